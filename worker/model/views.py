"""A view of a model: the same modules and weights, but for those on the way to one part, which are
copies. So that part can be called in another way, and the model itself knows nothing of it.
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


def view(model: Any, path: str) -> list[Any]:
    """Copies of the model and of the modules on the way to this part, which is the last."""
    parts = [_copied(model)]
    for name in path.split("."):
        inner = parts[-1]._modules[name] = _copied(parts[-1]._modules[name])
        parts.append(inner)
    return parts


def _copied(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = {**module._modules}
    return made
