"""`bench.py pipeline`: POST / with a fill-mask model, beside other servers."""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from bench_servers import Launch, free_port, is_ours, onequeue, print_json, run_load_test, running

REQUESTS = {1: 30, 16: 192, 64: 256}  # by the number of clients


def pipeline(arguments: argparse.Namespace) -> None:
    """Measure every server in turn under every load, `rounds` times; print medians and ratios."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for round_ in range(arguments.rounds):
        for name in arguments.servers:
            key, path = ("text", "/predict") if name == "litserve" else (None, "/")
            path = {"mosec": "/inference"}.get(name, path)
            is_peer = not is_ours(name)
            launch = peer_server(arguments, name) if is_peer else fill_mask(name, arguments.model)
            with running(name, launch) as server, server.resumed():
                if is_peer:
                    mixed_texts(server.port, path, 1, 0, key)  # peers have no warm-up
                for clients in REQUESTS:
                    run = mixed_texts(server.port, path, clients, 1 + round_, key)
                    runs.setdefault((name, clients), []).append(run)
                    report(name, clients, run)
    compare(runs)


def fill_mask(name: str, model: str) -> Launch:
    settings = {"PIPELINE_TASK": "fill-mask", "PIPELINE_MODEL": model}
    settings |= {"CHAT_MODEL": "none", "EMBEDDING_MODEL": "none"}
    return onequeue(name, free_port(), settings)


def peer_server(arguments: argparse.Namespace, name: str) -> Launch:
    port, program = free_port(), f"scripts/peers/serve_{name}.py"
    path = f"{Path(arguments.peer_python).parent}:{os.environ['PATH']}"
    command = [arguments.peer_python, program, arguments.model, str(port)]
    return Launch(command, port, "/", {"PATH": path})


def mixed_texts(port: int, path: str, clients: int, seed: int, key: str | None) -> dict[str, Any]:
    """Send texts of 4 to 60 words in a closed loop."""
    flags = ["--concurrency", str(clients), "--requests", str(REQUESTS[clients])]
    flags += ["--words", "4-60", "--mask", "[MASK]", "--seed", str(seed), "--warmup", "4"]
    return run_load_test(
        port, path, *flags, *(["--kind", "json", "--json-key", key] if key else [])
    )


def report(name: str, clients: int, run: dict[str, Any]) -> None:
    print_json(
        bench="pipeline",
        server=name,
        clients=clients,
        requests_per_s=round(run["ok_per_s"], 2),
        p50_ms=run["latency_ms"]["p50"],
        p95_ms=run["latency_ms"]["p95"],
    )


def compare(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Compare each configuration of onequeue with the best peer, by medians over the rounds."""

    def median(name: str, clients: int, *path: str) -> float:
        values: list[Any] = list(runs[name, clients])
        for key in path:
            values = [value[key] for value in values]
        return float(statistics.median(values))

    names = list(dict.fromkeys(name for name, _ in runs))
    peers = [name for name in names if not name.startswith("onequeue")]
    for ours in (name for name in names if name.startswith("onequeue")):
        for clients in REQUESTS if peers else ():
            best = max(median(peer, clients, "ok_per_s") for peer in peers)
            fastest = min(median(peer, clients, "latency_ms", "p95") for peer in peers)
            print_json(
                bench="pipeline",
                server=ours,
                clients=clients,
                times_best_peer=round(median(ours, clients, "ok_per_s") / best, 2),
                p95_of_best_peer=round(median(ours, clients, "latency_ms", "p95") / fastest, 2),
            )
