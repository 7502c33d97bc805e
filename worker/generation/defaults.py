"""What a request leaves open, from the checkpoint's generation_config; else as the OpenAI API has
it."""

from transformers import GenerationConfig, PreTrainedTokenizerBase

from worker.model.logits_processors import SamplingParams

LEFT_OPEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def end_ids(defaults: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All of the checkpoint's end-of-sequence tokens."""
    ids = getattr(defaults, "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def default_sampling(defaults: GenerationConfig) -> SamplingParams:
    """What the checkpoint says; `do_sample: false` is greedy."""
    given = {name: getattr(defaults, name, None) for name in LEFT_OPEN}
    if getattr(defaults, "do_sample", None) is False:
        given["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
