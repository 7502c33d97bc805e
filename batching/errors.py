"""The errors of a work item, by the stage that raises them.

    OnequeueError
    ├─ InvalidInput        parsing or preparing: the client's input cannot be served
    │  └─ ContextExceeded  prompt and output exceed the model's context
    ├─ Refused             admission: not accepted, try again after `retry_after_s`
    │  ├─ QueueFull        the allowed number of items is accepted and unanswered
    │  ├─ DeadlineHopeless the measured service rate cannot meet the deadline
    │  ├─ NotReady         the models are loading or warming up, or a model could not be loaded
    │  ├─ Draining         the server is stopping
    │  ├─ BreakerOpen      the model keeps failing; a probe is due
    │  └─ WorkerDown       the worker thread is dead or stuck
    │     └─ DeviceLost    the error leaves the device unusable
    ├─ DeadlineExceeded    the deadline passed after acceptance
    ├─ ClientGone          the client disconnected
    ├─ NoRoom              a model does not fit into the memory that other models leave
    └─ ItemFailed          the model raised on this item alone
       └─ OutOfMemory      this item alone does not fit into memory

server/http/errors.py maps them to HTTP statuses.
"""


class OnequeueError(Exception):
    """Base of all; `str()` of it may be shown to a client."""

    retry_after_s: float | None = None


class InvalidInput(OnequeueError):
    """`param` is the path of the invalid field, such as `parameters.top_k`."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def at(cls, param: str, reason: str) -> "InvalidInput":
        """Return an error whose message starts with the field's path."""
        return cls(f"{param}: {reason}", param)


class ContextExceeded(InvalidInput):
    @classmethod
    def of(cls, max_tokens: int, param: str, reason: str) -> "ContextExceeded":
        """Return an error with the words by which clients know that a shorter prompt may fit."""
        limit = f"this model's maximum context length is {max_tokens} tokens"
        return cls(f"{param}: {reason}; {limit}", param)


class Refused(OnequeueError):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused): ...


class DeadlineHopeless(Refused): ...


class NotReady(Refused): ...


class Draining(Refused): ...


class BreakerOpen(Refused): ...


class WorkerDown(Refused): ...


class DeviceLost(WorkerDown): ...


class DeadlineExceeded(OnequeueError): ...


class ClientGone(OnequeueError): ...


class NoRoom(OnequeueError): ...


class ItemFailed(OnequeueError): ...


class OutOfMemory(ItemFailed): ...
