"""GET /debug/queue: what waits and runs, by whose key, without contents."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx

from batching.request_queue import FairQueue, RequestQueue
from server.core.api_keys import NO_KEY, Keyring
from server.core.request_context import RequestContext
from server.core.settings import Settings
from server.http.debug import debug_queue
from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.serving import serving, wait_until

NAMES = ("first", "second")
KEYS = [{"authorization": f"Bearer {key}"} for key in NAMES]


def test_the_queue_is_not_shown_without_keys() -> None:
    with serving(load_chat=FakeGenerator) as server:
        answer = CLIENT.get(server.url + "/debug/queue")
        assert answer.status_code == 404
        assert "MODEL_CONTROL=1" in answer.json()["error"]["message"]
    with serving(load_chat=FakeGenerator, model_control=True) as server:
        assert CLIENT.get(server.url + "/debug/queue").json()["requests"] == []
    with serving(load_chat=FakeGenerator, api_keys=("first",)) as server:
        assert CLIENT.get(server.url + "/debug/queue").status_code == 401


def test_waiting_and_running_requests_are_listed_with_their_keys() -> None:
    generator = FakeGenerator()
    generator.one_by_one = True
    generator.permits.release()  # for the first token
    with (
        serving(
            load_chat=lambda: generator, api_keys=NAMES, admin_keys=("admin",), max_queue_size=8
        ) as server,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(headers=KEYS[1] | {"x-request-id": "mine"}) as client,
    ):
        url, body = (
            server.url + "/v1/completions",
            {"prompt": "long", "max_tokens": 4000, "stream": True},
        )
        with client.stream("POST", url, json=body) as stream:
            chunks = stream.iter_raw()  # its end would close the stream
            next(chunks)

            def queue(key: str = "admin") -> dict[str, Any]:
                headers = {"authorization": f"Bearer {key}"}
                listed = CLIENT.get(server.url + "/debug/queue", headers=headers)
                document: dict[str, Any] = listed.json()
                return document

            document = queue()
            assert (document["inputs"], document["slots"]) == (1, 8)
            assert CLIENT.get(server.url + "/load", headers=KEYS[0]).json() == {"server_load": 1}
            [request] = document["requests"]
            assert (request["id"], request["key"]) == ("mine", "key 2")
            assert request["model"] == "fake"
            assert request["age_s"] >= 0
            assert request["state"] == "running"
            assert request["output_tokens"] > 0
            assert request["time_left_s"] is None, "it has started"
            waiting = pool.submit(
                CLIENT.post, url, json={"prompt": "a", "max_tokens": 1}, headers=KEYS[0]
            )
            wait_until(lambda: queue()["inputs"] == 2)
            second = queue()["requests"][1]
            assert (second["key"], second["state"]) == ("key 1", "waiting")
            assert 0 < second["time_left_s"] <= 60
            assert "long" not in str(queue())
            assert [request["id"] for request in queue("second")["requests"]] == ["mine"]
            [own] = queue("first")["requests"]
            assert own["id"] == second["id"]
            generator.one_by_one = False
            generator.permits.release()
            assert waiting.result().status_code == 200
        wait_until(lambda: queue()["inputs"] == 0)


def test_a_request_whose_inputs_arrive_over_time_is_listed_once() -> None:
    async def listed() -> list[str]:
        times = iter(range(10))
        queue = RequestQueue(8, lambda: float(next(times)))
        model_queue = FairQueue(8)
        stream = RequestContext(b"first", "stream", is_stream=True)
        for context in (stream, RequestContext(b"", "other"), stream):
            queue.accept(context, ["a"], math.inf, model_queue, "generation")
        models = {"generation": SimpleNamespace(name="generation", served_name="demo")}
        client = SimpleNamespace(queue=queue, models=models)
        settings = Settings(model_control=True)
        keyring = Keyring(settings)
        app = SimpleNamespace(worker_client=client, keyring=keyring, settings=settings)
        scope = {"app": app, "context": SimpleNamespace(key=NO_KEY)}
        request: Any = SimpleNamespace(app=app, scope=scope)
        return [f"{entry.id} {entry.inputs}" for entry in (await debug_queue(request)).requests]

    assert asyncio.run(listed()) == ["stream 2", "other 1"]
