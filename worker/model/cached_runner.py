"""A language model's own forward and cache, a token at a time for a batch of texts.

For models that do not run on paged memory. Whether what the model keeps between steps is right, and
how texts may share a batch (padded on the left, of one length only, or not at all), is asked of the
model itself at load. Without a cache that works, texts are run anew for each token.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from batching.errors import DeviceLost
from worker.failures import failure_of
from worker.model.language_model import LanguageModel
from worker.model.sampler import SampledToken, prompt_logprobs
from worker.model.self_check import TOLERANCE, Differs, encoder_lengths

log = logging.getLogger("onequeue.stepwise")

# What models call what they keep between steps, in their output and as an argument.
NAMES = ("past_key_values", "cache_params", "state")
RECURRENT = "cache_params"  # of models that know nothing of earlier tokens, nor of their mask
# Texts of the check: longer than the blocks in which linear attention works.
LENGTH = 70
STEPS = 4
# What is kept may be rounded in other places than what is computed at once; if wrong, it is off
# by more than this. Batches differ from single texts by less: recurrences amplify rounding.
CACHED, BATCHED = 0.1, 1e-3
# Prompt tokens whose logits are there at once: a run of the prompt for each so many.
SCORED = 512


@dataclass(frozen=True, slots=True)
class Past:
    """What a batch has been through: the model's cache, and which of its tokens are no padding."""

    name: str
    cache: Any
    mask: Tensor  # [B, T]


class Stepwise:
    def __init__(self, language: LanguageModel) -> None:
        self.model = language.model
        self.device = language.device
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)
        pad = language.tokenizer.pad_token_id
        self.pad = pad if isinstance(pad, int) else 0
        self.caches = False
        self.batching: Literal["padded", "same length", "single"] = "single"
        self._choose(language)
        log.info("static batches batching=%s cached=%s", self.batching, self.caches)

    @torch.inference_mode()
    def forward(
        self, texts: Sequence[Sequence[int]], past: Past | None
    ) -> tuple[Tensor, Past | None]:
        """Logits [B, V] for the token after each text, and what to give with the next. `past`,
        which is used up, has been through all but the last token of each; None: through none."""
        if past is None:
            width = max(map(len, texts))
            rows = [[self.pad] * (width - len(text)) + [*text] for text in texts]
            masked = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
            mask = torch.tensor(masked, device=self.device)
        else:
            rows = [[text[-1]] for text in texts]
            mask = torch.cat([past.mask, past.mask.new_ones(len(texts), 1)], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -len(rows[0]) :]
        ids = torch.tensor(rows, device=self.device)
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        if past:
            inputs[past.name] = past.cache
        if past is None or past.name != RECURRENT:
            inputs["attention_mask"] = mask
        output = self._call(inputs, self.caches, 1)
        now = None
        if self.caches:
            now = next((Past(n, output[n], mask) for n in NAMES if output.get(n) is not None), None)
        logits: Tensor = output.logits[:, -1]
        return logits, now

    @torch.inference_mode()
    def scores(self, text: Sequence[int], top: int) -> list[SampledToken]:
        """How likely each token but the first is, with the `top` best in its place."""
        ids = torch.tensor([list(text)], device=self.device)
        scores: list[SampledToken] = []
        for begin in range(0, len(text) - 1, SCORED):
            end = min(len(text) - 1, begin + SCORED)
            rows = torch.arange(begin, end, device=self.device)
            logits: Tensor = self._call({"input_ids": ids}, False, rows).logits[0]
            if len(logits) != end - begin:  # the model gives them all
                logits = logits[begin:end]
            scores += prompt_logprobs(logits, text[begin + 1 : end + 1], top)
        return scores

    @torch.inference_mode()
    def keep(self, past: Past, rows: Sequence[int]) -> Past | None:
        """What some rows of a batch have been through; None: it cannot be told apart."""
        if not isinstance(past.cache, Cache):
            return None
        try:
            index = torch.tensor(rows, device=self.device)
            past.cache.reorder_cache(index)  # type: ignore[arg-type]  # any integers will do
            return Past(past.name, past.cache, past.mask[index])
        except Exception as error:  # as when there is no memory for the copy
            if isinstance(failure_of(error), DeviceLost):
                raise
            return None

    def _call(self, inputs: dict[str, Any], cache: bool, rows: int | Tensor) -> Any:
        inputs |= {"use_cache": cache, "logits_to_keep": rows}
        return self.model(**{name: inputs[name] for name in inputs if name in self.takes})

    # ── the check ──

    def _choose(self, language: LanguageModel) -> None:
        longest = max(*encoder_lengths(self.model, language.context), LENGTH)
        longest = min(language.context, longest)
        texts = _random_texts(language, [min(longest, STEPS + 2), longest, longest])
        own = [self._stepped([text])[0] for text in texts]
        self.caches = True
        try:
            cached = [self._stepped([text])[0] for text in texts]
            _compare(cached, own, CACHED)
            own = cached
        except Exception as error:
            self.caches = False
            _refused("cached", error)
        tolerance = max(BATCHED, TOLERANCE[language.dtype])
        try:
            _compare(self._stepped(texts[:2]), own[:2], tolerance)
            self.batching = "padded"
            return
        except Exception as error:
            _refused("padded", error)
        try:
            _compare(self._stepped(texts[1:]), own[1:], tolerance)
            self.batching = "same length"
        except Exception as error:
            _refused("same length", error)

    def _stepped(self, texts: list[list[int]]) -> list[list[Tensor]]:
        """The last logits of each text, as batches give them: others have their turns between,
        and rows end."""
        gave: list[list[Tensor]] = [[] for _ in texts]
        rows, past = list(range(len(texts))), None
        for step in reversed(range(STEPS)):
            begun = [texts[row][: len(texts[row]) - step] for row in rows]
            logits, past = self.forward(begun, past)
            for row, got in zip(rows, logits, strict=True):
                gave[row].append(got)
            if self.caches and past is None:
                raise Differs("it keeps nothing between steps")
            self.forward([texts[0][:2]] * 3, None)
            if step == STEPS // 2 and len(rows) > 1:
                rows, past = rows[1:], past and self.keep(past, [1])
        return gave


def _compare(
    got: Sequence[Sequence[Tensor]], own: Sequence[Sequence[Tensor]], tolerance: float
) -> None:
    for some, expected in zip(got, own, strict=True):
        for logits, right in zip(some, expected, strict=False):
            off = (logits.float() - right.float()).abs().max() / right.float().abs().max()
            if not off <= tolerance:  # also when NaN
                raise Differs(f"logits differ by {float(off):.1e} of the largest")


def _refused(way: str, error: Exception) -> None:
    if isinstance(failure_of(error), DeviceLost):
        raise error
    first = (str(error).splitlines() or [type(error).__name__])[0]
    log.info("not %s: %s", way, first[:200])


def _random_texts(language: LanguageModel, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    special = set(language.tokenizer.all_special_ids)
    ordinary = [id_ for id_ in range(language.vocab_size) if id_ not in special]
    picks = torch.randint(len(ordinary), (sum(lengths),), generator=generator).tolist()
    stream = iter(picks)
    return [[ordinary[next(stream)] for _ in range(length)] for length in lengths]
