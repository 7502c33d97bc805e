"""A causal language model: loading it, and what is known of it once it is there.

How it is run is not here: paged_runner.py where paging.py finds that it can be, else
cached_runner.py.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from worker.device.device import free_bytes
from worker.device.self_check import TOLERANCE, compare, explicit_masks
from worker.messages.generation import TEXT_ALONE
from worker.model.attention.kv_cache import LayerShape
from worker.model.attention.native import native_ops_loaded
from worker.model.cpu import linear
from worker.model.cpu.linear import emulates_dtype, pack_weights, packs_dtype, quantize_weights
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    local_path,
    missing_weights_matter,
)
from worker.task_detection import advice

log = logging.getLogger("onequeue.language_model")

# The context of a model that knows no limit, and where its configuration says the limit.
UNLIMITED = 32768
CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "context_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GeneratorOptions(ModelOptions):
    quantization: str = "none"
    compile: str = "auto"
    speculation: str = "auto"
    max_model_len: int | None = None
    kv_cache_gb: float | None = None
    max_running: int = 256
    max_image_mp: float = 64.0


class LanguageModel:
    """`folder`: the checkpoint's, or its name on a hub. `is_multimodal`: it takes pictures."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: str = "",
        is_multimodal: bool = False,
    ) -> None:
        self.name = name
        self.folder = folder
        self.is_multimodal = is_multimodal
        self.no_images = TEXT_ALONE  # why they are refused, if nothing reads them
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.parameters = model.num_parameters()
        self.tolerance = TOLERANCE[model.dtype]
        # filled in by paging.py, a place a layer; a window of 0 is none
        self.layers: list[LayerShape] = []
        self.windows: list[int] = []
        # how many rows the output has: a model may have more than the tokenizer has tokens
        self.vocab_size = int(self.config.vocab_size)

    @property
    def defaults(self) -> GenerationConfig:
        empty: Any = GenerationConfig  # not annotated
        return self.model.generation_config or empty()

    @property
    def decoder(self) -> Any:
        """The part that runs paged: of a multimodal model, what its pictures' rows go into."""
        model: Any = self.model  # not annotated
        return model.get_decoder() if self.is_multimodal else model

    @property
    def context(self) -> int:
        """Tokens the model was made for."""
        known = [getattr(self.config, name, None) for name in CONTEXT_NAMES]
        limit = next((n for n in known if isinstance(n, int) and n > 0), UNLIMITED)
        ropes = getattr(self.config, "rope_parameters", None) or {}
        for rope in (ropes, *ropes.values()):  # some have one for each kind of layer
            if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
                # tables that depend on the longest sequence of a row: within this they are the same
                limit = min(limit, rope.get("original_max_position_embeddings") or limit)
        return int(limit)

    def compare(self, got: Tensor, reference: Tensor) -> None:
        compare(got, reference, self.tolerance)

    def pack_weights(
        self, quantization: str, recheck: Callable[[], None] | None = None, native: bool = False
    ) -> None:
        """Weights as this device's kernels want them. Without `recheck`, which runs the model and
        raises if that says something else then, only if `quantization` asks for it. `native`:
        native operations are used if they are built, and built at once where there is no room for
        what serves until then."""
        on_cpu = self.device.type == "cpu"
        if quantization == "int8":
            if not on_cpu:
                raise LoadingFailed("QUANTIZATION=int8 is for models on a CPU")
            quantize_weights(self.model, free_bytes(self.device), recheck or (lambda: None))
            self.tolerance = TOLERANCE[torch.bfloat16]  # what int8 weights are multiplied by
        elif recheck and on_cpu and packs_dtype(self.dtype):
            free = free_bytes(self.device)
            widens = native and emulates_dtype(self.dtype)
            if widens:
                widens = native_ops_loaded(build=not linear.has_memory(self.model, free))
            pack_weights(self.model, free, recheck, widens=widens)
        elif on_cpu and emulates_dtype(self.dtype):
            log.warning("this CPU emulates bfloat16: DTYPE=float32 is faster here")


def load_language_model(options: GeneratorOptions) -> LanguageModel:
    """LoadingFailed names the model and says why."""
    name = options.model
    with load_errors(name, "chat"):
        path = local_path(name, "chat")
        model, tokenizer, lacking = load_checkpoint(options, path, auto_class)
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # where this thread's kernels and graphs go
        is_multimodal = auto_class(model.config) is AutoModelForImageTextToText
        with explicit_masks(model.get_decoder()) if is_multimodal else nullcontext():
            check_generates(model, lacking)
    return LanguageModel(name, model, tokenizer, path, is_multimodal)


def auto_class(config: Any) -> Any:
    """The auto class for a configuration: that of models which take pictures, or of others."""
    is_multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM


def check_generates(model: PreTrainedModel, lacking: dict[str, str]) -> None:
    """LoadingFailed unless the checkpoint has weights for what follows a text, and a token's
    logits depend on those before it alone."""

    @torch.inference_mode()
    def logits(last: int) -> Tensor:
        ids = torch.tensor([[*range(1, 8), last]], device=model.device)
        made: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return made.float()

    one, other = logits(0)[:-1], logits(8)[:-1]
    if missing_weights_matter(model, lacking, lambda: logits(0).cpu().numpy().tobytes()):
        why = describe_missing_weights(lacking)
    elif (one - other).abs().max() > TOLERANCE[model.dtype] * one.abs().max():
        why = "its tokens depend on those that follow"
    else:
        return
    raise LoadingFailed(
        f"it was not made to generate text: {why}; {advice(model.config.to_dict())}"
    )
