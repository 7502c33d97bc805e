"""The output items of a response, made of deltas, and the events that tell of them.

    output_item.added → content_part.added → deltas → ….done → content_part.done → output_item.done

An event is a document with its `type`; it shares items with `items`, so write it before the next.
Calls have no content parts. A stretch of reasoning, of text or of arguments is one item.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal

from server.openai.reply import CallId, finite
from server.openai.responses.items import new_id
from server.openai.responses.store import Document
from worker.deltas import Delta, Part, TokenLogprob

Ending = Literal["completed", "incomplete"]

ITEM_TYPES = {"content": "message", "reasoning": "reasoning", "call": "function_call"}


class ResponseOutput:
    """`called`: how many calls have been made in the conversation before."""

    def __init__(self, call_id: CallId, called: int) -> None:
        self.items: list[Document] = []
        self._call_id = call_id
        self._called = called
        self._open: Document | None = None  # the last one, if more may come
        self._texts: list[str] = []  # of the open item
        # Not yet told: they may lag behind the text, or be of the message after the next.
        self._logprobs: deque[TokenLogprob] = deque()
        self._unscored = 0  # characters of the open message that none was told of

    def add(self, delta: Delta) -> Iterator[Document]:
        self._logprobs += delta.logprobs
        for part in delta.parts:
            yield from self._add(part)

    def end(self, how: Ending) -> Iterator[Document]:
        """Close what is open. What ended with nothing said is an empty message."""
        if how == "completed" and not self.items:
            yield from self._begin("message")
        yield from self._close(how)

    def _add(self, part: Part) -> Iterator[Document]:
        kind = ITEM_TYPES[part.kind]
        if self._open is None or self._open["type"] != kind or part.name is not None:
            yield from self._close("completed")
            yield from self._begin(kind, part.name or "")
        if part.text:
            self._texts.append(part.text)
            self._unscored += len(part.text)
            yield self._said(part.text)

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
        yield {"type": "response.output_item.added", **self._where(), "item": item}
        if part is not None:
            added = self._where() | {"item_id": item["id"], "content_index": 0, "part": part}
            yield {"type": "response.content_part.added", **added}
            item["content"].append(part)

    def _said(self, text: str) -> Document:
        assert self._open is not None
        of_item = self._where() | {"item_id": self._open["id"], "delta": text}
        kind = self._open["type"]
        if kind == "function_call":
            return {"type": "response.function_call_arguments.delta", **of_item}
        of_item["content_index"] = 0
        if kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **of_item}
        logprobs = self._scores()
        self._open["content"][0]["logprobs"] += logprobs
        return {"type": "response.output_text.delta", **of_item, "logprobs": logprobs}

    def _scores(self) -> list[Document]:
        """Log-probabilities of the open message's text: their tokens join to it."""
        found = []
        while self._logprobs and len(self._logprobs[0].text) <= self._unscored:
            each = self._logprobs.popleft()
            self._unscored -= len(each.text)
            found.append(_token(each))
        return found

    def _close(self, how: Ending) -> Iterator[Document]:
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        of_item = self._where() | {"item_id": item["id"]}
        if item["type"] == "function_call":
            item["arguments"] = text
            done = of_item | {"name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **done}
        else:
            part = item["content"][0]
            part["text"] = text
            of_item["content_index"] = 0
            if item["type"] == "message":
                part["logprobs"] += self._scores()
                done = of_item | {"text": text, "logprobs": part["logprobs"]}
                yield {"type": "response.output_text.done", **done}
            else:
                yield {"type": "response.reasoning_text.done", **of_item, "text": text}
            yield {"type": "response.content_part.done", **of_item, "part": part}
        item["status"] = how
        self._open = None
        yield {"type": "response.output_item.done", **self._where(), "item": item}

    def _where(self) -> Document:
        return {"output_index": len(self.items) - 1}


def _token(each: TokenLogprob) -> Document:
    top = [_bare(other) for other in each.top]
    return _bare(each) | {"top_logprobs": top}


def _bare(each: TokenLogprob) -> Document:
    return {"token": each.text, "logprob": finite(each.logprob), "bytes": list(each.raw)}
