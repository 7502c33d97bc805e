"""Operations of DETERMINISTIC=1, run by Triton's interpreter: a row has the same bits among any
others. No GPU is needed."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_paged_attention import Case, check, memory

pytest.importorskip("triton", reason="triton exists for Linux only")
from triton.runtime import interpreter

from worker.backends import cuda as cuda_package
from worker.backends.cuda import batch_invariant, triton_decode
from worker.backends.cuda.mixed import RowwiseMetadata
from worker.model.language_model import use_batch_invariant_operations
from worker.model.loading import LoadingFailed

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter runs on CPUs", allow_module_level=True)


@pytest.fixture(autouse=True)
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's dot add in order, as a GPU's units do for each row alike. numpy's adds
    otherwise for some rows of a tile, and takes no bfloat16."""

    def numbers(operand: Any) -> Any:
        data = operand.data
        is_bfloat16 = data.dtype == np.uint16
        return (data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else data

    def dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = numbers(a)[:, :, None] * numbers(b)[None]
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


ROWS = (2, 31, 33, 300)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: batch_invariant.mean_rows(x, [-1], True),
    "sum": lambda x: batch_invariant.sum_rows(x, [1]),
    "cumsum": lambda x: batch_invariant.cumsum(x, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_product_do_not_depend_on_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 150).to(dtype), torch.randn(70, 150).to(dtype)
    whole = batch_invariant.mm(x, weight.T)
    right = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(whole, right, atol=1e-3, rtol=1e-2)
    for rows in ROWS:
        assert torch.equal(batch_invariant.mm(x[:rows], weight.T), whole[:rows])
    for row in (0, 1, 32, 299):
        assert torch.equal(batch_invariant.mm(x[row : row + 1], weight.T), whole[row : row + 1])


def test_products_of_batches_and_with_a_bias() -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(3, 5, 20), torch.randn(3, 20, 4), torch.randn(4)
    torch.testing.assert_close(batch_invariant.bmm(a, b), a @ b)
    out = batch_invariant.addmm(bias, a[0], b[0], beta=2, alpha=3)
    torch.testing.assert_close(out, 2 * bias + 3 * a[0] @ b[0])
    assert batch_invariant.mm(a[0, :0], b[0]).shape == (0, 4)
    numbers = torch.arange(4).view(2, 2)
    assert batch_invariant.mm(numbers, numbers).tolist() == [[2, 3], [6, 11]]


@pytest.mark.parametrize("name", OPERATIONS)
def test_sums_of_a_row_do_not_depend_on_others(name: str) -> None:
    torch.manual_seed(0)
    x, run = torch.rand(40, 1500), OPERATIONS[name]
    right = {"mean": x.mean(-1, True), "sum": x.sum(1), "cumsum": x.cumsum(-1)}
    whole = run(x)
    torch.testing.assert_close(whole, right[name])
    for row in range(40):
        assert torch.equal(run(x[row : row + 1]), whole[row : row + 1])


def test_other_sums_are_torchs() -> None:
    x = torch.arange(6).view(2, 3)
    assert batch_invariant.sum_rows(x, [0]).tolist() == [3, 5, 7]
    assert batch_invariant.sum_rows(x > 1, [-1]).tolist() == [1, 3]
    assert batch_invariant.sum_rows(x, None).item() == 15
    assert batch_invariant.cumsum(x, 1).tolist() == [[0, 1, 3], [3, 7, 12]]
    assert batch_invariant.cumsum(x.float(), 0).tolist() == [[0, 1, 2], [3, 5, 7]]
    assert batch_invariant.mean_rows(x, [0, 1], dtype=torch.float32).item() == 2.5
    sums = batch_invariant.cumsum(x.float(), -1, dtype=torch.float64)
    assert (sums.dtype, sums.tolist()) == (torch.float64, [[0, 1, 3], [3, 7, 12]])


@pytest.fixture
def replaced() -> Iterator[None]:
    library = batch_invariant.replace_operations("cpu")
    yield
    library._destroy()
    batch_invariant.replace_operations.cache_clear()


@pytest.mark.usefixtures("replaced")
@torch.inference_mode()
def test_layers_use_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    product = batch_invariant._product

    class Recorded:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            shapes.append(grid)
            launch: Callable[..., None] = product[grid]
            return launch

    monkeypatch.setattr(batch_invariant, "_product", Recorded())
    for bias in (False, True):
        layer, x = nn.Linear(40, 130, bias=bias), torch.randn(1, 70, 40)
        whole = layer(x)
        assert torch.equal(layer(x[:, 5:6]), whole[:, 5:6])
    assert shapes == [(9,), (3,)] * 2
    assert float(torch.ones(2, 3).mean(-1)[0]) == 1


def test_without_triton_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "worker.backends.cuda.batch_invariant")
    monkeypatch.delattr(cuda_package, "batch_invariant")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LoadingFailed, match=r"^DETERMINISTIC=1 needs Triton on a GPU: [^\n]*$"):
        use_batch_invariant_operations(nn.Linear(1, 1))  # type: ignore[arg-type]


MIX = [(70, 1), (0, 18), (14, 3)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about NaN
def test_prompts_attend_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "MAX_ROWS", 16)
    check(Case("all", window=20), MIX, random.Random(0), RowwiseMetadata)


def test_the_parts_of_a_rows_keys_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    cached = memory(Case("all"), MIX, random.Random(0))
    step = RowwiseMetadata(cached.cache, cached.batch)
    heads = cached.cache.layers[0].heads
    size = cached.cache.layers[0].key_size
    q = torch.randn(len(cached.batch.ids), heads, size)
    keys, values = [torch.randn_like(t[0]) for t in (cached.cache.keys, cached.cache.values)]

    def attend(rows: slice) -> Tensor:
        return triton_decode.attend(
            q[rows], keys, values, step._tables, step._table_starts[rows],
            step._row_positions[rows], programs=step.programs, scale=0.3,
        )  # fmt: skip

    whole = attend(slice(None))
    for row in (0, 1, 21):
        assert torch.equal(attend(slice(row, row + 1)), whole[row : row + 1])
