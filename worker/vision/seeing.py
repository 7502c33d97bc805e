"""Provisional: files to images."""

from collections.abc import Iterator, Sequence

from worker.image_files import decode_image, open_image, upright_rgb
from worker.protocol import Picture
from worker.vision.processor import Seen


def seen(pictures: Sequence[Picture]) -> Iterator[Seen]:
    for each in pictures:
        image = open_image(each.data, each.param, 1 << 26)
        decode_image(image, each.param)
        yield Seen(upright_rgb(image), each.detail == "low", each.param)
