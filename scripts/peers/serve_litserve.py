#!/usr/bin/env python3
"""serve_litserve.py MODEL PORT: LitServe around a fill-mask pipeline, batches of up to 16 within
10 ms. A peer for scripts/bench.py; needs `pip install litserve`."""

import os
import sys
from typing import Any

import litserve
from transformers import pipeline


class FillMask(litserve.LitAPI):  # type: ignore[misc]  # an untyped package
    def setup(self, device: str) -> None:
        self.pipe = pipeline("fill-mask", model=os.environ["PEER_MODEL"])

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def predict(self, texts: list[str]) -> Any:
        outputs = self.pipe(list(texts), batch_size=len(texts))
        return outputs if len(texts) > 1 else [outputs]

    def encode_response(self, output: Any) -> Any:
        return {"output": output}


if __name__ == "__main__":
    os.environ["PEER_MODEL"] = sys.argv[1]  # the worker runs in another process
    api = FillMask(max_batch_size=16, batch_timeout=0.01)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(
        port=int(sys.argv[2]),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
    )
