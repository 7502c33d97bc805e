"""The model runner for what is not paged: the forward and the cache that transformers gives it.

Sequences that begin together share a forward from then on, as a group, if the model is found at
load to run them so: padded on the left, of one length only, or not at all. Whether what it keeps
between steps is right is asked of the model too; without that, texts are run anew for each token.
Prompts run whole. A sequence that was put back has lost what was kept, and begins anew.
"""

import inspect
import logging
from collections import abc
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from batching.block_pool import BlockTable
from batching.errors import DeviceLost
from batching.sequence import Batch, Chunk, Sequence
from worker.device.async_copy import fill_placeholders, to_device
from worker.device.self_check import (
    TOLERANCE,
    CannotRun,
    compare,
    length_beyond_windows,
    random_prompts,
)
from worker.error_classification import failure_of, first_line
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.cached_runner")

# What models call what they keep between steps, in their output and as an argument.
NAMES = ("past_key_values", "cache_params", "state")
RECURRENT = "cache_params"  # of models that know nothing of earlier tokens, nor of their mask
# A step runs each group in turn. Beyond so many, small ones join the newcomers and run anew with
# them, if that takes no more tokens than this, padding included.
GROUPS = 2
REJOINED = {"cpu": 512, "cuda": 8192}
# Texts of the check: longer than the blocks in which linear attention works.
LENGTH = 70
STEPS = 4
# What is kept may be rounded in other places than what is computed at once; if wrong, it is off
# by more than this. Batches differ from single texts by less: recurrences amplify rounding.
CACHED, BATCHED = 0.1, 1e-3

Texts = abc.Sequence[abc.Sequence[int]]
Steps = abc.Sequence[abc.Sequence[Tensor]]  # of each text, the logits after each step


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a batch has been through: the model's cache, and which of its tokens are no padding."""

    name: str
    cache: Any
    mask: Tensor  # [B, T]


@dataclass(eq=False)
class CacheGroup:
    """Sequences that share a forward, and what came of the last."""

    rows: int
    size: int  # tokens, padding included
    logits: Tensor  # [rows, V] after the last of them
    past: CacheState | None  # None: they are run anew


class CacheSlot(NamedTuple):
    """Of a sequence in its group: kept with its table, so it goes when that does."""

    group: CacheGroup
    row: int
    tokens: int  # of the sequence, that have run


class CachedRunner:
    compile_state: Literal["running", "done", "off"] = "off"
    decoder_hook: None = None
    idempotent = False

    def __init__(self, language: LanguageModel, max_model_len: int | None = None) -> None:
        self.language = language
        self.max_model_len = min(max_model_len or language.context, language.context)
        self.model = language.model
        self.device = language.device
        self.rejoined = REJOINED[self.device.type]
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)
        pad = language.tokenizer.pad_token_id
        self.pad = pad if isinstance(pad, int) else 0
        self._drawn: Tensor | None = None  # by the step before the one that runs
        self.caches = False
        self.batching: Literal["padded", "same length", "single"] = "single"
        self._choose()
        log.info("static batches batching=%s cached=%s", self.batching, self.caches)

    @torch.inference_mode()
    def forward(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        """Logits [R, vocabulary] of the batch's rows; `drawn`: what promised tokens stand for.
        Sequences whose last token has been through are not run again: another group raised, and
        parts of the batch are tried."""
        self._drawn = drawn
        scored = [self._scored(chunk) for chunk in batch.chunks if chunk.to_score]
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.to_sample]
        for group, members in self._to_run(sequences):
            self._run(group, members)
        logits = [*scored, *map(self._logits, sequences)]
        return torch.cat(logits) if logits else torch.empty(0, self.language.vocab_size)

    def _to_run(self, sequences: list[Sequence]) -> list[tuple[CacheGroup | None, list[Sequence]]]:
        """Who runs together: groups go on, and those that have none, or lost it, form some."""
        ongoing: dict[CacheGroup, list[Sequence]] = {}
        fresh: list[Sequence] = []
        for sequence in sequences:
            place = find_cache_slot(sequence)
            missing = len(sequence.tokens) - place.tokens if place else -1
            if place and place.group.past and missing == 1:
                ongoing.setdefault(place.group, []).append(sequence)
            elif missing:
                fresh.append(sequence)
        self._rejoin(ongoing, fresh)
        formed: dict[int, list[Sequence]] = {}
        for number, sequence in enumerate(fresh):
            ways = {"padded": 0, "same length": len(sequence.tokens), "single": number}
            formed.setdefault(ways[self.batching], []).append(sequence)
        return [*ongoing.items(), *((None, members) for members in formed.values())]

    def _rejoin(self, ongoing: dict[CacheGroup, list[Sequence]], fresh: list[Sequence]) -> None:
        """The smallest groups beyond GROUPS begin anew with those that do."""
        while fresh and self.batching == "padded" and len(ongoing) >= GROUPS:
            smallest = min(ongoing, key=lambda group: group.size)
            joined = [*ongoing[smallest], *fresh]
            if len(joined) * max(len(each.tokens) for each in joined) > self.rejoined:
                return
            fresh[:] = joined
            del ongoing[smallest]
            smallest.past = None

    def _run(self, group: CacheGroup | None, members: list[Sequence]) -> None:
        past = None
        if group:
            past, group.past = group.past, None  # in doubt until all went well
            rows = [cache_slot(each).row for each in members]
            if past and rows != list(range(group.rows)):
                past = self.keep(past, rows)
        texts = [each.tokens for each in members]
        logits, past = self.run(texts, past)
        made = CacheGroup(len(texts), len(texts) * max(map(len, texts)), logits, past)
        for row, each in enumerate(members):
            block_table(each).runner_state = CacheSlot(made, row, len(each.tokens))

    def _logits(self, sequence: Sequence) -> Tensor:
        """[1, V] after its last token."""
        place = cache_slot(sequence)
        return place.group.logits[place.row : place.row + 1]

    def _scored(self, chunk: Chunk) -> Tensor:
        """Logits [P, V] of the chunk's positions to score, by a run of the prompt up to there."""
        positions = chunk.to_score
        ids = torch.tensor([chunk.sequence.tokens[: positions.stop]], device=self.device)
        rows = torch.arange(positions.start, positions.stop, device=self.device)
        logits: Tensor = self._call({"input_ids": ids}, False, rows).logits[0]
        return logits[-len(positions) :]  # a model may give them all

    # ── the model's forward ──

    @torch.inference_mode()
    def run(self, texts: Texts, past: CacheState | None) -> tuple[Tensor, CacheState | None]:
        """Logits [B, V] for the token after each text, and what to give with the next. `past`,
        which is used up, has been through all but the last token of each; None: through none."""
        if past is None:
            width = max(map(len, texts))
            rows = [[self.pad] * (width - len(text)) + [*text] for text in texts]
            masked = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
            mask = to_device(masked, self.device)
        else:
            rows = [[text[-1]] for text in texts]
            mask = torch.cat([past.mask, past.mask.new_ones(len(texts), 1)], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -len(rows[0]) :]
        ids = fill_placeholders(to_device(rows, self.device), self._drawn)
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        return self.advance(inputs, mask, past, self.caches)

    def advance(
        self, inputs: dict[str, Any], mask: Tensor, past: CacheState | None, keeps: bool
    ) -> tuple[Tensor, CacheState | None]:
        """As `run`, of inputs with a mask [B, T] of all tokens, those of the past included."""
        if past:
            inputs[past.name] = past.cache
        if past is None or past.name != RECURRENT:
            inputs["attention_mask"] = mask
        output = self._call(inputs, keeps, 1)
        now = None
        if keeps:
            now = next(
                (CacheState(n, output[n], mask) for n in NAMES if output.get(n) is not None), None
            )
        logits: Tensor = output.logits[:, -1]
        return logits, now

    @torch.inference_mode()
    def keep(self, past: CacheState, rows: abc.Sequence[int]) -> CacheState | None:
        """What some rows of a batch have been through; None: it cannot be divided by row."""
        if not isinstance(past.cache, Cache):
            return None
        try:
            index = to_device(rows, self.device)
            past.cache.reorder_cache(index)  # type: ignore[arg-type]  # any integers will do
            return CacheState(past.name, past.cache, past.mask[index])
        except Exception as error:  # as when there is no memory for the copy
            if isinstance(failure_of(error), DeviceLost):
                raise
            return None

    def _call(self, inputs: dict[str, Any], cache: bool, rows: int | Tensor) -> Any:
        inputs |= {"use_cache": cache, "logits_to_keep": rows}
        return self.model(**{name: inputs[name] for name in inputs if name in self.takes})

    # ── the check ──

    def _choose(self) -> None:
        longest = max(length_beyond_windows(self.model.config, self.language.context), LENGTH)
        longest = min(self.language.context, longest)
        widths = [min(longest, STEPS + 2), longest, longest]
        texts = random_prompts(self.model, self.language.tokenizer, widths)
        alone = [self._stepped([text])[0] for text in texts]
        self.caches = True
        try:
            cached = [self._stepped([text])[0] for text in texts]
            _compare(cached, alone, CACHED)
            alone = cached
        except Exception as error:
            self.caches = False
            log_refusal("cached", error)
        tolerance = max(BATCHED, TOLERANCE[self.language.dtype])
        ways: tuple[Any, ...] = (("padded", slice(0, 2)), ("same length", slice(1, 3)))
        for way, part in ways:
            try:
                _compare(self._stepped(texts[part]), alone[part], tolerance)
                self.batching = way
                return
            except Exception as error:
                log_refusal(way, error)

    def _stepped(self, texts: list[list[int]]) -> list[list[Tensor]]:
        """The last logits of each text, as batches give them: others have their turns between,
        and rows end."""
        gave: list[list[Tensor]] = [[] for _ in texts]
        rows, past = list(range(len(texts))), None
        for step in reversed(range(STEPS)):
            begun = [texts[row][: len(texts[row]) - step] for row in rows]
            logits, past = self.run(begun, past)
            for row, got in zip(rows, logits, strict=True):
                gave[row].append(got)
            if self.caches and past is None:
                raise CannotRun("it keeps nothing between steps")
            self.run([texts[0][:2]] * 3, None)
            if step == STEPS // 2 and len(rows) > 1:
                rows, past = rows[1:], past and self.keep(past, [1])
        return gave


def find_cache_slot(sequence: Sequence) -> CacheSlot | None:
    slot = block_table(sequence).runner_state
    assert slot is None or isinstance(slot, CacheSlot)
    return slot


def cache_slot(sequence: Sequence) -> CacheSlot:
    slot = find_cache_slot(sequence)
    assert slot is not None
    return slot


def block_table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None
    return sequence.table


def _compare(got: Steps, reference: Steps, tolerance: float) -> None:
    for some, expected in zip(got, reference, strict=True):
        for logits, right in zip(some, expected, strict=False):
            compare(logits, right, tolerance)


def log_refusal(way: str, error: Exception) -> None:
    if isinstance(failure_of(error), DeviceLost):
        raise error
    log.info("not %s: %.200s", way, first_line(error))
