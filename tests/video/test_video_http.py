"""Clips in requests of OpenAI's SDK to a tiny model that takes videos."""

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import sdk, tiny_video
from tests.clips import clip
from tests.sdk import Sdk
from tests.tiny_multimodal import folder

CLIP = clip()


@pytest.fixture(scope="module")
def seeing() -> Iterator[Sdk]:
    assert "qwen3-vl" in tiny_video.BUILDERS
    path = str(folder("video-qwen3-vl"))
    with sdk.connect(chat_model=path, dtype="float32", kv_cache_gb=0.05) as connected:
        yield connected


def ask(seeing: Sdk, *parts: dict[str, Any], **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]
    chats: Any = seeing.client.chat.completions
    return chats.create(
        messages=messages, model=seeing.model, temperature=0, max_tokens=8, extra_body=more
    )


def data(video: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(video).decode()
    return {"type": "input_video", "input_video": {"data": encoded, "format": "mp4"}}


def test_clips_are_read_from_both_parts_and_fewer_frames_make_shorter_prompts(
    seeing: Sdk,
) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(CLIP).decode()}"
    whole = ask(seeing, data(CLIP))
    linked = ask(seeing, {"type": "video_url", "video_url": {"url": url}})
    assert linked.choices[0].message.content == whole.choices[0].message.content
    assert linked.usage.prompt_tokens_details.cached_tokens
    fewer = ask(seeing, data(CLIP), media_io_kwargs={"video": {"num_frames": 2}})
    assert fewer.usage.prompt_tokens < whole.usage.prompt_tokens
    listed: Any = seeing.client.models.list().data[0]
    assert listed.input_modalities == ["text", "image", "video"]


def test_the_sound_of_a_clip_is_among_its_frames() -> None:
    path = str(folder("video-qwen2.5-omni-thinker"))
    sound = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    with sdk.connect(chat_model=path, dtype="float32", kv_cache_gb=0.05) as omni:
        clips = [data(clip(sound_s=seconds)) for seconds in (0.5, 1.0)]
        short, longer = (ask(omni, part, **sound).usage for part in clips)
        recording = {"type": "input_audio", "input_audio": clips[0]["input_video"]}
        both = ask(omni, clips[0], recording).usage
        assert (
            both.prompt_tokens_details.audio_tokens == short.prompt_tokens_details.audio_tokens > 0
        )
        assert both.prompt_tokens == short.prompt_tokens < longer.prompt_tokens
        assert ask(omni, clips[0], **sound).usage.prompt_tokens_details.cached_tokens
        assert not ask(omni, clips[0]).usage.prompt_tokens_details.audio_tokens
        with pytest.raises(openai.BadRequestError, match="has no audio") as refusal:
            ask(omni, data(CLIP), **sound)
        assert refusal.value.param == "messages[0].content[1].input_video"


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        (CLIP[:300], "not a video that can be read"),
        (b"#EXTM3U\nfile:///etc/passwd", "not a video that can be read"),
        (clip(kind="matroska", codec="ffv1"), "the codec ffv1 is not decoded"),
    ],
)
def test_files_that_cannot_be_read_are_refused(seeing: Sdk, video: bytes, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refusal:
        ask(seeing, data(video))
    assert refusal.value.param == "messages[0].content[1].input_video"
