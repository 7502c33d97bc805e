"""A part of a text to speak, and its audio. No torch."""

from dataclasses import dataclass

import numpy as np

from worker.messages.protocol import PipelineInput

DEFAULT_VOICE = "default"  # the first one of a model, or its only one


@dataclass(frozen=True, slots=True)
class SpeechInput(PipelineInput):
    """One sentence of `/v1/audio/speech`, whose output is a SpokenAudio. `is_part`: of a text with
    others; it is silent if the model has no tokens for it, such as digits."""

    is_part: bool = False


@dataclass(frozen=True, slots=True)
class SpokenAudio:
    """The audio of a sentence: mono int16 samples [n]."""

    samples: np.ndarray
    rate: int  # samples a second
    tokens: int  # of the text
