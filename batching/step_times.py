"""The clock of a model's steps: what a step costs, by the times of earlier ones.

    seconds = constant_s + tokens · token_s + rows · row_s + keys · key_s

where tokens are those of prompts (or of a batch), rows are of sequences that decode, and keys are
read by the tokens. The batcher cuts batches by it, the scheduler sizes the prompts of a step, and
speculation weighs drafts. Owned by the worker's thread: its callers measure.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

# The longest time that a batch computes while other models have work, and otherwise: a request for
# the same model that arrives meanwhile waits for its end.
MAX_TURN_S, MAX_TURN_ALONE_S = 0.2, 0.3
# A batch of so many tokens, or of one image, is hardly slower per token than a larger one. Without
# work of other models it is not cut.
EFFICIENT_TOKENS = 512
# The factor of a step's weight with each later one, and how many times its expected time a step
# counts at most: other threads may have delayed it.
DECAY, MAX_SLOWDOWN = 0.98, 4
# Assumed until steps of different sizes show more: a row adds this part of the constant time, as
# sure as one step that is as far from the mean as the mean from zero; tokens take all of a step,
# hardly sure.
ROW_SHARE = 0.02
TOKEN_WEIGHT = 0.01
# Limits of a step's prompt tokens, by device.
MAX_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
MAX_PREFILL_TOKENS_WHOLE = {"cpu": 4096, "cuda": 32768}
# The longest time that prompts add to a step, and the fewest of their tokens in it: while sequences
# decode, and while none does. A GPU computes a few thousand in its time, which is enough to use it.
MAX_PREFILL_S = {"cpu": 0.2, "cuda": 0.1}
MIN_PREFILL_TOKENS = 32
MIN_PREFILL_TOKENS_ALONE = {"cpu": 512, "cuda": 8192}
# More than the latter run hardly faster each: a step has more only while prompts add less than this
# to it, since a request that arrives waits for its end. Prompts that run whole are not limited.
MAX_LARGE_PREFILL_S = 0.05


class StepTimes:
    """A least-squares fit over steps, of which later ones weigh more. The times are zero before the
    first step."""

    def __init__(self) -> None:
        # over steps: of the products of 1, tokens, rows and keys with each other and with seconds
        self._sums = [[0.0] * 5 for _ in range(4)]
        self._tokens_s = 0.0  # of steps with tokens
        self.constant_s = self.row_s = 0.0
        self._mean_token_s = self._last_token_s = 0.0  # the second: of the last step with prompts

    def learn(self, tokens: int, rows: int, seconds: float, keys: float = 0.0) -> None:
        expected_s = self.constant_s + tokens * self.token_s + rows * self.row_s
        if expected_s and (self.token_s or not tokens):
            seconds = min(seconds, MAX_SLOWDOWN * expected_s)
        step = (1.0, tokens, rows, keys, seconds)
        self._sums = [
            [DECAY * old + value * other for old, other in zip(sums, step, strict=True)]
            for sums, value in zip(self._sums, step, strict=False)
        ]
        self._tokens_s = DECAY * self._tokens_s + (seconds if tokens else 0.0)
        self._fit()
        if tokens >= MIN_PREFILL_TOKENS:
            self._last_token_s = (seconds - self.constant_s - rows * self.row_s) / tokens

    @property
    def token_s(self) -> float:
        """The time that a token adds. Later chunks of a prompt read more keys than the mean."""
        return max(self._mean_token_s, self._last_token_s)

    @property
    def spare_rows(self) -> float:
        """How many rows take as long as a step's constant part."""
        if not self._sums[0][0]:
            return 1 / ROW_SHARE
        return self.constant_s / self.row_s if self.row_s else math.inf

    @property
    def has_rows(self) -> bool:
        return self._sums[0][2] > 0

    def fitting(self, sizes: Sequence[int], max_turn_s: float, layers: int = 1) -> int:
        """Return how many of a batch's first rows run within a turn, at least one. `sizes`: the
        tokens of each row. `layers`: the parts of the batch, each of which may take a turn."""
        min_tokens = EFFICIENT_TOKENS if max_turn_s > MAX_TURN_S else 0
        left_s = max_turn_s * layers - self.constant_s
        fits = (
            tokens <= min_tokens or tokens * self.token_s <= left_s for tokens in accumulate(sizes)
        )
        return max(1, sum(fits))

    def _fit(self) -> None:
        """Solve for the times. Where noise makes one negative, it is zero, and tokens take all of
        the steps that have some."""
        steps, tokens, rows, _, seconds = self._sums[0]
        system = [sums.copy() for sums in self._sums]
        for n in range(4):
            system[n][n] *= 1 + 1e-9  # a few steps leave a time open
        row_weight = (rows / steps) ** 2
        system[2][2] += row_weight
        system[2][4] += row_weight * seconds / (steps / ROW_SHARE + rows)
        token_s = 0.0
        if tokens:
            token_s, token_weight = self._tokens_s / tokens, TOKEN_WEIGHT * (tokens / steps) ** 2
            system[1][1] += token_weight
            system[1][4] += token_weight * token_s
        assumed = (0.0, token_s, 0.0, 0.0)
        fitted = [n for n in range(4) if system[n][n]]
        times = solve(system, fitted, assumed)
        while negative := [n for n in fitted if times[n] < 0]:
            fitted = [n for n in fitted if n not in negative]
            times = solve(system, fitted, assumed)
        self.constant_s, self._mean_token_s, self.row_s, _ = times


def solve(
    system: Sequence[Sequence[float]], unknown: Sequence[int], given: Sequence[float]
) -> list[float]:
    """Solve a positive definite linear system, whose rows end with their right sides, by Gaussian
    elimination. Unknowns that are not in `unknown` have a `given` value."""
    rows = {n: list(system[n]) for n in unknown}
    for row in rows.values():
        row[-1] -= sum(row[m] * value for m, value in enumerate(given) if m not in rows)
    for n, row in rows.items():
        for m in unknown[unknown.index(n) + 1 :]:
            factor = rows[m][n] / row[n]
            rows[m] = [a - factor * b for a, b in zip(rows[m], row, strict=True)]
    solution = list(given)
    for n in reversed(unknown):
        known = sum(rows[n][m] * solution[m] for m in unknown if m > n)
        solution[n] = (rows[n][-1] - known) / rows[n][n]
    return solution


class PrefillBudget:
    """Chooses the number of prompt tokens of a step: few enough not to stall streams."""

    def __init__(self, device_type: str, whole_prompts: bool = False) -> None:
        limits = MAX_PREFILL_TOKENS_WHOLE if whole_prompts else MAX_PREFILL_TOKENS
        self.times = StepTimes()
        self.max_tokens = limits[device_type]
        self._max_s = MAX_PREFILL_S[device_type]
        self._whole_prompts = whole_prompts
        self._min_unmeasured = MIN_PREFILL_TOKENS_ALONE[device_type]
        self._min_alone = self.max_tokens if whole_prompts else self._min_unmeasured

    def prompt_tokens(
        self, streaming: bool, spent_s: float = 0.0, max_turn_s: float = math.inf
    ) -> int:
        """Return the next step's budget. `streaming`: sequences are decoding, or other models
        have work. `spent_s`: time that the step has taken already; `max_turn_s`: that it should
        take at most."""
        token_s = self.times.token_s
        left_s = max(0.0, min(self._max_s, max_turn_s) - spent_s)
        fitting = int(left_s / token_s) if token_s else 0
        minimum = self._min_alone
        if token_s:
            in_turn = max(MIN_PREFILL_TOKENS, int(MAX_TURN_ALONE_S / token_s))
            minimum = (max if self._whole_prompts else min)(self._min_unmeasured, in_turn)
        if streaming:
            minimum = MIN_PREFILL_TOKENS if token_s else self._min_unmeasured
        limit = self.max_tokens
        if token_s and not self._whole_prompts:
            limit = min(limit, max(self._min_unmeasured, int(MAX_LARGE_PREFILL_S / token_s)))
        return min(limit, max(minimum, fitting))

    def doubling_tokens(self, rows: int) -> int:
        """The prompt tokens that take as long as a step of so many rows, or a few more; not limited
        where no sequence has ever decoded."""
        times = self.times
        if not times.has_rows:
            return self.max_tokens
        seconds = times.constant_s + rows * times.row_s
        return max(MIN_PREFILL_TOKENS, int(seconds / times.token_s) if times.token_s else 0)
