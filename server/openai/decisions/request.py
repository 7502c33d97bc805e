"""The body of `POST /v1/decisions`, checked, as a DecisionInput; and its answers' document."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.core.answer_stream import UsageCounts
from server.http.json import Document, parse_json, to_json
from server.openai.decisions.questions import AnyQuestion, QuestionPart, written
from server.openai.messages import read_messages
from server.openai.request_fields import FILLED, CacheOptions, Filled, Salt, required
from server.openai.responses.events import usage_document
from server.openai.responses.items import (
    IMAGE,
    MESSAGE_PARTS,
    InputPart,
    Item,
    Role,
    documents,
    messages,
)
from worker.messages.decisions import MAX_QUESTIONS, DecisionInput

# As a response has them, and what that has instead of calls of tools that take a text.
Kind = Literal["message", "function_call", "function_call_output"]
Custom = Literal["custom_tool_call", "custom_tool_call_output"]


class ItemPart(QuestionPart):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["input_json", *MESSAGE_PARTS]})]

    def plain(self, path: str) -> InputPart:
        if self.type == "input_json":
            return InputPart("input_text", self.shown(path))
        if self.type == IMAGE:
            self.read(path, MESSAGE_PARTS)  # decisions are about text
        return InputPart(self.type, self.text, self.refusal)


class DecisionItem(Struct):
    type: Kind | Custom = "message"
    role: Role | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None

    def plain(self, path: str) -> Item:
        """What a response would be given."""
        arguments = self.arguments and unescaped(self.arguments, f"{path}.arguments")
        if self.type == "custom_tool_call":
            arguments = to_json({"input": required(self.input, f"{path}.input")}).decode()
        plain: Any = self.type.replace("custom_tool", "function")
        return Item(
            plain,
            role=self.role,
            content=self._plain_content(f"{path}.content"),
            call_id=self.call_id,
            name=self.name,
            arguments=arguments,
            output=self.output,
        )

    def _plain_content(self, path: str) -> str | list[InputPart] | None:
        if not isinstance(self.content, list):
            return self.content
        return [each.plain(f"{path}[{n}]") for n, each in enumerate(self.content)]


def unescaped(arguments: str, path: str) -> str:
    """JSON whose escapes hide nothing that is looked for in texts; what is none is as it was."""
    try:
        parsed = parse_json(arguments.encode()) if "\\u" in arguments else arguments
    except InvalidInput:
        return arguments
    return written(parsed, path)  # orjson writes JSON less deep than it reads it


class DecisionRequest(Struct, kw_only=True):
    model: str | None = None
    input: Filled | Annotated[list[DecisionItem], FILLED]
    questions: Annotated[list[AnyQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    cache_salt: Salt | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def decision_input(self) -> DecisionInput:
        """InvalidInput for what cannot be asked."""
        given: str | list[Item]
        if isinstance(self.input, str):
            given = self.input
        else:
            given = [each.plain(f"input[{n}]") for n, each in enumerate(self.input)]
        shown = messages((), documents(given, lambda ids: {}))
        return DecisionInput(
            read_messages(shown)[0],
            tuple(each.asked(f"questions[{n}]") for n, each in enumerate(self.questions)),
        )

    def document(self, probabilities: Sequence[Sequence[float]], usage: UsageCounts) -> Document:
        """From the probabilities of each question's options, in order."""
        pairs = zip(self.questions, probabilities, strict=True)
        return {
            "answers": [each.answer(found) for each, found in pairs],
            "model": self.model,
            "usage": usage_document(usage),
        }
