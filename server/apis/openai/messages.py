"""The messages of a conversation: as clients send them, and as chat templates read them.

The items of the Responses API are converted to these messages. Text parts are joined by line
breaks, as in vLLM; in a message with media they stay parts.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.media import Detail, FileData, FileUrl, ImageUrl, url_input
from server.apis.openai.request_fields import NON_EMPTY, required
from server.http.json import Document
from worker.messages.generation import INPUT, MAX_MEDIA, Chat, MediaInput, MediaKind

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
NULLABLE = ["assistant", "tool", "function"]  # roles whose content may be null
# The fields of the parts that have text. Those of Responses are accepted, as in vLLM.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THINKING = "thinking"
IMAGE, INPUT_IMAGE = "image_url", "input_image"  # with the same field; the second is Responses'
# The kinds of the parts that have media.
MEDIA: Mapping[str, MediaKind] = {
    IMAGE: "image",
    INPUT_IMAGE: "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "input_video": "video",
    "video_url": "video",
}
PARTS = (*TEXTS, THINKING, *MEDIA)


def any_of(*alternatives: tuple[Document, list[str]]) -> Meta:
    """Return a JSON schema of alternatives: pairs of properties and required names."""
    schemas = [{"properties": properties, "required": names} for properties, names in alternatives]
    return Meta(extra_json_schema={"allOf": [{"anyOf": schemas}]})  # a union has an anyOf


# Which fields a part or a message requires, for the OpenAPI document.
PART_FIELDS = any_of(
    *(
        ({"type": {"const": kind}, field: {"type": "string"}}, [field])
        for kind, field in (*TEXTS.items(), (THINKING, THINKING))
    ),
    *(
        ({"type": {"const": kind}, kind: {"type": ["object", "string"]}}, [kind])
        for kind in (IMAGE, "audio_url", "video_url")
    ),
    *(
        ({"type": {"const": kind}, kind: {"type": "object"}}, [kind])
        for kind in ("input_audio", "input_video")
    ),
    ({"type": {"const": INPUT_IMAGE}, IMAGE: {"type": ["object", "string"]}}, [IMAGE]),
)
CALLING = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
CALL_FIELDS = any_of(
    ({"function": {"type": "object"}}, ["function"]),
    ({"type": {"const": "custom"}, "custom": {"type": "object"}}, ["type", "custom"]),
)
MESSAGE_FIELDS = any_of(
    ({"content": {"type": ["string", "array"], "minItems": 1}}, ["content"]),
    (CALLING, ["tool_calls"]),
    ({"role": {"enum": NULLABLE}, "content": {"type": ["null", "array"]}}, []),
)


class TextPart(Struct):
    """A part of a message, in either API. Other types than text and media are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def read(self, path: str, kinds: Container[str], prefix: str = "") -> str:
        """Return the text; InvalidInput, with `prefix`, for a type that is not in `kinds`."""
        if self.type not in kinds:
            reason = f"{prefix}this model takes text, not {self.type[:50]!r}"
            raise InvalidInput.at(f"{path}.type", reason)
        field = TEXTS.get(self.type, "text")
        return str(required(getattr(self, field), f"{path}.{field}"))


class ContentPart(TextPart):
    type: Annotated[str, Meta(extra_json_schema={"enum": PARTS})]
    image_url: ImageUrl | str | None = None
    detail: Detail | None = None  # of an input_image
    thinking: str | None = None
    input_audio: FileData | None = None
    audio_url: FileUrl | str | None = None
    input_video: FileData | None = None
    video_url: FileUrl | str | None = None

    def media_input(self, path: str) -> MediaInput:
        field = IMAGE if self.type == INPUT_IMAGE else self.type
        path = f"{path}.{field}"
        value: Any = required(getattr(self, field), path)
        if isinstance(value, FileData):
            return value.media_input(path, MEDIA[self.type])
        url = value if isinstance(value, str) else value.url
        detail = value.detail if isinstance(value, ImageUrl) else self.detail
        return url_input(url, detail, path, MEDIA[self.type])


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustomTool(Struct):
    name: str
    input: str


class ToolCall(Struct):
    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = "function"
    custom: CalledCustomTool | None = None

    def to_template(self, path: str) -> Document:
        """Return the call in the chat template's form. Arguments, which may be deep, stay as is."""
        if self.type == "custom":
            custom: CalledCustomTool = required(self.custom, f"{path}.custom")
            function: Document = {"name": custom.name, "arguments": {INPUT: custom.input}}
        else:
            called: CalledFunction = required(self.function, f"{path}.function")
            function = {"name": called.name, "arguments": called.arguments or ""}
        type_ = "function" if self.type == "custom" else self.type
        return {"function": function, "id": self.id, "type": type_ or "function"}


class Message(Struct):
    role: Role
    content: str | list[Annotated[ContentPart | str, PART_FIELDS]] | None = None
    name: str | None = None
    tool_calls: list[Annotated[ToolCall, CALL_FIELDS]] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # what tool_calls were before
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for reasoning_content

    def to_template(self, path: str) -> tuple[Document, list[MediaInput]]:
        """Return the message in the chat template's form, and its media. `path` is for errors."""
        content: str | list[Document] | None = None
        media: list[MediaInput] = []
        thoughts, calls = "", self.tool_calls
        if self.function_call and not calls:
            calls = [ToolCall(self.function_call)]
        if isinstance(self.content, list) and self.content:
            content, media, thoughts = self._parts(self.content, path)
        elif isinstance(self.content, str):
            content = self.content
        elif self.role in NULLABLE:
            content = None if self.role == "assistant" and calls else ""  # as in vLLM
        else:
            reason = "is required" if self.content is None else "must not be empty"
            raise InvalidInput.at(f"{path}.content", reason)
        reasoning = self.reasoning_content or self.reasoning or thoughts or self.reasoning_content
        if self.reasoning and self.reasoning != reasoning:
            raise InvalidInput.at(f"{path}.reasoning", "differs from reasoning_content")
        optional: Document = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        optional = {key: value for key, value in optional.items() if value is not None}
        if calls:
            optional["tool_calls"] = [
                call.to_template(f"{path}.tool_calls[{n}]") for n, call in enumerate(calls)
            ]
        role = TEMPLATE_ROLES.get(self.role, self.role)
        return {"role": role, "content": content, **optional}, media

    def _parts(
        self, parts: Sequence[ContentPart | str], path: str
    ) -> tuple[str | list[Document], list[MediaInput], str]:
        """Return the content as text, or as parts if there are media; the media; the reasoning."""
        documents: list[Document] = []
        media: list[MediaInput] = []
        thoughts: list[str] = []
        for n, part in enumerate(parts):
            part_path = f"{path}.content[{n}]"
            if isinstance(part, str):  # as in vLLM
                part = ContentPart("text", part)
            if part.type == THINKING and self.role == "assistant":
                thoughts.append(required(part.thinking, f"{part_path}.{THINKING}"))
                continue
            if part.type not in MEDIA:
                documents.append({"type": "text", "text": part.read(part_path, TEXTS)})
                continue
            if self.role not in ("user", "tool"):
                reason = "images, recordings and videos are for messages of the user and of tools"
                raise InvalidInput.at(f"{part_path}.type", reason)
            documents.append({"type": MEDIA[part.type]})
            media.append(part.media_input(part_path))
        reasoning = "\n".join(thoughts)
        if media:
            return documents, media, reasoning
        return "\n".join(part["text"] for part in documents), [], reasoning


Messages = Annotated[list[Annotated[Message, MESSAGE_FIELDS]], NON_EMPTY]


class TemplateOptions(Protocol):
    """The fields of a request that a chat template reads."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def conversation(
    options: TemplateOptions,
    messages: list[Message],
    tools: Sequence[Document] | None,
    effort: str | None = None,
    context: Sequence[Document] | None = None,
    template: str | None = None,
) -> Chat:
    """Return the input of the chat template. `context`: documents for it. `template`: instead of
    the model's. Raises InvalidInput for an invalid message."""
    add_prompt = options.add_generation_prompt
    documents, media = to_template_messages(
        (f"messages[{n}]", message) for n, message in enumerate(messages)
    )
    return Chat(
        documents,
        tuple(tools or ()),
        options.chat_template_kwargs or {},
        not options.continue_final_message if add_prompt is None else add_prompt,
        bool(options.continue_final_message),
        effort,
        media=media,
        documents=tuple(context or ()),
        template=template,
    )


def to_template_messages(
    messages: Iterable[tuple[str, Message]],
) -> tuple[tuple[Document, ...], tuple[MediaInput, ...]]:
    """Return messages in the chat template's form, and their media. A message has its path."""
    documents: list[Document] = []
    media: list[MediaInput] = []
    for path, message in messages:
        document, message_media = message.to_template(path)
        if message_media and message.role == "tool":  # templates take media of users only
            parts = document["content"]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            documents.append({**document, "content": "\n".join(texts)})
            document = {"role": "user", "content": [p for p in parts if p["type"] != "text"]}
        documents.append(document)
        media += message_media
        if len(media) > MAX_MEDIA:
            limit = f"a request takes at most {MAX_MEDIA} images, recordings and videos"
            raise InvalidInput.at(path, limit)
    return tuple(documents), tuple(media)
