"""Which cores a model computes on, and that the worker's thread and OpenMP's stay on them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from server.preflight import SPIN_COUNT, openmp_threads, put_openmp
from worker.cores import Cores, choose_cores, find_cores, lines_of, one_each, pin, quota, release

ROOT = Path(__file__).parents[2]
ALONE = {core: str(core) for core in range(4)}
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
HYPERTHREADS = {core: f"{core % 2},{core % 2 + 2}" for core in range(4)}  # two physical cores


def group(root: Path, place: str, **files: str) -> None:
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


# ── how many threads ──


def test_each_physical_core_gets_a_thread() -> None:
    assert choose_cores(range(4), ALONE, None, None, "auto").threads == 4
    assert choose_cores(range(4), HYPERTHREADS, None, None, "auto").threads == 2
    assert choose_cores({1, 2, 3}, HYPERTHREADS, None, None, "auto").threads == 2
    assert one_each({1, 2, 3}, HYPERTHREADS) == [1, 2]


def test_cores_of_which_nothing_is_known_count_each() -> None:
    assert choose_cores(range(4), dict.fromkeys(range(4), ""), None, None, "auto").threads == 4


@pytest.mark.parametrize(("paid", "threads"), [(0.5, 1), (1.9, 1), (2.0, 2), (3.5, 3), (9.0, 4)])
def test_no_more_threads_than_the_quota_pays_for(paid: float, threads: int) -> None:
    assert choose_cores(range(4), ALONE, paid, None, "auto").threads == threads


def test_what_the_operator_asks_for_wins() -> None:
    assert choose_cores(range(4), ALONE, 2.0, 3, "auto").threads == 3


def test_the_operators_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert openmp_threads() is None
    for text, number in (("3", 3), ("4,2", 4), ("many", None), ("0", None), ("", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert openmp_threads() == number


# ── the control group's quota ──


def test_the_quota_of_version_2_is_the_least_up_to_the_root(tmp_path: Path) -> None:
    group(tmp_path, "", cpu__max="max 100000")
    group(tmp_path, "a", cpu__max="150000 100000")
    group(tmp_path, "a/b", cpu__max="400000 100000")
    assert quota(tmp_path, ["0::/a/b"]) == 1.5
    assert quota(tmp_path, ["0::/"]) is None


def test_the_quota_of_version_1_is_that_of_its_controller(tmp_path: Path) -> None:
    group(tmp_path, "cpu,cpuacct/pod", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    group(tmp_path, "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    lines = ["5:memory:/pod", "3:cpu,cpuacct:/pod", "0::/"]
    assert quota(tmp_path, lines) == 2.5


def test_a_path_that_is_the_hosts_falls_back_to_the_containers_root(tmp_path: Path) -> None:
    group(tmp_path, "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert quota(tmp_path, ["3:cpu:/docker/0123"]) == 3.0


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path, []) is None
    assert quota(tmp_path / "missing", ["0::/a"]) is None


def test_a_groups_path_in_another_encoding_is_one_that_is_not_there(tmp_path: Path) -> None:
    group(tmp_path, "", cpu__max="150000 100000")
    membership = tmp_path / "cgroup"
    membership.write_bytes(b"0::/caf\xe9\n")
    assert quota(tmp_path, lines_of(membership)) == 1.5


# ── which cores are kept ──


def test_auto_keeps_one_core_of_each_physical_one() -> None:
    assert choose_cores(range(4), HYPERTHREADS, None, None, "auto").kept == {0, 1}


@pytest.mark.parametrize(
    ("paid", "asked"),
    [(2.0, None), (None, 2), (None, None)],
    ids=["others have such a quota too", "others were asked for as many", "none are left over"],
)
def test_auto_keeps_none_where_others_would_choose_the_same(
    paid: float | None, asked: int | None
) -> None:
    assert not choose_cores(range(4), ALONE, paid, asked, "auto").kept


def test_on_keeps_as_many_as_there_are_threads_and_off_none() -> None:
    assert choose_cores(range(4), ALONE, None, 2, "on").kept == {0, 1}
    assert choose_cores(range(4), HYPERTHREADS, None, 3, "on").kept == {0, 1, 2}
    assert not choose_cores(range(4), HYPERTHREADS, None, None, "off").kept


def test_where_there_is_no_affinity_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert find_cores("on", None) is None
    release()


def test_a_system_that_lets_no_thread_choose_its_cores_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(thread: int, cores: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused, raising=False)
    affinities = iter([{0, 1}, {0}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: next(affinities), raising=False)
    pin(Cores(1, frozenset({0}), False, ""))
    release()
    assert [record.message for record in caplog.records] == [
        "a thread stays on its cores: Operation not permitted"
    ] * 2


PINNED = """
    import os, queue, threading
    import torch
    from server.app import create_app
    from server.core.settings import Settings
    from worker.cores import release

    tasks = lambda: set(os.listdir("/proc/self/task"))
    masks = lambda ids: {tuple(sorted(os.sched_getaffinity(int(each)))) for each in ids}
    whole, found = tuple(sorted(os.sched_getaffinity(0))), queue.SimpleQueue()

    def helps():
        release()
        found.put(masks([threading.get_native_id()]))

    def load():
        torch.set_num_threads(2)
        before = tasks()
        torch.ones(1 << 22).add_(1)  # in parallel
        found.put(masks([threading.get_native_id()]))
        found.put(masks(tasks() - before))
        threading.Thread(target=helps).start()

    app = create_app(Settings(chat_model="none", pin_worker="on"), load)
    app.worker_client.worker.start(app.worker_client, lambda *_: None)
    worker, team, helper = (found.get(timeout=60) for _ in range(3))
    assert worker == team == {whole[:1]}, (worker, team)
    assert helper == masks([os.getpid()]) == {whole}, helper
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_the_worker_and_openmps_threads_stay_and_helpers_do_not() -> None:
    done = run(PINNED, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


ALONE_IN_THE_POOL = """
    import os, queue, threading
    import torch
    from server.core.worker_client import Pool

    tasks = lambda: set(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)
    torch.ones(1 << 22).add_(1)
    found = queue.SimpleQueue()

    def work(items):
        before = tasks()
        torch.ones(1 << 22).add_(1)
        found.put((torch.get_num_threads(), tasks() - before))

    pool = Pool("prepare", 1, work)
    pool.threads[0].start()
    pool.put([1])
    assert found.get(timeout=60) == (1, set())
    assert torch.get_num_threads() == 2
    later = threading.Thread(target=lambda: found.put(torch.get_num_threads()))
    later.start()
    assert found.get(timeout=60) == 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_pools_thread_gets_no_openmp_team() -> None:
    done = run(ALONE_IN_THE_POOL)
    assert done.returncode == 0, done.stderr


# ── what OpenMP is told ──

TOLD = """
    from server.preflight import put_openmp
    from worker.cores import Cores

    put_openmp(Cores(1, frozenset(), metered=True, why=""))
    import torch
    print(torch.get_num_threads())
"""


def test_openmp_reads_what_it_is_told_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    done = run(TOLD, OMP_DISPLAY_ENV="verbose")
    assert done.stdout == "1\n", done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:  # a build with another library has its own words
        assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


SERVED = """
    from server.app import app
    import torch

    print(torch.get_num_threads() == app.worker_client.worker.cores.threads)
"""


def test_the_app_tells_it() -> None:
    done = run(SERVED, CHAT_MODEL="none")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(("metered", "told"), [(True, str(SPIN_COUNT)), (False, None)])
def test_waiting_is_bounded_where_a_quota_pays_for_it(
    monkeypatch: pytest.MonkeyPatch, metered: bool, told: str | None
) -> None:
    forget(monkeypatch)
    put_openmp(Cores(2, frozenset(), metered, ""))
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ.get("GOMP_SPINCOUNT") == told


def test_what_the_operator_said_of_openmp_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    put_openmp(Cores(2, frozenset(), True, ""))
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("nonsense", ["abc", "0", "-1", ""])
def test_a_number_of_threads_that_is_none_is_not_left_to_openmp(
    monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    """It would take all cores, whatever a quota pays for."""
    forget(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
    put_openmp(Cores(2, frozenset(), True, ""))
    assert os.environ["OMP_NUM_THREADS"] == "2"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put into the environment goes again with the test."""
    for name in OPENMP:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
