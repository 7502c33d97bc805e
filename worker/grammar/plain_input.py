"""A custom tool's Lark grammar as a rule of plain text, up to the text that closes an input.

    statements (custom_input.py) → expressions → rules that end with the closing text

llguidance's lexer takes the longest lexeme and does not go back. A last lexeme that the closing
text could continue would never end, so the closing text is part of it, and no lexeme contains the
closing text otherwise. A grammar that can write it across lexemes is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from worker.grammar.lark import MAX_LENGTH, regex_terminal, string_literal
from worker.grammar.regex_syntax import RegexPart

Lexical = str | tuple[RegexPart, str]  # other text of a grammar, or a regular expression and flags
IGNORE = "%ignore"
MAX_DEPTH = 50  # of groups
MAX_PASSES = 10  # over the rules, to find their facts
EMPTY, NOT_EMPTY = '""', "/(?s:.+)/"
SKIPPABLE = re.compile(r"[?*]|\{(0|,)")  # a quantifier
SIGNS = {"sequence": " ", "choice": " | ", "both": " & "}
Kind = Literal["", "sequence", "choice", "both"]


@dataclass(frozen=True, slots=True)
class Expression:
    """A token, or a sequence, a choice or an intersection of expressions; perhaps repeated."""

    kind: Kind = ""
    items: tuple["Expression", ...] = ()
    token: Lexical = ""
    quantifier: str = ""


class _Reader:
    """Reads the body of a statement."""

    def __init__(self, tokens: Sequence[Lexical]) -> None:
        self._tokens, self._position, self._depth = tokens, 0, 0

    def body(self) -> Expression:
        expression = self._choice()
        if self._position < len(self._tokens):
            raise ValueError(f"{self._next!r} is not supported in it")
        return expression

    @property
    def _next(self) -> Lexical:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, token: str) -> bool:
        taken = self._next == token
        self._position += taken
        return taken

    def _list(self, sign: str, read: Callable[[], Expression], kind: Kind) -> Expression:
        items = [read()]
        while self._take(sign):
            items.append(read())
        return items[0] if len(items) == 1 else Expression(kind, tuple(items))

    def _choice(self) -> Expression:
        return self._list("|", self._named, "choice")

    def _named(self) -> Expression:
        expression = self._list("&", self._sequence, "both")
        if self._take("->"):
            self._position += 1
        return expression

    def _sequence(self) -> Expression:
        items = []
        while self._next not in ("", "|", "&", "->", ")", "]"):
            items.append(self._repeated())
        return items[0] if len(items) == 1 else Expression("sequence", tuple(items))

    def _repeated(self) -> Expression:
        expression, quantifier = self._item(), ""
        if self._next in ("?", "*", "+"):
            quantifier = str(self._next)
            self._position += 1
        elif self._take("~"):
            quantifier = f"{{{self._next}}}"
            self._position += 1
        elif self._next == "{":
            while not quantifier.endswith("}"):
                if not isinstance(self._next, str) or self._next == "":
                    raise ValueError("its braces are not balanced")
                quantifier += self._next
                self._position += 1
        return (
            Expression("sequence", (expression,), quantifier=quantifier)
            if quantifier
            else expression
        )

    def _item(self) -> Expression:
        token = self._next
        self._position += 1
        if token not in ("(", "["):
            return Expression(token=token)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("its groups are nested too deeply")
        inner = self._choice()
        if not self._take(")" if token == "(" else "]"):
            raise ValueError(f"its {token} is not closed")
        self._depth -= 1
        return Expression("sequence", (inner,), quantifier="?" if token == "[" else "")


class PlainGrammar:
    """A grammar of text that `close` follows, which is empty where a special token follows.
    `prefix`: no name begins with it."""

    def __init__(self, statements: Sequence[Sequence[Lexical]], close: str, prefix: str) -> None:
        self._statements, self._close, self._end = statements, close, close.strip()
        self._prefix = prefix
        named = [s for s in statements if s[0] != IGNORE]
        self._bodies = {_bare(s[0]): _Reader(s[s.index(":") + 1 :]).body() for s in named}
        self._ignored = [_Reader(s[1:]).body() for s in statements if s[0] == IGNORE]
        self._start = f"{prefix.lower()}start" if close else "start"
        self._excluded = f"~{regex_terminal(f'(?s:.*){re.escape(self._end)}(?s:.*)')}"
        self._terminals: list[str] = []
        self._end_names: dict[str, str] = {}  # by name, the rule of its text and the closing text
        self._end_rules: list[str] = []

    def rewrite(self) -> list[str]:
        """Return the rewritten statements. ValueError with the reason if that cannot be done."""
        lines = []
        for statement in self._statements:
            in_rule = not _is_terminal(_bare(statement[0])) and statement[0] != IGNORE
            lines.append(" ".join(self._token(token, in_rule) for token in statement))
        if self._close:
            analysis = self._analysis
            analysis.check(self._ignored)
            ends = self._ends(Expression(token="start"))
            ends += [f"{self._start} {end}" for item in self._ignored for end in self._ends(item)]
            if analysis.facts(Expression(token="start")).is_nullable:
                ends.append(string_literal(self._close))
            lines.append(f"start: {' | '.join(ends)}")
        return [*lines, *self._end_rules, *self._terminals]

    @cached_property
    def _analysis(self) -> "_Analysis":
        return _Analysis(self._bodies, self._end)

    # ── text of the grammar ──

    def _text(self, expression: Expression) -> str:
        if not expression.kind:
            return self._token(expression.token)
        body = SIGNS[expression.kind].join(map(self._text, expression.items))
        return f"({body or EMPTY}){expression.quantifier}"

    def _token(self, token: Lexical, in_rule: bool = True) -> str:
        if isinstance(token, str):
            return self._start if _bare(token) == "start" else token
        regex, flags = token
        literal = regex_terminal(regex.source) + flags
        if not self._end:
            return literal
        # An empty lexeme would hide that the next one may begin like the closing text.
        is_optional = in_rule and _is_empty(regex)
        parts = [literal, *([NOT_EMPTY] * is_optional)]
        if regex.matches(self._end[0], flags):
            parts.append(self._excluded)
        if len(parts) == 1:
            return literal
        terminal = self._add_terminal(" & ".join(parts))
        return f"(({terminal})?)" if is_optional else terminal

    def _add_terminal(self, body: str) -> str:
        name = f"{self._prefix}{len(self._terminals)}"
        self._terminals.append(f"{name}: {body}")
        return name

    # ── the last lexeme ──

    def _ends(self, expression: Expression) -> list[str]:
        """Return the alternatives of text that is not empty, and the closing text."""
        if not expression.kind:
            return self._token_ends(expression.token)
        if expression.kind == "both":
            raise ValueError("& is supported only in terminals")
        ends: list[str] = []
        if expression.kind == "choice":
            ends = [end for item in expression.items for end in self._ends(item)]
        else:
            items = [*expression.items]
            while items:
                last = items.pop()
                before = " ".join(map(self._text, items))
                ends += [f"{before} {end}" for end in self._ends(last)]
                if len(before) * len(ends) > MAX_LENGTH:
                    raise ValueError("it is too long")
                if not self._analysis.facts(last).is_nullable:
                    break
        if expression.quantifier:
            earlier = _one_less(expression.quantifier)
            body = self._text(replace(expression, quantifier=""))
            ends = [f"{body}{earlier} {end}" for end in ends] if earlier else ends
        if sum(map(len, ends)) > MAX_LENGTH:
            raise ValueError("it is too long")
        return ends

    def _token_ends(self, token: Lexical) -> list[str]:
        if token == EMPTY:
            return []
        name = _bare(token)
        is_rule = name[:1].isalpha() or name[:1] == "_"
        if is_rule and name not in self._bodies:
            raise ValueError(f"{name[:50]!r} is not defined")
        if not is_rule or _is_terminal(name):
            close, text = string_literal(self._close), self._token(token)
            if not self._may_go_on(token, self._close[0]):
                return [f"{text} {close}"]
            if not isinstance(token, str):
                text = regex_terminal(token[0].source) + token[1]
            return [self._add_terminal(f"({text} & {self._excluded}) {close}")]
        if name not in self._end_names:
            self._end_names[name] = f"{self._prefix.lower()}end_{len(self._end_names)}"
            ends = " | ".join(self._ends(self._bodies[name]))
            self._end_rules.append(f"{self._end_names[name]}: {ends}")
        return [self._end_names[name]]

    def _may_go_on(self, token: Lexical, char: str, depth: int = 0) -> bool:
        """Return whether the match of a terminal may continue with a character."""
        if not isinstance(token, str):
            return _may_go_on(token[0], char, token[1])
        body = self._bodies.get(_bare(token))
        if body is None:
            return False
        # Of several tokens any may, to be safe.
        return bool(body.kind) or depth > MAX_DEPTH or self._may_go_on(body.token, char, depth + 1)


def _one_less(quantifier: str) -> str:
    """Return the quantifier of all repetitions but the last."""
    if quantifier in ("?", "*", "+"):
        return "" if quantifier == "?" else "*"
    least, comma, most = quantifier[1:-1].partition(",")
    least = str(max(0, int(least or 0) - 1))
    if not comma:
        return f"{{{least}}}"
    return f"{{{least},{max(0, int(most) - 1) if most else ''}}}"


# ── properties of expressions ──


class Facts(NamedTuple):
    """Whether a text of an expression may be empty; the characters of the closing text with which
    one may begin and end."""

    is_nullable: bool = False
    first: frozenset[str] = frozenset()
    last: frozenset[str] = frozenset()


class _Analysis:
    """The facts of a grammar's rules, and whether its text may contain `end` across lexemes."""

    def __init__(self, bodies: Mapping[str, Expression], end: str) -> None:
        self._end, self._chars = end, sorted({*end})
        self._of_regex: dict[Lexical, Facts] = {}
        self._named = dict.fromkeys(bodies, Facts())
        self._writes_end = False
        for _ in range(MAX_PASSES):
            before = dict(self._named)
            for name in (*bodies, *reversed([*bodies])):
                self._named[name] = self.facts(bodies[name])
            if before == self._named:
                return
        raise ValueError("its rules are nested too deeply")

    def check(self, ignored: Iterable[Expression]) -> None:
        """Raise ValueError if lexemes together may be the closing text. A lexeme alone is not."""
        between = [self.facts(expression) for expression in ignored]
        for facts in between:
            for other in [*self._named.values(), *between]:
                self._follow(facts.last, other.first)
                self._follow(other.last, facts.first)
        if self._writes_end:
            reason = (
                f"its text may contain {self._end!r}, which ends the input in this model's calls"
            )
            raise ValueError(reason)

    def _follow(self, last: frozenset[str], first: frozenset[str]) -> None:
        """Record that a text follows another one."""
        pairs = pairwise(self._end) if last and first else ()
        self._writes_end |= any(one in last and other in first for one, other in pairs)

    def facts(self, expression: Expression) -> Facts:
        if not expression.kind:
            return self._token_facts(expression.token)
        items = [self.facts(item) for item in expression.items]
        if expression.kind == "sequence":
            nullable, first, last = True, frozenset[str](), frozenset[str]()
            for item in items:
                self._follow(last, item.first)
                first = first | item.first if nullable else first
                last = item.last | last if item.is_nullable else item.last
                nullable = nullable and item.is_nullable
        else:
            nullable = (any if expression.kind == "choice" else all)(i.is_nullable for i in items)
            first = frozenset().union(*(item.first for item in items))
            last = frozenset().union(*(item.last for item in items))
        if expression.quantifier not in ("", "?"):
            self._follow(last, first)
        nullable = nullable or bool(SKIPPABLE.match(expression.quantifier))
        return Facts(nullable, first, last)

    def _token_facts(self, token: Lexical) -> Facts:
        if not isinstance(token, str):
            if token not in self._of_regex:
                part, flags = token
                edges = (self._edge_chars(part, flags, from_end) for from_end in (False, True))
                self._of_regex[token] = Facts(_is_empty(part), *edges)
            return self._of_regex[token]
        if token.startswith('"'):
            text = json.loads(token)
            return Facts(not text, frozenset(text[:1]), frozenset(text[-1:]))
        return self._named.get(_bare(token), Facts())

    def _edge_chars(self, part: RegexPart, flags: str, from_end: bool) -> frozenset[str]:
        found: set[str] = set() if part.group else {*part.members(self._chars, flags)}
        for parts in part.group:
            for inner in reversed(parts) if from_end else parts:
                found |= self._edge_chars(inner, flags, from_end)
                if not _is_empty(inner):
                    break
        return frozenset(found)


def _may_go_on(part: RegexPart, char: str, flags: str) -> bool:
    """Return whether a match of a regular expression may continue with a character, or perhaps."""
    if not part.matches(char, flags):
        return False
    if part.quantifier or len(part.group) > 1:
        return True
    return any(_may_go_on(inner, char, flags) for parts in part.group for inner in parts)


def _is_empty(part: RegexPart) -> bool:
    """Return whether a regular expression matches the empty text."""
    if SKIPPABLE.match(part.quantifier):
        return True
    return any(all(map(_is_empty, parts)) for parts in part.group)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _bare(token: Lexical) -> str:
    """Return a name without the signs before it."""
    return token.lstrip("!?") if isinstance(token, str) else ""
