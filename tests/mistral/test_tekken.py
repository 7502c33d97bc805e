"""Text models whose only tokenizer is a tekken.json: prompts have the ids of mistral-common,
outputs those of the library's `generate`."""

import copy
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from batching.request_queue import WorkItem
from tests import sdk
from tests.generating import GREEDY, generate, load, reference_of, serve
from tests.sdk import Sdk
from tests.tiny import hf
from tests.tiny_tekken import IDS, text_folder
from worker.engines.generation.engine import GenerationEngine
from worker.engines.pipeline.loading import PipelineOptions, load_checked_pipeline
from worker.messages.generation import Chat, GenerationInput, Stopping

VERSIONS = ["v3", "v7", "v11", "v13"]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
SYSTEM = {"role": "system", "content": "Be brief, s'il vous plaît."}
QUESTION = {"role": "user", "content": "What is the weather\nin Paris,  and in 東京? 12345"}
ANSWER = {"role": "assistant", "content": "Sunny."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": 'A "sun"'}
CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "question": ([QUESTION], []),
    "turns": ([SYSTEM, QUESTION, ANSWER, QUESTION], []),
    "tools": ([SYSTEM, QUESTION], TOOLS),
    "result": ([QUESTION, CALL, RESULT], TOOLS),
    "after a result": ([QUESTION, CALL, RESULT, ANSWER, QUESTION], TOOLS),
}


@cache
def loaded(version: str) -> GenerationEngine:
    generator = load(text_folder(version))
    assert generator.info.batching == "continuous", generator.info.why
    return generator


@cache
def tokenizer(version: str) -> Any:
    return hf.AutoTokenizer.from_pretrained(text_folder(version))


def ids_of(version: str, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
    """The prompt of the library's tokenizer, which takes arguments as text."""
    messages = copy.deepcopy([*messages])
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    ids: list[int] = tokenizer(version).apply_chat_template(messages, tools=[*tools] or None)[
        "input_ids"
    ]
    return ids


def output_of(version: str, prompt: list[int], count: int) -> list[int]:
    return generate(reference_of(text_folder(version)), [prompt], count)[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_chats_have_the_librarys_ids(version: str) -> None:
    """Alone, then with the prefixes that the first run has left in the cache."""
    generator = loaded(version)
    stopping = Stopping(max_tokens=8, ignore_eos=True)
    for is_cached in (False, True):
        items: list[Any] = [
            WorkItem(
                GenerationInput(Chat((*messages,), (*tools,)), GREEDY, stopping), float("inf"), 0.0
            )
            for messages, tools in CONVERSATIONS.values()
        ]
        served, _ = serve(generator, items)
        for one, (messages, tools) in zip(served, CONVERSATIONS.values(), strict=True):
            prompt = ids_of(version, messages, tools)
            assert list(one.prompt) == prompt
            assert one.ids == [output_of(version, prompt, 8)]
            assert not is_cached or one.deltas[0].cached_tokens > 16


def test_texts_begin_with_the_librarys_first_token() -> None:
    text = "The capital of France"
    assert loaded("v13").input_processor.encode(text) == tokenizer("v13").encode(text)


def test_pipeline_tokenizes_as_the_library_does() -> None:
    options = PipelineOptions(model=str(text_folder("v13")), task="text-generation", device="cpu")
    pipe = load_checked_pipeline(options)
    ids = pipe.tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    assert ids == ids_of("v13", [QUESTION])


@pytest.fixture(scope="module")
def chat() -> Iterator[Sdk]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.02}
    with sdk.connect(chat_model=str(text_folder("v13")), **settings) as connected:
        yield connected


def test_chat_is_streamed_with_its_usage(chat: Sdk) -> None:
    create: Any = chat.client.chat.completions.create
    asked = {"model": chat.model, "messages": [SYSTEM, QUESTION], "max_tokens": 12}
    whole = create(**asked, temperature=0)
    *chunks, last = create(
        **asked, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    prompt = ids_of("v13", [SYSTEM, QUESTION])
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == len(prompt)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    ids = output_of("v13", prompt, whole.usage.completion_tokens)
    ids = ids[: ids.index(IDS["eos_token_id"])] if IDS["eos_token_id"] in ids else ids
    assert text == tokenizer("v13").decode(ids, skip_special_tokens=True)


def test_a_required_call_follows_the_tokens_of_the_tokenizer(chat: Sdk) -> None:
    create: Any = chat.client.chat.completions.create
    for seed in range(3):
        response = create(
            model=chat.model, messages=[QUESTION], tools=TOOLS, tool_choice="required",
            parallel_tool_calls=False, temperature=1, seed=seed, max_tokens=400,
        )  # fmt: skip
        [called] = response.choices[0].message.tool_calls
        assert called.function.name == "get_weather"
        if response.choices[0].finish_reason == "tool_calls":
            assert json.loads(called.function.arguments).keys() == {"city"}
