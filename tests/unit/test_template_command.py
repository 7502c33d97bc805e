"""`scripts/template`: the report of a template, parsed outputs, and errors."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from server.commands import template
from tests import tiny_chat
from worker.model.loading import DEMO_FOLDER

ROOT = Path(__file__).parents[2]
WEATHER = {"name": "weather", "description": "any", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
LINES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"tools": [WEATHER], "thinking": None, "output": f"<think>\nhm\n</think>\n\nSo.\n{CALL}"},
        {"content": "So.", "reasoning": "hm", "calls": [["weather", '{"city": "Zürich"}']]},
    ),
    (
        {"tools": [WEATHER], "thinking": False, "output": "Hi.<|im_end|>more"},
        {"content": "Hi.", "reasoning": "", "calls": []},
    ),
    (
        {"tools": [], "thinking": True, "output": f"hm</think>{CALL}"},
        {"content": CALL, "reasoning": "hm", "calls": []},
    ),
    ({"output": ""}, {"content": "", "reasoning": "", "calls": []}),
]


class Ran(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def ran(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        status = 0
        try:
            template.template_command("template", [*map(str, arguments)])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        return Ran(status, *capsys.readouterr())

    return ran


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jinja"
    path.write_text(tiny_chat.TEMPLATE.partition("{%- endfor -%}")[2])  # without tools
    return path


def test_report_is_a_few_lines_of_text(run: Any) -> None:
    ran = run("demo")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert 8 <= len(lines) <= 20
    for fact in ("<tool_call>\\n{", "<think>", "</think>", "<|im_end|>"):
        assert any(fact in line for line in lines), fact
    assert not any(line.startswith("lacks") for line in lines)


def test_report_as_json(run: Any) -> None:
    result = json.loads(run("demo", "--json").out)
    assert result["calls"]["learned"]
    assert result["calls"]["arguments"] == "json"
    assert result["calls"]["two"].count("FUNCTION") == 2
    assert result["thoughts"] == {
        "open": "<think>",
        "close": "</think>",
        "in_prompt": {"default": "", "true": "<think>\n", "false": ""},
    }
    assert result["tools_shown"]
    assert result["end_of_turn"] in result["end_tokens"]
    assert result["lacks"] == []


def test_template_file_is_read_with_or_without_a_tokenizer(run: Any, file: Path) -> None:
    alone = json.loads(run(file, "--json").out)
    [lack] = alone["lacks"]
    assert "tools" in lack  # this template renders none
    other = json.loads(run(file, "--tokenizer", DEMO_FOLDER / "chat", "--json").out)
    assert other["calls"] == alone["calls"]
    assert other["end_tokens"] == ["<|im_end|>"]
    assert alone["end_tokens"] == ["</s>"]


def test_report_has_what_a_template_lacks(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "bare.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    ran = run(path)
    lacks = [line for line in ran.out.splitlines() if line.startswith("lacks")]
    for word in ("calls", "thoughts", "tools"):
        assert any(word in line for line in lacks), word


def test_outputs_are_parsed_as_by_the_server(run: Any, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(line) for line, _ in LINES)
    path = tmp_path / "lines.jsonl"
    path.write_text(lines + "\n\n")
    for ran in (run("demo", "--read", "-", stdin=lines), run("demo", "--read", path)):
        assert [json.loads(line) for line in ran.out.splitlines()] == [
            result for _, result in LINES
        ]
        assert ran.status == 0
        assert not ran.err


@pytest.mark.parametrize(
    "bad",
    ["{", '{"tools": []}', '{"output": 3}', '{"output": "", "tools": [{"description": ""}]}', "[]"],
)
def test_error_names_an_invalid_line(run: Any, bad: str) -> None:
    ran = run("demo", "--read", "-", stdin=f'{{"output": "Hi"}}\n{bad}\n{{"output": "no more"}}')
    assert ran.status == 2
    assert ran.err.startswith("template: line 2: ")
    assert len(ran.err.splitlines()) == 1
    assert len(ran.out.splitlines()) == 1


def test_error_names_a_line_that_the_template_refuses(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "no.jinja"
    path.write_text(
        "{{ raise_exception('No tools!') if enable_thinking }}{{ messages[0].content }}"
    )
    line = json.dumps({"output": "", "thinking": True})
    ran = run(path, "--read", "-", stdin=line)
    assert (ran.status, ran.out) == (2, "")
    assert "line 1: " in ran.err
    assert "No tools!" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere.jinja",),
        ("./nowhere",),
        ("demo", "--read", "nowhere.jsonl"),
        ("demo", "--tokenizer", "./nowhere"),
    ],
)
def test_error_names_a_missing_file(run: Any, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert "nowhere" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.matrix
def test_script_runs_from_any_folder(file: Path) -> None:
    command = [sys.executable, "-P", "-m", "server", "template", file.name, "--json"]
    environ = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=file.parent, env=environ, capture_output=True, timeout=120)
    assert json.loads(ran.stdout)["calls"]["learned"]
