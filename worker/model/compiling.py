"""A model with its body compiled, for the paged runner: what it is made of, and what a call checks.

The compiler's function checks at every call whatever its graph was made from, which for the
hundreds of modules of a model takes as long as some of its layers. Nothing of that changes once it
serves: only what it is called with is looked at.
"""

import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from worker.model.loading import first_line
from worker.model.partial_copy import copied_down_to, path_to_decoder
from worker.model.self_check import CannotRun

log = logging.getLogger("onequeue.compiling")

# Kernels ask how many threads there are when they run (free_cores.py).
ON_CPU = {"freezing": True, "cpp.dynamic_threads": True}


def compiled(model: Any, check: Callable[[Any], None], sees: bool = False) -> Any:
    """A copy of the model, with the same weights, whose body's forward is compiled; of one that
    sees, its decoder's. It is when `check`, which raises if it must not be used, runs it. Whatever
    the compiler raises is raised.

    One graph for any number of tokens, since attention and its memory are opaque to the compiler,
    and one for a single token; on a CPU weights are constants in it, those of packed layers the
    same, and what calls its kernels is compiled too, where the compiler can do that. The output
    head stays outside: its number of rows changes with every step.
    """
    path = path_to_decoder(model) if sees else _body_of(model)
    if model.device.type != "cpu":
        return _compiled(model, path, check, {})
    try:
        return _compiled(model, path, check, ON_CPU | {"cpp_wrapper": True})
    except Exception as error:
        log.info("kernels are called from Python: %.300s", first_line(error))
        return _compiled(model, path, check, ON_CPU)


def _compiled(
    model: Any, path: str, check: Callable[[Any], None], settings: dict[str, bool]
) -> Any:
    from torch._inductor import config as inductor  # seconds to import

    with inductor.patch(settings):
        made, *_, body = copied_down_to(model, path)
        body.forward = torch.compile(
            _forward_of(model.get_submodule(path)),
            dynamic=True,
            options={"guard_filter_fn": _on_inputs},
        )
        check(made)
    return made


def _body_of(model: Any) -> str:
    """What the model calls it. Some classes give a name that they don't use (Llama 4): there it is
    the part that is a model itself."""
    misnamed = model.base_model is model
    for name, part in model.named_children():
        if part is model.base_model or (misnamed and isinstance(part, PreTrainedModel)):
            return str(name)
    raise CannotRun("which part is its body is not known")


def _forward_of(body: Any) -> Callable[..., Any]:
    """With code of its own: graphs are kept with the code that they were made from, and without
    the checks those of two models could not be told apart."""

    def forward(**inputs: Any) -> Any:
        return body.forward(**inputs)

    code = forward.__code__.replace()
    return FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def _on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Of what a graph depends on, what each call checks: the tensors and the sizes it is given."""
    return [guard.guard_type == "SHAPE_ENV" or guard.name.startswith("inputs[") for guard in guards]
