"""Packages that are in folders of their own (scripts/install), for processes that tests start.

There is no build of torchvision for CPUs that the tests may install beside torch; its operators are
defined by tests/without_operators. mistral-common refuses the pinned numpy, and transformers loads
other classes where it is installed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCHVISION, MISTRAL_COMMON = "torchvision", "mistral-common"
# What is found first, before the package.
BEFORE: Mapping[str, Path] = {TORCHVISION: ROOT / "tests" / "without_operators"}


def environment_with(package: str) -> dict[str, str]:
    """Return the environment of a process that can import a package. Skips the test, but in CI,
    where it is not installed."""
    variable = f"{package.upper().replace('-', '_')}_FOLDER"
    folder = Path(os.environ.get(variable, ROOT / ".venv" / package))
    if not folder.exists():
        reason = f"{package} is not in {folder}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    paths = (ROOT, BEFORE.get(package, folder), folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
