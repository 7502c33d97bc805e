"""What holds the answers to a request to what it asks: calls, a format, a budget of thoughts.

    calls, constraint, thinking_tokens → grammars, compiled → Plan, which a guide follows

For requests that ask for any of it; in pool threads, like input_processor.py. What a checkpoint's
template
shows of calls proves itself here, by its grammar.

What the generation engine does in pool threads: from requests to token ids, sampling parameters,
limits, and what answers are parsed by; and from ids to text. What holds them: input_processor.py.

    payload → text (chat_template/template.py) → ids → Prepared, for output.py

The tokenizer never truncates or pads, so threads may share it; lengths are checked here.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.generation.decisions import Decisions
from worker.generation.output import PreparedPrompt, make_choices
from worker.grammar.compiler import Grammar, Grammars
from worker.grammar.constraints import OutputConstraints
from worker.grammar.lark import either, unusable
from worker.grammar.tool_calls import accepts, calls_grammar
from worker.messages.decisions import DecisionInput
from worker.messages.generation import Calls, Chat, GenerationInput, Sampling, Stopping
from worker.messages.protocol import Batching
from worker.model.language_model import LanguageModel
from worker.model.loading import model_info
from worker.model.sampler import SamplingParams
from worker.text.chat_template.inference import ARGUMENTS, SWITCHES, TOOLS
from worker.text.chat_template.template import ChatTemplate
from worker.text.detokenizer import Vocabulary
from worker.text.output_format import CONTENT, OutputFormat
from worker.text.parser import OutputParser
from worker.text.tool_call_format import ToolCallFormat
from worker.vision.image_preprocessor import ImagePreprocessor
from worker.vision.multimodal_prompt import MultimodalPrompt


class ConstraintBuilder:
    """By the forms of a model's template. `vocab_size`: the model's; `ends`: tokens that end it."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        ends: Sequence[int],
    ) -> None:
        self.grammars = Grammars(tokenizer, vocab_size, ends)
        self._template = template

    def of(self, request: GenerationInput, begun: str) -> OutputConstraints | None:
        """`begun`: what the prompt has already written of the answer. InvalidInput with the reason;
        Pending until the grammars that it takes are compiled."""
        calls, constraint, budget = request.calls, request.constraint, request.thinking_tokens
        form, call_form = self._template.forms(calls)
        answer: Grammar | None = None  # holds the answer as a whole
        call: Grammar | None = None  # holds a call that the model begins by itself
        if calls and call_form:
            answer, call = self._grammars_of_calls(request, calls, form, call_form)
        elif constraint:
            chat = isinstance(request.prompt, Chat)
            answer = self.grammars.matcher(constraint, self._before(form) if chat else "")
        single = calls is not None and not calls.parallel
        if not (answer or call or single or budget is not None):
            return None
        opens = answer and shall_think(request) and not form.ends_reasoning(begun)
        return OutputConstraints(
            tokenizer=self.grammars.tokenizer("tools") if answer or call else None,
            answer=answer,
            document=answer is not None and not (calls and calls.required),
            call=call,
            may_think=self._template.opens_thoughts if opens else (),
            budget=budget,
            close=self._template.end_of_thoughts(form) if budget is not None else (),
            single_call=single,
        )

    def _grammars_of_calls(
        self, request: GenerationInput, calls: Calls, answers: OutputFormat, form: ToolCallFormat
    ) -> tuple[Grammar | None, Grammar | None]:
        """Of the answer as a whole, or of a call that the model begins by itself."""
        constraint, tools, grammars = request.constraint, request.called_tools, self.grammars
        begun = not (calls.required or constraint)
        several = calls.parallel and (not begun or form.shares_delimiters)
        starts = [answers.message_start] if answers.message_start else []
        try:
            written = calls_grammar(form, tools, several, grammars.quoted, starts, begun)
            compiled = grammars.compiled(written, "tools")
        except InvalidInput:
            if not calls.required and not constraint:
                return None, None  # what the model makes of it is not constrained
            assert isinstance(request.prompt, Chat)
            for tool in tools:  # which of them is it?
                param = f"tools[{request.prompt.tools.index(tool)}]"
                try:
                    alone = calls_grammar(form, [tool], False, grammars.quoted)
                except InvalidInput as error:
                    raise unusable(str(error), param) from None
                grammars.check(alone, param)
            raise
        if calls.required:
            return compiled, None
        if constraint is None:
            return None, compiled
        if answers.undelimited_calls:
            both = "this model's calls cannot be told from JSON: leave out either this or tools"
            raise InvalidInput(f"{constraint.param}: {both}", constraint.param)
        whole = either(constraint, written, self._before(answers))
        return grammars.compiled(whole, constraint.param), None

    def _before(self, form: OutputFormat) -> str:
        """What may stand before content, in the notation."""
        headers = (form.message_start, form.content and form.content[0])
        return "".join(f"({self.grammars.quoted(text)})? " for text in headers if text)


def proved(template: ChatTemplate) -> ChatTemplate:
    """The grammar of its calls takes those that it writes; else their form is not used. Where it
    writes Python without its quotes, there is nothing to compare."""
    form = template.answers.tool_calls
    if form and (form.arguments.style != "python" or form.arguments.quotes):
        written = [text for text, calls in template.examples if calls[0][1] == ARGUMENTS]
        if not all(accepts(form, TOOLS, text) for text in written):
            template.refuse_calls("their grammar does not take what the template writes")
    return template


def shall_think(request: GenerationInput) -> bool:
    """Whether thinking is asked for: else an answer with a grammar begins with it."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return False
    switched = any(chat.template_kwargs.get(switch) for switch in SWITCHES)
    return switched or chat.effort not in (None, "none") or request.thinking_tokens is not None


# What a request may leave open: it is as the checkpoint's generation_config has it, or else as the
# OpenAI API does.
LEFT_OPEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class InputProcessor:
    """`max_model_len`: tokens in all. `why`: why the model does not run on paged memory, if so."""

    def __init__(
        self,
        language: LanguageModel,
        max_model_len: int,
        why: str = "",
        image_preprocessor: ImagePreprocessor | None = None,
    ) -> None:
        tokenizer, defaults, vocab_size = language.tokenizer, language.defaults, language.vocab_size
        self.language = language
        self.image_preprocessor = image_preprocessor
        self.max_model_len = max_model_len
        if image_preprocessor:
            image_preprocessor.processor.max_tokens = max_model_len
        self.no_images = "" if image_preprocessor else language.no_images
        batching: Batching = "static" if why else "continuous"
        model = language.model
        self.info = model_info(
            "text-generation", language.name, model, language.parameters, batching, why
        )
        self.eos_ids = tuple(id_ for id_ in end_ids(defaults, tokenizer) if id_ < vocab_size)
        self.defaults = default_sampling(defaults)
        self.template = proved(ChatTemplate(tokenizer))
        self.plans = ConstraintBuilder(self.template, tokenizer, vocab_size, self.eos_ids)
        self.vocabulary = Vocabulary(tokenizer, self.template.answers.keeps_special)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.decisions = Decisions(tokenizer, self.template, max_model_len, self.longest_token)

    def prepare(self, item: WorkItem) -> None:
        if isinstance(item.payload, DecisionInput):
            self.decisions.prepare(item)
            return
        prepared = self.prepared(item.payload, item.cache_namespace)
        item.prepared = make_choices(item, prepared, self.vocabulary)
        item.tokens = len(prepared.ids)

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, Chat) and prompt.images and self.image_preprocessor:
            return self.image_preprocessor.token_ids(self.template.render(prompt), prompt.images)
        return self._encoded(prompt, add_special_tokens, "messages")[1]

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids, skip_special=False)

    def token(self, token_id: int) -> str:
        self._check_ids([token_id], "tokens")
        return self.vocabulary.token(token_id)[0]

    def call_id(self, name: str, index: int) -> str:
        return self.template.call_id(name, index)

    def close(self) -> None:
        self.plans.grammars.close()
        if self.image_preprocessor:
            self.image_preprocessor.close()

    # ── a request ──

    def prepared(self, request: GenerationInput, cache_namespace: bytes = b"") -> PreparedPrompt:
        """InvalidInput says what cannot be served."""
        text, ids, multimodal = self._prompt(request, cache_namespace)
        ends: dict[int, int | None] = {id_: id_ for id_ in request.stopping.stop_token_ids}
        self._check_ids(request.stopping.stop_token_ids, "stop_token_ids")
        if not request.stopping.ignore_eos:
            ends |= dict.fromkeys(self.eos_ids)
        if request.stopping.min_tokens and len(ends) == self.language.vocab_size:
            raise InvalidInput.at("min_tokens", "every token of this model ends the answer")
        echoed = request.sampling.logprobs if request.echo else None
        return PreparedPrompt(
            ids,
            self._params(request.sampling, request.stopping, tuple(ends)),
            self._max_tokens(len(ids), request),
            ends,
            echoed if request.prompt_logprobs is None else request.prompt_logprobs,
            *self._answer(request, text),
            multimodal=multimodal,
        )

    def _answer(
        self, request: GenerationInput, text: str
    ) -> tuple[OutputParser | None, OutputConstraints | None]:
        """What reads the answers to a prompt, and what holds them to what is asked."""
        chats = isinstance(request.prompt, Chat)
        begun = begun_answer(self.template, request, text) if chats else ""
        asks = request.calls or request.constraint or request.thinking_tokens is not None
        plan = self.plans.of(request, begun) if asks else None
        document = plan is not None and plan.document
        return answer_parser(self.template, request, begun, document) if chats else None, plan

    def _prompt(
        self, request: GenerationInput, cache_namespace: bytes
    ) -> tuple[str, list[int], MultimodalPrompt | None]:
        """The prompt's text, if it is one, its tokens, and what of them is pictures."""
        multimodal = None
        if isinstance(request.prompt, Chat) and request.prompt.images:
            text, multimodal = self._multimodal_prompt(request.prompt, cache_namespace)
            ids = [*multimodal.ids]
        elif isinstance(request.prompt, tuple):
            self._check_ids(request.prompt, request.param)
            text, ids = "", list(request.prompt)
        else:
            text, ids = self._encoded(request.prompt, True, request.param)
        if not ids:
            raise InvalidInput("the prompt has no tokens", request.param)
        if len(ids) >= self.max_model_len + (request.stopping.max_tokens == 0):
            raise InvalidInput(
                f"the prompt has {len(ids)} tokens; this model's context holds "
                f"{self.max_model_len}, with the answer",
                request.param,
            )
        return text, ids, multimodal

    def _multimodal_prompt(
        self, chat: Chat, cache_namespace: bytes
    ) -> tuple[str, MultimodalPrompt]:
        """Its text, and its pictures with their tokens."""
        image_preprocessor = self.image_preprocessor
        if image_preprocessor is None:
            raise InvalidInput(self.no_images, chat.images[0].param)
        images = [replace(image, cache_namespace=cache_namespace) for image in chat.images]
        with image_preprocessor.admit(images):
            text = self.template.render(chat)
            self._check_length(text, "messages")
            output = image_preprocessor.process(text, images)
        recompute = partial(image_preprocessor.recompute, text, images)
        return text, MultimodalPrompt.from_output(output, recompute)

    def _encoded(self, prompt: Chat | str, special: bool, param: str) -> tuple[str, list[int]]:
        """Text and ids. `special`: the tokenizer adds its own; templates write them."""
        if isinstance(prompt, Chat):
            prompt, special = self.template.render(prompt), False
        self._check_length(prompt, param)
        call: Any = self.language.tokenizer
        return prompt, call(prompt, add_special_tokens=special, verbose=False)["input_ids"]

    def _check_length(self, prompt: str, param: str) -> None:
        if len(prompt) > self.max_model_len * self.longest_token:
            raise InvalidInput(
                f"the prompt has more than {len(prompt) // self.longest_token} tokens; this "
                f"model's context holds {self.max_model_len}",
                param,
            )

    def _check_ids(self, ids: Any, param: str) -> None:
        for id_ in ids:
            if not 0 <= id_ < self.language.vocab_size:
                raise InvalidInput(f"{id_} is no token id of this model", param)

    def _max_tokens(self, prompt: int, request: GenerationInput) -> int:
        stopping, room = request.stopping, self.max_model_len - prompt
        default = room if stopping.default_tokens is None else min(room, stopping.default_tokens)
        most = default if stopping.max_tokens is None else stopping.max_tokens
        for name, asked in ((stopping.param, most), ("min_tokens", stopping.min_tokens)):
            if asked > room:
                raise InvalidInput(
                    f"{name} is {asked} and the prompt has {prompt} tokens; this model's context "
                    f"holds {self.max_model_len} in all",
                    name,
                )
        return most

    def _params(self, asked: Sampling, stopping: Stopping, ends: tuple[int, ...]) -> SamplingParams:
        self._check_ids(asked.logit_bias, "logit_bias")
        chosen = {name: getattr(asked, name) for name in LEFT_OPEN}
        return replace(
            self.defaults,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=tuple(asked.logit_bias.items()),
            seed=secrets.randbits(64) if asked.seed is None else asked.seed,
            logprobs=asked.logprobs,
            min_tokens=stopping.min_tokens,
            end_ids=ends if stopping.min_tokens else (),
            **{name: value for name, value in chosen.items() if value is not None},
        )


def begun_answer(template: ChatTemplate, request: GenerationInput, text: str) -> str:
    """What a chat's prompt has already written of the answer."""
    chat = request.prompt
    assert isinstance(chat, Chat)
    if chat.continue_final_message:
        content = chat.messages[-1].get("content")
        return content if isinstance(content, str) else ""
    form, _ = template.forms(request.calls)
    return form.reasoning_at_end(text) if chat.add_generation_prompt else ""


def answer_parser(
    template: ChatTemplate, request: GenerationInput, begun: str, document: bool = False
) -> OutputParser | None:
    """What reads the answers to a chat; None: they are nothing but text."""
    form, _ = template.forms(request.calls)
    if form.initial_phase == CONTENT and not form.delimiters and not request.calls:
        return None
    tools = request.called_tools if request.calls else ()
    return OutputParser(form, begun, bool(request.calls), tools, document)


def end_ids(defaults: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All of the checkpoint's end-of-sequence tokens."""
    ids = getattr(defaults, "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def default_sampling(defaults: GenerationConfig) -> SamplingParams:
    """What the checkpoint says; `do_sample: false` is greedy."""
    given = {name: getattr(defaults, name, None) for name in LEFT_OPEN}
    if getattr(defaults, "do_sample", None) is False:
        given["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
