"""The compiled model: made in a thread of its own while the plain one serves.

One graph for any number of tokens, since attention and its memory are opaque to the compiler, and
one for a single token; on a CPU weights are constants in it, those of packed layers the same.
The output head stays outside: its number of rows changes with every step.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor

from worker.model.language_model import LanguageModel
from worker.model.paged_attention import PagedCache, Step

log = logging.getLogger("onequeue.compiling")

# Numbers of tokens that the graphs are made and checked with: several, then one.
WIDTHS = (24, 7, 1)


def compile_in_background(language: LanguageModel, done: Callable[[bool], None]) -> None:
    """`done(True)` once `language.call` is the compiled model, `done(False)` if there is none."""
    thread = threading.Thread(target=_compile, args=(language, done), name="compile", daemon=True)
    thread.start()


def _compile(language: LanguageModel, done: Callable[[bool], None]) -> None:
    started = time.monotonic()
    try:
        torch.set_num_threads(torch.get_num_threads())  # this thread's own count
        with inductor.patch(freezing=language.device.type == "cpu"):
            twin = _twin(language.model)
            _check(language, twin)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("not compiled, serving goes on as it is: %s", first[:300])
        done(False)
    else:
        language.call = twin
        log.info("compiled seconds=%.0f", time.monotonic() - started)
        done(True)


def _twin(model: Any) -> Any:
    """The same modules and weights, with the body's forward compiled."""
    body = copy.copy(model.base_model)
    body.forward = torch.compile(model.base_model.forward, dynamic=True)
    twin = copy.copy(model)
    twin._modules = {
        name: body if child is model.base_model else child for name, child in model._modules.items()
    }
    return twin


def _check(language: LanguageModel, twin: nn.Module) -> None:
    """Run both on the same steps; raises if they differ."""
    cache = PagedCache(language.layers, 2, language.dtype, language.device)
    for width in WIDTHS:
        step = Step(cache, [([0, 1], 0, width)], language.dtype)
        ids = [1 + 7 * n % (language.vocab_size - 1) for n in range(width)]
        own = language.forward(step, ids, range(width))
        language.compare(language.forward(step, ids, range(width), twin), own)
