"""A scripted model for coding agents, and the programs themselves, where they are installed.

The response to a conversation is the turn of its number of tool results.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batching.request_queue import WorkItem
from tests.fake_generator import Choice, FakeGenerator, Running
from worker.messages.generation import Chat, GenerationInput

PROGRAMS = Path(__file__).parent / "node" / "node_modules" / ".bin"
Turn = Sequence[str]  # words of the fake generator


def find_program(name: str) -> str | None:
    """Return the path of an installed program."""
    return shutil.which(name) or shutil.which(name, path=str(PROGRAMS))


def call(name: str, **arguments: Any) -> Turn:
    """Return the words of a tool's call."""
    return [f"!{name}", f"={json.dumps(arguments)}"]


class ScriptedGenerator(FakeGenerator):
    max_model_len = 200_000

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__()
        self.turns = turns

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = item.payload.prompt

    def add(self, item: WorkItem[Any, Any]) -> None:
        payload: GenerationInput = item.payload
        assert isinstance(payload.prompt, Chat)
        self.payloads.append(payload)
        number = sum(message["role"] == "tool" for message in payload.prompt.messages)
        turn = self.turns[min(number, len(self.turns) - 1)] if payload.prompt.tools else ["Done"]
        self.running.append(Running(item, "scripted", [Choice(0, words=[*turn])]))
