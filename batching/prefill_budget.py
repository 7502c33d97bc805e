"""How many prompt tokens a step takes: as many as pay, few enough not to stall streams. Learned
from the times of steps; no clock here.
"""

# Prompt tokens of a step; where prompts run whole, with their padding.
MOST = {"cpu": 2048, "cuda": 8192}
MOST_WHOLE = {"cpu": 4096, "cuda": 32768}
# No more than make a step so much longer, but at least so many while somebody streams, and so many
# while nobody does.
LONGER_S, LEAST = 0.3, 32
LEAST_ALONE = {"cpu": 512, "cuda": 8192}
NEW_SHARE = 0.3  # of the latest step in what was learned of their times


class PrefillBudget:
    """How many prompt tokens a step takes, learned from the steps' times: as many as pay, few
    enough not to stall streams. What a prompt token adds is what counts, not its share of the
    whole: a small step is mostly the weights being read, and must not shrink for that."""

    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        self._most = (MOST_WHOLE if whole_prompts else MOST)[device_type]
        self._least_alone = self._most if whole_prompts else LEAST_ALONE[device_type]
        self.decode_s = 0.0  # the last step without prompts: whoever times it says so
        self._token_s = 0.0  # what a prompt token adds

    def prompt_tokens(self, streaming: bool, spent_s: float = 0.0) -> int:
        """For the next step, which is so much longer already."""
        left_s = max(0.0, LONGER_S - spent_s)
        fitting = int(left_s / self._token_s) if self._token_s else 0
        least = LEAST if streaming and self._token_s else self._least_alone
        return min(self._most, max(least, fitting))

    def learn(self, prompt: int, others: int, seconds: float) -> None:
        """A step of so many prompt tokens and other rows took so long."""
        if prompt >= LEAST:
            more_s = max(0.0, seconds - self.decode_s) if others else seconds
            share = NEW_SHARE if self._token_s else 1.0
            self._token_s += share * (more_s / prompt - self._token_s)
