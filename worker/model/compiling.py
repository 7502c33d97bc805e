"""Compiles a language model: the whole body on a CPU, its layers on a GPU.

Attention and its memory are opaque to the compiler, so a graph serves any number of tokens. On a
CPU weights are constants of the graph, and the code that calls kernels is compiled too where the
compiler supports that. On a GPU the layers of a kind share a graph: it is compiled in a few
seconds. A body takes a minute or two, in which the compiler slows down all other threads. A step of
few rows is captured anyway (cuda_graphs.py), and a single token has a graph of its own.
"""

import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_torchdynamo_compiling

from worker import compilers
from worker.device.self_check import CannotRun
from worker.error_classification import first_line
from worker.model.attention.paged import SHARED_LAYER, call_as_layer
from worker.model.decoder_hook import copy_path, path_to_decoder, shallow_copy

log = logging.getLogger("onequeue.compiling")


OPAQUE: dict[Any, Any] = {}  # torch's own functions, as operations that the compiler does not fuse
for _name in ("cos", "sin"):
    _op = torch.library.custom_op(
        f"onequeue::{_name}", getattr(torch, _name), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    _op.register_fake(torch.empty_like)
    OPAQUE[getattr(torch.ops.aten, _name).default] = getattr(torch.ops.onequeue, _name).default


def _use_opaque_functions(graph: torch.fx.Graph) -> None:
    """Keep rotary angles out of fused loops. Where a model pairs every other number of a head, as
    with latent attention, the loops run over tokens: the last ones, fewer than a vector has, would
    get cosines of another rounding."""
    for node in graph.nodes:
        node.target = OPAQUE.get(node.target, node.target)


# Inductor's settings on a CPU. With dynamic_threads, kernels read the number of threads when they
# run (worker/cores.py).
CPU_COMPILE_SETTINGS = {
    "freezing": True,
    "cpp.dynamic_threads": True,
    "post_grad_custom_pre_pass": _use_opaque_functions,
}
# Guards on a layer that do not tell kinds of layers apart. These, and those on global functions,
# never fail while the model serves, and checking them takes as long as a part of the layer.
IGNORED_GUARDS = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")
MAX_LAYER_GRAPHS = 32  # of a model: two for each kind of layers


def _is_traced() -> bool:
    """Return whether the compiler traces this call. torch.compiler.is_compiling() is one flag of
    the process in torch 2.13: while a model is compiled, other threads read True."""
    import torch  # not that of this module, whose code runs in another one

    return torch.compiler.is_dynamo_compiling()


# Layers of transformers ask its own function, which reads that flag; modules import it by name.
is_torchdynamo_compiling.__code__ = _is_traced.__code__


def compile_model(model: Any, check: Callable[[Any], None], is_multimodal: bool = False) -> Any:
    """Return a copy of the model whose body, or multimodal decoder, runs compiled.

    Weights are shared. `check` runs the copy, which compiles it, and raises if it must not be used.
    Raise what the compiler or `check` raises. The output head stays eager, as its number of rows
    changes with every step.
    """
    path = path_to_decoder(model) if is_multimodal else _path_to_body(model)
    if model.device.type != "cpu":
        try:
            compiled = with_compiled_layers(model, path)
        except CannotRun as error:
            log.info("the body is compiled as a whole: %s", error)
            return _compile_body(model, path, check, {})
        _avoid_symbolic_tracing()
        check(compiled)
        return compiled
    try:
        return _compile_body(model, path, check, CPU_COMPILE_SETTINGS | {"cpp_wrapper": True})
    except CannotRun:  # other logits: the kernels are the same without it
        raise
    except Exception as error:
        if isinstance(error, CannotRun) or compilers.ending.is_set():
            raise  # its logits are refused: the same kernels would give them again
        log.info("kernels are called from Python: %.300s", first_line(error))
        return _compile_body(model, path, check, CPU_COMPILE_SETTINGS)


def _avoid_symbolic_tracing() -> None:
    """Give the compiler the module that it traces once: while it does, the calls of modules in
    other threads, such as a step of the eager model, raise NameError (torch 2.13)."""
    from torch._inductor.loop_body import InterpreterShim  # seconds to import

    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = torch.fx.GraphModule({}, graph)
    InterpreterShim._dummy_gm = staticmethod(lambda: module)  # type: ignore[assignment]


def _path_to_body(model: Any) -> str:
    """Return the name of the model's body; raise CannotRun if there is none.

    Some classes declare a name that they don't use (Llama 4): there it is the child that is a model
    itself.
    """
    misnamed = model.base_model is model
    for name, part in model.named_children():
        if part is model.base_model or (misnamed and isinstance(part, PreTrainedModel)):
            return str(name)
    raise CannotRun("its body is not one of its children")


def _own_code(function: Any) -> Callable[..., Any]:
    """Return a copy of a function with its own code object.

    Graphs are cached by code object. With most guards dropped, two models that shared one would run
    each other's graphs.
    """
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, None, closure)


# ── a body ──


def _compile_body(
    model: Any, path: str, check: Callable[[Any], None], settings: dict[str, Any]
) -> Any:
    from torch._inductor import config as inductor  # seconds to import

    _avoid_symbolic_tracing()
    original = model.get_submodule(path)

    def forward(**inputs: Any) -> Any:
        return original.forward(**inputs)

    with inductor.patch(settings):
        compiled, *_, body = copy_path(model, path)
        body.forward = torch.compile(
            _own_code(forward),
            dynamic=True,
            options={"guard_filter_fn": _keep_tensor_guards if settings else _keep_input_guards},
        )
        check(compiled)
    return compiled


def _keep_input_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep only the guards on input tensors and sizes.

    Guards on the model's hundreds of modules never fail while it serves, and checking them takes as
    long as some of its layers.
    """
    return [guard.guard_type == "SHAPE_ENV" or guard.name.startswith("inputs[") for guard in guards]


def _keep_tensor_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep only the guards on input tensors. That a size is not 1 is dropped: graphs are general,
    and `check` runs them with one token."""
    return [
        guard.guard_type != "SHAPE_ENV" and guard.name.startswith("inputs[") for guard in guards
    ]


# ── layers ──


def with_compiled_layers(model: Any, path: str) -> Any:
    """Return a copy of the model in which the layers of the part at `path` are compiled when they
    are first called; weights are shared. Raise CannotRun if there are no layers to compile."""
    lists = [
        (name, part)
        for name, part in model.get_submodule(path).named_children()
        if isinstance(part, nn.ModuleList) and len(part) > 1
    ]
    if len(lists) != 1:
        raise CannotRun("its layers are not in one list")
    [(name, layers)] = lists

    def forward(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return layer.forward(*args, **kwargs)

    torch._dynamo.config.recompile_limit = MAX_LAYER_GRAPHS  # beyond it, layers run eager
    run = torch.compile(
        _own_code(forward), dynamic=True, options={"guard_filter_fn": _keep_layer_guards}
    )
    compiled, *_, copied = copy_path(model, f"{path}.{name}")
    for index, layer in enumerate(layers):
        copied._modules[str(index)] = _compiled_layer(layer, run)
    return compiled


def _compiled_layer(layer: nn.Module, run: Callable[..., Any]) -> Any:
    """Return a copy of a layer that calls `run` with the layer, which has no number of its own:
    its graph is that of other layers too."""
    copies = {id(module): shallow_copy(module) for module in layer.modules()}
    numbers: set[int] = set()
    for module in copies.values():
        if "forward" in vars(module):
            raise CannotRun("its layers have forwards of their own")
        module._modules = {
            name: child and copies[id(child)] for name, child in module._modules.items()
        }
        if isinstance(number := getattr(module, "layer_idx", None), int):
            numbers.add(number)
            module.layer_idx = SHARED_LAYER
    if len(numbers) != 1:
        raise CannotRun("a layer attends more than once, or not")
    [number], unnumbered, outer = numbers, copies[id(layer)], shallow_copy(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call_as_layer(number, run, unnumbered, args, kwargs)

    outer.forward = forward
    return outer


def _keep_layer_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards that tell the kinds of layers, and the shapes of inputs, apart."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (
            guard.guard_type not in IGNORED_GUARDS
            and guard.name.startswith(("layer", "args[", "kwargs["))
        )
        for guard in guards
    ]
