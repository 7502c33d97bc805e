"""What the bits of a KV cache depend on, as a digest: keys and values that another process has
stored are read only where this one would compute the same."""

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from batching.sequence import Form
from worker.backends.native_attention import cpu_features
from worker.model.language_model import LanguageModel
from worker.model.paged_runner import PagedRunner, PromptRun, chunk_steps

PROBE_TOKENS = 49
SAMPLES = 4096  # bytes of each tensor
CODE = ("batching", "worker")  # packages, of which some compute keys and values
# They decode media, and compute the features of which the encoders make keys and values.
MEDIA_PACKAGES = ("av", "numpy", "pillow", "soundfile", "soxr", "torchvision")


def weights_digest(weights: Mapping[str, Tensor]) -> bytes:
    """Return a digest of all weights: of the name, dtype and shape of each, of samples, and of the
    sum of all its bytes as integers, which reading takes no longer than memory does."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        content = tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy()
        words = content[: len(content) // 8 * 8].view(np.int64)
        digest.update(words.sum(dtype=np.int64).tobytes())
        digest.update(content[:: max(1, len(content) // SAMPLES)].tobytes())
        digest.update(content[-8:].tobytes())
    return digest.digest()


@cache
def code_digest() -> bytes:
    """Return a digest of this version's code."""
    root, digest = Path(__file__).parents[2], blake2b(digest_size=16)
    for folder in CODE:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.digest()


def media_versions() -> list[tuple[str, str]]:
    """Return the packages on which the features of media depend, with their versions."""
    found = (package for name in MEDIA_PACKAGES for package in metadata.distributions(name=name))
    return [(package.name, package.version) for package in found]


def form_digest(runner: PagedRunner, form: Form, model: Callable[..., Any]) -> bytes:
    """Return a digest of the logits of a fixed prompt, in chunks and one token alone: it tells
    forms of the model apart, and kernels that depend on the machine or its memory."""
    language = runner.language
    prompts = language.random_prompts([min(PROBE_TOKENS, language.context - 1)])
    run = PromptRun(language, prompts, runner.backend(form), model)
    [logits] = run.run(chunk_steps(prompts, [len(prompts[0]) // 2]))
    content = logits.cpu().contiguous().view(torch.uint8).numpy()
    return blake2b(content.tobytes(), digest_size=16).digest()


def fingerprint(language: LanguageModel, *settings: object) -> bytes:
    """Return a digest of the weights, the configuration, the layout of the cache, the code and the
    machine. `settings`: what else changes the bits."""
    parts = (
        language.digest, language.model.config.to_json_string(), language.dtype, language.context,
        language.layers, language.windows, language.states, language.deterministic, settings,
        code_digest(), torch.__version__, transformers.__version__, torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(), cpu_features(),
    )  # fmt: skip
    return blake2b(repr(parts).encode(), digest_size=16).digest()
