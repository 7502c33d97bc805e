"""Every command in README, CONTRIBUTING and docs/ runs as it is written, or its flags exist.

A fenced block of `bash` or `python` is executed against a server that the documented command
starts, unless `<!-- not run -->`, which readers do not see, is on the line above it. The flags of
such a block are checked.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.documents import LOCAL, Block, blocks_of
from tests.processes import ROOT, started
from tests.serving import wait_until

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Programs that run through pytest's own Python, with the flags that their help lists.
SCRIPT = re.compile(r"(\./scripts/\S+|\.venv/bin/onequeue \w+)(.*)")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(blocks: list[Block]) -> list[object]:
    return [pytest.param(block, id=f"{block.page}:{n}") for n, block in enumerate(blocks)]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run the documented start command, with a model that speaks; yield the port of the server."""
    command = ["./scripts/serve", "demo", "--transcription-model", "demo"]
    assert any(" ".join(command) in block.text for block in BLOCKS if not block.runs)
    batch_dir = str(tmp_path_factory.mktemp("batches"))
    more = ["--pipeline-model", f"demo,tts={tiny.folder('vits')}", "--port", "0"]
    with started([*command, *more], BATCH_DIR=batch_dir) as (_, port):
        wait_until(lambda: httpx.get(f"http://localhost:{port}/ready").status_code == 200)
        yield port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree's entries as links, and a curl that fails on error statuses."""
    folder = tmp_path_factory.mktemp("tree")
    for entry in ROOT.iterdir():
        (folder / entry.name).symlink_to(entry)
    programs = folder / "programs"
    programs.mkdir()
    curl = programs / "curl"
    curl.write_text('#!/bin/sh\nexec /usr/bin/curl --silent --show-error --fail-with-body "$@"\n')
    curl.chmod(0o755)
    return folder


def test_every_block_of_a_page_is_found() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```(?:bash|python)", page.read_text(), re.MULTILINE)
        assert len(fences) == len([block for block in BLOCKS if block.page == page.name]), page


@pytest.mark.skipif(not Path("/usr/bin/curl").exists(), reason="there is no curl")
@pytest.mark.parametrize(
    "block", named([entry for entry in BLOCKS if entry.language == "bash" and entry.runs])
)
def test_a_shell_block_runs(block: Block, port: int, folder: Path) -> None:
    environ = os.environ | {"PATH": f"{folder}/programs:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text.replace(LOCAL, f"localhost:{port}")],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}))
def test_the_python_blocks_of_a_page_run(page: str, port: int) -> None:
    """Comments behind print calls are what they print."""
    blocks = [block.text for block in BLOCKS if (block.page, block.language) == (page, "python")]
    source = "\n".join(blocks).replace(LOCAL, f"localhost:{port}")
    expected = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


@cache
def help_of(command: str) -> str:
    command = command.replace(".venv/bin/onequeue", f"{sys.executable} -m server")
    done = subprocess.run(
        [*shlex.split(command), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "block",
    named([entry for entry in BLOCKS if not entry.runs and entry.page != "CONTRIBUTING.md"]),
)
def test_the_flags_of_a_command_that_is_not_run_exist(block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.text.replace("<this repository>", "x")], check=True)
    for command, arguments in SCRIPT.findall(block.text.replace("\\\n", " ")):
        for flag in re.findall(r"--[a-z][a-z-]*", arguments):
            assert flag in help_of(command), f"{command} has no {flag}"


def test_development_commands_exist() -> None:
    for block in BLOCKS:
        for script in re.findall(r"\./scripts/\w+(?:\.py)?", block.text):
            assert os.access(ROOT / script, os.X_OK), script


def test_paths_in_the_documents_exist() -> None:
    for page in PAGES:
        for path in re.findall(
            r"`((?:batching|docs|scripts|server|tests|worker)/[^`*\s]*)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_generated_tables_are_current() -> None:
    subprocess.run([sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, check=True)


def test_the_site_builds_without_warnings() -> None:
    command = ["-m", "zensical", "build", "--strict", "--clean", "-f", ".zensical.toml"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8_000
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 3_000
