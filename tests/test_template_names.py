"""What `chat_template_kwargs` may name, and what becomes of what a template cannot take."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidInput
from tests import tiny_chat
from worker.protocol import Chat

HI: tuple[dict[str, Any], ...] = ({"role": "user", "content": "hi"},)


def rendered(**variables: Any) -> str:
    return tiny_chat.engine().prompts.template.render(Chat(HI, template_kwargs=variables))


def own_to_transformers() -> set[str]:
    """By its source: arguments of the calls that lead to a template, and what is passed to it."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    names: set[str] = set()
    for file in (
        "tokenization_utils_base.py",
        "processing_utils.py",
        "utils/chat_template_utils.py",
    ):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in (
                "apply_chat_template",
                "render_jinja_template",
            ):
                names |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            match node:
                case ast.Call(func=ast.Attribute(attr="render")):
                    names |= {each.arg for each in node.keywords if each.arg}
                case ast.Assign(
                    targets=[
                        ast.Subscript(
                            value=ast.Attribute(attr="globals" | "filters"),
                            slice=ast.Constant(value=str(name)),
                        )
                    ]
                ):
                    names.add(name)
    return names


def test_what_is_the_renderers_own_cannot_be_set() -> None:
    names = own_to_transformers()
    assert {"conversations", "messages", "tokenize", "namespace", "tojson", "self"} <= names
    for name in names | {"bos_token", "eos_token", "pad_token", "mask_token", "range"}:
        with pytest.raises(InvalidInput, match="not a variable") as caught:
            rendered(**{name: None})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_variable_that_the_template_does_not_know_is_fine() -> None:
    assert rendered(enable_thinkin=False, format="x", language="de") == rendered()
    assert rendered(enable_thinking=False) != rendered()


def test_what_a_template_cannot_take_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_chat.engine().prompts.tokenizer
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    for template in (
        "{{ raise_exception('no, thanks') }}",
        "{{ 1 / 0 }}",
        "{{ depth | tojson }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content + depth }}",
        "{% if %}",
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(InvalidInput) as caught:
            rendered(depth=deep)
        assert caught.value.param == "messages"
        assert "Error(" not in str(caught.value)
