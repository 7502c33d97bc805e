"""OpenAI's SDKs and images, with a tiny multimodal model."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import sdk, tiny_multimodal
from tests.multimodal import png
from tests.sdk import Sdk

SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
PLACES = 16  # that an image fills


def url(seed: int = 1) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


def user(*parts: str) -> list[Any]:
    """A message of texts and images' URLs."""
    content = [
        {"type": "image_url", "image_url": {"url": part, "detail": "high"}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def seeing() -> Iterator[Sdk]:
    folder = str(tiny_multimodal.folder("llava"))
    with sdk.connect(chat_model=folder, dtype="float32", kv_cache_gb=0.05) as connected:
        yield connected


def test_chat_has_the_same_text_whole_and_streamed(seeing: Sdk) -> None:
    messages = user("What is it?", url(1), "and", url(2))
    asked = {"model": seeing.model, "messages": messages, **SHORT}
    whole = seeing.client.chat.completions.create(**asked)
    stream = seeing.client.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole.choices[0].message.content
    text_alone = seeing.client.chat.completions.create(
        model=seeing.model, messages=user("What is it?", "and"), **SHORT
    )
    assert whole.usage
    assert text_alone.usage
    assert whole.usage.prompt_tokens >= text_alone.usage.prompt_tokens + 2 * PLACES - 2


def test_responses_accept_images_and_keep_them(seeing: Sdk) -> None:
    text, image = {"type": "input_text", "text": "What?"}, {"type": "input_image", "detail": "auto"}
    content: list[Any] = [text, image | {"image_url": url()}]
    first = seeing.client.responses.create(
        model=seeing.model,
        input=[{"role": "user", "content": content}],
        max_output_tokens=16,
        temperature=0,
    )
    second = seeing.client.responses.create(
        model=seeing.model,
        input="And?",
        previous_response_id=first.id,
        max_output_tokens=16,
        temperature=0,
    )
    assert first.usage
    assert second.usage
    assert first.usage.input_tokens > PLACES
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_tokens_of_a_chat_with_images(seeing: Sdk) -> None:
    root = seeing.url.removesuffix("/v1")
    messages = user("What is it?", url())
    tokenized = httpx.post(f"{root}/tokenize", json={"messages": messages}).json()
    answer = seeing.client.chat.completions.create(model=seeing.model, messages=messages, **SHORT)
    assert answer.usage
    assert tokenized["count"] == len(tokenized["tokens"]) == answer.usage.prompt_tokens


def test_node(seeing: Sdk) -> None:
    got = sdk.run_node("images.mjs", SEEING_URL=seeing.url, IMAGE=url())
    assert got["said"] == got["told"]
    assert got["tokens"] == got["input"] > PLACES
