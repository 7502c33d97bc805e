"""The comparison of the checks at load: does a faster way to run a model give its logits?

`check` compares logits in the model's own dtype. Rounding alone may move a row further than the
tolerance allows, such as one of a hardly trained token. Then the reference runs once more, in
float32: the candidate passes if its error is that of the reference, within a factor. A wrong
candidate is off by much more than rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from worker.backends.cpu.linear_layers import FLOAT32_PRODUCTS
from worker.device.self_check import CannotRun, relative_error
from worker.error_classification import first_line
from worker.load_context import on_worker

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Largest accepted errors against float32, relative to those of the reference. The error of a row is
# its root mean square. Those of real checkpoints have such long tails that one row of 48 may decide
# the error of all. So geometric means are compared, and each row with the larger of the reference's
# row and the root mean square of the reference's rows (up to 6.7 times for models that are equal).
MAX_ERROR_RATIO = 1.5
MAX_ROW_ERROR_RATIO = 8.0

Run = Callable[[Sequence[Any]], Sequence[Tensor]]  # the logits [L, V] of each prompt


def check(reference: Run, candidate: Run, prompts: Sequence[Any], tolerance: float) -> None:
    """Raise CannotRun unless both give the same logits up to rounding; see Reference.check."""
    Reference(reference, prompts).check(candidate(prompts), tolerance)


class Reference:
    """The logits of some prompts, which those of candidates are compared with.

    `run` is called once more, with torch's functions in float32, when a candidate needs that.
    `logits`: what it gives, if that is known. `name`: of other outputs.
    """

    def __init__(
        self, run: Run, prompts: Sequence[Any], logits: Sequence[Tensor] | None = None,
        name: str = "logits",
    ) -> None:  # fmt: skip
        self._run: Run | None = run
        self._name = name
        self.prompts = prompts
        self.logits = run(prompts) if logits is None else logits
        self._exact: Sequence[Tensor] = ()  # float32, once they are needed

    def close(self) -> None:
        """The model is changed from now on: `run` would no longer give the reference."""
        self._run = None

    def check(self, candidate: Sequence[Tensor], tolerance: float) -> None:
        """Raise CannotRun unless these are the logits [≤ L, V] of the prompts, up to rounding.

        They are if no value is off by more than `tolerance`, relative to the largest absolute one
        of the prompt in the reference, or else by their errors against float32.
        """
        pairs = [(one, all_[: len(one)]) for one, all_ in zip(candidate, self.logits, strict=True)]
        errors = torch.tensor([relative_error(actual, expected) for actual, expected in pairs])
        largest = float(errors.max())  # NaN, if one is
        if largest <= tolerance:
            return
        reason = f"{self._name} differ by {largest:.1e} of the largest, not {tolerance:.1e}"
        if self.logits[0].dtype == torch.float32:
            raise CannotRun(reason)
        try:
            exact = self._in_float32()
        except Exception as error:  # an operation without float32
            raise CannotRun(f"{reason}; not run in float32: {first_line(error)}") from error
        own, expected = (
            torch.cat([row_errors(pair[side], e) for pair, e in zip(pairs, exact, strict=True)])
            for side in (0, 1)
        )
        ratio = float((own.log().mean() - expected.log().mean()).exp())
        allowed = expected.maximum(expected.square().mean().sqrt())
        row_ratio = float((own / allowed).max())
        if not (ratio <= MAX_ERROR_RATIO and row_ratio <= MAX_ROW_ERROR_RATIO):
            raise CannotRun(
                f"{reason}; its error against float32 is {ratio:.1f} times the reference's, "
                f"{row_ratio:.1f} times in the worst row"
            )

    def _in_float32(self) -> Sequence[Tensor]:
        if self._run is None:
            raise CannotRun("the model is changed")
        self._exact = self._exact or on_worker(partial(run_in_float32, self._run, self.prompts))
        return self._exact


def row_errors(logits: Tensor, exact: Tensor) -> Tensor:
    """Return the root mean square of the differences in each row [L], which is not 0."""
    differences = logits.float() - exact[: len(logits)].float()
    return differences.square().mean(-1).sqrt().clamp(min=1e-9)


# ── float32 ──


@torch.inference_mode()
def run_in_float32(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with torch's functions in float32, on this thread. Weights in another dtype
    are converted when a function uses them, one at a time."""
    with _Float32():
        return function(*args)


class _Float32(TorchFunctionMode):
    """Tensors of lower precision are float32 wherever a function takes them, and new ones are."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if product := FLOAT32_PRODUCTS.get(func):  # with weights in a layout of its own
            return product(*args)
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as its shape or dtype
            return _widened_dtype(func(*args))
        if _is_in_place(func) and args[0].dtype in LOW_PRECISION:  # such as a cache of the model
            return func(*tree_map(partial(_as, args[0].dtype), args), **kwargs)
        if func is torch.nn.functional.embedding:  # its result is converted, not the whole weight
            return func(*args, **kwargs)
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _as(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
        return value.float()
    return _widened_dtype(value)


def _widened_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW_PRECISION else value
