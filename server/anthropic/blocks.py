"""The messages of `/v1/messages`: content blocks, and their conversion to the chat template's form.

    system, messages --to_template_messages--> messages of the template, images

The results of tools are messages of their own, before the text of the user's message that they come
in; images in them go to that message, since templates take images of the user only.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.core.sealing import unseal
from server.http.json import Document
from server.openai.images import MAX_IMAGES, image_input
from server.openai.messages import any_of
from server.openai.request_fields import NON_EMPTY, required
from worker.messages.generation import ImageInput

BILLING_LINE = "x-anthropic-billing-header:"  # Claude Code changes it with each request
BLOCKS_BY_ROLE = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "image", "document", "search_result"),
    "search_result": ("text",),
}
# Which fields a block requires, for the OpenAPI document.
TEXT_FIELD: Document = {"type": "string"}
BLOCK_FIELDS = any_of(
    ({"type": {"const": "text"}, "text": TEXT_FIELD}, ["type", "text"]),
    ({"type": {"const": "tool_use"}, "input": {"type": "object"}}, ["type", "id", "name", "input"]),
    ({"type": {"const": "tool_result"}, "tool_use_id": TEXT_FIELD}, ["type", "tool_use_id"]),
    ({"type": {"const": "thinking"}, "thinking": TEXT_FIELD}, ["type", "thinking"]),
    ({"type": {"const": "redacted_thinking"}, "data": TEXT_FIELD}, ["type", "data"]),
    ({"type": {"enum": ["image", "document"]}, "source": {"type": "object"}}, ["type", "source"]),
    (
        {"type": {"const": "search_result"}, "source": TEXT_FIELD, "content": {"type": "array"}},
        ["type", "source", "title", "content"],
    ),
)


class BlockSource(Struct):
    """The content of an image or a document."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list["SimpleBlock"] | None = None

    def image_input(self, path: str) -> ImageInput:
        if self.type == "url":
            return image_input(required(self.url, f"{path}.url"), None, f"{path}.url")
        if self.type != "base64":
            raise _unsupported(f"{path}.type", self.type, "base64 or url")
        media_type = required(self.media_type, f"{path}.media_type")
        data = required(self.data, f"{path}.data")
        return image_input(f"data:{media_type};base64,{data}", None, f"{path}.data")

    def document_text(self, path: str) -> str:
        if self.type == "text":
            return required(self.data, f"{path}.data")
        if self.type != "content":
            raise _unsupported(f"{path}.type", self.type, "text or content")
        if self.content is None or isinstance(self.content, str):
            return required(self.content, f"{path}.content")
        return join_texts(self.content, f"{path}.content")


class SimpleBlock(Struct):
    """A text, an image, a document, or a search result, which has texts in it."""

    type: str
    text: str | None = None
    source: BlockSource | str | None = None  # of a search result, where it was found
    title: str | None = None
    context: str | None = None
    content: str | list["SimpleBlock"] | None = None  # of a search result, and of a tool's

    def file(self, path: str) -> BlockSource:
        if isinstance(self.source, str):
            raise InvalidInput.at(f"{path}.source", "must be an object")
        return required(self.source, f"{path}.source")

    def read_text(self, path: str) -> str:
        """Return the text of a text, a document or a search result."""
        if self.type == "text":
            return required(self.text, f"{path}.text")
        if self.type == "document":
            text = self.file(path).document_text(f"{path}.source")
            return "\n".join(filter(None, [self.title, self.context, text]))
        title, source = required(self.title, f"{path}.title"), self.source
        if not isinstance(source, str):
            raise InvalidInput.at(f"{path}.source", "must be a string")
        if not isinstance(content := self.content, list):
            raise InvalidInput.at(f"{path}.content", "must be a list")
        return "\n".join([title, source, join_texts(content, f"{path}.content", self.type)])


class ContentBlock(SimpleBlock):
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # of redacted thinking

    def reasoning(self, path: str) -> str:
        """Return the text of thinking. The signature has the text that was not shown; that of
        another server is ignored."""
        if self.type == "redacted_thinking":
            return unseal(required(self.data, f"{path}.data")) or ""
        return required(self.thinking, f"{path}.thinking") or unseal(self.signature or "") or ""

    def tool_call(self, path: str) -> Document:
        function = {
            "name": required(self.name, f"{path}.name"),
            "arguments": required(self.input, f"{path}.input"),
        }
        return {"function": function, "id": required(self.id, f"{path}.id"), "type": "function"}


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[ContentBlock, BLOCK_FIELDS]]


InputMessages = Annotated[list[InputMessage], NON_EMPTY]
System = str | list[Annotated[SimpleBlock, Meta(extra_json_schema={"required": ["text"]})]]


def to_template_messages(
    system: System | None, messages: Sequence[InputMessage]
) -> tuple[tuple[Document, ...], tuple[ImageInput, ...]]:
    """Return the messages of the chat template, and their images. InvalidInput for a block that is
    not supported."""
    conversion = Conversion()
    if system and (text := _without_billing_line(system)):
        conversion.messages.append({"role": "system", "content": text})
    for n, message in enumerate(messages):
        conversion.add(message, f"messages[{n}]")
    return tuple(conversion.messages), tuple(conversion.images)


class Conversion:
    """A conversation in the chat template's form. `functions`: the called ones, by the call's
    id."""

    def __init__(self) -> None:
        self.messages: list[Document] = []
        self.images: list[ImageInput] = []
        self._functions: dict[str, str] = {}

    def add(self, message: InputMessage, path: str) -> None:
        content, path = message.content, f"{path}.content"
        if isinstance(content, str):
            self.messages.append({"role": message.role, "content": content})
            return
        _check_types(content, message.role, path)
        if message.role == "user":
            self._add_user(content, path)
        elif message.role == "assistant":
            self._add_assistant(content, path)
        else:
            self.messages.append({"role": "system", "content": join_texts(content, path)})

    def _add_assistant(self, blocks: Sequence[ContentBlock], path: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Document] = []
        for n, block in enumerate(blocks):
            block_path = f"{path}[{n}]"
            if block.type == "text":
                texts.append(block.read_text(block_path))
            elif block.type == "tool_use":
                call = block.tool_call(block_path)
                self._functions[call["id"]] = call["function"]["name"]
                calls.append(call)
            else:
                reasoning.append(block.reasoning(block_path))
        message: Document = {"role": "assistant", "content": "\n".join(texts)}
        if joined := "\n".join(filter(None, reasoning)):
            message["reasoning_content"] = joined
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        self.messages.append(message)

    def _add_user(self, blocks: Sequence[ContentBlock], path: str) -> None:
        parts: list[Document] = []
        for n, block in enumerate(blocks):
            if block.type == "tool_result":
                parts += self._add_result(block, f"{path}[{n}]")
        for n, block in enumerate(blocks):
            if block.type != "tool_result":
                parts.append(self._part(block, f"{path}[{n}]"))
        if any(part["type"] == "image" for part in parts):
            self.messages.append({"role": "user", "content": parts})
        elif parts or not blocks:
            text = "\n".join(part["text"] for part in parts)
            self.messages.append({"role": "user", "content": text})

    def _add_result(self, block: ContentBlock, path: str) -> list[Document]:
        """Add a message with the text of a result; return its images as parts."""
        id = required(block.tool_use_id, f"{path}.tool_use_id")
        if id not in self._functions:
            reason = f"no tool_use before it has the id {id[:100]!r}"
            raise InvalidInput.at(f"{path}.tool_use_id", reason)
        parts: list[Document] = []
        if isinstance(content := block.content, str):
            parts.append({"type": "text", "text": content})
        elif content:
            path += ".content"
            _check_types(content, "tool_result", path)
            parts += (self._part(part, f"{path}[{n}]") for n, part in enumerate(content))
        texts = [part["text"] for part in parts if part["type"] == "text"]
        message = {"role": "tool", "content": "\n".join(texts), "name": self._functions[id]}
        self.messages.append({**message, "tool_call_id": id})
        return [part for part in parts if part["type"] == "image"]

    def _part(self, block: SimpleBlock, path: str) -> Document:
        if block.type != "image":
            return {"type": "text", "text": block.read_text(path)}
        if len(self.images) == MAX_IMAGES:
            raise InvalidInput.at(path, f"a request takes at most {MAX_IMAGES} images")
        self.images.append(block.file(path).image_input(f"{path}.source"))
        return {"type": "image"}


def join_texts(blocks: Sequence[SimpleBlock], path: str, role: str = "system") -> str:
    _check_types(blocks, role, path)
    return "\n".join(block.read_text(f"{path}[{n}]") for n, block in enumerate(blocks))


def _without_billing_line(system: System) -> str:
    """Return the system text. A line that a client changes with each request is removed from the
    blocks that begin with it: the prefix of the prompt would be another each time."""
    if isinstance(system, str):
        texts = [system]
    else:
        _check_types(system, "system", "system")
        texts = [block.read_text(f"system[{n}]") for n, block in enumerate(system)]
    kept = [text.partition("\n")[2] if text.startswith(BILLING_LINE) else text for text in texts]
    return "\n".join(filter(None, kept))


def _check_types(blocks: Sequence[SimpleBlock], role: str, path: str) -> None:
    """Raise InvalidInput for a block that messages of a role do not have."""
    accepted = BLOCKS_BY_ROLE[role]
    for n, block in enumerate(blocks):
        if block.type not in accepted:
            raise _unsupported(f"{path}[{n}].type", block.type, ", ".join(accepted))


def _unsupported(path: str, type: str, accepted: str) -> InvalidInput:
    return InvalidInput.at(path, f"must be {accepted}, not {type[:50]!r}")
