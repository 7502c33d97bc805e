"""`onequeue template`: report the formats of a chat template, or parse outputs.

    MODEL or FILE.jinja → tokenizer → ResponseReader → report, or a line for each output

Run it before filing a bug about parsing tool calls or reasoning.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.engines.generation.input_processor import eos_token_ids
from worker.engines.generation.response_reader import ResponseReader
from worker.error_classification import first_line
from worker.messages.generation import ToolCallPolicy
from worker.model.loading import local_path
from worker.text.chat_template.byte_tokenizer import byte_tokenizer
from worker.text.chat_template.history import QUESTION, Render
from worker.text.chat_template.inference import CONTENT, TOOLS, assistant, example_calls
from worker.text.chat_template.template import ChatTemplate

EXIT_USAGE = 2  # as argparse's
CONTENTS = {"absent": "left out", "null": "null", "empty": "an empty text"}
IDS = {"any": "any", "nine": "nine letters or digits"}
IDS |= dict.fromkeys(("counted", "named"), "functions.NAME:INDEX")


class ToolFunction(msgspec.Struct):
    name: str
    description: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class OutputLine(msgspec.Struct):
    """A line of `--read`: a model's output, and the tools of its request."""

    output: str
    tools: list[ToolFunction] = []
    thinking: bool | None = None


def template_command(program: str, argv: Sequence[str]) -> None:
    arguments = make_parser(program).parse_args(argv)
    try:
        reader, stop_tokens = load(arguments.template, arguments.tokenizer)
        lines: Iterable[bytes] = sys.stdin.buffer
        if arguments.read not in (None, "-"):
            lines = Path(arguments.read).read_bytes().splitlines()
    except Exception as error:  # of a file, the hub or a library
        fail(f"{arguments.template}: {first_line(error)}")
    if arguments.read:
        read(reader, lines)
    else:
        fields = report(reader.template, stop_tokens)
        if arguments.json:
            print(json.dumps(fields, ensure_ascii=False, indent=2))
        else:
            print(as_text(fields))


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Report the formats inferred from a model's chat template, and what it lacks.",
    )
    parser.add_argument("template", metavar="MODEL|FILE.jinja", help="a checkpoint, or a template")
    parser.add_argument("--tokenizer", metavar="DIR", help="the tokenizer to use with the template")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--read",
        metavar="FILE",
        help='parse outputs instead: lines {"tools": [{"name", "description", "parameters"}], '
        '"thinking": true, false or null, "output": text} from a file, or - for stdin; a line '
        '{"content", "reasoning", "calls": [[name, arguments]]} is printed for each',
    )
    return parser


def load(name: str, tokenizer_folder: str | None) -> tuple[ResponseReader, tuple[str, ...]]:
    """Return a reader of outputs, and the tokens that end one."""
    defaults: Any = None
    if name.endswith(".jinja"):
        source = Path(name).read_text()
        tokenizer = tokenizer_for(source, tokenizer_folder)
    else:
        path = local_path(name, "chat")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        with contextlib.suppress(OSError):
            defaults = GenerationConfig.from_pretrained(path)
        if tokenizer_folder:
            tokenizer = tokenizer_for(tokenizer.chat_template, tokenizer_folder)
    if not tokenizer.chat_template:
        raise InvalidInput("it has no chat template", None)
    stop_token_ids = eos_token_ids(defaults, tokenizer)
    stop_tokens = tuple(str(tokenizer.convert_ids_to_tokens(id)) for id in stop_token_ids)
    return ResponseReader(tokenizer, stop_token_ids), stop_tokens


def tokenizer_for(source: str, folder: str | None) -> PreTrainedTokenizerBase:
    """Return a tokenizer with this chat template alone; without a folder, a byte-level one."""
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.chat_template, tokenizer.response_template = source, None
        return tokenizer
    tokenizer = byte_tokenizer(source)
    end = end_of_turn(ChatTemplate(tokenizer).try_render)
    if end and len(tokenizer.tokenize(end)) == 1:
        tokenizer.eos_token = end
    return tokenizer


# ── outputs ──


def read(reader: ResponseReader, lines: Iterable[bytes]) -> None:
    """Parse the output of each line and print a line; exit at an invalid one."""
    decoder = msgspec.json.Decoder(OutputLine)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            tools = [
                {"type": "function", "function": msgspec.to_builtins(tool)} for tool in line.tools
            ]
            response = reader.read(line.output, tools, line.thinking)
        except (msgspec.MsgspecError, InvalidInput) as error:
            fail(f"line {number}: {error}")
        print(msgspec.json.encode(response).decode(), flush=True)


def fail(reason: str) -> NoReturn:
    print(f"template: {reason}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


# ── the report ──


def report(template: ChatTemplate, stop_tokens: tuple[str, ...]) -> dict[str, Any]:
    """Return the report. `stop_tokens`: the checkpoint's, beside the template's end of a turn."""
    formats = {
        "calls": _calls(template),
        "thoughts": _reasoning(template),
        "history": _history(template),
        "tools_shown": template.shows_tools,
        "end_tokens": list(stop_tokens),
        "end_of_turn": end_of_turn(template.try_render),
    }
    lacks = [*template.notes]
    if not formats["thoughts"]:
        lacks.append("thoughts: no delimiters were found; outputs have no reasoning")
    if not stop_tokens and not formats["end_of_turn"]:
        lacks.append("end: no token ends an output")
    return {**formats, "lacks": lacks}


def _calls(template: ChatTemplate) -> dict[str, Any]:
    """Return the format of required calls, and whether it was inferred."""
    call_format = template.output_format_for(ToolCallPolicy((), required=True)).tool_calls
    assert call_format is not None
    one, two = (example_calls(template.examples, count) for count in (1, 2))
    return {
        "learned": bool(template.examples),
        "arguments": call_format.arguments.style,
        "one": one,
        "two": two if call_format.separator is not None else None,
    }


def _reasoning(template: ChatTemplate) -> dict[str, Any] | None:
    """Return the delimiters, and those in the prompt for each value of `enable_thinking`."""
    output_format = template.output_format
    if output_format.reasoning is None:
        return None
    switches: dict[str, dict[str, Any]] = {"default": {}}
    switches |= {str(value).lower(): {"enable_thinking": value} for value in (True, False)}
    in_prompt = {
        name: output_format.reasoning_at_end(template.try_render([QUESTION], **variables))
        for name, variables in switches.items()
    }
    opening, closing = output_format.reasoning
    return {"open": opening, "close": closing, "in_prompt": in_prompt}


def _history(template: ChatTemplate) -> dict[str, Any] | None:
    """Return the form in which the template takes earlier calls."""
    history = template.history_format
    if history is None or history.calls_in_content:
        return None
    return {
        "content_of_null": CONTENTS[history.empty_content],
        "arguments": history.arguments,
        "ids": IDS[history.call_ids],
        "text_and_calls": "two messages" if history.separate_content else "one message",
        "calls_in_a_message": "one" if history.one_call else "several",
        "later_system_messages": "in place" if template.message_order.system_in_place else "folded",
    }


def end_of_turn(render: Render) -> str | None:
    """Return the text that a template writes after the assistant's last message."""
    messages = [QUESTION, assistant(content=CONTENT)]
    text = render(messages, add_generation_prompt=False)
    text = text or render(messages, TOOLS, add_generation_prompt=False)
    _, content, end = text.rpartition(CONTENT)
    return (end.strip() or None) if content else None


def as_text(fields: Mapping[str, Any]) -> str:
    """Return a line for each field of the report, and for each item of a list."""
    lines = [*_lines(fields, "")]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _lines(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in fields.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _lines(value, f"{name}: ")
        else:
            for item in value if isinstance(value, list) else [value]:
                # On one line, with invisible characters escaped.
                text = json.dumps(item, ensure_ascii=False).replace('\\"', '"')
                yield name, text[1:-1] if isinstance(item, str) else text
