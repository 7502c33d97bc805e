"""Whether a model that sees runs its pictures paged, which is asked of the model itself at load.

A prompt with two pictures, and one without, go through paged steps in chunks, and whole through the
model's own forward; where logits differ, or the forward does not tell what it passes to its
decoder, the model runs with the cache that it came with, if its own forward takes pictures at all.
"""

import inspect
import logging
from array import array

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batching.block_pool import BlockTable
from batching.errors import DeviceLost
from batching.sequence import Batch, Chunk, Sequence
from worker.device.self_check import explicit_masks
from worker.error_classification import failure_of, first_line
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import LanguageModel
from worker.model.paged_runner import PagedRunner
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.multimodal_prompt import MultimodalPrompt, taken
from worker.vision.processor import Processor, ProcessorOutput

log = logging.getLogger("onequeue.generation")

WORDS = "A picture, {0} another one, {0} and what is to be seen in them."
SIZES = (64, 48), (32, 64)  # pixels


def check_multimodal(language: LanguageModel, processor: Processor) -> None:
    """CannotRun unless they do."""
    made = sample(processor)
    with explicit_masks(language.decoder):
        reference = own_logits(language, processor, made)
        ids = [1 + 7 * n % (language.vocab_size - 1) for n in range(2 * BLOCK)]
        text_reference = own_logits(language, processor, ProcessorOutput(ids, {}, [], []))
    blocks = -(-len(made.ids) // BLOCK)
    runner = PagedRunner(language, blocks + 2, language.context, 0)
    assert runner.decoder_hook is not None
    tower, prompt = VisionEncoder(runner.decoder_hook, EncoderCache()), MultimodalPrompt.of(made)
    for piece in prompt.missing(tower.album, len(prompt.spans)):
        (prompt.found[piece.digest],) = tower.look([piece])
    prompt.open(tower)
    pictured = _sequence(made.ids, range(blocks))
    pictured.multimodal = prompt
    text = _sequence(ids, range(blocks, blocks + 2))
    while pictured.left:
        half = prompt.align_chunk(pictured.computed, min(pictured.left, -(-len(made.ids) // 2)))
        chunks = [Chunk(text, text.computed, min(text.left, BLOCK))] if text.left else []
        chunks.append(Chunk(pictured, pictured.computed, half))
        batch = Batch.of(chunks)
        batch.rows = range(len(batch.ids))
        logits = runner.forward(batch)
        for chunk, row in zip(chunks, batch.offsets, strict=True):
            part = slice(chunk.start, chunk.start + chunk.count)
            expected = reference if chunk.sequence is pictured else text_reference
            language.compare(logits[row : row + chunk.count], expected[part])
            chunk.sequence.computed += chunk.count


def check_multimodal_unpaged(language: LanguageModel, processor: Processor) -> bool:
    """Whether its own forward takes pictures; else, with a line in the log, it serves text."""
    try:
        own_logits(language, processor, sample(processor))
    except Exception as error:
        if isinstance(failure_of(error), DeviceLost):
            raise
        why = first_line(error)
        log.warning("images are refused, the model does not run with them: %s", why)
        language.no_images = "this model does not run with images here: the server's log says why"
        return False
    return True


def sample(processor: Processor) -> ProcessorOutput:
    """Two small pictures of noise."""
    noise = np.random.default_rng(0)
    views = []
    for number, (width, height) in enumerate(SIZES):
        image = Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8))
        views.append(processor.look(image, bytes([number]), rough=True))
    return processor.process(WORDS.format(processor.mark), views)


@torch.inference_mode()
def own_logits(language: LanguageModel, processor: Processor, made: ProcessorOutput) -> Tensor:
    """[T, V] by the model's own forward."""
    takes = inspect.signature(language.model.forward).parameters
    images = processor.joined(made.images) if made.images else {}
    given = taken({**made.inputs, **images}, takes)
    inputs = {name: each.to(language.device) for name, each in given.items()}
    ids = torch.tensor([made.ids], device=language.device)
    logits: Tensor = language.model(input_ids=ids, **inputs, use_cache=False).logits[0]
    return logits


def _sequence(ids: list[int], blocks: range) -> Sequence:
    sequence = Sequence([*ids])
    sequence.table = BlockTable(array("i", blocks), 0, 0)
    return sequence
