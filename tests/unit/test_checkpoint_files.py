"""Why a folder is refused, by its files: one sentence with the next step."""

import json
import os
from pathlib import Path

import pytest

from server.core.settings import SettingsError
from server.preflight import check_model
from tests.checkpoints import NO_TENSORS, write_checkpoint
from worker.checkpoint_files import config_problem, folder_problem, weight_files, weights_problem

CONFIG = {"model_type": "bert", "architectures": ["BertModel"]}
POINTER = "version https://git-lfs.github.com/spec/v1\nsize 9\n"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "it is empty: download the model's files into it"),
        (["adapter_config.json", "adapter_model.safetensors"], "merge it into its model first"),
        (["model_index.json", "unet/config.json"], "transformers has no such models"),
        (["model-q4.gguf"], "name a GGUF file in it, such as model-q4.gguf"),
        (["refs/main", "snapshots/0123"], "name the folder of a revision in its folder snapshots"),
        (["checkpoint-5/config.json"], "name a folder in it that has one, such as checkpoint-5"),
        (["vocab.txt", "tokenizer.json"], "in it, but tokenizer.json, vocab.txt: add the model's"),
        (["d.txt", "c.txt", "b.txt", "a.txt"], "in it, but a.txt, b.txt, c.txt: add the model's"),
    ],
)
def test_a_folder_without_a_configuration_is_explained(files: list[str], sentence: str) -> None:
    assert sentence in config_problem(files)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "it has no weights: add model.safetensors"),
        (["training_args.bin"], "it has no weights: add model.safetensors"),
        (["pytorch_model.bin"], "a pickle (pytorch_model.bin), which could run code: load it once"),
        (["0_Transformer/pytorch_model.bin"], "a pickle"),
        (["onnx/model.onnx", "onnx/model.onnx_data"], "are model.onnx only: use the"),
        (
            ["openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.bin"],
            "are openvino_model.xml only: use the",
        ),
        (
            ["openvino_language_model.xml", "openvino_language_model.bin"],
            "are openvino_language_model.xml only: use the",
        ),
        (["model.gguf"], "its weights are GGUF: name the file, such as model.gguf"),
        (["tf_model.h5", "pytorch_model.bin"], "a pickle (pytorch_model.bin)"),
        (["tf_model.h5"], "are tf_model.h5 only: use the model's safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "merge it into its model first"),
        (["consolidated.safetensors"], "its weights are consolidated.safetensors, and"),
    ],
)
def test_a_checkpoint_without_its_weights_is_explained(
    files: list[str], sentence: str, tmp_path: Path
) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG, weights=""))
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(SettingsError) as refused:
        check_model("CHAT_MODEL", str(folder), str(folder))
    assert str(refused.value).startswith(f"CHAT_MODEL='{folder}': ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("folder", ["", "0_Transformer/"])
@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_beside_other_formats_are_served(folder: str, weights: str) -> None:
    others = ["pytorch_model.bin", "onnx/model.onnx", "model.gguf"]
    assert not weights_problem([folder + weights, *others])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "its config.json cannot be read, it is not JSON: "),
        ("[1]", "its config.json is not an object"),
        (
            '{"quantization_config": ["gptq"]}',
            "the quantization_config in its config.json is not an",
        ),
        (POINTER, "is a pointer of Git LFS: run git lfs pull"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_explained(
    content: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert sentence in folder_problem(tmp_path)


def weights(size: int) -> bytes:
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (weights(400), ""),
        (NO_TENSORS, ""),
        (weights(400)[:-1], "its model.safetensors is damaged or incomplete: download it again"),
        (weights(400) + b"a", "is damaged"),
        (weights(400)[:20], "is damaged"),
        (b"", "is damaged"),
        (b"<html>not found</html>", "is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "is damaged"),
        (POINTER.encode(), "is a pointer of Git LFS"),
    ],
)
def test_damaged_weights_are_found_by_their_header(
    content: bytes, sentence: str, tmp_path: Path
) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG))
    (folder / "model.safetensors").write_bytes(content)
    problem = folder_problem(folder)
    assert sentence in problem if sentence else not problem


def test_every_shard_of_an_index_is_checked(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG, weights=""))
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    (folder / shards[0]).write_bytes(weights(40))
    assert folder_problem(folder) == f"its weights lack {shards[1]}: download it"
    (folder / shards[1]).write_bytes(weights(40)[:-4])
    assert f"its {shards[1]} is damaged or incomplete" in folder_problem(folder)
    (folder / shards[1]).write_bytes(weights(40))
    assert not folder_problem(folder)
    index.write_text("[]")
    assert "its model.safetensors.index.json cannot be read" in folder_problem(folder)


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "sub/../../{}"])
def test_an_index_names_files_in_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(NO_TENSORS)
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG, weights=""))
    (folder / "sub").mkdir()
    shard = name.format("other.safetensors", folder=tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "cannot be read, or names files elsewhere" in folder_problem(folder)
    with pytest.raises(ValueError, match="outside of its folder"):
        weight_files(folder)


def test_files_of_an_index_may_be_links_to_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(NO_TENSORS)
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG, weights=""))
    (folder / "a.safetensors").symlink_to("../blob")
    index = {"weight_map": {"a": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_problem(folder) == ""


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"num_hidden_layers": 2_000_000}, "has num_hidden_layers 2000000, more than 1024"),
        ({"text_config": {"n_layer": 10**12}}, "has n_layer 1000000000000, more than 1024"),
        ({"blocks": [{"num_experts": 2000}]}, "has num_experts 2000, more than 1024"),
        ({"max_position_embeddings": 2**27 + 1}, "has max_position_embeddings 134217729, more"),
        ({"max_position_embeddings": 2**27, "num_hidden_layers": 1024}, ""),
        ({"vocab_size_per_layer_input": 262_144, "sliding_window": 2**40}, ""),
    ],
)
def test_counts_that_the_weights_do_not_have_are_refused(
    config: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG | config))
    problem = folder_problem(folder)
    assert problem.startswith(f"its configuration {sentence}") if sentence else problem == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "model", CONFIG))
    folder.chmod(0)
    try:
        assert folder_problem(folder) == "this folder cannot be read: Permission denied"
    finally:
        folder.chmod(0o700)
