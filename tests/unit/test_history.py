"""Earlier calls and their results are rendered in the form that the template takes: with small
templates, and with those of real checkpoints where they are present."""

import itertools
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import to_builtins

from batching.errors import InvalidInput
from server.apis.openai.chat import ChatBuilder, ChatRequest
from server.apis.openai.endpoint import ParsedRequest
from server.apis.openai.request_fields import decode
from server.core.delta_stream import UsageCounts
from tests.tiny_tokenizers import llama_tokenizer
from worker.messages.deltas import Delta, DeltaPart
from worker.messages.generation import Chat
from worker.text.chat_template.history import (
    HistoryAdapter,
    HistoryFormat,
    MessageOrder,
    fold_messages,
)
from worker.text.chat_template.template import ChatTemplate

REAL = Path(__file__).parents[3] / "shared" / "templates"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": f"It is {name}", "parameters": schema},
    }


TOOLS = [tool("get_weather", city={"type": "string", "description": "Where"}), tool("clock")]
ASKED = {"role": "user", "content": "What is the weather?"}
CITY = {"city": "Zürich"}


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(llama_tokenizer(source))


def chat(messages: list[Any], **fields: Any) -> tuple[ChatRequest, Chat]:
    body = {"messages": messages, "tools": TOOLS, **fields}
    request = decode(body, ChatRequest, lambda _: "demo", {})
    prompt = request.generation_inputs(1)[0].prompt
    assert isinstance(prompt, Chat)
    return request, prompt


def answered(chat_template: ChatTemplate, messages: list[Any], *parts: DeltaPart) -> dict[str, Any]:
    """Return the assistant message of a response."""
    request, _ = chat(messages)
    parsed, model = ParsedRequest(request, request.generation_inputs(1)), cast(Any, chat_template)
    builder = ChatBuilder(parsed, UsageCounts(), model)
    choice = builder.choice(Delta(0, list(parts), finish_reason="tool_calls"))
    message: dict[str, Any] = to_builtins(choice.message)
    return message


def calling(arguments: Any = CITY, name: str = "get_weather") -> DeltaPart:
    return DeltaPart("call", json.dumps(arguments, ensure_ascii=False), name)


def results(message: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]


def in_form(chat_template: ChatTemplate, messages: list[Any]) -> list[dict[str, Any]]:
    assert chat_template.history_format is not None
    return HistoryAdapter(chat_template.history_format).adapt(messages)


def rendered(chat_template: ChatTemplate, messages: list[Any]) -> str:
    return chat_template.render(chat(messages)[1]).text


def second_turn(chat_template: ChatTemplate, parts: list[DeltaPart], *texts: str) -> str:
    message = answered(chat_template, [ASKED], *parts)
    return rendered(chat_template, [ASKED, message, *results(message, *texts)])


def shown(text: str, arguments: dict[str, Any]) -> int:
    """Count their occurrences as JSON."""
    decoder = json.JSONDecoder()
    count = 0
    for match in re.finditer(r"\{", text):
        try:
            count += decoder.raw_decode(text, match.start())[0] == arguments
        except ValueError:
            continue
    return count


# ── small templates, each with other requirements ──

HEAD = "{%- for m in messages -%}[{{ m.role }}]"
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}'
LOOP = "{%- for c in m.tool_calls or [] -%}" + CALL + "</tool_call>{%- endfor -%}"
OBJECTS = LOOP.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TEXTS = LOOP.replace("ARGUMENTS", "{{ c.function.arguments }}")
SAYS = '{{ m.content or "" }}'
END = '{%- endfor -%}{{ "[assistant]" if add_generation_prompt }}'
REFUSED = "{{ raise_exception('IDs have nine letters') if ID | length != 9 }}"
NINE = (
    "{%- if m.role == 'tool' -%}" + REFUSED.replace("ID", "m.tool_call_id") + "{%- endif -%}"
    "{%- for c in m.tool_calls or [] -%}" + REFUSED.replace("ID", "c.id") + "{{ c.id }}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor -%}"
    "{{ m.tool_call_id }}"
)
NAMED = (
    "{{ m.tool_call_id if m.role == 'tool' }}{%- for c in m.tool_calls or [] -%}"
    "functions.{{ c.function.name }}:{{ loop.index0 }}{{ c.function.arguments | tojson }}"
    "{%- endfor -%}"
)
NOT_BOTH = "{%- if m.content -%}{{ m.content }}{%- else -%}" + OBJECTS + "{%- endif -%}"
FIRST_ONLY = SAYS + OBJECTS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
SMALL = [
    (SAYS + OBJECTS, HistoryFormat()),
    ("{{ '' + m.content }}" + OBJECTS, HistoryFormat(empty_content="empty")),
    ("{{ m.content }}" + OBJECTS, HistoryFormat()),
    ("{{ m.get('content') }}" + OBJECTS, HistoryFormat(empty_content="empty")),
    (
        "{%- if m.content is none -%}" + OBJECTS + "{%- else -%}{{ m.content }}{%- endif -%}",
        HistoryFormat(empty_content="null", separate_content=True),
    ),
    (SAYS + TEXTS, HistoryFormat(arguments="text")),
    (SAYS + NINE, HistoryFormat(call_ids="nine")),
    (SAYS + NINE.replace("!= 9", "< 9"), HistoryFormat(call_ids="nine")),
    (SAYS + NAMED, HistoryFormat(call_ids="named")),
    (NOT_BOTH, HistoryFormat(separate_content=True)),
    (OBJECTS + SAYS, HistoryFormat(separate_content=True)),
    (FIRST_ONLY, HistoryFormat(one_call=True)),
    (SAYS, HistoryFormat(calls_in_content=True)),
    (
        "{%- if m.role != 'tool' -%}" + SAYS + OBJECTS + "{%- endif -%}",
        HistoryFormat(results="user"),
    ),
    (
        "{{ raise_exception('no') if m.role == 'tool' }}" + SAYS,
        HistoryFormat(calls_in_content=True, results="user"),
    ),
    ("{{ (m.content or 0) / 0 }}", None),
    ("{%- macro f() -%}{{ f() }}{%- endmacro -%}{{ f() }}", None),
    ("{{ ", None),
]


def small(body: str) -> ChatTemplate:
    return template_of(HEAD + body + END)


@pytest.mark.parametrize(("template", "expected"), SMALL)
def test_history_format_is_inferred(template: str, expected: HistoryFormat | None) -> None:
    assert small(template).history_format == expected


def test_system_messages_alone_may_have_parts() -> None:
    system = "{{ m.content[0]['text'] if m.role == 'system' else m.content }}"
    chat_template = small(system + OBJECTS)
    messages = [{"role": "system", "content": "Hm."}, ASKED]
    text = rendered(chat_template, messages)
    assert text.endswith(f"[user]{ASKED['content']}[assistant]")
    assert text.startswith("[system]Hm.")


def test_model_without_a_template_loads() -> None:
    assert ChatTemplate(llama_tokenizer(None)).history_format is None


@pytest.mark.parametrize("template", [item for item, form in SMALL if form])
def test_calls_and_the_content_before_them_are_rendered(template: str) -> None:
    parts = [DeltaPart("content", "Well."), calling(), calling({}, "clock")]
    text = second_turn(small(template), parts, "sunny", "noon")
    text = text[text.index("[user]") :]
    positions = [text.index(item) for item in ("Well.", "get_weather", "Zürich", "clock")]
    assert positions == sorted(positions)
    assert text.count("sunny") == text.count("noon") == 1
    assert (shown(text, CITY), shown(text, {})) == (1, 1) or "functions.clock:1{}" in text
    assert text.endswith("[assistant]")


def test_single_calls_are_followed_by_their_results() -> None:
    text = second_turn(small(FIRST_ONLY), [calling(), calling({}, "clock")], *"12")
    text = text[text.index("[user]") :]
    assert re.findall(r"\[(\w+)\](\d?)", text) == [
        ("user", ""), ("assistant", ""), ("tool", "1"), ("assistant", ""), ("tool", "2"),
        ("assistant", ""),
    ]  # fmt: skip


def test_results_follow_the_order_of_their_calls() -> None:
    chat_template = small(SAYS + OBJECTS)
    message = answered(chat_template, [ASKED], calling(), calling({}, "clock"))
    tool_results = results(message, "sunny", "noon")
    in_order, turned = (
        rendered(chat_template, [ASKED, message, *item])
        for item in (tool_results, tool_results[::-1])
    )
    assert in_order == turned
    [_, *shown] = in_form(
        chat_template, [message, *({**item, "tool_call_id": None} for item in tool_results)]
    )
    assert [item["tool_call_id"] for item in shown] == [
        item["tool_call_id"] for item in tool_results
    ]


FOREIGN = ["call_0123456789abcdef01234567", "toolu_01", "call_0", "call_0", None]


@pytest.mark.parametrize("ids", [FOREIGN[:2], FOREIGN[2:4], FOREIGN[3:], ["abcdefgh1", "x"]])
def test_foreign_ids_are_adapted_equally_in_calls_and_results(ids: list[str | None]) -> None:
    marked = NINE.replace("{{ c.id }}", "%{{ c.id }}%")
    marked = marked.replace(
        "{{ m.tool_call_id }}", "{{ '%' ~ m.tool_call_id ~ '%' if m.tool_call_id }}"
    )
    chat_template = small(SAYS + marked)
    messages: list[Any] = [ASKED]
    for turn in range(2):  # the second has the same ids again
        function = {"name": "clock", "arguments": "{}"}
        calls = [{"id": id, "type": "function", "function": function} for id in ids]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        tool_results: list[Any] = [
            {"role": "tool", "tool_call_id": id, "content": f"{turn}-{n}"}
            for n, id in enumerate(ids)
        ]
        messages += [{k: v for k, v in item.items() if v is not None} for item in tool_results]
    text = rendered(chat_template, messages)
    shown_ids = re.findall("%(.*?)%", text.partition(ASKED["content"])[2])
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in shown_ids)
    assert shown_ids[0:2] == shown_ids[2:4]
    assert shown_ids[4:6] == shown_ids[6:8]
    assert len(set(shown_ids)) == 4
    assert ("abcdefgh1" in shown_ids) == ("abcdefgh1" in ids)
    assert rendered(chat_template, messages) == text  # the prefix stays


@pytest.mark.parametrize(
    ("template", "expected"), [(OBJECTS, "call_[0-9a-f]{24}"), (NINE, "[0-9a-f]{9}")]
)
def test_new_call_ids_have_the_templates_form(template: str, expected: str) -> None:
    chat_template = small(SAYS + template)
    calls = answered(chat_template, [ASKED], calling(), calling())["tool_calls"]
    assert calls[0]["id"] != calls[1]["id"]
    assert all(re.fullmatch(expected, call["id"]) for call in calls)
    [message] = in_form(chat_template, [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert [call["id"] for call in message["tool_calls"]] == [call["id"] for call in calls]


def test_named_ids_count_through_the_conversation() -> None:
    chat_template = small(SAYS + NAMED)
    first = answered(chat_template, [ASKED], calling(), calling({}, "clock"))
    assert [call["id"] for call in first["tool_calls"]] == [
        "functions.get_weather:0", "functions.clock:1"]  # fmt: skip
    so_far = [ASKED, first, *results(first, "sunny", "noon")]
    second = answered(chat_template, so_far, calling())
    assert second["tool_calls"][0]["id"] == "functions.get_weather:2"
    text = rendered(chat_template, [*so_far, second, *results(second, "rain")])
    assert text.count("functions.get_weather:0") == 4  # this template's count
    assert text.endswith("[tool]rainfunctions.get_weather:0[assistant]")


def test_ids_that_the_template_shows_are_counted_through_the_conversation() -> None:
    shown = "{{ m.tool_call_id if m.role == 'tool' }}{%- for c in m.tool_calls or [] -%}"
    shown += "{{ c.id }}{{ c.function.arguments | tojson }}{%- endfor -%}"
    chat_template = small(SAYS + shown)
    first = answered(chat_template, [ASKED], calling())
    assert first["tool_calls"][0]["id"] == "functions.get_weather:0"
    second = answered(chat_template, [ASKED, first], calling(), calling({}, "clock"))
    second["tool_calls"][1]["id"] = "call_of_another_server"
    messages = [ASKED, first, *results(first, "sunny"), second, *results(second, "rain", "noon")]
    turns = rendered(chat_template, messages).split("[assistant]")[1:]
    assert re.findall(r"functions\.\w+:\d", turns[0]) == ["functions.get_weather:0"] * 2
    again = ["functions.get_weather:1", "functions.clock:2"]
    assert re.findall(r"functions\.\w+:\d", turns[1]) == again * 2
    later = answered(chat_template, [ASKED], calling(), calling())  # the first turns are gone
    for call, id in zip(later["tool_calls"], ("functions.get_weather:1", "call_x"), strict=True):
        call["id"] = id
    text = rendered(chat_template, [ASKED, later]).split("[assistant]")[1]
    assert re.findall(r"functions\.\w+:(\d)", text) == ["1", "2"]


def test_calls_whose_name_is_metadata_are_rendered_as_messages() -> None:
    chat_template = small("{{ m.metadata if m.metadata }};" + SAYS)
    message = answered(
        chat_template, [ASKED], DeltaPart("content", "Well."), calling(), calling({}, "clock")
    )
    text = rendered(chat_template, [ASKED, message, *results(message, "sunny", "noon")])
    assert text.partition("[assistant]")[2] == (
        ';Well.[assistant]get_weather;{"city": "Zürich"}[observation];sunny'
        "[assistant]clock;{}[observation];noon[assistant]"
    )


def test_functions_and_the_date_are_variables_where_the_template_has_no_tools() -> None:
    chat_template = template_of(
        "{{ 'Call ' + functions + ' on ' + datetime }}{% for m in messages %}{{ m.content }}"
        "{% endfor %}"
    )
    text = rendered(chat_template, [ASKED])
    assert json.loads(text[len("Call ") :].partition(" on 20")[0])[1]["name"] == "clock"
    assert chat_template.shows_tools


@pytest.mark.parametrize("content", [None, ""])
def test_messages_of_the_older_functions_are_calls_and_results(content: str | None) -> None:
    chat_template = small(SAYS + OBJECTS)
    function = {"name": "get_weather", "arguments": json.dumps(CITY)}
    call = {"role": "assistant", "content": content}
    old = [
        {**call, "function_call": function},
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    new = [
        {**call, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert rendered(chat_template, [ASKED, *old]) == rendered(chat_template, [ASKED, *new])


def test_late_result_is_matched_to_its_call() -> None:
    chat_template = small("{{ m.name }}{{ m.tool_call_id }}" + SAYS + NAMED)
    message = answered(chat_template, [ASKED], calling())
    text = rendered(chat_template, [ASKED, message, ASKED, *results(message, "sunny")])
    assert "[tool]get_weatherfunctions.get_weather:0" in text


def test_results_of_earlier_or_unknown_calls_are_kept() -> None:
    chat_template = small("{{ m.name }}" + SAYS + NINE)
    first, second = (answered(chat_template, [ASKED], calling(name=name)) for name in ("a", "b"))
    unknown = {"role": "tool", "tool_call_id": "call_unknown", "content": "lost"}
    tool_results = [*results(second, "sunny"), *results(first, "noon"), unknown]
    text = rendered(chat_template, [ASKED, first, second, *tool_results])
    assert re.search(r"\[tool\]bsunny\w{9}\[tool\]anoon\w{9}\[tool\]lost\w{9}\[", text)
    assert "call_unknown" not in text


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ('{"city": ', ['{"city": ', '"{\\"city\\": "']),  # no JSON
        ("[1]", ["[1]"]),
        ("sunny", ["sunny"]),
        (r'{"city": "a\ud83d"}', ["a\ufffd", r"a\ud83d"]),  # half a surrogate pair
        ('{"city": 12345678901234567890123}', ["12345678901234567890123"]),
    ],
)
def test_unusual_arguments_are_rendered_unchanged(arguments: str, texts: list[str]) -> None:
    for template in (SAYS + OBJECTS, SAYS + TEXTS, SAYS):
        part = DeltaPart("call", arguments, "get_weather")
        turn = second_turn(small(template), [part], "told")
        assert any(text in turn for text in texts)
        assert turn.encode()  # it can be tokenized


def test_calls_are_an_error_where_the_template_supports_none() -> None:
    only = "{{ raise_exception('one') if messages | length > 2 }}{{ m.content }}"
    chat_template = small(only)
    assert rendered(chat_template, [ASKED])
    with pytest.raises(InvalidInput, match="does not support tool calls and results"):
        second_turn(chat_template, [calling()], "sunny")


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ("raise_exception('Only one of them!')", "refuses the messages: Only one of them!"),
        ("messages[0].nothing.at_all", "cannot render these messages"),
        ("messages[0].content + 1", "cannot render these messages"),
    ],
)
def test_error_quotes_the_templates_own_message_only(raises: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        template_of("{{ " + raises + " }}").render(chat([ASKED])[1])
    assert str(refused.value) == f"the model's chat template {message}"
    assert refused.value.param == "messages"


# ── templates of real checkpoints ──

NAMES = sorted(path.stem for path in REAL.glob("*.jinja"))
NO_TOOLS = "google-gemma-2-2b-it"  # shows neither a system message nor tools
needs_templates = pytest.mark.skipif(not NAMES, reason="no templates of real checkpoints here")


def real(name: str) -> ChatTemplate:
    return template_of((REAL / f"{name}.jinja").read_text())


@needs_templates
def test_history_formats_of_real_templates() -> None:
    forms = {name: real(name).history_format or HistoryFormat() for name in NAMES}

    def having(**fields: Any) -> set[str]:
        [(key, value)] = fields.items()
        return {name for name, form in forms.items() if getattr(form, key) == value}

    assert having(call_ids="nine") == {
        "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407",
    }  # fmt: skip
    assert having(call_ids="named") == {"moonshotai-Kimi-K2"}
    assert having(arguments="text") == {"tool_chat_template_phi4_mini"}
    assert having(empty_content="null") == {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"}
    assert having(empty_content="empty") == {"Qwen-QwQ-32B", "Qwen-Qwen3-0.6B"}
    assert having(one_call=True) == {"meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b"}
    assert having(calls_in_content=True) == {
        "HuggingFaceTB-SmolLM3-3B", "Kimi-K2-Instruct", "ibm-granite-granite-3.3-2B-Instruct",
        NO_TOOLS, "microsoft-Phi-3.5-mini-instruct",
    }  # fmt: skip
    assert having(results="user") == {NO_TOOLS, "microsoft-Phi-3.5-mini-instruct"}


# ── system messages after the first turn ──

TAGGED = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
SHOWN = "<{{ m.role[0] }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
SHOWN += '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
SHOWN += "{% endfor %}</>"
LATER = "m.role == 'system' and not loop.first"
AFTER = "m.role == 'user' and not loop.first and messages[loop.index0 - 1].role"
TWICE = f"({AFTER} == 'user')"
ORDERS = {
    "in place": SHOWN,
    "refused": f"{{{{ raise_exception('no') if {LATER} }}}}{SHOWN}",
    "left out": f"{{% if not ({LATER}) %}}{SHOWN}{{% endif %}}",
    "alternating": f"{{{{ raise_exception('no') if ({LATER}) or {TWICE} }}}}{SHOWN}",
    "no user after results": f"{{{{ raise_exception('no') if ({LATER}) or {TWICE} "
    f"or ({AFTER} == 'tool') }}}}{SHOWN}",
    "nowhere": f"{{{{ raise_exception('no') if m.role == 'system' }}}}{SHOWN}",
    "at the beginning": "{% if loop.first %}{% for m in messages if m.role == 'system' %}"
    f"{SHOWN}{{% endfor %}}{{% endif %}}{{% if m.role != 'system' %}}{SHOWN}{{% endif %}}",
}
CALLING_A = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}],
}
RESULT_A = {"role": "tool", "tool_call_id": "1", "content": "of a"}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


RULES, FIRST, ANSWER = said("system", "rules"), said("user", "one"), said("assistant", "first")
NOTE, SECOND = said("developer", "note"), said("user", "two")
FOLDED = "<system>\nnote\n</system>"
CALL_A = '<a>{"name": "a", "arguments": {}}</>'
# Messages, and their text where system messages are taken in place, where they are not, and where a
# user's message may not follow a result.
PLACES = [
    (
        [RULES, FIRST, ANSWER, NOTE, SECOND],
        "<s>rules</><u>one</><a>first</><s>note</><u>two</>",
        f"<s>rules</><u>one</><a>first</><u>{FOLDED}\n\ntwo</>",
        None,
    ),
    (
        [RULES, FIRST, NOTE],
        "<s>rules</><u>one</><s>note</>",
        f"<s>rules</><u>one\n\n{FOLDED}</>",
        None,
    ),
    (
        [RULES, FIRST, ANSWER, NOTE],
        "<s>rules</><u>one</><a>first</><s>note</>",
        f"<s>rules</><u>one</><a>first</><u>{FOLDED}</>",
        None,
    ),
    ([RULES, NOTE, FIRST], "<s>rules</><s>note</><u>one</>", "<s>rules\n\nnote</><u>one</>", None),
    (
        [FIRST, CALLING_A, RESULT_A, NOTE],
        f"<u>one</>{CALL_A}<t>of a</><s>note</>",
        f"<u>one</>{CALL_A}<t>of a</><u>{FOLDED}</>",
        f"<u>one</>{CALL_A}<t>of a\n\n{FOLDED}</>",
    ),
    (
        [FIRST, CALLING_A, RESULT_A, SECOND],
        f"<u>one</>{CALL_A}<t>of a</><u>two</>",
        f"<u>one</>{CALL_A}<t>of a</><u>two</>",
        f"<u>one</>{CALL_A}<t>of a\n\ntwo</>",
    ),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("messages", "in_place", "folded", "in_result"), PLACES)
def test_system_messages_stay_in_their_place_or_are_folded(
    order: str, messages: list[Any], in_place: str, folded: str, in_result: str | None
) -> None:
    template = template_of(TAGGED.replace("BODY", ORDERS[order]))
    _, prompt = chat(messages)
    text = template.render(Chat(prompt.messages)).text
    expected = in_place if order == "in place" else folded
    if order == "nowhere":
        expected = expected.replace("<s>rules\n\nnote</><u>", f"<s>rules</><u>{FOLDED}\n\n")
        expected = expected.replace("<s>rules</><u>", "<u><system>\nrules\n</system>\n\n")
    if order == "no user after results" and in_result:
        expected = in_result
    assert text == f"{expected}<a>"


@pytest.mark.parametrize("first", [RULES, FIRST])
def test_tools_are_in_the_users_message_where_the_template_takes_no_system(first: Any) -> None:
    template = template_of(TAGGED.replace("BODY", ORDERS["nowhere"]))
    text = rendered(template, [first, FIRST][first is FIRST :])
    assert re.fullmatch(r"<u><system>\n.*get_weather.*</system>\n\none</><a>", text, re.DOTALL)
    assert ("rules" in text) == (first is RULES)


@pytest.mark.parametrize("order", ORDERS)
def test_longer_histories_begin_with_the_shorter_one(order: str) -> None:
    template = template_of(TAGGED.replace("BODY", ORDERS[order]))
    history: list[Any] = [
        RULES,
        FIRST,
        NOTE,
        CALLING_A,
        RESULT_A,
        NOTE,
        ANSWER,
        NOTE,
        SECOND,
        ANSWER,
    ]
    texts = []
    for length in range(2, len(history)):
        if history[length]["role"] == "assistant":
            _, prompt = chat(history[:length])
            texts.append(template.render(Chat(prompt.messages)).text)
    assert len(texts) == 3
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.removesuffix("<a>"))


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_many_system_messages_take_linear_time(system: bool, in_place: bool) -> None:
    start = time.thread_time()
    fold_messages([said("system", "note")] * 50_000, MessageOrder(system, in_place))
    assert time.thread_time() - start < 2


def test_texts_before_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    note, asked = said("system", "note"), {**FIRST, "content": parts}
    folded = fold_messages([note, note, asked], MessageOrder(False, False))
    text = {"type": "text", "text": f"{FOLDED}\n\n{FOLDED}"}
    assert folded == [{"role": "user", "content": [text, *parts]}]


def test_equal_arguments_give_equal_prompts() -> None:
    source = TAGGED.replace("BODY", SHOWN.replace("c.function.arguments | tojson", "''")).replace(
        "{{ '' }}", "{{ c.function.arguments + '' }}"
    )
    template = template_of(source)
    assert template.history_format is not None
    assert template.history_format.arguments == "text"
    texts = set()
    for arguments in ('{"x":1,"y":"ü"}', '{ "x": 1, "y": "\\u00fc" }', {"x": 1, "y": "ü"}):
        function: dict[str, Any] = {"name": "a", "arguments": arguments}
        call: dict[str, Any] = {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": function}],
        }
        _, prompt = chat([FIRST, call, RESULT_A])
        texts.add(template.render(Chat(prompt.messages)).text)
    assert texts == {f"<u>one</>{CALL_A}<t>of a</><a>".replace("{}", '{"x": 1, "y": "ü"}')}
    call["tool_calls"][0]["function"]["arguments"] = '{"x": "\\ud800"}'  # it stays escaped
    _, prompt = chat([FIRST, call, RESULT_A])
    assert '"\\ud800"' in template.render(Chat(prompt.messages)).text
