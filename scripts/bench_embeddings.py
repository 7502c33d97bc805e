#!/usr/bin/env python3
"""Compare embeddings and reranking over HTTP with sentence-transformers, on one machine.

    bench_embeddings.py --model PATH [--reranker PATH] [--servers onequeue onequeue@../other]
                        [--peers BIN/infinity_emb BIN/vllm]

Texts of 4 to 200 words are sent by clients with one text per request, and by one client in one
list; in process `SentenceTransformer.encode` gets 32 texts at a time in order of arrival, and the
whole list, which it sorts by length. Then 100 documents are reranked in one request, beside
`CrossEncoder.predict`. Peers are the commands of infinity_emb or vllm. A server that is not being
measured is suspended. Ends with a table of medians. Needs sentence-transformers.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environment  # noqa: F401  # first: may start the script again with .venv
from bench_generation import cpu
from bench_servers import Launch, Server, free_port, onequeue, print_json, running

from server.commands.load_test.http_client import Client
from server.commands.load_test.request_bodies import WORDS

BATCH_SIZE = 32  # of `encode` by default
DOCUMENTS = 100
QUERY = "which morning keeps the quiet garden beside the river"

Tasks = Mapping[str, Callable[[], object]]  # functions to time, by the name of their row


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 200))) for _ in range(count)]


# ── servers ──


async def post_all(port: int, path: str, bodies: Sequence[Any], clients: int) -> None:
    """Post all bodies, one at a time per client."""
    http = Client(urlsplit(f"http://127.0.0.1:{port}{path}"), {"content-type": "application/json"})
    remaining = iter(bodies)

    async def client() -> None:
        for body in remaining:
            response = await http.post(json.dumps(body).encode(), None)
            if response.status != 200:
                raise SystemExit(response.body.decode())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    http.close()


def posting(server: Server, path: str, bodies: Sequence[Any], clients: int) -> Callable[[], None]:
    """Return a function that posts all bodies to a server."""

    def task() -> None:
        with server.resumed():
            asyncio.run(post_all(server.port, path, bodies, clients))

    return task


def launch_peer(program: str, port: int, model: str) -> Launch:
    """Return how to launch a peer with OpenAI's embeddings endpoint, in float32 on a CPU."""
    path = f"{Path(program).parent}:{os.environ['PATH']}"
    environ = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PATH": path}
    if Path(program).name == "vllm":
        command = [program, "serve", model, "--runner", "pooling", "--dtype", "float32"]
        environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    else:
        command = [program, "v2", "--model-id", model, "--served-model-name", model]
        command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32"]
        command += ["--url-prefix", "/v1", "--no-bettertransformer"]
    return Launch([*command, "--port", str(port)], port, "/health", environ)


def embedding_tasks(servers: Sequence[Server], model: str, texts: list[str], clients: int) -> Tasks:
    oracle: Any = importlib.import_module("sentence_transformers")
    options = {"encoding_format": "base64", "model": model}  # as OpenAI's clients request
    singles = [{"input": text, **options} for text in texts]
    tasks: dict[str, Callable[[], object]] = {}
    for server in servers:
        singly = posting(server, "/v1/embeddings", singles, clients)
        tasks[f"{server.name}, {clients} clients, a text each"] = singly
        whole = posting(server, "/v1/embeddings", [{"input": texts, **options}], 1)
        tasks[f"{server.name}, a list of all"] = whole
    encode = oracle.SentenceTransformer(model, device="cpu").float().encode
    batches = [texts[start : start + BATCH_SIZE] for start in range(0, len(texts), BATCH_SIZE)]
    tasks[f"`encode` of {BATCH_SIZE} as they arrive"] = lambda: [encode(batch) for batch in batches]
    tasks["`encode` of all, sorted"] = lambda: encode(texts)
    return tasks


def reranking_tasks(servers: Sequence[Server], model: str) -> Tasks:
    oracle: Any = importlib.import_module("sentence_transformers")
    documents = random_texts(DOCUMENTS, seed=2)
    body = {"query": QUERY, "documents": documents}
    tasks: dict[str, Callable[[], object]] = {
        f"{server.name}, rerank": posting(server, "/rerank", [body], 1) for server in servers
    }
    predict = oracle.CrossEncoder(model, device="cpu").predict
    pairs = [(QUERY, document) for document in documents]
    tasks["`CrossEncoder.predict`"] = lambda: predict(pairs)
    return tasks


# ── measurements ──


def measure(tasks: Tasks, rounds: int, texts: int) -> dict[str, float]:
    """Return the texts per second of each, medians over the rounds. A first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(rounds + 1):
        for name, task in tasks.items():
            started = time.perf_counter()
            task()
            rate = texts / (time.perf_counter() - started)
            if round_:
                rates[name].append(rate)
                print_json(bench="embeddings", what=name, texts_per_s=round(rate, 2))
    return {name: statistics.median(values) for name, values in rates.items()}


def table(rates: Mapping[str, float], beside: str) -> Iterator[str]:
    """Yield Markdown lines; the last column is the speed relative to the row `beside`."""
    yield f"| | texts/s | times {beside} |"
    yield "| --- | ---: | ---: |"
    for name, rate in rates.items():
        yield f"| {name} | {rate:.1f} | {rate / rates[beside]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--reranker", default="none")
    parser.add_argument("--servers", nargs="+", default=["onequeue"])
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the exits that stop servers
    settings = {"PIPELINE_MODEL": "none", "CHAT_MODEL": "none", "DTYPE": "float32"}
    settings |= {"EMBEDDING_MODEL": arguments.model, "RERANK_MODEL": arguments.reranker}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, onequeue(name, free_port(), settings)))
            for name in arguments.servers
        ]
        peers = [
            stack.enter_context(
                running(Path(program).name, launch_peer(program, free_port(), arguments.model))
            )
            for program in arguments.peers
        ]
        texts = random_texts(arguments.texts, seed=1)
        tasks = embedding_tasks([*servers, *peers], arguments.model, texts, arguments.clients)
        rates = measure(tasks, arguments.rounds, len(texts))
        lines = list(table(rates, f"`encode` of {BATCH_SIZE} as they arrive"))
        if arguments.reranker != "none":
            rates = measure(
                reranking_tasks(servers, arguments.reranker), arguments.rounds, DOCUMENTS
            )
            lines += ["", *table(rates, "`CrossEncoder.predict`")]
    print(f"\n{cpu()}, float32\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
