"""Sealed text: opened by the process that sealed it, and unchanged only."""

import base64

from server.core.sealing import seal, unseal


def test_a_sealed_text_is_opened_again() -> None:
    for text in ("", "a", "wörld " * 10_000):
        assert unseal(seal(text)) == text
    assert seal("a") != seal("a")
    assert "secret" not in base64.b64decode(seal("secret")).decode("latin-1")


def test_a_changed_or_foreign_text_is_not_opened() -> None:
    content = base64.b64decode(seal("text"))
    for index in range(len(content)):
        changed = bytes([*content[:index], content[index] ^ 1, *content[index + 1 :]])
        assert unseal(base64.b64encode(changed).decode()) is None
    for text in ("", "?", "wörld", "QUJD", base64.b64encode(content[:20]).decode()):
        assert unseal(text) is None
