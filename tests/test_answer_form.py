"""How calls are written is found out by having a chat template write some."""

import json

import pytest

from tests.tiny_tokenizers import llama_tokenizer
from worker.grammar.calls import calls_grammar
from worker.text.call_form import ID, INDEX, PLAIN_CALLS, Arguments, CallForm
from worker.text.chat_template import ChatTemplate

TURN = "{% for m in messages %}{% if m.tool_calls %}CALLS{% else %}[INST]{{ m.content }}[/INST]"
TURN += "{% endif %}{% endfor %}"
EACH = "{% for c in m.tool_calls %}EACH{% endfor %}"
NOTHING = ("", "")
TEMPLATES: dict[str, tuple[str, CallForm | None]] = {
    "qwen": (
        EACH.replace(
            "EACH",
            '{{ "\n" }}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
            "{{ c.function.arguments | tojson }}}\n</tool_call>",
        )
        + "<|im_end|>",
        PLAIN_CALLS,
    ),
    "llama": (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>",
        CallForm(
            NOTHING,
            ("", "<|eot_id|>"),
            '", "parameters": ',
            None,
            braces=('{"name": "', "}"),
            keys=("name", "parameters"),
        ),
    ),
    "mistral": (
        EACH.replace(
            "EACH", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        )
        + "</s>",
        CallForm(("", "</s>"), ("[TOOL_CALLS]", ""), "[ARGS]", ""),
    ),
    "list": (
        "[TOOL_CALLS] ["
        + EACH.replace(
            "EACH",
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
            '"id": "{{ c.id }}"}{{ ", " if not loop.last }}',
        )
        + "]</s>",
        CallForm(
            ("[TOOL_CALLS] [", "]</s>"),
            NOTHING,
            '", "arguments": ',
            ", ",
            braces=('{"name": "', f', "id": "{ID}"}}'),
            keys=("name", "arguments"),
        ),
    ),
    "numbered": (
        "<calls>"
        + EACH.replace(
            "EACH",
            "<call>functions.{{ c.function.name }}:{{ loop.index0 }}<args>"
            "{{ c.function.arguments | tojson }}</call>",
        )
        + "</calls>",
        CallForm(("<calls>", "</calls>"), ("<call>functions.", "</call>"), f":{INDEX}<args>", ""),
    ),
    "tags": (
        EACH.replace(
            "EACH",
            "<call name={{ c.function.name }}>{% for key, value in c.function.arguments.items() %}"
            "<{{ key }}>{{ value }}</>{% endfor %}</call>",
        ),
        CallForm(
            NOTHING,
            ("<call name=", "</call>"),
            ">",
            "",
            Arguments("entries", open="<", middle=">", text_middle=">", close="</>", comma=""),
        ),
    ),
    "no calls": ("<tool_call><function=x><parameter=y>1</parameter></function></tool_call>", None),
    "refuses": ("<tool_call>{{ raise_exception('no') }}", None),
    "ignores": ("<tool_call>", None),
    "not read back": (  # what is written in capitals is not what went in
        EACH.replace(
            "EACH",
            '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
            '{{ c.function.arguments | tojson }}, "name": "x"}</tool_call>',
        ),
        None,
    ),
}


def learned(template: str) -> ChatTemplate:
    return ChatTemplate(llama_tokenizer(TURN.replace("CALLS", template)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_the_templates(name: str) -> None:
    source, expected = TEMPLATES[name]
    template = learned(source)
    assert template.answers.calls == (expected or PLAIN_CALLS)
    assert any(note.startswith("calls:") for note in template.notes) == (expected is None)


def test_a_grammar_names_the_tools_and_their_parameters() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b"}},
    ]
    one = calls_grammar(PLAIN_CALLS, tools, False, json.dumps)
    more = calls_grammar(PLAIN_CALLS, tools, True, json.dumps)
    assert "call_0 | call_1" in one
    assert '"additionalProperties": false' in one.splitlines()[3]
    assert ")*" not in one
    assert ")*" in more
