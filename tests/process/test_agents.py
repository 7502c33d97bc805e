"""Claude Code and Codex themselves, with a scripted model: they edit a file in a folder."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.agents import ScriptedGenerator, Turn, call, find_program
from tests.serving import Server, serving
from worker.messages.generation import Chat

pytestmark = pytest.mark.agents

TASK = "Replace hello by goodbye in a.txt"
DONE = ["All", " done."]
PATCH = "*** Begin Patch\n*** Update File: a.txt\n@@\n-hello\n+goodbye\n*** End Patch"
SED = "sed -i s/hello/goodbye/ a.txt"
SCRIPT = f'const result = await tools.exec_command({{cmd: "{SED}"}});\ntext(result.output);'
CODEX_CONFIG = """\
model = "{model}"
model_provider = "onequeue"

[model_providers.onequeue]
name = "onequeue"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "ONEQUEUE_API_KEY"
"""


class Workplace(NamedTuple):
    folder: Path
    home: Path

    @property
    def file(self) -> Path:
        return self.folder / "a.txt"


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    workplace = Workplace(tmp_path / "work", tmp_path / "home")
    workplace.folder.mkdir()
    workplace.home.mkdir()
    workplace.file.write_text("hello\n")
    return workplace


@pytest.fixture
def generator() -> ScriptedGenerator:
    return ScriptedGenerator([])


@pytest.fixture
def server(generator: ScriptedGenerator) -> Iterator[Server]:
    aliases = ("claude-*=demo", "gpt-*=demo")
    with serving(load_chat=lambda: generator, api_keys=("key",), model_aliases=aliases) as started:
        yield started


def run(
    name: str, arguments: Sequence[str], workplace: Workplace, environment: Mapping[str, str]
) -> str:
    if (program := find_program(name)) is None:
        pytest.skip(f"{name} is not installed")
    home = {"HOME": str(workplace.home), "CODEX_HOME": str(workplace.home)}
    finished = subprocess.run(
        [program, *arguments],
        cwd=workplace.folder,
        env={**os.environ, **home, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def chats(generator: ScriptedGenerator) -> list[Chat]:
    """Return the conversations with tools: others make titles."""
    prompts = [payload.prompt for payload in generator.payloads]
    return [prompt for prompt in prompts if isinstance(prompt, Chat) and prompt.tools]


def test_claude_code_edits_a_file(
    server: Server, generator: ScriptedGenerator, workplace: Workplace
) -> None:
    path = str(workplace.file)
    generator.turns = [
        ["*think", *call("Read", file_path=path)],
        call("Edit", file_path=path, old_string="hello", new_string="goodbye"),
        DONE,
    ]
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    output = run("claude", ["-p", TASK, "--permission-mode", "acceptEdits"], workplace, environment)
    assert output.strip() == "All done."
    assert workplace.file.read_text() == "goodbye\n"
    first, second, third = chats(generator)
    assert "x-anthropic-billing-header" not in str(first.messages[0]["content"])
    for earlier, later in ((first, second), (second, third)):  # prompts only grow
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.tools == earlier.tools
    assert second.messages[-2]["reasoning_content"] == "think "
    assert "hello" in second.messages[-1]["content"]


@pytest.mark.parametrize(
    ("model", "turn"),
    [
        ("demo", call("exec_command", cmd=SED)),
        ("gpt-5.5", call("apply_patch", input=PATCH)),
        ("gpt-6.1-sol", call("functions__exec", input=SCRIPT)),
    ],
)
def test_codex_edits_a_file(
    server: Server, generator: ScriptedGenerator, workplace: Workplace, model: str, turn: Turn
) -> None:
    """For models whose names it knows, Codex has custom tools with grammars: a patch, a script."""
    generator.turns = [["*think", *turn], DONE]
    config = CODEX_CONFIG.format(model=model, url=server.url)
    (workplace.home / "config.toml").write_text(config)
    arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    output = run("codex", [*arguments, TASK], workplace, {"ONEQUEUE_API_KEY": "key"})
    assert output.strip() == "All done."
    assert workplace.file.read_text() == "goodbye\n"
    first, second = chats(generator)
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    assert second.messages[-2]["reasoning_content"] == "think "
    policy: Any = generator.payloads[0].tool_policy
    assert [*policy.inputs] == {"demo": [], "gpt-5.5": ["apply_patch"]}.get(
        model, ["functions__exec"]
    )
