"""The request of `POST /v1/decisions`: its conversion to the model's input, and the response.

Its input has items of the Responses API and is converted as there (items.py); its
questions are those of questions.py.
"""

from collections.abc import Container, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.decisions.questions import AnyAnswer, AnyQuestion, QuestionPart, as_text
from server.apis.openai.messages import to_template_messages
from server.apis.openai.request_fields import NON_EMPTY, CacheOptions, NonEmpty, Salt
from server.apis.openai.responses.events import ResponseUsage, response_usage
from server.apis.openai.responses.items import (
    MESSAGE_PARTS,
    InputPart,
    Item,
    ItemRole,
    to_documents,
    to_messages,
)
from server.core.delta_stream import UsageCounts
from server.http.json import Document, parse_json
from server.http.operation import Operation
from worker.messages.decisions import MAX_QUESTIONS, DecisionInput

DecisionItemType = Literal["message", "function_call", "function_call_output"]
CustomToolType = Literal["custom_tool_call", "custom_tool_call_output"]


class ItemPart(QuestionPart):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["input_json", *MESSAGE_PARTS]})]

    def read(self, path: str, kinds: Container[str], prefix: str = "") -> str:
        is_json = self.type == "input_json"
        return self.to_text(path) if is_json else super().read(path, kinds, prefix)

    def media_document(self, path: str) -> Document:
        raise InvalidInput.at(f"{path}.type", f"this model takes text, not {self.type!r}")


class DecisionItem(Struct):
    type: DecisionItemType | CustomToolType | None = "message"
    role: ItemRole | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None

    def to_item(self, path: str) -> Item:
        fields: Document = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.arguments:
            fields["arguments"] = unescaped(self.arguments, f"{path}.arguments")
        return Item(**fields)


def unescaped(arguments: str, path: str) -> str:
    """Return JSON without \\u escapes, which would hide special tokens; other text unchanged."""
    try:
        value = parse_json(arguments.encode()) if "\\u" in arguments else arguments
    except InvalidInput:
        return arguments
    return as_text(value, path)


class Decision(Struct):
    answers: list[AnyAnswer]
    model: str | None
    usage: ResponseUsage


class DecisionRequest(Struct, kw_only=True):
    model: str | None = None
    input: NonEmpty | Annotated[list[DecisionItem], NON_EMPTY]
    questions: Annotated[list[AnyQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    cache_salt: Salt | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def decision_input(self) -> DecisionInput:
        """Return the model's input, or raise InvalidInput."""
        items: str | list[Item]
        if isinstance(self.input, str):
            items = self.input
        else:
            items = [item.to_item(f"input[{n}]") for n, item in enumerate(self.input)]
        messages = to_messages((), to_documents(items, lambda ids: {}))
        questions = tuple(
            question.to_question(f"questions[{n}]") for n, question in enumerate(self.questions)
        )
        return DecisionInput(to_template_messages(messages)[0], questions)

    def response(self, probabilities: Sequence[Sequence[float]], usage: UsageCounts) -> Decision:
        """Return the response, from the probabilities of each question's options, in order."""
        pairs = zip(self.questions, probabilities, strict=True)
        answers = [question.answer(options) for question, options in pairs]
        return Decision(answers, self.model, response_usage(usage))


DECISIONS = Operation(
    "POST /v1/decisions",
    "The probabilities of answers to questions about an input",
    Decision,
    DecisionRequest,
)
