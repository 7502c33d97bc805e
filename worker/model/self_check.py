"""What worker/model/ and worker/pipeline/ share of the checks that run a model at load."""

import torch
from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Rows are not made longer than this to exceed a window: it would take longer than loading.
LONGEST = 600
SHORTEST = 20


class Differs(Exception):
    """Rows in a batch do not give what they give alone; the message says how."""


def encoder_lengths(model: PreTrainedModel, limit: int) -> list[int]:
    """Two rows near in length, which share an attention call when packed, and a short one. They
    exceed the attention window, as far as `limit` and time allow."""
    config = model.config
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "local_attention")]
    reach = 2 * max(windows) + 8
    longest = min(limit, reach if SHORTEST < reach <= LONGEST else SHORTEST)
    return [min(3, longest), longest, longest - longest // 8]
