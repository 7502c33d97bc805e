"""The messages of a conversation: as clients send them, as chat templates read them.

The items of the Responses API become such messages too. Parts of text are joined with line breaks,
as vLLM does for templates that take strings; beside images they stay parts.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct, to_builtins

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.images import MOST_PICTURES, ImageUrl, image_input
from server.openai.request_fields import FILLED, required
from worker.messages.generation import Chat, ImageInput

Role = Literal["system", "developer", "user", "assistant", "tool"]
TEXTS = ("text", "refusal")
IMAGE = "image_url"
PARTS = (*TEXTS, IMAGE)


def any_of(*needs: tuple[Document, list[str]]) -> Meta:
    """For the OpenAPI document: properties and which of them are required, beyond their types."""
    each = [{"properties": properties, "required": names} for properties, names in needs]
    return Meta(extra_json_schema={"anyOf": each})


# For the OpenAPI document.
FULL_PART = any_of(
    *(({"type": {"const": kind}, kind: {"type": "string"}}, [kind]) for kind in TEXTS),
    ({"type": {"const": IMAGE}, IMAGE: {"type": ["object", "string"]}}, [IMAGE]),
)
CALLING = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
FULL_MESSAGE = any_of(
    ({"content": {"type": ["string", "array"]}}, ["content"]), (CALLING, ["tool_calls"])
)


class TextPart(Struct):
    """Of a message, in either API. What is neither text nor an image is refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def read(self, path: str, kinds: Sequence[str], prefix: str = "") -> str:
        """Its text, if it is of one of the kinds; `prefix` begins the error otherwise."""
        if self.type not in kinds:
            only = f"{prefix}this model takes text, not {self.type[:50]!r}"
            raise InvalidInput.at(f"{path}.type", only)
        if self.type == "refusal":
            return required(self.refusal, f"{path}.refusal")
        return required(self.text, f"{path}.text")


class ContentPart(TextPart):
    type: Annotated[str, Meta(extra_json_schema={"enum": PARTS})]
    image_url: ImageUrl | str | None = None

    def image_input(self, path: str) -> ImageInput:
        url: ImageUrl | str | None = self.image_url
        given = ImageUrl(url) if isinstance(url, str) else required(url, f"{path}.{IMAGE}")
        return image_input(given.url, given.detail, path)


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(Struct):
    role: Role
    content: str | Annotated[list[Annotated[ContentPart, FULL_PART]], FILLED] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM names it

    def rendered(self, path: str) -> tuple[Document, list[ImageInput]]:
        """What the template gets, and the images that it stands for; `path` is what errors call
        this message."""
        content: str | list[Document] | None = None
        pictures: list[ImageInput] = []
        if isinstance(self.content, list):
            content, pictures = self._parts(self.content, path)
        elif self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidInput.at(f"{path}.content", "is required")
        else:
            content = self.content
        role = "system" if self.role == "developer" else self.role
        thoughts = self.reasoning_content or self.reasoning or self.reasoning_content
        if self.reasoning and self.reasoning != thoughts:
            raise InvalidInput.at(f"{path}.reasoning", "differs from reasoning_content")
        made: Document = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thoughts,
        }
        made = {key: value for key, value in made.items() if value is not None}
        if self.tool_calls:
            made["tool_calls"] = [to_builtins(call) for call in self.tool_calls]
        return {"role": role, "content": content, **made}, pictures

    def _parts(
        self, parts: list[ContentPart], path: str
    ) -> tuple[str | list[Document], list[ImageInput]]:
        """Content: text as long as there are no images."""
        made: list[Document] = []
        pictures: list[ImageInput] = []
        for n, part in enumerate(parts):
            here = f"{path}.content[{n}]"
            if part.type != IMAGE:
                made.append({"type": "text", "text": part.read(here, TEXTS)})
                continue
            if self.role != "user":
                raise InvalidInput.at(f"{here}.type", "images go into messages of the user alone")
            made.append({"type": "image"})
            pictures.append(part.image_input(here))
        if pictures:
            return made, pictures
        return "\n".join(part["text"] for part in made), []


Messages = Annotated[list[Annotated[Message, FULL_MESSAGE]], FILLED]


class Conversing(Protocol):
    """What a request says about how its conversation is rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def conversation(
    asked: Conversing,
    messages: list[Message],
    tools: Sequence[Document] | None,
    effort: str | None = None,
) -> Chat:
    prompted = asked.add_generation_prompt
    rendered, pictures = read_messages((f"messages[{n}]", each) for n, each in enumerate(messages))
    return Chat(
        rendered,
        tuple(tools or ()),
        asked.chat_template_kwargs or {},
        not asked.continue_final_message if prompted is None else prompted,
        bool(asked.continue_final_message),
        effort,
        images=pictures,
    )


def read_messages(
    messages: Iterable[tuple[str, Message]],
) -> tuple[tuple[Document, ...], tuple[ImageInput, ...]]:
    """What the template gets of messages, each after its path, and the images in them."""
    made: list[Document] = []
    pictures: list[ImageInput] = []
    for path, message in messages:
        document, more = message.rendered(path)
        made.append(document)
        pictures += more
        if len(pictures) > MOST_PICTURES:
            raise InvalidInput.at(path, f"a request takes at most {MOST_PICTURES} images")
    return tuple(made), tuple(pictures)
