"""Several models in one setting: `[NAME=]MODEL[@REVISION][;OPTION=VALUE…]`, and MODELS=FILE."""

from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.core.settings import Settings, SettingsError, load_settings, parse_models
from server.entries import model_entries
from server.preflight import MODELS
from tests.checkpoints import write_checkpoint

CHAT = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MASKED = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
TAGGER = {"architectures": ["BertForTokenClassification"], "model_type": "bert"}


def read(environ: dict[str, str]) -> Settings:
    return load_settings(environ)


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
    entries = entries_of(chat_model=read({"MODELS": file}).chat_model, sampling_defaults="{}")
    texts = [entry.settings.sampling_defaults for entry in entries.values()]
    assert texts == [defaults, '{"top_k": 3}']


def test_links_to_files_of_the_hub_name_them() -> None:
    value = "https://huggingface.co/org/x/blob/main/q4/x.gguf"
    [reference] = parse_models("chat_model", value)
    assert reference.path == "org/x/q4/x.gguf"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("chat_model", "demo;colour=red", "'colour' is no option of this setting, only dtype,"),
        ("chat_model", "demo;task=fill-mask", "'task' is no option of this setting"),
        ("embedding_model", "demo;max_len=3", "'max_len' is no option of this setting"),
        ("chat_model", "demo;dtype=int3", "dtype='int3' must be one of auto, float32"),
        ("chat_model", "demo;max_len=1", "max_len='1' must be at least 2"),
        ("chat_model", "demo;pin=maybe", "pin='maybe' must be 1 or 0"),
        (
            "chat_model",
            'demo;sampling_defaults={"top_k":1,"top_p":3}',
            """sampling_defaults='{"top_k":1,"top_p":3}': top_p: expected float <= 1.0, not 3""",
        ),
        ("embedding_model", "demo;sampling_defaults={}", "is no option of this setting"),
        ("chat_model", "a=demo,a=org/x", "the name 'a' is given twice"),
        ("chat_model", "demo,none", "CHAT_MODEL='none': there is no model to name"),
        ("chat_model", "demo,,x=demo", "an entry is empty: remove its comma"),
        ("chat_model", "demo,/nowhere@v1", "there is no such folder"),
        ("chat_model", "org/x@", "is neither a folder nor a hub id"),
        ("chat_model", "demo;dtype=float32;dtype=auto", "'dtype' is given twice"),
        ("chat_model", "demo;pin;pin=off", "'pin' is given twice"),
        (
            "pipeline_model",
            "demo,x=demo;task=summarize",
            "PIPELINE_MODEL='x=demo;task=summarize': unknown task 'summarize'",
        ),
        ("pipeline_model", "demo,x=demo;task=token-classification", "serves fill-mask only"),
    ],
)
def test_an_entry_that_cannot_be_served_is_refused_at_start(
    setting: str, value: str, message: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        create_app(Settings(**{setting: value}))  # type: ignore[arg-type]  # strings
    assert message in str(raised.value)


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
    settings = read({"MODELS": file, "RERANK_MODEL": "org/z"})
    assert {name: getattr(settings, name) for name in MODELS} == {
        "pipeline_model": "a=org/x;task=fill-mask,org/y",
        "chat_model": "small=org/chat@v2;dtype=bfloat16;max_len=2048;pin=on,demo",
        "embedding_model": "demo",
        "rerank_model": "org/z",
        "transcription_model": "none",
    }


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path / "models.toml", '\ufeffchat_model = "org/chat"')
    assert read({"MODELS": file}).chat_model == "org/chat"


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
        read({"MODELS": file, "EMBEDDING_MODEL": "demo"})
    assert message in str(raised.value)
    with pytest.raises(SettingsError, match=r"MODELS='/nowhere/models\.toml'"):
        read({"MODELS": "/nowhere/models.toml"})
