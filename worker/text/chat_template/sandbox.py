"""Bounds on the work of a chat template: a checkpoint's template is untrusted code.

transformers renders templates in jinja2's sandbox, which bounds neither loops nor memory. The
environments here charge a rendering for the turns of its loops, for its calls and for the bytes of
the values that it makes, before it makes them. transformers uses one once this module is imported.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, MappingView, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput

MAX_TURNS = 3_000_000  # of loops, and calls
MAX_BYTES = 256_000_000  # of all values that a rendering makes
MAX_CPU_S = 10.0  # of the thread that renders
MAX_BITS = 10_000  # of an integer
VALUE_BYTES = 64  # that a value takes without its text
# Filters and methods of texts that take about as long as their arguments' text. Real templates call
# them on whole messages. The first do not turn their value into text: they read it lazily, or once.
READING = {
    "attr", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map",
    "reject", "rejectattr", "reverse", "select", "selectattr",
}  # fmt: skip
LINEAR = READING | {
    "capitalize", "e", "endswith", "escape", "find", "format", "format_map", "join", "lower",
    "lstrip", "replace", "rstrip", "rsplit", "safe", "split", "splitlines", "startswith", "string",
    "strip", "tojson", "trim", "upper",
}  # fmt: skip
# All others, such as `center`, get short arguments and small numbers: they may multiply, or take a
# quadratic time.
MAX_TEXT, MAX_NUMBER = 100_000, 1000
NESTED_FIELD = re.compile(r"\{[^}]*\{")
COLLECTIONS = (list, tuple, set, MappingView)
MAX_TIME_FIELD = 256  # characters that strftime writes for one of its format
NUMBER = re.compile(r"\d+")
# .budget: of the rendering that runs on this thread. .is_lenient: it may change lists.
_thread = threading.local()


class TemplateTooExpensive(InvalidInput):
    """The template takes more than a rendering may take."""


class Budget:
    def __init__(self) -> None:
        self.turns = self.nbytes = 0
        self.until = time.thread_time() + MAX_CPU_S

    def charge(self, nbytes: int, turns: int) -> None:
        self.nbytes += nbytes
        self.turns += turns
        if self.nbytes > MAX_BYTES:
            raise _too_expensive(f"{MAX_BYTES // 1_000_000} MB")
        if self.turns > MAX_TURNS:
            raise _too_expensive(f"{MAX_TURNS} turns of loops")
        if time.thread_time() > self.until:
            raise _too_expensive(f"{MAX_CPU_S:g} s")


def _too_expensive(bound: str) -> TemplateTooExpensive:
    reason = f"the model's chat template takes more than {bound} for these messages"
    return TemplateTooExpensive(reason, "messages")


def charge(nbytes: int, turns: int = 0) -> None:
    if budget := getattr(_thread, "budget", None):
        budget.charge(nbytes, turns)


def charged(value: Any) -> Any:
    """Return a value, which is about to become text or a part of another one."""
    charge(text_bytes(value))
    return value


def sliced(value: Any) -> Any:
    """Return a slice, which has a copy of a text and shares the items of a list."""
    charge(text_bytes(value) if isinstance(value, str | bytes) else VALUE_BYTES * len(value))
    return value


def turns(iterable: Iterable[Any], nbytes: int) -> Iterator[Any]:
    """Yield the items of a loop, whose body has so many bytes of text."""
    for item in iterable:
        charge(nbytes, 1)
        yield item


def text_bytes(value: Any) -> int:
    """Return about the length of a value's text. Beyond the bound the rest is not counted."""
    if isinstance(value, str):
        return VALUE_BYTES + len(value)
    total = 0
    stack: list[Any] = [value]
    while stack and total <= MAX_BYTES:
        part = stack.pop()
        total += VALUE_BYTES
        if isinstance(part, str | bytes):
            total += len(part)
        elif issubclass(type(part), COLLECTIONS):
            stack.extend(part)
        elif isinstance(part, dict):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, range):
            total += VALUE_BYTES * len(part)
        elif isinstance(part, Namespace):
            stack.append(object.__getattribute__(part, "_Namespace__attrs"))
    return total


def _quantity(argument: Any) -> int:
    """Return how often, or how wide, an argument can have a value written."""
    if isinstance(argument, int):
        return abs(argument)
    return len(argument) if isinstance(argument, str) else text_bytes(argument)


def _charge_call(name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Charge for a filter, or a method of a text, by the bytes that it is going to make."""
    others = [*args, *kwargs.values()]
    nbytes = sum(_quantity(other) for other in others)
    joins_attributes = name == "join" and ("attribute" in kwargs or len(args) > 1)
    is_known = name in LINEAR and not joins_attributes  # the text of attributes is not counted
    if not is_known and not isinstance(value, NoValue):
        numbers = [other for other in others if isinstance(other, int)]
        size = text_bytes(value) + sum(map(text_bytes, others))
        if size > MAX_TEXT or any(abs(number) > MAX_NUMBER for number in numbers):
            raise _too_expensive(f"{MAX_TEXT // 1000} kB, or numbers to {MAX_NUMBER}, in {name}()")
        nbytes += _quantity(value) * max([1, *map(_quantity, others)])
    if name in ("format", "format_map"):
        if NESTED_FIELD.search(str(value)):
            raise _too_expensive("fields within fields of a format")
        nbytes += _format_bytes(str(value), others)
    elif name in ("split", "rsplit") and isinstance(value, str):
        separator = next((other for other in others if isinstance(other, str)), "")
        nbytes += VALUE_BYTES * (value.count(separator) if separator else len(value))
        nbytes += len(value)
    elif name == "replace" and isinstance(value, str):
        old, new = (kwargs.get(n, args[i] if i < len(args) else "") for i, n in enumerate(OLD_NEW))
        nbytes += len(value) + (value.count(str(old)) + 1) * len(str(new))
    elif name == "join":
        separator = str(args[0] if args else kwargs.get("d", ""))
        count = len(value) if hasattr(value, "__len__") else 0
        nbytes += text_bytes(value) + count * len(separator)
    elif name == "tojson":
        indent = max([1, *(other for other in others if isinstance(other, int))])
        nbytes += indent * text_bytes(value)
    elif name == "strftime_now":
        nbytes *= MAX_TIME_FIELD
    elif name in READING and isinstance(value, str) and name not in ("count", "length"):
        nbytes += VALUE_BYTES * len(value)  # it is read character by character
    charge(nbytes, 1)


def _format_bytes(text: str, values: Collection[Any]) -> int:
    """Return the most bytes that a format string makes: each field has any width and value."""
    widths = sum(map(int, NUMBER.findall(text)))
    fields = text.count("%") + text.count("{")
    return len(text) + fields * (widths + sum(_quantity(value) for value in values))


OLD_NEW = ("old", "new")  # arguments of `replace`


class NoValue(str):
    """In place of the text of a method, for other calls."""


class Functions(dict[str, Any]):
    """Filters by name. Those that a template gets charge for what they do."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = super().__getitem__(name)
        if function in (charged, sliced, turns):
            return function
        passes = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context comes first

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[passes:]
            value = _joined(name, value)
            _charge_call(name, value, others, kwargs)
            if name not in READING:
                charged(value)
            return _made(function(*args[:passes], value, *others, **kwargs))

        return bounded

    def get(self, name: str, default: Any = None) -> Any:
        with suppress(KeyError):
            return self[name]
        return default


def _joined(name: str, value: Any) -> Any:
    """Return what `join` reads, with the items of an iterator, which are to be charged first."""
    return [*value] if name == "join" and isinstance(value, Iterator) else value


def _made(result: Any) -> Any:
    """Charge for what a call has made, without the texts in a list, and return it."""
    if isinstance(result, str | bytes | list | tuple):
        charge(len(result))
    return result


class BoundedNodes(NodeTransformer):
    """Adds the charges for loops, literals and `~`, which have no hooks in an environment."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, nodes.EvalContextModifier | nodes.ScopedEvalContextModifier):
            raise TemplateSyntaxError("autoescape is not supported", node.lineno)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filter(node, sliced)
        if isinstance(node, nodes.For):
            if node.recursive:
                raise TemplateSyntaxError("recursive loops are not supported", node.lineno)
            nbytes = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.iter = _filter(node.iter, turns, nodes.Const(nbytes))
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filter(part, charged) for part in node.nodes]
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return _filter(node, charged)
        return node


def _filter(node: Any, function: Callable[..., Any], *args: nodes.Expr) -> nodes.Filter:
    name = f"onequeue.{function.__name__}"
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


class BoundedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        _thread.budget = Budget()
        context = self.new_context(dict(*args, **kwargs))
        try:
            return self.environment.concat(self.root_render_func(context))
        except Exception:
            self.environment.handle_exception()
        finally:
            _thread.budget = None
            context.vars.clear()  # of macros, which refer to the context


@contextmanager
def lenient() -> Iterator[None]:
    """Let the templates that this thread renders change lists."""
    _thread.is_lenient = True
    try:
        yield
    finally:
        _thread.is_lenient = False


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """In place of transformers' environment."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))
    template_class = BoundedTemplate

    def __init__(self, **options: Any) -> None:
        # optimized: constant expressions would be evaluated as a template is compiled
        super().__init__(**options, optimized=False, finalize=_finalize)
        self.filters = Functions(self.filters)
        self.filters |= {f"onequeue.{f.__name__}": f for f in (charged, sliced, turns)}
        self.tests: dict[str, Any] = {**self.tests}
        self.tests = {name: _counted(test) for name, test in self.tests.items()}
        for name in ("cycler", "joiner", "lipsum"):  # their text is not known
            del self.globals[name]

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(BoundedNodes().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if getattr(_thread, "is_lenient", False):
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator == "*" and left.bit_length() + right.bit_length() > MAX_BITS:
                raise _too_expensive(f"{MAX_BITS} bits of an integer")
            if operator == "**" and left.bit_length() * right > MAX_BITS:
                raise _too_expensive(f"{MAX_BITS} bits of an integer")
        elif operator == "+":
            size = text_bytes(right) + (len(left) if isinstance(left, str | list | tuple) else 0)
            charge(size // 4)  # most results are replaced by the next
        elif operator == "*":
            value, count = (right, left) if isinstance(left, int) else (left, right)
            charge(_quantity(value) * (max(count, 0) if isinstance(count, int) else 1))
        elif operator == "%" and isinstance(left, str | bytes):
            charge(_format_bytes(str(left), right if isinstance(right, tuple) else [right]))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, Macro | LoopContext):
            charge(0, 1)
        else:
            method = getattr(function, "__wrapped__", function)  # str.format is wrapped
            value = getattr(method, "__self__", None)
            text = value if isinstance(value, str | bytes) else NoValue()
            name = getattr(method, "__name__", "")
            args = tuple(_joined(name, argument) for argument in args)
            _charge_call(name, text, args, kwargs)
        return _made(super().call(context, function, *args, **kwargs))


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    return charged(value)


def _counted(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def counted(*args: Any, **kwargs: Any) -> Any:
        charge(0, 1)
        return test(*args, **kwargs)

    return counted


vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = BoundedEnvironment
