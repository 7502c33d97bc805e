"""A Whisper checkpoint's special tokens: what its decoder is started with, and what it never says.

As transformers' `generate` reads them from the checkpoint's generation_config.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from worker.model.loading import LoadingFailed
from worker.speech import words

alphabet: Any = bytes_to_unicode  # of byte-level BPE; it has no types
BYTE_OF: dict[str, int] = {letter: byte for byte, letter in alphabet().items()}
START_OF_PROMPT = "<|startofprev|>"


class WhisperVocabulary:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any, positions: int) -> None:
        """`config` is the generation_config; LoadingFailed if it says nothing of timestamps."""
        self.tokenizer = tokenizer
        self.start: int = config.decoder_start_token_id
        self.end: int = config.eos_token_id
        if not hasattr(config, "no_timestamps_token_id"):
            raise LoadingFailed("its generation_config.json has no no_timestamps_token_id")
        self.no_timestamps: int = config.no_timestamps_token_id
        self.timestamps: int = self.no_timestamps + 1  # the first
        self.no_speech: int = self.no_timestamps - 1
        multilingual = getattr(config, "is_multilingual", True)
        languages = getattr(config, "lang_to_id", None) or {}
        self.languages: dict[str, int] = {
            name.strip("<|>"): token for name, token in languages.items() if multilingual
        }
        tasks = getattr(config, "task_to_id", None) or {}
        self.tasks: dict[str, int] = tasks if multilingual else {}
        self.never: Sequence[int] = config.suppress_tokens or ()
        self.never_first: Sequence[int] = config.begin_suppress_tokens or ()
        self.latest_first: int | None = getattr(config, "max_initial_timestamp_index", None)
        self.most_prompt = positions // 2 - 1

    def language(self, given: str | None) -> str | None:
        """The code of a language that a request names; None: the model is to tell."""
        if given is None:
            return None if self.languages else "en"
        code = given.lower()
        code = TO_LANGUAGE_CODE.get(code, code)
        if code not in (self.languages or ("en",)):
            raise InvalidInput.at("language", f"the model does not know {given!r}")
        return code

    def language_name(self, code: str | None) -> str:
        """As OpenAI names it; empty where there is none."""
        return LANGUAGES.get(code, code) if code else ""

    def prompt(self, text: str) -> list[int]:
        """What comes before the start: the mark of a text and its end; nothing if it is empty."""
        if not text.strip():
            return []
        encode: Any = self.tokenizer
        ids = encode(" " + text.strip(), add_special_tokens=False)["input_ids"]
        if any(token >= self.end for token in ids):
            raise InvalidInput.at("prompt", "it contains a special token of the model")
        return [self.before, *ids[-self.most_prompt :]]

    @property
    def before(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(START_OF_PROMPT))  # type: ignore[arg-type]

    def begin(self, language: str, task: str) -> list[int]:
        """The start, with the language and task that a multilingual model is told."""
        if not self.languages:
            return [self.start]
        return [self.start, self.languages[language], *self.task(task)]

    def task(self, task: str) -> list[int]:
        """InvalidInput if the model was not made for it."""
        if task in self.tasks:
            return [self.tasks[task]]
        if task == "translate":
            raise InvalidInput("the model does not translate: it knows English alone", "model")
        return []

    def words(self, tokens: Sequence[int], language: str) -> list[words.Piece]:
        """Text of each word and which of the tokens it has; `language` is a code."""
        return words.split([self.raw(token) for token in tokens], language)

    def raw(self, token: int) -> bytes:
        """Of one of a text; it may be part of a character."""
        letters: Any = self.tokenizer.convert_ids_to_tokens(token)
        if all(letter in BYTE_OF for letter in letters):
            return bytes(BYTE_OF[letter] for letter in letters)
        return str(letters).encode()  # an added one

    def text(self, tokens: Sequence[int]) -> str:
        said = [token for token in tokens if token < self.end]
        return str(self.tokenizer.decode(said, skip_special_tokens=True))
