"""What must be set before anything is imported, and what keeps tests from depending on the clock.

Limits in tests are for what never happens: on a busy machine a second is nothing.
"""

import collections
import functools
import gc
import os
import shutil
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from tests.browser import Watched, launched
from tests.matrix import matrix

# Without a GPU, Triton's kernels are run by its interpreter: read when they, and triton's own, are
# defined, and torch or transformers may be what imports triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Each of httpx's clients would read all certificates anew, for a tenth of a second.
vars(ssl)["create_default_context"] = functools.cache(ssl.create_default_context)

# What httpx.get and its like take where they are given no limit: 5 s otherwise.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(60)))

hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print a failure without collecting garbage.

    pytest parses the test's source for it. While it makes the tree, CPython 3.11 counts its depth
    in one place for all threads, and fails where another one parses meanwhile, as a traceback that
    is logged does. Nothing but what the collector calls lets another thread in.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes by its folder, and what drives a browser by its fixture."""
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


@pytest.fixture(params=matrix([False, True], False), ids=["at once", "ahead"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A generation engine on the CPU, whose steps land at once as they do there, or fly as they do
    on a GPU: whether they fly."""
    from worker.generation import engine

    monkeypatch.setitem(engine.AHEAD, "cpu", request.param)
    return bool(request.param)


@pytest.fixture
def poisoned_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for keys and values that has never been written to is full of what are no numbers."""
    from worker.model.attention.kv_cache import KVCache

    ordinary = KVCache.__init__

    def init(cache: KVCache, *arguments: Any) -> None:
        ordinary(cache, *arguments)
        for stored in (*cache.keys, *cache.values):
            stored.fill_(float("nan"))

    monkeypatch.setattr(KVCache, "__init__", init)


@pytest.fixture(scope="session")
def native() -> None:
    """The native attention is built, once, and loaded."""
    if not shutil.which("g++"):
        pytest.skip("there is no compiler")
    from worker.model.attention.native import load_native_ops

    load_native_ops()


@pytest.fixture(scope="module")  # no longer: playwright's loop would be in the way of others
def browser() -> Generator[Any, None, None]:
    with launched() as made:
        yield made


@pytest.fixture
def visitor(browser: Any) -> Generator[Any, None, None]:
    """A page of a fresh browser with a phone's window, in which nothing may go wrong."""
    with browser.new_context(viewport={"width": 360, "height": 740}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.watched = Watched(page)
        yield page
        assert page.watched.wrong == []
