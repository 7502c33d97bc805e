"""The pictures' turn before a step: who waits for the tower, and one run of it.

    waiting prompts in order → pictures not looked at yet → one run → prompts that are ready

A run has one picture while somebody streams, so that a step is not longer than that; else several
of the same shape, of whatever prompts, but on a CPU only small ones: of large ones each takes
longer together. Only the first few prompts in line are looked at ahead of their admission, and rows
are dropped as soon as the prompt has run. On the worker's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

from batching.errors import OnequeueError
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence as Continuation
from worker.error_classification import run_in_halves
from worker.vision.encoder import VisionEncoder
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import MultimodalItem

AHEAD = 4  # prompts in line that are looked at before there is room for them
TOGETHER = 8  # pictures in a run while nobody streams
CPU_NUMBERS = 3 * 512 * 512  # that a run has on a CPU, if not a picture alone has more
AGAIN_S = 0.01  # how long nothing else is looked for while what was put back is made again

Failed = Callable[[MultimodalPrompt, BaseException], None]


class EncoderJob(NamedTuple):
    prompt: MultimodalPrompt
    piece: MultimodalItem


class EncoderScheduler:
    """`failed` is told whose picture could not be looked at."""

    def __init__(self, tower: VisionEncoder, failed: Failed) -> None:
        self.tower = tower
        self._failed = failed
        self._open: dict[MultimodalPrompt, None] = {}

    def turn(self, scheduler: ContinuousScheduler, streaming: bool) -> None:
        """At most one run of the tower."""
        prompts = dict.fromkeys(_prompts(scheduler.waiting))
        waiting = [each for each in list(prompts)[:AHEAD] if not each.ready]
        lacking = [EncoderJob(each, piece) for each in waiting for piece in self._missing(each)]
        if lacking:
            self._look(_batch(lacking, 1 if streaming else self._together(lacking[0].piece)))
        for prompt in waiting:
            self._open_if_seen(prompt)
        coming = [each.coming for each in waiting if each.coming]
        if coming and not lacking and not scheduler.running:
            wait(coming, AGAIN_S, FIRST_COMPLETED)

    def close_those_that_ran(self, scheduler: ContinuousScheduler) -> None:
        """And those whose sequences are no more: after a step."""
        lines = (scheduler.running, scheduler.waiting)
        needed = {
            sequence.multimodal
            for line in lines
            for sequence in line
            if sequence.multimodal and sequence.computed < sequence.multimodal.end
        }
        for prompt in [each for each in self._open if each not in needed]:
            del self._open[prompt]
            prompt.close()

    def _together(self, piece: MultimodalItem) -> int:
        if self.tower.entrance.model.device.type != "cpu":
            return TOGETHER
        return max(1, min(TOGETHER, CPU_NUMBERS // piece.numbers))

    def _missing(self, prompt: MultimodalPrompt) -> list[MultimodalItem]:
        try:
            return prompt.missing(self.tower.album, TOGETHER)
        except Exception as error:
            self._failed(prompt, error)
            return []

    def _look(self, batch: Sequence[EncoderJob]) -> None:
        failed: set[MultimodalPrompt] = set()

        def run(part: Sequence[EncoderJob]) -> None:
            made = self.tower.look([each.piece for each in part])
            for each, rows in zip(part, made, strict=True):
                each.prompt.found[each.piece.digest] = rows

        def told(part: Sequence[EncoderJob], failure: OnequeueError) -> None:
            if len(part) == 1:
                failed.add(part[0].prompt)
                self._failed(part[0].prompt, failure)

        run_in_halves(batch, run, told, lambda each: each.prompt not in failed)

    def _open_if_seen(self, prompt: MultimodalPrompt) -> None:
        try:
            if not prompt.unseen(self.tower.album):
                prompt.open(self.tower)
                self._open[prompt] = None
        except Exception as error:
            self._failed(prompt, error)


def _prompts(line: Iterable[Continuation]) -> Iterable[MultimodalPrompt]:
    return (each.multimodal for each in line if isinstance(each.multimodal, MultimodalPrompt))


def _batch(lacking: Sequence[EncoderJob], most: int) -> list[EncoderJob]:
    """The first, and others of its shape; the same picture once."""
    shape = lacking[0].piece.shape
    alike = {each.piece.digest: each for each in reversed(lacking) if each.piece.shape == shape}
    return list(alike.values())[::-1][:most]
