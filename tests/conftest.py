"""Settings that must precede imports, fixtures, and hooks that make tests independent of the clock.

Time limits in tests are generous: they only end a test that hangs, also on a busy machine.
"""

import collections
import contextlib
import functools
import gc
import importlib.metadata
import logging
import os
import shutil
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from tests.browser import PageProblems, launch_browser
from tests.matrix import matrix

# Without a GPU, Triton's interpreter runs its kernels. The variable is read when kernels are
# defined, and importing torch or transformers may import triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Without the cache each httpx client would read all certificates again, for a tenth of a second.
vars(ssl)["create_default_context"] = functools.cache(ssl.create_default_context)

# Each server would parse the metadata of four packages again, for a third of its start.
vars(importlib.metadata)["version"] = functools.cache(importlib.metadata.version)

# The default timeout of httpx.get and the like would be 5 s.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(60)))


class Loggers(dict[str, Any]):
    """Loggers by name. pytest iterates over them at each phase of a test, while a thread that
    imports a library, as one that compiles a model does, may add some."""

    def values(self) -> Any:
        return list(super().values())  # at once, under the global interpreter lock


vars(logging.root.manager)["loggerDict"] = Loggers(logging.root.manager.loggerDict)

hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failure without garbage collection.

    pytest parses the test's source for a report. CPython 3.11 counts the depth of the syntax tree
    in one place for all threads, and fails if another thread parses at the same time, as logging a
    traceback does. Only the garbage collector can switch threads there.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers `process`, by folder, and `browser`, by fixture."""
    for item in items:
        if item.path.parent.name == "process":
            item.add_marker(pytest.mark.process)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Print, behind pytest's own summary, how many tests were skipped and why."""
    yield
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of pytest-xdist
        return
    reasons: collections.Counter[str] = collections.Counter()
    for report in reporter.stats.get("skipped", ()):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    left_out = len(reporter.stats.get("deselected", ()))
    reporter.write_line(
        f"skipped {reasons.total()}{f' ({listed})' if listed else ''}, left out {left_out}"
    )


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop of async tests."""
    return "asyncio"


@pytest.fixture(params=matrix([False, True], False), ids=["at once", "ahead"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a generation engine on the CPU runs steps ahead, as on a GPU. Otherwise it
    processes the results of each step at once."""
    from worker.engines.generation import engine

    monkeypatch.setitem(engine.RUNS_AHEAD, "cpu", request.param)
    return bool(request.param)


@pytest.fixture
def poisoned_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new KV caches with NaN, so that reading memory that was not written shows."""
    from worker.model.attention.kv_cache import KVCache

    original = KVCache.__init__

    def init(cache: KVCache, *arguments: Any, **options: Any) -> None:
        original(cache, *arguments, **options)
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(float("nan"))

    monkeypatch.setattr(KVCache, "__init__", init)


@pytest.fixture(scope="session")
def native() -> None:
    """Compile and load the native operations."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    from worker.backends.native_attention import load_native_ops

    load_native_ops()


@pytest.fixture(scope="module")  # a longer scope would leave playwright's event loop running
def browser() -> Generator[Any, None, None]:
    with launch_browser() as chromium:
        yield chromium


@pytest.fixture
def visitor(browser: Any) -> Generator[Any, None, None]:
    """Return a page in a new browser context with a phone's window; fail if it has problems."""
    with browser.new_context(viewport={"width": 360, "height": 740}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.problems = PageProblems(page)
        yield page
        assert page.problems.messages == []


@pytest.fixture
def page(visitor: Any, server: Any) -> Any:
    """Return the page of a module's server, in the browser."""
    from tests.page_server import open_page

    return open_page(visitor, server)


@pytest.fixture(scope="session")
def postgres() -> Generator[Any, None, None]:
    from tests.postgres import running_postgres

    with running_postgres() as server:
        yield server


@contextlib.contextmanager
def opened_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Any, None, None]:
    """Yield an empty database of the kind that is the parameter."""
    from tests.postgres import Databases

    if request.param == "sqlite":
        yield Databases(str(tmp_path / "store.db"))
        return
    url = request.getfixturevalue("postgres").new_database()
    from server.apis.openai import postgres

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres, "RECONNECT_S", 0.0)
        databases = Databases(url)
        yield databases
        databases.close()


@pytest.fixture(params=["sqlite", "postgres"])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Any, None, None]:
    with opened_databases(request, tmp_path) as databases:
        yield databases


@pytest.fixture(params=matrix(["sqlite", "postgres"], "sqlite"))
def server_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Any, None, None]:
    """For servers: one of each kind, PostgreSQL in the complete check."""
    with opened_databases(request, tmp_path) as databases:
        yield databases
