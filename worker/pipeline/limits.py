"""How much a model takes: tokens of context, characters, seconds of sound.

Checked before the worker sees an input, because beyond its tables a model raises, and on a
GPU an index beyond a table ends the process's device for everybody.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jinja2 import TemplateError
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batching.errors import InvalidInput
from worker.model.loading import Pipe

ENDLESS = 1 << 24  # tokenizers say 10^30 where nobody set a limit
# A token is rarely longer: a text with more characters per token of context is refused unread.
MAX_CHARS_PER_TOKEN = 256
MAX_CHUNKS = 1024  # forward rows of one input
MAX_UNCHUNKED_S = 300.0  # sound in one row: its cost grows with the square
MAX_HEARD = 4  # times that sound is heard where each piece is filled up with silence
MAX_FILLED = 1 << 20  # tokens of all texts in an answer of fill-mask: seconds, and some 4 MB
MAX_SCORES = 1 << 24  # of one text's masks, each of which has one for every word
CHARS_PER_TOKEN = 4  # about
FILL_MASK_TOP_K = 5  # the pipeline's own default
WHISPER_PROMPT = 4  # tokens at most: start, language, task, no timestamps


def context_limit(pipe: Pipe) -> int:
    """Tokens the model takes at most, special tokens included."""
    config = pipe.model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), ENDLESS]
    if pipe.tokenizer is not None:
        limits.append(pipe.tokenizer.model_max_length)
    for name, module in pipe.model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, torch.nn.Embedding):
            continue
        if module.padding_idx is not None:  # RoBERTa counts positions from there
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return int(min(limit for limit in limits if limit and limit > 0))


def check_characters(count: int, limit: int) -> None:
    if count > MAX_CHARS_PER_TOKEN * limit:
        many = f"the text has {count} characters; the model takes {limit} tokens"
        raise InvalidInput(many, "inputs")


def vocabulary(pipe: Pipe) -> int:
    """Rows of the input embedding: tokenizers may know tokens that the model does not."""
    try:
        return int(pipe.model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # the model embeds in its own way
        return ENDLESS


def check_decision(pipe: Pipe, request: Mapping[str, Any], limit: int) -> None:
    """Raises InvalidInput unless the questions are well-formed and each prompt fits."""
    try:
        prompts = pipe.preprocess(request)["prompts"]
    except (ValueError, TemplateError) as error:
        raise InvalidInput(str(error)[:1000], "inputs.questions") from None
    longest = max(inputs["input_ids"].shape[-1] for inputs, _ in prompts)
    if longest > limit:
        long = f"a question makes {longest} tokens with the state; the model takes {limit}"
        raise InvalidInput(long, "inputs")


def check_strings(pipe: Pipe, inputs: Any, parameters: Mapping[str, Any], limit: int) -> None:
    """What a pipeline tokenizes inside, out of the runner's sight: a text, a phrase per label."""
    fields = {**parameters, **(inputs if isinstance(inputs, dict) else {"": inputs})}
    phrase = fields.get("hypothesis_template", "This is a photo of {}.")
    texts = [fields[key] for key in ("", "text") if isinstance(fields.get(key), str)]
    for text in (*texts, *map(phrase.format, fields.get("candidate_labels", ()))):
        check_characters(len(text), limit)
        if (count := len(pipe.tokenizer(text)["input_ids"])) > limit:
            raise InvalidInput(f"the text has {count} tokens; the model takes {limit}", "inputs")


def check_masks(
    masks: int, tokens: int, text: str, parameters: Mapping[str, Any], words: int
) -> None:
    """Of fill-mask, whose answers repeat the text: `parameters` are its postprocessing's, `words`
    the size of its vocabulary."""
    if masks * words > MAX_SCORES:
        many = f"the text has {masks} masks; at most {MAX_SCORES // words} are taken"
        raise InvalidInput(many, "inputs")
    answers, targets = parameters.get("top_k", FILL_MASK_TOP_K), parameters.get("target_ids")
    if targets is not None:
        answers = min(answers, len(targets))
    if answers > words:
        raise InvalidInput(f"the model has {words} tokens", "parameters.top_k")
    length = max(tokens, len(text) // CHARS_PER_TOKEN)
    if masks * answers * length > MAX_FILLED:
        long = f"{answers} answers for {masks} masks, each the whole text, are too much to send"
        raise InvalidInput(long, "parameters.top_k" if "top_k" in parameters else "inputs")


def check_strides(parameters: Mapping[str, Any], limit: int) -> None:
    """Overlaps that leave each piece of a text hardly anything new."""
    width = parameters.get("max_seq_len") or limit
    if width > limit:
        long = f"max_seq_len is {width}; the model takes {limit} tokens"
        raise InvalidInput(long, "parameters.max_seq_len")
    for name in ("stride", "doc_stride"):
        if (parameters.get(name) or 0) > width // 2:
            most = f"{name} must be at most {width // 2}, half the length of a piece"
            raise InvalidInput(most, f"parameters.{name}")


def check_sound(seconds: float, parameters: Mapping[str, Any], window_s: float) -> None:
    """`window_s`: what the model hears of each piece, silence after it; then it cuts sound of any
    length to pieces of its own. 0: it hears what there is."""
    if chunk_s := parameters.get("chunk_length_s") or 0.0:
        step_s = chunk_s - 2 * parameters.get("stride_length_s", chunk_s / 6)
        most = float(MAX_CHUNKS)
        if window_s:
            most = min(most, (MAX_UNCHUNKED_S + MAX_HEARD * seconds) / window_s)
        if step_s <= 0 or seconds / step_s > most:
            new = f"(chunk_length_s - 2 x stride_length_s is {step_s:g} seconds)"
            many = f"and of {seconds:.0f} seconds there may be at most {int(most)} pieces"
            each = f"each piece must bring something new {new}, {many}"
            raise InvalidInput(each, "parameters.chunk_length_s")
    elif seconds > MAX_UNCHUNKED_S and not window_s:
        long = f"the sound lasts {seconds:.0f} seconds; this model takes {MAX_UNCHUNKED_S:.0f}"
        cut = "speech recognition can cut it into pieces: set chunk_length_s"
        raise InvalidInput(f"{long} at a time ({cut})", "inputs")


def check_whisper(pipe: Pipe, parameters: Mapping[str, Any]) -> None:
    """What its `generate` would raise for."""
    config, asked = pipe.model.generation_config, parameters.get("return_timestamps")
    needed = "alignment_heads" if asked == "word" else "no_timestamps_token_id"
    if asked and getattr(config, needed, None) is None:
        raise InvalidInput(f"its generation_config has no {needed}", "parameters.return_timestamps")
    most = pipe.model.config.max_target_positions - WHISPER_PROMPT
    if (parameters.get("max_new_tokens") or 0) > most:
        many = f"the model says at most {most} tokens of a piece of sound"
        raise InvalidInput(many, "parameters.max_new_tokens")
    for name, table in (("language", "lang_to_id"), ("task", "task_to_id")):
        if (value := parameters.get(name)) is None:
            continue
        known = getattr(config, table, None) if getattr(config, "is_multilingual", True) else None
        if name == "language":
            code = value.lower().strip("<|>")
            value = f"<|{TO_LANGUAGE_CODE.get(code, code)}|>"
        if value not in (known or ()):
            names = ", ".join(each.strip("<|>") for each in known or ())
            knows = f"it knows {names or 'one alone'}"
            raise InvalidInput(f"the model takes no such {name}: {knows}", f"parameters.{name}")


def values_per_pixel(task: str, pipe: Pipe) -> int:
    """About how many float32 values an answer has for each of the image's pixels: scores of each
    label, a mask of each query, or a map of depths that becomes Python floats, then text."""
    if task == "depth-estimation":
        return 16
    if task != "image-segmentation":
        return 1
    config = pipe.model.config
    queries = getattr(getattr(config, "decoder_config", config), "num_queries", 0)
    return max(int(config.num_labels), int(queries))
