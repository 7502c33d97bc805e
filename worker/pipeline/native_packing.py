"""The native attention for packed batches on a CPU: built and compared in the background, then used
from the next batch on. Without a compiler, or where it says something else, torch's goes on."""

import logging
import threading

import torch

from worker.cores import release
from worker.model import native_attention
from worker.model.loading import first_line
from worker.model.self_check import SHORTEST, TOLERANCE, compare
from worker.pipeline.packed_attention import (
    Look,
    Packing,
    attend_in_groups,
    attend_natively,
    plan_batch,
)

log = logging.getLogger("onequeue.native_packing")


def begin(packing: Packing) -> None:
    """In a separate thread; `packing.native` tells when it is used."""
    model = packing.model
    if model.device.type == "cpu" and model.dtype in native_attention.DTYPES:
        threading.Thread(target=_take, args=(packing,), name="compile", daemon=True).start()


def _take(packing: Packing) -> None:
    release()
    try:
        native_attention.load()
        for look in list(packing.looks):
            check(look, packing.model.dtype)
    except Exception as error:
        log.warning("no native attention, torch's serves: %.300s", first_line(error))
    else:
        packing.native = True
        log.info("native attention")


@torch.inference_mode()
def check(look: Look, dtype: torch.dtype) -> None:
    """CannotRun unless it gives what torch's attention gives for random rows beyond the window."""
    counts = [3, 2 * look.window + SHORTEST, 17, 18]
    plan = plan_batch(counts, max(counts), torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(counts), look.size, generator=generator).to(dtype)
        for heads in (look.heads, look.key_heads, look.key_heads)
    )
    reference, got = (
        attend(query, key, value, plan, look) for attend in (attend_in_groups, attend_natively)
    )
    compare(got, reference, TOLERANCE[dtype], "its sums differ")
