#!/usr/bin/env python3
"""Embeddings and reranking over HTTP beside sentence-transformers in process, on one machine.

    bench_embeddings.py --model PATH [--reranker PATH] [--servers onequeue onequeue@../other]
                        [--peers BIN/infinity_emb BIN/vllm]

Texts of 4 to 200 words: clients with one text each under way, and one that sends all of them as a
list; beside `SentenceTransformer.encode` of 32 texts at a time, in order of arrival, and of the
whole list, which it sorts by length. Then 100 documents in one request beside
`CrossEncoder.predict` of as many pairs. Peers are programs that serve embeddings, infinity_emb's or
vllm's. All take turns, a server that is not measured stands still. Ends with a table of medians.
Needs sentence-transformers, which the server does not.
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

from bench_generation import cpu
from bench_servers import Launch, Server, free_port, onequeue, running, say

from server.commands.load_test.http_client import Client
from server.commands.load_test.request_bodies import WORDS

ARRIVAL = 32  # texts that `encode` is given at a time, which is its own batch size
DOCUMENTS = 100
QUERY = "which morning keeps the quiet garden beside the river"

Measured = Mapping[str, Callable[[], object]]  # what is timed, by the name of its row


def texts_of(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 200))) for _ in range(count)]


# ── the server ──


async def ask(port: int, path: str, bodies: Sequence[Any], clients: int) -> None:
    """Each client has one request under way."""
    http = Client(urlsplit(f"http://127.0.0.1:{port}{path}"), {"content-type": "application/json"})
    rest = iter(bodies)

    async def client() -> None:
        for body in rest:
            answer = await http.post(json.dumps(body).encode(), None)
            if answer.status != 200:
                raise SystemExit(answer.body.decode())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    http.close()


def served(server: Server, path: str, bodies: Sequence[Any], clients: int) -> Callable[[], None]:
    def work() -> None:
        with server.awake():
            asyncio.run(ask(server.port, path, bodies, clients))

    return work


def peer(program: str, port: int, model: str) -> Launch:
    """One that serves the model's embeddings as OpenAI does, in float32 on a CPU."""
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


def embedding(servers: Sequence[Server], model: str, texts: list[str], clients: int) -> Measured:
    oracle: Any = importlib.import_module("sentence_transformers")
    options = {"encoding_format": "base64", "model": model}  # which OpenAI's clients ask for
    singles = [{"input": text, **options} for text in texts]
    works: dict[str, Callable[[], object]] = {}
    for server in servers:
        of = served(server, "/v1/embeddings", singles, clients)
        works[f"{server.name}, {clients} clients, a text each"] = of
        of = served(server, "/v1/embeddings", [{"input": texts, **options}], 1)
        works[f"{server.name}, a list of all"] = of
    encode = oracle.SentenceTransformer(model, device="cpu").float().encode
    arrivals = [texts[at : at + ARRIVAL] for at in range(0, len(texts), ARRIVAL)]
    works[f"`encode` of {ARRIVAL} as they arrive"] = lambda: [encode(each) for each in arrivals]
    works["`encode` of all, sorted"] = lambda: encode(texts)
    return works


def reranking(servers: Sequence[Server], model: str) -> Measured:
    oracle: Any = importlib.import_module("sentence_transformers")
    documents = texts_of(DOCUMENTS, seed=2)
    body = {"query": QUERY, "documents": documents}
    works: dict[str, Callable[[], object]]
    works = {f"{each.name}, rerank": served(each, "/rerank", [body], 1) for each in servers}
    predict = oracle.CrossEncoder(model, device="cpu").predict
    pairs = [(QUERY, document) for document in documents]
    works["`CrossEncoder.predict`"] = lambda: predict(pairs)
    return works


# ── measuring ──


def measure(works: Measured, rounds: int, texts: int) -> dict[str, float]:
    """Texts per second of each, the median over the rounds; a first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            rate = texts / (time.perf_counter() - started)
            if turn:
                rates[name].append(rate)
                say(bench="embeddings", what=name, texts_per_s=round(rate, 2))
    return {name: statistics.median(found) for name, found in rates.items()}


def table(rates: Mapping[str, float], beside: str) -> Iterator[str]:
    """Markdown; the last column is how many times as fast as `beside`."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    settings = {"PIPELINE_MODEL": "none", "CHAT_MODEL": "none", "DTYPE": "float32"}
    settings |= {"EMBEDDING_MODEL": arguments.model, "RERANK_MODEL": arguments.reranker}
    with contextlib.ExitStack() as stack:
        launches = [(name, onequeue(name, free_port(), settings)) for name in arguments.servers]
        servers = [stack.enter_context(running(*each)) for each in launches]
        others = [
            (Path(each).name, peer(each, free_port(), arguments.model)) for each in arguments.peers
        ]
        peers = [stack.enter_context(running(*each)) for each in others]
        texts = texts_of(arguments.texts, seed=1)
        works = embedding([*servers, *peers], arguments.model, texts, arguments.clients)
        rates = measure(works, arguments.rounds, len(texts))
        lines = list(table(rates, f"`encode` of {ARRIVAL} as they arrive"))
        if arguments.reranker != "none":
            rates = measure(reranking(servers, arguments.reranker), arguments.rounds, DOCUMENTS)
            lines += ["", *table(rates, "`CrossEncoder.predict`")]
    print(f"\n{cpu()}, float32\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
