"""Words of a transcript are those of transformers' pipeline."""

import pytest
from transformers.models.whisper import tokenization_whisper

from tests.transcribing import WHISPER, checkpoint
from worker.engines.speech.vocabulary import WhisperVocabulary

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
    whisper = checkpoint(WHISPER)
    return WhisperVocabulary(whisper.tokenizer, whisper.model.generation_config, 100)


def reference_words(tokens: list[int], language: str) -> list[tuple[str, list[int]]]:
    combine = getattr(tokenization_whisper, "_combine_tokens_into_words", None)
    if combine is None:
        pytest.skip("this version of transformers lacks the private function")
    texts, _, indices = combine(
        checkpoint(WHISPER).tokenizer, tokens, tokenization_whisper.LANGUAGES[language]
    )
    return list(zip(texts, indices, strict=True))


@pytest.mark.parametrize(
    ("language", "text"), [(code, text) for code, texts in TEXTS.items() for text in texts]
)
def test_words_are_those_of_transformers(language: str, text: str) -> None:
    tokens = checkpoint(WHISPER).tokenizer(text, add_special_tokens=False)["input_ids"]
    words = vocabulary().words(tokens, language)
    assert words == reference_words(tokens, language)
    assert "".join(word for word, _ in words) == text
    assert [index for _, indices in words for index in indices] == list(range(len(tokens)))


def test_invalid_utf8_keeps_all_tokens() -> None:
    token_id = checkpoint(WHISPER).tokenizer.convert_tokens_to_ids
    tokens = [token_id(letter) for letter in ("Ġ", "a", "ä", "½", "Ġ", "b", "ä", "½")]
    words = vocabulary().words(tokens, "en")
    assert [word for word, _ in words] == [" a�", " b�"]
    assert [index for _, indices in words for index in indices] == list(range(8))
    assert vocabulary().words([], "en") == []
