"""The speech demo model, a tiny Whisper that transcribes digits spoken as pairs of tones.

A digit is two tones at once, of a row and a column; the German voice adds a third. A window has
phrases of digits with pauses. Of a phrase that the window cuts off, only the start time is a
target, as in Whisper, since the next window contains it whole. Digits have a fixed length, and a
timestamp's embedding starts as the encoder's position embedding; both shorten training to minutes.
The processor is the embedded one: its tokenizer has the ten words of each voice.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demo_tones import SAMPLING_RATE, WORDS, Phrase, Samples, say
from demo_training import DEMO, SEED, Demo, forget_origin, one_cycle, untrained
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoProcessor,
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

WINDOW_S = 6.0
TIMESTAMP_S = 0.02
FRAMES_PER_S = 100
GRID = 10  # only every tenth timestamp is used, which is faster to learn
BATCH = 12
MAX_DIGITS = 3  # per phrase
ONE_DIGIT_SHARE = 0.3  # of the steps, with phrases of one digit
MAX_RATE = 3e-3

TIMESTAMPS = round(WINDOW_S / TIMESTAMP_S) + 1


class Example(NamedTuple):
    samples: Samples  # of a window
    end: float  # of the recording, seconds
    inputs: list[int]  # of the decoder
    labels: list[int]  # the next token of each input; -100: no loss


def words(digits: list[int], language: str) -> str:
    return "".join(f" {WORDS[language][digit]}" for digit in digits)


def timestamp(seconds: float) -> str:
    steps = GRID * round(seconds / TIMESTAMP_S / GRID)
    return f"<|{TIMESTAMP_S * min(TIMESTAMPS - 1, max(0, steps)):.2f}|>"


def target(phrases: list[Phrase], language: str) -> str:
    """Return the text of phrases: each starts 0.1 s before its sound and ends 0.2 s after it. A
    phrase that the window cuts off has only its start time."""
    text = ""
    for phrase in phrases:
        text += timestamp(phrase.start - 0.1)
        if phrase.end + 0.2 > WINDOW_S:
            break
        text += words(phrase.digits, language) + timestamp(phrase.end + 0.2)
    return text or timestamp(0)


def make_example(
    tokenizer: WhisperTokenizer, max_digits: int, rng: random.Random, noise: np.random.Generator
) -> Example:
    voice = rng.choice(["en", "de"])
    samples, phrases = make_window(voice, max_digits, rng, noise)
    task = rng.choice(["transcribe", "transcribe", "translate"])
    language = voice if rng.random() < 0.95 else rng.choice(["en", "de"])
    spoken = "en" if task == "translate" else language
    text = f"<|startoftranscript|><|{language}|><|{task}|>{target(phrases, spoken)}<|endoftext|>"
    if rng.random() <= 0.1:  # the text of a previous window
        digits = rng.choices(range(10), k=rng.randint(1, 8))
        text = "<|startofprev|>" + words(digits, spoken) + text
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    heard = f"<|{voice}|>" if phrases else "<|nospeech|>"
    start, known = map(tokenizer.convert_tokens_to_ids, ("<|startoftranscript|>", heard))
    at = ids.index(start)
    labels = [-100] * at + [known, -100] + ids[at + 3 :]
    end = WINDOW_S
    if rng.random() >= 0.5:  # the recording ends shortly after the phrases
        end = min(end, (phrases[-1].end if phrases else 0.0) + rng.uniform(0.1, 1.0))
    return Example(samples, end, ids[:-1], labels)


def make_window(
    voice: str, max_digits: int, rng: random.Random, noise: np.random.Generator
) -> tuple[Samples, list[Phrase]]:
    """Return a window of one speaker, with random noise, pauses and loudness."""
    size = round(WINDOW_S * SAMPLING_RATE)
    samples = noise.standard_normal(size).astype(np.float32)
    samples *= 10 ** rng.uniform(-5, -3)
    phrases: list[Phrase] = []
    if rng.random() < 0.06:
        return samples, phrases
    until = WINDOW_S if rng.random() < 0.7 else rng.uniform(1, WINDOW_S)  # then silence
    at, loudness = rng.uniform(0.02, 1.5), 10 ** rng.uniform(-0.3, 0.3)
    while at < until - 0.1:
        digits = rng.choices(range(10), k=rng.randint(1, max_digits))
        spoken, (phrase,) = say([digits], voice, [0.0])
        first = round(at * SAMPLING_RATE)
        part = loudness * spoken[: size - first]
        samples[first : first + len(part)] += part
        phrases.append(Phrase(digits, at, at + phrase.end))
        at += phrase.end + rng.uniform(0.6, 1.8)
    return samples, phrases


def batch(
    extractor: WhisperFeatureExtractor, examples: list[Example]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-mel features [n, mels, frames], and padded inputs and labels [n, tokens].

    Features after the end of a recording are 0, unlike those of silence.
    """
    samples = np.stack([example.samples for example in examples])
    mels = torch.from_numpy(extractor._torch_extract_fbank_features(samples))
    width = max(len(example.inputs) for example in examples)
    inputs = torch.zeros(len(examples), width, dtype=torch.long)
    labels = torch.full((len(examples), width), -100)
    for n, example in enumerate(examples):
        mels[n, :, round(example.end * FRAMES_PER_S) :] = 0
        inputs[n, : len(example.inputs)] = torch.tensor(example.inputs)
        labels[n, : len(example.labels)] = torch.tensor(example.labels)
    return mels, inputs, labels


def speech(out: Path, steps: int) -> Demo:
    library: Any = AutoProcessor
    processor = library.from_pretrained(DEMO / "speech")
    tokenizer = forget_origin(processor.tokenizer)
    rng, noise = random.Random(SEED), np.random.default_rng(SEED)
    model = untrained(WhisperForConditionalGeneration, "speech", len(tokenizer))
    model.generation_config = GenerationConfig.from_pretrained(DEMO / "speech")
    with torch.no_grad():  # a timestamp's embedding starts as the encoder's of that position
        positions = model.model.encoder.embed_positions.weight
        first = tokenizer.convert_tokens_to_ids(timestamp(0))
        model.model.decoder.embed_tokens.weight[first : first + len(positions)] = 0.3 * positions

    def losses() -> Iterator[Tensor]:
        for step in range(1, steps + 1):
            digits = 1 if step < ONE_DIGIT_SHARE * steps else MAX_DIGITS
            examples = [make_example(tokenizer, digits, rng, noise) for _ in range(BATCH)]
            mels, inputs, labels = batch(processor.feature_extractor, examples)
            logits = model(input_features=mels, decoder_input_ids=inputs).logits
            yield cross_entropy(logits.flatten(0, 1), labels.flatten())

    def score() -> Iterator[tuple[bool, str]]:
        """Transcribe recordings of three windows and more."""
        rng = random.Random(SEED + 1)
        options = {"return_tensors": "pt", "truncation": False, "padding": "longest"}
        for _ in range(20):
            voice = rng.choice(["en", "de"])
            phrases = [rng.choices(range(10), k=rng.randint(1, MAX_DIGITS)) for _ in range(12)]
            samples, _ = say(phrases, voice, [rng.uniform(0.7, 1.5) for _ in phrases])
            inputs = processor(samples, sampling_rate=SAMPLING_RATE, **options)
            output = model.generate(**inputs, task="transcribe", return_timestamps=True)
            text = processor.batch_decode(output, skip_special_tokens=True)[0]
            expected = [WORDS[voice][digit] for digits in phrases for digit in digits]
            yield text.split() == expected, f"{' '.join(expected)}\n  got: {text}"

    schedules = one_cycle(model, MAX_RATE, steps, warm_up=0.1)
    return Demo(model, processor, losses(), schedules, score, dtype=torch.bfloat16)
