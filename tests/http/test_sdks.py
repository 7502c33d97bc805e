"""Hugging Face's clients and the real server: `AsyncInferenceClient` and `transformers chat`; and
the errors of streams that OpenAI's and Anthropic's SDKs raise."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import huggingface_hub
import openai
import pytest
import transformers
from huggingface_hub import AsyncInferenceClient
from transformers import GenerationConfig
from transformers.cli.chat import load_generation_config, parse_generate_flags

from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving
from worker.model.generation_config import with_request_fields

WHOLE = "Hello there, wörld!"
HI = [{"role": "user", "content": "hi"}]


def test_huggingface_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it bars us too

    async def ask() -> tuple[str | None, str, str | None]:
        async with AsyncInferenceClient(base_url=server.url, api_key="-") as client:
            whole = await client.chat_completion(HI, model="demo", max_tokens=50)
            stream = await client.chat_completion(HI, stream=True)
            text, reason = "", None
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
            return whole.choices[0].message.content, text, reason

    assert asyncio.run(ask()) == (WHOLE, WHOLE, "stop")


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
def test_sdks_raise_the_refusal_of_a_stream_that_has_opened(api: str) -> None:
    generator = FakeGenerator()
    generator.gate.clear()
    fields: dict[str, Any] = {"model": "demo", "stream": True}
    bad: list[Any] = [{"role": "user", "content": "bad"}]
    with serving(load_chat=lambda: generator, sse_keepalive_s=0.05) as server:
        ours = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
        others = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
        create: dict[str, Callable[[], Any]] = {
            "chat": lambda: ours.chat.completions.create(messages=bad, **fields),
            "completions": lambda: ours.completions.create(prompt="bad", **fields),
            "responses": lambda: ours.responses.create(input="bad", **fields),
            "messages": lambda: others.messages.create(messages=bad, max_tokens=9, **fields),
        }
        stream = create[api]()  # its headers have come
        generator.release()
        error = anthropic.APIStatusError if api == "messages" else openai.APIError
        with pytest.raises(error, match="the model failed on this input"):
            list(stream)


def test_transformers_chat_loads_a_model_and_talks_to_it(tmp_path: Path) -> None:
    generators: list[FakeGenerator] = []

    def load() -> FakeGenerator:
        generators.append(FakeGenerator())
        return generators[-1]

    flags = ["max_new_tokens=20", "temperature=0.1", "do_sample=False", "top_k=9"]
    settings: dict[str, Any] = {"chat_model": "demo,cold=demo", "model_control": True}
    with serving(load_chat=load, **settings) as server:
        done = subprocess.run(
            [Path(sys.executable).parent / "transformers", "chat", "cold", server.url, *flags],
            input="hi\n!exit\n",
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "0", "COLUMNS": "120", "TERM": "dumb"},
        )
    assert done.returncode == 0, done.stderr
    assert "cold is warm" in done.stdout  # it was not loaded
    assert WHOLE in done.stdout
    [payload] = generators[1].payloads
    wanted = {"max_new_tokens": 20, "temperature": 0.1, "do_sample": False, "top_k": 9}
    assert dict(payload.config) == {**wanted, "transformers_version": transformers.__version__}


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["temperature=0.5", "top_k=9", "top_p=0.8", "min_p=0.1", "repetition_penalty=1.2"],
        ["num_beams=1", "typical_p=1.0", "no_repeat_ngram_size=3", "use_cache=True"],
    ],
)
def test_the_generation_config_of_transformers_chat_is_obeyed(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is built by the functions of the command, as each of its turns does."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it bars us too
    config: Any = load_generation_config(None)
    config.update(do_sample=True, max_new_tokens=256)
    config.update(**parse_generate_flags(flags))
    generator = FakeGenerator()

    async def ask(url: str) -> str:
        extra = {"generation_config": config.to_json_string(), "model": "demo"}
        async with AsyncInferenceClient(base_url=url) as client:
            stream = await client.chat_completion(HI, stream=True, model="demo", extra_body=extra)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    with serving(load_chat=lambda: generator) as server:
        assert asyncio.run(ask(server.url)) == WHOLE
    [payload] = generator.payloads
    untyped: Any = GenerationConfig  # not annotated
    used = with_request_fields(untyped(), payload.config, 1000)
    assert {n: v for n, v in vars(used).items() if v is not None} == config.to_diff_dict()
