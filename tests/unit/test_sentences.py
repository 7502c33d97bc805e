"""Texts to speak, cut into sentences."""

import random
import time

import pytest

from server.apis.openai.audio.sentences import MAX_SENTENCE, split_sentences

LONG = "This sentence has more than forty characters. "


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("hello", ["hello"]),
        ("Hi. How are you? Fine!", ["Hi. How are you? Fine!"]),
        (LONG * 2, [LONG.strip()] * 2),
        (f"“{LONG.strip()}” {LONG}", [f"“{LONG.strip()}”", LONG.strip()]),
        (f"{LONG}\n\n{LONG}", [LONG.strip()] * 2),
        (f"{LONG}... —", [f"{LONG.strip()} ... —"]),
        ("It costs 3.14 euros", ["It costs 3.14 euros"]),
        ("世" * 30 + "。" + "界" * 20 + "。", ["世" * 30 + "。 " + "界" * 20 + "。"]),
        ("a" * 600, ["a" * 240, "a" * 240, "a" * 120]),
        ("... ?! —", []),
        (" \n\t", []),
    ],
)
def test_a_text_is_cut_behind_its_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_no_text_takes_long_or_loses_letters() -> None:
    letters = random.Random(0)
    texts = [one * 4096 for one in '. !。\n"a世\t\0 ']
    texts += ["".join(letters.choices('ab. !?"\n。;…)', k=4096)) for _ in range(50)]
    started = time.thread_time()
    for text in texts:
        sentences = split_sentences(text)
        assert all(len(sentence) <= MAX_SENTENCE for sentence in sentences)
        kept = [c for c in "".join(sentences) if c.isalnum()]
        assert kept == [c for c in text if c.isalnum()]
    assert time.thread_time() - started < 0.1 * len(texts)
