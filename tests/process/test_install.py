"""scripts/install does nothing where what is wanted has been installed: pip is not asked again."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("bash", "sh", "dirname", "grep", "touch")  # without npm


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Whose Python writes down that it was called."""
    scripts, programs, tools = (tmp_path / each for each in ("scripts", ".venv/bin", "tools"))
    for folder in (scripts, programs, tools):
        folder.mkdir(parents=True)
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    shutil.copy(SCRIPTS / "install", scripts)
    (scripts / "constraints.txt").write_text("torch==1\n")
    (tmp_path / "pyproject.toml").touch()
    for path in (scripts / "constraints.txt", tmp_path / "pyproject.toml"):
        os.utime(path, (1e9, 1e9))
    python = programs / "python"
    python.write_text("#!/bin/sh\necho $@ >> called\n")
    python.chmod(0o755)
    return tmp_path


def calls(house: Path, *words: str) -> list[str]:
    """What Python was called with."""
    called = house / "called"
    called.unlink(missing_ok=True)
    subprocess.run(
        ["scripts/install", *words], cwd=house, env={"PATH": str(house / "tools")}, check=True
    )
    return called.read_text().splitlines() if called.exists() else []


def test_what_was_installed_for_development_runs(house: Path) -> None:
    assert len(calls(house, "dev")) == 2
    assert calls(house, "dev") == calls(house) == []


def test_what_was_installed_to_run_is_not_enough_for_development(house: Path) -> None:
    assert len(calls(house)) == 2
    assert calls(house) == []
    assert len(calls(house, "dev")) == 2


def test_new_requirements_are_installed(house: Path) -> None:
    calls(house, "dev")
    (house / "pyproject.toml").write_text("[project]")
    os.utime(house / "pyproject.toml", (4e9, 4e9))
    assert len(calls(house)) == len(calls(house, "dev")) == 2
