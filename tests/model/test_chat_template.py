"""Names that `chat_template_kwargs` may set, errors of templates, and the parser and constraints of
a plain chat."""

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput
from tests import tiny_chat
from tests.generating import when_ready
from tests.tiny_tokenizers import llama_tokenizer
from worker.engines.generation.input_processor import InputProcessor
from worker.engines.generation.loading import load_generator
from worker.engines.generation.output import PreparedPrompt
from worker.messages.generation import Chat, GenerationInput, Sampling, ToolCallPolicy
from worker.model.language_model import LanguageModel
from worker.text.chat_template.history import QUESTION
from worker.text.chat_template.inference import TOOLS
from worker.text.chat_template.sandbox import TemplateTooExpensive
from worker.text.chat_template.template import ChatTemplate

HI: tuple[dict[str, Any], ...] = ({"role": "user", "content": "hi"},)


def rendered(**variables: Any) -> str:
    return (
        tiny_chat.engine().input_processor.template.render(Chat(HI, template_kwargs=variables)).text
    )


def test_reserved_variables_cannot_be_set() -> None:
    """Those of the library's calls that lead to a template, of templates and of Jinja."""
    calls: list[Any] = [
        PreTrainedTokenizerBase.apply_chat_template,
        ProcessorMixin.apply_chat_template,
        chat_template_utils.render_jinja_template,
    ]
    names = {name for call in calls for name in inspect.signature(call).parameters}
    assert {"conversations", "tokenize", "self"} <= names
    compiled: Any = chat_template_utils._compile_jinja_template("")
    names |= {*compiled.environment.globals, "messages", "tojson"}
    for name in names | {"bos_token", "eos_token", "pad_token", "mask_token"}:
        with pytest.raises(InvalidInput, match="not a variable") as caught:
            rendered(**{name: None})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_unknown_variables_are_ignored() -> None:
    assert rendered(enable_thinkin=False, format="x", language="de") == rendered()
    assert rendered(enable_thinking=False) != rendered()


def test_variables_have_defaults_that_a_request_overrides() -> None:
    tokenizer = tiny_chat.engine().runner.language.tokenizer
    template = ChatTemplate(tokenizer, {"enable_thinking": False})
    unset, high = Chat(HI), Chat(HI, effort="high")
    assert template.render(unset).text == rendered(enable_thinking=False)
    assert template.render(high).text == rendered(enable_thinking=True)
    own = Chat(HI, template_kwargs={"enable_thinking": True})
    assert template.render(own).text == rendered(enable_thinking=True)
    template = ChatTemplate(tokenizer, {"enable_thinking": True})
    assert [template.reasoning_requested(chat) for chat in (unset, high)] == [True, True]
    assert not template.reasoning_requested(Chat(HI, effort="none"))
    assert ChatTemplate(tokenizer).reasoning_requested(unset)  # the template's own default
    with pytest.raises(ValueError, match="CHAT_TEMPLATE_KWARGS: messages is not a variable"):
        ChatTemplate(tokenizer, {"messages": []})


SWITCHED = "{{ enable_thinking }} {{ thinking }} {{ messages[0].content }}"


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (Chat(HI), "False False hi"),
        (Chat(HI, effort="high"), "True True hi"),
        # another switch would contradict the request's
        (Chat(HI, template_kwargs={"thinking": True}), " True hi"),
        (Chat(HI, template_kwargs={"other": True}), "False False hi"),
    ],
)
def test_reasoning_is_switched_by_each_variable_unless_a_request_does(
    chat: Chat, text: str
) -> None:
    template = ChatTemplate(llama_tokenizer(SWITCHED), {"thinking": True}, "off")
    assert template.render(chat).text == text
    assert ChatTemplate(llama_tokenizer(SWITCHED)).render(Chat(HI)).text == "  hi"


SHOWN = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: GENERATE{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "default"),
    [
        ("{{ messages[0].content }}", False),
        (SHOWN.replace("GENERATE", ""), True),  # without a switch
        (SHOWN.replace("GENERATE", "{% if enable_thinking is false %}<think></think>{% endif %}"),
         True),
        (SHOWN.replace("GENERATE", "{% if not thinking %}<think></think>{% endif %}"), False),
        (SHOWN.replace("GENERATE", "{{ '/think' if thinking else '' }}"), False),
        (SHOWN.replace("GENERATE", "{{ reasoning_effort or 'medium' }}"), True),
        (SHOWN.replace("GENERATE", "{{ reasoning_effort or 'none' }}"), False),
    ],
)  # fmt: skip
def test_reasoning_is_requested_where_it_is_the_default(source: str, default: bool) -> None:
    template = ChatTemplate(llama_tokenizer(source), reasoning="auto")
    assert template.reasoning_requested(Chat(HI)) == default
    assert not template.reasoning_requested(Chat(HI, effort="none"))
    off = Chat(HI, template_kwargs={"enable_thinking": False, "thinking": False})
    assert not template.reasoning_requested(off)


def test_the_settings_reach_the_template_and_the_sampling() -> None:
    options = replace(tiny_chat.options(), chat_template_kwargs='{"enable_thinking": true}')
    options = replace(options, reasoning="off", default_seed=7)
    processor = load_generator(options).input_processor
    assert processor.template.render(Chat(HI)).text == rendered(enable_thinking=False)
    seeds = [
        processor.prepare_prompt(GenerationInput(Chat(HI), Sampling(seed=seed))).params.seed
        for seed in (None, 0, 3)
    ]
    assert seeds == [7, 0, 3]


def test_errors_of_a_template_are_invalid_input(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_chat.engine().runner.language.tokenizer
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


CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"
THOUGHTS = CALLS + "{# </think> #}"


def prepared(source: str, **fields: Any) -> PreparedPrompt:
    tokenizer = llama_tokenizer(source)
    processor = InputProcessor(
        LanguageModel("", tiny_chat.engine().runner.language.model, tokenizer), 1000
    )
    try:
        request = tiny_chat.asking(tools=({"function": {"name": "clock"}},), **fields).payload
        return when_ready(lambda: processor.prepare_prompt(request))
    finally:
        processor.close()


def test_plain_chat_has_a_parser_and_no_constraints() -> None:
    calls = ToolCallPolicy(("clock",))
    for source, fields, reads, plans in (
        (CALLS, {}, True, False),  # it may reason though its template shows none
        (THOUGHTS, {}, True, False),
        (CALLS, {"tool_policy": calls}, True, True),
        (CALLS, {"tool_policy": ToolCallPolicy(("clock",), required=True)}, True, True),
        (THOUGHTS, {"thinking_tokens": 3}, True, True),
    ):
        result = prepared(source, **fields)
        assert (result.parser is not None, result.constraints is not None) == (reads, plans)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}[U]{{ m.content }}{% endfor %}[A]",
        f"{{{{ messages[0].content }}}}<{'a' * 80}>",
        "{" * 3000,
        # tests/unit/test_history.py has a shorter recursion in the default check
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", marks=pytest.mark.matrix),
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_odd_templates_load(template: str) -> None:
    result = ChatTemplate(llama_tokenizer(template))
    assert result.examples == []
    assert result.notes


def test_template_that_changes_its_input_does_not_change_the_probes() -> None:
    before = copy.deepcopy((QUESTION, TOOLS))
    ChatTemplate(
        llama_tokenizer("{% set _ = messages[0].pop('content') %}{% set _ = tools.pop() %}")
    )
    assert before == (QUESTION, TOOLS)


PARTS_ALONE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_template_that_renders_only_parts_gets_parts() -> None:
    template = ChatTemplate(llama_tokenizer(PARTS_ALONE))
    messages = {"role": "system", "content": "brief"}, *HI
    assert template.render(Chat(messages)).text == "<|system|>brief</s><|user|>hi</s><|assistant|>"
    pictured = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
    assert template.render(Chat((pictured,))).text == "<|user|>hi</s><|assistant|>"
    prefix = Chat(
        (*HI, {"role": "assistant", "content": "I"}),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert template.render(prefix).text == "<|user|>hi</s><|assistant|>I"


LOOPS = 3 * "{% for i in range(99999) %}" + 3 * "{% endfor %}"


def test_a_template_that_takes_much_for_any_message_is_refused_at_load() -> None:
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = LOOPS
    with pytest.raises(TemplateTooExpensive, match="3000000 turns of loops"):
        ChatTemplate(tokenizer)


def test_a_template_that_takes_much_for_a_message_refuses_the_request() -> None:
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if 'slow' in messages[0].content %}"
    tokenizer.chat_template += LOOPS + "{% endif %}"
    template = ChatTemplate(tokenizer)
    assert template.render(Chat(HI)).text == "hi"
    with pytest.raises(InvalidInput, match="the model's chat template takes more than") as caught:
        template.render(Chat(({"role": "user", "content": "slow"},)))
    assert caught.value.param == "messages"
