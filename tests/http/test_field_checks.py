"""Fields of requests: refused by an error that names the field and its reason, or accepted.

Those that all requests of generation share are tested in chats.
"""

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsStreaming as ChatParameters,
)
from openai.types.completion_create_params import (
    CompletionCreateParamsStreaming as CompletionParameters,
)
from openai.types.responses import ResponseIncludable
from openai.types.responses.response_create_params import (
    ResponseCreateParamsStreaming as ResponseParameters,
)

from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.request_fields import known_fields
from server.apis.openai.responses.request import ResponseRequest
from tests.event_streams import assert_refused, post
from tests.fake_generator import FakeGenerator
from tests.serving import Server, server_fixture

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE, LOAD = "/tokenize", "/detokenize", "/load_model"
Fields = dict[str, Any]
USER: Fields = {"role": "user", "content": "hi"}
# A valid request; the fields of a case replace its own.
VALID: dict[str, Fields] = {
    CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "hi"},
    TOKENIZE: {}, DETOKENIZE: {}, LOAD: {},
}  # fmt: skip


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


# ── chats ──

ASSISTANT = {"role": "assistant", "content": "yes"}
PART = "messages[0].content[0]"
FORMAT, OUTPUTS, OPTIONS = "response_format", "structured_outputs", "stream_options"
SCHEMA = f"{FORMAT}.json_schema.schema"
CONTINUE = "continue_final_message"
BOTH = {"schema": {"a": 1}, "value": {"a": 1}}
JSON_OBJECT, JSON_SCHEMA = {"type": "json_object"}, {"type": "json_schema"}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def messages(*sent: Any) -> Fields:
    return {"messages": [*sent]}


def parts(*content: Any) -> Fields:
    """A message of the user with these parts."""
    return messages({"role": "user", "content": [*content]})


def function(definition: Any) -> Fields:
    return {"type": "function", "function": definition}


def functions(*definitions: Any) -> Fields:
    return {"tools": [function(definition) for definition in definitions]}


def allowed(choice: Any) -> Fields:
    return {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}


def chosen(choice: Any) -> Fields:
    return {"tools": [CLOCK], "tool_choice": choice}


CHATS: list[tuple[Fields, str, str]] = [
    ({"messages": None}, "messages", "expected array"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": {}}, "messages", "got object"),
    ({"messages": None, "input": "hi"}, "messages", "a request with `input` goes to /v1/responses"),
    (messages("hi"), "messages[0]", "expected object"),
    (messages({"content": "hi"}), "messages[0].role", "is required"),
    (messages({"role": "critic", "content": "x"}), "messages[0].role", "'critic'"),
    (messages({"role": "user"}), "messages[0].content", "is required"),
    (messages({"role": "user", "content": 3}), "messages[0].content", "got int"),
    (parts(), "messages[0].content", "empty"),
    (parts({"type": "image_url"}), f"{PART}.image_url", "is required"),
    (parts({"type": "smell_url", "text": "a"}), f"{PART}.type", "not 'smell_url'"),
    (parts({"type": "text"}), f"{PART}.text", "is required"),
    (parts(3), PART, "expected str | object"),
    (messages({"role": "user", "content": "refused"}), "messages", "is refused"),
    (
        messages(ASSISTANT | {"reasoning": "a", "reasoning_content": "b"}),
        "messages[0].reasoning",
        "differs from reasoning_",
    ),
    (messages(ASSISTANT | {"reasoning": []}), "messages[0].reasoning", "expected str"),
    ({"temperature": 2.1}, "temperature", "<= 2"),
    ({"temperature": -0.1}, "temperature", ">= 0"),
    ({"temperature": "hot"}, "temperature", "expected float"),
    ({"temperature": True}, "temperature", "got bool"),
    ({"top_p": -0.1}, "top_p", ">= 0"),
    ({"top_p": 1.1}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"min_p": 1.5}, "min_p", "<= 1"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", ">= 0.01"),
    ({"repetition_penalty": 1e300}, "repetition_penalty", "<= 100"),
    ({"presence_penalty": 2.5}, "presence_penalty", "<= 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 129}, "n", "<= 128"),
    ({"n": True}, "n", "got bool"),
    ({"n": 1.5}, "n", "got float"),
    ({"seed": 10**30}, "seed", "the integer 1e+30 has more than 64 bits"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -2}, "max_tokens", ">= -1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": "9"}, "max_tokens", "got str"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "exceeds max_tokens"),
    ({"stop": 3}, "stop", "got int"),
    ({"stop": ["a", 1]}, "stop[1]", "got int"),
    ({"stop": [""]}, "stop[0]", "must not be empty"),
    ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
    ({"stop": ["a"] * 17}, "stop", "<= 16"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "<= 1024"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "is not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "expected float"),
    ({"logit_bias": [1]}, "logit_bias", "expected object"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "<= 1024"),
    ({"logprobs": 3}, "logprobs", "expected bool"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
    ({"prompt_logprobs": 1, "n": 2}, "prompt_logprobs", "n: 1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "got bool"),
    ({"return_token_ids": 1}, "return_token_ids", "got int"),
    ({"return_token_ids": "yes"}, "return_token_ids", "got str"),
    ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    *(({"cache_salt": salt}, "cache_salt", "expected str") for salt in (1, ["a"], "a" * 257)),
    *(({"request_id": id}, "request_id", "match") for id in ("", "a b", "ö", "x" * 129)),
    ({"stream": "yes"}, "stream", "expected bool"),
    ({OPTIONS: {}}, OPTIONS, "stream: true"),
    ({OPTIONS: {"include_usage": True}}, OPTIONS, "stream: true"),
    ({"stream": True, OPTIONS: {"include_usage": 1}}, f"{OPTIONS}.include_usage", "bool"),
    ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type", "must be json_object or"),
    ({FORMAT: {}}, f"{FORMAT}.type", "is required"),
    ({FORMAT: "text"}, FORMAT, "expected object"),
    ({FORMAT: JSON_SCHEMA}, SCHEMA, "is required"),
    ({FORMAT: JSON_SCHEMA | {"json_schema": {"schema": []}}}, SCHEMA, "expected object"),
    ({FORMAT: JSON_OBJECT | BOTH}, f"{FORMAT}.value", "cannot be combined with schema"),
    ({FORMAT: JSON_OBJECT | {"schema": "{}"}}, f"{FORMAT}.schema", "expected object"),
    ({OUTPUTS: {}}, OUTPUTS, "needs one of"),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "needs one of"),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice", "not be empty"),
    ({OUTPUTS: {"choice": [""]}}, f"{OUTPUTS}.choice", "not be empty"),
    ({OUTPUTS: {"json": "{"}}, f"{OUTPUTS}.json", "is not valid JSON"),
    ({OUTPUTS: {"json": "[]"}}, f"{OUTPUTS}.json", "must be a JSON object"),
    ({OUTPUTS: {"structural_tag": "x"}}, f"{OUTPUTS}.structural_tag", "not implemented"),
    ({OUTPUTS: {"regex": "a"}, FORMAT: JSON_OBJECT}, OUTPUTS, "cannot be combined with"),
    ({"guided_regex": "a", "regex": "b"}, "guided_regex", "cannot be combined with"),
    ({"guided_regex": "a", OUTPUTS: {"regex": "b"}}, "guided_regex", "cannot be combined with"),
    ({"grammar": "a", FORMAT: JSON_OBJECT}, "grammar", "cannot be combined with"),
    ({"n_predict": 5}, "n_predict", "use max_tokens"),
    ({"reasoning_effort": "hard"}, "reasoning_effort", "must be high or"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", ">= 0"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "expected object"),
    ({"add_generation_prompt": True, CONTINUE: True}, CONTINUE, "cannot be combined with"),
    ({"model": 3}, "model", "expected str"),
    ({"modalities": ["text", "audio"]}, "modalities", "is not implemented"),
    ({"tools": [{"type": "x"}], "tool_choice": "none"}, "tools[0].type", "function"),
    ({"tools": [{}] * 129}, "tools", "<= 128"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "before it"),
    (functions({}), "tools[0].function.name", "is required"),
    (functions({"name": 'a"b'}), "tools[0].function.name", "{1,128}"),
    (functions({"name": "a" * 129}), "tools[0].function.name", "{1,128}"),
    (functions({"name": "f", "parameters": [1]}), "tools[0].function.parameters", "object"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    (chosen("any"), "tool_choice", "'any'"),
    (chosen(3), "tool_choice", "got int"),
    (chosen({"type": "any"}), "tool_choice.type", "'any'"),
    (chosen({"type": "function"}), "tool_choice.function", "is required"),
    (chosen(function({"name": "g"})), "tool_choice.function.name", "no tool 'g'"),
    (chosen({"type": "allowed_tools"}), "tool_choice.allowed_tools", "is required"),
    (allowed({"mode": "auto"}), "tool_choice.allowed_tools.tools", "is required"),
    (
        allowed({"mode": "auto", "tools": [{"function": {"name": "g"}}]}),
        "tool_choice.allowed_tools.tools[0].function.name",
        "no tool 'g'",
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is required"),
    (
        {"tools": [{"type": "custom", "custom": {
            "name": "a", "format": {"type": "grammar", "grammar": {}}}}]},
        "tools[0].custom.format.grammar.syntax",
        "is required",
    ),
]  # fmt: skip

# ── completions, and the endpoints without a response of the model ──

PROMPTS: list[tuple[Fields, str, str]] = [
    ({"prompt": None}, "prompt", "expected"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt[0]", "empty"),
    ({"prompt": [[]]}, "prompt[0]", "empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": ["a", 1]}, "prompt[1]", "either texts or token ids"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "either texts or token ids"),
    ({"prompt": [1, "a"]}, "prompt[1]", "token id"),
    ({"prompt": [1, True]}, "prompt[1]", "bool"),
    ({"prompt": [1, -1]}, "prompt[1]", ">= 0"),
    ({"prompt": [[1, -1]]}, "prompt[0][1]", ">= 0"),
    ({"prompt": [[1, 1.5]]}, "prompt[0][1]", "float"),
    ({"prompt": {"a": 1}}, "prompt", "object"),
    ({"prompt": ["a"] * 9}, "prompt", "exceed 8 choices"),
    ({"prompt": ["a"] * 3, "n": 3}, "prompt", "exceed 8 choices"),
    ({"prompt": ["a", "refused"]}, "prompt[1]", "is refused"),
    ({"prompt": "refused", "stream": True}, "prompt", "is refused"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"min_tokens": 17}, "min_tokens", "exceeds max_tokens, 16"),
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"logprobs": "1"}, "logprobs", "str"),
    ({"logprobs": 2, "echo": True, "prompt_logprobs": 1}, "prompt_logprobs", "logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "requires log-probabilities"),
    ({"echo": 1}, "echo", "bool"),
    ({"suffix": "b", "echo": True}, "suffix", "combined with echo"),
    ({"prompt": ["a"], "suffix": "b"}, "suffix", "one text"),
    ({"best_of": 2}, "best_of", "not implemented"),
    ({"best_of": "2"}, "best_of", "got str"),
    ({"request_id": "a b"}, "request_id", "match"),
    ({OPTIONS: {}}, OPTIONS, "stream: true"),
]
WITHOUT_OUTPUT: dict[str, list[tuple[Fields, str | None, str]]] = {
    TOKENIZE: [
        ({}, "prompt", "not both"),
        ({"prompt": "a", "messages": [USER]}, "prompt", "not both"),
        ({"prompt": 3}, "prompt", "got int"),
        ({"prompt": "refused"}, None, "the template refuses this"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "'x'"),
    ],
    DETOKENIZE: [
        ({}, "tokens", "is required"),
        ({"tokens": "a"}, "tokens", "got str"),
        ({"tokens": [1, "a"]}, "tokens[1]", "got str"),
        ({"tokens": [1, -1]}, "tokens[1]", ">= 0"),
        ({"tokens": [1, 5000, 2]}, "tokens[1]", "there is no token 5000"),
    ],
    LOAD: [({"model": 3}, "model", "got int"), ({}, "model", "is required")],
}

# ── responses ──

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g", "description": "goes", "strict": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "say 3"}
PICTURE = {"type": "input_image", "image_url": "data:;base64,"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}
NAMED_SCHEMA = {"type": "json_schema", "name": "n"}
NOTE = {"type": "custom", "name": "note"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
SHELL_CALL = {"type": "local_shell_call", "call_id": "1"}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [TOOL, NOTE]}


def items(*sent: Any) -> Fields:
    return {"input": [*sent]}


def content(*sent: Any) -> Fields:
    """An item of the user with these parts."""
    return items({"role": "user", "content": [*sent]})


def formatted(text_format: Any) -> Fields:
    return {"text": {"format": text_format}}


def choosing(choice: Any) -> Fields:
    return {"tools": [TOOL], "tool_choice": choice}


def noting(input_format: Any) -> Fields:
    return {"tools": [NOTE | {"format": input_format}]}


ITEMS: list[tuple[Fields, str, str]] = [
    ({"input": None}, "input", "expected"),
    ({"input": ""}, "input", "must not be empty"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"n_predict": 5}, "n_predict", "use max_output_tokens"),
    ({FORMAT: JSON_OBJECT}, FORMAT, "use text.format"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": {}}, "input", "got object"),
    (items("hi"), "input[0]", "expected object"),
    (items({"content": "hi"}), "input[0].role", "is required"),
    (items({"role": "tool", "content": "x"}), "input[0].role", "'tool'"),
    (items({"role": "user"}), "input[0].content", "is required"),
    (items({"type": "input_text"}), "input[0].text", "is required"),
    (items({"type": "input_text", "text": 3}), "input[0].text", "expected str"),
    (items({"type": "input_text", "text": "a", "role": "x"}), "input[0].role", "'x'"),
    (items({"type": "input_image"}), "input[0].image_url", "is required"),
    (items(PICTURE), "input[0].content[0].image_url", "takes text, no images"),
    (items({"role": "user", "content": 3}), "input[0].content", "got int"),
    (content(), "input[0].content", "empty"),
    (
        content({"type": "input_text", "text": "a"}, PICTURE),
        "input[0].content[1].image_url",
        "takes text, no images",
    ),
    (
        items(USER, {"role": "user", "content": [{"type": "input_text"}]}),
        "input[1].content[0].text",
        "is required",
    ),
    (
        items({"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}),
        "input[0].content[0].refusal",
        "is required",
    ),
    (items({"type": "computer_call"}), "input[0].type", "'computer_call'"),
    (items(CALL | {"call_id": None}), "input[0].call_id", "is required"),
    (items(CALL | {"name": None}), "input[0].name", "is required"),
    (items(CALL | {"arguments": None}), "input[0].arguments", "is required"),
    (items(CALL | {"arguments": {}}), "input[0].arguments", "expected str"),
    (items(CALL, RESULT | {"output": None}), "input[1].output", "is required"),
    (
        items(CALL, RESULT | {"output": [{"type": "input_file"}]}),
        "input[1].output[0].type",
        "'input_file'",
    ),
    (items(USER, RESULT), "input[1].call_id", "no function_call"),
    (items(RESULT, CALL), "input[0].call_id", "no function_call"),
    (
        items({"type": "reasoning", "summary": [{"type": "x", "text": "a"}]}),
        "input[0].summary[0].type",
        "'x'",
    ),
    (items({"type": "item_reference"}), "input[0].id", "is required"),
    (items(USER | {"id": "a\0b"}), "input[0].id", "match"),
    (items(USER | {"id": "x" * 513}), "input[0].id", "512"),
    (
        items({"type": "custom_tool_call", "call_id": "1", "name": "a"}),
        "input[0].input",
        "is required",
    ),
    (items(SHELL_CALL), "input[0].action", "is required"),
    (items(SHELL_CALL | {"action": deep(400)}), "input[0].action", "nested"),
    (items({"type": "additional_tools"}), "input[0].tools", "is required"),
    (items({"type": "additional_tools", "tools": [TOOL]}), "input", "more than tools"),
    (
        items({"type": "additional_tools", "tools": [TOOL | {"parameters": deep(400)}]}),
        "input[0].tools[0].parameters",
        "nested",
    ),
    ({"instructions": 3}, "instructions", "expected str"),
    ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ({"temperature": 2.1, "stream": True}, "temperature", "<= 2"),
    ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"include": ["everything"]}, "include[0]", "'everything'"),
    ({"include": "logprobs"}, "include", "expected array"),
    ({"metadata": {"a": 1}}, "metadata", "expected str"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "<= 16"),
    ({"metadata": {"a" * 65: ""}}, "metadata", "<= 64"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "<= 512"),
    ({"store": "yes"}, "store", "expected bool"),
    ({"background": True, "store": False}, "background", "store: false"),
    ({OPTIONS: {}}, OPTIONS, "stream: true"),
    ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode", "'never'"),
    ({"prompt_cache_retention": "1y"}, "prompt_cache_retention", "is not implemented"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "is not implemented"),
    ({"return_token_ids": True}, "return_token_ids", "is not implemented"),
    ({"max_tokens": 5}, "max_tokens", "is not implemented"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge'"),
    ({"reasoning": {"summary": "x"}}, "reasoning.summary", "'x'"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not implemented"),
    ({"text": {"verbosity": "x"}}, "text.verbosity", "'x'"),
    (formatted({}), "text.format.type", "is required"),
    (formatted({"type": "grammar"}), "text.format.type", "'grammar'"),
    (formatted(NAMED_SCHEMA), "text.format.schema", "is required"),
    (formatted({"type": "json_schema", "schema": {}}), "text.format.name", "is required"),
    (formatted(NAMED_SCHEMA | {"schema": []}), "text.format.schema", "expected object"),
    (formatted(NAMED_SCHEMA | {"schema": deep(250)}), "text.format.schema", "nested too deeply"),
    (
        formatted(JSON_OBJECT) | {OUTPUTS: {"regex": "a"}},
        OUTPUTS,
        "cannot be combined with text.format",
    ),
    ({"tools": [{}]}, "tools[0].type", "is required"),
    ({"tools": [TOOL, {"type": "mcp"}]}, "tools[1].type", "'mcp'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name", "{1,128}"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "before it"),
    ({"tools": [TOOL | {"parameters": 3}]}, "tools[0].parameters", "expected object"),
    ({"tools": [TOOL | {"parameters": deep(250)}]}, "tools[0].parameters", "nested"),
    ({"tools": [TOOL] * 129}, "tools", "<= 128"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", "is required"),
    (noting({"type": "grammar"}), "tools[0].format.syntax", "is required"),
    (noting(LARK | {"syntax": "x"}), "tools[0].format.syntax", "'x'"),
    (noting(LARK | {"definition": ""}), "tools[0].format.definition", "empty"),
    ({"tools": [SPACE, SPACE]}, "tools[1].tools[0].name", "before it"),
    (
        {"tools": [SPACE | {"tools": [{"type": "local_shell"}]}]},
        "tools[0].tools[0].type",
        "'local_shell'",
    ),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "is required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
    (choosing("any"), "tool_choice", "'any'"),
    (choosing(3), "tool_choice", "got int"),
    (choosing({"type": "function"}), "tool_choice.name", "required"),
    (choosing({"type": "function", "name": "g"}), "tool_choice.name", "no tool 'g'"),
    (choosing({"type": "custom", "name": "x"}), "tool_choice.name", "no tool 'x'"),
    (choosing({"type": "mcp"}), "tool_choice.type", "'mcp'"),
    ({"tools": [OTHER], "tool_choice": ALLOWED}, "tool_choice.tools[0].name", "no tool 'f'"),
    (
        {"tool_choice": {"type": "function", "name": "g" * 51}},
        "tool_choice.name",
        f"there is no tool {'g' * 50!r}",
    ),
    (choosing(ALLOWED | {"mode": None}), "tool_choice.mode", "got null"),
    (choosing(ALLOWED | {"tools": []}), "tool_choice.tools", "must not be empty"),
    (choosing(ALLOWED | {"tools": [{"type": "mcp"}]}), "tool_choice.tools[0].type", "'mcp'"),
    (choosing(ALLOWED | {"tools": [TOOL] * 129}), "tool_choice.tools", "<= 128"),
]


REFUSED: dict[str, Sequence[tuple[Fields, str | None, str]]] = {
    CHAT: CHATS,
    COMPLETIONS: PROMPTS,
    RESPONSES: ITEMS,
    **WITHOUT_OUTPUT,
}


server = server_fixture(load_chat=FakeGenerator, max_queue_size=8)


@pytest.mark.parametrize(
    ("path", "fields", "param", "reason"),
    [(path, *case) for path, cases in REFUSED.items() for case in cases],
)
def test_error_names_the_invalid_field(
    server: Server, path: str, fields: Fields, param: str | None, reason: str
) -> None:
    answer = post(server, path, VALID[path] | fields)
    assert_refused(answer, param, reason)
    assert (param or "") in answer.json()["error"]["message"]  # clients often show it alone
    assert server.worker_client.queue.pending == 0


# ── accepted ──

ACCEPTED: dict[str, list[Fields]] = {
    CHAT: [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"store": False, "service_tier": "auto", "verbosity": "low"},
        {"store": True, "prediction": {"type": "content", "content": "x"}},
        {"modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "none"},
        {FORMAT: {"type": "text"}, "function_call": "none"},
        {"generation_config": "{}", "whatever": [1], "guided_decoding": None},
        *({"model": name} for name in ("", "dummy", "tgi", "demo")),
        {"n": 1, "stop": []},
        {"tools": [{"function": {"name": "clock"}}]},
        # the empty values of clients that send every field
        {"stop": "", "functions": [], "function_call": "auto", "modalities": [], "samplers": ""},
        {"top_p": 0, "prompt_cache_retention": "24h"},
        {"max_tokens": -1, "min_tokens": 2},
        {"max_completion_tokens": -1},
        {"guided_regex": "a", OUTPUTS: {"regex": "a"}},  # as guidance sends it
    ],
    COMPLETIONS: [{"best_of": 2, "n": 2}, {"best_of": 1, "suffix": None, "n": 1}],
    RESPONSES: [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"service_tier": "auto", "truncation": "disabled", "store": False, "n": 1},
        {OPTIONS: {"include_obfuscation": False}, "stream": True},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"include": get_args(ResponseIncludable)},
        {"reasoning": {"generate_summary": "auto", "mode": "standard", "context": "auto"}},
        {"top_logprobs": 0, "prompt_cache_retention": "in_memory", "return_token_ids": False},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h", "prewarm": True}},
        {"background_options": {"completion_window": "soonest"}},
        {"image": {"context_compression": "auto"}},
        *({"model": name, "whatever": [1]} for name in ("", "tgi")),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields"), [(path, fields) for path, cases in ACCEPTED.items() for fields in cases]
)
def test_values_that_change_nothing_are_accepted(server: Server, path: str, fields: Fields) -> None:
    answer = post(server, path, VALID[path] | fields)
    assert answer.status_code == 200, answer.text
    if "model" in fields:
        assert answer.json()["model"] == "demo"


@pytest.mark.parametrize(
    ("parameters", "kind", "ignored"),
    [
        (ChatParameters, ChatRequest, set()),
        (CompletionParameters, CompletionRequest, set()),
        (ResponseParameters, ResponseRequest, set()),
    ],
)
def test_every_parameter_of_the_api_is_implemented_accepted_or_refused(
    parameters: Any, kind: Any, ignored: set[str]
) -> None:
    known = set(get_type_hints(parameters))
    assert "stream" in known
    assert known - known_fields(kind) == ignored
