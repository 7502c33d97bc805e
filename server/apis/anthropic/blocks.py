"""The messages of `/v1/messages`: content blocks, and their conversion to the chat template's form.

    system, messages --to_template_messages--> messages of the template, images

The results of tools are messages of their own, before the text of the user's message that they come
in; images in them go to that message, since templates take images of the user only.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Struct

from batching.errors import InvalidInput
from server.apis.openai.media import url_input
from server.apis.openai.request_fields import NON_EMPTY
from server.core.sealing import unseal
from server.http.json import Document
from worker.messages.generation import MAX_MEDIA, MediaInput

BILLING_LINE = "x-anthropic-billing-header:"  # Claude Code changes it with each request


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str

    def read_text(self) -> str:
        return self.text


class TextOnlyBlock(Struct):
    """A block of a list that has texts only. msgspec would not require the tag of a single type."""

    type: Literal["text"]
    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    media_type: str
    data: str

    def image_input(self, path: str) -> MediaInput:
        url = f"data:{self.media_type};base64,{self.data}"
        return url_input(url, None, f"{path}.data")


class UrlSource(Struct, tag_field="type", tag="url"):
    url: str

    def image_input(self, path: str) -> MediaInput:
        return url_input(self.url, None, f"{path}.url")


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class TextSource(Struct, tag_field="type", tag="text"):
    data: str

    def read_text(self) -> str:
        return self.data


class ContentSource(Struct, tag_field="type", tag="content"):
    content: str | list[TextOnlyBlock]

    def read_text(self) -> str:
        return join_texts(self.content)


class DocumentBlock(Struct, tag_field="type", tag="document"):
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None

    def read_text(self) -> str:
        return "\n".join(filter(None, [self.title, self.context, self.source.read_text()]))


class SearchResult(Struct, tag_field="type", tag="search_result"):
    source: str  # where it was found
    title: str
    content: list[TextOnlyBlock]

    def read_text(self) -> str:
        return "\n".join([self.title, self.source, join_texts(self.content)])


ContentBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResult


class ToolReference(Struct, tag_field="type", tag="tool_reference"):
    """A tool that a search has found. All tools are in the prompt here."""

    tool_name: str

    def read_text(self) -> str:
        return self.tool_name


class ToolResult(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ContentBlock | ToolReference] | None = None


class Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None

    def reasoning(self) -> str:
        """Return the text; one that was not shown is in the signature, if this server sealed it."""
        return self.thinking or unseal(self.signature or "") or ""


class RedactedThinking(Struct, tag_field="type", tag="redacted_thinking"):
    data: str

    def reasoning(self) -> str:
        return unseal(self.data) or ""


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AssistantBlock: TypeAlias = TextBlock | Thinking | RedactedThinking | ToolUse


class UserMessage(Struct, tag_field="role", tag="user"):
    content: str | list[ContentBlock | ToolResult]


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str | list[AssistantBlock]


class SystemMessage(Struct, tag_field="role", tag="system"):
    content: str | list[TextOnlyBlock]


InputMessage: TypeAlias = UserMessage | AssistantMessage | SystemMessage
InputMessages = Annotated[list[InputMessage], NON_EMPTY]
System = str | list[TextOnlyBlock]


def to_template_messages(
    system: System | None, messages: Sequence[InputMessage]
) -> tuple[tuple[Document, ...], tuple[MediaInput, ...]]:
    """Return the messages of the chat template, and their images. InvalidInput for the result of an
    unknown call, or too many images."""
    conversion = Conversion()
    if system and (text := _without_billing_line(system)):
        conversion.messages.append({"role": "system", "content": text})
    for n, message in enumerate(messages):
        conversion.add(message, f"messages[{n}].content")
    return tuple(conversion.messages), tuple(conversion.images)


class Conversion:
    """A conversation in the chat template's form. `functions`: names, by the calls' ids."""

    def __init__(self) -> None:
        self.messages: list[Document] = []
        self.images: list[MediaInput] = []
        self._functions: dict[str, str] = {}

    def add(self, message: InputMessage, path: str) -> None:
        if isinstance(message, SystemMessage):
            self.messages.append({"role": "system", "content": join_texts(message.content)})
        elif isinstance(message, AssistantMessage):
            self._add_assistant(message.content)
        elif isinstance(message.content, str):
            self.messages.append({"role": "user", "content": message.content})
        else:
            self._add_user(message.content, path)

    def _add_assistant(self, content: str | list[AssistantBlock]) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Document] = []
        for block in [TextBlock(content)] if isinstance(content, str) else content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUse):
                self._functions[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"function": function, "id": block.id, "type": "function"})
            else:
                reasoning.append(block.reasoning())
        message: Document = {"role": "assistant", "content": "\n".join(texts)}
        if joined := "\n".join(filter(None, reasoning)):
            message["reasoning_content"] = joined
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        self.messages.append(message)

    def _add_user(self, blocks: Sequence[ContentBlock | ToolResult], path: str) -> None:
        parts: list[Document] = []
        for n, block in enumerate(blocks):
            if isinstance(block, ToolResult):
                parts += self._add_result(block, f"{path}[{n}]")
        for n, block in enumerate(blocks):
            if not isinstance(block, ToolResult):
                parts.append(self._part(block, f"{path}[{n}]"))
        if any(part["type"] == "image" for part in parts):
            self.messages.append({"role": "user", "content": parts})
        elif parts or not blocks:
            text = "\n".join(part["text"] for part in parts)
            self.messages.append({"role": "user", "content": text})

    def _add_result(self, block: ToolResult, path: str) -> list[Document]:
        """Add a message with the text of a result; return its images as parts."""
        id = block.tool_use_id
        if id not in self._functions:
            reason = f"no tool_use before it has the id {id[:100]!r}"
            raise InvalidInput.at(f"{path}.tool_use_id", reason)
        content = block.content or ()
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        parts = [self._part(part, f"{path}.content[{n}]") for n, part in enumerate(blocks)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        message = {"role": "tool", "content": "\n".join(texts), "name": self._functions[id]}
        self.messages.append({**message, "tool_call_id": id})
        return [part for part in parts if part["type"] == "image"]

    def _part(self, block: ContentBlock | ToolReference, path: str) -> Document:
        if not isinstance(block, ImageBlock):
            return {"type": "text", "text": block.read_text()}
        if len(self.images) == MAX_MEDIA:
            raise InvalidInput.at(path, f"a request takes at most {MAX_MEDIA} images")
        self.images.append(block.source.image_input(f"{path}.source"))
        return {"type": "image"}


def join_texts(content: str | Sequence[TextOnlyBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _without_billing_line(system: System) -> str:
    """Return the system text. A line that a client changes with each request is removed from the
    blocks that begin with it: the prefix of the prompt would be another each time."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    kept = [text.partition("\n")[2] if text.startswith(BILLING_LINE) else text for text in texts]
    return "\n".join(filter(None, kept))
