"""API keys: the file, its errors, reloads, and rate limits."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batching.fair_share import Priority
from batching.token_bucket import EXCHANGE_S, ParallelLimit, TokenBucket
from server.core.api_keys import Keyring
from server.core.settings import Settings, SettingsError

DIGEST = hashlib.sha256(b"secret").hexdigest()


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def keyring(path: Path, text: str, **settings: Any) -> Keyring:
    write(path, text)
    return Keyring(Settings(api_keys_file=str(path), **settings))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def table(rest: str = "", name: str = "alice", digest: str = DIGEST) -> str:
    return f'[keys.{name}]\nsha256 = "{digest}"\n{rest}\n'


def test_a_key_is_found_by_its_digest_with_its_rights(path: Path) -> None:
    rights = 'priority = "batch"\nshare = 3\nadmin = true\nrequests_per_minute = 5'
    keys = keyring(path, table(rights), api_keys=("plain",), admin_keys=("boss",))
    alice = keys.find(b"secret")
    assert alice
    assert (alice.name, alice.priority, alice.share) == ("alice", Priority.BATCH, 3)
    assert alice.admin
    assert alice.requests
    assert alice.requests.per_minute == 5
    assert alice.tokens is None
    for unknown in (b"", b"secret ", DIGEST.encode(), b"\0alice", bytes.fromhex(DIGEST)):
        assert keys.find(unknown) is None
    found = keys.find(b"plain"), keys.find(b"boss")
    assert [(key.name, key.admin) for key in found if key] == [("key 1", False), ("key 2", True)]
    assert b"secret" not in alice.id


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "must have a table"),
        ("[keys]", "must have a table"),
        ("key = 1\n" + table(), "must have a table"),
        ("[keys", "at end of document"),
        ("[keys.a]\nshare = 1", "keys.a: Object missing required field `sha256`"),
        ("[keys]\na = 1", "keys.a: Expected `object`, got `int`"),
        (table(name='"a b"'), "a name has"),
        (table(name='"' + "a" * 65 + '"'), "a name has"),
        (table(digest="secret"), "keys.alice: Expected `str` matching regex"),
        (table("limit = 1"), "unknown field `limit`"),
        (table('priority = "high"'), "Invalid enum value 'high' - at `$.priority`"),
        (table("priority = [1]"), "Expected `str`, got `array` - at `$.priority`"),
        (table(f"{'x' * 9999} = 1"), "unknown field `xxx"),
        (table(f'priority = "{"x" * 9999}"'), "Invalid enum value 'xxx"),
        (table("share = 0"), "keys.alice: Expected `float` >= 0.001 - at `$.share`"),
        (table("share = nan"), "Expected `float` >= 0.001"),
        (table("share = true"), "Expected `float`, got `bool`"),
        (table("requests_per_minute = 0"), "Expected `int` >= 1"),
        (table("tokens_per_minute = 1.5"), "got `float` - at `$.tokens_per_minute`"),
        (table("tokens_per_minute = true"), "got `bool`"),
        (table("max_parallel_requests = 0"), "Expected `int` >= 1"),
        (table('admin = "yes"'), "Expected `bool`, got `str` - at `$.admin`"),
        (table() + table(name="bob"), "alice and bob have the same sha256"),
        ("[keys.é]\nsha256 = 1", "at line 1"),
    ],
)
def test_an_invalid_file_is_refused_in_one_sentence_without_secrets(
    path: Path, text: str, error: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        keyring(path, text)
    message = str(refused.value)
    assert error in message
    assert message.startswith(f"API_KEYS_FILE={str(path)!r}: ")
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    assert "secret" not in message
    assert DIGEST not in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for content in (None, b"\xff\xfe"):
        path = tmp_path / "keys"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SettingsError, match="API_KEYS_FILE="):
            Keyring(Settings(api_keys_file=str(path)))


def test_a_reload_replaces_the_keys_and_keeps_what_is_used_of_their_limits(path: Path) -> None:
    limits = "requests_per_minute = 5\ntokens_per_minute = 9\nmax_parallel_requests = 3"
    keys = keyring(path, table(limits))
    before = keys.find(b"secret")
    changed = hashlib.sha256(b"new").hexdigest()
    write(path, table(limits.replace("= 9", "= 10"), digest=changed))
    keys.reload()
    after = keys.find(b"new")
    assert before
    assert after
    assert (keys.find(b"secret"), after.id) == (None, before.id)
    assert after.requests is before.requests
    assert after.parallel is before.parallel is not None
    assert after.tokens is not before.tokens


def test_an_invalid_file_changes_nothing_at_a_reload(path: Path) -> None:
    keys = keyring(path, table())
    for text in ("[keys", "", table("share = -1")):
        write(path, text)
        with pytest.raises(SettingsError):
            keys.reload()
        assert keys.find(b"secret")


def test_a_file_that_all_users_can_read_is_warned_about(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keyring(path, table())
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        keys.reload()
    assert "can be read by all users" in caplog.text


def test_a_rate_limit_allows_a_minutes_units_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(60, now=100.0)
    assert bucket.left(500.0) == 60, "no more is saved up"
    bucket.take(60, 500.0)
    assert bucket.wait_s(1, 500.0) == 1
    assert bucket.wait_s(1, 500.5) == 0.5
    assert bucket.wait_s(1, 501.0) == 0
    bucket.take(121, 501.0)  # counted after it has run
    assert bucket.left(501.0) == -120
    assert bucket.wait_s(1, 501.0) == 121
    assert bucket.left(681.0) == 60


def answered_in_a_minute(busy: Sequence[bool], store_is_lost: bool = False) -> int:
    """Return the units that processes take in their third minute. The busy ones take what they can;
    each exchanges once a second, at a time of its own."""
    shared, buckets, taken = TokenBucket(600, 0.0), [], 0
    for _ in busy:
        bucket = TokenBucket(600, 0.0)
        bucket.exchange(0.0, 600.0, len(busy), 0.0)
        buckets.append(bucket)
    for step in range(180 * 30):
        now = step / 30
        for n, bucket in enumerate(buckets):
            if busy[n] and not bucket.wait_s(1, now):
                bucket.take(1, now)
                taken += now >= 120
            if step % 30 == 10 * n:
                if store_is_lost:
                    bucket.go_alone(1.0)
                else:
                    units = bucket.taken
                    shared.take(units, now)
                    bucket.exchange(units, shared.left(now), len(busy), now)
    return taken


@pytest.mark.parametrize("busy", [[True], [True] * 3, [True, False, False], [True, True, False]])
def test_processes_share_a_limit(busy: list[bool]) -> None:
    assert 570 <= answered_in_a_minute(busy) <= 630


def test_each_process_takes_its_part_while_the_store_is_lost() -> None:
    assert 570 <= answered_in_a_minute([True] * 3, store_is_lost=True) <= 630
    assert 190 <= answered_in_a_minute([True, False, False], store_is_lost=True) <= 210
    bucket = TokenBucket(600, 0.0)
    bucket.exchange(0.0, 600.0, 3, 0.0)
    for second in range(600):
        bucket.take(3, float(second))
        bucket.go_alone(1.0)
    assert bucket.taken == 200  # not ten minutes' units, for which the others would wait


def test_a_process_whose_part_is_taken_waits_for_the_next_exchange() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.exchange(0.0, 4.0, 2, 0.0)
    for _ in range(2):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.left(0.0) == 2
    assert bucket.wait_s(1, 0.0) == EXCHANGE_S
    bucket.exchange(2.0, 2.0, 2, 1.0)
    assert bucket.wait_s(1, 1.0) == 0


class ParallelClients:
    """Processes with a limit, of which each exchanges once a second at a time of its own."""

    def __init__(self, limit: int, processes: int) -> None:
        self.limits = [ParallelLimit(limit) for _ in range(processes)]
        self.held = [0] * processes
        for n in range(processes):
            self.exchange(n)

    def exchange(self, n: int) -> None:
        self.limits[n].exchange(sum(self.held) - self.held[n], len(self.limits))
        self.held[n] = self.limits[n].held

    def run(self, seconds: int, busy: Sequence[int]) -> list[int]:
        """Send requests to the busy processes, each of which lasts for a second. Return how many
        ran at the same time."""
        counts = []
        for _ in range(seconds):
            for n, limit in enumerate(self.limits):
                limit.running = 0
                while n in busy and limit.start():
                    counts.append(sum(limit.running for limit in self.limits))
                self.exchange(n)
        return counts


@pytest.mark.parametrize("limit", [3, 20, 1000])
def test_processes_share_a_limit_of_parallel_requests(limit: int) -> None:
    clients = ParallelClients(limit, 3)
    for busy in ([0, 1, 2], [1], [0, 2]):
        clients.run(20, busy)
        counts = clients.run(20, busy)
        assert max(counts) == limit


def test_a_small_limit_of_parallel_requests_is_not_divided_to_nothing() -> None:
    clients = ParallelClients(1, 3)
    for n in (0, 1, 2):
        assert clients.run(2, [n]) == [1, 1]
        clients.run(1, [])
        clients.run(1, [])


def test_requests_that_start_within_an_exchange_do_not_raise_the_limit() -> None:
    class Starting(ParallelLimit):
        """A request starts, in another thread, after each look at those that run."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "running":
                self.running = value + 1
            return value

    limit = Starting(20)
    limit.exchange(0, 2)
    assert limit.held == 10
    assert limit._allowed == 10


def test_each_process_runs_its_part_while_the_store_is_lost() -> None:
    clients = ParallelClients(20, 3)
    clients.run(10, [0])
    for limit in clients.limits:
        limit.running = 0
        limit.go_alone()
        assert sum(limit.start() for _ in range(20)) == 6
    small = ParallelLimit(1)
    small.exchange(1, 3)
    assert not small.start()
    small.go_alone()
    assert small.start(), "each process may run one"
