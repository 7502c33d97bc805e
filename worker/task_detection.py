"""Which tasks a checkpoint was made for, by the architectures that its config.json names.

Read before anything is loaded, without torch or transformers, to find the task where none is set
and to refuse one that contradicts the checkpoint. What a model really lacks is found out when it
has been loaded (loading.py).
"""

import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from batching.errors import OnequeueError
from worker.tasks import resolve_task

DEMO_TASK = "fill-mask"
CONFIG, DECISIONS = "config.json", "decision.json"
FETCH_S = 60.0
HEARS = "(Wav2Vec2|Hubert|UniSpeech|WavLM|SEW|Data2VecAudio|Whisper)"
# The first that fits the architecture's whole name. What ends in Model is a body without a head.
MADE_FOR: Mapping[str, str | None] = {
    rf"{HEARS}.*ForSequenceClassification": "audio-classification",
    rf"{HEARS}.*(Model|ForPreTraining)|.*EncoderDecoderModel": None,
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
    r"(Vits|Bark)Model|.*ForTextTo(Speech|Waveform)": "text-to-audio",
}
ENTAILS = re.compile("entail", re.IGNORECASE)  # begins a label of a model for zero-shot
# Tasks that another model than one made for them cannot do: it has no such head.
HEADS = {
    "text-classification", "zero-shot-classification", "token-classification", "fill-mask",
    "table-question-answering", "image-classification", "image-segmentation", "object-detection",
    "depth-estimation", "keypoint-matching", "audio-classification",
    "automatic-speech-recognition",
}  # fmt: skip


class TaskUnclear(OnequeueError):
    """No task is set and the checkpoint leaves it open, or it contradicts the one that is set."""


def settle_task(task: str, model: str) -> str:
    """The task to run: the one that is set, or for `auto` what the checkpoint was made for."""
    if model in ("demo", "none"):
        return DEMO_TASK if task == "auto" else resolve_task(task)
    if task == "auto":
        return _only_task(read_config(model), model)
    task = resolve_task(task)
    if is_path(model) and (Path(model).expanduser() / CONFIG).is_file():
        config = read_config(model)
        fitting = made_for(config)
        if fitting and task not in fitting and task in HEADS:
            why = f"{model} was not made for it: {advice(config)}"
            raise TaskUnclear(f"PIPELINE_TASK={task}: {why}")
    return task


def _only_task(config: Mapping[str, Any], model: str) -> str:
    fitting = made_for(config)
    if len(fitting) == 1:
        return fitting[0]
    names = " and ".join(architectures(config)) or "not named"
    found = f"fits several: {', '.join(fitting)}" if fitting else "says none"
    raise TaskUnclear(
        f"PIPELINE_TASK is not set, and the architecture of {model} ({names}) {found}"
    )


def made_for(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The tasks that a checkpoint's architecture is made for; empty where that is not known."""
    for name in architectures(config):
        for pattern, task in MADE_FOR.items():
            if re.fullmatch(pattern, name):
                labels = map(str, (config.get("id2label") or {}).values())
                if task == "text-classification" and any(ENTAILS.match(each) for each in labels):
                    return task, "zero-shot-classification"
                return (task,) if task else ()
        if name.endswith("ForConditionalGeneration") and "vision_config" in config:
            return ("image-text-to-text",)
        if name.endswith("Model"):  # what comes in decides, and only a vision model has these
            sees = "num_channels" in config and "vocab_size" not in config
            return ("image-feature-extraction" if sees else "feature-extraction",)
    return ()


def architectures(config: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or ()]


def advice(config: Mapping[str, Any]) -> str:
    """What the architecture is and which task to set for it."""
    names, tasks = ", ".join(architectures(config)), " or ".join(made_for(config))
    if not tasks:
        return f"its architecture is {names or 'not named'}"
    return f"its architecture, {names}, is for PIPELINE_TASK={tasks}"


def is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def decides_in_its_own_way(model: str) -> bool:
    """Whether the checkpoint has settings for decisions, or that cannot be known."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if is_path(model):
        return (Path(model).expanduser() / DECISIONS).is_file()
    try:
        fetched(model, DECISIONS)
    except EntryNotFoundError as error:
        return isinstance(error, LocalEntryNotFoundError)  # neither there nor looked up
    except Exception:
        return True
    return True


def read_config(model: str) -> dict[str, Any]:
    """config.json of a folder, or of a hub id: from the cache, or fetched."""
    try:
        path = Path(model).expanduser() / CONFIG if is_path(model) else fetched(model, CONFIG)
        config = json.loads(path.read_text())
    except Exception as error:  # of the hub, the file or its content
        raise TaskUnclear(
            f"PIPELINE_MODEL={model}: its config.json cannot be read, and PIPELINE_TASK is not "
            f"set: {reason(error)}"
        ) from error
    return config if isinstance(config, dict) else {}


def fetched(model: str, name: str) -> Path:
    """A file of a hub's model, from the cache or fetched. By a thread that nobody waits for longer
    than FETCH_S: a start shall end one way or other."""
    from huggingface_hub import hf_hub_download

    path: Future[str] = Future()

    def fetch() -> None:
        try:
            path.set_result(hf_hub_download(model, name))
        except BaseException as error:  # raised where the result is awaited
            path.set_exception(error)

    threading.Thread(target=fetch, name="fetch", daemon=True).start()
    try:
        return Path(path.result(FETCH_S))
    except TimeoutError:
        raise TimeoutError(f"the hub did not answer within {FETCH_S:g} s") from None


def reason(error: Exception) -> str:
    """Why a checkpoint cannot be had or read, on one line: in our words where the hub is why."""
    cause: BaseException | None = error
    while cause:
        if said := _said_of_hub(cause):
            return said
        cause = cause.__cause__
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _said_of_hub(error: BaseException) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "the model is gated, and HF_TOKEN is of nobody who was let in"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or none that HF_TOKEN may see"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return f"it is not in the cache, and {why}"
    refused = getattr(getattr(error, "response", None), "status_code", None) == 401
    return "the hub does not accept HF_TOKEN" if refused else ""
