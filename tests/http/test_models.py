"""Model names, and the endpoints without a forward pass: /v1/models, /tokenize, /load_model."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.event_streams import CLIENT, chat, error_of, post
from tests.fake_generator import FakeGenerator
from tests.fakes import PanicException
from tests.serving import Server, server_fixture, serving

server = server_fixture(load_chat=FakeGenerator, chat_model="org/model")


def test_model_is_listed_and_found_by_its_name(server: Server) -> None:
    listed = CLIENT.get(server.url + "/v1/models").json()
    (model,) = listed["data"]
    assert (model["id"], model["root"]) == ("org/model", "org/model")
    assert CLIENT.get(server.url + "/v1/models/").json() == {"object": "list", "data": [model]}
    found = CLIENT.get(server.url + "/v1/models/org/model")
    assert found.json() == model
    assert CLIENT.post(server.url + "/v1/models").status_code == 405


def test_folder_is_named_by_its_last_component(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    for setting in (str(folder), str(folder) + "/"):
        with serving(load_chat=FakeGenerator, chat_model=setting) as server:
            listed = CLIENT.get(server.url + "/v1/models").json()["data"]
            assert [model["id"] for model in listed] == ["my-model"]
            for name in ("my-model", setting, None):
                assert chat(server, model=name).json()["model"] == "my-model"
            assert chat(server, model="model").status_code == 404


def test_a_named_model_and_its_aliases_are_listed_and_responses_have_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").mkdir()
    settings: dict[str, Any] = {
        "chat_model": f"me={tmp_path / 'secret'}",
        "model_aliases": ("gpt-4o=me", "org/gpt=me"),
    }
    with serving(load_chat=FakeGenerator, **settings) as server:
        listed = CLIENT.get(server.url + "/v1/models").json()["data"]
        assert [(m["id"], m["root"]) for m in listed] == [
            ("me", "me"), ("gpt-4o", "me"), ("org/gpt", "me"),
        ]  # fmt: skip
        assert CLIENT.get(server.url + "/v1/models/org/gpt").json() == listed[2]
        for name in ("me", "gpt-4o", "org/gpt", None):
            assert chat(server, model=name).json()["model"] == "me"
        for name in ("secret", str(tmp_path / "secret")):
            assert chat(server, model=name).status_code == 404


def test_models_of_the_same_name_have_different_ids() -> None:
    with serving(load_chat=FakeGenerator, chat_model="demo", embedding_model="demo") as server:
        listed = CLIENT.get(server.url + "/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["demo", "demo-embedding"]
        assert [model["max_model_len"] for model in listed] == [4096, 128]
        assert chat(server, model="demo").json()["model"] == "demo"
        for name in ("demo", "demo-embedding", None):
            answer = post(server, "/v1/embeddings", {"input": "a", "model": name})
            assert answer.json()["model"] == "demo-embedding"
        counted = post(server, "/tokenize", {"prompt": "ab", "model": "demo-embedding"})
        assert counted.json()["max_model_len"] == 128


@pytest.mark.parametrize("path", ["tokenize", "detokenize", "load_model"])
def test_an_unknown_model_is_404_everywhere(server: Server, path: str) -> None:
    answer = post(server, "/" + path, {"model": "gpt-4o", "prompt": "a", "tokens": [1]})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_panic_of_the_tokenizer_is_400(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: Any) -> list[int]:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(server.worker_client.models["generation"].generator, "encode", panic)
    answer = post(server, "/tokenize", {"prompt": "a"})
    assert answer.status_code == 400
    assert "index" not in error_of(answer)["message"]


def test_body_may_start_with_a_byte_order_mark_and_not_be_compressed(server: Server) -> None:
    body = b'{"prompt": "ab"}'
    marked = CLIENT.post(server.url + "/tokenize", content=b"\xef\xbb\xbf" + body)
    assert marked.json()["count"] == 3
    for encoding in ("gzip", "x-gzip", "gzip, BR"):
        packed = {"content-encoding": encoding}
        answer = CLIENT.post(server.url + "/tokenize", content=gzip.compress(body), headers=packed)
        assert (answer.status_code, error_of(answer)["param"]) == (415, "Content-Encoding")
        assert encoding in error_of(answer)["message"]
