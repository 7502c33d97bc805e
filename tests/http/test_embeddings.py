"""`POST /v1/embeddings` over HTTP: formats, errors, long lists beside short requests, clients."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import openai
import orjson
import pytest
from huggingface_hub import InferenceClient

from batching.request_queue import WorkItem
from server.apis.openai.embedding.embeddings import EmbeddingRequest
from tests.event_streams import CLIENT, assert_refused, error_of, post
from tests.fakes import FakeRunner
from tests.sdk import run_node
from tests.serving import Server, server_fixture, serving, wait_until
from worker.messages.scoring import MAX_PART_INPUTS, EmbeddingOutput, PartSize, split_parts
from worker.text import long_text

PATH = "/v1/embeddings"
FACTS = ["the capital of france is paris", "a cow says moo", "bread is made from flour"]


server = server_fixture(embedding_model="demo")


def vectors(server: Server, inputs: Any, **more: Any) -> Any:
    answer = post(server, PATH, {"input": inputs, **more})
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]], dtype=np.float32)


def test_related_texts_are_closer_than_others(server: Server) -> None:
    known = vectors(server, FACTS)
    for n, query in enumerate(["what is the capital of france?", "the cow's moo", "flour"]):
        near = known @ vectors(server, query)[0]
        assert near.argmax() == n
        assert near[n] > sorted(near)[1] + 0.2


def test_texts_and_ids_floats_and_base64_are_the_same(server: Server) -> None:
    [whole] = vectors(server, FACTS[0])
    ids = post(server, "/tokenize", {"prompt": FACTS[0]}).json()["tokens"]
    for same in ([FACTS[0]], ids, [ids]):
        np.testing.assert_array_equal(vectors(server, same)[0], whole)
    body = {"input": [FACTS[0]], "encoding_format": "base64"}
    [encoded] = post(server, PATH, body).json()["data"]
    read = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    np.testing.assert_allclose(read, whole, atol=1e-7)
    [short] = vectors(server, FACTS[0], dimensions=16)
    expected = whole[:16] / np.linalg.norm(whole[:16])
    np.testing.assert_allclose(short, expected, atol=1e-6)


LONG = "red " * 200 + "blue " * 200
ONE_LONG = {"source_sentence": FACTS[0], "sentences": ["a", LONG]}
NAMED = {"source_sentence": FACTS[0], "sentences": FACTS}
# Sent by test_rerank.py, beside its own.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    PATH: [
        ({}, "input"),
        ({"input": "a", "inputs": "a"}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", [5]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[5], [6, 99999]]}, "input[1]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [None]}, "input[0]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * 20 + ["long " * 200]}, "input[20]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 17}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "prompt_name": "q"}, "prompt_name"),
        ({"input": "a", "input_type": "nonsense"}, "input_type"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    "/similarity": [
        ({}, "inputs"),
        ({"inputs": {"sentences": ["a"]}}, "inputs.source_sentence"),
        ({"inputs": ONE_LONG}, "inputs.sentences[1]"),
        ({"inputs": NAMED, "parameters": {"prompt_name": "none"}}, "prompt_name"),
    ],
    "/embed_all": [
        ({}, "inputs"),
        ({"inputs": ["a", ""]}, "inputs[1]"),
        ({"inputs": ["a", LONG]}, "inputs[1]"),
        ({"inputs": "a", "prompt_name": "none"}, "prompt_name"),
    ],
    "/decode": [
        ({"ids": []}, "ids"),
        ({"ids": [[5], 6]}, "ids[1]"),
        ({"ids": [[5], [6, 99999]]}, "ids[1][1]"),
    ],
    "/tokenize": [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", ""]}, "inputs[1]"),
        ({"inputs": "a", "prompt": "a"}, "inputs"),
    ],
    "/v1/score": [({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2")],
}


def test_long_text_is_truncated_on_request(server: Server) -> None:
    first = vectors(server, LONG, truncate=True)
    np.testing.assert_array_equal(vectors(server, LONG, truncate_prompt_tokens=-1), first)
    last = vectors(server, LONG, truncate=True, truncation_direction="Left")
    assert abs(first - last).max() > 1e-3


def test_model_is_listed_and_tokenizes(server: Server) -> None:
    listed = CLIENT.get(server.url + "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("demo", 128)]
    tokenized = post(server, "/tokenize", {"prompt": "paris", "return_token_strs": True}).json()
    assert tokenized["token_strs"] == ["[CLS]", "paris", "[SEP]"]
    assert "paris" in post(server, "/detokenize", {"tokens": tokenized["tokens"]}).json()["prompt"]
    assert CLIENT.get(server.url + "/ready").json()["embedding_model"] == "demo"


def test_score_is_the_cosine(server: Server) -> None:
    one, other = vectors(server, FACTS[:2])
    for body in (
        {"text_1": FACTS[0], "text_2": [FACTS[0], FACTS[1]]},
        {"queries": [FACTS[0]] * 2, "documents": FACTS[:2]},
    ):
        for path in ("/v1/score", "/score"):
            document = post(server, path, body).json()
            scores = [entry["score"] for entry in document["data"]]
            np.testing.assert_allclose(scores, [1, one @ other], atol=1e-5)


# ── text-embeddings-inference ──


def test_similarity_is_a_list_of_cosines(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    one, *others = vectors(server, [FACTS[0], *FACTS])
    client = InferenceClient(model=server.url + "/similarity")
    got = client.sentence_similarity(FACTS[0], other_sentences=FACTS)
    np.testing.assert_allclose(got, np.array(others) @ one, atol=1e-5)
    right, left = (
        post(server, "/similarity", {"inputs": ONE_LONG, "parameters": parameters}).json()
        for parameters in ({"truncate": True}, {"truncate": True, "truncation_direction": "Left"})
    )
    assert right[0] == left[0]
    assert abs(right[1] - left[1]) > 1e-3


def test_embed_normalizes_unless_told_not_to(server: Server) -> None:
    requests = (EmbeddingRequest(inputs="a"), True), (EmbeddingRequest(input="a"), None)
    for request, normalizes in requests:  # None: as the checkpoint does
        [payload] = request.payloads(PartSize(1, 9), "embedding")
        assert payload.normalize is normalizes
    for body, is_unit in (({}, True), ({"normalize": True}, True), ({"normalize": False}, False)):
        got = post(server, "/embed", {"inputs": FACTS, "truncate": False, **body}).json()
        assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5) == is_unit


def test_embed_all_has_a_vector_for_each_token(server: Server) -> None:
    single = post(server, "/embed_all", {"inputs": FACTS[0]}).json()
    tokens = post(server, "/tokenize", {"prompt": FACTS[0]}).json()["count"]
    assert np.array(single).shape == (1, tokens, 64)
    many = post(server, "/embed_all", {"inputs": [*FACTS, *["paris"] * 40]}).json()
    np.testing.assert_allclose(many[0], single[0], atol=1e-4)
    assert [len(entry) for entry in many[3:]] == [3] * 40
    pooled = np.mean(single[0], axis=0)
    vector = post(server, "/embed", {"inputs": FACTS[0], "normalize": False}).json()
    np.testing.assert_allclose(pooled, vector[0], atol=1e-4)
    long = {"inputs": ["a", LONG], "truncate": True, "truncation_direction": "Left"}
    assert [len(entry) for entry in post(server, "/embed_all", long).json()] == [3, 128]


def test_embed_all_bounds_the_numbers_of_a_response(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.embedding.embedder.MAX_NUMBERS", 64 * 3 * 32)
    assert len(post(server, "/embed_all", {"inputs": ["paris"] * 32}).json()) == 32
    error = error_of(post(server, "/embed_all", {"inputs": ["paris"] * 33}))
    assert (error["param"], error["code"]) == ("inputs", "invalid_value")


def test_decode_takes_ids_or_lists_of_ids(server: Server) -> None:
    ids = post(server, "/tokenize", {"prompt": "paris"}).json()["tokens"]
    assert post(server, "/decode", {"ids": ids}).json() == ["paris"]
    body = {"ids": [ids, ids[1:2]], "skip_special_tokens": False}
    assert post(server, "/decode", body).json() == ["[CLS] paris [SEP]", "paris"]


def test_tokenize_describes_the_tokens_of_inputs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = post(server, "/tokenize", {"prompt": " paris, moo"}).json()["tokens"]
    [tokens] = post(server, "/tokenize", {"inputs": " paris, moo"}).json()
    assert [token["id"] for token in tokens] == ids
    assert tokens[0] == {
        "id": ids[0],
        "text": "[CLS]",
        "special": True,
        "start": None,
        "stop": None,
    }
    places = [(token["text"], token["start"], token["stop"]) for token in tokens[1:-1]]
    assert places[0] == ("paris", 1, 6)
    assert places[-1] == ("moo", 8, 11)
    assert not any(token["special"] for token in tokens[1:-1])
    body = {"inputs": ["paris", "moo"], "add_special_tokens": False}
    assert [len(tokens) for tokens in post(server, "/tokenize", body).json()] == [1, 1]
    monkeypatch.setattr("server.apis.openai.tokenize.MAX_DESCRIBED_CHARS", 8)
    assert_refused(post(server, "/tokenize", {"inputs": ["paris", "france"]}), "inputs")


def test_decode_limits_the_ids_of_all_lists(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.apis.openai.tokenize.MAX_DECODED_IDS", 3)
    assert post(server, "/decode", {"ids": [[5, 6], [7]]}).status_code == 200
    assert_refused(post(server, "/decode", {"ids": [[5, 6], [7, 8]]}), "ids")


def test_info_describes_the_embedding_model(server: Server) -> None:
    info = CLIENT.get(server.url + "/info").json()
    assert info["model_id"] == "demo"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 128
    assert info["max_client_batch_size"] == 2048


# ── long lists ──


class GatedRunner(FakeRunner):
    """Vectors of zeros, a batch at a time as the gate allows; notes the texts of each."""

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = list(item.payload.inputs)
        item.rows = item.tokens = len(item.prepared)

    def forward(self, prepared: list[Any]) -> list[Any]:
        self.batches.append([text for texts in prepared for text in texts])
        self.entered.release()
        assert self.gate.wait(60)
        return prepared

    def finish(self, item: WorkItem, raw: Any) -> Any:
        rows = np.zeros((len(raw), 1), np.float32)
        return EmbeddingOutput(b",".join([b"[0]"] * len(raw)), rows, len(raw))


def test_one_text_beside_four_long_lists_waits_for_two_batches() -> None:
    runner = GatedRunner()
    runner.gate.clear()
    with serving(load_embedder=lambda: runner) as server, ThreadPoolExecutor(5) as threads:
        lists = [{"inputs": [f"{name}{n}" for n in range(2048)]} for name in "abcd"]
        answers = [threads.submit(post, server, "/embed", body) for body in lists]
        places = 4 * 2048 // MAX_PART_INPUTS
        wait_until(lambda: server.worker_client.queue.pending == places)
        assert runner.entered.acquire(timeout=60)
        running = len(runner.batches)
        single = threads.submit(post, server, "/embed", {"inputs": "single"})
        wait_until(lambda: server.worker_client.queue.pending == places + 1)
        model: Any = server.worker_client.models["embedding"]
        wait_until(lambda: any(len(i.payload.inputs) == 1 for i in in_hand(server, model)))
        runner.gate.set()
        assert single.result().json() == [[0]]
        [place] = [n for n, batch in enumerate(runner.batches) if "single" in batch]
        assert place - running <= 2
        for answer in answers:
            assert len(answer.result().json()) == 2048
        in_order = "".join(text[0] for batch in runner.batches for text in batch)
        first_end = min(in_order.rindex(name) for name in "abcd")
        assert {*in_order[:first_end]} >= {*"abcd"}, "lists take turns"


def in_hand(server: Server, model: Any) -> list[WorkItem[Any]]:
    """The payloads that the worker has received."""
    return [item for item in list(server.worker_client.queue.items) if item.arrived_at]


def test_disconnect_drops_the_rest_of_a_list() -> None:
    runner = GatedRunner()
    runner.gate.clear()
    with serving(load_embedder=lambda: runner) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/embed", json={"inputs": ["a"] * 2048}, timeout=0.5)
        wait_until(lambda: not server.worker_client.queue.pending)
        runner.gate.set()
        assert post(server, "/embed", {"inputs": "b"}).json() == [[0]]
        assert sum(map(len, runner.batches)) < 200


def test_list_larger_than_the_queue_is_refused() -> None:
    with serving(load_embedder=GatedRunner, max_queue_size=4) as server:
        answer = post(server, PATH, {"input": ["a"] * 81})
        assert answer.status_code == 400
        assert "needs" in error_of(answer)["message"] or "need" in error_of(answer)["message"]
        assert post(server, "/embed", {"inputs": ["a"] * 64}).status_code == 200


def test_part_of_a_list_is_limited_by_count_and_size() -> None:
    found = list(split_parts("abcdefgh", [1, 1, 9, 1, 1, 1, 1, 1], PartSize(16, 4)))
    assert found == [(0, "ab"), (2, "c"), (3, "defg"), (7, "h")]
    assert [len(part) for _, part in split_parts(range(40), [1] * 40, PartSize(16, 999))] == [
        16,
        16,
        8,
    ]


def test_event_loop_is_free_while_a_long_list_is_embedded(server: Server) -> None:
    texts = [f"red green blue {n}" for n in range(2048)]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(post, server, PATH, {"input": texts})
        waits = []
        while not answer.done():
            waits.append(CLIENT.get(server.url + "/health").elapsed.total_seconds())
        assert len(answer.result().json()["data"]) == 2048
    assert sorted(waits)[len(waits) // 2] < 0.1


# ── clients ──


def test_openai_sdk_requests_base64_and_returns_floats(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        response = client.embeddings.create(model="demo", input=FACTS)
        for entry, vector in zip(response.data, vectors(server, FACTS), strict=True):
            np.testing.assert_allclose(entry.embedding, vector, atol=1e-6)
        plain = client.embeddings.create(
            model="demo", input=FACTS[0], encoding_format="float", dimensions=32
        )
        assert len(plain.data[0].embedding) == 32
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="demo", input="a", dimensions=1000)


def test_openais_node_sdk(server: Server) -> None:
    found = run_node("embeddings.mjs", URL=server.url + "/v1", TEXTS=json.dumps(FACTS))
    np.testing.assert_allclose(found, vectors(server, FACTS), atol=1e-6)


def test_hugging_faces_client_extracts_features(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it bars us too
    client = InferenceClient(model=server.url + "/embed")
    [one] = client.feature_extraction(FACTS[0])
    np.testing.assert_allclose(one, vectors(server, FACTS[0])[0], atol=1e-6)
    several = client.feature_extraction(FACTS, normalize=True, truncate=True)  # type: ignore[arg-type,unused-ignore]  # lists since 1.6
    assert several.shape == (3, 64)
    assert orjson.loads(post(server, "/embed", {"inputs": FACTS}).content)[0] == pytest.approx(one)


def test_long_texts_delay_no_short_ones() -> None:
    with serving(embedding_model="demo", device="cpu") as server, ThreadPoolExecutor(10) as pool:
        url = server.url + "/v1/embeddings"
        with long_text._long_text:  # held as by a text that takes long to tokenize
            long = [
                pool.submit(httpx.post, url, timeout=60, json=body)
                for body in 10 * [{"input": "a " * 100_000, "truncate_prompt_tokens": -1}]
            ]
            wait_until(lambda: server.worker_client.queue.pending == len(long))
            assert httpx.post(url, json={"input": "a"}, timeout=60).status_code == 200
            assert not any(one.done() for one in long)
        assert [one.result().status_code for one in long] == 10 * [200]


def test_a_prompt_to_tokenize_is_limited_in_bytes() -> None:
    with serving(embedding_model="demo", device="cpu") as server:
        for text, status in (("a " * 200_000, 200), ("ä" * 524_289, 413), ("a" * 12_000_000, 413)):
            response = httpx.post(server.url + "/tokenize", json={"prompt": text}, timeout=60)
            assert response.status_code == status, response.text[:200]
        assert "1048576 bytes" in response.json()["error"]["message"]
