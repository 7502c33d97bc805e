"""The runner of unpaged models with media: a prompt with media runs alone, with the model's own
forward and transformers' cache.

As for text, a check at load decides whether the cache gives right results. Without it, the whole
prompt, media included, is recomputed for each token.
"""

import logging
from collections import abc
from functools import partial

import torch
from torch import Tensor

from batching.sequence import Chunk, Sequence
from worker.backends.cached_runner import (
    CACHED_TOLERANCE,
    CHECK_STEPS,
    RECOMPUTED,
    CachedRunner,
    CacheState,
    Texts,
)
from worker.device.async_copy import fill_placeholders
from worker.device.self_check import CannotRun
from worker.error_classification import first_line
from worker.model.check import check
from worker.model.decoder_hook import DecoderHook
from worker.model.language_model import LanguageModel
from worker.vision.multimodal_prompt import MultimodalPrompt, select_tensors
from worker.vision.processor import Processor
from worker.vision.self_check import sample_outputs

log = logging.getLogger("onequeue.cached_runner")


class MultimodalCachedRunner(CachedRunner):
    """`caches_media`: whether prompts with media use the cache."""

    def __init__(
        self, language: LanguageModel, max_model_len: int | None, processor: Processor
    ) -> None:
        super().__init__(language, max_model_len)
        self._processor = processor
        self.caches_media = self.uses_cache
        try:
            self._hook: DecoderHook | None = DecoderHook(self.model)
        except CannotRun:
            self._hook = None
        if self.caches_media:
            self._check_cached_media()

    def _run_members(
        self, members: list[Sequence], texts: Texts, state: CacheState | None
    ) -> tuple[Tensor, CacheState | None]:
        prompt = members[0].multimodal
        if isinstance(prompt, MultimodalPrompt):
            return self.run_multimodal(prompt, texts[0], state)
        return self.run_texts(texts, state)

    def _prompt_logits(self, chunk: Chunk) -> Tensor:
        prompt, positions = chunk.sequence.multimodal, chunk.to_score
        if not isinstance(prompt, MultimodalPrompt):
            return super()._prompt_logits(chunk)
        rows = torch.arange(positions.start, positions.stop, device=self.device)
        inputs = self._whole_inputs(prompt, chunk.sequence.tokens)
        logits: Tensor = self._call(inputs, False, rows).logits[0]
        return logits if len(logits) == len(positions) else logits[rows]

    @torch.inference_mode()
    def run_multimodal(
        self, prompt: MultimodalPrompt, tokens: abc.Sequence[int], state: CacheState | None
    ) -> tuple[Tensor, CacheState | None]:
        """Run a prompt with media and the tokens generated since, as `run_texts` does for text."""
        if state is None:
            inputs = self._whole_inputs(prompt, tokens)
            return self.run_inputs(inputs, len(tokens), None, self.caches_media)
        ids = fill_placeholders(torch.tensor([tokens[-1:]], device=self.device), self._sampled)
        positions = torch.tensor([[len(tokens) - 1 + prompt.shift]], device=self.device)
        last = {
            name: tensor[:, -1:].to(self.device)
            for name, tensor in select_tensors(
                prompt.processed().inputs, self.argument_names
            ).items()
        }
        inputs = {**last, "input_ids": ids, "position_ids": positions}
        return self.run_inputs(inputs, len(tokens), state, self.caches_media)

    def _whole_inputs(
        self, prompt: MultimodalPrompt, tokens: abc.Sequence[int]
    ) -> dict[str, Tensor]:
        """Return all arguments of the forward. Arguments of each token repeat their last value for
        generated tokens."""
        if prompt.positions is None and self._hook:
            try:
                prompt.compute_positions(self._hook)
            except Exception as error:  # such as positions that are counted from the first token
                log.info("not computing positions: %.200s", first_line(error))
                self._hook = None
        output, width = prompt.processed(), len(tokens)
        token_inputs = {
            name: torch.cat([tensor, *[tensor[:, -1:]] * (width - tensor.shape[1])], 1)
            for name, tensor in select_tensors(output.inputs, self.argument_names).items()
        }
        inputs = {**token_inputs, **select_tensors(output.media_inputs(), self.argument_names)}
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        ids = fill_placeholders(torch.tensor([tokens], device=self.device), self._sampled)
        # a generated placeholder stands for no item
        generated = ids[:, len(prompt.ids) :]
        for modality in self._processor.modalities.values():
            generated.masked_fill_(generated == modality.token_id, self.pad_token_id)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **moved}

    def _check_cached_media(self) -> None:
        """Compare steps on the cache, with texts between them, with recomputed ones."""
        [generated] = self.language.random_prompts([CHECK_STEPS])

        def run(caches: bool, prompt: MultimodalPrompt, texts: Texts) -> list[Tensor]:
            rows, state = [], None
            for text in texts:
                logits, state = self.run_multimodal(prompt, text, state if caches else None)
                rows.append(logits)
                self.run_texts([generated[:2]] * 3, None)
            return [torch.cat(rows)]

        try:
            for output in sample_outputs(self._processor):
                prompt = MultimodalPrompt.from_output(output)
                texts = [[*output.ids, *generated[:count]] for count in range(CHECK_STEPS)]
                recomputed, cached = partial(run, False, prompt), partial(run, True, prompt)
                check(recomputed, cached, texts, CACHED_TOLERANCE)
        except Exception as error:
            self.caches_media = False
            self.language.fall_back("cached media", error, "the recomputed prompt", RECOMPUTED)
