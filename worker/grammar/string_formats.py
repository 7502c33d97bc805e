"""The string formats of JSON Schema that are enforced, as regular expressions of the whole string.

These are the formats that llguidance enforces in JSON, for arguments in other styles. Any other
format is an annotation.
"""

DAY_OF_30, DAY_OF_31 = "(0[1-9]|[12][0-9]|30)", "(0[1-9]|[12][0-9]|3[01])"
LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE = (
    f"([0-9]{{4}}-((0[13578]|1[02])-{DAY_OF_31}|(0[469]|11)-{DAY_OF_30}|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP}-02-29)"
)
HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{HOUR_AND_MINUTE})"
DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
HOSTNAME = rf"{LABEL}(\.{LABEL})*"
WORD = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"({OCTET}\.){{3}}{OCTET}"
GROUP = "[0-9a-fA-F]{1,4}"


def _groups(max_count: int) -> str:
    """Up to `max_count` groups, separated by colons."""
    return f"({GROUP}(:{GROUP}){{0,{max_count - 1}}})?" if max_count else ""


IPV6 = f"(({GROUP}:){{7}}{GROUP}|{'|'.join(f'{_groups(n)}::{_groups(7 - n)}' for n in range(8))})"
LETTER = "[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2}"  # of a URI
SEGMENT = f"({LETTER}|[:@])"
AUTHORITY = rf"(({LETTER}|:)*@)?(\[{IPV6}\]|({LETTER})*)(:[0-9]*)?"
PATH = f"(//{AUTHORITY}(/{SEGMENT}*)*|/?({SEGMENT}+(/{SEGMENT}*)*)?)"

FORMATS = {
    "date-time": f"{DATE}[tT]{TIME}",
    "time": TIME,
    "date": DATE,
    "duration": f"P({DAYS}({HOURS})?|{HOURS}|[0-9]+W)",
    "email": rf"{WORD}(\.{WORD})*@({HOSTNAME}|\[{IPV4}\])",
    "hostname": HOSTNAME,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:{PATH}(\?({SEGMENT}|[/?])*)?(#({SEGMENT}|[/?])*)?",
}
