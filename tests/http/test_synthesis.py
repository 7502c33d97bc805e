"""Speech over real sockets: /v1/audio/speech and /v1/audio/voices."""

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile

from server.apis.openai.audio.speech import MAX_INPUT
from tests import tiny_speech as tiny_speech  # adds its models to the list
from tests.sdk import run_node
from tests.serving import Server, metric, serving, wait_until
from tests.tiny import folder

ONE = "The first sentence of this text has some words."
TEXT = f"{ONE} And here is another one, which is a bit longer. A third one follows these two."
FORMATS = ["mp3", "opus", "aac", "flac", "wav", "pcm"]
MEDIA = {"mp3": "mpeg", "opus": "ogg"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models: dict[str, Any] = {
        "pipeline_model": f"tts={folder('vits-noisy')}",
        "pipeline_task": "text-to-audio",
    }
    with serving(device="cpu", dtype="float32", chat_model="demo", **models) as running:
        yield running


def post(server: Server, timeout: float = 60, **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "seed": 1, "response_format": "wav"} | fields
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=timeout)


def read_audio(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """Return the samples of an audio file or stream, and their rate."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32768, 24_000
    if name in ("aac", "flac"):  # libsndfile refuses FLAC without a length
        with av.open(io.BytesIO(data), "r") as container:
            frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
            samples = np.concatenate(frames, 1)[0]
            samples = samples / 32768 if samples.dtype == np.int16 else samples
            return samples, container.streams.audio[0].rate
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        return file.read(1 << 22), file.samplerate


def refusal(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("text", [ONE, TEXT], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_decodes_to_the_same_speech(server: Server, name: str, text: str) -> None:
    expected, rate = read_audio(post(server, input=text).content, "wav")
    response = post(server, input=text, response_format=name)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == f"audio/{MEDIA.get(name, name)}"
    assert ("content-length" in response.headers) == (text == ONE)
    samples, found_rate = read_audio(response.content, name)
    assert found_rate == (24_000 if name == "pcm" else 16_000 if name != "opus" else found_rate)
    padding_s = {"mp3": 0.2, "aac": 0.2, "opus": 0.1}.get(name, 0.001)  # of codecs' frames
    assert abs(len(samples) / found_rate - len(expected) / rate) < padding_s
    if name in ("wav", "flac"):
        assert np.abs(samples - expected).max() < 1e-4
    assert np.abs(samples).max() > 0.01


def test_the_default_is_mp3_as_in_openais_api(server: Server) -> None:
    response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": ONE})
    assert response.headers["content-type"] == "audio/mpeg"
    assert len(read_audio(response.content, "mp3")[0]) > 100


def test_a_file_states_its_length_and_a_stream_does_not(server: Server) -> None:
    whole, stream = post(server, input=ONE).content, post(server).content
    sizes = [int.from_bytes(data[40:44], "little") for data in (whole, stream)]
    assert sizes == [len(whole) - 44, 0xFFFFFFFF]


def test_sentences_are_those_of_separate_requests(server: Server) -> None:
    together, _ = read_audio(post(server).content, "wav")
    sentences = [f"{sentence}." for sentence in TEXT.rstrip(".").split(". ")]
    assert len(sentences) == 3
    apart = [read_audio(post(server, input=text).content, "wav")[0] for text in sentences]
    np.testing.assert_array_equal(together, np.concatenate(apart))


def test_events_carry_the_same_bytes_and_the_usage(server: Server) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/audio/speech",
        json={"input": TEXT, "seed": 1, "response_format": "pcm", "stream_format": "sse"},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *deltas, done = map(json.loads, lines)
    assert [event["type"] for event in deltas] == ["speech.audio.delta"] * 3
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert audio == post(server, response_format="pcm").content
    assert done["type"] == "speech.audio.done"
    usage = done["usage"]
    assert usage["input_tokens"] > len(TEXT)  # letters, and blanks between them
    assert usage["output_tokens"] == pytest.approx(len(audio) / 48_000 * 20, abs=1)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_seed_voice_and_speed_are_obeyed(server: Server) -> None:
    first = post(server).content
    assert post(server).content == first
    assert post(server, voice="0").content == post(server, voice={"id": "0"}).content == first
    assert post(server, voice="default").content == first
    assert post(server, voice="1").content != first
    assert post(server, seed=2).content != first
    assert post(server, seed=None).content != post(server, seed=None).content
    slow, fast = (len(post(server, speed=speed).content) for speed in (0.5, 2))
    assert slow > len(first) > fast


def test_openais_sdk_speaks(server: Server, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    given: dict[str, Any] = {"model": "tts", "input": TEXT, "voice": "1"}
    whole = client.audio.speech.create(**given, response_format="wav", extra_body={"seed": 1})
    assert whole.read() == post(server, voice="1").content
    with client.audio.speech.with_streaming_response.create(**given) as response:
        response.stream_to_file(tmp_path / "speech.mp3")
    assert len(read_audio((tmp_path / "speech.mp3").read_bytes(), "mp3")[0]) > 1000
    with pytest.raises(openai.BadRequestError, match="must be one of 0, 1, 2"):
        client.audio.speech.create(**given | {"voice": "alloy"})


def test_openais_node_sdk_speaks(server: Server) -> None:
    found = run_node("speech.mjs", URL=f"{server.url}/v1", TEXT=TEXT)
    expected = len(post(server, voice="1", response_format="pcm").content)
    assert found["whole"] == found["bytes"] == expected
    assert found["pieces"] >= 1
    assert found["refused"] == "voice"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "input: must not be empty"),
        ({"input": None}, "input", "input: is required"),
        ({"input": " ... "}, "input", "input: has no letter and no digit to speak"),
        ({"input": "\0\a\x1b"}, "input", "input: has no letter and no digit to speak"),
        ({"input": "a" * (MAX_INPUT + 1)}, "input", "input: expected str of length <= 4096"),
        ({"input": "世界"}, "input", "the text has no tokens"),
        ({"input": "世界。" * 100}, "input", "input: has no text that the model speaks"),
        ({"input": ["a"]}, "input", "input: expected str, got array"),
        ({"voice": "../../etc/passwd"}, "voice", "voice must be one of 0, 1, 2, not '../../"),
        ({"voice": "-1"}, "voice", "voice must be one of 0, 1, 2"),
        ({"voice": {"id": "3"}}, "voice", "voice must be one of 0, 1, 2"),
        ({"voice": {}}, "voice.id", "voice.id: is required"),
        ({"instructions": "whisper"}, "instructions", "instructions: is not implemented"),
        ({"speed": 0.1}, "speed", "speed: expected float >= 0.25"),
        ({"speed": 5}, "speed", "speed: expected float <= 4"),
        ({"response_format": "ogg"}, "response_format", "response_format: must be aac or flac"),
        ({"stream_format": "audios"}, "stream_format", "stream_format: must be"),
    ],
)
def test_wrong_fields_are_refused(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    status, found, text = refusal(post(server, **fields))
    assert (status, found) == (400, param), text
    assert text.startswith(message)


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    response = post(server, instructions="", speed=1, unknown=1)
    assert response.content == post(server).content
    assert response.headers["x-ignored-fields"] == "unknown"


def test_other_models_are_not_found(server: Server) -> None:
    status, param, text = refusal(post(server, model="demo"))
    assert (status, param) == (404, "model")
    assert text == "there is no model 'demo' here, only 'tts'"
    chat = {"model": "tts", "messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
    assert refusal(response)[:2] == (404, "model")


def test_models_and_voices_are_listed(server: Server) -> None:
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["tasks"]) for model in models] == [
        ("demo", ["text-generation"]),
        ("tts", ["text-to-audio"]),
    ]
    assert httpx.get(f"{server.url}/models").json()["data"] == models
    voices = httpx.get(f"{server.url}/v1/audio/voices").json()["voices"]
    assert voices == [{"id": n, "name": n, "model": "tts"} for n in "012"]


def test_post_to_the_root_takes_voice_speed_and_seed(server: Server) -> None:
    body = {"inputs": ONE, "parameters": {"seed": 1, "voice": "1", "speed": 0.5}}
    result = httpx.post(server.url, json=body).json()
    spoken, rate = read_audio(post(server, input=ONE, voice="1", speed=0.5).content, "wav")
    assert result["sampling_rate"] == rate
    assert np.abs(np.clip(result["audio"], -1, 1) - spoken).max() < 1e-4


def test_without_a_model_that_speaks_the_404_names_the_setting() -> None:
    with serving(chat_model="demo", device="cpu") as server:
        status, _, message = refusal(post(server))
        assert (status, message) == (
            404,
            "there is no route /v1/audio/speech: it needs PIPELINE_TASK=text-to-audio",
        )


def test_a_model_of_one_voice_names_the_field_that_it_ignores() -> None:
    task = "text-to-audio"
    with serving(pipeline_model=str(folder("vits")), pipeline_task=task, device="cpu") as server:
        response = post(server, voice="alloy")
        assert response.headers["x-ignored-fields"] == "voice"
        assert "x-ignored-fields" not in post(server, voice="default").headers
        [voice] = httpx.get(f"{server.url}/v1/audio/voices").json()["voices"]
        assert voice["id"] == "default"


def test_aac_needs_its_extra(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, param, message = refusal(post(server, response_format="aac"))
    assert (status, param) == (400, "response_format")
    assert "extra [audio]" in message


class SlowSteps:
    """Holds the forward passes of a model until they are released, one by one."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.count = 0
        engine: Any = server.worker_client.models["pipeline"].engine
        forward = engine.runner.forward

        def held(prepared: list[Any]) -> list[Any]:
            self.count += 1
            self.entered.release()
            assert self.permits.acquire(timeout=60)
            result: list[Any] = forward(prepared)
            return result

        monkeypatch.setattr(engine.runner, "forward", held)

    def release(self, count: int) -> None:
        self.permits.release(count)


def test_a_sentence_is_sent_before_the_next_one_is_spoken(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = post(server).content
    steps = SlowSteps(server, monkeypatch)
    steps.release(1)
    body = {"input": TEXT, "seed": 1, "response_format": "wav"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        chunks = response.iter_raw()
        first = next(chunks)
        assert steps.entered.acquire(timeout=60)
        assert len(first) < len(expected)
        steps.release(2)
        assert b"".join([first, *chunks]) == expected


def test_unread_audio_counts_as_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    given_back: list[int] = []
    memory = server.app.memory
    monkeypatch.setattr(memory, "hold", lambda transfer, size: held.append(size - transfer.held))
    monkeypatch.setattr(memory, "give_back", lambda transfer, size: given_back.append(size))
    spoken_s = metric(server, "onequeue_spoken_seconds_total")
    audio = post(server).content
    spoken_s = metric(server, "onequeue_spoken_seconds_total") - spoken_s
    assert spoken_s == pytest.approx((len(audio) - 44) / 32_000)
    assert len(held) == 3
    assert sum(held) == len(audio) - 44
    assert 0 < sum(given_back) < sum(held)  # the last sentences leave with the request


def test_a_disconnect_frees_the_slots_and_ends_the_speech(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = SlowSteps(server, monkeypatch)
    queue = server.worker_client.queue
    body = json.dumps({"input": TEXT}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        assert steps.entered.acquire(timeout=60)
        assert queue.pending == 3
    wait_until(lambda: queue.pending == 0)
    steps.release(2)
    assert post(server, input=ONE).status_code == 200
    assert steps.count == 2  # the first sentence, and the other request
    wait_until(lambda: server.app.memory.used == 0)


def test_a_failing_sentence_ends_the_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = server.worker_client.models["pipeline"].engine
    forward, calls = engine.runner.forward, iter(range(100))
    read = threading.Event()

    def broken(prepared: list[Any]) -> list[Any]:
        if next(calls) == 1:
            assert read.wait(60)
            raise ValueError("broken")
        result: list[Any] = forward(prepared)
        return result

    monkeypatch.setattr(engine.runner, "forward", broken)
    failed = metric(server, 'onequeue_errors_total{kind="item_failed"}')
    body = {"input": TEXT, "response_format": "wav"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        read.set()
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)
    wait_until(lambda: server.worker_client.queue.pending == 0)
    assert metric(server, 'onequeue_errors_total{kind="item_failed"}') == failed + 1


def test_a_full_queue_and_a_late_request_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = SlowSteps(server, monkeypatch)
    url, late = f"{server.url}/v1/audio/speech", {"X-Request-Timeout-Ms": "50"}
    response = httpx.post(url, json={"input": ONE}, headers=late, timeout=60)
    assert response.status_code == 504
    steps.release(1)
    monkeypatch.setattr(server.worker_client.queue, "capacity", 0)
    monkeypatch.setattr(server.worker_client.queue.slots, "has_room", lambda *args: False)
    assert post(server).status_code == 503


def test_sentences_without_tokens_are_silent(server: Server) -> None:
    digits = "12345 67890 12345 67890 12345 67890 12345 67890."
    spoken = post(server, input=ONE)
    assert post(server, input=f"{digits} {ONE} {digits}", response_format="pcm").status_code == 200
    samples = [read_audio(post(server, input=text).content, "wav")[0] for text in (
        f"{digits} {ONE}", f"{ONE} {digits}", ONE,
    )]  # fmt: skip
    assert len(samples[0]) == len(samples[1]) == len(samples[2])
    assert spoken.status_code == 200
    for text in (digits, f"{digits} {digits}"):
        assert refusal(post(server, input=text))[:2] == (400, "input")


def test_a_long_text_outlasts_the_limit_of_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: dict[str, Any] = {"pipeline_model": str(folder("vits")), "device": "cpu"}
    with serving(pipeline_task="text-to-audio", request_timeout_s=3.0, **models) as server:
        engine: Any = server.worker_client.models["pipeline"].engine
        forward, waited = engine.runner.forward, threading.Event()

        def slow(prepared: list[Any]) -> list[Any]:
            waited.wait(1.2)
            result: list[Any] = forward(prepared)
            return result

        monkeypatch.setattr(engine.runner, "forward", slow)
        whole = post(server).content
        assert len(read_audio(whole, "wav")[0])
        assert server.worker_client.queue.pending == 0
