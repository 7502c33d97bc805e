"""Helpers for the checks at load: two ways of running random prompts must agree up to rounding.

model/check.py compares the outputs of models, `compare` those of single operations.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Largest accepted difference, relative to the largest absolute value of the reference. It grows
# with the square root of the layers beyond DEPTH: roundings add up like steps of a random walk.
DEPTH = 16
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# A longer prompt would make the check take longer than loading the model.
MAX_PROMPT_TOKENS = 600
MIN_PROMPT_TOKENS = 20
WINDOW_SETTINGS = ("sliding_window", "local_attention", "attention_chunk_size", "window_size")
# Numbers of keys that attention sees, selects or compresses, by their names in configurations and
# modules; and other numbers with such names.
KEY_NUMBERS = re.compile(r"window|top_?k|^index|budget|pool|compress")
OTHER_NUMBERS = re.compile(r"dim|heads|group|layers|pattern|freq|offset|token|theta")
# Smaller numbers, such as those of experts, are not narrowed.
MIN_NARROWED = 16


class CannotRun(Exception):
    """A model fails in an execution mode or differs from its reference, for the reason given."""


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make the layers call the registered attention function `name`.

    Raise CannotRun if the model class does not support it.
    """
    try:
        model.set_attn_implementation(name)
    except Exception as error:  # model classes raise different types
        raise CannotRun(f"it takes no attention function: {error}") from error
    if model.config._attn_implementation != name:  # some classes only log the refusal
        raise CannotRun("it takes no attention function")


@contextmanager
def attention_of(part: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Make `part` attend by another implementation while the context is open."""
    before = part.config._attn_implementation
    if implementation == before:  # some classes do not take even their own
        yield
        return
    part.set_attn_implementation(implementation)
    try:
        yield
    finally:
        part.set_attn_implementation(before)


def checked_attention(part: PreTrainedModel, is_multimodal: bool) -> str:
    """Return the attention by which the model's own forward is a reference: "eager" makes explicit
    masks. Without them some multimodal decoders attend to later tokens. A library's kernels are not
    traced."""
    own: str = part.config._attn_implementation
    return own if own in ("sdpa", "eager") and not is_multimodal else "eager"


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the reference's largest absolute value."""
    largest = reference.float().abs().max().clamp(min=1e-6)
    return float((actual.float() - reference.float()).abs().max() / largest)


def compare(
    actual: Tensor, reference: Tensor, tolerance: float, message: str = "products differ"
) -> None:
    """Raise CannotRun if an operation's result is off by more than `tolerance`. Logits, which
    rounding may move further, are compared by model/check.py."""
    error = relative_error(actual, reference)
    if not error <= tolerance:  # also when NaN
        raise CannotRun(f"{message} by {error:.1e} of the largest")


def tolerance_of(dtype: torch.dtype, config: Any) -> float:
    """Return the largest accepted difference of a model's logits."""
    layers = getattr(config, "num_hidden_layers", None) or DEPTH
    return TOLERANCE[dtype] * math.sqrt(max(1.0, layers / DEPTH))


def length_beyond_windows(config: Any, limit: int, default: int = MIN_PROMPT_TOKENS) -> int:
    """Return a prompt length, in tokens, that exceeds every attention window of the model.

    Return `default` if there is no window or it is too long to check; never more than `limit`.
    """
    windows = [getattr(config, name, None) for name in WINDOW_SETTINGS]
    length = 2 * max(window if isinstance(window, int) else 0 for window in windows) + 8
    return min(limit, length if MIN_PROMPT_TOKENS < length <= MAX_PROMPT_TOKENS else default)


@contextmanager
def narrowed(part: PreTrainedModel, run: Callable[[], object]) -> Iterator[bool]:
    """Narrow every number of keys that the attention of `part` sees or selects, so that short
    prompts exceed it. Yield whether a number is narrowed.

    A number with which `run` raises stays as it is: weights depend on it.
    """
    owners: dict[str, list[tuple[Any, int]]] = {}
    parts = [(module, getattr(module, "config", None)) for module in part.modules()]
    for owner in {id(owner): owner for pair in parts for owner in pair if owner}.values():
        for name, value in vars(owner).items():
            is_key_number = KEY_NUMBERS.search(name) and not OTHER_NUMBERS.search(name)
            if type(value) is int and value >= MIN_NARROWED and is_key_number:
                owners.setdefault(name, []).append((owner, value))
    kept: list[str] = []
    try:
        for name, entries in owners.items():
            try:
                for owner, value in entries:
                    setattr(owner, name, 16 if value >= 1024 else 4)  # ratios stay whole
                run()
            except Exception:  # model classes raise different types
                kept.append(name)
                _restore(name, entries)
        yield len(kept) < len(owners)
    finally:
        for name, entries in owners.items():
            _restore(name, entries)


def _restore(name: str, entries: Sequence[tuple[Any, int]]) -> None:
    for owner, value in entries:
        setattr(owner, name, value)


class TopKSizes(TorchDispatchMode):
    """Records from how many values each `topk` selects."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.topk:
            self.sizes.add(args[0].shape[args[2] if len(args) > 2 else -1])
        return func(*args, **(kwargs or {}))


def random_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]
) -> list[list[int]]:
    """Return one prompt per length, of random ordinary tokens; the same on every call.

    Special and added tokens have rows that are hardly trained, and rows beyond the tokenizer's are
    not: there bfloat16 is off by more than elsewhere.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = range(min(model.config.get_text_config().vocab_size, len(tokenizer)))
    added = tokenizer.get_added_vocab().values()
    ordinary = sorted(set(vocabulary).difference(tokenizer.all_special_ids, added))
    indices = torch.randint(len(ordinary), (sum(lengths),), generator=generator).tolist()
    tokens = (ordinary[index] for index in indices)
    return [list(itertools.islice(tokens, length)) for length in lengths]
