"""The response store: its bounds, its chains, its file."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.core.settings import Settings, SettingsError
from server.openai.responses.store import NotStored, ResponseStore, Stored, TooLarge


def stored(id: str, previous: str | None = None, text: str = "") -> Stored:
    response = {"id": id, "previous_response_id": previous, "output": [{"id": f"out_{id}"}]}
    return Stored(response, [{"id": f"in_{id}", "text": text}])


def filled(path: Path) -> ResponseStore:
    """A store in a file that may not grow, with one response, `a`."""
    store = ResponseStore(str(path))
    store.put(stored("a"))
    [pages] = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    return store


def ids(store: ResponseStore, *among: str) -> list[str]:
    found = []
    for id in among:
        with contextlib.suppress(NotStored):
            found.append(store.get(id).response["id"])
    return found


def test_response_is_returned_until_it_is_deleted() -> None:
    store = ResponseStore(":memory:")
    store.put(stored("a", text="wörld"))
    assert store.get("a") == stored("a", text="wörld")
    found = {"in_a": {"id": "in_a", "text": "wörld"}, "out_a": {"id": "out_a"}}
    assert store.items({"in_a", "out_a", "none"}) == found
    store.delete("a")
    assert store.totals == (0, 0)
    for look_up in (store.get, store.chain, store.delete):
        with pytest.raises(NotStored):
            look_up("a")
    assert store.items({"in_a"}) == {}


def test_item_of_two_responses_remains_after_the_first_is_deleted() -> None:
    store = ResponseStore(":memory:")
    same: list[Any] = [{"id": "in"}, {"id": "in"}]
    for id in ("a", "b"):
        store.put(Stored({"id": id, "previous_response_id": None, "output": []}, same))
    store.delete("a")
    assert store.items({"in"}) == {"in": {"id": "in"}}
    store.delete("b")
    assert store.items({"in"}) == {}


def test_items_of_one_response_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(":memory:")
    many: list[Any] = [{"id": f"in_{n}"} for n in range(100)]
    for id, items in (("a", many[:50]), ("b", many[50:])):
        store.put(Stored({"id": id, "previous_response_id": None, "output": []}, items))
    reads: list[str] = []
    read = store._read

    def counted(id: str) -> Stored:
        reads.append(id)
        return read(id)

    monkeypatch.setattr(store, "_read", counted)
    assert len(store.items({entry["id"] for entry in many})) == 100
    assert sorted(reads) == ["a", "b"]


def test_chain_is_returned_oldest_first() -> None:
    store = ResponseStore(":memory:")
    turns = [stored("a"), stored("b", "a"), stored("c", "b")]
    for turn in turns:
        store.put(turn)
    assert store.chain("c") == turns
    assert store.chain("b") == turns[:2]
    assert store.chain("c", store.totals[1]) == turns
    with pytest.raises(TooLarge):
        store.chain("c", store.totals[1] - 1)
    store.delete("a")
    with pytest.raises(NotStored) as missing:
        store.chain("c")
    assert missing.value.id == "a"


def test_oldest_responses_are_dropped_above_the_count_limit() -> None:
    store = ResponseStore(":memory:", max_responses=3)
    for id in "abcde":
        store.put(stored(id))
    assert ids(store, *"abcde") == ["c", "d", "e"]
    assert store.totals[0] == 3


def test_oldest_responses_are_dropped_above_the_size_limit() -> None:
    store = ResponseStore(":memory:", max_bytes=1000)
    for id in "abc":
        store.put(stored(id, text="x" * 300))
    assert ids(store, *"abc") == ["b", "c"]
    assert store.totals[1] <= 1000
    store.put(stored("big", text="x" * 2000))
    assert ids(store, "b", "c", "big") == []
    assert store.totals == (0, 0)
    store.put(stored("d"))
    assert ids(store, "d") == ["d"]


def test_used_conversation_keeps_its_first_response() -> None:
    store = ResponseStore(":memory:", max_responses=3)
    store.put(stored("a"))
    store.put(stored("b", "a"))
    store.put(stored("other"))
    store.chain("b")
    store.put(stored("c", "b"))
    assert ids(store, "a", "b", "c", "other") == ["a", "b", "c"]


def test_file_keeps_responses_their_order_and_its_bounds(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    store = ResponseStore(path)
    for id in "abc":
        store.put(stored(id))
    store.chain("a")
    size = store.totals[1]
    store.close()
    store = ResponseStore(path, max_responses=3)
    assert store.totals == (3, size)
    assert store.get("b") == stored("b")
    store.put(stored("d"))
    assert ids(store, *"abcd") == ["a", "c", "d"]
    store.close()


def test_stored_responses_can_be_used_on_a_full_disk(tmp_path: Path) -> None:
    store = filled(tmp_path / "responses.db")
    before = store.totals
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.put(stored("b", "a", "x" * 100_000))
    assert store.totals == before
    assert ids(store, "a", "b") == ["a"]
    store._database.execute("PRAGMA query_only = ON")  # not even a use can be written down
    assert store.chain("a") == [stored("a")]
    store._database.execute("PRAGMA query_only = OFF")
    store.put(stored("c", "a"))
    assert ids(store, "a", "c") == ["a", "c"]
    store.close()


def test_failed_put_is_rolled_back() -> None:
    store = ResponseStore(":memory:", max_responses=1)
    store.put(stored("a"))
    before = store.totals

    keeps = "CREATE TRIGGER keeps BEFORE DELETE ON responses BEGIN SELECT raise(ABORT, 'full'); END"
    store._database.execute(keeps)
    with pytest.raises(sqlite3.Error):
        store.put(stored("b"))
    assert store.totals == before
    assert ids(store, "a", "b") == ["a"]


def test_error_names_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database " * 100)
    for path in (text, tmp_path / "none" / "responses.db", tmp_path):
        with pytest.raises(sqlite3.Error):
            ResponseStore(str(path))
        with pytest.raises(SettingsError, match="RESPONSES_DB="):
            create_app(Settings(responses_db=str(path)))
