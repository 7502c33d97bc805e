"""The check at load whether a language model runs on a paged KV cache, and the size of that cache.

There is no list of model families. A few random prompts run through paged steps, in chunks, and
through transformers' own forward. If the logits differ, or a layer does not support it, the model
keeps transformers' cache (cached_runner.py) and the reason is logged. A sliding window longer than
the prompts is narrowed on both sides, which detects layers that rely on the model's mask and do not
pass the window on.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from batching.sequence import Batch, Span
from batching.state_pool import MAX_CHECKPOINTS, MAX_DRAFTS, StateSegment
from worker.backends.latent import use_latents
from worker.backends.recurrent import RecurrentProbe, install, uninstall
from worker.device.device import free_bytes, unreserved_bytes
from worker.device.self_check import (
    MIN_PROMPT_TOKENS,
    CannotRun,
    TopKSizes,
    attention_of,
    checked_attention,
    length_beyond_windows,
    narrowed,
    set_attention,
)
from worker.error_classification import first_line
from worker.load_context import on_worker, remaining_bytes
from worker.model.attention.kv_cache import BLOCK, LayerShape
from worker.model.attention.paged import ATTENTION, AttentionMetadata
from worker.model.check import Reference
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.loading import (
    GB,
    LoadingFailed,
    TooLittleMemory,
    is_worth_compiling,
    log_own_attention,
)
from worker.model.paged_runner import (
    PagedRunner,
    PromptRun,
    StateSlots,
    chunk_steps,
    run_model,
)

log = logging.getLogger("onequeue.paging")

PROBE = "onequeue_probe"  # the attention function that records the layers
# Position limit of a sequence at the end of the context: so many keys are gathered quickly.
MAX_FAR_POSITION = 1 << 17
# Tokens of the longest prompt where layers are recurrent: more than two of their chunks.
MIN_RECURRENT_TOKENS = 150
# Largest relative difference of their logits: recurrences amplify rounding.
RECURRENT_TOLERANCE = 1e-3
# Kinds of layers that have states besides keys and values, by the kind of their attention.
HYBRID_KINDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
NO_ATTENTION = LayerShape(0, 0, 0)
# Share of the memory that is free after loading, for the keys and values of one model.
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.85}


# The function that records the layers of the model that this thread probes. transformers never
# drops a registered function, so that function holds no reference to a model.
_recorder: ContextVar[Callable[..., tuple[Tensor, None]]] = ContextVar("recorder")
AttentionInterface.register(PROBE, lambda *args, **kwargs: _recorder.get()(*args, **kwargs))


def load_paged_runner(
    language: LanguageModel,
    options: GeneratorOptions,
    extra_check: Callable[[], None] = lambda: None,
) -> PagedRunner:
    """Make the model attend over a paged cache, pack its weights and size the cache.

    `extra_check` raises CannotRun for other reasons against it, once the layers do. Raise CannotRun
    if they do not, with the model unchanged, and LoadingFailed if there is no memory for a cache.
    """
    check = PagingCheck(language, extra_check)
    check.enable()
    if options.lora_dir == "none":  # an adapter may change the layers that expand latents
        use = partial(use_latents, language.decoder, language.layers, check.compare)
        language.attempt(use, "latents", "keys and values of all heads", "fewer tokens fit")
    native = is_worth_compiling(options.compile, language.parameters)
    language.pack_weights(options.quantization, check.compare, native)
    length = min(options.max_model_len or language.context, language.context)
    max_tokens = options.max_running * length
    room = cache_bytes(language, options.kv_cache_gb, options.later_caches)
    drafts = options.speculation == "auto" and language.device.type == "cpu"
    try:
        slots = state_slots(language, room, options.max_running, MAX_DRAFTS if drafts else 0)
        room -= slots.pool().num_slots * state_bytes(language)
        blocks = cache_blocks(language, room, max_tokens)
    except LoadingFailed as error:
        raise too_small(str(error), options) from error
    max_model_len = min(length, blocks * BLOCK)
    if options.max_model_len and max_model_len < (wanted := options.max_model_len):
        reason = f"the memory for keys and values holds {blocks * BLOCK} tokens"
        if wanted > language.context:
            reason = f"the model takes {language.context} tokens"
        raise LoadingFailed(f"MAX_MODEL_LEN={wanted}: {reason}")
    language.rotary.fix(max_model_len)
    log_own_attention(options.attention, "steps on the paged cache")
    log.info(
        "cache blocks=%d tokens=%d token_bytes=%d context=%d",
        blocks, blocks * BLOCK, token_bytes(language), max_model_len,
    )  # fmt: skip
    if language.states:
        log.info(
            "states bytes=%d sequences=%d checkpoints=%d",
            state_bytes(language), slots.sequences, slots.checkpoints,
        )  # fmt: skip
    return PagedRunner(language, blocks, max_model_len, options.max_running, slots)


def cache_bytes(language: LanguageModel, size_gb: float | None, later_caches: int = 0) -> float:
    """Return the size of a model's cache: `size_gb`, None: a share of the free memory that no other
    cache has reserved, which leaves as much for each of `later_caches`.

    Raise LoadingFailed for a size beyond the free memory of a CPU: its pages are taken one by one,
    until the system ends the process."""
    if size_gb is not None:
        if language.device.type == "cpu" and size_gb * GB > (free := free_bytes(language.device)):
            raise LoadingFailed(f"KV_CACHE_GB={size_gb:g}: {free / GB:.1f} GB are free")
        return size_gb * GB
    share = CACHE_SHARE[language.device.type]
    free = min(unreserved_bytes(language.device), remaining_bytes())
    return free * share / (1 + share * later_caches)


def too_small(reason: str, options: GeneratorOptions) -> LoadingFailed:
    """Return the error of a cache that holds no sequence."""
    if options.kv_cache_gb is None:
        return TooLittleMemory(reason)
    return LoadingFailed(f"KV_CACHE_GB is too small: {reason}")


def state_bytes(language: LanguageModel) -> int:
    """Return the size of a slot: the states of recurrent layers for one sequence."""
    return sum(state.nbytes for state in language.states)


def state_slots(
    language: LanguageModel, room: float, max_running: int, max_drafts: int
) -> StateSlots:
    """Divide a cache of `room` bytes: half of it is for states of sequences, if so many run, and of
    their drafts; and a quarter for checkpoints.

    Raise LoadingFailed if it holds no sequence's states.
    """
    if not language.states:
        return StateSlots(0, 0)
    size = state_bytes(language)
    drafts = min(max_drafts, int(room / 8 // size))
    sequences = min(max_running, int((room / 2 - drafts * size) // (2 * size)))
    if not sequences:
        raise LoadingFailed(
            f"the states of the model's recurrent layers need {4 * size / 1e6:.1f} MB and there is "
            f"room for {room / 1e6:.1f} MB"
        )
    most = sequences * MAX_CHECKPOINTS
    return StateSlots(sequences, min(most, int(room / 4 // size)), drafts)


def token_bytes(language: LanguageModel) -> int:
    """Return the size of a token's keys and values."""
    return sum(layer.numbers for layer in language.layers) * language.dtype.itemsize


def cache_blocks(language: LanguageModel, room: float, max_tokens: int) -> int:
    """Return the number of blocks for a cache of `room` bytes, at most for `max_tokens` tokens.

    Raise LoadingFailed if that is less than two blocks.
    """
    block_bytes = max(1, BLOCK * token_bytes(language))
    blocks = min(int(room // block_bytes), -(-max_tokens // BLOCK))
    if blocks < 2:
        raise LoadingFailed(
            f"the model's keys and values need {2 * block_bytes / 1e6:.1f} MB for {2 * BLOCK} "
            f"tokens and there is room for {room / 1e6:.1f} MB"
        )
    return blocks


class PagingCheck:
    """Compares paged steps on random prompts with transformers' logits [L, V] of each.

    `extra_check` raises CannotRun for other reasons against a paged cache.
    """

    def __init__(
        self, language: LanguageModel, extra_check: Callable[[], None] = lambda: None
    ) -> None:
        self.language = language
        self.extra_check = extra_check
        self.model = language.model
        limit = language.context - 2
        self.probe = RecurrentProbe(language.decoder, language.decoder.config)
        shortest = MIN_PROMPT_TOKENS + BLOCK
        if self.probe.cache is not None:  # more than the chunks of linear attention
            shortest = MIN_RECURRENT_TOKENS
        longest = length_beyond_windows(language.config, limit, shortest)
        widths = [min(3, longest), longest, longest - longest // 4]
        self.prompts = language.random_prompts(widths)
        self._own_attention = checked_attention(language.decoder, language.is_multimodal)
        recorded = [TopKSizes() for _ in self.prompts]
        logits = []
        with attention_of(language.decoder, self._own_attention):
            for prompt, sizes in zip(self.prompts, recorded, strict=True):
                logits += on_worker(partial(self._recorded_logits, prompt, sizes))
            self.selects_keys = any(one.sizes != recorded[0].sizes for one in recorded)
        self.reference = Reference(self._own_logits, self.prompts, logits)

    def enable(self) -> None:
        """Make the layers attend over a paged cache.

        Raise CannotRun, with the model unchanged, if they do not or if logits differ. Fill in
        `layers` and `windows` of the language model.
        """
        if self.selects_keys:
            raise CannotRun("its attention selects keys by score")
        decoder = self.language.decoder
        before = decoder.config._attn_implementation
        try:
            on_worker(self._probe_layers)
            set_attention(decoder, ATTENTION)
            self._compare_recurrent()
            self._compare_narrow()
            self.reference.close()
        except Exception as error:
            decoder.set_attn_implementation(before)
            uninstall(self.language.recurrent)
            self.language.recurrent, self.language.states = [], []
            if isinstance(error, CannotRun):
                raise
            raise CannotRun(f"a packed step failed: {first_line(error)[:200]}") from error

    def _compare_recurrent(self) -> None:
        """Compare; recurrent layers that differ are compared again with states that continue with
        single tokens."""
        try:
            self.compare()
        except CannotRun:
            if not self.language.recurrent:
                raise
            for module in self.language.recurrent:
                module.stepwise = True
            self.compare()
            log.info("prompts continue token by token in recurrent layers")

    # ── the layers ──

    @torch.inference_mode()
    def _probe_layers(self) -> None:
        """Run the model with an attention function that records each layer."""
        language, probe = self.language, self.probe
        recorded: dict[int, tuple[LayerShape, int]] = {}

        def record(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            probe.record_attention()
            return _record(recorded, language.is_multimodal, *args, **kwargs)

        set_attention(self.language.decoder, PROBE)
        positions = torch.arange(2, device=self.model.device)[None]
        token = _recorder.set(record)
        try:
            with probe.recording():
                self._call(
                    input_ids=positions * 0, position_ids=positions, **probe.arguments(self.model)
                )
        finally:
            _recorder.reset(token)
        config = language.config
        layers = config.num_hidden_layers
        if not probe.attending(layers) <= recorded.keys() <= set(range(layers)):
            raise CannotRun("not every layer calls a registered attention function")
        language.recurrent, language.states = probe.find()
        install(language.recurrent)
        if language.states:
            language.tolerance = max(language.tolerance, RECURRENT_TOLERANCE)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        for layer in range(layers):
            if layer not in recorded:
                language.layers.append(NO_ATTENTION)
                language.windows.append(0)
                continue
            (shape, window), kind = recorded[layer], HYBRID_KINDS.get(kinds[layer], kinds[layer])
            if kind == "chunked_attention":
                shape = replace(shape, chunk=int(config.attention_chunk_size))
            elif kind not in ("full_attention", "sliding_attention"):
                raise CannotRun(f"it has layers of {kind}")
            elif kind == "sliding_attention" and not window:
                raise CannotRun("its attention function is not passed its sliding window")
            language.layers.append(shape)
            language.windows.append(window)

    def _call(self, **inputs: Any) -> Any:
        """Call the model with those inputs that it takes."""
        names = inspect.signature(self.model.forward).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
            inputs = {name: value for name, value in inputs.items() if name in names}
        return self.model(**inputs)

    # ── the reference ──

    def _recorded_logits(self, prompt: Sequence[int], sizes: TopKSizes) -> list[Tensor]:
        with sizes:
            return self._own_logits([prompt])

    @torch.inference_mode()
    def _own_logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits [L, V] of each prompt by the model's own forward and attention."""
        with attention_of(self.language.decoder, self._own_attention):
            rows = [torch.tensor([[*prompt]], device=self.model.device) for prompt in prompts]
            return [self.model(input_ids=ids, use_cache=False)[0][0] for ids in rows]

    # ── paged steps ──

    def compare(self) -> None:
        """Raise CannotRun unless paged steps give the reference's logits: chunks of the prompts in
        shared batches, and a last token beside one near the end of the context."""
        run = PromptRun(self.language, self.prompts)
        logits = run.run(chunk_steps(self.prompts, [len(prompt) // 2 for prompt in self.prompts]))
        self.reference.check(logits, self.language.tolerance)
        far = min(self.language.context, MAX_FAR_POSITION) - 1
        last = len(self.prompts[1]) - 1
        spans = [Span(run.tables[1], last, 1), Span([0] * (far // BLOCK + 1), far, 1)]
        states = [run.states[n] for n in (1, 0)]
        segments = [[StateSegment(1, state.current, state.target)] for state in states]
        ids = [self.prompts[1][last], self.prompts[0][0]]
        batch = Batch(spans, ids, range(2), states=segments)
        metadata = AttentionMetadata(run.cache, batch)
        beside = on_worker(partial(run_model, self.language, batch, metadata))
        logits[1] = torch.cat((logits[1][:-1], beside[:1]))
        self.reference.check(logits, self.language.tolerance)
        self.extra_check()

    def _compare_narrow(self) -> None:
        """Compare with a window that the prompts exceed in place of a longer one."""
        prompts, language = self.prompts[1:2], self.language
        window = getattr(language.config, "sliding_window", None)
        if not (isinstance(window, int) and len(prompts[0]) < window < language.context):
            return

        def run(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
            return on_worker(partial(self._own_logits, prompts))

        with narrowed(language.decoder, partial(run, prompts)):
            steps = chunk_steps(prompts, [len(prompts[0]) // 2])
            logits = PromptRun(language, prompts).run(steps)
            try:
                Reference(run, prompts).check(logits, language.tolerance)
            except CannotRun as error:
                reason = f"its layers do not pass on its sliding window: {error}"
                raise CannotRun(reason) from error


def _record(
    recorded: dict[int, tuple[LayerShape, int]], masked: bool,
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    sliding_window: int | None = None, position_bias: Tensor | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Record a layer's shape and window in place of attention; return zeros.

    `masked`: a mask of the model may make the layer causal.
    """
    if position_bias is not None:
        raise CannotRun("its attention adds a bias")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not (causal or masked) or not hasattr(module, "layer_idx"):
        raise CannotRun("its attention is not causal, or has no layer_idx")
    if module.layer_idx in recorded:
        raise CannotRun("a layer attends twice")
    temperature = None
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        temperature = float(module.floor_scale), float(module.attn_scale)
    shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], temperature=temperature)
    recorded[module.layer_idx] = shape, sliding_window or 0
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
