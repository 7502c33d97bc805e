"""Whisper-type models: windows through the encoder, then a token of each window at a time.

    begin (encode → cross-attention's keys and values → language → prompt) → step, step, …

Windows of several recordings share a forward, and join and leave between any two steps. What they
said is judged in transcript.py; where their words are in time, in alignment.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isnan
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batching.errors import ItemFailed
from worker.model.sampler import uniform
from worker.speech.cache import RowCache
from worker.speech.logits_rules import LogitsRules
from worker.speech.vocabulary import WhisperVocabulary
from worker.speech.work import SpeechRunner


@dataclass(eq=False, slots=True)
class Window:
    """A stretch of a recording on its way through the decoder, and what has been said so far."""

    features: Tensor  # [mels, frames]
    frames: int  # that are sound
    seek: int  # where it begins, in frames
    before: Sequence[int]  # what its prompt begins with
    language: str | None  # None: it is asked of the model
    task: str
    temperature: float = 0.0
    attempt: int = 0
    row: int = -1  # in the cache; -1: none
    prompt: Sequence[int] = ()
    said: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of what was said
    no_speech: float = 0.0
    ended: bool = False
    owner: Any = None  # the item that it is of

    def begin_again(self, temperature: float) -> None:
        self.temperature = temperature
        self.attempt += 1
        self.said, self.logprobs, self.ended = [], [], False


class WhisperRunner(SpeechRunner):
    """`running` are in the order of rows."""

    def __init__(self, model: PreTrainedModel, vocabulary: WhisperVocabulary, rows: int) -> None:
        super().__init__(model, rows)
        parts: Any = model
        config, defaults = parts.config, parts.generation_config
        self.encoder, self.decoder = parts.model.encoder, parts.model.decoder
        self.vocabulary = vocabulary
        self.device = model.device
        self.rules = LogitsRules(vocabulary, model.device)
        self.cache = RowCache(model, rows)
        self.positions: int = config.max_target_positions
        # tokens that are said of a window at most
        self.most_new: int = defaults.max_new_tokens or defaults.max_length or self.positions
        self._heads: int = config.decoder_attention_heads

    @property
    def head(self) -> Any:
        return self.model.proj_out

    @torch.inference_mode()
    def begin(self, windows: Sequence[Window]) -> None:
        for window in windows:
            if window.row < 0:
                window.row = len(self.running)
                self.running.append(window)
        self._encode(windows)
        self._tell_languages([window for window in windows if window.language is None])
        self._prompt(windows)

    @torch.inference_mode()
    def step(self, windows: Sequence[Window]) -> None:
        going = [window for window in windows if window.said and not window.ended]
        self._prompt(windows)
        if going:
            starts = [len(window.prompt) + len(window.said) - 1 for window in going]
            hidden = self._decode([[window.said[-1]] for window in going], going, starts)
            self._say(going, self.head(hidden[:, 0]))

    def leave(self, window: Window) -> None:
        """The last window's row moves there."""
        if window.row < 0:
            return
        last = self.running.pop()
        if last is not window:
            self.cache.move(last.row, window.row)
            self.running[window.row] = last
            last.row = window.row
        window.row = -1

    @torch.inference_mode()
    def replay(self, window: Window, tokens: Sequence[int]) -> None:
        """All of its prompt and `tokens` through the decoder once more, for whoever watches."""
        self._decode([[*window.prompt, *tokens]], [window], 0)

    # ── parts of a step ──

    def _prompt(self, windows: Sequence[Window]) -> None:
        """The first token of those that have none."""
        windows = [window for window in windows if not window.said]
        for window in windows:
            assert window.language is not None
            begin = self.vocabulary.begin(window.language, window.task)
            window.prompt = [*window.before, *begin]
        for length, group in groupby(windows, lambda window: len(window.prompt)):
            members = list(group)
            hidden = self._decode([list(each.prompt) for each in members], members, 0)
            starts = [len(each.before) for each in members]
            at_start = self.head(hidden[range(len(members)), starts]).float().softmax(1)
            told = at_start[:, self.vocabulary.no_speech].tolist()
            for window, probability in zip(members, told, strict=True):
                window.no_speech = probability
            self._say(members, self.head(hidden[:, length - 1]))

    def _encode(self, windows: Sequence[Window]) -> None:
        features = torch.stack([window.features for window in windows])
        hidden = self.encoder(features.to(self.device, self.model.dtype)).last_hidden_state
        rows = [window.row for window in windows]
        for layer, (keys, values) in zip(self.decoder.layers, self.cache.cross, strict=True):
            attention = layer.encoder_attn
            for kept, project in ((keys, attention.k_proj), (values, attention.v_proj)):
                shaped = project(hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2)
                kept[rows] = shaped

    def _tell_languages(self, windows: Sequence[Window]) -> None:
        if not windows:
            return
        vocabulary = self.vocabulary
        hidden = self._decode([[vocabulary.start]] * len(windows), windows, 0)
        codes, tokens = list(vocabulary.languages), list(vocabulary.languages.values())
        best = self.head(hidden[:, 0])[:, tokens].argmax(1).tolist()
        for window, index in zip(windows, best, strict=True):
            window.language = codes[index]

    def _decode(
        self, tokens: list[list[int]], windows: Sequence[Window], starts: int | Sequence[int]
    ) -> Tensor:
        """Hidden states [R, N, size] of tokens that begin at `starts`."""
        ids = torch.tensor(tokens, device=self.device)
        first = torch.tensor(starts, device=self.device).expand(len(windows))
        positions = first[:, None] + torch.arange(ids.shape[1], device=self.device)
        self.cache.at([window.row for window in windows], positions)
        decoder, mask = self.decoder, self.cache.mask()
        hidden: Tensor = decoder.embed_tokens(ids) + decoder.embed_positions.weight[positions]
        for layer in decoder.layers:
            # cross-attention is asked for by what it would be made from: the cache has it made
            hidden = layer(hidden, mask, hidden, past_key_values=self.cache, use_cache=True)
        made: Tensor = decoder.layer_norm(hidden)
        return made

    def _say(self, windows: Sequence[Window], logits: Tensor) -> None:
        logprobs = self.rules.logprobs(logits, [window.said for window in windows])
        tokens = logprobs.argmax(1)
        for row, window in enumerate(windows):
            if window.temperature > 0:
                tokens[row] = _drawn(logprobs[row], window)
        found = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        if any(map(isnan, found)):
            raise ItemFailed("the model's output for this input is no number")
        for window, token, logprob in zip(windows, tokens.tolist(), found, strict=True):
            window.said.append(token)
            window.logprobs.append(logprob)
            room = min(self.most_new, self.positions - len(window.prompt))
            window.ended = token == self.vocabulary.end or len(window.said) >= room


def _drawn(logprobs: Tensor, window: Window) -> int:
    """By the inverse distribution function, so that a request says the same again."""
    bounds = (logprobs / window.temperature).softmax(0).cumsum(0)
    number = uniform(window.seek, window.attempt, len(window.said)) * float(bounds[-1])
    return int(torch.searchsorted(bounds, number).clamp(max=len(bounds) - 1))
