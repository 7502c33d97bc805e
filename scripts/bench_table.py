"""From what was measured to medians, ratios and a table for the README."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench_floor import Floor
from bench_servers import is_ours


class Sweep(NamedTuple):
    """A load: prompts of so many words, a temperature, clients in a closed loop."""

    words: int
    temperature: float
    clients: int


Runs = dict[Sweep, dict[str, list[dict[str, Any]]]]  # by server, a run each round
Summaries = Mapping[Sweep, Mapping[str, Mapping[str, float]]]

COLUMNS = {
    "prompt tokens": "right",
    "temperature": "right",
    "clients": "right",
    "server": "left",
    "tokens/s": "right",
    "of the floor": "right",
    "first token, ms (p95)": "right",
    "between tokens, ms (p95)": "right",
    "ours, times": "left",
}


def summaries(runs: Runs, floor: Floor) -> Summaries:
    """Medians over the rounds."""
    return {
        sweep: {name: summary(each, sweep, floor) for name, each in servers.items()}
        for sweep, servers in runs.items()
    }


def summary(runs: list[dict[str, Any]], sweep: Sweep, floor: Floor) -> dict[str, float]:
    def median(key: str, part: str | None = None) -> float:
        found = [run[key] if part is None else (run[key] or {}).get(part, 0.0) for run in runs]
        return float(statistics.median(found))

    rate = median("output_tokens_per_s")
    prompts = sum(run["prompt_tokens"] for run in runs) / sum(run["ok"] for run in runs)
    return {
        "prompt_tokens": round(prompts),
        "others_cores": max(run["others_cores"] for run in runs),
        "tokens_per_s": rate,
        "of_floor": floor.share(rate, sweep.clients),
        "ttft_p50_ms": median("ttft_ms", "p50"),
        "ttft_p95_ms": median("ttft_ms", "p95"),
        "inter_token_p50_ms": median("inter_token_ms", "p50"),
        "inter_token_p95_ms": median("inter_token_ms", "p95"),
    }


def ratios(found: Summaries) -> list[dict[str, Any]]:
    """Each of ours beside each server named after it: how many times its tokens/s, and which part
    of its time to the first token."""
    return [
        sweep._asdict()
        | {
            "server": name,
            "beside": other,
            "times": round(servers[name]["tokens_per_s"] / servers[other]["tokens_per_s"], 2),
            "ttft_ratio": round(servers[name]["ttft_p50_ms"] / servers[other]["ttft_p50_ms"], 2),
        }
        for sweep, servers in found.items()
        for name, other in pairs(list(servers))
    ]


def pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    for at, name in enumerate(names):
        for other in names[at + 1 :] if is_ours(name) else ():
            yield name, other


def table(found: Summaries) -> Iterator[str]:
    """Markdown; `ours, times` is the first of ours beside this server."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "| " + " | ".join("---:" if at == "right" else "---" for at in COLUMNS.values()) + " |"
    for sweep, servers in found.items():
        ours = next((of for name, of in servers.items() if is_ours(name)), None)
        for name, of in servers.items():
            times = ours and ours is not of and of["tokens_per_s"]
            cells = [
                f"{of['prompt_tokens']:,.0f}",
                f"{sweep.temperature:g}",
                str(sweep.clients),
                name,
                f"{of['tokens_per_s']:,.1f}",
                f"{of['of_floor']:.0%}",
                f"{of['ttft_p50_ms']:,.0f} ({of['ttft_p95_ms']:,.0f})",
                f"{of['inter_token_p50_ms']:.1f} ({of['inter_token_p95_ms']:.1f})",
                f"{ours['tokens_per_s'] / times:.2f}" if ours and times else "",
            ]
            yield "| " + " | ".join(cells) + " |"
