"""When the tokens of a window were spoken: dynamic time warping of cross-attention.

The alignment heads that the checkpoint names attend to the position in the audio. Their attention
while each token was generated is warped into a monotonic path through time, as transformers'
`generate` does with `return_token_timestamps`. Its time warping visits cell by cell, so it is
implemented here by diagonals.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.whisper.generation_whisper import _median_filter

from worker.engines.speech.whisper import WhisperRunner, WhisperWindow

ENCODER_STATE_S = 0.02  # seconds of audio per state of the encoder
FRAMES_PER_STATE = 2


class Aligner:
    """Computes token times of a finished window: implements `Align`."""

    def __init__(self, runner: WhisperRunner) -> None:
        model: Any = runner.model
        self.runner = runner
        self.filter_width: int = model.config.median_filter_width
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        later_layers = range(layers // 2, layers)
        all_heads = [(layer, head) for layer in later_layers for head in range(heads)]
        alignment_heads = getattr(model.generation_config, "alignment_heads", None)
        # the default is that of OpenAI's implementation
        self.heads: Sequence[Sequence[int]] = alignment_heads or all_heads

    def __call__(self, window: WhisperWindow) -> Callable[[], list[float]]:
        if len(window.tokens) == 1:
            return lambda: [0.0]
        weights = self._attention(window)
        return lambda: token_ends(weights, self.filter_width)

    @torch.inference_mode()
    def _attention(self, window: WhisperWindow) -> Tensor:
        """Return the attention [heads, tokens, states] of the alignment heads at each generated
        token except the last."""
        tokens = window.tokens[:-1]
        with _capture_queries(self.runner, {layer for layer, _ in self.heads}) as queries:
            self.runner.replay(window, tokens)
        states = max(1, window.audio_frames // FRAMES_PER_STATE)
        weights = []
        for layer, head in self.heads:
            keys = self.runner.cache.cross_attention[layer][0][window.row, head]
            size = keys.shape[-1]
            columns = slice(head * size, (head + 1) * size)
            query = queries[layer][0, -len(tokens) :, columns] * size**-0.5
            weights.append((query @ keys.T).softmax(-1).float()[:, :states])
        return torch.stack(weights).cpu()


@contextmanager
def _capture_queries(runner: WhisperRunner, layers: set[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the cross-attention queries [R, N, size] of these layers in a forward."""
    queries: dict[int, Tensor] = {}

    def capture(layer: int, module: Any, args: Any, output: Tensor) -> None:
        queries[layer] = output

    with ExitStack() as hooks:
        for layer in layers:
            project = runner.decoder.layers[layer].encoder_attn.q_proj
            hooks.callback(project.register_forward_hook(partial(capture, layer)).remove)
        yield queries


def token_ends(weights: Tensor, filter_width: int) -> list[float]:
    """Return where each generated token ends, in seconds of the window; the last one ends with the
    one before. `weights`: as of `_attention`."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    smooth = _median_filter((weights - mean) / std, filter_width).mean(0)
    costs = np.nan_to_num(-smooth.double().numpy())  # NaN: the std of a single token is 0
    tokens, states = warp(costs)
    jumps = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
    ends: list[float] = (states[jumps] * ENCODER_STATE_S).tolist()
    return [*ends, ends[-1]]


def warp(costs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows and columns of the cheapest path through costs [N, M] from the first corner
    to the last, with steps by one in one or both directions."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):  # cells of a diagonal are independent
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        cheapest = np.minimum(np.minimum(total[i - 1, j - 1], total[i - 1, j]), total[i, j - 1])
        total[i, j] = costs[i - 1, j - 1] + cheapest
    path = []
    row, column = rows, columns
    while row:
        path.append((row - 1, column - 1))
        both, up, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        if both < min(up, left):
            row, column = row - 1, column - 1
        elif up < min(both, left):
            row -= 1
        else:
            column -= 1
    forward = np.array(path[::-1])
    return forward[:, 0], forward[:, 1]
