"""A text to speak, cut into sentences, which are spoken one by one."""

import re
from textwrap import wrap

MAX_SENTENCE = 240  # characters: models cut longer texts off, or lose their attention
SHORT = 40  # characters of a sentence that the next one joins

# Behind the end of a sentence, with its closing quote or bracket, and between paragraphs.
_END = re.compile(r"(?<=[.!?…;])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])|\n\s*")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, none without a letter or a digit; empty if it has none."""
    sentences: list[str] = []
    pieces = (piece for part in _END.split(text) for piece in wrap(part, MAX_SENTENCE))
    for piece in pieces:
        last = sentences[-1] if sentences else ""
        joins = len(last) < SHORT or not any(map(str.isalnum, piece))
        if last and joins and len(last) + len(piece) < MAX_SENTENCE:
            sentences[-1] = f"{last} {piece}"
        else:
            sentences.append(piece)
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]
