"""From what a client sent to what a pipeline's `preprocess` takes; runs in pool threads.

Every string is checked here for what it is: a text, or bytes in base64. None is handed on where
a pipeline would open it as a path or a link. Counting tokens is in limits.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import Chat

from batching.errors import InvalidInput
from worker.model.loading import Pipe
from worker.pipeline.limits import check_characters, check_sound, output_planes
from worker.pipeline.media import to_audio, to_image, to_images
from worker.protocol import PipelineInput
from worker.room import Place
from worker.tasks import TASKS, listed, texts

MAX_LABELLED_CHARS = 4_000_000
MAX_QUESTIONS = 64  # each may be a prompt of its own

Check = Callable[[Any], str | None]


def read_input(task: str, payload: PipelineInput, pipe: Pipe, limit: int, place: Place) -> Any:
    """Raises InvalidInput for what the task cannot take; what is decoded is decoded in `place`."""
    inputs = payload.inputs
    match TASKS[task].kind:
        case "image":
            return to_image(inputs, place, planes=output_planes(task, pipe))
        case "audio":
            rate = pipe.feature_extractor.sampling_rate
            own_pieces = getattr(pipe, "type", "") == "seq2seq_whisper"
            check = partial(check_sound, parameters=payload.parameters, any_length=own_pieces)
            return to_audio(inputs, rate, place, check)
        case "json":
            return read_object(task, inputs, limit, place)
    if task == "zero-shot-classification" and isinstance(inputs, str):
        labels = payload.parameters["candidate_labels"]
        if len(inputs) * len(labels) > MAX_LABELLED_CHARS:  # it is tokenized for each label
            raise InvalidInput("the text is too long for so many labels", "inputs")
    return read_text(task, inputs, pipe, limit)


def read_text(task: str, inputs: Any, pipe: Pipe, limit: int) -> Any:
    """A string; for some tasks a pair or a conversation."""
    if isinstance(inputs, dict) and task == "text-classification":
        return read_pair(inputs, limit)
    if isinstance(inputs, list) and task == "text-generation":
        return read_chat(inputs, pipe, limit)
    if not isinstance(inputs, str):
        raise InvalidInput(f"{task} takes a string", "inputs")
    if not (inputs if task == "text-generation" else inputs.strip()):
        raise InvalidInput("the text is empty", "inputs")
    check_characters(len(inputs), limit)
    if task == "fill-mask" and pipe.tokenizer.mask_token not in inputs:
        raise InvalidInput(
            f"there is no {pipe.tokenizer.mask_token} in the text: "
            "write it where a word is to be filled in",
            "inputs",
        )
    return inputs


def read_pair(inputs: dict[str, Any], limit: int) -> dict[str, str]:
    fine = "text" in inputs and set(inputs) <= {"text", "text_pair"}
    if not fine or not all(isinstance(v, str) and v.strip() for v in inputs.values()):
        raise InvalidInput(
            'a pair is {"text": …, "text_pair": …}, both strings, not empty', "inputs"
        )
    check_characters(sum(map(len, inputs.values())), limit)
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
            name = min(map(str, extra))[:100]
            raise InvalidInput(
                f"a message has a role and a content, no {name!r}", f"inputs[{index}]"
            )
    check_characters(sum(len(message["content"]) for message in messages), limit)
    return Chat(messages)  # type: ignore[arg-type]  # annotated as a dict, used as a list


# ── tasks whose input is a JSON object ──


def text(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "must be a string, not empty"


def word_boxes(value: Any) -> str | None:
    fine = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and is_box(pair[1])
        for pair in value
    )
    return (
        None
        if fine
        else ("must be a list of [word, [left, top, right, bottom]], whole numbers from 0 to 1000")
    )


def is_box(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4 or {type(edge) for edge in value} != {int}:
        return False
    left, top, right, bottom = value
    return bool(0 <= left <= right <= 1000 and 0 <= top <= bottom <= 1000)


def table(value: Any) -> str | None:
    fine = isinstance(value, dict) and all(isinstance(column, list) for column in value.values())
    fine = fine and len({len(column) for column in value.values()}) == 1
    plain = (str, int, float, bool, type(None))
    fine = fine and all(isinstance(cell, plain) for column in value.values() for cell in column)
    return None if fine else 'must be an object of columns of equal length: {"name": ["…", …], …}'


def state(value: Any) -> str | None:
    fine = isinstance(value, (str, dict, list)) and value
    return None if fine else "must be a string, an object or a list, not empty"


def questions(value: Any) -> str | None:
    fine = isinstance(value, dict) and 0 < len(value) <= MAX_QUESTIONS
    return None if fine else f"must be an object of 1 to {MAX_QUESTIONS} questions by their names"


# Which keys an object may have beside those it must have.
OPTIONAL_KEYS = {"document-question-answering": ("image", "word_boxes")}
CHECKS: dict[str, Check] = {
    "question": text,
    "query": texts,
    "text": text,
    "candidate_labels": listed,
    "word_boxes": word_boxes,
    "table": table,
    "state": state,
    "questions": questions,
}


def read_object(task: str, inputs: Any, limit: int, place: Place) -> Any:
    """What the pipeline is called with: images decoded, a table made a DataFrame of strings."""
    wanted = TASKS[task].json_keys
    known = (*wanted, *OPTIONAL_KEYS.get(task, ()))
    given = {k: v for k, v in inputs.items() if v is not None} if isinstance(inputs, dict) else {}
    if not set(wanted) <= set(given) or not set(given) <= set(known):
        keys = ", ".join(f'"{key}": …' for key in known)
        raise InvalidInput(f"{task} takes an object {{{keys}}}", "inputs")
    for key, value in given.items():
        if key in CHECKS and (wrong := CHECKS[key](value)):
            raise InvalidInput(wrong, f"inputs.{key}")
    try:
        characters = sum(count_characters(given[key]) for key in CHECKS if key in given)
    except RecursionError:
        raise InvalidInput("it is nested too deeply", "inputs") from None
    check_characters(characters, limit)
    if task == "document-question-answering" and not {"image", "word_boxes"} & set(given):
        raise InvalidInput("a document is an image, word_boxes, or both", "inputs")
    if "image" in given:
        labels = len(given.get("candidate_labels", ()))  # the image is processed for each
        given["image"] = to_image(given["image"], place, "inputs.image", labels)
    if task == "keypoint-matching":
        return read_pair_of_images(given["images"], place, "inputs.images")
    if "images" in given:
        given["images"] = to_image(given["images"], place, "inputs.images")
    if "table" in given:
        given["table"] = to_frame(given["table"])
    return given


def read_pair_of_images(value: Any, place: Place, param: str) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidInput("must be a list of two images", param)
    named = [(each, f"{param}[{index}]") for index, each in enumerate(value)]
    return to_images(named, place)


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
