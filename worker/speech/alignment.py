"""When the tokens of a window were said: dynamic time warping of cross-attention.

The heads that the checkpoint names look at where in the sound they are; what they looked at while
each token was there is warped into a path through time, as transformers' `generate` does.
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

from worker.speech.whisper import WhisperRunner, Window

# A state of the encoder lasts so long.
STATE_S = 0.02


class Aligner:
    """Of a window that has ended. `frames` of it are sound."""

    def __init__(self, runner: WhisperRunner) -> None:
        model: Any = runner.model
        self.runner = runner
        self.width: int = model.config.median_filter_width
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        later = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
        named = getattr(model.generation_config, "alignment_heads", None)
        self.heads: Sequence[Sequence[int]] = named or later  # as OpenAI's do without

    def __call__(self, window: Window) -> Callable[[], list[float]]:
        """On the worker's thread, as it runs the decoder; what is left is for a pool thread: the
        seconds of the window where each of its tokens ends."""
        if len(window.said) == 1:
            return lambda: [0.0]
        weights = self._attention(window)
        return lambda: token_ends(weights, self.width)

    @torch.inference_mode()
    def _attention(self, window: Window) -> Tensor:
        """[heads, tokens, states]: where each head looked while each token that was said was there,
        but for the last."""
        said = window.said[:-1]
        with _watched(self.runner, {layer for layer, _ in self.heads}) as queries:
            self.runner.replay(window, said)
        weights = []
        for layer, head in self.heads:
            keys = self.runner.cache.cross[layer][0][window.row, head]
            size = keys.shape[-1]
            query = queries[layer][0, -len(said) :, head * size : (head + 1) * size] * size**-0.5
            looked = (query @ keys.T).softmax(-1).float()
            weights.append(looked[:, : max(1, window.frames // 2)])
        return torch.stack(weights).cpu()


@contextmanager
def _watched(runner: WhisperRunner, layers: set[int]) -> Iterator[dict[int, Tensor]]:
    """What cross-attention in these layers asked for, [R, N, size] each, in a forward."""
    queries: dict[int, Tensor] = {}

    def watch(layer: int, module: Any, args: Any, output: Tensor) -> None:
        queries[layer] = output

    with ExitStack() as hooks:
        for layer in layers:
            project = runner.decoder.layers[layer].encoder_attn.q_proj
            hooks.callback(project.register_forward_hook(partial(watch, layer)).remove)
        yield queries


def token_ends(weights: Tensor, width: int) -> list[float]:
    """Seconds of the window where each token that was said ends, the last as the one before.
    `weights` as above, `width` of the median filter."""
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    smooth = _median_filter((weights - mean) / spread, width).mean(0)
    tokens, states = warp(np.nan_to_num(-smooth.double().numpy()))  # of one token, all is 0 / 0
    jumps = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
    ends: list[float] = (states[jumps] * STATE_S).tolist()
    return [*ends, ends[-1]]


def warp(costs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest path through costs [N, M] from the first corner to the last, a step in one or
    both directions at a time: the rows and the columns it goes through. By diagonals, each at once.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        least = np.minimum(np.minimum(total[i - 1, j - 1], total[i - 1, j]), total[i, j - 1])
        total[i, j] = costs[i - 1, j - 1] + least
    path = []
    at, to = rows, columns
    while at:
        path.append((at - 1, to - 1))
        both, row, column = total[at - 1, to - 1], total[at - 1, to], total[at, to - 1]
        if both < min(row, column):
            at, to = at - 1, to - 1
        elif row < min(both, column):
            at -= 1
        else:
            to -= 1
    turned = np.array(path[::-1])
    return turned[:, 0], turned[:, 1]
