"""What `scripts/template` runs: says what was learned from a chat template, and reads answers.

    MODEL or FILE.jinja → tokenizer → AnswerReader → report, or a line for each that is read

It is what to run before a bug in the reading of calls or thoughts is filed.
"""

import argparse
import contextlib
import json
import logging
import signal
import sys
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.generation.answer_reader import AnswerReader
from worker.generation.frontend import end_ids
from worker.model.loading import first_line, local_path
from worker.text.byte_tokenizer import byte_tokenizer
from worker.text.chat_template import ChatTemplate
from worker.text.report import as_text, end_of_turn, report

BAD = 2  # exit status, as argparse has it


class Function(msgspec.Struct):
    name: str
    description: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Line(msgspec.Struct):
    """What a model wrote, and what it was offered."""

    output: str
    tools: list[Function] = []
    thinking: bool | None = None


def main() -> None:
    asked = arguments().parse_args()
    try:
        reader, ends = load(asked.template, asked.tokenizer)
    except Exception as error:  # whatever a file, a hub or a library has against it
        refuse(f"{asked.template}: {first_line(error)}")
    if asked.read:
        read(reader, opened(asked.read))
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


def load(name: str, tokenizer_folder: str | None) -> tuple[AnswerReader, tuple[str, ...]]:
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
    ends = end_ids(defaults, tokenizer)
    texts = tuple(str(tokenizer.convert_ids_to_tokens(id)) for id in ends)
    return AnswerReader(tokenizer, ends), texts


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


def read(reader: AnswerReader, lines: BinaryIO) -> None:
    """A line for each. Stops at one that is bad."""
    decoder = msgspec.json.Decoder(Line)
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


def opened(name: str) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    try:
        return BytesIO(Path(name).read_bytes())
    except OSError as error:
        refuse(f"{name}: {error.strerror}")


def refuse(why: str) -> NoReturn:
    print(f"template: {why}", file=sys.stderr)
    raise SystemExit(BAD)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the report tells what is lacking
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
