#!/usr/bin/env python3
"""serve_mosec.py MODEL PORT: Mosec around a fill-mask pipeline, batches of up to 16 within 10 ms.
A peer for scripts/bench.py; needs `pip install mosec`."""

import os
import sys
from typing import Any

import mosec
import orjson
from transformers import pipeline


class FillMaskWorker(mosec.Worker):  # type: ignore[misc]  # an untyped package
    def __init__(self) -> None:
        self.pipe = pipeline("fill-mask", model=os.environ["PEER_MODEL"])

    def deserialize(self, data: bytes) -> str:
        return data.decode()

    def serialize(self, data: Any) -> bytes:
        return orjson.dumps(data)

    def forward(self, texts: list[str]) -> Any:
        outputs = self.pipe(texts, batch_size=len(texts))
        return outputs if len(texts) > 1 else [outputs]


if __name__ == "__main__":
    os.environ["PEER_MODEL"], port = sys.argv[1:]  # the worker runs in another process
    sys.argv[1:] = ["--port", port, "--timeout", "60000"]
    server = mosec.Server()
    server.append_worker(FillMaskWorker, num=1, max_batch_size=16, max_wait_time=10)
    server.run()
