"""The choice of CPU cores, and pinning of the worker's thread and OpenMP's."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from server.preflight import KERNEL_CACHES, SPIN_COUNT, openmp_threads, set_openmp_variables
from tests import processes
from tests.cgroups import process
from worker.cores import (
    Cores,
    choose_cores,
    cpu_quota,
    find_cores,
    pin,
    unpin,
)

ALONE = {core: str(core) for core in range(4)}
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
HYPERTHREADS = {core: f"{core % 2},{core % 2 + 2}" for core in range(4)}  # two physical cores


def group(root: Path, place: str, **files: str) -> None:
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


# ── threads and pinned cores ──


@pytest.mark.parametrize(
    ("cores", "topology", "quota", "requested", "setting", "threads", "pinned"),
    [
        # "auto" pins where there are spare cores, and others would not choose the same ones
        ({0, 1, 2, 3}, ALONE, None, None, "auto", 4, set()),
        ({0, 1, 2, 3}, HYPERTHREADS, None, None, "auto", 2, {0, 1}),
        ({1, 2, 3}, HYPERTHREADS, None, None, "auto", 2, {1, 2}),
        ({0, 1, 2, 3}, dict.fromkeys(range(4), ""), None, None, "auto", 4, set()),
        *(
            ({0, 1, 2, 3}, ALONE, quota, None, "auto", threads, set())
            for quota, threads in ((0.5, 1), (1.9, 1), (2.0, 2), (3.5, 3), (9.0, 4))
        ),
        ({0, 1, 2, 3}, ALONE, 2.0, 3, "auto", 3, set()),
        ({0, 1, 2, 3}, ALONE, None, 2, "auto", 2, set()),
        ({0, 1, 2, 3}, ALONE, None, 2, "on", 2, {0, 1}),
        ({0, 1, 2, 3}, HYPERTHREADS, None, 3, "on", 3, {0, 1, 2}),
        ({0, 1, 2, 3}, HYPERTHREADS, None, None, "off", 2, set()),
    ],
)
def test_each_physical_core_gets_a_thread_within_the_quota(
    cores: set[int],
    topology: dict[int, str],
    quota: float | None,
    requested: int | None,
    setting: str,
    threads: int,
    pinned: set[int],
) -> None:
    chosen = choose_cores(cores, topology, quota, requested, setting)
    assert chosen.threads == threads
    assert chosen.pinned == pinned


def test_the_requested_number_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert openmp_threads() is None
    for text, number in (("3", 3), ("4,2", 4), ("many", None), ("0", None), ("", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert openmp_threads() == number


# ── the cgroup's quota ──


def test_the_quota_of_version_2_is_the_least_up_to_the_root(tmp_path: Path) -> None:
    group(tmp_path / "mount", "", cpu__max="max 100000")
    group(tmp_path / "mount", "a", cpu__max="150000 100000")
    group(tmp_path / "mount", "a/b", cpu__max="400000 100000")
    mounts = [("/", tmp_path / "mount", "cgroup2 rw")]
    assert cpu_quota(process(tmp_path, ["0::/a/b"], mounts)) == 1.5
    assert cpu_quota(process(tmp_path, ["0::/"], mounts)) is None


def test_the_quota_of_version_1_is_its_controllers(tmp_path: Path) -> None:
    cpu = tmp_path / "cpu,cpuacct"
    group(cpu, "pod", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    group(cpu, "", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    groups = ["5:memory:/pod", "3:cpu,cpuacct:/pod", "0::/"]
    mounts = [("/", tmp_path / "memory", "cgroup memory"), ("/", cpu, "cgroup cpu,cpuacct")]
    assert cpu_quota(process(tmp_path, groups, mounts)) == 2.5


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(process(tmp_path, ["0::/a"], [])) is None


# ── pinning ──


def test_without_affinity_torch_chooses_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert find_cores("on", None) is None
    unpin()


def test_a_refused_affinity_is_logged_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(thread: int, cores: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused, raising=False)
    affinities = iter([{0, 1}, {0}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: next(affinities), raising=False)
    pin(Cores(1, frozenset({0}), False, ""))
    unpin()
    assert [record.message for record in caplog.records] == [
        "a thread stays on its cores: Operation not permitted"
    ] * 2


PINNED = """
    import os, queue, threading
    import torch
    from server.app import create_app
    from server.core.settings import Settings
    from worker.cores import unpin
    from worker.load_context import on_worker

    tasks = lambda: set(os.listdir("/proc/self/task"))
    masks = lambda ids: {tuple(sorted(os.sched_getaffinity(int(id)))) for id in ids}
    whole, found = tuple(sorted(os.sched_getaffinity(0))), queue.SimpleQueue()

    def help():
        unpin()
        found.put(masks([threading.get_native_id()]))

    def load():
        return on_worker(measure)

    def measure():
        torch.set_num_threads(2)
        before = tasks()
        torch.ones(1 << 22).add_(1)  # in parallel
        found.put(masks([threading.get_native_id()]))
        found.put(masks(tasks() - before))
        threading.Thread(target=help).start()

    app = create_app(Settings(chat_model="none", pin_worker="on"), load)
    app.worker_client.worker.start(app.worker_client, lambda *_: None)
    app.worker_client.worker.load(app.worker_client.models["pipeline"])
    worker, team, helper = (found.get(timeout=60) for _ in range(3))
    assert worker == team == {whole[:1]}, (worker, team)
    assert helper == masks([os.getpid()]) == {whole}, helper
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, "-c", textwrap.dedent(code)], **env)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_the_worker_and_openmps_threads_are_pinned_and_helpers_are_not() -> None:
    done = run(PINNED, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


POOL_THREAD = """
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
def test_a_pool_thread_gets_no_openmp_team() -> None:
    done = run(POOL_THREAD)
    assert done.returncode == 0, done.stderr


# ── OpenMP's environment ──

ENVIRONMENT = """
    from server.preflight import set_openmp_variables
    from worker.cores import Cores

    set_openmp_variables(Cores(1, frozenset(), limited=True, why=""))
    import torch
    print(torch.get_num_threads())
"""


def test_openmp_reads_its_environment_when_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    done = run(ENVIRONMENT, OMP_DISPLAY_ENV="verbose")
    assert done.stdout == "1\n", done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:  # builds with another library print other names
        assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


SERVED = """
    from server.app import app
    import torch

    print(torch.get_num_threads() == app.worker_client.worker.cores.threads)
"""


def test_the_app_sets_openmps_environment() -> None:
    done = run(SERVED, CHAT_MODEL="none")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("given", "limited", "threads", "spin_count"),
    [
        ({}, True, "2", str(SPIN_COUNT)),  # spinning is bounded under a quota
        ({}, False, "2", None),
        ({"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}, True, "3", None),
        # OpenMP would use all cores, whatever the quota
        *(({"OMP_NUM_THREADS": n}, True, "2", str(SPIN_COUNT)) for n in ("abc", "0", "-1", "")),
    ],
)
def test_openmps_environment_is_set_unless_the_operator_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    limited: bool,
    threads: str,
    spin_count: str | None,
) -> None:
    for name in OPENMP:  # restored after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_openmp_variables(Cores(2, frozenset(), limited, ""))
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count


# ── the memory of compiled products ──

PRODUCTS = """
    import re
    from server.preflight import limit_kernel_caches

    limit_kernel_caches()
    import torch
    from worker.backends.cpu.linear_layers import PackedLinear

    def resident_mb():
        return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

    layer, x = PackedLinear(torch.zeros(256, 256), None), torch.zeros(200, 256)
    layer(x)
    before = resident_mb()
    for rows in range(1, 200):
        layer(x[:rows])
    print(resident_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_products_of_many_numbers_of_rows_take_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    done = run(PRODUCTS, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 70  # 26; without the limits 120, on a CPU with AVX-512
