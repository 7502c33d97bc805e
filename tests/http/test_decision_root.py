"""`POST /` with the task `decision`: inputs and outputs of the pipeline, by a language model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.apis.openai.decisions.endpoint import uses_language_model
from server.core.settings import Settings, SettingsError
from server.preflight import check_models
from tests import tiny_decisions, tiny_multimodal
from tests.event_streams import CLIENT, error_of, post
from tests.model.test_decision_config import ASSETS, ON_IMAGES, PHOTO, asset
from tests.model.test_decisions import assert_close, library
from tests.serving import Server, metric, serving
from tests.tiny_decisions import QUESTIONS

STATE = "I was charged twice for my order and want my money back, please. " * 3
ASKED = {"state": STATE, "questions": QUESTIONS}


def serving_decisions(chat_model: Path | str, pipeline_model: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.05, "compile": "off", **more}
    settings |= {"chat_model": str(chat_model), "pipeline_model": str(pipeline_model)}
    return serving(pipeline_task="decision", **settings)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = tiny_decisions.folder()
    with serving_decisions(folder, folder) as started:
        yield started


def test_answers_equal_those_of_the_pipeline(server: Server) -> None:
    assert set(server.worker_client.models) == {"generation"}
    answer = post(server, "/", {"inputs": ASKED})
    assert answer.status_code == 200, answer.text
    assert_close(answer.json(), library()(ASKED))
    several = post(server, "/", {"inputs": [ASKED, {**ASKED, "state": {"order": [1, None]}}]})
    one, other = several.json()
    assert_close(one, answer.json())
    assert list(other) == list(one)
    assert other != one


def test_input_shares_the_prefix_cache_with_systemone(server: Server) -> None:
    inputs = {"state": STATE + "It is the third time.", "questions": QUESTIONS}
    assert post(server, "/v1/systemone", inputs).status_code == 200
    before = tokens(server)
    assert post(server, "/", {"inputs": inputs}).status_code == 200
    run, found = (now - then for now, then in zip(tokens(server), before, strict=True))
    assert found > run


def tokens(server: Server) -> tuple[float, float]:
    """Of prompts: run and found in the cache."""
    counted = 'onequeue_tokens_total{kind="%s"}'
    return metric(server, counted % "prompt"), metric(server, counted % "cached")


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ("hello", "inputs"),
        ({"state": "a"}, "inputs.questions"),
        ([ASKED, {"state": "a", "questions": {}}], "inputs[1].questions"),
        ({"state": "a", "questions": {"a": {"type": "which"}}}, "inputs.questions"),
        ({**ASKED, "assets": {"a": "/etc/passwd"}}, "inputs.assets"),
        ({**ASKED, "assets": {"a": {"data_base64": "/etc/passwd"}}}, "inputs.assets.a"),
        ({**ASKED, "state": STATE * 999}, "state"),
    ],
)
def test_error_names_the_invalid_field(server: Server, inputs: Any, param: str) -> None:
    answer = post(server, "/", {"inputs": inputs})
    assert answer.status_code == 400
    assert str(error_of(answer)["param"]).startswith(param)


def test_deeply_nested_state_is_accepted(server: Server) -> None:
    state: Any = 0
    for _ in range(400):
        state = [state]
    assert post(server, "/", {"inputs": {**ASKED, "state": state}}).status_code == 200


def test_model_is_loaded_for_decisions_without_a_chat_model(server: Server) -> None:
    folder = tiny_decisions.folder()
    with serving_decisions("none", folder) as alone:
        assert set(alone.worker_client.models) == {"pipeline"}
        answer, expected = (
            post(target, "/", {"inputs": ASKED}).json() for target in (alone, server)
        )
        assert_close(answer, expected)
        status = CLIENT.get(alone.url + "/ready").json()
        assert status["model"] == folder.name
        assert "chat_model" not in status
        for path in ("/v1/chat/completions", "/v1/systemone"):
            assert post(alone, path, {}).status_code == 404


def test_model_is_loaded_beside_another_chat_model(server: Server, tmp_path: Path) -> None:
    folder, other = tiny_decisions.folder(), tmp_path / "other"
    shutil.copytree(folder, other)
    with serving_decisions(other, folder) as both:
        assert set(both.worker_client.models) == {"pipeline", "generation"}
        answer, expected = (
            post(target, "/", {"inputs": ASKED}).json() for target in (both, server)
        )
        assert_close(answer, expected)
        status = CLIENT.get(both.url + "/ready").json()
        assert (status["model"], status["task"]) == (folder.name, "decision")
        assert status["chat_model"] == other.name
        before = tokens(both)
        assert post(both, "/v1/systemone", ASKED).status_code == 200
        run, _ = (now - then for now, then in zip(tokens(both), before, strict=True))
        assert run > len(STATE) / 8  # the other model has not seen it


@pytest.mark.parametrize(
    ("config", "architecture", "by_language_model"),
    [
        ({"labels": {"noul": ["A", "B"]}}, "LlamaForCausalLM", True),
        ({"chat_template": "{{ state }}{{ question }}"}, "LlamaForCausalLM", True),
        ({"chat_template": "{{ state }}{{ questions }}"}, "LlamaForCausalLM", False),
        ({"adapter": "lora"}, "LlamaForCausalLM", False),
        ({}, "JevForDecision", False),
    ],
)
def test_pipeline_serves_what_a_language_model_does_not(
    config: Any, architecture: str, by_language_model: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "decision.json").write_text(json.dumps(config))
    settings = Settings(pipeline_task="decision")
    assert uses_language_model(settings, str(tmp_path)) == by_language_model
    assert not uses_language_model(Settings(), str(tmp_path))


@pytest.mark.parametrize("content", [None, "[]", '{"labels": {"noul": "A"}}'])
def test_unusable_decision_config_ends_the_start(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match="DECISION_CONFIG="):
        check_models(Settings(chat_model="demo", decision_config=str(file)))


def test_images_are_taken_by_both_endpoints() -> None:
    folder = tiny_multimodal.folder("gemma3")
    body = {"state": PHOTO, "questions": ON_IMAGES, "assets": ASSETS}
    with serving_decisions(folder, folder, max_image_mp=1) as seeing:
        named = post(seeing, "/v1/systemone", body)
        assert named.status_code == 200, named.text
        assert_close(post(seeing, "/", {"inputs": body}).json(), named.json()["answers"])
        without = post(seeing, "/v1/systemone", {**body, "assets": {}}).json()
        assert without["answers"] != named.json()["answers"]
        assert without["usage"]["input_tokens"] < named.json()["usage"]["input_tokens"]
        for image in ("cG5n", asset(1, width=1001, height=1001)["data_base64"]):
            assets = {"img-1": {"type": "image", "data_base64": image}}
            answer = post(seeing, "/v1/systemone", {**body, "assets": assets})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "assets.img-1"
