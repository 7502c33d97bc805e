"""Upper bounds of a model's inputs: tokens of context, characters, seconds of audio.

Inputs are checked in pool threads, before they reach the worker: a model raises for an index beyond
its tables, and on a GPU that makes the device unusable for all requests.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jinja2 import TemplateError
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from worker.model.loading import Pipe
from worker.tasks import truncates

UNLIMITED = 1 << 24  # tokenizers without a limit report 10^30
# Longer tokens are rare: a text with more characters per token of context is refused unread.
MAX_CHARS_PER_TOKEN = 256
MAX_TEXT_CHARS = 1 << 19  # a tokenizer needs 300 bytes of memory per character
TRUNCATION_HINT = '; "parameters": {"truncation": true} truncates it'
MAX_CHUNKS = 1024  # rows of one input
MAX_UNCHUNKED_S = 300.0  # audio in one row: the cost grows with the square
MAX_PADDED_RATIO = 4  # times that audio is processed where each chunk is padded with silence
MAX_FILLED_TOKENS = 1 << 20  # of all texts in a fill-mask response: seconds, and some 4 MB
MAX_MASK_SCORES = 1 << 24  # of one text: masks times vocabulary
CHARS_PER_TOKEN = 4  # on average
FILL_MASK_TOP_K = 5  # the pipeline's own default
MAX_WHISPER_PROMPT_TOKENS = 4  # start, language, task, no timestamps


# ── what a model accepts ──


def context_limit(pipe: Pipe) -> int:
    """Return the most tokens that the model accepts, special tokens included."""
    try:
        config = pipe.model.config.get_text_config()
    except ValueError:  # there are several
        config = pipe.model.config.get_text_config(encoder=True)
    names = "max_position_embeddings", "max_text_positions"
    limits = [UNLIMITED, *(getattr(config, name, None) for name in names)]
    if pipe.tokenizer is not None:
        limits.append(pipe.tokenizer.model_max_length)
    for name, module in pipe.model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, torch.nn.Embedding):
            continue
        if module.padding_idx is not None:  # RoBERTa counts positions from there
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return int(min(limit for limit in limits if limit and limit > 0))


def vocabulary_size(pipe: Pipe) -> int:
    """Return the rows of the input embedding: a tokenizer may have more tokens than the model."""
    try:
        return int(pipe.model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # the model has no plain embedding
        return UNLIMITED


def values_per_pixel(task: str, pipe: Pipe) -> int:
    """Return about how many float32 values an output has per pixel of the image: scores of each
    label, a mask of each query, or a depth map that becomes Python floats, then text."""
    if task == "depth-estimation":
        return 16
    if task != "image-segmentation":
        return 1
    config = pipe.model.config
    queries = getattr(getattr(config, "decoder_config", config), "num_queries", 0)
    return max(int(config.num_labels), int(queries))


# ── checks of inputs and parameters; all raise InvalidInput ──


def check_characters(count: int, limit: int, hint: str = "") -> None:
    if count > MAX_TEXT_CHARS:
        raise InvalidInput(
            f"the text has {count} characters; at most {MAX_TEXT_CHARS} are accepted", "inputs"
        )
    if count > MAX_CHARS_PER_TOKEN * limit:
        raise InvalidInput(
            f"the text has {count} characters; the model takes {limit} tokens{hint}", "inputs"
        )


def check_decision(pipe: Pipe, request: Mapping[str, Any], limit: int) -> None:
    """Check that the questions are well-formed and that each prompt fits into the context."""
    try:
        prompts = pipe.preprocess(request)["prompts"]
    except (ValueError, TemplateError) as error:
        raise InvalidInput(str(error)[:1000], "inputs.questions") from None
    longest = max(inputs["input_ids"].shape[-1] for inputs, _ in prompts)
    if longest > limit:
        raise InvalidInput(
            f"the state and a question have {longest} tokens; the model takes {limit}", "inputs"
        )


def check_strings(pipe: Pipe, inputs: Any, parameters: Mapping[str, Any], limit: int) -> None:
    """Check texts that a pipeline tokenizes by itself, after the runner's own checks: the text,
    and a phrase per label."""
    fields = {**parameters, **(inputs if isinstance(inputs, dict) else {"": inputs})}
    phrase = fields.get("hypothesis_template", "This is a photo of {}.")
    texts = [fields[key] for key in ("", "text") if isinstance(fields.get(key), str)]
    for text in (*texts, *map(phrase.format, fields.get("candidate_labels", ()))):
        check_characters(len(text), limit)
        if truncates(parameters):
            continue
        if (count := len(pipe.tokenizer(text)["input_ids"])) > limit:
            raise InvalidInput(f"the text has {count} tokens; the model takes {limit}", "inputs")


def check_masks(
    masks: int, tokens: int, chars: int, parameters: Mapping[str, Any], words: int
) -> None:
    """Check the size of a fill-mask response, which repeats the text, of `chars` characters if it
    is whole. `parameters` are those of postprocessing, `words` is the vocabulary's size."""
    if masks * words > MAX_MASK_SCORES:
        raise InvalidInput(
            f"the text has {masks} masks; at most {MAX_MASK_SCORES // words} are accepted", "inputs"
        )
    candidates, targets = parameters.get("top_k", FILL_MASK_TOP_K), parameters.get("target_ids")
    if targets is not None:
        candidates = min(candidates, len(targets))
    if candidates > words:
        raise InvalidInput(
            f"top_k is {candidates}; the model has {words} tokens", "parameters.top_k"
        )
    length = max(tokens, chars // CHARS_PER_TOKEN)
    if masks * candidates * length > MAX_FILLED_TOKENS:
        raise InvalidInput(
            f"the response would repeat a text of about {length} tokens {masks * candidates} times "
            f"({masks} masks, {candidates} candidates each); "
            f"at most {MAX_FILLED_TOKENS} tokens are returned",
            "parameters.top_k" if "top_k" in parameters else "inputs",
        )


def check_strides(parameters: Mapping[str, Any], limit: int) -> None:
    """Check that a text's chunks overlap by at most half of their length."""
    width = parameters.get("max_seq_len") or limit
    if width > limit:
        raise InvalidInput(
            f"max_seq_len is {width}; the model takes {limit} tokens", "parameters.max_seq_len"
        )
    for name in ("stride", "doc_stride"):
        if (stride := parameters.get(name) or 0) > width // 2:
            raise InvalidInput(
                f"{name} is {stride}; it must be at most {width // 2}, half of a chunk's length",
                f"parameters.{name}",
            )


def check_audio(seconds: float, parameters: Mapping[str, Any], window_s: float) -> None:
    """Check a recording's length and its cut into chunks.

    `window_s` is the length to which the model pads each chunk with silence; such a model cuts
    recordings of any length by itself. 0: chunks are not padded.
    """
    if chunk_s := parameters.get("chunk_length_s") or 0.0:
        step_s = chunk_s - 2 * parameters.get("stride_length_s", chunk_s / 6)
        max_chunks = float(MAX_CHUNKS)
        if window_s:
            max_chunks = min(max_chunks, (MAX_UNCHUNKED_S + MAX_PADDED_RATIO * seconds) / window_s)
        if step_s <= 0 or seconds / step_s > max_chunks:
            raise InvalidInput(
                f"chunk_length_s - 2 x stride_length_s is {step_s:g} seconds; it must be positive "
                f"and cut the {seconds:.0f} seconds into at most {int(max_chunks)} chunks",
                "parameters.chunk_length_s",
            )
    elif seconds > MAX_UNCHUNKED_S and not window_s:
        raise InvalidInput(
            f"the recording has {seconds:.0f} seconds; this model takes {MAX_UNCHUNKED_S:.0f} "
            "at a time (speech recognition can cut it into chunks: set chunk_length_s)",
            "inputs",
        )


def check_whisper(pipe: Pipe, parameters: Mapping[str, Any]) -> None:
    """Check the parameters for which Whisper's `generate` would raise."""
    config, timestamps = pipe.model.generation_config, parameters.get("return_timestamps")
    required = "alignment_heads" if timestamps == "word" else "no_timestamps_token_id"
    if timestamps and getattr(config, required, None) is None:
        raise InvalidInput(
            f"return_timestamps is {str(timestamps).lower()}; "
            f"the model's generation_config has no {required}",
            "parameters.return_timestamps",
        )
    max_tokens = pipe.model.config.max_target_positions - MAX_WHISPER_PROMPT_TOKENS
    if (max_new_tokens := parameters.get("max_new_tokens") or 0) > max_tokens:
        raise InvalidInput(
            f"max_new_tokens is {max_new_tokens}; "
            f"the model generates at most {max_tokens} tokens per window",
            "parameters.max_new_tokens",
        )
    for name, table in (("language", "lang_to_id"), ("task", "task_to_id")):
        if (value := parameters.get(name)) is None:
            continue
        known = getattr(config, table, None) if getattr(config, "is_multilingual", True) else None
        token = value
        if name == "language":
            code = value.lower().strip("<|>")
            token = f"<|{TO_LANGUAGE_CODE.get(code, code)}|>"
        if token not in (known or ()):
            names = ", ".join(key.strip("<|>") for key in known or ())
            accepted = f"the model accepts {names}" if names else "the model has only one"
            raise InvalidInput(f"{name} is {value[:100]!r}; {accepted}", f"parameters.{name}")
