"""`bench.py speech`: transcriptions over HTTP beside a plain server around transformers' pipeline,
`transformers serve`, and the pipeline in process. One client and eight, clips of 3 to 60 seconds.

All decode each window once: onequeue gets thresholds that never trigger temperature fallback.
`transformers serve` truncates a recording after 30 seconds; the rest does not count for it. Without
--model, a model of whisper-base's shape with random weights transcribes noise, 100 tokens per
window, about as many as speech has.
"""

import argparse
import asyncio
import importlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import bench_in_process
import environment
import numpy as np
import soundfile
from bench_servers import Launch, Server, free_port, is_ours, onequeue, print_json, running

from server.commands.load_test.http_client import Client

SAMPLING_RATE = 16000
SECONDS = (3, 60, 6, 42, 10, 28, 15, 20)
CLIENTS = (1, 8)
TOKENS = 100  # per window
MAX_TRANSCRIBED_S = {"transformers": 30}  # of each recording
PATH = "/v1/audio/transcriptions"
BOUNDARY = "onequeue-bench"


def speech(arguments: argparse.Namespace) -> None:
    """Measure the real-time factor of each server in turn."""
    model = str(Path(arguments.model or make_model()).resolve())
    factors: dict[tuple[str, int], list[float]] = {}
    names = [name for name in arguments.servers if name != "in-process"]
    with ExitStack() as stack:
        single_pass = without_fallback(Path(model), stack)
        servers = [
            stack.enter_context(running(name, launch(arguments, name, model, single_pass)))
            for name in names
        ]
        models = {name: single_pass if is_ours(name) else model for name in names}
        for server in servers:
            measure(server, models[server.name], clips()[:1], 1)
        for _ in range(arguments.rounds):
            if "in-process" in arguments.servers:
                record(factors, "in-process", 1, bench_in_process.measure("speech", model))
            for server in servers:
                for clients in CLIENTS:
                    seconds = measure(server, models[server.name], clips(), clients)
                    record(factors, server.name, clients, seconds)
    medians = {key: statistics.median(values) for key, values in factors.items()}
    for (name, clients), ours in medians.items():
        if name.startswith("onequeue"):
            ratios = {
                f"{peer}, {count}": round(theirs / ours, 2)
                for (peer, count), theirs in medians.items()
                if count == clients and peer != name
            }
            print_json(bench="speech", server=name, clients=clients, times_as_fast_as=ratios)


def record(
    factors: dict[tuple[str, int], list[float]], name: str, clients: int, wall_s: float
) -> None:
    heard = sum(min(seconds, MAX_TRANSCRIBED_S.get(name, seconds)) for seconds in SECONDS)
    factors.setdefault((name, clients), []).append(wall_s / heard)
    factor = round(wall_s / heard, 4)
    print_json(bench="speech", server=name, clients=clients, real_time_factor=factor, heard_s=heard)


def without_fallback(model: Path, stack: ExitStack) -> str:
    """Return a copy of the checkpoint whose thresholds never trigger temperature fallback."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    settings = json.loads(config.read_text())
    settings |= {"compression_ratio_threshold": 1e9, "logprob_threshold": -1e9}
    config.unlink()
    config.write_text(json.dumps(settings | {"no_speech_threshold": 1.0}))
    return str(folder)


def launch(arguments: argparse.Namespace, name: str, model: str, single_pass: str) -> Launch:
    port, offline = free_port(), {"HF_HUB_OFFLINE": "1"}
    if name == "plain":
        script = str(environment.ROOT / "scripts" / "peers" / "serve_speech.py")
        return Launch([sys.executable, script, model, str(port)], port, "/", offline)
    if name == "transformers":
        program = str(Path(arguments.peer_python).parent / "transformers")
        command = [program, "serve", model, "--port", str(port), "--device", "cpu"]
        return Launch(command, port, "/health", offline)
    others = {f"{kind}_MODEL": "none" for kind in ("CHAT", "PIPELINE", "EMBEDDING", "RERANK")}
    settings = {"TRANSCRIPTION_MODEL": single_pass, "REQUEST_TIMEOUT_S": "600"}
    return onequeue(name, port, settings | others)


def measure(server: Server, model: str, audio: Sequence[bytes], clients: int) -> float:
    """Return the seconds for all clips, of which each client sends one at a time."""
    started = time.perf_counter()
    with server.resumed():
        asyncio.run(transcribe_all(server.port, model, audio, clients))
    return time.perf_counter() - started


async def transcribe_all(port: int, model: str, audio: Sequence[bytes], clients: int) -> None:
    content_type = f"multipart/form-data; boundary={BOUNDARY}"
    http = Client(urlsplit(f"http://127.0.0.1:{port}{PATH}"), {"content-type": content_type})
    remaining = iter(audio)

    async def client() -> None:
        for clip in remaining:
            response = await http.post(form(model, clip), None)
            if response.status != 200:
                raise SystemExit(response.body.decode())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    http.close()


def form(model: str, clip: bytes, **more: str) -> bytes:
    fields = {"model": model, "language": "en", "response_format": "json"} | more
    head = "".join(
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    file = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="clip.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    return f"{head}{file}".encode() + clip + f"\r\n--{BOUNDARY}--\r\n".encode()


def clips() -> list[bytes]:
    """Return WAV files of noise whose loudness changes twice a second."""
    random = np.random.default_rng(1)
    files = []
    for seconds in SECONDS:
        loudness = random.uniform(0.02, 0.5, seconds * 2).repeat(SAMPLING_RATE // 2)
        file = io.BytesIO()
        soundfile.write(
            file, loudness * random.normal(size=loudness.size) / 4, SAMPLING_RATE, format="WAV"
        )
        files.append(file.getvalue())
    return files


def make_model() -> str:
    """Save a model of whisper-base's shape and vocabulary with random weights."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    hf: Any = importlib.import_module("transformers")  # untyped in part
    folder = Path(tempfile.gettempdir()) / "onequeue-bench-whisper-base"
    if folder.exists():
        return str(folder)
    words = sorted(ByteLevel.alphabet())
    words += [f"Ġw{number}" for number in range(len(words), 50257)]
    end, start = 50257, 50258
    vocabulary = {word: number for number, word in enumerate([*words, "<|endoftext|>"])}
    tokenizer = hf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    names = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    special = ["<|startoftranscript|>", *languages, *(f"<|{name}|>" for name in names)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    token_ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    token_ids |= {"decoder_start_token_id": start}
    sizes = {f"{side}_layers": 6 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
    config = hf.WhisperConfig(vocab_size=len(tokenizer), d_model=512, **sizes, **token_ids)
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        max_new_tokens=TOKENS,
        is_multilingual=True,
        lang_to_id={token: ids[token] for token in languages},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        **token_ids,
    )
    for part in (model, tokenizer, hf.WhisperFeatureExtractor()):
        part.save_pretrained(folder)
    return str(folder)
