"""Real models under mixed load while they are loaded and unloaded: each request is answered once,
by the model that it names."""

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.event_streams import CLIENT, chat, error_of, post
from tests.serving import Server, metric, serving, wait_until

CHAT = Path(__file__).parents[2] / "worker" / "demo" / "chat"
FRANCE = "What is the capital of France?"
LONG = "a " * 60
REQUESTS, PHASES, CLIENTS = 500, 10, 12
NAMES = ("generation", "generation:short", "pipeline", "embedding")


def ask_chat(server: Server) -> None:
    answer = chat(server, FRANCE, model="demo", max_tokens=20, temperature=0).json()
    assert answer["model"] == "demo"
    assert "Paris" in answer["choices"][0]["message"]["content"]


def ask_long(server: Server) -> None:
    assert chat(server, LONG, model="demo", max_tokens=1).status_code == 200


def ask_short(server: Server) -> None:
    answer = chat(server, "Hi", model="short", max_tokens=8, temperature=0, stream=True)
    assert answer.text.count('"model":"short"') > 1
    assert answer.text.endswith("data: [DONE]\n\n")


def ask_too_long(server: Server) -> None:
    refused = chat(server, LONG, model="short", max_tokens=1)
    assert (refused.status_code, "length is 40" in error_of(refused)["message"]) == (400, True)


def ask_pipeline(server: Server) -> None:
    answer = CLIENT.post(server.url + "/", content=b"the capital of france is [MASK].")
    assert answer.json()[0]["token_str"] == "paris"


def ask_embedding(server: Server) -> None:
    answer = post(server, "/v1/embeddings", {"input": ["paris", "rome"]}).json()
    assert answer["model"] == "demo-embedding"
    assert [len(entry["embedding"]) for entry in answer["data"]] == [64, 64]


KINDS: list[tuple[Callable[[Server], None], ...]] = [
    (ask_chat, ask_long), (ask_short, ask_too_long), (ask_pipeline,), (ask_embedding,),
]  # fmt: skip


def test_every_forward_of_a_load_runs_on_the_workers_thread() -> None:
    threads: set[str] = set()
    hook = register_module_forward_pre_hook(
        lambda module, args: threads.add(threading.current_thread().name)
    )
    try:
        with serving(
            chat_model=f"demo,short={CHAT};max_len=40",
            embedding_model="demo,other=demo",
            pipeline_model=f"demo,vectors={CHAT.parent / 'fill-mask'};task=feature-extraction",
            transcription_model="demo",
            compile="off",
        ) as server:
            ask_short(server)
            vectors = post(server, "/v1/embeddings", {"input": "a", "model": "other"})
            pipeline = CLIENT.post(server.url + "/?model=vectors", content=b"a")
            assert (vectors.status_code, pipeline.status_code) == (200, 200)
            [tokens] = post(server, "/tokenize", {"inputs": "paris"}).json()
            own = post(server, "/tokenize", {"prompt": "paris", "model": "other"}).json()
            ids = [token["id"] for token in tokens]
            assert ids == own["tokens"]  # by the embedding model, as /decode
            assert post(server, "/decode", {"ids": ids}).json() == ["paris"]
    finally:
        hook.remove()
    assert threads == {"worker"}


@pytest.mark.matrix
@pytest.mark.parametrize("compile", ["off", "on"])
def test_requests_are_answered_while_models_come_and_go(compile: str) -> None:
    """In each phase two of four models have requests, so that the others are idle."""
    settings: dict[str, Any] = {"model_idle_s": 0.2, "compile": compile}
    settings |= {"chat_model": f"demo,short={CHAT};max_len=40", "embedding_model": "demo"}
    chooser = random.Random(0)
    with serving(**settings, pipeline_model="demo") as server:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for pair in itertools.islice(itertools.cycle(itertools.combinations(KINDS, 2)), PHASES):
                asks = [ask for kind in pair for ask in kind]
                chosen = [chooser.choice(asks) for _ in range(REQUESTS // PHASES)]
                list(pool.map(lambda ask: ask(server), chosen))
        client = server.worker_client
        wait_until(lambda: all(model.state == "unloaded" for model in client.models.values()))
        assert client.queue.pending == 0
        for name in NAMES:
            loads = metric(server, f'onequeue_model_loads_total{{result="loaded",serves="{name}"}}')
            assert loads > 1, name
            assert metric(server, f'onequeue_model_loaded{{serves="{name}"}}') == 0
        ask_chat(server)
        assert httpx.get(server.url + "/ready").json()["chat_model"] == "demo"
