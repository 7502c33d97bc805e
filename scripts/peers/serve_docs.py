#!/usr/bin/env python3
"""serve_docs.py MODEL PORT: the queue server of transformers' documentation page "Using pipelines
for a webserver" around a fill-mask pipeline, with its dynamic batching: a batch grows while items
arrive within a millisecond of each other. A peer for scripts/bench.py."""

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


async def fill_mask(request: Request) -> JSONResponse:
    result: asyncio.Queue[Any] = asyncio.Queue()
    await waiting.put(((await request.body()).decode(), result))
    return JSONResponse(await result.get())


async def serve() -> None:
    pipe = pipeline("fill-mask", model=sys.argv[1])
    while True:
        batch = [await waiting.get()]
        with contextlib.suppress(TimeoutError):
            while True:
                batch.append(await asyncio.wait_for(waiting.get(), 0.001))
        outputs: Any = pipe([text for text, _ in batch], batch_size=len(batch))
        if len(batch) == 1:  # fill-mask returns one result without a list
            outputs = [outputs]
        for (_, result), output in zip(batch, outputs, strict=True):
            await result.put(output)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    task = asyncio.create_task(serve())
    yield
    task.cancel()


if __name__ == "__main__":
    app = Starlette(routes=[Route("/", fill_mask, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
