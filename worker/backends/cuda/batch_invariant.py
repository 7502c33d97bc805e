"""Operations on a GPU that give a row the same bits alone and among any others.

Libraries choose tiles, the division of sums and the order of adding by the number of rows. Here it
depends only on the length of a row, as in He et al., "Defeating Nondeterminism in LLM Inference"
(2025). Products, means, sums and cumulative sums of rows replace torch's operations; attention
runs row by row (backends/cuda/mixed.py). torch's softmax and layer norm divide a row by its length
alone; maxima, sorting and topk do not round.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# One size of tiles for any number of rows: another one may add in another order.
TILE_ROWS, TILE_COLUMNS = 32, 64
TILE_DEPTH_BYTES = 128
ROW_TILE = 1024  # elements of a row that a sum loads at a time
PRODUCT_DTYPES = torch.float32, torch.bfloat16, torch.float16
SUM_DTYPES = *PRODUCT_DTYPES, torch.float64


@triton.jit(do_not_specialize=["rows"])
def _product(
    a, b, out, rows, columns, depth, a_batch, a_row, a_depth, b_batch, b_depth, b_column,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_depth: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [batch, rows, columns]; sums are float32, in order of the depth."""
    row_tiles, column_tiles = tl.cdiv(rows, tile_rows), tl.cdiv(columns, tile_columns)
    program = tl.program_id(0)
    batch = (program // (row_tiles * column_tiles)).to(tl.int64)
    tile = program % (row_tiles * column_tiles)
    # row tiles first: they read the same columns
    m = (tile % row_tiles * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    n = (tile // row_tiles * tile_columns + tl.arange(0, tile_columns)).to(tl.int64)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        k = start + tl.arange(0, tile_depth)
        x = tl.load(
            a + batch * a_batch + m[:, None] * a_row + k[None, :] * a_depth,
            mask=(m < rows)[:, None] & (k < depth)[None, :], other=0.0,
        )  # fmt: skip
        y = tl.load(
            b + batch * b_batch + k[:, None] * b_depth + n[None, :] * b_column,
            mask=(k < depth)[:, None] & (n < columns)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(x, y, total, input_precision="ieee")
    at = out + (batch * rows + m[:, None]) * columns + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def _row_sum(x, out, columns, divisor, tile: tl.constexpr, total_type: tl.constexpr):
    """Compute the sum of one row, divided by `divisor`."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([tile], total_type)
    for start in range(0, columns, tile):
        at = start + tl.arange(0, tile)
        part = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
        total += part.to(total_type)
    tl.store(out + row, (tl.sum(total, 0) / divisor).to(out.dtype.element_ty))


@triton.jit
def _row_cumsum(x, out, columns, tile: tl.constexpr, total_type: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    before = tl.zeros([1], total_type)
    for start in range(0, columns, tile):
        at = start + tl.arange(0, tile)
        part = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
        sums = tl.cumsum(part.to(total_type), 0) + before
        tl.store(out + row * columns + at, sums.to(out.dtype.element_ty), mask=at < columns)
        before = tl.sum(tl.where(tl.arange(0, tile) == tile - 1, sums, 0.0), 0, keep_dims=True)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products [B, M, N] of a [B, M, K] and b [B, K, N]."""
    batch, rows, depth = a.shape
    columns = b.shape[2]
    out = a.new_empty(batch, rows, columns)
    if a.dtype != b.dtype or a.dtype not in PRODUCT_DTYPES:
        torch.ops.aten.bmm.out(a, b, out=out)
        return out
    tiles = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, TILE_COLUMNS)
    if batch * tiles:
        _product[(batch * tiles,)](
            a, b, out, rows, columns, depth, *a.stride(), *b.stride(),
            tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS,
            tile_depth=TILE_DEPTH_BYTES // a.element_size(),
        )  # fmt: skip
    return out


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product [M, N] of a [M, K] and b [K, N]."""
    return bmm(a[None], b[None])[0]


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Return beta · bias + alpha · a b."""
    product = mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def sum_rows(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if _is_row_wise(x, dim, dtype):
        return _reduced(x, keepdim, 1)
    out = x.new_empty(0, dtype=dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    torch.ops.aten.sum.IntList_out(x, dim, keepdim, dtype=dtype, out=out)
    return out


def mean_rows(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if _is_row_wise(x, dim, dtype):
        return _reduced(x, keepdim, x.shape[-1])
    out = x.new_empty(0, dtype=dtype or x.dtype)
    torch.ops.aten.mean.out(x, dim, keepdim, dtype=dtype, out=out)
    return out


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    out = torch.empty(x.shape, dtype=result, device=x.device)
    if not x.numel() or not {x.dtype, result} <= set(SUM_DTYPES) or dim not in (-1, x.dim() - 1):
        torch.ops.aten.cumsum.out(x, dim, dtype=dtype, out=out)
        return out
    columns = x.shape[-1]
    _row_cumsum[(x.numel() // columns,)](
        x.contiguous(), out, columns, tile=ROW_TILE, total_type=_total_type(result)
    )
    return out


def _is_row_wise(x: Tensor, dim: Sequence[int] | None, dtype: torch.dtype | None) -> bool:
    is_last = dim is not None and len(dim) == 1 and dim[0] in (-1, x.dim() - 1)
    return is_last and x.dtype in SUM_DTYPES and dtype in (None, x.dtype) and x.numel() > 0


def _reduced(x: Tensor, keepdim: bool, divisor: int) -> Tensor:
    out = x.new_empty(*x.shape[:-1], 1)
    _row_sum[(out.numel(),)](
        x.contiguous(), out, x.shape[-1], divisor, tile=ROW_TILE, total_type=_total_type(x.dtype)
    )
    return out if keepdim else out[..., 0]


def _total_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


OPERATIONS = {
    "mm": mm, "bmm": bmm, "addmm": addmm, "cumsum": cumsum,
    "mean.dim": mean_rows, "sum.dim_IntList": sum_rows,
}  # fmt: skip


@functools.cache
def replace_operations(device: str = "cuda") -> Any:
    """Replace torch's operations on the kind of device, in the whole process, until the returned
    library is destroyed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name, function in OPERATIONS.items():
            library.impl(name, function, device.upper())
    return library
