"""A text and images become what the checkpoint's own processor makes of them, image by image."""

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.utils.import_utils import is_torchvision_available

from batching.errors import InvalidInput
from tests import tiny_seeing
from tests.tiny import SMALL, hf
from tests.tiny_seeing import SEES
from tests.tiny_tokenizers import llama_tokenizer
from worker.vision.processor import Processor, ProcessorOutput, load_processor

FAMILIES = [*tiny_seeing.BUILDERS]


@cache
def loaded(family: str) -> Processor:
    path = str(tiny_seeing.folder(family))
    config: Any = AutoConfig.from_pretrained(path)
    return Processor(load_processor(path), config.image_token_id, 4000)


def picture(shade: int, width: int = 80, height: int = 56) -> Image.Image:
    image = Image.linear_gradient("L").resize((width, height))
    return Image.merge(
        "RGB", (image, image.point(lambda x: 255 - x), Image.new("L", image.size, shade))
    )


def places(made: ProcessorOutput) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in made.pieces]


def text(processor: Processor, *words: str) -> str:
    return processor.mark.join(words)


def process(
    processor: Processor, asked: str, *images: Image.Image, rough: bool = False
) -> ProcessorOutput:
    return processor.process(asked, [processor.look(each, b"", rough) for each in images])


@pytest.mark.parametrize("family", FAMILIES)
def test_processor_without_torchvision_makes_what_the_whole_one_makes(family: str) -> None:
    processor = loaded(family)
    asked = text(processor, "<|user|>What is", " and", " together?</s>")
    images = [picture(40), picture(200, 48, 96)]
    plain = {"add_special_tokens": False}
    whole = processor._processor(
        images=[images], text=[asked], text_kwargs=plain, return_tensors="pt"
    )
    got = process(processor, asked, *images)
    assert got.ids == whole.pop("input_ids")[0].tolist()
    inputs = got.inputs | processor.joined(got.images)
    for name in whole.keys() - {"attention_mask", "labels"}:
        assert torch.equal(inputs[name], whole[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_image_has_its_span(family: str) -> None:
    processor = loaded(family)
    first, second = picture(40), picture(200, 48, 96)
    asked = text(processor, "one", "", " two", "")
    got = process(processor, asked, first, second, first)
    filled = [n for n, each in enumerate(got.ids) if each == processor.image_id]
    spanned = [n for start, stop in places(got) for n in filled if start <= n < stop]
    assert spanned == filled


def test_rough_look_takes_fewer_places_where_images_are_split() -> None:
    processor, large = loaded("smolvlm"), picture(1, 256, 256)
    asked = text(processor, "a", "b")
    fine, rough = (process(processor, asked, large, rough=each) for each in (False, True))
    count = fine.ids.count(processor.image_id)
    assert rough.ids.count(processor.image_id) < count


@pytest.mark.parametrize(
    ("words", "count", "reason"),
    [
        (("no mark",), 1, "does not show the images"),
        (("a", "b", "c"), 1, "stands for an image"),
        (("a", "b"), 2, "stands for an image"),
    ],
)
def test_marks_that_a_user_writes_are_refused(
    words: tuple[str, ...], count: int, reason: str
) -> None:
    processor = loaded("llava")
    with pytest.raises(InvalidInput, match=reason):
        process(processor, text(processor, *words), *[picture(1)] * count)


def test_places_that_a_user_writes_are_refused() -> None:
    processor = loaded("gemma3")  # whose mark is another token than its places
    asked = text(processor, "see", "and <image_soft_token>")
    with pytest.raises(InvalidInput, match="stand for images"):
        process(processor, asked, picture(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_image_fills_is_known_by_its_size_where_the_processor_tells(family: str) -> None:
    processor = loaded(family)
    tells = hasattr(processor._processor.image_processor, "get_number_of_image_patches")
    for size in ((64, 48), (40, 72), (200, 30), (90, 300)):
        count = processor.look(picture(1, *size), b"").count
        assert processor.filled(*size) == (count if tells else 0)


def test_image_that_the_model_does_not_take_is_named() -> None:
    processor = loaded("qwen2-vl")
    with pytest.raises(InvalidInput, match="1 × 300 pixels") as refused:
        processor.look(picture(1, 1, 300), b"", param="here")
    assert refused.value.param == "here"


def test_threads_share_a_processor() -> None:
    processor = loaded("smolvlm")
    expected = {}
    for n in range(4):
        asked = text(processor, *["word"] * (n + 2))
        expected[n] = asked, process(processor, asked, *[picture(n)] * (n + 1))
    wrong: list[int] = []

    def work(n: int) -> None:
        asked, once = expected[n]
        for _ in range(5):
            got = process(processor, asked, *[picture(n)] * (n + 1))
            if (got.ids, places(got)) != (once.ids, places(once)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_template_that_only_the_processor_has_is_the_tokenizers_too(tmp_path: Any) -> None:
    made = tiny_seeing.llava()[1]
    template, made.tokenizer.chat_template, made.chat_template = made.chat_template, None, None
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_processor(str(tmp_path)).tokenizer.chat_template == template


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_processor_that_wants_torchvision_itself_is_refused_by_that_name(tmp_path: Path) -> None:
    """Pixtral's: its image processor has a way by Pillow alone, what joins it and text has none."""
    sees = {**SEES, "head_dim": 8, "model_type": "pixtral"}
    hf.LlavaConfig(vision_config=sees, text_config=SMALL).save_pretrained(tmp_path)
    hf.PixtralImageProcessorPil().save_pretrained(tmp_path)
    llama_tokenizer("").save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    with pytest.raises(ImportError, match=r"(?i)torchvision"):
        load_processor(str(tmp_path))
