"""Words of a transcript, as transformers' pipeline tells them apart."""

import pytest
from transformers.models.whisper import tokenization_whisper

from tests.transcribing import WHISPER, speech
from worker.speech.vocabulary import WhisperVocabulary

TEXTS = {
    "en": (
        ' "Well" (said she) it\'s 5.3% - no, -7: [done]... Right?!',
        " ( [x y z ] ) 'tis \"",
        "no space before",
        "  two  spaces   three",
        ' "" ,a , b',
    ),
    "es": (" ¿Qué tal, señor? ¡Muy bien!",),
    "ja": ("今日は、良い天気。(はい)", " 🙂!"),
    "de": (" „Grüß dich“, sagte Jürgen – 3,5 €.",),
}


def vocabulary() -> WhisperVocabulary:
    made = speech(WHISPER)
    return WhisperVocabulary(made.tokenizer, made.model.generation_config, 100)


def oracle(tokens: list[int], language: str) -> list[tuple[str, list[int]]]:
    combine = getattr(tokenization_whisper, "_combine_tokens_into_words", None)
    if combine is None:
        pytest.skip("this transformers has no such function")
    texts, _, places = combine(
        speech(WHISPER).tokenizer, tokens, tokenization_whisper.LANGUAGES[language]
    )
    return list(zip(texts, places, strict=True))


@pytest.mark.parametrize(
    ("language", "text"), [(code, text) for code, texts in TEXTS.items() for text in texts]
)
def test_words_are_those_of_transformers(language: str, text: str) -> None:
    tokens = speech(WHISPER).tokenizer(text, add_special_tokens=False)["input_ids"]
    words = vocabulary().words(tokens, language)
    assert words == oracle(tokens, language)
    assert "".join(word for word, _ in words) == text
    assert [place for _, places in words for place in places] == list(range(len(tokens)))


def test_bytes_that_are_no_text_lose_no_token() -> None:
    spell = speech(WHISPER).tokenizer.convert_tokens_to_ids
    tokens = [spell(letter) for letter in ("Ġ", "a", "ä", "½", "Ġ", "b", "ä", "½")]
    words = vocabulary().words(tokens, "en")
    assert [word for word, _ in words] == [" a�", " b�"]
    assert [place for _, places in words for place in places] == list(range(8))
    assert vocabulary().words([], "en") == []
