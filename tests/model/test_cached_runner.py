"""Unpaged models generate the same as transformers' `generate`, beside any other requests."""

import copy
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from batching import step_times
from batching.errors import ItemFailed, OutOfMemory
from batching.step_times import MAX_TURN_S
from tests import generating, tiny_decoders
from tests.fakes import BusyModels
from tests.generating import GREEDY, ORDINARY, Driver, Request, Served, request
from tests.matrix import matrix
from tests.tiny_decoders import decoder
from worker.backends.cached_runner import CachedRunner, CacheGroup, CacheSlot, _tensor_bytes
from worker.backends.cpu.linear_layers import PackedLinear
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import cached_engine
from worker.messages.generation import Sampling
from worker.model.language_model import GeneratorOptions, LanguageModel

RECURRENT = {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3, "head_dim": 8}
NAMES = ("bloom", "falcon-alibi", "mamba", "mamba2", "qwen3.5", "qwen3-next", "llama")
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    **{name: tiny_decoders.BUILDERS[name] for name in NAMES},
    "falcon": decoder("FalconConfig", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "stablelm": decoder("StableLmConfig", num_key_value_heads=4),
    "gpt-neo": decoder("GPTNeoConfig", attention_types=[[["global", "local"], 1]], window_size=8),
    "trocr": decoder("TrOCRConfig"),
    "rwkv": decoder("RwkvConfig", attention_hidden_size=32, context_length=256),
    "recurrent-gemma": decoder("RecurrentGemmaConfig", num_key_value_heads=1, **RECURRENT),
}
# Whether rows of each may share a forward, and whether its cache is used.
MODES = dict.fromkeys(BUILDERS, (True, True)) | {
    "rwkv": (False, True),  # transformers mixes up the rows of a batch after the first step
    "recurrent-gemma": (True, False),  # keeps its state in its modules
}
LENGTHS = (3, 17, 40, 9, 9)
TOKENS = 8
BAD_TOKEN = 7  # a token for which some tests make the model fail


@cache
def language(name: str) -> LanguageModel:
    return generating.built(name, BUILDERS[name])


@cache
def checked(name: str) -> CachedRunner:
    return CachedRunner(language(name))


@generating.shares_template
def new_engine(name: str = "bloom", max_running: int = 256) -> GenerationEngine:
    """Return an engine of a model that is checked once per process."""
    options = GeneratorOptions(name, max_running=max_running)
    return cached_engine(copy.copy(checked(name)), options, "a test asks for it")


def prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return prompts without BAD_TOKEN."""
    chance = random.Random(seed)
    return [chance.choices(ORDINARY[2:], k=length) for length in lengths]


@cache
def _oracle(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return generating.generate(language(name).model, [prompt], count)[0]


def oracle(name: str, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
    """Return what `generate` outputs for a prompt alone."""
    return _oracle(name, tuple(prompt), count)


def serve(generator: GenerationEngine, *items: Request) -> tuple[list[Served], Driver]:
    return generating.serve(generator, items)


@contextmanager
def with_embedding_hook(
    name: str, change: Callable[[torch.Tensor, torch.Tensor], Any]
) -> Iterator[None]:
    """`change` gets the input ids and their embeddings, and may raise or return others."""
    embeddings = language(name).model.get_input_embeddings()
    hook = embeddings.register_forward_hook(
        lambda module, inputs, output: change(inputs[0], output)
    )
    try:
        yield
    finally:
        hook.remove()


# ── outputs ──


@pytest.mark.parametrize(
    "name", matrix([name for name in BUILDERS if name != "llama"], "mamba", "bloom")
)
def test_a_mixed_batch_generates_as_generate_does(name: str, steps: bool) -> None:
    generator = new_engine(name)
    assert (checked(name).batches_rows, checked(name).uses_cache) == MODES[name]
    texts = prompts(0)
    served, driver = serve(generator, *(request(prompt, max_tokens=TOKENS) for prompt in texts))
    for response, prompt in zip(served, texts, strict=True):
        assert response.ids == [oracle(name, prompt)]
        assert response.choices[0].finish_reason == "length"
    reports = driver.reports[steps:]  # with steps in flight, the first only launches one
    assert reports[0].prefill_tokens == sum(LENGTHS)
    assert sum(report.prefill_tokens for report in reports) == sum(LENGTHS)
    assert [report.decode_tokens for report in reports] == [len(texts)] * TOKENS


@pytest.mark.parametrize("name", ["bloom", "mamba", "qwen3.5"])
def test_rows_that_end_do_not_change_the_others(name: str, steps: bool) -> None:
    texts = prompts(1)
    items = [request(prompt, max_tokens=3 + 2 * n) for n, prompt in enumerate(texts)]
    served, driver = serve(new_engine(name), *items)
    for n, response in enumerate(served):
        assert response.ids == [oracle(name, texts[n], 3 + 2 * n)]
    running = [report.running for report in driver.reports[steps:]]
    assert running == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0]


@pytest.mark.usefixtures("steps")
def test_seeds_give_the_same_alone_in_a_batch_and_paged() -> None:
    texts = prompts(3)
    hot = [Sampling(temperature=1.5, seed=seed) for seed in range(len(texts))]

    def requests() -> list[Request]:
        return [request(p, s, n=2) for p, s in zip(texts, hot, strict=True)]

    together, _ = serve(new_engine("llama"), *requests())
    alone = [serve(new_engine("llama"), item)[0][0] for item in requests()]
    assert [response.ids for response in together] == [response.ids for response in alone]
    assert all(first != second for first, second in (response.ids for response in together))
    expected, _ = generating.serve(generating.engine("llama"), requests())
    assert [response.ids for response in together] == [response.ids for response in expected]


def test_an_echoed_prompt_has_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batching.scheduler.MAX_SCORED_TOKENS_WHOLE", 16)
    prompt = prompts(5)[LENGTHS.index(40)]
    scored = Sampling(temperature=0.0, logprobs=2)
    requests = [request(prompt, scored, n=2, max_tokens=3, echo=True)]
    requests += [request(prompt, scored, max_tokens=0, echo=True), request(prompts(6)[0])]
    (echoed, only_prompt, _), driver = serve(new_engine(), *requests)
    with torch.inference_mode():
        logits = language("bloom").model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
    for choice in (*echoed.choices, *only_prompt.choices):
        entries = choice.logprobs[: len(prompt)]
        assert [entry.token_id for entry in entries] == prompt
        assert entries[0].logprob is None
        assert [entry.logprob for entry in entries[1:]] == pytest.approx(expected, abs=1e-3)
        assert "".join(entry.text for entry in choice.logprobs) == choice.text
    assert [len(choice.logprobs) for choice in echoed.choices] == [43, 43]
    assert (only_prompt.choices[0].finish_reason, len(only_prompt.choices[0].logprobs)) == (
        "length",
        40,
    )
    assert [report.running for report in driver.reports[:4]] == [4, 4, 3, 3]


# ── scheduling ──


def test_a_new_request_starts_at_once() -> None:
    """Also beside long responses that started one by one, each a group of its own."""
    driver = Driver(new_engine())
    texts = prompts(8, (3, 200, 30, 9, 9))
    lasting = []
    for prompt in texts[:3]:
        lasting.append(driver.add(request(prompt, max_tokens=40)))
        driver.step()
    assert len(set(groups(driver))) == 3
    for prompt in texts[3:]:
        newcomer = driver.add(request(prompt, max_tokens=2))
        driver.step()
        assert driver.reports[-1].admitted == 1
        driver.step()
        assert newcomer.done
        assert newcomer.ids == [oracle("bloom", prompt, 2)]
    driver.finish()
    for response, prompt in zip(lasting, texts, strict=False):
        assert response.ids == [oracle("bloom", prompt, 40)]


def test_a_groups_cache_is_freed_with_its_last_sequence() -> None:
    driver = Driver(new_engine())
    for prompt in prompts(20, (9, 9)):
        driver.add(request(prompt, max_tokens=4))
    driver.step()
    driver.generator.warm_up()
    (group,) = set(map(weakref.ref, groups(driver)))
    driver.finish()
    assert group() is None


def groups(driver: Driver) -> list[CacheGroup]:
    tables = [sequence.table for sequence in driver.generator.scheduler.running]
    slots = [table.runner_state for table in tables if table]
    return [slot.group for slot in slots if isinstance(slot, CacheSlot)]


@pytest.mark.parametrize("name", matrix(BUILDERS, "bloom", "mamba"))
def test_other_models_run_between_the_layers_of_a_whole_prompt(name: str) -> None:
    late, early = prompts(15, (60, 5))
    driver = Driver(new_engine(name))
    generator, served = driver.generator, list[Served]()

    class Others(BusyModels):
        def run_steps(self) -> None:
            super().run_steps()
            self.total_s += 1000.0
            if len(served) < 2:  # as a request that arrives meanwhile
                served.append(driver.add(request(late, max_tokens=3)))

    times_s: list[float] = []
    generator._budget.times.learn = lambda *step: times_s.append(step[2])  # type: ignore[method-assign]
    generator.others = others = Others()
    assert generator._yield_points
    generator._yield_points._clock = itertools.count(0.0, 2 * MAX_TURN_S).__next__
    served.append(driver.add(request(early, max_tokens=3)))
    driver.finish()
    assert others.steps > len(driver.reports)
    assert times_s
    assert max(times_s) < 500
    for response, prompt in zip(served, (early, late), strict=True):
        assert response.ids[0] == oracle(name, prompt, 3)


def test_prompts_share_a_step_up_to_its_limit_and_a_longer_one_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS_WHOLE", {"cpu": 60})
    texts = prompts(10, [20, 20, 100, 20])
    served, driver = serve(new_engine(), *(request(text, max_tokens=2) for text in texts))
    assert [report.prefill_tokens for report in driver.reports[:3]] == [60, 100, 0]
    assert [one.ids for one in served] == [[oracle("bloom", text, 2)] for text in texts]


def test_warm_up_changes_nothing_and_clear_frees_all() -> None:
    driver = Driver(new_engine("mamba"))
    texts = prompts(11)
    served = driver.add(request(texts[0], max_tokens=5))
    driver.step()
    driver.generator.warm_up()
    driver.finish()
    assert served.ids == [oracle("mamba", texts[0], 5)]
    left = [driver.add(request(prompt)).item for prompt in texts]
    driver.step()
    groups_before = set(map(weakref.ref, groups(driver)))
    assert driver.generator.clear() == left
    assert not driver.generator.busy
    assert groups_before
    assert all(group() is None for group in groups_before)


# ── failures ──


@pytest.mark.parametrize("later", [False, True])
def test_a_step_that_raises_fails_only_the_guilty_item(later: bool, steps: bool) -> None:
    texts = prompts(13)
    if later:  # the model samples the token itself
        bad = Sampling(temperature=0.0, logit_bias={BAD_TOKEN: 1e4})
    else:
        texts[2][1], bad = BAD_TOKEN, GREEDY
    good = Sampling(temperature=0.0, logit_bias={BAD_TOKEN: -1e4})
    sampling = [good, good, bad, good, good]

    def requests() -> list[Request]:
        return [request(p, s, max_tokens=TOKENS) for p, s in zip(texts, sampling, strict=True)]

    def refuse(ids: torch.Tensor, output: torch.Tensor) -> None:
        if (ids == BAD_TOKEN).any():
            raise ValueError("no")

    expected, _ = serve(new_engine(), *requests())
    with with_embedding_hook("bloom", refuse):
        served, _ = serve(new_engine(), *requests())
    assert isinstance(served[2].error, ItemFailed)
    assert not isinstance(served[2].error, OutOfMemory)
    assert bool(served[2].deltas) == (later and not steps)  # a token in flight is dropped
    for at in (0, 1, 3, 4):
        assert served[at].choices == expected[at].choices


class LimitedMemory:
    """Raises out of memory in a forward of more rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.refused = 0

    def __call__(self, ids: torch.Tensor, output: torch.Tensor) -> None:
        if len(ids) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError("out of memory")


@pytest.mark.usefixtures("steps")
def test_a_batch_that_does_not_fit_runs_in_parts() -> None:
    texts, memory = prompts(14, [9] * 5), LimitedMemory(2)
    with with_embedding_hook("bloom", memory):
        served, driver = serve(
            new_engine(max_running=4), *(request(prompt, max_tokens=TOKENS) for prompt in texts)
        )
    for response, prompt in zip(served, texts, strict=True):
        assert response.ids == [oracle("bloom", prompt)]
    assert memory.refused == 2, "once with four rows, once to try three again"
    assert sum(report.preempted for report in driver.reports) == 4
    assert sum(report.admitted for report in driver.reports) == len(texts)
    ends = [list(driver.served).index(item) for item in driver.ended]
    assert ends == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("steps")
def test_sequences_that_do_not_fit_beside_others_wait() -> None:
    driver, texts, memory = Driver(new_engine()), prompts(17), LimitedMemory(1)
    with with_embedding_hook("bloom", memory):
        served = [driver.add(request(texts[0], max_tokens=20))]
        driver.step()
        served += [driver.add(request(prompt, max_tokens=4)) for prompt in texts[1:]]
        driver.step()
        assert (driver.reports[-1].running, driver.reports[-1].preempted) == (2, 3)
        assert driver.reports[-1].waiting == 3
        assert driver.deltas
        driver.step()
        assert (driver.reports[-1].running, driver.reports[-1].preempted) == (2, 0)
        driver.finish()
    for response, prompt in zip(served, texts, strict=True):
        assert response.ids == [oracle("bloom", prompt, 20 if response is served[0] else 4)]


# ── loading ──


def test_a_model_that_mixes_up_the_rows_of_a_batch_says_what_serves_instead() -> None:
    [fallback] = checked("rwkv").language.fallbacks
    assert (fallback.refused, fallback.serves) == ("shared forwards", "one for each sequence")
    assert "logits differ" in fallback.reason


def test_a_model_that_is_recomputed_for_each_token_warns(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for part in BUILDERS["recurrent-gemma"]():
        part.save_pretrained(tmp_path)
    generator = generating.load(tmp_path)
    paged, cached = generator.fallbacks
    assert (paged.refused, cached.refused) == ("paged cache", "cached states")
    assert cached.lost == "each token takes as long as the text before it"
    [warning] = [r for r in caplog.records if "cached states refused" in r.message]
    assert (warning.levelname, cached.lost in warning.message) == ("WARNING", True)


def test_an_unpaged_model_is_served_by_static_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onequeue")
    generator = generating.load(tiny_decoders.folder("bloom"), max_model_len=100)
    assert isinstance(generator.runner, CachedRunner)
    assert generator.info.batching == "static"
    assert "attention function" in generator.info.why
    assert generator.info.why in caplog.text
    assert "batched=True cached=True" in caplog.text
    assert any(isinstance(part, PackedLinear) for part in generator.runner.language.model.modules())
    assert generator.text_model.max_model_len == 100
    assert generator.compile_state == "off"
    generator.warm_up()
    (served,), _ = serve(generator, request("The capital of France", max_tokens=3))
    assert served.ids == generating.greedy("bloom", [served.prompt], 3)
    assert (
        generator.text_model.encode("The capital")
        == generator.runner.language.tokenizer("The capital")["input_ids"]
    )
    assert generator.text_model.token(ORDINARY[0]) == generator.text_model.decode([ORDINARY[0]])


# ── memory ──


def test_sequences_beyond_the_memory_of_caches_are_preempted() -> None:
    """Keys and values of a token take 512 bytes in bloom's two layers."""
    assert (checked("bloom").sequence_bytes, checked("bloom").token_bytes) == (0, 512)
    room = 10.4 * 16 * 512
    options = GeneratorOptions("bloom", kv_cache_gb=room / 1e9)
    generator = cached_engine(copy.copy(checked("bloom")), options, "a test asks for it")
    assert generator.scheduler.pool.num_blocks == 10
    assert generator.runner.max_model_len == 160
    texts, driver = prompts(7), Driver(generator)
    served = [driver.add(request(text, max_tokens=30)) for text in texts]
    most_groups = 0
    while generator.busy:
        driver.step()
        tables = [sequence.table for sequence in generator.scheduler.running]
        slots = [table.runner_state for table in tables if table and table.runner_state]
        caches = {slot.group: slot.group.state for slot in slots if isinstance(slot, CacheSlot)}
        most_groups = max(most_groups, len(caches))
        assert sum(_tensor_bytes(state, set()) for state in caches.values()) <= room
    assert most_groups > 1
    assert driver.total("preempted") > 0
    assert driver.total("cached_tokens") == 0
    for response, text in zip(served, texts, strict=True):
        assert response.ids == [oracle("bloom", text, 30)]


def test_sequences_have_no_more_states_than_fit_into_memory() -> None:
    size = checked("mamba").sequence_bytes
    assert size > 0
    assert checked("mamba").token_bytes == 0
    options = GeneratorOptions("mamba", kv_cache_gb=2 * 3 * size / 1e9)
    generator = cached_engine(copy.copy(checked("mamba")), options, "a test asks for it")
    assert generator.scheduler.max_running == 3
