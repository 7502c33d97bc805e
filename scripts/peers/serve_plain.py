#!/usr/bin/env python3
"""serve_plain.py MODEL PORT: a plain server around transformers' speech pipeline, one recording at
a time, as in its documentation. A peer for scripts/bench.py."""

import io
import sys
import threading
from typing import Any

import soundfile
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import pipeline

OPTIONS = {"num_beams": 1, "language": "en", "task": "transcribe"}


def main() -> None:
    pipe: Any = pipeline("automatic-speech-recognition", model=sys.argv[1], device="cpu")
    lock = threading.Lock()

    def transcribe(data: bytes) -> Any:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        audio = {"raw": samples, "sampling_rate": rate}
        with lock:
            return pipe(audio, return_timestamps=True, generate_kwargs=dict(OPTIONS))

    async def transcriptions(request: Request) -> JSONResponse:
        form = await request.form()
        file: Any = form["file"]
        return JSONResponse(await run_in_threadpool(transcribe, await file.read()))

    app = Starlette(routes=[Route("/v1/audio/transcriptions", transcriptions, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
