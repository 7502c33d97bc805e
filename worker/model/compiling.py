"""The compiled model, made in the background while the eager one serves (paged_runner.py).

One graph for any number of tokens, since attention and its memory are opaque to the compiler, and
one for a single token; on a CPU weights are constants in it, those of packed layers the same.
The output head stays outside: its number of rows changes with every step.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import config as inductor


def compiled(model: Any, check: Callable[[Any], None]) -> Any:
    """The same modules and weights, with the body's forward compiled: it is when `check`, which
    raises if it must not be used, runs it. Whatever the compiler raises is raised."""
    torch.set_num_threads(torch.get_num_threads())  # this thread's own count
    with inductor.patch(freezing=model.device.type == "cpu"):
        body = copy.copy(model.base_model)
        body.forward = torch.compile(model.base_model.forward, dynamic=True)
        made = copy.copy(model)
        made._modules = {
            name: body if child is model.base_model else child
            for name, child in model._modules.items()
        }
        check(made)
    return made
