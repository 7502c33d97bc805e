"""The request queue: admission, and the one place where work items wait in fair order.

    accept ──▶ FairQueue of the model ──take (drain task)──▶ prepared, run, resolved ──▶ release

An accepted item holds a slot until it is released, wherever it is by then, so no second, unbounded
queue can form. A FairQueue dispatches at most twice as many items as its model runs at a time, and
at most two seconds of prompts, so the threads and the worker's inbox behind it are short FIFO
queues. batcher.py then takes items in turn, scheduler.py by rank. A FairQueue also estimates how
long a new item would wait. Everything runs on the event loop.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Never, Protocol, cast

from typing_extensions import TypeVar

from batching.errors import ClientGone, DeadlineHopeless, QueueFull
from batching.fair_share import (
    CLIENT_LEVEL,
    NO_OWNER,
    FairOrder,
    Path,
    Priority,
    Shares,
    WorkOwner,
)
from batching.step_times import StepTimes

# Items are dispatched while prompts that have not started take less than this.
MAX_UNSTARTED_S = 2.0
MAX_UNSTARTED_TOKENS = 4096  # before a step is measured
# In the means that estimate costs: the factor of an item's weight with each later item.
DECAY = 0.98
CHARS_PER_TOKEN = 4.0  # assumed before the first item
# Lower classes hold at most a part of the slots: one divided by this.
CLASS_DIVISORS = {Priority.BATCH: 2, Priority.BACKGROUND: 4}
MAX_IDS = 20

# Of a work item. The queue does not read them: a bare WorkItem has objects and takes any stream.
Payload = TypeVar("Payload", covariant=True, default=object)
Prepared = TypeVar("Prepared", covariant=True, default=object)
Result = TypeVar("Result", covariant=True, default=object)
Delta = TypeVar("Delta", contravariant=True, default=Never)


class Stream(Protocol[Delta]):
    """Receives a response in parts: on the event loop, after each step."""

    def push(self, delta: Delta) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class WorkItem(Generic[Payload, Prepared, Result, Delta]):
    """One unit of work: a payload, the future of its result, and its state. Times are monotonic
    seconds.

    `future` gets the result or the error. Generated text goes to `stream` on the way, and the
    future then resolves to None at the end.
    """

    payload: Payload  # an input of its model's engine
    deadline: float
    accepted_at: float
    future: "asyncio.Future[Result]" = field(init=False)  # unset in warm-ups, as the next two
    model: str = field(init=False)  # its name in the registry
    stream: Stream[Delta] | None = None  # None: the result is one whole
    owner: WorkOwner = NO_OWNER
    units: int = 1  # texts or choices of the payload: how many places it takes in its model
    chars: int = 0  # of these texts
    awaits_model: bool = False  # accepted while its model was not loaded, until it is
    # Of its FairQueue, in tokens: the expected ones of the prompt, and what its owner is charged.
    queue: "FairQueue | None" = None  # that counts it
    expected: float = 0.0
    charged: float = 0.0
    dispatched: bool = False
    started: bool = False  # the response has started: later items no longer wait for this one
    open: bool = True  # unresolved; written by the event loop, read by all threads
    prepared: Prepared = field(init=False)  # set by the engine's `prepare`
    has_output: bool = False  # computed: only postprocessing is left
    computed: int = 0  # tokens of the prompt that have run, without cached ones; written by the
    generated: int = 0  # worker, as these output tokens are
    rows: int = 1  # model rows
    tokens: int = 1  # tokens of all rows together
    width: int = 1  # tokens of the longest row
    key: Hashable = None  # items with equal keys may share a batch
    arrived_at: float = 0.0  # at the worker, prepared
    started_at: float = 0.0
    read_s: float = 0.0  # for so long it waited for a prefix that was read from disk
    progress_at: float = 0.0  # of a stream: when a step last ran a part of it
    finished_at: float = 0.0
    batch_size: int = 0

    def is_alive(self, now: float) -> bool:
        """Return whether the result is still wanted: the item is open and not late."""
        return self.open and self.deadline > now

    def push(self, delta: object) -> None:
        """Hand a delta to the stream, if the item has one and is open. On the event loop only."""
        if self.stream:
            self.stream.push(cast(Delta, delta))  # its engine's

    def resolve(self, outcome: object) -> bool:
        """Set the future's result or exception. Return False if the item was resolved before. On
        the event loop only."""
        if not self.open:
            return False
        self.open, self.stream = False, None  # which refers to the item
        if self.future.cancelled():  # with its handler, when the server stops
            return False
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(cast(Result, outcome))  # its engine's
        return True


def request_ids(items: Sequence[WorkItem]) -> str:
    """Return the ids of the items' requests for a log line: the first MAX_IDS of them."""
    ids = [*dict.fromkeys(item.owner.request_id for item in items)]
    return ",".join(ids[:MAX_IDS]) + (",…" if len(ids) > MAX_IDS else "")


class FairQueue:
    """The items of one model, which wait in fair order until they are dispatched.

    `capacity`: how many units of items the model runs at a time. A full window still dispatches
    items of a class, a client, a flow or a request that has less than its part of it. `times`: of
    the model's steps, None while it is not loaded.
    """

    def __init__(self, capacity: int, times: Callable[[], StepTimes | None] = lambda: None) -> None:
        self.capacity = capacity
        self.times = times
        self.not_started = 0  # items
        self._running = 0  # units of items that have started
        self._order = FairOrder[WorkItem]()
        self._dispatched = Shares()  # units of items that are not answered
        self._unstarted = Shares()  # tokens of those of them that have not started
        self._ahead = Shares()  # tokens of all that have not started
        self._changed: dict[WorkOwner, None] = {}  # since the last `take`
        # Decaying sums over the latest items: units, characters, prompt and output tokens.
        self._units = self._chars = self._prompt = self._output = 0.0

    def add(self, item: WorkItem) -> None:
        per_char = self._prompt / self._chars if self._prompt else 1 / CHARS_PER_TOKEN
        item.queue, item.expected = self, max(1.0, (1 + item.chars) * per_char)
        self.not_started += 1
        self._ahead.take(item.owner, item.expected)
        self._order.add(item)
        self._changed[item.owner] = None

    def take(self) -> list[WorkItem]:
        """Remove and return the items that are dispatched now."""
        times, items = self.times(), list[WorkItem]()
        token_s = times.token_s if times else 0.0
        max_tokens = MAX_UNSTARTED_S / token_s if token_s else MAX_UNSTARTED_TOKENS
        while (
            self._order
            and self._dispatched.total < 2 * self.capacity
            and self._unstarted.total < max_tokens
        ):
            items.append(self._dispatch(self._order.first()))
        for owner in self._changed if self._order else ():
            while path := self._below_its_part(owner, max_tokens):
                items.append(self._dispatch(self._order.first(path)))
        self._changed.clear()
        return items

    def _below_its_part(self, owner: WorkOwner, max_tokens: float) -> Path | None:
        """Return the first of an owner's class, client, flow and request that waits and has less
        than its part of the window. Clients have one item in it, however long."""
        for path, held, part in self._dispatched.parts(owner):
            if self._order.waits(path) and held + 1 <= part * 2 * self.capacity:
                unstarted, following = self._unstarted.of(path), self._order.first(path)
                is_first = not unstarted and len(path) <= CLIENT_LEVEL
                if is_first or unstarted + following.expected <= part * max_tokens:
                    return path
        return None

    def _dispatch(self, item: WorkItem) -> WorkItem:
        item.dispatched = True
        item.charged = item.expected
        if self._prompt:
            item.charged *= 1 + self._output / self._prompt
        self._order.charge(item.owner, item.charged)
        self._order.remove(item)
        self._dispatched.take(item.owner, item.units)
        self._unstarted.take(item.owner, item.expected)
        return item

    def start(self, item: WorkItem) -> None:
        """Record that an item's response has started, or that its batch has run."""
        item.started = True
        self._running += item.units
        self._leave_unstarted(item)

    def _leave_unstarted(self, item: WorkItem) -> None:
        self.not_started -= 1
        self._ahead.give_back(item.owner, item.expected)
        if item.dispatched:
            self._unstarted.give_back(item.owner, item.expected)
        self._changed[item.owner] = None

    def remove(self, item: WorkItem) -> None:
        """Remove an item that is answered, or whose client has left."""
        if item.started:
            self._running -= item.units
        else:
            self._leave_unstarted(item)
        if not item.dispatched:
            self._order.remove(item)
            return
        self._dispatched.give_back(item.owner, item.units)
        self._order.charge(item.owner, item.computed + item.generated - item.charged)
        self._changed[item.owner] = None
        if item.computed:
            self._units = DECAY * self._units + item.units
            self._chars = DECAY * self._chars + 1 + item.chars
            self._prompt = DECAY * self._prompt + item.computed
            self._output = DECAY * self._output + item.generated

    def expected_wait_s(self, owner: WorkOwner) -> float:
        """Return how long a new item of an owner would wait to start, behind those whose turns come
        before: for their prompts, and where a model generates, for the ends of as many as have no
        free slot."""
        times = self.times()
        if not times or not self._units:
            return 0.0
        prompt, output = self._prompt / self._units, self._output / self._units
        tokens = self._ahead.ahead(owner, prompt)
        blocked = tokens / prompt
        if output:
            blocked = max(0.0, blocked - max(0, self.capacity - self._running))
        step_s = times.constant_s / self.capacity + times.row_s
        return tokens * times.token_s + blocked * max(1.0, output) * step_s


class RequestQueue:
    """`size_of` returns the numbers of a payload's texts or choices, and of their characters."""

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float],
        size_of: Callable[[object], tuple[int, int]] = lambda payload: (1, 0),
    ) -> None:
        self.capacity = capacity
        self.clock = clock
        self.size_of = size_of
        self.slots = Shares()
        self.items: dict[WorkItem, None] = {}  # accepted and not released, oldest first
        self.uses: Counter[str] = Counter()  # items of each model, by its name in the registry
        self.awaiting: Counter[str] = Counter()  # those of them that await the model
        self.awaiting_slots = Shares()  # of those
        self.on_unused: Callable[[str], object] = lambda model: None  # no item uses it any more
        self.on_released: Callable[[WorkItem], object] = lambda item: None
        self.drained = asyncio.Event()  # set while there are no items
        self.drained.set()
        self._changed: dict[FairQueue, None] = {}  # since the last `take`
        self._has_changed = asyncio.Event()
        self._waiting_for_room: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> int:
        """The number of items accepted and not released."""
        return len(self.items)

    def has_room(self, owner: WorkOwner) -> bool:
        """Return whether a request finds a slot, free or of its part."""
        return not self._full_class(owner) and self.slots.has_room(owner, self.capacity)

    def _full_class(self, owner: WorkOwner) -> int:
        """Return the slots of a lower class, if it holds all of them."""
        if not (divisor := CLASS_DIVISORS.get(owner.priority)):
            return 0
        slots = max(1, self.capacity // divisor)
        return slots if self.slots.of((owner.priority,)) >= slots else 0

    def accept(
        self,
        owner: WorkOwner,
        payloads: Sequence[object],
        deadline: float,
        queue: FairQueue,
        model: str,
        stream: Stream[Never] | None = None,
        awaits_model: bool = False,
    ) -> list[WorkItem[object, object, Result]]:
        """Reserve slots, queue all payloads of a request, or raise a Refused (503). A stream of
        inputs has waited for room.

        The results arrive at each `item.future`. The caller must `release` the items in the end.
        """
        if not owner.is_stream:
            self._admit(owner, deadline, queue)
        loop, now = asyncio.get_running_loop(), self.clock()
        items: list[WorkItem[object, object, Result]] = [
            WorkItem(payload, deadline, now, stream, owner, *self.size_of(payload), awaits_model)
            for payload in payloads
        ]
        self.items |= dict.fromkeys(items)
        self.uses[model] += len(items)
        self.drained.clear()
        for item in items:
            item.future, item.model = loop.create_future(), model
            item.future.add_done_callback(partial(self._leave_model, item))
            self.slots.take(owner)
            if awaits_model:
                self.awaiting[model] += 1
                self.awaiting_slots.take(owner)
            else:
                queue.add(item)
        self._mark(queue)
        return items

    def _leave_model(self, item: WorkItem, _: object = None) -> None:
        """Free an answered item's place in its model's window. Its slot is held until its request
        is released."""
        if item.queue:
            item.queue.remove(item)
            self._mark(item.queue)
            item.queue = None

    def _mark(self, queue: FairQueue) -> None:
        self._changed[queue] = None
        self._has_changed.set()

    async def wait_for_room(self, owner: WorkOwner) -> None:
        """Wait until a request finds a slot. New requests do not wait behind it."""
        while not self.has_room(owner):
            freed = asyncio.get_running_loop().create_future()
            self._waiting_for_room.append(freed)
            await freed

    def _admit(self, owner: WorkOwner, deadline: float, queue: FairQueue) -> None:
        now = self.clock()
        expected_s = queue.expected_wait_s(owner)
        retry_after_s = float(max(1, math.ceil(expected_s)))  # whole seconds, for a header
        if not self.has_room(owner):
            slots, name = self._full_class(owner), owner.priority.name.lower()
            if not slots:
                slots, name = self.capacity, "queue"
            message = f"the {name} is full: {slots} of {slots} slots are in use"
            raise QueueFull(message, retry_after_s)
        if expected_s and now + expected_s > deadline:
            raise DeadlineHopeless(
                f"the requests before this one need about {expected_s:.1f} s, more than this "
                "request's time limit",
                retry_after_s,
            )

    def has_model(self, model: str, queue: FairQueue) -> None:
        """Queue the items that have awaited a model."""
        del self.awaiting[model]
        for item in [i for i in self.items if i.model == model and i.awaits_model]:
            item.awaits_model = False
            self.awaiting_slots.give_back(item.owner)
            if item.open:
                queue.add(item)
        self._mark(queue)

    def _stop_using(self, item: WorkItem) -> None:
        self.uses[item.model] -= 1
        if item.awaits_model:
            self.awaiting[item.model] -= 1
            self.awaiting_slots.give_back(item.owner)
        if self.uses[item.model] == self.awaiting[item.model]:
            self.on_unused(item.model)

    async def take(self) -> list[WorkItem]:
        """Wait until a model's queue has changed, then take what it dispatches."""
        await self._has_changed.wait()
        self._has_changed.clear()
        changed, self._changed = self._changed, {}
        return [item for queue in changed for item in queue.take()]

    def start(self, items: Iterable[WorkItem]) -> None:
        """Record that the responses of items have started."""
        for item in items:
            if item.queue and not item.started:
                item.queue.start(item)
                self._mark(item.queue)

    def release(self, items: Sequence[WorkItem]) -> None:
        """Free the slots of items. Unresolved items are cancelled."""
        for item in items:
            if item.open:
                item.resolve(ClientGone("the client has gone"))
            if not item.future.cancelled():
                item.future.exception()  # retrieved: a list's handler reads its first error only
            if item in self.items:
                self.slots.give_back(item.owner)
                self._leave_model(item)
                del self.items[item]
                self._stop_using(item)
                self.on_released(item)
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)
        if not self.items:
            self.drained.set()
