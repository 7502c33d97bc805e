"""The events of background responses, which are read from the store: while a response is
generated, and after its end, by any number of clients of any process.

    BackgroundJob → ResponseStore.add_event → StoredEvents → client
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.apis.openai.responses.store import NotStored, ResponseStore
from server.apis.openai.sqlite_store import in_store
from server.http.json import Header
from server.http.sse import COMMENT, EventStream

POLL_S = 0.1  # how often events that another process adds are looked for


class StoredEvents(Response):
    """The events of a response after the one of number `after`. `added` is set when this process
    adds one."""

    def __init__(
        self,
        store: ResponseStore,
        namespace: bytes,
        id: str,
        after: int,
        added: asyncio.Event,
        headers: Sequence[Header] = (),
    ) -> None:
        self.store, self.namespace, self.id, self.after = store, namespace, id, after
        self.added, self.extra_headers = added, headers
        self.is_idle = False
        self.client_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await EventStream(scope, send, self._on_idle, self.extra_headers).run(self._events())
        finally:
            watching.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield events until the last one, or until the response is deleted."""
        with contextlib.suppress(NotStored):
            while not self.client_gone:
                self.added.clear()
                read = self.store.events, self.namespace, self.id, self.after
                events, is_generating = await in_store(*read)
                for event in events:
                    yield event
                self.after += len(events)
                if events:
                    continue
                if not is_generating:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.added.wait(), POLL_S)
                if self.is_idle:
                    self.is_idle = False
                    yield COMMENT

    def _on_idle(self) -> None:
        self.is_idle = True

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
