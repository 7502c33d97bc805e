"""What `scripts/template` runs: says what was learned from a chat template, and reads answers.

    MODEL or FILE.jinja → tokenizer → ResponseReader → report, or a line for each that is read

It is what to run before a bug in the reading of calls or thoughts is filed.
"""

import argparse
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.error_classification import first_line
from worker.generation.input_processor import eos_token_ids
from worker.generation.response_reader import ResponseReader
from worker.messages.generation import ToolCallPolicy
from worker.model.loading import local_path
from worker.text.chat_template.byte_tokenizer import byte_tokenizer
from worker.text.chat_template.history import QUESTION, Render
from worker.text.chat_template.inference import CONTENT, TOOLS, assistant, shown_calls
from worker.text.chat_template.template import ChatTemplate

BAD = 2  # exit status, as argparse has it
CONTENTS = {"absent": "left out", "null": "null", "dumped": "null", "empty": "an empty text"}
IDS = {"any": "any", "nine": "nine letters or digits", "named": "functions.NAME:INDEX"}


class ToolFunction(msgspec.Struct):
    name: str
    description: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class HistoryLine(msgspec.Struct):
    """What a model wrote, and what it was offered."""

    output: str
    tools: list[ToolFunction] = []
    thinking: bool | None = None


def main() -> None:
    asked = arguments().parse_args()
    try:
        reader, ends = load(asked.template, asked.tokenizer)
        lines: Iterable[bytes] = sys.stdin.buffer
        if asked.read not in (None, "-"):
            lines = Path(asked.read).read_bytes().splitlines()
    except Exception as error:  # whatever a file, a hub or a library has against it
        refuse(f"{asked.template}: {first_line(error)}")
    if asked.read:
        read(reader, lines)
    else:
        made = report(reader.template, ends)
        print(json.dumps(made, ensure_ascii=False, indent=2) if asked.json else as_text(made))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/template",
        description="Say what is learned from a model's chat template, and what could not be.",
    )
    parser.add_argument("template", metavar="MODEL|FILE.jinja", help="a checkpoint, or a template")
    parser.add_argument("--tokenizer", metavar="DIR", help="the tokenizer to go with the template")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "--read",
        metavar="FILE",
        help='read answers instead: lines {"tools": [{"name", "description", "parameters"}], '
        '"thinking": true, false or null, "output": text} from a file, or - for stdin; a line '
        '{"content", "reasoning", "calls": [[name, arguments]]} is printed for each',
    )
    return parser


def load(name: str, tokenizer_folder: str | None) -> tuple[ResponseReader, tuple[str, ...]]:
    """And the tokens that end an answer."""
    defaults: Any = None
    if name.endswith(".jinja"):
        source = Path(name).read_text()
        tokenizer = of_file(source, tokenizer_folder)
    else:
        path = local_path(name, "chat")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        with contextlib.suppress(OSError):
            defaults = GenerationConfig.from_pretrained(path)
        if tokenizer_folder:
            tokenizer = of_file(tokenizer.chat_template, tokenizer_folder)
    if not tokenizer.chat_template:
        raise InvalidInput("it has no chat template", None)
    ends = eos_token_ids(defaults, tokenizer)
    texts = tuple(str(tokenizer.convert_ids_to_tokens(id)) for id in ends)
    return ResponseReader(tokenizer, ends), texts


def of_file(source: str, folder: str | None) -> PreTrainedTokenizerBase:
    """A tokenizer with this chat template alone. Without a folder, one is made."""
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.chat_template, tokenizer.response_template = source, None
        return tokenizer
    made = byte_tokenizer(source)
    if (end := end_of_turn(ChatTemplate(made).tried)) and len(made.tokenize(end)) == 1:
        made.eos_token = end
    return made


# ── answers ──


def read(reader: ResponseReader, lines: Iterable[bytes]) -> None:
    """A line for each. Stops at one that is bad."""
    decoder = msgspec.json.Decoder(HistoryLine)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            tools = [
                {"type": "function", "function": msgspec.to_builtins(tool)} for tool in line.tools
            ]
            answer = reader.read(line.output, tools, line.thinking)
        except (msgspec.MsgspecError, InvalidInput) as error:
            refuse(f"line {number}: {error}")
        print(msgspec.json.encode(answer).decode(), flush=True)


def refuse(why: str) -> NoReturn:
    print(f"template: {why}", file=sys.stderr)
    raise SystemExit(BAD)


# ── the report ──


def report(template: ChatTemplate, end_tokens: tuple[str, ...]) -> dict[str, Any]:
    """`end_tokens`: the checkpoint's; what ends a turn in the template is told beside them."""
    made = {
        "calls": _calls(template),
        "thoughts": _thoughts(template),
        "history": _history(template),
        "tools_shown": template.shows_tools,
        "end_tokens": list(end_tokens),
        "end_of_turn": end_of_turn(template.tried),
    }
    lacks = [*template.notes]
    if not made["thoughts"]:
        lacks.append("thoughts: no marks of them were found; an answer has none")
    if not end_tokens and not made["end_of_turn"]:
        lacks.append("end: no token ends an answer")
    return {**made, "lacks": lacks}


def _calls(template: ChatTemplate) -> dict[str, Any]:
    """How they are written where they must be made, and whether that was learned."""
    form = template.output_format_for(ToolCallPolicy((), required=True)).tool_calls
    assert form is not None
    one, two = (shown_calls(template.examples, count) for count in (1, 2))
    made = {"learned": bool(template.examples), "arguments": form.arguments.style, "one": one}
    return {**made, "two": two if form.separator is not None else None}


def _thoughts(template: ChatTemplate) -> dict[str, Any] | None:
    """The marks, and what the prompt has written of them with each value of `enable_thinking`."""
    form = template.answers
    if form.reasoning is None:
        return None
    switches: dict[str, dict[str, Any]] = {"default": {}}
    switches |= {str(way).lower(): {"enable_thinking": way} for way in (True, False)}
    prompts = {name: template.tried([QUESTION], **given) for name, given in switches.items()}
    begun = {name: form.reasoning_at_end(prompt) for name, prompt in prompts.items()}
    return {"open": form.reasoning[0], "close": form.reasoning[1], "in_prompt": begun}


def _history(template: ChatTemplate) -> dict[str, Any] | None:
    """What the template takes of calls that were made before."""
    turns = template.turns
    if turns is None or turns.written:
        return None
    return {
        "content_of_null": CONTENTS[turns.content],
        "arguments": turns.arguments,
        "ids": IDS[turns.ids],
        "text_and_calls": "two messages" if turns.apart else "one message",
        "calls_in_a_message": "one" if turns.single else "several",
    }


def end_of_turn(render: Render) -> str | None:
    """What a template writes after an assistant's last message."""
    turns = [QUESTION, assistant(content=CONTENT)]
    text = render(turns, add_generation_prompt=False)
    text = text or render(turns, TOOLS, add_generation_prompt=False)
    _, shown, rest = text.rpartition(CONTENT)
    return (rest.strip() or None) if shown else None


def as_text(made: Mapping[str, Any]) -> str:
    """A line a fact, and a line for all that is lacking."""
    lines = [*_facts(made, "")]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _facts(made: Mapping[str, Any], of: str) -> Iterator[tuple[str, str]]:
    for key, value in made.items():
        name = f"{of}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}: ")
        else:
            for each in value if isinstance(value, list) else [value]:
                # on one line, with what cannot be seen escaped
                shown = json.dumps(each, ensure_ascii=False).replace('\\"', '"')
                yield name, shown[1:-1] if isinstance(each, str) else shown


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the report tells what is lacking
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
