"""From tokens to text and log-probabilities, independently of how a text is tokenized."""

import codecs
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests import tiny_chat
from tests.generating import GREEDY, request
from worker.engines.generation.output import PreparedPrompt, SequenceOutput, create_outputs
from worker.messages.deltas import Delta, TokenLogprob
from worker.messages.generation import ToolCallPolicy
from worker.model.sampler import SampledToken, SamplingParams
from worker.text.detokenizer import Vocabulary
from worker.text.output_format import DEFAULT_OUTPUT_FORMAT
from worker.text.parser import OutputParser

TOKENIZER = tiny_chat.tokenizer()
TOKENIZER.add_tokens(["ok\n"])
VOCABULARY = Vocabulary(TOKENIZER)
BYTES = {id_: VOCABULARY.token(id_)[1] for id_ in range(len(TOKENIZER))}
BEGIN, END = 0, 1  # special tokens, which have no text
OK = len(TOKENIZER) - 1  # "ok\n"
BYTE_F0, BYTE_9F = (next(i for i in BYTES if BYTES[i] == byte) for byte in (b"\xf0", b"\x9f"))
FRAGMENTS = [
    "<think>", "\nhm,  ok\n", "</think>", "\n\n", "Hello  there. \n", " ", "  ", "é🚀", "日本",
    '<tool_call>\n{"name": "w", "arguments": {"city": "P <b"}}\n</tool_call>', "<tool_call>",
    "</tool_call>", "nonsense", "<tool", "</thi", "stop", "sto", "\t\n", "x y", "abc", "ab",
]  # fmt: skip
STOPS = [(), (), ("stop",), ("abc", "x y"), ("\n\n",), ("é",), ("there. x",)]


def output(
    max_tokens: int,
    stop: tuple[str, ...] = (),
    logprobs: int | None = 0,
    output_format: Any = DEFAULT_OUTPUT_FORMAT,
    prefix: str = "",
    calls: bool = True,
    context: Sequence[int] = (5,),
) -> SequenceOutput:
    item = request(context, replace(GREEDY, logprobs=logprobs), stop=stop)
    item.payload = replace(item.payload, token_ids=True)
    parser = None if output_format is None else OutputParser(output_format, prefix, calls)
    params = SamplingParams(logprobs=logprobs)
    prepared = PreparedPrompt([*context], params, max_tokens, {END: None}, parser=parser)
    [result] = create_outputs(item, item.payload, prepared, VOCABULARY)
    result.start(0)
    return result


def tokens_of(text: str, chance: random.Random) -> list[int]:
    """Return random tokens with this text; some are parts of characters."""
    rest, tokens = text.encode(), []
    while rest:
        fitting = [i for i, piece in BYTES.items() if piece and rest.startswith(piece) and i > 5]
        tokens.append(chance.choice(fitting))
        rest = rest[len(BYTES[tokens[-1]]) :]
    return tokens


def delta_of(output: SequenceOutput, tokens: list[int], logprobs: bool = True) -> Delta:
    """Push these tokens and merge the deltas; a token's log-probability is its index."""
    whole = Delta(0)
    for number, token in enumerate(tokens):
        output.push(SampledToken(token, float(number) if logprobs else None, ()))
        if delta := output.take_delta():
            whole.merge(delta)
        if output.finished:
            break
    assert output.finished
    return whole


def read_at(
    choice: SequenceOutput, tokens: list[int], chance: random.Random, often: float
) -> Delta:
    """Push these tokens, of which the last ends the choice; read after some of them."""
    whole, unread = Delta(0), 0
    for number, token in enumerate(tokens):
        choice.push(SampledToken(token, float(number), ()))
        unread += 1
        assert choice.finished == (number == len(tokens) - 1)
        assert choice.unread == unread
        if choice.finished or chance.random() < often:
            whole.merge(choice.take_delta())
            unread = 0
    return whole


@pytest.mark.parametrize("has_parser", [True, False])
@pytest.mark.parametrize("context", [[5], [BYTE_F0, BYTE_9F]])
def test_text_does_not_depend_on_when_it_is_read(context: list[int], has_parser: bool) -> None:
    """Of random tokens, which may end in an emoji: read after each, after several, or written at
    once, since a stop string might end it."""
    chance = random.Random(len(context))
    parsing: dict[str, Any] = {} if has_parser else {"output_format": None}
    for _ in range(100):
        text = "".join(chance.choices([*FRAGMENTS, "👩‍🚀", "é🚀"], k=chance.randrange(1, 8)))
        tokens = tokens_of(text, chance)
        for special in chance.choices([BEGIN, 2, 3, len(TOKENIZER) + 9], k=chance.randrange(3)):
            tokens.insert(chance.randrange(len(tokens) + 1), special)
        tokens = tokens[: chance.randrange(1, len(tokens) + 1)]
        limit = len(tokens)
        if chance.random() < 0.5:
            tokens, limit = [*tokens, END], limit + 2
        logprobs, deltas = chance.choice([None, None, 0]), []
        for often, stop in ((1, ("never",)), (1, ()), (0.3, ()), (0, ())):
            choice = output(limit, stop, logprobs, context=context, **parsing)
            deltas.append(read_at(choice, tokens, chance, often))
        assert deltas[0].tokens == len(tokens)
        assert all(delta == deltas[0] for delta in deltas)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_token_that_comes_while_others_are_taken_is_taken(stop: tuple[str, ...]) -> None:
    """The worker does not report it, as it follows others that are unread."""
    choice, late = output(9, stop, None, output_format=None), [OK]

    class Unread(list[Any]):
        def __delitem__(self, index: Any) -> None:
            while late:
                choice.push(SampledToken(late.pop()))
            super().__delitem__(index)

    choice._unread_tokens, choice._unread_deltas = Unread(), Unread()
    choice.push(SampledToken(OK))
    delta = choice.take_delta()
    assert (delta.tokens, delta.text, choice.unread) == (2, "ok\nok\n", 0)


def assert_of_their_tokens(entries: list[TokenLogprob], tokens: list[int]) -> None:
    numbers = [entry.logprob for entry in entries]
    assert numbers == sorted(set(numbers), key=float)  # type: ignore[arg-type]
    for entry in entries:
        assert entry.logprob is not None
        assert entry.token_id == tokens[int(entry.logprob)]


@pytest.mark.parametrize("prefix", ["", "<think>\n", "The "])
def test_the_output_does_not_depend_on_how_a_text_is_tokenized(prefix: str) -> None:
    chance = random.Random(prefix)
    for _ in range(150):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randrange(1, 8)))
        stop = chance.choice(STOPS)
        expected = None
        for _ in range(3):
            tokens = tokens_of(text, chance)
            if ends := chance.random() < 0.5:
                tokens.append(END)
            limit = len(tokens) + ends
            delta = delta_of(output(limit, stop, prefix=prefix), tokens)
            assert "".join(entry.text for entry in delta.logprobs) == delta.text
            assert_of_their_tokens(delta.logprobs, tokens)
            plain = delta_of(output(limit, stop, None, prefix=prefix), tokens, logprobs=False)
            assert plain.parts == delta.parts
            expected = expected or delta.parts
            assert delta.parts == expected, (text, stop)


def test_a_text_that_ends_in_half_a_character_ends_before_it() -> None:
    chance = random.Random(0)
    for _ in range(100):
        text = "".join(chance.choices([*FRAGMENTS, "é", "日"], k=3))
        tokens = tokens_of(text, chance)
        tokens = tokens[: chance.randrange(1, len(tokens) + 1)]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(b"".join(BYTES[token] for token in tokens))
        for ids, limit in ((tokens, len(tokens)), ([*tokens, END], 10**6)):
            delta = delta_of(output(limit, output_format=None), ids)
            assert "".join(entry.text for entry in delta.logprobs) == delta.text == whole
            assert_of_their_tokens(delta.logprobs, ids)
            assert {entry.logprob for entry in delta.logprobs} >= set(range(len(tokens)))


def test_log_probabilities_of_content_come_before_an_interruption() -> None:
    """White space after the content belongs to no part: its token is not waited for."""
    sequence, whole = output(10**6), Delta(0)
    for token in (OK, *tokens_of("<think>", random.Random(0)), OK):
        sequence.push(SampledToken(token, -1.0, ()))
        whole.merge(sequence.take_delta() or Delta(0))
    assert [part.kind for part in whole.parts] == ["content", "reasoning"]
    assert [(entry.token_id, entry.text, entry.raw) for entry in whole.logprobs] == [
        (OK, "ok", b"ok")
    ]


def test_tokens_without_text_belong_to_the_content_before_them() -> None:
    for prefix, counted in (("", [BEGIN, OK, BEGIN, BEGIN]), ("<think>\n", [])):
        delta = delta_of(output(4, prefix=prefix), [BEGIN, OK, BEGIN, BEGIN])
        assert [entry.token_id for entry in delta.logprobs] == counted
    delta = delta_of(output(2), [BEGIN, BEGIN])
    assert [entry.token_id for entry in delta.logprobs] == [BEGIN, BEGIN]


CALL = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "stop", "calls", "run", "expected"),
    [
        ("Hello\n\n\n\n</s>", "\n", False, "Hello\n", ("Hello", "stop", "\n")),
        ("Hello\n\n\n\n</s>", "\n\n", False, "Hello\n\n", ("Hello", "stop", "\n\n")),
        ("Hello\nworld", "\n", False, "Hello\n", ("Hello", "stop", "\n")),
        ("Hello \n", "o \n", False, "Hello \n", ("Hell", "stop", "o \n")),
        ("Hello <</s>", "<", False, "Hello <</s>", ("Hello ", "stop", "<")),
        ("Hello <", "<", False, "Hello <", ("Hello ", "stop", "<")),
        ("<think>\n</think>\nHi\n.", "\n", False, "<think>\n</think>\nHi\n", ("Hi", "stop", "\n")),
        ("\n<think>.</think>\nHi", "\n", False, "\n<think>.</think>\nHi", ("Hi", "length", None)),
        # where tool calls are allowed, white space may precede one
        ("Hello\n\n", "\n", True, "Hello\n\n", ("Hello", "stop", "\n")),
        ("Hello\nworld", "\n", True, "Hello\nw", ("Hello", "stop", "\n")),
        (f"Hello\n{CALL}</s>", "\n", True, f"Hello\n{CALL}</s>", ("Hello", "tool_calls", None)),
    ],
)
def test_stop_strings_in_white_space_before_a_delimiter(
    text: str, stop: str, calls: bool, run: str, expected: tuple[Any, ...]
) -> None:
    """`run`: the part of the text that is generated, a token for each delimiter or character."""
    ids = {piece: id_ for id_, piece in BYTES.items()}
    units = [ids[unit.encode()] for unit in re.findall(r"</?\w+>|.|\n", text)]
    sequence = output(len(units), (stop,), None, calls=calls)
    delta = delta_of(sequence, units, logprobs=False)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == expected
    assert delta.tokens == len(re.findall(r"</?\w+>|.|\n", run))


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_calls_false_returns_the_first_call_only(parallel: bool) -> None:
    item = request([5], GREEDY)
    item.payload = replace(item.payload, tool_policy=ToolCallPolicy(("a", "b"), parallel=parallel))
    prepared = PreparedPrompt(
        [5],
        SamplingParams(),
        400,
        {END: None},
        parser=OutputParser(DEFAULT_OUTPUT_FORMAT, "", True),
    )
    [sequence] = create_outputs(item, item.payload, prepared, VOCABULARY)
    sequence.start(0)
    text = '<tool_call>[{"name": "a", "arguments": {"n": 1}}, {"name": "b"}]</tool_call>'
    for token in [*tokens_of(text, random.Random(0)), END]:
        sequence.push(SampledToken(token, None, ()))
    calls = [(part.name, part.text) for part in sequence.take_delta().parts if part.kind == "call"]
    assert calls == [("a", '{"n": 1}'), ("b", "{}")][: 1 + parallel]
