"""`bench.py beside`: streaming chats while an hour of sound is transcribed, from its upload on. The
largest gap between two pieces of a chat, beside what the encoder takes for a window by itself.

The speech model is bench_speech's; the chat is the demo, or the checkpoint of --chat-model.
"""

import argparse
import asyncio
import io
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import soundfile
from bench_servers import ROOT, free_port, onequeue, running, say
from bench_speech import BOUNDARY, PATH, RATE, form, make_model, said_once

from server.commands.load_test.http_client import ChatStream, Client

MINUTES = 60
ALONE_S, BESIDE_S = 5.0, 25.0  # that chats are looked at
TARGET = 2.0
TOKENS = 100  # of a chat
ENCODER = """
import statistics, sys, time, torch
sys.path.insert(0, '.')
from worker.speech.loading import SpeechOptions, load_speech
engine = load_speech(SpeechOptions(sys.argv[1]))
window = engine.try_example()
took = []
for _ in range(6):
    started = time.perf_counter()
    with torch.inference_mode():
        engine.runner.encoder(window.features[None])
    took.append(time.perf_counter() - started)
print(statistics.median(took[1:]))
"""


def beside(arguments: argparse.Namespace) -> None:
    model = Path(arguments.model or make_model()).resolve()
    others = {f"{each}_MODEL": "none" for each in ("PIPELINE", "EMBEDDING", "RERANK")}
    with ExitStack() as stack:
        once = said_once(model, stack)
        command = [sys.executable, "-c", ENCODER, once]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        window_s = float(done.stdout)
        say(bench="beside", encoder_window_s=round(window_s, 3))
        settings = {"CHAT_MODEL": arguments.chat_model, "TRANSCRIPTION_MODEL": once}
        launch = onequeue("onequeue", free_port(), settings | others)
        server = stack.enter_context(running("onequeue", launch))
        with server.awake():
            alone, gaps = asyncio.run(measure(server.port, once, an_hour()))
    say(bench="beside", gap="alone", largest_s=round(max(alone), 3), gaps=len(alone))
    ratio = round(max(gaps) / window_s, 2)
    say(
        bench="beside",
        gap="beside an hour of sound",
        largest_s=round(max(gaps), 3),
        gaps=len(gaps),
        windows=ratio,
        target=TARGET,
    )


async def measure(port: int, model: str, sound: bytes) -> tuple[list[float], list[float]]:
    """Gaps in seconds without and beside the recording, which is left in the end."""
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    http = Client(urlsplit(f"http://127.0.0.1:{port}{PATH}"), {"content-type": kind})
    await chats(port, 1.0)
    alone = await chats(port, ALONE_S)
    heard: list[bytes] = []
    recording = asyncio.create_task(http.post(form(model, sound, stream="true"), heard.append))
    gaps = await chats(port, BESIDE_S)
    recording.cancel()
    said = b"".join(heard).count(b"transcript.text.delta")
    if not said:
        raise SystemExit("nothing was transcribed meanwhile")
    say(bench="beside", deltas_of_the_recording=said)
    return alone, gaps


async def chats(port: int, seconds: float) -> list[float]:
    """Gaps between pieces of chats, one after another for so long."""
    url = urlsplit(f"http://127.0.0.1:{port}/v1/chat/completions")
    http, until = Client(url, {"content-type": "application/json"}), time.perf_counter() + seconds
    gaps: list[float] = []
    while time.perf_counter() < until:
        words = [{"role": "user", "content": f"What is the time? {time.time_ns()}"}]
        asked = {"messages": words, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        chat = ChatStream()
        answer = await http.post(json.dumps(asked).encode(), chat.feed)
        if answer.status != 200:
            raise SystemExit(answer.body.decode())
        gaps += [later - earlier for earlier, later in pairwise(chat.times)]
    http.close()
    return gaps


def an_hour() -> bytes:
    """FLAC of quiet noise, a minute of it again and again."""
    minute = np.random.default_rng(1).integers(-64, 64, 60 * RATE, np.int16)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", RATE, 1, format="FLAC") as made:
        for _ in range(MINUTES):
            made.write(minute)
    return file.getvalue()
