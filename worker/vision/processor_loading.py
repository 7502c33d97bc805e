"""A checkpoint's processor: what makes tensors of images, and token ids of text with their places.

Several processors (Qwen2-VL's and its kin) come with one for videos, which wants torchvision.
Where it is missing, image processor and tokenizer are loaded apart and joined: videos are not
served. On the worker's thread, at load.
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor,  # without torchvision, transformers itself hides it up to 5.17
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

PARTS: dict[str, Any] = {
    "image_processor": AutoImageProcessor,
    "tokenizer": AutoTokenizer,
    "feature_extractor": AutoFeatureExtractor,
}


def load_processor(path: str) -> Any:
    """A ProcessorMixin, its tokenizer with the checkpoint's chat template. ImportError names the
    package that is missing; ValueError if the checkpoint has no processor of images."""
    auto: Any = AutoProcessor
    try:
        processor = auto.from_pretrained(path, trust_remote_code=False)
    except ImportError as error:
        processor = _joined(path, error)
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise ValueError("the checkpoint has no processor of images (processor_config.json)")
    if not processor.tokenizer.chat_template:  # older checkpoints give it to the processor alone
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def _joined(path: str, error: ImportError) -> Any:
    """Of parts that load, without the one for videos; `error` if it was not that one's."""
    config = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    kind: Any = PROCESSOR_MAPPING.get(config, None)
    names = kind.get_attributes() if kind and not getattr(kind, "is_dummy", False) else []
    if "video_processor" not in names:
        raise error
    parts = {
        name: PARTS[name].from_pretrained(path, trust_remote_code=False)
        for name in names
        if name in PARTS
    }
    written, _ = kind.get_processor_dict(path)
    return _without_videos(kind).from_args_and_dict([parts.get(name) for name in names], written)


def _without_videos(kind: Any) -> Any:
    def check(self: Any, name: str, part: Any) -> Any:
        return part if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
