"""The grammars of custom tools' inputs, as rules of the text in which a call has its input.

    Lark → tokens of statements → terminals rewritten → a nested grammar

Where calls have JSON or Python arguments, the input is an escaped string: terminals match the
escaped text. Elsewhere the input is plain up to a closing text, which no terminal matches.
Terminals in which a lexeme must begin, at an escape or like the closing text, become rules. What
cannot be rewritten is refused. A regular expression is the pattern of a string.
"""

import json
import re
from collections.abc import Iterator, Sequence

from worker.grammar.lark import (
    MAX_LENGTH_OF,
    check_grammar,
    check_length,
    regex_terminal,
    schema_rule,
    string_literal,
    unusable_grammar,
)
from worker.grammar.regex_syntax import (
    JsonWriter,
    PlainWriter,
    RegexPart,
    RuleWriter,
    parse_regex,
    regex_char,
)
from worker.messages.generation import Constraint

# As llguidance reads Lark.
TOKEN = re.compile(
    r"""(?P<space>(?:\#|//)[^\n]*|[\ \t]+)
    |(?P<newline>(?:\r?\n)+[\ \t]*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*")
     (?P<ignores_case>i?)
    |(?P<regex>/(?:\\.|[^/\\])+/)(?P<flags>[imslux]*)
    |(?P<import>%import[\ \t]+common[\ \t]*
      (?:\.[\ \t]*(?P<imported>\w+)(?:[\ \t]*->[\ \t]*(?P<alias>\w+))?
        |\((?P<list>[\w,\ \t]*)\)))
    |(?P<name>%ignore\b|!?[_?]?[a-zA-Z][\w-]*)
    |(?P<number>[+-]?[0-9]+)
    |(?P<sign>->|\.\.|[:|()\[\]{}?*+~&,=.])""",
    re.VERBOSE | re.DOTALL,
)
# Lark's library of common terminals.
NUMBER = r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": NUMBER,
    "SIGNED_FLOAT": f"[+-]?({NUMBER})",
    "NUMBER": f"[0-9]+|{NUMBER}",
    "SIGNED_NUMBER": f"[+-]?([0-9]+|{NUMBER})",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
START = re.compile(r"%|[!?_]?[?_]?[a-zA-Z][\w-]*[^\n:]*:|\Z")  # of a statement
STRICT_JSON = {"whitespace_flexible": False}  # a pattern that is not supported is an error
IGNORE = "%ignore"
PREFIX = "onequeue_"  # of new rules
Lexical = str | tuple[RegexPart, str]  # other text of a grammar, or a regular expression and flags


def escaped_value(constraint: Constraint) -> str:
    """Return the rule of an input as a JSON string, with its quotes."""
    if constraint.kind == "regex":
        return schema_rule({"type": "string", "pattern": f"^{_pattern(constraint)}$"}, STRICT_JSON)
    return f'"\\"" {nested_grammar(constraint, TerminalRewriter(JsonWriter()))} "\\""'


def plain_value(constraint: Constraint, close: str) -> str:
    """Return the rule of an input as it is, and of the text `close` after it: empty for a special
    token, which is no text."""
    return nested_grammar(constraint, TerminalRewriter(PlainWriter(close), close))


def plain_pattern(constraint: Constraint, close: str) -> str:
    """Return the terminal of an input by a regular expression, and of the text `close` after it."""
    text, end = regex_terminal(_pattern(constraint) + re.escape(close)), re.escape(close.strip())
    return f"{text} & ~{regex_terminal(f'((?s:.*){end}){{2}}(?s:.*)')}" if end else text


def _pattern(constraint: Constraint) -> str:
    """Return the regular expression of a whole input, without anchors."""
    check_length(constraint.value, constraint.param, MAX_LENGTH_OF["regex"])
    pattern = str(constraint.value).removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith(r"\$"):
        pattern = pattern[:-1]
    return f"(?:{pattern})"


def nested_grammar(constraint: Constraint, rewriter: "TerminalRewriter") -> str:
    """Return a client's Lark grammar as a nested one. InvalidInput if it cannot be rewritten."""
    check_grammar(constraint.value, constraint.param)
    try:
        rewritten = rewriter.rewrite([*_statements(constraint.value)])
    except ValueError as error:
        raise unusable_grammar(str(error), constraint.param) from None
    except RecursionError:
        raise unusable_grammar("it is nested too deeply", constraint.param) from None
    return "%lark {\n" + "\n".join(rewritten) + "\n}"


# ── reading ──


def _statements(grammar: str) -> Iterator[list[Lexical]]:
    """Yield the statements of a grammar; the first token is a name that it defines, or %ignore."""
    statement: list[Lexical] = []
    position = depth = 0
    while position < len(grammar):
        token = TOKEN.match(grammar, position)
        if token is None:
            raise ValueError(f"{grammar[position : position + 20]!r} is not supported in it")
        position, text = token.end(), token[0]
        depth += (text == "{") - (text == "}")
        if depth < 0:
            raise ValueError("its braces are not balanced")
        if token["newline"] is not None:
            following = TOKEN.match(grammar, position)
            is_continued = following is not None and following[0] in ("|", "->", "&")
            if statement and not is_continued and START.match(grammar, position):
                yield statement
                statement = []
        elif token["import"]:
            names = [token["imported"]] if token["imported"] else re.findall(r"\w+", token["list"])
            for name in names:
                if name not in COMMON:
                    raise ValueError(f"there is no terminal common.{name[:50]}")
                yield [token["alias"] or name, ":", (parse_regex(COMMON[name], ""), "")]
        elif token["string"] is not None and token["ignores_case"]:
            pattern = "".join(map(regex_char, _decode_string(token["string"])))
            statement.append((parse_regex(pattern, "i"), "i"))
        elif token["string"] is not None:
            statement.append(json.dumps(_decode_string(token["string"])))
        elif token["regex"] is not None:
            flags = token["flags"]
            statement.append((parse_regex(token["regex"][1:-1], flags), flags.replace("s", "")))
        elif text == "~" and not re.match(r"[ \t]*[0-9]", grammar[position:]):
            raise ValueError("~ is not supported in it")
        elif text == "..":
            raise ValueError("a range is not supported in it; a class is: /[a-z]/")
        elif token["space"] is None:
            statement.append(text)
    if depth:
        raise ValueError("its braces are not balanced")
    if statement:
        yield statement


def _decode_string(literal: str) -> str:
    unescaped: str = json.loads(
        re.sub(r"\\(?:x(..)|.)", lambda m: f"\\u00{m[1]}" if m[1] else m[0], literal)
    )
    return unescaped


def _is_string(token: Lexical) -> bool:
    return isinstance(token, str) and token.startswith('"')


# ── rewriting ──


class TerminalRewriter:
    """Rewrites terminals with special characters to rules. `close`: the text after an input."""

    def __init__(self, writer: RuleWriter, close: str = "") -> None:
        self._writer, self._close = writer, close

    def rewrite(self, statements: Sequence[Sequence[Lexical]]) -> list[str]:
        definitions = {_name(s): s for s in statements if s[0] != IGNORE}
        terminals = {n: s for n, s in definitions.items() if n.lstrip("!?_")[:1].isupper()}
        self._rules: dict[str, str] = {}  # new names, of terminals that become rules
        before = -1
        while before < len(self._rules):
            before = len(self._rules)
            for name, statement in terminals.items():
                if any(map(self._is_special, statement[1:])) and name not in self._rules:
                    if "&" in statement:
                        raise ValueError(f"{name}: & is not supported beside special characters")
                    self._rules[name] = f"{PREFIX}{len(self._rules)}"
        lines: list[str] = []
        if self._close:
            self._rules |= {f"{sign}start": f"{PREFIX}start" for sign in ("", "?", "!")}
            lines.append(f"start: {PREFIX}start {string_literal(self._close)}")
        for statement in statements:
            if statement[0] == IGNORE:
                lines += self._ignored(statement[1:], terminals)
            else:
                lines.append(self._definition(statement))
        return lines

    def _definition(self, statement: Sequence[Lexical]) -> str:
        if (name := _name(statement)) in self._rules:
            body = statement[statement.index(":") :]  # without a priority
            return " ".join([self._rules[name], *map(self._token, body)])
        return " ".join(map(self._token, statement))

    def _is_special(self, token: Lexical) -> bool:
        if not isinstance(token, str):
            return bool(token[0].members(self._writer.special, token[1]))
        if _is_string(token):
            return self._writer.is_special(json.loads(token))
        return token in self._rules

    def _token(self, token: Lexical) -> str:
        if not isinstance(token, str):
            regex, flags = token
            if self._is_special(token):
                return self._writer.rule(regex, flags)
            return regex_terminal(regex.source) + flags
        if _is_string(token):
            return self._writer.literal(json.loads(token))
        return self._rules.get(token, token)

    def _ignored(
        self, tokens: Sequence[Lexical], terminals: dict[str, Sequence[Lexical]]
    ) -> Iterator[str]:
        """Yield statements that ignore the lexemes of repeated classes."""
        while len(tokens) == 1 and isinstance(tokens[0], str) and tokens[0] in self._rules:
            tokens = terminals[tokens[0]][2:]
        lexemes: list[str] | None = None
        if not any(map(self._is_special, tokens)):
            lexemes = [" ".join(map(self._token, tokens))]
        elif len(tokens) == 1 and not isinstance(tokens[0], str):
            lexemes = self._writer.repeated_lexemes(*tokens[0])
        elif len(tokens) == 1:
            lexemes = [self._token(tokens[0])]
        if lexemes is None:
            raise ValueError("%ignore takes a class of characters, repeated: /[ \\n]+/")
        yield from (f"{IGNORE} {lexeme}" for lexeme in lexemes)


def _name(statement: Sequence[Lexical]) -> str:
    name = statement[0]
    if not isinstance(name, str) or ":" not in statement:
        raise ValueError(f"{str(name)[:20]!r} starts no rule")
    return name
