"""From settings to a pipeline with its weights in place. Runs on the worker thread."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoConfig, pipeline

from batching.errors import OnequeueError
from worker.architectures import DEMO_TASK
from worker.model import missing_weights
from worker.tasks import resolve_task

log = logging.getLogger("onequeue.loading")

DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "fill-mask"
# A transformers.Pipeline. Its annotations call everything optional, whatever the task.
Pipe: TypeAlias = Any


class LoadingFailed(OnequeueError):
    """The model cannot be served; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    task: str
    model: str
    device: str = "auto"  # auto, cpu, cuda, cuda:1, …
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    attention: str = "auto"  # auto, or a name transformers knows
    max_image_mp: float = 64.0


def load_pipeline(options: LoadOptions) -> tuple[Pipe, dict[str, str]]:
    """The pipeline, and the names of the weights that its checkpoint lacks."""
    task = resolve_task(options.task)
    model = options.model
    if model == "demo":
        if task != DEMO_TASK:
            raise LoadingFailed(
                f"PIPELINE_MODEL=demo serves {DEMO_TASK} only: name a model for {task}"
            )
        model = str(DEMO_FOLDER)
    log.info("loading task=%s model=%s", task, options.model)
    started = time.monotonic()
    make: Any = pipeline  # overloaded by literal task
    try:
        if model.startswith(("/", ".", "~")):
            model = str(Path(model).expanduser())
            if not Path(model).is_dir():
                raise FileNotFoundError("there is no such folder")
        device = choose_device(options.device)
        keywords = {} if options.attention == "auto" else {"attn_implementation": options.attention}
        with missing_weights.recorded() as lacking:
            pipe = make(
                task,
                model=model,
                device=device,
                dtype=choose_dtype(options.dtype, model, device),
                trust_remote_code=False,  # unset, a terminal would be asked
                model_kwargs=keywords,
            )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LoadingFailed(
            f"the model {options.model!r} could not be loaded for {task}: {reason}"
        ) from error
    pipe.model.eval()
    log.info("loaded seconds=%.1f", time.monotonic() - started)
    return pipe, lacking.get(id(pipe.model), {})


def choose_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_dtype(name: str, model: str, device: torch.device) -> torch.dtype | str:
    """The checkpoint's own dtype for `auto`, but bfloat16 where a CPU would run float16."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # checked by the settings
    own = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "dtype", None)
    return torch.bfloat16 if own == torch.float16 and device.type == "cpu" else "auto"
