"""pytest prints a failure even if another thread parses code meanwhile."""

import subprocess
import sys
from pathlib import Path

# The collector's callback parses in the middle of pytest's own parsing, as another thread might.
FAILING = """
import ast
import gc

def test_that_fails():
    gc.callbacks.append(lambda *_: ast.parse("1"))
    assert not "the message"
"""


def test_a_failure_is_printed_while_another_thread_parses(tmp_path: Path) -> None:
    test = tmp_path / "test_failing.py"
    test.write_text(FAILING + "\ntable = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]\n" * 200)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:schemathesis",  # its hooks import modules while the collector parses
        f"--rootdir={tmp_path}",
        str(test),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert "the message" in done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert done.returncode == 1, done.stdout
