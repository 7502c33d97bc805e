"""What load_test.py sends: texts, chats and embeddings of random words, or files."""

import argparse
import base64
import itertools
import json
import mimetypes
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_client import Client

PATHS = {  # where a URL names no endpoint
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "upload": "/v1/audio/transcriptions",
}
BOUNDARY = "a-part-of-a-load-test"
WORDS = (
    "the a old new small river city morning engine letter music winter garden teacher window "
    "quiet bright heavy simple open runs keeps finds moves answers over under beside before after "
    "and but because while people water paper number story market island question memory light"
)


def make_bodies(args: argparse.Namespace, number: int = 0) -> Iterator[bytes]:
    """No two alike, and others for each target by its number: a server may remember a text."""
    rng, vocabulary = random.Random(f"{args.seed} {number}" if number else args.seed), WORDS.split()
    if args.kind in ("file", "upload"):
        files = [Path(name).read_bytes() for name in args.file]
        if args.kind == "upload":
            files = [form(args, *each) for each in zip(args.file, files, strict=True)]
        yield from itertools.cycle(files)
    named: dict[str, Any] = {"model": args.model} if args.model else {}
    named |= args.fields
    chat = dict(named)
    if args.max_tokens:
        chat["max_tokens"] = args.max_tokens
    if args.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    while True:
        words = rng.choices(vocabulary, k=rng.randint(*args.words))
        if args.mask:
            words.insert(rng.randint(0, len(words)), args.mask)
        text = " ".join(words)
        if args.kind == "text":
            yield text.encode()
        elif args.kind == "json":
            yield json.dumps({args.json_key: text}).encode()
        elif args.kind == "embeddings":
            yield json.dumps(named | {"input": text}).encode()
        else:
            system = [{"role": "system", "content": args.system}] if args.system else []
            content: Any = text
            if args.picture:
                drawn = random.Random(args.seed) if args.same_picture else rng
                content = [{"type": "text", "text": text}, stripes(drawn, args.picture)]
            messages = [*system, {"role": "user", "content": content}]
            yield json.dumps(chat | {"messages": messages}).encode()


def stripes(rng: random.Random, side: int) -> dict[str, Any]:
    """A part of a message: a PNG of lines of random colours, which takes no time to make."""
    lines = zlib.compress(b"".join(b"\0" + rng.randbytes(3) * side for _ in range(side)), 1)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", lines), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data
        file += struct.pack(">I", zlib.crc32(kind + data))
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def form(args: argparse.Namespace, name: str, content: bytes) -> bytes:
    """A file with the model and other fields, as a browser sends them."""
    fields = ({"model": args.model} if args.model else {}) | args.fields
    parts = [(f'name="{key}"', "", str(value).encode()) for key, value in fields.items()]
    media = f"\r\nContent-Type: {media_of(name)}"
    parts.append((f'name="file"; filename="{Path(name).name}"', media, content))
    made = b""
    for disposition, more, value in parts:
        head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}{more}\r\n\r\n"
        made += head.encode() + value + b"\r\n"
    return made + f"--{BOUNDARY}--\r\n".encode()


def media_of(name: str) -> str:
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def make_client(args: argparse.Namespace, target: str | None = None) -> Client:
    url = urlsplit(target or args.urls[0])
    if (path := PATHS.get(args.kind)) and not url.path.startswith("/v1/"):
        url = url._replace(path=url.path.rstrip("/").removesuffix("/v1") + path)
    content_type = "application/json"
    if args.kind == "text":
        content_type = "text/plain; charset=utf-8"
    elif args.kind == "upload":
        content_type = f"multipart/form-data; boundary={BOUNDARY}"
    elif args.kind == "file":
        content_type = media_of(args.file[0])
    return Client(url, {"content-type": content_type} | dict(args.header))
