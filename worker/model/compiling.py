"""Compiles a language model: its layers, or the whole body where they cannot share graphs.

Attention and its memory are opaque to the compiler, so a graph serves any number of tokens. Layers
of a kind share a graph, which is compiled in a few seconds; a body of thirty layers takes minutes,
in which the compiler slows down all other threads. On a CPU a graph has several layers, and the
code that calls kernels is compiled too where the compiler supports that. On a GPU a step of few
rows is captured anyway (cuda_graphs.py), and a single token has a graph of its own.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise, zip_longest
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_torchdynamo_compiling

from worker import compilers
from worker.backends.cpu.torch_only import EagerForward
from worker.device.self_check import CannotRun
from worker.error_classification import first_line
from worker.model.attention.paged import SHARED_LAYER, call_as_layers
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
# run (worker/cores.py). Without size_asserts, a step does not compare the sizes of each tensor.
CPU_SETTINGS = {
    "cpp.dynamic_threads": True,
    "post_grad_custom_pre_pass": _use_opaque_functions,
    "size_asserts": False,
}
# Guards on a layer that do not tell kinds of layers apart. These, and those on global functions,
# never fail while the model serves, and checking them takes as long as a part of the layer.
IGNORED_GUARDS = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")
# Layers in a graph on a CPU. Of SmolLM2's thirty, graphs of one layer take 27 s to compile and make
# a step a fifth to two fifths slower; graphs of five take 39 s, the whole body 113 s.
MAX_GROUP = 6
MAX_LAYER_GRAPHS = 32  # of a model: on a GPU two for each kind of layers
MAX_FORMS = 8  # forms of a group's inputs whose code runs without guards
CPP = {"cpp_wrapper": True}  # the code that calls kernels is compiled too


def _is_traced() -> bool:
    """Return whether the compiler traces this call. torch.compiler.is_compiling() is one flag of
    the process in torch 2.13: while a model is compiled, other threads read True."""
    import torch  # not that of this module, whose code runs in another one

    return torch.compiler.is_dynamo_compiling()


def compile_model(model: Any, check: Callable[[Any], None], is_multimodal: bool = False) -> Any:
    """Return a copy of the model whose body, or multimodal decoder, runs compiled.

    Weights are shared. `check` runs the copy, which compiles it, and raises if it must not be used.
    Raise what the compiler or `check` raises. The output head stays eager: its rows change.
    """
    from torch._inductor import config as inductor  # seconds to import

    path = path_to_decoder(model) if is_multimodal else _path_to_body(model)
    # Layers of transformers ask its own function, which reads that flag; modules import it by name.
    is_torchdynamo_compiling.__code__ = _is_traced.__code__
    _avoid_symbolic_tracing()
    if model.device.type == "cpu":
        layers = partial(with_compiled_layers, model, path, MAX_GROUP, is_general=True)
        body = partial(_with_compiled_body, model, path, is_general=True)
        frozen = CPU_SETTINGS | {"freezing": True}
        ways = [(layers, CPU_SETTINGS | CPP), (body, frozen | CPP), (body, frozen)]
    else:
        ways = [
            (partial(with_compiled_layers, model, path), {}),
            (partial(_with_compiled_body, model, path), {}),
        ]
    for number, (compiled, settings) in enumerate(ways, 1):
        try:
            # numbers in layers, such as that of a norm, are parts of the code, not inputs of it
            with inductor.patch(settings), torch._dynamo.config.patch(specialize_float=True):
                check(result := compiled())
            return result
        except Exception as error:
            is_refused = isinstance(error, CannotRun) and not isinstance(error, NoSharedGraph)
            if is_refused or number == len(ways) or compilers.ending.is_set():
                raise  # other kernels would give the same logits
            log.info("not compiled this way, trying the next: %.300s", first_line(error))


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


def _with_compiled_body(model: Any, path: str, is_general: bool = False) -> Any:
    """Return a copy of the model in which the part at `path` is compiled when it is first called;
    weights are shared. `is_general`: one graph serves any number of tokens."""
    original = model.get_submodule(path)

    def forward(**inputs: Any) -> Any:
        return original.forward(**inputs)

    compiled, *_, body = copy_path(model, path)
    # Guards on the model's hundreds of modules never fail while it serves, and checking them takes
    # as long as some of its layers.
    body.forward = _compile(forward, ("inputs[",), is_general)
    return compiled


def _compile(
    function: Callable[..., Any], inputs: tuple[str, ...], is_general: bool
) -> Callable[..., Any]:
    """Compile a function, with guards on the values whose names begin with `inputs`. `is_general`:
    that a size is not 1 is not guarded; the first call must have several tokens."""

    def keep(guards: Sequence[Any]) -> list[bool]:
        return [
            not is_general
            if guard.guard_type == "SHAPE_ENV"
            else guard.guard_type not in IGNORED_GUARDS and guard.name.startswith(inputs)
            for guard in guards
        ]

    return torch.compile(_own_code(function), dynamic=True, options={"guard_filter_fn": keep})


# ── layers ──


class NoSharedGraph(CannotRun):
    """The layers cannot share graphs; the message is the reason."""


def with_compiled_layers(
    model: Any, path: str, max_group: int = 1, is_general: bool = False
) -> Any:
    """Return a copy of the model in which the layers of the part at `path` are compiled when they
    are first called, up to `max_group` in a graph; weights are shared. Raise NoSharedGraph if there
    are no layers to compile. `is_general`: as in _with_compiled_body."""
    part = model.get_submodule(path)
    lists = [
        (name, child)
        for name, child in part.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 1
    ]
    if len(lists) != 1:
        raise NoSharedGraph("its layers are not in one list")
    [(name, layers)] = lists

    def forward(layers: Any, output: Any, args: Any, kwargs: Any) -> Any:
        for layer in layers:
            output = layer.forward(_hidden(output), *args, **kwargs)
        return output

    torch._dynamo.config.recompile_limit = MAX_LAYER_GRAPHS  # beyond it, layers run eager
    run = _compile(forward, ("layers", "output", "args[", "kwargs["), is_general)
    compiled, *_, copied = copy_path(model, f"{path}.{name}")
    copied.__class__, copied.groups, copied.called = _Layers, [], None
    index = 0
    for width in _group_sizes(part, len(layers), max_group):
        group = _LayerGroup(layers[index : index + width], run, is_general)
        copied.groups.append(group)
        for call in (group.run, *[group.output_again] * (width - 1)):
            outer = shallow_copy(layers[index])
            outer.forward = call
            copied._modules[str(index)] = outer
            index += 1
    return compiled


def _group_sizes(part: Any, count: int, max_group: int) -> Iterator[int]:
    """Yield the numbers of layers that share a graph: layers of one type, whose inputs are often
    those of that type, in groups of one size."""
    types = getattr(getattr(part, "config", None), "layer_types", None) or ()
    for _, same in groupby(types if len(types) == count else [None] * count):
        length = len([*same])
        size = max(n for n in range(1, max_group + 1) if length % n == 0)
        yield from [size] * (length // size)


def _form(value: Any) -> Hashable:
    """Return what guards read of an input, its sizes aside. Raise TypeError if it has an object,
    whose state they may read, such as the keys and values that layers of Gemma 4 share."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, dict):
        return tuple((key, _form(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    raise TypeError(f"guards on {type(value).__name__} are kept")


def _without_guards(compiled: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the code that `compiled` has run for these inputs. Guards on layers and the wrapper
    around them take up to a quarter of a step of one row."""
    function: Any = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    code = function.__code__
    local = dict(zip(code.co_varnames, inputs, strict=False))
    for entry in torch._dynamo.eval_frame._debug_get_cache_entry_list(code):
        if entry.guard_manager.check(local):
            return FunctionType(entry.code, function.__globals__, code.co_name)
    return compiled  # eager, beyond the limit of graphs


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


class _LayerGroup:
    """Layers in a row that run as one graph when the body calls the first of them."""

    def __init__(
        self, layers: Iterable[nn.Module], run: Callable[..., Any], is_general: bool
    ) -> None:
        self._is_general = is_general
        self._found: dict[Hashable, Callable[..., Any]] = {}  # what runs for inputs of this form
        self.hidden: Tensor | None = None  # of the last step, unless others follow
        self.following: list[_LayerGroup] = []  # that a call runs too
        self.layers, numbers = [], []
        for index, layer in enumerate(layers):
            copied, number = _unnumbered(layer, SHARED_LAYER - index)
            self.layers.append(copied)
            numbers.append(number - index)
        if len({*numbers}) != 1:
            raise NoSharedGraph("its layers are not in the order of their numbers")
        self.number, self.compiled = numbers[0], run

    def run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        form: Hashable = None
        if self._is_general:
            with suppress(TypeError):
                form = _form((hidden, args, kwargs))
        output = self._run(form, hidden, args, kwargs)
        for group in self.following:
            output = group._run(form, _hidden(output), args, kwargs)
        if not self.following:
            self.hidden, self.inputs, self.output = hidden, (args, kwargs), output
        return output

    def _run(self, form: Hashable, *inputs: Any) -> Any:
        run = self._found.get(form, self.compiled)
        output = call_as_layers(self.number, run, self.layers, *inputs)
        if form and form not in self._found and len(self._found) < MAX_FORMS:
            self._found[form] = _without_guards(self.compiled, (self.layers, *inputs))
        return output

    def precedes(self, group: "_LayerGroup") -> bool:
        """Return whether the last step's output went to a group with the same other inputs."""
        return group.hidden is _hidden(self.output) and _same(self.inputs, group.inputs)

    def output_again(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer has computed in `run`."""
        if hidden is not _hidden(self.output) or not _same(self.inputs, (args, kwargs)):
            raise NoSharedGraph("its layers do not have the same inputs")
        return self.output


class _Layers(nn.ModuleList):
    """The layers of a compiled copy. Where the body passes the same inputs to all groups in the
    first step, which is one of a check, it gets the first layer only, which runs all groups.
    Calling each layer took a twentieth of a step of one row of SmolLM2."""

    groups: list[_LayerGroup]
    called: list[nn.Module] | None  # None: the first step is not over

    def _called(self) -> list[nn.Module]:
        if self.called is None:
            layers, [first, *others] = [*super().__iter__()], self.groups
            if self.groups[-1].hidden is None:
                return layers
            runs_all = all(one.precedes(other) for one, other in pairwise(self.groups))
            first.following = others if runs_all else []
            self.called = layers[:1] if runs_all else layers
        return self.called

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._called())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self._called()
        return super().__getitem__(index)


def _same(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return whether two layers have had the same objects as inputs."""
    (args, kwargs), (other_args, other_kwargs) = inputs, others
    pairs = [*zip_longest(args, other_args)]
    pairs += [(kwargs.get(n), other_kwargs.get(n)) for n in kwargs.keys() | other_kwargs.keys()]
    return all(one is other for one, other in pairs)


def _unnumbered(layer: nn.Module, shared: int) -> tuple[nn.Module, int]:
    """Return a copy of a layer with the number `shared` instead of its own, as its graph is that of
    other layers too, and its own number."""
    copies = {id(module): shallow_copy(module) for module in layer.modules()}
    numbers: set[int] = set()
    for module in copies.values():
        if isinstance(vars(module).get("forward"), EagerForward):
            del module.forward  # the compiler takes that of the class
        if "forward" in vars(module):
            raise NoSharedGraph("its layers have forwards of their own")
        module._modules = {
            name: child and copies[id(child)] for name, child in module._modules.items()
        }
        if isinstance(number := getattr(module, "layer_idx", None), int):
            numbers.add(number)
            module.layer_idx = shared
    if len(numbers) != 1:
        raise NoSharedGraph("a layer attends more than once, or not")
    return copies[id(layer)], numbers.pop()
