"""Medians, ratios and the Markdown table of `bench.py generation`."""

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench_floor import Floor
from bench_servers import is_ours


class Sweep(NamedTuple):
    """A load: words per prompt (0: questions), temperature, clients in a closed loop."""

    words: int
    temperature: float
    clients: int


Runs = dict[Sweep, dict[str, list[dict[str, Any]]]]  # by server, one run per round
Summaries = Mapping[Sweep, Mapping[str, Mapping[str, float]]]

COLUMNS = {
    "prompt tokens": "right",
    "temperature": "right",
    "clients": "right",
    "server": "left",
    "tokens/s": "right",
    "of the floor": "right",
    "accepted drafts": "right",
    "first token, ms (p95)": "right",
    "between tokens, ms (p95)": "right",
    "ours, times": "left",
}


def summaries(runs: Runs, floor: Floor) -> Summaries:
    """Return medians over the rounds."""
    return {
        sweep: {name: summary(rounds, sweep, floor) for name, rounds in servers.items()}
        for sweep, servers in runs.items()
    }


def summary(runs: list[dict[str, Any]], sweep: Sweep, floor: Floor) -> dict[str, float]:
    def median(key: str, part: str | None = None) -> float:
        values = [run[key] if part is None else (run[key] or {}).get(part, 0.0) for run in runs]
        return float(statistics.median(values))

    rate = median("output_tokens_per_s")
    requests = sum(run["ok"] for run in runs)
    prompts = sum(run["prompt_tokens"] for run in runs) / requests
    context = prompts + sum(run["output_tokens"] for run in runs) / requests / 2
    return {
        "prompt_tokens": round(prompts),
        "others_cores": max(run["others_cores"] for run in runs),
        "tokens_per_s": rate,
        "of_floor": floor.share(rate, sweep.clients, context),
        "accepted_share": median("accepted_share"),
        "ttft_p50_ms": median("ttft_ms", "p50"),
        "ttft_p95_ms": median("ttft_ms", "p95"),
        "inter_token_p50_ms": median("inter_token_ms", "p50"),
        "inter_token_p95_ms": median("inter_token_ms", "p95"),
    }


def ratios(measured: Summaries) -> list[dict[str, Any]]:
    """Compare each onequeue with the servers named after it: `times` its tokens/s, and the ratio of
    the times to the first token."""
    return [
        sweep._asdict()
        | {
            "server": name,
            "beside": other,
            "times": round(servers[name]["tokens_per_s"] / servers[other]["tokens_per_s"], 2),
            "ttft_ratio": round(servers[name]["ttft_p50_ms"] / servers[other]["ttft_p50_ms"], 2),
        }
        for sweep, servers in measured.items()
        for name, other in pairs(list(servers))
    ]


def pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each onequeue with the later servers of as many bits per weight, or with all later
    ones if there are none."""
    for index, name in enumerate(names):
        if is_ours(name):
            later = names[index + 1 :]
            for other in [other for other in later if bits(other) == bits(name)] or later:
                yield name, other


def bits(name: str) -> str:
    """Return the bits of a quantized weight by a server's name, "8" or "4", otherwise ""."""
    found = re.search("(?:int|-Q)([48])", name)
    return found[1] if found else ""


def table(measured: Summaries) -> Iterator[str]:
    """Yield Markdown lines; `ours, times` compares the first onequeue with the server: of those
    with as many bits per weight, if there are any."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield (
        "| " + " | ".join("---:" if side == "right" else "---" for side in COLUMNS.values()) + " |"
    )
    for sweep, servers in measured.items():
        names = [name for name in servers if is_ours(name)]
        for name, row in servers.items():
            alike = [other for other in names if bits(other) == bits(name)] or names
            ours = servers[alike[0]] if alike else None
            rate = ours and ours is not row and row["tokens_per_s"]
            cells = [
                f"{row['prompt_tokens']:,.0f}",
                f"{sweep.temperature:g}",
                str(sweep.clients),
                name,
                f"{row['tokens_per_s']:,.1f}",
                f"{row['of_floor']:.0%}",
                f"{row['accepted_share']:.0%}" if is_ours(name) else "",
                f"{row['ttft_p50_ms']:,.0f} ({row['ttft_p95_ms']:,.0f})",
                f"{row['inter_token_p50_ms']:.1f} ({row['inter_token_p95_ms']:.1f})",
                f"{ours['tokens_per_s'] / rate:.2f}" if ours and rate else "",
            ]
            yield "| " + " | ".join(cells) + " |"
