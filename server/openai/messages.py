"""Chat messages as clients send them, and as chat templates read them.

The Responses API's items become such messages too (responses/items.py). Parts of text are joined
with line breaks, as vLLM does for templates that take strings. This model takes text only, so that
other parts are refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, to_builtins

from batching.errors import InvalidInput
from server.http.json import Document
from worker.protocol import Chat

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("text", "refusal")


def any_of(*needs: tuple[Document, list[str]]) -> Meta:
    """For the OpenAPI document: properties and which of them are required, beyond their types."""
    each = [{"properties": properties, "required": names} for properties, names in needs]
    return Meta(extra_json_schema={"anyOf": each})


FULL_PART = any_of(
    *(({"type": {"const": kind}, kind: {"type": "string"}}, [kind]) for kind in PARTS)
)
CALLING = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
FULL_MESSAGE = any_of(
    ({"content": {"type": ["string", "array"]}}, ["content"]), (CALLING, ["tool_calls"])
)
FILLED = Meta(extra_json_schema={"minItems": 1})


class Part(Struct):
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


class ContentPart(Part):
    type: Annotated[str, Meta(extra_json_schema={"enum": PARTS})]


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(Struct):
    role: Annotated[str, Meta(extra_json_schema={"enum": ROLES})]
    content: str | Annotated[list[Annotated[ContentPart, FULL_PART]], FILLED] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM names it

    def rendered(self, path: str) -> Document:
        """What the template gets; `path` is what errors call this message."""
        one_of(ROLES, self.role, f"{path}.role")
        content = self.content
        if isinstance(content, list):
            if not content:
                raise InvalidInput.at(f"{path}.content", "must not be empty")
            parts = enumerate(content)
            content = "\n".join(part.read(f"{path}.content[{n}]", PARTS) for n, part in parts)
        elif content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidInput.at(f"{path}.content", "is required")
        role = "system" if self.role == "developer" else self.role
        thoughts = self.reasoning_content or self.reasoning or self.reasoning_content
        if self.reasoning and self.reasoning != thoughts:
            raise InvalidInput.at(f"{path}.reasoning", "differs from reasoning_content")
        made: Document = {"role": role, "content": content}
        for key, value in (
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
            ("reasoning_content", thoughts),
        ):
            if value is not None:
                made[key] = value
        if self.tool_calls:
            made["tool_calls"] = [to_builtins(call) for call in self.tool_calls]
        return made


Messages = Annotated[list[Annotated[Message, FULL_MESSAGE]], FILLED]


def conversation(
    messages: list[Message],
    tools: list[Document] | None,
    template_kwargs: Document | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    effort: str | None = None,
) -> Chat:
    if not messages:
        raise InvalidInput.at("messages", "must not be empty")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return Chat(
        tuple([each.rendered(f"messages[{n}]") for n, each in enumerate(messages)]),
        tuple(tools or ()),
        template_kwargs or {},
        add_generation_prompt,
        bool(continue_final_message),
        effort,
    )


def one_of(known: Sequence[str], value: str, path: str) -> None:
    if value not in known:
        must = f"must be one of {', '.join(known)}, not {value[:50]!r}"
        raise InvalidInput.at(path, must)


def required(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidInput.at(path, "is required")
    return value
