"""The tests of tests/video, each file in a process that has torchvision."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.videos import ROOT, with_torchvision

FILES = sorted((ROOT / "tests" / "video").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_videos_with_torchvision(path: Path, pytestconfig: pytest.Config) -> None:
    marked = ("-m", pytestconfig.option.markexpr)
    options = ("-q", "-n0", "-p", "no:cacheprovider", *marked, str(path))
    command = (sys.executable, "-m", "pytest", *options)
    run = subprocess.run(command, cwd=ROOT, env=with_torchvision(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
