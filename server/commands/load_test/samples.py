"""The measurements of a run: a sample of each response, and counts of the requests."""

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.commands.load_test.http_client import ChatStream, IncompleteStreamError


@dataclass(slots=True)
class Sample:
    """One request. Times are in seconds; `start` counts from the start of the run."""

    start: float
    status: str  # the response's, or the name of the exception
    latency: float
    send_lag: float = 0.0  # between the scheduled time and the send
    ttft: float | None = None
    gaps: Sequence[float] = ()  # between content deltas
    output_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status.startswith("2")


@dataclass
class Record:
    started: float = field(default_factory=time.perf_counter)
    cpu_started: float = field(default_factory=time.process_time)
    samples: list[Sample] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # of 2xx responses
    retry_after: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)  # message by status
    issued: int = 0
    in_flight: int = 0
    dropped: int = 0
    unfinished: int = 0
    interrupted: bool = False


def read_tokens(sample: Sample, start: float, body: bytes, stream: ChatStream | None) -> None:
    """Put token counts and times of a chat response into its sample."""
    if stream is None or body:
        usage = json.loads(body).get("usage") or {}
        sample.output_tokens = usage.get("completion_tokens", 0)
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        return
    if not stream.done:
        raise IncompleteStreamError
    times = stream.times
    sample.output_tokens = len(times) if stream.usage is None else stream.usage
    sample.prompt_tokens = stream.prompt_tokens
    first = times[0] if times else stream.first  # the tokens may have no text
    sample.ttft = first - start if first else None
    sample.gaps = [later - earlier for earlier, later in itertools.pairwise(times)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values; nan if there are none."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else math.nan
