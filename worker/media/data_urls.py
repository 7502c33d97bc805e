"""Bytes that came as base64 in JSON. Torch-free.

Strings are decoded and never handed on: pipelines open strings as local paths or links.
"""

import base64
from typing import Any

from batching.errors import InvalidInput


def to_bytes(value: Any, param: str) -> bytes:
    """Bytes as they are; a JSON string must be base64 or a base64 data URL."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput("must be a base64 string or a data: URL", param)
    encoded = value
    if value[:5].lower() == "data:":
        header, _, encoded = value.partition(",")
        if not header.lower().endswith(";base64"):
            raise InvalidInput("a data: URL must be base64-encoded", param)
    try:
        return base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError:  # also what is not ASCII
        unopened = "must be a base64 string or a data: URL; paths and links are not opened"
        raise InvalidInput(unopened, param) from None
