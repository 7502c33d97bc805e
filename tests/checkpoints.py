"""Folders that look like checkpoints, for what is decided before weights are read."""

import json
from pathlib import Path
from typing import Any

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file


def write_checkpoint(
    folder: Path, config: dict[str, Any], weights: str = "model.safetensors"
) -> str:
    """Write a configuration and, unless `weights` is empty, a file of that name without tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / weights).write_bytes(NO_TENSORS)
    return str(folder)
