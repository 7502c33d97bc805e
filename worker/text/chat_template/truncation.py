"""Drop the oldest messages of a conversation that does not fit into the context."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from worker.messages.generation import Chat


def without_oldest(chat: Chat, fits: Callable[[Chat], bool]) -> Chat | None:
    """Drop the oldest messages, as few as possible, until a chat fits; return None if it never
    does.

    System messages at the start are kept. The first message after them is the user's or, within the
    last turn, any other than the result of a call, whose call would be missing. `fits` is called
    O(log n) times.
    """
    roles = [message["role"] for message in chat.messages]
    lead = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), 0)

    def cut(start: int) -> Chat:
        return replace(chat, messages=chat.messages[:lead] + chat.messages[start:])

    users = [n for n, role in enumerate(roles) if n > lead and role == "user"]
    last = users[-1] if users else lead
    others = [n for n, role in enumerate(roles) if n > last and role != "tool"]
    for starts in (users, others):
        first = bisect_left(starts, True, key=lambda start: fits(cut(start)))
        if first < len(starts):
            return cut(starts[first])
    return None
