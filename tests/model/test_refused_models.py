"""A checkpoint that cannot be served is refused while loading, with the next step. A base model is
served without chats, until it gets a chat template."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from batching.errors import InvalidInput, WorkerDown
from server.core.settings import Settings
from server.lifespan import with_cause
from server.web.examples import curl_examples
from tests import tiny, tiny_chat, tiny_decoders
from tests.generating import load
from worker.engines.embedding.loading import ScoringOptions, load_embedder, load_reranker
from worker.engines.generation.engine import GenerationEngine
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.load_context import LoadContext, loading
from worker.messages.generation import Chat
from worker.model.loading import LoadingFailed

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAT = Chat(({"role": "user", "content": "hello"},))


def copied(source: Path, folder: Path, without: tuple[str, ...] = (), **config: Any) -> str:
    """Copy a checkpoint, without some of its files and with other values in its config.json."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*without))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def chat(model: str | Path, **more: Any) -> GenerationEngine:
    return load(model, compile="off", **more)


def pipeline(model: str) -> object:
    return load_runner(PipelineOptions(model, device="cpu", task="fill-mask"), 8)


def embedder(model: str) -> object:
    return load_embedder(ScoringOptions(model, device="cpu"))


def reranker(model: str) -> object:
    return load_reranker(ScoringOptions(model, device="cpu"))


def assert_refused(load: Callable[[str], object], model: str, message: str) -> None:
    with pytest.raises(LoadingFailed) as refused:
        load(model)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config", "GPT2Config", "GemmaConfig"])
def test_a_chat_model_without_a_tokenizer_is_refused(config: str, tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of the architecture's class."""
    class_ = getattr(hf, config)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if config == "GPT2Config" else tiny.SMALL
    model = tiny.hf.AutoModelForCausalLM.from_config(class_(**{**sizes, "vocab_size": 400}))
    model.save_pretrained(tmp_path / "model")
    assert_refused(chat, str(tmp_path / "model"), "add its files (tokenizer.json and tokenizer_con")


@pytest.mark.parametrize(
    ("load", "source"), [(pipeline, "bert-mlm"), (embedder, "bert-base"), (reranker, "llama-lm")]
)
def test_other_text_models_need_a_tokenizer_too(
    load: Callable[[str], object], source: str, tmp_path: Path
) -> None:
    model = copied(tiny.folder(source), tmp_path / "model", without=(*TOKENIZER, "vocab*"))
    assert_refused(load, model, "add its files (tokenizer.json and tokenizer_config.json)")


@pytest.mark.parametrize("load", [chat, pipeline, embedder, reranker])
def test_custom_code_is_never_executed(load: Callable[[str], object], tmp_path: Path) -> None:
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM")
    model = copied(
        tiny_chat.folder(), tmp_path / "model", model_type="mine",
        auto_map=dict.fromkeys(names, "mine.Mine"), architectures=["MineForCausalLM"],
    )  # fmt: skip
    executed = tmp_path / "executed"
    (tmp_path / "model" / "mine.py").write_text(f"open({str(executed)!r}, 'w')\n")
    message = "needs Python code of its own (auto_map), which is never executed here: use a model"
    assert_refused(load, model, message)
    assert not executed.exists()


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    model = copied(tiny_chat.folder(), tmp_path / "model", model_type="mine")
    assert_refused(chat, model, "its config.json names no model_type that this transformers knows")


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    """Also of a folder that passes the first look: transformers refuses it, too."""
    model = copied(tiny_chat.folder(), tmp_path / "model", without=("model.safetensors",))
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    assert_refused(chat, model, "its weights are a pickle (pytorch_model.bin)")
    nested = tmp_path / "model" / "more"
    nested.mkdir()
    shutil.copy(tiny_chat.folder() / "model.safetensors", nested)
    assert_refused(chat, model, "it has no model.safetensors")
    assert_refused(pipeline, model, "it has no model.safetensors")


def test_a_chat_model_without_some_weights_is_incomplete(tmp_path: Path) -> None:
    model = copied(tiny_chat.folder(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    message = "its checkpoint has no weights for model.layers.0.mlp.down_proj.weight: download it"
    assert_refused(chat, model, message)
    with pytest.raises(LoadingFailed, match="for chat: its checkpoint has no weights"):
        chat(model)


def test_the_last_line_is_one_sentence(tmp_path: Path) -> None:
    """It has no sentences of transformers about a reason that is known."""
    model = copied(tiny_chat.folder(), tmp_path / "model", model_type="mine")
    with pytest.raises(LoadingFailed) as refused:
        chat(model)
    assert with_cause(refused.value) == str(refused.value)
    assert with_cause(refused.value).endswith("that this transformers knows: update it")
    died = WorkerDown("the worker has died")
    died.__cause__ = RuntimeError("first\nsecond")
    assert with_cause(died) == "the worker has died: first"


def test_an_embedding_model_is_no_reranker() -> None:
    message = "BertModel, has no head that scores pairs: name an embedding model with EMBEDDING_MOD"
    assert_refused(reranker, str(tiny.folder("bert-base")), message)
    assert_refused(reranker, str(tiny.folder("bert-nli")), "it has 3 labels and a reranker has one")


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_an_encoder_decoder_is_no_chat_model(family: str, tmp_path: Path) -> None:
    config = getattr(hf, f"{family}Config")(
        vocab_size=400, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    folder = tmp_path / "model"
    getattr(hf, f"{family}ForConditionalGeneration")(config).save_pretrained(folder)
    for file in TOKENIZER[:2]:
        shutil.copy(tiny_chat.folder() / file, folder)
    name = f"{family}ForConditionalGeneration"
    assert_refused(chat, str(folder), f"{name}, which has no pipeline in transformers 5: serve a")


# ── chat templates ──


def test_a_base_model_serves_completions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = copied(tiny_chat.folder(), tmp_path / "model", without=("chat_template.jinja",))
    generator = chat(model)
    assert not generator.info.has_chat_template
    assert "no chat template: use /v1/completions, or set CHAT_TEMPLATE" in caplog.text
    with pytest.raises(InvalidInput, match=r"or set CHAT_TEMPLATE=file\.jinja"):
        generator.text_model.encode(CHAT)
    settings = Settings(pipeline_model="none", chat_model=model, embedding_model="none")
    [command] = curl_examples(settings, "http://localhost", chats=False).values()
    assert "/v1/completions" in command
    [command] = curl_examples(settings, "http://localhost", chats=True).values()
    assert "/v1/chat/completions" in command


def test_a_template_file_is_inferred_like_the_checkpoints_own(tmp_path: Path) -> None:
    own = chat(tiny_chat.folder())
    model = copied(tiny_chat.folder(), tmp_path / "model", without=("chat_template.jinja",))
    file = tmp_path / "file.jinja"
    file.write_text(tiny_chat.TEMPLATE)
    generator = chat(model, chat_template=str(file))
    assert generator.info.has_chat_template
    inferred, expected = (
        engine.input_processor.template.output_format for engine in (generator, own)
    )
    assert inferred.tool_calls
    assert inferred.tool_calls == expected.tool_calls
    assert inferred.reasoning == expected.reasoning
    assert generator.text_model.encode(CHAT) == own.text_model.encode(CHAT)


@pytest.mark.parametrize(
    ("model", "needs"),
    [("llama", "keys and values need"), ("qwen3.5", "states"), ("bloom", "own cache needs")],
)
def test_a_cache_that_holds_no_sequence_is_refused_by_its_setting(model: str, needs: str) -> None:
    with pytest.raises(LoadingFailed, match=f"^KV_CACHE_GB is too small: .*{needs}.* for 0.0 MB$"):
        load(tiny_decoders.folder(model), kv_cache_gb=1e-6)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size"])
@pytest.mark.parametrize(("load", "model"), [(chat, "llama-lm"), (pipeline, "bert-mlm")])
def test_a_model_much_larger_than_its_weights_is_refused_before_it_takes_memory(
    load: Callable[[str], object], model: str, size: str, tmp_path: Path
) -> None:
    folder = copied(tiny.folder(model), tmp_path / "model", (), **{size: 1 << 26})
    larger = "describes a model that is larger than its weights"
    with (
        loading(LoadContext(lambda function: function())),
        pytest.raises(LoadingFailed, match=larger),
    ):
        load(folder)
