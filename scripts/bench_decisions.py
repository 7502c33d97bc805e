#!/usr/bin/env python3
"""Compare decisions over HTTP with transformers' `decision` pipeline, on one machine.

    bench_decisions.py --model PATH [--servers onequeue onequeue@../other]

Each round asks choices and scores about a new input of random words: one request with all
questions, then one call of the pipeline in process with as many threads. A server that is not being
measured is suspended. Ends with a table of medians and the largest difference of probabilities.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import environment  # noqa: F401  # first: may start the script again with .venv
import torch
from bench_generation import cpu
from bench_servers import Server, free_port, onequeue, print_json, running
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.decision import DecisionConfig

from server.commands.load_test.http_client import Client
from server.commands.load_test.request_bodies import WORDS

LEVELS = ("not at all", "a little", "much")

Questions = Mapping[str, Mapping[str, Any]]  # in the pipeline's form
Probabilities = Mapping[str, Sequence[float]]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def random_text(rng: random.Random, tokenizer: Any, tokens: int) -> str:
    ids = tokenizer(words(rng, tokens))["input_ids"][:tokens]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def random_questions(rng: random.Random, count: int) -> Questions:
    questions: dict[str, Mapping[str, Any]] = {}
    for n in range(count):
        question = {"instructions": f"Is it about {words(rng, 8)}?"}
        if n % 2:
            options = dict.fromkeys(rng.sample(WORDS.split(), k=4))
            questions[f"q{n}"] = {"type": "choice", "criteria": options, **question}
        else:
            questions[f"q{n}"] = {"type": "score", "criteria": list(LEVELS), **question}
    return questions


# ── the server and the pipeline ──


def ask_server(server: Server, state: str, questions: Questions) -> Probabilities:
    body = {
        "input": state,
        "questions": [to_openai(name, question) for name, question in questions.items()],
    }
    url = urlsplit(f"http://127.0.0.1:{server.port}/v1/decisions")

    async def post() -> bytes:
        http = Client(url, {"content-type": "application/json"})
        response = await http.post(json.dumps(body).encode(), None)
        http.close()
        if response.status != 200:
            raise SystemExit(response.body.decode())
        return response.body

    with server.resumed():
        answers = json.loads(asyncio.run(post()))["answers"]
    return {
        answer["name"]: [option["probability"] for option in answer["probabilities"]]
        for answer in answers
    }


def to_openai(name: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a question to the form of /v1/decisions."""
    field, key = ("choices", "value") if question["type"] == "choice" else ("levels", "label")
    options = [{key: option} for option in question["criteria"]]
    common = {
        "type": question["type"],
        "name": name,
        "instructions": question["instructions"],
    }
    return common | {field: options}


def ask_pipeline(decide: Any, state: str, questions: Questions) -> Probabilities:
    answers = decide({"state": state, "questions": questions})
    return {name: list(answer["probabilities"].values()) for name, answer in answers.items()}


def decision_pipeline(model: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    task: Any = "decision"
    return pipeline(
        task, model=loaded.eval(), tokenizer=tokenizer, decision_config=DecisionConfig()
    )


# ── measurements ──


def max_difference(one: Probabilities, other: Probabilities) -> float:
    pairs = ((one[name], other[name]) for name in one)
    return max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))


def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> tuple[Any, float]:
    """Return the seconds of each per round, and the largest difference of a probability. A first
    round warms up the servers; the pipeline has a short warm-up of its own."""
    rng, decide = random.Random(1), decision_pipeline(arguments.model)
    ask_pipeline(decide, words(rng, 20), random_questions(rng, 2))
    seconds: dict[str, list[float]] = {}
    difference = 0.0
    for round_ in range(arguments.rounds + 1):
        state = random_text(rng, decide.tokenizer, arguments.tokens)
        questions, results = random_questions(rng, arguments.questions), {}
        asks: dict[str, Callable[[], Probabilities]] = {
            server.name: partial(ask_server, server, state, questions) for server in servers
        }
        asks["library"] = partial(ask_pipeline, decide, state, questions)
        for name, ask in asks.items():
            if not round_ and name == "library":
                continue
            started = time.perf_counter()
            results[name] = ask()
            took = time.perf_counter() - started
            print_json(bench="decisions", what=name, seconds=round(took, 3), counts=bool(round_))
            if round_:
                seconds.setdefault(name, []).append(took)
        if round_:
            library = results["library"]
            difference = max(max_difference(library, other) for other in results.values())
    return seconds, difference


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the exits that stop servers
    settings = {"PIPELINE_MODEL": "none", "EMBEDDING_MODEL": "none", "CHAT_MODEL": arguments.model}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, onequeue(name, free_port(), settings)))
            for name in arguments.servers
        ]
        seconds, difference = measure(servers, arguments)
    library = statistics.median(seconds["library"])
    questions = f"{arguments.questions} questions on {arguments.tokens} tokens"
    print(f"\n{cpu()}, {torch.get_num_threads()} threads, {questions}")
    print(f"probabilities differ by {difference:.1e} at most")
    print("\n| | seconds | the library takes so many times as long |\n| --- | ---: | ---: |")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {library / median:.1f} |")


if __name__ == "__main__":
    main()
