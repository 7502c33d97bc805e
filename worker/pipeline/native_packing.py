"""What makes an encoder quick on a CPU: weights laid out for its kernels; then, built and compared
in the background, native attention of packed rows and products by matrix tiles or of few rows, each
used as soon as it is there. Without a compiler, or where they say something else, torch's go on."""

import logging
import threading
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from worker.cores import compute_alone, release
from worker.model import cpu_linear, native_attention, native_linear, tile_linear
from worker.model.loading import first_line, free_bytes, worth_compiling
from worker.model.self_check import SHORTEST, TOLERANCE, compare
from worker.pipeline.packed_attention import (
    Attention,
    Packing,
    attend_in_groups,
    attend_natively,
    plan_batch,
)

log = logging.getLogger("onequeue.native_packing")


def begin(
    model: PreTrainedModel, packing: Packing | None, run: Callable[[], object], compile: str
) -> None:
    """`run` runs the model; `packing.native` tells when the rest, which takes a thread of its own
    if it is worth it, is used. Heads stay as they are: a vocabulary's may be as large as all other
    layers, and is multiplied by few rows or none."""
    if model.device.type != "cpu" or model.dtype not in native_attention.DTYPES:
        return
    parameters = model.num_parameters()
    if cpu_linear.packs(model.dtype):
        cpu_linear.pack(model.base_model, free_bytes(model.device), run, shares=False)
    if packing and worth_compiling(compile, parameters):
        run()  # the packing sees how its layers attend
        threading.Thread(target=_take, args=(packing,), name="compile", daemon=True).start()


def _take(packing: Packing) -> None:
    release()
    compute_alone()
    try:
        native_attention.load()
        for kind in list(packing.kinds):
            check(kind, packing.model.dtype)
    except Exception as error:
        log.warning("no native attention, torch's serves: %.300s", first_line(error))
    else:
        packing.native = True
        log.info("native attention")
        tile_linear.use(packing.model.base_model, free_bytes(packing.model.device))
        native_linear.use(packing.model.base_model)


@torch.inference_mode()
def check(kind: Attention, dtype: torch.dtype) -> None:
    """CannotRun unless it gives what torch's attention gives for random rows beyond the window."""
    counts = [3, 2 * kind.window + SHORTEST, 17, 18]
    plan = plan_batch(counts, max(counts), torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(counts), kind.size, generator=generator).to(dtype)
        for heads in (kind.heads, kind.key_heads, kind.key_heads)
    )
    reference, got = (
        attend(query, key, value, plan, kind) for attend in (attend_in_groups, attend_natively)
    )
    compare(got, reference, TOLERANCE[dtype], "its sums differ")
