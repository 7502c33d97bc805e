"""Reads what a model has written as the server reads it while it is written.

    text → tokens → SequenceOutput (detokenizer, parser) → content, reasoning, calls

For scripts/template and its tests: no model runs, and nothing is held to a grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.request_queue import WorkItem
from worker.generation.input_processor import (
    response_parser,
    response_prefix,
    verify_tool_call_format,
)
from worker.generation.output import PreparedPrompt, create_outputs
from worker.messages.deltas import Delta
from worker.messages.generation import Calls, Chat, GenerationInput
from worker.model.sampler import SampledToken, SamplingParams
from worker.text.chat_template.template import ChatTemplate
from worker.text.detokenizer import Vocabulary

END = -1  # stands for the token that ends an answer, which its text does not show


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # names and arguments


class AnswerReader:
    """`end_ids`: tokens that end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
        self.template = verify_tool_call_format(ChatTemplate(tokenizer))
        self.tokenizer = tokenizer
        self._ends = dict.fromkeys((*end_ids, END))
        self._vocabulary = Vocabulary(tokenizer, self.template.answers.keeps_special)

    def read(
        self, output: str, tools: Sequence[dict[str, Any]] = (), thinking: bool | None = None
    ) -> ReadAnswer:
        """An answer to "?"; InvalidInput where the template refuses that. `tools`: functions
        offered, as in the API. `thinking`: `enable_thinking`, unless None."""
        request = asking(tools, thinking)
        assert isinstance(request.prompt, Chat)
        prompt = self.template.render(request.prompt, request.calls)
        ids = self._encoded(output)
        prepared = PreparedPrompt(
            self._encoded(prompt.text),
            SamplingParams(),
            len(ids) + 1,
            self._ends,
            parser=response_parser(
                request, prompt.output_format, response_prefix(request.prompt, prompt)
            ),
        )
        item = WorkItem(request, float("inf"), 0.0)
        [answer] = create_outputs(item, prepared, self._vocabulary)
        for id in (*ids, END):
            if not answer.finished:
                answer.push(SampledToken(id, None, ()))
        return told(answer.take_delta())

    def _encoded(self, text: str) -> list[int]:
        encode: Any = self.tokenizer
        ids: list[int] = encode(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def told(delta: Delta) -> ReadAnswer:
    """A whole answer's parts."""
    reasoning = "".join(part.text for part in delta.parts if part.kind == "reasoning")
    calls = [(part.name or "", part.text) for part in delta.parts if part.kind == "call"]
    return ReadAnswer(delta.text, reasoning, calls)


def asking(tools: Sequence[dict[str, Any]], thinking: bool | None) -> GenerationInput:
    """The request that an answer is read for: it may call all tools that are offered."""
    variables = {} if thinking is None else {"enable_thinking": thinking}
    chat = Chat(({"role": "user", "content": "?"},), tuple(tools), variables)
    names = tuple(tool["function"]["name"] for tool in tools)
    return GenerationInput(chat, calls=Calls(names) if names else None)
