"""The answer to a question and its confidence, from the probabilities of the options.

Confidence is 0 for equal probabilities and 1 for certainty, as in transformers' `decision`
pipeline.
"""

from collections.abc import Sequence


def likeliest(probabilities: Sequence[float]) -> int:
    """Return the index of the highest probability, the first of equals."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Return how far the highest probability is above an equal share."""
    share = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - share) / (1 - share)) if share < 1 else 1.0


def score_confidence(probabilities: Sequence[float]) -> float:
    """Return 1 - d/u: d is the mean distance of levels from the likeliest, u that of equal
    probabilities from the middle level."""
    count, best = len(probabilities), likeliest(probabilities)
    distance = sum(
        probability * abs(level - best) for level, probability in enumerate(probabilities)
    )
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform) if uniform else 1.0


def mean_level(probabilities: Sequence[float]) -> float:
    """Return the expected level; levels count from 0."""
    return sum(level * probability for level, probability in enumerate(probabilities))
