"""A causal language model: its loading, its limits and the layout of its weights.

paged_runner.py runs the model where the check in paging.py passes, cached_runner.py elsewhere.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from worker.backends.cpu.fused_linear import find_shared_inputs, fuse_linears
from worker.backends.cpu.linear import pack_weights, quantize_weights, unpack_weights
from worker.backends.cpu.linear_layers import emulates_dtype, packs_dtype, plain_linear
from worker.backends.native_attention import NATIVE_DTYPES, has_compiler, try_load_native_ops
from worker.backends.quantization import has_library_layers, without_outliers
from worker.backends.recurrent import RecurrentModule
from worker.decision_config import DecisionConfig
from worker.device.device import free_bytes
from worker.device.self_check import (
    TOLERANCE,
    CannotRun,
    attention_of,
    checked_attention,
    random_prompts,
    relative_error,
    tolerance_of,
)
from worker.error_classification import first_line
from worker.load_context import LoadStopped, on_worker
from worker.messages.generation import TEXT_ONLY
from worker.messages.protocol import Fallback
from worker.model.attention.kv_cache import LayerShape, StateShape
from worker.model.check import Reference
from worker.model.generation_config import (
    check_generation_config,
    fill_sampling_defaults,
    log_not_served,
    read_generation_config,
)
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    checkpoint_path,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    missing_weights_matter,
)
from worker.model.long_context import RotaryFactors
from worker.task_detection import split_file, task_hint, tasks_of

log = logging.getLogger("onequeue.language_model")

# Tokens of context where a configuration has no limit, and the settings that hold one.
DEFAULT_CONTEXT = 32768
CONTEXT_SETTINGS = (
    "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "context_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GeneratorOptions(ModelOptions):
    """Settings of a model that generates text; `kv_cache_gb` in GB of 10^9 bytes."""

    quantization: str = "none"
    compile: str = "auto"
    speculation: str = "auto"
    simulated_model: str = "none"
    max_model_len: int | None = None
    kv_cache_gb: float | None = None
    max_running: int = 256
    max_image_mp: float = 64.0
    chat_template: str = "auto"  # a file, or the checkpoint's own
    decision_config: str = "auto"  # a file, the checkpoint's own, or none
    chat_template_kwargs: str = "{}"  # JSON, as the next
    sampling_defaults: str = "{}"
    reasoning: str = "auto"  # on or off: the switch of the chat template
    default_seed: int | None = None  # of requests without one; None: random ones
    deterministic: bool = False  # on a GPU, outputs do not depend on the batch
    lora_dir: str = "none"  # the folder of adapters, if some may be loaded
    kv_cache_dir: str = "none"  # the folder of stored keys and values
    kv_cache_dir_gb: float = 10.0  # its largest size, in GB of 10^9 bytes
    later_caches: int = 0  # engines loaded after this one that size their cache by the free memory


class LanguageModel:
    """A loaded model and its tokenizer.

    `folder`: the checkpoint's path, or its name on a hub. `is_multimodal`: it takes media.
    """

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
        self.template_defaults: dict[str, Any] = {}  # variables of the chat template
        self.decision_config = DecisionConfig()
        self.reasoning = "auto"  # of GeneratorOptions, as the next
        self.default_seed: int | None = None
        self.refused_media = TEXT_ONLY  # why media are refused, by kind
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.parameters = model.num_parameters()
        # inputs of quantized layers are rounded
        dtype = torch.bfloat16 if has_library_layers(model) else model.dtype
        self.tolerance = tolerance_of(dtype, self.config)
        limits = [getattr(self.config, name, None) for name in CONTEXT_SETTINGS]
        limit = next((n for n in limits if isinstance(n, int) and n > 0), DEFAULT_CONTEXT)
        self.rotary = RotaryFactors(model, self.config, limit)
        # one entry per layer, set by paging.py; a window of 0 means none
        self.layers: list[LayerShape] = []
        self.windows: list[int] = []
        # of recurrent layers, set by paging.py
        self.recurrent: list[RecurrentModule] = []
        self.states: list[StateShape] = []
        self.fallbacks: tuple[Fallback, ...] = ()
        self.deterministic = False  # a GPU's operations are batch-invariant
        self.native = False  # native operations are to serve, set by pack_weights
        self.digest = b""  # of the weights, if keys and values are stored (fingerprint.py)
        self.lora: Any = None  # its LoraLayers, since the first adapter was loaded (lora.py)
        # width of the logits, which may exceed the tokenizer's number of tokens
        self.vocab_size = int(self.config.vocab_size)

    @property
    def defaults(self) -> GenerationConfig:
        return self.model.generation_config or GenerationConfig()

    @property
    def decoder(self) -> Any:
        """The part that attends over the paged cache: a multimodal model's text decoder."""
        return self.model.get_decoder() if self.is_multimodal else self.model

    @property
    def context(self) -> int:
        """Return the model's maximum number of tokens in a sequence."""
        return self.rotary.context

    def extend_context(self, max_model_len: int | None) -> None:
        """Extend `context` to `max_model_len` tokens, None: to all that the checkpoint has rotary
        factors for. Log why it is not extended."""
        length = min(max_model_len or self.rotary.longest, self.rotary.longest)
        try:
            self.rotary.fix(length)
        except CannotRun as error:
            log.warning("context=%d of %d: %s", self.context, self.rotary.longest, error)

    def fall_back(self, refused: str, error: Exception, serves: str, lost: str) -> None:
        """Record and log that a faster way to run the model is refused: `serves` runs instead.

        Only the text of CannotRun is for clients; that of other errors may name folders.
        """
        reason = first_line(error)[:300]
        log.warning("%s refused: %s; %s serves instead: %s", refused, reason, serves, lost)
        if not isinstance(error, CannotRun):
            reason = "see the server's log"
        self.fallbacks = (*self.fallbacks, Fallback(refused, reason, serves, lost))

    def attempt(self, change: Callable[[], object], refused: str, serves: str, lost: str) -> bool:
        """Return whether `change` succeeds: one that raises leaves the model as it was."""
        try:
            change()
        except LoadStopped:
            raise
        except Exception as error:  # such as a kernel that does not compile, too little memory
            self.fall_back(refused, error, serves, lost)
            return False
        return True

    def random_prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return prompts of so many ordinary tokens, the same on every call."""
        return random_prompts(self.model, self.tokenizer, lengths)

    def own_check(self) -> Callable[..., None]:
        """Return a function that raises CannotRun unless the own forward of the model, or of a copy
        that it is passed, gives the logits that the model's gives now."""

        @torch.inference_mode()
        def logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
            ids = torch.tensor(prompts, device=self.device)
            return [*model(input_ids=ids, use_cache=False).logits]

        def run(prompts: Sequence[Sequence[int]], model: Any = None) -> list[Tensor]:
            return on_worker(partial(logits, model or self.model, prompts))

        reference = Reference(run, self.random_prompts([8]))
        reference.close()
        return lambda model=None: reference.check(run(reference.prompts, model), self.tolerance)

    def pack_weights(
        self, quantization: str, recheck: Callable[[], None], native: bool = False
    ) -> None:
        """Pack or quantize the weights for the CPU's kernels; a GPU's are fused.

        `recheck` runs the model and raises if its output is wrong. `native`: native operations are
        to serve. Those with a layout of their own are built first if they are not there. Raise
        LoadingFailed if the device cannot run the quantization.
        """
        on_cpu = self.device.type == "cpu"
        self.native = native and on_cpu and self.dtype in NATIVE_DTYPES and has_compiler()
        if quantization in ("int8", "int4"):
            if not on_cpu:
                raise LoadingFailed(
                    f"QUANTIZATION={quantization} needs DEVICE=cpu, not {self.device}"
                )
            native = self.native and try_load_native_ops(build=True)
            free = free_bytes(self.device)
            quantize_weights(self.model, free, recheck, native, quantization)
            # inputs of quantized layers
            self.tolerance = tolerance_of(torch.bfloat16, self.config)
        elif not on_cpu:
            fuse = partial(fuse_weights, self.model, recheck)
            self.attempt(fuse, "fused products", "separate ones", "steps are slower")
            if not self.deterministic:
                group = partial(group_experts, self.model, recheck)
                self.attempt(group, "Triton experts", "torch's", "experts wait for the GPU")
        elif packs_dtype(self.dtype):
            free = free_bytes(self.device)
            emulated = self.native and emulates_dtype(self.dtype)
            bf16_weights = emulated and try_load_native_ops(build=True)
            pack_weights(self.model, free, recheck, bf16_weights=bf16_weights)
        elif emulates_dtype(self.dtype):
            log.warning("this CPU emulates bfloat16: DTYPE=float32 is faster here")


def fuse_weights(model: nn.Module, check: Callable[[], object]) -> None:
    """Make one product, for a GPU, of layers that are called on one input. Raise what `check`
    raises, which runs the model afterwards; the layers are then as before."""
    try:
        groups = find_shared_inputs(model, check)
        fuse_linears(model, groups, plain_linear, contiguous=False)
        check()
    except Exception:  # a model that needs contiguous outputs, too little memory
        unpack_weights(model)
        raise
    finally:
        torch.cuda.empty_cache()  # the former weights: free memory is measured next
    log.info("fused products=%d", len(groups))


def group_experts(model: PreTrainedModel, check: Callable[[], object]) -> None:
    """Run the experts of a mixture on Triton kernels if the library's wait for the GPU. Raise what
    `check`, which runs the model, raises afterwards; the experts are then as before."""
    try:  # triton comes with torch's builds for GPUs only
        from worker.backends.cuda.triton_experts import use_triton_experts
    except ImportError:
        return
    use_triton_experts(model, check)


def load_language_model(options: GeneratorOptions) -> LanguageModel:
    """Load the model of the options; raise LoadingFailed, with its name and the reason."""
    name = options.model
    with load_errors(name, "chat", options.attention):
        path = checkpoint_path(name, "chat")
        if not split_file(path)[1]:
            check_generation_config(read_generation_config(path))  # before the weights are read
        model, tokenizer, missing = load_checkpoint(
            options, path, auto_class, quantization=options.quantization
        )
        if model.device.type == "cuda":
            # the worker's kernels and graphs run there
            on_worker(partial(torch.cuda.set_device, model.device))
            if options.deterministic:
                use_batch_invariant_operations(model)
        is_multimodal = auto_class(model.config) is not AutoModelForCausalLM
        decoder = model.get_decoder() if is_multimodal else model
        attention = checked_attention(decoder, is_multimodal)
        with attention_of(decoder, attention), without_outliers(model):
            check_generates(model, missing)
        language = LanguageModel(options.name, model, tokenizer, path, is_multimodal)
        language.deterministic = options.deterministic and model.device.type == "cuda"
        model.generation_config = config = language.defaults
        check_generation_config(vars(config), language.vocab_size)
        log_not_served(vars(config))
        fill_sampling_defaults(config, options.sampling_defaults)
    return language


def use_batch_invariant_operations(model: PreTrainedModel) -> None:
    """Make a row's result on a GPU independent of others; raise LoadingFailed without Triton."""
    try:  # triton comes with torch's builds for GPUs only
        from worker.backends.cuda.batch_invariant import replace_operations
    except ImportError as error:
        raise LoadingFailed(f"DETERMINISTIC=1 needs Triton on a GPU: {error}") from error
    replace_operations()
    if getattr(model.config.get_text_config(), "_experts_implementation", None):
        model.set_experts_implementation("eager")  # the products of each expert are linear layers


def auto_class(config: Any) -> Any:
    """Return transformers' auto class for a configuration with or without media."""
    kind = type(config)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    # decoders with an audio encoder are listed beside models with an encoder of text
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise LoadingFailed(f"it was not made to generate text: {task_hint(config.to_dict())}")


def check_generates(model: PreTrainedModel, missing: dict[str, str]) -> None:
    """Raise LoadingFailed unless the model is causal and its checkpoint has the weights of its
    language modeling head. `missing`: weights that the checkpoint lacks."""

    @torch.inference_mode()
    def logits(last: int) -> Tensor:
        ids = torch.tensor([[*range(1, 8), last]], device=model.device)
        output: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return output.float()

    one, other = (on_worker(partial(logits, last))[:-1] for last in (0, 8))
    if missing_weights_matter(model, missing, lambda: logits(0).cpu().numpy().tobytes()):
        why = describe_missing_weights(missing)
        if "text-generation" in tasks_of(model.config.to_dict()):
            raise LoadingFailed(f"{why}: download it again, or add them")
    elif relative_error(other, one) > TOLERANCE[model.dtype]:
        why = "its tokens depend on those that follow"
    else:
        return
    raise LoadingFailed(
        f"it was not made to generate text: {why}; {task_hint(model.config.to_dict())}"
    )
