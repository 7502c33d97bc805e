"""What can happen to a work item, by the stage that says so.

    OnequeueError
    ├─ InvalidInput        parsing or preparing: the client's input cannot be served
    ├─ Refused             admission: not accepted, try again after `retry_after_s`
    │  ├─ QueueFull        as many accepted and unanswered as allowed
    │  ├─ DeadlineHopeless the measured service rate cannot meet the deadline
    │  ├─ NotReady         loading or warming up
    │  ├─ Draining         the server is stopping
    │  ├─ BreakerOpen      the model keeps failing, a probe is due
    │  └─ WorkerDown       the worker thread is dead or stuck
    │     └─ DeviceLost    what raised leaves no device to run anything on
    ├─ DeadlineExceeded    accepted, but the deadline passed in the queue or while running
    ├─ ClientGone          the client left; nobody waits for an answer
    └─ ItemFailed          the model raised on this item, and on it alone
       ├─ OutOfMemory      this item alone does not fit into memory
       └─ WrongResultCount the model answered a batch with too few or too many results

HTTP statuses are given in server/http/errors.py, not here.
"""


class OnequeueError(Exception):
    """Base of all; `str()` of it is fit to be shown to a client."""

    retry_after_s: float | None = None


class InvalidInput(OnequeueError):
    """`param` names the offending field, as in `parameters.top_k`."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def at(cls, param: str, reason: str) -> "InvalidInput":
        """Of one field of the request; the message begins with its name."""
        return cls(f"{param}: {reason}", param)


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


class ItemFailed(OnequeueError): ...


class OutOfMemory(ItemFailed): ...


class WrongResultCount(ItemFailed): ...
