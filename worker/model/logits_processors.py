"""The logits processors of a checkpoint's generation_config, for each row of the sampler.

They are those of `generate`, in its order. Processors change the scores of greedy and sampled
tokens. Warpers run after a grammar's mask: those of sampling that the sampler does not have itself,
and what `generate` applies after them.

A processor gets the token ids [1, L] of prompt and output and the scores [1, V] of the next token.
Lengths count from the prompt, so they do not depend on preemption or speculation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process

from worker.model.sampler import MIN_TEMPERATURE, Processor, SamplingParams

hf: Any = logits_process  # ids are annotated as LongTensor


class SuppressTokens:
    """Suppress tokens, always or after so many tokens. transformers' processors search the whole
    vocabulary in each call."""

    def __init__(self, tokens: Tensor, length: int | None = None) -> None:
        self.tokens, self.length = tokens, length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.length is not None and ids.shape[1] != self.length:
            return scores
        return scores.index_fill(1, self.tokens, -torch.inf)


class CheckpointProcessors:
    """Adds the processors of a checked generation_config to the parameters of requests. Those that
    do not depend on a request are shared."""

    def __init__(
        self,
        config: GenerationConfig,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        fields: Any = config  # not annotated
        self._fields = fields
        self._vocab_size, self._eos, self._device = vocab_size, list(eos_token_ids), device
        self._sequence_bias: Processor | None = None
        self._bad_words: Processor | None = None
        self._watermark: Processor | None = None
        if fields.sequence_bias:
            bias = [[ids, float(amount)] for ids, amount in fields.sequence_bias]
            self._sequence_bias = hf.SequenceBiasLogitsProcessor(bias)
        if words := [
            ids for ids in fields.bad_words_ids or () if ids not in [[e] for e in self._eos]
        ]:
            self._bad_words = hf.NoBadWordsLogitsProcessor(words)
        if fields.watermarking_config:
            self._watermark = fields.watermarking_config.construct_processor(vocab_size, device)
        self._suppressed = self._token_tensor(fields.suppress_tokens or ())
        self._suppressed_at_begin = self._token_tensor(fields.begin_suppress_tokens or ())

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
        first = self._processors_on_prompt(prompt)
        if first and params.repetition_penalty != 1.0:  # it comes after these, and before the rest
            first.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
            params = replace(params, repetition_penalty=1.0)
        processors = [*first, *self._processors(prompt, max_tokens, ignore_eos)]
        warpers = self._last_warpers()
        if params.temperature > 0 and self._needs_warpers:
            warpers = [*self._sampling_warpers(params), *warpers]
            params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        if not (processors or warpers):
            return params
        return replace(params, processors=tuple(processors), warpers=tuple(warpers))

    def _processors_on_prompt(self, prompt: Sequence[int]) -> list[Processor]:
        """Return the processors before the repetition penalty."""
        processors = [self._sequence_bias] if self._sequence_bias else []
        if (penalty := self._fields.encoder_repetition_penalty or 1.0) != 1.0:
            ids = self._token_tensor(sorted(set(prompt)))[None]
            processors.append(hf.EncoderRepetitionPenaltyLogitsProcessor(float(penalty), ids))
        return processors

    def _processors(
        self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool
    ) -> Iterator[Processor]:
        fields, eos = self._fields, None if ignore_eos else self._eos
        if size := fields.no_repeat_ngram_size:
            yield hf.NoRepeatNGramLogitsProcessor(size)
        if size := fields.encoder_no_repeat_ngram_size:
            yield hf.EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([*prompt]))
        if self._bad_words:
            yield self._bad_words
        if fields.forced_bos_token_id is not None:
            yield hf.ForcedBOSTokenLogitsProcessor(fields.forced_bos_token_id)
        if fields.forced_eos_token_id is not None:
            yield hf.ForcedEOSTokenLogitsProcessor(
                len(prompt) + max_tokens, fields.forced_eos_token_id, self._device
            )
        if fields.remove_invalid_values:
            yield hf.InfNanRemoveLogitsProcessor()
        if fields.exponential_decay_length_penalty and eos:
            decay = fields.exponential_decay_length_penalty
            yield hf.ExponentialDecayLengthPenalty(decay, eos, len(prompt))
        if len(self._suppressed):
            yield SuppressTokens(self._suppressed)
        if len(self._suppressed_at_begin):
            forced = len(prompt) == 1 and fields.forced_bos_token_id is not None
            yield SuppressTokens(self._suppressed_at_begin, len(prompt) + forced)

    @property
    def _needs_warpers(self) -> bool:
        """Whether sampling has a step that the sampler does not have."""
        fields = self._fields
        return bool(
            self._watermark
            or fields.top_h
            or (fields.typical_p or 1.0) < 1.0
            or 0.0 < (fields.epsilon_cutoff or 0.0) < 1.0
            or 0.0 < (fields.eta_cutoff or 0.0) < 1.0
        )

    def _sampling_warpers(self, params: SamplingParams) -> Iterator[Processor]:
        """Yield all warpers of sampling: those that the sampler has come between the others."""
        fields = self._fields
        yield hf.TemperatureLogitsWarper(max(params.temperature, MIN_TEMPERATURE))
        if fields.top_h:
            yield hf.TopHLogitsWarper(fields.top_h)
        if params.top_k > 0:
            yield hf.TopKLogitsWarper(params.top_k)
        if params.top_p < 1.0:
            yield hf.TopPLogitsWarper(params.top_p)
        if params.min_p > 0.0:
            yield hf.MinPLogitsWarper(params.min_p)
        if (mass := fields.typical_p or 1.0) < 1.0:
            yield hf.TypicalLogitsWarper(mass)
        if 0.0 < (epsilon := fields.epsilon_cutoff or 0.0) < 1.0:
            yield hf.EpsilonLogitsWarper(epsilon)
        if 0.0 < (epsilon := fields.eta_cutoff or 0.0) < 1.0:
            yield hf.EtaLogitsWarper(epsilon, device=self._device)

    def _last_warpers(self) -> list[Processor]:
        warpers = [self._watermark] if self._watermark else []
        if self._fields.renormalize_logits:
            warpers.append(hf.LogitNormalization())
        return warpers
