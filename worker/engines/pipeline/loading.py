"""Load a pipeline and choose how its batches run; runs on the worker thread.

Loading checks that the checkpoint has the weights that the outputs depend on. Batches of random
tokens, packed and padded, are compared with single rows. A kind of batch that changes the outputs
is not used, and the log shows the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SpeechT5HifiGan,
    pipeline,
)

from worker.backends.cpu.linear import pack_weights
from worker.backends.cpu.linear_layers import emulates_dtype, packs_dtype
from worker.backends.gptq import drop_int4_grids
from worker.backends.quantization import check_quantization
from worker.device.device import choose_device, free_bytes
from worker.device.self_check import TOLERANCE, CannotRun, length_beyond_windows, random_prompts
from worker.engines.pipeline.inputs import InputReader, warm_up_input
from worker.engines.pipeline.limits import context_limit, vocabulary_size
from worker.engines.pipeline.packed_attention import (
    Packing,
    start_native_kernels,
    use_flash_attention,
)
from worker.engines.pipeline.runner import PipelineRunner, split_output
from worker.engines.pipeline.synthesis import SynthesisRunner, find_voices
from worker.error_classification import first_line
from worker.load_context import add_memory, on_worker
from worker.media.decode_limiter import DecodeLimiter
from worker.media.inputs import to_json
from worker.messages.protocol import Batching, PipelineInput
from worker.model.check import Reference
from worker.model.generation_config import fill_sampling_defaults
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    Pipe,
    Weights,
    attention_keywords,
    check_fits,
    check_tokenizer,
    checkpoint_path,
    choose_dtype,
    describe_missing_weights,
    is_worth_compiling,
    load_errors,
    load_tokenizer,
    log_own_attention,
    missing_weights_matter,
    model_info,
    record_missing_weights,
)
from worker.model.long_context import factors_change
from worker.task_detection import CONFIG, task_hint, tasks_of
from worker.tasks import SPEECH_TASK, TASKS


@dataclass(frozen=True, slots=True)
class PipelineOptions(ModelOptions):
    _: KW_ONLY
    task: str
    compile: str = "auto"  # auto, on, off
    sampling_defaults: str = "{}"  # JSON, for text-generation
    max_image_mp: float = 64.0
    voices_dir: str = "none"


def load_pipeline(options: PipelineOptions) -> tuple[Pipe, dict[str, str]]:
    """Return the pipeline, and the names of the weights that its checkpoint lacks."""
    from transformers.integrations.mistral.tokenizer import resolve_mistral_format

    task = options.task
    make: Any = pipeline  # overloaded by literal task
    with load_errors(options.model, task, options.attention), record_missing_weights() as lacking:
        path = checkpoint_path(options.model, "fill-mask")
        device = choose_device(options.device)
        check_fits(path, options.dtype, device)
        check_quantization(AutoConfig.from_pretrained(path, trust_remote_code=False), device)
        pipe = make(
            task,
            model=path,
            device=device,
            dtype=choose_dtype(options.dtype, path, device),
            trust_remote_code=False,  # if unset, transformers prompts on a terminal
            model_kwargs={"use_safetensors": True, **attention_keywords(options.attention)},
            **(own_vocoder(path) if task == SPEECH_TASK else {}),
            **({"tokenizer": load_tokenizer(path)} if resolve_mistral_format(path)[0] else {}),
        )
        if TASKS[task].kind == "text" and pipe.tokenizer is not None:
            check_tokenizer(pipe.tokenizer)
    pipe.model.eval()
    if vocoder := getattr(pipe, "vocoder", None):
        vocoder.to(pipe.device, pipe.dtype).eval()
    drop_int4_grids(pipe.model)
    add_memory(Weights(pipe.model))
    config: Any = getattr(pipe.model, "generation_config", None)
    if getattr(config, "return_timestamps", None) is False:
        config.return_timestamps = None  # False makes Whisper refuse long recordings
    if task == "text-generation":
        fill_sampling_defaults(pipe.model.generation_config, options.sampling_defaults)
    return pipe, lacking.get(id(pipe.model), {})


def own_vocoder(path: str) -> dict[str, Any]:
    """Return the vocoder that lies in a checkpoint's folder `vocoder`, as an argument of the
    pipeline. By default the pipeline loads one from the hub for a model that makes spectrograms."""
    folder = Path(path) / "vocoder"
    if not (folder / CONFIG).is_file():
        return {}
    return {"vocoder": SpeechT5HifiGan.from_pretrained(folder, use_safetensors=True)}


def load_runner(options: PipelineOptions, max_rows: int) -> PipelineRunner:
    return new_runner(load_checked_pipeline(options), options, max_rows)


def load_checked_pipeline(options: PipelineOptions) -> Pipe:
    """Load a pipeline. Raises LoadingFailed if the model is not found or not made for the task."""
    task = options.task
    pipe, lacking = load_pipeline(options)
    if missing_weights_matter(pipe.model, lacking, partial(_warm_up_output, pipe, task)):
        config = pipe.model.config.to_dict()
        advised = "" if task in tasks_of(config) else f"; {task_hint(config)}"
        raise LoadingFailed(
            f"the model {options.model!r} was not made for {task}: "
            f"{describe_missing_weights(lacking)}{advised}"
        )
    if pipe.tokenizer is not None and TASKS[task].kind == "text":
        pipe.tokenizer.padding_side = "right"
    if options.attention != "auto":
        try:
            on_worker(partial(_warm_up_output, pipe, task))
        except Exception as error:  # each backend raises its own errors
            raise LoadingFailed(
                f"the model {options.model!r} does not run with ATTN_IMPLEMENTATION="
                f"{options.attention} on {pipe.device.type}: {first_line(error)}"
            ) from error
    return pipe


def new_runner(pipe: Pipe, options: PipelineOptions, max_rows: int) -> PipelineRunner:
    task = options.task
    batching, why, packing = choose_batching(task, pipe)
    if packing:
        log_own_attention(options.attention, "packed batches")
    count = pipe.model.num_parameters()
    info = model_info(task, options.name, pipe.model, count, batching, why)
    if task == "fill-mask":
        info = replace(info, mask=pipe.tokenizer.mask_token)
    if task == "text-classification":
        config: Any = pipe.model.config
        info = replace(info, labels=config.id2label, max_length=context_limit(pipe))
    limiter = DecodeLimiter(int(options.max_image_mp * 1e6))
    if task == SPEECH_TASK:
        return new_synthesis_runner(
            SynthesisRunner(pipe, info, packing, limiter, max_rows), options
        )
    runner = PipelineRunner(pipe, info, packing, limiter, max_rows)
    warm_up = partial(on_worker, runner.warm_up)
    on_cpu, dtype = pipe.device.type == "cpu", pipe.dtype
    if on_cpu and packs_dtype(dtype) and emulates_dtype(dtype):
        pack_weights(pipe.model, free_bytes(pipe.device), warm_up)
    use_flash_attention(pipe.model, packing, warm_up)
    if packing and is_worth_compiling(options.compile, info.parameters):
        start_native_kernels(pipe.model, packing, warm_up, options.compile)
    return runner


def new_synthesis_runner(runner: SynthesisRunner, options: PipelineOptions) -> SynthesisRunner:
    """Return the runner with its voices. Raises LoadingFailed if the model does not run so."""
    pipe = runner.pipe
    runner.voices = find_voices(pipe, options.voices_dir, runner.layout)
    runner.info = replace(runner.info, voices=tuple(runner.voices))
    try:
        if pipe.sampling_rate is None:
            raise ValueError("its config.json has no sampling_rate")
        on_worker(runner.warm_up)
    except Exception as error:  # of the model's own class
        raise LoadingFailed(
            f"the model {options.model!r} does not speak: {first_line(error)}"
        ) from error
    return runner


def _warm_up_output(pipe: Pipe, task: str) -> bytes:
    """Return the pipeline's output for the warm-up input, as JSON. A threshold is set to 0, since
    with random weights nothing may exceed it."""
    inputs, parameters = warm_up_input(task, pipe)
    if "threshold" in TASKS[task].parameters:
        parameters = {**parameters, "threshold": 0.0}
    payload = PipelineInput(inputs, parameters)
    with DecodeLimiter(1 << 20).lease() as lease:
        return to_json(pipe(InputReader(task, pipe).read(payload, pipe, lease), **parameters))


# ── the choice of batching ──


def choose_batching(task: str, pipe: Pipe) -> tuple[Batching, str, Packing | None]:
    """Return the fastest batching that keeps the model's own output, the reason why no faster one
    is used, and the attached packing if it is that."""
    if not TASKS[task].stages or not TASKS[task].batches:
        return "single", "", None
    if TASKS[task].kind != "text":
        return "same shape", "", None
    model, tokenizer, limit = pipe.model, pipe.tokenizer, context_limit(pipe)
    if tokenizer is None or tokenizer.pad_token_id is None:
        return "single", "its tokenizer has no padding token", None
    if tokenizer.pad_token_id >= vocabulary_size(pipe):
        return "single", "its vocabulary lacks its tokenizer's padding token", None
    if factors_change(model, limit):
        return "single", "its rotary factors depend on the longest text of a batch", None
    why = _why_not(lambda: check_packing(Packing(model), tokenizer, limit))
    if not why:
        packing = Packing(model)
        packing.attach()
        return "packed", "", packing
    counts = counts_beyond_windows(model, limit)
    if why_not_padded := _why_not(lambda: check_rows(model, tokenizer, counts, model)):
        return "single", f"packed: {why}; padded: {why_not_padded}", None
    return "padded", why, None


def _why_not(check: Callable[[], None]) -> str:
    """Return the reason why a check fails; "" if it passes."""
    try:
        check()
    except CannotRun as error:
        return str(error)
    except Exception as error:  # each model class raises its own errors
        return f"the forward raised {repr(error)[:200]}"
    return ""


def random_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, counts: Sequence[int]
) -> dict[str, Tensor]:
    """Return rows of random ordinary tokens, padded, as the arguments [B, L] that the tokenizer
    makes of texts. Each ends in the token that ends texts, which some models search for."""
    texts = random_prompts(model, tokenizer, counts)
    last = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if isinstance(last, int):
        for text in texts:
            text[-1] = last
    return dict(pad(tokenizer, {"input_ids": texts}).to(model.device))


def pad(tokenizer: PreTrainedTokenizerBase, batch: dict[str, list[list[int]]]) -> Any:
    """Return token ids, and the values that belong to them, as padded tensors [B, L]."""
    several = len(batch["input_ids"]) > 1  # a single row works without a padding token
    return tokenizer.pad(batch, padding=several, padding_side="right", return_tensors="pt")


def counts_beyond_windows(model: PreTrainedModel, limit: int) -> list[int]:
    """Return the tokens of a short row and of two of similar length, which share an attention call
    when packed. The two exceed the attention window, as far as `limit` and time allow."""
    longest = length_beyond_windows(model.config, limit)
    return [min(3, longest), longest, longest - longest // 8]


def check_packing(packing: Packing, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    """Raise CannotRun unless packed rows give the output of each row alone."""
    counts = counts_beyond_windows(packing.model, limit)

    def forward_packed(**batch: Tensor) -> Any:
        with ExitStack() as undo, packing.batch(counts, max(counts)):
            undo.callback(packing.attach())
            return packing.model(**batch)

    check_rows(packing.model, tokenizer, counts, forward_packed)
    if packing.calls != len(packing.layers):
        raise CannotRun("its layers do not call a registered attention function")


@torch.no_grad()
def check_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    counts: Sequence[int],
    forward_batch: Callable[..., Any],
) -> None:
    """Raise CannotRun unless each float output of a batch is the row's own, up to rounding."""
    batch = random_rows(model, tokenizer, counts)

    def run(forward: Callable[..., Any], rows: dict[str, Tensor], counts: Any) -> list[Tensor]:
        outputs = split_output(on_worker(partial(forward, **rows)), len(counts), counts)
        return [value for pair in zip(outputs, counts, strict=True) for value in _floats(*pair)]

    def run_alone(counts: Sequence[int]) -> list[Tensor]:
        rows = [
            ({name: value[row : row + 1, :n] for name, value in batch.items()}, n)
            for row, n in enumerate(counts)
        ]
        return [value for row, n in rows for value in run(model, row, [n])]

    together = run(forward_batch, batch, counts)
    alone = Reference(run_alone, counts, name="its outputs in a batch")
    if [value.shape for value in together] != [value.shape for value in alone.logits]:
        raise CannotRun("its outputs have other shapes in a batch")
    alone.check(together, max(TOLERANCE[value.dtype] for value in alone.logits))


def _floats(outputs: Any, count: int) -> Iterator[Tensor]:
    """Yield the float outputs [..., size] of a row of `count` tokens as [N, size]."""
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.ndim > 2 and value.shape[1] != count:
            raise CannotRun(f"its {name} are not one for each token")
        yield value.reshape(-1, *value.shape[-1:])
