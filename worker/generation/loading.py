"""From settings to a generation engine with its model: on paged memory, or with the cache
that transformers gives it where that does not fit. On the worker's thread.
"""

import logging
from functools import partial
from typing import Any

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from worker.device.self_check import CannotRun
from worker.error_classification import first_line
from worker.generation.engine import GenerationEngine
from worker.model.attention.kv_cache import BLOCK
from worker.model.cached_runner import CachedRunner
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.loading import is_worth_compiling
from worker.model.paged_runner import PagedRunner
from worker.model.paging import load_paged_runner
from worker.vision.cpu_fusions import apply_cpu_fusions
from worker.vision.image_preprocessor import ImagePreprocessor
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner
from worker.vision.processor import Processor, load_processor
from worker.vision.self_check import check_multimodal, check_multimodal_unpaged

log = logging.getLogger("onequeue.generation")

# Sequences that run at most where each has a cache of the model's, for which no room is reserved.
MOST_CACHED = 64
# How much of the cache is touched for the sake of prefixes, unless it was given, or is set aside
# anyway, as on a GPU. Running sequences may fill all of it.
PREFIX_SHARE = 0.25


def load_generator(options: GeneratorOptions) -> GenerationEngine:
    """LoadingFailed if the model cannot be served."""
    language = load_language_model(options)
    preprocessor = load_image_preprocessor(language, int(options.max_image_mp * 1e6))
    runner: PagedRunner | CachedRunner
    try:
        also = (
            partial(check_multimodal, language, preprocessor.processor)
            if preprocessor
            else lambda: None
        )
        runner = load_paged_runner(language, options, also)
    except CannotRun as error:
        log.warning("static batches: %s", error)
        language.pack_weights(options.quantization)
        if preprocessor and not check_multimodal_unpaged(language, preprocessor.processor):
            preprocessor = None
        length = options.max_model_len
        if preprocessor:
            runner = MultimodalCachedRunner(language, length, preprocessor.processor)
        else:
            runner = CachedRunner(language, length)
        return cached_engine(runner, options, str(error), preprocessor)
    if preprocessor:
        apply_cpu_fusions(language)
    if is_worth_compiling(options.compile, language.parameters):
        runner.compile()
    return paged_engine(runner, options, preprocessor)


def load_image_preprocessor(language: LanguageModel, most_pixels: int) -> ImagePreprocessor | None:
    """None, with a line in the log, where the checkpoint's does not load: it serves text."""
    if not language.is_multimodal:
        return None
    config: Any = language.model.config
    try:
        made = load_processor(language.folder)
        processor = Processor(made, config.image_token_id, language.context)
    except Exception as error:
        while isinstance(error.__cause__, ImportError):
            error = error.__cause__  # of a module that wants a package, that package
        why = first_line(error)
        log.warning("images are refused, its processor does not load: %s", why)
        told = why if isinstance(error, ImportError) else "the server's log says why"
        language.no_images = f"this model's processor of images does not load here: {told}"
        return None
    language.tokenizer = processor.tokenizer
    return ImagePreprocessor(processor, most_pixels)


def paged_engine(
    runner: PagedRunner,
    options: GeneratorOptions,
    preprocessor: ImagePreprocessor | None = None,
) -> GenerationEngine:
    set_aside = options.kv_cache_gb is not None or runner.language.device.type == "cuda"
    share = 1.0 if set_aside else PREFIX_SHARE
    return GenerationEngine(
        runner,
        lambda: ContinuousScheduler(BlockPool(runner.blocks, BLOCK, share), options.max_running),
        speculates=options.speculation == "auto",
        image_preprocessor=preprocessor,
    )


def cached_engine(
    runner: CachedRunner,
    options: GeneratorOptions,
    why: str,
    preprocessor: ImagePreprocessor | None = None,
) -> GenerationEngine:
    """`why`: why the model is not paged."""
    most = min(options.max_running, MOST_CACHED)
    # any sequence fits into a block, no block is ever full, and there are more than can run
    blocks, size = 2 * most + 1, runner.max_model_len + 1
    return GenerationEngine(
        runner,
        lambda: ContinuousScheduler(BlockPool(blocks, size), most, whole_prompts=True),
        why=why,
        image_preprocessor=preprocessor,
    )
