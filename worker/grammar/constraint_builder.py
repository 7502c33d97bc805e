"""Builds the constraints of a request: tool calls, an output format, a reasoning budget.

Runs in pool threads. Grammars are compiled in a thread of their own (compiler.py).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.grammar.compiler import GrammarCompiler, compiling_for
from worker.grammar.constraints import OutputConstraints
from worker.grammar.lark import (
    content_or_calls,
    schema_rule,
    unusable_grammar,
    without_annotations,
)
from worker.grammar.tool_calls import Tool, accepts, text_or_calls, tool_calls_grammar
from worker.messages.generation import Chat, GenerationInput, ToolCallPolicy
from worker.text.chat_template.inference import ARGUMENTS, TOOLS
from worker.text.chat_template.template import ChatTemplate
from worker.text.output_format import OutputFormat
from worker.text.tool_call_format import ToolCallFormat


class ConstraintBuilder:
    """Compiles the constraints of requests to one model. `vocab_size`: the model's;
    `eos_token_ids`: the tokens that end a response."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self._template = template

    def set_client(self, client: Hashable) -> None:
        """Name the client of the grammars that this thread compiles next."""
        compiling_for.set(client)

    def build(
        self, request: GenerationInput, output_format: OutputFormat, prefix: str
    ) -> OutputConstraints | None:
        """Return the constraints of a request; None if its responses may be anything. `prefix`:
        what the prompt already contains of the response.

        Raise InvalidInput where a constraint cannot be compiled, Pending until it is."""
        calls, budget = request.tool_policy, request.thinking_tokens
        if request.thinking_is_optional and output_format.reasoning is None:
            budget = None
        single = calls is not None and not calls.parallel
        constraints = OutputConstraints()
        if calls and output_format.tool_calls:
            constraints = self._constrain_calls(
                request, calls, output_format, output_format.tool_calls
            )
        elif strict := request.strict_tools:
            reason = "cannot be applied: the format of this model's tool calls is not known"
            raise InvalidInput.at(_param_of(request, strict[0], "strict"), reason)
        elif request.constraint:
            headers = self._headers(output_format) if isinstance(request.prompt, Chat) else ""
            content = self.grammars.compile_constraint(request.constraint, headers)
            constraints = OutputConstraints(content=content, is_document=True)
        has_grammar = constraints.content or constraints.call
        if not (has_grammar or single or budget is not None):
            return None
        # without reasoning, a response with a grammar starts with what the grammar allows
        opens = (
            constraints.content
            and isinstance(chat := request.prompt, Chat)
            and (request.thinking_tokens is not None or self._template.reasoning_requested(chat))
            and not output_format.ends_reasoning(prefix)
        )
        return replace(
            constraints,
            tokenizer=self.grammars.tokenizer("tools") if has_grammar else None,
            undelimited_calls=output_format.undelimited_calls,
            reasoning_start=self._template.reasoning_start if opens else (),
            reasoning_end=self._template.reasoning_end(output_format) if budget is not None else (),
            reasoning_budget=budget,
            single_call=single,
        )

    def _constrain_calls(
        self,
        request: GenerationInput,
        calls: ToolCallPolicy,
        output_format: OutputFormat,
        call_format: ToolCallFormat,
    ) -> OutputConstraints:
        """Return the grammar of the whole response, or of a call that the model starts itself; no
        grammar where the tools of optional calls have none."""
        constraint, tools, grammars = request.constraint, request.called_tools, self.grammars
        # In schemas of other functions, keywords that cannot be applied have no effect.
        self._check_tools(request, _strict_schema)
        optional, strict = not (calls.required or constraint), request.strict_tools
        several = calls.parallel and (not optional or call_format.shares_delimiters)
        starts = [output_format.message_start] if output_format.message_start else []
        inputs = calls.input_constraints
        try:
            grammar = tool_calls_grammar(
                call_format, tools, several, grammars.quote, starts, optional, inputs
            )
            compiled = grammars.compile(grammar, "tools")
            if optional and strict:
                beginnings = call_format.beginnings(calls.names)
                text = text_or_calls(beginnings, grammar, grammars.special_ids)
                text_or_call = grammars.compile(text, "tools")
                return OutputConstraints(
                    call=compiled, text_or_call=text_or_call, beginnings=tuple(beginnings)
                )
        except InvalidInput:
            if optional and not strict:
                return OutputConstraints()
            self._check_tools(
                request,
                lambda tool: tool_calls_grammar(
                    call_format, [tool], False, grammars.quote, inputs=inputs
                ),
            )
            raise
        if calls.required:
            return OutputConstraints(content=compiled)
        if constraint is None:
            return OutputConstraints(call=compiled)
        if output_format.undelimited_calls:
            reason = "this model writes tool calls as plain JSON: send either this or tools"
            raise InvalidInput.at(constraint.param, reason)
        whole = content_or_calls(constraint, grammar, self._headers(output_format))
        compiled = grammars.compile(whole, constraint.param)
        return OutputConstraints(content=compiled, is_document=True)

    def _check_tools(
        self, request: GenerationInput, grammar_of: Callable[[Tool], str | None]
    ) -> None:
        """Raise InvalidInput that names the tool whose grammar cannot be compiled."""
        for tool in request.called_tools:
            param = _param_of(request, tool["function"]["name"])
            try:
                grammar = grammar_of(tool)
            except RecursionError:
                raise unusable_grammar("it is nested too deeply", param) from None
            except InvalidInput as error:
                raise error if error.param else unusable_grammar(str(error), param) from None
            if grammar:
                self.grammars.check(grammar, param)

    def _headers(self, output_format: OutputFormat) -> str:
        """Return a Lark rule for the delimiters that may precede content."""
        headers = (output_format.message_start, output_format.content and output_format.content[0])
        return "".join(f"({self.grammars.quote(text)})? " for text in headers if text)


def _strict_schema(tool: Tool) -> str | None:
    """Return the grammar of a strict function's schema, with all of its keywords."""
    function = tool["function"]
    if function.get("strict") is not True or not function.get("parameters"):
        return None
    schema = without_annotations(function["parameters"], is_strict=True)
    return f"start: {schema_rule(schema, {})}"


def _param_of(request: GenerationInput, name: str, field: str = "") -> str:
    """Return the field of a tool that errors name: the grammar of its input, or the function."""
    assert isinstance(request.prompt, Chat)
    assert request.tool_policy
    if constraint := request.tool_policy.input_constraints.get(name):
        return constraint.param
    names = [tool["function"]["name"] for tool in request.prompt.tools]
    return f"tools[{names.index(name)}]" + (f".{field}" if field else "")


def verify_tool_call_format(template: ChatTemplate) -> ChatTemplate:
    """Check that the grammar of the template's tool calls accepts those that the template writes;
    else have it use the plain format. Python calls without quotes cannot be compared."""
    call_format = template.output_format.tool_calls
    if call_format and (call_format.arguments.style != "python" or call_format.arguments.quotes):
        texts = [text for text, calls in template.examples if calls[0][1] == ARGUMENTS]
        # Some templates do not end a section of one call.
        ends = "", call_format.section[1]
        if not all(any(accepts(call_format, TOOLS, text + end) for end in ends) for text in texts):
            template.disable_tool_call_format(
                "their grammar does not accept the calls that the template writes"
            )
    return template
