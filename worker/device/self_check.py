"""The check at load: random prompts, run in two ways, must give the same but for rounding.

What is run is the caller's: paging.py, paged_runner.py and cuda_graphs.py, cached_runner.py, and
pipeline/load.py.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Of the largest number, for rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Prompts are not made longer than this to exceed a window: it would take longer than loading.
MAX_PROMPT_TOKENS = 600
MIN_PROMPT_TOKENS = 20
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "window_size")


class CannotRun(Exception):
    """A model does not run in the way that was tried, or gives something else; the message says
    why."""


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Have the layers call a registered attention function; CannotRun if they don't."""
    try:
        model.set_attn_implementation(name)
    except Exception as error:  # model classes refuse in different ways
        raise CannotRun(f"it takes no attention function: {error}") from error
    if model.config._attn_implementation != name:  # some only log that
        raise CannotRun("it takes no attention function")


@contextmanager
def explicit_masks(part: PreTrainedModel) -> Iterator[None]:
    """Its layers attend by the masks that the model makes, inside: without one, those of some
    models that see would look ahead."""
    before = part.config._attn_implementation
    part.set_attn_implementation("eager")
    try:
        yield
    finally:
        part.set_attn_implementation(before)


def compare(got: Tensor, reference: Tensor, tolerance: float, words: str = "logits differ") -> None:
    """CannotRun unless each number is off by at most `tolerance` of the reference's largest."""
    largest = reference.float().abs().max().clamp(min=1e-6)
    off = (got.float() - reference.float()).abs().max() / largest
    if not off <= tolerance:  # also when NaN
        raise CannotRun(f"{words} by {float(off):.1e} of the largest")


def length_beyond_windows(config: Any, limit: int, otherwise: int = MIN_PROMPT_TOKENS) -> int:
    """Of a prompt that exceeds the attention's windows, as far as `limit` and time allow."""
    windows = [getattr(config, name, None) for name in WINDOWS]
    beyond = 2 * max(window if isinstance(window, int) else 0 for window in windows) + 8
    return min(limit, beyond if MIN_PROMPT_TOKENS < beyond <= MAX_PROMPT_TOKENS else otherwise)


def random_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, widths: Sequence[int]
) -> list[list[int]]:
    """The same each time, of tokens that are no special ones."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = range(model.config.get_text_config().vocab_size)
    ordinary = sorted(set(vocabulary) - set(tokenizer.all_special_ids))
    picks = torch.randint(len(ordinary), (sum(widths),), generator=generator).tolist()
    tokens = (ordinary[pick] for pick in picks)
    return [list(itertools.islice(tokens, width)) for width in widths]
