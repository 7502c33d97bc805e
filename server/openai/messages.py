"""A chat message as clients send it, and as chat templates read it.

Parts of text are joined with line breaks, as vLLM does for templates that take strings. This
model takes text only, so that other parts are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, to_builtins

from batching.errors import InvalidInput

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("text", "refusal")
# For the OpenAPI document: what a part and a message need, beyond their fields' types.
FULL_PART = Meta(
    extra_json_schema={
        "anyOf": [
            {"properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": [kind]}
            for kind in PARTS
        ]
    }
)
FULL_MESSAGE = Meta(
    extra_json_schema={
        "anyOf": [
            {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
            {
                "properties": {
                    "role": {"const": "assistant"},
                    "tool_calls": {"type": "array", "minItems": 1},
                },
                "required": ["tool_calls"],
            },
        ]
    }
)
FILLED = Meta(extra_json_schema={"minItems": 1})


class ContentPart(Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": PARTS})]
    text: str | None = None
    refusal: str | None = None


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

    def rendered(self, path: str) -> Mapping[str, Any]:
        """What the template gets; `path` is what errors call this message."""
        if self.role not in ROLES:
            known = f"{path}.role: must be one of {', '.join(ROLES)}, not {self.role[:50]!r}"
            raise InvalidInput(known, f"{path}.role")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidInput(f"{path}.content: is required", f"{path}.content")
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(f"{path}.content"),
        }
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                made[key] = value
        if self.tool_calls:
            made["tool_calls"] = [to_builtins(call) for call in self.tool_calls]
        return made

    def _text(self, path: str) -> str | None:
        if not isinstance(self.content, list):
            return self.content
        if not self.content:
            raise InvalidInput(f"{path}: must not be empty", path)
        texts = []
        for n, part in enumerate(self.content):
            if part.type not in PARTS:
                only = f"{path}[{n}].type: this model takes text, not {part.type[:50]!r}"
                raise InvalidInput(only, f"{path}[{n}].type")
            text = part.text if part.type == "text" else part.refusal
            if text is None:
                param = f"{path}[{n}].{part.type}"
                raise InvalidInput(f"{param}: is required", param)
            texts.append(text)
        return "\n".join(texts)


Messages = Annotated[list[Annotated[Message, FULL_MESSAGE]], FILLED]
