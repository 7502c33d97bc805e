"""The attention backends of transformers, as a setting and as a model's option."""

import logging
from importlib.util import find_spec

import pytest

from server.core.settings import SettingsError, load_settings, parse_models
from tests import tiny_decoders
from worker.engines.generation.loading import load_generator
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.model.language_model import GeneratorOptions
from worker.model.loading import LoadingFailed

OWN = "use their own function, not"
BACKENDS = ("flash_attn", "flash_attn_interface", "kernels")


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "flex_attention"])
def test_the_log_names_a_backend_that_is_replaced(
    attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks do not compile flex_attention."""
    with caplog.at_level(logging.INFO, "onequeue"):
        engine = load_generator(
            GeneratorOptions("demo", device="cpu", attention=attention, kv_cache_gb=0.01)
        )
        assert engine.info.batching == "continuous"
        load_runner(
            PipelineOptions("demo", "cpu", attention=attention, task="fill-mask", compile="off"), 32
        )
    lines = [record.message for record in caplog.records if OWN in record.message]
    places = ["steps on the paged cache", "packed batches"] if attention != "auto" else []
    assert lines == [f"attention: {place} {OWN} {attention}" for place in places]


def test_a_model_on_its_own_cache_keeps_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onequeue"):
        engine = load_generator(
            GeneratorOptions(
                str(tiny_decoders.folder("bloom")), device="cpu", attention="eager", compile="off"
            )
        )
    assert engine.info.batching != "continuous"
    assert engine.runner.language.model.config._attn_implementation == "eager"
    assert OWN not in caplog.text


@pytest.mark.parametrize(
    ("attention", "package"),
    [
        ("flash_attention_2", "FlashAttention2"),
        ("flash_attention_3", "FlashAttention3"),
        ("owner/kernel@v1:forward", "`kernels`"),
    ],
)
@pytest.mark.skipif(any(map(find_spec, BACKENDS)), reason="a backend is installed")
def test_a_backend_that_is_missing_is_refused_in_one_sentence(attention: str, package: str) -> None:
    with pytest.raises(LoadingFailed) as chat:
        load_generator(GeneratorOptions("demo", device="cpu", attention=attention))
    with pytest.raises(LoadingFailed) as pipeline:
        load_runner(PipelineOptions("demo", "cpu", attention=attention, task="fill-mask"), 32)
    for failed in (chat, pipeline):
        assert package in str(failed.value)
        assert f"ATTN_IMPLEMENTATION={attention}: " in str(failed.value)
        assert "installed" in str(failed.value)
        assert "\n" not in str(failed.value)


@pytest.mark.parametrize("name", ["flash", "paged|sdpa", "owner/kernel@", "a/b/c", "sdpa eager"])
def test_a_backend_that_is_none_is_refused_at_start(name: str) -> None:
    with pytest.raises(SettingsError, match=r"ATTN_IMPLEMENTATION=.*: must be auto, sdpa, eager, "):
        load_settings({"ATTN_IMPLEMENTATION": name})
    with pytest.raises(SettingsError, match=r"attention=.* must be auto, sdpa, eager, "):
        parse_models("chat_model", f"demo;attention={name}")


def test_each_model_has_its_own_backend() -> None:
    models = parse_models("chat_model", "a=demo;attention=eager,b=demo;attention=org/k@v1:f")
    assert [dict(model.options)["attn_implementation"] for model in models] == [
        "eager",
        "org/k@v1:f",
    ]
