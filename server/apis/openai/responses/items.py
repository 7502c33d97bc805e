"""The input items of a Responses request: as clients send them, as stored, and as messages.

    Item  --to_documents-->  stored and listed documents  --to_messages-->  chat template

An assistant's reasoning, text and calls are separate items; a template takes them as one message.
Media are allowed in messages of the user and in outputs. Other items and parts are refused.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from batching.errors import InvalidInput
from server.apis.openai.media import Detail, FileData, ImageUrl
from server.apis.openai.messages import (
    CalledFunction,
    ContentPart,
    Message,
    TextPart,
    ToolCall,
    any_of,
)
from server.apis.openai.request_fields import required
from server.apis.openai.response_format import check_depth
from server.apis.openai.response_tools import LOCAL_SHELL, Tool, flat_name, flatten_tools
from server.apis.openai.tools import MAX_TOOLS
from server.core.sealing import unseal
from server.http.errors import HttpError
from server.http.json import Document, to_json
from worker.messages.generation import INPUT

ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
    "additional_tools": "at_",
}
InputItemType = Literal[
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "additional_tools",
    "item_reference",
    "input_text",
    "input_image",
    "input_audio",
    "input_video",
]
# Items of tools that OpenAI's server runs, and of its summaries, which no one else can read.
HOSTED = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
    "tool_search_output", "compaction",
)  # fmt: skip
REQUIRED_FIELDS: Mapping[InputItemType, Sequence[str]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call": ("call_id", "action"),
    "local_shell_call_output": ("output",),  # and call_id or id
    "additional_tools": ("tools",),
    "item_reference": ("id",),
    "input_text": ("text",),
    "input_image": ("image_url",),
    "input_audio": ("input_audio",),
    "input_video": (),  # with `input_video` or `video_url`
}
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUTS = tuple(f"{call}_output" for call in CALLS)
ItemRole = Literal["user", "assistant", "system", "developer"]
MESSAGE_PARTS = ("input_text", "output_text", "refusal")
IMAGE, AUDIO, VIDEO = "input_image", "input_audio", "input_video"
MEDIA = (IMAGE, AUDIO, VIDEO)
PARTS = ("input_text", *MEDIA)
# Which fields an item requires, for the OpenAPI document. The type is optional where other fields
# determine it; see `Item.kind`.
OPTIONAL_TYPES = ("message", "item_reference")
ITEM_ID = re.compile(r"[\w=:+-]{1,512}", re.ASCII)  # of an item of a conversation
NOT_NULL = {"not": {"type": "null"}}
ITEM_FIELDS = any_of(
    *(
        ({"type": {"enum": [kind, None]}, **dict.fromkeys(fields, NOT_NULL)}, [*fields])
        if kind in OPTIONAL_TYPES
        else ({"type": {"enum": [kind]}, **dict.fromkeys(fields, NOT_NULL)}, [*fields, "type"])
        for kind, fields in REQUIRED_FIELDS.items()
    )
)


def new_id(kind: str) -> str:
    return ID_PREFIXES[kind] + secrets.token_hex(24)


class InputPart(TextPart):
    """`image_url`: a data: URL or a link."""

    image_url: str | None = None
    detail: Detail | None = None
    file_id: str | None = None
    input_audio: FileData | None = None
    input_video: FileData | None = None
    video_url: str | None = None

    def media_document(self, path: str) -> Document:
        """Return the file as it is stored. Its data is checked with the conversation."""
        if self.type == VIDEO and self.video_url is not None:
            return {"type": VIDEO, "video_url": self.video_url}
        if self.type in (AUDIO, VIDEO):
            field = self.input_audio if self.type == AUDIO else self.input_video
            file: FileData = required(field, f"{path}.{self.type}")
            return {"type": self.type, self.type: {"data": file.data, "format": file.format}}
        if self.file_id is not None:
            raise InvalidInput.at(f"{path}.file_id", "is not supported: files are not stored here")
        url = required(self.image_url, f"{path}.image_url")
        return {"type": IMAGE, "image_url": url, "detail": self.detail or "auto"}


Parts = str | list[InputPart]


class Item(InputPart):
    """An item, or a content part in place of one: a message of the user."""

    type: InputItemType | None = None  # type: ignore[assignment]  # other values than a part's
    id: Annotated[str, Meta(max_length=512, pattern=r"^[^\x00]*$")] | None = None  # is a key
    role: ItemRole | None = None
    content: Parts | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    namespace: str | None = None
    input: str | None = None  # of a custom tool
    action: dict[str, Any] | None = None  # of the local shell
    encrypted_content: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def kind(self) -> InputItemType:
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id else "message"

    def document(self, path: str, stored: Mapping[str, Document]) -> Document:
        """Return the checked item with an id; `stored` has the items that are referred to."""
        kind = self.kind
        if kind == "item_reference":
            id = required(self.id, f"{path}.id")
            if id not in stored:
                message = f"{path}.id: there is no stored item {id[:100]!r}"
                raise HttpError(404, message, f"{path}.id")
            return stored[id]
        if kind in PARTS:
            if kind in MEDIA:
                self.media_document(path)  # checked
            else:
                self.read(path, PARTS)
            return Item(role=self.role or "user", content=[self]).document(path, stored)
        if kind in CALLS:
            fields = self._call(path, REQUIRED_FIELDS[kind])
        elif kind in OUTPUTS:
            fields = self._output(path)
        elif kind == "additional_tools":
            tools: list[Tool] = required(self.tools, f"{path}.tools")
            flatten_tools(f"{path}.tools", tools)  # checked
            fields = {"role": "developer", "tools": [tool.document() for tool in tools]}
            check_depth(fields, f"{path}.tools")
        else:
            fields = {"message": self._message, "reasoning": self._reasoning}[kind](path)
        return {"id": self.id or new_id(kind), "type": kind, "status": "completed", **fields}

    def _message(self, path: str) -> Document:
        role = required(self.role, f"{path}.role")
        content = _part_documents(
            self.content, f"{path}.content", MESSAGE_PARTS, allow_media=role == "user"
        )
        if not content:
            raise InvalidInput.at(f"{path}.content", "must not be empty")
        if role == "assistant":
            output: Document = {"type": "output_text", "annotations": [], "logprobs": []}
            content = [part | output for part in content]
        return {"role": role, "content": content}

    def _reasoning(self, path: str) -> Document:
        summary = _part_documents(self.summary or [], f"{path}.summary", ("summary_text",))
        content = _part_documents(self.content or [], f"{path}.content", ("reasoning_text",))
        if not content and (text := unseal(self.encrypted_content or "")):
            content = [{"type": "reasoning_text", "text": text}]
        return {
            "summary": [part for part in summary if part["text"]],
            "content": [part for part in content if part["text"]],
        }

    def _call(self, path: str, names: Sequence[str]) -> Document:
        fields = {name: required(getattr(self, name), f"{path}.{name}") for name in names}
        check_depth(self.action, f"{path}.action")
        return fields | ({"namespace": self.namespace} if self.namespace else {})

    def _output(self, path: str) -> Document:
        call_id = self.call_id
        if call_id is None and self.kind == "local_shell_call_output":
            call_id = self.id
        call_id = required(call_id, f"{path}.call_id")
        parts = _part_documents(self.output, f"{path}.output", ("input_text",), allow_media=True)
        return {
            "call_id": call_id,
            "output": self.output if isinstance(self.output, str) else parts,
        }


def _part_documents(
    parts: Parts | None, path: str, kinds: Sequence[str], allow_media: bool = False
) -> list[Document]:
    """Return parts as they are stored; texts of any of the kinds get the first of them."""
    if parts is None:
        raise InvalidInput.at(path, "is required")
    if isinstance(parts, str):
        return [{"type": kinds[0], "text": parts}]
    prefix = f"must be {' or '.join(kinds)}: "
    return [
        part.media_document(f"{path}[{n}]")
        if allow_media and part.type in MEDIA
        else {"type": kinds[0], "text": part.read(f"{path}[{n}]", kinds, prefix)}
        for n, part in enumerate(parts)
    ]


def convert_foreign(items: Any) -> None:
    """Turn items of OpenAI's further tools, as clients send them, into calls of functions and their
    outputs. Those of HOSTED are removed."""
    if isinstance(items, list):
        items[:] = [new for item in items for new in _converted(item)]


def _converted(item: Any) -> Iterator[Any]:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "mcp_call":
        call = {"type": "function_call", "call_id": item.get("id")}
        yield {**item, **call, "namespace": item.get("server_label"), "output": None}
        output = item.get("output") or item.get("error")
        yield {**call, "type": "function_call_output", "output": _output_text(output)}
    elif kind in ("shell_call", "apply_patch_call"):
        arguments = to_json(item.get("action") or item.get("operation")).decode()
        name = kind.removesuffix("_call")
        yield {**item, "type": "function_call", "name": name, "arguments": arguments}
    elif kind in ("shell_call_output", "apply_patch_call_output"):
        output = item.get("output") or item.get("status")
        yield {**item, "type": "function_call_output", "output": _output_text(output)}
    elif kind not in HOSTED:
        yield item


def _output_text(output: Any) -> str:
    if isinstance(output, str):
        return output
    return to_json(output).decode() if output else ""


def to_documents(
    items: str | list[Item],
    look_up: Callable[[set[str]], Mapping[str, Document]],
    path: str = "input",
) -> list[Document]:
    """Return items as they are stored. `look_up` returns those of the ids that are stored; `path`
    names the items in errors."""
    if isinstance(items, str):
        items = [Item(role="user", content=items)]
    references: set[str] = set()
    for n, item in enumerate(items):
        if item.id and item.kind == "item_reference":
            if item.id in references:
                raise InvalidInput.at(f"{path}[{n}].id", "is referred to twice")
            references.add(item.id)
    stored = look_up(references) if references else {}
    return [item.document(f"{path}[{n}]", stored) for n, item in enumerate(items)]


def check_ids(items: Sequence[Document], previous: Iterable[Document], path: str) -> None:
    """Raise InvalidInput if an item has the id of another one, or one that no path can have."""
    ids = {item["id"] for item in previous}
    for n, item in enumerate(items):
        if not ITEM_ID.fullmatch(item["id"]):
            accepted = "letters, digits and _ - = : + are accepted, at most 512"
            raise InvalidInput.at(f"{path}[{n}].id", f"{item['id'][:50]!r}: {accepted}")
        if item["id"] in ids:
            raise InvalidInput.at(f"{path}[{n}].id", "is the id of an earlier item")
        ids.add(item["id"])


def to_messages(
    previous: Sequence[Document], items: Sequence[Document], source: str = "previous_response_id"
) -> list[tuple[str, Message]]:
    """Return a conversation: its previous items, then a request's. Each message has a path, which
    names it in errors; those of previous items have their `source`."""
    messages: list[Message] = []
    paths: list[str] = []
    functions: dict[str, str] = {}  # names by call_id
    for n, item in enumerate((*previous, *items), start=-len(previous)):
        if (kind := item["type"]) == "additional_tools":
            continue
        path = f"input[{n}]" if n >= 0 else source
        message = _assistant_message(messages, item)
        if message is None:
            call_id = f"{path}.call_id" if n >= 0 else source
            messages.append(_other_message(item, functions, call_id))
        elif kind == "reasoning":
            parts = item["content"] or item["summary"]
            message.reasoning_content = _join(parts) or None
        elif kind == "message":
            message.content = _join(item["content"])
        else:
            function = _called_function(item)
            functions[item["call_id"]] = function.name
            message.tool_calls = [*(message.tool_calls or ()), ToolCall(function, item["call_id"])]
        paths += [path] * (len(messages) - len(paths))
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""  # reasoning that was cut off before any text
    return list(zip(paths, messages, strict=True))


def _assistant_message(messages: list[Message], item: Document) -> Message | None:
    """Return the assistant's message that an item belongs to, a new one if the last is complete.

    None for an item of another role."""
    kind = item["type"]
    if kind in OUTPUTS or item.get("role", "assistant") != "assistant":
        return None
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        complete = (
            last.content or last.tool_calls or (kind == "reasoning" and last.reasoning_content)
        )
        if kind in CALLS or not complete:
            return last
    messages.append(Message("assistant"))
    return messages[-1]


def _called_function(item: Document) -> CalledFunction:
    """Return the function that the model has called, from the item of a call."""
    if item["type"] == "local_shell_call":
        arguments = {key: value for key, value in item["action"].items() if key != "type"}
        return CalledFunction(LOCAL_SHELL, arguments)
    name = flat_name(item["name"], item.get("namespace"))
    if item["type"] == "custom_tool_call":
        return CalledFunction(name, {INPUT: item["input"]})
    return CalledFunction(name, item["arguments"])


def _other_message(item: Document, functions: dict[str, str], path: str) -> Message:
    if item["type"] == "message":
        return Message(item["role"], _content(item["content"]))
    call_id = item["call_id"]
    if call_id not in functions:
        which = "it" if path.endswith(".call_id") else f"the item {item['id'][:100]!r}"
        raise InvalidInput.at(path, f"no function_call before {which} has this call_id")
    content = _content(item["output"])
    return Message("tool", content, name=functions[call_id], tool_call_id=call_id)


def _join(parts: str | list[Document]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def _content(parts: str | list[Document]) -> str | list[ContentPart | str]:
    """Return a message's content: text, or parts if there are media."""
    if isinstance(parts, str) or all(part["type"] not in MEDIA for part in parts):
        return _join(parts)
    return [_content_part(part) for part in parts]


def _content_part(part: Document) -> ContentPart:
    if part["type"] == IMAGE:
        return ContentPart("image_url", image_url=ImageUrl(part["image_url"], part["detail"]))
    if part["type"] == AUDIO:
        return ContentPart(AUDIO, input_audio=FileData(**part[AUDIO]))
    if part["type"] == VIDEO and VIDEO in part:
        return ContentPart(VIDEO, input_video=FileData(**part[VIDEO]))
    if part["type"] == VIDEO:
        return ContentPart("video_url", video_url=part["video_url"])
    return ContentPart("text", part["text"])
