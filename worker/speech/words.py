"""Words of a transcript, from the tokens that spell them.

bytes of tokens → whole characters → words → words with the marks that stand beside them
"""

from collections.abc import Iterator, Sequence
from string import punctuation

# Codes of languages that are written without spaces: each character is a word.
UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}
OPENING = "\"'“¿¡([{-"  # after a space, they belong to the next word
CLOSING = "\"'.。,，!！?？:：”)]}、"

# A text, and which tokens it is made of.
Piece = tuple[str, list[int]]


def split(tokens: Sequence[bytes], language: str) -> list[Piece]:
    """Their texts, joined, are the transcript. `language` is a code."""
    pieces = characters(tokens)
    return list(with_marks(pieces if language in UNSPACED else spaced(pieces)))


def characters(tokens: Sequence[bytes]) -> Iterator[Piece]:
    """A token that begins within a character comes with those that it began in."""
    raw, places = b"", list[int]()
    for place, token in enumerate(tokens):
        if places and not 0x80 <= token[0] < 0xC0:
            yield raw.decode(errors="replace"), places
            raw, places = b"", []
        raw += token
        places.append(place)
    if places:
        yield raw.decode(errors="replace"), places


def spaced(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """A word begins with a space; marks stand by themselves."""
    word: Piece | None = None
    for text, places in pieces:
        if word is None:
            word = text, places
        elif text.startswith(" ") or text.strip() in punctuation:
            yield word
            word = text, places
        else:
            word = word[0] + text, word[1] + places
    if word is not None:
        yield word


def with_marks(words: Iterator[Piece]) -> Iterator[Piece]:
    word, opens = ("", list[int]()), True
    for text, places in words:
        if opens or (text in CLOSING and not word[0].endswith(" ")):
            word = word[0] + text, word[1] + places
        else:
            yield word
            word = text, places
        opens = text.startswith(" ") and text.strip() in OPENING
    if word[1]:
        yield word
