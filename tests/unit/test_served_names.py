"""Served models and their names: NAME=MODEL, lists, files, MODEL_ALIASES and the hub's cache."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from server.apis.openai.models import ModelGroup, NamedModel, add_aliases
from server.app import create_app, loader_options
from server.cached_models import scan
from server.core.settings import (
    ModelReference,
    Settings,
    SettingsError,
    load_settings,
    parse_model,
    parse_models,
)
from server.entries import entry_on_demand, model_entries
from server.preflight import DEMO_MODELS, MODELS, assign_model, resolve_models
from tests.checkpoints import NO_TENSORS, write_checkpoint
from tests.fake_generator import FakeGenerator
from tests.hub import add_to_cache
from worker.checkpoint_files import LFS_POINTER
from worker.engines.embedding.loading import ScoringOptions
from worker.engines.pipeline.loading import PipelineOptions
from worker.engines.speech.loading import SpeechOptions
from worker.model.language_model import GeneratorOptions
from worker.model.loading import ModelOptions

CHAT: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MASKED = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
TAGGER = {"architectures": ["BertForTokenClassification"], "model_type": "bert"}


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
        ("https://huggingface.co/org/x/blob/main/q4/x.gguf", "org/x/q4/x.gguf", "org/x/q4/x.gguf"),
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


LINK = "https://huggingface.co/OWNER/NAME"
OF_SETTING = "is no option of this setting"
REFUSED = [
    ("PIPELINE_TASK", "fill-mask", "PIPELINE_TASK=fill-mask: name a PIPELINE_MODEL"),
    *(
        ("CHAT_MODEL", value, f"CHAT_MODEL={value!r}: {message}")
        for value, message in (
            ("name=", "is neither a folder nor a hub id"),
            ("two words=org/name", "is neither a folder nor a hub id"),
            ("org/x@", "is neither a folder nor a hub id"),
            ("name=/nowhere", "there is no such folder"),
            ("name=none", "there is no model to name"),
            ("name=auto", "there is no model to name"),
        )
    ),
    *(
        ("CHAT_MODEL", f"https://{address}", LINK)
        for address in (
            "huggingface.co/org/name/tree/other",
            "huggingface.co/datasets/org/name",
            "example.com/org/name",
        )
    ),
    ("CHAT_MODEL", "demo;colour=red", f"'colour' {OF_SETTING}, only dtype,"),
    ("CHAT_MODEL", "demo;task=fill-mask", f"'task' {OF_SETTING}"),
    ("EMBEDDING_MODEL", "demo;max_len=3", f"'max_len' {OF_SETTING}"),
    ("EMBEDDING_MODEL", "demo;sampling_defaults={}", OF_SETTING),
    ("CHAT_MODEL", "demo;dtype=int3", "dtype='int3' must be one of auto, float32"),
    ("CHAT_MODEL", "demo;max_len=1", "max_len='1' must be at least 2"),
    ("CHAT_MODEL", "demo;pin=maybe", "pin='maybe' must be 1 or 0"),
    (
        "CHAT_MODEL",
        'demo;sampling_defaults={"top_k":1,"top_p":3}',
        """sampling_defaults='{"top_k":1,"top_p":3}': top_p: expected float <= 1.0, not 3""",
    ),
    ("CHAT_MODEL", "a=demo,a=org/x", "the name 'a' is given twice"),
    ("CHAT_MODEL", "demo,none", "CHAT_MODEL='none': there is no model to name"),
    ("CHAT_MODEL", "demo,,x=demo", "an entry is empty: remove its comma"),
    ("CHAT_MODEL", "demo,/nowhere@v1", "there is no such folder"),
    ("CHAT_MODEL", "demo;dtype=float32;dtype=auto", "'dtype' is given twice"),
    ("CHAT_MODEL", "demo;pin;pin=off", "'pin' is given twice"),
    ("PIPELINE_MODEL", "demo,x=demo;task=summarize", "'x=demo;task=summarize': unknown task"),
    ("PIPELINE_MODEL", "demo,x=demo;task=token-classification", "serves fill-mask only"),
    ("MODEL_ALIASES", "gpt-4o", "MODEL_ALIASES='gpt-4o': must be ALIAS=NAME"),
    ("MODEL_ALIASES", "a b=demo", "must be ALIAS=NAME"),
    ("MODEL_ALIASES", "a=demo=b", "must be ALIAS=NAME"),
    ("MODEL_ALIASES", "a=demo,a=demo-embedding", "'a' is given twice"),
    ("MODEL_ALIASES", "demo=demo-embedding", "'demo' is a served model's own name"),
    ("MODEL_ALIASES", "demo-embedding=demo", "'demo-embedding' is a served model's own name"),
    ("MODEL_ALIASES", "a=gpt-5", "'a=gpt-5': no model is served by the name 'gpt-5', only 'demo'"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_setting_that_names_no_model_is_refused_at_start(
    name: str, value: str, message: str
) -> None:
    models = {"CHAT_MODEL": "demo"} if name == "PIPELINE_TASK" else {}
    with pytest.raises(SettingsError) as refused:
        create_app(load_settings({name: value, **models}))
    assert str(refused.value).startswith(name)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["CHAT_MODEL", "VOICES_DIR", "LORA_DIR"])
def test_a_folder_that_the_process_may_not_see_is_not_called_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if path == "/locked/model":
            raise PermissionError(13, "Permission denied")
        return found(path, *args, **options)

    found = os.stat
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(SettingsError) as refused:
        create_app(load_settings({name: "/locked/model"}))
    problem = "this folder cannot be read: Permission denied"
    assert str(refused.value) == f"{name}='/locked/model': {problem}"


def test_a_refused_value_is_quoted_in_part() -> None:
    with pytest.raises(SettingsError, match=r"MAX_RUNNING='9+x9+': must be a whole") as refused:
        load_settings({"MAX_RUNNING": "9" * 100 + "x" + "9" * 100_000})
    assert len(str(refused.value)) < 300


def create(aliases: str, **models: str) -> None:
    read = load_settings({"MODEL_ALIASES": aliases, **{k.upper(): v for k, v in models.items()}})
    create_app(read)


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


# ── several models in one setting ──


def test_entries_have_names_revisions_and_options() -> None:
    value = "a=org/x@v1;dtype=float32;max_len=64;pin, org/y@v2,demo;quantization=int8;pin=off"
    first, second, third = parse_models("chat_model", value)
    assert (first.name, first.path, first.pin) == ("a", "org/x@v1", True)
    assert dict(first.options) == {"dtype": "float32", "max_model_len": 64}
    assert (second.name, second.path, second.options) == ("org/y@v2", "org/y@v2", ())
    assert (third.name, third.pin, dict(third.options)) == ("demo", False, {"quantization": "int8"})


def test_none_and_auto_have_no_entries() -> None:
    assert parse_models("chat_model", "none") == parse_models("chat_model", "auto") == ()


def test_an_option_may_be_json(tmp_path: Path) -> None:
    defaults = '{"temperature": 0.7, "top_p": 0.95}'
    value = f"org/x;sampling_defaults={defaults};pin,x=demo;sampling_defaults={{}},demo"
    first, second, third = parse_models("chat_model", value)
    assert (first.path, first.pin) == ("org/x", True)
    assert dict(first.options) == {"sampling_defaults": defaults}
    assert dict(second.options) == {"sampling_defaults": "{}"}
    assert third.options == ()
    file = write(
        tmp_path / "models.toml",
        """
        [[chat_model]]
        model = "demo"
        sampling_defaults = {temperature = 0.7, top_p = 0.95}
        [[chat_model]]
        name = "x"
        model = "demo"
        sampling_defaults = '{"top_k": 3}'
        """,
    )
    entries = entries_of(
        chat_model=load_settings({"MODELS": file}).chat_model, sampling_defaults="{}"
    )
    texts = [entry.settings.sampling_defaults for entry in entries.values()]
    assert texts == [defaults, '{"top_k": 3}']


def test_names_of_different_kinds_that_collide_are_refused() -> None:
    with pytest.raises(SettingsError, match="two models are served by the name 'demo-embedding'"):
        create_app(Settings(chat_model="demo,demo-embedding=demo", embedding_model="demo"))


def entries_of(**settings: Any) -> dict[str, Any]:
    app = create_app(Settings(**settings))
    entries = {entry.name: entry for entry in model_entries(app.settings, ())}
    assert [*app.worker_client.models] == [
        name for name, entry in entries.items() if entry.served_by == name
    ]
    return entries


def test_each_model_has_its_own_settings(tmp_path: Path) -> None:
    chat = write_checkpoint(tmp_path / "chat", CHAT)
    entries = entries_of(
        chat_model=f"{chat},b={chat};dtype=float32;max_len=99",
        embedding_model="demo",
        kv_cache_gb=3.0,
        max_running=7,
    )
    assert [*entries] == ["generation", "generation:b", "embedding"]
    first, second = entries["generation"].settings, entries["generation:b"].settings
    assert (first.dtype, first.max_model_len) == ("auto", None)
    assert (second.dtype, second.max_model_len) == ("float32", 99)
    for settings in (first, second):  # shared by the chat models
        assert (settings.kv_cache_gb, settings.max_running) == (1.5, 3)


def test_each_pipeline_has_its_own_task(tmp_path: Path) -> None:
    masked = write_checkpoint(tmp_path / "masked", MASKED)
    tagger = write_checkpoint(tmp_path / "tagger", TAGGER)
    entries = entries_of(pipeline_model=f"{masked},{tagger},x={tagger};task=ner")
    tasks = [entry.settings.pipeline_task for entry in entries.values()]
    assert tasks == ["fill-mask", "token-classification", "token-classification"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_has_the_lists(tmp_path: Path) -> None:
    file = write(
        tmp_path / "models.toml",
        """
        embedding_model = "demo"
        pipeline_model = ["a=org/x;task=fill-mask", "org/y"]
        [[chat_model]]
        model = "org/chat"
        name = "small"
        revision = "v2"
        dtype = "bfloat16"
        max_len = 2048
        pin = true
        [[chat_model]]
        model = "demo"
        """,
    )
    settings = load_settings({"MODELS": file, "RERANK_MODEL": "org/z"})
    assert {name: getattr(settings, name) for name in MODELS} == {
        "pipeline_model": "a=org/x;task=fill-mask,org/y",
        "chat_model": "small=org/chat@v2;dtype=bfloat16;max_len=2048;pin=on,demo",
        "embedding_model": "demo",
        "rerank_model": "org/z",
        "transcription_model": "none",
    }


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path / "models.toml", '\ufeffchat_model = "org/chat"')
    assert load_settings({"MODELS": file}).chat_model == "org/chat"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat_model = [", "MODELS="),
        ('chat = "demo"', "'chat' is no list of models, only pipeline_model"),
        ("chat_model = [3]", "chat_model[0]: must be a string, or a table with a model"),
        ('[[chat_model]]\nname = "a"', "chat_model[0]: must be a string, or a table with a model"),
        ('[[chat_model]]\nmodel = "a,b"', "model must have no comma or semicolon, not 'a,b'"),
        ('embedding_model = "demo"', "EMBEDDING_MODEL is set, and in MODELS="),
        ("chat_model = " + "[" * 9999, "MODELS="),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "models.toml", text)
    with pytest.raises(SettingsError) as raised:
        load_settings({"MODELS": file, "EMBEDDING_MODEL": "demo"})
    assert message in str(raised.value)
    with pytest.raises(SettingsError, match=r"MODELS='/nowhere/models\.toml'"):
        load_settings({"MODELS": "/nowhere/models.toml"})


# ── the scan of the hub cache that MODELS_FROM_CACHE=1 makes ──


def files(**config: Any) -> dict[str, bytes]:
    text = json.dumps(CHAT | config).encode()
    return {"config.json": text, "model.safetensors": NO_TENSORS}


def names(cache: Path, seen: dict[str, int] | None = None) -> list[str]:
    kinds = {"generation", "embedding"}
    return [name for name, _ in scan(cache, kinds, {} if seen is None else seen)]


def test_complete_checkpoints_are_found_by_name(tmp_path: Path) -> None:
    folder = add_to_cache(tmp_path, "org/chat", files())
    add_to_cache(tmp_path, "org/chat", files(), ref="v1")
    embedder = files() | {"modules.json": b'[{"type": "sentence_transformers.models.Pooling"}]'}
    add_to_cache(tmp_path, "embedder", embedder)
    quantized = add_to_cache(tmp_path, "org/q", {"x.gguf": b"GGUF", "y.gguf": LFS_POINTER})
    found = dict(scan(tmp_path, {"generation", "embedding"}, {}))
    assert found.pop("org/chat") == ("generation", folder)
    assert found.pop("org/q/x.gguf") == ("generation", quantized / "x.gguf")
    assert found.pop("embedder")[0] == "embedding"
    assert [*found] == ["org/chat@v1"]


@pytest.mark.parametrize(
    "content",
    [
        {"config.json": b"{}"},  # no weights yet
        {"model.safetensors": NO_TENSORS},
        files() | {"config.json": b"[" * 100_000},
        files() | {"modules.json": b"[1]"},
        files() | {"model.safetensors": (9).to_bytes(8, "little")},
        files(architectures=["ViTForImageClassification"]),  # its endpoint names no models so
    ],
)
def test_other_repositories_are_left_out(tmp_path: Path, content: dict[str, bytes]) -> None:
    add_to_cache(tmp_path, "org/x", content)
    add_to_cache(tmp_path, "org/y", files())
    assert names(tmp_path) == ["org/y"]


def test_what_is_no_repository_is_left_out(tmp_path: Path) -> None:
    assert names(tmp_path / "missing") == []
    add_to_cache(tmp_path, "org/x y", files())
    snapshot = add_to_cache(tmp_path, "org/x", files())
    (tmp_path / "models--org--x" / "refs" / "main").write_text(f"../snapshots/{snapshot.name}")
    (tmp_path / "models--org--x" / "refs" / "pr").mkdir()
    add_to_cache(tmp_path, "org/data", files())
    (tmp_path / "models--org--data").rename(tmp_path / "datasets--org--data")
    (tmp_path / "models--file").touch()
    assert names(tmp_path) == []


def test_files_are_read_again_only_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = add_to_cache(tmp_path, "org/x", {"config.json": json.dumps(CHAT).encode()})
    seen: dict[str, int] = {}
    assert names(tmp_path, seen) == []
    with monkeypatch.context() as patch:
        patch.setattr("server.cached_models.folder_problem", lambda _: pytest.fail("read again"))
        assert names(tmp_path, seen) == []
    (snapshot / "model.safetensors").write_bytes(NO_TENSORS)
    assert names(tmp_path, seen) == ["org/x"]


def test_a_cached_model_has_the_settings_and_a_configured_models_share() -> None:
    models = "demo;dtype=float32;max_len=40,x=demo"
    settings = Settings(
        chat_model=models, chat_template="x", decision_config="y", kv_cache_gb=4, reasoning="on"
    )
    entries = model_entries(settings, ())
    reference = ModelReference("org/x", "org/x", "/cache/x", is_named=True)
    entry = entry_on_demand("generation", reference, settings, entries)
    assert (entry.name, entry.served_by, entry.generates) == (*["generation:org/x"] * 2, True)
    own = entry.settings
    assert (own.dtype, own.max_model_len, own.chat_template) == ("auto", None, "auto")
    assert own.decision_config == "auto"
    assert (own.kv_cache_gb, own.max_running, own.reasoning) == (2, 128, "on")
