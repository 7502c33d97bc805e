"""From what a client sent to what a pipeline's `preprocess` takes; runs in pool threads.

Every string is checked here for what it is: a text, or bytes in base64. None is handed on where
a pipeline would open it as a path or a link. What the model takes of it is in limits.py.
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
from worker.media.decode_limiter import Lease
from worker.media.inputs import to_audio, to_image, to_images
from worker.messages.protocol import PipelineInput
from worker.model.loading import Pipe
from worker.pipeline import limits
from worker.tasks import TASKS, TEXTS, check, listed

MAX_LABELLED_CHARS = 500_000
MAX_DETECTED = 128  # labels that an image is looked at for, whole, each by itself
MAX_QUESTIONS = 64  # each may be a prompt of its own


class InputReader:
    """Reads the inputs of one task for one model; `limit`: the tokens that the model takes."""

    def __init__(self, task: str, pipe: Pipe) -> None:
        self.name = task
        self.task = TASKS[task]
        self.limit = limits.context_limit(pipe)
        self.values_per_pixel = limits.values_per_pixel(task, pipe)

    def read(self, payload: PipelineInput, pipe: Pipe, lease: Lease) -> Any:
        """Raises InvalidInput for what the task or the model cannot take; what is decoded is
        decoded within the lease."""
        inputs, parameters = payload.inputs, payload.parameters
        limits.check_strides(parameters, self.limit)
        match self.task.kind:
            case "text":
                inputs = self._read_text(inputs, parameters, pipe)
            case "image":
                inputs = to_image(inputs, lease, values_per_pixel=self.values_per_pixel)
            case "audio":
                extractor, window_s = pipe.feature_extractor, 0.0
                if getattr(pipe, "type", "") == "seq2seq_whisper":
                    limits.check_whisper(pipe, parameters)
                    window_s = extractor.chunk_length
                check = partial(limits.check_sound, parameters=parameters, window_s=window_s)
                inputs = to_audio(inputs, extractor.sampling_rate, lease, check)
            case "json":
                inputs = read_object(self.name, inputs, self.limit, lease)
        if (self.task.kind != "text" or not self.task.stages) and pipe.tokenizer is not None:
            limits.check_strings(pipe, inputs, parameters, self.limit)
        if self.name == "decision":
            limits.check_decision(pipe, inputs, self.limit)
        return inputs

    def _read_text(self, inputs: Any, parameters: Mapping[str, Any], pipe: Pipe) -> Any:
        """A string; for some tasks a pair or a conversation."""
        if isinstance(inputs, dict) and self.name == "text-classification":
            return read_pair(inputs, self.limit)
        if isinstance(inputs, list) and self.name == "text-generation":
            return read_chat(inputs, pipe, self.limit)
        if not isinstance(inputs, str):
            raise InvalidInput(f"{self.name} takes a string", "inputs")
        if not (inputs if self.name == "text-generation" else inputs.strip()):
            raise InvalidInput("the text is empty", "inputs")
        labels = parameters.get("candidate_labels", ())  # it is a row with each
        count = labels.count(",") + 1 if isinstance(labels, str) else len(labels)
        if len(inputs) * count > MAX_LABELLED_CHARS:
            raise InvalidInput("the text is too long for so many labels", "inputs")
        limits.check_characters(len(inputs), self.limit)
        if self.name == "fill-mask" and (mask := pipe.tokenizer.mask_token) not in inputs:
            lacking = f"there is no {mask} in the text: write it where a word is to be filled in"
            raise InvalidInput(lacking, "inputs")
        return inputs


def read_pair(inputs: dict[str, Any], limit: int) -> dict[str, str]:
    fine = "text" in inputs and set(inputs) <= {"text", "text_pair"}
    if not fine or not all(isinstance(v, str) and v.strip() for v in inputs.values()):
        pair = 'a pair is {"text": …, "text_pair": …}, both strings, not empty'
        raise InvalidInput(pair, "inputs")
    limits.check_characters(sum(map(len, inputs.values())), limit)
    return inputs


def read_chat(messages: list[Any], pipe: Pipe, limit: int) -> Chat:
    """Roles and contents are strings: a list of parts may name images to be fetched."""
    if pipe.tokenizer.chat_template is None:
        raise InvalidInput("this model has no chat template: send a string", "inputs")
    if not messages:
        raise InvalidInput("the conversation is empty", "inputs")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidInput("must be an object with role and content", f"inputs[{index}]")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidInput("must be a string", f"inputs[{index}].{key}")
        if extra := set(message) - {"role", "content"}:
            no = f"a message has a role and a content, no {min(map(str, extra))[:100]!r}"
            raise InvalidInput(no, f"inputs[{index}]")
    limits.check_characters(sum(len(message["content"]) for message in messages), limit)
    return Chat(messages)  # type: ignore[arg-type]  # annotated as a dict, used as a list


# ── tasks whose input is a JSON object ──


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
    if not isinstance(value, dict) or not all(isinstance(each, list) for each in value.values()):
        return False
    cells = (cell for column in value.values() for cell in column)
    return len({len(column) for column in value.values()}) == 1 and all(
        isinstance(cell, (str, int, float, bool, type(None))) for cell in cells
    )


# Which keys an object may have beside those it must have.
OPTIONAL_KEYS = {"document-question-answering": ("image", "word_boxes")}
TEXT = check("must be a string, not empty", lambda v: isinstance(v, str) and bool(v.strip()))
CHECKS = {
    "question": TEXT,
    "query": TEXTS,
    "text": TEXT,
    "candidate_labels": listed,
    "word_boxes": check(
        "must be a list of [word, [left, top, right, bottom]], whole numbers from 0 to 1000",
        are_word_boxes,
    ),
    "table": check('must be an object of columns of equal length: {"name": ["…", …], …}', is_table),
    "state": check(
        "must be a string, an object or a list, not empty",
        lambda value: isinstance(value, (str, dict, list)) and bool(value),
    ),
    "questions": check(
        f"must be an object of 1 to {MAX_QUESTIONS} questions by their names",
        lambda value: isinstance(value, dict) and 0 < len(value) <= MAX_QUESTIONS,
    ),
}


def read_object(task: str, inputs: Any, limit: int, lease: Lease) -> Any:
    """What the pipeline is called with: images decoded, a table made a DataFrame of strings."""
    needed = TASKS[task].json_keys
    known = (*needed, *OPTIONAL_KEYS.get(task, ()))
    given = {k: v for k, v in inputs.items() if v is not None} if isinstance(inputs, dict) else {}
    if not set(needed) <= set(given) <= set(known):
        keys = ", ".join(f'"{key}": …' for key in known)
        raise InvalidInput(f"{task} takes an object {{{keys}}}", "inputs")
    for key, value in given.items():
        if key in CHECKS and (wrong := CHECKS[key](value)):
            raise InvalidInput(wrong, f"inputs.{key}")
    try:
        characters = sum(count_characters(given[key]) for key in CHECKS if key in given)
    except RecursionError:
        raise InvalidInput("it is nested too deeply", "inputs") from None
    limits.check_characters(characters, limit)
    if task == "document-question-answering" and not {"image", "word_boxes"} & set(given):
        raise InvalidInput("a document is an image, word_boxes, or both", "inputs")
    if task == "keypoint-matching":
        pair = given["images"]
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidInput("must be a list of two images", "inputs.images")
        return to_images([(each, f"inputs.images[{n}]") for n, each in enumerate(pair)], lease)
    if "image" in given:
        labels = len(given.get("candidate_labels", ()))  # the image is processed for each
        if labels > MAX_DETECTED:
            many = f"at most {MAX_DETECTED} labels are looked for at a time"
            raise InvalidInput(many, "inputs.candidate_labels")
        given["image"] = to_image(given["image"], lease, "inputs.image", labels)
    if "images" in given:
        given["images"] = to_image(given["images"], lease, "inputs.images")
    if "table" in given:
        given["table"] = to_frame(given["table"])
    return given


def count_characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(count_characters, value)) + sum(map(count_characters, value.values()))
    if isinstance(value, list):
        return sum(map(count_characters, value))
    return len(value) if isinstance(value, str) else 1


def to_frame(columns: dict[str, list[Any]]) -> Any:
    import pandas

    cells = {k: ["" if c is None else str(c) for c in column] for k, column in columns.items()}
    return pandas.DataFrame(cells)


# ── for warming up and for probing a failing worker ──


def warm_up_input(task: str, pipe: Pipe) -> tuple[Any, dict[str, Any]]:
    """The smallest sound inputs, and parameters, as a client would send them."""
    known, labels = TASKS[task], ["one", "two"]
    parameters: dict[str, Any] = {"candidate_labels": labels} if known.required else {}
    if task in ("text-generation", "image-text-to-text"):
        parameters["max_new_tokens"] = 2
    if known.kind == "audio":
        return _wav(pipe.feature_extractor.sampling_rate), parameters
    if known.kind == "text":
        return f"hello {pipe.tokenizer.mask_token}" if task == "fill-mask" else "hello", parameters
    png = io.BytesIO()
    Image.new("RGB", (64, 64), (120, 130, 140)).save(png, format="PNG")
    if known.kind == "image":
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
    keys = (*known.json_keys, *OPTIONAL_KEYS.get(task, ()))
    return {key: samples[key] for key in keys}, parameters


def _wav(sampling_rate: int) -> bytes:
    """A second of a quiet tone."""
    import soundfile

    buffer = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(sampling_rate) * 0.05)
    soundfile.write(buffer, tone, sampling_rate, format="WAV")
    return buffer.getvalue()
