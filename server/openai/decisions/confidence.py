"""From the probabilities of a question's options to one answer and how sure it
is: 0 for options all alike, 1 for certainty. As transformers' `decision` pipeline has it.
"""

from collections.abc import Sequence


def likeliest(probabilities: Sequence[float]) -> int:
    """The first of those that are."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def of_choice(probabilities: Sequence[float]) -> float:
    """How far the best is above its share."""
    share = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - share) / (1 - share)) if share < 1 else 1.0


def of_score(probabilities: Sequence[float]) -> float:
    """How near to the likeliest level the others are, beside levels all alike around their
    middle."""
    count, best = len(probabilities), likeliest(probabilities)
    distance = sum(each * abs(level - best) for level, each in enumerate(probabilities))
    alike = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / alike) if alike else 1.0


def mean_level(probabilities: Sequence[float]) -> float:
    """Levels count from 0."""
    return sum(level * each for level, each in enumerate(probabilities))
