#!/usr/bin/env python3
"""serve.py NAME [MODEL] PORT: small servers that scripts/bench.py compares with this one.

docs     the queue server of transformers' documentation page "Using pipelines for a webserver"
         around a fill-mask pipeline, with its dynamic batching: a batch grows while items arrive
         within a millisecond of each other
plain    a server around transformers' speech pipeline, one recording at a time
bare     a route that returns its body
instant  this server with a model that returns the input text at once, so that only the server's own
         cost remains
"""

import asyncio
import contextlib
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def routed(path: str, endpoint: Callable[[Request], Awaitable[Response]], **more: Any) -> Starlette:
    return Starlette(routes=[Route(path, endpoint, methods=["POST"])], **more)


def docs(model: str) -> Any:
    waiting: asyncio.Queue[tuple[str, asyncio.Queue[Any]]] = asyncio.Queue()

    async def fill_mask(request: Request) -> Response:
        result: asyncio.Queue[Any] = asyncio.Queue()
        await waiting.put(((await request.body()).decode(), result))
        return JSONResponse(await result.get())

    async def serve() -> None:
        pipe = importlib.import_module("transformers").pipeline("fill-mask", model=model)
        while True:
            batch = [await waiting.get()]
            with contextlib.suppress(TimeoutError):
                while True:
                    batch.append(await asyncio.wait_for(waiting.get(), 0.001))
            outputs = pipe([text for text, _ in batch], batch_size=len(batch))
            if len(batch) == 1:  # fill-mask returns one result without a list
                outputs = [outputs]
            for (_, result), output in zip(batch, outputs, strict=True):
                await result.put(output)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(serve())
        yield
        task.cancel()

    return routed("/", fill_mask, lifespan=lifespan)


def plain(model: str) -> Any:
    from in_process import speech

    call, lock = speech(model), threading.Lock()

    def transcribe(form: bytes) -> object:
        with lock:
            return call(form)

    async def transcriptions(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(transcribe, await request.body()))

    return routed("/v1/audio/transcriptions", transcriptions)


def bare() -> Any:
    async def echo(request: Request) -> Response:
        return Response(b'"' + await request.body() + b'"', media_type="application/json")

    return routed("/", echo)


def instant() -> Any:
    from server.app import create_app
    from server.core.settings import load_settings
    from worker.messages.protocol import ALONE, ModelInfo, OtherModels

    class InstantRunner:
        text_model = None
        others: OtherModels = ALONE
        info = ModelInfo("fill-mask", "instant", "none", "none", 0, "packed")

        def prepare(self, item: Any) -> None:
            item.prepared = item.payload.inputs

        def forward(self, prepared: list[str]) -> list[str]:
            return prepared

        def finish(self, item: Any, raw: str) -> bytes:
            return b'"' + raw.encode() + b'"'

        def warm_up(self) -> None:
            pass

    settings = replace(load_settings(), chat_model="none", embedding_model="none")
    return create_app(settings, InstantRunner)


SERVERS: dict[str, Callable[..., Any]] = {
    make.__name__: make for make in (docs, plain, bare, instant)
}


if __name__ == "__main__":
    name, *model, port = sys.argv[1:]
    app = SERVERS[name](*model)
    uvicorn.run(app, port=int(port), access_log=False, log_level="warning")
