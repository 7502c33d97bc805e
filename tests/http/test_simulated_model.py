"""SIMULATED_MODEL: the steps of a chat model without their computation."""

import time

from tests import sdk


def test_a_response_has_all_its_tokens_and_each_takes_a_step() -> None:
    with sdk.connect(chat_model="demo", simulated_model="20,100", kv_cache_gb=0.05) as demo:
        started = time.monotonic()
        response = demo.client.chat.completions.create(
            model=demo.model, messages=[{"role": "user", "content": "hi"}], max_tokens=30
        )
        seconds = time.monotonic() - started
    assert response.usage is not None
    assert response.usage.completion_tokens == 30
    assert response.choices[0].finish_reason == "length"
    assert response.choices[0].message.content
    assert seconds > 29 * 0.02
