"""README's Python runs as it stands there, pasted from top to bottom, and says what it says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests import sdk

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks() -> list[str]:
    """The indented ones that are Python: no shell line is."""
    found = re.findall(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", README)
    return [block for each in found if is_python(block := re.sub(r"(?m)^    ", "", each))]


def is_python(block: str) -> bool:
    try:
        return bool(ast.parse(block).body)
    except SyntaxError:
        return False


def test_the_examples_run_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks()
    assert len(examples) == 3
    names: dict[str, Any] = {}
    with sdk.demo() as demo:
        for example in examples:
            exec(example.replace("http://localhost:8000/v1", demo.url), names)
    told = "".join(f"{line}\n" for line in re.findall(r"print\(.*\)  # (.*)", README))
    assert capsys.readouterr().out == "1, 2, 3, 4, 5." + told
