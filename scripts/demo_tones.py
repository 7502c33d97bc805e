#!/usr/bin/env python3
"""Synthesize digits as pairs of tones, in two voices: the input of the speech demo model.

scripts/demo_tones.py talk.mp3 314 15    # two phrases, in a file of any format
"""

import argparse
from typing import NamedTuple

import environment  # noqa: F401  # first: may start the script again with .venv
import numpy as np
import soundfile
from numpy.typing import NDArray

SAMPLING_RATE = 16_000  # Hz
WORDS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
}
ROWS, COLUMNS = (420.0, 560.0, 740.0, 980.0), (1290.0, 1650.0, 2100.0)  # Hz
GERMAN_TONE = 3100.0  # Hz, added by the German voice

Samples = NDArray[np.float32]


class Phrase(NamedTuple):
    digits: list[int]
    start: float  # seconds
    end: float


def tone(digit: int, seconds: float, voice: str) -> Samples:
    """Return the samples [n] of a digit, with an amplitude of about 0.2 at most."""
    time = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    row, column = divmod(digit, 3)
    wave = sum(np.sin(2 * np.pi * hertz * time) for hertz in (ROWS[row], COLUMNS[column]))
    if voice == "de":
        wave = wave + 0.7 * np.sin(2 * np.pi * GERMAN_TONE * time)
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
    return (0.1 * fade * wave).astype(np.float32)


def say(
    phrases: list[list[int]], voice: str = "en", pauses: list[float] | None = None
) -> tuple[Samples, list[Phrase]]:
    """Return samples and times of phrases, each after a pause (by default 0.8 s), with a digit
    every half second."""
    parts, timed, at = [], [], 0.0
    for n, digits in enumerate(phrases):
        pause = 0.8 if pauses is None else pauses[n]
        parts.append(np.zeros(round(pause * SAMPLING_RATE), np.float32))
        start = at + pause
        for digit in digits:
            parts += [tone(digit, 0.35, voice), np.zeros(round(0.15 * SAMPLING_RATE), np.float32)]
        at = start + 0.5 * len(digits)
        timed.append(Phrase(digits, start, at - 0.15))
    return np.concatenate(parts), timed


def phrase(text: str) -> list[int]:
    return [int(digit) for digit in text]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write digits as tones to an audio file.")
    parser.add_argument("file", help="the format follows the suffix: .wav, .flac, .ogg or .mp3")
    parser.add_argument("phrases", metavar="DIGITS", type=phrase, nargs="+")
    parser.add_argument("--voice", choices=WORDS, default="en")
    arguments = parser.parse_args()
    samples, _ = say(arguments.phrases, arguments.voice)
    soundfile.write(arguments.file, samples, SAMPLING_RATE)


if __name__ == "__main__":
    main()
