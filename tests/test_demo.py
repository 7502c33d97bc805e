"""Asks the embedded fill-mask model plain questions, the way a user would type them."""

from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import pipeline

MODEL = Path(__file__).resolve().parents[1] / "worker" / "demo" / "fill-mask"

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
