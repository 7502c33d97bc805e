"""scripts/release: what it refuses, and the commit and tag of a release. .ci/run runs its check."""

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from server import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased, 2026-01-01)\n\n- New.\n\n## 0.1.0 (2026-01-01)\n"
Release = Callable[..., None]


def load_script() -> ModuleType:
    loader = SourceFileLoader("release", str(ROOT / "scripts" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit and without a tag."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
    root = tmp_path / "checkout"
    (root / "server").mkdir(parents=True)
    (root / "server" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    (root / ".gitignore").write_text("dist/\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


@pytest.fixture
def script(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script, which builds a wheel that contains nothing and does not check it."""
    script: Any = load_script()

    def build(folder: Path) -> Path:
        (folder / "dist").mkdir()
        wheel = folder / "dist" / "onequeue.whl"
        wheel.write_text((folder / "tree" / "server" / "__init__.py").read_text())
        return wheel

    monkeypatch.setattr(script, "ROOT", checkout)
    monkeypatch.setattr(script, "build", build)
    monkeypatch.setattr(script, "check", lambda wheel, folder: None)
    return script


@pytest.fixture
def release(script: Any, monkeypatch: pytest.MonkeyPatch) -> Release:
    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["release", *arguments])
        script.main()

    return run


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def state(root: Path) -> str:
    return git(root, "log", "--format=%s") + git(root, "status", "--porcelain") + git(root, "tag")


def test_a_release_has_version_date_commit_and_tag(checkout: Path, release: Release) -> None:
    release("0.2.0")
    assert state(checkout) == "release: set version 0.2.0\nfirst\nv0.2.0\n"
    assert (checkout / "server" / "__init__.py").read_text() == '__version__ = "0.2.0"\n'
    dated = CHANGELOG.replace("(unreleased, 2026-01-01)", f"({date.today()})")
    assert (checkout / "CHANGELOG.md").read_text() == dated
    assert (checkout / "dist" / "onequeue.whl").read_text() == '__version__ = "0.2.0"\n'


def test_without_a_version_nothing_changes(checkout: Path, release: Release) -> None:
    (checkout / "CHANGELOG.md").write_text("changed")
    release()
    assert state(checkout) == "first\n M CHANGELOG.md\n"


def test_a_failed_check_changes_nothing(checkout: Path, release: Release, script: Any) -> None:
    script.check = lambda wheel, folder: sys.exit("failed")
    with pytest.raises(SystemExit, match="failed"):
        release("0.2.0")
    assert state(checkout) == "first\n"
    assert not (checkout / "dist").exists()


def test_an_edit_during_the_check_is_not_committed(
    checkout: Path, release: Release, script: Any
) -> None:
    edit = partial((checkout / ".gitignore").write_text, "dist/\nother\n")
    script.check = lambda wheel, folder: edit()
    release("0.2.0")
    assert state(checkout) == "release: set version 0.2.0\nfirst\n M .gitignore\nv0.2.0\n"


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0rc1"])
def test_other_versions_are_refused(release: Release, version: str) -> None:
    with pytest.raises(SystemExit, match=r"X\.Y\.Z"):
        release(version)


def test_uncommitted_changes_are_refused(checkout: Path, release: Release) -> None:
    (checkout / "server" / "__init__.py").write_text("changed")
    with pytest.raises(SystemExit, match=r"server/__init__\.py"):
        release("0.2.0")


def test_a_version_is_released_once(checkout: Path, release: Release) -> None:
    git(checkout, "tag", "v0.2.0")
    with pytest.raises(SystemExit, match="the tag v0\\.2\\.0 exists"):
        release("0.2.0")
    release("0.3.0")
    with pytest.raises(SystemExit, match="no section"):
        release("0.4.0")


def test_a_wheel_without_a_file_of_a_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = load_script()
    (tmp_path / "tree" / "server").mkdir(parents=True)
    (tmp_path / "dist").mkdir()
    for name in ("__init__.py", "page.html"):
        (tmp_path / "tree" / "server" / name).touch()
    monkeypatch.setattr(script, "run", lambda *command: "")
    with zipfile.ZipFile(tmp_path / "dist" / "onequeue.whl", "w") as wheel:
        wheel.writestr("server/__init__.py", "")
    with pytest.raises(SystemExit, match=r"the wheel lacks server/page\.html$"):
        script.build(tmp_path)


def test_the_changelog_begins_with_the_present_version(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    text = (ROOT / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(text)
    load_script().set_version(tmp_path, __version__)
    lines = (tmp_path / "CHANGELOG.md").read_text().splitlines()
    assert lines[2].startswith(f"## {__version__} (2")
    assert len((tmp_path / "CHANGELOG.md").read_bytes()) <= len(text.encode())
