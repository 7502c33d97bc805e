"""Embeddings over HTTP beside sentence-transformers in process, in one run.

    python scripts/bench_embeddings.py MODEL [--reranker MODEL] [--texts N] [--clients N]

Texts of mixed lengths, in order of arrival: 16 clients with a text each against
`SentenceTransformer.encode(batch_size=32)` of 32 texts at a time, and of the whole list at once,
which it may sort; then 100 documents reranked in one request against `CrossEncoder.predict`. All in
float32 in this process. The last line is one JSON document. Needs sentence-transformers, which the
server does not; without it, only our own figures are given.
"""

import argparse
import asyncio
import importlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn

from server.app import create_app
from server.settings import Settings

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
]
BATCH = 32


def texts_of(count: int, seed: int) -> list[str]:
    """4 to 120 words, most of them short."""
    rng = random.Random(seed)
    lengths = (min(120, 4 + int(rng.expovariate(1 / 25))) for _ in range(count))
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def serve(model: str, reranker: str, port: int) -> uvicorn.Server:
    settings = Settings(
        pipeline_model="none",
        chat_model="none",
        embedding_model=model,
        rerank_model=reranker,
        dtype="float32",
    )
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return server
        except httpx.ConnectError:
            pass
        time.sleep(0.1)


async def ask(url: str, texts: list[str], clients: int) -> None:
    """Each client has one text under way."""
    rest = iter(texts)

    async def client(http: httpx.AsyncClient) -> None:
        for text in rest:
            answer = await http.post(url, json={"input": text, "encoding_format": "base64"})
            answer.raise_for_status()

    async with httpx.AsyncClient(timeout=600) as http, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(http))


def embeddings(base: str, texts: list[str], clients: int) -> dict[str, float]:
    url = base + "/v1/embeddings"
    asyncio.run(ask(url, texts[:64], clients))
    one_s = seconds(lambda: asyncio.run(ask(url, texts, clients)))
    listed_s = seconds(lambda: httpx.post(url, json={"input": texts}, timeout=600))
    return {"ours_singles": len(texts) / one_s, "ours_list": len(texts) / listed_s}


def encoded(module: Any, model: str, texts: list[str]) -> dict[str, float]:
    oracle = module.SentenceTransformer(model, device="cpu").float()
    oracle.encode(texts[:64])
    batches = [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
    arrival_s = seconds(lambda: [oracle.encode(batch, batch_size=BATCH) for batch in batches])
    whole_s = seconds(lambda: oracle.encode(texts, batch_size=BATCH))
    return {"encode_arrival": len(texts) / arrival_s, "encode_whole": len(texts) / whole_s}


def reranked(base: str, module: Any, model: str) -> dict[str, float]:
    documents = texts_of(100, seed=2)
    body = {"query": "what is it that they are for", "documents": documents}

    def ours() -> None:
        httpx.post(base + "/rerank", json=body, timeout=600).raise_for_status()

    ours()
    found = {"ours_rerank_s": min(seconds(ours) for _ in range(3))}
    if module is not None:
        oracle = module.CrossEncoder(model, device="cpu")
        pairs = [(body["query"], document) for document in documents]
        oracle.predict(pairs[:32])
        found["predict_s"] = min(seconds(lambda: oracle.predict(pairs)) for _ in range(3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings beside sentence-transformers.")
    parser.add_argument("model")
    parser.add_argument("--reranker", default="none")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--port", type=int, default=8360)
    args = parser.parse_args()
    try:
        module: Any = importlib.import_module("sentence_transformers")
    except ImportError:
        module = None
    server = serve(args.model, args.reranker, args.port)
    base, texts = f"http://127.0.0.1:{args.port}", texts_of(args.texts, seed=1)
    found = embeddings(base, texts, args.clients)
    if args.reranker != "none":
        found |= reranked(base, module, args.reranker)
    server.should_exit = True
    if module is not None:
        found |= encoded(module, args.model, texts)
        found["ratio"] = found["ours_singles"] / found["encode_arrival"]
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
