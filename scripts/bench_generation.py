"""`bench.py generation`: streaming chats on the same checkpoint, beside other servers.

All servers are up and compiled before anything is measured, one awake at a time, and take turns
under each load; where memory does not hold them together, they are started one after another. A
prompt is sent to a server once: neither its prefix nor its answer is known from before.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench_floor import Floor, measure_floor
from bench_servers import (
    Launch,
    Server,
    free_port,
    is_ours,
    load,
    onequeue,
    others_cpu_s,
    running,
    say,
)
from bench_table import Runs, Sweep, ratios, summaries, table

SYSTEM = " ".join(f"Rule {n}: be brief." for n in range(330))  # some 2,000 tokens
GB = 1e9
QUIET = 0.1  # cores that others may use beside what is measured


def generation(arguments: argparse.Namespace) -> None:
    if not arguments.model:
        raise SystemExit("--model is needed: the path of a chat checkpoint")
    model = Path(arguments.model).resolve()
    floor = measure_floor(model, arguments.dtype)
    runs: Runs = {}
    for names in groups(arguments.servers, floor.weight_bytes, free_memory()):
        with contextlib.ExitStack() as stack:
            launches = [(name, launch(arguments, name, str(model))) for name in names]
            servers = [stack.enter_context(running(*each)) for each in launches]
            for turn in range(arguments.rounds):
                for sweep in sweeps(arguments):
                    for server in servers[turn % len(servers) :] + servers[: turn % len(servers)]:
                        measure(runs, server, sweep, turn, arguments)
            for server in servers if arguments.shared_prompt else ():
                if is_ours(server.name):
                    shared_prompt(server, str(model))
    report(runs, floor, arguments)


def groups(names: list[str], weight_bytes: int, free_bytes: int) -> list[list[str]]:
    """Those that are up together: all, if each can have its weights in three forms and 5 GB."""
    together = len(names) * (3 * weight_bytes + 5 * GB) < free_bytes
    return [names] if together else [[name] for name in names]


def free_memory() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if "MemAvailable" in line)


def launch(arguments: argparse.Namespace, name: str, model: str) -> Launch:
    dtype, port, offline = arguments.dtype, free_port(), {"HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        command = [arguments.vllm, "serve", model, "--port", str(port), "--dtype", dtype]
        path = f"{Path(arguments.vllm).parent}:{os.environ['PATH']}"
        room = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "PATH": path}
        return Launch([*command, "--max-model-len", "4096"], port, "/health", offline | room)
    if name == "transformers":
        program = str(Path(arguments.peer_python).parent / "transformers")
        command = [program, "serve", model, "--port", str(port), "--dtype", dtype]
        command += ["--device", "cpu", "--continuous-batching", "--cb-max-memory-percent", "0.1"]
        return Launch(command, port, "/health", offline)
    settings = {"CHAT_MODEL": model, "PIPELINE_MODEL": "none", "DTYPE": dtype, "KV_CACHE_GB": "2"}
    settings["EMBEDDING_MODEL"] = "none"
    settings["REQUEST_TIMEOUT_S"] = "600"  # as patient as the load tester
    return onequeue(name, port, settings)


def sweeps(arguments: argparse.Namespace) -> Iterator[Sweep]:
    lengths, temperatures = arguments.prompt_words, arguments.temperature
    for words, temperature, clients in product(lengths, temperatures, arguments.clients):
        yield Sweep(words, temperature, clients)


def measure(
    runs: Runs, server: Server, sweep: Sweep, turn: int, arguments: argparse.Namespace
) -> None:
    """One load on one server; its prompts are the same for each server, and new to it."""
    tokens, clients = arguments.tokens, sweep.clients
    fields: dict[str, Any] = {"temperature": sweep.temperature, "ignore_eos": True}
    if server.name == "transformers":
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        limits |= {"do_sample": sweep.temperature > 0}
        fields = {"temperature": sweep.temperature, "generation_config": json.dumps(limits)}
    flags: dict[str, Any] = {
        "--kind": "chat",
        "--model": str(Path(arguments.model).resolve()),
        "--max-tokens": tokens,
        "--words": sweep.words,
        "--concurrency": clients,
        "--requests": max(clients, 4) * arguments.requests,
        "--warmup": 1 if turn else clients,
        "--seed": hash((turn, sweep)) % 2**32,
        "--timeout": 600,
        "--fields": json.dumps(fields),
    }
    ours, started = {server.process.pid, os.getsid(0)}, time.perf_counter()
    others_s = others_cpu_s(ours)
    with server.awake():
        words = [str(word) for pair in flags.items() for word in pair]
        run = load(server.port, "", "--stream", *words)
    took_s = time.perf_counter() - started
    run["others_cores"] = round((others_cpu_s(ours) - others_s) / took_s, 2)
    runs.setdefault(sweep, {}).setdefault(server.name, []).append(run)
    say(
        bench="generation",
        server=server.name,
        **sweep._asdict(),
        output_tokens_per_s=run["output_tokens_per_s"],
        ttft_ms=run["ttft_ms"],
        inter_token_ms=run["inter_token_ms"],
        others_cores=run["others_cores"],
    )


def report(runs: Runs, floor: Floor, arguments: argparse.Namespace) -> None:
    rate, size = floor.bytes_per_s / GB, floor.weight_bytes / GB
    cores, step_ms = len(os.sched_getaffinity(0)), 1000 * floor.step_s
    machine = f"{cpu()}, {cores} cores. {Path(arguments.model).name}, {arguments.dtype}"
    about = f"{machine}: {size:.3f} GB of weights at {rate:.1f} GB/s, a step of {step_ms:.2f} ms."
    found = summaries(runs, floor)
    others = max(each["others_cores"] for of in found.values() for each in of.values())
    if others > QUIET:
        about += f" NOT QUIET: {others:.1f} cores were used by others."
    for line in ratios(found):
        say(bench="generation", **line)
    print("\n" + about + "\n\n" + "\n".join(table(found)))
    if arguments.json:
        whole = {
            "machine": machine,
            "weight_bytes": floor.weight_bytes,
            "bytes_per_s": floor.bytes_per_s,
            "figures": [sweep._asdict() | {"servers": of} for sweep, of in found.items()],
            "ratios": ratios(found),
        }
        Path(arguments.json).write_text(json.dumps(whole, indent=1) + "\n")


def cpu() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, sys.platform)


def shared_prompt(server: Server, model: str) -> None:
    """Sixteen chats at once that begin with the same long system message: prompt tokens run."""
    with server.awake():
        before = tokens(server.port)
        flags = ["--stream", "--model", model, "--max-tokens", "32", "--system", SYSTEM]
        chats = ["--concurrency", "16", "--requests", "16", "--timeout", "600"]
        run = load(server.port, "", "--kind", "chat", *flags, *chats)
        after = tokens(server.port)
    say(
        bench="generation, shared prompt",
        server=server.name,
        requests=16,
        prompt_tokens_run=int(after["prompt"] - before.get("prompt", 0)),
        prompt_tokens_reused=int(after.get("cached", 0) - before.get("cached", 0)),
        ttft_p50_ms=run["ttft_ms"]["p50"],
    )


def tokens(port: int) -> dict[str, float]:
    found = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("onequeue_tokens_total{"):
                found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found
