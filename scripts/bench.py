#!/usr/bin/env python3
"""Compare this server with its alternatives in one run on one machine.

    bench.py http                      a model that takes no time, beside a bare route (needs wrk)
    bench.py direct   --model PATH     one client, beside the pipeline called in a loop
    bench.py pipeline --model PATH     1, 16 and 64 clients, beside the server of transformers'
                                       documentation, LitServe and Mosec (scripts/peers/).
                                       Servers: docs litserve mosec
    bench.py generation --model PATH   streaming chats, beside vLLM, transformers serve and
                                       llama.cpp. Servers: vllm transformers llama:GGUF
    bench.py perplexity --model PATH   of one text, by each onequeue
    bench.py vision                    streaming chats with an image each, beside the same
    bench.py speech                    transcriptions, beside a server around the pipeline,
                                       transformers serve and the pipeline in process.
                                       Servers: plain transformers in-process
    bench.py beside                    gaps in chats while an hour of audio is transcribed

To measure a change, compare two checkouts: --servers onequeue onequeue@../other-checkout.
Each measurement is one JSON line; ratios come last, and generation ends with a table. Without
--model, a model of bert-base's shape with random weights is used. Responses are not checked.
"""

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import bench_in_process
import environment  # first: may start the script again with .venv
from bench_beside import beside
from bench_generation import generation, perplexity
from bench_pipeline import fill_mask, mixed_texts, pipeline
from bench_servers import Launch, free_port, print_json, running
from bench_speech import speech
from bench_vision import vision

T = TypeVar("T")
TEXT = "The capital of France is [MASK]."
SERVERS: dict[str, list[str]] = {  # the defaults of each benchmark
    "http": [],
    "direct": [],
    "pipeline": [
        *("docs", "litserve", "mosec", "onequeue:DTYPE=float32", "onequeue:DTYPE=bfloat16"),
    ],
    "generation": ["onequeue", "vllm", "transformers"],
    "perplexity": ["onequeue", "onequeue:QUANTIZATION=int8", "onequeue:QUANTIZATION=int4"],
    "vision": ["onequeue", "vllm", "transformers"],
    "speech": ["onequeue", "plain", "transformers", "in-process"],
    "beside": [],
}


# ── servers ──


def serve_instant(port: int) -> None:
    import uvicorn

    from server.app import create_app
    from server.core.settings import load_settings

    uvicorn.run(
        create_app(
            replace(load_settings(), chat_model="none", embedding_model="none"), InstantRunner
        ),
        port=port,
        access_log=False,
    )


def serve_bare(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(b'"' + await request.body() + b'"', media_type="application/json")

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    uvicorn.run(app, port=port, access_log=False)


class InstantRunner:
    """Returns the input text, so that only the server's own cost remains."""

    text_model = None

    def __init__(self) -> None:
        from worker.messages.protocol import ALONE, ModelInfo, OtherModels

        self.others: OtherModels = ALONE
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
    """Measure requests per second of each server in turn with wrk, `rounds` times.

    With so few clients each batch of an instant model waits for its full MAX_BATCH_WAIT_MS, so it
    is measured without that wait too.
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
                launch = Launch(command, port, ready, {"MAX_BATCH_WAIT_MS": wait_ms})
                with running(name, launch) as server, server.resumed():
                    rates[name].append(wrk(script.name, port))
                print_json(bench="http", server=name, clients=16, requests_per_s=rates[name][-1])
    bare = rates.pop("bare")
    for name, measured in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(measured, bare, strict=True)]
        print_json(bench="http", server=name, ratio=round(statistics.median(ratios), 3), target=0.5)


def wrk(script: str, port: int) -> float:
    """Return requests per second with 16 connections over 5 seconds."""
    command = ["wrk", "-t1", "-c16", "-d5", "-s", script, f"http://127.0.0.1:{port}/"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return float(next(line for line in lines if line.startswith("Requests/sec")).split()[1])


def direct(arguments: argparse.Namespace) -> None:
    """Measure the median latency of one client, beside the pipeline called in a loop."""
    ours, loops = [], []
    for _ in range(arguments.rounds):
        loops.append(bench_in_process.measure("fill-mask", arguments.model))
        print_json(bench="direct", server="loop", p50_ms=round(loops[-1], 1))
        name = "onequeue:DTYPE=float32"
        with running(name, fill_mask(name, arguments.model)) as server, server.resumed():
            ours.append(mixed_texts(server.port, "/", 1, 1, None)["latency_ms"]["p50"])
        print_json(bench="direct", server="onequeue", p50_ms=ours[-1])
    ratio = statistics.median(ours) / statistics.median(loops)
    print_json(bench="direct", p50_ratio=round(ratio, 3), target=1.03)


def make_model() -> str:
    """Save a model of bert-base's shape with random weights and the demo's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    folder = Path(tempfile.gettempdir()) / "onequeue-bench-bert-base"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(
            str(environment.ROOT / "worker" / "demo" / "fill-mask")
        )
        tokenizer.model_max_length = 512
        BertForMaskedLM(BertConfig(vocab_size=30522)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("bench", choices=list(SERVERS))
    add("--model", help="a checkpoint: fill-mask with [MASK], or a chat model; or qwen3-0.6b, -8b")
    add("--servers", nargs="+", help="names from above; onequeue[@CHECKOUT][:SETTING=VALUE,…]")
    add("--rounds", type=int, default=3)
    add(
        "--peer-python",
        default=sys.executable,
        help="a Python with litserve and mosec, or in the folder of the transformers command",
    )
    add("--chat-model", default="demo", help="beside: the model that streams")
    chats = parser.add_argument_group("generation")
    add = chats.add_argument
    add("--vllm", default="vllm", help="the vllm command")
    add("--llama", default="llama-server", help="the program for llama:GGUF")
    add("--dtype", default="bfloat16", help="of all servers")
    add("--temperature", type=list_of(float), default=[1, 0], metavar="N,…", help="1,0")
    add("--clients", type=list_of(int), default=[1, 8, 16], metavar="N,…", help="1,8,16")
    add("--prompt-words", type=list_of(int), default=[64], metavar="N,…", help="64")
    add("--questions", action="store_true", help="ask questions; responses may end early")
    add("--tokens", type=int, default=32, help="of each response, at most")
    add("--requests", type=int, default=3, help="per client in each sweep")
    add(
        "--shared-prompt",
        action="store_true",
        help="also measure a prompt that sixteen chats share",
    )
    add("--json", metavar="FILE", help="write all measurements")
    text = str(environment.ROOT / "docs" / "architecture.md")
    add("--text", default=text, help="perplexity: a text, of which the beginning is used")
    add("--side", type=int, default=512, help="vision: pixels of an image's sides")
    arguments = parser.parse_args()
    arguments.servers = arguments.servers or SERVERS[arguments.bench]
    if arguments.bench in ("direct", "pipeline") and not arguments.model:
        arguments.model = make_model()
    benches = {"http": http, "direct": direct, "pipeline": pipeline, "generation": generation}
    benches |= {"speech": speech, "vision": vision, "beside": beside, "perplexity": perplexity}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the exits that stop servers
    benches[arguments.bench](arguments)


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("serve-"):
        {"serve-instant": serve_instant, "serve-bare": serve_bare}[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
