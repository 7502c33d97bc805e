"""The model runner for what is not paged, with pictures: a prompt that has some runs by itself,
with the model's own forward and its cache.

Whether what it keeps between steps is right is asked of the model at load, as for text; without
that, such a prompt is run anew, pictures and all, for each token.
"""

from collections import abc

import torch
from torch import Tensor

from batching.sequence import Chunk, Sequence
from worker.device.async_copy import fill_placeholders
from worker.device.self_check import CannotRun, compare, random_prompts
from worker.model.cached_runner import (
    CACHED,
    STEPS,
    CachedRunner,
    CacheGroup,
    CacheSlot,
    CacheState,
    block_table,
    log_refusal,
)
from worker.model.decoder_hook import DecoderHook
from worker.model.language_model import LanguageModel
from worker.vision.multimodal_prompt import MultimodalPrompt, taken
from worker.vision.processor import Processor
from worker.vision.self_check import sample


class MultimodalCachedRunner(CachedRunner):
    def __init__(
        self, language: LanguageModel, max_model_len: int | None, processor: Processor
    ) -> None:
        super().__init__(language, max_model_len)
        self._processor = processor
        self._keeps = self.caches
        try:
            self._tells: DecoderHook | None = DecoderHook(self.model)
        except CannotRun:
            self._tells = None
        if self._keeps:
            self._check_pictures()

    def _to_run(self, sequences: list[Sequence]) -> list[tuple[CacheGroup | None, list[Sequence]]]:
        pictured: list[tuple[CacheGroup | None, list[Sequence]]] = []
        for sequence in sequences:
            place: CacheSlot | None = block_table(sequence).kept
            missing = len(sequence.tokens) - place.tokens if place else -1
            if sequence.multimodal and missing:
                goes_on = place and place.group.past and missing == 1
                pictured.append((place.group if place and goes_on else None, [sequence]))
        return [*super()._to_run([each for each in sequences if not each.multimodal]), *pictured]

    def _run(self, group: CacheGroup | None, members: list[Sequence]) -> None:
        sequence, prompt = members[0], members[0].multimodal
        if not isinstance(prompt, MultimodalPrompt):
            super()._run(group, members)
            return
        past = None
        if group:
            past, group.past = group.past, None  # in doubt until all went well
        logits, past = self.run_pictured(prompt, sequence.tokens, past)
        size = len(sequence.tokens)
        block_table(sequence).kept = CacheSlot(CacheGroup(1, size, logits, past), 0, size)

    def _scored(self, chunk: Chunk) -> Tensor:
        prompt, positions = chunk.sequence.multimodal, chunk.to_score
        if not isinstance(prompt, MultimodalPrompt):
            return super()._scored(chunk)
        rows = torch.arange(positions.start, positions.stop, device=self.device)
        given = self._whole(prompt, chunk.sequence.tokens)
        logits: Tensor = self._call(given, False, rows).logits[0]
        return logits if len(logits) == len(positions) else logits[rows]

    @torch.inference_mode()
    def run_pictured(
        self, prompt: MultimodalPrompt, tokens: abc.Sequence[int], past: CacheState | None
    ) -> tuple[Tensor, CacheState | None]:
        """As `run`, for a prompt with pictures and what has been said since."""
        if past is None:
            given = self._whole(prompt, tokens)
            return self.advance(given, given["attention_mask"], None, self._keeps)
        mask = torch.cat([past.mask, past.mask.new_ones(1, 1)], 1)
        ids = fill_placeholders(torch.tensor([tokens[-1:]], device=self.device), self._drawn)
        positions = torch.tensor([[len(tokens) - 1 + prompt.shift]], device=self.device)
        last = {
            name: each[:, -1:].to(self.device)
            for name, each in taken(prompt.made().inputs, self.takes).items()
        }
        given = {**last, "input_ids": ids, "position_ids": positions}
        return self.advance(given, mask, past, self._keeps)

    def _whole(self, prompt: MultimodalPrompt, tokens: abc.Sequence[int]) -> dict[str, Tensor]:
        """All that the forward takes. What it takes of each token goes on as it ended."""
        if prompt.positions is None and self._tells:
            try:
                prompt.lay_out(self._tells)
            except Exception as error:  # as where its positions are counted from the first token
                log_refusal("laid out", error)
                self._tells = None
        made, width = prompt.made(), len(tokens)
        of_text = {
            name: torch.cat([each, *[each[:, -1:]] * (width - each.shape[1])], 1)
            for name, each in taken(made.inputs, self.takes).items()
        }
        image = self._processor.image_id  # if the model says it, there is no picture for it
        joined = self._processor.joined(made.images)
        ids = fill_placeholders(torch.tensor([tokens], device=self.device), self._drawn)
        said = ids[:, len(prompt.ids) :]
        said.masked_fill_(said == image, self.pad)
        others = {**of_text, **taken(joined, self.takes)}
        given = {name: each.to(self.device) for name, each in others.items()}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}

    def _check_pictures(self) -> None:
        """Whether what it keeps of pictures is right; texts have their turns between."""
        made = sample(self._processor)
        prompt = MultimodalPrompt.of(made)
        [more] = random_prompts(self.model, self.language.tokenizer, [STEPS])
        texts = [[*made.ids, *more[:count]] for count in range(STEPS)]
        try:
            past = None
            cached = []
            for text in texts:
                logits, past = self.run_pictured(prompt, text, past)
                cached.append(logits)
                self.run([more[:2]] * 3, None)
            anew = [self.run_pictured(prompt, text, None)[0] for text in texts]
            compare(torch.cat(cached), torch.cat(anew), CACHED)
        except Exception as error:
            self._keeps = False
            log_refusal("cached with pictures", error)
