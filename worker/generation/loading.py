"""From settings to a generation engine with its model: on paged memory, or with the model's own
cache where that does not fit it. On the worker's thread.
"""

import logging

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from worker.generation.engine import GenerationEngine
from worker.model.cached_runner import CachedRunner
from worker.model.kv_cache import BLOCK, prefix_share
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.paged_runner import PagedRunner
from worker.model.paging import load_paged_runner
from worker.model.self_check import CannotRun

log = logging.getLogger("onequeue.generation")

# Sequences that run at most where each has a cache of the model's, for which no room is reserved.
MOST_CACHED = 64


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
    share = prefix_share(runner.language.device, options.kv_cache_gb)

    def new_scheduler() -> ContinuousScheduler:
        return ContinuousScheduler(BlockPool(runner.blocks, BLOCK, share), options.max_running)

    return GenerationEngine(runner, new_scheduler, speculates=options.speculation == "auto")


def cached_engine(runner: CachedRunner, options: GeneratorOptions, why: str) -> GenerationEngine:
    """`why`: why the model is not paged."""
    most = min(options.max_running, MOST_CACHED)

    def new_scheduler() -> ContinuousScheduler:
        # any sequence fits into a block, no block is ever full, and there are more than can run
        pool = BlockPool(2 * most + 1, runner.max_model_len + 1)
        return ContinuousScheduler(pool, most, whole_prompts=True)

    return GenerationEngine(runner, new_scheduler, why=why)
