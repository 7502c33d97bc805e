"""Sound in chats with the families whose processors need torchvision, as test_audio_chats.py has
the others."""

import pytest

from tests.generating import serve
from tests.matrix import matrix
from tests.model.test_audio_chats import (
    ONE,
    OTHER,
    SHORT,
    assert_generated,
    max_items,
    questions,
)
from tests.model.test_audio_chats import (
    test_output_is_the_same_beside_other_requests_and_in_chunks as assert_same_in_chunks,
)
from tests.multimodal import engine, loaded, png, request, unpaged
from tests.tiny_audio import WITH_TORCHVISION

# Their attention adds a bias, or their model does not call its decoder with embeddings.
UNPAGED = ("inkling_mm_model", "phi4_multimodal")
PAGED = [name for name in WITH_TORCHVISION if name not in UNPAGED]
MIXED = [*PAGED, "inkling_mm_model"]


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("model", matrix(PAGED, "gemma4_unified"))
def test_output_is_the_same(model: str, tokens: int | None) -> None:
    assert_same_in_chunks(model, tokens)


@pytest.mark.parametrize("model", matrix(UNPAGED))
def test_output_on_transformers_cache_is_the_same(model: str) -> None:
    assert loaded(model).info.batching == "static"
    served, _ = serve(unpaged(model), questions(model), seed=1)
    assert_generated(model, served)


@pytest.mark.parametrize("model", matrix(MIXED))
def test_recordings_and_images_share_a_prompt(model: str) -> None:
    generator = unpaged(model) if model in UNPAGED else engine(model)
    item = request("What is ", png(0), " beside ", ONE, " and ", OTHER, " and ", png(1), "?")
    served, _ = serve(generator, [item, request(png(1), SHORT, "this?")])
    assert_generated(model, served)


def test_a_mask_that_one_recording_lacks_is_one_recording_in_a_prompt() -> None:
    assert max_items("phi4_multimodal") == 1
