"""The tasks of `POST /`: the kind of their input and the parameters that a request may set.

The parameters are an allow-list, because pipelines pass unknown ones on to `generate`, which can
load and run a repository's code: no paths, models, callables or `trust_remote_code`. No torch;
engines/pipeline/runner.py runs the tasks.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from batching.errors import InvalidInput, OnequeueError

Kind = Literal["text", "image", "audio", "json"]
# None for a valid value, else "must be …". Not a msgspec type: its errors name one of two bounds,
# and 0.22 crashes on a string with a pattern in a union with a list, as TEXTS would be.
Check: TypeAlias = Callable[[Any], str | None]

MAX_TEXTS = 512
MAX_TEXT_CHARS = 10_000
MAX_NEW_TOKENS = 1 << 20


def check(requirement: str, is_valid: Callable[[Any], bool]) -> Check:
    return lambda value: None if is_valid(value) else requirement


def describe_value(value: Any) -> str:
    """Return a JSON value for an error text: strings cut, lists and objects by their size."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return json.dumps(value[:50] if isinstance(value, str) else value, ensure_ascii=False)


def allow(other: Any, check: Check) -> Check:
    """Return a check that also accepts `other`, which its error text does not mention."""
    return lambda value: None if value == other else check(value)


def integer(low: int, high: int = 1 << 20) -> Check:
    requirement = f"must be a whole number from {low} to {high}"
    return check(requirement, lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float) -> Check:
    requirement = f"must be a number from {low:g} to {high:g}"
    return check(requirement, lambda value: type(value) in (int, float) and low <= value <= high)


def one_of(*choices: Any) -> Check:
    typed = [(type(choice), choice) for choice in choices]  # True == 1
    requirement = "must be one of " + ", ".join(map(str, choices))
    return check(requirement, lambda value: (type(value), value) in typed)


def is_short(value: Any) -> bool:
    """Return whether a value is a string within the length limit."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS


def are_texts(value: Any) -> bool:
    """Return whether a value is a string or a list of strings, none empty."""
    texts = value if isinstance(value, list) else [value]
    return 0 < len(texts) <= MAX_TEXTS and all(is_short(text) and text.strip() for text in texts)


def listed(value: Any) -> str | None:
    """Check a list as `TEXTS`; some pipelines would read a string as a list of its characters."""
    is_list = isinstance(value, list)
    return TEXTS(value) if is_list else f"must be a list of 1 to {MAX_TEXTS} strings"


def is_template(value: Any) -> bool:
    """Return whether a string has exactly one `{}` and no other braces: other format fields could
    read attributes of objects."""
    has_one = isinstance(value, str) and value.count("{}") == 1
    return has_one and not set("{}") & set(value.replace("{}", ""))


FLAG = one_of(True, False)
SHARE = number(0, 1)
TEXT = check(f"must be a string of at most {MAX_TEXT_CHARS} characters", is_short)
TEXTS = check(f"must be a string or a list of 1 to {MAX_TEXTS} strings, none empty", are_texts)
TEMPLATE = check("must be a string with one {} where the label goes", is_template)
STRATEGIES = ("longest_first", "only_first", "only_second", "do_not_truncate")
TRUNCATION = {"truncation": one_of(True, False, *STRATEGIES)}
TOP_K = {"top_k": integer(1, 100_000)}
SCORES = {"function_to_apply": one_of("sigmoid", "softmax", "none")}
CLASSIFY = {"top_k": allow(None, integer(1)), **SCORES, **TRUNCATION}
ZERO_SHOT = {"candidate_labels": TEXTS, "hypothesis_template": TEMPLATE}
ZERO_SHOT_MEDIA = {**ZERO_SHOT, "candidate_labels": listed}
GENERATE = {
    "max_new_tokens": integer(1, MAX_NEW_TOKENS),
    "min_new_tokens": integer(0, MAX_NEW_TOKENS),
    "do_sample": FLAG,
    "temperature": number(0.01, 100),
    "top_k": integer(1),
    "top_p": number(0.001, 1),
    "min_p": SHARE,
    "typical_p": number(0.001, 1),
    "repetition_penalty": number(0.01, 10),
    "no_repeat_ngram_size": integer(0, 100),
    "num_beams": integer(1, 8),
    "num_return_sequences": integer(1, 16),
    "stop_sequence": TEXTS,
    "return_full_text": FLAG,
    **TRUNCATION,
}

SPEECH_TASK = "text-to-audio"
SPEAK = {"voice": TEXT, "speed": number(0.25, 4), "seed": integer(-(1 << 63), (1 << 63) - 1)}


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    parameters: Mapping[str, Check] = field(default_factory=dict)
    json_keys: tuple[str, ...] = ()  # keys a JSON input must have
    required: tuple[str, ...] = ()  # parameters
    stages: bool = True  # the pipeline's stages run apart; otherwise it is called, input by input
    batches: bool = True  # rows of several requests may share a forward pass
    wraps_string: bool = False  # the response to a single string is a list of one
    unwraps_single: bool = False  # the response to a list of one is its element


LABELS = ("candidate_labels",)
TASKS: Mapping[str, Task] = {
    "fill-mask": Task("text", {**TOP_K, "targets": TEXTS, **TRUNCATION}, unwraps_single=True),
    "text-classification": Task("text", CLASSIFY, wraps_string=True),
    "token-classification": Task(
        "text",
        {
            "aggregation_strategy": one_of("none", "simple", "first", "average", "max"),
            "ignore_labels": allow([], listed),
            "stride": integer(0),
            **TRUNCATION,
        },
    ),
    "zero-shot-classification": Task(
        "text", {**ZERO_SHOT, "multi_label": FLAG, **TRUNCATION}, required=LABELS
    ),
    "feature-extraction": Task("text", TRUNCATION),
    "text-generation": Task("text", GENERATE, batches=False),
    SPEECH_TASK: Task("text", {**SPEAK, **TRUNCATION}, batches=False),
    "table-question-answering": Task(
        "json",
        {
            "sequential": FLAG,
            "truncation": one_of(True, False, "drop_rows_to_fit", "do_not_truncate"),
        },
        ("table", "query"),
        batches=False,
        unwraps_single=True,
    ),
    "document-question-answering": Task(
        "json",
        {
            "top_k": integer(1, 1000),
            "doc_stride": integer(1),
            "max_answer_len": integer(1, 10_000),
            "max_seq_len": integer(8),
            "max_question_len": integer(1),
            "handle_impossible_answer": FLAG,
        },
        ("question",),
        batches=False,
    ),
    "image-classification": Task("image", {**TOP_K, **SCORES}),
    "image-feature-extraction": Task("image", {"pool": FLAG}),
    "image-segmentation": Task(
        "image",
        {
            "subtask": one_of("panoptic", "instance", "semantic"),
            "threshold": SHARE,
            "mask_threshold": SHARE,
            "overlap_mask_area_threshold": SHARE,
        },
        batches=False,
    ),
    "object-detection": Task("image", {"threshold": SHARE}, batches=False),
    "depth-estimation": Task("image", batches=False),
    "zero-shot-image-classification": Task(
        "image", ZERO_SHOT_MEDIA, required=LABELS, batches=False
    ),
    "zero-shot-object-detection": Task(
        "json", {"threshold": SHARE, "top_k": integer(1)}, ("image", *LABELS), batches=False
    ),
    "image-text-to-text": Task(
        "json",
        {"max_new_tokens": integer(1, 1024), "return_full_text": FLAG},
        ("images", "text"),
        batches=False,
    ),
    "keypoint-matching": Task(
        "json", {"threshold": SHARE}, ("images",), batches=False, unwraps_single=True
    ),
    "decision": Task("json", {}, ("state", "questions"), stages=False),
    "audio-classification": Task("audio", {"top_k": allow(None, integer(1, 100_000)), **SCORES}),
    "automatic-speech-recognition": Task(
        "audio",
        {
            "return_timestamps": one_of(True, False, "word", "char"),
            "chunk_length_s": number(0, 300),
            "stride_length_s": number(0, 150),
            "max_new_tokens": integer(1, 4096),
            "language": TEXT,
            "task": one_of("transcribe", "translate"),
        },
    ),
    "zero-shot-audio-classification": Task(
        "audio", ZERO_SHOT_MEDIA, required=LABELS, batches=False
    ),
}

NOT_SERVED = {
    "video-classification": "its pipeline reads videos from paths and URLs only",
    "mask-generation": "its pipeline needs torchvision, which onequeue does not install",
    "any-to-any": "its pipeline needs torchvision; serve the model with --chat-model instead",
}

CHAT_INSTEAD = "serve a chat model with text-generation instead"
DROPPED = {  # by transformers 5
    "text2text-generation": CHAT_INSTEAD,
    "summarization": CHAT_INSTEAD,
    "translation": CHAT_INSTEAD,
    "question-answering": CHAT_INSTEAD,
    "visual-question-answering": "serve a vision-language model with image-text-to-text instead",
    "vqa": "serve a vision-language model with image-text-to-text instead",
    "image-to-image": "it has moved to the diffusers library",
}

ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-to-speech": "text-to-audio",
}


class UnservedTask(OnequeueError):
    """The task is unknown or not served."""


def truncates(parameters: Mapping[str, Any]) -> bool:
    """Return whether checked parameters ask for truncation."""
    return parameters.get("truncation", False) not in (False, "do_not_truncate")


def resolve_task(name: str) -> str:
    """Return a task's name, from its name or an alias. Raises UnservedTask."""
    task = ALIASES.get(name, name)
    if task in TASKS:
        return task
    if task in DROPPED:
        raise UnservedTask(f"transformers 5 has dropped the task {task!r}: {DROPPED[task]}")
    if task in NOT_SERVED:
        raise UnservedTask(f"the task {task!r} is not served: {NOT_SERVED[task]}")
    raise UnservedTask(f"unknown task {name!r}; the tasks are: {', '.join(sorted(TASKS))}")


def check_parameters(
    task_name: str, parameters: dict[str, Any], others: Container[str] = ()
) -> None:
    """Check a request's parameters against the task's. Whole numbers become floats, in place, where
    any number is valid. `others` are given elsewhere. Raises InvalidInput."""
    task = TASKS[task_name]
    for name, value in parameters.items():
        check_value = task.parameters.get(name)
        if check_value is None:
            known = ", ".join(sorted(task.parameters)) or "none"
            unknown = f"{task_name} has no parameter {name[:100]!r}; it accepts: {known}"
            raise InvalidInput(unknown, f"parameters.{name[:100]}")
        if requirement := check_value(value):
            raise InvalidInput(
                f"{name} {requirement}, not {describe_value(value)}", f"parameters.{name}"
            )
        if type(value) is int and check_value(float(value)) is None:
            parameters[name] = float(value)
    for name in task.required:
        if name not in parameters and name not in others:
            example = f'{{"inputs": …, "parameters": {{"{name}": …}}}}'
            needed = f"{task_name} needs the parameter {name}: post {example} as application/json"
            raise InvalidInput(needed, f"parameters.{name}")
