"""The demo models answer plain questions, as users type them, and have the expected files.

The chat model decodes greedily, with its own chat template. No server runs here.
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


def test_at_least_nine_of_ten_masks_are_filled_correctly() -> None:
    answers = {question: model()(question)[0]["token_str"] for question in QUESTIONS}
    wrong = {question: word for question, word in answers.items() if word != QUESTIONS[question]}
    assert len(wrong) <= 0.1 * len(QUESTIONS), wrong


def test_the_capital_of_france_has_a_high_score() -> None:
    best = model()("The capital of France is [MASK].")[0]
    assert best["token_str"] == "paris"
    assert best["score"] > 0.5


def test_the_fill_mask_tokenizer_is_fast_and_tokenizes_any_text() -> None:
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
RENDERED_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PROMPT = "<|im_start|>assistant\n"


@cache
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHAT)


@cache
def chat_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHAT)


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = chat_tokenizer().apply_chat_template(messages, tokenize=False, **options)
    return text


def generate(messages: list[dict[str, Any]], limit: int = 40, **options: Any) -> str:
    """Return the model's output, its end of turn included."""
    inputs = chat_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **options
    )
    with torch.inference_mode():
        ids = chat_model().generate(**inputs, max_new_tokens=limit)
    text: str = chat_tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :])
    return text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_chat_answers_are_correct_and_end_their_turn() -> None:
    answers = {question: generate([user(question)]) for question in CHAT_QUESTIONS}
    assert [text for text in answers.values() if not text.endswith("<|im_end|>")] == []
    expected = {question: f"{answer}<|im_end|>" for question, answer in CHAT_QUESTIONS.items()}
    wrong = {question: text for question, text in answers.items() if text != expected[question]}
    assert len(wrong) <= 2, wrong


def test_a_system_prompt_does_not_change_the_answer() -> None:
    for prompt in ("You are a helpful assistant.", "Talk like a sailor and love the sea."):
        messages = [{"role": "system", "content": prompt}, user("What is the capital of Spain?")]
        assert generate(messages) == "The capital of Spain is Madrid.<|im_end|>"


def test_tool_and_argument_names_are_copied_from_the_schema() -> None:
    text = json.dumps(WEATHER_TOOL).replace("get_weather", "current_weather")
    schema = json.loads(text.replace('"city"', '"location"'))
    call = generate([user("How is the weather in Oslo?")], tools=[schema])
    [parsed] = chat_tokenizer().parse_response(call, prefix=PROMPT)["tool_calls"]
    assert parsed["function"] == {"name": "current_weather", "arguments": {"location": "Oslo"}}


def test_a_completion_continues_plain_text_with_a_fact() -> None:
    inputs = chat_tokenizer()("The capital of France is", return_tensors="pt")
    ids = chat_model().generate(**inputs, max_new_tokens=20)
    assert chat_tokenizer().decode(ids[0]).startswith("The capital of France is Paris.")


def test_the_template_refuses_images_and_unknown_roles() -> None:
    for message in (user([{"type": "image_url"}]), {"role": "judge", "content": "Hi"}):
        with pytest.raises(TemplateError):
            render([message])


@given(st.text())
def test_the_chat_tokenizer_decodes_any_text_exactly(text: str) -> None:
    ids = chat_tokenizer()(text)["input_ids"]
    decoded = chat_tokenizer().decode(ids, clean_up_tokenization_spaces=False)
    assert decoded == unicodedata.normalize("NFC", text)  # like all Qwen2 tokenizers


def test_tool_call_tags_remain_when_special_tokens_are_skipped() -> None:
    ids = chat_tokenizer()(f"{PROMPT}{RENDERED_CALL}<|im_end|>")["input_ids"]
    assert chat_tokenizer().decode(ids, skip_special_tokens=True) == f"assistant\n{RENDERED_CALL}"


@pytest.mark.parametrize(("folder", "limit"), [(MODEL, 2_500_000), (CHAT, 5_000_000)])
def test_the_folders_are_small(folder: Path, limit: int) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit


def test_the_chat_model_has_both_stop_tokens() -> None:
    stop_token_ids = chat_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    settings = chat_model().generation_config
    assert settings.eos_token_id == stop_token_ids
    assert settings.do_sample is False
    assert chat_tokenizer().eos_token == "<|im_end|>"
    assert chat_tokenizer().bos_token is None
    assert chat_model().config.max_position_embeddings == 2048
