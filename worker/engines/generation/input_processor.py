"""Prepares requests for the generation engine: token ids, sampling parameters, limits, constraints.

    payload → text (chat_template/template.py) → token ids → PreparedPrompt, for output.py
    tool calls, constraint, reasoning budget → grammars, compiled → OutputConstraints

Runs in pool threads. The tokenizer never truncates or pads, so that threads may share it; lengths
are checked here. No model runs here, and grammars are compiled in a thread of their own
(grammar/compiler.py).
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import GenerationConfig, PreTrainedTokenizerBase

from batching.errors import ContextExceeded, InvalidInput, NotReady
from batching.request_queue import WorkItem
from batching.sequence import TokenIds
from worker.engines.generation.output import (
    PreparedPrompt,
    PromptOutput,
    SequenceOutput,
    create_outputs,
)
from worker.messages.decisions import DecisionInput
from worker.messages.generation import (
    SAMPLING_FIELDS,
    Chat,
    GenerationInput,
    MediaInput,
    SamplingDefaults,
    transcription_chat,
)
from worker.messages.protocol import Batching, IsWanted
from worker.model.generation_config import MAX_SEQUENCE, with_request_fields
from worker.model.language_model import LanguageModel
from worker.model.loading import model_info
from worker.model.logits_processors import CheckpointProcessors
from worker.model.sampler import SamplingParams
from worker.text.chat_template.template import ChatTemplate, RenderedPrompt
from worker.text.chat_template.truncation import without_oldest
from worker.text.detokenizer import Vocabulary
from worker.text.long_text import TokenLimit, tokenizing
from worker.text.output_format import CONTENT, OutputFormat
from worker.text.parser import OutputParser

if TYPE_CHECKING:
    from worker.grammar.constraints import OutputConstraints
    from worker.vision.media_preprocessor import MediaPreprocessor
    from worker.vision.multimodal_prompt import MultimodalPrompt

MAX_PROMPT_CHARS = 1 << 23
MAX_TOKEN_CHARS = 64  # on average, in the text that is kept of a truncated prompt

Output = SequenceOutput | PromptOutput
GenerationItem = WorkItem[GenerationInput | DecisionInput, Sequence[Output]]


class EncodedPrompt(NamedTuple):
    ids: TokenIds
    multimodal: "MultimodalPrompt | None" = None  # None: the prompt has no media


class InputProcessor:
    """Prepares requests for one model. `max_model_len`: tokens of prompt and output together.
    `unpaged_reason`: why the model does not run on paged memory; empty if it does."""

    def __init__(
        self,
        language: LanguageModel,
        max_model_len: int,
        unpaged_reason: str = "",
        media_preprocessor: "MediaPreprocessor | None" = None,
    ) -> None:
        from worker.engines.generation.decisions import Decisions
        from worker.grammar.constraint_builder import ConstraintBuilder, verify_tool_call_format

        tokenizer, vocab_size = language.tokenizer, language.vocab_size
        defaults: Any = language.defaults  # its fields are not annotated
        self.media_preprocessor = media_preprocessor
        self.max_model_len = max_model_len
        self.refused_media = language.refused_media
        self.transcription_chat = transcription_chat
        batching: Batching = "static" if unpaged_reason else "continuous"
        self.info = model_info(
            "text-generation",
            language.name,
            language.model,
            language.parameters,
            batching,
            unpaged_reason,
        )
        self._tokenizer: Any = tokenizer  # calls of it are not annotated
        self.hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_token_ids = self._ends(defaults)
        self._default_params = params = default_sampling(defaults)
        values = {name: getattr(params, name) for name in SAMPLING_FIELDS}
        sampling = (getattr(defaults, name) for name in ("do_sample", *SAMPLING_FIELDS))
        self.defaults = SamplingDefaults(**values, configured=any(v is not None for v in sampling))
        self._checkpoint, self._device = defaults, language.device
        self._processors = self._config_processors(defaults, self.eos_token_ids)
        template = ChatTemplate(tokenizer, language.template_defaults, language.reasoning)
        self.template = verify_tool_call_format(template)
        if media_preprocessor:
            media_preprocessor.processor.max_tokens = max_model_len
            self.transcription_chat = media_preprocessor.processor.transcription_chat
            self.template.omits_video_sound = media_preprocessor.processor.interleaves_sound
        self._default_seed = language.default_seed
        self.info = replace(self.info, has_chat_template=bool(self.template.source))
        self.constraint_builder = ConstraintBuilder(
            self.template, tokenizer, vocab_size, self.eos_token_ids
        )
        self.vocabulary = Vocabulary(tokenizer, self.template.output_format.keeps_special)
        self._token_limit = TokenLimit(tokenizer, partial(self._encode, add_special_tokens=False))
        limits = max_model_len, self._token_limit
        config = language.decision_config
        self.decisions = Decisions(tokenizer, self.template, *limits, config, media_preprocessor)

    def prepare(self, item: GenerationItem) -> None:
        """Fill in `item.prepared`, an output for each choice or question, and `item.tokens`."""
        request = item.payload
        if request.adapter and (reason := request.adapter.unusable_reason):
            raise NotReady(reason, 5)
        if isinstance(request, DecisionInput):
            self._prepare_decisions(item, request)
            return
        if request.tool_policy or request.constraint:
            self.constraint_builder.set_client(item.owner.client)
        if request.drops_oldest:
            request = self._without_oldest(request)
        prepared = self.prepare_prompt(request, lambda: item.open)
        item.prepared = create_outputs(item, request, prepared, self.vocabulary)
        item.tokens = len(prepared.ids)

    def _without_oldest(self, request: GenerationInput) -> GenerationInput:
        """Return a request without the oldest messages, if they do not fit into the context. One
        with media is not changed: each attempt would process them."""
        assert isinstance(request.prompt, Chat)
        if request.prompt.media:
            return request
        room = max(1, self.max_model_len - (request.stopping.max_tokens or 1))

        def fits(chat: Chat) -> bool:
            try:
                return len(self.encode(chat)) <= room
            except InvalidInput:  # it is too long, or the template refuses its beginning
                return False

        if fits(request.prompt) or not (chat := without_oldest(request.prompt, fits)):
            return request
        return replace(request, prompt=chat)

    def _prepare_decisions(self, item: GenerationItem, request: DecisionInput) -> None:
        if request.assets and (reason := self.refused_media.get("image")):
            raise InvalidInput.at("assets", reason)
        try:
            item.prepared = self.decisions.create_outputs(item, request)
        except RecursionError:
            raise InvalidInput.at(request.param, "or a question is nested too deeply") from None
        except InvalidInput as error:
            if error.param == "messages":
                error.param = request.param
            raise

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        """Return a prompt's token ids. Raises InvalidInput if the chat template refuses it."""
        if not isinstance(prompt, Chat):
            return self._tokenize(prompt, add_special_tokens, "messages")
        text = self.render(prompt)
        if prompt.media and self.media_preprocessor:
            return self.media_preprocessor.token_ids(text, prompt.media)
        return self._tokenize(text, False, "messages")

    def render(self, chat: Chat) -> str:
        text = self.template.render(chat).text
        self._check_length(text, "messages")
        return text

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.vocabulary.decode(ids, skip_special)

    def token(self, token_id: int) -> str:
        """Return the text of one token. Raises InvalidInput if the id does not exist."""
        self._check_ids([token_id], "tokens")
        return self.vocabulary.token(token_id)[0]

    def close(self) -> None:
        self.constraint_builder.grammars.close()
        if self.media_preprocessor:
            self.media_preprocessor.close()

    # ── a request ──

    def prepare_prompt(
        self, request: GenerationInput, is_wanted: IsWanted = lambda: True
    ) -> PreparedPrompt:
        """Raise InvalidInput where the request cannot be served, Pending while its grammars are
        compiled, ClientGone once not `is_wanted()`."""
        rendered = self._render(request)
        config, ends = self._checkpoint, self.eos_token_ids
        processors = self._processors
        if request.config or request.sampling.bad_words:
            config = self._request_config(request)
            ends = self._ends(config)
            processors = self._config_processors(config, ends)
        # before the prompt: media would be decoded again after each Pending
        parser, constraints = self._response(request, rendered)
        if constraints and request.sampling.allowed_token_ids:
            reason = "cannot be combined with a constraint on the output"
            raise InvalidInput.at("allowed_token_ids", reason)
        prompt = self._encode_prompt(request, rendered, is_wanted)
        stopping = request.stopping
        stop_token_ids: dict[int, int | None] = {id_: id_ for id_ in stopping.stop_token_ids}
        self._check_ids(stopping.stop_token_ids, "stop_token_ids")
        if not stopping.ignore_eos:  # the tokenizer's own gives no reason, as in vLLM
            first = self._tokenizer.eos_token_id
            stop_token_ids |= {id_: None if id_ == first else id_ for id_ in ends}
        echoed = request.sampling.logprobs if request.echo else None
        max_tokens = self._max_tokens(len(prompt.ids), request, config)
        params = self._sampling_params(request, config, ends, len(prompt.ids))
        if processors:
            params = processors.extend(params, prompt.ids, max_tokens, stopping.ignore_eos)
        strings = config.stop_strings or ()
        history_len = 0
        if rendered and request.truncate is None:
            history_len = self.template.history_len(rendered, prompt.ids)
        return PreparedPrompt(
            prompt.ids,
            params,
            max_tokens,
            stop_token_ids,
            stop=(strings,) if isinstance(strings, str) else tuple(strings),
            prompt_logprobs=echoed if request.prompt_logprobs is None else request.prompt_logprobs,
            parser=parser,
            constraints=constraints,
            multimodal=prompt.multimodal,
            history_len=history_len,
        )

    def _ends(self, config: GenerationConfig) -> tuple[int, ...]:
        return tuple(t for t in eos_token_ids(config, self._tokenizer) if 0 <= t < self._vocab_size)

    def _config_processors(
        self, config: GenerationConfig, ends: Sequence[int]
    ) -> CheckpointProcessors | None:
        """Return the logits processors of a configuration; None if it has none."""
        processors = CheckpointProcessors(config, self._vocab_size, ends, self._device)
        return processors if processors.extend_any() else None

    def _request_config(self, request: GenerationInput) -> Any:
        """Return the checkpoint's configuration with that of a request, and with its bad words, as
        tokens: at the start of a text, and after a space."""
        config: Any = with_request_fields(self._checkpoint, request.config, self._vocab_size)
        banned = {
            tuple(self._encode(text, add_special_tokens=False)): None
            for word in request.sampling.bad_words
            for text in (word, " " + word.lstrip(" "))
        }
        config.suppress_tokens = [
            *(config.suppress_tokens or ()),
            *(ids[0] for ids in banned if len(ids) == 1),
        ]
        sequences = [list(ids) for ids in banned if len(ids) > 1]
        if max(map(len, sequences), default=0) > MAX_SEQUENCE:
            raise InvalidInput.at("bad_words", f"a word has more than {MAX_SEQUENCE} tokens")
        config.bad_words_ids = [*(config.bad_words_ids or ()), *sequences]
        return config

    def _render(self, request: GenerationInput) -> RenderedPrompt | None:
        """Return a chat's text; None for other prompts."""
        if not isinstance(request.prompt, Chat):
            return None
        rendered = self.template.render(request.prompt, request.tool_policy)
        if request.truncate is None:
            self._check_length(rendered.text, request.param)
        return rendered

    def _response(
        self, request: GenerationInput, rendered: RenderedPrompt | None
    ) -> "tuple[OutputParser | None, OutputConstraints | None]":
        """Return the parser of the responses to a prompt, and their constraints."""
        prefix, output_format = "", self.template.output_format
        if rendered:
            assert isinstance(request.prompt, Chat)
            prefix = response_prefix(request.prompt, rendered)
            output_format = rendered.output_format
        constraints = None
        if request.tool_policy or request.constraint or request.thinking_tokens is not None:
            constraints = self.constraint_builder.build(request, output_format, prefix)
        if not rendered:
            return None, constraints
        return response_parser(request, output_format, prefix, constraints), constraints

    def _encode_prompt(
        self, request: GenerationInput, rendered: RenderedPrompt | None, is_wanted: IsWanted
    ) -> EncodedPrompt:
        prompt, param, room = request.prompt, request.param, request.truncate
        if room is not None:
            wanted = request.stopping.max_tokens or request.stopping.default_tokens
            wanted = wanted or request.config.get("max_new_tokens") or 1
            fitting = max(1, self.max_model_len - wanted)
            room = fitting if room < 0 else min(room, self.max_model_len)
        if isinstance(prompt, tuple):
            self._check_ids(prompt, param)
            encoded = EncodedPrompt(TokenIds(prompt if room is None else prompt[-room:]))
        elif isinstance(prompt, str) and request.suffix is not None:
            from worker.text.fill_in_middle import fill_in_middle

            before = self._tokenize(prompt, False, param)
            after = self._tokenize(request.suffix, False, "suffix")
            start = [id_ for id_ in self._encode("", True) if id_ == self._tokenizer.bos_token_id]
            fim = fill_in_middle(self._tokenizer)
            encoded = EncodedPrompt(TokenIds([*start, *fim.prompt(before, after)]))
        elif isinstance(prompt, str):
            encoded = EncodedPrompt(TokenIds(self._tokenize(prompt, True, param, room)))
        elif room is not None:
            if prompt.media:
                raise InvalidInput.at("truncate_prompt_tokens", "cannot be combined with media")
            assert rendered
            encoded = EncodedPrompt(TokenIds(self._tokenize(rendered.text, False, param, room)))
        else:
            assert rendered
            encoded = self._encode_chat(rendered.text, prompt.media, request, is_wanted)
        length = len(encoded.ids)
        if not length:
            raise InvalidInput.at(param, "the prompt has no tokens; at least one is needed")
        if length >= self.max_model_len + (request.stopping.max_tokens == 0):
            raise self._too_long(param, str(length))
        return encoded

    def _encode_chat(
        self,
        text: str,
        media: Sequence[MediaInput],
        request: GenerationInput,
        is_wanted: IsWanted,
    ) -> EncodedPrompt:
        for file in media:
            if reason := self.refused_media.get(file.kind):
                raise InvalidInput(reason, file.param)
        preprocessor, namespace = self.media_preprocessor, request.cache_namespace
        if not (media and preprocessor):
            return EncodedPrompt(TokenIds(self._tokenize(text, False, request.param)))
        from worker.vision.multimodal_prompt import MultimodalPrompt

        with preprocessor.admit(media, namespace):
            output = preprocessor.process(text, media, namespace, is_wanted)
        recompute = partial(preprocessor.recompute, text, media, namespace)
        multimodal = MultimodalPrompt.from_output(output, recompute)
        return EncodedPrompt(multimodal.ids, multimodal)

    def _tokenize(
        self, text: str, add_special_tokens: bool, param: str, room: int | None = None
    ) -> list[int]:
        """Return token ids: all, or the last `room`, with a first token that starts each text."""
        if room is None:
            self._check_length(text, param)
        else:
            head = self._encode(text[:MAX_TOKEN_CHARS], add_special_tokens)[:1]
            text = text[-min(room * MAX_TOKEN_CHARS, MAX_PROMPT_CHARS) :]
        with tokenizing(len(text)):
            ids = self._encode(text, add_special_tokens)
        if room is None or len(ids) <= room:
            return ids
        start = head if head == [self._tokenizer.bos_token_id] else []
        return start + ids[len(ids) - room + len(start) :]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoding["input_ids"]
        return ids

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a long text that cannot fit, before it is tokenized."""
        if len(text) > MAX_PROMPT_CHARS:
            raise InvalidInput.at(
                param,
                f"the prompt has {len(text)} characters; at most {MAX_PROMPT_CHARS} are accepted",
            )
        if self._token_limit.is_exceeded(text, self.max_model_len):
            raise self._too_long(param, f"more than {self.max_model_len}")

    def _too_long(self, param: str, tokens: str) -> InvalidInput:
        reason = f"the prompt is too long: {tokens} tokens, without the response"
        return ContextExceeded.of(self.max_model_len, param, reason)

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        for id_ in ids:
            if not 0 <= id_ < self._vocab_size:
                last = self._vocab_size - 1
                raise InvalidInput.at(param, f"{id_} is not a token id of this model: 0 to {last}")

    def _max_tokens(
        self, prompt_tokens: int, request: GenerationInput, config: GenerationConfig
    ) -> int:
        """Return the output's limit, in tokens: as requested, or the checkpoint's, or the rest of
        the context."""
        stopping, room = request.stopping, self.max_model_len - prompt_tokens
        default = stopping.default_tokens or default_max_tokens(config, prompt_tokens) or room
        max_tokens = min(room, default) if stopping.max_tokens is None else stopping.max_tokens
        for name, value in ((stopping.param, max_tokens), ("min_tokens", stopping.min_tokens or 0)):
            if value > room:
                reason = f"{value} tokens exceed the {room} left by a prompt of {prompt_tokens}"
                raise ContextExceeded.of(self.max_model_len, name, reason)
        return max_tokens

    def _sampling_params(
        self,
        request: GenerationInput,
        config: GenerationConfig,
        ends: tuple[int, ...],
        prompt_tokens: int,
    ) -> SamplingParams:
        sampling, stopping = request.sampling, request.stopping
        min_tokens, allowed = stopping.min_tokens, frozenset(sampling.allowed_token_ids)
        # before min_tokens, also of a request that ignores the ends, as in vLLM
        stop_token_ids = tuple({*stopping.stop_token_ids, *ends})
        seed = self._default_seed if sampling.seed is None else sampling.seed
        if min_tokens is None:
            stop_token_ids = () if stopping.ignore_eos else ends
            min_tokens = default_min_tokens(config, prompt_tokens) if stop_token_ids else 0
        possible = allowed or range(self._vocab_size)
        if min_tokens and len(possible) <= len(stop_token_ids) and {*possible} <= {*stop_token_ids}:
            reason = "every token that this request allows ends the response"
            raise InvalidInput.at("min_tokens", reason)
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids(allowed, "allowed_token_ids")
        self._check_ids(sampling.logprob_token_ids, "logprob_token_ids")
        requested = {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
        return replace(
            self._default_params if config is self._checkpoint else default_sampling(config),
            allowed_token_ids=tuple(allowed),
            logprob_token_ids=sampling.logprob_token_ids,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            seed=secrets.randbits(64) if seed is None else seed,
            logprobs=sampling.logprobs,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids if min_tokens else (),
            **{name: value for name, value in requested.items() if value is not None},
        )


def response_prefix(chat: Chat, rendered: RenderedPrompt) -> str:
    """Return what a chat's prompt already contains of the response."""
    if chat.continue_final_message:
        content = chat.messages[-1].get("content")
        return content if isinstance(content, str) else ""
    if not chat.add_generation_prompt or rendered.output_format.reasoning is None:
        return ""
    return rendered.output_format.reasoning_at_end(rendered.text)


def response_parser(
    request: GenerationInput,
    output_format: OutputFormat,
    prefix: str,
    constraints: "OutputConstraints | None" = None,
) -> OutputParser | None:
    """Return the parser of a chat's responses; None if all of their text is content."""
    delimited = output_format.initial_phase != CONTENT or output_format.delimiters
    if not delimited and not request.tool_policy:
        return None
    tools = request.called_tools if request.tool_policy else ()
    allows_calls, is_document, allows_call = bool(request.tool_policy), False, None
    if constraints:
        is_document = constraints.is_document
        allows_call = constraints.allows_call if constraints.is_strict else None
    return OutputParser(output_format, prefix, allows_calls, tools, is_document, allows_call)


def eos_token_ids(
    defaults: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    ids = getattr(defaults, "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def default_max_tokens(defaults: Any, prompt_tokens: int) -> int | None:
    """Return the checkpoint's limit; None if it has none, or if the prompt exceeds it."""
    max_new_tokens: int | None = defaults.max_new_tokens
    max_length: int | None = defaults.max_length
    if max_new_tokens is None and max_length is not None:
        return max(0, max_length - prompt_tokens) or None
    return max_new_tokens


def default_min_tokens(defaults: Any, prompt_tokens: int) -> int:
    """Return how many tokens the checkpoint wants before its end-of-sequence tokens."""
    min_new_tokens: int | None = defaults.min_new_tokens
    if min_new_tokens is None:
        return max(0, (defaults.min_length or 0) - prompt_tokens)
    return min_new_tokens


def default_sampling(defaults: GenerationConfig) -> SamplingParams:
    """Return the sampling parameters of a checkpoint, or else the values of the OpenAI API;
    `do_sample: false` is a temperature of 0."""
    values = {name: getattr(defaults, name, None) for name in SAMPLING_FIELDS}
    if getattr(defaults, "do_sample", None) is False:
        values["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
