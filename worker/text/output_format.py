"""How a model writes its output: the delimiters between reasoning, tool calls and content.

    chat template (chat_template/inference.py)  →  inferred_output_format  ┐
    response template (of the tokenizer)        →  declared_output_format  ┴→ OutputFormat

parser.py follows the delimiters from phase to phase. A response template's fields are phases too:
transformers compiles them and reads a call's field, while parser.py finds where fields begin and
end, for which it needs no complete output.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple, TypeAlias

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

from worker.text.tool_call_format import (
    DEFAULT_TOOL_CALL_FORMAT,
    DELIMITER,
    ID,
    INDEX,
    NAME,
    PLACEHOLDER_PATTERNS,
    Pair,
    ToolCallFormat,
)
from worker.text.tool_call_parser import (
    BufferedCallParser,
    JsonCallParser,
    ParsedCalls,
    PlainCallParser,
    ToolCallParser,
    ToolTypes,
    make_call_parser,
    read_value,
)

Match: TypeAlias = Any  # of the regex package, which is untyped
# From the groups of the match that opens calls, and the tools.
MakeCallParser = Callable[[dict[str, str], ToolTypes], ToolCallParser]

CONTENT, REASONING, CALL, IGNORED = "content", "reasoning", "call", "ignored"  # phases
MIN_PARTIAL = 3  # characters of a delimiter that is cut short, for it to be hidden
MAX_PENDING = 4096  # characters that may become a delimiter; then they are text
MAX_UNCERTAIN = 8192  # characters after a call in open reasoning, or after a call's end in a string


class Delimiter(NamedTuple):
    """Text that leads from one phase to another."""

    phases: frozenset[str]  # in which it counts
    next_phase: str
    pattern: Any  # of the regex package
    extendable: bool = False  # a match at the end of a text may become longer
    make_parser: MakeCallParser | None = None  # of the calls that it opens
    only_first: bool = False  # it counts only before any content
    # a pattern of the part of the delimiter that is enough to know that a call begins
    trigger: Any = None
    known_tool: bool = False  # it counts only with the name of a tool of the request
    name_first: bool = False  # a word that it begins with is the name of the tool
    line_start: bool = False  # within content it counts only at the start of a line
    after_call: bool = False  # it counts only right after a call

    def after_trigger(self, text: str) -> str | None:
        """Return the text after the trigger; None without one."""
        match = self.trigger and self.trigger.search(text)
        return text[match.end() :] if match else None

    def partial_start(self, text: str, after_call: bool, names: Iterable[str]) -> int:
        """Return where a partial delimiter of a call starts at the end of the text, so that it can
        be hidden; the text's length if there is none. `after_call`: the text follows a call, and a
        partial delimiter of any kind is hidden. `names`: of the tools."""
        is_call = self.next_phase == CALL and not (self.only_first or self.line_start)
        if not is_call and (self.known_tool or not after_call):
            return len(text)
        named = (self.after_trigger(text) or "").lstrip()
        if self.known_tool and not may_be_tool(named, names):
            return len(text)
        match = self.pattern.search(text, partial=True)
        alone = match and after_call and not text[: match.start()].strip()
        cut = match and match.partial and len(match.group()) >= (alone or MIN_PARTIAL)
        return int(match.start()) if cut else len(text)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`reasoning`, `content`: the delimiters around them; content seldom has any. `tool_calls` is
    None where their format is unknown: calls are then parsed if `call_delimiters` find them, but
    not constrained by a grammar."""

    delimiters: tuple[Delimiter, ...]
    call_delimiters: tuple[Delimiter, ...] = ()  # in use where the output may have tool calls
    reasoning: Pair | None = None
    content: Pair | None = None
    tool_calls: ToolCallFormat | None = None
    undelimited_calls: bool = False  # calls begin with their JSON or name, before any content
    message_start: str = ""  # may stand before content and calls where reasoning is a message
    may_close_unopened: bool = False  # reasoning may end that nothing opened: a variable toggles it
    initial_phase: str = CONTENT
    lead_in: str = ""  # words that begin reasoning which no delimiter opens; part of it
    visible_texts: tuple[str, ...] = ()  # of the delimiters, and of the quotes around arguments

    def ends_reasoning(self, text: str) -> bool:
        return self.reasoning is not None and self.reasoning[1].strip() in text

    def reasoning_at_end(self, prompt: str) -> str:
        """Return the delimiters of reasoning that a prompt ends with, open or closed."""
        if self.reasoning is None:
            return ""
        opens, closes = (text.strip() for text in self.reasoning)
        start = prompt.rfind(opens)
        tail = prompt[start:] if start >= 0 else ""
        rest = tail.replace(closes, "").replace(opens, "")
        return "" if rest.strip() else tail

    def may_become_call(self, text: str, names: Iterable[str]) -> bool:
        """Return whether the text of an incomplete call may continue as a call. Without delimiters,
        its beginning decides."""
        if not self.undelimited_calls:
            return True
        calls = self.tool_calls
        if not (calls and text.strip()):
            return False
        name = f"(?:{'|'.join(map(regex.escape, names))})"
        pattern = regex.compile(rf"\s*+{_undelimited_call(calls, name)}.*", regex.DOTALL)
        return pattern.fullmatch(text, partial=True) is not None

    def keeps_special(self, token: str) -> bool:
        """Return whether a special token is part of a delimiter or of quotes around arguments."""
        return len(token) > 2 and any(token in text for text in self.visible_texts)


def may_be_tool(text: str, names: Iterable[str], start: int = 0) -> bool:
    """Return whether the word at this position, if there is one, begins the name of a tool."""
    word = TOOL.match(text, start)
    return word is None or any(name.startswith(word[0]) for name in names)


# ── inferred from a chat template ──

DEFAULT_REASONING: Pair = ("<think>", "</think>")

# What models write around calls without delimiters: <|python_tag|>, [TOOL_CALLS], a code fence
FENCE = r"```\w{0,20}"
WRAPPER = rf"(?:<\|?/?\w{{1,40}}\|?>|\[/?[A-Z_]{{2,40}}\]|{FENCE})"
MARK = r"(?:\[[A-Z_]{2,40}\]\w*+\s*+)"  # [ARGS], or [CALL_ID]id
TOOL_NAME = r"[\w.:/-]{1,128}+"  # any that a request may define
TOOL = regex.compile(TOOL_NAME)
NAME_GROUP = r"(?P<name>[^\s<>\[\]{}()\"'`,]{1,128}?)"


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Output in messages, each with a header that names its channel. `start`, `channel` and `body`
    stand before the header, the channel's name and the text; `ends` end the text."""

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    reasoning: str  # the channel's name
    content: str  # the channel's name
    recipient: str  # the text before a function's name


def inferred_output_format(
    reasoning: Pair | None,
    content: Pair | None,
    calls: ToolCallFormat | None,
    channels: ChannelFormat | None,
    ends: Sequence[str] = (),
    message_start: str = "",
    turn: Pair = ("", ""),
) -> OutputFormat:
    """`ends`: delimiters after content or calls that end neither. `turn`: the delimiters that begin
    and end a response, where these are no special tokens. `message_start`: reasoning,
    content and calls are messages that begin with it, or with the prompt's end, and a header."""
    is_lead_in = reasoning and not (message_start or DELIMITER.search(reasoning[0]))
    lead_in = reasoning[0] if reasoning and is_lead_in else ""
    if channels:
        output_format = _channel_output_format(channels, calls)
    else:
        delimiters: list[Delimiter] = []
        for pair, phase in ((reasoning, REASONING), (content, CONTENT)):
            if pair:
                if message_start and not DELIMITER.match(pair[0]):
                    delimiters += _header_delimiters(phase, message_start, pair[0])
                elif phase == REASONING and lead_in:  # it opens the reasoning, and is part of it
                    pattern = f"(?={regex.escape(lead_in)})"
                    delimiters.append(_delimiter((CONTENT,), REASONING, pattern, only_first=True))
                else:
                    delimiters.append(_opening_delimiter(phase, pair[0]))
                if pair[1]:
                    closing = regex.escape(pair[1])
                    delimiters.append(_delimiter((CONTENT, phase), CONTENT, closing))
        if reasoning is None:  # some models reason though their template shows none
            delimiters += [
                _delimiter((CONTENT,), REASONING, DEFAULT_REASONING[0], only_first=True),
                _delimiter((REASONING,), CONTENT, DEFAULT_REASONING[1]),
            ]
        delimiters += _ignored_delimiters(filter(None, (message_start, *ends)))
        header, end = map(regex.escape, turn)
        if header:
            delimiters.append(_delimiter((CONTENT,), CONTENT, header, only_first=True))
        for phase in (CONTENT, REASONING) if end else ():
            delimiters.append(_delimiter((phase,), phase, rf"{end}\s*+\Z", extendable=True))
        output_format = OutputFormat(
            tuple(delimiters),
            tuple(_call_delimiters(calls) if calls else ()),
            reasoning,
            content,
            calls,
            undelimited_calls=calls is not None and calls.undelimited,
            lead_in=lead_in,
        )
    texts = [
        *output_format.visible_texts,
        *(reasoning or DEFAULT_REASONING),
        *(content or ()),
        *ends,
        message_start,
    ]
    if calls:
        arguments = calls.arguments
        texts += [*calls.section, *calls.call, calls.middle, calls.separator or ""]
        texts += [arguments.open, arguments.middle, arguments.close, arguments.quotes]
        if arguments.item:
            texts += [arguments.opening(arguments.item, ""), arguments.closing(arguments.item)]
    return replace(output_format, visible_texts=tuple(filter(None, texts)))


def _delimiter(phases: Iterable[str], next_phase: str, pattern: str, **options: Any) -> Delimiter:
    compiled = regex.compile(pattern, regex.DOTALL)
    return Delimiter(frozenset(phases), next_phase, compiled, **options)


def _named_parser(groups: dict[str, str], _: ToolTypes) -> ToolCallParser:
    return PlainCallParser("", "", groups["name"])


# What some models write that have no format of their own: a name, a line feed, and arguments
NAME_BEFORE_JSON = _delimiter(
    (CONTENT,),
    CALL,
    rf"(?P<name>{TOOL_NAME})[ \t]*+\n\s*+(?=\{{)",
    make_parser=_named_parser,
    only_first=True,
    known_tool=True,
)


def _undelimited_call(calls: ToolCallFormat, name: str = "", wrapper: str = WRAPPER) -> str:
    """Return a pattern of the beginning of calls without delimiters, up to a name if its pattern is
    given. Some models write calls as Python though their template writes JSON, or the reverse."""
    word = rf"(?:{regex.escape(calls.prefix_word)}\s*+)?" if calls.prefix_word else ""
    key = calls.keys[0] if calls.keys else "name"
    member = (rf'{key}"\s*+:\s*+"' if key else "") + f'{name}"' if name else ""
    json_call = rf'(?P<json>(?:\[\s*+)?\{{\s*+"{member})'
    python_call = rf"(?P<python>\[\s*+{name or TOOL_NAME}\({f'|{name}{KEYWORD}' if name else ''})"
    # No leading \s*: a long run of white space would be searched from each of its positions.
    return rf"(?:{wrapper}\s*+)?{word}(?={json_call}|{python_call})"


KEYWORD = r"\((?=\s*+\w++\s*+=)"  # behind the name of a call that no brackets enclose
# Behind a name: a definition of a tool has a name, too, and no arguments.
CALLED = r'(?=\(|"\s*+(?:\}|,\s*+"(?:arguments|parameters)"))'
# What may close what models write around calls that are not in their format
CLOSER = r"</\w{1,40}>|<\|/\w{1,40}\|>|<\|\w{0,30}(?i:end)\w{0,9}\|>|\[/[A-Z_]{2,40}\]|```(?!\w)"


def _bare_calls(own: str) -> list[Delimiter]:
    """Return what some models write though their format has delimiters, or though they have none:
    JSON or Python calls alone, perhaps in tags or a code fence; or a name before its JSON.
    `own`: the format's delimiter."""
    other = rf"(?!<think|{regex.escape(own) or '<think'})"
    opener = rf"{other}(?:<\|?\w{{1,40}}\|?>|\[[A-Z_]{{2,40}}\]|{FENCE})"
    name, default = f"(?P<name>{TOOL_NAME})", DEFAULT_TOOL_CALL_FORMAT
    named_calls = (
        rf"{other}\[[A-Z_]{{2,40}}\]\s*+{name}\s*+{MARK}*+(?=\{{)",
        rf"{name}\s*+{MARK}++(?=\{{)",
        rf'<function(?:=|\s++name=)"?{name}"?>\s*+(?=\{{)',
    )
    bare_call = partial(
        _delimiter, (CONTENT,), CALL, known_tool=True, name_first=True, line_start=True
    )
    return [
        bare_call(
            rf"(?:{opener}\s*+)?{_undelimited_call(default, name + CALLED, opener)}",
            make_parser=partial(make_call_parser, default),
        ),
        bare_call("|".join(named_calls), make_parser=_named_parser),
        _delimiter((CONTENT,), CONTENT, CLOSER, after_call=True, extendable=True),
    ]


def _ignored_delimiters(texts: Iterable[str]) -> list[Delimiter]:
    """Return delimiters within content, which end nothing."""
    return [_delimiter((CONTENT,), CONTENT, regex.escape(text)) for text in texts]


def _opening_delimiter(phase: str, text: str) -> Delimiter:
    """Return what opens reasoning, or content, which may follow reasoning that nothing closes. A
    word may follow the delimiter, as in <|channel>thought; it may be missing or cut if the next
    character shows that."""
    bare = text.rstrip(ascii_letters)
    word = text.removeprefix(bare)
    if not word:
        phases, line_start = (CONTENT, REASONING), phase == REASONING  # elsewhere it is a mention
        return _delimiter(phases, phase, regex.escape(bare), line_start=line_start)
    cut = "|".join(f"(?={word[:n]}[^{char}])" for n, char in enumerate(word))
    return _delimiter((CONTENT, phase), phase, f"{regex.escape(bare)}(?:{word}|{cut})")


def _header_delimiters(phase: str, start: str, header: str) -> list[Delimiter]:
    """Return what opens reasoning or content whose header is words: these count after the start of
    a message, and at the start of the output."""
    phases, body = (CONTENT, REASONING), regex.escape(header.lstrip())
    return [
        _delimiter(phases, phase, rf"{regex.escape(start)}\s*+{body}"),
        _delimiter(phases, phase, body, only_first=True),
    ]


def _call_delimiters(calls: ToolCallFormat) -> list[Delimiter]:
    """Return what opens a call, with its name if that comes next, what closes it, and delimiters
    that may follow."""
    optional, opens = calls.opening
    closes, after = calls.closing
    before = "".join(rf"(?:{_flexible_pattern(text)}\s*)?" for text in optional)
    before = before.replace("calls", "calls?")
    if calls.undelimited:
        pattern = _undelimited_call(calls)
    elif calls.is_list:
        pattern = before + _flexible_pattern(opens)
        if calls.any_style and calls.call == DEFAULT_TOOL_CALL_FORMAT.call:
            pattern += r"(?=\s*+[^\s{])"  # JSON is streamed
    else:
        before_id, id_, after_id = calls.middle.strip().rpartition(ID)
        optional_id = f"(?:{_flexible_pattern(before_id + id_)})?" if id_ and after_id else ""
        before_index, index, after_index = after_id.rpartition(INDEX)
        if index and after_index:
            optional_id += rf"(?:{_flexible_pattern(before_index + index)}\s*)?"
        middle = optional_id + _flexible_pattern(after_index) or r"(?=[\s<])"
        opening = rf"{_flexible_pattern(opens)}\s*" if opens else ""
        if (delimiter := calls.syntax.pattern.match(opens)) and (word := opens[delimiter.end() :]):
            opening = rf"{_flexible_pattern(delimiter[0])}\s*(?:{_flexible_pattern(word)}\s*)?"
        if opens and calls.arguments.style == "json":
            # some models omit the delimiter before JSON, or write the first again, or another
            middle = rf"(?:{middle}|(?:{_flexible_pattern(opens)}\s*)?{MARK}*+(?=\{{))"
        pattern = rf"{before}{opening}{NAME_GROUP}\s*{middle}"
    trigger = None if calls.is_list else regex.compile(_flexible_pattern(calls.trigger.strip()))
    phases = (CONTENT,) if calls.undelimited else (CONTENT, REASONING)
    opening_call = partial(
        _delimiter,
        # The next call ends one that nothing closes.
        (*phases, CALL) if closes and not (calls.is_list or calls.message_start) else phases,
        CALL,
        make_parser=partial(make_call_parser, calls),
    )
    if (start := calls.message_start) and not DELIMITER.match(opens):
        delimiters = [
            opening_call(rf"{regex.escape(start)}\s*+{pattern}", known_tool=True),
            opening_call(pattern, known_tool=True, only_first=True),
        ]
    else:
        delimiters = [opening_call(pattern, only_first=calls.undelimited, trigger=trigger)]
    if closes:
        ends = "|".join(map(_flexible_pattern, (closes, *after)))  # some models omit the first
        delimiters.append(_delimiter((CALL,), CONTENT, ends))
    after_call = partial(_delimiter, (CONTENT,), CONTENT, after_call=True)
    if calls.undelimited:
        named = _undelimited_call(calls, f"(?P<name>{TOOL_NAME})")
        delimiters.append(opening_call(named, known_tool=True, line_start=True))
        delimiters += _bare_calls("")[1:]
    elif not (calls.message_start or calls.any_style):
        # Some models write JSON calls in place of the template's, or in <tool_call>.
        opens, ends = (text.strip() for text in DEFAULT_TOOL_CALL_FORMAT.call)
        first = calls.syntax.pattern.match((calls.section[0] + calls.call[0]).strip())
        own = first[0] if first else ""
        texts = {own, opens} - ({own} if calls.is_list else {""})
        after += [ends, *calls.syntax.pattern.findall(calls.call[1] + calls.section[1])[-1:]]
        for text in sorted(texts):
            pattern = rf"{_flexible_pattern(text)}(?=\s*+(?:\[\s*+)?\{{\s*+\")"
            make_parser = lambda *_: PlainCallParser("name", "arguments")  # noqa: E731
            delimiters.append(opening_call(pattern, make_parser=make_parser))
        if calls.is_list:  # a name behind the delimiter: [TOOL_CALLS]name{…}
            own_calls = _flexible_pattern(calls.opening[1])
            pattern = rf"{own_calls}\s*+(?P<name>{TOOL_NAME})\s*+{MARK}*+(?=\{{)"
            named_call = opening_call(pattern, known_tool=True, make_parser=_named_parser)
            delimiters.insert(0, named_call._replace(trigger=regex.compile(own_calls)))
        delimiters += _bare_calls(own)
    return delimiters + [after_call(regex.escape(text)) for text in after]


def _channel_output_format(channels: ChannelFormat, calls: ToolCallFormat | None) -> OutputFormat:
    """Return the format of channels, whose headers are one delimiter each; the first that matches
    decides the phase. The patterns do not backtrack, so that other text is searched once."""
    start, channel, body = map(regex.escape, (channels.start, channels.channel, channels.body))
    recipient = regex.escape(channels.recipient.strip())
    to = regex.escape(channels.recipient.split("=")[0].strip() + "=")
    rest = rf"(?:(?!{body}).){{0,200}}+{body}"
    reasoning = rf"{channel}\s*{regex.escape(channels.reasoning)}"
    before_to, before_reasoning = (rf"(?:(?!{body}|{end}).){{0,200}}+" for end in (to, reasoning))
    reasoning += rf"(?:(?!{channel}|{body}).){{0,100}}+{body}"
    begins, phases = rf"(?:{start}|(?={channel}))", (CONTENT, REASONING, IGNORED)
    call_delimiters: list[Delimiter] = []
    if calls:
        for before in (recipient, to):  # some models leave out the namespace of functions
            function = rf"{before}(?P<name>{TOOL_NAME}){rest}"
            opening_call = partial(
                _delimiter,
                next_phase=CALL,
                make_parser=partial(make_call_parser, calls),
                trigger=regex.compile(recipient),
                known_tool=before != recipient,
            )
            call_delimiters += [
                opening_call(phases, pattern=f"{begins}{before_to}{function}"),
                # the prompt has the start of the header
                opening_call((CONTENT,), pattern=function, only_first=True),
            ]
    return OutputFormat(
        (
            _delimiter(phases, IGNORED, rf"{begins}{before_to}{to}(?!assistant){rest}"),
            _delimiter(phases, REASONING, f"{begins}{before_reasoning}{reasoning}"),
            _delimiter(phases, CONTENT, f"{begins}{rest}"),
            _delimiter((*phases, CALL), CONTENT, "|".join(map(regex.escape, channels.ends))),
        ),
        tuple(call_delimiters),
        (channels.channel + channels.reasoning + channels.body, channels.ends[0]),
        (channels.channel + channels.content + channels.body, channels.ends[0]),
        calls,
        message_start=channels.start,
        visible_texts=(channels.start, channels.channel, channels.body, *channels.ends),
    )


def _flexible_pattern(text: str) -> str:
    """Return a pattern of the text in which white space matches any white space or none, some may
    stand around delimiters, and placeholders match any index or id."""
    text = DELIMITER.sub(r" \g<0> ", text).strip()
    return "".join(
        PLACEHOLDER_PATTERNS.get(part) or (r"\s*" if part.isspace() else regex.escape(part))
        for part in re.split(rf"([{INDEX}{ID}{NAME}]|\s+)", text)
        if part
    )


# Used where a model must call a tool and its own format is unknown.
DEFAULT_OUTPUT_FORMAT = inferred_output_format(
    DEFAULT_REASONING, None, DEFAULT_TOOL_CALL_FORMAT, None
)


# ── declared by a response template ──

CALLS_FIELD, CONTENT_FIELD = "tool_calls", "content"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PHASE_OF_FIELD = {CALLS_FIELD: CALL, CONTENT_FIELD: CONTENT}
PHASE_OF_FIELD |= dict.fromkeys(REASONING_FIELDS, REASONING)


def declared_output_format(spec: Mapping[str, Any]) -> OutputFormat:
    """Read a response template; ValueError or TypeError if it is invalid."""
    spec_fields = {name: dict(field) for name, field in spec["fields"].items()}
    for spec_field in spec_fields.values():
        # White space before a delimiter is dropped anyway, and searching for it is slow.
        for key in ("open_pattern", "close_pattern"):
            if key in spec_field:
                spec_field[key] = spec_field[key].removeprefix(r"\s*")
    template = load_response_template({**spec, "fields": spec_fields})
    initial = _phase_of(template.implicit) if template.implicit else IGNORED
    delimiters: list[Delimiter] = []
    call_delimiters: list[Delimiter] = []
    texts: list[str] = []
    reasoning: Pair | None = None
    for name, field in template.fields.items():
        phase = _phase_of(name)
        own = _field_delimiters(field, initial, phase)
        (call_delimiters if name == CALLS_FIELD else delimiters).extend(own)
        texts += [delimiter.pattern.pattern.replace("\\", "") for delimiter in own]
        texts += [text for pair in field.content_args.get("string_delims", ()) for text in pair]
        if phase == REASONING and field.open_literals and field.close_literals:
            reasoning = field.open_literals[0], field.close_literals[0]
    return OutputFormat(
        tuple(delimiters),
        tuple(call_delimiters),
        reasoning,
        undelimited_calls=any(delimiter.only_first for delimiter in call_delimiters),
        initial_phase=initial,
        visible_texts=tuple(texts),
    )


def _phase_of(field: str) -> str:
    return PHASE_OF_FIELD.get(field, f"{IGNORED} {field}")


def _field_delimiters(field: ResponseTemplateField, outside: str, phase: str) -> list[Delimiter]:
    """Return what opens a field and what closes it."""
    delimiters = []
    for pattern, literals, can_extend, before, after in (
        (field.open_re, field.open_literals, field.open_literal_can_extend, outside, phase),
        (field.close_re, field.close_literals, field.close_literal_can_extend, phase, outside),
    ):
        if pattern is None:
            continue
        extendable = can_extend or not (literals or is_literal(pattern.pattern))
        make_parser = partial(_declared_call_parser, field) if phase == after == CALL else None
        # Calls that begin with their JSON have an empty delimiter.
        only_first = bool(
            make_parser and (match := pattern.search('{"name": "x"')) and not match.group()
        )
        delimiters.append(
            Delimiter(frozenset((before,)), after, pattern, extendable, make_parser, only_first)
        )
    return delimiters


def is_literal(pattern: str) -> bool:
    """Return whether a pattern matches one text alone."""
    return not re.search(r"(?<!\\)(?:\\\\)*[.^$*+?{}\[\]|()]|\\[A-Za-z0-9]", pattern)


def _declared_call_parser(
    field: ResponseTemplateField, captured: dict[str, str], tools: ToolTypes
) -> ToolCallParser:
    """`captured`: the groups of the pattern that opens the field."""
    shape = field.transform.get("function") if isinstance(field.transform, dict) else None
    is_json = field.content == "json"
    if is_json and not field.content_args and shape == "{content}":
        return JsonCallParser("name", "arguments")
    if is_json and not field.content_args and isinstance(shape, dict):
        name, arguments = str(shape.get("name")), str(shape.get("arguments"))
        if arguments == "{content}":
            return JsonCallParser("", "", captured.get(name.strip("{}")) or "")
        keys = (key.strip("{}").removeprefix("content.") for key in (name, arguments))
        return JsonCallParser(*keys)

    def read(text: str, cut: bool) -> ParsedCalls:
        try:
            content = process_field(text, field, captured)
            calls = content if isinstance(content, list) else [content]
            return [typed(**call["function"]) for call in calls]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("no calls") from error

    def typed(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        types = tools.get(name, {})

        def typed_value(key: str, value: Any) -> Any:
            if (allowed := types.get(key)) is None or not isinstance(value, str):
                return value
            return value if is_json and "string" in allowed else read_value(value, allowed)

        return name, {key: typed_value(key, value) for key, value in arguments.items()}

    return BufferedCallParser(read)
