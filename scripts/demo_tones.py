"""Digits as pairs of tones, in two voices: what the speech demo model hears, and tests say.

.venv/bin/python scripts/demo_tones.py talk.mp3 314 15    # two phrases, in a file of any format
"""

import argparse
from typing import NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 16_000  # samples a second
WORDS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
}
ROWS, COLUMNS = (420.0, 560.0, 740.0, 980.0), (1290.0, 1650.0, 2100.0)  # Hz
HUM = 3100.0  # of the German voice

Sound = NDArray[np.float32]


class Phrase(NamedTuple):
    digits: list[int]
    start: float  # seconds, of its sound
    end: float


def tone(digit: int, seconds: float, voice: str) -> Sound:
    """Samples [n] of a digit, of about 0.2 at most."""
    at = np.arange(round(seconds * RATE)) / RATE
    row, column = divmod(digit, 3)
    made = sum(np.sin(2 * np.pi * hertz * at) for hertz in (ROWS[row], COLUMNS[column]))
    if voice == "de":
        made = made + 0.7 * np.sin(2 * np.pi * HUM * at)
    ends = np.minimum(1, np.minimum(at, at[::-1]) / 0.01)
    return (0.1 * ends * made).astype(np.float32)


def say(
    phrases: list[list[int]], voice: str = "en", pauses: list[float] | None = None
) -> tuple[Sound, list[Phrase]]:
    """Phrases of digits, each after a pause (0.8 seconds), a digit every half second."""
    parts, said, at = [], [], 0.0
    for n, digits in enumerate(phrases):
        pause = 0.8 if pauses is None else pauses[n]
        parts.append(np.zeros(round(pause * RATE), np.float32))
        start = at + pause
        for digit in digits:
            parts += [tone(digit, 0.35, voice), np.zeros(round(0.15 * RATE), np.float32)]
        at = start + 0.5 * len(digits)
        said.append(Phrase(digits, start, at - 0.15))
    return np.concatenate(parts), said


def phrase(text: str) -> list[int]:
    return [int(digit) for digit in text]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write digits, as tones, to a file of sound.")
    parser.add_argument("file", help="its name says the format: .wav, .flac, .ogg or .mp3")
    parser.add_argument("phrases", metavar="DIGITS", type=phrase, nargs="+")
    parser.add_argument("--voice", choices=WORDS, default="en")
    asked = parser.parse_args()
    soundfile.write(asked.file, say(asked.phrases, asked.voice)[0], RATE)


if __name__ == "__main__":
    main()
