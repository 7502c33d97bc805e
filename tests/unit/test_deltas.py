"""Deltas of a choice, merged until they are read."""

import tracemalloc

from worker.messages.deltas import Delta, DeltaPart


def test_text_that_is_not_read_yet_is_not_copied_with_each_token() -> None:
    tracemalloc.start()
    unread = Delta(0)
    for text in ("字" * 1_000_000, *["字"] * 100):  # CPython does so once the code is warm
        unread.merge(Delta(0, [DeltaPart("content", text)]))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    unread.merge(Delta(0, [DeltaPart("content", "字a")]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert unread.text == "字" * 1_000_101 + "a"
    assert peak - before < 100_000
