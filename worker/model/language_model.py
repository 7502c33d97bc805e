"""A causal language model: loading, what its layers keep, and whether it runs on paged memory.

No list of names says which models do: a few random prompts go through the packed step, in
chunks, and through the model's own forward; where logits differ, or a layer refuses, the model is
served by the fallback (generation/static.py) and the reason is logged. A sliding window that is
longer than the prompts is made narrow in the configuration, on both ways: layers that their model
masks but does not tell are found whatever its size.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from worker.architectures import advice
from worker.model import memory, missing_weights
from worker.model.attention_interface import ATTENTION, CannotPage, probing, running
from worker.model.loading import LoadingFailed, choose_device, choose_dtype
from worker.model.paged_attention import BLOCK, AttentionParams, LayerShape, PagedCache, Step
from worker.model.self_check import LONGEST, SHORTEST, TOLERANCE

log = logging.getLogger("onequeue.language_model")

DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "chat"
# The context of a model that knows no limit.
UNLIMITED = 32768
# How far off a mate is put in the check at most: so many positions are gathered quickly.
FAR = 1 << 17
# A window that the shortest prompts of the check exceed, whatever the model's own.
NARROW = 5


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    model: str
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    quantization: str = "none"
    compile: str = "auto"
    speculation: str = "auto"
    max_model_len: int | None = None
    kv_cache_gb: float | None = None
    max_running: int = 256


class NarrowStep(Step):
    """As if the layers that are told a window were told NARROW."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: AttentionParams
    ) -> Tensor:
        told = how._replace(window=min(how.window, NARROW))
        return super().attend(query, key, value, sinks, told)


class LanguageModel:
    """A loaded model. `forward` runs packed steps once `page` has succeeded."""

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.parameters = model.num_parameters()
        self.tolerance = TOLERANCE[model.dtype]  # of the largest logit, for rounding
        self.call: Callable[..., Any] = model  # what `forward` runs: the model, or it compiled
        self.layers: list[LayerShape] = []
        self.windows: list[int] = []
        self.reference: tuple[list[list[int]], list[Tensor]] = [], []  # prompts and own logits
        # how many rows the output has: a model may have more than the tokenizer has tokens
        self.vocab_size = int(self.config.vocab_size)

    @property
    def defaults(self) -> GenerationConfig:
        empty: Any = GenerationConfig  # not annotated
        return self.model.generation_config or empty()

    @property
    def context(self) -> int:
        """Tokens the model was made for."""
        names = (
            "max_position_embeddings",
            "n_positions",
            "seq_length",
            "max_seq_len",
            "context_length",
        )
        known = [getattr(self.config, name, None) for name in names]
        limit = next((n for n in known if isinstance(n, int) and n > 0), UNLIMITED)
        ropes = getattr(self.config, "rope_parameters", None) or {}
        for rope in (ropes, *ropes.values()):  # some have one for each kind of layer
            if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
                # tables that depend on the longest sequence of a row: within this they are the same
                limit = min(limit, rope.get("original_max_position_embeddings") or limit)
        return int(limit)

    # ── packed steps ──

    def page(self) -> None:
        """Have the layers attend over paged memory; CannotPage if they don't, or not rightly."""
        prompts = self._random_prompts()
        own = [self._own_logits(prompt) for prompt in prompts]
        self.reference = prompts, own
        narrow = self._narrow_logits(prompts[1], own[1])
        before = self.model.config._attn_implementation
        try:
            try:
                self.model.set_attn_implementation(ATTENTION)
            except Exception as error:  # each model class refuses in its own way
                raise CannotPage(f"it takes no attention function: {error}") from error
            if self.model.config._attn_implementation != ATTENTION:  # some only log that
                raise CannotPage("it takes no attention function")
            self._probe_layers()
            self.check(prompts, own)
            if narrow:
                self._check_narrow(prompts[1], narrow)
        except Exception as error:
            self.model.set_attn_implementation(before)
            if isinstance(error, CannotPage):
                raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CannotPage(f"a packed step failed: {first[:200]}") from error

    def recheck(self) -> None:
        """CannotPage if what was done to the weights since changes what the model says."""
        self.check(*self.reference)

    @torch.inference_mode()
    def _probe_layers(self) -> None:
        found: dict[int, tuple[LayerShape, int]] = {}

        def record(module: nn.Module, shape: LayerShape, window: int) -> None:
            layer: Any = module.layer_idx
            if layer in found:
                raise CannotPage("a layer attends twice")
            found[layer] = (shape, window)

        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with probing(record):
            self.model(
                input_ids=ids,
                position_ids=torch.arange(2, device=self.device)[None],
                use_cache=False,
            )
        if sorted(found) != list(range(self.config.num_hidden_layers)):
            raise CannotPage("not every layer calls a registered attention function")
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(found)
        for layer in range(len(found)):
            shape, window = found[layer]
            kind = kinds[layer]
            if kind == "chunked_attention":
                size = int(self.config.attention_chunk_size)
                shape = replace(shape, chunk=size)
            elif kind not in ("full_attention", "sliding_attention"):
                raise CannotPage(f"it has layers of {kind}")
            elif kind == "sliding_attention" and not window:
                raise CannotPage("its sliding window is not told to its attention function")
            self.layers.append(shape)
            self.windows.append(window)

    def _random_prompts(self) -> list[list[int]]:
        """Longer than the attention windows, as far as the context and patience allow."""
        config = self.config
        names = ("sliding_window", "attention_chunk_size", "window_size")
        windows = [getattr(config, name, None) or 0 for name in names]
        reach = 2 * max(w if isinstance(w, int) else 0 for w in windows) + 8
        longest = reach if SHORTEST < reach <= LONGEST else SHORTEST + BLOCK
        longest = min(longest, self.context - 2)
        generator = torch.Generator().manual_seed(0)
        ordinary = sorted(set(range(self.vocab_size)) - set(self.tokenizer.all_special_ids))
        lengths = [min(3, longest), longest, longest - longest // 4]
        pick = torch.randint(len(ordinary), (sum(lengths),), generator=generator).tolist()
        stream = iter(pick)
        return [[ordinary[next(stream)] for _ in range(n)] for n in lengths]

    @torch.inference_mode()
    def _own_logits(self, prompt: Sequence[int]) -> Tensor:
        """[L, V] by the model's own forward."""
        ids = torch.tensor([list(prompt)], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _narrow_logits(self, prompt: Sequence[int], own: Tensor) -> list[Tensor]:
        """What the model says of the prompt when the window of its configuration, which is longer,
        is NARROW; nothing if that makes no difference to its own forward, or it has none."""
        configs = {id(each): each for m in self.model.modules() if (each := _config(m)) is not None}
        windows = [(each, each.sliding_window) for each in configs.values()]
        if not any(len(prompt) < window < self.context for _, window in windows):
            return []
        try:
            for config, _ in windows:
                config.sliding_window = NARROW
            narrow = self._own_logits(prompt)
        finally:
            for config, window in windows:
                config.sliding_window = window
        try:
            self.compare(narrow, own)
        except CannotPage:
            return [narrow]
        return []

    def _check_narrow(self, prompt: list[int], narrow: list[Tensor]) -> None:
        try:
            self.check([prompt], narrow, NarrowStep)
        except CannotPage as error:
            raise CannotPage(f"its sliding window is not told to its layers: {error}") from error

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        own: Sequence[Tensor],
        kind: type[Step] = Step,
    ) -> None:
        """CannotPage unless chunks of the prompts, packed, give the model's own logits."""
        needed = [-(-len(prompt) // BLOCK) for prompt in prompts]
        cache = PagedCache(self.layers, sum(needed), self.dtype, self.device)
        first = 0
        tables = []
        for count in needed:
            tables.append(list(range(first, first + count)))
            first += count
        done = [0] * len(prompts)
        # in chunks of half, then all but one, then a token each
        for divisor, less in ((2, 0), (1, 1), (1, 0)):
            ends = [len(prompt) // divisor - less for prompt in prompts]
            parts = [i for i, end in enumerate(ends) if end > done[i]]
            chunks = [(tables[i], done[i], ends[i] - done[i]) for i in parts]
            ids = [token for i in parts for token in prompts[i][done[i] : ends[i]]]
            logits = self.forward(kind(cache, chunks, self.dtype), ids, range(len(ids)))
            row = 0
            for i in parts:
                count = ends[i] - done[i]
                self.compare(logits[row : row + count], own[i][done[i] : ends[i]])
                row += count
                done[i] = ends[i]
        if len(prompts) > 1:
            self._check_far_mate(cache, tables, prompts[1], own[1])

    def _check_far_mate(
        self, cache: PagedCache, tables: list[list[int]], prompt: Sequence[int], own: Tensor
    ) -> None:
        """A mate near the end of the context must not change what a token gives."""
        far = min(self.context, FAR) - 1
        last = len(prompt) - 1
        mate = tables[0][:1] * (far // BLOCK + 1)
        step = Step(cache, [(tables[1], last, 1), (mate, far, 1)], self.dtype)
        logits = self.forward(step, [prompt[last], prompt[0]], range(2))
        self.compare(logits[:1], own[last:])

    def compare(self, got: Tensor, own: Tensor) -> None:
        largest = own.float().abs().max().clamp(min=1e-6)
        off = (got.float() - own.float()).abs().max() / largest
        if not off <= self.tolerance:  # also when NaN
            raise CannotPage(f"packed logits differ by {float(off):.1e} of the largest")

    @torch.inference_mode()
    def forward(
        self, step: Step, ids: Sequence[int], wanted: Sequence[int], call: Any = None
    ) -> Tensor:
        """Logits [len(wanted), V] of the step's rows `wanted`; keys and values are written."""
        rows = torch.tensor(list(wanted), dtype=torch.long, device=self.device)
        positions = step.positions[
            None
        ].clone()  # made in inference mode, for the compiler's guards
        with running(step):
            output = (call or self.call)(
                input_ids=torch.tensor([list(ids)], device=self.device),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: Tensor = output.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]


def check_generates(model: PreTrainedModel, lacking: dict[str, str]) -> None:
    """LoadingFailed unless the checkpoint has weights for what follows a text, and a token's
    logits depend on those before it alone."""

    @torch.inference_mode()
    def logits(last: int) -> Tensor:
        ids = torch.tensor([[*range(1, 8), last]], device=model.device)
        own: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return own.float()

    why = ""
    if missing_weights.matter(model, lacking, lambda: logits(0).cpu().numpy().tobytes()):
        why = f"its checkpoint has no weights for {missing_weights.shown(lacking)}"
    else:
        one, other = logits(0)[:-1], logits(8)[:-1]
        if (one - other).abs().max() > TOLERANCE[model.dtype] * one.abs().max():
            why = "its tokens depend on those that follow"
    if why:
        raise LoadingFailed(
            f"it was not made to generate text: {why}; {advice(model.config.to_dict())}"
        )


def _config(module: nn.Module) -> Any:
    """Its configuration, if that names a sliding window."""
    config = getattr(module, "config", None)
    return config if isinstance(getattr(config, "sliding_window", None), int) else None


def load_language_model(options: GeneratorOptions) -> LanguageModel:
    name = options.model
    path = str(DEMO_FOLDER) if name == "demo" else name
    log.info("loading chat model=%s", name)
    started = time.monotonic()
    auto: Any = AutoModelForCausalLM
    try:
        if path.startswith(("/", ".", "~")):
            path = str(Path(path).expanduser())
            if not Path(path).is_dir():
                raise FileNotFoundError("there is no such folder")
        device = choose_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # where this thread's kernels and graphs go
        memory.check_fits(path, options.dtype, device)
        keywords = {} if options.attention == "auto" else {"attn_implementation": options.attention}
        model, info = auto.from_pretrained(
            path,
            dtype=choose_dtype(options.dtype, path, device),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **keywords,
        )
        model.to(device).eval()
        check_generates(model, missing_weights.names_of(info))
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LoadingFailed(f"the chat model {name!r} could not be loaded: {reason}") from error
    log.info("loaded seconds=%.1f", time.monotonic() - started)
    return LanguageModel(name, model, tokenizer)
