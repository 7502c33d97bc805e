"""The items of a Responses request: as clients send them, as they are stored, as messages.

    Item  --document-->  what is stored and listed  --messages-->  what the chat template reads

An assistant's reasoning, text and calls are separate items; a template takes them as one
message. Images are in messages of the user; other items and parts are refused by name.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from batching.errors import InvalidInput
from server.http.errors import HttpError
from server.http.json import Document
from server.openai.images import Detail, ImageUrl
from server.openai.messages import (
    CalledFunction,
    ContentPart,
    Message,
    TextPart,
    ToolCall,
    any_of,
)
from server.openai.request_fields import required

PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
ItemType = Literal[
    "message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text"
]
NEEDS: Mapping[ItemType, Sequence[str]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": ("id",),
    "input_text": ("text",),  # a part of a message, without one: the user's
}
Role = Literal["user", "assistant", "system", "developer"]
MESSAGE_PARTS = ("input_text", "output_text", "refusal")
IMAGE = "input_image"
# For the OpenAPI document: what an item needs, beyond its fields' types. A type may be left out
# where `Item.document` tells it from other fields.
UNTYPED = ("message", "item_reference")
THERE = {"not": {"type": "null"}}
FULL_ITEM = any_of(
    *(
        ({"type": {"enum": [kind, None]}, **dict.fromkeys(needs, THERE)}, [*needs])
        if kind in UNTYPED
        else ({"type": {"enum": [kind]}, **dict.fromkeys(needs, THERE)}, [*needs, "type"])
        for kind, needs in NEEDS.items()
    )
)


def new_id(kind: str) -> str:
    return PREFIXES[kind] + secrets.token_hex(24)


class InputPart(TextPart):
    """`image_url`: a data: URL or a link."""

    image_url: str | None = None
    detail: Detail | None = None
    file_id: str | None = None

    def image(self, path: str) -> Document:
        """As it is stored. What it refers to is read when the conversation is."""
        if self.file_id is not None:
            raise InvalidInput.at(f"{path}.file_id", "there are no stored files here")
        url = required(self.image_url, f"{path}.image_url")
        return {"type": IMAGE, "image_url": url, "detail": self.detail or "auto"}


Parts = str | list[InputPart]


class Item(Struct):
    type: ItemType | None = None
    id: str | None = None
    role: Role | None = None
    content: Parts | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    text: str | None = None

    @property
    def kind(self) -> ItemType:
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id else "message"

    def document(self, path: str, stored: Mapping[str, Document]) -> Document:
        """Checked, with an id; `path` is what errors call it, `stored` has what is referred to."""
        kind = self.kind
        if kind == "item_reference":
            id = required(self.id, f"{path}.id")
            if id not in stored:
                unknown = f"{path}.id: there is no stored item {id[:100]!r}"
                raise HttpError(404, unknown, f"{path}.id")
            return stored[id]
        if kind == "input_text":
            text = required(self.text, f"{path}.text")
            return Item(role=self.role or "user", content=text).document(path, stored)
        made: Document = getattr(self, f"_{kind}")(path)
        return {"id": self.id or new_id(kind), "type": kind, "status": "completed", **made}

    def _message(self, path: str) -> Document:
        role = required(self.role, f"{path}.role")
        content = _parts(self.content, f"{path}.content", MESSAGE_PARTS, role == "user")
        if not content:
            raise InvalidInput.at(f"{path}.content", "must not be empty")
        if role == "assistant":
            output: Document = {"type": "output_text", "annotations": [], "logprobs": []}
            content = [part | output for part in content]
        return {"role": role, "content": content}

    def _reasoning(self, path: str) -> Document:
        summary = _parts(self.summary or [], f"{path}.summary", ("summary_text",))
        content = _parts(self.content or [], f"{path}.content", ("reasoning_text",))
        return {
            "summary": [part for part in summary if part["text"]],
            "content": [part for part in content if part["text"]],
        }

    def _function_call(self, path: str) -> Document:
        names = NEEDS["function_call"]
        return {name: required(getattr(self, name), f"{path}.{name}") for name in names}

    def _function_call_output(self, path: str) -> Document:
        call_id = required(self.call_id, f"{path}.call_id")
        parts = _parts(self.output, f"{path}.output", ("input_text",))
        return {
            "call_id": call_id,
            "output": self.output if isinstance(self.output, str) else parts,
        }


def documents(
    given: str | list[Item], look_up: Callable[[set[str]], Mapping[str, Document]]
) -> list[Document]:
    """`look_up` finds stored items by their ids, those that there are."""
    items = [Item(role="user", content=given)] if isinstance(given, str) else given
    referred: set[str] = set()
    for n, item in enumerate(items):
        if item.id and item.kind == "item_reference":
            if item.id in referred:
                raise InvalidInput.at(f"input[{n}].id", "is referred to twice")
            referred.add(item.id)
    stored = look_up(referred) if referred else {}
    return [item.document(f"input[{n}]", stored) for n, item in enumerate(items)]


def messages(before: Sequence[Document], items: Sequence[Document]) -> list[tuple[str, Message]]:
    """The conversation: what came before, then a request's items. Each message after the path
    by which errors call it."""
    made: list[Message] = []
    paths: list[str] = []
    names: dict[str, str] = {}  # of the functions called, by call_id
    for n, item in enumerate((*before, *items), start=-len(before)):
        kind, turn = item["type"], _open_turn(made, item)
        if turn is None:
            made.append(_of_others(item, names, f"input[{n}].call_id"))
        elif kind == "reasoning":
            parts = item["content"] or item["summary"]
            turn.reasoning_content = _joined(parts) or None
        elif kind == "message":
            turn.content = _joined(item["content"])
        else:
            names[item["call_id"]] = item["name"]
            called = CalledFunction(item["name"], item["arguments"])
            turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(called, item["call_id"])]
        if len(made) > len(paths):
            paths.append(f"input[{n}]" if n >= 0 else "previous_response_id")
    for message in made:
        if message.content is None and not message.tool_calls:
            message.content = ""  # reasoning, cut off before any text
    return list(zip(paths, made, strict=True))


def _open_turn(made: list[Message], item: Document) -> Message | None:
    """The assistant's message that an item belongs to; None for what others say."""
    kind = item["type"]
    if kind == "function_call_output" or item.get("role", "assistant") != "assistant":
        return None
    if made and made[-1].role == "assistant":
        last = made[-1]
        ended = last.content or last.tool_calls or (kind == "reasoning" and last.reasoning_content)
        if kind == "function_call" or not ended:
            return last
    made.append(Message("assistant"))
    return made[-1]


def _of_others(item: Document, names: dict[str, str], path: str) -> Message:
    if item["type"] == "message":
        return Message(item["role"], _shown(item["content"]))
    call_id = item["call_id"]
    if call_id not in names:
        raise InvalidInput.at(path, "no function_call before it has this call_id")
    return Message("tool", _joined(item["output"]), name=names[call_id], tool_call_id=call_id)


def _joined(parts: str | list[Document]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def _shown(parts: list[Document]) -> str | list[ContentPart]:
    """Parts as long as there are images."""
    if all(part["type"] != IMAGE for part in parts):
        return _joined(parts)
    return [
        ContentPart("image_url", image_url=ImageUrl(part["image_url"], part["detail"]))
        if part["type"] == IMAGE
        else ContentPart("text", part["text"])
        for part in parts
    ]


def _parts(
    given: Parts | None, path: str, kinds: Sequence[str], images: bool = False
) -> list[Document]:
    """Text as the first of the kinds that it may be of; `images`, too, if they may be there."""
    if given is None:
        raise InvalidInput.at(path, "is required")
    if isinstance(given, str):
        return [{"type": kinds[0], "text": given}]
    prefix = f"must be {' or '.join(kinds)}: "
    return [
        part.image(f"{path}[{n}]")
        if images and part.type == IMAGE
        else {"type": kinds[0], "text": part.read(f"{path}[{n}]", kinds, prefix)}
        for n, part in enumerate(given)
    ]
