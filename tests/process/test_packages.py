"""The tests of tests/video and tests/mistral, each file in a process that has their package."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import MISTRAL_COMMON, ROOT, TORCHVISION, environment_with

FOLDERS = {"video": TORCHVISION, "mistral": MISTRAL_COMMON}
FILES = {
    path: package
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_file_with_its_package(path: Path, pytestconfig: pytest.Config) -> None:
    marked = ("-m", pytestconfig.option.markexpr)
    options = ("-q", "-n0", "-p", "no:cacheprovider", *marked, str(path))
    command = (sys.executable, "-m", "pytest", *options)
    environment = environment_with(FILES[path])
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
