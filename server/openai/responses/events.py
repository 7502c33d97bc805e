"""A response as it comes to be: the object that is answered and stored, and its events.

    created, in_progress → output items → completed | incomplete | failed | cancelled
    output_item.added → content_part.added → deltas → ….done → content_part.done → output_item.done

An event is a document with its `type`; it shares items with the response, so it is written before
the next is made. Calls have no content parts. A stretch of reasoning, text or arguments is an item.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import orjson

from server.core.answer_stream import UsageCounts
from server.http.errors import HttpError
from server.http.json import Document
from server.openai.chat import CallId
from server.openai.endpoint import GenerationResponseBuilder
from server.openai.logprobs import logprob_document
from server.openai.response_format import Format
from server.openai.responses.items import new_id
from server.openai.responses.request import ResponseRequest
from server.openai.responses.store import Stored
from worker.messages.deltas import Delta, TokenLogprob
from worker.messages.generation import Chat, GenerationInput, SamplingDefaults
from worker.messages.protocol import Generator

Ending = Literal["completed", "incomplete"]

# Fields of a request that its response tells as they are.
ECHOED = (
    *("instructions", "max_output_tokens", "model", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)

# A delta's kinds as items, and what items' events are called and about.
ITEM_TYPES = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponsesResponseBuilder(GenerationResponseBuilder):
    """`items` are the request's input. One that failed has the error `invalid_prompt`, if the
    request was wrong, or `server_error`."""

    def __init__(
        self,
        request: ResponseRequest,
        payload: GenerationInput,
        items: list[Document],
        generator: Generator,
    ) -> None:
        super().__init__([payload], bool(request.stream))
        assert isinstance(payload.prompt, Chat)
        self.output = ResponseOutput(generator.call_id, payload.prompt.num_tool_calls)
        self.document = _blank(request, generator.defaults) | {"output": self.output.items}
        self.id = str(self.document["id"])
        self.stored = Stored(self.document, items)
        self._cut = False  # by max_output_tokens, or the end of the context
        self._events = 0

    def begin(self, first: Sequence[Delta]) -> Iterator[bytes]:
        self.document["status"] = "in_progress"
        for name in ("created", "in_progress"):
            yield self._frame(self._event(name))

    def add(self, delta: Delta) -> Iterator[bytes]:
        self._cut = self._cut or delta.finish_reason == "length"
        return map(self._frame, self.output.add(delta))

    def finish(self) -> Iterator[bytes]:
        """The last item's end; the response's own is the last event."""
        status: Ending = "incomplete" if self._cut else "completed"
        yield from map(self._frame, self.output.end(status))
        if self._cut:
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end(status)

    def fail(self, error: HttpError) -> Iterator[bytes]:
        """What was open is closed without its last events."""
        code = "invalid_prompt" if error.code == "invalid_value" else "server_error"
        self.document["error"] = {"code": code, "message": str(error)}
        self.break_off("failed")
        return iter(())

    def whole(self, deltas: Sequence[Delta]) -> Document:
        for delta in deltas:
            consume(self.add(delta))
        consume(self.finish())
        return self.document

    def _frame(self, event: Document) -> bytes:
        numbered = event | {"sequence_number": self._events}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(numbered))

    def last(self) -> bytes:
        return self._frame(self._event(self.document["status"]))

    def _event(self, name: str) -> Document:
        return {"type": f"response.{name}", "response": self.document}

    def break_off(self, status: Literal["failed", "cancelled"]) -> None:
        consume(self.output.end("incomplete"))
        self._end(status)

    def _end(self, status: str) -> None:
        self.document["status"] = status
        if self.usage.prompt:
            self.document["usage"] = usage_document(self.usage)
        if status == "completed":
            self.document["completed_at"] = int(time.time())


def usage_document(usage: UsageCounts) -> Document:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class ResponseOutput:
    """The output items made of deltas. `called`: calls in the conversation before."""

    def __init__(self, call_id: CallId, called: int) -> None:
        self.items: list[Document] = []
        self._call_id = call_id
        self._called = called
        self._open: Document | None = None  # the last one, if more may come
        self._texts: list[str] = []  # of the open item
        # Not yet in an event: they may lag behind the text, or be of the message after the next.
        self._logprobs: deque[TokenLogprob] = deque()
        self._unscored = 0  # characters of the open message that have none yet

    def add(self, delta: Delta) -> Iterator[Document]:
        self._logprobs += delta.logprobs
        for part in delta.parts:
            kind = ITEM_TYPES[part.kind]
            if self._open is None or self._open["type"] != kind or part.name is not None:
                yield from self._close("completed")
                yield from self._begin(kind, part.name or "")
            if part.text:
                self._texts.append(part.text)
                self._unscored += len(part.text)
                yield self._delta(self.items[-1], part.text)

    def end(self, status: Ending) -> Iterator[Document]:
        """Close what is open. An answer without any text is an empty message."""
        if status == "completed" and not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin(self, kind: str, name: str = "") -> Iterator[Document]:
        item: Document = {"id": new_id(kind), "type": kind, "status": "in_progress"}
        part: Document | None = None
        if kind == "message":
            item |= {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            call_id = self._call_id(name, self._called)
            self._called += 1
            item |= {"call_id": call_id, "name": name, "arguments": ""}
        self.items.append(item)
        self._open, self._texts, self._unscored = item, [], 0
        yield self._event("response.output_item.added", item=item)
        if part is not None:
            of_part = {"item_id": item["id"], "content_index": 0, "part": part}
            yield self._event("response.content_part.added", **of_part)
            item["content"].append(part)

    def _delta(self, item: Document, text: str) -> Document:
        kind = item["type"]
        event = self._event(TEXT_EVENTS[kind] + ".delta", item_id=item["id"], delta=text)
        if kind != "function_call":
            event["content_index"] = 0
        if kind == "message":
            event["logprobs"] = self._scores()
            item["content"][0]["logprobs"] += event["logprobs"]
        return event

    def _scores(self) -> list[orjson.Fragment]:
        """Log-probabilities of the open message's text: their tokens join to it."""
        found = []
        while self._logprobs and len(self._logprobs[0].text) <= self._unscored:
            found.append(self._logprobs.popleft())
            self._unscored -= len(found[-1].text)
        return list(map(logprob_document, found))

    def _close(self, status: Ending) -> Iterator[Document]:
        if (item := self._open) is None:
            return
        text, done = "".join(self._texts), TEXT_EVENTS[item["type"]] + ".done"
        if item["type"] == "function_call":
            item["arguments"] = text
            call = {"item_id": item["id"], "name": item["name"], "arguments": text}
            yield self._event(done, **call)
        else:
            part, place = item["content"][0], {"item_id": item["id"], "content_index": 0}
            part["text"] = text
            scored = {}
            if item["type"] == "message":
                part["logprobs"] += self._scores()
                scored = {"logprobs": part["logprobs"]}
            yield self._event(done, **place, text=text, **scored)
            yield self._event("response.content_part.done", **place, part=part)
        item["status"] = status
        self._open = None
        yield self._event("response.output_item.done", item=item)

    def _event(self, type: str, **fields: Any) -> Document:
        return {"type": type, "output_index": len(self.items) - 1, **fields}


def consume(events: Iterator[object]) -> None:
    """Make the changes that come with events which nobody gets."""
    deque(events, maxlen=0)


def _blank(request: ResponseRequest, defaults: SamplingDefaults) -> Document:
    """All fields of the API, before anything is generated."""
    choice, reasoning, text = request.tool_choice, request.reasoning, request.text
    format = text.format if text and text.format else Format(type="text")
    described: Format | Document = format if format.type == "json_schema" else {"type": format.type}
    if format.type == "json_object" and format.schema:
        described = {"type": format.type, "schema": format.schema}
    return {
        "id": "resp_" + secrets.token_hex(24),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued",
        "background": bool(request.background),
        "error": None,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "incomplete_details": None,
        "max_tool_calls": None,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": defaults.temperature if request.temperature is None else request.temperature,
        "text": {
            "format": msgspec.to_builtins(described),
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": "auto" if choice is None else msgspec.to_builtins(choice),
        "tools": msgspec.to_builtins(request.tools or ()),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.top_p if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": request.metadata or {},
        **{name: getattr(request, name) for name in ECHOED},
    }
