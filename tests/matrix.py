"""The variants of a promise that only `./scripts/test --all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def matrix(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the parameters, all but `kept` with the marker `matrix`.

    `kept` are the values that the default check runs: one of each kind.
    """
    values = list(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"not among the values: {missing}"
    mark = pytest.mark.matrix
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*row, marks=() if value in kept else mark)
        for value, row in zip(values, rows, strict=True)
    ]
