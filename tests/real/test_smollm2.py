"""SmolLM2-135M-Instruct: its output is that of `generate`, and the same in every bit whatever runs
beside it. Random weights do not show what hardly trained rows and natural drafts do."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from batching import step_times
from tests.event_streams import chat as post_chat
from tests.event_streams import chunks
from tests.generating import Driver, Request, Served, request, runner_of, serve
from tests.real.checkpoints import hf, smollm2, smollm2_gguf
from tests.serving import Server, serving
from tests.threads import compute_threads
from worker.backends.native_attention import NativeMetadata
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator, paged_engine
from worker.messages.generation import Sampling
from worker.model.check import row_errors
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.paged_runner import PagedRunner
from worker.model.paging import load_paged_runner

pytestmark = pytest.mark.real

QUESTIONS = (
    "Write a short story about the sea and a clock.",
    "Write a Python function that counts words in a dictionary, with comments.",
    "Summarize: tea is grown in Asia.",
    "Traduisez en anglais : le chat dort sur la chaise.",
    "Schreibe einen Satz über Brücken in Köln.",
    "Escribe una lista de tres frutas.",
    "用中文写一句话。",
    "日本の首都はどこですか。",
    "Что такое звезда?",
    "اكتب جملة عن البحر.",
)
NEW = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


@cache
def tokenizer() -> Any:
    return hf.AutoTokenizer.from_pretrained(smollm2())


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    def ids(question: str) -> tuple[int, ...]:
        message = [{"role": "user", "content": question}]
        output = tokenizer().apply_chat_template(message, add_generation_prompt=True)
        return tuple(output["input_ids"])

    return tuple(map(ids, QUESTIONS))


@cache
def reference() -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def generated(prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = reference().generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=2
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@cache
def loaded(dtype: str, native: bool) -> LanguageModel:
    options = GeneratorOptions(smollm2(), dtype=dtype, device="cpu", kv_cache_gb=0.1)
    runner = load_paged_runner(load_language_model(options), options)
    if native:
        runner._use_native_ops()
        assert runner.metadata is NativeMetadata, runner.language.fallbacks
    assert runner.language.fallbacks == ()
    return runner.language


def engine(dtype: str = "bfloat16", native: bool = True, speculation: str = "off") -> Any:
    language = loaded(dtype, native)
    runner = PagedRunner(language, 400, 4096, 64)
    if native:
        runner.metadata = NativeMetadata
    return paged_engine(runner, GeneratorOptions("", speculation=speculation, compile="off"))


def items(sampling: Sequence[Sampling], new: int = NEW) -> list[Request]:
    return [
        request(prompt, sampling[number % len(sampling)], max_tokens=new)
        for number, prompt in enumerate(prompts())
    ]


def bits(served: Served) -> tuple[Any, ...]:
    """Return the tokens, and their log-probabilities in every bit."""
    return served.ids, [[token.logprob for token in delta.logprobs] for delta in served.choices]


# ── float32 ──


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.usefixtures("native")
def test_float32_output_is_that_of_generate(native: bool) -> None:
    greedy = [Sampling(temperature=0.0)]
    served, _ = serve(engine("float32", native, "auto"), items(greedy), seed=0)
    for one in served:
        assert one.ids == [generated(one.prompt)], tokenizer().decode(one.prompt)


@pytest.mark.usefixtures("native")
def test_float32_output_after_2000_tokens_is_that_of_generate() -> None:
    text = tokenizer()("".join(QUESTIONS) * 15)["input_ids"][:2000]
    [served], driver = serve(engine("float32", speculation="auto"), [request(text, max_tokens=NEW)])
    assert served.ids == [generated(text)]
    assert driver.partial, "the prompt runs in chunks"


# ── bfloat16 ──


@torch.inference_mode()
@pytest.mark.usefixtures("native")
def test_logits_are_as_near_to_those_of_float32_as_torchs_own_are() -> None:
    """Over the rows of real chats, whose errors differ by orders of magnitude."""
    own = hf.AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16).eval()
    runner = PagedRunner(loaded("bfloat16", True), 400, 4096, 64)
    errors: dict[str, list[Tensor]] = {"torch": [], "native": []}
    for prompt in prompts():
        [exact], [torchs] = (model(torch.tensor([prompt])).logits for model in (reference(), own))
        [native] = runner._run_chunks(NativeMetadata, [prompt])
        errors["torch"].append(row_errors(torchs, exact))
        errors["native"].append(row_errors(native, exact))
    torchs, native = (torch.cat(rows).log().mean().exp() for rows in errors.values())
    assert native <= 1.1 * torchs
    assert torchs < 0.5, "an error of the comparison"


@pytest.mark.usefixtures("native")
def test_bits_do_not_depend_on_company_chunks_prefixes_or_speculation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = [
        Sampling(temperature=0.0, logprobs=1),
        Sampling(temperature=0.7, seed=3, logprobs=1),
    ]
    alone = [bits(serve(engine(), [item])[0][0]) for item in items(sampling)]
    assert [bits(one) for one in serve(engine(), items(sampling))[0]] == alone
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 20})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", 20)
    shared = engine(speculation="auto")
    served, chunked = serve(shared, items(sampling), seed=1)
    assert [bits(one) for one in served] == alone
    assert chunked.partial, "prompts run in chunks"
    served, cached = serve(shared, items(sampling), seed=2)
    assert [bits(one) for one in served] == alone
    assert cached.total("cached_tokens"), "prefixes are in the cache"


@pytest.mark.usefixtures("native")
def test_drafts_of_a_repeated_text_are_accepted_and_change_nothing() -> None:
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 6
    ids = tokenizer()(text)["input_ids"]
    plain, _ = serve(engine(), [request(ids, Sampling(temperature=0.0, logprobs=1), 48)])
    drafted, driver = serve(
        engine(speculation="auto"), [request(ids, Sampling(temperature=0.0, logprobs=1), 48)]
    )
    assert bits(drafted[0]) == bits(plain[0])
    assert driver.total("accepted") > 10
    assert len(driver.reports) < 40


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_compiled_model_is_accepted_and_keeps_bits(quantization: str) -> None:
    options = GeneratorOptions(
        smollm2(), device="cpu", kv_cache_gb=0.1, quantization=quantization, compile="on"
    )
    generator: GenerationEngine = load_generator(options)
    runner = runner_of(generator)
    driver = Driver(generator)
    while runner.compile_state == "running":  # a step takes the compiled model
        driver.add(request(prompts()[0], max_tokens=4))
        driver.finish()
    assert runner.compile_state == "done", runner.language.fallbacks
    assert runner.language.fallbacks == ()
    sampling = [Sampling(temperature=0.0, logprobs=1)]
    alone = [bits(serve(generator, [item])[0][0]) for item in items(sampling)]
    assert [bits(one) for one in serve(generator, items(sampling), seed=1)[0]] == alone
    generator.close()


def test_a_gguf_file_gives_the_output_of_its_folder() -> None:
    options = GeneratorOptions(
        smollm2_gguf(),
        dtype="bfloat16",
        device="cpu",
        kv_cache_gb=0.1,
        compile="off",
        speculation="off",  # torch's products of other rows than those below may round otherwise
    )
    generator = load_generator(options)
    greedy = [Sampling(temperature=0.0, logprobs=1)]
    from_file = serve(generator, items(greedy)[:3])[0]
    from_folder = serve(engine(native=False), items(greedy)[:3])[0]
    assert [bits(one) for one in from_file] == [bits(one) for one in from_folder]


# ── over HTTP ──


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(chat_model=smollm2(), dtype="float32", compile="off", kv_cache_gb=0.1) as server:
        yield server


def chat(server: Server, content: str, **fields: Any) -> Any:
    response = post_chat(server, content, temperature=0, **fields)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


def test_a_schema_is_obeyed(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    choice = chat(
        server,
        "Tom is 7 years old. Answer in JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert choice["finish_reason"] == "stop"
    person = json.loads(choice["message"]["content"])
    assert isinstance(person["age"], int)
    assert "Tom" in person["name"]


def test_a_required_tool_is_called_with_arguments_of_its_schema(server: Server) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choice = chat(server, "How is the weather in Rome?", tools=[tool], tool_choice="required")
    calls = choice["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    for call in calls:
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_a_stream_has_the_text_of_a_response_and_ends_by_itself(server: Server) -> None:
    question = "What is the capital of France? Answer in one sentence."
    choice = chat(server, question, max_tokens=60)
    assert choice["finish_reason"] == "stop"
    assert "Paris" in choice["message"]["content"]
    streamed = chunks(post_chat(server, question, temperature=0, stream=True))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed if c["choices"])
    assert text == choice["message"]["content"]
