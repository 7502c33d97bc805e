"""An NDJSON body is split into the same lines however its chunks arrive."""

import random

import pytest

from server.http.lines import Line, LineSplitter


def split(body: bytes, cuts: list[int], max_bytes: int = 20) -> list[Line]:
    lines: list[Line] = []
    splitter, start = LineSplitter(max_bytes), 0
    for end in [*sorted(cuts), len(body)]:
        lines += splitter.feed(body[start:end])
        assert splitter.held <= max_bytes + 4
        start = end
    return [*lines, *splitter.finish()]


BODY = b"\xef\xbb\xbf1\r\n\r\n \t\n" + b"x" * 20 + b"\r\n" + b"y" * 21 + b"\n\xff\n" + b"z" * 99
LINES = [
    Line(1, b"1", 3),
    Line(4, b"x" * 20, 11),
    Line(5, None, 33),
    Line(6, b"\xff", 55),
    Line(7, None, 57),
]


def test_lines_do_not_depend_on_chunks() -> None:
    assert split(BODY, []) == LINES
    assert split(BODY, list(range(len(BODY)))) == LINES
    rng = random.Random(0)
    for _ in range(300):
        assert split(BODY, rng.choices(range(len(BODY)), k=rng.randrange(8))) == LINES


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"\n\r\n", []),
        (b"a", [Line(1, b"a", 0)]),
        (b"a\n", [Line(1, b"a", 0)]),
        (b"\xef\xbb\xbf\na", [Line(2, b"a", 4)]),
        (b"a\n\xef\xbb\xbfb", [Line(1, b"a", 0), Line(2, b"\xef\xbb\xbfb", 2)]),
    ],
)
def test_ends_of_lines(body: bytes, lines: list[Line]) -> None:
    assert split(body, []) == split(body, list(range(len(body)))) == lines


def test_a_long_line_is_not_held() -> None:
    splitter = LineSplitter(100)
    for _ in range(1000):
        assert list(splitter.feed(b"a" * 1000)) == []
        assert splitter.held == 0
    assert list(splitter.feed(b"\nb\n")) == [Line(1, None, 0), Line(2, b"b", 1_000_001)]


def test_blank_lines_count_and_take_no_step_each() -> None:
    splitter = LineSplitter(20)
    assert list(splitter.feed(b"1\n \n\r\n" + b"\n" * 1000 + b"  2")) == [Line(1, b"1", 0)]
    assert splitter.complete == 1003
    assert list(splitter.finish()) == [Line(1004, b"  2", 1006)]
