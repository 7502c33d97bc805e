"""`bench.py generation`: streaming chats on the same checkpoint, beside other servers.

All servers start and compile before the first measurement. One runs at a time, in turn under each
load. On a GPU, and where memory does not hold all of them, they are started one after another. Each
prompt is sent to a server once, so that no prefix or response is cached. A model of random weights
is made where `--model` names a shape. With `--questions` prompts are questions, not random words,
and a response ends where the model ends it.
"""

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench_floor import Floor, measure_floor
from bench_models import SHAPES, make_model
from bench_servers import (
    Launch,
    Server,
    free_port,
    is_ours,
    onequeue,
    other_cpu_seconds,
    print_json,
    run_load_test,
    running,
)
from bench_table import Runs, Sweep, ratios, summaries, table

SYSTEM = " ".join(f"Rule {n}: be brief." for n in range(330))  # some 2,000 tokens
TEXT_CHARS = 4500  # some 1,000 tokens
GB = 1e9
MAX_OTHER_CORES = 0.1  # that other processes may use during a measurement
LLAMA_FLAGS = ("-np", "16", "-c", "16384", "-t", "2")  # slots, their tokens in all, threads
QUESTIONS = """\
Tell a short story in which both play a part.
List ten facts about the first in a numbered list, then one about the second.
Write a Python class that stores data about both, with a docstring and an example.
Compare them in a Markdown table of five rows.
Write one sentence about them, and translate it into French and Spanish.
Explain the history of the first to a student, and how the second changed it.
Write a polite e-mail that asks a museum whether it shows them.
Give reasons for and against them as two lists with bullet points.
Write a poem of twelve lines about the first.
Write a JSON array with three examples of each.
Which of them would you show to a child, and why? Answer in two sentences.
Write a SQL query that counts the rows of a table for each, and explain it.""".splitlines()
KINDS = (
    "old modern small famous broken Japanese Roman wooden electric forgotten expensive northern "
    "blue medieval portable silent African dangerous round cheap"
)
THINGS = (
    "lighthouses bicycles clocks violins bridges gardens kites maps mirrors boats kitchens radios "
    "castles lamps puppets trains windmills libraries coins tents drums statues tunnels chairs "
    "telescopes markets letters ovens gates parks"
)


def generation(arguments: argparse.Namespace) -> None:
    if not arguments.model:
        shapes = ", ".join(SHAPES)
        raise SystemExit(f"--model is needed: the path of a chat checkpoint, or {shapes}")
    if arguments.model in SHAPES:
        arguments.model = make_model(arguments.model)
    model = Path(arguments.model).resolve()
    floor = measure_floor(model, arguments.dtype)
    memory = 0 if floor.gpu else free_memory()
    runs: Runs = {}
    for names in groups(arguments.servers, floor.weight_bytes, memory):
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(
                    running(name, launch(arguments, name, str(model), bool(floor.gpu)))
                )
                for name in names
            ]
            for round_ in range(arguments.rounds):
                for sweep in sweeps(arguments):
                    for server in rotated(servers, round_):
                        measure(runs, server, sweep, round_, arguments)
            for server in servers if arguments.shared_prompt else ():
                if is_ours(server.name):
                    shared_prompt(server, str(model))
    report(runs, floor, arguments)


def groups(names: list[str], weight_bytes: int, free_bytes: int) -> list[list[str]]:
    """Return the servers that run together: all, if memory has three copies of the weights and
    2 GB for each; one copy and 1 GB for llama.cpp's."""
    llamas = sum(name.startswith("llama:") for name in names)
    needed = (len(names) - llamas) * (3 * weight_bytes + 2 * GB) + llamas * (weight_bytes + GB)
    return [names] if needed < free_bytes else [[name] for name in names]


def rotated(servers: list[Server], count: int) -> list[Server]:
    """Return the servers in another order in each round."""
    first = count % len(servers)
    return servers[first:] + servers[:first]


def free_memory() -> int:
    """Return the available bytes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if "MemAvailable" in line)


def launch(arguments: argparse.Namespace, name: str, model: str, on_gpu: bool = False) -> Launch:
    """Return how to launch a server. On a GPU each chooses the size of its cache."""
    dtype, port, offline = arguments.dtype, free_port(), {"HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        command = [arguments.vllm, "serve", model, "--port", str(port), "--dtype", dtype]
        path = f"{Path(arguments.vllm).parent}:{os.environ['PATH']}"
        environ = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "PATH": path}
        return Launch([*command, "--max-model-len", "4096"], port, "/health", offline | environ)
    if name.startswith("llama:"):
        gguf = str(Path(name.removeprefix("llama:")).resolve())
        command = [arguments.llama, "-m", gguf, "--port", str(port), *LLAMA_FLAGS]
        return Launch(command, port, "/health", {})
    if name == "transformers":
        program = [arguments.peer_python, "-m", "transformers.cli.transformers"]
        command = [*program, "serve", model, "--port", str(port), "--dtype", dtype]
        command += ["--continuous-batching", "--device", "cuda" if on_gpu else "cpu"]
        command += [] if on_gpu else ["--cb-max-memory-percent", "0.1"]
        return Launch(command, port, "/health", offline)
    settings = {"CHAT_MODEL": model, "PIPELINE_MODEL": "none", "DTYPE": dtype}
    if not on_gpu:
        settings["KV_CACHE_GB"] = "2"
    settings["EMBEDDING_MODEL"] = "none"
    settings["REQUEST_TIMEOUT_S"] = "600"  # as the load test's own
    return onequeue(name, port, settings)


def sweeps(arguments: argparse.Namespace) -> Iterator[Sweep]:
    lengths = [0] if arguments.questions else arguments.prompt_words
    for words, temperature, clients in product(lengths, arguments.temperature, arguments.clients):
        yield Sweep(words, temperature, clients)


def measure(
    runs: Runs, server: Server, sweep: Sweep, round_: int, arguments: argparse.Namespace
) -> None:
    """Run one load on one server. All servers get the same prompts, each prompt once."""
    tokens, clients = arguments.tokens, sweep.clients
    requests, warmup = max(clients, 4) * arguments.requests, 1 if round_ else clients
    seed = hash((round_, sweep)) % 2**32
    fields: dict[str, Any] = {"temperature": sweep.temperature}
    if not arguments.questions:
        fields["ignore_eos"] = True
    if server.name == "transformers":
        limits = {"max_new_tokens": tokens, "do_sample": sweep.temperature > 0}
        if not arguments.questions:
            limits["min_new_tokens"] = tokens
        fields = {"temperature": sweep.temperature, "generation_config": json.dumps(limits)}
    flags: dict[str, Any] = {
        "--kind": "chat",
        "--model": str(Path(arguments.model).resolve()),
        "--max-tokens": tokens,
        "--concurrency": clients,
        "--requests": requests,
        "--warmup": warmup,
        "--seed": seed,
        "--timeout": 600,
        "--fields": json.dumps(fields),
    }
    if server.name.startswith("llama:"):
        flags["--header"] = "connection: close"  # which it does, and does not announce
    own, started = {server.process.pid, os.getsid(0)}, time.perf_counter()
    other_s = other_cpu_seconds(own)
    with server.resumed(), tempfile.NamedTemporaryFile("w", suffix=".txt") as texts:
        if arguments.questions:
            texts.write("\n".join(questions(warmup + requests, seed)))
            texts.flush()
            flags["--texts"] = texts.name
        else:
            flags["--words"] = sweep.words
        words = [str(word) for pair in flags.items() for word in pair]
        before = token_counts(server.port) if is_ours(server.name) else {}
        run = run_load_test(server.port, "", "--stream", *words)
        after = token_counts(server.port) if is_ours(server.name) else {}
    seconds = time.perf_counter() - started
    run["accepted_share"] = accepted_share(before, after)
    run["others_cores"] = round((other_cpu_seconds(own) - other_s) / seconds, 2)
    runs.setdefault(sweep, {}).setdefault(server.name, []).append(run)
    print_json(
        bench="generation",
        server=server.name,
        **sweep._asdict(),
        output_tokens_per_s=run["output_tokens_per_s"],
        output_tokens=run["output_tokens"],
        accepted_share=round(run["accepted_share"], 3),
        ttft_ms=run["ttft_ms"],
        inter_token_ms=run["inter_token_ms"],
        others_cores=run["others_cores"],
    )


def questions(count: int, seed: int) -> list[str]:
    """Return different questions. Each begins with its subjects, so that no prefix is cached."""
    rng = random.Random(seed)
    things = THINGS.split()
    subjects = [f"{kind} {thing}" for kind in KINDS.split() for thing in things]
    return [
        f"Topics: {subject} and {rng.choice(things)}. {rng.choice(QUESTIONS)}"
        for subject in rng.sample(subjects, count)
    ]


def accepted_share(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the share of the output tokens that are accepted draft tokens."""
    gained = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    return gained.get("accepted", 0) / max(gained.get("output", 0), 1)


def report(runs: Runs, floor: Floor, arguments: argparse.Namespace) -> None:
    rate, size = floor.bytes_per_s / GB, floor.weight_bytes / GB
    cores, step_ms = len(os.sched_getaffinity(0)), 1000 * floor.step_s
    machine = (
        f"{floor.gpu or cpu()}, {cores} cores. {Path(arguments.model).name}, {arguments.dtype}"
    )
    header = f"{machine}: {size:.3f} GB of weights at {rate:.1f} GB/s, a step of {step_ms:.2f} ms."
    measured = summaries(runs, floor)
    rows = [row for servers in measured.values() for row in servers.values()]
    other_cores = max(row["others_cores"] for row in rows)
    if other_cores > MAX_OTHER_CORES:
        header += f" NOT QUIET: other processes used {other_cores:.1f} cores."
    for line in ratios(measured):
        print_json(bench="generation", **line)
    print("\n" + header + "\n\n" + "\n".join(table(measured)))
    if arguments.json:
        document = {
            "machine": machine,
            "weight_bytes": floor.weight_bytes,
            "bytes_per_s": floor.bytes_per_s,
            "figures": [
                sweep._asdict() | {"servers": servers} for sweep, servers in measured.items()
            ],
            "ratios": ratios(measured),
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def cpu() -> str:
    """Return the CPU's model name."""
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, sys.platform)


def shared_prompt(server: Server, model: str) -> None:
    """Count the prompt tokens that run for sixteen concurrent chats with one system message."""
    with server.resumed():
        before = token_counts(server.port)
        flags = ["--stream", "--model", model, "--max-tokens", "32", "--system", SYSTEM]
        chats = ["--concurrency", "16", "--requests", "16", "--timeout", "600"]
        run = run_load_test(server.port, "", "--kind", "chat", *flags, *chats)
        after = token_counts(server.port)
    print_json(
        bench="generation, shared prompt",
        server=server.name,
        requests=16,
        prompt_tokens_run=int(after["prompt"] - before.get("prompt", 0)),
        prompt_tokens_reused=int(after.get("cached", 0) - before.get("cached", 0)),
        ttft_p50_ms=run["ttft_ms"]["p50"],
    )


def perplexity(arguments: argparse.Namespace) -> None:
    """Print the perplexity of one text by each server, by the log-probabilities of its tokens."""
    model = str(Path(arguments.model).resolve())
    text = Path(arguments.text).read_text()[:TEXT_CHARS]
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    for name in arguments.servers:
        with running(name, launch(arguments, name, model)) as server, server.resumed():
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                logprobs = json.load(response)["choices"][0]["logprobs"]["token_logprobs"][1:]
        value = math.exp(-statistics.mean(logprobs))
        print_json(
            bench="perplexity", server=name, tokens=len(logprobs), perplexity=round(value, 3)
        )


def token_counts(port: int) -> dict[str, float]:
    """Return onequeue_tokens_total by kind."""
    counts = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        for line in response.read().decode().splitlines():
            if line.startswith("onequeue_tokens_total{"):
                counts[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return counts
