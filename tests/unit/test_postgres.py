"""PostgreSQL as a database of servers: outages, locks, limits of keys."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from batching.token_bucket import ParallelLimit, TokenBucket
from server.apis.openai.batches.store import BatchStore
from server.apis.openai.database import DatabaseDown
from server.app import create_app
from server.core.settings import SettingsError, load_settings
from tests.postgres import Postgres, kill, running_postgres
from tests.serving import wait_until
from tests.unit.test_batch_files import begun, claimed

Open = Callable[[], Any]


@pytest.fixture
def opened(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Each call opens a database as another process."""
    from server.apis.openai import postgres as module

    monkeypatch.setattr(module, "RECONNECT_S", 0.0)
    url = postgres.new_database()
    with ExitStack() as stack:

        def open_database() -> Any:
            database = module.PostgresDatabase(url)
            stack.callback(database.close)
            return database

        yield open_database


def test_a_transaction_is_of_its_thread_and_as_a_whole(opened: Open) -> None:
    database = opened()
    database.execute("CREATE TABLE numbers (number BIGINT)")
    with suppress(KeyError), database.transaction():
        database.execute("INSERT INTO numbers VALUES (1)")
        with database.transaction():
            assert database.execute("SELECT number FROM numbers") == [(1,)]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(database.execute, "SELECT number FROM numbers").result(60) == []
        raise KeyError
    assert database.execute("SELECT number FROM numbers") == []


def test_a_process_is_alive_until_its_connection_ends(opened: Open) -> None:
    one, other = opened(), opened()
    assert other.is_alive(one.process)
    assert one.count_processes() == 2
    kill(one)
    assert not other.is_alive(one.process)
    assert other.count_processes() == 1


def test_an_outage_fails_queries_soon_and_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_postgres() as server:
        from server.apis.openai import postgres as module

        one, other = (module.PostgresDatabase(server.url()) for _ in range(2))
        with ThreadPoolExecutor(4) as pool:  # as many connections
            assert len([*pool.map(one.execute, ["SELECT pg_sleep(0.5)"] * 4)]) == 4
        server.stop(signal.SIGQUIT)
        with pytest.raises(DatabaseDown, match="not available"):
            one.execute("SELECT 1")
        with pytest.raises(DatabaseDown) as error:
            one.renew()
        assert str(server.folder) not in str(error.value)
        before = time.perf_counter()
        for _ in range(100):  # without a wait of each
            with pytest.raises(DatabaseDown):
                one.execute("SELECT 1")
        assert time.perf_counter() - before < 3
        server.start()
        one.renew()
        # the other one has no lock yet, and is not taken for dead, nor by a process that starts
        new = module.PostgresDatabase(server.url())
        assert one.is_alive(other.process)
        assert new.is_alive(other.process)

        assert one.execute("SELECT 1") == [(1,)]  # at once, in the time of a new connection
        other.renew()
        monkeypatch.setattr(one, "_judges_from", 0.0)
        assert one.is_alive(other.process)
        for database in (one, other, new):
            database.close()


def test_a_server_that_does_not_reply_fails_queries(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is paused: its own limit of a statement does not hold then."""
    from server.apis.openai import postgres as module

    database = opened()
    monkeypatch.setattr(module, "REPLY_S", 0.2)
    for _ in range(2):
        before = time.perf_counter()
        with pytest.raises(DatabaseDown), database.transaction():
            database.execute("SELECT pg_sleep(60)")
        assert time.perf_counter() - before < 5
    monkeypatch.undo()
    assert database.execute("SELECT 1") == [(1,)]


def test_a_batch_ends_while_the_lines_of_a_dead_process_are_released(
    opened: Open, postgres: Postgres
) -> None:
    """Both lock the batch first: else each would wait for the other."""
    stores = [BatchStore(opened(), 1_000_000, 1_000_000) for _ in range(3)]
    dead, one, other = stores
    record = begun(dead)
    assert claimed(dead, record) == [0, 1, 2]
    kill(dead.database)
    waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
    with ThreadPoolExecutor(1) as pool, one.database.transaction():
        one.database.execute("SELECT 1 FROM batches FOR UPDATE")
        released = pool.submit(other.release_abandoned)
        wait_until(lambda: bool(postgres.execute(waiting)))
        assert one.finish(record, "failed")
    released.result(60)
    assert not one.has_lines(record)


def test_a_process_claims_as_many_lines_as_it_asks_for(opened: Open) -> None:
    """Also by the plan for a batch that is not in the statistics yet, which joins by a loop."""
    store = BatchStore(opened(), 1_000_000, 1_000_000)
    record = begun(store, 100)
    with store.database.transaction():
        for kind in ("hashjoin", "hashagg", "mergejoin", "sort", "material", "memoize"):
            store.database.execute(f"SET LOCAL enable_{kind} = off")
        assert claimed(store, record, 16) == [*range(16)]


def start(environment: dict[str, str]) -> None:
    create_app(load_settings(environment))


def test_a_wrong_url_ends_the_start_without_its_password(postgres: Postgres) -> None:
    for url, reason in (
        ("postgresql://u:secret@/none?host=/nowhere", "/nowhere"),
        ("postgresql://u:secret@/none?unknown=1", "with known parameters"),
        ("mysql://u:secret@h", "must be sqlite or postgresql"),
        ("postgresql://u:x@secret@h/none", "must be sqlite or postgresql.*%40"),
        ("postgresql://u:0/secret@h/none", "must be sqlite or postgresql.*%2F"),
        ("postgresql://u:secret%zz@h/none", "with known parameters"),
        ("postgresql://u:secret@[h/none", "with known parameters"),
    ):
        with pytest.raises(SettingsError, match=f"STORE.*{reason}") as error:
            start({"STORE": url})
        assert "secret" not in str(error.value)
    with pytest.raises(SettingsError, match="RESPONSES_DB and BATCH_DIR are for sqlite"):
        start({"STORE": postgres.url(), "BATCH_DIR": "folder"})


def test_processes_share_the_limits_of_keys(opened: Open) -> None:
    from server.apis.openai.shared_limits import SharedLimits

    def bucket_of(process: int) -> TokenBucket:
        return keys[process].requests  # type: ignore[no-any-return]

    keys = [
        SimpleNamespace(
            name="k",
            requests=TokenBucket(60, time.monotonic()),
            tokens=None,
            parallel=ParallelLimit(20),
        )
        for _ in range(2)
    ]
    limits = []
    for key in keys:
        jobs: Any = SimpleNamespace(stores=[], on_poll=[], app=SimpleNamespace(keyring=[key]))
        limits.append(SharedLimits(opened(), jobs))
    for each in limits:
        anyio.run(each._poll)
    now = time.monotonic()
    taken = [0, 0]
    for process in (0, 1):
        while not bucket_of(process).wait_s(1, now):
            bucket_of(process).take(1, now)
            taken[process] += 1
    assert taken == [30, 30]
    for each in (*limits, *limits):
        anyio.run(each._poll)
    for process in (0, 1):
        assert bucket_of(process).left(time.monotonic()) == pytest.approx(0, abs=10)  # refilled
        assert bucket_of(process).taken == 0
    [[units]] = limits[0].database.execute("SELECT units FROM limits")
    assert units == pytest.approx(0, abs=10)
    for sign in "-+":  # time has passed, or the clock has been set back
        stepped = f"updated = clock_timestamp() {sign} interval '1 hour'"
        limits[0].database.execute(f"UPDATE limits SET units = 0, {stepped}")
        anyio.run(limits[1]._poll)
        assert bucket_of(1).left(time.monotonic()) == 60

    running = [key.parallel for key in keys]
    for _ in range(8):
        while any([limit.start() for limit in running]):  # noqa: C419  # both
            pass
        for each in limits:
            anyio.run(each._poll)
    assert sum(limit.running for limit in running) == 20
    kill(limits[1].database)
    for _ in range(8):
        while running[0].start():
            pass
        anyio.run(limits[0]._poll)
    assert running[0].running == 20, "those of a dead process count no more"
