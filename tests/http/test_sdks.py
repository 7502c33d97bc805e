"""Real clients against the real server: OpenAI's SDK, Hugging Face's, and `transformers chat`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import openai
import pytest
from huggingface_hub import AsyncInferenceClient

from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving, wait_until

WHOLE = "Hello there, wörld!"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(load_chat=FakeGenerator, api_keys=("key",)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)


def test_openai_async_client_that_leaves_a_stream(server: Server) -> None:
    async def leave() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="key") as client:
            stream = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "long"}], stream=True
            )
            async with stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        return chunk.choices[0].delta.content
        return ""

    assert asyncio.run(leave()).startswith("w0 ")


def test_openai_error_in_a_stream_is_an_exception(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "bad later"}], stream=True
    )
    with pytest.raises(openai.APIError, match="failed on this input"):
        list(stream)


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["ab", "cd"], echo=True, logprobs=1, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == ["abHello", "cdHello"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["c", "d", "Hello"]
    stream = client.completions.create(model="demo", prompt=[1, 2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == WHOLE


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "onequeue"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_openai_client_with_two_models_that_are_loaded_and_unloaded() -> None:
    """As Open WebUI does: list, load, wait, chat, unload, wait."""
    settings: dict[str, Any] = {"chat_model": "demo,other=demo", "model_control": True}
    with (
        serving(load_chat=FakeGenerator, **settings) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client,
    ):

        def states() -> dict[str, str]:
            listed = {model.id: model.model_extra or {} for model in client.models.list()}
            return {id: extra["status"]["value"] for id, extra in listed.items()}

        assert states() == {"demo": "loaded", "other": "unloaded"}
        for action, state in (("load", "loaded"), ("unload", "unloaded")):
            done = httpx.post(f"{server.url}/models/{action}", json={"model": "other"}, timeout=60)
            assert done.json() == {"success": True}
            wait_until(lambda state=state: states()["other"] == state)  # type: ignore[misc]  # a default
            for name in ("demo", "other"):  # an unloaded model is loaded again
                completion = client.chat.completions.create(model=name, messages=HI)  # type: ignore[arg-type]
                assert (completion.model, completion.choices[0].message.content) == (name, WHOLE)


def test_openai_errors_have_their_classes_and_fields(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}], temperature=3
        )
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="o", messages=[{"role": "user", "content": "hi"}])
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as streamed:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "refused"}], stream=True
        )
    assert streamed.value.param == "messages"
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_huggingface_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it bars us too

    async def ask() -> tuple[str | None, str, str | None]:
        async with AsyncInferenceClient(base_url=server.url, api_key="key") as client:
            whole = await client.chat_completion(HI, model="demo", max_tokens=50)
            stream = await client.chat_completion(HI, stream=True)
            text, reason = "", None
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
            return whole.choices[0].message.content, text, reason

    assert asyncio.run(ask()) == (WHOLE, WHOLE, "stop")


def transformers_chat(server: Server, folder: Path, model: str, *flags: str) -> str:
    """Chat with a model by transformers' command; return its output."""
    done = subprocess.run(
        [Path(sys.executable).parent / "transformers", "chat", model, server.url, *flags],
        input="hi\n!exit\n",
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "0", "COLUMNS": "120", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_chat_loads_a_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"chat_model": "demo,cold=demo", "model_control": True}
    with serving(load_chat=FakeGenerator, **settings) as server:
        output = transformers_chat(server, tmp_path, "cold")
    assert "cold is warm" in output  # it was not loaded
    assert WHOLE in output


def test_transformers_chat(tmp_path: Path) -> None:
    generator = FakeGenerator()
    flags = ["max_new_tokens=20", "temperature=0.1", "do_sample=False", "top_k=9"]
    with serving(load_chat=lambda: generator) as server:
        output = transformers_chat(server, tmp_path, "demo", *flags)
    assert "demo was already loaded" in output
    assert WHOLE in output
    [payload] = generator.payloads
    assert payload.stopping.default_tokens == 20
    assert (payload.sampling.temperature, payload.sampling.top_k) == (0, 9)
