#!/usr/bin/env python3
"""serve_docs.py MODEL PORT: the queue server of transformers' documentation page "Using pipelines
for a webserver" around a fill-mask pipeline, with its dynamic batching: an item more as long as
one comes within a millisecond. A peer for scripts/bench.py."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import pipeline

waiting: asyncio.Queue[tuple[str, asyncio.Queue[Any]]] = asyncio.Queue()


async def answer(request: Request) -> JSONResponse:
    reply: asyncio.Queue[Any] = asyncio.Queue()
    await waiting.put(((await request.body()).decode(), reply))
    return JSONResponse(await reply.get())


async def serve() -> None:
    pipe = pipeline("fill-mask", model=sys.argv[1])
    while True:
        batch = [await waiting.get()]
        with contextlib.suppress(TimeoutError):
            while True:
                batch.append(await asyncio.wait_for(waiting.get(), 0.001))
        outputs: Any = pipe([text for text, _ in batch], batch_size=len(batch))
        if len(batch) == 1:  # fill-mask answers a list of one without the list
            outputs = [outputs]
        for (_, reply), output in zip(batch, outputs, strict=True):
            await reply.put(output)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    task = asyncio.create_task(serve())
    yield
    task.cancel()


if __name__ == "__main__":
    app = Starlette(routes=[Route("/", answer, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
