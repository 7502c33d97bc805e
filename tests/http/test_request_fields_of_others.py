"""Fields of other servers' requests are obeyed, refused, or named as ignored."""

import logging
from collections.abc import Iterator

import pytest
from msgspec import Struct

from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.request_fields import CONSTRAINT_FIELDS
from server.apis.openai.responses.request import ResponseRequest
from server.http import ignored_fields
from tests.event_streams import post
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving

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
