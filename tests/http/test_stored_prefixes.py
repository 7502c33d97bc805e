"""KV_CACHE_DIR over restarts of the server: with quantized weights, and with adapters."""

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_adapters, tiny_chat
from tests.event_streams import post
from tests.serving import metric, serving

PROMPT = "say 1 2 3 and then 4 5 6 " * 12
NEXT = PROMPT + "and 7 8 9 " * 3


def answers(*prompts: str, model: str = "demo", **settings: Any) -> tuple[list[Any], float]:
    """Return a model's answers on a server that starts and stops, and the tokens that it has read
    from disk."""
    # the number of drafts depends on times, and torch rounds by it
    fixed: dict[str, Any] = {"compile": "off", "speculation": "off", "kv_cache_gb": 0.01}
    choices = []
    with serving(
        chat_model=f"demo={tiny_chat.folder()}", dtype="float32", **fixed, **settings
    ) as server:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 1}
            response = post(server, "/v1/completions", {"model": model} | body)
            assert response.status_code == 200, response.text
            choices += response.json()["choices"]
        return choices, metric(server, 'onequeue_tokens_total{kind="read",model="demo"}')


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models_read_what_they_have_computed(tmp_path: Path, quantization: str) -> None:
    stored: dict[str, Any] = {"quantization": quantization, "kv_cache_dir": str(tmp_path / "kv")}
    (_, expected), read = answers(PROMPT, NEXT, **stored)
    assert read == 0  # from memory
    [again], read = answers(NEXT, **stored)
    assert again == expected
    assert read >= 128
    assert answers(NEXT, **stored | {"quantization": "none"})[1] == 0


def test_adapters_read_what_they_have_computed(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        tiny_adapters.make(tmp_path / "lora" / name, tiny_chat.folder(), seed)
    stored: dict[str, Any] = {
        "lora": ("a=one", "b=two"), "lora_dir": str(tmp_path / "lora"),
        "kv_cache_dir": str(tmp_path / "kv"),
    }  # fmt: skip
    (_, expected), _ = answers(PROMPT, NEXT, model="a", **stored)
    [again], read = answers(NEXT, model="a", **stored)
    assert again == expected
    assert read >= 128
    assert answers(NEXT, model="b", **stored)[1] == 0
    tiny_adapters.make(tmp_path / "lora" / "one", tiny_chat.folder(), 7)
    assert answers(NEXT, model="a", **stored)[1] == 0
