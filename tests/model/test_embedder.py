"""Embedders follow sentence-transformers' files, however a batch runs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from batching.errors import InvalidInput
from tests import tiny
from tests.tiny_embedders import NEW, OLD, checkpoint, dense, embedded, load, states, write
from worker.engines.embedding.embedder import Embedder
from worker.messages.scoring import EmbeddingInput, EmbeddingOutput, Truncation
from worker.model.loading import LoadingFailed

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "paris is the capital of france and the city of light " * 2,
    "hello",
]


def embed(embedder: Embedder, texts: list[Any], **options: Any) -> EmbeddingOutput:
    return embedded(embedder, EmbeddingInput(texts, 0, **options))


def pool(hidden: Any, name: str, start: int = 0) -> Any:
    """Pool a text's states as sentence-transformers defines it."""
    weights = torch.arange(1, len(hidden) + 1)[start:, None].float()
    hidden = hidden[start:]
    return {
        "cls": hidden[0],
        "max": hidden.max(0).values,
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * weights).sum(0) / weights.sum(),
        "lasttoken": hidden[-1],
    }[name]


POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
OLD_KEYS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
}


def check_pooling(embedder: Embedder, base: str, name: str) -> None:
    together = embed(embedder, TEXTS).vectors
    for text, vector in zip(TEXTS, together, strict=True):
        expected = pool(states(base, text), name).numpy()
        np.testing.assert_allclose(vector, expected, rtol=1e-3, atol=1e-3 * abs(expected).max())
        alone = embed(embedder, [text]).vectors[0]
        np.testing.assert_allclose(vector, alone, atol=1e-4 * abs(expected).max())


@pytest.mark.parametrize("name", POOLINGS)
def test_each_pooling_equals_its_definition(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "m", pooling={"pooling_mode": name}, prefix=NEW)
    check_pooling(load(folder), "bert-base", name)


@pytest.mark.parametrize("name", sorted(OLD_KEYS))
def test_old_configurations_name_poolings_by_flags(tmp_path: Path, name: str) -> None:
    flags = {f"pooling_mode_{key}": pooling == name for pooling, key in OLD_KEYS.items()}
    check_pooling(load(checkpoint(tmp_path / "m", pooling=flags)), "bert-base", name)


@pytest.mark.parametrize(
    ("base", "batching"),
    [("roberta-base", "packed"), ("deberta-base", "padded"), ("albert-base", "padded")],
)
def test_other_encoders_give_the_same_vectors_in_a_batch(
    tmp_path: Path, base: str, batching: str
) -> None:
    embedder = load(checkpoint(tmp_path / "m", base, pooling={"pooling_mode": "mean"}))
    assert embedder.info.batching == batching
    check_pooling(embedder, base, "mean")


def test_several_poolings_are_concatenated_in_their_order(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", pooling={"pooling_mode": ["max", "cls"]})
    [vector] = embed(load(folder), TEXTS[:1]).vectors
    hidden = states("bert-base", TEXTS[0])
    expected = torch.cat([pool(hidden, "max"), pool(hidden, "cls")]).numpy()
    np.testing.assert_allclose(vector, expected, atol=1e-3)


def test_a_transformer_in_a_subfolder_is_found_in_a_folder_and_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old versions of sentence-transformers saved it there."""
    snapshot = tmp_path / "models--a--old/snapshots/0123"
    shutil.copytree(tiny.folder("bert-base"), snapshot / "0_Transformer")
    module = {"idx": 0, "name": "0", "path": "0_Transformer", "type": OLD + "Transformer"}
    write(snapshot, "modules.json", [module])
    main = snapshot.parents[1] / "refs/main"
    main.parent.mkdir()
    main.write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for model in (Path("a/old"), snapshot):
        check_pooling(load(model), "bert-base", "mean")


def test_a_vector_is_the_normalized_mean_without_files(tmp_path: Path) -> None:
    [vector] = embed(load(checkpoint(tmp_path / "m")), TEXTS[:1]).vectors
    expected = normalize(pool(states("bert-base", TEXTS[0]), "mean"), dim=0).numpy()
    np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["mean", "cls", "weightedmean"])
@pytest.mark.parametrize("included", [True, False])
def test_pooling_includes_or_excludes_the_prompt(tmp_path: Path, name: str, included: bool) -> None:
    pooling = {"pooling_mode": name, "include_prompt": included}
    prompts = {"query": "what is ", "document": ""}
    embedder = load(checkpoint(tmp_path / "m", pooling=pooling, general={"prompts": prompts}))
    [vector] = embed(embedder, TEXTS[:1], prompt="query").vectors
    hidden = states("bert-base", "what is " + TEXTS[0])
    skip = 0 if included else len(states("bert-base", "what is ")) - 1
    np.testing.assert_allclose(vector, pool(hidden, name, skip).numpy(), atol=1e-3)
    for role in ("search_query", "query"):
        assert (embed(embedder, TEXTS[:1], role=role).vectors[0] == vector).all()
    [bare] = embed(embedder, TEXTS[:1]).vectors
    assert (embed(embedder, TEXTS[:1], role="search_document").vectors[0] == bare).all()
    assert abs(bare - vector).max() > 1e-2


def test_the_default_prompt_is_used_without_a_name(tmp_path: Path) -> None:
    general = {"prompts": {"q": "what is "}, "default_prompt_name": "q"}
    pooling = {"pooling_mode": "mean"}
    embedder = load(checkpoint(tmp_path / "m", pooling=pooling, general=general))
    named, unnamed = (embed(embedder, TEXTS[:1], prompt=name).vectors for name in ("q", None))
    assert (named == unnamed).all()


@pytest.mark.parametrize("as_bin", [False, True])
def test_dense_and_normalize_layers_run_in_order(tmp_path: Path, as_bin: bool) -> None:
    folder = checkpoint(
        tmp_path / "m", pooling={"pooling_mode": "mean"}, layers=("Dense", "Normalize")
    )
    linear = dense(folder, "2_Dense", 12, "torch.nn.modules.activation.Tanh", as_bin)
    [vector] = embed(load(folder), TEXTS[:1]).vectors
    with torch.no_grad():
        dense_output = torch.tanh(linear(pool(states("bert-base", TEXTS[0]), "mean")))
    np.testing.assert_allclose(vector, normalize(dense_output, dim=0).numpy(), atol=1e-4)


def test_vectors_are_truncated_before_they_are_normalized(
    tmp_path: Path,
) -> None:
    pooling = {"pooling_mode": "mean"}
    folder = checkpoint(
        tmp_path / "m",
        pooling=pooling,
        layers=("Normalize",),
        general={"truncate_dim": 20},
        matryoshka_dimensions=[8, 20],
    )
    embedder = load(folder)
    whole = pool(states("bert-base", TEXTS[0]), "mean")
    for dimensions, size in ((None, 20), (20, 20), (8, 8)):
        [vector] = embed(embedder, TEXTS[:1], dimensions=dimensions).vectors
        expected = normalize(whole[:size], dim=0).numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    for dimensions in (21, 9):
        with pytest.raises(InvalidInput, match="dimensions"):
            embed(embedder, TEXTS[:1], dimensions=dimensions)


def test_dimensions_need_a_matryoshka_model_or_the_operators_setting(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    with pytest.raises(InvalidInput, match="Matryoshka"):
        embed(load(folder), TEXTS[:1], dimensions=8)
    allowed = load(folder, allow_dimensions=True)
    assert embed(allowed, TEXTS[:1], dimensions=8).vectors.shape == (1, 8)


def test_lower_casing_and_length_follow_the_files(tmp_path: Path) -> None:
    bert = {"max_seq_length": 8, "do_lower_case": True}
    pooling = {"pooling_mode": "mean"}
    embedder = load(checkpoint(tmp_path / "m", "roberta-base", pooling=pooling, bert=bert))
    lower, upper = (embed(embedder, [text]).vectors for text in ("a b", "A B"))
    assert (lower == upper).all()
    with pytest.raises(InvalidInput, match="context length is 8 tokens"):
        embed(embedder, ["a b c d e f g h i j k l m n"])


def test_a_truncated_text_keeps_its_special_tokens(tmp_path: Path) -> None:
    embedder = load(checkpoint(tmp_path / "m"))
    ids = embedder.encode(TEXTS[2])
    for left, kept in ((False, [*ids[:4], ids[-1]]), (True, [ids[0], *ids[-5:]])):
        cut = embed(embedder, TEXTS[2:3], truncation=Truncation(True, len(kept), left))
        assert cut.tokens == len(kept)
        assert (cut.vectors == embed(embedder, [kept]).vectors).all()


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([""], {}, "input[0]: must not be empty"),
        ([[5, 10**6]], {}, "input[0]: has the token id 1000000; the model's end at"),
        ([[5] * 600], {}, "input[0]: has 600 tokens"),
        (["a" * 10**6], {}, "input[0]: has 1000000 characters"),
        (["a", "b " * 600], {}, "input[1]: has"),
        (["a"], {"prompt": "q"}, "prompt_name: must be left out: this model has no prompts"),
        ([[5]], {"prompt": "q"}, "prompt_name: is for texts"),
        (["a"], {"role": "nonsense"}, "input_type: must be one of query,"),
        (["a b c"], {"truncation": Truncation(True, 2)}, "2 tokens leave no room for text"),
    ],
)
def test_an_unsuitable_input_is_refused_with_its_name(
    tmp_path: Path, inputs: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        embed(load(checkpoint(tmp_path / "m")), inputs, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("layer", "message"), [("WordWeights", "WordWeights"), ("Dense", "os.system")]
)
def test_unknown_modules_activations_and_poolings_are_refused_at_load(
    tmp_path: Path, layer: str, message: str
) -> None:
    folder = checkpoint(tmp_path / "m", pooling={"pooling_mode": "mean"}, layers=(layer,))
    if layer == "Dense":
        dense(folder, "2_Dense", 4, "os.system")
    with pytest.raises(LoadingFailed, match=message):
        load(folder)
    with pytest.raises(LoadingFailed, match="median"):
        load(checkpoint(tmp_path / "p", pooling={"pooling_mode": "median"}))
