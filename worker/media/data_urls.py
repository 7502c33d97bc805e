"""Base64 strings and data URLs in JSON, decoded to bytes.

Strings are never passed on: pipelines would open them as local paths or links. No torch.
"""

import base64
from typing import Any

from batching.errors import InvalidInput

SPACES = b" \t\n\r\v\f"


def to_bytes(value: Any, param: str) -> bytes:
    """Return bytes unchanged, and those of a string that is base64 or a base64 data URL. Raises
    InvalidInput for any other value."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        kind = type(value).__name__
        raise InvalidInput.at(param, f"must be a base64 string or a data: URL, not {kind}")
    encoded = value
    if value[:5].lower() == "data:":
        header, _, encoded = value.partition(",")
        if not header.lower().endswith(";base64"):
            raise InvalidInput.at(param, f"a data: URL must be in base64, not {header[:100]!r}")
    try:
        return base64.b64decode(encoded.encode("ascii").translate(None, SPACES), validate=True)
    except ValueError:  # also raised for text that is not ASCII
        invalid = "must be a base64 string or a data: URL; paths and links are not opened"
        raise InvalidInput.at(param, invalid) from None
