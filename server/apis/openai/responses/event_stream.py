"""The events of background responses, which are read from the store: while a response is
generated, and after its end, by any number of clients of any process.

    BackgroundJob → ResponseStore.add_event → StoredEvents → client
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput, QueueFull
from server.apis.openai.media import while_connected
from server.apis.openai.responses.store import NotStored, ResponseStore
from server.apis.openai.store import in_store
from server.core.worker_client import NO_DEADLINES, IncomingRequest
from server.http.json import Header
from server.http.request import Application
from server.http.sse import COMMENT, EventStream

if TYPE_CHECKING:
    from server.apis.openai.responses.endpoint import BackgroundJob

POLL_S = 0.5  # how often events that another process adds are looked for


@dataclass(eq=False)
class StoredEvents(Response):
    """The events of a response after the one of number `after`. `job`: None if it has ended, or
    belongs to another process. It sets `readers` with each event, and `last_event` at its end."""

    store: ResponseStore
    namespace: bytes
    id: str
    after: int
    job: "BackgroundJob | None"
    extra_headers: Sequence[Header] = ()
    added: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    is_idle: bool = field(init=False, default=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        readers = self.job.readers if self.job else set()
        readers.add(self.added)
        stream = EventStream(scope, send, self._on_idle, self.extra_headers)
        incoming = IncomingRequest(scope, receive, NO_DEADLINES)
        try:
            await while_connected(incoming, [stream.run(self._events(scope))], "")
        finally:
            readers.discard(self.added)

    async def _events(self, scope: Scope) -> AsyncIterator[bytes]:
        """Yield events until the last one, until the response is deleted, or until this server
        stops while another process generates it."""
        app: Application = scope["app"]
        while self.job or not app.worker_client.terminating:
            self.added.clear()
            read = self.store.events, self.namespace, self.id, self.after
            try:
                events, is_generating = await in_store(*read)
            except (NotStored, InvalidInput, QueueFull) as error:  # deleted, or the store fails
                if not self.job and isinstance(error, QueueFull):
                    raise
                if self.job and not self.job.last_event:
                    events, is_generating = [], True
                else:
                    if self.job:
                        yield self.job.last_event
                    return
            app.memory.hold(scope["transfer"], sum(map(len, events)))
            for event in events:
                yield event
            self.after += len(events)
            if events:
                continue
            if not is_generating:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.added.wait(), None if self.job else POLL_S)
            if self.is_idle:
                self.is_idle = False
                yield COMMENT

    def _on_idle(self) -> None:
        self.is_idle = True
        self.added.set()
