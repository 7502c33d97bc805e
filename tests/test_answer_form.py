"""How calls are written is found out by having a chat template write some."""

import pytest

from tests.tiny_tokenizers import llama_tokenizer
from worker.grammar.notation import calls_grammar
from worker.text.answer_form import PLAIN_CALLS, AnswerForm, CallForm, call_form
from worker.text.chat_template import ChatTemplate

TURN = "{% for m in messages %}{% if m.tool_calls %}CALLS{% else %}[INST]{{ m.content }}[/INST]"
TURN += "{% endif %}{% endfor %}"
EACH = "{% for c in m.tool_calls %}EACH{% endfor %}"
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
        CallForm('{"name": "', '", "parameters": ', None, "}"),
    ),
    "mistral": (
        EACH.replace(
            "EACH", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        )
        + "</s>",
        CallForm("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", ""),
    ),
    "list": (
        "[TOOL_CALLS] ["
        + EACH.replace(
            "EACH",
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
            '{{ ", " if not loop.last }}',
        )
        + "]</s>",
        CallForm(
            '[TOOL_CALLS] [{"name": "',
            '", "arguments": ',
            '}, {"name": "',
            "}]",
            several_in_mark=True,
        ),
    ),
    "tags": ("<tool_call><function=x><parameter=y>1</parameter></function></tool_call>", None),
    "refuses": ("<tool_call>{{ raise_exception('no') }}", None),
    "ignores": ("<tool_call>", None),
}


def found(template: str) -> CallForm | None:
    return ChatTemplate(llama_tokenizer(TURN.replace("CALLS", template))).calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_the_templates_own(name: str) -> None:
    template, expected = TEMPLATES[name]
    assert found(template) == expected


def test_a_model_without_marks_has_no_form() -> None:
    assert call_form(None, lambda messages: "") is None


def test_a_grammar_names_the_tools_and_their_parameters() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b"}},
    ]
    one = calls_grammar(PLAIN_CALLS, tools, False, repr)
    more = calls_grammar(PLAIN_CALLS, tools, True, repr)
    assert "call_0 | call_1" in one
    assert '"additionalProperties": false' in one.splitlines()[3]
    assert ")*" not in one
    assert ")*" in more


def test_a_response_template_whose_calls_have_no_mark_has_no_form() -> None:
    form = AnswerForm({"start_anchor": "\n", "fields": {"tool_calls": {"content": "json"}}})
    assert call_form(form, lambda messages: TURN) is None
    assert call_form(form, lambda messages: '{"name_of_it"') is None
