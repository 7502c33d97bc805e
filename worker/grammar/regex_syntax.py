"""Regular expressions of clients' grammars, as Rust reads them: parsed, and rewritten to rules.

    pattern --parse_regex--> alternatives of sequences of repeated parts --RuleWriter--> Lark

Only what terminals of a grammar need: characters, classes, groups, repetition, alternatives.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

import regex
from llguidance import LLMatcher, LLTokenizer

from worker.grammar.lark import regex_terminal, string_literal

BYTE_TOKENIZER = LLTokenizer("byte")
EMPTY = '""'
MAX_CLASS_CHARS = 500  # of a class of characters
MAX_DEPTH = 50  # of groups
# Characters that JSON escapes, and how: in one way, so that each text has one escaped form.
ESCAPED = {char: json.dumps(char)[1:-1] for char in [*map(chr, range(32)), '"', "\\"]}
CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]{1,5}(?:,[0-9]{0,5})?\})(?P<mode>[*+?])?")
GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flag>s?|-s):)|(?!\?))")
ATOM = regex.compile(
    r"""(?P<escape>\\(?:[dDwWsS]|[pP](?:\{\^?[\w=:]{1,50}\}|\w)))
    |\\(?:[xu]\{(?P<code>[0-9a-fA-F]{1,6})\}|x(?P<code>[0-9a-fA-F]{2})|u(?P<code>[0-9a-fA-F]{4}))
    |\\(?P<control>[ntrfva])
    |\\(?P<char>(?![<>])[\W_])
    |(?P<class>\[\^?+\]?+(?P<rest>(?:\\.|[^\\\[\]]|\[(?&rest)\])*+)\])
    |(?P<dot>\.)
    |(?P<char>[^\\\[^$*+?{(])""",
    regex.VERBOSE | regex.DOTALL,
)


@dataclass(frozen=True, slots=True)
class RegexPart:
    """A class of characters, a character or a group of alternatives, repeated. `text`: the regular
    expression without the quantifier."""

    text: str
    char: str = ""
    group: tuple[tuple["RegexPart", ...], ...] = ()
    quantifier: str = ""

    @property
    def source(self) -> str:
        return self.text + self.quantifier

    def members(self, chars: Sequence[str], flags: str) -> list[str]:
        """Return those of the characters that are possible somewhere in the part."""
        if self.group:
            parts = [part for sequence in self.group for part in sequence]
            found = {char for part in parts for char in part.members(chars, flags)}
            return [char for char in chars if char in found]
        if self.char:
            chosen = {self.char, *((self.char.lower(), self.char.upper()) * ("i" in flags))}
            return [char for char in chars if char in chosen]
        return class_members(self.text, "i" in flags, *chars)


def parse_regex(pattern: str, flags: str) -> RegexPart:
    """Return a regular expression as a group. Raise ValueError for unsupported syntax."""
    if set(flags) - set("is"):
        raise ValueError(f"flags of a regular expression may be i and s, not {flags!r}")
    reader = _RegexReader(pattern)
    group = reader.alternatives("s" in flags)
    if reader.position < len(pattern):
        raise ValueError("a parenthesis in it is not opened")
    return group


@dataclass
class _RegexReader:
    pattern: str
    position: int = 0
    depth: int = 0

    def alternatives(self, dot_all: bool) -> RegexPart:
        """Read up to the end or to a closing parenthesis."""
        sequences: list[list[RegexPart]] = [[]]
        while self.position < len(self.pattern) and self.pattern[self.position] != ")":
            if self.pattern[self.position] == "|":
                self.position += 1
                sequences.append([])
            else:
                sequences[-1].append(self._quantified(self._part(dot_all)))
        sources = ("".join(part.source for part in parts) for parts in sequences)
        return RegexPart(f"(?:{'|'.join(sources)})", group=tuple(map(tuple, sequences)))

    def _part(self, dot_all: bool) -> RegexPart:
        start = self.position
        if group := GROUP.match(self.pattern, start):
            self.position = group.end()
            return self._group(group["flag"] == "s" or (dot_all and group["flag"] != "-s"))
        atom = ATOM.match(self.pattern, start, start + MAX_CLASS_CHARS)
        if atom is None and self.pattern[start] == "[":
            raise ValueError("a class of characters in it is not closed, or too long")
        if atom is None:
            raise self._unsupported(start)
        self.position = atom.end()
        if atom["dot"]:
            return RegexPart(r"[\s\S]" if dot_all else r"[^\n]")
        if atom["escape"] or atom["class"]:
            return RegexPart(atom["class"] or f"[{atom['escape']}]")
        char = CONTROL.get(atom["control"], atom["char"])
        if atom["code"]:
            code = int(atom["code"], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"{atom[0]} is no character")
            char = chr(code)
        return RegexPart(regex_char(char) if char.isprintable() else _class_char(char), char)

    def _group(self, dot_all: bool) -> RegexPart:
        """Read a group whose parenthesis has been read."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("its groups are nested too deeply")
        group = self.alternatives(dot_all)
        if not self.pattern.startswith(")", self.position):
            raise ValueError("a parenthesis in it is not closed")
        self.position += 1
        self.depth -= 1
        return group

    def _quantified(self, part: RegexPart) -> RegexPart:
        if (match := QUANTIFIER.match(self.pattern, self.position)) is None:
            return part
        if match["mode"]:
            raise self._unsupported(match.start())
        self.position = match.end()
        return replace(part, quantifier=match[0])

    def _unsupported(self, start: int) -> ValueError:
        return ValueError(f"{self.pattern[start : start + 20]!r} is not supported in it")


# ── rules ──


class RuleWriter:
    """Writes Lark rules of regular expressions in whose text some characters are special.

    A special character begins a lexeme: llguidance's lexer does not go back to a lexeme that could
    have ended before it."""

    special: Sequence[str]
    ordinary: str  # the class of all other characters

    def is_special(self, text: str) -> bool:
        """Return whether a literal text is written as another."""
        return self.literal(text) != string_literal(text)

    def literal(self, text: str) -> str:
        raise NotImplementedError

    def special_lexemes(self, part: RegexPart, flags: str, is_unbounded: bool) -> list[str]:
        """Return the lexemes of a class that begin with special characters."""
        raise NotImplementedError

    def rule(self, group: RegexPart, flags: str) -> str:
        """Return a rule of the matches of a regular expression."""
        return self._alternatives(group, flags, is_last=True)

    def repeated_lexemes(self, part: RegexPart, flags: str) -> list[str] | None:
        """Return the lexemes whose repetition a class matches that is repeated; None for any other
        regular expression."""
        while len(part.group) == 1 and len(part.group[0]) == 1 and not part.quantifier:
            [[part]] = part.group
        if part.group or part.char or part.quantifier not in ("*", "+"):
            return None
        return self._class_lexemes(part, flags, "+")

    def _alternatives(self, group: RegexPart, flags: str, is_last: bool) -> str:
        sequences = (" ".join(self._sequence(parts, flags, is_last)) for parts in group.group)
        return f"({' | '.join(sequence or EMPTY for sequence in sequences)})"

    def _sequence(self, parts: Sequence[RegexPart], flags: str, is_last: bool) -> Iterator[str]:
        """Yield the rules of the parts. Those without special characters are one lexeme."""
        plain: list[str] = []
        self.literal("".join(part.char or "\0" for part in parts))  # ValueError: closing text
        for n, part in enumerate(parts):
            if not part.members(self.special, flags):
                plain.append(part.source)
                continue
            if plain:
                yield _lexeme("".join(plain), flags)
                plain = []
            ends = is_last and n == len(parts) - 1
            if part.char:
                yield self.literal(part.char) + part.quantifier
            elif part.group:
                ends = ends and part.quantifier in ("", "?")
                yield self._alternatives(part, flags, ends) + part.quantifier
            else:
                following = parts[n + 1] if n + 1 < len(parts) else None
                may_run = ends or (
                    following is not None
                    and following.char != ""
                    and following.quantifier in ("", "+")
                    and not part.members([following.char], flags)
                )
                is_run = may_run and part.quantifier in ("*", "+")
                lexemes = self._class_lexemes(part, flags, "+" if is_run else "")
                yield f"({' | '.join(lexemes)}){part.quantifier}"
        if plain:
            yield _lexeme("".join(plain), flags)

    def _class_lexemes(self, part: RegexPart, flags: str, repeated: str) -> list[str]:
        """Return the lexemes of a class: its ordinary characters, and special ones."""
        is_unbounded = part.quantifier in ("*", "+")
        ordinary = _lexeme(f"[{part.text}&&{self.ordinary}]{repeated}", flags)
        return [ordinary, *self.special_lexemes(part, flags, is_unbounded)]


class JsonWriter(RuleWriter):
    """Writes rules of text as a JSON string has it."""

    special = (*ESCAPED,)
    ordinary = r'[^"\\\x00-\x1f]'

    def literal(self, text: str) -> str:
        return string_literal(json.dumps(text, ensure_ascii=False)[1:-1])

    def special_lexemes(self, part: RegexPart, flags: str, is_unbounded: bool) -> list[str]:
        escapes = [ESCAPED[char][1:] for char in part.members(self.special, flags)]
        if len(escapes) == 1:
            return [string_literal(f"\\{escapes[0]}")]
        alternatives = "|".join("".join(map(regex_char, escape)) for escape in escapes)
        return [regex_terminal(rf"\\(?:{alternatives})")] if escapes else []


class PlainWriter(RuleWriter):
    """Writes rules of text up to `close`; any text if that is empty. A lexeme that begins like the
    closing text ends where it differs from it."""

    def __init__(self, close: str) -> None:
        self._end = close.strip()
        self._beginnings = dict.fromkeys((close.rstrip(), self._end)) if close else {}
        self.special = [*dict.fromkeys(text[0] for text in self._beginnings)]
        self.ordinary = f"[^{''.join(map(_class_char, self.special))}]"

    def literal(self, text: str) -> str:
        if self._end and self._end in text:
            reason = f"its text contains {self._end!r}, which ends the input in this model's calls"
            raise ValueError(reason)
        return string_literal(text)

    def special_lexemes(self, part: RegexPart, flags: str, is_unbounded: bool) -> list[str]:
        if not is_unbounded:
            return [string_literal(char) for char in part.members(self.special, flags)]
        patterns = (self._departing(text, part, flags) for text in self._beginnings)
        return [_lexeme(pattern, flags) for pattern in patterns if pattern]

    def _departing(self, text: str, part: RegexPart, flags: str) -> str:
        """Return the regular expression of the beginnings of a text, of characters of a class; but
        for the longest, which an ordinary character of the class follows that does not end it."""
        members, *before, last = {*part.members(text, flags)}, *text
        common = [*takewhile(members.__contains__, before)]
        pattern = ""
        if before and len(common) == len(before):
            pattern = (
                f"{regex_char(common.pop())}[{part.text}&&{self.ordinary}&&[^{_class_char(last)}]]"
            )
        for char in reversed(common):
            pattern = regex_char(char) + (f"(?:{pattern})?" if pattern else "")
        return pattern


def _lexeme(source: str, flags: str) -> str:
    return regex_terminal(source) + ("i" if "i" in flags else "")


def _class_char(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


@lru_cache(maxsize=1024)
def class_members(character_class: str, ignores_case: bool, *chars: str) -> list[str]:
    """Return those of the characters that a class has."""
    grammar = f"start: {regex_terminal(character_class)}{'i' * ignores_case}"
    matcher = LLMatcher(BYTE_TOKENIZER, grammar)
    if matcher.get_error():
        raise ValueError(f"{character_class[:50]!r} is not supported in it")
    return [char for char in chars if matcher.deep_copy().try_consume_tokens([*char.encode()])]


def regex_char(char: str) -> str:
    return f"\\{char}" if char in r"\.+*?()|[]{}^$/&~-" else char
