"""A copy of a model down to one part: the modules on the way there are copies, all others and the
weights are shared. So that part can be called in another way, and the model itself knows nothing.
"""

import copy
from typing import Any

from worker.model.self_check import CannotRun


def path_to_decoder(model: Any) -> str:
    """Its name; CannotRun if the model does not tell."""
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if module is decoder and name:
            return str(name)
    raise CannotRun("which part is its decoder is not known")


def copied_down_to(model: Any, path: str) -> list[Any]:
    """The model's copy first, that of the part which has this name in it last."""
    parts = [_copied(model)]
    for name in path.split("."):
        inner = parts[-1]._modules[name] = _copied(parts[-1]._modules[name])
        parts.append(inner)
    return parts


def _copied(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = {**module._modules}
    return made
