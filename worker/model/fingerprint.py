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
from torch import Tensor

from batching.sequence import Form
from worker.backends.native_attention import cpu_features
from worker.model.paged_runner import PagedRunner, PromptRun, chunk_steps

PROBE_TOKENS = 49
SAMPLES = 4096  # bytes of each tensor
CODE = ("batching", "worker")  # packages, of which some compute keys and values
# They compute, or decode the media of whose features the encoders make keys and values.
PACKAGES = (
    "torch", "transformers", "torchvision", "numpy", "av", "pillow", "soundfile", "soxr", "triton",
)  # fmt: skip


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
    root, digest = Path(__file__).parents[2], blake2b(digest_size=16)
    for folder in CODE:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.digest()


def versions() -> list[tuple[str, str]]:
    """Return the packages on which numbers depend, with their versions."""
    found = (package for name in PACKAGES for package in metadata.distributions(name=name))
    return [(package.name, package.version) for package in found]


def record_forms(runner: PagedRunner, *settings: object) -> Mapping[Form, bytes]:
    """Return digests by form of the model, each of which is added once the form is complete: of the
    weights, the configuration, the layout of the cache, the code and the machine, and of the logits
    of a fixed prompt, in chunks and one token alone. These tell apart kernels that depend on the
    machine or its memory. `settings`: what else changes the bits."""
    language, forms = runner.language, dict[Form, bytes]()
    parts = (
        language.digest, language.model.config.to_json_string(), language.dtype, language.context,
        language.layers, language.windows, language.states, language.deterministic, settings,
        [*map(bool, runner.cache.panels)], code_digest(), versions(), torch.__config__.show(),
        cpu_features(),
        language.device.type == "cuda" and torch.cuda.get_device_name(language.device),
    )  # fmt: skip

    def record(form: Form, model: Callable[..., Any]) -> None:
        prompts = language.random_prompts([min(PROBE_TOKENS, language.context - 1)])
        run = PromptRun(language, prompts, runner.backend(form), model)
        [logits] = run.run(chunk_steps(prompts, [len(prompts[0]) // 2]))
        content = logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        forms[form] = blake2b(repr(parts).encode() + content, digest_size=16).digest()

    runner.record_form = record
    return forms
