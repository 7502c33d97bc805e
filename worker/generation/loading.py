"""From settings to a generation engine, its model's weights laid out and its memory reserved.

A model runs on paged memory, or with its own cache where that does not fit it.
"""

import logging

import torch

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from worker.generation.engine import GenerationEngine
from worker.model import cpu_linear, memory
from worker.model.attention_interface import CannotPage
from worker.model.cached_runner import CachedRunner
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.loading import LoadingFailed
from worker.model.paged_attention import BLOCK
from worker.model.paged_runner import PagedRunner
from worker.model.self_check import TOLERANCE

log = logging.getLogger("onequeue.generation")

# COMPILE=auto leaves models with fewer parameters alone: a minute's work for little.
WORTH_COMPILING = 10_000_000
# Sequences that run at most where each keeps a cache of the model's, whose size nobody bounds.
MOST_CACHED = 64


def load_generator(options: GeneratorOptions) -> GenerationEngine:
    language = load_language_model(options)
    refused = ""
    try:
        language.page()
    except CannotPage as error:
        refused = str(error)
        log.warning("static batches: %s", refused)
    _lay_out(language, options, paged=not refused)
    language.reference = [], []  # as large as the vocabulary, and no longer needed
    if refused:
        return cached_engine(language, CachedRunner(language), options, refused)
    wanted = min(options.max_model_len or language.context, language.context)
    blocks = memory.cache_blocks(
        language.layers,
        language.dtype,
        language.device,
        options.kv_cache_gb,
        options.max_running * wanted,
    )
    max_model_len = min(wanted, blocks * BLOCK)
    if options.max_model_len and max_model_len < options.max_model_len:
        raise LoadingFailed(
            f"MAX_MODEL_LEN={options.max_model_len}: the model takes {language.context} tokens "
            f"and the memory for keys and values holds {blocks * BLOCK}"
        )
    runner = PagedRunner(language, blocks, max_model_len, options.max_running)
    log.info("cache blocks=%d tokens=%d context=%d", blocks, blocks * BLOCK, max_model_len)
    big = language.parameters >= WORTH_COMPILING
    if options.compile == "on" or (options.compile == "auto" and big):
        runner.compile()
    return paged_engine(language, runner, options, blocks, max_model_len)


def paged_engine(
    language: LanguageModel,
    runner: PagedRunner,
    options: GeneratorOptions,
    blocks: int,
    max_model_len: int,
) -> GenerationEngine:
    share = memory.prefix_share(language.device, options.kv_cache_gb)

    def new_scheduler() -> ContinuousScheduler:
        return ContinuousScheduler(BlockPool(blocks, BLOCK, share), options.max_running)

    speculates = options.speculation == "auto"
    return GenerationEngine(language, runner, new_scheduler, max_model_len, speculates)


def cached_engine(
    language: LanguageModel, runner: CachedRunner, options: GeneratorOptions, why: str
) -> GenerationEngine:
    max_model_len = min(options.max_model_len or language.context, language.context)
    most = min(options.max_running, MOST_CACHED)

    def new_scheduler() -> ContinuousScheduler:
        # any sequence fits into a block, no block is ever full, and there are more than can run
        pool = BlockPool(2 * most + 1, max_model_len + 1)
        return ContinuousScheduler(pool, most, whole_prompts=True)

    return GenerationEngine(language, runner, new_scheduler, max_model_len, why=why)


def _lay_out(language: LanguageModel, options: GeneratorOptions, paged: bool) -> None:
    """Weights as this device's kernels want them; without a check only if that is asked for."""
    if options.quantization == "int8":
        if language.device.type != "cpu":
            raise LoadingFailed("QUANTIZATION=int8 is for models on a CPU")
        cpu_linear.quantise(language.model, memory.free_bytes(language.device))
        language.tolerance = TOLERANCE[torch.bfloat16]  # what int8 weights are multiplied by
    elif paged and language.device.type == "cpu" and cpu_linear.packs(language.dtype):
        cpu_linear.pack(language.model, memory.free_bytes(language.device))
        try:
            language.recheck()
        except Exception as error:  # a model that uses weights without calling their layer
            log.info("weights stay as they are: %s", error)
            cpu_linear.unpack(language.model)
    elif (
        language.device.type == "cpu" and cpu_linear.packed_dtype(language.dtype) != language.dtype
    ):
        log.warning("this CPU emulates bfloat16: DTYPE=float32 is faster here")
