"""Which tokens the rows of a step allow, computed while the model runs.

The bits come from llguidance, in a thread of their own that holds no lock of Python's meanwhile.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from worker.sampling import Allowed

Bits = NDArray[np.int32]  # [rows, words], a bit a token
BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the row that a choice is at allows, and those after each drafted token: what its
    matcher says, or any token."""

    matcher: LLMatcher | None = None
    drafts: tuple[int, ...] = ()
    also: int | None = None  # may come as well, in the first row
    only: int | None = None  # nothing else may come
    no_end: bool = False  # it may not end here


class Masks:
    """`width`: of the model's output. `ends`: the tokens that end a sequence."""

    def __init__(self, width: int, ends: Sequence[int]) -> None:
        self._width, self._ends = width, ends
        self._executor = LLExecutor(1)
        self._aside = ThreadPoolExecutor(1, "masks")

    def begin(self, wanted: Sequence[tuple[int, Wanted]]) -> "Future[Allowed] | None":
        """For choices by the row that each is at; their drafts' rows follow."""
        return self._aside.submit(self._allowed, wanted) if wanted else None

    def _allowed(self, wanted: Sequence[tuple[int, Wanted]]) -> Allowed:
        rows = [first + n for first, each in wanted for n in range(1 + len(each.drafts))]
        bits: Bits = np.full((len(rows), (self._width + 31) // 32), -1, np.int32)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        at = 0
        for _, each in wanted:
            if each.matcher is not None and each.drafts:
                drafted.append((each.matcher, at, list(each.drafts)))
            elif each.matcher is not None:
                plain.append((each.matcher, at))
            at += 1 + len(each.drafts)
        where = bits.ctypes.data, bits.strides[0], len(bits)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        at = 0
        for _, each in wanted:
            self._edit(bits[at : at + 1 + len(each.drafts)], each)
            at += 1 + len(each.drafts)
        tokens = np.unpackbits(bits.view(np.uint8), axis=1, count=self._width, bitorder="little")
        return Allowed(rows, torch.from_numpy(tokens.view(np.bool_)))

    def _edit(self, bits: Bits, each: Wanted) -> None:
        if each.only is not None:
            bits[:] = 0
        for token in (each.only, each.also):
            if token is not None:
                bits[0, token // 32] |= BIT[token % 32]
        for end in self._ends if each.no_end else ():
            bits[:, end // 32] &= ~BIT[end % 32]
