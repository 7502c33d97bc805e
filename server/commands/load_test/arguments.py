"""The command line of `onequeue load`: its flags, and checks of their combinations."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server.commands.load_test.request_bodies import read_texts

DESCRIPTION = """\
Load-test an HTTP inference server by URL: send requests, then print and plot the results.

Closed loop (--concurrency) or open loop (--rate; latency counts from the scheduled arrival).
It speaks HTTP/1.1 without proxies or redirects, and it does not judge the responses.
https is verified by the system's certificates, or those of SSL_CERT_FILE.
Latency percentiles are of 2xx responses only; the first error of each kind is shown.
The last line of stdout is one JSON document."""
EXAMPLES = """\
    onequeue load http://127.0.0.1:8000/ --concurrency 16 --requests 2000 --plot out.svg
    onequeue load http://127.0.0.1:8000 --kind json --fields '{"parameters": {"top_k": 1}}' \\
        --requests 100
    onequeue load http://127.0.0.1:8000 --kind chat --stream --rate 5 --duration 30 | tail -1
    onequeue load http://127.0.0.1:8000 http://127.0.0.1:9000 --kind embeddings --duration 10
    onequeue load http://127.0.0.1:8000 --kind upload --file speech.wav --requests 20"""


def parse_args(program: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(program)
    args = parser.parse_args(argv)
    if args.stream and args.kind != "chat":
        parser.error("--stream needs --kind chat")
    if args.plot and not args.plot.endswith(".svg"):
        parser.error(f"--plot {args.plot}: must end in .svg")
    if args.plot and not Path(args.plot).parent.is_dir():
        parser.error(f"--plot {args.plot}: no such directory")
    if (args.kind in ("file", "upload")) != bool(args.file):
        parser.error("--kind file and --kind upload need --file, and no other kind takes it")
    for name in args.file:
        if not Path(name).is_file():
            parser.error(f"--file {name}: no such file")
    if args.texts and not (Path(args.texts).is_file() and read_texts(args.texts)):
        parser.error(f"--texts {args.texts}: no such file, or it has no text")
    if args.texts and args.kind in ("file", "upload"):
        parser.error("--texts needs --kind text, json, chat or embeddings")
    if args.fields and args.kind in ("text", "file"):
        parser.error("--fields needs --kind json, chat, embeddings or upload")
    if args.plot and len(args.urls) > 1:
        parser.error("--plot takes one URL")
    if args.requests == args.duration == math.inf:
        parser.error("give --requests, --duration or both")
    return args


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    several = "several are loaded in turn and compared side by side"
    add("urls", metavar="url", nargs="+", type=http_url, help=several)
    kinds = ("text", "json", "chat", "embeddings", "file", "upload")
    add("--kind", choices=kinds, default="text", help="upload: a file in a form, for speech")
    add("--file", action="append", default=[], help="file, upload: the body; several in turn")
    add("--concurrency", type=count, default=1, help="closed loop: clients (and for --warmup)")
    add("--rate", type=positive, help="open loop: this many arrivals per second")
    add("--arrivals", choices=("poisson", "constant"), default="poisson")
    add("--max-in-flight", type=count, default=512, help="open loop: drop arrivals beyond it")
    add("--requests", type=count, default=math.inf, help="stop after this many")
    add("--duration", type=positive, default=math.inf, help="stop sending after these seconds")
    add("--warmup", type=int, default=0, help="requests sent first and not counted")
    add("--timeout", type=positive, default=60.0, help="seconds for one whole request")
    add("--words", type=word_range, default=(4, 20), metavar="N|LOW-HIGH", help="per text (4-20)")
    texts = "the inputs: one text per line, in this order, repeated; random words by default"
    add("--texts", metavar="FILE", help=texts)
    add("--mask", help='put this word into each text at a random place, e.g. "[MASK]"')
    add("--json-key", default="inputs")
    add("--model", help="chat, embeddings, upload: the model's name")
    add("--max-tokens", type=count, help="chat")
    add("--system", help="chat: a system message, the same in every request")
    fields = "json, chat, embeddings, upload: an object whose fields are added to each body"
    add("--fields", type=json_object, default={}, metavar="JSON", help=fields)
    add("--picture", type=count, help="chat: a new image of this many pixels a side per request")
    add("--same-picture", action="store_true", help="chat: the same image in every request")
    add("--stream", action="store_true", help="chat: measure first-token and inter-token times")
    add("--header", type=header, action="append", default=[], metavar='"K: V"')
    add("--seed", type=int, default=0)
    add("--plot", metavar="FILE", help="write a latency plot, .svg")
    return parser


def http_url(text: str) -> str:
    url = urlsplit(text)
    plain = url.scheme in ("http", "https") and url.hostname and "@" not in url.netloc
    if not (plain and text.isascii() and text.isprintable() and " " not in text and url.port != 0):
        message = "must be http[s]://host[:port][/path] in ASCII"
        raise argparse.ArgumentTypeError(message)
    return text


def json_object(text: str) -> dict[str, Any]:
    if not isinstance(document := json.loads(text), dict):
        raise ValueError
    return document


def word_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    words = int(low), int(high if dash else low)
    if not 1 <= words[0] <= words[1]:
        raise ValueError
    return words


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and text.isprintable() and text.encode("latin-1")):
        raise ValueError
    return name.strip().lower(), value.strip()


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError
    return value


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value
