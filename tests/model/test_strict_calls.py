"""Calls that a model begins itself match strict tools, whatever the model would rather write.

An adversary in place of the model writes calls that do not match, in the format of the chat
templates of real checkpoints, in tokens that begin and end anywhere. It takes what the masks allow.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jsonschema_rs
import pytest

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from tests.generating import when_ready
from tests.matrix import matrix
from tests.unit.test_prompt_growth import NO_TOOLS
from tests.unit.test_template_outputs import KINDS, NAMES, PATHS, source_text
from worker.engines.generation.input_processor import (
    response_parser,
    response_prefix,
)
from worker.engines.generation.output import PreparedPrompt, SequenceOutput, create_outputs
from worker.grammar.bitmask import BitmaskComputer
from worker.grammar.constraint_builder import ConstraintBuilder, verify_tool_call_format
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, Constraint, GenerationInput, ToolCallPolicy
from worker.model.sampler import SampledToken, SamplingParams
from worker.text.chat_template.byte_tokenizer import byte_tokenizer
from worker.text.chat_template.template import ChatTemplate
from worker.text.detokenizer import Vocabulary

pytestmark = pytest.mark.skipif(not PATHS, reason="no templates of real checkpoints here")
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"enum": ["sun", "moon"]}, "times": {"type": "integer", "maximum": 9}},
    "required": ["word"],
    "additionalProperties": False,
}
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "any", "parameters": schema, "strict": strict},
    }
    for name, schema, strict in (("lookup", PARAMETERS, True), ("patch", INPUT, False))
]
GRAMMAR = Constraint("grammar", 'start: "go" ("!" | "?")+', "tools[1].format.definition")
POLICY = ToolCallPolicy(("lookup", "patch"), inputs={"patch": GRAMMAR})
REQUEST = GenerationInput(
    Chat(({"role": "user", "content": "Well?"},), tuple(TOOLS)), tool_policy=POLICY
)
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("lookup", {"word": "earth"}),
    ("lookup", {"times": 3}),
    ("lookup", {"word": "sun", "other": "x"}),
    ("patch", {"input": "stop"}),
    ("patch", {"input": "go!?", "more": 1}),
    ("erase", {"word": "sun"}),
    ("look", {}),
]
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("lookup", {"word": "moon", "times": 3}),
    ("patch", {"input": "go!?"}),
]
MAX_TOKENS = 400


def output_of(name: str, call: tuple[str, dict[str, Any]]) -> str:
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    sent = {"function": function, "id": "call00001", "type": "function"}
    return source_text(name, {"role": "assistant", "content": "", "tool_calls": [sent]})[1]


class Adversary:
    """Generates outputs of one template token by token, with masks as the engine applies them."""

    def __init__(self, name: str, texts: Sequence[str], special: bool, rng: random.Random) -> None:
        self.rng = rng
        self.tokenizer: Any = byte_tokenizer(PATHS[name].read_text(), special)
        self.template = verify_tool_call_format(ChatTemplate(self.tokenizer))
        starts = [rng.randrange(len(text)) for text in texts for _ in range(25)]
        pieces = {
            text[start : start + rng.randint(2, 14)]
            for text, start in zip([text for text in texts for _ in range(25)], starts, strict=True)
        }
        pieces |= {char for text in texts for char in text if not char.isascii()}
        pieces -= self.tokenizer.get_vocab().keys()
        self.tokenizer.add_tokens(sorted(pieces))
        self.eos = self.tokenizer.eos_token_id
        size = len(self.tokenizer)
        self.vocabulary = Vocabulary(self.tokenizer, self.template.output_format.keeps_special)
        self.masks = BitmaskComputer(size, [self.eos])
        self.builder = ConstraintBuilder(self.template, self.tokenizer, size, [self.eos])
        self.tokens = {id: self.vocabulary.token(id)[0] for id in range(size) if id != self.eos}

    def output(self) -> SequenceOutput:
        assert isinstance(REQUEST.prompt, Chat)
        rendered = self.template.render(REQUEST.prompt, POLICY)
        prefix, output_format = response_prefix(REQUEST.prompt, rendered), rendered.output_format
        constraints = when_ready(partial(self.builder.build, REQUEST, output_format, prefix))
        prepared = PreparedPrompt(
            self.tokenizer(rendered.text)["input_ids"],
            SamplingParams(),
            MAX_TOKENS,
            {self.eos: None},
            parser=response_parser(REQUEST, output_format, prefix, constraints),
            constraints=constraints,
        )
        item = WorkItem(REQUEST, float("inf"), 0.0)
        return create_outputs(item, REQUEST, prepared, self.vocabulary)[0]

    def write(self, text: str, longest: bool = False) -> Delta:
        """Write a text as far as masks allow; where they do not, any other token. `longest`: in
        the longest tokens, not in any."""
        output, position, others = self.output(), 0, 0
        while not output.finished:
            assert output.constraints
            pending, allowed = output.constraints.mask(), None
            if pending is not None:
                self.masks.start([pending])
                pending.outcome.result()
                allowed = self.masks.token_mask([(0, 1, pending)]).tokens[0].tolist()
            rest = text[position:]
            fits = [
                id
                for id, token in self.tokens.items()
                if token and rest.startswith(token) and (allowed is None or allowed[id])
            ]
            if fits:
                longest_fit = max(fits, key=lambda id: len(self.tokens[id]))
                id = longest_fit if longest else self.rng.choice(fits)
                position += len(self.tokens[id])
            elif (not rest or others > 150) and (allowed is None or allowed[self.eos]):
                id = self.eos
            else:
                assert allowed is not None, rest
                others += 1
                id = self.rng.choice([id for id, is_allowed in enumerate(allowed) if is_allowed])
            output.push(SampledToken(id, None, ()))
        return output.take_delta()


@contextmanager
def adversary(name: str, texts: Sequence[str], special: bool) -> Iterator[Adversary]:
    result = Adversary(name, texts, special, random.Random(f"{name}{special}"))
    try:
        yield result
    finally:
        result.builder.grammars.close()


def assert_valid(delta: Delta, text: str) -> int:
    """Return the number of complete calls."""
    calls = [(part.name, part.text) for part in delta.parts if part.kind == "call"]
    for n, (name, arguments) in enumerate(calls):
        if delta.finish_reason == "length" and n == len(calls) - 1:
            return n
        value = json.loads(arguments)
        if name == "patch":
            assert value.keys() == {"input"}, (text, value)
            assert value["input"].startswith("go"), (text, value)
            assert value["input"][2:], (text, value)
            assert set(value["input"][2:]) <= set("!?"), (text, value)
        else:
            assert name == "lookup", (text, name)
            assert jsonschema_rs.is_valid(PARAMETERS, value), (text, value)
    return len(calls)


@pytest.mark.parametrize("special", matrix([False, True], False))
@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_no_call_leaves_its_grammar(name: str, special: bool) -> None:
    if name in NO_TOOLS:
        pytest.skip("the template takes no tools")
    right = [output_of(name, call) for call in RIGHT]
    wrong = [output_of(name, call) for call in WRONG]
    if not all(call[0] in text for call, text in zip(RIGHT, right, strict=True)):
        pytest.skip("the template writes no calls")
    with adversary(name, wrong + right, special) as model:
        if not model.template.output_format.tool_calls:
            with pytest.raises(InvalidInput, match="cannot be applied"):
                model.output()
            return
        for text in right:
            delta = model.write(text, longest=True)
            assert assert_valid(delta, text) or delta.reasoning_tokens, delta
            assert_valid(model.write(text), text)
        for text in wrong:
            squeezed = "".join(text.split())
            for variant in (text, f"Well.\n{text}", squeezed, f"<{text}", text + text):
                assert_valid(model.write(variant), variant)
