"""Error texts of request fields: the field, the accepted values and the given value."""

from typing import Any

import pytest

from batching.errors import InvalidInput
from server.apis.openai.chat import ChatRequest
from server.apis.openai.request_fields import convert, decode
from server.apis.openai.responses.request import ResponseRequest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: expected float <= 2.0, not 3"),
        ({"stop": ["a"] * 17}, "stop: expected array of length <= 16, not 17"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]: expected int >= 0, not -1"),
        ({"stop": ["a", 1]}, "stop[1]: expected str, got int"),
        ({"cache_salt": "x" * 300}, "cache_salt: expected str of length <= 256, not 300"),
        ({"logit_bias": {"1": 500}}, "logit_bias: expected float <= 100.0"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{}]}, "messages[0].role: is required"),
    ],
)
def test_error_names_the_field_the_accepted_and_the_given_value(
    fields: dict[str, Any], message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(InvalidInput) as caught:
        convert(body, ChatRequest)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [({"k": "v" * 600}, "length <= 512"), ({"k" * 65: ""}, "length <= 64")],
)
def test_error_within_an_object_has_no_length_of_the_object(
    metadata: dict[str, str], accepted: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert({"input": "x", "metadata": metadata}, ResponseRequest)
    assert str(caught.value) == f"metadata: expected str of {accepted}"


def test_whole_numbers_may_be_written_as_floats() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5.0, "temperature": 1.0}
    request = decode(body, ChatRequest, lambda name: "demo", {})
    assert (request.max_tokens, request.temperature) == (5, 1.0)
    for value, message in (
        (5.5, "expected int, got float"),
        (1e300, "the integer 1e.300 has more than 64 bits"),
        (-1.0, "max_tokens: expected int >= 0, not -1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            decode({**body, "max_tokens": value}, ChatRequest, lambda name: "demo", {})
