"""/ready and /metrics show the model's current fallbacks, and its build or compilation."""

import httpx

from tests.fake_generator import FakeGenerator
from tests.serving import metric, serving
from worker.messages.protocol import Fallback

FALLBACK = Fallback("native attention", "logits differ by 1e-1", "torch's attention", "speed")


def test_ready_and_metrics_show_what_was_refused() -> None:
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator) as server:
        url = server.url + "/ready"
        sample = 'onequeue_fallback{refused="native attention",serves="generation"}'
        assert "fallbacks" not in httpx.get(url).json()
        generator.fallbacks = (FALLBACK,)  # found while the model serves
        assert httpx.get(url).json()["fallbacks"] == {
            "generation": [
                {
                    "refused": "native attention",
                    "reason": "logits differ by 1e-1",
                    "serves": "torch's attention",
                    "lost": "speed",
                }
            ]
        }
        assert metric(server, sample) == 1
        generator.fallbacks = ()
        assert sample not in httpx.get(server.url + "/metrics").text


def test_ready_and_the_models_list_show_what_is_built() -> None:
    generator = FakeGenerator()
    with serving(load_chat=lambda: generator) as server:

        def shown() -> tuple[object, object]:
            ready = httpx.get(server.url + "/ready").json().get("stages")
            [model] = httpx.get(server.url + "/v1/models").json()["data"]
            return ready, model["status"].get("stage")

        assert shown() == (None, None)
        generator.stage = "building native operations, 40 s so far, once"
        assert shown() == ({"generation": generator.stage}, generator.stage)
        generator.stage = ""
        assert shown() == (None, None)
