"""Fields of other servers' requests are obeyed, refused, or named as ignored."""

import json
import logging
from collections.abc import Iterator

import pytest
from msgspec import Struct

from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.request_fields import CONSTRAINT_FIELDS, config_fields
from server.apis.openai.responses.request import ResponseRequest
from server.http import ignored_fields
from tests.event_streams import frames, post
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving
from worker.model.generation_config import NOT_SERVED, field_types

# The fields of the request schemas of other servers, in their documents' order.
VLLM = """frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream_options temperature top_p tools tool_choice
reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search
top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids
bad_words echo suffix add_generation_prompt continue_final_message add_special_tokens documents
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval prompt_embeds
enable_response_messages previous_input_messages guided_json guided_regex guided_choice
guided_grammar guided_json_object guided_decoding_backend guided_whitespace_pattern
logits_processors best_of"""
SGLANG = """regex ebnf structural_tag no_stop_trim stop_regex lora_path session_params
separate_reasoning stream_reasoning return_hidden_states return_routed_experts rid extra_key
custom_logit_processor custom_params bootstrap_host bootstrap_port bootstrap_room
data_parallel_rank input_ids max_dynamic_patch min_dynamic_patch use_audio_in_video
return_cached_tokens_details"""
LLAMA_CPP = """dynatemp_range dynatemp_exponent n_predict n_indent n_keep n_cmpl n_cache_reuse
typical_p repeat_penalty repeat_last_n dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
mirostat_eta grammar json_schema n_probs min_keep t_max_predict_ms id_slot cache_prompt
return_tokens samplers timings_per_token return_progress post_sampling_probs response_fields lora
reasoning_format reasoning_budget thinking_forced_open parse_tool_calls grammar_lazy
grammar_triggers preserved_tokens backend_sampling tfs_z"""
OPENAI = """audio function_call functions metadata modalities moderation prediction
prompt_cache_key prompt_cache_retention safety_identifier service_tier store verbosity
web_search_options background conversation include instructions max_output_tokens max_tool_calls
previous_response_id prompt_cache_options reasoning text truncation context_management"""
FIELDS = f"{VLLM} {SGLANG} {LLAMA_CPP} {OPENAI}".split()
ROUTES: dict[str, tuple[type[Struct], dict[str, object]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (ResponseRequest, {"input": "hi", "store": False}),
}


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator) as started:
        yield started


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_changes_nothing_is_refused_or_named(server: Server, path: str) -> None:
    kind, body = ROUTES[path]
    obeyed = {*kind.__struct_fields__, *kind.without_effect}  # type: ignore[attr-defined]
    for name in FIELDS:
        answer = post(server, path, {**body, name: 7.5})  # of no field the default, or the type
        if answer.status_code == 400:
            assert error_of(answer)["param"].startswith(name), answer.text
        else:
            assert answer.status_code == 200, (name, answer.text)
            named = answer.headers.get("x-ignored-fields")
            assert named == (None if name in obeyed else name)


def test_a_stream_names_ignored_fields(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    answer = post(server, "/v1/chat/completions", {**body, "stream": True, "rid": "x", "top_k": 1})
    assert answer.headers["x-ignored-fields"] == "rid"


def test_names_are_bounded_and_visible_ascii(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    names = {f"x{n}" for n in range(20)}
    answer = post(server, "/v1/chat/completions", {**body, **dict.fromkeys(names, 1)})
    assert len(answer.headers["x-ignored-fields"].split(", ")) == 10
    odd = "ö, \r\nset-cookie: a" + "y" * 100
    answer = post(server, "/v1/chat/completions", {**body, odd: 1})
    assert answer.headers["x-ignored-fields"] == ("?????set-cookie:?a" + "y" * 100)[:64]
    answer = post(server, "/v1/chat/completions", {**body, "rid": None, "other": 0})
    assert answer.headers["x-ignored-fields"] == "other"


def test_a_name_is_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_fields, "_logged", set())
    monkeypatch.setattr(ignored_fields, "MAX_LOGGED", 2)
    _, body = ROUTES["/v1/chat/completions"]
    with caplog.at_level(logging.WARNING, "onequeue.fields"):
        for name in ("rid", "rid", "lora_path", "extra_key"):
            post(server, "/v1/chat/completions", {**body, name: 1})
    assert [record.getMessage().split("field=")[1] for record in caplog.records] == [
        "rid", "lora_path",
    ]  # fmt: skip


def test_unknown_fields_are_refused_where_the_setting_says_so(generator: FakeGenerator) -> None:
    with serving(load_chat=lambda: generator, unknown_fields="refuse") as server:
        for path, (_, body) in ROUTES.items():
            answer = post(server, path, {**body, "rid": "x"})
            assert (answer.status_code, error_of(answer)["param"]) == (400, "rid")
            assert post(server, path, {**body, "user": "x", "rid": None}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {"type": "object"}),
        ("guided_json", '{"type": "object"}'),
        ("guided_regex", "[0-9]+"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", 'root ::= "a"'),
        ("json_schema", {}),
        ("regex", "[0-9]+"),
        ("ebnf", 'root ::= "a"'),
        ("grammar", 'root ::= "a"'),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
def test_constraints_of_other_servers_are_obeyed(
    server: Server, generator: FakeGenerator, path: str, name: str, value: object
) -> None:
    _, body = ROUTES[path]
    structured = {CONSTRAINT_FIELDS[name]: value}
    assert post(server, path, {**body, "structured_outputs": structured}).status_code == 200
    wanted = generator.payloads[-1].constraint
    assert wanted
    assert post(server, path, {**body, name: value}).status_code == 200
    got = generator.payloads[-1].constraint
    assert got
    assert (got.kind, got.value, got.param) == (wanted.kind, wanted.value, name)


def test_two_constraints_are_refused(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    for others in ({"regex": "b"}, {"structured_outputs": {"regex": "b"}}):
        answer = post(server, "/v1/chat/completions", {**body, "guided_regex": "a", **others})
        assert error_of(answer)["param"] == "guided_regex"
    formatted = {"response_format": {"type": "json_object"}, "grammar": "a"}
    answer = post(server, "/v1/chat/completions", {**body, **formatted})
    assert error_of(answer)["param"] == "grammar"
    empty: dict[str, object] = {"grammar": "", "guided_choice": [], "json_schema": None}
    assert post(server, "/v1/chat/completions", {**body, **empty}).status_code == 200


def test_texts_have_their_stops_and_special_tokens_on_request(
    server: Server, generator: FakeGenerator
) -> None:
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    for path, (_, body) in ROUTES.items():
        for given in ({}, fields):
            assert post(server, path, {**body, **given}).status_code == 200
            payload = generator.payloads[-1]
            got = payload.stopping.includes_stop, not payload.skips_special
            assert got == (bool(given), bool(given))


def test_llama_cpps_penalty_is_obeyed(server: Server, generator: FakeGenerator) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    for fields, penalty in (
        ({"repeat_penalty": 1.1}, 1.1),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, 1.2),
    ):
        assert post(server, "/v1/chat/completions", {**body, **fields}).status_code == 200
        assert generator.payloads[-1].sampling.repetition_penalty == penalty


def test_a_refusal_says_what_to_use(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    answer = post(server, "/v1/chat/completions", {**body, "n_predict": 5})
    assert "use max_tokens" in error_of(answer)["message"]
    for name, value in {"typical_p": 1, "num_beams": 1, "use_beam_search": False}.items():
        answer = post(server, "/v1/chat/completions", {**body, name: value})
        assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, None)


def test_the_pipeline_names_fields_beside_its_inputs() -> None:
    with serving() as server:
        answer = post(server, "/", {"inputs": "a [MASK]", "adapter_id": "x"})
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "adapter_id")


@pytest.mark.parametrize("path", ROUTES)
def test_sampling_fields_reach_the_model(
    server: Server, generator: FakeGenerator, path: str
) -> None:
    _, body = ROUTES[path]
    fields: dict[str, object] = {
        "bad_words": ["a"], "allowed_token_ids": [5, 6], "vllm_xargs": {"no_repeat_ngram_size": 7},
        "truncate_prompt_tokens": 3, "generation_config": '{"top_h": 0.5, "max_new_tokens": 9}',
    }  # fmt: skip
    answer = post(server, path, {**body, **fields})
    assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, None)
    payload = generator.payloads[-1]
    assert (payload.sampling.bad_words, payload.sampling.allowed_token_ids) == (("a",), (5, 6))
    wanted = {"top_h": 0.5, "max_new_tokens": 9, "no_repeat_ngram_size": 7}
    assert (payload.truncate, dict(payload.config)) == (3, wanted)
    assert payload.stopping.default_tokens is None  # which would win


def test_unknown_parts_of_fields_are_named(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    fields = {
        "vllm_xargs": {"ngram_size": 3}, "stream_options": {"include_obfuscation": False},
        "structured_outputs": {"regex": "a", "backend": "x"}, "stream": True,
        "generation_config": '{"use_cache": true, "new_in_6": 1}', "metadata": {"a": "b"},
    }  # fmt: skip
    named = post(server, "/v1/chat/completions", {**body, **fields}).headers["x-ignored-fields"]
    assert {*named.split(", ")} == {
        "vllm_xargs.ngram_size", "stream_options.include_obfuscation",
        "structured_outputs.backend", "generation_config.new_in_6",
    }  # fmt: skip


def test_every_field_of_a_generation_config_is_known() -> None:
    assert {*field_types(9), *NOT_SERVED} <= config_fields()


def test_an_answer_has_the_id_of_its_request(server: Server) -> None:
    for path, prefix in {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}.items():
        _, body = ROUTES[path]
        assert post(server, path, {**body, "request_id": "r-1"}).json()["id"] == prefix + "r-1"
        for bad in ("", "a b", "ö", "x" * 129):
            answer = post(server, path, {**body, "request_id": bad})
            assert error_of(answer)["param"] == "request_id"


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    with serving(chat_model="demo") as started:
        yield started


def test_the_last_message_is_echoed(server: Server) -> None:
    messages = [{"role": "user", "content": "say c d"}, {"role": "assistant", "content": "say a b"}]
    body = {"messages": messages, "echo": True, "add_generation_prompt": False}
    continued = {**body, "continue_final_message": True}
    for given, wanted in ((continued, "say a ba b"), (body | {"messages": messages[:1]}, "cd")):
        whole = post(server, "/v1/chat/completions", given)
        assert whole.json()["choices"][0]["message"]["content"].replace(" ", "") == wanted.replace(
            " ", ""
        )
        chunks = frames(post(server, "/v1/chat/completions", {**given, "stream": True}).text)
        deltas = [json.loads(chunk)["choices"] for chunk in chunks[:-1]]
        text = "".join(choice["delta"].get("content") or "" for [choice] in deltas)
        assert text == whole.json()["choices"][0]["message"]["content"]


def test_tokens_are_named_by_their_ids(real: Server) -> None:
    fields = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    body = {**ROUTES["/v1/chat/completions"][1], **fields, "logprobs": True}
    answer = post(real, "/v1/chat/completions", {**body, "logprob_token_ids": [9, 4]}).json()
    for token in answer["choices"][0]["logprobs"]["content"]:
        assert token["token"].startswith("token_id:")
        assert [top["token"] for top in token["top_logprobs"]] == ["token_id:9", "token_id:4"]
    answer = post(real, "/v1/completions", {"prompt": "Hello", **fields, "logprobs": 2}).json()
    scores = answer["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in scores["tokens"])
    assert all(len(top) in (2, 3) for top in scores["top_logprobs"])
    answer = post(real, "/v1/completions", {"prompt": "hi", "logprob_token_ids": [1]})
    assert error_of(answer)["param"] == "logprob_token_ids"


def test_a_prompt_is_truncated_at_its_start(real: Server) -> None:
    long = "one two three four five six seven eight nine ten " * 3000
    for prompt in (long, [*range(20, 60)]):
        fields = {"max_tokens": 2, "return_token_ids": True, "truncate_prompt_tokens": 12}
        answer = post(real, "/v1/completions", {"prompt": prompt, **fields})
        ids = answer.json()["choices"][0]["prompt_token_ids"]
        assert len(ids) == 12, answer.text
        if isinstance(prompt, list):
            assert ids == prompt[-12:]
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
    assert post(real, "/v1/chat/completions", chat).status_code == 400
    for limit in (-1, 20):
        answer = post(real, "/v1/chat/completions", {**chat, "truncate_prompt_tokens": limit})
        used = answer.json()["usage"]["prompt_tokens"]
        assert used == limit if limit > 0 else used > 20


def test_documents_are_for_templates_that_read_them(real: Server) -> None:
    documents = [{"title": "A", "text": "B"}]
    body = {**ROUTES["/v1/chat/completions"][1], "documents": documents, "max_tokens": 1}
    answer = post(real, "/v1/chat/completions", body)
    assert error_of(answer)["param"] == "documents"


def test_a_template_of_a_request_is_rendered_where_the_operator_trusts_it(real: Server) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ documents }}"
    body = {**ROUTES["/v1/chat/completions"][1], "max_tokens": 1, "return_token_ids": True}
    given = {**body, "chat_template": template, "documents": [{"text": "D"}]}
    answer = post(real, "/v1/chat/completions", given)
    assert error_of(answer)["param"] == "chat_template"
    with serving(chat_model="demo", trust_request_chat_template=True) as trusting:
        ids = post(trusting, "/v1/chat/completions", given).json()["prompt_token_ids"]
        text = post(trusting, "/detokenize", {"tokens": ids}).json()["prompt"]
        assert text == "[hi][{'text': 'D'}]"
        answer = post(trusting, "/v1/responses", {"input": "hi", "chat_template": template})
        assert answer.json()["usage"]["input_tokens"] < len(ids)
        for bad in (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{{ messages", "{{ 'a' * 3000000000 }}", "{{ raise_exception('no') }}",
            "(" * 60_000, "{{" + "(" * 60_000, "{{ ''.__class__.__mro__ }}" * 2000,
        ):  # fmt: skip
            answer = post(trusting, "/v1/chat/completions", {**body, "chat_template": bad})
            if not bad.startswith("("):
                assert answer.status_code == 400, answer.text
        assert post(trusting, "/v1/chat/completions", body).status_code == 200
