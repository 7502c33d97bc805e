"""Convert a request's inputs to the arguments of a pipeline's `preprocess`; runs in pool threads.

The runner (runner.py) calls `InputReader.read`. Every string is a text or base64 data, checked
here: none reaches code of a pipeline that would open it as a path or a URL. The model's upper
bounds are in limits.py.
"""

import base64
import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from transformers.utils.chat_template_utils import Chat

from batching.errors import InvalidInput
from worker.engines.pipeline import limits
from worker.media.decode_limiter import Lease
from worker.media.inputs import to_audio, to_image, to_images
from worker.messages.protocol import PipelineInput
from worker.model.loading import Pipe
from worker.tasks import TASKS, TEXTS, check, listed, truncates

MAX_LABELLED_CHARS = 500_000  # of a text, times its labels: each label makes a row
MAX_DETECTION_LABELS = 128  # each label makes a row with the whole image
MAX_QUESTIONS = 64  # each may be a prompt of its own


class InputReader:
    """Reads the inputs of one task for one model; `limit` is the model's context in tokens."""

    def __init__(self, task: str, pipe: Pipe) -> None:
        self.name = task
        self.task = TASKS[task]
        self.limit = limits.context_limit(pipe)
        self.values_per_pixel = limits.values_per_pixel(task, pipe)

    def read(self, payload: PipelineInput, pipe: Pipe, lease: Lease) -> Any:
        """Return the argument of `preprocess`. Images and audio are decoded within the lease.
        Raises InvalidInput for inputs that the task or the model does not accept."""
        inputs, parameters = payload.inputs, payload.parameters
        limits.check_strides(parameters, self.limit)
        any_length = truncates(parameters) and self.task.stages
        limit = limits.UNLIMITED if any_length else self.limit
        match self.task.kind:
            case "text":
                inputs = self._read_text(inputs, parameters, pipe, limit)
            case "image":
                inputs = to_image(inputs, lease, values_per_pixel=self.values_per_pixel)
            case "audio":
                extractor, window_s = pipe.feature_extractor, 0.0
                if getattr(pipe, "type", "") == "seq2seq_whisper":
                    limits.check_whisper(pipe, parameters)
                    window_s = extractor.chunk_length
                check = partial(limits.check_audio, parameters=parameters, window_s=window_s)
                inputs = to_audio(inputs, extractor.sampling_rate, lease, check)
            case "json":
                inputs = read_object(self.name, inputs, self.limit, lease)
        if (self.task.kind != "text" or not self.task.stages) and pipe.tokenizer is not None:
            limits.check_strings(pipe, inputs, parameters, self.limit)
        if self.name == "decision":
            limits.check_decision(pipe, inputs, self.limit)
        return inputs

    def _read_text(self, inputs: Any, parameters: Mapping[str, Any], pipe: Pipe, limit: int) -> Any:
        """Check a string or, for some tasks, a pair or a conversation."""
        if isinstance(inputs, dict) and self.name == "text-classification":
            return read_pair(inputs, limit)
        if isinstance(inputs, list) and self.name == "text-generation":
            return read_chat(inputs, pipe, limit)
        if not isinstance(inputs, str):
            raise InvalidInput(f"{self.name} takes a string, not {describe_type(inputs)}", "inputs")
        if not (inputs if self.name == "text-generation" else inputs.strip()):
            raise InvalidInput("the text is empty", "inputs")
        labels = parameters.get("candidate_labels", ())
        count = labels.count(",") + 1 if isinstance(labels, str) else len(labels)
        if len(inputs) * count > MAX_LABELLED_CHARS:
            raise InvalidInput(
                f"the text has {len(inputs)} characters and {count} labels; "
                f"at most {MAX_LABELLED_CHARS} characters times labels are accepted",
                "inputs",
            )
        limits.check_characters(len(inputs), limit, limits.TRUNCATION_HINT)
        if self.name == "fill-mask" and (mask := pipe.tokenizer.mask_token) not in inputs:
            raise InvalidInput(
                f"the text has no {mask}: write it in place of the word to fill in", "inputs"
            )
        return inputs


def read_pair(inputs: dict[str, Any], limit: int) -> dict[str, str]:
    """Check a pair of texts. Raises InvalidInput."""
    has_keys = "text" in inputs and set(inputs) <= {"text", "text_pair"}
    if not has_keys or not all(isinstance(v, str) and v.strip() for v in inputs.values()):
        raise InvalidInput(
            'a pair of texts must be {"text": …, "text_pair": …}, both non-empty strings', "inputs"
        )
    limits.check_characters(sum(map(len, inputs.values())), limit)
    return inputs


def read_chat(messages: list[Any], pipe: Pipe, limit: int) -> Chat:
    """Check a conversation. Contents must be strings, because a list of parts may contain images
    to fetch. Raises InvalidInput."""
    if pipe.tokenizer.chat_template is None:
        raise InvalidInput("the model has no chat template: send a string", "inputs")
    if not messages:
        raise InvalidInput("the conversation is empty", "inputs")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            accepted = f"must be an object with role and content, not {describe_type(message)}"
            raise InvalidInput.at(f"inputs[{index}]", accepted)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                kind = describe_type(message[key]) if key in message else "absent"
                raise InvalidInput.at(f"inputs[{index}].{key}", f"must be a string, not {kind}")
        if unknown := set(message) - {"role", "content"}:
            raise InvalidInput(
                f"a message takes role and content, not {min(map(str, unknown))[:100]!r}",
                f"inputs[{index}]",
            )
    limits.check_characters(sum(len(message["content"]) for message in messages), limit)
    return Chat(messages)  # type: ignore[arg-type]  # annotated as a dict, used as a list


def text_length(inputs: Any) -> int:
    """Return the characters of a text, of the texts of a pair, or of a conversation."""
    if isinstance(inputs, Chat):
        return sum(len(message["content"]) for message in inputs.messages)
    texts = inputs.values() if isinstance(inputs, dict) else [inputs]
    return sum(len(text) for text in texts if isinstance(text, str))


def describe_type(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", bool: "a boolean", bytes: "bytes", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")


# ── tasks with a JSON object as input ──


def are_word_boxes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and is_box(pair[1])
        for pair in value
    )


def is_box(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4 or {type(edge) for edge in value} != {int}:
        return False
    left, top, right, bottom = value
    return bool(0 <= left <= right <= 1000 and 0 <= top <= bottom <= 1000)


def is_table(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(v, list) for v in value.values()):
        return False
    cells = (cell for column in value.values() for cell in column)
    return len({len(column) for column in value.values()}) == 1 and all(
        isinstance(cell, (str, int, float, bool, type(None))) for cell in cells
    )


# Keys that an object may have besides the required ones.
OPTIONAL_KEYS = {"document-question-answering": ("image", "word_boxes")}
TEXT = check("must be a non-empty string", lambda v: isinstance(v, str) and bool(v.strip()))
CHECKS = {
    "question": TEXT,
    "query": TEXTS,
    "text": TEXT,
    "candidate_labels": listed,
    "word_boxes": check(
        "must be a list of [word, [left, top, right, bottom]], integers from 0 to 1000",
        are_word_boxes,
    ),
    "table": check('must be an object of columns of equal length: {"name": ["…", …], …}', is_table),
    "state": check(
        "must be a non-empty string, object or list",
        lambda value: isinstance(value, (str, dict, list)) and bool(value),
    ),
    "questions": check(
        f"must be an object of 1 to {MAX_QUESTIONS} questions by name",
        lambda value: isinstance(value, dict) and 0 < len(value) <= MAX_QUESTIONS,
    ),
}


def read_object(task: str, inputs: Any, limit: int, lease: Lease) -> Any:
    """Check a JSON object and return the pipeline's argument: images decoded, a table as a
    DataFrame of strings. Raises InvalidInput."""
    required = TASKS[task].json_keys
    known = (*required, *OPTIONAL_KEYS.get(task, ()))
    fields = {k: v for k, v in inputs.items() if v is not None} if isinstance(inputs, dict) else {}
    if not set(required) <= set(fields) <= set(known):
        keys = ", ".join(f'"{key}": …' for key in known)
        raise InvalidInput(f"{task} takes an object {{{keys}}}", "inputs")
    for key, value in fields.items():
        if key in CHECKS and (wrong := CHECKS[key](value)):
            raise InvalidInput.at(f"inputs.{key}", wrong)
    try:
        characters = sum(count_characters(fields[key]) for key in CHECKS if key in fields)
    except RecursionError:
        raise InvalidInput("the object is nested too deeply", "inputs") from None
    limits.check_characters(characters, limit)
    if task == "document-question-answering" and not {"image", "word_boxes"} & set(fields):
        raise InvalidInput("a document must have an image, word_boxes, or both", "inputs")
    if task == "keypoint-matching":
        pair = fields["images"]
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidInput.at("inputs.images", "must be a list of two images")
        return to_images([(image, f"inputs.images[{n}]") for n, image in enumerate(pair)], lease)
    if "image" in fields:
        labels = len(fields.get("candidate_labels", ()))
        if labels > MAX_DETECTION_LABELS:
            raise InvalidInput(
                f"there are {labels} labels; at most {MAX_DETECTION_LABELS} are accepted",
                "inputs.candidate_labels",
            )
        fields["image"] = to_image(fields["image"], lease, "inputs.image", labels)
    if "images" in fields:
        fields["images"] = to_image(fields["images"], lease, "inputs.images")
    if "table" in fields:
        fields["table"] = to_frame(fields["table"])
    return fields


def count_characters(value: Any) -> int:
    """Return the characters of all strings in a JSON value; other values count as one each."""
    if isinstance(value, dict):
        return sum(map(count_characters, value)) + sum(map(count_characters, value.values()))
    if isinstance(value, list):
        return sum(map(count_characters, value))
    return len(value) if isinstance(value, str) else 1


def to_frame(columns: dict[str, list[Any]]) -> Any:
    import pandas

    cells = {k: ["" if c is None else str(c) for c in column] for k, column in columns.items()}
    return pandas.DataFrame(cells)


# ── warm-up, and probes of a failing model ──


def warm_up_input(task: str, pipe: Pipe) -> tuple[Any, dict[str, Any]]:
    """Return the smallest valid inputs, and parameters, as a client would send them."""
    definition, labels = TASKS[task], ["one", "two"]
    parameters: dict[str, Any] = {"candidate_labels": labels} if definition.required else {}
    if task in ("text-generation", "image-text-to-text"):
        parameters["max_new_tokens"] = 2
    if definition.kind == "audio":
        return _wav(pipe.feature_extractor.sampling_rate), parameters
    if definition.kind == "text":
        return f"hello {pipe.tokenizer.mask_token}" if task == "fill-mask" else "hello", parameters
    png = io.BytesIO()
    Image.new("RGB", (64, 64), (120, 130, 140)).save(png, format="PNG")
    if definition.kind == "image":
        return png.getvalue(), parameters
    image = base64.b64encode(png.getvalue()).decode()
    samples = {
        "candidate_labels": labels,
        "image": image,
        "images": [image, image] if task == "keypoint-matching" else image,
        "query": "how many?",
        "question": "what?",
        "questions": {"one": {"type": "noul"}},
        "state": "hello",
        "table": {"name": ["one"], "count": ["1"]},
        "text": f"{getattr(pipe.processor, 'image_token', '')} hello",
        "word_boxes": [["one", [0, 0, 100, 100]], ["two", [100, 0, 200, 100]]],
    }
    keys = (*definition.json_keys, *OPTIONAL_KEYS.get(task, ()))
    return {key: samples[key] for key in keys}, parameters


def _wav(sampling_rate: int) -> bytes:
    """Return one second of a quiet tone."""
    import soundfile

    buffer = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(sampling_rate) * 0.05)
    soundfile.write(buffer, tone, sampling_rate, format="WAV")
    return buffer.getvalue()
