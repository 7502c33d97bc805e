"""How many prompt tokens a step takes: many while nobody streams, few enough not to stall streams.

Learned from the steps' own times. What a prompt token adds to a step is what counts, not its share
of the whole: a small step is mostly the weights being read, and steps must not shrink for that.
"""

# Prompt tokens of a step while nobody streams, and at least while somebody does.
MOST = {"cpu": 512, "cuda": 8192}
LEAST = 32
# The same where prompts run whole, padding included: those of a step stay together.
MOST_WHOLE = {"cpu": 4096, "cuda": 32768}
# While somebody streams, prompts should not make a step longer by more than this.
LONGER_S = 0.3
NEW_SHARE = 0.3  # of the latest step in what was learned


class PrefillBudget:
    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        self._most = (MOST_WHOLE if whole_prompts else MOST)[device_type]
        self._decode_s = 0.0  # a step without prompts
        self._token_s = 0.0  # what a prompt token adds

    def prompt_tokens(self, streaming: bool) -> int:
        """For the next step."""
        if not streaming or not self._token_s:
            return self._most
        return max(LEAST, min(self._most, int(LONGER_S / self._token_s)))

    def learn(self, prompt: int, others: int, seconds: float) -> None:
        """A step of so many prompt tokens and other rows took so long."""
        if not prompt:
            self._decode_s = _mean(self._decode_s, seconds)
        elif prompt >= LEAST:
            more_s = max(0.0, seconds - self._decode_s) if others else seconds
            self._token_s = _mean(self._token_s, more_s / prompt)


def _mean(known: float, new: float) -> float:
    return known + (NEW_SHARE if known else 1.0) * (new - known)
