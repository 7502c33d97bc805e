"""Whisper-type models: windows through the encoder, then through the decoder token by token.

    start: encoder → keys and values of cross-attention → language → prompt → first token
    step: one token of each window, …

Windows of several recordings share a forward; they join and leave between any two steps. Which
windows there are, and whether one is computed again, is decided in transcript.py; word times are
computed in alignment.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isnan
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperTimeStampLogitsProcessor

from batching.errors import ItemFailed
from worker.backends.recurrent import cache_argument
from worker.engines.speech.interfaces import SpeechRunner, Window
from worker.engines.speech.row_cache import RowCache
from worker.engines.speech.vocabulary import WhisperVocabulary
from worker.model.sampler import uniform


@dataclass(eq=False, slots=True)
class WhisperWindow(Window):
    """A window with its decoder prompt and the tokens generated so far."""

    features: Tensor  # [mels, frames]
    audio_frames: int  # without the padding
    seek: int  # where the window starts, in frames
    context: Sequence[int]  # of earlier windows or the request's prompt
    language: str | None  # None: detected
    task: str
    temperature: float = 0.0
    attempt: int = 0
    row: int = -1  # in the cache; -1: none
    prompt: Sequence[int] = ()  # the context and the start
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per token
    no_speech_prob: float = 0.0

    def restart(self, temperature: float) -> None:
        self.temperature = temperature
        self.attempt += 1
        self.tokens, self.logprobs, self.finished = [], [], False


class WhisperRunner(SpeechRunner[WhisperWindow]):
    """`running` windows are in the order of their rows."""

    def __init__(self, model: PreTrainedModel, vocabulary: WhisperVocabulary, rows: int) -> None:
        super().__init__(model, rows)
        untyped: Any = model
        config, generation_config = untyped.config, untyped.generation_config
        self.encoder, self.decoder = untyped.model.encoder, untyped.model.decoder
        self._cache_argument = cache_argument(self.decoder.layers[0])
        self.vocabulary = vocabulary
        self.device = model.device
        self.rules = LogitsRules(generation_config, model.device)
        self.cache = RowCache(model, rows)
        self.max_positions: int = config.max_target_positions
        self.max_new_tokens: int = (
            generation_config.max_new_tokens or generation_config.max_length or self.max_positions
        )
        self._heads: int = config.decoder_attention_heads

    @torch.inference_mode()
    def start(self, windows: Sequence[WhisperWindow]) -> None:
        for window in windows:
            if window.row < 0:
                window.row = len(self.running)
                self.running.append(window)
        self._encode(windows)
        self._detect_languages([window for window in windows if window.language is None])
        self._prefill(windows)

    @torch.inference_mode()
    def step(self, windows: Sequence[WhisperWindow]) -> None:
        decoding = [window for window in windows if window.tokens and not window.finished]
        self._prefill(windows)
        if decoding:
            starts = [len(window.prompt) + len(window.tokens) - 1 for window in decoding]
            hidden = self._decode([[window.tokens[-1]] for window in decoding], decoding, starts)
            self._sample(decoding, self.model.proj_out(hidden[:, 0]))

    def remove(self, window: WhisperWindow) -> None:
        """Move the last window's row into the freed one."""
        if window.row < 0:
            return
        last = self.running.pop()
        if last is not window:
            self.cache.move_row(last.row, window.row)
            self.running[window.row] = last
            last.row = window.row
        window.row = -1

    @torch.inference_mode()
    def replay(self, window: WhisperWindow, tokens: Sequence[int]) -> None:
        """Run the prompt and `tokens` through the decoder again, for its hooks."""
        self._decode([[*window.prompt, *tokens]], [window], [0])

    # ── parts of a step ──

    def _encode(self, windows: Sequence[WhisperWindow]) -> None:
        """Store keys and values of cross-attention."""
        features = torch.stack([window.features for window in windows])
        hidden = self.encoder(features.to(self.device, self.model.dtype)).last_hidden_state
        rows = [window.row for window in windows]
        layers = zip(self.decoder.layers, self.cache.cross_attention, strict=True)
        for layer, (keys, values) in layers:
            attention = layer.encoder_attn
            for stored, project in ((keys, attention.k_proj), (values, attention.v_proj)):
                stored[rows] = project(hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2)

    def _detect_languages(self, windows: Sequence[WhisperWindow]) -> None:
        if not windows:
            return
        languages = self.vocabulary.languages
        hidden = self._decode([[self.vocabulary.start]] * len(windows), windows, [0] * len(windows))
        codes, tokens = list(languages), list(languages.values())
        best = self.model.proj_out(hidden[:, 0])[:, tokens].argmax(1).tolist()
        for window, index in zip(windows, best, strict=True):
            window.language = codes[index]

    def _prefill(self, windows: Sequence[WhisperWindow]) -> None:
        """Run the prompts of windows without tokens and generate their first."""
        windows = [window for window in windows if not window.tokens]
        for window in windows:
            assert window.language is not None
            start = self.vocabulary.start_tokens(window.language, window.task)
            window.prompt = [*window.context, *start]
        for length, group in groupby(windows, lambda window: len(window.prompt)):
            members = list(group)
            hidden = self._decode(
                [list(window.prompt) for window in members], members, [0] * len(members)
            )
            starts = [len(window.context) for window in members]
            at_start = self.model.proj_out(hidden[range(len(members)), starts]).float().softmax(1)
            no_speech = at_start[:, self.vocabulary.no_speech].tolist()
            for window, probability in zip(members, no_speech, strict=True):
                window.no_speech_prob = probability
            self._sample(members, self.model.proj_out(hidden[:, length - 1]))

    def _decode(
        self,
        tokens: list[list[int]],
        windows: Sequence[WhisperWindow],
        starts: Sequence[int],
    ) -> Tensor:
        """Return hidden states [R, N, size] of tokens [R, N] at positions from `starts` on."""
        ids = torch.tensor(tokens, device=self.device)
        first, count = torch.tensor(starts, device=self.device), ids.shape[1]
        positions = first[:, None] + torch.arange(count, device=self.device)
        rows = [window.row for window in windows]
        self.cache.set_positions(rows, positions, width=max(starts) + count)
        decoder, mask = self.decoder, self.cache.mask()
        cached = {self._cache_argument: self.cache, "use_cache": True}
        hidden: Tensor = decoder.embed_tokens(ids) + decoder.embed_positions.weight[positions]
        for layer in decoder.layers:
            # cross-attention runs if encoder states are given; it reads the cache, not these
            hidden = layer(hidden, mask, hidden, **cached)
        output: Tensor = decoder.layer_norm(hidden)
        return output

    def _sample(self, windows: Sequence[WhisperWindow], logits: Tensor) -> None:
        logprobs = self.rules.logprobs(logits, [window.tokens for window in windows])
        tokens = logprobs.argmax(1)
        for row, window in enumerate(windows):
            if window.temperature > 0:
                tokens[row] = _sample_at_temperature(logprobs[row], window)
        sampled = logprobs.gather(1, tokens[:, None])[:, 0]
        # one transfer, which waits for the step
        numbers, values = torch.stack((tokens.double(), sampled.double())).tolist()
        if any(map(isnan, values)):
            raise ItemFailed("the model's output for this input is not a number")
        for window, number, logprob in zip(windows, numbers, values, strict=True):
            token = int(number)
            window.tokens.append(token)
            window.logprobs.append(logprob)
            limit = min(self.max_new_tokens, self.max_positions - len(window.prompt))
            window.finished = token == self.vocabulary.end or len(window.tokens) >= limit


def _sample_at_temperature(logprobs: Tensor, window: WhisperWindow) -> Tensor:
    """Sample by the inverse distribution function; a repeated request gives the same tokens."""
    bounds = (logprobs / window.temperature).softmax(0).cumsum(0)
    number = uniform(window.seek, window.attempt, len(window.tokens))
    target = (bounds[-1:].double() * number).to(bounds.dtype)
    return torch.searchsorted(bounds, target)[0].clamp(max=len(bounds) - 1)


class LogitsRules:
    """The next-token distribution: suppressed tokens, and the rules of timestamps by transformers'
    processor. `config`: the checkpoint's generation_config."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self._first_timestamp: int = config.no_timestamps_token_id + 1
        self._timestamp_rules = WhisperTimeStampLogitsProcessor(config, begin_index=0)
        # an index: SuppressTokensLogitsProcessor searches the whole vocabulary in each call
        self._suppressed, self._suppressed_at_begin = (
            torch.tensor(tokens or (), device=device, dtype=torch.long)
            for tokens in (config.suppress_tokens, config.begin_suppress_tokens)
        )

    def logprobs(self, logits: Tensor, generated: Sequence[Sequence[int]]) -> Tensor:
        """Return float32 log-probabilities [R, V] of logits [R, V]. `generated`: the tokens of each
        row, none in all rows or at least one in each."""
        scores: Any = logits.to(torch.float32, copy=True)
        scores.index_fill_(1, self._suppressed, -torch.inf)
        width = max(map(len, generated))
        if not width:
            scores.index_fill_(1, self._suppressed_at_begin, -torch.inf)
        # rows begin with a timestamp: an earlier one in front of it, as padding, changes no rule
        padded = [[self._first_timestamp] * (width - len(ids)) + [*ids] for ids in generated]
        input_ids: Any = torch.tensor(padded, dtype=torch.long)
        return torch.log_softmax(self._timestamp_rules(input_ids, scores), 1)
