"""torchvision, which the library's video processors need, for processes that tests start.

There is no build of it for CPUs that the tests may install beside torch, so that it is in a folder
of its own (scripts/install), and its operators are defined by tests/without_operators.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("TORCHVISION_FOLDER", ROOT / ".venv" / "torchvision"))


def with_torchvision() -> dict[str, str]:
    """Return the environment of a process that can import torchvision. Skips the test, but in CI,
    where it is not installed."""
    if not FOLDER.exists():
        reason = f"torchvision is not in {FOLDER}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    paths = (ROOT, ROOT / "tests" / "without_operators", FOLDER)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
