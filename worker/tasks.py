"""The tasks `POST /` can run: what their input is, which parameters a request may set.

The parameters are an allow-list, because pipelines forward what they don't know to `generate`,
which can load and run a repository's code: no paths, models, callables or `trust_remote_code`.
No torch here; how a task is run is in pipeline/runner.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batching.errors import InvalidInput, OnequeueError

Kind = Literal["text", "image", "audio", "json"]
Check = Callable[[Any], str | None]  # None if the value is fine, else what it must be

MAX_TEXTS = 512
MAX_TEXT_CHARS = 10_000
MAX_NEW_TOKENS = 1 << 20


def integer(low: int, high: int = 1 << 20) -> Check:
    def check(value: Any) -> str | None:
        fine = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if fine else f"must be a whole number from {low} to {high}"

    return check


@dataclass(frozen=True, slots=True)
class Number:
    """A check of a number; transformers wants it as a float even where it is whole."""

    low: float
    high: float

    def __call__(self, value: Any) -> str | None:
        fine = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fine and self.low <= value <= self.high:
            return None
        return f"must be a number from {self.low:g} to {self.high:g}"


def one_of(*choices: Any) -> Check:
    def check(value: Any) -> str | None:
        fine = any(value == choice and type(value) is type(choice) for choice in choices)
        return None if fine else "must be one of " + ", ".join(map(str, choices))

    return check


def text(value: Any) -> str | None:
    """A string that is no document."""
    fine = isinstance(value, str) and len(value) <= MAX_TEXT_CHARS
    return None if fine else f"must be a string of at most {MAX_TEXT_CHARS} characters"


def texts(value: Any) -> str | None:
    """A non-empty string or list of strings."""
    many = value if isinstance(value, list) else [value]
    fine = 0 < len(many) <= MAX_TEXTS and all(text(v) is None and v.strip() for v in many)
    return None if fine else f"must be a string or a list of 1 to {MAX_TEXTS} strings, none empty"


def listed(value: Any) -> str | None:
    """As `texts`, but a list: some pipelines would take a string for a list of its characters."""
    return (
        texts(value) if isinstance(value, list) else f"must be a list of 1 to {MAX_TEXTS} strings"
    )


def template(value: Any) -> str | None:
    """Exactly one `{}` and no other braces: a format string may reach into objects."""
    fine = isinstance(value, str) and value.count("{}") == 1
    fine = fine and not set("{}") & set(value.replace("{}", ""))
    return None if fine else "must be a string with one {} where the label goes"


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


flag = one_of(True, False)
scores = one_of("sigmoid", "softmax", "none")
TOP_K = {"top_k": integer(1, 100_000)}
CLASSIFY: Mapping[str, Check] = {"top_k": optional(integer(1)), "function_to_apply": scores}
ZERO_SHOT: Mapping[str, Check] = {"candidate_labels": texts, "hypothesis_template": template}
ZERO_SHOT_MEDIA: Mapping[str, Check] = {**ZERO_SHOT, "candidate_labels": listed}
GENERATE: Mapping[str, Check] = {
    "max_new_tokens": integer(1, MAX_NEW_TOKENS),
    "min_new_tokens": integer(0, MAX_NEW_TOKENS),
    "do_sample": flag,
    "temperature": Number(0.01, 100),
    "top_k": integer(1),
    "top_p": Number(0.001, 1),
    "min_p": Number(0, 1),
    "typical_p": Number(0.001, 1),
    "repetition_penalty": Number(0.01, 10),
    "no_repeat_ngram_size": integer(0, 100),
    "num_beams": integer(1, 8),
    "num_return_sequences": integer(1, 16),
    "stop_sequence": texts,
    "return_full_text": flag,
}


@dataclass(frozen=True, slots=True)
class Task:
    """`stages`: run by the pipeline's own stages; otherwise the pipeline is called whole, one
    input at a time. `batches`: whether rows of several requests may share a forward."""

    kind: Kind
    parameters: Mapping[str, Check] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    stages: bool = True
    batches: bool = True
    json_keys: tuple[str, ...] = ()  # keys a JSON input must have
    wraps_string: bool = False  # a lone string is answered with a list of one
    unwraps_single: bool = False  # a list of one is answered without the list


TASKS: Mapping[str, Task] = {
    "fill-mask": Task("text", {**TOP_K, "targets": texts}, unwraps_single=True),
    "text-classification": Task("text", CLASSIFY, wraps_string=True),
    "token-classification": Task(
        "text",
        {
            "aggregation_strategy": one_of("none", "simple", "first", "average", "max"),
            "ignore_labels": lambda v: None if v == [] else listed(v),
            "stride": integer(0),
        },
    ),
    "zero-shot-classification": Task(
        "text", {**ZERO_SHOT, "multi_label": flag}, required=("candidate_labels",)
    ),
    "feature-extraction": Task("text", {"truncation": flag}),
    "text-generation": Task("text", GENERATE),
    "text-to-audio": Task("text", stages=False),
    "table-question-answering": Task(
        "json",
        {"sequential": flag},
        batches=False,
        json_keys=("table", "query"),
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
            "handle_impossible_answer": flag,
        },
        batches=False,
        json_keys=("question",),
    ),
    "image-classification": Task(
        "image", {"top_k": integer(1, 100_000), "function_to_apply": scores}
    ),
    "image-feature-extraction": Task("image", {"pool": flag}),
    "image-segmentation": Task(
        "image",
        {
            "subtask": one_of("panoptic", "instance", "semantic"),
            "threshold": Number(0, 1),
            "mask_threshold": Number(0, 1),
            "overlap_mask_area_threshold": Number(0, 1),
        },
        batches=False,
    ),
    "object-detection": Task("image", {"threshold": Number(0, 1)}, batches=False),
    "depth-estimation": Task("image", batches=False),
    "zero-shot-image-classification": Task(
        "image", ZERO_SHOT_MEDIA, required=("candidate_labels",), batches=False
    ),
    "zero-shot-object-detection": Task(
        "json",
        {"threshold": Number(0, 1), "top_k": integer(1)},
        batches=False,
        json_keys=("image", "candidate_labels"),
    ),
    "image-text-to-text": Task(
        "json",
        {"max_new_tokens": integer(1, 1024), "return_full_text": flag},
        batches=False,
        json_keys=("images", "text"),
    ),
    "keypoint-matching": Task(
        "json", {"threshold": Number(0, 1)}, batches=False, json_keys=("images",)
    ),
    "decision": Task("json", stages=False, json_keys=("state", "questions")),
    "audio-classification": Task(
        "audio", {"top_k": optional(integer(1, 100_000)), "function_to_apply": scores}
    ),
    "automatic-speech-recognition": Task(
        "audio",
        {
            "return_timestamps": one_of(True, False, "word", "char"),
            "chunk_length_s": Number(0, 300),
            "stride_length_s": Number(0, 150),
            "max_new_tokens": integer(1, 4096),
            "language": text,
            "task": one_of("transcribe", "translate"),
        },
    ),
    "zero-shot-audio-classification": Task(
        "audio", ZERO_SHOT_MEDIA, required=("candidate_labels",), batches=False
    ),
}

NOT_SERVED = {
    "video-classification": "its pipeline reads videos from paths and URLs only",
    "mask-generation": "its pipeline needs torchvision, which onequeue does not install",
    "any-to-any": "its pipeline needs torchvision, which onequeue does not install",
}

CHAT_INSTEAD = "serve a chat model with text-generation instead"
DROPPED = {  # what transformers 4 had and 5 has not
    "text2text-generation": CHAT_INSTEAD,
    "summarization": CHAT_INSTEAD,
    "translation": CHAT_INSTEAD,
    "question-answering": CHAT_INSTEAD,
    "visual-question-answering": "serve a vision-language model with image-text-to-text instead",
    "vqa": "serve a vision-language model with image-text-to-text instead",
    "image-to-image": "it is the diffusers library's now",
}

ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-to-speech": "text-to-audio",
}


class UnservedTask(OnequeueError):
    """No such task, or none that is served; the message says which and why."""


def resolve_task(name: str) -> str:
    """The task's own name, from that or an alias."""
    task = ALIASES.get(name, name)
    if task in TASKS:
        return task
    if task in DROPPED:
        raise UnservedTask(f"transformers 5 has dropped the task {task!r}: {DROPPED[task]}")
    if task in NOT_SERVED:
        raise UnservedTask(f"the task {task!r} is not served: {NOT_SERVED[task]}")
    raise UnservedTask(f"unknown task {name!r}; known are: {', '.join(sorted(TASKS))}")


def check_parameters(task_name: str, parameters: dict[str, Any]) -> None:
    """Raises InvalidInput unless every parameter is one of the task's and well-formed; makes
    floats of whole numbers where any number will do."""
    task = TASKS[task_name]
    for name, value in parameters.items():
        check = task.parameters.get(name)
        if check is None:
            known = ", ".join(sorted(task.parameters)) or "none"
            raise InvalidInput(
                f"{task_name} does not take the parameter {name[:100]!r}; it takes: {known}",
                f"parameters.{name[:100]}",
            )
        if wrong := check(value):
            raise InvalidInput(f"{name} {wrong}", f"parameters.{name}")
        if isinstance(check, Number):
            parameters[name] = float(value)
    for name in task.required:
        if name not in parameters:
            raise InvalidInput(
                f"{task_name} needs the parameter {name}: post "
                f'{{"inputs": …, "parameters": {{"{name}": …}}}} as application/json',
                f"parameters.{name}",
            )
