"""Whether a language model runs on a paged KV cache, which is asked of the model itself at load.

No list of names says which do: a few random prompts go through the paged runner's step, in chunks,
and through transformers' forward; where logits differ, or a layer refuses, the model keeps the
cache that it came with (cached_runner.py) and the reason is logged. A sliding window that is longer
than the prompts is made narrow in the configuration, on both ways: layers that their model masks,
but that are not told the window, are found whatever its size.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from batching.sequence import Batch, Span
from worker.device.device import free_bytes
from worker.device.self_check import (
    MIN_PROMPT_TOKENS,
    CannotRun,
    explicit_masks,
    length_beyond_windows,
    random_prompts,
    set_attention,
)
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.attention.paged import ATTENTION, AttentionMetadata, SpanGroup
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.loading import GB, LoadingFailed, is_worth_compiling
from worker.model.paged_runner import PagedRunner, run_model

log = logging.getLogger("onequeue.paging")

PROBE = "onequeue_probe"
# How far ahead in the context the other sequence of the check is at most: so many positions are
# gathered quickly.
FAR = 1 << 17
# A window that the shortest prompts of the check exceed, whatever the configured one.
NARROW = 5
# Of what is free once the weights are there, the part that keys and values may take.
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.85}


def load_paged_runner(
    language: LanguageModel, options: GeneratorOptions, also: Callable[[], None] = lambda: None
) -> PagedRunner:
    """CannotRun, and the model is as it was; LoadingFailed if there is no room for a cache. `also`:
    what else is to be checked once its layers attend over one."""
    check = PagingCheck(language, also)
    check.page()
    native = is_worth_compiling(options.compile, language.parameters)
    language.pack_weights(options.quantization, check.compare, native)
    wanted = min(options.max_model_len or language.context, language.context)
    blocks = cache_blocks(language, options.kv_cache_gb, options.max_running * wanted)
    max_model_len = min(wanted, blocks * BLOCK)
    if options.max_model_len and max_model_len < options.max_model_len:
        raise LoadingFailed(
            f"MAX_MODEL_LEN={options.max_model_len}: the model takes {language.context} tokens "
            f"and the memory for keys and values holds {blocks * BLOCK}"
        )
    log.info("cache blocks=%d tokens=%d context=%d", blocks, blocks * BLOCK, max_model_len)
    return PagedRunner(language, blocks, max_model_len, options.max_running)


def cache_blocks(language: LanguageModel, given_gb: float | None, most_tokens: int) -> int:
    """How many blocks to allocate: what was given, or a share of what is free; not more than
    all running sequences could fill. LoadingFailed if that is not even two."""
    sizes = sum(layer.heads * (layer.key_size + layer.value_size) for layer in language.layers)
    each = BLOCK * sizes * language.dtype.itemsize
    free = free_bytes(language.device) * CACHE_SHARE[language.device.type]
    room = free if given_gb is None else given_gb * GB
    blocks = min(int(room // each), -(-most_tokens // BLOCK))
    if blocks < 2:
        raise LoadingFailed(
            f"its keys and values need {each / 1e6:.1f} MB for {BLOCK} tokens and there is room "
            f"for {room / 1e6:.1f} MB"
        )
    return blocks


class NarrowMetadata(AttentionMetadata):
    """As if the layers that get a window got NARROW."""

    def groups(self, window: int, chunk: int, masked: bool) -> list[SpanGroup]:
        return super().groups(min(window, NARROW), chunk, masked)


class PagingCheck:
    """Random prompts, and the reference: transformers' logits [L, V] of each. `also` raises for
    what else speaks against running paged."""

    def __init__(self, language: LanguageModel, also: Callable[[], None] = lambda: None) -> None:
        self.language = language
        self.also = also
        self.model = language.model
        limit = language.context - 2
        longest = length_beyond_windows(language.config, limit, MIN_PROMPT_TOKENS + BLOCK)
        widths = [min(3, longest), longest, longest - longest // 4]
        self.prompts = random_prompts(self.model, language.tokenizer, widths)
        with explicit_masks(language.decoder) if language.is_multimodal else nullcontext():
            self.reference = [self._reference(prompt) for prompt in self.prompts]
            self.narrow_reference = self._narrow_reference()

    def page(self) -> None:
        """Have the layers attend over a paged cache; CannotRun if they don't, or not rightly."""
        decoder = self.language.decoder
        before = decoder.config._attn_implementation
        try:
            self._probe_layers()
            set_attention(decoder, ATTENTION)
            self.compare()
            if self.narrow_reference is not None:
                self._compare_narrow(self.narrow_reference)
        except Exception as error:
            decoder.set_attn_implementation(before)
            if isinstance(error, CannotRun):
                raise
            raise CannotRun(f"a packed step failed: {first_line(error)[:200]}") from error

    # ── what the layers tell ──

    @torch.inference_mode()
    def _probe_layers(self) -> None:
        """Fills in the language model's layers and windows."""
        found: dict[int, tuple[LayerShape, int]] = {}
        record = functools.partial(_record, found, self.language.is_multimodal)
        AttentionInterface.register(PROBE, record)
        set_attention(self.language.decoder, PROBE)
        positions = torch.arange(2, device=self.model.device)[None]
        self.model(input_ids=positions * 0, position_ids=positions, use_cache=False)
        config = self.language.config
        if sorted(found) != list(range(config.num_hidden_layers)):
            raise CannotRun("not every layer calls a registered attention function")
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(found)
        for layer in range(len(found)):
            (shape, window), kind = found[layer], kinds[layer]
            if kind == "chunked_attention":
                shape = replace(shape, chunk=int(config.attention_chunk_size))
            elif kind not in ("full_attention", "sliding_attention"):
                raise CannotRun(f"it has layers of {kind}")
            elif kind == "sliding_attention" and not window:
                raise CannotRun("its sliding window is not told to its attention function")
            self.language.layers.append(shape)
            self.language.windows.append(window)

    # ── the reference ──

    @torch.inference_mode()
    def _reference(self, prompt: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False)[0][0]
        return logits

    def _narrow_reference(self) -> Tensor | None:
        """Of the second prompt when the window of the configuration, which is longer, is NARROW;
        None if that makes no difference, or there is no such window."""
        prompt, reference = self.prompts[1], self.reference[1]
        modules = self.model.modules()
        configs = {id(each): each for m in modules if (each := getattr(m, "config", None))}
        windows = [
            (each, window)
            for each in configs.values()
            if isinstance(window := getattr(each, "sliding_window", None), int)
        ]
        if not any(len(prompt) < window < self.language.context for _, window in windows):
            return None
        try:
            for config, _ in windows:
                config.sliding_window = NARROW
            narrow = self._reference(prompt)
        finally:
            for config, window in windows:
                config.sliding_window = window
        try:
            self.language.compare(narrow, reference)
        except CannotRun:
            return narrow
        return None

    # ── what paged steps say ──

    def compare(self) -> None:
        """CannotRun unless chunks of the prompts, in shared batches, give the reference's logits,
        and so does a last token beside one near the end of the context."""
        cache, tables = self._compare(self.prompts, self.reference)
        far = min(self.language.context, FAR) - 1
        last = len(self.prompts[1]) - 1
        spans = [Span(tables[1], last, 1), Span([0] * (far // BLOCK + 1), far, 1)]
        batch = Batch(spans, [self.prompts[1][last], self.prompts[0][0]], range(2))
        logits = run_model(self.model, batch, AttentionMetadata(cache, batch))
        self.language.compare(logits[:1], self.reference[1][last:])
        self.also()

    def _compare_narrow(self, narrow: Tensor) -> None:
        try:
            self._compare(self.prompts[1:2], [narrow], NarrowMetadata)
        except CannotRun as error:
            raise CannotRun(f"its sliding window is not told to its layers: {error}") from error

    def _compare(
        self, prompts: Sequence[Sequence[int]], reference: Sequence[Tensor],
        metadata: type[AttentionMetadata] = AttentionMetadata,
    ) -> tuple[KVCache, list[range]]:  # fmt: skip
        """The cache that the prompts are in then, and the blocks of each."""
        language = self.language
        ends = list(itertools.accumulate(-(-len(prompt) // BLOCK) for prompt in prompts))
        tables = [range(*each) for each in itertools.pairwise([0, *ends])]
        cache = KVCache(language.layers, ends[-1], language.dtype, language.device)
        done = [0] * len(prompts)
        # in chunks of half, then all but one, then a token each
        for divisor, less in ((2, 0), (1, 1), (1, 0)):
            ends = [len(prompt) // divisor - less for prompt in prompts]
            chunks = [each for each in zip(itertools.count(), done, ends) if each[1] < each[2]]
            spans = [Span(tables[n], start, end - start) for n, start, end in chunks]
            ids = [token for n, start, end in chunks for token in prompts[n][start:end]]
            batch = Batch(spans, ids, range(len(ids)))
            logits = run_model(self.model, batch, metadata(cache, batch))
            for (n, start, end), row in zip(chunks, batch.offsets, strict=True):
                language.compare(logits[row : row + end - start], reference[n][start:end])
            done = ends
        return cache, tables


def _record(
    found: dict[int, tuple[LayerShape, int]], masked: bool,
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    sliding_window: int | None = None, position_bias: Tensor | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """In place of attention: a layer's shape and window are noted, its output is nothing.
    `masked`: its model's masks may be what makes it causal."""
    if position_bias is not None:
        raise CannotRun("its attention adds a bias")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not (causal or masked) or not hasattr(module, "layer_idx"):
        raise CannotRun("its attention is not causal, or does not know its layer")
    if module.layer_idx in found:
        raise CannotRun("a layer attends twice")
    temperature = None
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        temperature = float(module.floor_scale), float(module.attn_scale)
    shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], temperature=temperature)
    found[module.layer_idx] = shape, sliding_window or 0
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
