"""What a run of load_test.py has seen: a sample of each answer, counted as they come."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from http_client import ChatStream, IncompleteStreamError


@dataclass(slots=True)
class Sample:
    start: float
    status: str
    latency: float
    send_lag: float = 0.0
    ttft: float | None = None
    gaps: Sequence[float] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status.startswith("2")


@dataclass
class Record:
    """What one run has seen so far."""

    started: float = field(default_factory=time.perf_counter)
    cpu_started: float = field(default_factory=time.process_time)
    samples: list[Sample] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    retry_after: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)  # by status: what it said
    issued: int = 0
    in_flight: int = 0
    dropped: int = 0
    unfinished: int = 0
    interrupted: bool = False


def read_tokens(sample: Sample, start: float, body: bytes, stream: ChatStream | None) -> None:
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
    first = times[0] if times else stream.first  # a token may have no text of its own
    sample.ttft = first - start if first else None
    sample.gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
