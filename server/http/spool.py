"""Send answers while the request's body still arrives, at the client's pace.

    put → buffer → send
             └─ beyond a megabyte → temporary file → send

Some clients read only after they have sent everything: their answers wait in the file. The file is
bounded; once it is full, or the body has arrived, `put` waits for the client.
"""

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import Hashable, Sequence

import anyio.to_thread
from starlette.types import Scope, Send

from server.http.json import Header
from server.http.transfers import Transfer

MAX_BUFFER = 1 << 20  # bytes of answers in memory, beside the last one
MAX_SPOOL = 1 << 31  # bytes of all files; those of a client take at most what is left
PIECE = 1 << 16  # sent at once


class SpoolBudget:
    """The bytes of all files. Those of a client grow up to as much as remains free: half of
    MAX_SPOOL if it is alone, and later clients find room."""

    def __init__(self) -> None:
        self._used = Counter[Hashable]()

    def take(self, client: Hashable, size: int) -> bool:
        """Count bytes that are about to be written. Return False if there is no room."""
        if self._used[client] + self._used.total() + 2 * size > MAX_SPOOL:
            return False
        self._used[client] += size
        return True

    def give_back(self, client: Hashable, size: int) -> None:
        self._used[client] -= size
        if not self._used[client]:
            del self._used[client]


class SpoolFile:
    """A temporary file, for pool threads. A thread whose task has been cancelled goes on: it gets
    a ValueError once the file is closed, and never the next file with its descriptor."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `close`
        self._lock = threading.Lock()

    def write(self, data: bytes, offset: int) -> int:
        """Return the number of bytes written. Raises OSError."""
        with self._lock:
            self._file.seek(offset)
            return self._file.write(data)

    def read(self, size: int, offset: int) -> bytes:
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)

    def close(self) -> None:
        """Delete the file, which takes about a second per gigabyte."""
        with self._lock:
            self._file.close()


class SpooledResponse:
    """A response that is written in parts. `run` sends them, and raises ClientGone; the headers go
    out with the first part."""

    def __init__(self, scope: Scope, send: Send, headers: Sequence[Header]) -> None:
        self.client_sends = True  # the body has not ended: the client may not read yet
        self._send = send
        self._headers = headers
        self._budget: SpoolBudget = scope["app"].spools
        self._client = scope["context"].client
        self._transfer: Transfer = scope["transfer"]
        self._transfer.may_stall = True
        self._buffer = bytearray()
        self._closing = False
        self._filled = asyncio.Event()  # there is something to send
        self._sent = asyncio.Event()  # something was taken to be sent
        self._file: SpoolFile | None = None
        self._written = self._read = 0  # offsets in the file
        self._is_writing = False

    async def put(self, part: bytes) -> None:
        """Add a part. Waits where neither memory nor the file has room."""
        self._buffer += part
        self._filled.set()
        if len(self._buffer) < MAX_BUFFER:
            return
        await asyncio.sleep(0)  # `run` takes the buffer, if the client reads
        while len(self._buffer) >= MAX_BUFFER and not await self._spool():
            self._transfer.may_stall = False
            self._sent.clear()
            await self._sent.wait()
        self._transfer.may_stall = self.client_sends

    def end_body(self) -> None:
        """Require the client to read from now on: the whole body has arrived."""
        self.client_sends = self._transfer.may_stall = False

    def close(self) -> None:
        """Let `run` end once everything has been sent."""
        self._closing = True
        self._filled.set()

    async def run(self) -> None:
        """Send all parts until `close`, but not the end of the response."""
        is_started = False
        while True:
            piece = await self._take()
            if not is_started:
                is_started = True
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
            if not piece:
                return
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def discard(self) -> None:
        if self._file:
            asyncio.get_running_loop().run_in_executor(None, self._file.close)
            self._budget.give_back(self._client, self._written)
            self._file, self._read, self._written = None, 0, 0

    async def _take(self) -> bytes:
        """Return the next bytes to send, at most PIECE; none at the end."""
        while True:
            if self._read < self._written:
                assert self._file
                size = min(PIECE, self._written - self._read)
                piece = await anyio.to_thread.run_sync(self._file.read, size, self._read)
                self._read += size
                if self._read == self._written and not self._is_writing:
                    self.discard()
                break
            if self._buffer and not self._is_writing:
                piece = bytes(self._buffer[:PIECE])
                del self._buffer[:PIECE]
                break
            if self._closing and not self._is_writing:
                return b""
            self._filled.clear()
            await self._filled.wait()
        self._sent.set()
        return piece

    async def _spool(self) -> bool:
        """Move the buffer to the file. Return False without room, or if the client has to read."""
        size = len(self._buffer)
        if not self.client_sends or not self._budget.take(self._client, size):
            return False
        self._is_writing = True
        written = 0
        try:
            if self._file is None:
                self._file = await anyio.to_thread.run_sync(SpoolFile)
            data, offset = bytes(self._buffer), self._written
            written = await anyio.to_thread.run_sync(self._file.write, data, offset)
        except OSError:  # the disk is full
            return False
        finally:
            self._is_writing = False
            self._filled.set()
            self._budget.give_back(self._client, size - written)
        self._written += written
        del self._buffer[:written]
        return True
