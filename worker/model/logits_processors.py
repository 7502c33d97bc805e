"""The logits processors of a checkpoint's generation_config, for each row of the sampler.

They are those that `generate` builds, in its order. Processors change the scores of greedy and
sampled tokens. Warpers run after a grammar's mask: those of sampling that the sampler does not have
itself, and what `generate` applies after them.

A processor gets the token ids [1, L] of prompt and output and the scores [1, V] of the next token.
Lengths count from the prompt, so they do not depend on preemption or speculation.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process

from worker.model.sampler import MIN_TEMPERATURE, Processor, SamplingParams

hf: Any = logits_process  # ids are annotated as LongTensor
# They do not depend on a request, and prepare a bias for the whole vocabulary.
SHARED = (hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor)
FULL_MATCHES, MAX_MATCHES = 4, 1024  # tokens compared at all positions; positions compared further
# What `generate` asks a model for while it builds its list. None follows the processors.
MODEL = SimpleNamespace(
    config=SimpleNamespace(
        is_encoder_decoder=False, get_text_config=lambda: SimpleNamespace(vocab_size=None)
    ),
    _merge_criteria_processor_list=lambda processors, _: [*processors, None],
)


class SuppressTokens:
    """Suppress tokens, always or after so many. transformers' processors search the vocabulary."""

    def __init__(self, tokens: Tensor, length: int | None = None) -> None:
        self.tokens, self.length = tokens, length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.length is not None and ids.shape[1] != self.length:
            return scores
        return scores.index_fill(1, self.tokens, -torch.inf)


class NoRepeatedNgrams:
    """Suppress tokens that complete a sequence of `size` tokens that the text has. transformers'
    processor compares every window as a whole."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        text = ids[0]
        following = torch.arange(min(self.size - 1, len(text)), len(text), device=text.device)
        for back in range(1, self.size):
            following = following[text[following - back] == text[len(text) - back]]
            if back == FULL_MATCHES:  # only highly repetitive text has more matches
                following = following[-MAX_MATCHES:]
            if not len(following):
                return scores
        tokens = text[following]
        return scores.index_fill(1, tokens[tokens < scores.shape[1]], -torch.inf)


class CheckpointProcessors:
    """Adds the processors of a checked generation_config to the parameters of requests."""

    def __init__(
        self,
        config: GenerationConfig,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._shared: dict[type, Processor] = {}
        fields: Any = copy.copy(config)  # not annotated
        self._fields = fields
        self._suppressed = self._token_tensor(fields.suppress_tokens or ())
        self._suppressed_at_begin = self._token_tensor(fields.begin_suppress_tokens or ())
        # those of the classes above, of the sampler, and those that are not served
        self._ngram_size = fields.no_repeat_ngram_size or 0
        fields.suppress_tokens = fields.begin_suppress_tokens = fields.no_repeat_ngram_size = None
        fields.min_length = fields.min_new_tokens = fields.guidance_scale = fields.num_beams = None
        bias = [[ids, float(amount)] for ids, amount in fields.sequence_bias or ()]
        fields.sequence_bias = bias or None
        ends = [[token] for token in eos_token_ids]
        fields.bad_words_ids = [w for w in fields.bad_words_ids or () if w not in ends] or None
        fields._eos_token_tensor = torch.tensor(eos_token_ids, dtype=torch.long, device=device)
        if fields.watermarking_config:
            watermark = fields.watermarking_config.construct_processor(vocab_size, device)
            shared = SimpleNamespace(construct_processor=lambda *_: watermark)
            fields.watermarking_config = shared
        # sampling has a step that the sampler does not have
        self._needs_warpers = bool(
            fields.watermarking_config
            or fields.top_h
            or (fields.typical_p or 1.0) < 1.0
            or 0.0 < (fields.epsilon_cutoff or 0.0) < 1.0
            or 0.0 < (fields.eta_cutoff or 0.0) < 1.0
        )

    def extend_any(self) -> bool:
        """Return whether a request gets processors, whatever its prompt."""
        sampled = SamplingParams()
        return self.extend(sampled, [0], 1, ignore_eos=False) is not sampled

    def _token_tensor(self, ids: Iterable[int]) -> Tensor:
        """Return the ids that are in the vocabulary."""
        valid = [id_ for id_ in ids if 0 <= id_ < self._vocab_size]
        return torch.tensor(valid, dtype=torch.long, device=self._device)

    def extend(
        self, params: SamplingParams, prompt: Sequence[int], max_tokens: int, ignore_eos: bool
    ) -> SamplingParams:
        """Return a request's parameters with its processors; unchanged if it needs none."""
        fields = copy.copy(self._fields)
        fields.max_length, fields.repetition_penalty = len(prompt) + max_tokens, None
        if ignore_eos or not len(fields._eos_token_tensor):
            fields.exponential_decay_length_penalty = None
        if fields.sequence_bias or (fields.encoder_repetition_penalty or 1.0) != 1.0:
            # it comes after these, and before the rest
            fields.repetition_penalty = params.repetition_penalty
            params = replace(params, repetition_penalty=1.0)
        fields.do_sample = params.temperature > 0 and self._needs_warpers
        if fields.do_sample:  # the filters that the sampler has come between the others
            fields.temperature = max(params.temperature, MIN_TEMPERATURE)
            fields.top_k, fields.top_p = max(0, params.top_k), params.top_p
            fields.min_p = params.min_p or None
            params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        processors, warpers = self._build(fields, prompt)
        if not (processors or warpers):
            return params
        return replace(params, processors=tuple(processors), warpers=tuple(warpers))

    def _build(self, fields: Any, prompt: Sequence[int]) -> tuple[list[Processor], list[Processor]]:
        encoder_ids = None
        if fields.encoder_repetition_penalty or fields.encoder_no_repeat_ngram_size:
            encoder_ids = self._token_tensor(prompt)[None]
        build: Any = GenerationMixin._get_logits_processor  # its ids are annotated as LongTensor
        built = build(MODEL, fields, len(prompt), encoder_ids, device=self._device)
        built = [self._shared.setdefault(type(p), p) if isinstance(p, SHARED) else p for p in built]
        end = built.index(None)
        processors, warpers = built[:end], built[end + 1 :]
        if self._ngram_size:
            processors.append(NoRepeatedNgrams(self._ngram_size))
        if len(self._suppressed):
            processors.append(SuppressTokens(self._suppressed))
        if len(self._suppressed_at_begin):
            forced = len(prompt) == 1 and fields.forced_bos_token_id is not None
            processors.append(SuppressTokens(self._suppressed_at_begin, len(prompt) + forced))
        return processors, warpers
