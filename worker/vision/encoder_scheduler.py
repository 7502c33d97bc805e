"""Which media the encoder runs before a step of the decoder.

    waiting prompts in order → tiles not encoded yet → one encoder run → prompts that are ready

A run encodes one tile while a sequence is running, and steps of all models run at its yield points:
both bound the time between two tokens. Otherwise it encodes several tiles of the same shape, also
of different prompts; on a CPU only small ones, because there large tiles take longer in a batch.
Only the first few waiting prompts are encoded before their admission, and their rows are dropped
once the prompt has been prefilled. Runs on the worker's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

from batching.errors import OnequeueError
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence as GeneratedSequence
from worker.engines.pipeline.yield_points import YieldPoints
from worker.error_classification import run_in_halves
from worker.messages.protocol import OtherModels
from worker.vision.encoder import VisionEncoder, YieldingOperations
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import MultimodalItem

MAX_PROMPTS_AHEAD = 4  # waiting prompts that are encoded before they are admitted
MAX_BATCH = 8  # tiles of a run
MAX_CPU_NUMEL = 3 * 512 * 512  # elements of a batch on a CPU; a single tile may have more
RECOMPUTE_WAIT_S = 0.01  # how long an otherwise idle step waits for media to be processed again

OnFailure = Callable[[MultimodalPrompt, BaseException], None]


class EncoderJob(NamedTuple):
    prompt: MultimodalPrompt
    item: MultimodalItem


class EncoderScheduler:
    """`on_failure` is called with each prompt whose media could not be encoded."""

    def __init__(
        self, encoder: VisionEncoder, yield_points: YieldPoints, on_failure: OnFailure
    ) -> None:
        self.encoder = encoder
        self._yield_points = yield_points
        self._on_failure = on_failure
        self._ready: dict[MultimodalPrompt, None] = {}
        self._is_encoding = False

    def step(self, scheduler: ContinuousScheduler, others: OtherModels) -> None:
        """Run the encoder at most once, unless this is called within its run, and mark prompts
        ready whose media are all encoded."""
        waiting, jobs = self.waiting(scheduler), list[EncoderJob]()
        if not self._is_encoding:
            jobs = [EncoderJob(prompt, i) for prompt in waiting for i in self._missing(prompt)]
        if jobs:
            one_by_one = bool(scheduler.running) or others.busy
            batch = _first_batch(jobs, 1 if one_by_one else self._max_batch(jobs[0].item))
            self._is_encoding = True
            try:
                before_operation = self._yield_points.before_layer
                with self._yield_points.active(others), YieldingOperations(before_operation):
                    self._encode(batch)
            finally:
                self._is_encoding = False
        for prompt in waiting:
            self._mark_ready_if_encoded(prompt)
        recomputing = [prompt.recomputing for prompt in waiting if prompt.recomputing]
        if recomputing and not jobs and not scheduler.running:
            wait(recomputing, RECOMPUTE_WAIT_S, FIRST_COMPLETED)

    def waiting(self, scheduler: ContinuousScheduler) -> list[MultimodalPrompt]:
        """Return the prompts that are encoded next."""
        prompts = dict.fromkeys(_prompts(scheduler.by_rank()))
        return [prompt for prompt in list(prompts)[:MAX_PROMPTS_AHEAD] if not prompt.ready]

    def release_prefilled(self, scheduler: ContinuousScheduler) -> None:
        """Drop the rows of prompts that no sequence has to prefill. Called after a step."""
        needed = {
            sequence.multimodal
            for sequences in (scheduler.running, scheduler.waiting)
            for sequence in sequences
            if sequence.multimodal and sequence.computed < sequence.multimodal.end
        }
        for prompt in [prompt for prompt in self._ready if prompt not in needed]:
            del self._ready[prompt]
            prompt.release()

    def _max_batch(self, item: MultimodalItem) -> int:
        if self.encoder.hook.model.device.type != "cpu":
            return MAX_BATCH
        largest = max(tensor.numel() for tensor in item.inputs.values())
        return max(1, min(MAX_BATCH, MAX_CPU_NUMEL // largest))

    def _missing(self, prompt: MultimodalPrompt) -> list[MultimodalItem]:
        try:
            return prompt.missing(self.encoder.cache, MAX_BATCH)
        except Exception as error:
            self._on_failure(prompt, error)
            return []

    def _encode(self, batch: Sequence[EncoderJob]) -> None:
        failed: set[MultimodalPrompt] = set()

        def run(jobs: Sequence[EncoderJob]) -> None:
            encoded = self.encoder.encode([job.item for job in jobs])
            for job, rows in zip(jobs, encoded, strict=True):
                job.prompt.encoded[job.item.digest] = rows

        def fail(jobs: Sequence[EncoderJob], failure: OnequeueError) -> None:
            if len(jobs) == 1:
                failed.add(jobs[0].prompt)
                self._on_failure(jobs[0].prompt, failure)

        run_in_halves(batch, run, fail, lambda job: job.prompt not in failed)

    def _mark_ready_if_encoded(self, prompt: MultimodalPrompt) -> None:
        try:
            if not prompt.find_unencoded(self.encoder.cache):
                prompt.mark_ready(self.encoder)
                self._ready[prompt] = None
        except Exception as error:
            self._on_failure(prompt, error)


def _prompts(waiting: Iterable[GeneratedSequence]) -> Iterable[MultimodalPrompt]:
    inputs = (sequence.multimodal for sequence in waiting)
    return (prompt for prompt in inputs if isinstance(prompt, MultimodalPrompt))


def _first_batch(jobs: Sequence[EncoderJob], limit: int) -> list[EncoderJob]:
    """Return the first job and up to `limit - 1` others of its shape, each tile once."""
    shape = jobs[0].item.shape
    by_digest = {job.item.digest: job for job in reversed(jobs) if job.item.shape == shape}
    return list(by_digest.values())[::-1][:limit]
