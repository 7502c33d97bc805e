"""`bench.py beside`: streaming chats while an hour of audio is uploaded and transcribed. Compares
the largest gap between two chunks of a chat with the time of the encoder for one window.

The speech model is bench_speech's; the chat model is the demo, or the checkpoint of --chat-model.
"""

import argparse
import asyncio
import io
import json
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import bench_in_process
import numpy as np
import soundfile
from bench_servers import free_port, onequeue, print_json, running
from bench_speech import BOUNDARY, PATH, SAMPLING_RATE, form, make_model, without_fallback

from server.commands.load_test.http_client import ChatStream, Client

MINUTES = 60
ALONE_S, BESIDE_S = 5.0, 25.0  # measuring time of the chats
TARGET = 2.0  # windows of the encoder
TOKENS = 100  # per chat


def beside(arguments: argparse.Namespace) -> None:
    model = Path(arguments.model or make_model()).resolve()
    others = {f"{kind}_MODEL": "none" for kind in ("PIPELINE", "EMBEDDING", "RERANK")}
    with ExitStack() as stack:
        single_pass = without_fallback(model, stack)
        window_s = bench_in_process.measure("encoder", single_pass)
        print_json(bench="beside", encoder_window_s=round(window_s, 3))
        settings = {"CHAT_MODEL": arguments.chat_model, "TRANSCRIPTION_MODEL": single_pass}
        launch = onequeue("onequeue", free_port(), settings | others)
        server = stack.enter_context(running("onequeue", launch))
        with server.resumed():
            alone, gaps = asyncio.run(measure(server.port, single_pass, hour_of_noise()))
    print_json(bench="beside", gap="alone", largest_s=round(max(alone), 3), gaps=len(alone))
    ratio = round(max(gaps) / window_s, 2)
    print_json(
        bench="beside",
        gap="beside an hour of sound",
        largest_s=round(max(gaps), 3),
        gaps=len(gaps),
        windows=ratio,
        target=TARGET,
    )


async def measure(port: int, model: str, audio: bytes) -> tuple[list[float], list[float]]:
    """Return the gaps in seconds without and beside the transcription, which is cancelled at the
    end."""
    content_type = f"multipart/form-data; boundary={BOUNDARY}"
    http = Client(urlsplit(f"http://127.0.0.1:{port}{PATH}"), {"content-type": content_type})
    await chats(port, 1.0)
    alone = await chats(port, ALONE_S)
    events: list[bytes] = []
    body = form(model, audio, stream="true")
    transcription = asyncio.create_task(http.post(body, events.append))
    gaps = await chats(port, BESIDE_S)
    transcription.cancel()
    deltas = b"".join(events).count(b"transcript.text.delta")
    if not deltas:
        raise SystemExit("nothing was transcribed during the chats")
    print_json(bench="beside", deltas_of_the_recording=deltas)
    return alone, gaps


async def chats(port: int, seconds: float) -> list[float]:
    """Return the gaps between chunks of chats that run one after another for `seconds`."""
    url = urlsplit(f"http://127.0.0.1:{port}/v1/chat/completions")
    http, until = Client(url, {"content-type": "application/json"}), time.perf_counter() + seconds
    gaps: list[float] = []
    while time.perf_counter() < until:
        messages = [{"role": "user", "content": f"What is the time? {time.time_ns()}"}]
        request = {"messages": messages, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        chat = ChatStream()
        response = await http.post(json.dumps(request).encode(), chat.feed)
        if response.status != 200:
            raise SystemExit(response.body.decode())
        gaps += [later - earlier for earlier, later in pairwise(chat.times)]
    http.close()
    return gaps


def hour_of_noise() -> bytes:
    """Return a FLAC file of one minute of quiet noise, repeated."""
    minute = np.random.default_rng(1).integers(-64, 64, 60 * SAMPLING_RATE, np.int16)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", SAMPLING_RATE, 1, format="FLAC") as output:
        for _ in range(MINUTES):
            output.write(minute)
    return file.getvalue()
