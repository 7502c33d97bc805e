"""Token ids to text, one token at a time, and spans of that text with the tokens behind them.

    Vocabulary (one per tokenizer) → stream (one per sequence): push(id) → text, flush() → text

output.py pushes each sampled token and passes the text on to the parser. A stream
returns only text that no later token changes. Byte-level BPE is decoded by a table of
bytes and an incremental UTF-8 decoder; other tokenizers decode a short window of tokens. Nothing
here encodes, or sets truncation or padding. Of a fast tokenizer only the vocabulary and the decoder
are kept, so that other threads may encode meanwhile, unless its class edits the decoded text.
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

CONTEXT = 8  # tokens of the prompt's end that a stream decodes along
MAX_INCOMPLETE = 8  # tokens pending for an incomplete character, before they are shown as they are
MAX_SILENT = 64  # tokens pending that add no text, such as spaces that a decoder strips at the end
REPLACEMENT = "\ufffd"

Unit: TypeAlias = Any  # a token as `Join` takes it: its bytes, its string or its id
Join = Callable[[list[Unit]], str]
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
byte_alphabet: Any = bytes_to_unicode  # of byte-level BPE; not annotated
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in byte_alphabet().items()}

# A token that adds text, after those before it that add none: parts of its first character.
Tokens: TypeAlias = tuple[TokenLogprob, ...]


class TokenSpan(NamedTuple):
    """The part of a token's text that lies in a span. All parts of a token have equal `tokens`."""

    text: str
    tokens: Tokens
    ends_token: bool = True


@dataclass(slots=True)
class TextSpan:
    """A stretch of text, and its tokens if log-probabilities are requested."""

    text: str
    token_spans: list[TokenSpan] = field(default_factory=list)

    def append(self, other: "TextSpan") -> None:
        self.text += other.text
        self.token_spans += other.token_spans

    def take(self, count: int) -> "TextSpan":
        """Remove and return the first `count` characters."""
        if count >= len(self.text):
            taken, self.text, self.token_spans = TextSpan(self.text, self.token_spans), "", []
            return taken
        taken = TextSpan(self.text[:count])
        self.text = self.text[count:]
        if self.token_spans:
            whole = 0
            while whole < len(self.token_spans) and len(self.token_spans[whole].text) <= count:
                count -= len(self.token_spans[whole].text)
                whole += 1
            taken.token_spans, self.token_spans = self.token_spans[:whole], self.token_spans[whole:]
            if count and self.token_spans:
                text, tokens, ends_token = self.token_spans[0]
                taken.token_spans.append(TokenSpan(text[:count], tokens, ends_token=False))
                self.token_spans[0] = TokenSpan(text[count:], tokens, ends_token)
        return taken


class Vocabulary:
    """The text of a tokenizer's ids, fast or slow; shared by all sequences and threads."""

    def __init__(self, tokenizer: Any, keeps_special: Callable[[str], bool] | None = None) -> None:
        """`keeps_special`: special tokens that remain text, such as delimiters."""
        decode: Join = partial(
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
        self._hidden = {
            i for i, token in special.items() if not (keeps_special and keeps_special(token))
        }
        self._token_cache: dict[int, tuple[str, bytes]] = {}
        if fast:
            decoder = tokenizer.backend_tokenizer.decoder
            if _is_byte_level(decoder):
                self._set_units({i: token_bytes(t) for i, t in tokens.items()}, _join_bytes)
            else:
                self._set_units(tokens, " ".join if decoder is None else decoder.decode)
        # Some classes edit the decoder's text, as CLIP and Whisper do: decoding all ids shows it.
        if not fast or self.decode(ids, skip_special=False) != decode(ids):
            self._set_units({i: i for i in ids}, decode)

    def _set_units(self, units: dict[int, Unit], join: Join) -> None:
        self._units, self._join = units, join
        self._visible = {i: unit for i, unit in units.items() if i not in self._hidden}

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of a whole sequence: `tokenizer.decode` without clean-up."""
        units = self._visible if skip_special else self._units
        return self._join([units[i] for i in ids if i in units])

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return one token as it reads inside a text, with its leading space: its text, and its
        bytes, which may be part of a character. ("", b"") outside the vocabulary."""
        if (cached := self._token_cache.get(token_id)) is None:
            cached = self._token_cache[token_id] = self._decode_token(token_id)
        return cached

    def _decode_token(self, token_id: int) -> tuple[str, bytes]:
        unit = self._units.get(token_id)
        if unit is None:
            return "", b""
        alone = self._join([unit])
        if isinstance(unit, bytes):
            return alone, unit
        # After itself, since decoders treat the first token of a text differently.
        text = self._special.get(token_id) or self._join([unit, unit])[len(alone) :]
        byte = BYTE_TOKEN.fullmatch(unit) if isinstance(unit, str) and unit != alone else None
        return text, bytes.fromhex(byte[1]) if byte else text.encode()

    def stream(
        self, context: Sequence[int], skip_special: bool = True
    ) -> "_ByteStream | _WindowStream":
        """Return a stream for the ids that follow `context`: the prompt's last ids, or all of them.
        Some decoders write a token differently at the start of a text.

        The joined pushes and the flush equal what decoding context and ids adds to decoding the
        context alone; ids outside the vocabulary add nothing. The exception is a decoder that
        rewrites earlier text: text that was returned stays. With byte fallback (`<0xE5>`), a run of
        byte tokens that turns out to be invalid UTF-8 decodes to one U+FFFD per token, even for the
        complete characters in it; CTRL's "@@" vanishes once a word follows.
        """
        units = self._visible if skip_special else self._units
        before = [*islice((units[i] for i in reversed(context) if i in units), CONTEXT)][::-1]
        if self._join is _join_bytes:
            return _ByteStream(units, before)
        return _WindowStream(units, before, self._join)


# Why not tokenizers.decoders.DecodeStream (0.23): it raises "Invalid prefix" when byte-fallback
# tokens turn out invalid, returns nothing and slows down with every token on endless invalid bytes
# (330 µs a token after 2,000), has no flush, takes no slow tokenizers, and at byte level costs 1.8
# times as much as _ByteStream.


class _ByteStream:
    """Byte-level BPE: bytes through an incremental UTF-8 decoder."""

    def __init__(self, units: Mapping[int, bytes], before: Iterable[bytes]) -> None:
        self._units = units
        self._incomplete = b""  # the beginning of a character
        self._decode(b"".join(before))
        # A context that ends inside a character was shown with U+FFFD for it.
        self._replaced = self._incomplete.decode("utf-8", "replace")

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._incomplete + data
        text, count = codecs.utf_8_decode(data, "replace", final)
        self._incomplete = data[count:]
        return text

    def push(self, token_id: int) -> str:
        """Return the text that is final now: "" while a character is incomplete."""
        return self._without_replaced(self._decode(self._units.get(token_id, b"")))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Do the same with several tokens."""
        data = b"".join([self._units.get(token_id, b"") for token_id in token_ids])
        return self._without_replaced(self._decode(data))

    def flush(self, cut: bool = False) -> str:
        """Return the pending text at the end: incomplete bytes become U+FFFD. They have no text
        where the output was `cut`, as by its limit."""
        return "" if cut else self._without_replaced(self._decode(b"", final=True))

    def _without_replaced(self, text: str) -> str:
        if self._replaced and text:
            text, self._replaced = text.removeprefix(self._replaced), ""
        return text


class _WindowStream:
    """Other decoders: decode the tokens returned last together with the pending ones, and remove
    the text of the former. Both are few, so that a token's cost does not grow with the text."""

    def __init__(self, units: Mapping[int, Unit], before: list[Unit], join: Join) -> None:
        self._units = units
        self._join = join
        # A window that starts inside a character would spoil the bytes that follow.
        whole = (before[n:] for n in range(len(before)) if REPLACEMENT not in join(before[n:]))
        self._shown = next(whole, before)
        self._shown_text = join(self._shown)
        self._pending: list[Unit] = []

    def push(self, token_id: int) -> str:
        """Return the text that is final now: "" while a character is incomplete."""
        unit = self._units.get(token_id)
        if unit is None:
            return ""
        self._pending = [*self._pending, unit]  # a copy of the stream keeps its own
        new = self._new_text()
        max_pending = MAX_INCOMPLETE if new else MAX_SILENT
        if len(self._pending) < max_pending and (not new or new.endswith(REPLACEMENT)):
            return ""
        return self._show(new)

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self, cut: bool = False) -> str:
        """Return the pending text at the end, without an incomplete character if it is `cut`."""
        if cut:
            self._drop_incomplete()
        return self._show(self._new_text()) if self._pending else ""

    def _drop_incomplete(self) -> None:
        """Drop the tokens of an incomplete character. The bytes of ids are not known: there a
        generated U+FFFD at the end counts as incomplete, too."""
        state = codecs.getincrementaldecoder("utf-8")("replace")
        for unit in self._pending:
            byte = BYTE_TOKEN.fullmatch(unit) if isinstance(unit, str) else None
            state.decode(bytes.fromhex(byte[1]) if byte else b" ")
        del self._pending[len(self._pending) - len(state.getstate()[0]) :]
        while self._pending and not isinstance(self._pending[-1], str):
            if not self._new_text().endswith(REPLACEMENT):
                break
            self._pending.pop()

    def _new_text(self) -> str:
        text = self._join(self._shown + self._pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        if self._shown_text.endswith(REPLACEMENT):  # a character that is complete only now
            common = commonprefix([text, self._shown_text])  # noqa: RUF071  # no paths
            return text[len(common) :]
        return self._join(self._pending)  # an invalid run of bytes rewrote shown text

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending, []
        self._shown_text = self._join(self._shown)
        return text


def _is_byte_level(decoder: Any) -> bool:
    if isinstance(decoder, decoders.Sequence):
        kinds = [part["type"] for part in json.loads(decoder.__getstate__())["decoders"]]
        return kinds in (["ByteLevel"], ["ByteLevel", "Fuse"])
    return isinstance(decoder, decoders.ByteLevel)


def token_bytes(token: str) -> bytes:
    """Return a token's bytes as the ByteLevel decoder has them. An added token with characters
    outside the byte alphabet is plain text."""
    try:
        return bytes(map(BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()


def _join_bytes(units: Iterable[bytes]) -> str:
    return b"".join(units).decode("utf-8", "replace")
