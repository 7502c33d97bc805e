"""A chat template of a checkpoint cannot take the server's time and memory."""

import gc
import json
import tracemalloc
import weakref
from typing import Any

import pytest
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from worker.text.chat_template import sandbox
from worker.text.chat_template.sandbox import BoundedEnvironment, TemplateTooExpensive, lenient

MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "so"}]
MAX_PEAK = 1 << 26  # bytes, with the bounds of `small_bounds`
TIMES = 3_000_000_000
DOUBLED = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)


def compiled(source: str) -> Template:
    compile_template: Any = chat_template_utils
    template: Template = compile_template._compile_jinja_template(source)
    return template


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TURNS", 10_000)
    monkeypatch.setattr(sandbox, "MAX_BYTES", 4_000_000)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if not b %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(9999) %}" + 1000 * "text" + "{% endfor %}",
        "{% for a in range(99999) %}{% if a is divisibleby(3) %}{% endif %}{% endfor %}",
        f'{{{{ "a" * {TIMES} }}}}',
        f"{{{{ [1] * {TIMES} }}}}",
        f"{{{{ {TIMES} * (1,) }}}}",
        DOUBLED % ("'a'", "ns.x + ns.x"),
        DOUBLED % ("'a'", "ns.x ~ ns.x"),
        DOUBLED % ("[1]", "ns.x + ns.x"),
        DOUBLED % ("[1]", "[ns.x, ns.x]"),
        DOUBLED % ("[1]", "(ns.x, ns.x)"),
        DOUBLED % ("[1]", "{1: ns.x, 2: ns.x}"),
        DOUBLED % ("[1]", "dict(a=ns.x, b=ns.x)"),
        DOUBLED % ("[1]", "namespace(a=ns.x, b=ns.x)"),
        DOUBLED % ("10", "ns.x * ns.x"),
        "{{ 10 ** 1000000 }}",
        f"{{{{ 'a'|center({TIMES}) }}}}",
        "{% set x = 1|round(200000000, 'floor') %}",
        "{% set x = [[1]]|batch(100000, [1] * 1000)|first|sum(start=[]) %}",
        "{% set x = ('a' * 1000000)|wordwrap(1) %}",
        "{% set x = ('a' * 1000000).partition('b') %}",
        "{% set x = ('a' * 1000000)|select|list %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(99) %}{% set x = s[1:] %}{% endfor %}",
        "{{ '{:{}}'.format('a', '2000000000') }}",
        f"{{{{ '%*d'.encode() % ({TIMES}, 1) }}}}",
        "{{ ('a' * 9999)|replace(new='b' * 9999, old='a') }}",
        f"{{% if 'a'|center({TIMES}) %}}{{% endif %}}",
        f"{{% filter center({TIMES}) %}}a{{% endfilter %}}",
        f"{{{{ ['a']|map('center', {TIMES})|list }}}}",
        f"{{{{ 'a\nb'|indent({TIMES}) }}}}",
        "{{ ('a' * 9999)|replace('a', 'a' * 9999) }}",
        "{{ ('a' * 9999).replace('', 'a' * 9999) }}",
        "{{ range(99999)|join('a' * 9999) }}",
        "{{ range(99999)|map('string')|join('a' * 9999) }}",
        "{{ ('a' * 9999).join(['a'] * 9999) }}",
        "{{ (['a' * 99999] * 9999)|join }}",
        "{{ (['a' * 99999] * 9999)|map('lower')|join }}",
        f"{{{{ 'a'.ljust({TIMES}) }}}}",
        f"{{{{ 'a'.zfill({TIMES}) }}}}",
        f"{{{{ '\t'.expandtabs({TIMES}) }}}}",
        "{{ ('a' * 9999).translate({97: 'a' * 9999}) }}",
        "{{ ('a b ' * 999999).split() }}",
        f"{{{{ (5).to_bytes({TIMES}, 'big') }}}}",
        f"{{{{ '%{TIMES}d'|format(1) }}}}",
        f"{{{{ '%{TIMES}d' % 1 }}}}",
        f"{{{{ '%*d' % ({TIMES}, 1) }}}}",
        f"{{{{ '{{:{TIMES}}}'.format(1) }}}}",
        f"{{{{ '{{:{{}}}}'.format(1, {TIMES}) }}}}",
        "{{ ('{0}' * 9999).format('a' * 9999) }}",
        f"{{{{ [[1]]|tojson(indent={TIMES}) }}}}",
        f"{{{{ [1]|batch({TIMES}, 0)|list }}}}",
        f"{{{{ [1]|slice({TIMES})|list }}}}",
    ],
)
def test_a_template_that_takes_much_is_ended_before_it_takes_it(source: str) -> None:
    template = compiled(source)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateTooExpensive, match="the model's chat template takes more than"):
            template.render(messages=MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK
    finally:
        tracemalloc.stop()


def test_time_is_bounded_where_single_operations_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CPU_S", 0.05)
    source = "{% set a, b = 'a' * 9999999, 'a' * 9999999 %}"
    source += "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}"
    with pytest.raises(TemplateTooExpensive, match=r"0\.05 s"):
        compiled(source).render()


def test_each_rendering_has_its_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TURNS", 30)
    template = compiled("{% for i in range(20) %}{{ i }}{% endfor %}")
    assert template.render() == template.render()


def test_a_rendering_with_macros_holds_no_messages() -> None:
    class Messages(list[Any]): ...

    template = compiled("{% macro f() %}{{ messages }}{% endmacro %}{{ f() }}")
    messages = Messages(MESSAGES)
    held = weakref.ref(messages)
    gc.collect()
    gc.disable()
    try:
        template.render(messages=messages)
        del messages
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
        "{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}",
        "{% for m in none_such %}{% else %}none{% endfor %}{{ none_such }}",
        "{% set n = namespace(x=[]) %}{% for i in range(3) %}{% set n.x = n.x + [i] %}"
        "{{ n.x }}{% endfor %}",
        "{% macro f(a, b=2) %}{{ a + b }}{{ caller() }}{% endmacro %}{% call f(1) %}c{% endcall %}",
        "{% for k, v in {'a': [1]}.items() %}{{ k }}{{ v[:1] }}{% endfor %}",
        "{{ {'a': 1}|items|list }}{{ 'a,b'.split(',')[-1] }}{{ 'abc'|replace('b', 'd') }}",
        "{{ messages|map(attribute='role')|join(', ') }}{{ '%s-%d' % ('a', 3) }}",
        "{{ '%s'|format(1) }}{{ '{} {k}'.format(1, k=2) }}{{ 2 ** 10 * 3 }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|tojson }}",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x }}{{ ['b', 'a']|sort|first }}",
    ],
)
def test_other_templates_render_as_in_jinja(source: str) -> None:
    plain = ImmutableSandboxedEnvironment().from_string(source)
    bounded = BoundedEnvironment().from_string(source)
    assert bounded.render(messages=MESSAGES) == plain.render(messages=MESSAGES) != ""


@pytest.mark.usefixtures("small_bounds")
def test_lists_that_a_template_changes_are_counted() -> None:
    source = "{% set a = [1] %}{% for i in range(60) %}{% set _ = a.extend(a) %}{% endfor %}"
    with pytest.raises(TemplateTooExpensive), lenient():
        BoundedEnvironment().from_string(source).render()
    with pytest.raises(SecurityError):
        BoundedEnvironment().from_string(source).render()


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape 'a'|center(3000000000) %}{% endautoescape %}",
        "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
        "{{ [cycler('x')]|join(attribute='current') }}",
    ],
)
def test_what_has_no_bound_is_not_supported(source: str) -> None:
    with pytest.raises(TemplateError):
        compiled(source).render(messages=MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ messages[loop.index:]|length }}{% endfor %}",
        "{{ '<{}>'.format(messages[0].content) }}{{ '%s!'|format(messages[0].content) }}",
        "{{ messages|tojson(indent=2, ensure_ascii=false, separators=(',', ':')) }}",
    ],
)
def test_long_conversations_render_as_in_jinja(source: str) -> None:
    messages = [{"role": "user", "content": "a" * 1000 * (1 + 200 * (n == 0))} for n in range(900)]
    bounded = BoundedEnvironment(trim_blocks=True)
    expected = ImmutableSandboxedEnvironment(trim_blocks=True)
    for environment in (bounded, expected):
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, **kwargs)
    text = bounded.from_string(source).render(messages=messages)
    assert text == expected.from_string(source).render(messages=messages)
