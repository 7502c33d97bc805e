"""The model runner for models that are not paged: transformers' own forward and cache.

Sequences of equal length that start together form a group, which shares a forward and a cache from
then on. A check at load compares outputs with those of `generate` to decide whether sequences may
share a forward and whether the cache gives right results; without it, the whole text is recomputed
for each token. Prompts run whole. A preempted sequence has lost its cache and is recomputed: at
once, or token by token where attention selects keys, since the selection among equal scores depends
on the length.
"""

import inspect
import logging
from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from batching.block_pool import BlockTable
from batching.sequence import Batch, Chunk, Sequence
from worker.backends.recurrent import CACHE_NAMES
from worker.device.async_copy import fill_placeholders, to_device
from worker.device.self_check import (
    TOLERANCE,
    CannotRun,
    TopKSizes,
    length_beyond_windows,
    narrowed,
)
from worker.error_classification import first_line
from worker.load_context import on_worker
from worker.model.check import Reference
from worker.model.language_model import LanguageModel
from worker.model.loading import LoadingFailed

log = logging.getLogger("onequeue.cached_runner")

# Tokens of the check's texts: more than the chunks of linear attention.
CHECK_TOKENS = 70
CHECK_STEPS = 4
# Tokens of two texts whose caches are measured.
MEASURED_TOKENS = (8, 40)
# Tokens of two texts that show whether attention selects keys.
SELECTION_TOKENS = (40, 56)
# What is lost without a cache, and without shared forwards.
RECOMPUTED = "each token takes as long as the text before it"
UNBATCHED = "steps of several sequences take longer"
# Largest relative difference of cached and recomputed logits. Both round at different points; a
# wrong cache differs by more.
CACHED_TOLERANCE = 0.1
# The same for batched and single texts, which differ by less: recurrences amplify rounding.
BATCHED_TOLERANCE = 1e-3

Texts = abc.Sequence[abc.Sequence[int]]


@dataclass(frozen=True, slots=True)
class CacheState:
    """The model's cache of a batch."""

    name: str  # of the argument and the output
    cache: Any
    tokens: int  # of each row


@dataclass(eq=False)
class CacheGroup:
    """Sequences that share a forward, and its output."""

    logits: Tensor  # [rows, V] after the last token
    state: CacheState | None  # None: the texts are recomputed


class CacheSlot(NamedTuple):
    """A sequence's row in its group. Stored in its block table, so it is freed with that."""

    group: CacheGroup
    row: int
    tokens: int  # of the sequence, in the cache


class CachedRunner:
    """Runs batches by the model's own forward.

    `max_model_len`: tokens of the longest sequence. `batches_rows` (sequences may share a forward),
    `uses_cache` and `selects_keys` (attention sees the keys with the highest scores): results of
    the check. `sequence_bytes`, `token_bytes`: size of the cache of an empty sequence and a token.
    """

    compile_state: Literal["running", "done", "off"] = "off"
    stage = ""
    decoder_hook: None = None
    idempotent = False  # a forward updates the cache
    runs_ahead = False

    def __init__(self, language: LanguageModel, max_model_len: int | None = None) -> None:
        self.language = language
        self.max_model_len = min(max_model_len or language.context, language.context)
        self.model = language.model
        self.device = language.device
        self.argument_names = frozenset(inspect.signature(self.model.forward).parameters)
        pad_token_id = language.tokenizer.pad_token_id
        self.pad_token_id = pad_token_id if isinstance(pad_token_id, int) else 0
        self._sampled: Tensor | None = None  # the previous step's tokens, for placeholders
        self.uses_cache = True
        self.batches_rows = True
        self.selects_keys = False
        on_worker(self._check)
        self.sequence_bytes, self.token_bytes = on_worker(self._cache_bytes)
        log.info("static batches batched=%s cached=%s", self.batches_rows, self.uses_cache)

    @torch.inference_mode()
    def forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """Return the logits [R, vocabulary] of the batch's rows.

        `sampled`: int64, the previous step's tokens by row, for placeholders in the texts. After a
        group has raised, parts of the batch are run again: sequences whose last token is in the
        cache are then skipped.
        """
        self._sampled = sampled
        scored = [self._prompt_logits(chunk) for chunk in batch.chunks if chunk.to_score]
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.to_sample]
        for group, members in self._groups_to_run(sequences):
            self._run_group(group, members)
        logits = [*scored, *map(self._logits, sequences)]
        return torch.cat(logits) if logits else torch.empty(0, self.language.vocab_size)

    # ── groups ──

    def _groups_to_run(
        self, sequences: list[Sequence]
    ) -> list[tuple[CacheGroup | None, list[Sequence]]]:
        """Return the groups that continue, and new ones (None), each with sequences to run."""
        groups: dict[Hashable, list[Sequence]] = {}
        for sequence in sequences:
            slot = cache_slot(sequence)
            if slot and slot.tokens == len(sequence.tokens):
                continue
            key: Hashable = id(sequence)
            if slot and slot.group.state:
                key = slot.group
            elif self.batches_rows and not sequence.multimodal:
                key = sequence.prompt_len, len(sequence.tokens)
            groups.setdefault(key, []).append(sequence)
        return [
            (key if isinstance(key, CacheGroup) else None, members)
            for key, members in groups.items()
        ]

    def _run_group(self, group: CacheGroup | None, members: list[Sequence]) -> None:
        """Run the members' tokens that are not in the cache."""
        state = None
        if group:
            state, group.state = group.state, None  # invalid if the forward raises
            rows = [slot.row for sequence in members if (slot := cache_slot(sequence))]
            if state and rows != list(range(len(group.logits))):
                state = self.select_rows(state, rows)
        texts = [sequence.tokens for sequence in members]
        if self.selects_keys and not state and not members[0].multimodal:
            for length in range(members[0].prompt_len, len(texts[0])):
                _, state = self.run_texts([text[:length] for text in texts], state)
        logits, state = self._run_members(members, texts, state)
        next_group = CacheGroup(logits, state)
        for row, sequence in enumerate(members):
            slot = CacheSlot(next_group, row, len(texts[row]))
            block_table(sequence).runner_state = slot

    def _run_members(
        self, members: list[Sequence], texts: Texts, state: CacheState | None
    ) -> tuple[Tensor, CacheState | None]:
        return self.run_texts(texts, state)

    def _logits(self, sequence: Sequence) -> Tensor:
        """Return [1, V] after the sequence's last token."""
        slot = cache_slot(sequence)
        assert slot is not None
        return slot.group.logits[slot.row : slot.row + 1]

    def _prompt_logits(self, chunk: Chunk) -> Tensor:
        """Return the logits [P, V] of the chunk's positions to score, from a separate forward."""
        positions = chunk.to_score
        ids = torch.tensor([chunk.sequence.tokens[: positions.stop]], device=self.device)
        rows = torch.arange(positions.start, positions.stop, device=self.device)
        logits: Tensor = self._call({"input_ids": ids}, False, rows).logits[0]
        return logits[-len(positions) :]  # a model may ignore logits_to_keep

    # ── the model's forward ──

    @torch.inference_mode()
    def run_texts(self, texts: Texts, state: CacheState | None) -> tuple[Tensor, CacheState | None]:
        """Return the logits [B, V] after each text, and the state for its next token.

        The texts are of equal length. `state`: of the first tokens of each; None: run the texts
        whole. It is updated in place and must not be used again.
        """
        start, end = state.tokens if state else 0, len(texts[0])
        rows = to_device([text[start:] for text in texts], self.device)
        positions = torch.arange(start, end, device=self.device).repeat(len(texts), 1)
        ids = fill_placeholders(rows, self._sampled)
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        return self.run_inputs(inputs, end, state, self.uses_cache)

    def run_inputs(
        self, inputs: dict[str, Any], tokens: int, state: CacheState | None, use_cache: bool
    ) -> tuple[Tensor, CacheState | None]:
        """Do the same for a forward's inputs; `tokens`: of each text, those in the cache too."""
        if state:
            inputs[state.name] = state.cache
        output = self._call(inputs, use_cache, 1)
        next_state = None
        if use_cache:
            names = [name for name in output.keys() if name in CACHE_NAMES]  # noqa: SIM118
            next_state = CacheState(names[0], output[names[0]], tokens) if names else None
        logits: Tensor = output.logits[:, -1]
        return logits, next_state

    @torch.inference_mode()
    def select_rows(self, state: CacheState, rows: abc.Sequence[int]) -> CacheState | None:
        """Return the state of some rows; None if the cache cannot be divided by row."""
        if not isinstance(state.cache, Cache):
            return None
        try:
            index = to_device(rows, self.device)
            state.cache.reorder_cache(index)  # type: ignore[arg-type]  # any integers will do
            return CacheState(state.name, state.cache, state.tokens)
        except Exception:  # such as a copy that does not fit into memory
            return None

    def _call(self, inputs: dict[str, Any], use_cache: bool, rows: int | Tensor) -> Any:
        inputs |= {"use_cache": use_cache, "logits_to_keep": rows}
        return self.model(**{name: inputs[name] for name in inputs if name in self.argument_names})

    # ── the check at load ──

    @torch.inference_mode()
    def _cache_bytes(self) -> tuple[int, int]:
        """Return the size of the cache of an empty sequence, and of each token, as measured."""
        sizes = []
        for count in MEASURED_TOKENS:
            _, state = self.run_texts([[1] * min(count, self.max_model_len)], None)
            sizes.append(_tensor_bytes(state, set()))
        short, long = sizes
        of_token = max(0, long - short) // (MEASURED_TOKENS[1] - MEASURED_TOKENS[0])
        return max(0, short - of_token * MEASURED_TOKENS[0]), of_token

    def _check(self) -> None:
        """Set `uses_cache` and `batches_rows` to whether these give the outputs of `generate`, also
        for texts that exceed every window and number of selected keys."""
        limit = self.language.context
        longest = max(length_beyond_windows(self.model.config, limit), CHECK_TOKENS)
        self._check_length(min(limit, longest))
        lengths = [min(limit, length) for length in SELECTION_TOKENS]
        short, long = self.language.random_prompts(lengths)
        with narrowed(self.language.decoder, lambda: self.run_texts([long], None)) as changed:
            self.selects_keys = self._topk_sizes(short) != self._topk_sizes(long)
            if changed:
                self._check_length(min(limit, CHECK_TOKENS))

    def _topk_sizes(self, text: abc.Sequence[int]) -> set[int]:
        recorded = TopKSizes()
        with recorded:
            self.run_texts([text], None)
        return recorded.sizes

    def _check_length(self, longest: int) -> None:
        """Clear `uses_cache` or `batches_rows` where texts of up to `longest` tokens do not get the
        logits of `generate` with it. Raise LoadingFailed if they do not without both."""
        language = self.language
        lengths = [min(longest, CHECK_STEPS + 2), longest, longest]
        prompts = [max(1, length - CHECK_STEPS + 1) for length in lengths]
        generated = [self._generate(prompt) for prompt in language.random_prompts(prompts)]
        texts = [text for text, _ in generated]
        reference = Reference(self._recomputed, texts, [logits for _, logits in generated])
        try:
            alone = [self._run_steps([text])[0] for text in texts]
            reference.check(alone, CACHED_TOLERANCE)
        except Exception as error:
            if not self.uses_cache:
                raise LoadingFailed(
                    f"the model {language.name!r} cannot be served: its outputs differ from "
                    f"those of generate ({first_line(error)})"
                ) from error
            self.uses_cache = False
            self._check_length(longest)
            language.fall_back("cached states", error, "the recomputed text", RECOMPUTED)
            return
        if self.batches_rows:
            tolerance = max(BATCHED_TOLERANCE, TOLERANCE[language.dtype])
            reference = Reference(self._recomputed, texts[1:], alone[1:])
            try:
                reference.check(self._run_steps(texts[1:]), tolerance)
            except Exception as error:
                language.fall_back("shared forwards", error, "one for each sequence", UNBATCHED)
                self.batches_rows = False

    @torch.inference_mode()
    def _generate(self, prompt: list[int]) -> tuple[list[int], Tensor]:
        """Return the prompt with tokens that `generate` adds, and the logits [CHECK_STEPS, V] after
        the prompt and each of them. Where `generate` raises, recompute the text for each token."""
        ids = torch.tensor([prompt], device=self.device)
        model: Any = self.model  # not annotated
        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            min_new_tokens=CHECK_STEPS,
            max_new_tokens=CHECK_STEPS,
            pad_token_id=self.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        try:
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy
            )
            logits = torch.cat(output.logits).to(self.language.dtype)  # which are float32 copies
            return output.sequences[0, :-1].tolist(), logits
        except Exception as error:
            log.info("not compared with generate: %.200s", first_line(error))
        text = [*prompt, *[prompt[0]] * (CHECK_STEPS - 1)]
        return text, self._recomputed([text])[0]

    @torch.inference_mode()
    def _recomputed(self, texts: Texts) -> list[Tensor]:
        """Return the logits [CHECK_STEPS, V] of each text's last tokens, each from a forward over
        all tokens up to it."""
        rows = []
        for text in texts:
            prefixes = [text[: len(text) - step] for step in reversed(range(CHECK_STEPS))]
            ids = [torch.tensor([[*prefix]], device=self.device) for prefix in prefixes]
            logits = [self._call({"input_ids": one}, False, 1).logits[0, -1] for one in ids]
            rows.append(torch.stack(logits))
        return rows

    def _run_steps(self, texts: Texts) -> list[Tensor]:
        """Run the last CHECK_STEPS tokens of the texts step by step, as one batch.

        Other texts run between the steps, and a row ends halfway, as in serving. Return the logits
        [steps, V] of each text.
        """
        logits_of: list[list[Tensor]] = [[] for _ in texts]
        rows, state = list(range(len(texts))), None
        for step in reversed(range(CHECK_STEPS)):
            prefixes = [texts[row][: len(texts[row]) - step] for row in rows]
            logits, state = self.run_texts(prefixes, state)
            for row, row_logits in zip(rows, logits, strict=True):
                logits_of[row].append(row_logits)
            if self.uses_cache and state is None:
                raise CannotRun("its output has no cache")
            self.run_texts([texts[0][:2]] * 3, None)
            if step == CHECK_STEPS // 2 and len(rows) > 1:
                rows, state = rows[1:], state and self.select_rows(state, [1])
        return [torch.stack(logits) for logits in logits_of]


def block_table(sequence: Sequence) -> BlockTable:
    """Return the block table of a running sequence."""
    assert sequence.table is not None
    return sequence.table


def cache_slot(sequence: Sequence) -> CacheSlot | None:
    """Return the running sequence's slot, None before its first step."""
    slot = block_table(sequence).runner_state
    assert slot is None or isinstance(slot, CacheSlot)
    return slot


def _tensor_bytes(value: object, counted: set[int]) -> int:
    """Return the size of all tensors in a cache, each counted once."""
    if id(value) in counted:
        return 0
    counted.add(id(value))
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        parts: abc.Iterable[object] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, CacheState):
        parts = (value.cache,)
    else:
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(_tensor_bytes(part, counted) for part in parts)
