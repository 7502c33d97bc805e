"""Requests to `/v1/responses` in tests, and strict parsing of responses and events.

The OpenAI SDK's types validate them.
"""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent

from tests.event_streams import CLIENT, post
from tests.serving import Server

PATH = "/v1/responses"
WHOLE = "Hello there, wörld!"
CLASSES = {
    event_class.model_fields["type"].annotation.__args__[0]: event_class
    for event_class in ResponseStreamEvent.__origin__.__args__  # type: ignore[attr-defined]  # Annotated
}

Document = dict[str, Any]


def respond(server: Server, input: Any = "hi", **fields: Any) -> httpx.Response:
    return post(server, PATH, {"input": input, **fields})


def get_response(server: Server, id: str, below: str = "", **query: Any) -> httpx.Response:
    return CLIENT.get(f"{server.url}{PATH}/{id}{below}", params=query)


def response_document(response: httpx.Response) -> Document:
    assert response.status_code == 200, response.text
    document: Document = response.json()
    valid(document)
    return document


def valid(document: Document) -> None:
    Response.model_validate_json(json.dumps(document), strict=True)
    assert None not in [item["id"] for item in document["output"]]


def events(response: httpx.Response, first: int = 0) -> list[Document]:
    """Return a stream's events: frames of two lines, named, numbered from `first` and valid for the
    SDK."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    received = []
    for number, frame in enumerate(response.text.removesuffix("\n\n").split("\n\n"), first):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert data.startswith("data: ")
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        CLASSES[event["type"]].model_validate_json(json.dumps(event), strict=True)
        if "response" in event:
            valid(event["response"])
        received.append(event)
    return received


def output_texts(response: Document) -> list[tuple[str, str]]:
    """Return the type and the text of each output item."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]
