"""`POST /v1/systemone`, an endpoint of `transformers serve`: its request, questions and answers.

A request has a state, which is text or any JSON, and named questions about it. Assets are images,
by the placeholders that they replace in the texts of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, cast

from msgspec import Meta, Raw, Struct

from server.apis.openai.decisions.questions import (
    as_text,
    choice_confidence,
    described,
    likeliest,
    mean_level,
    score_confidence,
)
from server.apis.openai.request_fields import NonEmpty, Salt
from server.core.delta_stream import UsageCounts
from server.http.operation import Operation
from worker.media.data_urls import to_bytes
from worker.messages.decisions import MAX_OPTIONS, NOUL_OPTIONS, DecisionInput, Question
from worker.messages.generation import MediaInput

MAX_NAMED = 64

Content: TypeAlias = str | dict[str, Any] | list[Any]
ASSETS = Meta(max_length=4, description="Images by their placeholders")


class Asset(Struct):
    data_base64: str
    type: Literal["image"] | None = "image"
    format: str | None = None  # read from the data


class NamedNoulAnswer(Struct, tag_field="type", tag="noul"):
    noul: float


class NamedNoul(Struct, tag_field="type", tag="noul"):
    """A yes-no question; its answer is the probability of yes."""

    instructions: Content | None = None
    criteria: dict[Literal["true", "false"], Content | None] | None = None

    def to_question(self, path: str) -> Question:
        criteria: Mapping[Any, Content | None] = self.criteria or {}
        options = tuple(optional_text(criteria.get(key), path) for key in NOUL_OPTIONS)
        return Question("noul", optional_text(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> NamedNoulAnswer:
        return NamedNoulAnswer(probabilities[0])


class NamedChoiceAnswer(Struct, tag_field="type", tag="choice"):
    choice: str
    confidence: float
    probabilities: dict[str, float]


class NamedChoice(Struct, tag_field="type", tag="choice"):
    criteria: Annotated[dict[str, Content | None], Meta(min_length=1, max_length=MAX_OPTIONS)]
    instructions: Content | None = None

    def to_question(self, path: str) -> Question:
        options = tuple(
            described(name, optional_text(criterion, path))
            for name, criterion in self.criteria.items()
        )
        return Question("choice", optional_text(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> NamedChoiceAnswer:
        names = list(self.criteria)
        return NamedChoiceAnswer(
            names[likeliest(probabilities)],
            choice_confidence(probabilities),
            dict(zip(names, probabilities, strict=True)),
        )


class NamedScoreAnswer(Struct, tag_field="type", tag="score"):
    score: float
    legend: Mapping[str, Content]
    confidence: float
    probabilities: dict[str, float]


class NamedScore(Struct, tag_field="type", tag="score"):
    """The levels, lowest first."""

    criteria: Annotated[list[Content], Meta(min_length=1, max_length=MAX_OPTIONS)]
    instructions: Content | None = None

    def to_question(self, path: str) -> Question:
        options = tuple(optional_text(level, path) for level in self.criteria)
        return Question("score", optional_text(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> NamedScoreAnswer:
        levels = list(map(str, range(len(probabilities))))
        return NamedScoreAnswer(
            mean_level(probabilities),
            dict(zip(levels, map(legend_entry, self.criteria), strict=True)),
            score_confidence(probabilities),
            dict(zip(levels, probabilities, strict=True)),
        )


NamedQuestion: TypeAlias = NamedNoul | NamedChoice | NamedScore


class StateUsage(Struct):
    input_tokens: int
    output_tokens: int


class SystemOne(Struct):
    model: str | None
    answers: dict[str, NamedNoulAnswer | NamedChoiceAnswer | NamedScoreAnswer]
    usage: StateUsage


class SystemOneRequest(Struct, kw_only=True):
    model: str | None = None
    state: Content
    questions: Annotated[dict[str, NamedQuestion], Meta(min_length=1, max_length=MAX_NAMED)]
    assets: Annotated[dict[NonEmpty, Asset], ASSETS] | None = None
    cache_salt: Salt | None = None

    def decision_input(self) -> DecisionInput:
        """Return the model's input, or raise InvalidInput."""
        message = {"role": "user", "content": as_text(self.state, "state")}
        questions = []
        for name, question in self.questions.items():
            source = name, question.instructions, question.criteria
            questions.append(replace(question.to_question(f"questions.{name}"), source=source))
        assets = {}
        for name, asset in (self.assets or {}).items():
            path = f"assets.{name}"
            assets[name] = MediaInput(to_bytes(asset.data_base64, path), "auto", path)
        return DecisionInput((message,), tuple(questions), "state", self.state, assets)

    def response(self, probabilities: Sequence[Sequence[float]], usage: UsageCounts) -> SystemOne:
        """Return the response, from the probabilities of each question's options, in order."""
        pairs = zip(self.questions.items(), probabilities, strict=True)
        answers = {name: question.answer(options) for (name, question), options in pairs}
        return SystemOne(self.model, answers, StateUsage(usage.prompt, 0))


SYSTEM_ONE = Operation(
    "POST /v1/systemone",
    "The probabilities of answers to named questions about a state",
    SystemOne,
    SystemOneRequest,
)


def optional_text(content: Content | None, path: str) -> str:
    return "" if content is None else as_text(content, path)


def legend_entry(level: Content) -> Content:
    """Return a level as the response has it: JSON with the spaces of `json.dumps`."""
    if isinstance(level, str):
        return level
    return cast(Content, Raw(as_text(level, "criteria").encode()))
