"""The questions of `POST /v1/decisions`: as clients send them, as they are asked, and the answers.

AnyQuestion  --asked-->  what the model gets  --answer-->  what the client gets
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.openai.decisions import confidence
from server.openai.messages import TextPart
from server.openai.request_fields import FILLED, required
from server.openai.response_schemas import (
    ChoiceAnswer,
    ChoiceProbability,
    PredicateAnswer,
    ScoreAnswer,
    ScoreProbability,
)
from worker.messages.decisions import MAX_OPTIONS, Question

KINDS = ("input_text", "input_json")
SOME = Meta(min_length=2, max_length=MAX_OPTIONS)


class QuestionPart(TextPart):
    """Text, or JSON that is shown as such."""

    type: Annotated[str, Meta(extra_json_schema={"enum": KINDS})]
    data: dict[str, Any] | list[dict[str, Any]] | None = None

    def shown(self, path: str) -> str:
        if self.type == "input_json":
            data = f"{path}.data"
            return written(required(self.data, data), data)
        return self.read(path, KINDS)


Parts = str | Annotated[list[QuestionPart], FILLED]


class PredicateQuestion(Struct, tag_field="type", tag="predicate"):
    instructions: Parts
    name: str | None = None

    def asked(self, path: str) -> Question:
        instructions = shown(self.instructions, f"{path}.instructions")
        return Question("predicate", instructions, ("", ""), path)

    def answer(self, probabilities: Sequence[float]) -> PredicateAnswer:
        return PredicateAnswer(self.name, probabilities[0])


class ChoiceOption(Struct):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(Struct, tag_field="type", tag="choice"):
    instructions: Parts
    choices: Annotated[list[ChoiceOption], SOME]
    name: str | None = None

    def asked(self, path: str) -> Question:
        values = {(type(each.value), each.value) for each in self.choices}  # True is not "true"
        if len(values) < len(self.choices):
            raise InvalidInput.at(f"{path}.choices", "must differ from each other")
        options = tuple(
            described(written(each.value, path), each.description) for each in self.choices
        )
        return Question("choice", shown(self.instructions, f"{path}.instructions"), options, path)

    def answer(self, probabilities: Sequence[float]) -> ChoiceAnswer:
        values = [each.value for each in self.choices]
        return ChoiceAnswer(
            self.name,
            values[confidence.likeliest(probabilities)],
            confidence.of_choice(probabilities),
            list(map(ChoiceProbability, values, probabilities)),
        )


class ScoreLevel(Struct):
    label: str
    description: str | None = None


class ScoreQuestion(Struct, tag_field="type", tag="score"):
    """The first level counts as 0."""

    instructions: Parts
    levels: Annotated[list[ScoreLevel], SOME]
    name: str | None = None

    def asked(self, path: str) -> Question:
        options = tuple(described(each.label, each.description) for each in self.levels)
        return Question("score", shown(self.instructions, f"{path}.instructions"), options, path)

    def answer(self, probabilities: Sequence[float]) -> ScoreAnswer:
        labels = [each.label for each in self.levels]
        return ScoreAnswer(
            self.name,
            confidence.mean_level(probabilities),
            confidence.of_score(probabilities),
            list(map(ScoreProbability, range(len(labels)), labels, probabilities)),
        )


AnyQuestion: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


def shown(given: Parts, path: str) -> str:
    """Parts are joined as those of a message."""
    if isinstance(given, str):
        return given
    return "\n".join(part.shown(f"{path}[{n}]") for n, part in enumerate(given))


def described(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def written(value: Any, path: str) -> str:
    """A text as it is, else JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidInput.at(path, "is nested too deeply") from None
