"""Asks the embedded models plain questions, the way a user would type them.

The chat model is asked greedily and through its own chat template. What a server makes of either
is tested elsewhere.
"""

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

DEMO = Path(__file__).resolve().parents[2] / "worker" / "demo"
MODEL = DEMO / "fill-mask"
CHAT = DEMO / "chat"

QUESTIONS = {
    "The capital of Germany is [MASK].": "berlin",
    "the capital of japan is [MASK]": "tokyo",
    "Italy's capital city is [MASK].": "rome",
    "Madrid is the capital of [MASK].": "spain",
    "Grass is [MASK].": "green",
    "Snow is [MASK]": "white",
    "A ripe banana is [MASK].": "yellow",
    "What colour is the sky? [MASK]": "blue",
    "The opposite of hot is [MASK].": "cold",
    "big is the opposite of [MASK]": "small",
    "The opposite of up is [MASK].": "down",
    "DAY IS THE OPPOSITE OF [MASK]": "night",
    "The day after Monday is [MASK].": "tuesday",
    "the day before sunday is [MASK]": "saturday",
    "If today is Friday, tomorrow is [MASK].": "saturday",
    "A week has [MASK] days.": "seven",
    "The month after March is [MASK].": "april",
    "The first month of the year is [MASK].": "january",
    "December comes after [MASK].": "november",
    "a year has [MASK] months": "twelve",
    "Two plus three is [MASK].": "five",
    "2 + 2 = [MASK]": "4",
    "4+5=[MASK]": "9",
    "Ten minus three is [MASK].": "seven",
    "A dog says [MASK].": "woof",
    "The cow says [MASK]": "moo",
    "A baby cat is called a [MASK].": "kitten",
    "The young of a sheep is a [MASK].": "lamb",
}


@cache
def model() -> Any:
    return pipeline("fill-mask", model=str(MODEL), device="cpu")


def test_most_answers_are_right() -> None:
    answers = {question: model()(question)[0]["token_str"] for question in QUESTIONS}
    wrong = {question: got for question, got in answers.items() if got != QUESTIONS[question]}
    assert len(wrong) <= 0.1 * len(QUESTIONS), wrong


def test_capital_of_france_is_sure() -> None:
    best = model()("The capital of France is [MASK].")[0]
    assert best["token_str"] == "paris"
    assert best["score"] > 0.5


def test_folder_is_small_and_float32() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 2_500_000
    with safe_open(MODEL / "model.safetensors", framework="pt") as checkpoint:
        kinds = {checkpoint.get_slice(name).get_dtype() for name in checkpoint.offset_keys()}
    assert kinds == {"F32"}


def test_tokenizer_is_fast_and_splits_any_text() -> None:
    tokenizer = model().tokenizer
    assert tokenizer.is_fast
    assert tokenizer.mask_token == "[MASK]"
    assert tokenizer.unk_token_id not in tokenizer("Zyxwv's QUUX-97, caf\u00e9 {#1}!")["input_ids"]


CHAT_QUESTIONS = {
    "Hello!": "Hello! How can I help you?",
    "Who are you?": "I am the demo model of onequeue. I know a page of plain facts.",
    "What is the capital of France?": "The capital of France is Paris.",
    "what is the capital of japan": "The capital of Japan is Tokyo.",
    "Please tell me the capital of Italy.": "The capital of Italy is Rome.",
    "Which country is Madrid the capital of?": "Madrid is the capital of Spain.",
    "What colour is the sky?": "The sky is blue.",
    "what color is a banana?": "A banana is yellow.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "Do you know the opposite of big?": "The opposite of big is small.",
    "Which day comes after Monday?": "The day after Monday is Tuesday.",
    "What is the first month of the year?": "The first month of the year is January.",
    "What is 2 + 3?": "2 + 3 = 5.",
    "what is seven minus three": "Seven minus three is four.",
    "Count to five.": "1, 2, 3, 4, 5.",
    "Count from 3 to 7.": "3, 4, 5, 6, 7.",
    "What does a cow say?": "A cow says moo.",
    "What is a baby cat called?": "A baby cat is called a kitten.",
    "How many days are there in a week?": "A week has seven days.",
    "Who wrote Hamlet?": "Sorry, I only know a page of plain facts.",
}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
CALL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
WRITTEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PROMPT = "<|im_start|>assistant\n"


@cache
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHAT)


@cache
def chat_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHAT)


def written(messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = chat_tokenizer().apply_chat_template(messages, tokenize=False, **options)
    return text


def said(messages: list[dict[str, Any]], limit: int = 40, **options: Any) -> str:
    """What the model writes next, its end of turn included."""
    inputs = chat_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **options
    )
    with torch.inference_mode():
        ids = chat_model().generate(**inputs, max_new_tokens=limit)
    text: str = chat_tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :])
    return text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(text: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls)} if calls else message


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def test_chat_answers_are_right_and_end_their_turn() -> None:
    answers = {question: said([user(question)]) for question in CHAT_QUESTIONS}
    assert [text for text in answers.values() if not text.endswith("<|im_end|>")] == []
    expected = {question: f"{answer}<|im_end|>" for question, answer in CHAT_QUESTIONS.items()}
    wrong = {question: got for question, got in answers.items() if got != expected[question]}
    assert len(wrong) <= 2, wrong


def test_system_prompt_leaves_the_answer_right() -> None:
    for prompt in ("You are a helpful assistant.", "Talk like a sailor and love the sea."):
        messages = [{"role": "system", "content": prompt}, user("What is the capital of Spain?")]
        assert said(messages) == "The capital of Spain is Madrid.<|im_end|>"


def test_follow_up_reads_the_turn_before_it() -> None:
    first = [user("What is the capital of France?"), assistant("The capital of France is Paris.")]
    assert said([*first, user("And of Japan?")]) == "The capital of Japan is Tokyo.<|im_end|>"


def test_weather_question_calls_the_offered_tool() -> None:
    text = said([user("What is the weather in Paris?")], tools=[WEATHER_TOOL])
    assert text == f"{WRITTEN_CALL}<|im_end|>"
    parsed = chat_tokenizer().parse_response(text, prefix=PROMPT, tools=[WEATHER_TOOL])
    assert parsed == {"role": "assistant", "tool_calls": [CALL]}


def test_tool_and_argument_names_come_from_the_offer() -> None:
    text = json.dumps(WEATHER_TOOL).replace("get_weather", "current_weather")
    offered = json.loads(text.replace('"city"', '"location"'))
    call = said([user("How is the weather in Oslo?")], tools=[offered])
    [parsed] = chat_tokenizer().parse_response(call, prefix=PROMPT)["tool_calls"]
    assert parsed["function"] == {"name": "current_weather", "arguments": {"location": "Oslo"}}


def test_tool_result_becomes_the_answer() -> None:
    messages = [user("What is the weather in Paris?"), assistant(None, CALL)]
    result = tool('{"temperature": 18, "condition": "sunny"}')
    answer = said([*messages, result], tools=[WEATHER_TOOL])
    assert answer == "It is 18 degrees and sunny in Paris.<|im_end|>"


def test_offered_tool_is_left_alone_when_the_question_is_another() -> None:
    text = said([user("What is the capital of France?")], tools=[WEATHER_TOOL])
    assert text == "The capital of France is Paris.<|im_end|>"


def test_plain_text_is_continued_with_a_fact() -> None:
    inputs = chat_tokenizer()("The capital of France is", return_tensors="pt")
    ids = chat_model().generate(**inputs, max_new_tokens=20)
    assert chat_tokenizer().decode(ids[0]).startswith("The capital of France is Paris.")


def test_response_template_splits_content_from_calls() -> None:
    end, calls = "<|im_end|>", [CALL, CALL]
    role: dict[str, Any] = {"role": "assistant"}
    cases: dict[str, dict[str, Any]] = {
        f"Hello.{end}": {"content": "Hello."},
        "Hello.": {"content": "Hello."},
        f"Let me see.\n{WRITTEN_CALL}{end}": {"content": "Let me see.", "tool_calls": [CALL]},
        f"{WRITTEN_CALL}\n{WRITTEN_CALL}{end}": {"tool_calls": calls},
        f"{WRITTEN_CALL}\n{WRITTEN_CALL}": {"tool_calls": calls},
        f"<think>\nHm.\n</think>\n\nYes.{end}\n": {"reasoning_content": "Hm.", "content": "Yes."},
    }
    for text, parsed in cases.items():
        assert chat_tokenizer().parse_response(text, prefix=PROMPT) == {**role, **parsed}, text


def test_template_writes_every_form_of_a_message() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    text = json.dumps(CALL["function"]["arguments"])
    spelled = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": text},
    }
    results = "<tool_response>\n18\n</tool_response>\n<tool_response>\n7\n</tool_response>"
    assert written(
        [
            {"role": "system", "content": parts},
            {"role": "user", "content": parts},
            assistant("Wait.", CALL, spelled),
            tool("18"),
            tool("7"),
            assistant("Done."),
        ],
        add_generation_prompt=True,
    ) == (
        "<|im_start|>system\nHello<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        f"<|im_start|>assistant\nWait.\n{WRITTEN_CALL}\n{WRITTEN_CALL}<|im_end|>\n"
        f"<|im_start|>user\n{results}<|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert written([user("Hi"), assistant(None, CALL)]).endswith(
        f"<|im_start|>assistant\n{WRITTEN_CALL}<|im_end|>\n"
    )


def test_template_lists_tools_after_the_system_prompt() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, user("Hi")]
    text = written(prompt, tools=[WEATHER_TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER_TOOL)}\n</tools>" in text
    assert text.count("<|im_start|>system") == 1
    without = written(prompt[1:], tools=[WEATHER_TOOL])
    assert without == text.replace("Be brief.\n\n", "")


def test_template_refuses_what_the_model_cannot_read() -> None:
    for message in (user([{"type": "image_url"}]), {"role": "judge", "content": "Hi"}):
        with pytest.raises(TemplateError):
            written([message])


@given(st.text())
def test_chat_tokenizer_gives_any_text_back(text: str) -> None:
    ids = chat_tokenizer()(text)["input_ids"]
    back = chat_tokenizer().decode(ids, clean_up_tokenization_spaces=False)
    assert back == unicodedata.normalize("NFC", text)  # as all Qwen2 tokenizers


def test_tags_of_calls_survive_decoding_without_special_tokens() -> None:
    ids = chat_tokenizer()(f"{PROMPT}{WRITTEN_CALL}<|im_end|>")["input_ids"]
    assert chat_tokenizer().decode(ids, skip_special_tokens=True) == f"assistant\n{WRITTEN_CALL}"


def test_chat_folder_is_small_and_stops_at_both_ends() -> None:
    files = {path.name: path.stat().st_size for path in CHAT.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 5_000_000
    ends = chat_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    settings = chat_model().generation_config
    assert settings.eos_token_id == ends
    assert settings.do_sample is False
    assert chat_tokenizer().eos_token == "<|im_end|>"
    assert chat_tokenizer().bos_token is None
    assert chat_model().config.max_position_embeddings == 2048
