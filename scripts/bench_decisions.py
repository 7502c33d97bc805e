#!/usr/bin/env python3
"""Questions about one input over HTTP beside transformers' `decision` pipeline, on one machine.

    bench_decisions.py --model PATH [--servers onequeue onequeue@../other]

Choices and scores about an input of random words, another in each round: one request with all of
them, and a call of the pipeline in process with as many threads, in turns. A server that is not
measured stands still. Ends with a table of medians and the largest difference of probabilities.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from bench_generation import cpu
from bench_servers import Server, free_port, onequeue, running, say
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.decision import DecisionConfig

from server.commands.load_test.http_client import Client
from server.commands.load_test.request_bodies import WORDS

LEVELS = ("not at all", "a little", "much")

Questions = Mapping[str, Mapping[str, Any]]  # as the pipeline takes them
Probabilities = Mapping[str, Sequence[float]]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def text_of(rng: random.Random, tokenizer: Any, tokens: int) -> str:
    ids = tokenizer(words(rng, tokens))["input_ids"][:tokens]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def questions_of(rng: random.Random, count: int) -> Questions:
    asked: dict[str, Mapping[str, Any]] = {}
    for n in range(count):
        question = {"instructions": f"Is it about {words(rng, 8)}?"}
        if n % 2:
            options = dict.fromkeys(rng.sample(WORDS.split(), k=4))
            asked[f"q{n}"] = {"type": "choice", "criteria": options, **question}
        else:
            asked[f"q{n}"] = {"type": "score", "criteria": list(LEVELS), **question}
    return asked


# ── the two ──


def served(server: Server, state: str, asked: Questions) -> Probabilities:
    body = {"input": state, "questions": [openai(name, each) for name, each in asked.items()]}
    url = urlsplit(f"http://127.0.0.1:{server.port}/v1/decisions")

    async def ask() -> bytes:
        http = Client(url, {"content-type": "application/json"})
        answer = await http.post(json.dumps(body).encode(), None)
        http.close()
        if answer.status != 200:
            raise SystemExit(answer.body.decode())
        return answer.body

    with server.awake():
        answers = json.loads(asyncio.run(ask()))["answers"]
    return {
        each["name"]: [option["probability"] for option in each["probabilities"]]
        for each in answers
    }


def openai(name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    field, key = ("choices", "value") if asked["type"] == "choice" else ("levels", "label")
    options = [{key: option} for option in asked["criteria"]]
    common = {"type": asked["type"], "name": name, "instructions": asked["instructions"]}
    return common | {field: options}


def piped(decide: Any, state: str, asked: Questions) -> Probabilities:
    answers = decide({"state": state, "questions": asked})
    return {name: list(each["probabilities"].values()) for name, each in answers.items()}


def decision_pipeline(model: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    task: Any = "decision"
    return pipeline(
        task, model=loaded.eval(), tokenizer=tokenizer, decision_config=DecisionConfig()
    )


# ── measuring ──


def difference(one: Probabilities, other: Probabilities) -> float:
    pairs = ((one[name], other[name]) for name in one)
    return max(abs(a - b) for each in pairs for a, b in zip(*each, strict=True))


def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> tuple[Any, float]:
    """Seconds of each, a list of rounds, and by how much they differ at most. A first round warms
    up the servers; the library has a short one."""
    rng, decide = random.Random(1), decision_pipeline(arguments.model)
    piped(decide, words(rng, 20), questions_of(rng, 2))
    seconds: dict[str, list[float]] = {}
    worst = 0.0
    for turn in range(arguments.rounds + 1):
        state = text_of(rng, decide.tokenizer, arguments.tokens)
        asked, found = questions_of(rng, arguments.questions), {}
        works = {each.name: (served, each) for each in servers} | {"library": (piped, decide)}
        for name, (work, asker) in works.items():
            if not turn and name == "library":
                continue
            started = time.perf_counter()
            found[name] = work(asker, state, asked)
            took = time.perf_counter() - started
            say(bench="decisions", what=name, seconds=round(took, 3), counts=bool(turn))
            if turn:
                seconds.setdefault(name, []).append(took)
        if turn:
            worst = max(difference(found["library"], each) for each in found.values())
    return seconds, worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--servers", nargs="+", default=["onequeue"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    settings = {"PIPELINE_MODEL": "none", "EMBEDDING_MODEL": "none", "CHAT_MODEL": arguments.model}
    with contextlib.ExitStack() as stack:
        launches = [(name, onequeue(name, free_port(), settings)) for name in arguments.servers]
        servers = [stack.enter_context(running(*each)) for each in launches]
        seconds, worst = measure(servers, arguments)
    library = statistics.median(seconds["library"])
    asked = f"{arguments.questions} questions on {arguments.tokens} tokens"
    print(f"\n{cpu()}, {torch.get_num_threads()} threads, {asked}")
    print(f"probabilities differ by {worst:.1e} at most")
    print("\n| | seconds | the library takes so many times as long |\n| --- | ---: | ---: |")
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"| {name} | {median:.2f} | {library / median:.1f} |")


if __name__ == "__main__":
    main()
