"""Served models and their names: NAME=MODEL, MODEL_ALIASES, links to the hub."""

from pathlib import Path
from typing import Any

import pytest

from server.apis.openai.models import ModelGroup, NamedModel, add_aliases
from server.app import create_app, loader_options
from server.core.settings import Settings, SettingsError, load_settings, parse_model
from server.entries import model_entries
from server.preflight import DEMO_MODELS, MODELS, assign_model, resolve_models
from tests.checkpoints import write_checkpoint
from tests.fake_generator import FakeGenerator
from worker.engines.embedding.loading import ScoringOptions
from worker.engines.pipeline.loading import PipelineOptions
from worker.engines.speech.loading import SpeechOptions
from worker.model.language_model import GeneratorOptions
from worker.model.loading import ModelOptions

CHAT = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def served(**models: str) -> dict[str, str]:
    settings = resolve_models(Settings(**models), ())  # type: ignore[arg-type]  # strings
    values = {name: getattr(settings, name) for name in MODELS}
    return {name: value for name, value in values.items() if value != "none"}


def test_the_demo_models_are_served_if_none_is_named() -> None:
    demos = dict.fromkeys(DEMO_MODELS, "demo")
    assert served() == demos
    assert served(chat_model="none") == {k: v for k, v in demos.items() if k != "chat_model"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("model", ["org/name", "demo"])
def test_a_named_model_is_served_without_demo_models(name: str, model: str) -> None:
    assert served(**{name: model}) == {name: model}
    assert served(**{name: model, "embedding_model": "demo"}) == {
        name: model, "embedding_model": "demo",
    } | {name: "demo" if name == "embedding_model" else model}  # fmt: skip


def name_and_path(entry: str) -> tuple[str, str]:
    reference = parse_model("chat_model", entry)
    return reference.name, reference.path


def test_a_loader_names_a_model() -> None:
    app = create_app(Settings(), load_chat=FakeGenerator)
    assert [*app.worker_client.models] == ["generation"]


def test_a_name_for_the_demo_models_asks_for_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"MODEL='mine=demo': .* as --chat-model mine=demo"):
        assign_model("mine=demo", dict.fromkeys((*MODELS, "pipeline_task")))


def test_a_task_without_a_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="PIPELINE_TASK=fill-mask: name a PIPELINE_MODEL"):
        create_app(Settings(chat_model="demo", pipeline_task="fill-mask"))


@pytest.mark.parametrize(
    ("setting", "name", "path"),
    [
        ("org/name", "org/name", "org/name"),
        ("gpt-4o=org/name", "gpt-4o", "org/name"),
        ("ft:gpt:a@b+c=demo", "ft:gpt:a@b+c", "demo"),
        ("demo", "demo", "demo"),
        ("/models/mine", "mine", "/models/mine"),
        ("me=/models/mine", "me", "/models/mine"),
        ("/models/a=b", "a=b", "/models/a=b"),  # a path, not a name
        ("./a=b", "a=b", "./a=b"),
        ("two words=org/name", "two words=org/name", "two words=org/name"),
        ("name=", "name=", "name="),
        ("https://huggingface.co/org/name", "org/name", "org/name"),
        ("https://huggingface.co/org/name/", "org/name", "org/name"),
        ("http://huggingface.co/org/name/tree/main", "org/name", "org/name"),
        ("huggingface.co/org/name?library=transformers", "org/name", "org/name"),
        ("https://hf.co/gpt2/tree/main", "gpt2", "gpt2"),
        ("me=https://huggingface.co/org/name", "me", "org/name"),
        ("org/name:x.gguf", "org/name/x.gguf", "org/name/x.gguf"),
        ("me=org/name:q4/x.gguf", "me", "org/name/q4/x.gguf"),
        ("org/name@v1:x.gguf", "org/name/x.gguf@v1", "org/name/x.gguf@v1"),
        ("org/name:x.gguf@v1", "org/name/x.gguf@v1", "org/name/x.gguf@v1"),  # of a file of models
        ("/nowhere:x.gguf", "x.gguf", "/nowhere/x.gguf"),
    ],
)
def test_a_setting_is_a_model_with_or_without_a_name(setting: str, name: str, path: str) -> None:
    assert name_and_path(setting) == (name, path)


def test_an_absolute_path_with_an_equals_sign_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "x=y").mkdir()
    assert name_and_path(f"{tmp_path}/x=y") == ("x=y", f"{tmp_path}/x=y")


def test_a_gguf_file_follows_its_folder_after_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt@1000"
    folder.mkdir()
    (folder / "x.gguf").touch()
    assert name_and_path(f"{folder}:x.gguf") == ("x.gguf", f"{folder}/x.gguf")
    (tmp_path / "ckpt@1000:x.gguf").touch()  # a file of this name is meant, if there is one
    parse_model.cache_clear()
    assert name_and_path(f"{folder}:x.gguf") == ("ckpt@1000:x.gguf", f"{folder}:x.gguf")


@pytest.mark.parametrize("entry", ["org/name/x.gguf@v1", "org/name@v1:x.gguf"])
def test_requests_name_a_gguf_file_by_either_form(entry: str) -> None:
    app = create_app(Settings(chat_model=entry), load_chat=FakeGenerator)
    model = NamedModel(parse_model("chat_model", entry), app.worker_client, "generation")
    names = "org/name/x.gguf@v1", "org/name@v1:x.gguf"
    assert {ModelGroup([model]).id_for(name) for name in names} == {names[0]}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("https://huggingface.co/org/name/tree/other", "https://huggingface.co/OWNER/NAME"),
        ("https://huggingface.co/datasets/org/name", "https://huggingface.co/OWNER/NAME"),
        ("https://example.com/org/name", "https://huggingface.co/OWNER/NAME"),
        ("name=", "is neither a folder nor a hub id"),
        ("two words=org/name", "is neither a folder nor a hub id"),
        ("name=/nowhere", "there is no such folder"),
        ("name=none", "there is no model to name"),
        ("name=auto", "there is no model to name"),
    ],
)
def test_what_names_no_model_is_refused(model: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"CHAT_MODEL='{model}': .*{message}"):
        create_app(Settings(chat_model=model))


def create(aliases: str, **models: str) -> None:
    read = load_settings({"MODEL_ALIASES": aliases, **{k.upper(): v for k, v in models.items()}})
    create_app(read)


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ("gpt-4o", "MODEL_ALIASES='gpt-4o': must be ALIAS=NAME"),
        ("a b=demo", "must be ALIAS=NAME"),
        ("a=demo=b", "must be ALIAS=NAME"),
        ("a=demo,a=demo-embedding", "'a' is given twice"),
        ("demo=demo-embedding", "'demo' is a served model's own name"),
        ("demo-embedding=demo", "'demo-embedding' is a served model's own name"),
        ("a=gpt-5", "MODEL_ALIASES='a=gpt-5': no model is served by the name 'gpt-5', only 'demo'"),
    ],
)
def test_an_alias_that_cannot_be_used_is_refused(aliases: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        create(aliases)


def test_the_first_pattern_of_a_name_chooses_the_model() -> None:
    client: Any = None
    models = [
        NamedModel(parse_model("chat_model", entry), client, registry_name)
        for entry, registry_name in (("a=demo", "generation"), ("b=demo", "generation:b"))
    ]
    add_aliases(models, ("gpt-*=b", "*=a", "gpt-5=a"))
    group = ModelGroup(models)
    assert [group.id_for(name) for name in ("gpt-4", "o3", "b", "gpt-5")] == ["b", "a", "b", "a"]


def test_an_alias_is_for_a_served_name(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "mine", CHAT)
    create("gpt-4o=mine", chat_model=model)
    create("gpt-4o=me,mine=me", chat_model=f"me={model}")
    for aliases, setting in ((f"gpt-4o={model}", model), ("gpt-4o=mine", f"me={model}")):
        with pytest.raises(SettingsError, match="no model is served by the name"):
            create(aliases, chat_model=setting)


def test_names_and_loaders_of_every_kind_agree() -> None:
    settings: dict[str, Any] = dict.fromkeys(MODELS, "demo") | {"rerank_model": "none"}
    app = create_app(Settings(**settings))
    assert len(app.worker_client.models) == len(MODELS) - 1


@pytest.mark.parametrize(
    ("setting", "kind", "given"),
    [
        ("pipeline_model", PipelineOptions, {}),
        ("chat_model", GeneratorOptions, {"later_caches": 0}),
        ("embedding_model", ScoringOptions, {}),
        ("rerank_model", ScoringOptions, {}),
        ("transcription_model", SpeechOptions, {}),
    ],
)
def test_a_local_model_is_loaded_under_a_name_without_its_folders(
    tmp_path: Path, setting: str, kind: type[ModelOptions], given: dict[str, Any]
) -> None:
    folder = tmp_path / "private" / "model"
    folder.mkdir(parents=True)
    settings = Settings(pipeline_task="fill-mask", **{setting: str(folder)})  # type: ignore[arg-type]
    [entry] = [e for e in model_entries(settings, ()) if e.reference.path == str(folder)]
    options = loader_options(kind, entry, **given)
    assert (options.name, options.model) == ("model", str(folder))
