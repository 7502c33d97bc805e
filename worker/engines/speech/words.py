"""Words of a Whisper transcript, from the bytes of its tokens.

    bytes of tokens → whole characters → words → words with adjacent punctuation

transcript.py adds the times. transformers groups words the same way, in private functions
(_combine_tokens_into_words).
"""

from collections.abc import Iterator, Sequence
from string import punctuation

# Languages without spaces between words: each character is a word.
UNSPACED_LANGUAGES = {"zh", "ja", "th", "lo", "my", "yue"}
OPENING_PUNCTUATION = "\"'“¿¡([{-"  # after a space, part of the next word
CLOSING_PUNCTUATION = "\"'.。,，!！?？:：”)]}、"

# A text, and the indices of its tokens.
WordTokens = tuple[str, list[int]]


def split_words(tokens: Sequence[bytes], language: str) -> list[WordTokens]:
    """Return words whose joined texts are the transcript. `language` is a code."""
    characters = split_characters(tokens)
    words = characters if language in UNSPACED_LANGUAGES else join_characters(characters)
    return list(merge_punctuation(words))


def split_characters(tokens: Sequence[bytes]) -> Iterator[WordTokens]:
    """Group the tokens that share a character."""
    data, indices = b"", list[int]()
    for index, token in enumerate(tokens):
        if indices and not 0x80 <= token[0] < 0xC0:
            yield data.decode(errors="replace"), indices
            data, indices = b"", []
        data += token
        indices.append(index)
    if indices:
        yield data.decode(errors="replace"), indices


def join_characters(characters: Iterator[WordTokens]) -> Iterator[WordTokens]:
    """Join characters to words that begin at a space; punctuation is a word by itself."""
    word: WordTokens | None = None
    for text, indices in characters:
        if word is None:
            word = text, indices
        elif text.startswith(" ") or text.strip() in punctuation:
            yield word
            word = text, indices
        else:
            word = word[0] + text, word[1] + indices
    if word is not None:
        yield word


def merge_punctuation(words: Iterator[WordTokens]) -> Iterator[WordTokens]:
    word, opens = ("", list[int]()), True
    for text, indices in words:
        if opens or (text in CLOSING_PUNCTUATION and not word[0].endswith(" ")):
            word = word[0] + text, word[1] + indices
        else:
            yield word
            word = text, indices
        opens = text.startswith(" ") and text.strip() in OPENING_PUNCTUATION
    if word[1]:
        yield word
