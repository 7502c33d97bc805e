"""The format of tool calls is inferred from the calls that a chat template renders."""

import json

import pytest

from tests.tiny_tokenizers import llama_tokenizer
from worker.grammar.tool_calls import tool_calls_grammar
from worker.text.chat_template.template import ChatTemplate
from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT, ID

TURN = "{% for m in messages %}{% if m.tool_calls %}CALLS{% else %}[INST]{{ m.content }}[/INST]"
TURN += "{% endif %}{% endfor %}"
EACH = "{% for c in m.tool_calls %}EACH{% endfor %}"
# A template's loop of calls, and the expected text of two calls in the inferred format.
TEMPLATES: dict[str, tuple[str, str | None]] = {
    "qwen": (
        EACH.replace(
            "EACH",
            '{{ "\n" }}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
            "{{ c.function.arguments | tojson }}}\n</tool_call>",
        ),
        '\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
        '\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
    ),
    "mistral": (
        EACH.replace(
            "EACH", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        ),
        "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}",
    ),
    "list": (
        "[TOOL_CALLS] ["
        + EACH.replace(
            "EACH",
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
            '"id": "{{ c.id }}"}{{ ", " if not loop.last }}',
        )
        + "]",
        f'[TOOL_CALLS] [{{"name": "a", "arguments": {{}}, "id": "{ID}"}}, '
        f'{{"name": "b", "arguments": {{}}, "id": "{ID}"}}]',
    ),
    "numbered": (
        "<calls>"
        + EACH.replace(
            "EACH",
            "<call>functions.{{ c.function.name }}:{{ loop.index0 }}<args>"
            "{{ c.function.arguments | tojson }}</call>",
        )
        + "</calls>",
        "<calls><call>functions.a:0<args>{}</call><call>functions.b:1<args>{}</call></calls>",
    ),
    "tags": (
        EACH.replace(
            "EACH",
            "<call name={{ c.function.name }}>{% for key, value in c.function.arguments.items() %}"
            "<{{ key }}>{{ value }}</>{% endfor %}</call>",
        ),
        "<call name=a>{}</call><call name=b>{}</call>",
    ),
    "python": (
        "["
        + EACH.replace(
            "EACH",
            "{{ c.function.name }}({% for key, value in c.function.arguments.items() %}"
            "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
            "{{ ', ' if not loop.last }}",
        )
        + "]",
        "[a({}), b({})]",
    ),
    "no calls": ("<tool_call><function=x><parameter=y>1</parameter></function></tool_call>", None),
    "refuses": ("<tool_call>{{ raise_exception('no') }}", None),
    "ignores": ("<tool_call>", None),
    "not read back": (
        EACH.replace(
            "EACH",
            '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
            "{{ c.function.arguments | tojson | replace('1.5', '2.5') }}}</tool_call>",
        ),
        None,
    ),
}


def learned(template: str) -> ChatTemplate:
    return ChatTemplate(llama_tokenizer(TURN.replace("CALLS", template)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_call_format_is_the_templates(name: str) -> None:
    source, expected = TEMPLATES[name]
    template = learned(source)
    calls = template.output_format.tool_calls
    assert calls is not None
    if expected is None:
        assert calls == DEFAULT_TOOL_CALL_FORMAT
    else:
        assert calls.render([("a", "{}"), ("b", "{}")]) == expected
    assert any(note.startswith("calls:") for note in template.notes) == (expected is None)


def test_each_note_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    template = learned("<tool_call>")
    template.disable_tool_call_format("of a test")
    ChatTemplate(llama_tokenizer(None))  # a base model's
    records = [record for record in caplog.records if record.name == "onequeue.template"]
    assert [record.levelname for record in records] == ["WARNING"] * len(template.notes)
    assert [f"chat template: {note}" for note in template.notes] == [r.message for r in records]
    assert template.notes[-1] == "calls: of a test; JSON in <tool_call> is used"
    assert all(note.count("; ") == 1 for note in template.notes)


def test_grammar_has_the_names_of_tools_and_parameters() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b"}},
    ]
    one = tool_calls_grammar(DEFAULT_TOOL_CALL_FORMAT, tools, False, json.dumps)
    more = tool_calls_grammar(DEFAULT_TOOL_CALL_FORMAT, tools, True, json.dumps)
    assert "call_0 | call_1" in one
    assert '"additionalProperties": false' in one.splitlines()[3]
    assert ")*" not in one
    assert ")*" in more
