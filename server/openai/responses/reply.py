"""A response as it comes to be: the object that is answered and stored, and its events.

    created, in_progress → deltas → completed | incomplete | failed | cancelled

`server_error` and `invalid_prompt` are the errors of a response that failed after its start.
"""

import secrets
import time
from collections.abc import Iterator

import msgspec
import orjson

from server.openai.exchange import Usage
from server.openai.responses.output import Ending, ResponseOutput
from server.openai.responses.request import ResponseRequest
from server.openai.responses.store import Document, Stored
from worker.deltas import Delta


class ResponseReply:
    def __init__(
        self, request: ResponseRequest, items: list[Document], model: str, output: ResponseOutput
    ) -> None:
        self.request = request
        self.input = items
        self.output = output
        self._cut = False  # by max_output_tokens, or the end of the context
        self._events = 0
        self.document = _blank(request, model) | {"output": self.output.items}

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def stored(self) -> Stored:
        return Stored(self.document, self.input)

    def begin(self) -> Iterator[Document]:
        self.document["status"] = "in_progress"
        for name in ("created", "in_progress"):
            yield self._told(name)

    def add(self, delta: Delta) -> Iterator[Document]:
        self._cut = self._cut or delta.finish_reason == "length"
        yield from self.output.add(delta)

    def finish(self, usage: Usage) -> Iterator[Document]:
        """The last item's end; `ended` is the event after it."""
        status: Ending = "incomplete" if self._cut else "completed"
        yield from self.output.end(status)
        if self._cut:
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end(status, usage)

    def fail(self, message: str, invalid: bool, usage: Usage) -> None:
        """What was open stays as it is, and its last events are not told."""
        code = "invalid_prompt" if invalid else "server_error"
        self.document["error"] = {"code": code, "message": message}
        self._break_off("failed", usage)

    def cancel(self, usage: Usage) -> None:
        self._break_off("cancelled", usage)

    def ended(self) -> Document:
        return self._told(self.document["status"])

    def frame(self, event: Document) -> bytes:
        """An event as it is sent, numbered."""
        numbered = event | {"sequence_number": self._events}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(numbered))

    def _told(self, name: str) -> Document:
        return {"type": f"response.{name}", "response": self.document}

    def _break_off(self, status: str, usage: Usage) -> None:
        spend(self.output.end("incomplete"))
        self._end(status, usage)

    def _end(self, status: str, usage: Usage) -> None:
        self.document["status"] = status
        self.document["usage"] = _usage(usage) if usage.prompt else None
        if status == "completed":
            self.document["completed_at"] = int(time.time())


def spend(events: Iterator[Document]) -> None:
    """Make the changes that events tell of, for nobody who listens."""
    for _ in events:
        pass


def _blank(request: ResponseRequest, model: str) -> Document:
    """All fields of the API, before anything was said. Unset sampling is the checkpoint's."""
    choice, reasoning, text = request.tool_choice, request.reasoning, request.text
    return {
        "id": "resp_" + secrets.token_hex(24),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stored,
        "temperature": request.temperature,
        "text": {
            "format": request.format.document(),
            "verbosity": text.verbosity if text else None,
        },
        "tool_choice": "auto" if choice is None else msgspec.to_builtins(choice),
        "tools": [tool.document() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }


def _usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
