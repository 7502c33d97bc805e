"""The tasks of a checkpoint, by the architectures that its config.json names.

Runs before anything is loaded, without torch or transformers: it infers the task where none is set,
and refuses a task that contradicts the checkpoint. Missing weights are found after loading
(model/loading.py).
"""

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from batching.errors import OnequeueError
from worker.checkpoint_files import GGUF
from worker.error_classification import first_line
from worker.loader import Job
from worker.tasks import SPEECH_TASK, resolve_task

DEMO_TASK = "fill-mask"
CONFIG = "config.json"
FETCH_S = 60.0
CONNECT_S = 1.0
T = TypeVar("T")
SPEECH_MODELS = "(Wav2Vec2|Hubert|UniSpeech|WavLM|SEW|Data2VecAudio|Whisper)"
SPEAKING_MODELS = "(Musicgen|Csm|Dia|HiggsAudio|PocketTTS|GradiumPhononTTS|VibeVoice)"
# The first pattern that matches an architecture's whole name counts. Names that end in Model are
# models without a head.
TASK_PATTERNS: Mapping[str, str | None] = {
    rf"{SPEECH_MODELS}.*ForSequenceClassification": "audio-classification",
    rf"{SPEECH_MODELS}.*(Model|ForPreTraining)|.*EncoderDecoderModel|.*MTModel": None,
    r".*ForSequenceClassification": "text-classification",
    r".*ForMaskedLM|.*WithLMHeadModel": "fill-mask",
    r".*(Bert|Albert|BigBird|Ernie|FNet)ForPreTraining": "fill-mask",
    r".*For(CausalLM|TextGeneration)|.*LMHeadModel": "text-generation",
    r".*ForTokenClassification": "token-classification",
    r"Tapas.*ForQuestionAnswering": "table-question-answering",
    r"LayoutLM.*ForQuestionAnswering": "document-question-answering",
    r".*ForImageClassification": "image-classification",
    r".*For\w*Segmentation": "image-segmentation",
    r"(OwlViT|Owlv2|MMGroundingDino|GroundingDino|OmDetTurbo)ForObjectDetection": (
        "zero-shot-object-detection"
    ),
    r".*ForObjectDetection": "object-detection",
    r".*ForDepthEstimation": "depth-estimation",
    r".*ForKeypointMatching": "keypoint-matching",
    r".*ForAudioClassification": "audio-classification",
    r".*For(CTC|TDT|SpeechSeq2Seq)|(Whisper|Moonshine|Speech2Text)ForConditionalGeneration": (
        "automatic-speech-recognition"
    ),
    r"(CLIP|Siglip|Siglip2|AltCLIP|ChineseCLIP|Align)Model": "zero-shot-image-classification",
    r"ClapModel": "zero-shot-audio-classification",
    rf"(Vits|Bark|FastSpeech2Conformer)Model|.*WithHifiGan|{SPEAKING_MODELS}.*Generation": (
        SPEECH_TASK
    ),
    r".*ForTextTo(Speech|Waveform)": SPEECH_TASK,
}
# Architectures without a pipeline in transformers 5; TASK_PATTERNS come first.
DROPPED = r".*(ForConditionalGeneration|MTModel)|.*ForQuestionAnswering|.*EncoderDecoderModel"
NO_PIPELINE = "has no pipeline in transformers 5: serve a chat model with --chat-model instead"
CUSTOM_CODE = "needs Python code of its own (auto_map), which is never executed here"
ENTAILMENT = re.compile("entail", re.IGNORECASE)  # starts a label of models for zero-shot
# Tasks that need a head of their own, which other models lack.
HEAD_TASKS = {
    "text-classification", "zero-shot-classification", "token-classification", "fill-mask",
    "table-question-answering", "image-classification", "image-segmentation", "object-detection",
    "depth-estimation", "keypoint-matching", "audio-classification",
    "automatic-speech-recognition",
}  # fmt: skip


class TaskError(OnequeueError):
    """The task is not set and cannot be inferred, or contradicts the checkpoint."""


def detect_task(task: str, model: str) -> str:
    """Return the name of the task to run: the one that is set, or for `auto` the checkpoint's.
    Raises TaskError, and UnservedTask for a task that is not served."""
    if model in ("demo", "none"):
        return DEMO_TASK if task == "auto" else resolve_task(task)
    if task == "auto":
        return _infer_task(read_config(model), model)
    task = resolve_task(task)
    if is_path(model) and (Path(model).expanduser() / CONFIG).is_file():
        config = read_config(model)
        tasks = tasks_of(config)
        if tasks and task not in tasks and task in HEAD_TASKS:
            hint = task_hint(config)
            raise TaskError(f"PIPELINE_TASK={task}: {model} was not made for it: {hint}")
    return task


def _infer_task(config: Mapping[str, Any], model: str) -> str:
    tasks = tasks_of(config)
    if len(tasks) == 1:
        return resolve_task(tasks[0])
    names = " and ".join(architectures(config)) or "not named"
    fits = unserved_reason(config) or "fits no known task: name one with --pipeline-task"
    if tasks:
        fits = f"fits several, {', '.join(tasks)}: name one, as --pipeline-task {tasks[-1]}"
    raise TaskError(f"PIPELINE_TASK is not set, and the architecture of {model} ({names}) {fits}")


def unserved_reason(config: Mapping[str, Any]) -> str:
    """Return why no task serves an architecture; empty if that is unknown."""
    if config.get("auto_map"):
        return CUSTOM_CODE
    is_dropped = any(re.fullmatch(DROPPED, name) for name in architectures(config))
    return NO_PIPELINE if is_dropped else ""


def tasks_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks of a checkpoint's architecture; none if it is unknown."""
    for name in architectures(config):
        for pattern, task in TASK_PATTERNS.items():
            if re.fullmatch(pattern, name):
                labels = map(str, (config.get("id2label") or {}).values())
                if task == "text-classification" and any(
                    ENTAILMENT.match(label) for label in labels
                ):
                    return task, "zero-shot-classification"
                return (task,) if task else ()
        if name.endswith("ForConditionalGeneration") and "vision_config" in config:
            return ("image-text-to-text",)
        if name.endswith("ForConditionalGeneration") and "text_config" in config:
            return ("any-to-any",)
        if name.endswith("Model"):
            is_vision = "num_channels" in config and "vocab_size" not in config
            return ("image-feature-extraction" if is_vision else "feature-extraction",)
    return ()


def architectures(config: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or ()]


def task_hint(config: Mapping[str, Any]) -> str:
    """Return the end of an error text: the architecture and the setting for it."""
    names, tasks = ", ".join(architectures(config)), " or ".join(tasks_of(config))
    if not tasks:
        reason = unserved_reason(config)
        return f"its architecture is {names or 'not named'}" + (reason and f", which {reason}")
    return f"its architecture, {names}, is for PIPELINE_TASK={tasks}"


def is_path(model: str) -> bool:
    is_file = model.endswith(GGUF) and os.path.isfile(model)
    return model.startswith(("/", ".", "~")) or is_file or os.path.isdir(model)


def read_config(model: str) -> dict[str, Any]:
    """Return the config.json of a folder or a hub id, perhaps downloaded. Raises TaskError."""
    try:
        path = Path(model).expanduser() / CONFIG if is_path(model) else download(model, CONFIG)
        config = json.loads(path.read_text())
    except Exception as error:  # by the hub, the file or its content
        raise TaskError(
            f"PIPELINE_MODEL={model}: its config.json cannot be read, and PIPELINE_TASK is not "
            f"set: {load_error(error)}"
        ) from error
    return config if isinstance(config, dict) else {}


def split_file(model: str) -> tuple[str, str]:
    """Return the folder or the hub id (with its revision), and the name of a GGUF file in it; an
    empty name for other models."""
    id, at, revision = model, "", ""
    if not is_path(model):
        id, at, revision = model.partition("@")
    if not id.endswith(GGUF):
        return model, ""
    if is_path(model):
        return str(Path(model).parent), Path(model).name
    owner, name, *file = id.split("/")
    return f"{owner}/{name}{at}{revision}", "/".join(file)


def split_revision(model: str) -> tuple[str, str | None]:
    """Return the id and the revision of ID@REVISION; None if there is none."""
    id, _, revision = model.partition("@")
    return id, revision or None


def download(model: str, name: str) -> Path:
    """Return the path of a hub model's file, from the cache or downloaded. Raises TimeoutError
    after FETCH_S, so that a start does not hang; the thread is abandoned then. A hub that cannot be
    reached is not tried again: that would take a quarter of a minute."""
    import httpx
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    id, revision = split_revision(model)
    if isinstance(cached := try_to_load_from_cache(id, name, revision=revision), str):
        return Path(cached)
    if not constants.HF_HUB_OFFLINE:
        try:
            in_thread(lambda: httpx.head(constants.ENDPOINT, timeout=CONNECT_S), 3 * CONNECT_S)
        except (httpx.HTTPError, TimeoutError) as error:
            raise LocalEntryNotFoundError("the hub cannot be reached") from error
    try:
        return Path(in_thread(lambda: hf_hub_download(id, name, revision=revision), FETCH_S))
    except TimeoutError:
        raise TimeoutError(f"the hub did not answer within {FETCH_S:g} s") from None


def in_thread(function: Callable[[], T], timeout_s: float) -> T:
    """Return a function's result. Raises TimeoutError; the thread is abandoned then."""
    job = Job(function)
    threading.Thread(target=job.run, name="download", daemon=True).start()
    result: T = job.result.result(timeout_s)
    return result


def file_sizes(model: str) -> dict[str, int]:
    """Return the sizes of a hub model's files, by name; none if they cannot be listed."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return {}
    id, revision = split_revision(model)
    try:
        info = HfApi().model_info(id, revision=revision, timeout=FETCH_S, files_metadata=True)
    except Exception:  # of the hub
        return {}
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def is_custom_code(error: BaseException) -> bool:
    return "trust_remote_code" in str(error)


def load_error(error: BaseException) -> str:
    """Return in one line why a checkpoint cannot be downloaded or read."""
    cause: BaseException | None = error
    while cause:
        if text := _hub_error(cause):
            return text
        cause = cause.__cause__
    message = str(error)
    if is_custom_code(error):
        return f"it {CUSTOM_CODE}: use a model that transformers has built in"
    if "does not recognize this architecture" in message or "Unrecognized model in" in message:
        return "its config.json names no model_type that this transformers knows: update it"
    if "no file named model.safetensors" in message or "loaded with `safetensors`" in message:
        return "it has no model.safetensors: use a model with safetensors, or convert its weights"
    if "during automatic conversion of the weights" in message:
        return "its weights do not fit its quantization_config or config.json: download it again"
    return first_line(error)


def _hub_error(error: BaseException) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "the model is gated, and HF_TOKEN has no access to it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub's model has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or HF_TOKEN has no access to it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "the hub cannot be reached: check the network"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set: unset it"
        return f"it is not in the cache, and {why}, or name a folder"
    unauthorized = getattr(getattr(error, "response", None), "status_code", None) == 401
    return "the hub does not accept HF_TOKEN" if unauthorized else ""
