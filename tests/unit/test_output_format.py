"""The format of tool calls is inferred from the calls that a chat template renders."""

import json
import logging
import time
from functools import cache
from typing import Any

import pytest

from tests.call_formats import WRITTEN, loop, written
from tests.tiny_tokenizers import llama_tokenizer
from worker.engines.generation.response_reader import ResponseReader
from worker.grammar.tool_calls import accepts
from worker.text.chat_template.byte_tokenizer import byte_tokenizer
from worker.text.chat_template.inference import EXAMPLE_ARGUMENTS, TYPED_TOOLS, find_brackets
from worker.text.chat_template.template import ChatTemplate
from worker.text.detokenizer import TextSpan
from worker.text.parser import OutputParser
from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT

TURN = "{% for m in messages %}{% if m.tool_calls %}CALLS{% else %}[INST]{{ m.content }}[/INST]"
TURN += "{% endif %}{% endfor %}"
EACH = "{% for c in m.tool_calls %}EACH{% endfor %}"
# Templates whose calls cannot be inferred: JSON in <tool_call> is used.
UNKNOWN = {
    "no calls": "<tool_call><function=x><parameter=y>1</parameter></function></tool_call>",
    "refuses": "<tool_call>{{ raise_exception('no') }}",
    "ignores": "<tool_call>",
    "not read back": loop("hermes").replace("| tojson", "| tojson | replace('1.5', '2.5')"),
}


def learned(template: str) -> ChatTemplate:
    return ChatTemplate(llama_tokenizer(TURN.replace("CALLS", template)))


@pytest.mark.parametrize("name", WRITTEN)
def test_tool_call_format_is_the_templates(name: str) -> None:
    template = learned(loop(name))
    calls = template.output_format.tool_calls
    assert calls is not None
    names = ["a", "b"] if calls.separator is not None else ["a"]
    assert calls.render([(called, "{}") for called in names]) == written(name, *names)
    assert not any(note.startswith("calls:") for note in template.notes)
    assert len(template.examples) >= len(EXAMPLE_ARGUMENTS) - 2 * (name == "llama")
    assert all(accepts(calls, TYPED_TOOLS, text) for text, _ in template.examples)


@pytest.mark.parametrize("name", UNKNOWN)
def test_calls_that_cannot_be_inferred_are_json(name: str) -> None:
    template = learned(UNKNOWN[name])
    assert template.output_format.tool_calls == DEFAULT_TOOL_CALL_FORMAT
    assert any(note.startswith("calls:") for note in template.notes)


def test_word_of_a_type_decides_where_the_schema_does_not() -> None:
    tokenizer = llama_tokenizer(TURN.replace("CALLS", loop("typed tags")))
    tools = [{"type": "function", "function": {"name": "a"}}]
    text = '<calls><call name="a"><arg name="x" text="yes">7</arg><arg name="y" text="no">7</arg>'
    response = ResponseReader(tokenizer, ()).read(f"{text}</call></calls>", tools)
    assert [(name, json.loads(arguments)) for name, arguments in response.calls] == [
        ("a", {"x": "7", "y": 7})
    ]


@pytest.mark.parametrize(
    "text", ['[a(x="7", y=[1]), b()]', '[{"name": "a", "arguments": {"x": "7", "y": [1]}}]']
)
def test_calls_that_the_template_does_not_write_are_named_like_results(text: str) -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}<|tool_result_start|>{{ m.content }}"
    source += "<|tool_result_end|>{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    output = f"Well <|tool_call_start|>{text}<|tool_call_end|>"
    response = ResponseReader(llama_tokenizer(source), ()).read(output, tools)
    assert response.content.strip() == "Well"
    calls = [(name, json.loads(arguments)) for name, arguments in response.calls]
    assert ("a", {"x": "7", "y": [1]}) in calls


NESTED = """{% macro write(value) %}{% if value is mapping %}
{%- for k, v in value.items() %}[<|>]<{{ k }}>{{ write(v) }}[<|>]</{{ k }}>{% endfor %}
{%- elif value is iterable and value is not string %}
{%- for v in value %}[<|>]<item>{{ write(v) }}[<|>]</item>{% endfor %}
{%- else %}{{ value if value is string else value | tojson }}{% endif %}{% endmacro %}
{{- "[<|>]<calls>" }}{% for c in m.tool_calls %}[<|>]<call name="{{ c.function.name }}">
{{- write(c.function.arguments) }}[<|>]</call>{% endfor %}[<|>]</calls>"""


def test_lists_and_objects_may_be_elements() -> None:
    tokenizer = llama_tokenizer(TURN.replace("CALLS", NESTED))
    properties = {"text": {"type": "string"}, "o": {"type": "object"}, "e": {"type": "array"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "a", "parameters": parameters}}]
    n = "[<|>]"
    nested = f"{n}<item>{n}<o>1{n}</o>{n}<l>{n}<item>02{n}</item>{n}</l>{n}</item>"
    text = f"{n}<text>{n}<b>{n}</text>{n}<o>{n}<o>{nested}{n}</o>{n}</o>{n}<e>{n}</e>"
    output = f'{n}<calls>{n}<call name="a">{text}{n}</call>{n}</calls>'
    response = ResponseReader(tokenizer, ()).read(output, tools)
    assert (response.content, len(response.calls)) == ("", 1)
    expected = {"text": f"{n}<b>", "o": {"o": [{"o": 1, "l": ["02"]}]}, "e": []}
    assert json.loads(response.calls[0][1]) == expected


# Delimiters are words between two tokens, and content has some.
PARTS = """
{%- macro part(name, text) %}<|begin|>{{ name }}<|of|>{{ text }}<|finish|>{{ name }}<|of|>
{%- endmacro %}
{%- for m in messages %}<|begin|>turn by="{{ m.role }}"<|of|>
{%- if m.role == "assistant" %}
    {{- part("thought", m.reasoning_content or "") }}{{ part("answer", m.content or "") }}
    {%- if m.tool_calls %}<|begin|>calls<|of|>
    {%- for c in m.tool_calls %}<|begin|>call to="{{ c.function.name }}" n="{{ loop.index }}"<|of|>
    {%- for key, value in c.function.arguments.items() %}<|begin|>argument key="{{ key }}"<|of|>
        {{- value if value is string else value | tojson }}<|finish|>argument<|of|>
    {%- endfor %}<|finish|>call<|of|>{% endfor %}<|finish|>calls<|of|>{% endif %}
{%- else %}{{ m.content }}{% endif %}<|finish|>turn<|of|><|end|>{% endfor %}
{%- if add_generation_prompt %}<|begin|>turn by="assistant"<|of|><|begin|>thought<|of|>{% endif %}
"""
ANSWER = "<|begin|>answer<|of|>Well.<|finish|>answer<|of|>"
CALLS = """<|begin|>calls<|of|><|begin|>call to="a" n="1"<|of|><|begin|>argument key="x"<|of|>7\
<|finish|>argument<|of|><|finish|>call<|of|><|finish|>calls<|of|>"""
TURN_END = "<|finish|>turn<|of|>"
TOOL_A = [{"type": "function", "function": {"name": "a"}}]


def test_calls_of_words_between_tokens_are_constrained() -> None:
    template = ResponseReader(byte_tokenizer(PARTS), ()).template
    calls = template.output_format.tool_calls
    assert not any(note.startswith("calls:") for note in template.notes)
    assert calls is not None
    assert calls.render([("a", ""), ("b", "")]).count('n="2"') == 1
    assert len(template.examples) == len(EXAMPLE_ARGUMENTS)
    assert all(accepts(calls, TYPED_TOOLS, text) for text, _ in template.examples)


@pytest.mark.parametrize(
    ("text", "brackets"),
    [
        ("<a>one<b>1<c>one<b><a>two<b>2<c>two<b>", (("<a>", "<b>"), ("<c>", "<b>"))),
        ("<key>keyone</key><key>keytwo</key>", ()),  # the words are the model's
        ("<call>function<sep>nameone<call>function<sep>nametwo", ()),  # the same word
        ("<a>one<b><a>two<c>", ()),
        ("<role>user<text><role>model<text><file>12<text>", ()),
        ("<role>user\n?<end><role>model\nqcontentq<end>", ()),
    ],
)
def test_only_words_of_the_template_make_a_delimiter(text: str, brackets: object) -> None:
    assert find_brackets(text) == brackets


TEXTS = """{% for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|/think|>{% endif -%}
<|text|>{{ m.content }}<|/text|><|end|>{% endfor %}{% if add_generation_prompt %}[assistant]
{%- endif %}"""


LEAD_IN = """{% for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}{{ m.reasoning_content }} [THE ANSWER IS] {% endif %}{{ m.content }}
{%- endfor %}{% if add_generation_prompt %}[assistant]These are my steps: {% endif %}"""


@pytest.mark.parametrize("special", [False, True])
def test_words_of_the_prompt_may_begin_the_reasoning(special: bool) -> None:
    reader = ResponseReader(byte_tokenizer(LEAD_IN, special), ())
    response = reader.read("look up. [THE ANSWER IS] Blue.")
    assert (response.content, response.reasoning) == ("Blue.", "These are my steps: look up.")
    assert reader.read("look up.").reasoning == "These are my steps: look up."
    # The next prompt repeats what the model has read and written.
    asked = [{"role": "user", "content": "?"}]
    answered = {
        "role": "assistant",
        "reasoning_content": response.reasoning,
        "content": response.content,
    }
    before = reader.template.try_render(asked)
    assert reader.template.try_render([*asked, answered]).startswith(before)


def test_what_a_template_lacks_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onequeue.template")
    template = learned("<tool_call>")
    lacks = ". ".join(template.notes)
    template.disable_tool_call_format("of a test")
    records = [record for record in caplog.records if record.name == "onequeue.template"]
    assert {record.levelname for record in records} == {"INFO"}
    expected = [f"chat template: {lacks}"] if lacks else []
    expected.append(f"chat template: {template.notes[-1]}")
    assert [record.message for record in records] == expected
    assert template.notes[-1] == "calls: of a test; JSON in <tool_call> is used"
    assert all(note.count("; ") == 1 for note in template.notes)


# Habits of templates: how they write calls, and an output of their model.
PAIRS = "{% for key, value in c.function.arguments.items() %}"
LOST_COMMAS = f"""[{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}({PAIRS}
{{{{- key }}}}={{{{ value | tojson }}}}{{% endfor %}})
{{{{- ", " if not loop.last }}}}{{% endfor %}}]"""
HABITS: dict[str, tuple[str, str]] = {
    "JSON on several lines": (
        "<call>{{ m.tool_calls | map(attribute='function') | list | tojson(indent=2) }}",
        '<call>[{"name": "a", "arguments": {"x": 7}}]',
    ),
    "JSON in a block of code": (
        "Action:\n```json\n[{% for c in m.tool_calls %}\n    {\n        "
        '"tool": "{{ c.function.name }}",\n        "parameters": '
        "{{ c.function.arguments | tojson(indent=4) }}\n    }{{ ',' if not loop.last }}"
        "{% endfor %}\n]\n```",
        'Action:\n```json\n[{"tool": "a", "parameters": {"x": 7}}]\n```',
    ),
    "no comma between arguments": (LOST_COMMAS, "[a(x=7)]"),
    "a line for each Python call": (
        f"<calls>{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}({PAIRS}{{{{ key }}}}="
        "{{- value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        '{{ "\n" if not loop.last }}{% endfor %}</calls>',
        "<calls>a(x=7)\nb(y=8)</calls>",
    ),
    "the message's own list": (
        "<calls>{{ m.tool_calls | tojson }}</calls>",
        '<calls>[{"id": "1", "function": {"name": "a", "arguments": {"x": 7}}}]</calls>',
    ),
    "all values in quotes": (
        EACH.replace(
            "EACH",
            "<call>{{ c.function.name }}{{ '{' }}" + PAIRS + "{{ key }}:<q>{{ value }}<q>"
            "{{ ',' if not loop.last }}{% endfor %}}</call>",
        ),
        "<call>a{x:<q>7<q>,t:<q>7, 8<q>,l:[<q>7<q>,8],n:7.5}</call>",
    ),
    "a line feed after each call": (
        EACH.replace(
            "EACH",
            '<call>{"name": "{{ c.function.name }}", "arguments": '
            "{{- c.function.arguments | tojson }}}</call>" + '{{ "\n" }}',
        )
        + "<end>",
        '<call>{"name": "a", "arguments": {"x": 7}}</call>',
    ),
    "the section ends after several calls only": (
        EACH.replace(
            "EACH",
            "{{ '<calls>' if loop.first }}<call>{{ c.function.name }}<args>"
            "{{ c.function.arguments | tojson }}</call>"
            "{{ '</calls>' if loop.last and loop.index > 1 }}",
        ),
        '<calls><call>a<args>{"x": 7}</call></calls>',
    ),
    "values may be quoted as in XML": (
        loop("named closings"),
        "<call name=a><x>7</x><t><![CDATA[<7>\n]]></t></call>",
    ),
}
PARAMETERS = {"x": "integer", "t": "string", "l": "array", "n": "number"}
TYPED_TOOL_A = {
    "name": "a",
    "parameters": {"properties": {key: {"type": type_} for key, type_ in PARAMETERS.items()}},
}


@pytest.mark.parametrize("habit", HABITS)
def test_calls_are_inferred_whatever_the_habits_of_the_template(habit: str) -> None:
    source, output = HABITS[habit]
    tokenizer = llama_tokenizer(TURN.replace("CALLS", source))
    reader = ResponseReader(tokenizer, ())
    assert not any(note.startswith("calls:") for note in reader.template.notes)
    response = reader.read(f"Well. {output}" if output[0] != "[" else output, [
        {"type": "function", "function": TYPED_TOOL_A}
    ])  # fmt: skip
    assert response.content.strip() in ("Well.", "")
    (name, arguments), *others = response.calls
    assert others == [("b", '{"y": 8}')] * output.count("b(")
    expected: dict[str, Any] = {"x": 7}
    if "<q>" in output:
        expected = {"x": 7, "t": "7, 8", "l": ["7", 8], "n": 7.5}
    if "CDATA" in output:
        expected["t"] = "<7>\n"
    assert (name, json.loads(arguments)) == ("a", expected)


# Each part of a message is a message of its own, with a header.
TO = """{% for m in messages %}<|start|>{{ m.role }}
{%- if m.role == "assistant" %}
{%- if m.reasoning_content %} to=self<|text|>{{ m.reasoning_content }}<|next|><|start|>assistant
{%- endif %}
{%- for c in m.tool_calls or [] %} to={{ c.function.name }}<|text|><calls>
<call of="{{ c.function.name }}">
{%- for key, value in c.function.arguments.items() %}<arg of="{{ key }}">
    {{- value if value is string else value | tojson }}</arg>{% endfor %}</call>
</calls>{{ "<|next|><|start|>assistant" if not loop.last }}{% endfor %}
{%- if not m.tool_calls %} to=user<|text|>{{ m.content }}{% endif %}
{%- else %}<|text|>{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# The prompt begins with a system message, the text of a whole conversation does not.
TO_WITH_DEFAULT = (
    "{% if add_generation_prompt or tools %}<|start|>system<|text|>!<|end|>{% endif %}"
)
TO_WITH_DEFAULT += TO
NAMED = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == "assistant" %}{% if m.content %}>>>all
{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}
{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>>>>{% endif %}"""
CALL_TO = ' to=a<|text|><calls>\n<call of="a"><arg of="x">7</arg></call>\n</calls>'
NEXT = "<|next|><|start|>assistant"


@pytest.mark.parametrize("source", [TO, NAMED])
@pytest.mark.parametrize("text", ["\n", "a", " to=", "a\n", "all", ">", ">>>", "<|start|>"])
def test_endless_headers_take_linear_time(source: str, text: str) -> None:
    output_format = ResponseReader(byte_tokenizer(source), ()).template.output_format
    seconds = []
    for length in (2000, 8000):
        parser = OutputParser(output_format, "", True, TOOL_A)
        started = time.thread_time()
        for char in text * (length // len(text)):
            parser.feed(TextSpan(char))
        parser.finish()
        seconds.append(time.thread_time() - started)
    assert seconds[1] < 8 * seconds[0] + 0.4


BESIDE = """{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}
{{- "<|text_start|>" ~ (m.content or "") ~ "<|text_end|>" }}
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters":
{{- c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


PLAN = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}PLAN{% for c in m.tool_calls %}"
PLAN += "<call>{{ c.function.name }}<args>{{ c.function.arguments | tojson }}</call>{% endfor %}"
PLAN += "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
PLAN += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


PLAN = PLAN.replace("PLAN", "<|PLAN_START|>{{ m.tool_plan }}<|PLAN_END|>")
# The template has no calls.
NO_CALLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# The end of the generation prompt is no part of a call.
HEADERS = """{% for m in messages %}{% if m.tool_calls %}{{ H }}
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters":
{{- " " }}{{ c.function.arguments | tojson }}}{% endfor %}{% else %}<|role|>{{ m.role }}
{{- "<|text|>\n" }}{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}{{ H }}{% endif %}"""
HEADERS = HEADERS.replace("{{ H }}", '{{- "\\n<|role|>assistant<|text|>\\n" }}')
# The recipient of a call stands behind the channel or before it.
RECIPIENTS = """{% for m in messages %}{% set start = "<|start|>" ~ m.role ~ "<|channel|>" %}
{%- if m.thinking %}{{ start }}analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- for c in m.tool_calls or [] %}{{ start }}commentary to=functions.{{ c.function.name }} json
{{- "<|message|>" }}{{ c.function.arguments | tojson }}<|call|>{% endfor %}
{%- if m.content %}{{ start }}final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL_IN_CHANNEL = '<|channel|>commentary to=functions.a json<|message|>{"x": 7}<|call|>'
CALL_TO_CHANNEL = ' to=functions.a<|channel|>commentary json<|message|>{"x": 7}<|call|>'
# The template has no calls, but its instructions do; it removes reasoning and its delimiters.
TOLD = """{% if tools %}Write <|tool_call|> and a list, or <my_calls></my_calls>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{% set text = m.content.split("</thought>")[-1] %}
{{- text.split("<answer>")[-1].split("</answer>")[0] }}{% endfor %}"""
# The text before content is no delimiter of reasoning.
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ROLES = ROLES.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
# Calls are messages of a role that only this template has.
OWN_ROLE = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'call' %}<|my_call|>{% endif %}"
OWN_ROLE += "{{ m.content }}{% endfor %}"
# The tokens of the instructions remain in calls.
INSTRUCTIONS = "{% if tools %}Write <tool_call>NAME<k>KEY</k><v>VALUE</v></tool_call>{% endif %}"
INSTRUCTIONS += "{% for m in messages %}<role>{{ m.role }}{{ m.content }}{% endfor %}"
HERMES = TURN.replace("CALLS", loop("hermes"))
PYTHON, KEYS, BRACKETS, SECTION, LIST, CODER = (
    TURN.replace("CALLS", loop(name))
    for name in ("bare python", "pairs", "args", "section", "list", "coder")
)
COMPACT = KEYS.replace('{{ "\\n" }}', "")
TRIANGLES = HERMES.replace(
    "{{ m.content }}", "◁think▷{{ m.reasoning_content }}◁/think▷{{ m.content }}"
)
TURNS = """{% for m in messages %}<|{{ m.role }}|><|text|>{% if m.role == 'assistant' %}
<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|><|text|>{% endif %}"""
TAGS = "{% if thinking %}Write <think></think> and <response></response>{% endif %}" + NO_CALLS
ROLE = TURN.replace("CALLS", "<|go|>\ncall<|of|>\n{{ m.tool_calls[0].function | tojson }}<|go|>")
HERMES_CALL = '<tool_call>\n{"name": "a", "arguments": {"x": 7}}\n</tool_call>'
OPEN_CALL = "<tool_call>a<arg_key>x</arg_key><arg_value>7</arg_value>"
JSON_CALL = '{"name": "a", "parameters": {"x": 7}}'
OUTPUTS: list[tuple[str, str, tuple[str, str, int]]] = [  # content, reasoning, calls of `a`
    (PARTS, f"Hm.<|finish|>thought<|of|>{ANSWER}{TURN_END}", ("Well.", "Hm.", 0)),
    (PARTS, f"Hm.<|finish|>thought<|of|>{ANSWER}{CALLS}{TURN_END}", ("Well.", "Hm.", 1)),
    (PARTS, ANSWER + TURN_END, ("Well.", "", 0)),  # nothing closes the reasoning
    (PARTS, "Hm.", ("", "Hm.", 0)),
    (TEXTS, "<|text|>Well.<|/text|>", ("Well.", "", 0)),
    (TEXTS, "<|think|>Hm.<|/think|><|text|>Well.<|/text|>", ("Well.", "Hm.", 0)),
    (TEXTS, "<|think|>Hm.<|text|>Well.<|/text|>", ("Well.", "Hm.", 0)),
    # the template shows no reasoning
    (HERMES, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}", ("", "Hm.", 1)),
    (HERMES, "The tags <think> and </think>.", ("The tags <think> and </think>.", "", 0)),
    (HEADERS, JSON_CALL, ("", "", 1)),
    (TO, " to=user<|text|>Well.", ("Well.", "", 0)),
    (TO, f" to=self<|text|>Hm.{NEXT} to=user<|text|>Well.", ("Well.", "Hm.", 0)),
    (TO, f"{CALL_TO}{NEXT}{CALL_TO}", ("", "", 2)),
    (TO_WITH_DEFAULT, " to=user<|text|>Well.", ("Well.", "", 0)),
    (TO_WITH_DEFAULT, f" to=self<|text|>Hm.{NEXT} to=user<|text|>Well.", ("Well.", "Hm.", 0)),
    (TO, f" to=self<|text|>Hm.{NEXT}{CALL_TO}", ("", "Hm.", 1)),
    (TO, f" to=user<|text|>Say to=self.{NEXT}{CALL_TO}", ("Say to=self.", "", 1)),
    (NAMED, "all\nWell.\nall\na\n{}", ("Well.\nall\na\n{}", "", 0)),
    (NAMED, 'a\n{"x": 7}>>>a\n{"x": 7}', ("", "", 2)),
    (NAMED, 'all\nWell.\n>>>a\n{"x": 7}', ("Well.", "", 1)),
    (NO_CALLS, f"Well. {HERMES_CALL}", ("Well.", "", 1)),
    (NO_CALLS, "Well. <|tool_call_start|>[a(x=7)]<|tool_call_end|>", ("Well.", "", 1)),
    (NO_CALLS, 'Well. <tool_call>a\n{"x": 7}</tool_call>', ("Well.", "", 1)),
    (NO_CALLS, "Well. <tool_call>a\n<k>x</k>\n<v>7</v>\n</tool_call>", ("Well.", "", 1)),
    (NO_CALLS, "Well. <tool_call>\n<f=a>\n<p=x>\n7\n</p>\n</f>\n</tool_call>", ("Well.", "", 1)),
    (NO_CALLS, 'Well. <tool_call><f name="a"><p name="x">7</p></f></tool_call>', ("Well.", "", 1)),
    (NO_CALLS, 'a\n{"x": 7}', ("", "", 1)),
    (NO_CALLS, 'a \n{"x": 7}\nWell.', ("Well.", "", 1)),
    (NO_CALLS, 'b\n{"x": 7}', ('b\n{"x": 7}', "", 0)),
    (NO_CALLS, 'Well. a\n{"x": 7}', ('Well. a\n{"x": 7}', "", 0)),
    (RECIPIENTS, f"{ANALYSIS}{CALL_IN_CHANNEL}", ("", "Hm.", 1)),
    (RECIPIENTS, f"{ANALYSIS}{CALL_TO_CHANNEL}", ("", "Hm.", 1)),
    (RECIPIENTS, CALL_TO_CHANNEL, ("", "", 1)),
    (TRIANGLES, f"◁think▷Hm.◁/think▷Well. {HERMES_CALL}", ("Well.", "Hm.", 1)),
    (TOLD, f"Well. <|tool_call|>[{JSON_CALL}, {JSON_CALL}]", ("Well.", "", 2)),
    (TOLD, f"Well. <my_calls>[{JSON_CALL}]</my_calls>", ("Well.", "", 1)),
    (TOLD, '<my_calls>[{"function": {"name": "a", "arguments": {"x": 7}}}]', ("", "", 1)),
    (TOLD, "<thought>Hm.</thought><answer>\nWell.\n</answer>", ("Well.", "Hm.", 0)),
    (TOLD, f"<my_calls>\n{JSON_CALL}\n{JSON_CALL}\n</my_calls>", ("", "", 2)),
    (ROLES, "Well.", ("Well.", "", 0)),
    (OWN_ROLE, f"Well. <|my_call|>[{JSON_CALL}]", ("Well.", "", 1)),
    (NO_CALLS, f"Well. <|tool_call|>[{JSON_CALL}]<|/tool_call|>", ("Well.", "", 1)),
    # JSON or Python, whichever the template writes
    (HEADERS, "[a(x=7), a(x=7)]", ("", "", 2)),
    (HEADERS, "[b(x=7)]", ("[b(x=7)]", "", 0)),
    (HEADERS, "[a](http://b)", ("[a](http://b)", "", 0)),
    (PYTHON, f"[{JSON_CALL}]", ("", "", 1)),
    (PYTHON, '[{"x": 7}]', ('[{"x": 7}]', "", 0)),
    # habits from other formats
    (HEADERS, f"```json\n[{JSON_CALL}]\n```", ("", "", 1)),
    (HEADERS, f"<tool_call>{JSON_CALL}</tool_call>", ("", "", 1)),
    (HEADERS, '```json\n[{"x": 7}]\n```', ('```json\n[{"x": 7}]\n```', "", 0)),
    (HEADERS, '{"function": "a", "parameters": {"x": 7}}', ("", "", 1)),
    (HERMES, "<tool_call>{'name': 'a', 'arguments': {'x': 7}}</tool_call>", ("", "", 1)),
    (KEYS, f"Well. <tool_call>{JSON_CALL}</tool_call>", ("Well.", "", 1)),
    (BRACKETS, f"[TOOL_CALLS][{JSON_CALL}, {JSON_CALL}]", ("", "", 2)),
    (BRACKETS, '[TOOL_CALLS]a{"x": 7}[TOOL_CALLS]a{"x": 7}', ("", "", 2)),
    (SECTION, '<calls> <call> functions.a:0 <args> {"x": 7} </call> </calls>', ("", "", 1)),
    (INSTRUCTIONS, "<tool_call>a<k>x</k><v>7</v></tool_call>", ("", "", 1)),
    (LIST, f"Well. <tool_call> [{JSON_CALL}]</tool_call>", ("Well.", "", 1)),
    (BRACKETS, f"Well. <tool_call>{JSON_CALL}</tool_call>", ("Well.", "", 1)),
    # calls without delimiters after text, at the start of a line
    (HEADERS, f"Well.\n{JSON_CALL}", ("Well.", "", 1)),
    (HEADERS, f"Well.\n\n```json\n[{JSON_CALL}]\n```", ("Well.", "", 1)),
    (HEADERS, "Well.\n[a(x=7)]", ("Well.", "", 1)),
    (PYTHON, "Well.\n[a(x=7), a(x=7)]", ("Well.", "", 2)),
    (HEADERS, f"Write {JSON_CALL}", (f"Write {JSON_CALL}", "", 0)),
    (HEADERS, 'As in\n{"name": "b"}', ('As in\n{"name": "b"}', "", 0)),
    (HEADERS, "See\n[note", ("See\n[note", "", 0)),
    # other styles, in the place of the template's
    (HERMES, f"Well.\n```json\n{JSON_CALL}\n```\nWell.", ("Well.\n\nWell.", "", 1)),
    (HERMES, f"```xml\n<response>\n{JSON_CALL}\n</response>\n```", ("", "", 1)),
    (HERMES, f"<tools>{JSON_CALL}</tools>", ("", "", 1)),
    (HERMES, "```tool_code\na(x=7)\n```", ("", "", 1)),
    (HERMES, "```python\na(7)\n```", ("```python\na(7)\n```", "", 0)),
    (HERMES, f"{HERMES_CALL}\n```python\n7\n```", ("```python\n7\n```", "", 1)),
    (HERMES, '<function=a>{"x": 7}</function>\n' * 2, ("", "", 2)),
    (HERMES, '<function name="a">\n{"x": 7}\n</function>', ("", "", 1)),
    (HERMES, '<tool_call>a\n{"x": 7}\n</tool_call>', ("", "", 1)),
    (HERMES, "<tool_call>a(x=7)</tool_call>", ("", "", 1)),
    (HERMES, '<tool_call><f=a>{"x": 7}</f></tool_call>', ("", "", 1)),
    (HERMES, "<tool_call><f=a>\n<p=x>7</p>\n</f></tool_call>", ("", "", 1)),
    (HERMES, '<tool_call>b {"x": 7}</tool_call>', ('<tool_call>b {"x": 7}</tool_call>', "", 0)),
    (HEADERS, 'Well.\n<function=a>{"x": 7}</function>', ("Well.", "", 1)),
    (NO_CALLS, f"Well.\n[TOOL_CALLS] [{JSON_CALL}]", ("Well.", "", 1)),
    (NO_CALLS, '[TOOL_CALLS]a[ARGS]{"x": 7}[TOOL_CALLS]a{"x": 7}', ("", "", 2)),
    (LIST, '[TOOL_CALLS]a{"x": 7}[TOOL_CALLS] a [ARGS] {"x": 7}', ("", "", 2)),
    (LIST, '[TOOL_CALLS]a[CALL_ID]b1[ARGS]{"x": 7}', ("", "", 1)),
    (LIST, "The mark [TOOL_CALLS] a.", ("The mark [TOOL_CALLS] a.", "", 0)),
    (BRACKETS, '[TOOL_CALLS]a[CALL_ID]b1[ARGS]{"x": 7}', ("", "", 1)),
    (PYTHON, "a(x=7)\na(x=7)", ("", "", 2)),
    (PYTHON, "a(x=7), a(x=7)", ("", "", 2)),
    (PYTHON, "Well: a(x=7)", ("Well: a(x=7)", "", 0)),
    (PYTHON, "b(x=7)", ("b(x=7)", "", 0)),
    (HERMES, f"<tool_call>```json\n{JSON_CALL}\n```</tool_call>", ("", "", 1)),
    (NO_CALLS, f"<tool_call>```json\n{JSON_CALL}\n```</tool_call>", ("", "", 1)),
    (NO_CALLS, f"<|tool_call|>[{JSON_CALL}]<|end|>", ("", "", 1)),
    (KEYS, '<tool_call>a\n{"x": 7}\n</tool_call>', ("", "", 1)),
    (CODER, '<tool_call><function=a>\n{"x": 7}</function></tool_call>', ("", "", 1)),
    # parts of the delimiters are missing
    (CODER, "<tool_call><function=a>\n<parameter=x>7</parameter></tool_call>", ("", "", 1)),
    (SECTION, '<calls><call>functions.a:0<args>{"x": 7}</calls>', ("", "", 1)),
    (SECTION, '<calls><call>a:0<args>{"x": 7}</call></calls>', ("", "", 1)),
    (SECTION, '<calls><call>functions.a<args>{"x": 7}</call></calls>', ("", "", 1)),
    (SECTION, '<call><call>a<args>{"x": 7}</call></call>', ("", "", 1)),
    (ROLE, 'call<|of|>\n{"name": "a", "arguments": {"x": 7}}', ("", "", 1)),
    # delimiters of the turn
    (TURNS, "<|text|>Well.<|end|>\n", ("Well.", "", 0)),
    (TURNS, "<think>Hm.</think>Well.<|end|>", ("Well.", "Hm.", 0)),
    (TURNS, "Hm.</think>Well.", ("Well.", "Hm.", 0)),
    (TURNS, "<think>Hm.<|end|>", ("", "Hm.", 0)),
    (TAGS, "<think>Hm.</think><response>Well.</response>", ("Well.", "Hm.", 0)),
    # the next call ends one that nothing closes
    (SECTION, '<calls><call>functions.a:0<args>{"x": 7}' * 2, ("", "", 2)),
    (KEYS, f"{OPEN_CALL}{OPEN_CALL}</tool_call>", ("", "", 2)),
    # delimiters without a call
    (SECTION, "Write <calls> and </calls>.", ("Write <calls> and </calls>.", "", 0)),
    (HERMES, '<tool_call>{"x": 7}', ('<tool_call>{"x": 7}', "", 0)),
    (BESIDE, JSON_CALL, ("", "", 1)),
    (BESIDE, f"<|text_start|>{JSON_CALL}<|text_end|>", ("", "", 1)),
    (BESIDE, f"<|text_start|><|text_end|>{JSON_CALL}", ("", "", 1)),
    (PLAN, '<|PLAN_START|>Hm.<|PLAN_END|><call>a<args>{"x": 7}</call>', ("", "Hm.", 1)),
]


@cache
def reader_of(source: str, special: bool) -> ResponseReader:
    return ResponseReader(byte_tokenizer(source, special), ())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("source", "text", "expected"), OUTPUTS)
def test_outputs_are_read_in_the_format_of_the_template(
    source: str, text: str, expected: tuple[str, str, int], special: bool
) -> None:
    reader = reader_of(source, special)
    is_inferred = not any(note.startswith("calls:") for note in reader.template.notes)
    assert is_inferred or source in (
        *(NO_CALLS, INSTRUCTIONS, OWN_ROLE, ROLES, TAGS, TEXTS, TOLD, TURNS),
    )
    response = reader.read(text, TOOL_A)
    calls = [(name, json.loads(arguments)) for name, arguments in response.calls]
    content, reasoning, count = expected
    assert (response.content.strip(), response.reasoning) == (content, reasoning)
    assert calls == [("a", {"x": 7})] * count


def test_text_that_ends_a_turn_is_dropped_at_the_end_alone() -> None:
    reader = reader_of(TURNS.replace("<|end|>", "</a>"), False)
    assert reader.read("<a>x</a> y</a>").content == "<a>x</a> y"


@pytest.mark.parametrize("quoted", ["'it's'", "'it's, or'", "''a' b''", "'\\')]'", "''", '"\'"'])
def test_quotes_within_quotes_do_not_hide_the_text_after_calls(quoted: str) -> None:
    tools = [{"type": "function", "function": TYPED_TOOL_A}]
    response = reader_of(PYTHON, False).read(f"[a(t={quoted}, x=7)]\nWell.", tools)
    [(_, arguments)] = response.calls
    assert response.content == "Well."
    assert json.loads(arguments) == {"t": quoted[1:-1].replace("\\", ""), "x": 7}


@pytest.mark.parametrize(
    ("source", "entries"),
    [
        (COMPACT, "<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n<arg_key>t</arg_key>\nTEXT"),
        (KEYS, "<arg_key>x</arg_key><arg_value>7\n<arg_key>t</arg_key> TEXT"),
        (CODER, "\n<parameter=x>\n7\n<parameter=t>\n8 <parameter=z>\n</parameter>\n"),
        (CODER, "<parameter=t><![CDATA[8 </parameter>]]></parameter><parameter=x>7</parameter>"),
    ],
)
def test_values_end_where_the_next_begins(source: str, entries: str) -> None:
    entries = entries.replace("TEXT", "<arg_value>8 <parameter=z></arg_value>")
    call = f"a{entries}" if "arg_key" in entries else f"<function=a>{entries}</function>"
    tools = [{"type": "function", "function": TYPED_TOOL_A}]
    response = reader_of(source, False).read(f"<tool_call>{call}</tool_call>", tools)
    text = "8 </parameter>" if "CDATA" in entries else "8 <parameter=z>"
    [(name, arguments)] = response.calls
    assert (name, json.loads(arguments)) == ("a", {"x": 7, "t": text})


def test_reasoning_beside_calls_may_be_a_plan() -> None:
    history_format = reader_of(PLAN, False).template.history_format
    assert history_format is not None
    assert history_format.reasoning_key == "tool_plan"
