#!/usr/bin/env python3
"""serve_instant.py PORT: this server with a model that returns the input text at once, so that only
the server's own cost remains. A peer for scripts/bench.py."""

import sys
from dataclasses import replace
from typing import Any

import uvicorn

from server.app import create_app
from server.core.settings import load_settings
from worker.messages.protocol import ALONE, ModelInfo, OtherModels


class InstantRunner:
    text_model = None

    def __init__(self) -> None:
        self.others: OtherModels = ALONE
        self.info = ModelInfo("fill-mask", "instant", "none", "none", 0, "packed")

    def prepare(self, item: Any) -> None:
        item.prepared = item.payload.inputs

    def forward(self, prepared: list[str]) -> list[str]:
        return prepared

    def finish(self, item: Any, raw: str) -> bytes:
        return b'"' + raw.encode() + b'"'

    def warm_up(self) -> None:
        pass


if __name__ == "__main__":
    settings = replace(load_settings(), chat_model="none", embedding_model="none")
    uvicorn.run(create_app(settings, InstantRunner), port=int(sys.argv[1]), access_log=False)
