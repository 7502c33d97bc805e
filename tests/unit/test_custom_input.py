"""Grammars of custom tools' inputs, within the text of calls of every format."""

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from tests.call_formats import NAMES, accepts, arguments_text, call_format_of, call_text
from worker.grammar.custom_input import escaped_value, plain_value
from worker.grammar.lark import content_rule
from worker.grammar.tool_calls import tool_calls_grammar
from worker.messages.generation import Constraint
from worker.text.tool_call_parser import make_call_parser

# The grammar that Codex sends for its tool apply_patch.
APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """\
*** Begin Patch
*** Update File: src/a "b".py
@@ def f(x):
 \tif x == '\\n':
-\t\treturn "é"
+\t\treturn {"a": [1, 2]}
*** Add File: c.txt
+one
*** End Patch"""
# Codex's tool exec.
EXEC = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "patch",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        },
    },
}
BYTES = LLTokenizer("byte")
CLOSE = "\n</parameter>\n"
FORMATS = [*NAMES, "channels"]


def matches_escaped(definition: str, text: str) -> bool:
    rule = escaped_value(Constraint("grammar", definition, "p"))
    return accepts(f"start: {rule}", json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ("start: STR\n%import common.ESCAPED_STRING -> STR\n", r'"a \n \" b"', '"a'),
        (
            'start: NUMBER ("," NUMBER)*\n%import common (NUMBER, WS)\n%ignore WS\n',
            "1, 2,\n\t3.5",
            "1,,2",
        ),
        ('start: s+\ns: "GET"i /[a-z_]+/ (NL | ";")\nNL: "\\n"+\n', "geta\n\nGETb_c;", "GETa"),
        ("start: LINE+\nLINE: /[^\\n]*\\n/\n", 'a\nb"c"\n\n', "a"),
        ('start: /a.*z\\n/ "q"\n', "a zz\nq", "a zz q"),
        ('start: word (/\\s+/ word)*\nword: /\\w+/\n  | "\\""\n', 'ab \n\tcd "', "a,"),
        ("start: /(?s:a.b)/ /[^\\x00-\\x1f]/i", "a\nbX", "a\nb\n"),
        ('start: "\\x41\\u00e9\\\\" ["x"] /\\"{2}/ ~ 1', 'Aé\\x""', "Aé"),
        ("start: (A | B)+ // comment\nA: /[\\t\\/]/\nB: /b|\\\\/\n", "\t/b\\", "c"),
    ],
)
def test_escaped_terminals(definition: str, good: str, bad: str) -> None:
    assert accepts(definition, good)
    assert not accepts(definition, bad)
    assert matches_escaped(definition, good)
    assert not matches_escaped(definition, bad)


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ('start: "a" }\nx: "b" {', "braces"),
        ("start: <think>", "'<think>' is not supported"),
        ("start: %json {}", "'%json {}' is not supported"),
        ("start: @other", "'@other' is not supported"),
        ("start: /a(?=b)/", "'(?=b)' is not supported"),
        ("start: /a\\b/", "is not supported"),
        ("start: /^a$/", "'^a$' is not supported"),
        ("start: /a/x", "flags"),
        ("start: /[a/", "not closed"),
        ("start: /(a/", "not closed"),
        ("start: /a)/", "not opened"),
        ("start: /[" + "a" * 501 + "]/", "too long"),
        ("start: /" + "(" * 60 + ")" * 60 + "/", "too deeply"),
        ('start: A\nA: ~"a"', "~ is not supported"),
        ('start: "a".."z"', "a range is not supported"),
        ("start: A\nA: /a\\n/ & /[^b]+/", "& is not supported"),
        ("%import common.NOPE", "no terminal common.NOPE"),
        ('start: "a"\n%ignore /a\\nb/', "%ignore takes a class"),
        ("start", "starts no rule"),
        ("x" * 200_000, "characters"),
        # in plain text
        ('start: "a</parameter>"', "its text contains '</parameter>'"),
        ("start: a\na: /x<\\/parameter>/", "its text contains '</parameter>'"),
        ("start: a\na[max_tokens=3]: /[a-z]+/", "no attributes here, as [max_tokens=3]"),
        ('start [stop="]"]: /[a-z]+/', 'no attributes here, as [stop="]"]'),
        ("start: A\nA: /[<>]/ & /[^b]+/", "& is not supported"),
        ("start: /" + "(" * 60 + "a" + ")" * 60 + "/", "nested too deeply"),
    ],
)
def test_a_grammar_that_cannot_be_applied_is_refused(definition: str, reason: str) -> None:
    is_plain = "parameter" in reason or "attributes" in reason or "[<>]" in definition
    constraint = Constraint("grammar", definition, "tools[0].format.definition")
    with pytest.raises(InvalidInput) as error:
        plain_value(constraint, CLOSE) if is_plain else escaped_value(constraint)
    assert str(error.value).startswith("tools[0].format.definition: cannot be compiled: ")
    assert reason in str(error.value)
    assert error.value.param == "tools[0].format.definition"


def matches_plain(definition: str, text: str) -> bool:
    rule = plain_value(Constraint("grammar", definition, "p"), CLOSE)
    return accepts(f'start: {rule} "</function>"', f"{text}{CLOSE}</function>")


ASSIGNMENTS = 'start: one+\none: NAME "=" /[0-9]+/ ";"?\nNAME: /[a-z]+/\n%ignore /\\s+/\n'
OPTIONAL = 'start: "a"? ["b"] ("c" | "d")* x?\nx: y | "e"\ny: "f"{2,3} | y "g" ~ 2\n'


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (APPLY_PATCH, [PATCH, PATCH + "\n"], [PATCH.replace("+one", "+</parameter>"), "", "x"]),
        (EXEC, ["a < b;\n\n", "</param>\n", "// @exec: 1\r\nx\n"], ["", "x</parameter>y"]),
        (ASSIGNMENTS, ["a = 1; b=2", "a=1;\n\n"], ["a", "", "a==1"]),
        (OPTIONAL, ["", "a", "ab", "acd", "acdffgg", "bfff", "e"], ["f", "ffff", "ba", "ffg"]),
        ("start: /(a|\\n)*/", ["", "\n\n", "a\na\n"], ["b"]),
        ("start: line*\nline: /[^\\n]*/ LF -> l\nLF: /\\n/", ["a\nb\n", "\n\n\n", ""], ["a"]),
        ('start: /[^;]+/ t\nt: (";" /[^;]+/)* [";"]', ["a\n;\nb", "a;", "\n"], [";"]),
        ('start: a\na: "(" a ")" | /[a-z\\n]+/', ["((a\n))", "x\n\n"], ["(x"]),
        ('start: "x" | start /y\\s?/', ["x", "xyy\ny", "xy\n"], ["y"]),
    ],
)
def test_plain_text_ends_with_the_closing_text(
    definition: str, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert matches_plain(definition, text), text
    for text in bad:
        assert not matches_plain(definition, text), text


ANY_TEXT, LINES = r"start: /[\s\S]+/", "start: LINE+\nLINE: /[^\\n]*\\n/"


@pytest.mark.parametrize("close", [CLOSE, "</arg_value>\n", "<end>"])
def test_plain_text_contains_no_closing_text(close: str) -> None:
    end, rng = close.strip(), random.Random(close)
    pieces = ["a", "<", "/", ">", "\n", "</", end[:-1], end[:-2], f"<{end}", f"{end[:-1]}\n"]
    rules = [plain_value(Constraint("grammar", g, "p"), close) for g in (ANY_TEXT, LINES)]
    any_text, lines = (LLMatcher(BYTES, f"start: {rule}") for rule in rules)
    for _ in range(200):
        text = "".join(rng.choices(pieces, k=6)) + "\n"
        tokens = BYTES.tokenize_str(text + close)
        is_closed = end in text
        assert lines.deep_copy().try_consume_tokens(tokens) < len(tokens) or not is_closed, text
        if is_closed or end[:-1] not in text:
            accepts = any_text.deep_copy().try_consume_tokens(tokens) == len(tokens)
            assert accepts == (not is_closed), text


def test_a_regular_expression_is_the_pattern_of_the_string() -> None:
    for pattern in (r'^[a-z"]+\d$', r'[a-z"]+\d'):
        rule = escaped_value(Constraint("regex", pattern, "p"))
        assert accepts(f"start: {rule}", json.dumps('ab"1'))
        assert not accepts(f"start: {rule}", json.dumps('ab"1x'))


def grammar_of(name: str, constraint: Constraint) -> str:
    inputs = {"patch": constraint}
    return tool_calls_grammar(call_format_of(name), [TOOL], False, json.dumps, inputs=inputs)


def call_with(name: str, source: str) -> str:
    return call_text(name, {"input": source}, "patch")


@pytest.mark.parametrize("name", FORMATS)
def test_source_code_is_an_input_in_every_format(name: str) -> None:
    grammar = grammar_of(name, Constraint("grammar", EXEC, "p"))
    for source in (
        'for (let x = 1; x < "2"; x++) {}\n',
        '// @exec: {"a": 1}\r\nlet y = `</b>\n\x01`;\n\n',
    ):
        assert accepts(grammar, call_with(name, source))
    assert not accepts(grammar, call_with(name, ""))


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format_have_an_input_of_the_grammar(name: str) -> None:
    grammar = grammar_of(name, Constraint("grammar", APPLY_PATCH, "p"))
    assert accepts(grammar, call_with(name, PATCH))
    assert accepts(grammar, call_with(name, PATCH + "\n"))
    for wrong in (PATCH[1:], PATCH.replace("@@", "%%"), PATCH.replace("+one", "one")):
        assert not accepts(grammar, call_with(name, wrong))
    call_format = call_format_of(name)
    if call_format.arguments.style == "entries":  # the parser reads the same input
        types = {"patch": {"input": {"string"}}}
        parser = make_call_parser(call_format, {"name": "patch"}, types)
        parser.feed(arguments_text(name, {"input": PATCH}))
        [part] = parser.close(False)
        assert json.loads(part.arguments) == {"input": PATCH}
    pattern = grammar_of(name, Constraint("regex", "[a-z<>]+", "p"))
    assert not accepts(pattern, call_with(name, PATCH))
    assert accepts(pattern, call_with(name, "a<b>"))


def test_a_whole_grammar_has_no_attributes_either() -> None:
    with pytest.raises(InvalidInput, match="no attributes here"):
        content_rule(Constraint("grammar", "start[temperature=0.5]: /[a-z]+/", "p"))
    grammar = 'start: a [b] "x[1]:"\na: "x"\nb: "y"'
    assert content_rule(Constraint("grammar", grammar, "p")) == grammar
