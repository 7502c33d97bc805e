"""The response store: its bounds, its chains, its file."""

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest

from batching.errors import InvalidInput
from server.apis.openai.database import NewerSchema, SqliteDatabase, use_write_ahead_log
from server.apis.openai.responses import store as responses_store
from server.apis.openai.responses.store import EVENTS_S, NotStored, ResponseStore, Stored
from server.apis.openai.store import owner_of, storage_namespace
from server.app import create_app
from server.core.settings import Settings, SettingsError
from tests.postgres import Databases, kill

MINE, OTHER = storage_namespace(b"mine"), storage_namespace(b"other")
OWNER = owner_of(b"mine", "127.0.0.1")


def stored(id: str, previous: str | None = None, text: str = "") -> Stored:
    response = {"id": id, "previous_response_id": previous, "output": [{"id": f"out_{id}"}]}
    return Stored(response, [{"id": f"in_{id}", "text": text}])


def filled(path: Path) -> ResponseStore:
    """A store in a file that may not grow, with one response, `a`."""
    database = SqliteDatabase(str(path))
    store = ResponseStore(database)
    store.put(OWNER, stored("a"))
    [[pages]] = database.execute("PRAGMA page_count")
    database.execute(f"PRAGMA max_page_count = {pages}")
    return store


def ids(store: ResponseStore, *among: str, namespace: bytes = MINE) -> list[str]:
    found = []
    for id in among:
        with contextlib.suppress(NotStored):
            found.append(store.get(namespace, id).response["id"])
    return found


def totals(store: ResponseStore) -> tuple[int, int]:
    """The number of responses that have ended, and their bytes."""
    rows = store.database.execute("SELECT size FROM responses WHERE used > 0")
    return len(rows), sum(size for [size] in rows)


@pytest.fixture
def store(databases: Databases) -> ResponseStore:
    return ResponseStore(databases.open())


def test_response_is_returned_until_it_is_deleted(store: ResponseStore) -> None:
    store.put(OWNER, stored("a", text="wörld"))
    assert store.get(MINE, "a") == stored("a", text="wörld")
    found = {"in_a": {"id": "in_a", "text": "wörld"}, "out_a": {"id": "out_a"}}
    assert store.items(MINE, {"in_a", "out_a", "none"}) == found
    store.delete(MINE, "a")
    assert totals(store) == (0, 0)
    for look_up in (store.get, store.chain, store.delete):
        with pytest.raises(NotStored):
            look_up(MINE, "a")
    assert store.items(MINE, {"in_a"}) == {}


def test_item_of_two_responses_remains_after_the_first_is_deleted(store: ResponseStore) -> None:
    same: list[Any] = [{"id": "in"}, {"id": "in"}]
    for id in ("a", "b"):
        store.put(OWNER, Stored({"id": id, "previous_response_id": None, "output": []}, same))
    store.delete(MINE, "a")
    assert store.items(MINE, {"in"}) == {"in": {"id": "in"}}
    store.delete(MINE, "b")
    assert store.items(MINE, {"in"}) == {}


def test_a_response_and_its_items_are_stored_together(store: ResponseStore) -> None:
    conversation = {"id": "conv", "metadata": {}}
    of = responses_store.of_conversations(MINE)
    store.create_conversation(OWNER._replace(namespace=of), conversation, [], 1000)
    for id, previous, added in (("a", None, ["in_a", "out_a"]), ("a", "x", [])):
        turn = stored(id, previous)
        with contextlib.ExitStack() as stack:
            if not added:  # is there already
                stack.enter_context(pytest.raises(InvalidInput, match="already"))
            store.extend(of, "conv", turn.items, 1000, (OWNER, turn))
    assert [item["id"] for item in store.conversation(of, "conv")] == ["in_a", "out_a"]
    assert store.get(MINE, "a").response["previous_response_id"] is None
    with pytest.raises(InvalidInput, match="exceed"):
        store.extend(of, "conv", stored("b", text="x" * 1000).items, 1000, (OWNER, stored("b")))
    assert ids(store, "a", "b") == ["a"]
    assert totals(store)[1] == sum(
        size for [size] in store.database.execute("SELECT size FROM responses")
    )
    store.delete(of, "conv")
    assert store.database.execute("SELECT count(*) FROM conversation_items") == [(0,)]


def test_namespace_is_the_same_after_a_restart() -> None:
    # a change of these bytes would lose all stored responses
    assert storage_namespace(b"").hex() == "c47b73d7e019c67f2e0e2d842366efaf"


def test_chain_is_returned_oldest_first(store: ResponseStore) -> None:
    turns = [stored("a"), stored("b", "a"), stored("c", "b")]
    for turn in turns:
        store.put(OWNER, turn)
    assert store.chain(MINE, "c") == turns
    assert store.chain(MINE, "b") == turns[:2]
    sizes: list[int] = []
    assert store.chain(MINE, "c", sizes.append) == turns
    assert (len(sizes), sum(sizes)) == totals(store)
    store.delete(MINE, "a")
    with pytest.raises(NotStored) as missing:
        store.chain(MINE, "c")
    assert missing.value.id == "a"


@pytest.mark.parametrize(
    ("bounds", "text"), [({"max_responses": 2}, ""), ({"max_bytes": 1000}, "x" * 300)]
)
def test_oldest_responses_are_dropped_above_a_limit(
    databases: Databases, bounds: dict[str, int], text: str
) -> None:
    store = ResponseStore(databases.open(), **bounds)
    for id in "abcd":
        store.put(OWNER, stored(id, text=text))
    assert ids(store, *"abcd") == ["c", "d"]
    assert totals(store)[0] == 2
    assert totals(store)[1] <= 1000


@pytest.mark.parametrize(
    ("bounds", "text"), [({"max_responses": 6}, ""), ({"max_bytes": 4000}, "x" * 500)]
)
def test_clients_share_the_store(databases: Databases, bounds: dict[str, int], text: str) -> None:
    """A client that stores much loses its own oldest responses, by number or by size."""
    one, two, three = (owner_of(b"", f"10.0.0.{n}") for n in range(3))
    store = ResponseStore(databases.open(), **bounds)
    store.put(one, stored("one", text=text))
    for n in range(20):
        store.put(two, stored(f"two{n}", text=text))
    many = ids(store, *(f"two{n}" for n in range(20)), namespace=two.namespace)
    assert many == [f"two{n}" for n in range(20 - len(many), 20)]
    assert len(many) == 5  # alone it takes all that the others leave
    for n in range(20):
        store.put(three, stored(f"three{n}", text=text))
    assert ids(store, "one", namespace=one.namespace) == ["one"]
    left = store.database.execute("SELECT count(*) FROM responses GROUP BY client")
    assert sorted(left) == [(1,), (2,), (3,)]


def test_too_large_response_drops_no_others(databases: Databases) -> None:
    store = ResponseStore(databases.open(), max_bytes=1000)
    one, two = owner_of(b"one", ""), owner_of(b"two", "")
    store.put(one, stored("a"))
    store.put(two, stored("b", text="x" * 2000))
    assert ids(store, "b", namespace=two.namespace) == []
    assert ids(store, "a", namespace=one.namespace) == ["a"]
    assert totals(store)[0] == 1


def test_an_owner_is_a_key_or_else_an_address() -> None:
    keyed = owner_of(b"key", "10.0.0.1")
    assert keyed == owner_of(b"key", "10.0.0.2")
    assert keyed.namespace == keyed.client
    one, two = owner_of(b"", "10.0.0.1"), owner_of(b"", "10.0.0.2")
    assert one.namespace == two.namespace == storage_namespace(b"")
    assert len({one.client, two.client, one.namespace, keyed.client}) == 4


def test_used_conversation_keeps_its_first_response(databases: Databases) -> None:
    store = ResponseStore(databases.open(), max_responses=3)
    store.put(OWNER, stored("a"))
    store.put(OWNER, stored("b", "a"))
    store.put(OWNER, stored("other"))
    store.chain(MINE, "b")
    store.put(OWNER, stored("c", "b"))
    assert ids(store, "a", "b", "c", "other") == ["a", "b", "c"]


def test_responses_keep_their_order_and_their_bounds(databases: Databases) -> None:
    store = ResponseStore(databases.open())
    for id in "abc":
        store.put(OWNER, stored(id))
    store.chain(MINE, "a")
    size = totals(store)[1]
    store.close()
    store = ResponseStore(databases.open(), max_responses=3)
    assert totals(store) == (3, size)
    assert store.get(MINE, "b") == stored("b")
    store.put(OWNER, stored("d"))
    assert ids(store, *"abcd") == ["a", "c", "d"]
    store.close()


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_user_reads_the_files(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "responses.db"
    if exists:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            use_write_ahead_log(connection)
            path.chmod(0o644)
    database = SqliteDatabase(str(path))
    store = ResponseStore(database)
    store.put(OWNER, stored("a"))
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    suffixes = ("", "-wal", "-shm", f"-{database.process}.lock")
    assert modes == {f"responses.db{suffix}": 0o600 for suffix in suffixes}
    store.close()


def test_stored_responses_can_be_used_on_a_full_disk(tmp_path: Path) -> None:
    store = filled(tmp_path / "responses.db")
    before = totals(store)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.put(OWNER, stored("b", "a", "x" * 100_000))
    assert totals(store) == before
    assert ids(store, "a", "b") == ["a"]
    store.database.execute("PRAGMA query_only = ON")  # not even a use can be written down
    assert store.chain(MINE, "a") == [stored("a")]
    store.database.execute("PRAGMA query_only = OFF")
    store.put(OWNER, stored("c", "a"))
    assert ids(store, "a", "c") == ["a", "c"]
    store.close()


def test_error_names_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database " * 100)
    for path in (text, tmp_path / "none" / "responses.db"):
        with pytest.raises(sqlite3.Error):
            ResponseStore(SqliteDatabase(str(path)))
        with pytest.raises(SettingsError, match="RESPONSES_DB="):
            create_app(Settings(responses_db=str(path)))


def test_a_folder_and_a_device_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (folder, pipe):
        path.chmod(0o755)
        with pytest.raises(SettingsError, match="it is not a regular file"):
            create_app(Settings(responses_db=str(path)))
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


# ── background responses, in a file that processes share ──


def running(id: str) -> Stored:
    response: Any = {"id": id, "previous_response_id": None, "output": [], "status": "queued"}
    return Stored(response, [{"id": f"in_{id}"}])


Pair = tuple[ResponseStore, ResponseStore]


@pytest.fixture
def shared(databases: Databases) -> Iterator[Pair]:
    """The store of two processes."""
    one, other = (ResponseStore(databases.open(), max_responses=2) for _ in range(2))
    yield one, other
    for store in (one, other):
        store.close()


def test_a_background_response_is_found_by_all_from_its_start(shared: Pair) -> None:
    owner, other = shared
    owner.put(OWNER, running("a"), is_generating=True)
    assert other.get(MINE, "a") == running("a")
    progress = {**running("a").response, "status": "in_progress", "output": [{"id": "out"}]}
    owner.put(OWNER, Stored(progress, running("a").input), is_generating=True)
    assert orjson.loads(other.response(MINE, "a")) == progress | {"output": []}
    assert totals(other) == (0, 0)
    for id in "bcd":  # none of them drops the running one
        other.put(OWNER, stored(id))
    other.chain(MINE, "a")
    assert totals(other)[0] == 2
    assert other.is_generating(MINE, "a")
    assert not other.is_generating(OTHER, "a")
    with pytest.raises(NotStored):
        other.get(OTHER, "a")
    owner.put(OWNER, stored("a"))
    assert not other.is_generating(MINE, "a")
    assert ids(other, *"abcd") == ["a", "d"]
    assert other.items(MINE, {"in_a"}) == {"in_a": {"id": "in_a", "text": ""}}


def test_a_pause_or_a_step_of_the_clock_fails_nothing(
    shared: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = shared
    owner.put(OWNER, running("a"), is_generating=True)
    day = 24 * 3600
    for clock, step in ((time.time, day), (time.time, -day), (time.monotonic, day)):
        now = clock()
        monkeypatch.setattr(time, clock.__name__, lambda now=now, step=step: now + step)
        assert other.is_generating(MINE, "a")
        assert other.get(MINE, "a") == owner.get(MINE, "a") == running("a")
    owner.put(OWNER, stored("a"))
    assert other.get(MINE, "a") == stored("a")


def test_the_responses_of_a_dead_process_have_failed_for_all(
    databases: Databases, tmp_path: Path
) -> None:
    owner, *others = (ResponseStore(databases.open(), max_responses=2) for _ in range(3))
    for id in "abcd":
        owner.put(OWNER, running(id), is_generating=True)
    others[0].put(OWNER, running("own"), is_generating=True)
    kill(owner.database)
    for _ in range(2):
        others[1].release_abandoned()
    assert totals(others[0])[0] == 2, "before one is requested"
    for store in others:
        failed = store.get(MINE, "d")
        assert (failed.response["status"], failed.input) == ("failed", [])
        assert failed.response["error"]["code"] == "server_error"
        assert store.is_generating(MINE, "own")
        assert ids(store, *"abcd") == ["c", "d"]  # they count, and are dropped in turn
    for store in others:
        store.close()
    if not databases.is_postgres:
        assert [file.name for file in tmp_path.iterdir()] == ["store.db"]


def test_a_file_with_leases_is_read(tmp_path: Path) -> None:
    """As an earlier version has left it."""
    database = SqliteDatabase(str(tmp_path / "responses.db"))
    store = ResponseStore(database)
    store.put(OWNER, stored("a"))
    database.connection.executescript(
        "DROP TABLE generating; CREATE TABLE running (id TEXT PRIMARY KEY, expires REAL NOT NULL);"
        "INSERT INTO running VALUES ('b', 1); UPDATE responses SET used = 1;"
        "PRAGMA user_version = 0"
    )
    store.close()
    store = ResponseStore(SqliteDatabase(str(tmp_path / "responses.db")))
    store.remove_expired()
    store.put(OWNER, running("b"), is_generating=True)
    assert ids(store, *"ab") == ["a", "b"]
    store.close()


def test_unused_responses_expire(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(databases.open(), ttl_s=100)
    for id in ("a", "b", "running"):
        store.put(OWNER, running(id) if id == "running" else stored(id), id == "running")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 99)
    store.chain(MINE, "b")
    monkeypatch.setattr(time, "time", lambda: now + 101)
    store.remove_expired()
    assert ids(store, "a", "b", "running") == ["b", "running"]


def test_a_newer_schema_is_refused(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = *responses_store.MIGRATIONS, "CREATE TABLE newer (id TEXT)"
    with monkeypatch.context() as patch:
        patch.setattr(responses_store, "MIGRATIONS", newer)
        ResponseStore(databases.open()).close()
    with pytest.raises(NewerSchema, match=r"'responses' has version 3.* up to 2"):
        ResponseStore(databases.open())
    if databases.is_postgres:
        with pytest.raises(SettingsError, match="STORE: its schema 'responses' has version 3"):
            create_app(Settings(store=databases.url))


def test_a_failed_migration_changes_nothing(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResponseStore(databases.open())
    wrong = *responses_store.MIGRATIONS, "CREATE TABLE newer (id TEXT); SELECT * FROM none"
    with monkeypatch.context() as patch:
        patch.setattr(responses_store, "MIGRATIONS", wrong)
        with pytest.raises((OSError, sqlite3.Error)):
            ResponseStore(databases.open())
    ResponseStore(databases.open())
    with pytest.raises((OSError, sqlite3.Error)):
        store.database.execute("SELECT * FROM newer")


def test_a_text_that_postgresql_cannot_store_is_refused(databases: Databases) -> None:
    store = ResponseStore(databases.open())
    with pytest.raises(InvalidInput if databases.is_postgres else NotStored):
        store.get(MINE, "a\0")


def test_processes_open_a_new_database_at_the_same_time(
    databases: Databases, tmp_path: Path
) -> None:
    for n in range(1 if databases.is_postgres else 10):
        if not databases.is_postgres:
            databases.url = str(tmp_path / f"{n}.db")
        gate = threading.Barrier(4)

        def opened(gate: threading.Barrier = gate) -> int:
            gate.wait(60)
            store = ResponseStore(databases.open())
            store.put(OWNER, stored(f"a{threading.get_ident()}"))
            store.close()
            return 1

        with ThreadPoolExecutor(4) as pool:
            assert sum(future.result() for future in [pool.submit(opened) for _ in range(4)]) == 4


def test_the_switch_to_a_write_ahead_log_is_repeated_while_another_process_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, full = sqlite3.OperationalError("locked"), sqlite3.OperationalError("disk full")
    busy.sqlite_errorcode, full.sqlite_errorcode = sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL
    waits: list[float] = []
    monkeypatch.setattr("server.apis.openai.database.time.sleep", waits.append)
    database = Mock(execute=Mock(side_effect=[busy, busy, None]))
    use_write_ahead_log(database)
    assert len(waits) == 2
    with pytest.raises(sqlite3.OperationalError, match="full"):
        use_write_ahead_log(Mock(execute=Mock(side_effect=full)))
    assert len(waits) == 2


# ── events ──


def test_events_are_kept_for_a_time_and_count_while_they_are(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(OWNER, running("a"), is_generating=True)
    for number in range(3):
        store.add_event("a", number, b"event %d" % number)
    assert store.events(MINE, "a", 0) == ([b"event 1", b"event 2"], True)
    with monkeypatch.context() as patch:
        patch.setattr(responses_store, "MAX_READ_BYTES", 3)
        assert store.events(MINE, "a", 0) == ([b"event 1"], True)
    with pytest.raises(NotStored):
        store.events(OTHER, "a", 0)
    done = running("a").response | {"status": "completed"}
    store.put(OWNER, Stored(done, []))
    [last], is_generating = store.events(MINE, "a", 2)
    assert last.startswith(b"event: response.completed\ndata: ")
    assert b'"sequence_number":3' in last
    assert not is_generating
    _, size = totals(store)
    store.remove_expired()
    assert totals(store) == (1, size)
    store.put(OWNER, running("b"), is_generating=True)
    store.add_event("b", 0, b"event")
    later = time.time() + EVENTS_S + 2
    monkeypatch.setattr(time, "time", lambda: later)
    store.remove_expired()
    assert store.events(MINE, "b", -1) == ([b"event"], True)  # until an hour after its end
    assert totals(store) == (1, size - len(last) - 3 * len(b"event 0"))
    with pytest.raises(InvalidInput, match="until an hour after"):
        store.events(MINE, "a", 2)
