"""Uploads over real sockets: malformed forms, and files that are too large, slow or endless."""

import io
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from server.apis.openai.audio.endpoint import TranscriptionEndpoint
from server.http.form import PREFIX, Form
from server.http.upload import Uploads
from tests.event_streams import CLIENT, error_of
from tests.fake_transcriber import RATE, FakeTranscriber
from tests.http.test_transcriptions import PATH, _all_is_removed, post, server, speaker, spool, wav
from tests.serving import Server, read_response, serving, wait_until
from tests.tiny import folder
from tests.transcribing import WHISPER
from tests.unit.test_media import tone, without_length

__all__ = ["_all_is_removed", "server", "speaker", "spool"]  # fixtures


def multipart(*parts: tuple[str, bytes], boundary: str = "xyz", end: str = "--") -> bytes:
    """Return a form; a part is the parameters of its header and its content."""
    encoded = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + body + b"\r\n"
        for head, body in parts
    ]
    return b"".join(encoded) + f"--{boundary}{end}\r\n".encode()


def send(server: Server, body: bytes, media: str = "multipart/form-data; boundary=xyz") -> Any:
    response = CLIENT.post(server.url + PATH, content=body, headers={"Content-Type": media})
    assert response.status_code >= 400, response.text
    return response.status_code, error_of(response)


FILE = ('name="file"; filename="a.wav"', tone(1.0, RATE))


def test_an_upload_in_chunks_has_its_file_last_and_of_no_audio_type(server: Server) -> None:
    """Without a content length, as Open WebUI sends it."""
    lines = [
        b"--xyz", b'content-disposition: form-data; name="model"', b"", b"demo",
        b"--xyz", b'content-disposition: form-data; name="file"; filename="a.wav"',
        b"content-type: application/octet-stream", b"", wav(), b"--xyz--", b"",
    ]  # fmt: skip
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    body = iter([line + b"\r\n" for line in lines])
    response = CLIENT.post(server.url + PATH, content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "text" in response.json()


def test_malformed_forms_are_refused(server: Server) -> None:
    assert send(server, b"{}", "application/json")[0] == 415
    status, error = send(server, multipart(FILE), "multipart/form-data")
    assert (status, error["message"][:30]) == (400, "the Content-Type has no bounda")
    status, error = send(server, multipart(FILE, boundary="other"))
    assert status == 400
    assert "boundary" in error["message"]
    status, error = send(server, multipart(FILE, end=""))
    assert status == 400
    assert "cut off" in error["message"]
    assert send(server, b"")[0] == 400
    assert send(server, multipart(), "multipart/form-data; boundary=" + "x" * 300)[0] == 400


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "file: is required"),
        ([('name="model"', b"demo")], "file: is required"),
        ([('name="file"', wav())], "file: must be a file"),
        ([FILE, FILE], "file: must be sent once"),
        ([('name="file"; filename="a.wav"', b"")], "file: is empty"),
        ([('name="sound"; filename="a.wav"', b"x")], "sound: must not be a file"),
        ([("filename", b"x")], "has no name"),
        ([FILE, ('name="prompt"', b"\xff")], "prompt: is not valid UTF-8"),
        ([(f'name="n{n}"', b"x") for n in range(65)], "more than 64 fields"),
    ],
)
def test_invalid_parts_are_refused_by_name(
    parts: list[tuple[str, bytes]], message: str, server: Server
) -> None:
    status, error = send(server, multipart(*parts))
    assert status == 400
    assert message in error["message"]


def test_too_large_files_get_413(server: Server, spool: Path) -> None:
    response = post(server, b"\0" * 4_000_000)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert response.headers["connection"] == "close"
    with socket.create_connection(("127.0.0.1", server.port)) as client:  # by its Content-Length
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"
        head += "Content-Type: multipart/form-data; boundary=x"
        client.sendall(
            f"{head}\r\nExpect: 100-continue\r\nContent-Length: 200000000\r\n\r\n".encode()
        )
        assert read_response(client)[0] == 413


@contextmanager
def started_upload(server: Server, waits: bool = True) -> Iterator[socket.socket]:
    """Start an upload and send a part of it."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"
        head += "Content-Type: multipart/form-data; boundary=xyz"
        client.sendall(f"{head}\r\nContent-Length: 100000\r\n\r\n".encode())
        before = uploads(server).spool.used
        client.sendall(multipart(FILE, end="")[:30_000])
        if waits:
            wait_until(lambda: uploads(server).spool.used == before + 30_000)
        yield client


def uploads(server: Server) -> Uploads:
    [endpoint] = [route.app for route in server.app.routes if route.path == PATH]
    assert isinstance(endpoint, TranscriptionEndpoint)
    return endpoint.uploads


def test_uploads_take_no_slot_of_the_queue(server: Server) -> None:
    with started_upload(server), started_upload(server):
        assert server.worker_client.queue.pending == 0
        assert post(server).status_code == 200
    wait_until(lambda: uploads(server).spool.used == 0)


def test_an_upload_that_stops_arriving_gets_408(spool: Path) -> None:
    with (
        serving(load_transcriber=FakeTranscriber, body_timeout_s=0.2) as server,
        started_upload(server) as client,
    ):
        status, body = read_response(client)
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")


def test_all_uploads_are_limited_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads(server).spool, "used", 16 * 2_000_000)
    response = post(server)
    assert (response.status_code, error_of(response)["code"]) == (503, "queue_full")


def test_slowest_upload_ends_while_the_disk_space_is_short(spool: Path) -> None:
    """All files together may take 64 kB; each upload has sent 30 kB."""
    settings: dict[str, Any] = {"max_audio_mb": 0.004, "body_timeout_s": 3600}
    with (
        serving(load_transcriber=FakeTranscriber, **settings) as server,
        started_upload(server) as slow,
        started_upload(server) as slower,
    ):
        assert uploads(server).spool.limit == 64_000
        assert post(server, wav()[:3900]).status_code == 200
        status, body = read_response(slow)
        assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
        wait_until(lambda: uploads(server).spool.used == 30_000)
        slower.sendall(b"x")
        wait_until(lambda: uploads(server).spool.used == 30_001)


def test_a_full_disk_is_a_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    response = post(server)
    assert (response.status_code, error_of(response)["code"]) == (503, "queue_full")


def test_a_disconnect_ends_the_transcription(server: Server, speaker: FakeTranscriber) -> None:
    dropped = len(speaker.dropped)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + PATH,
            files={"file": ("a.wav", wav())},
            data={"prompt": "hang"},
            timeout=httpx.Timeout(60, read=0.5),
        )
    wait_until(lambda: len(speaker.dropped) == dropped + 1)


def test_the_deadline_covers_the_first_segment(server: Server, speaker: FakeTranscriber) -> None:
    late = CLIENT.post(
        server.url + PATH,
        files={"file": ("a.wav", wav())},
        data={"prompt": "hang"},
        headers={"X-Request-Timeout-Ms": "300"},
    )
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")


def test_an_upload_of_180_mb_is_never_whole_in_memory(spool: Path) -> None:
    """Half an hour of silence in two channels."""

    def pieces() -> Iterator[bytes]:
        head, end = multipart(('name="file"; filename="a.wav"', b"@")).split(b"@")
        size = 180_000_000
        yield head + b"RIFF" + (36 + size).to_bytes(4, "little") + b"WAVEfmt "
        yield bytes.fromhex("10000000 0100 0200 44ac0000 10b10200 0400 1000") + b"data"
        yield size.to_bytes(4, "little")
        for _ in range(180):
            yield bytes(1_000_000)
        yield end

    with serving(load_transcriber=FakeTranscriber) as server, growing_less_than(100_000_000):
        media = {"Content-Type": "multipart/form-data; boundary=xyz"}
        response = CLIENT.post(server.url + PATH, content=pieces(), headers=media, timeout=300)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["seconds"] == pytest.approx(45_000_000 / 44_100, abs=0.01)


def test_ten_hours_of_silence_are_refused_in_little_memory(spool: Path) -> None:
    """By the length in the header, or without one as soon as the audio is too long."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 1000, 1, format="FLAC") as audio_file:
        for _ in range(36):
            audio_file.write(np.zeros(1_000_000, np.int16))
    whole = buffer.getvalue()
    assert len(whole) < 200_000
    with serving(transcription_model=str(folder(WHISPER)), compile="off") as server:
        assert post(server, tone(5.0, 1000)).status_code == 200  # all is imported
        with growing_less_than(150_000_000):
            for file, message in (
                (whole, "lasts 36000 seconds in 1 channels; at most 7200"),
                (without_length(whole), "at most 7200 seconds"),
            ):
                response = post(server, file)
                assert response.status_code == 400, response.text
                assert message in error_of(response)["message"]


@contextmanager
def growing_less_than(max_bytes: int) -> Iterator[None]:
    """Check the growth of this process's memory, in bytes."""
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, resident())

    watching = threading.Thread(target=watch)
    watching.start()
    yield
    done.set()
    watching.join()
    assert peak - before < max_bytes


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_form_removed_while_it_is_fed_leaves_no_file(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, writing, gate = Form(b"xyz", 1_000_000), threading.Event(), threading.Event()
    write = os.write

    def slowly(file: int, data: bytes) -> int:
        writing.set()
        assert gate.wait(60)
        return write(file, data)

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(os, "write", slowly)
        feeding = pool.submit(form.feed, multipart(FILE))
        assert writing.wait(60)
        removing = pool.submit(form.remove)
        gate.set()
        feeding.result()
        removing.result()
    form.feed(multipart(FILE))
    assert not list(spool.glob(PREFIX + "*"))
