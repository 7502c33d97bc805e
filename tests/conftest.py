"""What must be set before anything is imported."""

import os
from pathlib import Path
from typing import Any

import pytest

# Without a GPU, Triton's kernels are run by its interpreter: read when they, and triton's own, are
# defined, and torch or transformers may be what imports triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def poisoned_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for keys and values that has never been written to is full of what are no numbers."""
    from worker.step import PagedCache

    ordinary = PagedCache.__init__

    def init(cache: PagedCache, *arguments: Any) -> None:
        ordinary(cache, *arguments)
        for stored in (*cache.keys, *cache.values):
            stored.fill_(float("nan"))

    monkeypatch.setattr(PagedCache, "__init__", init)
