"""The last layer of an encoder whose head looks at few tokens: attention sees all, and from where
its answer is added to the layer's input on, only those tokens go on.

In which module that is, is seen in a forward, not told by names; where a layer adds by itself there
is none, and it runs whole. Whether the output stays the same is for the caller to compare.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def find_join(layer: nn.Module, run: Callable[[], object]) -> nn.Module | None:
    """The module in `layer` that is called with attention's answer and the layer's own input, while
    `run` runs the model."""
    inputs: list[Tensor] = []
    found: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        if module is layer:
            inputs[:] = args[:1]
        elif inputs and len(args) == 2 and args[1] is inputs[0]:
            found.append(module)

    handles = [module.register_forward_pre_hook(note) for module in layer.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if len(found) == 1 else None
