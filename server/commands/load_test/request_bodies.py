"""Bodies that a load test sends: random texts, chats and embedding requests, or files."""

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

BOUNDARY = "a-part-of-a-load-test"
WORDS = (
    "the a old new small river city morning engine letter music winter garden teacher window "
    "quiet bright heavy simple open runs keeps finds moves answers over under beside before after "
    "and but because while people water paper number story market island question memory light"
)


def make_bodies(args: argparse.Namespace, number: int = 0) -> Iterator[bytes]:
    """Yield bodies without end. Random texts are all different, and different for each target's
    `number`: a server may cache a text."""
    rng = random.Random(f"{args.seed} {number}" if number else args.seed)
    named = ({"model": args.model} if args.model else {}) | args.fields
    if args.kind in ("file", "upload"):
        files = [Path(name).read_bytes() for name in args.file]
        if args.kind == "upload":
            files = [form(named, *file) for file in zip(args.file, files, strict=True)]
        yield from itertools.cycle(files)
    chat = dict(named)
    if args.max_tokens:
        chat["max_tokens"] = args.max_tokens
    if args.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    texts = itertools.cycle(read_texts(args.texts)) if args.texts else random_texts(args, rng)
    for text in texts:
        if args.kind == "text":
            yield text.encode()
        elif args.kind == "json":
            yield json.dumps(args.fields | {args.json_key: text}).encode()
        elif args.kind == "embeddings":
            yield json.dumps(named | {"input": text}).encode()
        else:
            system = [{"role": "system", "content": args.system}] if args.system else []
            content: Any = text
            if args.picture:
                image_rng = random.Random(args.seed) if args.same_picture else rng
                image = base64.b64encode(striped_image(image_rng, args.picture)).decode()
                url = {"url": f"data:image/png;base64,{image}"}
                content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": url}]
            messages = [*system, {"role": "user", "content": content}]
            yield json.dumps(chat | {"messages": messages}).encode()


def read_texts(name: str) -> list[str]:
    """Return the lines of a file that are not blank."""
    lines = Path(name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]


def random_texts(args: argparse.Namespace, rng: random.Random) -> Iterator[str]:
    vocabulary = WORDS.split()
    while True:
        words = rng.choices(vocabulary, k=rng.randint(*args.words))
        if args.mask:
            words.insert(rng.randint(0, len(words)), args.mask)
        yield " ".join(words)


def striped_image(rng: random.Random, side: int) -> bytes:
    """Return a PNG of lines of random colours, which is cheap to make."""
    lines = zlib.compress(b"".join(b"\0" + rng.randbytes(3) * side for _ in range(side)), 1)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", lines), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data
        file += struct.pack(">I", zlib.crc32(kind + data))
    return file


def form(fields: dict[str, Any], name: str, content: bytes) -> bytes:
    """Return a multipart form with a file and other fields."""
    parts = [(f'name="{key}"', "", str(value).encode()) for key, value in fields.items()]
    media = f"\r\nContent-Type: {media_type(name)}"
    parts.append((f'name="file"; filename="{Path(name).name}"', media, content))
    body = b""
    for disposition, media_line, value in parts:
        head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}{media_line}\r\n\r\n"
        body += head.encode() + value + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def media_type(name: str) -> str:
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
