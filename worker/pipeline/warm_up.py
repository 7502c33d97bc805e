"""The smallest sound input of each task, for warming up and for probing a failing worker."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from worker.model.loading import Pipe
from worker.tasks import TASKS


def warm_up_input(task: str, pipe: Pipe) -> tuple[Any, dict[str, Any]]:
    """Inputs and parameters as a client would send them."""
    png = _png()
    image = base64.b64encode(png).decode()
    labels = {"candidate_labels": ["one", "two"]}
    match task:
        case "fill-mask":
            return f"hello {pipe.tokenizer.mask_token}", {}
        case "text-generation":
            return "hello", {"max_new_tokens": 2}
        case "table-question-answering":
            return {"table": {"name": ["one"], "count": ["1"]}, "query": "how many?"}, {}
        case "document-question-answering":
            boxes = [["one", [0, 0, 100, 100]], ["two", [100, 0, 200, 100]]]
            return {"image": image, "question": "what?", "word_boxes": boxes}, {}
        case "keypoint-matching":
            return {"images": [image, image]}, {}
        case "decision":
            return {"state": "hello", "questions": {"one": {"type": "noul"}}}, {}
        case "zero-shot-object-detection":
            return {"image": image, **labels}, {}
        case "image-text-to-text":
            token = getattr(pipe.processor, "image_token", "")
            return {"images": image, "text": f"{token} hello"}, {"max_new_tokens": 1}
    parameters = labels if TASKS[task].required else {}
    match TASKS[task].kind:
        case "image":
            return png, parameters
        case "audio":
            return _wav(pipe.feature_extractor.sampling_rate), parameters
    return "hello", parameters


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (120, 130, 140)).save(buffer, format="PNG")
    return buffer.getvalue()


def _wav(sampling_rate: int) -> bytes:
    """A second of a quiet tone."""
    import soundfile

    buffer = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(sampling_rate) * 0.05)
    soundfile.write(buffer, tone, sampling_rate, format="WAV")
    return buffer.getvalue()
