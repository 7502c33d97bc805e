"""Text that a client keeps for the server: sealed, so that the client neither reads nor changes it.

Reasoning that is not shown comes back with the next request. Nothing is stored: the key is the
process's own, and a text that another process has sealed is not opened.
"""

import base64
import binascii
import hashlib
import hmac
import secrets

_CIPHER_KEY, _TAG_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
_NONCE_BYTES = _TAG_BYTES = 16


def seal(text: str) -> str:
    """Return a text in base64: SHAKE-256 encrypts it, keyed BLAKE2b authenticates it."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = nonce + _apply_key_stream(nonce, text.encode())
    return base64.b64encode(sealed + _tag(sealed)).decode()


def unseal(sealed: str) -> str | None:
    """Return the text; None if this process has not sealed it."""
    try:
        content = base64.b64decode(sealed, validate=True)
    except (binascii.Error, ValueError):
        return None
    content, tag = content[:-_TAG_BYTES], content[-_TAG_BYTES:]
    if len(content) < _NONCE_BYTES or not hmac.compare_digest(tag, _tag(content)):
        return None
    nonce, encrypted = content[:_NONCE_BYTES], content[_NONCE_BYTES:]
    return _apply_key_stream(nonce, encrypted).decode()


def _tag(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_TAG_BYTES, key=_TAG_KEY).digest()


def _apply_key_stream(nonce: bytes, content: bytes) -> bytes:
    stream = hashlib.shake_256(_CIPHER_KEY + nonce).digest(len(content))
    mixed = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
    return mixed.to_bytes(len(content), "little")
