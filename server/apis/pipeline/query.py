"""The query of `POST /`: the model's name, and parameters for each input of the body."""

from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Scope

from batching.errors import InvalidInput
from server.http.json import parse_value

MAX_QUERY_NAMES = 64


def query_of(scope: Scope) -> dict[str, str]:
    """Return the values of the query by name. Raises InvalidInput for too many names, one that
    occurs twice, and text that is not UTF-8."""
    limits: Any = {"keep_blank_values": True, "max_num_fields": MAX_QUERY_NAMES, "errors": "strict"}
    try:
        pairs = parse_qsl(scope["query_string"].decode(), **limits)
    except ValueError:
        reason = f"the query must have at most {MAX_QUERY_NAMES} names, and be UTF-8"
        raise InvalidInput(reason) from None
    query = dict(pairs)
    if len(query) < len(pairs):
        raise InvalidInput("the query has a name twice")
    return query


def query_parameters(scope: Scope) -> dict[str, Any]:
    """Return the parameters in the query: each value is JSON, or a text if it is not. Raises the
    errors of `query_of`."""
    return {name: _value(text) for name, text in query_of(scope).items() if name != "model"}


def _value(text: str) -> Any:
    try:
        return parse_value(text.encode())
    except InvalidInput:
        return text
