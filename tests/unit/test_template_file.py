"""CHAT_TEMPLATE: a file that is read and compiled before a model is loaded."""

from pathlib import Path

import pytest

from server.app import create_app
from server.core.settings import Settings, SettingsError
from worker.template_file import MAX_BYTES, read_template

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
