"""Special tokens of a Whisper checkpoint, text to tokens and back, and the words of a transcript.

The ids are read from the checkpoint's generation_config, as transformers' `generate` does. Used by
the decoder of a recording (transcript.py) and by the runner (whisper.py).
"""

from collections.abc import Iterator, Sequence
from string import punctuation
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from worker.model.loading import LoadingFailed
from worker.text.detokenizer import token_bytes

START_OF_PREVIOUS = "<|startofprev|>"
# Languages without spaces between words: each character is a word.
UNSPACED_LANGUAGES = {"zh", "ja", "th", "lo", "my", "yue"}
OPENING_PUNCTUATION = "\"'“¿¡([{-"  # after a space, part of the next word
CLOSING_PUNCTUATION = "\"'.。,，!！?？:：”)]}、"

# A text, and the indices of its tokens.
WordTokens = tuple[str, list[int]]


class WhisperVocabulary:
    """Raises LoadingFailed if the checkpoint has no timestamp tokens. `config`: its
    generation_config. `max_positions`: of the decoder."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any, max_positions: int) -> None:
        self.tokenizer = tokenizer
        self.start: int = config.decoder_start_token_id
        self.end: int = config.eos_token_id
        if not hasattr(config, "no_timestamps_token_id"):
            raise LoadingFailed("its generation_config.json has no no_timestamps_token_id")
        self.first_timestamp: int = config.no_timestamps_token_id + 1
        self.no_speech: int = config.no_timestamps_token_id - 1
        multilingual = getattr(config, "is_multilingual", True)
        languages = getattr(config, "lang_to_id", None) or {}
        self.languages: dict[str, int] = {
            name.strip("<|>"): token for name, token in languages.items() if multilingual
        }
        tasks = getattr(config, "task_to_id", None) or {}
        self.tasks: dict[str, int] = tasks if multilingual else {}
        self.max_context = max_positions // 2 - 1  # tokens

    # ── the decoder's prompt ──

    def parse_language(self, language: str | None) -> str | None:
        """Return the code of a language name or code; None if the model detects the language.
        Raises InvalidInput for a language that the model does not have."""
        if language is None:
            return None if self.languages else "en"
        code = language.lower()
        code = TO_LANGUAGE_CODE.get(code, code)
        if code not in (self.languages or ("en",)):
            raise InvalidInput.at("language", f"the model does not support {language!r}")
        return code

    def task_tokens(self, task: str) -> list[int]:
        """Raise InvalidInput if the model does not support the task."""
        if task in self.tasks:
            return [self.tasks[task]]
        if task == "translate":
            raise InvalidInput("the model does not translate: it supports English only", "model")
        return []

    def start_tokens(self, language: str, task: str) -> list[int]:
        """Return the start of a transcript, with language and task for a multilingual model."""
        if not self.languages:
            return [self.start]
        return [self.start, self.languages[language], *self.task_tokens(task)]

    def context_tokens(self, prompt: str) -> list[int]:
        """Return the context of a request's prompt, which precedes the start; empty for an empty
        prompt. Keeps the last `max_context` tokens. Raises InvalidInput for special tokens."""
        if not prompt.strip():
            return []
        ids: Any = self.tokenizer(" " + prompt.strip(), add_special_tokens=False)["input_ids"]
        if any(token >= self.end for token in ids):
            raise InvalidInput.at("prompt", "it contains a special token of the model")
        return [self.start_of_previous, *ids[-self.max_context :]]

    @property
    def start_of_previous(self) -> int:
        """The token that starts the context."""
        return int(self.tokenizer.convert_tokens_to_ids(START_OF_PREVIOUS))  # type: ignore[arg-type]

    # ── the transcript ──

    def text(self, tokens: Sequence[int]) -> str:
        text_tokens = [token for token in tokens if token < self.end]
        return str(self.tokenizer.decode(text_tokens, skip_special_tokens=True))

    def words(self, tokens: Sequence[int], language: str) -> list[WordTokens]:
        """Return each word's text and the indices of its tokens. `language` is a code."""
        characters = split_characters([self.token_bytes(token) for token in tokens])
        words = characters if language in UNSPACED_LANGUAGES else join_characters(characters)
        return list(merge_punctuation(words))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a text token, which may be part of a character."""
        return token_bytes(str(self.tokenizer.convert_ids_to_tokens(token)))


# ── words, as transformers groups them in private functions (_combine_tokens_into_words) ──


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
