"""Weights that a checkpoint lacks: transformers draws them at random and goes on.

That is fine for a pooler that nobody asks for, and nonsense for the head of a task. Which it is
shows when the warm-up input is run again with other values in them: no list of names is kept.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

SHOWN = 3


@contextmanager
def recorded() -> Iterator[dict[int, dict[str, str]]]:
    """While inside, every `from_pretrained` notes what it did not find, by the model's id.
    `pipeline` chooses classes and loads them, but does not hand on what they report."""
    found: dict[int, dict[str, str]] = {}
    with _recording:
        original = vars(PreTrainedModel)["from_pretrained"]

        def from_pretrained(cls: Any, *args: Any, **keywords: Any) -> Any:
            asked = keywords.pop("output_loading_info", False)
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = original.__get__(None, cls)(*args, **{**keywords, **options})
            found[id(model)] = names_of(info)
            return (model, info) if asked else model

        setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
        try:
            yield found
        finally:
            setattr(PreTrainedModel, "from_pretrained", original)  # noqa: B010


_recording = threading.Lock()


def names_of(info: dict[str, Any]) -> dict[str, str]:
    """What was not found in a checkpoint, each as a message names it."""
    names = {name: name for name in info["missing_keys"]}
    for name, there, wanted in info["mismatched_keys"]:
        names[name] = f"{name} (it has {tuple(there)} where config.json says {tuple(wanted)})"
    return dict(sorted(names.items()))


@torch.no_grad()
def matter(model: PreTrainedModel, names: dict[str, str], answer: Callable[[], bytes]) -> bool:
    """Whether what the model answers depends on these weights."""
    state = model.state_dict()
    found = {value.data_ptr() for name, value in state.items() if name not in names}
    drawn = [
        state[name]
        for name in names
        if name in state
        and state[name].is_floating_point()
        and state[name].data_ptr() not in found  # tied to one that was found
    ]
    if not drawn:
        return False
    before = [value.clone() for value in drawn]
    try:
        first = _seeded(answer)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for value in drawn:
                value.copy_(torch.randn(value.shape, generator=generator))
            if _seeded(answer) != first:
                return True
    finally:
        for value, loaded in zip(drawn, before, strict=True):
            value.copy_(loaded)
    return False


def _seeded(answer: Callable[[], bytes]) -> bytes:
    """Some models draw noise. One that raises answers too: other than it did before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return answer()
        except Exception as error:  # of any model, of any value
            return repr(error).encode()


def shown(names: dict[str, str]) -> str:
    """What a message says of them."""
    first = list(names.values())[:SHOWN]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"its checkpoint has no weights for {', '.join(first)}{more}"
