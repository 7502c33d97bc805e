"""Questions about one input, as they cross to the worker, and the words in which they are asked.

No token is generated: the options of a question have labels, and its answer is how likely each
label is to be said first, if one of them is. Input and question are put as transformers' `decision`
pipeline puts them, so that the answers are the same.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MOST_QUESTIONS = 400
MOST_OPTIONS = 255
YES_NO = ("Yes", "No")
LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Question:
    """`options` are what the labels stand for. Those of a predicate are two, for true and false,
    and may be empty."""

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[str, ...]
    param: str  # the field of the request that errors about it name

    def asked(self, labels: Sequence[str]) -> str:
        """What follows the input."""
        if self.kind == "predicate":
            return self._lines(self._conditions(labels), f"Answer {' or '.join(labels)} only.")
        options = [f"{label}. {text}" for label, text in zip(labels, self.options, strict=True)]
        kind = "letter" if "".join(labels) == LETTERS[: len(labels)] else "label"
        of = "option" if self.kind == "choice" else "level"
        which = f"{labels[0]} to {labels[-1]}"
        return self._lines(
            options, f"Answer with the {kind} of the {of} that fits best ({which}) only."
        )

    def _conditions(self, labels: Sequence[str]) -> list[str]:
        """When to say which label, where that is not plain."""
        plain = ("", "") if tuple(labels) == YES_NO else ("true", "false")
        told = [given or word for given, word in zip(self.options, plain, strict=True)]
        return [f"{label}: {text}" for label, text in zip(labels, told, strict=True) if text]

    def _lines(self, options: Sequence[str], request: str) -> str:
        return "\n".join([*filter(None, [self.instructions]), *options]) + f"\n{request}"


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """Messages, and questions that are each asked behind them. An answer's delta has the
    probabilities of its question's options; the item's future resolves to None after the last."""

    messages: tuple[Mapping[str, Any], ...]  # as in a Chat
    questions: tuple[Question, ...]
    param: str = "input"  # the field of the request that errors about the messages name
    background: bool = False

    @property
    def n(self) -> int:
        """How many answers there will be."""
        return len(self.questions)
