"""Requests with images, recordings and videos for tiny models. The reference is the library's own
processor and `generate`, called with the whole prompt at once."""

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from batching.request_queue import WorkItem
from server.apis.openai.media import with_sound
from tests import tiny_multimodal
from tests.generating import GREEDY, Request, Served, load, serve, shares_template
from worker.device.self_check import CannotRun
from worker.engines.generation import loading
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator, paged_engine
from worker.messages.generation import Chat, GenerationInput, MediaInput, MediaKind, Stopping
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions, auto_class
from worker.model.paged_runner import PagedRunner, StateSlots
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import load_processor

torch.set_num_threads(1)
OUTPUT_TOKENS = 8
SAMPLING_RATE = 16_000
DEFAULT_FRAMES = {"fps": 2.0}  # of video processors that set neither a rate nor a number


@cache
def png(seed: int, width: int = 64, height: int = 48) -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@cache
def wav(seed: int, seconds: float = 0.9, rate: int = SAMPLING_RATE) -> bytes:
    """A recording of noise, whose samples are exact in 16 bits."""
    noise = np.random.default_rng(seed).integers(-9000, 9000, int(seconds * rate), np.int16)
    file = io.BytesIO()
    soundfile.write(file, noise, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def kind_of(file: bytes) -> MediaKind:
    if file.startswith(b"\x89PNG"):
        return "image"
    return "video" if file[4:8] == b"ftyp" else "audio"


def request(
    *parts: str | bytes,
    max_tokens: int = OUTPUT_TOKENS,
    limits: tuple[tuple[str, float], ...] = (),
    sound: bool = False,
    **fields: Any,
) -> Request:
    """A message of texts, images, recordings and videos. `limits`: of the media. `sound`: that of
    the videos is read."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)}
        for part in parts
    ]
    files = [part for part in parts if isinstance(part, bytes)]
    at = "messages[0].content"
    media = tuple(MediaInput(file, "auto", at, limits=limits, kind=kind_of(file)) for file in files)
    chat = Chat(({"role": "user", "content": content},), media=media)
    chat = with_sound(chat) if sound else chat
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    return WorkItem(GenerationInput(chat, GREEDY, stopping, **fields), float("inf"), 0.0)


@cache
def loaded(model: str) -> GenerationEngine:
    return load(tiny_multimodal.folder(model))


@shares_template
def engine(model: str, blocks: int = 400, max_running: int = 256) -> GenerationEngine:
    """A new engine of a model that is loaded once. Its KV cache is filled with NaN."""
    known = loaded(model)
    assert known.info.batching == "continuous", known.info.why
    language = known.runner.language
    room = min(language.context, blocks * BLOCK)
    runner = PagedRunner(language, blocks, room, 0, StateSlots(32, 32))
    for stored in (*runner.cache.keys, *runner.cache.values):
        stored.fill_(float("nan"))
    options = GeneratorOptions("", max_running=max_running)
    return paged_engine(runner, options, known.input_processor.media_preprocessor)


@cache
def unpaged(model: str) -> GenerationEngine:
    """An engine whose check of paged media has failed."""
    options = GeneratorOptions(str(tiny_multimodal.folder(model)), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_multimodal", fail_check)
        return load_generator(options)


def fail_check(*_: Any) -> None:
    raise CannotRun("simulated")


def in_small_chunks(generator: GenerationEngine, tokens: int) -> GenerationEngine:
    budget: Any = generator._budget
    budget.prompt_tokens = lambda streaming, spent_s, max_turn_s: tokens
    return generator


def max_recordings(model: str) -> int | None:
    """Return how many recordings the processor takes in a prompt; None: any number, or none."""
    preprocessor = loaded(model).input_processor.media_preprocessor
    assert preprocessor
    modality = preprocessor.processor.modalities.get("audio")
    return modality.max_items if modality else None


def prompt_of(served: Served) -> MultimodalPrompt:
    prompt = served.item.prepared[0].prepared.multimodal
    assert isinstance(prompt, MultimodalPrompt)
    return prompt


# ── the reference: transformers ──


@cache
def library(model: str) -> tuple[Any, Any]:
    """The library's own model and processor."""
    path = tiny_multimodal.folder(model)
    config: Any = tiny_multimodal.hf.AutoConfig.from_pretrained(path)
    network = auto_class(config).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    network.generation_config.eos_token_id = None
    return network.eval(), load_processor(str(path))


def samples(file: bytes) -> np.ndarray:
    if kind_of(file) == "video":
        from tests.clips import sound_of

        return sound_of(file)
    decoded: np.ndarray = soundfile.read(io.BytesIO(file), dtype="float32")[0]
    return decoded


def library_inputs(model: str, served: Served) -> Any:
    """What the library's processor makes of a request's conversation."""
    processor = library(model)[1]
    payload = served.item.payload
    assert isinstance(payload, GenerationInput)
    chat = payload.prompt
    assert isinstance(chat, Chat)
    interleaves = "omni" in model  # only these put the sound of a video among its frames
    messages = [
        {
            **message,
            "content": [
                part for part in message["content"] if not (interleaves and part.get("in_video"))
            ],
        }
        for message in chat.messages
    ]
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    if not chat.media:
        return processor.tokenizer([text], add_special_tokens=False, return_tensors="pt")
    files: dict[MediaKind, list[bytes]] = {
        kind: [file.data for file in chat.media if file.kind == kind]
        for kind in ("image", "audio", "video")
    }
    media: dict[str, Any] = {}
    if files["image"]:
        media["images"] = [Image.open(io.BytesIO(file)) for file in files["image"]]
    if files["audio"]:
        media["audio"] = list(map(samples, files["audio"]))
        media["audio_kwargs"] = {"sampling_rate": SAMPLING_RATE}
    if files["video"]:
        media |= video_arguments(processor.video_processor, files["video"], chat.media[0].limits)
    videos = iter(range(len(files["video"])))
    sounds = [file for file in chat.media if file.kind == "audio"]
    in_video = [next(videos) if file.in_video else None for file in sounds]
    if interleaves and any(file.in_video for file in sounds):
        media |= {"use_audio_in_video": True, "audio_from_video_indices": in_video}
    inputs = processor(
        text=[text], text_kwargs={"add_special_tokens": False}, return_tensors="pt", **media
    )
    return {**inputs, "use_audio_in_video": True} if "use_audio_in_video" in media else inputs


def video_arguments(processor: Any, files: list[bytes], limits: Any) -> dict[str, Any]:
    from tests.clips import decoded

    options = {"fps": None, **dict(limits)} if limits else {}
    if not options and processor.fps is None and processor.num_frames is None:
        options = DEFAULT_FRAMES
    frames, metadata = zip(*map(decoded, files), strict=True)
    return {
        "videos": [*frames], "video_metadata": [*metadata], "do_sample_frames": True, **options,
    }  # fmt: skip


def assert_generated(model: str, served: Sequence[Served]) -> None:
    """Compare prompts and outputs with those of the library."""
    for request in served:
        assert request.choices
        inputs, ids = library_inputs(model, request), list(request.prompt)
        assert inputs["input_ids"][0].tolist() == ids
        output = library(model)[0].generate(
            **inputs, do_sample=False, max_new_tokens=max(map(len, request.ids)), pad_token_id=2
        )
        expected = output[0, len(ids) :].tolist()
        assert request.ids == [expected[: len(tokens)] for tokens in request.ids]


@torch.inference_mode()
def scored(model: str, served: Served) -> list[float]:
    """The log-probabilities of the prompt's tokens but the first; -inf for tokens that the model
    has no logit for."""
    logits = library(model)[0](**library_inputs(model, served)).logits
    rows = zip(logits[0, :-1].log_softmax(-1).tolist(), served.prompt[1:], strict=True)
    return [row[target] if target < len(row) else float("-inf") for row, target in rows]


# ── promises to every medium ──


def assert_same_beside_others(model: str, items: Sequence[Request], tokens: int | None) -> None:
    """Serve requests that arrive at random times, whole or with so many tokens a step."""
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    served, driver = serve(generator, items, seed=1)
    assert_generated(model, served)
    assert driver.partial or not tokens


def assert_prefixes_are_of_equal_media(
    model: str, one: bytes, other: bytes, more: str = " And more?"
) -> None:
    """The prefix cache ends where another medium starts, and goes beyond the same one."""
    generator, cached = engine(model), list[int]()
    for file, end in ((one, ""), (other, ""), (one, more), (other, more)):
        item = request("What are these, and what are they for? ", file, " Tell me it all!" + end)
        [served], _ = serve(generator, [item])
        assert_generated(model, [served])
        cached.append(served.deltas[0].cached_tokens)
    start = prompt_of(served).spans[0][0]
    assert cached[0] == 0
    assert cached[1] <= start < min(cached[2:])


def assert_preempted_continue(model: str, files: Sequence[bytes], blocks: int) -> None:
    """`blocks`: too few for all requests."""
    items = [request("One ", file, "or two", max_tokens=40 + n) for n, file in enumerate(files)]
    served, driver = serve(engine(model, blocks), items)
    assert driver.total("preempted")
    assert_generated(model, served)
