"""Fields of other servers' requests are obeyed, refused, or named as ignored."""

import logging

import pytest
from msgspec import Struct

from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.request_fields import config_fields
from server.apis.openai.responses.request import ResponseRequest
from server.http import ignored_fields
from tests.event_streams import error_of, post
from tests.fake_generator import FakeGenerator
from tests.serving import Server, server_fixture, serving
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
previous_response_id prompt_cache_options reasoning text truncation context_management
access_programs image prompt"""
FIELDS = f"{VLLM} {SGLANG} {LLAMA_CPP} {OPENAI}".split()
ROUTES: dict[str, tuple[type[Struct], dict[str, object]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (ResponseRequest, {"input": "hi", "store": False}),
}


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


def test_names_are_bounded_and_visible_ascii(server: Server) -> None:
    _, body = ROUTES["/v1/chat/completions"]
    names = {f"x{n}" for n in range(20)}
    answer = post(server, "/v1/chat/completions", {**body, **dict.fromkeys(names, 1)})
    assert len(answer.headers["x-ignored-fields"].split(", ")) == 10
    odd = "ö, \r\nset-cookie: a" + "y" * 100
    answer = post(server, "/v1/chat/completions", {**body, odd: 1})
    assert answer.headers["x-ignored-fields"] == ("?????set-cookie:?a" + "y" * 100)[:64]


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
        _, body = ROUTES["/v1/chat/completions"]
        assert post(server, "/v1/chat/completions", body | {"verbosity": "low"}).status_code == 200


def test_the_pipeline_names_fields_beside_its_inputs() -> None:
    with serving() as server:
        answer = post(server, "/", {"inputs": "a [MASK]", "adapter_id": "x"})
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "adapter_id")


def test_every_field_of_a_generation_config_is_known() -> None:
    assert {*field_types(9), *NOT_SERVED} <= config_fields()


real = server_fixture(chat_model="demo")


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


def test_a_limit_of_minus_one_is_none(real: Server) -> None:
    body = {"prompt": "Count", "ignore_eos": True, "max_tokens": -1}
    answer = post(real, "/v1/completions", body).json()
    assert answer["usage"]["total_tokens"] == 2048  # the context


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
