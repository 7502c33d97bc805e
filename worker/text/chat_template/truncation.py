"""Drop the oldest messages of a conversation that does not fit into the context."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from worker.messages.generation import Chat


def without_oldest(chat: Chat, fits: Callable[[Chat], bool]) -> Chat | None:
    """Return a chat of text without as few of its oldest messages as possible; None if no rest
    fits.

    System messages at the start stay. The rest begins with a message of the user or, within the
    last turn, with any but the result of a call, which would lack its call. `fits` is called
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
