#!/usr/bin/env python3
"""What one would use instead, each around the same fill-mask pipeline: NAME MODEL PORT.

docs is the queue server of transformers' documentation page "Using pipelines for a webserver"
with its dynamic batching (an item more as long as one comes within a millisecond); litserve and
mosec are those frameworks with batches of up to 16 within 10 ms, as their own examples have it.
Needs transformers, and litserve or mosec for those two: `pip install litserve mosec`.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from transformers import pipeline

PATHS = {"docs": "/", "litserve": "/predict", "mosec": "/inference"}
BATCH, WAIT_S = 16, 0.01


def docs(model: str, port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    waiting: asyncio.Queue[tuple[str, asyncio.Queue[Any]]] = asyncio.Queue()

    async def answer(request: Request) -> JSONResponse:
        reply: asyncio.Queue[Any] = asyncio.Queue()
        await waiting.put(((await request.body()).decode(), reply))
        return JSONResponse(await reply.get())

    async def serve() -> None:
        pipe = pipeline("fill-mask", model=model)
        while True:
            batch = [await waiting.get()]
            with contextlib.suppress(TimeoutError):
                while True:
                    batch.append(await asyncio.wait_for(waiting.get(), 0.001))
            outputs = pipe([text for text, _ in batch], batch_size=len(batch))
            for (_, reply), output in zip(batch, listed(outputs, len(batch)), strict=True):
                await reply.put(output)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(serve())
        yield
        task.cancel()

    app = Starlette(routes=[Route("/", answer, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=port, log_level="warning")


def litserve(model: str, port: int) -> None:
    import litserve as ls

    class Fill(ls.LitAPI):  # type: ignore[misc]  # untyped package
        def setup(self, device: str) -> None:
            self.pipe = pipeline("fill-mask", model=model)

        def decode_request(self, request: dict[str, str]) -> str:
            return request["text"]

        def predict(self, texts: list[str]) -> Any:
            return listed(self.pipe(list(texts), batch_size=len(texts)), len(texts))

        def encode_response(self, output: Any) -> Any:
            return {"output": output}

    api = Fill(max_batch_size=BATCH, batch_timeout=WAIT_S)
    ls.LitServer(api, accelerator="cpu").run(port=port, num_api_servers=1, log_level="warning")


def mosec(model: str, port: int) -> None:
    import mosec as ms
    import orjson

    class Fill(ms.Worker):  # type: ignore[misc]  # untyped package
        def __init__(self) -> None:
            self.pipe = pipeline("fill-mask", model=model)

        def deserialize(self, data: bytes) -> str:
            return data.decode()

        def serialize(self, data: Any) -> bytes:
            return orjson.dumps(data)

        def forward(self, texts: list[str]) -> Any:
            return listed(self.pipe(texts, batch_size=len(texts)), len(texts))

    sys.argv = ["mosec", "--port", str(port), "--timeout", "60000"]
    server = ms.Server()
    server.append_worker(Fill, num=1, max_batch_size=BATCH, max_wait_time=int(WAIT_S * 1000))
    server.run()


def listed(outputs: Any, count: int) -> Any:
    """fill-mask answers a list of one without the list."""
    return outputs if count > 1 else [outputs]


if __name__ == "__main__":
    name, model, port = sys.argv[1:]
    {"docs": docs, "litserve": litserve, "mosec": mosec}[name](model, int(port))
