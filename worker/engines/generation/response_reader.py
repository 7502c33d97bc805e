"""Parses a response's text as the server parses it while the model writes it.

    text → tokens → SequenceOutput (detokenizer, parser) → content, reasoning, tool calls

For the template tool (server/commands/template.py): no model runs, and no grammar constrains the
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.request_queue import WorkItem
from worker.engines.generation.input_processor import (
    response_parser,
    response_prefix,
)
from worker.engines.generation.output import PreparedPrompt, create_outputs
from worker.grammar.constraint_builder import verify_tool_call_format
from worker.messages.deltas import Delta
from worker.messages.generation import Chat, GenerationInput, ToolCallPolicy
from worker.model.sampler import SampledToken, SamplingParams
from worker.text.chat_template.template import ChatTemplate
from worker.text.detokenizer import Vocabulary

END = -1  # stands for the token that ends a response, which its text does not contain


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # function names and arguments


class ResponseReader:
    """`stop_token_ids`: tokens that end a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        self.template = verify_tool_call_format(ChatTemplate(tokenizer))
        self.tokenizer = tokenizer
        self._stop_token_ids = dict.fromkeys((*stop_token_ids, END))
        self._vocabulary = Vocabulary(tokenizer, self.template.output_format.keeps_special)

    def read(
        self, text: str, tools: Sequence[dict[str, Any]] = (), thinking: bool | None = None
    ) -> ParsedResponse:
        """Return the parts of a response to the message "?". `tools`: functions offered, as in
        the API. `thinking`: the template's `enable_thinking`, unless None.

        Raise InvalidInput if the template refuses the message."""
        request = sample_request(tools, thinking)
        assert isinstance(request.prompt, Chat)
        prompt = self.template.render(request.prompt, request.tool_policy)
        prefix = response_prefix(request.prompt, prompt)
        ids = self._encode(text)
        prepared = PreparedPrompt(
            self._encode(prompt.text),
            SamplingParams(),
            len(ids) + 1,
            self._stop_token_ids,
            parser=response_parser(request, prompt.output_format, prefix),
        )
        item = WorkItem(request, float("inf"), 0.0)
        [output] = create_outputs(item, request, prepared, self._vocabulary)
        for token in (*ids, END):
            if not output.finished:
                output.push(SampledToken(token, None, ()))
        return parsed_response(output.take_delta())

    def _encode(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)


def parsed_response(delta: Delta) -> ParsedResponse:
    reasoning = "".join(part.text for part in delta.parts if part.kind == "reasoning")
    calls = [(part.name or "", part.text) for part in delta.parts if part.kind == "call"]
    return ParsedResponse(delta.text, reasoning, calls)


def sample_request(tools: Sequence[dict[str, Any]], thinking: bool | None) -> GenerationInput:
    """Return a request whose response may call all of the tools."""
    variables = {} if thinking is None else {"enable_thinking": thinking}
    chat = Chat(({"role": "user", "content": "?"},), tuple(tools), variables)
    names = tuple(tool["function"]["name"] for tool in tools)
    return GenerationInput(chat, tool_policy=ToolCallPolicy(names) if names else None)
