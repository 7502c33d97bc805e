"""The questions of `POST /v1/decisions`: as clients send them, as the model gets them, and answers.

AnyQuestion  --to_question-->  Question (worker)  --probabilities, answer-->  response

Confidence is 0 for equal probabilities and 1 for certainty, as in transformers' `decision`
pipeline.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.messages import TextPart
from server.apis.openai.request_fields import NON_EMPTY, required
from worker.messages.decisions import MAX_OPTIONS, Question

PART_TYPES = ("input_text", "input_json")
OPTIONS = Meta(min_length=2, max_length=MAX_OPTIONS)


class QuestionPart(TextPart):
    """Text, or JSON that the model gets as text."""

    type: Annotated[str, Meta(extra_json_schema={"enum": PART_TYPES})]
    data: dict[str, Any] | list[dict[str, Any]] | None = None

    def to_text(self, path: str) -> str:
        if self.type == "input_json":
            path = f"{path}.data"
            return as_text(required(self.data, path), path)
        return self.read(path, PART_TYPES)


QuestionText = str | Annotated[list[QuestionPart], NON_EMPTY]


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    name: str | None
    probability: float


class PredicateQuestion(Struct, tag_field="type", tag="predicate"):
    instructions: QuestionText
    name: str | None = None

    def to_question(self, path: str) -> Question:
        instructions = join_parts(self.instructions, f"{path}.instructions")
        return Question("noul", instructions, ("", ""), path)

    def answer(self, probabilities: Sequence[float]) -> PredicateAnswer:
        return PredicateAnswer(self.name, probabilities[0])


class ChoiceProbability(Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ChoiceOption(Struct):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(Struct, tag_field="type", tag="choice"):
    instructions: QuestionText
    choices: Annotated[list[ChoiceOption], OPTIONS]
    name: str | None = None

    def to_question(self, path: str) -> Question:
        values = {(type(option.value), option.value) for option in self.choices}
        if len(values) < len(self.choices):
            raise InvalidInput.at(f"{path}.choices", "must have different values")
        options = tuple(
            described(as_text(option.value, path), option.description) for option in self.choices
        )
        instructions = join_parts(self.instructions, f"{path}.instructions")
        return Question("choice", instructions, options, path)

    def answer(self, probabilities: Sequence[float]) -> ChoiceAnswer:
        values = [option.value for option in self.choices]
        return ChoiceAnswer(
            self.name,
            values[likeliest(probabilities)],
            choice_confidence(probabilities),
            list(map(ChoiceProbability, values, probabilities)),
        )


class ScoreProbability(Struct):
    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class ScoreLevel(Struct):
    label: str
    description: str | None = None


class ScoreQuestion(Struct, tag_field="type", tag="score"):
    """The first level is 0."""

    instructions: QuestionText
    levels: Annotated[list[ScoreLevel], OPTIONS]
    name: str | None = None

    def to_question(self, path: str) -> Question:
        options = tuple(described(level.label, level.description) for level in self.levels)
        instructions = join_parts(self.instructions, f"{path}.instructions")
        return Question("score", instructions, options, path)

    def answer(self, probabilities: Sequence[float]) -> ScoreAnswer:
        labels = [level.label for level in self.levels]
        return ScoreAnswer(
            self.name,
            mean_level(probabilities),
            score_confidence(probabilities),
            list(map(ScoreProbability, range(len(labels)), labels, probabilities)),
        )


AnyQuestion: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion
AnyAnswer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer


def join_parts(parts: QuestionText, path: str) -> str:
    """Return the text of parts, joined like those of a message."""
    if isinstance(parts, str):
        return parts
    return "\n".join(part.to_text(f"{path}[{n}]") for n, part in enumerate(parts))


def described(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def as_text(value: Any, path: str) -> str:
    """Return a text as it is, any other value as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidInput.at(path, "is nested too deeply") from None


# ── answers ──


def likeliest(probabilities: Sequence[float]) -> int:
    """Return the index of the highest probability, the first of equals."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Return how far the highest probability is above an equal share."""
    share = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - share) / (1 - share)) if share < 1 else 1.0


def score_confidence(probabilities: Sequence[float]) -> float:
    """Return 1 - d/u: d is the mean distance of levels from the likeliest, u that of equal
    probabilities from the middle level."""
    count, best = len(probabilities), likeliest(probabilities)
    distance = sum(
        probability * abs(level - best) for level, probability in enumerate(probabilities)
    )
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform) if uniform else 1.0


def mean_level(probabilities: Sequence[float]) -> float:
    """Return the expected level; levels count from 0."""
    return sum(level * probability for level, probability in enumerate(probabilities))
