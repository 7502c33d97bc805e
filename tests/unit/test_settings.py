"""Settings: of the environment, of .env and of flags; what cannot be used is refused at start."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from server.app import create_app
from server.commands.serve import export_settings
from server.core.settings import Settings, SettingsError, load_settings, misspelled
from worker.template_file import MAX_BYTES, read_template

ROOT = Path(__file__).parents[2]


def test_values_are_parsed_by_their_type() -> None:
    assert load_settings({}) == Settings()
    environ = {"MAX_BATCH_SIZE": "8", "MAX_BATCH_WAIT_MS": "0", "API_KEYS": "a, b,,"}
    settings = load_settings(environ | {"DEBUG": "1", "DTYPE": "bfloat16"})
    assert (settings.max_batch_size, settings.max_batch_wait_ms) == (8, 0)
    assert settings.api_keys == ("a", "b")
    assert (settings.debug, settings.dtype) == (True, "bfloat16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a server starts in, with an empty environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {})
    return tmp_path


def export(**flags: str) -> None:
    export_settings(None, {spec.name: None for spec in fields(Settings)} | flags)


def test_env_file_is_read_and_the_environment_wins(folder: Path) -> None:
    (folder / ".env").write_text("MAX_BATCH_SIZE=5\nMAX_QUEUE_SIZE=6\nHF_TOKEN=a\n")
    os.environ["MAX_QUEUE_SIZE"] = "7"
    settings = load_settings()
    assert (settings.max_batch_size, settings.max_queue_size) == (5, 7)
    assert os.environ["HF_TOKEN"] == "a", "other libraries read it"


def test_env_files_are_loaded_before_the_model_is_looked_up(folder: Path) -> None:
    (folder / ".env").write_text("MAX_BATCH_SIZE=5\nHF_TOKEN=a\n")
    (folder / "other.env").write_text("MAX_BATCH_SIZE=6\nMAX_QUEUE_SIZE=7\n")
    export(max_queue_size="8", env_file="other.env")
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    assert os.environ == {"MAX_BATCH_SIZE": "6", "MAX_QUEUE_SIZE": "8", "HF_TOKEN": "a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DTYPE", "float8"),
        ("MAX_BATCH_SIZE", "0"),
        ("MAX_BATCH_SIZE", "many"),
        ("MAX_BATCH_SIZE", "1.5"),
        ("MAX_BATCH_WAIT_MS", "-1"),
        ("REQUEST_TIMEOUT_S", "nan"),
        ("REQUEST_TIMEOUT_S", "inf"),
        ("MAX_BATCH_WAIT_MS", "1e10"),
        ("MAX_QUEUE_SIZE", "1000000001"),
        ("DEBUG", "perhaps"),
        ("PIPELINE_MODEL", ""),
        ("PIN_WORKER", "perhaps"),
        ("IMAGE_FETCH", "https://example.com"),
        ("IMAGE_FETCH", "example.com,*"),
        ("IMAGE_FETCH", "example.com:80"),
        ("CORS_ORIGINS", "their.site"),
        ("CORS_ORIGINS", "https://their.site/"),
        ("CORS_ORIGINS", "https://*.their.site"),
        ("API_KEYS", "schlüssel"),
        ("API_KEYS", "one two"),
    ],
)
def test_an_invalid_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name) as refused:
        load_settings({name: value})
    assert name != "API_KEYS" or value not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("IMAGE_FETCH", "any"),
        ("IMAGE_FETCH", "example.com, 10.0.0.1,2001:db8::1"),
        ("CORS_ORIGINS", "*"),
        ("CORS_ORIGINS", "https://their.site,http://localhost:3000,null,app://id"),
        ("API_KEYS", "sk-1_2=,$%"),
    ],
)
def test_lists_are_split_at_commas(name: str, value: str) -> None:
    parts = getattr(load_settings({name: value}), name.lower())
    assert parts == tuple(part.strip() for part in value.split(","))


def test_help_lists_every_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    for spec in fields(Settings):
        assert "--" + spec.name.replace("_", "-") in done.stdout
    assert "0: never (0)" in " ".join(done.stdout.split())  # the default of --model-idle-s


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"OPENAI_API_KEY=x\nPIPELINE_MODLE=x\n", r"PIPELINE_MODLE in .env .* PIPELINE_MODEL"),
        ("MAX_RUNNING=7".encode("utf-16"), r"\.env: is not UTF-8 text"),
        (b"A=b\0c", r"\.env: embedded null byte"),
    ],
)
def test_an_unusable_env_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_a_folder_named_as_the_env_file_is_ignored(folder: Path) -> None:
    (folder / "other.env").write_text("MAX_RUNNING=7")
    (folder / ".env").mkdir()  # some name their virtual environment so
    export(env_file="other.env")
    assert load_settings().max_running == 7


@pytest.mark.usefixtures("folder")
def test_a_misspelled_setting_in_the_environment_is_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("API_KEY", "max_batch_size", "MODEL_NAME", "LOG_LEVEL", "OPENAI_API_KEY"):
        os.environ[name] = "x"
    assert load_settings() == Settings()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "did you mean" in line]
    assert sorted(warnings) == [
        "onequeue: API_KEY is not a setting; did you mean API_KEYS?",
        "onequeue: max_batch_size is not a setting; did you mean MAX_BATCH_SIZE?",
    ]


def test_no_setting_is_a_misspelling_of_another() -> None:
    assert list(misspelled(spec.name.upper() for spec in fields(Settings))) == []


def test_short_names_of_other_programs_are_no_misspellings() -> None:
    assert dict(misspelled(["COMPILER", "DEVICES", "XDEBUG", "DEVCIE", "API_KEY"])) == {
        "DEVCIE": "DEVICE",
        "API_KEY": "API_KEYS",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ("temperature=1", "must be a JSON object"),
        ('{"temperature": NaN}', "must be a JSON object"),
        (
            '{"top_p": 1, "temp": 1}',
            "'temp' is no sampling parameter, only temperature, top_p, top_k, min_p, "
            "repetition_penalty",
        ),
        ('{"temperature": "hot"}', "temperature: expected float, got str"),
        ('{"temperature": 2.1}', "temperature: expected float <= 2.0, not 2.1"),
        ('{"top_p": -0.1}', "top_p: expected float >= 0.0, not -0.1"),
        ('{"top_k": 1.5}', "top_k: expected int, got float"),
        ('{"top_k": -2}', "top_k: expected int >= -1, not -2"),
        ('{"min_p": true}', "min_p: expected float, got bool"),
        ('{"repetition_penalty": 0}', "repetition_penalty: expected float >= 0.01, not 0"),
    ],
)
def test_unusable_sampling_defaults_are_refused_at_start(text: str, message: str) -> None:
    """With the bounds of a request's fields."""
    with pytest.raises(SettingsError) as refused:
        create_app(load_settings({"CHAT_MODEL": "demo", "SAMPLING_DEFAULTS": text}))
    assert str(refused.value) == f"SAMPLING_DEFAULTS={text!r}: {message}"


# ── CHAT_TEMPLATE: a file that is read and compiled before a model is loaded ──


TEMPLATE = """{%- for message in messages %}
{%- if loop.index > 100 %}{% break %}{% endif %}
{%- generation %}{{ message.content }}{% endgeneration %}
{%- endfor %}"""


def test_a_template_with_the_tags_of_transformers_is_read(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    assert read_template(str(file)) == TEMPLATE
    create_app(Settings(chat_model="demo", chat_template=str(file)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "is empty"),
        (b"\xff", "is not UTF-8 text"),
        (b"a" * (MAX_BYTES + 1), "is larger than 1000000 bytes"),
        (b"a\n{% for %}", "does not compile in line 2: "),
        (b"{{ messages | unknown }}", "does not compile in line 1: No filter named 'unknown'"),
        (b"{% generation %}", "does not compile"),
    ],
)
def test_an_unusable_template_is_refused(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        create_app(Settings(chat_model="demo", chat_template=str(file)))
    assert str(refused.value).startswith(f"CHAT_TEMPLATE='{file}': {message}")
    assert "\n" not in str(refused.value)


def test_a_folder_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is a folder"):
        create_app(Settings(chat_model="demo", chat_template=str(tmp_path)))


def test_a_template_needs_a_chat_model() -> None:
    with pytest.raises(SettingsError, match="there is no CHAT_MODEL for it"):
        create_app(Settings(embedding_model="demo", chat_template="file.jinja"))


@pytest.mark.parametrize("text", ["[1]", "{", "enable_thinking=false", "[" * 99999])
def test_variables_of_the_template_must_be_a_json_object(text: str) -> None:
    with pytest.raises(SettingsError, match=r"CHAT_TEMPLATE_KWARGS=.*must be a JSON object"):
        create_app(Settings(chat_model="demo", chat_template_kwargs=text))
