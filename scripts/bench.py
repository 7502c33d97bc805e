#!/usr/bin/env python3
"""Measure this server beside what one would use instead, in one run on one machine.

    bench.py http                      an instant model behind the queue, beside a bare route (wrk)
    bench.py direct   --model PATH     one client, beside calling the pipeline in a loop
    bench.py pipeline --model PATH     1, 16 and 64 clients, beside the documentation's server,
                                       LitServe and Mosec (scripts/peers/)
    bench.py generation --model PATH   1 and 16 streaming chats, beside vLLM and transformers serve,
                                       and a long system prompt that all share

Prints one JSON line a measurement, the last with the ratios. Without --model a random-weight
model of bert-base's shape is made. It judges no answers: the tests do that.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_generation import generation
from bench_servers import free_port, running, say

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TEXT = "The capital of France is [MASK]."
SERVERS = (
    ["docs", "litserve", "mosec", "onequeue:float32"],
    ["vllm", "transformers", "onequeue"],
)
CLIENTS = {1: 30, 16: 192, 64: 256}  # clients: requests


# ── servers ──


def serve_instant(port: int) -> None:
    import uvicorn

    from server.app import create_app
    from server.settings import load_settings

    uvicorn.run(
        create_app(replace(load_settings(), chat_model="none"), InstantRunner),
        port=port,
        access_log=False,
    )


def serve_bare(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        return Response(b'"' + await request.body() + b'"', media_type="application/json")

    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    uvicorn.run(app, port=port, access_log=False)


class InstantRunner:
    """Answers with the text itself: what is left is what the server costs."""

    def __init__(self) -> None:
        from worker.protocol import ModelInfo

        self.info = ModelInfo("fill-mask", "instant", "none", "none", 0, "packed")

    def prepare(self, item: Any) -> None:
        item.prepared = item.payload.inputs

    def forward(self, prepared: list[str]) -> list[str]:
        return prepared

    def finish(self, item: Any, raw: str) -> bytes:
        return b'"' + raw.encode() + b'"'

    def warm_up(self) -> None:
        pass


# ── measurements ──


def http(arguments: argparse.Namespace) -> None:
    """Requests per second of each server in turn, `rounds` times, under wrk.

    With as many clients as this, every batch of an instant model waits out its deadline: once
    more without one.
    """
    if not shutil.which("wrk"):
        raise SystemExit("wrk is needed: apt-get install wrk")
    servers = {"bare": "1", "instant": "1", "instant, MAX_BATCH_WAIT_MS=0": "0"}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f'wrk.method="POST"; wrk.body="{TEXT}"')
        script.flush()
        for _ in range(arguments.rounds):
            for name, wait_ms in servers.items():
                port = free_port()
                program = name.partition(",")[0]
                command = [sys.executable, __file__, "serve-" + program, str(port)]
                ready = "/ready" if program == "instant" else "/"
                with running(command, port, ready, {"MAX_BATCH_WAIT_MS": wait_ms}):
                    rates[name].append(wrk(script.name, port))
                say(bench="http", server=name, clients=16, requests_per_s=rates[name][-1])
    bare = rates.pop("bare")
    for name, found in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(found, bare, strict=True)]
        say(bench="http", server=name, ratio=round(statistics.median(ratios), 3), target=0.5)


def wrk(script: str, port: int) -> float:
    load = ["wrk", "-t1", "-c16", "-d5", "-s", script, f"http://127.0.0.1:{port}/"]
    done = subprocess.run(load, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return float(next(line for line in lines if line.startswith("Requests/sec")).split()[1])


def direct(arguments: argparse.Namespace) -> None:
    """The median latency of one client, beside the pipeline called in a loop in a process."""
    code = (
        "import json,sys,time,random,statistics; sys.path.insert(0,'scripts')\n"
        "from load_test import WORDS; from transformers import pipeline\n"
        "pipe=pipeline('fill-mask',model=sys.argv[1]); r=random.Random(1); took=[]\n"
        "for i in range(44):\n"
        "    words=[r.choice(WORDS.split()) for _ in range(r.randint(4,60))]\n"
        "    words[r.randrange(len(words))]='[MASK]'; t=time.perf_counter()\n"
        "    pipe(' '.join(words)); took.append(time.perf_counter()-t)\n"
        "print(json.dumps(statistics.median(took[4:])*1e3))"
    )
    ours, loops = [], []
    for _ in range(arguments.rounds):
        done = subprocess.run(
            [sys.executable, "-c", code, arguments.model],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        loops.append(float(done.stdout))
        say(bench="direct", server="loop", p50_ms=round(loops[-1], 1))
        port = free_port()
        with running(*onequeue(arguments.model, port, "float32")):
            ours.append(load(port, "/", 1, None)["latency_ms"]["p50"])
        say(bench="direct", server="onequeue", p50_ms=ours[-1])
    ratio = statistics.median(ours) / statistics.median(loops)
    say(bench="direct", p50_ratio=round(ratio, 3), target=1.03)


def pipeline(arguments: argparse.Namespace) -> None:
    """Every server in turn under every load, `rounds` times; medians and ratios at the end."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.servers:
            port = free_port()
            key, path = ("text", "/predict") if name == "litserve" else (None, "/")
            if name.startswith("onequeue"):
                launch = onequeue(arguments.model, port, name.partition(":")[2] or "float32")
            else:
                path = {"mosec": "/inference"}.get(name, path)
                peer = [
                    arguments.peer_python,
                    f"scripts/peers/serve_{name}.py",
                    arguments.model,
                    str(port),
                ]
                path_first = f"{Path(arguments.peer_python).parent}:{os.environ['PATH']}"
                launch = (peer, port, "/", {"PATH": path_first})
            with running(*launch):
                if not name.startswith("onequeue"):
                    load(port, path, 1, key)  # peers answer before they are warm
                for clients in CLIENTS:
                    runs.setdefault((name, clients), []).append(load(port, path, clients, key))
                    report(name, clients, runs[name, clients][-1])
    compare(runs)


def onequeue(model: str, port: int, dtype: str) -> tuple[list[str], int, str, dict[str, str]]:
    settings = {"PIPELINE_TASK": "fill-mask", "PIPELINE_MODEL": model, "DTYPE": dtype}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    return command, port, "/ready", settings


def load(port: int, path: str, clients: int, key: str | None) -> dict[str, Any]:
    """Mixed lengths of 4 to 60 words, closed loop, by scripts/load_test.py."""
    command = [sys.executable, "scripts/load_test.py", f"http://127.0.0.1:{port}{path}"]
    command += ["--concurrency", str(clients), "--requests", str(CLIENTS[clients])]
    command += ["--words", "4-60", "--mask", "[MASK]", "--seed", "1", "--warmup", "4"]
    if key:
        command += ["--kind", "json", "--json-key", key]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if measured["errors"]:
        raise SystemExit(f"errors under load: {measured['statuses']}")
    return measured


def report(name: str, clients: int, run: dict[str, Any]) -> None:
    say(
        bench="pipeline",
        server=name,
        clients=clients,
        requests_per_s=round(run["ok_per_s"], 2),
        p50_ms=run["latency_ms"]["p50"],
        p95_ms=run["latency_ms"]["p95"],
    )


def compare(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Each of our configurations against the best peer, by medians over the rounds."""

    def median(name: str, clients: int, *path: str) -> float:
        values: list[Any] = list(runs[name, clients])
        for key in path:
            values = [value[key] for value in values]
        return float(statistics.median(values))

    names = list(dict.fromkeys(name for name, _ in runs))
    peers = [name for name in names if not name.startswith("onequeue")]
    for ours in (name for name in names if name.startswith("onequeue")):
        for clients in CLIENTS if peers else ():
            best = max(median(peer, clients, "ok_per_s") for peer in peers)
            fastest = min(median(peer, clients, "latency_ms", "p95") for peer in peers)
            say(
                bench="pipeline",
                server=ours,
                clients=clients,
                times_best_peer=round(median(ours, clients, "ok_per_s") / best, 2),
                p95_of_best_peer=round(median(ours, clients, "latency_ms", "p95") / fastest, 2),
            )


def make_model() -> str:
    """A random-weight model of bert-base's shape with the demo's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    folder = Path(tempfile.gettempdir()) / "onequeue-bench-bert-base"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "worker" / "demo" / "fill-mask"))
        tokenizer.model_max_length = 512
        BertForMaskedLM(BertConfig(vocab_size=30522)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=["http", "direct", "pipeline", "generation"])
    parser.add_argument("--model", help="a checkpoint: fill-mask with [MASK], or a chat model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="a python that has litserve and mosec, or in whose folder transformers is",
    )
    parser.add_argument("--vllm", default="vllm", help="generation: the program")
    parser.add_argument("--dtype", default="bfloat16", help="generation: of every server")
    parser.add_argument(
        "--servers",
        nargs="+",
        help="docs litserve mosec onequeue:DTYPE; for generation: vllm transformers "
        "onequeue onequeue:SETTING=VALUE,…",
    )
    arguments = parser.parse_args()
    if not arguments.servers:
        arguments.servers = SERVERS[arguments.bench == "generation"]
    if arguments.bench in ("direct", "pipeline") and not arguments.model:
        arguments.model = make_model()
    benches = {"http": http, "direct": direct, "pipeline": pipeline, "generation": generation}
    benches[arguments.bench](arguments)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("serve-"):
        {"serve-instant": serve_instant, "serve-bare": serve_bare}[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
