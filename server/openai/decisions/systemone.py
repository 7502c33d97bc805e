"""The body of `POST /v1/systemone`, which transformers serve has, and the document of its answers.

A state, of text or any JSON, and named questions about it.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.core.answer_stream import UsageCounts
from server.http.json import Document
from server.openai.decisions import confidence
from server.openai.decisions.questions import described, written
from server.openai.request_fields import Salt
from worker.messages.decisions import MAX_OPTIONS, DecisionInput, Question

MOST_NAMED = 64

Content: TypeAlias = str | dict[str, Any] | list[Any]
ASSETS = Meta(extra_json_schema={"maxProperties": 0}, description="Images: not implemented")


class NamedNoul(Struct, tag_field="type", tag="noul"):
    """How likely the answer is yes."""

    instructions: Content | None = None
    criteria: dict[Literal["true", "false"], Content | None] | None = None

    def asked(self, path: str) -> Question:
        told: Mapping[Any, Content | None] = self.criteria or {}
        options = tuple(shown(told.get(each), path) for each in ("true", "false"))
        return Question("predicate", shown(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> Document:
        return {"type": "noul", "noul": probabilities[0]}


class NamedChoice(Struct, tag_field="type", tag="choice"):
    criteria: Annotated[dict[str, Content | None], Meta(min_length=1, max_length=MAX_OPTIONS)]
    instructions: Content | None = None

    def asked(self, path: str) -> Question:
        options = tuple(described(name, shown(told, path)) for name, told in self.criteria.items())
        return Question("choice", shown(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> Document:
        names = list(self.criteria)
        return {
            "type": "choice",
            "choice": names[confidence.likeliest(probabilities)],
            "confidence": confidence.of_choice(probabilities),
            "probabilities": dict(zip(names, probabilities, strict=True)),
        }


class NamedScore(Struct, tag_field="type", tag="score"):
    """The levels, lowest first."""

    criteria: Annotated[list[Content], Meta(min_length=1, max_length=MAX_OPTIONS)]
    instructions: Content | None = None

    def asked(self, path: str) -> Question:
        options = tuple(shown(level, path) for level in self.criteria)
        return Question("score", shown(self.instructions, path), options, path)

    def answer(self, probabilities: Sequence[float]) -> Document:
        levels = list(map(str, range(len(probabilities))))
        return {
            "type": "score",
            "score": confidence.mean_level(probabilities),
            "legend": dict(zip(levels, map(fragment, self.criteria), strict=True)),
            "confidence": confidence.of_score(probabilities),
            "probabilities": dict(zip(levels, probabilities, strict=True)),
        }


NamedQuestion: TypeAlias = NamedNoul | NamedChoice | NamedScore


class SystemOneRequest(Struct, kw_only=True):
    model: str | None = None
    state: Content
    questions: Annotated[dict[str, NamedQuestion], Meta(min_length=1, max_length=MOST_NAMED)]
    assets: Annotated[dict[str, Any], ASSETS] | None = None
    cache_salt: Salt | None = None

    def decision_input(self) -> DecisionInput:
        """InvalidInput for what cannot be asked."""
        if self.assets:
            raise InvalidInput.at("assets", "this model takes text, no images")
        message = {"role": "user", "content": shown(self.state, "state")}
        asked = (each.asked(f"questions.{name}") for name, each in self.questions.items())
        return DecisionInput((message,), tuple(asked), param="state")

    def document(self, probabilities: Sequence[Sequence[float]], usage: UsageCounts) -> Document:
        """From the probabilities of each question's options, in order."""
        pairs = zip(self.questions.items(), probabilities, strict=True)
        return {
            "model": self.model,
            "answers": {name: each.answer(found) for (name, each), found in pairs},
            "usage": {"input_tokens": usage.prompt, "output_tokens": 0},
        }


def shown(given: Content | None, path: str) -> str:
    return "" if given is None else written(given, path)


def fragment(given: Content) -> str | orjson.Fragment:
    """A level in the answer: orjson writes JSON less deep than it reads it."""
    return given if isinstance(given, str) else orjson.Fragment(written(given, "criteria"))
