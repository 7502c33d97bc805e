"""LoRA adapters of language models, as requests name them. No torch."""

import itertools
from dataclasses import dataclass, field
from typing import Protocol

from batching.errors import OnequeueError

_numbers = itertools.count(1)


class InvalidAdapter(OnequeueError):
    """The adapter cannot be served; the message names the file or the field, and the reason."""


class AdapterWeights(Protocol):
    """The weights of an adapter on the device of its base."""

    @property
    def nbytes(self) -> int: ...


@dataclass(eq=False)
class Adapter:
    """An adapter of a language model, its base.

    The requests that name it hold it, so its memory is freed after the last of them. `number`: no
    other adapter of the process has it, so that their cached prefixes stay apart.
    """

    name: str
    path: str  # of its folder, from `root` on or absolute
    root: str  # the folder that it must lie inside
    number: int = field(default_factory=lambda: next(_numbers))
    weights: AdapterWeights | None = None  # while the base is loaded
    failure: str = ""  # why it could not be loaded with its base

    @property
    def unusable_reason(self) -> str:
        """Return why no request can use it now; empty if it is loaded."""
        if self.weights is not None:
            return ""
        reason = f"could not be loaded: {self.failure}" if self.failure else "was unloaded"
        return f"the adapter {self.name!r} {reason}"
