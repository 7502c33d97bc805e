"""Reading what `/v1/responses` answers in tests, strictly: no response or event may look otherwise.

The SDK's own types say what an event or a response looks like.
"""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.event_streams import CLIENT, post
from tests.serving import Server

PATH = "/v1/responses"
WHOLE = "Hello there, wörld!"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CLASSES = {
    each.model_fields["type"].annotation.__args__[0]: each
    for each in ResponseStreamEvent.__origin__.__args__  # type: ignore[attr-defined]  # Annotated
}

Document = dict[str, Any]


def respond(server: Server, given: Any = "hi", **fields: Any) -> httpx.Response:
    return post(server, PATH, {"input": given, **fields})


def look_up(server: Server, id: str, below: str = "", **query: Any) -> httpx.Response:
    return CLIENT.get(f"{server.url}{PATH}/{id}{below}", params=query)


def answered(response: httpx.Response) -> Document:
    assert response.status_code == 200, response.text
    document: Document = response.json()
    valid(document)
    return document


def valid(document: Document) -> None:
    Response.model_validate_json(json.dumps(document), strict=True)
    assert None not in [item["id"] for item in document["output"]]


def events(response: httpx.Response) -> list[Document]:
    """Each is one frame of two lines, named, numbered and as the SDK's class of its type says."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    found = []
    for number, frame in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert data.startswith("data: ")
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        CLASSES[event["type"]].model_validate_json(json.dumps(event), strict=True)
        if "response" in event:
            valid(event["response"])
        found.append(event)
    return found


def of(response: Document) -> list[tuple[str, str]]:
    """What the output items are, and what they say."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]
