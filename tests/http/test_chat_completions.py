"""Bodies of generation requests over a real socket: null, nested, malformed and large ones."""

import threading
from typing import Any

import pytest

from server.apis.openai import completions, endpoint, logprobs
from server.apis.openai.chat import ChatRequest
from server.apis.openai.responses.request import ResponseRequest
from tests.event_streams import CLIENT, chat, error_of, post
from tests.fake_generator import FakeGenerator
from tests.serving import Server, chat_server_fixture
from worker.messages.generation import Chat, Sampling, Stopping

PATH, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WHOLE = "Hello there, wörld!"


server = chat_server_fixture(chat_model="org/model")


def refused(server: Server, **body: Any) -> dict[str, str]:
    answer = post(server, PATH, {"messages": [{"role": "user", "content": "hi"}], **body})
    assert answer.status_code == 400, answer.text
    return error_of(answer)


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", ResponseRequest, {"input": "hi"}),
    ],
)
def test_null_counts_as_absent(
    server: Server, generator: FakeGenerator, path: str, kind: Any, body: dict[str, Any]
) -> None:
    nothing = dict.fromkeys({*kind.__struct_fields__, *kind.unimplemented} - {*body})
    for fields in ({}, nothing):
        assert post(server, path, fields | body).status_code == 200
        payload = generator.payloads[-1]
        assert payload.prompt == Chat(({"role": "user", "content": "hi"},))
        assert (payload.sampling, payload.stopping) == (Sampling(), Stopping())
        assert (payload.n, payload.first_choice, payload.echo) == (1, 0, False)
        assert (payload.constraint, payload.tool_policy) == (None, None)


USER = b'{"messages": [{"role": "user", "content": '


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"messages"', None),
        (USER + b'"\xff"}]}', None),
        (USER + b'"x"}], "extra": "\xff"}', None),
        (USER + b'"\\ud800"}]}', "messages[0].content"),
        (USER + b'"x\\udc00y"}]}', "messages[0].content"),
        (USER + b'"x"}], "stop": ["a", "\\ud83d"]}', "stop[1]"),
        (USER + b'"x"}], "user": {"\\udfff": 1}}', "user"),
        (USER + b'"x"}], "user": {"\\udfff": "\\ud800"}}', "user"),
        (USER + b'"x"}], "temperature": NaN}', None),
        (USER + b'"x"}], "temperature": Infinity}', None),
        (USER + b'"x"}], "temperature": 1e999}', None),
        (USER + b'"x"}], "n": ' + b"9" * 5000 + b"}", None),
        (USER + b'"x"}], "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (USER + b'"x"}], "chat_template_kwargs": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", None),
    ],
)
def test_body_that_is_not_json_is_400(server: Server, body: bytes, param: str | None) -> None:
    for media in ("application/json", "text/plain"):
        answer = CLIENT.post(server.url + PATH, content=body, headers={"content-type": media})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


def test_large_body_is_parsed_off_the_loop_with_the_same_response(server: Server) -> None:
    extra = ["x" * 100] * 5000
    assert chat(server, extra=extra).json()["choices"][0]["message"]["content"] == WHOLE
    assert refused(server, extra=extra, n=0)["param"] == "n"


def test_very_long_key_does_not_make_a_long_error(server: Server) -> None:
    key = "k" * 200_000
    body = USER + b'"x"}], "' + key.encode() + b'": {"x": "\\ud800"}}'
    answer = CLIENT.post(server.url + PATH, content=body)
    assert answer.status_code == 400
    error_of(answer)
    assert len(refused(server, logit_bias={key: 1})["message"]) < 4100


@pytest.mark.parametrize("depth", [300, 980, 1010])
def test_deeply_nested_arguments_are_no_internal_error(server: Server, depth: int) -> None:
    arguments = b'{"a":' * depth + b"1" + b"}" * depth
    body = (
        b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": '
        b'[{"id": "c", "type": "function", "function": {"name": "f", "arguments": %b}}]}, '
        b'{"role": "tool", "tool_call_id": "c", "content": "x"}]}' % arguments
    )
    for path in ("/v1/chat/completions", "/tokenize"):
        assert CLIENT.post(server.url + path, content=body).status_code in (200, 400)


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
        assert post(server, COMPLETIONS, scored | fields).status_code == 200
    assert {"AnyIO worker thread" in name for name in threads} == {off_the_loop}
