"""Several models of a kind in one server: requests choose by `model`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from server import cached_models
from tests import tiny
from tests.event_streams import CLIENT, chat, error_of, post
from tests.hub import add_to_cache
from tests.serving import Server, metric, serving
from tests.transcribing import CTC, WHISPER, noise, saved

FOLDER = Path(__file__).parents[2] / "worker" / "demo"
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The demo models, each twice: with the whole context and a short one."""
    with serving(
        chat_model=f"demo,short={FOLDER / 'chat'};max_len=40",
        embedding_model="demo,other=demo;dtype=float32",
        pipeline_model="demo,vectors=" + str(FOLDER / "fill-mask") + ";task=feature-extraction",
        pipeline_task="fill-mask",
        compile="off",
    ) as started:
        yield started


def test_a_request_is_answered_by_the_model_that_it_names(server: Server) -> None:
    for name in ("demo", "short", None):
        answer = chat(server, FRANCE, model=name, max_tokens=20, temperature=0).json()
        assert answer["model"] == (name or "demo")
        assert "Paris" in answer["choices"][0]["message"]["content"]
    steps = metric(server, 'onequeue_model_info{batching="continuous",dtype="float32"'
                   ',model="short",serves="generation:short",task="text-generation"}')  # fmt: skip
    assert steps == 1
    body = {"messages": [{"role": "user", "content": "a " * 60}], "max_tokens": 2}
    assert post(server, "/v1/chat/completions", body | {"model": "demo"}).status_code == 200
    long = post(server, "/v1/chat/completions", body | {"model": "short"})
    assert (long.status_code, "length is 40" in error_of(long)["message"]) == (400, True)
    unknown = chat(server, FRANCE, model="other")
    assert unknown.status_code == 404
    assert "only 'demo', 'short'" in error_of(unknown)["message"]


def test_models_of_the_hub_cache_are_served_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    files = {file.name: file.read_bytes() for file in (FOLDER / "chat").iterdir()}
    add_to_cache(tmp_path, "org/one", files)
    settings: dict[str, Any] = {"chat_model": "demo", "models_from_cache": True}
    with serving(**settings, model_aliases=("org/*=demo",), compile="off") as server:
        url, manager = server.url + "/v1/models", server.worker_client.manager
        monkeypatch.setattr(cached_models, "SCAN_INTERVAL_S", 0.0)  # after the next scan
        add_to_cache(tmp_path, "org/two", files)
        add_to_cache(tmp_path, "demo", files)  # the name is taken
        listed = [(model["id"], model["status"]) for model in CLIENT.get(url).json()["data"]]
        assert listed == [
            ("demo", {"value": "loaded"}),
            ("org/one", {"value": "unloaded"}),
            ("org/two", {"value": "unloaded"}),
        ]
        monkeypatch.setattr(cached_models, "SCAN_INTERVAL_S", 1e6)
        add_to_cache(tmp_path, "other/three", files)
        for name in ("org/one", "other/three"):
            answer = chat(server, FRANCE, model=name, max_tokens=20, temperature=0).json()
            assert answer["model"] == name
            assert "Paris" in answer["choices"][0]["message"]["content"]
        assert manager.models["generation:org/one"].is_ready
        assert CLIENT.get(f"{url}/other/three").json()["status"] == {"value": "loaded"}
        add_to_cache(tmp_path, "other/four", files)
        refused = chat(server, FRANCE, model="other/four")  # the cache was just scanned
        assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")


def test_every_generation_endpoint_chooses_the_model(server: Server) -> None:
    long = "a " * 60
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": long, "max_tokens": 2},
        "/v1/responses": {"input": long, "max_output_tokens": 2},
        "/v1/decisions": {"input": long, "questions": [{"type": "predicate", "instructions": "?"}]},
    }
    for path, body in bodies.items():
        short = post(server, path, body | {"model": "short"})
        assert short.status_code == 400, (path, short.text)
        assert "40" in error_of(short)["message"]
    counted = post(server, "/tokenize", {"prompt": "a", "model": "short"}).json()
    assert counted["max_model_len"] == 40


def test_embeddings_choose_the_model(server: Server) -> None:
    for name, answered in (
        (None, "demo-embedding"),
        ("demo", "demo-embedding"),
        ("other", "other"),
    ):
        answer = post(server, "/v1/embeddings", {"input": "a", "model": name}).json()
        assert answer["model"] == answered
    lines = b'{"input": "a", "model": "other"}\n{"input": "b"}\n'
    headers = {"content-type": "application/x-ndjson"}
    answer = httpx.post(server.url + "/v1/embeddings", content=lines, headers=headers)
    models = [json.loads(line)["model"] for line in answer.text.splitlines()]
    assert models == ["other", "demo-embedding"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-ndjson"}])
def test_the_pipeline_is_chosen_by_query_or_header(server: Server, headers: dict[str, str]) -> None:
    body = json.dumps({"inputs": "the capital of france is [MASK]."})

    def ask(query: str = "", **more: str) -> httpx.Response:
        return httpx.post(server.url + "/" + query, content=body, headers=headers | more)

    assert "token_str" in ask().text
    assert ask("?model=demo").text == ask().text
    vectors = ask("?model=vectors")
    assert "token_str" not in vectors.text
    assert vectors.status_code == 200
    assert ask(**{"x-model": "vectors"}).text == vectors.text
    assert ask("?model=short").status_code == 404
    listed = httpx.get(server.url + "/models").json()["data"]
    pipelines = [model for model in listed if model["serves"] == "pipeline"]
    described = [(model["tasks"], model.get("mask_token")) for model in pipelines]
    assert described == [(["fill-mask"], "[MASK]"), (["feature-extraction"], None)]


def test_a_revision_in_the_cache_is_served_by_id_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--chat"
    shutil.copytree(FOLDER / "chat", repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with serving(chat_model="org/chat@v2,org/chat@v3", compile="off") as started:
        answer = chat(started, FRANCE, model="org/chat@v2", max_tokens=20, temperature=0)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        missing = chat(started, FRANCE, model="org/chat@v3")
        assert missing.status_code == 503
        assert error_of(missing)["message"].startswith(
            "the model 'org/chat@v3' could not be loaded: it is not in the cache"
        )


@pytest.mark.parametrize("media", ["application/json", "application/x-ndjson"])
def test_a_body_that_names_another_pipeline_is_refused(server: Server, media: str) -> None:
    body = json.dumps({"inputs": "the capital of france is [MASK].", "model": "vectors"})

    def ask(query: str) -> str:
        url, headers = server.url + "/" + query, {"content-type": media}
        return httpx.post(url, content=body, headers=headers).text

    assert "model: must be the model that ?model= or the header X-Model names" in ask("")
    assert ask("?model=vectors").startswith("[[")


@pytest.mark.parametrize("name", [CTC, WHISPER])
def test_a_model_of_two_endpoints_is_loaded_once(name: str, tmp_path: Path) -> None:
    """Its texts are equal where the pipeline decodes as the transcriber does."""
    model = str(tiny.folder(name))
    audio = Path(saved(tmp_path, noise(3.0))).read_bytes()
    settings: dict[str, Any] = {"pipeline_model": model, "transcription_model": model}
    with serving(pipeline_task="automatic-speech-recognition", **settings) as server:
        models: Any = server.worker_client.models
        recognizer, transcriber = models["pipeline"].engine.runner, models["transcription"].engine
        assert transcriber.runner.model is recognizer.pipe.model
        if name != CTC:
            return
        url = f"{server.url}/v1/audio/transcriptions"
        transcript = CLIENT.post(url, files={"file": ("a.wav", audio)}).json()["text"]
        assert transcript == CLIENT.post(server.url, content=audio).json()["text"].strip()
