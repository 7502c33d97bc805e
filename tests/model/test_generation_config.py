"""Fields of a checkpoint's generation_config: outputs are those of `generate`."""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from batching.errors import InvalidInput
from tests import tiny_chat, tiny_decoders
from tests.generating import (
    ORDINARY,
    Driver,
    Served,
    built,
    engine,
    greedy,
    load,
    loaded,
    prompts,
    reference_model,
    request,
    serve,
)
from tests.matrix import matrix
from worker.backends.cached_runner import CachedRunner
from worker.engines.generation import engine as module
from worker.engines.generation.loading import cached_engine
from worker.engines.generation.speculation import NgramDrafter
from worker.messages.generation import Constraint, Sampling
from worker.model.language_model import GeneratorOptions
from worker.model.loading import LoadingFailed
from worker.text import fill_in_middle

COUNT = 14
TEXTS = [*prompts(11, (9, 24), count=2), [ORDINARY[3]]]
OMITTED = Sampling()  # all fields are the checkpoint's
Fields = dict[str, Any]


def outputs() -> list[list[int]]:
    return greedy("llama", TEXTS, COUNT)


def tokens_at(*places: int) -> list[int]:
    """The tokens that greedy outputs have there."""
    return sorted({output[place] for output in outputs() for place in places})


def text_of(output: Sequence[int]) -> str:
    return loaded("llama").input_processor.decode(list(output))


# Each has an effect on the outputs for TEXTS.
FIELDS: dict[str, Callable[[], Fields]] = {
    "suppress_tokens": lambda: {"suppress_tokens": tokens_at(0, 3)},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": tokens_at(0, 3)},
    "bad_words_ids": lambda: {
        "bad_words_ids": [[tokens_at(2)[0]], *(output[3:6] for output in outputs())]
    },
    "sequence_bias": lambda: {
        "sequence_bias": [[[ORDINARY[40]], 3.0], *([output[1:3], -9.0] for output in outputs())]
    },
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 3.0},
    "repetition_penalty": lambda: {"repetition_penalty": 1.9},
    "min_new_tokens": lambda: {"min_new_tokens": 6, "eos_token_id": tokens_at(2, 8)},
    "min_length": lambda: {"min_length": 30, "eos_token_id": tokens_at(2, 8)},
    "forced_bos_token_id": lambda: {"forced_bos_token_id": ORDINARY[7]},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": ORDINARY[8]},
    "exponential_decay_length_penalty": lambda: {
        "exponential_decay_length_penalty": [3, 1.9], "eos_token_id": [ORDINARY[50], ORDINARY[51]],
    },
    "remove_invalid_values": lambda: {
        "remove_invalid_values": True, "suppress_tokens": tokens_at(0)
    },
    "renormalize_logits": lambda: {"renormalize_logits": True, "suppress_tokens": tokens_at(1)},
    "watermarking_config": lambda: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "stop_strings": lambda: {"stop_strings": ["ingD", "$Ob", " is/"]},
    "max_new_tokens": lambda: {"max_new_tokens": 5},
    "max_length": lambda: {"max_length": 30},
    "all": lambda: {
        "suppress_tokens": tokens_at(0), "begin_suppress_tokens": tokens_at(1),
        "bad_words_ids": [output[3:5] for output in outputs()], "no_repeat_ngram_size": 2,
        "sequence_bias": [[[ORDINARY[40]], 2.0], [[ORDINARY[40], ORDINARY[41]], 9.0]],
        "repetition_penalty": 1.3, "min_new_tokens": 7, "eos_token_id": tokens_at(5, 6),
        "forced_eos_token_id": ORDINARY[8], "exponential_decay_length_penalty": (4, 1.2),
    },
}  # fmt: skip


@contextmanager
def checkpoint(fields: Fields) -> Iterator[None]:
    """Engines of the loaded model have these fields."""
    model: Any = loaded("llama").runner.language.model
    before, untyped = model.generation_config, GenerationConfig
    model.generation_config = untyped(do_sample=False, **fields)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = before


@torch.inference_mode()
def generated(fields: Fields, model: Any = None) -> list[list[int]]:
    """Return the tokens of `generate`, one prompt at a time."""
    result, model = [], model or reference_model("llama")
    for text in TEXTS:
        limits = {} if {"max_new_tokens", "max_length"} & {*fields} else {"max_new_tokens": COUNT}
        output = model.generate(
            torch.tensor([text]), do_sample=False, pad_token_id=2, **fields, **limits,
            tokenizer=loaded("llama").runner.language.tokenizer,
        )  # fmt: skip
        result.append(output[0, len(text) :].tolist())
    return result


def served_ids(served: Sequence[Served]) -> list[list[int]]:
    return [one.ids[0] for one in served]


def asked(fields: Fields, text: Sequence[int]) -> Any:
    limited = {"max_new_tokens", "max_length"} & {*fields}
    ends = fields.get("eos_token_id") is not None
    return request(text, OMITTED, None if limited else COUNT, ignore_eos=not ends)


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_output_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch: with drafts, and without them while steps run ahead; all fields also
    the other way round."""
    fields = FIELDS[name]()
    wanted = generated(fields)
    assert wanted != [
        output[: len(ids)] for output, ids in zip(outputs(), wanted, strict=True)
    ] or (min(map(len, wanted)) < COUNT)
    with checkpoint(fields):
        for speculation, ahead in product(("auto", "off"), (False, True)):
            if name != "all" and (speculation == "auto") == ahead:
                continue
            monkeypatch.setitem(module.RUNS_AHEAD, "cpu", ahead)
            generator = engine("llama", speculation=speculation)
            alone = [serve(generator, [asked(fields, text)])[0][0] for text in TEXTS]
            assert served_ids(alone) == wanted
            together, _ = serve(generator, [asked(fields, text) for text in TEXTS], seed=3)
            assert served_ids(together) == wanted


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", matrix(FIELDS, "all"))
def test_positions_hold_with_drafts_preemption_and_resume(
    name: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count from the prompt's end, whatever ran again. Drafts are the tokens of `generate`
    with these fields or without."""
    fields = FIELDS[name]()
    wanted = generated(fields)
    texts = {
        tuple(text): ids for text, ids in zip(TEXTS, wanted if right else outputs(), strict=True)
    }

    def draft(_: NgramDrafter, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        [following] = [
            ids[len(tokens) - len(text) :]
            for text, ids in texts.items()
            if (*text,) == (*tokens[: len(text)],)
        ]
        return tuple(following[: max(0, limit)])

    monkeypatch.setattr(NgramDrafter, "draft", draft)
    with checkpoint(fields):
        generator = engine("llama")
        driver = Driver(generator)
        served = [driver.add(asked(fields, text)) for text in TEXTS]
        for _ in range(3):
            driver.step()
            for sequence in list(generator.scheduler.running)[1:]:
                generator.scheduler._preempt(sequence)
        driver.finish()
    assert served_ids(served) == wanted
    assert driver.total("drafted") > 0


def test_cached_runner_has_the_same_fields() -> None:
    fields = FIELDS["all"]()
    language = built("llama", tiny_decoders.BUILDERS["llama"])
    wanted = generated(fields, language.model)
    untyped: Any = GenerationConfig
    language.model.generation_config = untyped(do_sample=False, **fields)
    options = GeneratorOptions("", speculation="off")
    generator = cached_engine(CachedRunner(language), options, "")
    served, _ = serve(generator, [asked(fields, text) for text in TEXTS])
    assert served_ids(served) == wanted


# ── a request's own fields ──


def configured(item: Any, fields: Fields) -> Any:
    item.payload = replace(item.payload, config=fields)
    return item


@pytest.mark.parametrize("name", matrix([n for n in FIELDS if n != "watermarking_config"], "all"))
def test_a_requests_configuration_replaces_the_checkpoints_fields(name: str) -> None:
    """Those of a request only: another one in the batch has the checkpoint's."""
    fields = FIELDS[name]()
    base = {} if "min_length" in fields else {"min_new_tokens": 3}  # which would win in `generate`
    with checkpoint(base):
        requests = [configured(asked(fields, text), fields) for text in TEXTS]
        served, _ = serve(engine("llama"), [*requests, asked({}, TEXTS[0])])
    wanted = [*generated(base | fields), *generated(base)[:1]]
    assert served_ids(served) == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"suppress_tokens": [[1]]}, "suppress_tokens"),
        ({"bad_words_ids": [[10**9]]}, "bad_words_ids"),
        ({"bad_words_ids": [[5]] * 200}, "bad_words_ids"),
        ({"forced_bos_token_id": 10**9}, "forced_bos_token_id"),
        ({"no_repeat_ngram_size": 10**6}, "no_repeat_ngram_size"),
        ({"stop_strings": ["a"] * 17}, "stop_strings"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"encoder_repetition_penalty": 1e300}, "encoder_repetition_penalty"),
    ],
)
def test_a_requests_configuration_is_checked(fields: Fields, param: str) -> None:
    asked_for = configured(request(TEXTS[0], OMITTED, COUNT), fields).payload
    with pytest.raises(InvalidInput) as refused:
        loaded("llama").input_processor.prepare_prompt(asked_for)
    assert refused.value.param == f"generation_config.{param}"


def test_bad_words_are_not_generated() -> None:
    words = tuple(text_of([output[2]]) for output in outputs())
    sampling = replace(OMITTED, bad_words=words, temperature=0)
    served, _ = serve(engine("llama"), [request(text, sampling, COUNT) for text in TEXTS])
    for ids, output in zip(served_ids(served), outputs(), strict=True):
        assert ids[:2] == output[:2]
        assert output[2] not in ids


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("min_new_tokens", {"min_tokens": 0}),
        ("max_new_tokens", {"max_tokens": COUNT}),
        ("max_length", {"max_tokens": COUNT}),
        ("repetition_penalty", {"sampling": Sampling(repetition_penalty=1.0)}),
    ],
)
def test_a_requests_own_field_overrides_the_checkpoints(field: str, own: Fields) -> None:
    fields = FIELDS[field]()
    with checkpoint(fields):
        options = {"sampling": OMITTED, "max_tokens": COUNT, "ignore_eos": False, **own}
        served, _ = serve(engine("llama"), [request(text, **options) for text in TEXTS])
    assert served_ids(served) == generated({"eos_token_id": fields.get("eos_token_id")})


def test_a_prompt_beyond_the_checkpoints_length_may_use_the_context() -> None:
    with checkpoint({"max_length": 10}):
        [served], _ = serve(engine("llama"), [request([*ORDINARY[:20]], OMITTED, max_tokens=None)])
    assert len(served.ids[0]) > COUNT


def test_stop_strings_join_those_of_the_request_and_are_not_shown() -> None:
    [output, *_] = outputs()
    own, checkpoints = text_of(output[7:9]), text_of(output[3:5])
    with checkpoint({"stop_strings": checkpoints}):
        for stop in ((), (own,)):
            [served], _ = serve(engine("llama"), [request(TEXTS[0], OMITTED, COUNT, stop=stop)])
            [choice] = served.choices
            assert (choice.finish_reason, choice.stop_reason) == ("stop", checkpoints)
            assert choice.text == text_of(output[:3])
    with checkpoint({"stop_strings": "never in it"}):
        [served], _ = serve(engine("llama"), [request(TEXTS[0], OMITTED, COUNT, stop=(own,))])
        assert served.choices[0].stop_reason == own


def test_a_grammar_wins_over_suppressed_tokens() -> None:
    generator = tiny_chat.engine()
    model: Any = generator.runner.language.model
    before = model.generation_config
    vocabulary = generator.runner.language.vocab_size
    try:
        for suppressed in (range(vocabulary), range(0, vocabulary, 2)):
            model.generation_config = GenerationConfig(
                do_sample=False, eos_token_id=before.eos_token_id, suppress_tokens=[*suppressed],
                min_new_tokens=40, no_repeat_ngram_size=1,
            )  # fmt: skip
            item = request("x", OMITTED, 40, ignore_eos=False)
            constraint = Constraint("choice", ["Paris Paris Paris"], "structured_outputs.choice")
            item.payload = replace(item.payload, constraint=constraint)
            [served], _ = serve(tiny_chat.engine(), [item])
            assert served.choices[0].text == "Paris Paris Paris"
            assert served.choices[0].finish_reason == "stop"
    finally:
        model.generation_config = before


# ── load ──


def folder_with(tmp_path: Path, fields: Fields | str) -> str:
    path = tmp_path / "model"
    shutil.copytree(tiny_decoders.folder("llama"), path)
    file = path / "generation_config.json"
    content = fields if isinstance(fields, str) else {**json.loads(file.read_text()), **fields}
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": "all"},
        {"begin_suppress_tokens": [1.5]},
        {"bad_words_ids": [1, 2]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [[10**6]]},
        {"sequence_bias": {"5": 1.0}},
        {"sequence_bias": [[[10**6], 1.0]]},
        {"exponential_decay_length_penalty": [1]},
        {"exponential_decay_length_penalty": [1, -2]},
        {"no_repeat_ngram_size": "two"},
        {"no_repeat_ngram_size": -1},
        {"min_new_tokens": 2.5},
        {"min_length": -1},
        {"max_new_tokens": "many"},
        {"typical_p": 0},
        {"epsilon_cutoff": [0.1]},
        {"eta_cutoff": True},
        {"top_h": 0},
        {"stop_strings": [""]},
        {"stop_strings": 5},
        {"forced_bos_token_id": 10**6},
        {"forced_eos_token_id": [-1]},
        {"renormalize_logits": "yes"},
        {"temperature": "hot"},
        {"repetition_penalty": math.inf},
        {"top_k": "50"},
        {"watermarking_config": {"bias": "large"}},
        {"eos_token_id": "</s>"},
    ],
    ids=str,
)
def test_a_malformed_field_stops_the_load(tmp_path: Path, fields: Fields) -> None:
    [name] = fields
    with pytest.raises(LoadingFailed) as raised:
        load(folder_with(tmp_path, fields))
    sentence = str(raised.value)
    assert f"its generation_config has {name}: " in sentence
    assert "\n" not in sentence


def test_a_file_without_an_object_stops_the_load(tmp_path: Path) -> None:
    with pytest.raises(LoadingFailed, match=r"its generation_config\.json is not a JSON object"):
        load(folder_with(tmp_path, '{"temperature": '))


def test_what_is_not_served_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "num_beams": 4, "guidance_scale": 1.5, "prompt_lookup_num_tokens": 3, "max_time": 2.0,
        "penalty_alpha": 0.6, "num_return_sequences": 1, "suppress_tokens": [5],
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "onequeue"):
        generator = load(folder_with(tmp_path, fields))
    [record] = [r for r in caplog.records if r.name == "onequeue.generation_config"]
    assert record.getMessage() == (
        "generation_config: not served: num_beams=4, penalty_alpha=0.6, guidance_scale=1.5, "
        "max_time=2.0, prompt_lookup_num_tokens=3"
    )
    [served], _ = serve(generator, [request(TEXTS[0], OMITTED, 4)])
    assert 5 not in served.ids[0]


# ── SAMPLING_DEFAULTS ──

NO_SAMPLING = {"do_sample": None, "temperature": None, "top_p": None, "top_k": None}


@pytest.mark.parametrize(
    ("fields", "defaults", "requested", "expected", "configured"),
    [
        ({}, {}, {}, (1.0, 1.0, 0, 0.0, 1.0), False),
        ({"do_sample": True}, {}, {}, (1.0, 1.0, 0, 0.0, 1.0), True),
        ({}, {"temperature": 0.7, "top_p": 0.9}, {}, (0.7, 0.9, 0, 0.0, 1.0), True),
        ({"top_p": 0.8}, {"temperature": 0.7, "top_p": 0.9}, {}, (0.7, 0.8, 0, 0.0, 1.0), True),
        ({}, {"top_p": 0.9, "top_k": -1}, {"top_p": 1.0}, (1.0, 1.0, 0, 0.0, 1.0), True),
        ({"top_k": 50}, {"top_k": 3, "min_p": 0.1}, {"top_k": 7}, (1.0, 1.0, 7, 0.1, 1.0), True),
        ({}, {"repetition_penalty": 1.2}, {"top_k": 0}, (1.0, 1.0, 0, 0.0, 1.2), True),
        # a temperature of 0 and do_sample are the same field
        ({"do_sample": False}, {"temperature": 0.7}, {}, (0.0, 1.0, 0, 0.0, 1.0), True),
        ({"do_sample": True}, {"temperature": 0}, {}, (0.0, 1.0, 0, 0.0, 1.0), True),
        ({"temperature": 0.3}, {"temperature": 0}, {}, (0.3, 1.0, 0, 0.0, 1.0), True),
        ({}, {"temperature": 0}, {"temperature": 0.5}, (0.5, 1.0, 0, 0.0, 1.0), True),
        ({}, {"temperature": None}, {}, (1.0, 1.0, 0, 0.0, 1.0), False),
    ],
)
def test_sampling_defaults_fill_what_request_and_checkpoint_leave_out(
    tmp_path: Path,
    fields: Fields,
    defaults: Fields,
    requested: Fields,
    expected: tuple[float, ...],
    configured: bool,
) -> None:
    path = folder_with(tmp_path, {**NO_SAMPLING, **fields})
    text = json.dumps(defaults)
    generator = load(path, sampling_defaults=text)
    item = request([7], replace(OMITTED, **requested))
    generator.prepare(item)
    params = item.prepared[0].prepared.params
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert tuple(getattr(params, name) for name in names) == expected
    assert generator.defaults.configured is configured
    for name in names:
        if name not in requested:
            assert getattr(generator.defaults, name) == getattr(params, name)


# ── fill-in-the-middle ──


def test_a_suffix_makes_a_prompt_of_the_tokenizers_fim_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = loaded("llama").input_processor
    tokenizer: Any = loaded("llama").runner.language.tokenizer
    payload = replace(request("def f(", OMITTED, COUNT).payload, suffix="return 1")
    with pytest.raises(InvalidInput) as refused:
        processor.prepare_prompt(payload)
    assert refused.value.param == "suffix"
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("def f(", "return 1")
    )
    start = [tokenizer.bos_token_id] if tokenizer("").input_ids else []
    marks = [300, 301, 302]
    names = tuple(tokenizer.convert_ids_to_tokens(marks))
    monkeypatch.setattr(fill_in_middle, "FIM_TOKENS", (names,))
    ids = [*processor.prepare_prompt(payload).ids]
    assert ids == [*start, 300, *before, 301, *after, 302]
    monkeypatch.setattr(fill_in_middle, "FIM_TOKENS", ())
    monkeypatch.setattr(fill_in_middle, "SUFFIX_FIRST", names[:2])
    assert [*processor.prepare_prompt(payload).ids] == [*start, 301, *after, 300, *before]
