"""Checkpoints that other programs have quantized, and bitsandbytes: served as transformers loads
them, or refused in one sentence."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import generating, tiny_decoders
from tests.generating import generate, prompts, reference_of, request, serve
from tests.matrix import matrix
from tests.quantized import (
    COMPRESSED,
    DEMO,
    FP8,
    write_awq,
    write_compressed,
    write_config,
    write_fp8,
    write_gguf,
    write_gptq,
    write_mxfp4,
)
from worker.backends import quantization
from worker.engines.generation.engine import GenerationEngine
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.loading import LoadingFailed, checkpoint_path, needed_bytes

CPU = torch.device("cpu")


def load(model: Path, **options: Any) -> GenerationEngine:
    return generating.load(model, **{"compile": "off", **options})


def refusal(model: Path, **options: Any) -> str:
    with pytest.raises(LoadingFailed) as failed:
        load(model, **options)
    return str(failed.value)


def assert_served(generator: GenerationEngine, reference: Any) -> None:
    """Compare greedy outputs with those of transformers' own load, token for token."""
    assert generator.info.batching == "continuous", generator.info.why
    asked = prompts(1, [3, 20, 41], count=1)
    served, _ = serve(generator, [request(prompt) for prompt in asked])
    for one, prompt in zip(served, asked, strict=True):
        assert one.ids == generate(reference, [prompt], 12)


# ── what this environment does not have ──


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"quant_method": "gptq", "bits": 3},
            "on cpu here: its bits 3 cannot be read, only 2, 4, 8",
        ),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "its format 'marlin' cannot be"),
        ({"quant_method": "awq", "bits": 8}, "its bits 8 cannot be read, only 4"),
        ({"quant_method": "awq", "version": "gemv"}, "its format 'gemv' cannot be read, only gemm"),
        (FP8, "fp8, which is not available on cpu here: Loading an FP8 quantized model requires"),
        (COMPRESSED, "install it with `pip install compressed-tensors"),
        ({"load_in_4bit": True}, "with bitsandbytes, which is not available on cpu here: "),
        ({"quant_method": "hqq", "bits": 4}, "with hqq, which is not available on cpu here: "),
        ({"quant_method": "spqr"}, "with spqr, which is not available on cpu here: "),
    ],
)
def test_a_method_that_is_not_available_is_refused_in_one_sentence(
    section: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("finegrained_fp8", "bnb_4bit"):
        module = f"transformers.quantizers.quantizer_{name}"
        monkeypatch.setattr(f"{module}.is_accelerate_available", lambda: False)
    refused = refusal(write_config(tmp_path / "model", section))
    assert f"could not be loaded for chat: its weights are quantized with {''}" in refused
    assert sentence in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("gptq", "is not an object: download it again"),
        (["gptq"], "is not an object: download it again"),
        ({}, "has no quant_method: use a"),
        ({"bits": 4}, "has no quant_method: use a"),
        ({"quant_method": "zip"}, "is invalid for zip: Unknown quantization type"),
        ({"quant_method": "gptq"}, "is invalid for gptq: "),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "is invalid for gptq: "),
        ({"quant_method": "awq", "version": 3}, "is invalid for awq: "),
    ],
)
def test_a_malformed_quantization_config_is_refused_in_one_sentence(
    section: Any, sentence: str, tmp_path: Path
) -> None:
    refused = refusal(write_config(tmp_path / "model", section))
    assert f"the quantization_config in its config.json {sentence}" in refused
    assert "\n" not in refused


@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-4bit"])
def test_bitsandbytes_that_is_missing_is_named_with_its_extra(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    refused = refusal(DEMO, quantization=kind)
    assert f"QUANTIZATION={kind} needs bitsandbytes: pip install 'onequeue[bnb]'" in refused


@pytest.mark.parametrize("size", [4, 12, 24, 200])
def test_a_damaged_gguf_file_is_refused_in_one_sentence(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes((b"GGUF" + bytes([3, 0, 0, 0]) + bytes(range(1, 200)))[:size])
    refused = refusal(file)
    assert refused.endswith(("model.gguf is damaged: download it again", "in its metadata."))
    assert "\n" not in refused


# ── served ──


def needs(*packages: str) -> pytest.MarkDecorator:
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


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (write_gptq, {}),
        (write_gptq, {"format": "gptq_v2"}),
        (write_gptq, {"desc_act": True}),
        (write_gptq, {"bits": 8, "group": 128}),
        (write_gptq, {"bits": 2, "group": 32}),
        (write_awq, {}),
    ],
)
def test_gptq_and_awq_are_served_dequantized_without_a_package(
    write: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, weights = write(tmp_path / "model", **options)
    assert_served(load(folder), with_weights(weights))


def with_weights(weights: dict[str, torch.Tensor], source: Path = DEMO) -> Any:
    reference = reference_of(source)
    for name, weight in weights.items():
        reference.get_parameter(name).data.copy_(weight)
    return reference


@pytest.mark.parametrize("write", [write_gptq, write_awq])
def test_int4_keeps_the_codes_of_a_checkpoint(write: Any, tmp_path: Path) -> None:
    """Rounding anew would change them by some percent; scales are rounded to bfloat16."""
    folder, weights = write(tmp_path / "model")
    model = load(folder, quantization="int4").runner.language.model
    for layer in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.1.{layer}"
        module, expected = model.get_submodule(name), weights[f"{name}.weight"]
        inputs = expected.shape[1]
        product = (module(torch.eye(inputs)) - module(torch.zeros(1, inputs))).T  # without bias
        assert (product - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_only_int4_layers_need_the_grids_of_a_checkpoint(quantization: str, tmp_path: Path) -> None:
    folder, weights = write_awq(tmp_path / "model")
    options = GeneratorOptions(str(folder), device="cpu", quantization=quantization)
    model = load_language_model(options).model
    grids = [name for name in weights if hasattr(model.get_parameter(name), "int4_grid")]
    assert grids == (list(weights) if quantization == "int4" else [])


# of a layer's part, by what does not fit; None: the part is missing
DAMAGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None]]] = {
    "no scales": ("scales", lambda x: None),
    "no zeros": ("qzeros", lambda x: None),
    "group below 0": ("g_idx", lambda x: x - 1),
    "group above all": ("g_idx", lambda x: x + 1),
    "one group number": ("g_idx", lambda x: x[:1]),
    "fewer scales": ("scales", lambda x: x[:1]),
    "no outputs": ("scales", lambda x: x[:, :0]),
    "fewer outputs": ("qweight", lambda x: x[:, :8]),
    "words of 64 bits": ("qweight", torch.Tensor.long),
    "no dimension": ("qzeros", lambda x: x[0, 0]),
}


@pytest.mark.parametrize("kind", matrix(DAMAGE, "no scales", "group below 0", "one group number"))
def test_gptq_tensors_that_do_not_fit_together_are_refused(kind: str, tmp_path: Path) -> None:
    folder, _ = write_gptq(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    part, damage = DAMAGE[kind]
    name = f"model.layers.0.mlp.up_proj.{part}"
    damaged = damage(stored.pop(name))
    if damaged is not None:
        stored[name] = damaged.clone()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    assert refusal(folder).endswith("quantization_config or config.json: download it again")


@pytest.mark.parametrize("write", [write_gptq, write_awq])
@pytest.mark.parametrize(("name", "part"), [("mixtral", "experts"), ("gpt2", "c_proj")])
def test_experts_and_transposed_layers_are_dequantized(
    name: str, part: str, write: Any, tmp_path: Path
) -> None:
    """Experts before they are merged."""
    source = tiny_decoders.folder(name)
    folder, weights = write(tmp_path / "model", group=32, source=source)
    assert any(part in weight for weight in weights)
    dequantized = tmp_path / "dequantized"
    shutil.copytree(source, dequantized)
    stored = load_file(source / "model.safetensors")
    save_file({**stored, **weights}, dequantized / "model.safetensors", {"format": "pt"})
    assert_served(load(folder), reference_of(dequantized))


def test_mxfp4_is_served_as_transformers_loads_it(tmp_path: Path) -> None:
    """Without accelerate: the experts are dequantized."""
    folder = write_mxfp4(tmp_path / "model", tiny_decoders.folder("gpt-oss"))
    dequantized = reference_of(folder, quantization_config=quantization_config("Mxfp4Config"))
    assert_served(load(folder), dequantized)


def quantization_config(name: str) -> Any:
    import transformers

    return getattr(transformers, name)(dequantize=True)


@needs("accelerate", "gguf")
def test_gguf_without_its_package_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = "transformers.modeling_gguf_pytorch_utils"
    monkeypatch.setattr(f"{reader}.is_gguf_available", lambda: False)
    assert "Please install torch and gguf" in refusal(write_gguf(tmp_path / "model.gguf"))


@needs("accelerate", "gguf")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_is_served_as_transformers_loads_it(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "demo.gguf", kind)
    generator = load(file)
    assert_served(generator, reference_of(tmp_path, gguf_file=file.name))
    assert generator.runner.language.tokenizer.chat_template


@needs("accelerate", "gguf")
def test_a_gguf_file_with_more_layers_than_weights_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "demo.gguf", layers=2_000_000)
    with pytest.raises(LoadingFailed, match="has num_hidden_layers 2000000, and its weights only"):
        checkpoint_path(str(file), "chat")


def test_a_configuration_of_a_hub_with_too_many_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--chat/snapshots/0123"
    snapshot.mkdir(parents=True)
    config = json.loads((DEMO / "config.json").read_text())
    config["num_hidden_layers"] = 2_000_000
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadingFailed, match="has num_hidden_layers 2000000, more than 1024"):
        checkpoint_path("org/chat", "chat")


@needs("accelerate", "gguf")
def test_the_weights_of_a_gguf_file_can_be_quantized_again(tmp_path: Path) -> None:
    generator = load(write_gguf(tmp_path / "demo.gguf"), dtype="bfloat16", quantization="int8")
    assert generator.info.batching == "continuous", generator.info.why


@needs("accelerate", "bitsandbytes")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-4bit"])
def test_bitsandbytes_is_served_in_continuous_batches(kind: str, dtype: str) -> None:
    generator = load(DEMO, dtype=dtype, quantization=kind)
    assert generator.info.batching == "continuous", generator.info.why
    served, _ = serve(generator, [request("The capital of Japan is")])
    assert len(served[0].ids[0]) == 12


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_gptq(path)[0],
        write_fp8,
        pytest.param(
            lambda path: write_gguf(path.with_suffix(".gguf"), "Q4_0"),
            marks=needs("accelerate", "gguf"),
        ),
    ],
    ids=["gptq", "fp8", "gguf"],
)
def test_needed_memory_is_that_of_the_dequantized_weights(write: Any, tmp_path: Path) -> None:
    checkpoint = str(write(tmp_path / "model"))
    whole = needed_bytes(str(DEMO), "bfloat16", CPU)
    assert needed_bytes(checkpoint, "bfloat16", CPU) == pytest.approx(whole, rel=0.1)
