"""Messages of decisions: questions about one input, and the prompt text of a question.

No token is generated. The options of a question have labels, and its response is the probability of
each label as the next token, among the labels alone. The prompt is worded as by transformers'
`decision` pipeline, so that the results are equal.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.messages.adapters import Adapter
from worker.messages.generation import MediaInput

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
YES_NO = ("Yes", "No")
NOUL_OPTIONS = ("true", "false")
LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Question:
    """One question. A noul has two options, true and false, whose texts may be empty."""

    kind: Literal["noul", "choice", "score"]
    instructions: str
    options: tuple[str, ...]
    param: str  # the field that errors about it name
    # for a decision template: the name, the instructions and the criteria, as in the request
    source: tuple[str, Any, Any] = ("", None, None)

    def text(self, labels: Sequence[str], noul_options: Sequence[str] = NOUL_OPTIONS) -> str:
        """Return the text that follows the input in the prompt."""
        if self.kind == "noul":
            conditions = self._conditions(labels, noul_options)
            return self._join(conditions, f"Answer {' or '.join(labels)} only.")
        options = [f"{label}. {text}" for label, text in zip(labels, self.options, strict=True)]
        kind = "letter" if "".join(labels) == LETTERS[: len(labels)] else "label"
        noun = "option" if self.kind == "choice" else "level"
        labels_range = f"{labels[0]} to {labels[-1]}"
        return self._join(
            options, f"Answer with the {kind} of the {noun} that fits best ({labels_range}) only."
        )

    def _conditions(self, labels: Sequence[str], names: Sequence[str]) -> list[str]:
        """Return a line per label that needs a condition."""
        needs_none = tuple(labels) == YES_NO
        conditions = dict(zip(NOUL_OPTIONS, self.options, strict=True))
        texts = [conditions[name] or ("" if needs_none else name) for name in names]
        return [f"{label}: {text}" for label, text in zip(labels, texts, strict=True) if text]

    def _join(self, options: Sequence[str], request: str) -> str:
        return "\n".join([*filter(None, [self.instructions]), *options]) + f"\n{request}"


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """Messages, and the questions about them. A delta has the probabilities of one question's
    options; the item's future resolves to None after the last."""

    messages: tuple[Mapping[str, Any], ...]  # as in a Chat
    questions: tuple[Question, ...]
    param: str = "input"  # the field that errors about the messages name
    state: Any = None  # as a decision template reads it; None: the request has messages
    # images by their placeholders in the state and the questions
    assets: Mapping[str, MediaInput] = field(default_factory=dict)
    adapter: Adapter | None = None  # None: the model as it is
    cache_namespace: bytes = b""  # cached prefixes and images are shared within it alone

    @property
    def n(self) -> int:
        """The number of responses."""
        return len(self.questions)
