"""Checkpoints that other programs have quantized, and bitsandbytes: served as transformers loads
them, or refused in one sentence."""

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import tiny_decoders
from tests.generating import generate, prompts, request, serve
from tests.quantized import (
    COMPRESSED,
    DEMO,
    FP8,
    write_compressed,
    write_config,
    write_fp8,
    write_gguf,
    write_mxfp4,
)
from worker.generation.engine import GenerationEngine
from worker.generation.loading import load_generator
from worker.model import quantization
from worker.model.cpu import linear
from worker.model.language_model import GeneratorOptions
from worker.model.loading import LoadingFailed, needed_bytes

CPU = torch.device("cpu")


def load(model: Path, **options: Any) -> GenerationEngine:
    given: dict[str, Any] = {"dtype": "float32", "compile": "off", **options}
    return load_generator(GeneratorOptions(str(model), device="cpu", kv_cache_gb=0.01, **given))


def refusal(model: Path, **options: Any) -> str:
    with pytest.raises(LoadingFailed) as failed:
        load(model, **options)
    return str(failed.value)


def assert_served(generator: GenerationEngine, reference: Any) -> None:
    """Compare greedy outputs with those of transformers' own load, token for token."""
    assert generator.info.batching == "continuous", generator.info.why
    reference.generation_config.eos_token_id = None
    asked = prompts(1, [3, 20, 41], count=1)
    served, _ = serve(generator, [request(prompt) for prompt in asked])
    for one, prompt in zip(served, asked, strict=True):
        assert one.ids == generate(reference.eval(), [prompt], 12)


def reference_of(folder: Path, **more: Any) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)


# ── what this environment does not have ──


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 4}, "with gptq, which needs gptqmodel and optimum: pip"),
        ({"quant_method": "awq", "bits": 4}, "with awq, which needs accelerate and gptqmodel: pip"),
        (FP8, "with fp8, which needs accelerate: pip install accelerate, or use"),
        (COMPRESSED, "which needs compressed-tensors: pip install compressed-tensors, or use"),
        ({"load_in_4bit": True}, "which needs accelerate and bitsandbytes: pip install accelerate"),
        ({"quant_method": "hqq", "bits": 4}, "with hqq, which is not available on cpu here: "),
        ({"quant_method": "spqr"}, "with spqr, which is not available on cpu here: "),
        ({"quant_method": "zip"}, "which this transformers does not know: update it, or use a"),
        ({"quant_method": "exl3"}, "which this transformers does not know: update it, or use a"),
    ],
)
def test_a_method_that_is_not_available_is_refused_in_one_sentence(
    section: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    refused = refusal(write_config(tmp_path / "model", section))
    assert f"could not be loaded for chat: its weights are quantized with {''}" in refused
    assert sentence in refused
    assert "\n" not in refused


@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-4bit"])
def test_bitsandbytes_that_is_missing_is_named_with_its_extra(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    refused = refusal(DEMO, quantization=kind)
    needs = f"QUANTIZATION={kind}, which needs accelerate and bitsandbytes: pip install 'onequeue"
    assert needs in refused


def test_gguf_without_its_packages_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    monkeypatch.setattr("worker.model.loading.check_fits", lambda *_: None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "which needs accelerate and gguf: pip install accelerate gguf, or" in refusal(file)


@pytest.mark.parametrize("size", [4, 12, 24, 200])
def test_a_damaged_gguf_file_is_refused_in_one_sentence(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes((b"GGUF" + bytes([3, 0, 0, 0]) + bytes(range(1, 200)))[:size])
    refused = refusal(file)
    assert refused.endswith(("model.gguf is damaged: download it again", "in its metadata."))
    assert "\n" not in refused


# ── served ──


def needs(*packages: str) -> Callable[[Any], Any]:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@needs("accelerate")
def test_fp8_is_served_as_transformers_loads_it(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "model")
    assert_served(load(folder), reference_of(folder))


@needs("compressed_tensors")
def test_compressed_tensors_are_served_dequantized(tmp_path: Path) -> None:
    folder, reference = write_compressed(tmp_path / "model"), reference_of(DEMO)
    stored = load_file(folder / "model.safetensors")
    for name, weight in reference.state_dict().items():
        if (scale := stored.get(f"{name}_scale")) is not None:
            weight.copy_(stored[name].float() * scale)
    assert_served(load(folder), reference)


def test_mxfp4_is_served_as_transformers_loads_it(tmp_path: Path) -> None:
    """Without accelerate: the experts are dequantized."""
    folder = write_mxfp4(tmp_path / "model", tiny_decoders.folder("gpt-oss"))
    dequantized = reference_of(folder, quantization_config=quantization_config("Mxfp4Config"))
    assert_served(load(folder), dequantized)


def quantization_config(name: str) -> Any:
    import transformers

    return getattr(transformers, name)(dequantize=True)


@needs("accelerate", "gguf")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_is_served_as_transformers_loads_it(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "demo.gguf", kind)
    generator = load(file)
    assert_served(generator, reference_of(tmp_path, gguf_file=file.name))
    assert generator.runner.language.tokenizer.chat_template


@needs("accelerate", "gguf")
def test_the_weights_of_a_gguf_file_can_be_quantized_again(tmp_path: Path) -> None:
    generator = load(write_gguf(tmp_path / "demo.gguf"), dtype="bfloat16", quantization="int8")
    assert generator.info.batching == "continuous", generator.info.why


@needs("accelerate", "gguf")
def test_memory_for_a_gguf_file_is_that_of_its_dequantized_weights(tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "demo.gguf", "Q4_0"))
    whole = needed_bytes(str(DEMO), "chat", "bfloat16", CPU)
    assert needed_bytes(file, "chat", "bfloat16", CPU) == pytest.approx(whole, rel=0.1)


@needs("accelerate", "bitsandbytes")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-4bit"])
def test_bitsandbytes_is_served_in_continuous_batches(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "MIN_TIMED_WEIGHTS", 1)
    with caplog.at_level(logging.INFO, "onequeue"):
        generator = load(DEMO, dtype=dtype, quantization=kind)
    assert f"time of bitsandbytes products relative to {dtype}: rows=1 factor=" in caplog.text
    assert generator.info.batching == "continuous", generator.info.why
    served, _ = serve(generator, [request("The capital of Japan is")])
    assert len(served[0].ids[0]) == 12


def test_memory_for_fp8_is_that_of_its_dequantized_weights(tmp_path: Path) -> None:
    folder = str(write_fp8(tmp_path / "model"))
    whole = needed_bytes(str(DEMO), "chat", "bfloat16", CPU)
    assert needed_bytes(folder, "chat", "bfloat16", CPU) == pytest.approx(whole, rel=0.1)
