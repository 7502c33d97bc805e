"""scripts/install calls pip only if requirements have changed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("bash", "sh", "dirname", "grep", "touch")  # without npm


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout whose Python records its calls."""
    scripts, programs, tools = (tmp_path / name for name in ("scripts", ".venv/bin", "tools"))
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


def calls(checkout: Path, *args: str) -> list[str]:
    """Run scripts/install; return the calls of Python."""
    called = checkout / "called"
    called.unlink(missing_ok=True)
    subprocess.run(
        ["scripts/install", *args], cwd=checkout, env={"PATH": str(checkout / "tools")}, check=True
    )
    return called.read_text().splitlines() if called.exists() else []


def test_an_installation_for_development_is_enough_to_run(checkout: Path) -> None:
    assert len(calls(checkout, "dev")) == 2
    assert calls(checkout, "dev") == calls(checkout) == []


def test_an_installation_to_run_is_not_enough_for_development(checkout: Path) -> None:
    assert len(calls(checkout)) == 2
    assert calls(checkout) == []
    assert len(calls(checkout, "dev")) == 2


def test_new_requirements_are_installed(checkout: Path) -> None:
    calls(checkout, "dev")
    (checkout / "pyproject.toml").write_text("[project]")
    os.utime(checkout / "pyproject.toml", (4e9, 4e9))
    assert len(calls(checkout)) == len(calls(checkout, "dev")) == 2
