"""The oldest messages are dropped, never half a call."""

from typing import Any

import pytest

from worker.messages.generation import Chat
from worker.text.chat_template.truncation import without_oldest

S, U, A, T = ({"role": role} for role in ("system", "user", "assistant", "tool"))
C: dict[str, Any] = {"role": "assistant", "tool_calls": [{}]}


@pytest.mark.parametrize(
    ("messages", "room", "kept"),
    [
        ([U, A, U, A, U], 3, [U, A, U]),
        ([U, A, U, A, U], 2, [U]),
        ([S, U, A, U, A, U], 4, [S, U, A, U]),
        ([U, C, T, A, U, A], 5, [U, A]),  # not from the call or its result
        ([S, U, C, T, C, T, C, T], 5, [S, C, T, C, T]),  # one long turn
        ([S, U, C, T, T], 3, None),  # the results need their call
        ([S, U], 1, None),
    ],
)
def test_as_few_messages_as_possible_are_dropped(
    messages: list[Any], room: int, kept: list[Any] | None
) -> None:
    tried = []

    def fits(chat: Chat) -> bool:
        tried.append(chat)
        return len(chat.messages) <= room

    rest = without_oldest(Chat(tuple(messages)), fits)
    assert (rest and list(rest.messages)) == kept
    assert len(tried) <= 5


def test_a_rest_that_the_template_refuses_is_not_taken() -> None:
    chat = Chat((U, A, U, C, T, C, T))
    assert (
        without_oldest(chat, lambda rest: rest.messages[0] == U and len(rest.messages) < 2) is None
    )
