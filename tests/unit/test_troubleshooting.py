"""docs/troubleshooting.md has an entry for each warning and error that the log can have, and for
each status with its codes, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from server.http.errors import RESPONSE_BY_ERROR, RESPONSE_BY_STATUS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LEVELS = {"warning", "error", "critical", "exception", "log"}
VALUE = re.compile(r"%[.\d]*[a-z]")  # of logging's format


def calls() -> Iterator[tuple[ast.Module, ast.Call]]:
    for package in ("batching", "worker", "server"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            yield from ((tree, node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def text_of(node: ast.expr, tree: ast.Module) -> str:
    """Return the text of a literal, or of the constant of its module that a name is."""
    if isinstance(node, ast.Name):
        [node] = [
            statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id
        ]
    text = ast.literal_eval(node)
    assert isinstance(text, str), text
    return text


def log_lines() -> set[str]:
    """Return the messages of all log calls from WARNING on, with … in place of values."""
    lines = set()
    for tree, call in calls():
        logger, _, level = ast.unparse(call.func).rpartition(".")
        if logger == "log" and level in LEVELS:
            message = call.args[level == "log"]
            lines.add(VALUE.sub("…", text_of(message, tree)))
    return lines


def codes() -> set[tuple[int, str]]:
    """Return the status and code of each error response."""
    found = {(status, code) for status, (_, code) in RESPONSE_BY_STATUS.items()}
    found |= {(status, code) for status, _, code in RESPONSE_BY_ERROR.values()}
    for _, call in calls():
        for keyword in call.keywords:
            if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and call.args:
                found.add((ast.literal_eval(call.args[0]), ast.literal_eval(keyword.value)))
    return found


def test_all_loggers_are_named_log() -> None:
    """Otherwise log_lines() would miss their messages."""
    for package in ("batching", "worker", "server"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            names = re.findall(r"^(\w+) = logging\.getLogger\(\"onequeue", source, re.MULTILINE)
            assert set(names) <= {"log"}, path
            assert "warnings.warn(" not in source, path


def test_each_line_of_the_log_has_an_entry() -> None:
    entries = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)
    assert len(entries) == len(set(entries)), "an entry is there twice"
    assert set(entries) == log_lines()


def test_each_status_has_an_entry_with_its_codes() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.+?) \|", PAGE, re.MULTILINE)
    entries = [(int(status), code) for status, names in rows for code in names.split(", ")]
    assert len(entries) == len(set(entries)), "an entry is there twice"
    assert {(status, code.strip("`")) for status, code in entries} == codes()
