#!/usr/bin/env python3
"""Compare this server with its alternatives in one run on one machine.

    bench.py http                      a model that takes no time, beside a bare route (needs wrk)
    bench.py pipeline --model PATH     1, 16 and 64 clients, beside the server of transformers'
                                       documentation, LitServe and Mosec (scripts/peers/).
                                       Servers: docs litserve mosec in-process
    bench.py generation --model PATH   streaming chats, beside vLLM, transformers serve and
                                       llama.cpp. Servers: vllm transformers llama:GGUF
    bench.py perplexity --model PATH   of one text, by each onequeue
    bench.py vision                    streaming chats with an image each, beside the same
    bench.py speech                    transcriptions of clips, beside a server around the pipeline,
                                       transformers serve (the first 30 s of each) and the pipeline.
                                       Servers: plain transformers in-process
    bench.py beside                    the longest gap in chats while an hour of audio is
                                       transcribed, beside the time of the encoder for one window
    bench.py embeddings --model PATH   texts of 4 to 200 words, beside sentence-transformers.
                                       Servers: vllm infinity:INFINITY_EMB in-process
    bench.py rerank --model PATH       100 documents, beside CrossEncoder.predict
    bench.py decisions --model PATH    200 questions, beside transformers' decision pipeline
    bench.py host                      up to 1,024 streaming chats of a model that computes nothing:
                                       the CPU time of a token, by thread. A step's milliseconds:
                                       --servers onequeue:SIMULATED_MODEL=14

To measure a change, compare two checkouts: --servers onequeue onequeue@../other-checkout. All
servers start and compile before the first measurement. They take turns, and the others are
suspended. Where memory does not hold all of them, and on a GPU, they run one after another. Servers
get the same requests, each request once; "in-process" gets those of one client. Each measurement is
one JSON line; then come ratios, and a table of medians. Responses are not checked.
"""

import argparse
import io
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import environment  # first: may start the script again with .venv
from bench_floor import measure_floor
from bench_models import IMAGE_SIDE, SHAPES, make_model
from bench_servers import (
    Server,
    cpu_seconds,
    finish_load_test,
    is_ours,
    launch,
    other_cpu_seconds,
    print_json,
    running,
    start_load_test,
)

from server.commands.load_test.request_bodies import WORDS

T = TypeVar("T")
GB = 1e9
MAX_OTHER_CORES = 0.1  # that other processes may use during a measurement
TEXT = "The capital of France is [MASK]."
TEXT_CHARS = 4500  # of the text whose perplexity is measured: some 1,000 tokens
QUERY = "which morning keeps the quiet garden beside the river"
CLIPS_S = (3, 60, 6, 42, 10, 28, 15, 20)
SAMPLING_RATE = 16000
TRANSFORMERS_S = 30  # of a recording that `transformers serve` transcribes

Arguments = argparse.Namespace
Figures = dict[str, float]  # the first is the one that is compared


class Load(NamedTuple):
    """Requests of one kind: `labels` name it, `flags` are those of `onequeue load`."""

    labels: dict[str, Any]
    flags: dict[str, Any]
    path: str = ""
    units: float = 1.0  # texts or seconds of audio in a request
    background: Mapping[str, Any] = MappingProxyType({})  # flags of a load beside it


class Bench(NamedTuple):
    """Servers by default, what each onequeue serves, and loads for a seed in each round."""

    servers: Sequence[str]
    settings: dict[str, str]  # of each onequeue, where MODEL is the model
    loads: Callable[[Arguments, int], Iterator[Load]]
    measure: Callable[[Server, Load, Arguments], Figures]
    clients: Sequence[int] = (1,)
    model: str = ""  # of random weights, by default
    task: str = ""  # of "in-process"


Labels = tuple[tuple[str, Any], ...]  # of a load
Measured = dict[Labels, dict[str, list[Figures]]]  # by server, one per round
Medians = dict[Labels, dict[str, Figures]]


# ── requests ──


def texts(arguments: Arguments, seed: int) -> Iterator[Load]:
    for clients in arguments.clients:
        flags = {"--words": "4-60", "--mask": "[MASK]", "--concurrency": clients}
        yield Load(
            {"clients": clients},
            flags | {"--requests": min(256, 10 * arguments.requests * clients)},
        )


def chat_flags(arguments: Arguments, clients: int, temperature: float) -> dict[str, Any]:
    fields = {"temperature": temperature} | ({} if arguments.questions else {"ignore_eos": True})
    return {
        "--kind": "chat",
        "--stream": True,
        "--model": arguments.model,
        "--max-tokens": arguments.tokens,
        "--concurrency": clients,
        "--requests": max(clients, 4) * arguments.requests,
        "--fields": json.dumps(fields),
    }


def chats(arguments: Arguments, seed: int) -> Iterator[Load]:
    """Yield loads of random words, or of questions, whose responses end where the model ends."""
    lengths = ["questions"] if arguments.questions else arguments.prompt_words
    for words, temperature, clients in product(lengths, arguments.temperature, arguments.clients):
        flags = chat_flags(arguments, clients, temperature) | {"--words": words}
        if arguments.questions:
            del flags["--words"]
            asked = questions(flags["--requests"] + clients, f"{seed} {temperature} {clients}")
            flags["--texts"] = saved(arguments, f"questions-{clients}.txt", "\n".join(asked))
        yield Load({"words": words, "temperature": temperature, "clients": clients}, flags)


def simulated_chats(arguments: Arguments, seed: int) -> Iterator[Load]:
    for clients in arguments.clients:
        flags = chat_flags(arguments, clients, 1) | {"--model": "demo", "--words": "8-20"}
        yield Load({"clients": clients}, flags)


def questions(count: int, seed: str) -> list[str]:
    """Return different questions. Each begins with its subjects, so that no prefix is cached."""
    rng, file = random.Random(seed), Path(__file__).with_name("bench_questions.txt")
    kinds, things, *endings = file.read_text().splitlines()
    subjects = [f"{kind} {thing}" for kind in kinds.split() for thing in things.split()]
    return [
        f"Topics: {subject} and {rng.choice(things.split())}. {rng.choice(endings)}"
        for subject in rng.sample(subjects, count)
    ]


def images(arguments: Arguments, seed: int) -> Iterator[Load]:
    for same, clients in product((False, True), arguments.clients):
        flags = chat_flags(arguments, clients, 0) | {"--words": 12, "--picture": IMAGE_SIDE}
        flags |= {"--requests": max(clients, 3) * arguments.requests}
        flags |= {"--same-picture": True} if same else {}
        yield Load({"image": "same" if same else "new", "clients": clients}, flags)


def clips(arguments: Arguments, seed: int) -> Iterator[Load]:
    files = [saved(arguments, f"{n}.wav", sound(n, seconds)) for n, seconds in enumerate(CLIPS_S)]
    for clients in arguments.clients:
        flags = upload_flags(arguments, files) | {"--concurrency": clients}
        flags |= {"--requests": len(files)}
        yield Load(
            {"clients": clients}, flags, "/v1/audio/transcriptions", statistics.mean(CLIPS_S)
        )


def upload_flags(arguments: Arguments, files: list[str], **more: str) -> dict[str, Any]:
    fields = {"language": "en", "response_format": "json"} | more
    return {
        "--kind": "upload",
        "--file": files,
        "--model": arguments.model,
        "--fields": json.dumps(fields),
    }


def sound(seed: int, seconds: int, loudness: float = 0.25) -> bytes:
    """Return a WAV or, for an hour, a FLAC file of noise, whose loudness changes twice a second."""
    import numpy as np
    import soundfile

    rng, file = np.random.default_rng(seed), io.BytesIO()
    steps = rng.uniform(0.08, 2, seconds * 2).repeat(SAMPLING_RATE // 2)
    noise = loudness * steps * rng.normal(size=steps.size) / 4
    soundfile.write(file, noise, SAMPLING_RATE, format="WAV" if seconds < 3600 else "FLAC")
    return file.getvalue()


def chats_beside(arguments: Arguments, seed: int) -> Iterator[Load]:
    hour = saved(arguments, "hour.flac", sound(1, 3600, 0.01))
    flags = {"--kind": "chat", "--stream": True, "--max-tokens": 100, "--duration": 25}
    flags["--fields"] = json.dumps({"ignore_eos": True})
    upload = upload_flags(arguments, [hour], stream="true") | {"--duration": 3600}
    yield Load({"load": "alone"}, flags | {"--duration": 5})
    yield Load({"load": "beside an hour of sound"}, flags, background=upload)


def documents(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 200))) for _ in range(count)]


def embeddings(arguments: Arguments, seed: int) -> Iterator[Load]:
    """Yield 256 texts as OpenAI's clients request them: alone, 32 in a list, and in one list."""
    options = {"encoding_format": "base64", "model": arguments.model}
    for size, clients in ((1, arguments.clients[0]), (32, 1), (256, 1)):
        inputs = documents(256 + size, seed)
        bodies = [{"input": inputs[n : n + size]} | options for n in range(0, len(inputs), size)]
        yield posted(arguments, {"texts": size, "clients": clients}, "/v1/embeddings", bodies, size)


def reranking(arguments: Arguments, seed: int) -> Iterator[Load]:
    bodies = [{"query": QUERY, "documents": documents(100, 2 * seed + n)} for n in range(2)]
    yield posted(arguments, {"documents": 100}, "/rerank", bodies, 100)


def decisions(arguments: Arguments, seed: int) -> Iterator[Load]:
    """Yield choices and scores about an input of 1,000 tokens, all in a request."""
    from transformers import AutoTokenizer

    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(arguments.model)
    bodies = []
    for count in (2, 200):
        ids = tokenizer(" ".join(rng.choices(WORDS.split(), k=1000)))["input_ids"][:1000]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        bodies.append({"input": text, "questions": [decision(rng, n) for n in range(count)]})
    yield posted(arguments, {"questions": 200}, "/v1/decisions", bodies)


def decision(rng: random.Random, number: int) -> dict[str, Any]:
    words = WORDS.split()
    about = f"Is it about {' '.join(rng.choices(words, k=8))}?"
    question: dict[str, Any] = {"name": f"q{number}", "instructions": about}
    if number % 2:
        choices = [{"value": word} for word in rng.sample(words, k=4)]
        return question | {"type": "choice", "choices": choices}
    levels = [{"label": label} for label in ("not at all", "a little", "much")]
    return question | {"type": "score", "levels": levels}


def posted(
    arguments: Arguments, labels: dict[str, Any], path: str, bodies: list[Any], units: float = 1
) -> Load:
    """Return a load of JSON bodies, each sent once; the first is the warm-up."""
    files = [
        saved(arguments, f"{n}-{len(bodies)}.json", json.dumps(body))
        for n, body in enumerate(bodies)
    ]
    flags = {"--kind": "file", "--file": files, "--requests": len(files) - 1, "--warmup": 1}
    return Load(labels, flags | {"--concurrency": labels.get("clients", 1)}, path, units)


def saved(arguments: Arguments, name: str, content: str | bytes) -> str:
    file = Path(arguments.folder) / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def nothing(arguments: Arguments, seed: int) -> Iterator[Load]:
    yield Load({}, {})


# ── measurements ──


def run(server: Server, load: Load, arguments: Arguments) -> dict[str, Any]:
    """Run a load on a server, or in this process's place on the library."""
    flags = {"--timeout": 600, "--warmup": arguments.warmup, "--seed": arguments.seed} | load.flags
    path, program, name = load.path, ["scripts/load_test.py"], server.name
    if name == "in-process":
        task = BENCHES[arguments.bench].task
        program = ["scripts/peers/in_process.py", task, arguments.model]
        flags = {"--requests": 6, "--warmup": 1} if task == "encoder" else flags
    elif name == "litserve":
        path, flags = "/predict", flags | {"--kind": "json", "--json-key": "text"}
    elif name == "mosec":
        path = "/inference"
    elif name.startswith("llama:"):
        flags["--header"] = "connection: close"  # which it does, and does not announce
    elif name == "transformers" and "--fields" in flags and "--max-tokens" in flags:
        fields = json.loads(flags["--fields"])
        limits = {"max_new_tokens": arguments.tokens, "do_sample": fields["temperature"] > 0}
        limits |= {"min_new_tokens": arguments.tokens} if fields.pop("ignore_eos", False) else {}
        flags["--fields"] = json.dumps(fields | {"generation_config": json.dumps(limits)})
    if is_ours(name) and flags.get("--kind") == "upload":
        flags["--model"] = arguments.single_pass
    with ExitStack() as stack:
        stack.enter_context(server.resumed())
        if load.background and is_ours(name):
            upload = dict(load.background) | {"--model": arguments.single_pass, "--timeout": 3600}
            beside = start_load_test(program, server.port, "", upload)
            stack.callback(finish_load_test, beside)
            stack.callback(beside.terminate)
        return finish_load_test(start_load_test(program, server.port, path, flags))


def rates(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return the throughput: requests, texts or seconds of audio per second."""
    result, units = run(server, load, arguments), load.units
    if arguments.bench == "speech" and server.name == "transformers":
        units = statistics.mean(min(seconds, TRANSFORMERS_S) for seconds in CLIPS_S)
    latency = result["latency_ms"]
    return {
        "per_s": result["ok_per_s"] * units,
        "p50_ms": latency["p50"],
        "p95_ms": latency["p95"],
    }


def tokens(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return tokens/s, their share of the floor, the times to and between tokens, and counts."""
    before = token_counts(server)
    result = run(server, load, arguments)
    after = token_counts(server)
    gained = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    rate, ok = result["output_tokens_per_s"], result["ok"]
    prompt, output = result["prompt_tokens"] / ok, result["output_tokens"] / ok
    figures = {"tokens_per_s": rate}
    if arguments.floor:
        clients, context = load.labels["clients"], prompt + output / 2
        figures["of_floor"] = arguments.floor.share(rate, clients, context)
    for name in ("ttft_ms", "inter_token_ms"):
        values = result[name] or {}
        figures |= {f"{name[:-3]}_{part}_ms": values.get(part, 0) for part in ("p50", "p95")}
    figures |= {"prompt_tokens": prompt, "output_tokens": output}
    if gained:
        figures["accepted_share"] = gained.get("accepted", 0) / max(gained.get("output", 0), 1)
        figures["prompt_tokens_run"] = gained.get("prompt", 0)
        figures["prompt_tokens_reused"] = gained.get("cached", 0)
    return figures


def host_times(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return tokens/s, the time to the first one, and the CPU time of a token: of the server, of
    its event loop, of its worker, which takes most of the rest, and of the load generator."""
    assert server.process
    pid, tasks = server.process.pid, Path(f"/proc/{server.process.pid}/task")
    before = {thread: seconds for thread, _, seconds in cpu_seconds(tasks.glob("*/stat"))}
    load_s = os.times().children_user
    result = run(server, load, arguments)
    load_s = os.times().children_user - load_s
    after = cpu_seconds(tasks.glob("*/stat"))
    used = {thread: seconds - before.get(thread, 0.0) for thread, _, seconds in after}
    loop = used.pop(pid)  # the main thread
    times = {"cpu": loop + sum(used.values()), "loop": loop, "worker": max(used.values())}
    us = {
        f"{name}_us": 1e6 * seconds / result["output_tokens"]
        for name, seconds in (times | {"load": load_s}).items()
    }
    first = {f"ttft_{part}_ms": result["ttft_ms"][part] for part in ("p50", "p95")}
    return {"tokens_per_s": result["output_tokens_per_s"]} | us | first


def token_counts(server: Server) -> dict[str, float]:
    """Return onequeue_tokens_total by kind."""
    if not is_ours(server.name):
        return {}
    url = f"http://127.0.0.1:{server.port}/metrics"
    with server.resumed(), urllib.request.urlopen(url) as response:
        lines = response.read().decode().splitlines()
    totals = (line for line in lines if line.startswith("onequeue_tokens_total{"))
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in totals}


def longest_gap(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return the longest gap between two chunks of a chat; "in-process" one window's median."""
    result = run(server, load, arguments)
    if server.name == "in-process":
        return {"longest_ms": result["latency_ms"]["p50"]}
    return {"longest_ms": result["inter_token_ms"]["max"]}


def wrk(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return requests per second with 16 connections over 5 seconds."""
    script = saved(arguments, "wrk.lua", f'wrk.method="POST"; wrk.body="{TEXT}"')
    command = ["wrk", "-t1", "-c16", "-d5", "-s", script, f"http://127.0.0.1:{server.port}/"]
    with server.resumed():
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    rate = next(line for line in lines if line.startswith("Requests/sec")).split()[1]
    return {"per_s": float(rate)}


def perplexity(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Return the perplexity of a text by the log-probabilities of its tokens."""
    text = (environment.ROOT / "docs" / "architecture.md").read_text()[:TEXT_CHARS]
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with server.resumed(), urllib.request.urlopen(request) as response:
        logprobs = json.load(response)["choices"][0]["logprobs"]["token_logprobs"][1:]
    return {"perplexity": math.exp(-statistics.mean(logprobs)), "tokens": len(logprobs)}


# ── the table of benchmarks ──

# Names in capitals stand for the values that `started` has.
CHAT = {"CHAT_MODEL": "MODEL", "DTYPE": "bfloat16", "REQUEST_TIMEOUT_S": "600"}
FILL_MASK = {"PIPELINE_TASK": "fill-mask", "PIPELINE_MODEL": "MODEL"}
SPEECH = {"TRANSCRIPTION_MODEL": "SINGLE_PASS", "REQUEST_TIMEOUT_S": "600"}
BESIDE = SPEECH | {"CHAT_MODEL": "demo", "REQUEST_TIMEOUT_S": "3600"}
EMBEDDING = {"EMBEDDING_MODEL": "MODEL", "DTYPE": "float32"}
RERANK = {"RERANK_MODEL": "MODEL", "DTYPE": "float32"}
HOST = {"CHAT_MODEL": "demo", "SIMULATED_MODEL": "0", "MAX_RUNNING": "1024"}
HOST |= {"MAX_QUEUE_SIZE": "4096", "REQUEST_TIMEOUT_S": "600", "COMPILE": "off"}
BOTH = ["onequeue", "in-process"]
OURS = ["onequeue", "onequeue:QUANTIZATION=int8", "onequeue:QUANTIZATION=int4"]
PEERS = ["onequeue", "vllm", "transformers"]
FLOAT32, BFLOAT16 = "onequeue:DTYPE=float32", "onequeue:DTYPE=bfloat16"
INSTANT = ["instant", "instant:MAX_BATCH_WAIT_MS=0", "bare"]
PIPELINES = [FLOAT32, BFLOAT16, "docs", "litserve", "mosec"]
SPEAKERS = ["onequeue", "plain", "transformers", "in-process"]
BENCHES = {
    "http": Bench(INSTANT, {}, nothing, wrk),
    "pipeline": Bench(PIPELINES, FILL_MASK, texts, rates, (1, 16, 64), "bert-base", "fill_mask"),
    "generation": Bench(PEERS, CHAT, chats, tokens, (1, 8, 16)),
    "perplexity": Bench(OURS, CHAT, nothing, perplexity),
    "vision": Bench(PEERS, CHAT, images, tokens, (1, 8, 16), "smolvlm"),
    "speech": Bench(SPEAKERS, SPEECH, clips, rates, (1, 8), "whisper-base", "speech"),
    "beside": Bench(BOTH, BESIDE, chats_beside, longest_gap, (1,), "whisper-base", "encoder"),
    "embeddings": Bench(BOTH, EMBEDDING, embeddings, rates, (16,), task="embeddings"),
    "rerank": Bench(BOTH, RERANK, reranking, rates, task="rerank"),
    "decisions": Bench(BOTH, {"CHAT_MODEL": "MODEL"}, decisions, rates, task="decisions"),
    "host": Bench(["onequeue"], HOST, simulated_chats, host_times, (1, 16, 64, 256, 1024)),
}


def measure_all(arguments: Arguments) -> Measured:
    """Measure each server in turn under each load in each round."""
    bench, measured = BENCHES[arguments.bench], Measured()
    for names in groups(arguments.servers, arguments.weight_bytes, arguments.memory):
        with ExitStack() as stack:
            servers = [stack.enter_context(started(arguments, name)) for name in names]
            for round_ in range(arguments.rounds):
                arguments.warmup, first = 1 if round_ else 4, round_ % len(servers)
                for seed, load in enumerate(bench.loads(arguments, round_), 1000 * round_):
                    arguments.seed = seed
                    for server in servers[first:] + servers[:first]:
                        if server.process or load.flags.get("--concurrency", 1) == 1:
                            figures = measure(server, load, arguments)
                            of_load = measured.setdefault((*load.labels.items(),), {})
                            of_load.setdefault(server.name, []).append(figures)
    return measured


def measure(server: Server, load: Load, arguments: Arguments) -> Figures:
    """Measure one load on one server, and the cores that other processes use meanwhile."""
    own = {os.getsid(0)} | ({server.process.pid} if server.process else set())
    since, other_s = time.perf_counter(), other_cpu_seconds(own)
    figures = BENCHES[arguments.bench].measure(server, load, arguments)
    seconds = time.perf_counter() - since
    figures["others_cores"] = (other_cpu_seconds(own) - other_s) / seconds
    figures = {name: round(value, 3) for name, value in figures.items()}
    print_json(bench=arguments.bench, server=server.name, **load.labels, **figures)
    return figures


def started(arguments: Arguments, name: str) -> AbstractContextManager[Server]:
    if name == "in-process":
        return nullcontext(Server(name, 1, None))
    values = {"MODEL": arguments.model, "SINGLE_PASS": arguments.single_pass}
    kinds = ("CHAT", "PIPELINE", "EMBEDDING", "RERANK")
    settings = {f"{kind}_MODEL": "none" for kind in kinds}
    of_bench = BENCHES[arguments.bench].settings
    settings |= {key: values.get(value, value) for key, value in of_bench.items()}
    if arguments.bench in ("generation", "vision", "perplexity") and not arguments.on_gpu:
        settings["KV_CACHE_GB"] = "2"  # on a GPU each server chooses
    return running(name, launch(arguments, name, arguments.model, settings))


def groups(names: list[str], weight_bytes: float, free_bytes: float) -> list[list[str]]:
    """Return the servers that run together: all, if memory has three copies of the weights and
    2 GB for each; one copy and 1 GB for llama.cpp's."""
    llamas = sum(name.startswith("llama:") for name in names)
    needed = (len(names) - llamas) * (3 * weight_bytes + 2 * GB) + llamas * (weight_bytes + GB)
    return [names] if needed < free_bytes else [[name] for name in names]


def free_memory() -> int:
    """Return the available bytes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if "MemAvailable" in line)


def without_fallback(model: str, folder: str) -> str:
    """Return a copy of a speech model whose thresholds never trigger temperature fallback, so that
    each window is decoded once, as by the peers."""
    copy = Path(folder) / "single-pass"
    copy.mkdir()
    for file in Path(model).iterdir():
        (copy / file.name).symlink_to(file)
    config = copy / "generation_config.json"
    settings = json.loads(config.read_text())
    settings |= {"compression_ratio_threshold": 1e9, "logprob_threshold": -1e9}
    config.unlink()
    config.write_text(json.dumps(settings | {"no_speech_threshold": 1.0}))
    return str(copy)


# ── the report ──


def report(measured: Measured, arguments: Arguments) -> None:
    values = medians(measured)
    for line in ratios(values):
        print_json(bench=arguments.bench, **line)
    floor, cores = arguments.floor, len(os.sched_getaffinity(0))
    header = f"{(floor and floor.gpu) or cpu()}, {cores} cores."
    header += f" {Path(arguments.model).name}." if arguments.model else ""
    if floor:
        rate, size = floor.bytes_per_s / GB, floor.weight_bytes / GB
        header += f" {size:.3f} GB of weights at {rate:.1f} GB/s, a step of"
        header += f" {1000 * floor.step_s:.2f} ms."
    others = max(row["others_cores"] for servers in values.values() for row in servers.values())
    if others > MAX_OTHER_CORES:
        header += f" NOT QUIET: other processes used {others:.1f} cores."
    print("\n" + header + "\n\n" + "\n".join(table(values)))


def medians(measured: Measured) -> Medians:
    return {
        labels: {name: median(runs) for name, runs in servers.items()}
        for labels, servers in measured.items()
    }


def median(runs: list[Figures]) -> Figures:
    """Return medians over the rounds, of others_cores the maximum."""
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return figures | {"others_cores": max(run["others_cores"] for run in runs)}


def ratios(values: Medians) -> Iterator[dict[str, Any]]:
    """Compare each onequeue with the servers named after it, figure by figure."""
    for labels, servers in values.items():
        for name, other in pairs(list(servers)):
            ours, theirs = servers[name], servers[other]
            shared = [key for key in ours if theirs.get(key) and key != "others_cores"]
            times = {key: round(ours[key] / theirs[key], 2) for key in shared}
            yield dict(labels) | {"server": name, "beside": other, "times": times}


def pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each onequeue with the later servers of as many bits per weight, or with all later
    ones if there are none."""
    for index, name in enumerate(names):
        if is_ours(name):
            later = names[index + 1 :]
            for other in [other for other in later if bits(other) == bits(name)] or later:
                yield name, other


def bits(name: str) -> str:
    """Return the bits of a quantized weight by a server's name, "8" or "4", otherwise ""."""
    found = re.search("(?:int|-Q)([48])", name)
    return found[1] if found else ""


def table(values: Medians) -> Iterator[str]:
    """Yield Markdown lines: a row for each load and server, a column for each figure."""
    rows = [
        dict(labels) | {"server": name} | figures
        for labels, servers in values.items()
        for name, figures in servers.items()
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "others_cores"))
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(cell(row.get(name, "")) for name in columns) + " |"


def cell(value: Any) -> str:
    """Write numbers with three digits or more."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cpu() -> str:
    """Return the CPU's model name."""
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, sys.platform)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("bench", choices=list(BENCHES))
    shapes = ", ".join(SHAPES)
    add("--model", help=f"the path of a checkpoint; generation: or {shapes}, of random weights")
    add("--servers", nargs="+", help="names from above; onequeue[@CHECKOUT][:SETTING=VALUE,…]")
    add("--rounds", type=int, default=3)
    add("--clients", type=list_of(int), metavar="N,…", help="in a closed loop")
    add("--requests", type=int, default=3, help="per client")
    python = "a Python with the packages of docs, litserve, mosec, plain and transformers"
    add("--peer-python", default=sys.executable, help=python)
    add("--vllm", default="vllm", help="the vllm command")
    add("--llama", default="llama-server", help="the program for llama:GGUF")
    add("--temperature", type=list_of(float), default=[1, 0], metavar="N,…", help="1,0")
    add("--prompt-words", type=list_of(int), default=[64], metavar="N,…", help="64")
    add("--questions", action="store_true", help="ask questions; responses may end early")
    add("--tokens", type=int, default=32, help="of each response, at most")
    arguments = parser.parse_args()
    bench = BENCHES[arguments.bench]
    arguments.servers = arguments.servers or bench.servers
    arguments.clients = arguments.clients or bench.clients
    if arguments.bench == "http" and not shutil.which("wrk"):
        raise SystemExit("wrk is needed: apt-get install wrk")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the exits that stop servers
    with tempfile.TemporaryDirectory() as arguments.folder:
        choose_model(arguments, bench)
        report(measure_all(arguments), arguments)


def choose_model(arguments: Arguments, bench: Bench) -> None:
    """Make the model if it is one of random weights; measure what its size implies."""
    name = arguments.model or bench.model
    if not name and arguments.bench not in ("http", "host"):
        raise SystemExit("--model is needed: the path of a checkpoint")
    if name in SHAPES or (not arguments.model and name):
        name = make_model(name)
    arguments.model = str(Path(name).resolve()) if name else ""
    arguments.single_pass = arguments.floor = None
    if arguments.bench in ("speech", "beside"):
        arguments.single_pass = without_fallback(arguments.model, arguments.folder)
    if arguments.bench == "generation":
        arguments.floor = measure_floor(Path(arguments.model))
    arguments.on_gpu = bool(arguments.floor and arguments.floor.gpu)
    arguments.weight_bytes = arguments.floor.weight_bytes if arguments.floor else 0
    arguments.memory = 0 if arguments.on_gpu else free_memory()


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
