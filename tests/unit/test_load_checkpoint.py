"""Weights are read to a GPU directly where transformers can do that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny
from worker.model import loading
from worker.model.loading import ModelOptions, load_checkpoint

GPU = torch.device("cuda")


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_are_copied_to_a_gpu_while_they_are_read(
    has_accelerate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, Any]] = []
    moved: list[torch.device] = []

    class Model(torch.nn.Module):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            moved.append(device)
            return self

    def from_pretrained(folder: str, **options: Any) -> Any:
        passed.append(options)
        return Model(), {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(loading, "choose_device", lambda name: GPU)
    monkeypatch.setattr(loading, "check_fits", lambda *_: None)
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: has_accelerate)
    auto = SimpleNamespace(from_pretrained=from_pretrained)
    folder = str(tiny.folder("llama-lm"))
    load_checkpoint(ModelOptions(folder), folder, lambda config: auto)
    [options] = passed
    assert options.get("device_map") == ({"": GPU} if has_accelerate else None)
    assert moved == ([] if has_accelerate else [GPU])
