"""Streams equal the tokenizer's own decode, for every kind of tokenizer; stop strings equal a
search of the whole text after each character."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny_tokenizers import SENTENCES, bert_tokenizer, hf, llama_tokenizer
from worker.text.detokenizer import (
    CONTEXT,
    MAX_INCOMPLETE,
    MAX_SILENT,
    REPLACEMENT,
    TextSpan,
    Vocabulary,
)
from worker.text.stop_strings import StopStrings

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces,\n\n\tlines and\u00a0more ;",
    "naïve café – 10 € “quoted”…",
    "日本の首都は東京です。",
    "flags 🇫🇷🇯🇵, a family 👩‍👩‍👧‍👦, thumbs 👍🏽 and 🧑‍🚀!",
    "combining: e\u0301 n\u0303 a\u0308\u0301, שלום",
    "<s>not special</s>",
)


def byte_level() -> Any:
    tokenizer = llama_tokenizer()
    tokenizer.add_tokens(["two words"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end of turn|>"]})
    return tokenizer


def byte_level_in_a_sequence() -> Any:
    """Has added tokens that its decoder reads as bytes, the last one as half a character."""
    tokenizer = llama_tokenizer()
    tokenizer.add_tokens(["Ġx", "xé"])
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def llama2() -> Any:
    """Replace, ByteFallback, Fuse, Strip."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *BYTE_TOKENS]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    learner.train_from_iterator(SENTENCES, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return hf.LlamaTokenizer(vocab=model["vocab"], merges=merges)


def unigram(decoder: decoders.Decoder, byte_tokens: Sequence[str] = BYTE_TOKENS) -> Any:
    words = sorted({"▁" + word for sentence in SENTENCES for word in sentence.split()})
    chars = sorted({letter for sentence in SENTENCES for letter in sentence} - {" "})
    special = ["<unk>", "<s>", "</s>"]
    chunks = [*special, *byte_tokens, "▁", *chars, *words]
    scores = [(span, -1.0 if "▁" in span else -9.0) for span in chunks]
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=bool(byte_tokens)))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def gemma() -> Any:
    kinds = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return unigram(decoders.Sequence(kinds))


def metaspace_and_bytes() -> Any:
    return unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def end_of_word() -> Any:
    """BPEDecoder, as in GPT-1: a word's space is decoded with the next token."""
    words = {word.strip(",.;?") for sentence in SENTENCES for word in sentence.split()}
    tokens = [*sorted(word + "</w>" for word in words), "un", "re"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


class StrippingTokenizer(hf.PreTrainedTokenizer):  # type: ignore[misc]  # hf is Any
    """Python only, and like SentencePiece's there: spaces at both ends are lost."""

    def __init__(self, **kwargs: Any) -> None:
        self.tokens = ["<unk>", "</s>", "▁", "▁▁", "▁an", "▁The", "apple", "s", ".", "é", "\n"]
        super().__init__(unk_token="<unk>", eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.tokens.index(token) if token in self.tokens else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self.tokens[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


class EditingTokenizer(hf.PreTrainedTokenizerFast):  # type: ignore[misc]  # hf is Any
    """Fast, but its class edits the decoded text."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        text: str = super()._decode(*args, **kwargs)
        return text.replace("e", "3")


def editing() -> Any:
    backend = llama_tokenizer().backend_tokenizer
    return EditingTokenizer(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte-level in a sequence": byte_level_in_a_sequence,
    "llama-2": llama2,
    "gemma": gemma,
    "metaspace and bytes": metaspace_and_bytes,
    "metaspace": lambda: unigram(decoders.Metaspace(), ()),
    "wordpiece": bert_tokenizer,
    "end of word": end_of_word,
    "bytes in Python": hf.ByT5Tokenizer,
    "stripping, in Python": StrippingTokenizer,
    "editing": editing,
}
BYTE_LEVEL = ["byte-level", "byte-level in a sequence"]
BYTE_FALLBACK = ["llama-2", "gemma", "metaspace and bytes"]
SPELL_ANY_TEXT = [*BYTE_LEVEL, *BYTE_FALLBACK, "bytes in Python"]
each_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def load(kind: str) -> tuple[Any, Vocabulary]:
    tokenizer = KINDS[kind]()
    return tokenizer, Vocabulary(tokenizer)


def encoded(kind: str, text: str) -> list[int]:
    ids: list[int] = load(kind)[0](text, add_special_tokens=False)["input_ids"]
    return ids


def decoded(kind: str, ids: Sequence[int], skip: bool = True) -> str:
    tokenizer, _ = load(kind)
    known_ids = [i for i in ids if tokenizer.is_fast or i < len(tokenizer)]
    text: str = tokenizer.decode(
        known_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    return text


def streamed(kind: str, context: Sequence[int], ids: Sequence[int], skip: bool = True) -> list[str]:
    """Return the text of each push, then of the flush."""
    stream = load(kind)[1].stream(context, skip)
    return [*(stream.push(i) for i in ids), stream.flush()]


def added(kind: str, context: Sequence[int], ids: Sequence[int], skip: bool = True) -> str:
    """Return what decoding everything adds to decoding the context."""
    before, after = decoded(kind, context, skip), decoded(kind, [*context, *ids], skip)
    if not after.startswith(before):  # the context ends inside a character that `ids` complete
        before = before.removesuffix(REPLACEMENT)
    assert after.startswith(before)
    return after[len(before) :]


@cache
def some_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids in any order, including unknown and special ones. Runs of byte tokens are complete
    characters, or invalid from their start between other tokens."""
    tokenizer, _ = load(kind)
    size = max(tokenizer.get_vocab().values()) + 4
    if kind not in BYTE_FALLBACK:
        return st.lists(st.integers(0, size), max_size=30)
    byte_ids = tokenizer.convert_tokens_to_ids(BYTE_TOKENS)
    other = st.sampled_from(sorted(set(range(size)) - set(byte_ids)))
    word = st.sampled_from([i for i in encoded(kind, SENTENCES[0]) if i not in byte_ids])
    # a generated U+FFFD looks like half a character until a token follows
    characters = st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)
    character = characters.map(lambda char: [byte_ids[byte] for byte in char.encode()])
    continuation = st.lists(st.sampled_from(byte_ids[0x80:0xC0]), min_size=1, max_size=20)
    garbage = st.tuples(word, continuation, word).map(lambda x: [x[0], *x[1], x[2]])
    parts = st.one_of(other.map(lambda i: [i]), character, garbage)
    return st.lists(parts, max_size=15).map(lambda parts: [i for part in parts for i in part])


@each_kind
@given(data=st.data())
def test_tokens_pushed_together_have_the_text_of_each(kind: str, data: st.DataObject) -> None:
    context, ids = data.draw(some_ids(kind)), data.draw(some_ids(kind))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=len(ids), max_size=len(ids)))
    stream, rest, text = load(kind)[1].stream(context), iter(ids), ""
    for size in sizes:
        copied = copy.copy(stream)
        copied.push_all(ids)  # without effect on the other
        text += stream.push_all(islice(rest, size))
    text += stream.push_all(rest)
    assert text + stream.flush() == "".join(streamed(kind, context, ids))


@each_kind
@settings(deadline=None)  # the first example makes the tokenizer
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_what_decode_adds_to_the_context(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    context, ids = data.draw(some_ids(kind)), data.draw(some_ids(kind))
    if kind not in BYTE_LEVEL and decoded(kind, context, skip).endswith(REPLACEMENT):
        context = []
    assert "".join(streamed(kind, context, ids, skip)) == added(kind, context, ids, skip)


@each_kind
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_equals_the_tokenizers(kind: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(some_ids(kind))
    assert load(kind)[1].decode(ids, skip) == decoded(kind, ids, skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", SPELL_ANY_TEXT)
def test_push_returns_complete_characters_at_once(kind: str, text: str) -> None:
    ids = encoded(kind, text)
    for before in ("", "A", "Say it: ", "日本", "\n"):
        context = encoded(kind, before)
        *pushes, flushed = streamed(kind, context, ids, skip=False)
        assert REPLACEMENT not in "".join(pushes)
        assert "".join(pushes) == added(kind, context, ids, skip=False)
        assert flushed == ""
        if kind not in BYTE_FALLBACK:
            assert "".join(pushes) == text


@pytest.mark.parametrize("kind", SPELL_ANY_TEXT)
@pytest.mark.parametrize("before", ["A", "日本", "日本の首都は東京"])
def test_character_is_returned_with_its_last_byte(kind: str, before: str) -> None:
    ids = encoded(kind, "🚀é\n")[-7:]
    assert streamed(kind, encoded(kind, before), ids) == ["", "", "", "🚀", "", "é", "\n", ""]


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *BYTE_FALLBACK, "editing"])
@pytest.mark.parametrize("before", ["is", "🚀", "\x80"])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_cut_output_ends_without_half_a_character(kind: str, before: str, kept: int) -> None:
    stream, rocket = load(kind)[1].stream(encoded(kind, "A")), encoded(kind, "🚀")[-4:]
    ids = encoded(kind, before)
    if before == "\x80":  # no character
        ids = encoded(kind, "é")[-1:]
    shown = "".join(map(stream.push, [*ids, *rocket[:kept]])) + stream.flush(cut=True)
    expected = before.replace("\x80", REPLACEMENT)
    if kind == "editing" and before == "\x80":
        expected = ""  # the bytes of its ids are not known
    assert shown.strip() == expected
    assert stream.flush(cut=True) == ""


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *BYTE_FALLBACK])
@pytest.mark.parametrize("kept", [0, 2])
def test_a_cut_output_keeps_a_generated_replacement_character(kind: str, kept: int) -> None:
    stream = load(kind)[1].stream(encoded(kind, "A"))
    ids = [*encoded(kind, REPLACEMENT)[-3:], *encoded(kind, "🚀")[-4:][:kept]]
    assert "".join(map(stream.push, ids)) + stream.flush(cut=True) == REPLACEMENT


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *BYTE_FALLBACK])
def test_context_may_end_inside_a_character(kind: str) -> None:
    rocket, delimiter = encoded(kind, "🚀")[-4:], encoded(kind, "a.")[-1]
    context = [*encoded(kind, "A"), *rocket[:2]]
    assert "".join(streamed(kind, context, [*rocket[2:], delimiter])) == "🚀."
    assert "".join(streamed(kind, context, [delimiter])) == "."
    assert "".join(streamed(kind, context, [])) == ""


def test_context_may_end_in_half_a_surrogate() -> None:
    """Python's decoder waits for a third byte, though the text is invalid already."""
    vocabulary = load("byte-level")[1]
    id_of = {vocabulary.token(i)[1]: i for i in range(360)}
    half = [id_of[b"\xed"], id_of[b"\xa0"]]
    for ids in ([], [id_of[b"\x80"]], [id_of[b"A"]], half):
        shown = "".join(streamed("byte-level", half, ids))
        assert shown == added("byte-level", half, ids)


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
@settings(deadline=None)
@given(data=st.data())
def test_returned_text_stays_when_a_run_of_bytes_turns_out_invalid(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, vocabulary = load(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=60))
    text, whole = "".join(streamed(kind, [], ids)), vocabulary.decode(ids)
    rest = iter(text)  # decode replaces whole characters of such a run, and nothing else
    assert all(char in rest for char in whole.replace(REPLACEMENT, ""))
    assert text.count(REPLACEMENT) <= whole.count(REPLACEMENT)


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_incomplete_character_keeps_the_complete_one_before_it(kind: str) -> None:
    one_and_a_half, stop = encoded(kind, "叫叫")[-6:-1], encoded(kind, "s.")[-1]
    ids = [*one_and_a_half[:4], stop, *one_and_a_half]
    *pushes, flushed = streamed(kind, encoded(kind, "A"), ids)
    assert pushes == ["", "", "叫", "", "�.", "", "", "叫", "", ""]
    assert flushed == "��"


@pytest.mark.parametrize("kind", [*BYTE_FALLBACK, "bytes in Python", "wordpiece", "editing"])
@pytest.mark.parametrize("byte", [0x41, 0x80, 0xE5])
def test_window_stays_short(kind: str, byte: int) -> None:
    tokenizer = load(kind)[0]
    vocabulary, widths = Vocabulary(tokenizer), list[int]()
    join = vocabulary._join

    def noting_join(chunks: list[Any]) -> str:
        widths.append(len(chunks))
        return join(chunks)

    vocabulary._join = noting_join
    name = f"<0x{byte:02X}>" if kind in BYTE_FALLBACK else chr(byte)
    endless = tokenizer.convert_tokens_to_ids(name)
    stream = vocabulary.stream(encoded(kind, SENTENCES[0]))
    shown = "".join(stream.push(endless) for _ in range(1000))
    if kind in BYTE_FALLBACK:
        assert 1000 - MAX_INCOMPLETE < len(shown) <= 1000
        assert max(widths) <= CONTEXT + MAX_INCOMPLETE
    assert max(widths) <= 2 * MAX_SILENT
    assert len(widths) <= 3 * 1000 + 1


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *BYTE_FALLBACK])
def test_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    _, vocabulary = load(kind)
    for text in TEXTS:
        ids = encoded(kind, text)
        shown = "".join(streamed(kind, encoded(kind, "A"), ids, skip=False))
        assert b"".join(vocabulary.token(i)[1] for i in ids) == shown.encode()
    rocket = encoded(kind, "🚀")[-4:]
    assert [vocabulary.token(i) for i in rocket] == [
        (REPLACEMENT, bytes([byte])) for byte in "🚀".encode()
    ]


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte-level", "Ġthe", " the"),
        ("byte-level", "<s>", "<s>"),
        ("byte-level", "<|end of turn|>", "<|end of turn|>"),
        ("byte-level", "two words", "two words"),
        ("llama-2", "▁the", " the"),
        ("llama-2", "▁", " "),
        ("llama-2", "<0x41>", "A"),
        ("llama-2", "</s>", "</s>"),
        ("metaspace", "▁The", " The"),
        ("wordpiece", "##s", "s"),
        ("wordpiece", "the", " the"),
        ("wordpiece", "[CLS]", "[CLS]"),
        ("end of word", "cats</w>", " cats"),
        ("stripping, in Python", "</s>", "</s>"),
        ("stripping, in Python", "▁The", " The"),
    ],
)
def test_token_text_is_that_inside_a_text(kind: str, token: str, text: str) -> None:
    tokenizer, vocabulary = load(kind)
    assert vocabulary.token(tokenizer.convert_tokens_to_ids(token)) == (text, text.encode())


@each_kind
def test_unknown_id_has_no_text(kind: str) -> None:
    tokenizer, vocabulary = load(kind)
    for unknown in (max(tokenizer.get_vocab().values()) + 1, 10**6, 2**40):
        assert vocabulary.token(unknown) == ("", b"")
        assert vocabulary.decode([unknown, unknown]) == ""
        assert streamed(kind, [unknown], [unknown]) == ["", ""]


def test_space_after_a_skipped_token_is_kept() -> None:
    the, eos = load("llama-2")[0].convert_tokens_to_ids(["▁the", "</s>"])
    assert streamed("llama-2", [], [the, eos, the]) == ["the", "", " the", ""]
    assert streamed("llama-2", [the, *[eos] * 20], [the]) == [" the", ""]
    assert streamed("llama-2", [eos], [the]) == ["the", ""]


@pytest.mark.parametrize("kind", ["byte-level", "llama-2", "wordpiece"])
def test_fast_tokenizer_is_not_used_after_init(kind: str) -> None:
    """So that other threads may set its truncation and padding."""
    tokenizer = KINDS[kind]()
    vocabulary, ids = Vocabulary(tokenizer), encoded(kind, SENTENCES[0])
    tokenizer._tokenizer = None
    stream = vocabulary.stream(ids)
    assert vocabulary.decode(ids) == decoded(kind, ids)
    assert "".join(map(stream.push, ids)) + stream.flush() == added(kind, ids, ids)


def shown_of(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[:end].removesuffix(longest), longest
    return text, None


few_letters = st.sampled_from("abcé🚀")


@given(
    parts=st.lists(st.text(few_letters, max_size=6), max_size=12),
    stops=st.lists(st.text(few_letters, min_size=1, max_size=5), max_size=4),
)
@example(parts=["ab", "c"], stops=["abcd", "bc"])
@example(parts=["abc"], stops=["bc", "abc", "ab"])
@example(parts=["a", "bc", "b", "c"], stops=["bcc", "abc"])
@example(parts=["a\n#\n", "##\n\nb"], stops=["\n\n", "###"])
@example(parts=[*"xabc"], stops=["ab", "abc"])
@example(parts=[*"xabcd"], stops=["abcd", "bc"])
@example(parts=[*"aaab"], stops=["aab"])
@pytest.mark.parametrize("shows_match", [False, True])
def test_stop_strings_match_whatever_the_chunks(
    parts: list[str], stops: list[str], shows_match: bool
) -> None:
    text = "".join(parts)
    expected, matched = shown_of(text, stops)
    if matched and shows_match:
        expected += matched
    search, shown, pushed = StopStrings(stops, shows_match), "", ""
    for part in parts:
        shown, pushed = shown + search.push(TextSpan(part)).text, pushed + part
        assert expected.startswith(shown)
        if search.matched is None:
            held = pushed.removeprefix(shown)
            assert shown + held == pushed
            assert not held or any(stop.startswith(held) and held != stop for stop in stops)
        else:
            assert shown == expected
    assert shown + search.flush().text == expected
    assert search.matched == matched
    assert search.flush().text == ""
