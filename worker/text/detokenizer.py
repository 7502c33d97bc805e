"""Token ids to text, token by token, and pieces of that text that know their tokens.

A Vocabulary is made once per tokenizer. It gives each sequence a stream, which turns ids into
text that will not change any more. Byte-level BPE is a table of bytes and a UTF-8 decoder; other
tokenizers decode a short window of tokens. Nothing here encodes or sets truncation and padding,
and of a fast tokenizer only table and decoder are kept, so that other threads may encode
meanwhile; all but those that edit their decoder's text.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple, TypeAlias

from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from worker.messages.deltas import TokenLogprob

# The last prompt tokens that a stream looks at.
CONTEXT = 8
# Tokens pending for a character that does not end; then they are shown as they are.
MAX_INCOMPLETE = 8
# Tokens pending because they add no text yet, such as spaces that a decoder strips at the end.
MAX_SILENT = 64
REPLACEMENT = "\ufffd"

Join = Callable[[list[Any]], str]  # the text of pieces; a piece is what stands for a token
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
alphabet: Any = bytes_to_unicode  # of byte-level BPE; it has no types
BYTE_OF: dict[str, int] = {letter: byte for byte, letter in alphabet().items()}


# A token that has text, after those that have none: part of its first character.
Tokens: TypeAlias = tuple[TokenLogprob, ...]


class TokenSpan(NamedTuple):
    """What a piece has of one token's text. All shares of a token have the same `tokens`."""

    text: str
    tokens: Tokens
    ends: bool = True  # with the end of the token's text


@dataclass(slots=True)
class TextSpan:
    """A stretch of text, and the shares of tokens that it is made of; none if nobody asks."""

    text: str
    shares: list[TokenSpan] = field(default_factory=list)

    def append(self, other: "TextSpan") -> None:
        self.text += other.text
        self.shares += other.shares

    def take(self, count: int) -> "TextSpan":
        """The first `count` characters, which leave this piece."""
        if count >= len(self.text):
            taken, self.text, self.shares = TextSpan(self.text, self.shares), "", []
            return taken
        taken = TextSpan(self.text[:count])
        self.text = self.text[count:]
        if self.shares:
            whole = 0
            while whole < len(self.shares) and len(self.shares[whole].text) <= count:
                count -= len(self.shares[whole].text)
                whole += 1
            taken.shares, self.shares = self.shares[:whole], self.shares[whole:]
            if count and self.shares:
                text, tokens, ends = self.shares[0]
                taken.shares.append(TokenSpan(text[:count], tokens, ends=False))
                self.shares[0] = TokenSpan(text[count:], tokens, ends)
        return taken


class Vocabulary:
    """A tokenizer's ids as text, fast or slow; shared by all sequences and threads."""

    def __init__(self, tokenizer: Any, marks: Callable[[str], bool] | None = None) -> None:
        """`marks`: special tokens that are text all the same, since a reader looks for them."""
        ask: Join = partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        fast = getattr(tokenizer, "is_fast", False)
        tokens = {i: token for token, i in tokenizer.get_vocab().items()}
        if fast:
            added = tokenizer.added_tokens_decoder.items()
            special = {i: token.content for i, token in added if token.special}
        else:
            names = (str(name) for name in tokenizer.all_special_tokens)
            special = dict(zip(tokenizer.all_special_ids, names, strict=True))
        ids = list(range(max(tokens, default=-1) + 1))
        self._special: dict[int, str] = special
        self._hidden = {i for i, token in special.items() if not (marks and marks(token))}
        self._described: dict[int, tuple[str, bytes]] = {}
        if fast:
            decoder = tokenizer.backend_tokenizer.decoder
            if _is_byte_level(decoder):
                self._use({i: _bytes(token) for i, token in tokens.items()}, _join_bytes)
            else:
                self._use(tokens, " ".join if decoder is None else decoder.decode)
        # some classes edit what their decoder gives, as CLIP and Whisper do: the vocabulary tells
        if not fast or self.text_of(ids, skip_special=False) != ask(ids):
            self._use({i: i for i in ids}, ask)

    def _use(self, pieces: dict[int, Any], join: Join) -> None:
        self._pieces, self._join = pieces, join
        self._visible = {i: piece for i, piece in pieces.items() if i not in self._hidden}

    def text_of(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """A whole sequence, as `tokenizer.decode` without cleaning up has it."""
        pieces = self._visible if skip_special else self._pieces
        return self._join([pieces[i] for i in ids if i in pieces])

    def token(self, token_id: int) -> tuple[str, bytes]:
        """One token as it reads inside a text, with its leading space: the text to show, and its
        bytes, which may be part of a character. ("", b"") outside the vocabulary."""
        if (known := self._described.get(token_id)) is None:
            known = self._described[token_id] = self._describe(token_id)
        return known

    def _describe(self, token_id: int) -> tuple[str, bytes]:
        piece = self._pieces.get(token_id)
        if piece is None:
            return "", b""
        alone = self._join([piece])
        if isinstance(piece, bytes):
            return alone, piece
        # after itself, since decoders treat the first token of a text otherwise
        text = self._special.get(token_id) or self._join([piece, piece])[len(alone) :]
        byte = BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) and piece != alone else None
        return text, bytes.fromhex(byte[1]) if byte else text.encode()

    def stream(
        self, context: Sequence[int], skip_special: bool = True
    ) -> "_ByteStream | _WindowStream":
        """The text of the ids to come. `context`: the prompt's last ids, or all of them; some
        decoders write a token otherwise where no text precedes it.

        The joined pushes and the flush are what decoding the context and the ids adds to decoding
        the context alone; ids outside the vocabulary add nothing. Not so where a decoder rewrites
        what it gave before: what was shown stays. With byte fallback (`<0xE5>`) a run of byte
        tokens that turns out to be invalid UTF-8 decodes to one U+FFFD per token, its whole
        characters included; CTRL's "@@" vanishes once a word follows.
        """
        pieces = self._visible if skip_special else self._pieces
        before = [*islice((pieces[i] for i in reversed(context) if i in pieces), CONTEXT)][::-1]
        if self._join is _join_bytes:
            return _ByteStream(pieces, before)
        return _WindowStream(pieces, before, self._join)


def _is_byte_level(decoder: Any) -> bool:
    if isinstance(decoder, decoders.Sequence):
        kinds = [part["type"] for part in json.loads(decoder.__getstate__())["decoders"]]
        return kinds in (["ByteLevel"], ["ByteLevel", "Fuse"])
    return isinstance(decoder, decoders.ByteLevel)


def _bytes(token: str) -> bytes:
    """As the ByteLevel decoder has it, for added tokens too: what its alphabet lacks is text."""
    try:
        return bytes(map(BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _join_bytes(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


class _ByteStream:
    def __init__(self, pieces: Mapping[int, bytes], before: Iterable[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(before))
        # a context that ends inside a character: its own text has U+FFFD for that
        self._replaced = self._decoder.getstate()[0].decode("utf-8", "replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now: "" while a character is incomplete."""
        return self._added(self._decoder.decode(self._pieces.get(token_id, b"")))

    def flush(self) -> str:
        """What was pending, at the end: incomplete bytes become U+FFFD."""
        return self._added(self._decoder.decode(b"", final=True))

    def _added(self, text: str) -> str:
        """To the context's own text."""
        if self._replaced and text:
            text, self._replaced = text.removeprefix(self._replaced), ""
        return text


class _WindowStream:
    """Decodes the tokens shown last together with the pending ones, and takes off the text of the
    former. Both are few, so that a token's cost does not grow with the text."""

    def __init__(self, pieces: Mapping[int, Any], before: list[Any], join: Join) -> None:
        self._pieces = pieces
        self._join = join
        # one that begins inside a character would spoil the bytes that follow
        whole = (before[n:] for n in range(len(before)) if REPLACEMENT not in join(before[n:]))
        self._shown = next(whole, before)
        self._shown_text = join(self._shown)
        self._pending: list[Any] = []

    def push(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            return ""
        self._pending.append(piece)
        new = self._new_text()
        most = MAX_INCOMPLETE if new else MAX_SILENT
        if len(self._pending) < most and (not new or new.endswith(REPLACEMENT)):
            return ""
        return self._show(new)

    def flush(self) -> str:
        return self._show(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        text = self._join(self._shown + self._pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        if self._shown_text.endswith(REPLACEMENT):  # a character that is complete only now
            both = commonprefix([text, self._shown_text])  # noqa: RUF071  # no paths
            return text[len(both) :]
        return self._join(self._pending)  # an invalid run of bytes rewrote what was shown

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending, []
        self._shown_text = self._join(self._shown)
        return text
