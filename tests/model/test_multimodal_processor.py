"""A text and images give the output of the checkpoint's own processor, one image at a time."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.utils.import_utils import is_torchvision_available

from batching.errors import InvalidInput
from tests import tiny_multimodal
from tests.matrix import matrix
from tests.threads import run_together
from tests.tiny import SMALL, hf
from tests.tiny_multimodal import VISION
from tests.tiny_tokenizers import llama_tokenizer
from worker.vision.processor import Processor, ProcessorOutput, load_processor

FAMILIES = tiny_multimodal.FAMILIES


@cache
def loaded(family: str) -> Processor:
    path = str(tiny_multimodal.folder(family))
    config: Any = AutoConfig.from_pretrained(path)
    return Processor(load_processor(path), config, 4000)


def gradient(shade: int, width: int = 80, height: int = 56) -> Image.Image:
    image = Image.linear_gradient("L").resize((width, height))
    return Image.merge(
        "RGB", (image, image.point(lambda x: 255 - x), Image.new("L", image.size, shade))
    )


def spans(output: ProcessorOutput) -> list[tuple[int, int]]:
    return [(item.start, item.stop) for item in output.items]


def text(processor: Processor, *words: str) -> str:
    return processor.modalities["image"].token.join(words)


def process(
    processor: Processor, prompt: str, *images: Image.Image, low_detail: bool = False
) -> ProcessorOutput:
    features = [processor.process_media("image", image, b"", low_detail) for image in images]
    return processor.process_text(prompt, features)


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2.5-vl", "gemma3"))
def test_output_equals_that_of_the_checkpoints_processor(family: str) -> None:
    processor = loaded(family)
    prompt = text(processor, "<|user|>What is", " and", " together?</s>")
    images = [gradient(40), gradient(200, 48, 96)]
    plain = {"add_special_tokens": False}
    whole = processor._processor(
        images=[images], text=[prompt], text_kwargs=plain, return_tensors="pt"
    )
    got = process(processor, prompt, *images)
    assert got.ids == whole.pop("input_ids")[0].tolist()
    inputs = got.inputs | got.media_inputs()
    for name in whole.keys() - {"attention_mask", "labels"}:
        assert torch.equal(inputs[name], whole[name]), name


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2.5-vl", "gemma3"))
def test_spans_cover_all_image_tokens(family: str) -> None:
    processor = loaded(family)
    first, second = gradient(40), gradient(200, 48, 96)
    prompt = text(processor, "one", "", " two", "")
    got = process(processor, prompt, first, second, first)
    placeholders = [
        n for n, token in enumerate(got.ids) if token == processor.modalities["image"].token_id
    ]
    spanned = [n for start, stop in spans(got) for n in placeholders if start <= n < stop]
    assert spanned == placeholders


def test_low_detail_image_fills_fewer_tokens_where_images_are_split() -> None:
    processor, large = loaded("smolvlm"), gradient(1, 256, 256)
    prompt = text(processor, "a", "b")
    high = process(processor, prompt, large)
    low = process(processor, prompt, large, low_detail=True)
    image_token_id = processor.modalities["image"].token_id
    assert low.ids.count(image_token_id) < high.ids.count(image_token_id)


@pytest.mark.parametrize(
    ("words", "count", "reason"),
    [
        (("no mark",), 1, "does not show the images"),
        (("a", "b", "c"), 1, "stands for an image"),
        (("a", "b"), 2, "stands for an image"),
    ],
)
def test_image_tokens_in_user_text_are_rejected(
    words: tuple[str, ...], count: int, reason: str
) -> None:
    processor = loaded("llava")
    with pytest.raises(InvalidInput, match=reason):
        process(processor, text(processor, *words), *[gradient(1)] * count)


def test_placeholders_in_user_text_are_rejected() -> None:
    processor = loaded("gemma3")  # its image token differs from its placeholders
    prompt = text(processor, "see", "and <image_soft_token>")
    with pytest.raises(InvalidInput, match="stand for images"):
        process(processor, prompt, gradient(1))


def test_image_that_the_processor_rejects_names_its_field() -> None:
    processor = loaded("qwen2-vl")
    with pytest.raises(InvalidInput, match="1 × 300 pixels") as error:
        processor.process_media("image", gradient(1, 1, 300), b"", param="here")
    assert error.value.param == "here"


def test_threads_share_one_processor() -> None:
    processor = loaded("smolvlm")
    expected = {}
    for n in range(4):
        prompt = text(processor, *["word"] * (n + 2))
        expected[n] = prompt, process(processor, prompt, *[gradient(n)] * (n + 1))
    wrong: list[int] = []

    def work(n: int) -> None:
        prompt, once = expected[n]
        for _ in range(5):
            got = process(processor, prompt, *[gradient(n)] * (n + 1))
            if (got.ids, spans(got)) != (once.ids, spans(once)):
                wrong.append(n)

    run_together(*(partial(work, n) for n in expected))
    assert not wrong


def test_chat_template_of_the_processor_is_given_to_the_tokenizer(tmp_path: Any) -> None:
    processor = tiny_multimodal.llava()[1]
    template = processor.chat_template
    processor.tokenizer.chat_template = processor.chat_template = None
    processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_processor(str(tmp_path)).tokenizer.chat_template == template


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_processor_that_requires_torchvision_is_rejected_naming_it(tmp_path: Path) -> None:
    """Pixtral's image processor runs with Pillow alone, its joint processor does not."""
    vision = {**VISION, "head_dim": 8, "model_type": "pixtral"}
    hf.LlavaConfig(vision_config=vision, text_config=SMALL).save_pretrained(tmp_path)
    hf.PixtralImageProcessorPil().save_pretrained(tmp_path)
    llama_tokenizer("").save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    with pytest.raises(ImportError, match=r"(?i)torchvision"):
        load_processor(str(tmp_path))
