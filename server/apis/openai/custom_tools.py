"""Custom tools: their input is a text, which a grammar may constrain.

    tool → a function with one argument → its JSON --CustomInputReader--> the input

The model sees and calls a function, in its own format of calls.
"""

import json
import re
from typing import Literal

from msgspec import Struct

from batching.errors import InvalidInput
from server.apis.openai.request_fields import required
from server.http.json import SURROGATE, Document
from worker.messages.generation import INPUT, Constraint

Syntax = Literal["lark", "regex"]


class GrammarText(Struct):
    syntax: Syntax
    definition: str


class InputFormat(Struct):
    """Chat Completions nests the grammar, the Responses API has it flat."""

    type: Literal["text", "grammar"]
    syntax: Syntax | None = None
    definition: str | None = None
    grammar: GrammarText | None = None

    def constraint(self, path: str) -> Constraint | None:
        if self.type == "text":
            return None
        if self.grammar is not None:
            path += ".grammar"
            syntax, definition = self.grammar.syntax, self.grammar.definition
        else:
            syntax = required(self.syntax, f"{path}.syntax")
            definition = required(self.definition, f"{path}.definition")
        if not definition:
            raise InvalidInput.at(f"{path}.definition", "must not be empty")
        kind: Literal["grammar", "regex"] = "grammar" if syntax == "lark" else "regex"
        return Constraint(kind, definition, f"{path}.definition")


def custom_function(name: str, description: str | None, constraint: Constraint | None) -> Document:
    """Return a custom tool as the function that chat templates read."""
    value: Document = {"type": "string"}
    if constraint is not None:
        kind = "regular expression" if constraint.kind == "regex" else "Lark grammar"
        value["description"] = f"Text that matches this {kind}:\n{constraint.value}"
    parameters = {
        "type": "object",
        "properties": {INPUT: value},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


class CustomInputReader:
    """Reads the input from a call's arguments, as their JSON is generated.

    Arguments of another form are the input as they are, once they are complete."""

    _START = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
    _STRING = re.compile(
        r"""(?x: [^"\\] | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
        | \\u[dD][89abAB][0-9a-fA-F]{2}  # a surrogate, and its other half or surely something else
          (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?= [^\\] | \\[^u] | \\u(?![dD][c-fC-F]|[dD]?\Z) ) )
        | \\u(?![0-9a-fA-F]{4}|[0-9a-fA-F]{0,3}\Z)  # invalid
        )*"""
    )

    def __init__(self) -> None:
        self._unread = ""
        self._is_open: bool | None = None  # None: the string has not started

    def push(self, text: str) -> str:
        """Return the part of the input that this text adds."""
        if self._is_open is False:
            return ""
        self._unread += text
        if self._is_open is None:
            if (start := self._START.match(self._unread)) is None:
                return ""
            self._is_open, self._unread = True, self._unread[start.end() :]
        match = self._STRING.match(self._unread)
        assert match is not None
        self._unread = self._unread[match.end() :]
        self._is_open = not self._unread.startswith('"')
        return self._decode(match[0])

    def _decode(self, escaped: str) -> str:
        """Return the text; half a surrogate pair cannot be encoded, invalid JSON stays as it is."""
        try:
            text = json.loads(f'"{escaped}"', strict=False)
        except ValueError:
            text = escaped
        return SURROGATE.sub("\ufffd", text)

    def read(self, arguments: str) -> str:
        return self.push(arguments) + self.finish()

    def finish(self) -> str:
        """Return the rest of the input, at the end of the call."""
        return self._unread if self._is_open is None else ""
