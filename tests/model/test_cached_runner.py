"""Models that are not paged give what transformers' `generate` gives, whatever runs beside it."""

import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from batching import scheduler
from batching.errors import ItemFailed, OutOfMemory
from batching.request_queue import WorkItem
from tests import generating, tiny_decoders
from tests.generating import GREEDY, ORDINARY, Driver, Served, request
from tests.matrix import matrix
from tests.tiny_decoders import decoder
from worker.generation.engine import GenerationEngine
from worker.generation.loading import cached_engine, load_generator
from worker.messages.generation import Sampling
from worker.model.cached_runner import CachedRunner, CacheGroup, CacheSlot
from worker.model.language_model import GeneratorOptions, LanguageModel

LINEAR = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}
RECURRENT = {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3, "head_dim": 8}
BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "bloom": tiny_decoders.BUILDERS["bloom"],
    "falcon": decoder("FalconConfig", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": tiny_decoders.BUILDERS["falcon-alibi"],
    "stablelm": decoder("StableLmConfig", num_key_value_heads=4),
    "gpt-neo": decoder(
        "GPTNeoConfig",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "mamba": decoder("MambaConfig", state_size=8),
    "mamba2": decoder("Mamba2Config", **MAMBA2),
    "qwen3.5": decoder("Qwen3_5TextConfig", **LINEAR),
    "qwen3-next": decoder(
        "Qwen3NextConfig",
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "trocr": decoder(
        "TrOCRConfig",
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        init_std=0.5,
    ),
    "rwkv": decoder("RwkvConfig", attention_hidden_size=32, context_length=256),
    "recurrent-gemma": decoder("RecurrentGemmaConfig", num_key_value_heads=1, **RECURRENT),
    "llama": tiny_decoders.BUILDERS["llama"],
}
# How rows may share a batch of each, and whether its cache is of use.
WAYS = dict.fromkeys(BUILDERS, ("padded", True)) | {
    "trocr": ("same length", True),  # counts positions from the left, padding included
    "rwkv": ("single", True),  # transformers mixes up the rows of a batch after the first step
    "recurrent-gemma": ("same length", False),  # keeps its state in its modules
}
LENGTHS = (3, 17, 40, 9, 9)
TOKENS = 8
WORD = 7  # a token that some tests make the model stumble over


@cache
def language(name: str) -> LanguageModel:
    torch.manual_seed(sum(name.encode()))
    model, tokenizer = BUILDERS[name]()
    model.generation_config.eos_token_id = None
    return LanguageModel(name, model.eval(), tokenizer)


@cache
def checked(name: str) -> CachedRunner:
    return CachedRunner(language(name))


def fresh(name: str = "bloom", max_running: int = 256) -> GenerationEngine:
    """Of a model that was checked once."""
    options = GeneratorOptions(name, max_running=max_running)
    return cached_engine(copy.copy(checked(name)), options, "it is asked for")


def prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Without WORD."""
    chance = random.Random(seed)
    return [chance.choices(ORDINARY[2:], k=length) for length in lengths]


@cache
def _oracle(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    generate: Any = language(name).model.generate
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=2,
    )
    made: list[int] = output[0, len(prompt) :].tolist()
    return made


def oracle(name: str, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
    """What `generate` makes of a prompt alone."""
    return _oracle(name, tuple(prompt), count)


def serve(generator: GenerationEngine, *items: WorkItem) -> tuple[list[Served], Driver]:
    return generating.serve(generator, items)


@contextmanager
def stumbling(name: str, over: Callable[[torch.Tensor, torch.Tensor], Any]) -> Iterator[None]:
    """`over` sees the ids that go in and their embeddings, and may raise or change them."""
    embeddings = language(name).model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, given, made: over(given[0], made))
    try:
        yield
    finally:
        hook.remove()


# ── what comes out ──


@pytest.mark.parametrize(
    "name", matrix([name for name in BUILDERS if name != "llama"], "mamba", "bloom")
)
def test_a_mixed_batch_goes_on_as_generate_does(name: str, steps: bool) -> None:
    generator = fresh(name)
    assert (checked(name).batching, checked(name).caches) == WAYS[name]
    given = prompts(0)
    served, driver = serve(generator, *(request(each, max_tokens=TOKENS) for each in given))
    for each, prompt in zip(served, given, strict=True):
        assert each.ids == [oracle(name, prompt)]
        assert each.choices[0].finish_reason == "length"
    reports = driver.reports[steps:]  # of those that fly, the first only sets off
    assert reports[0].prefill_tokens == sum(LENGTHS)
    assert sum(report.prefill_tokens for report in reports) == sum(LENGTHS)
    assert [report.decode_tokens for report in reports] == [len(given)] * TOKENS


@pytest.mark.parametrize("name", ["bloom", "mamba", "qwen3.5"])
def test_rows_that_end_leave_the_others_as_they_were(name: str, steps: bool) -> None:
    given = prompts(1)
    items = [request(each, max_tokens=3 + 2 * at) for at, each in enumerate(given)]
    served, driver = serve(fresh(name), *items)
    for at, each in enumerate(served):
        assert each.ids == [oracle(name, given[at], 3 + 2 * at)]
    running = [report.running for report in driver.reports[steps:]]
    assert running == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0]


def behind(prompt: Sequence[int], **asked: Any) -> WorkItem:
    """A request in the background."""
    item = request(prompt, **asked)
    item.payload = replace(item.payload, background=True)
    return item


def test_the_background_gives_its_place_to_a_newcomer_and_begins_anew() -> None:
    driver = Driver(fresh(max_running=2))
    given = prompts(4)
    first = [driver.add(behind(prompt, max_tokens=30)) for prompt in given[:2]]
    driver.step()
    waits = driver.add(behind(given[2], max_tokens=2))
    driver.step()
    assert (driver.reports[-1].running, driver.reports[-1].waiting) == (2, 1)
    newcomer = driver.add(request(given[3], max_tokens=2))
    driver.step()
    assert (driver.reports[-1].preempted, driver.reports[-1].running) == (1, 2)
    driver.step()
    assert newcomer.done
    assert not waits.deltas
    driver.finish()
    assert [each.ids[0] for each in first] == [oracle("bloom", each, 30) for each in given[:2]]


@pytest.mark.usefixtures("steps")
def test_under_constant_other_work_the_background_ends_in_order() -> None:
    driver = Driver(fresh(max_running=2))
    given = prompts(5)
    waits = [driver.add(behind(prompt, max_tokens=3)).item for prompt in given[:3]]
    for _ in range(40):
        while len(driver.generator.scheduler.waiting) < 4:
            driver.add(request(given[4], max_tokens=2))
        driver.step()
    assert [item for item in driver.ended if item in waits] == waits


def test_tokens_stream_a_step_at_a_time() -> None:
    driver = Driver(fresh())
    served = [driver.add(request(prompt, max_tokens=4)) for prompt in prompts(2)[:3]]
    for step in range(4):
        driver.step()
        assert [delta.tokens for delta in driver.deltas] == [1, 1, 1]
        assert [bool(delta.prompt_tokens) for delta in driver.deltas] == [step == 0] * 3
        assert [each.done for each in served] == [step == 3] * 3


@pytest.mark.usefixtures("steps")
def test_seeds_give_the_same_alone_in_a_batch_and_on_paged_memory() -> None:
    given = prompts(3)
    hot = [Sampling(temperature=1.5, seed=seed) for seed in range(len(given))]

    def asked() -> list[WorkItem]:
        return [request(p, s, n=2) for p, s in zip(given, hot, strict=True)]

    together, _ = serve(fresh("llama"), *asked())
    alone = [serve(fresh("llama"), item)[0][0] for item in asked()]
    assert [each.ids for each in together] == [each.ids for each in alone]
    assert all(first != second for first, second in (each.ids for each in together))
    expected, _ = generating.serve(generating.engine("llama"), asked())
    assert [each.ids for each in together] == [each.ids for each in expected]


@pytest.mark.usefixtures("steps")
def test_stop_strings_ends_and_least_tokens_hold() -> None:
    prompt = prompts(4)[0]
    ids = oracle("bloom", prompt)
    generator = fresh()
    piece = generator.decode(ids[2:4]).strip()
    assert piece
    (cut,), _ = serve(generator, request(prompt, stop=(piece,)))
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == piece
    assert piece not in cut.choices[0].text
    (ended,), _ = serve(generator, request(prompt, stop_token_ids=(ids[4],)))
    assert ended.choices[0].stop_reason == ids[4]
    assert ended.ids[0] == ids[: ids.index(ids[4]) + 1]
    (later,), _ = serve(generator, request(prompt, stop_token_ids=(ids[4],), min_tokens=7))
    assert later.deltas[0].tokens >= 7


def test_an_echoed_prompt_brings_its_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batching.scheduler.MAX_SCORED_TOKENS_WHOLE", 16)
    prompt = prompts(5)[LENGTHS.index(40)]
    scored = Sampling(temperature=0.0, logprobs=2)
    asked = [request(prompt, scored, n=2, max_tokens=3, echo=True)]
    asked += [request(prompt, scored, max_tokens=0, echo=True), request(prompts(6)[0])]
    (told, only, _), driver = serve(fresh(), *asked)
    with torch.inference_mode():
        logits = language("bloom").model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
    for choice in (*told.choices, *only.choices):
        entries = choice.logprobs[: len(prompt)]
        assert [entry.token_id for entry in entries] == prompt
        assert entries[0].logprob is None
        assert [entry.logprob for entry in entries[1:]] == pytest.approx(expected, abs=1e-3)
        assert "".join(entry.text for entry in choice.logprobs) == choice.text
    assert [len(choice.logprobs) for choice in told.choices] == [43, 43]
    assert (only.choices[0].finish_reason, len(only.choices[0].logprobs)) == ("length", 40)
    assert [report.running for report in driver.reports[:4]] == [4, 4, 3, 3]


# ── who runs when ──


def test_an_item_that_closes_leaves_at_once() -> None:
    driver = Driver(fresh())
    given = prompts(7)[:3]
    first, second, third = (driver.add(request(prompt, max_tokens=6)) for prompt in given)
    driver.step()
    second.item.open = False
    driver.step()
    assert driver.reports[-1].running == 2
    driver.finish()
    assert not second.done
    assert second.deltas[0].tokens == 1
    assert first.ids == [oracle("bloom", given[0], 6)]
    assert third.ids == [oracle("bloom", given[2], 6)]


def test_a_newcomer_begins_at_once_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside long answers that began one after another, each with a forward of its own."""
    monkeypatch.setattr(checked("bloom"), "rejoined", 0)
    driver = Driver(fresh())
    given = prompts(8, (3, 200, 30, 9, 9))
    lasting = []
    for prompt in given[:3]:
        lasting.append(driver.add(request(prompt, max_tokens=40)))
        driver.step()
    assert len(set(groups(driver))) == 3
    for prompt in given[3:]:
        newcomer = driver.add(request(prompt, max_tokens=2))
        driver.step()
        assert driver.reports[-1].admitted == 1
        driver.step()
        assert newcomer.done
        assert newcomer.ids == [oracle("bloom", prompt, 2)]
    driver.finish()
    for each, prompt in zip(lasting, given, strict=False):
        assert each.ids == [oracle("bloom", prompt, 40)]


@pytest.mark.usefixtures("steps")
def test_small_groups_run_as_one_again_when_another_begins() -> None:
    driver = Driver(fresh())
    given = prompts(19, (3, 17, 40, 9, 9, 5, 8, 30))
    served = []
    for prompt in given:
        served.append(driver.add(request(prompt, max_tokens=12)))
        driver.step()
        assert len(set(groups(driver))) <= 2
    driver.finish()
    for each, prompt in zip(served, given, strict=True):
        assert each.ids == [oracle("bloom", prompt, 12)]


def test_what_a_group_kept_goes_with_the_last_of_it() -> None:
    driver = Driver(fresh())
    for prompt in prompts(20, (5, 9)):
        driver.add(request(prompt, max_tokens=4))
    driver.step()
    driver.generator.warm_up()
    (kept,) = set(map(weakref.ref, groups(driver)))
    driver.finish()
    assert kept() is None


def groups(driver: Driver) -> list[CacheGroup]:
    tables = [sequence.table for sequence in driver.generator.scheduler.running]
    slots = [table.runner_state for table in tables if table]
    return [slot.group for slot in slots if isinstance(slot, CacheSlot)]


def test_no_more_rows_run_than_allowed() -> None:
    items = [request(prompt, n=2, max_tokens=3) for prompt in prompts(9)]
    served, driver = serve(fresh(max_running=3), *items)
    assert all(len(each.choices) == 2 for each in served)
    assert max(report.running for report in driver.reports) == 3


def test_a_step_takes_no_more_than_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS_WHOLE", {"cpu": 60})
    driver = Driver(fresh())
    for length in (20, 20, 100, 20):
        driver.add(request(prompts(10, [length])[0], max_tokens=2))
    driver.finish()
    assert [report.prefill_tokens for report in driver.reports[:4]] == [40, 100, 20, 0]


def test_clear_and_warm_up_leave_things_as_they_should() -> None:
    driver = Driver(fresh("mamba"))
    given = prompts(11)
    served = driver.add(request(given[0], max_tokens=5))
    driver.step()
    driver.generator.warm_up()
    driver.finish()
    assert served.ids == [oracle("mamba", given[0], 5)]
    left = [driver.add(request(prompt)).item for prompt in given]
    driver.step()
    kept = set(map(weakref.ref, groups(driver)))
    assert driver.generator.clear() == left
    assert not driver.generator.busy
    assert kept
    assert all(group() is None for group in kept)


# ── failing small ──


def test_an_output_that_is_no_number_fails_its_item_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = prompts(12)
    given[1][3] = WORD

    def broken(ids: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made.masked_fill((ids == WORD)[..., None], float("nan"))

    with stumbling("bloom", broken):
        served, _ = serve(fresh(), *(request(each, max_tokens=TOKENS, n=2) for each in given))
    assert isinstance(served[1].error, ItemFailed)
    assert not served[1].deltas
    assert caplog.text.count("generation failed") == 1
    for at in (0, 2, 3, 4):
        assert served[at].ids == [oracle("bloom", given[at])] * 2


@pytest.mark.parametrize("later", [False, True])
def test_a_step_that_raises_fails_the_guilty_item_alone(later: bool, steps: bool) -> None:
    given = prompts(13)
    if later:  # it says the word itself
        saying = Sampling(temperature=0.0, logit_bias={WORD: 1e4})
    else:
        given[2][1], saying = WORD, GREEDY
    silent = Sampling(temperature=0.0, logit_bias={WORD: -1e4})
    wanted = [silent, silent, saying, silent, silent]

    def asked() -> list[WorkItem]:
        return [request(p, s, max_tokens=TOKENS) for p, s in zip(given, wanted, strict=True)]

    def refuse(ids: torch.Tensor, made: torch.Tensor) -> None:
        if (ids == WORD).any():
            raise ValueError("no")

    expected, _ = serve(fresh(), *asked())
    with stumbling("bloom", refuse):
        served, _ = serve(fresh(), *asked())
    assert isinstance(served[2].error, ItemFailed)
    assert not isinstance(served[2].error, OutOfMemory)
    assert bool(served[2].deltas) == (later and not steps)  # what lands as it fails goes with it
    for at in (0, 1, 3, 4):
        assert served[at].choices == expected[at].choices


class Short:
    """Memory for a forward of so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.refused = 0

    def __call__(self, ids: torch.Tensor, made: torch.Tensor) -> None:
        if len(ids) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError("out of memory")


@pytest.mark.usefixtures("steps")
def test_what_does_not_fit_together_runs_in_parts() -> None:
    given, short = prompts(14), Short(2)
    with stumbling("bloom", short):
        served, driver = serve(
            fresh(max_running=4), *(request(each, max_tokens=TOKENS) for each in given)
        )
    for each, prompt in zip(served, given, strict=True):
        assert each.ids == [oracle("bloom", prompt)]
    assert short.refused == 2, "once with four rows, once to see whether three fit by now"
    assert sum(report.preempted for report in driver.reports) == 4
    assert sum(report.admitted for report in driver.reports) == len(given)
    ends = [list(driver.served).index(item) for item in driver.ended]
    assert ends == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("steps")
def test_where_others_run_what_does_not_fit_waits() -> None:
    driver, given, short = Driver(fresh()), prompts(17), Short(1)
    with stumbling("bloom", short):
        served = [driver.add(request(given[0], max_tokens=20))]
        driver.step()
        served += [driver.add(request(prompt, max_tokens=4)) for prompt in given[1:]]
        driver.step()
        assert (driver.reports[-1].running, driver.reports[-1].preempted) == (2, 3)
        assert driver.reports[-1].waiting == 3
        assert driver.deltas
        driver.step()
        assert (driver.reports[-1].running, driver.reports[-1].preempted) == (2, 0)
        driver.finish()
    for each, prompt in zip(served, given, strict=True):
        assert each.ids == [oracle("bloom", prompt, 20 if each is served[0] else 4)]


def test_what_does_not_fit_alone_fails_alone() -> None:
    given = prompts(15)

    def short(ids: torch.Tensor, made: torch.Tensor) -> None:
        if ids.shape[1] >= 40:
            raise torch.OutOfMemoryError("out of memory")

    with stumbling("bloom", short):
        served, _ = serve(fresh(), *(request(each, max_tokens=TOKENS) for each in given))
    for each, prompt in zip(served, given, strict=True):
        if len(prompt) == 40:
            assert isinstance(each.error, OutOfMemory)
        else:
            assert each.ids == [oracle("bloom", prompt)]


def test_a_lost_device_is_not_survived() -> None:
    def lost(ids: torch.Tensor, made: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with stumbling("bloom", lost), pytest.raises(RuntimeError, match="CUDA error"):
        serve(fresh(), request(prompts(16)[0]))


# ── loading ──


def test_a_model_that_remembers_other_calls_is_run_anew_for_each_token() -> None:
    before = 0  # rows of the last call

    def mixing(ids: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        nonlocal before
        rows, before = before, len(ids)
        return made if ids.shape[1] > 1 or rows == len(ids) else made.flip(-1)

    with stumbling("bloom", mixing):
        runner = CachedRunner(language("bloom"))
    assert (runner.batching, runner.caches) == ("padded", False)


def test_a_model_that_cannot_be_paged_is_served_static(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onequeue")
    folder = str(tiny_decoders.folder("bloom"))
    options = GeneratorOptions(folder, device="cpu", dtype="float32", max_model_len=100)
    generator = load_generator(options)
    assert isinstance(generator.runner, CachedRunner)
    assert generator.info.batching == "static"
    assert "attention function" in generator.info.why
    assert generator.info.why in caplog.text
    assert "batching=padded cached=True" in caplog.text
    assert generator.max_model_len == 100
    assert generator.compile_state == "off"
    generator.warm_up()
    (served,), _ = serve(generator, request("The capital of France", max_tokens=3))
    assert served.deltas[0].tokens == 3
    assert (
        generator.encode("The capital")
        == generator.runner.language.tokenizer("The capital")["input_ids"]
    )
    assert generator.token(ORDINARY[0]) == generator.decode([ORDINARY[0]])
