"""Loads a language model and creates its generation engine, on the worker's thread: on paged memory
or, where the model does not run on it, with transformers' cache.
"""

import json
import logging
from functools import partial
from typing import Any

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from worker.backends.cached_runner import CachedRunner
from worker.backends.quantization import without_outliers
from worker.decision_config import load_decision_config
from worker.device.self_check import CannotRun
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import InputProcessor
from worker.engines.generation.stored_engine import StoredEngine
from worker.error_classification import first_line
from worker.load_context import on_worker
from worker.messages.generation import PLURALS, TEXT_ONLY
from worker.model.attention.kv_cache import BLOCK
from worker.model.fingerprint import record_forms, weights_digest
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.loading import is_worth_compiling
from worker.model.paged_runner import PagedRunner
from worker.model.paging import cache_bytes, load_paged_runner, too_small
from worker.segment_store import open_store
from worker.template_file import read_template
from worker.vision.media_preprocessor import MediaPreprocessor
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner
from worker.vision.processor import Processor, load_processor
from worker.vision.self_check import check_multimodal, refuse, refuse_failing

log = logging.getLogger("onequeue.generation")

NO_TORCHVISION = (
    "this model's video processor needs torchvision, which is not installed: the server's extra "
    "[video] has it"
)

# Sequences that run together without paged memory, at most.
MAX_CACHED = 64
# The fraction of the KV cache that is used to keep prefixes, unless its size was set or its memory
# is allocated anyway, as on a GPU. Running sequences may fill all of it.
PREFIX_FRACTION = 0.25


def load_generator(options: GeneratorOptions) -> GenerationEngine:
    """Return the engine of a loaded model. Raises LoadingFailed if the model cannot be served."""
    language = load_language_model(options)
    language.extend_context(options.max_model_len)
    if options.kv_cache_dir != "none" and options.simulated_model == "none":
        language.digest = weights_digest(language.model.state_dict())  # before they are packed
    language.template_defaults = json.loads(options.chat_template_kwargs)
    language.reasoning, language.default_seed = options.reasoning, options.default_seed
    language.decision_config = load_decision_config(options.decision_config, language.folder)
    preprocessor = load_media_preprocessor(language, int(options.max_image_mp * 1e6))
    if options.chat_template != "auto":
        tokenizer: Any = language.tokenizer  # the processor's, of a multimodal model
        tokenizer.chat_template = read_template(options.chat_template)
        tokenizer.response_template = None

    def check_media() -> None:
        if preprocessor:
            on_worker(partial(check_multimodal, language, preprocessor.processor))

    runner: PagedRunner | CachedRunner
    try:
        with without_outliers(language.model):
            runner = load_paged_runner(language, options, check_media)
    except CannotRun as error:
        language.fall_back(
            "paged cache",
            error,
            "transformers' cache",
            "prefixes are not shared, prompts run whole",
        )
        if language.deterministic:
            log.warning("DETERMINISTIC=1 does not hold for static batches")
        language.pack_weights(options.quantization, language.own_check())
        length = options.max_model_len
        if preprocessor:
            runner = MultimodalCachedRunner(language, length, preprocessor.processor)
        else:
            runner = CachedRunner(language, length)
        engine = cached_engine(runner, options, str(error), preprocessor)
    else:
        engine = paged_engine(runner, options, preprocessor)
    if language.context > (original := language.rotary.original):
        log.warning(
            "rotary factors are those of %d tokens: up to %d tokens, outputs differ from those "
            "of generate, unless MAX_MODEL_LEN=%d",
            language.context, original, original,
        )  # fmt: skip
    return engine


def load_media_preprocessor(language: LanguageModel, max_pixels: int) -> MediaPreprocessor | None:
    """Return None if the model serves text only: without a processor that loads, with a warning in
    the log, or with no kind of media that the model runs with."""
    if not language.is_multimodal:
        return None
    try:
        pretrained = load_processor(language.folder)
        processor = Processor(pretrained, language.model.config, language.context)
    except Exception as error:
        while isinstance(error.__cause__, ImportError):
            error = error.__cause__  # the missing package, not the module that imports it
        reason = first_line(error)
        log.warning("images and sound are refused, the processor does not load: %s", reason)
        if not isinstance(error, ImportError):
            reason = "see the server's log"
        refused = f"this model's processor does not load: {reason}"
        language.refused_media = dict.fromkeys(language.refused_media, refused)
        return None
    for kind, why in processor.failures.items():
        refuse(language, kind, f"the processor does not take them: {why}")
    if getattr(pretrained, "video_processor", pretrained) is None:
        language.refused_media = {**language.refused_media, "video": NO_TORCHVISION}
    with without_outliers(language.model):
        on_worker(partial(refuse_failing, language, processor))
    if not processor.modalities:
        return None
    language.refused_media = {
        kind: f"this model takes no {PLURALS[kind]}" if reason == TEXT_ONLY[kind] else reason
        for kind, reason in language.refused_media.items()
        if kind not in processor.modalities
    }
    language.tokenizer = processor.tokenizer
    return MediaPreprocessor(processor, max_pixels)


def paged_engine(
    runner: PagedRunner,
    options: GeneratorOptions,
    preprocessor: MediaPreprocessor | None = None,
    kind: type[GenerationEngine] = GenerationEngine,
) -> GenerationEngine:
    language = runner.language
    if language.digest:
        settings = options.quantization, options.compile, options.lora_dir != "none"
        media = preprocessor and (preprocessor.processor.settings, options.max_image_mp)
        forms = record_forms(runner, runner.max_model_len, settings, media)
    # the compiler chooses the order of sums by the number of rows
    if is_worth_compiling(options.compile, language.parameters) and not language.deterministic:
        runner.compile()
    else:
        runner.record_form("", language.model)
    input_processor = InputProcessor(
        language, runner.max_model_len, media_preprocessor=preprocessor
    )
    speculates = options.speculation == "auto" and (runner.verifies_drafts or runner.builds_later)
    if options.simulated_model != "none":
        from worker.backends.simulated_runner import SimulatedRunner

        runner = SimulatedRunner(runner, options, input_processor.eos_token_ids)
        speculates = False
    is_reserved = options.kv_cache_gb is not None or language.device.type == "cuda"
    fresh_fraction = 1.0 if is_reserved else PREFIX_FRACTION

    def new_scheduler() -> ContinuousScheduler:
        states = runner.slots.pool() if language.states else None
        pool = BlockPool(runner.blocks, BLOCK, fresh_fraction, states)
        return ContinuousScheduler(pool, options.max_running)

    if language.digest:
        store = open_store(options.kv_cache_dir, int(options.kv_cache_dir_gb * 1e9))
        return StoredEngine(runner, input_processor, new_scheduler, speculates, store, forms)
    return kind(runner, input_processor, new_scheduler, speculates)


def cached_engine(
    runner: CachedRunner,
    options: GeneratorOptions,
    unpaged_reason: str,
    preprocessor: MediaPreprocessor | None = None,
) -> GenerationEngine:
    """`unpaged_reason`: why the model does not run on paged memory."""
    max_running, num_blocks = _cached_limits(runner, options)
    runner.max_model_len = min(runner.max_model_len, num_blocks * BLOCK)

    def new_scheduler() -> ContinuousScheduler:
        pool = BlockPool(num_blocks, BLOCK, keeps_prefixes=False)
        return ContinuousScheduler(pool, max_running, whole_prompts=True)

    return GenerationEngine(
        runner,
        InputProcessor(runner.language, runner.max_model_len, unpaged_reason, preprocessor),
        new_scheduler,
    )


def _cached_limits(runner: CachedRunner, options: GeneratorOptions) -> tuple[int, int]:
    """Return how many sequences may run and how many blocks of tokens they may have, so that their
    caches fit into memory."""
    max_running = min(options.max_running, MAX_CACHED)
    num_blocks = max_running * -(-runner.max_model_len // BLOCK)
    room = cache_bytes(runner.language, options.kv_cache_gb, options.later_caches)
    of_sequence, of_token = runner.sequence_bytes, runner.token_bytes
    if (needed := of_sequence + 2 * BLOCK * of_token) > room:
        reason = (
            f"the model's own cache needs {needed / 1e6:.1f} MB for {2 * BLOCK} tokens and there "
            f"is room for {room / 1e6:.1f} MB"
        )
        raise too_small(reason, options)
    if of_sequence:
        max_running = max(1, min(max_running, int(room / 2 // of_sequence)))
        room -= max_running * of_sequence
    if of_token:
        num_blocks = max(2, min(num_blocks, int(room // (of_token * BLOCK))))
    log.info(
        "static batches sequences=%d blocks=%d sequence_bytes=%d token_bytes=%d",
        max_running, num_blocks, of_sequence, of_token,
    )  # fmt: skip
    return max_running, num_blocks
