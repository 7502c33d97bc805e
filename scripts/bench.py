#!/usr/bin/env python3
"""Measure this server beside what one would use instead, in one run on one machine.

    bench.py http                      an instant model behind the queue, beside a bare route (wrk)
    bench.py direct   --model PATH     one client, beside calling the pipeline in a loop
    bench.py pipeline --model PATH     1, 16 and 64 clients, beside the documentation's server,
                                       LitServe and Mosec (scripts/peers/): docs litserve mosec
    bench.py generation --model PATH   streaming chats, beside vLLM and transformers serve: vllm
                                       transformers
    bench.py vision                    streaming chats with a picture each, beside the same
    bench.py speech                    transcriptions, beside a server around the pipeline,
                                       transformers serve and the pipeline: plain transformers
                                       in-process
    bench.py beside                    a chat's gaps while an hour of sound is transcribed

A change is measured beside the code before it: --servers onequeue onequeue@../other-checkout.
Prints one JSON line a measurement, the last with the ratios; generation ends with a table. Without
--model a random-weight model of bert-base's shape is made. It judges no answers: the tests do that.
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

from bench_beside import beside
from bench_generation import generation
from bench_pipeline import fill_mask, mixed_texts, pipeline
from bench_servers import Launch, free_port, running, say
from bench_speech import speech
from bench_vision import vision

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

T = TypeVar("T")
TEXT = "The capital of France is [MASK]."
SERVERS: dict[str, list[str]] = {  # each benchmark's own
    "http": [],
    "direct": [],
    "pipeline": [
        *("docs", "litserve", "mosec", "onequeue:DTYPE=float32", "onequeue:DTYPE=bfloat16"),
    ],
    "generation": ["onequeue", "vllm", "transformers"],
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

    async def answer(request: Request) -> Response:
        return Response(b'"' + await request.body() + b'"', media_type="application/json")

    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    uvicorn.run(app, port=port, access_log=False)


class InstantRunner:
    """Answers with the text itself: what is left is what the server costs."""

    text_model = None

    def __init__(self) -> None:
        from worker.messages.protocol import ModelInfo

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
                launch = Launch(command, port, ready, {"MAX_BATCH_WAIT_MS": wait_ms})
                with running(name, launch) as server, server.awake():
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
        "import json,sys,time,random,statistics; sys.path.insert(0,'.')\n"
        "from server.commands.load_test.request_bodies import WORDS\n"
        "from transformers import pipeline\n"
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
            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        loops.append(float(done.stdout))
        say(bench="direct", server="loop", p50_ms=round(loops[-1], 1))
        name = "onequeue:DTYPE=float32"
        with running(name, fill_mask(name, arguments.model)) as server, server.awake():
            ours.append(mixed_texts(server.port, "/", 1, 1, None)["latency_ms"]["p50"])
        say(bench="direct", server="onequeue", p50_ms=ours[-1])
    ratio = statistics.median(ours) / statistics.median(loops)
    say(bench="direct", p50_ratio=round(ratio, 3), target=1.03)


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
    add = parser.add_argument
    add("bench", choices=list(SERVERS))
    add("--model", help="a checkpoint: fill-mask with [MASK], or a chat model")
    add("--servers", nargs="+", help="of those above; onequeue[@CHECKOUT][:SETTING=VALUE,…]")
    add("--rounds", type=int, default=3)
    add(
        "--peer-python",
        default=sys.executable,
        help="a python that has litserve and mosec, or in whose folder transformers is",
    )
    add("--chat-model", default="demo", help="that streams beside the recording")
    chats = parser.add_argument_group("generation")
    add = chats.add_argument
    add("--vllm", default="vllm", help="the program")
    add("--dtype", default="bfloat16", help="of every server")
    add("--temperature", type=several(float), default=[1, 0], metavar="N,…", help="1,0")
    add("--clients", type=several(int), default=[1, 8, 16], metavar="N,…", help="1,8,16")
    add("--prompt-words", type=several(int), default=[64], metavar="N,…", help="64")
    add("--tokens", type=int, default=32, help="of each answer")
    add("--requests", type=int, default=3, help="a client in each sweep")
    add("--shared-prompt", action="store_true", help="also one that sixteen chats share")
    add("--json", metavar="FILE", help="write all figures")
    add("--side", type=int, default=512, help="vision: pixels of a picture's sides")
    arguments = parser.parse_args()
    arguments.servers = arguments.servers or SERVERS[arguments.bench]
    if arguments.bench in ("direct", "pipeline") and not arguments.model:
        arguments.model = make_model()
    benches = {"http": http, "direct": direct, "pipeline": pipeline, "generation": generation}
    benches |= {"speech": speech, "vision": vision, "beside": beside}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    benches[arguments.bench](arguments)


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("serve-"):
        {"serve-instant": serve_instant, "serve-bare": serve_bare}[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
