"""`POST /v1/completions` over a real socket, with a fake generator."""

import json
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from server.apis.openai import completions, endpoint, logprobs
from tests.event_streams import post
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator, max_queue_size=8) as started:
        yield started


def complete(server: Server, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = post(server, PATH, {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


@pytest.mark.parametrize(
    ("prompt", "prompts", "params"),
    [
        ("ab", ["ab"], ["prompt"]),
        (["ab"], ["ab"], ["prompt[0]"]),
        (["ab", "cd"], ["ab", "cd"], ["prompt[0]", "prompt[1]"]),
        ([5, 6, 7], [(5, 6, 7)], ["prompt"]),
        ([[5], [6, 7]], [(5,), (6, 7)], ["prompt[0]", "prompt[1]"]),
    ],
)
def test_prompt_is_text_ids_or_a_list_of_either(
    server: Server, generator: FakeGenerator, prompt: Any, prompts: list[Any], params: list[str]
) -> None:
    generator.payloads.clear()
    answer = complete(server, prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(len(entry) for entry in prompts)
    assert answer["usage"]["completion_tokens"] == 2 * len(prompts) * 6
    taken = sorted(generator.payloads, key=lambda payload: payload.first_choice)
    assert [payload.prompt for payload in taken] == prompts
    assert [payload.param for payload in taken] == params
    assert [payload.first_choice for payload in taken] == [2 * k for k in range(len(prompts))]


def test_max_tokens_is_16_by_default(server: Server, generator: FakeGenerator) -> None:
    assert complete(server, "long")["usage"]["completion_tokens"] == 16
    assert complete(server, "long", max_tokens=None)["choices"][0]["finish_reason"] == "length"
    assert complete(server, "long", max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("prompt", "off_the_loop"), [("ab", False), ("ab" * 40, True)])
def test_many_logprobs_are_encoded_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, prompt: str, off_the_loop: bool
) -> None:
    threads: list[str] = []

    def watched(module: Any, name: str) -> None:
        work = getattr(module, name)

        def recorded(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*arguments)

        monkeypatch.setattr(module, name, recorded)

    watched(completions, "completion_logprobs")
    watched(logprobs, "prompt_logprob")
    watched(endpoint, "to_json")
    scored = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    for fields in ({"prompt_logprobs": 1}, {"stream": True}):
        assert post(server, PATH, scored | fields).status_code == 200
    assert {"AnyIO worker thread" in name for name in threads} == {off_the_loop}


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "prompt", "is required"),
        ({"prompt": None}, "prompt", "expected"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt[0]", "empty"),
        ({"prompt": [[]]}, "prompt[0]", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": ["a", 1]}, "prompt[1]", "either texts or token ids"),
        ({"prompt": [[1], "a"]}, "prompt[1]", "either texts or token ids"),
        ({"prompt": [1, "a"]}, "prompt[1]", "token id"),
        ({"prompt": [1, True]}, "prompt[1]", "bool"),
        ({"prompt": [1, -1]}, "prompt[1]", ">= 0"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]", ">= 0"),
        ({"prompt": [[1, 1.5]]}, "prompt[0][1]", "float"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({"prompt": ["a"] * 9}, "prompt", "exceed 8 choices"),
        ({"prompt": ["a"] * 3, "n": 3}, "prompt", "exceed 8 choices"),
        ({"prompt": ["a", "refused"]}, "prompt[1]", "is refused"),
        ({"prompt": "refused", "stream": True}, "prompt", "is refused"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "exceeds max_tokens, 16"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "<= 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "bool"),
        ({"prompt": "a", "echo": 1}, "echo", "bool"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix", "combined with echo"),
        ({"prompt": ["a"], "suffix": "b"}, "suffix", "one text"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not implemented"),
        ({"prompt": "a", "best_of": "2"}, "best_of", "got str"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream: true"),
    ],
)
def test_error_names_the_invalid_field(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = post(server, PATH, body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert reason in error["message"]
    assert server.worker_client.queue.pending == 0


def test_best_of_equal_to_n_is_accepted(server: Server) -> None:
    assert len(complete(server, best_of=2, n=2)["choices"]) == 2
    assert len(complete(server, best_of=1, suffix=None, n=1)["choices"]) == 1


def test_every_parameter_of_the_api_is_implemented_accepted_or_refused() -> None:
    from openai.types.completion_create_params import CompletionCreateParamsStreaming

    from server.apis.openai.completions import CompletionRequest
    from server.apis.openai.request_fields import known_fields

    known = set(get_type_hints(CompletionCreateParamsStreaming))
    assert {"prompt", "stream"} <= known
    assert known <= known_fields(CompletionRequest)


# ── fill-in-the-middle ──


def test_infill_is_llama_cpps(server: Server, generator: FakeGenerator) -> None:
    """As editors send it: the prefix, the files beside it, the line before the cursor."""
    body = {
        "input_prefix": "say a ", "input_suffix": "after", "prompt": "b c", "n_predict": 2,
        "samplers": ["top_k", "infill"], "cache_prompt": True, "n_indent": 0,
    }  # fmt: skip
    answer = post(server, "/infill", body)
    assert answer.headers["x-ignored-fields"] == "n_indent"
    whole = answer.json()
    wanted = {"content": "a b", "stop": True, "stop_type": "limit", "stopping_word": ""}
    assert {name: whole[name] for name in wanted} == wanted
    assert whole["tokens_predicted"] == 2
    payload = generator.payloads[-1]
    assert (payload.prompt, payload.suffix) == ("say a b c", "after")
    text = post(server, "/infill", {**body, "stream": True, "n_predict": -1}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert "".join(chunk["content"] for chunk in chunks) == "a b c"
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["stop_type"] == "eos"
    extra = {"input_extra": [{"filename": "x.py", "text": "x = 1"}], "input_prefix": "y"}
    post(server, "/infill", extra)
    assert (generator.payloads[-1].prompt, generator.payloads[-1].suffix) == ("x.py\nx = 1\ny", "")
    for name, value in {
        "n_predict": "x",
        "input_extra": [1],
        "n": 2,
        "truncate_prompt_tokens": 9,
    }.items():
        assert error_of(post(server, "/infill", {name: value}))["param"].startswith(name)
