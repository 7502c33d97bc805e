"""`bench.py generation`: streaming chats on the same checkpoint, server after server.

Greedy, a fixed number of tokens each, prompts that differ from the first word on. A server is
measured once it says that it has finished compiling.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench_servers import ROOT, free_port, running, say

CLIENTS = {1: 4, 16: 48}  # clients: requests
TOKENS = 32
WORDS = 64
SYSTEM = " ".join(f"Rule {n}: be brief." for n in range(330))  # some 2,000 tokens


def generation(arguments: argparse.Namespace) -> None:
    if not arguments.model:
        raise SystemExit("--model is needed: the path of a chat checkpoint")
    model = str(Path(arguments.model).resolve())
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.servers:
            port = free_port()
            with running(*launch(arguments, name, model, port)):
                compiled(port, name)
                for clients, requests in CLIENTS.items():
                    run = load(port, name, model, clients, requests)
                    runs.setdefault((name, clients), []).append(run)
                    report(name, clients, run)
                if name == "onequeue":
                    shared_prompt(port, name, model)
    compare(runs)


def launch(
    arguments: argparse.Namespace, name: str, model: str, port: int
) -> tuple[list[str], int, str, dict[str, str]]:
    """Command, port, the path that says it is up, environment."""
    dtype, offline = arguments.dtype, {"HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        command = [arguments.vllm, "serve", model, "--port", str(port), "--dtype", dtype]
        path = f"{Path(arguments.vllm).parent}:{os.environ['PATH']}"
        room = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "PATH": path}
        return [*command, "--max-model-len", "4096"], port, "/health", offline | room
    if name == "transformers":
        program = str(Path(arguments.peer_python).parent / "transformers")
        command = [program, "serve", model, "--port", str(port), "--dtype", dtype]
        command += ["--device", "cpu", "--continuous-batching", "--cb-max-memory-percent", "0.1"]
        return command, port, "/health", offline
    settings = {"CHAT_MODEL": model, "PIPELINE_MODEL": "none", "DTYPE": dtype, "KV_CACHE_GB": "2"}
    settings["REQUEST_TIMEOUT_S"] = "600"  # as patient as the load tester
    for part in filter(None, name.partition(":")[2].split(",")):
        setting, _, value = part.partition("=")
        settings[setting] = value
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    return command, port, "/ready", offline | settings


def compiled(port: int, name: str) -> None:
    """Wait for the compiled model; peers compile before they answer."""
    while name.startswith("onequeue"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
            if json.load(answer)["compile"] != "running":
                return
        time.sleep(1)


def load(
    port: int, name: str, model: str, clients: int, requests: int, *more: str
) -> dict[str, Any]:
    """By scripts/load_test.py; how to ask for exactly so many tokens differs."""
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if name == "transformers":
        limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        fields = {"temperature": 0, "generation_config": json.dumps(limits)}
    command = [sys.executable, "scripts/load_test.py", f"http://127.0.0.1:{port}", "--kind", "chat"]
    command += ["--stream", "--model", model, "--max-tokens", str(TOKENS), "--seed", str(clients)]
    command += ["--concurrency", str(clients), "--requests", str(requests), "--warmup", "2"]
    command += ["--words", str(WORDS), "--timeout", "600", "--fields", json.dumps(fields)]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if measured["errors"]:
        raise SystemExit(f"errors under load: {measured['statuses']}")
    return measured


def report(name: str, clients: int, run: dict[str, Any]) -> None:
    say(
        bench="generation",
        server=name,
        clients=clients,
        output_tokens_per_s=round(run["output_tokens_per_s"], 2),
        ttft_p50_ms=run["ttft_ms"]["p50"],
        ttft_p95_ms=run["ttft_ms"]["p95"],
        inter_token_p50_ms=(run["inter_token_ms"] or {}).get("p50"),
    )


def shared_prompt(port: int, name: str, model: str) -> None:
    """Sixteen chats at once that begin with the same long system message: prompt tokens run."""
    before = tokens(port)
    run = load(port, name, model, 16, 16, "--system", SYSTEM, "--warmup", "0")
    after = tokens(port)
    say(
        bench="generation, shared prompt",
        server=name,
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


def compare(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Each of our configurations beside each peer, by medians over the rounds."""

    def median(name: str, clients: int, *path: str) -> float:
        values: list[Any] = list(runs[name, clients])
        for key in path:
            values = [value[key] for value in values]
        return float(statistics.median(values))

    names = list(dict.fromkeys(name for name, _ in runs))
    peers = [name for name in names if not name.startswith("onequeue")]
    for ours in (name for name in names if name.startswith("onequeue")):
        for clients in CLIENTS:
            rate = median(ours, clients, "output_tokens_per_s")
            first = median(ours, clients, "ttft_ms", "p50")
            for peer in peers:
                say(
                    bench="generation",
                    server=ours,
                    clients=clients,
                    peer=peer,
                    times=round(rate / median(peer, clients, "output_tokens_per_s"), 2),
                    ttft_ratio=round(first / median(peer, clients, "ttft_ms", "p50"), 2),
                )
