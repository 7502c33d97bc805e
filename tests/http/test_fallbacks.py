"""What the checks at load refused is in /ready and /metrics, as long as the model is loaded."""

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
