"""From settings to a generation engine with its model: on paged memory, or with the cache
that transformers gives it where that does not fit. On the worker's thread.
"""

import logging

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from worker.generation.engine import GenerationEngine
from worker.model.cached_runner import CachedRunner
from worker.model.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.paged_runner import PagedRunner
from worker.model.paging import load_paged_runner
from worker.model.self_check import CannotRun

log = logging.getLogger("onequeue.generation")

# Sequences that run at most where each has a cache of the model's, for which no room is reserved.
MOST_CACHED = 64
# How much of the cache is touched for the sake of prefixes, unless it was given, or is set aside
# anyway, as on a GPU. Running sequences may fill all of it.
PREFIX_SHARE = 0.25


def load_generator(options: GeneratorOptions) -> GenerationEngine:
    """LoadingFailed if the model cannot be served."""
    language = load_language_model(options)
    try:
        runner = load_paged_runner(language, options)
    except CannotRun as error:
        log.warning("static batches: %s", error)
        language.lay_out(options.quantization)
        return cached_engine(CachedRunner(language, options.max_model_len), options, str(error))
    return paged_engine(runner, options)


def paged_engine(runner: PagedRunner, options: GeneratorOptions) -> GenerationEngine:
    set_aside = options.kv_cache_gb is not None or runner.language.device.type == "cuda"
    share = 1.0 if set_aside else PREFIX_SHARE
    return GenerationEngine(
        runner,
        lambda: ContinuousScheduler(BlockPool(runner.blocks, BLOCK, share), options.max_running),
        speculates=options.speculation == "auto",
    )


def cached_engine(runner: CachedRunner, options: GeneratorOptions, why: str) -> GenerationEngine:
    """`why`: why the model is not paged."""
    most = min(options.max_running, MOST_CACHED)
    # any sequence fits into a block, no block is ever full, and there are more than can run
    blocks, size = 2 * most + 1, runner.max_model_len + 1
    return GenerationEngine(
        runner,
        lambda: ContinuousScheduler(BlockPool(blocks, size), most, whole_prompts=True),
        why=why,
    )
