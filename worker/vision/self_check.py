"""Checks at load whether a multimodal model's images and sound are computed correctly.

A prompt with two of each kind and one without run through paged steps in chunks, and are compared
with the model's own forward over the whole prompt. Where logits differ, or the forward does not
pass its decoder the needed inputs, the model runs with transformers' cache. A kind of media that
its own forward does not take is refused.
"""

import inspect
import logging
from array import array
from collections import abc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from batching.block_pool import BlockTable
from batching.errors import DeviceLost
from batching.sequence import Batch, Chunk, Sequence
from batching.state_pool import StatePool
from worker.device.self_check import attention_of
from worker.error_classification import failure_of, first_line
from worker.messages.generation import PLURALS, MediaKind
from worker.model.attention.kv_cache import BLOCK
from worker.model.check import Reference
from worker.model.language_model import LanguageModel
from worker.model.paged_runner import PagedRunner, StateSlots
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.multimodal_prompt import MultimodalPrompt, select_tensors
from worker.vision.processor import MediaFeatures, Processor, ProcessorOutput

log = logging.getLogger("onequeue.generation")

SAMPLE_TEXT = "Here is {0} and what is to be seen and heard in it."


def check_multimodal(language: LanguageModel, processor: Processor) -> None:
    """Raise CannotRun unless paged steps with media give the model's own logits. Videos and
    recordings are encoded whole where their tiles do not."""
    try:
        _check_paged(language, processor)
    except Exception as error:
        modalities = processor.modalities.values()
        split = [each for each in modalities if each.window_tokens or each.kind == "video"]
        if not split or isinstance(failure_of(error), DeviceLost):
            raise
        log.info("videos and recordings are encoded whole: %.200s", first_line(error))
        for modality in split:
            modality.is_split = False
        _check_paged(language, processor)


def _check_paged(language: LanguageModel, processor: Processor) -> None:
    for output in sample_outputs(processor):
        _check_prompt(language, processor, output)


def _check_prompt(language: LanguageModel, processor: Processor, output: ProcessorOutput) -> None:
    [text_ids] = language.random_prompts([2 * BLOCK])

    def own_logits(prompts: abc.Sequence[ProcessorOutput]) -> list[Tensor]:
        with attention_of(language.decoder, "eager"):
            return [reference_logits(language, processor, prompt) for prompt in prompts]

    reference = Reference(own_logits, [output, ProcessorOutput(text_ids, {}, [], [])])
    blocks = -(-len(output.ids) // BLOCK)
    runner = PagedRunner(language, blocks + 2, language.context, 0, StateSlots(2, 0))
    encoder = VisionEncoder(runner, EncoderCache())
    prompt = MultimodalPrompt.from_output(output)
    for item in prompt.missing(encoder.cache, len(prompt.spans)):
        (prompt.encoded[item.digest],) = encoder.encode([item])
    prompt.mark_ready(encoder)
    states = StatePool(2, 0)
    with_images = _sequence(output.ids, range(blocks), states)
    with_images.multimodal = prompt
    text_only = _sequence(text_ids, range(blocks, blocks + 2), states)
    parts: dict[Sequence, list[Tensor]] = {with_images: [], text_only: []}
    while with_images.uncomputed:
        half = -(-len(output.ids) // 2)
        count = prompt.align_chunk(with_images.computed, min(with_images.uncomputed, half))
        chunks = []
        if text_only.uncomputed:
            chunks.append(Chunk(text_only, text_only.computed, min(text_only.uncomputed, BLOCK)))
        chunks.append(Chunk(with_images, with_images.computed, count))
        for chunk in chunks:
            assert chunk.table is not None
            assert chunk.table.state is not None
            chunk.states = states.plan(chunk.table.state, chunk.end)
        batch = Batch.from_chunks(chunks)
        batch.rows = range(len(batch.ids))
        logits = runner.forward(batch)
        for chunk, row in zip(chunks, batch.offsets, strict=True):
            parts[chunk.sequence].append(logits[row : row + chunk.count].clone())
            chunk.sequence.computed += chunk.count
            assert chunk.table is not None
            assert chunk.table.state is not None
            states.commit(chunk.table.state, chunk.end)
    reference.check([torch.cat(part) for part in parts.values()], language.tolerance)


def refuse_failing(language: LanguageModel, processor: Processor) -> None:
    """Refuse the kinds of media that the model's own forward does not take: log the reason, set
    `language.refused_media` and remove them from the processor's modalities. Pairs that it does not
    take together become `exclusive`. Set whether it `interleaves_sound`."""

    def failure(sample: Callable[[], ProcessorOutput]) -> str:
        try:
            reference_logits(language, processor, sample())
        except Exception as error:
            if isinstance(failure_of(error), DeviceLost):
                raise
            return first_line(error)
        return ""

    for kind in [*processor.modalities]:
        if why := failure(partial(sample_output, processor, [kind])):
            refuse(language, kind, f"the model does not run with them: {why}")
            del processor.modalities[kind]
    for pair in combinations(processor.modalities, 2):
        if why := failure(partial(sample_output, processor, pair)):
            log.info("%s and %s exclude each other: %.200s", *pair, why)
            processor.exclusive.add(frozenset(pair))
    if processor.modalities.keys() >= {"video", "audio"}:
        processor.interleaves_sound = not failure(partial(sample_sound_in_video, processor))


def refuse(language: LanguageModel, kind: MediaKind, why: str) -> None:
    """Refuse a kind of media: log the reason, and refer clients to the log."""
    log.warning("%s are refused, %s", PLURALS[kind], why)
    reason = f"this model does not run with {PLURALS[kind]} here; see the server's log"
    language.refused_media = {**language.refused_media, kind: reason}


def sample_output(processor: Processor, kinds: Iterable[MediaKind] = ()) -> ProcessorOutput:
    """Return a processed prompt with two small items of noise of each kind; of one of each, where
    the processor takes no more."""
    media: list[MediaFeatures] = []
    for kind in kinds or processor.modalities:
        modality = processor.modalities[kind]
        for number, item in enumerate(modality.samples()[: modality.max_items]):
            digest = f"{kind}{number}".encode()
            media.append(processor.process_media(kind, item, digest, low_detail=True))
    return processor.process_text(_sample_text(processor, media), media)


def sample_sound_in_video(processor: Processor) -> ProcessorOutput:
    """Return a processed prompt with a video that has its sound among its frames."""
    video, sound = (processor.modalities[kind].samples()[0] for kind in ("video", "audio"))
    media = [
        processor.process_media("video", video, b"video"),
        processor.process_media("audio", sound, b"audio"),
    ]
    return processor.process_text(_sample_text(processor, media[:1]), media, {})


def sample_outputs(processor: Processor) -> abc.Sequence[ProcessorOutput]:
    """Return a prompt with all kinds, or one of each where they exclude each other, and one with a
    sound in a video."""
    kinds = [[kind] for kind in processor.modalities] if processor.exclusive else [()]
    outputs = [sample_output(processor, each) for each in kinds]
    return outputs + ([sample_sound_in_video(processor)] if processor.interleaves_sound else [])


def _sample_text(processor: Processor, media: abc.Sequence[MediaFeatures]) -> str:
    """Return a text with the media as the chat template renders them, since some models need the
    tokens around them; without these where it does not."""
    tokens = [features.modality.token for features in media]
    content: list[dict[str, str]] = []
    for features in media:
        content += {"type": "text", "text": "Another one: "}, {"type": features.modality.kind}
    try:
        messages = [{"role": "user", "content": content}]
        rendered = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        if all(rendered.count(token) == tokens.count(token) for token in tokens):
            return str(rendered)
    except Exception as error:  # templates raise anything
        log.info("the chat template renders no media: %.200s", first_line(error))
    return SAMPLE_TEXT.format(", another ".join(tokens))


@torch.inference_mode()
def reference_logits(
    language: LanguageModel, processor: Processor, output: ProcessorOutput
) -> Tensor:
    """Return logits [T, V] of the model's own forward."""
    names = inspect.signature(language.model.forward).parameters
    mask = torch.ones(1, len(output.ids), dtype=torch.long)  # without it some count no positions
    given = {**output.inputs, **output.media_inputs(), "attention_mask": mask}
    tensors = select_tensors(given, names)
    inputs = {name: tensor.to(language.device) for name, tensor in tensors.items()}
    ids = torch.tensor([output.ids], device=language.device)
    logits: Tensor = language.model(input_ids=ids, **inputs, use_cache=False).logits[0]
    return logits


def _sequence(ids: list[int], blocks: range, states: StatePool) -> Sequence:
    sequence = Sequence([*ids])
    sequence.table = BlockTable(array("i", blocks), 0, 0, state=states.open(None, 0))
    return sequence
