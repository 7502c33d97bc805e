"""Questions about one input, without generation: a prompt for each, and its labels' probabilities.

    messages → text (chat_template/template.py), divided where the question goes → token ids of the
    input, once
    question → ids after those → a sequence without output, which shares the input's blocks

The text is divided after the input's last word, where a token ends whatever follows. The ids are
then those of each whole prompt, and all prompts of an input have the same prefix. Special tokens in
a client's text remain text (special_token_escaping.py).

A question is rendered and encoded as a whole prompt if the request has images, or if the decision
configuration has a template. The prompt ends at the template's MARK; its SPLIT ends a token, and is
dropped.
"""

import copy
import re
import secrets
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from math import exp, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase

from batching.errors import ClientGone, ContextExceeded, InvalidInput
from batching.fair_share import Priority
from batching.request_queue import WorkItem
from batching.sequence import Chunk, PrefixedTokens, TokenIds
from worker.decision_config import DecisionConfig, UnusableDecisionConfig
from worker.engines.generation.output import PromptOutput
from worker.messages.decisions import LETTERS, NOUL_OPTIONS, YES_NO, DecisionInput, Question
from worker.messages.generation import MAX_MEDIA, Chat
from worker.model.sampler import SampledToken
from worker.text.chat_template.special_token_escaping import SpecialTokenEscaper
from worker.text.chat_template.template import ChatTemplate
from worker.text.long_text import TokenLimit, tokenizing
from worker.vision.media_preprocessor import MediaPreprocessor
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import ProcessorOutput

MARK, SPLIT = "<|mark|>", "<|split|>"  # of decision templates
# Tokens of one request: of its questions alone, or of whole prompts, which are held in memory; and
# of all its prompts, each with the input, which are looked up and attended to.
MAX_QUESTION_TOKENS = 1 << 20
MAX_PROMPT_TOKENS = 1 << 22
# Questions of a request that have normal priority; the others do not delay other requests.
MAX_FOREGROUND_QUESTIONS = 8
WORD_END = re.compile(r"(?<=\w)(?=[\s.,;:!?。、，！？])")
WORD_END_CHARS = 100  # at the end of the input, in which the last words are looked for
# Its prompt shows how many marks a template writes.
PROBE = Question("choice", "", (), "", ("", "", dict.fromkeys(NOUL_OPTIONS, "")))

Messages = Sequence[Mapping[str, Any]]


class SharedPrompt(NamedTuple):
    """The common parts of all prompts of a request."""

    ids: TokenIds  # the prefix
    last_word: str  # in `ids`; encoded with a question, since some tokenizers begin texts otherwise
    last_word_tokens: int
    before: str  # text between the prefix and the question
    after: str  # text after the question
    key: str  # of the escaped special tokens


class EscapedState(NamedTuple):
    """The state of a request, once for all prompts. `key` escapes special tokens; `names`: of the
    images that it shows. `is_plain`: it has no special tokens."""

    key: str = ""
    value: Any = None
    names: Sequence[str] = ()
    is_plain: bool = True


class LabelScores(PromptOutput):
    """The response to a question: the probabilities of its labels."""

    def __init__(
        self,
        item: WorkItem,
        number: int,
        ids: PrefixedTokens,
        labels: tuple[int, ...],
        temperature: float,
        input_tokens: int,
        multimodal: MultimodalPrompt | None,
    ) -> None:
        super().__init__(item, ids, number)
        self.prepared = replace(self.prepared, multimodal=multimodal)
        if number >= MAX_FOREGROUND_QUESTIONS:
            self.priority = Priority.BACKGROUND
        self.labels, self._temperature = labels, temperature
        # counted with the first question
        self._counted_tokens = input_tokens if number else 0

    def score(self, logits: Tensor, chunk: Chunk) -> list[SampledToken]:
        """Score the labels as the prompt's next token, by the logits [1, V] of its last one."""
        return label_logprobs(logits[0], self.labels, self._temperature)

    def add_prompt_scores(self, scores: Sequence[SampledToken]) -> None:
        self._delta.probabilities = [exp(score.logprob or 0.0) for score in scores]

    def start(self, cached_tokens: int) -> None:
        super().start(max(0, cached_tokens - self._counted_tokens))
        self._delta.prompt_tokens -= self._counted_tokens


class Decisions:
    """Prepares the questions of requests, in pool threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        max_model_len: int,
        token_limit: TokenLimit,
        config: DecisionConfig,
        preprocessor: MediaPreprocessor | None,
    ) -> None:
        self._tokenizer: Any = tokenizer  # calls of it are not annotated
        self._encode = partial(encode, tokenizer)
        self._escaper = self._template_escaper = SpecialTokenEscaper(tokenizer, self._encode)
        self._template = template
        self._max_model_len = max_model_len
        self._token_limit = token_limit
        self._config, self._preprocessor = config, preprocessor
        letters = self._single_tokens([*LETTERS, *map("".join, product(LETTERS, repeat=2))])
        yes_no = self._single_tokens(YES_NO)
        if len(yes_no) < 2:
            yes_no = letters
        self._labels_of = {"noul": yes_no, "choice": letters, "score": letters}
        for kind, labels in config.labels.items():
            self._labels_of[kind] = self._single_tokens(labels)
            if [*self._labels_of[kind]] != labels:
                reason = f"the labels of {kind}, {labels}, are not distinct single tokens"
                raise UnusableDecisionConfig(reason)
        self._split = -1
        if config.chat_template is not None:
            self._use_template(config.chat_template)

    def create_outputs(self, item: WorkItem, request: DecisionInput) -> list[LabelScores]:
        """Return a LabelScores for each question, and set `item.tokens`.

        Raise InvalidInput where the input or a question cannot be served, and RecursionError where
        one is nested too deeply; Pending while another request decodes its images."""
        has_template = self._config.chat_template is not None and request.state is not None
        shared = None if request.assets or has_template else self._shared_prompt(request)
        prefix_len = len(shared.ids) if shared else 0
        processed = self._processed(item, request)
        state = EscapedState() if shared else self._escaped_state(request)
        outputs: list[LabelScores] = []
        own_tokens = 0
        for number, question in enumerate(request.questions):
            if not item.open:
                raise ClientGone("the request has ended")
            labels, multimodal = self._labels(question), None
            if shared:
                escaped = self._escaper.escape(self._text(question, labels), shared.key)
                text = f"{shared.before}{escaped}{shared.after}"
                self._check(not self._token_limit.is_exceeded(text, MAX_QUESTION_TOKENS), question)
                with tokenizing(len(text)):
                    own_ids = self._escaper.ids(shared.last_word + text, shared.key)
                prompt = PrefixedTokens(shared.ids, own_ids[shared.last_word_tokens :])
            else:
                prompt, multimodal = self._whole_prompt(request, question, labels, processed, state)
            own_tokens += len(prompt.own)
            prompt_tokens = own_tokens + (number + 1) * prefix_len
            fits = own_tokens <= MAX_QUESTION_TOKENS and prompt_tokens <= MAX_PROMPT_TOKENS
            self._check(fits, question)
            if not prompt:
                raise InvalidInput.at(question.param, "the prompt has no tokens")
            if len(prompt) > self._max_model_len:
                raise self._too_long(f"{len(prompt)} tokens with the question", question.param)
            ids, temperature = (*labels.values(),), self._config.temperature.get(question.kind, 1.0)
            if question.kind == "noul" and self._config.noul_options != NOUL_OPTIONS:
                ids = ids[::-1]
            outputs.append(
                LabelScores(item, number, prompt, ids, temperature, prefix_len, multimodal)
            )
        item.tokens = prefix_len + own_tokens
        return outputs

    def _processed(self, item: WorkItem, request: DecisionInput) -> ProcessorOutput | None:
        """Return the images of a request, each once."""
        if not (request.assets and self._preprocessor):
            return None
        images, namespace = [*request.assets.values()], request.cache_namespace
        text = self._preprocessor.processor.modalities["image"].token * len(images)
        with self._preprocessor.admit(images, namespace):
            return self._preprocessor.process(text, images, namespace, lambda: item.open)

    # ── the input ──

    def _shared_prompt(self, request: DecisionInput) -> SharedPrompt:
        marker, key = secrets.token_hex(16), self._escaper.new_key()  # where the question goes
        messages = self._escaper.escape(request.messages, key)
        chat = Chat(with_question(messages, marker), (), {"enable_thinking": False})
        text, separator, after = self._template.render(chat).text.partition(marker)
        if not separator or marker in after:
            reason = "this model's chat template changes the text of messages"
            raise InvalidInput.at(request.param, reason)
        if self._token_limit.is_exceeded(text, self._max_model_len):
            raise self._too_long(f"more than {self._max_model_len} tokens", request.param)
        matches = WORD_END.finditer(text, max(0, len(text) - WORD_END_CHARS))
        ends = [match.start() for match in matches]
        end = ends[-1] if ends else len(text)
        last_word = text[ends[-2] : end] if len(ends) > 1 else ""
        with tokenizing(end):
            ids = self._escaper.ids(text[:end], key)
        if len(ids) >= self._max_model_len:
            raise self._too_long(f"{len(ids)} tokens", request.param)
        last_word_tokens = len(self._escaper.ids(last_word, key)) if last_word else 0
        return SharedPrompt(TokenIds(ids), last_word, last_word_tokens, text[end:], after, key)

    def _too_long(self, tokens: str, param: str) -> InvalidInput:
        return ContextExceeded.of(self._max_model_len, param, f"the prompt is too long: {tokens}")

    # ── a question ──

    def _text(self, question: Question, labels: Mapping[str, int]) -> str:
        return question.text([*labels], self._config.noul_options)

    def _whole_prompt(
        self,
        request: DecisionInput,
        question: Question,
        labels: Mapping[str, int],
        processed: ProcessorOutput | None,
        state: EscapedState,
    ) -> tuple[PrefixedTokens, MultimodalPrompt | None]:
        """Return a prompt that is rendered and encoded alone, by the decision template or as a
        message, with its images, of those that are `processed`."""
        template, key = self._config.chat_template, state.key
        content = f"{request.messages[0]['content']}\n\n{self._text(question, labels)}"
        values: dict[str, Any] = {"content": content}
        if template is not None:
            values = {"question": self._document(question, [*labels])}
        names = [*state.names]  # of the images
        values = insert_images(values, request.assets, names)
        escaped = self._template_escaper.escape(values, key)
        is_plain = state.is_plain and escaped == values
        if template is not None:
            escaped["state"] = state.value
        message = {"role": "user", "content": escaped.pop("content", "")}
        chat = Chat((message,), (), {"enable_thinking": False, **escaped}, template=template)
        text = self._template.render(chat).text
        self._check(not self._token_limit.is_exceeded(text, MAX_QUESTION_TOKENS), question)
        if template is not None:
            text = text.partition(MARK)[0]
        if names and self._preprocessor and processed:
            if not is_plain or SPLIT in text:
                reason = (
                    "it or the state has special tokens, which texts beside images may not have"
                )
                raise InvalidInput.at(question.param, reason)
            features = dict(zip(request.assets, processed.media, strict=True))
            shown = [features[name] for name in names]
            output = self._preprocessor.processor.process_text(text, shown)
            # the memory limiter counts the images until no prompt has them
            weakref.finalize(output, lambda _: None, processed)
            images = [request.assets[name] for name in names]
            recompute = partial(self._preprocessor.recompute, text, images, request.cache_namespace)
            multimodal = MultimodalPrompt.from_output(output, recompute)
            return PrefixedTokens((), multimodal.ids), multimodal
        with tokenizing(len(text)):
            ids = self._template_escaper.ids(text, key)
        return PrefixedTokens((), [id_ for id_ in ids if id_ != self._split]), None

    def _escaped_state(self, request: DecisionInput) -> EscapedState:
        """Return the state for a decision template, which each question's prompt reads."""
        key, names = self._template_escaper.new_key(), list[str]()
        if self._config.chat_template is None:
            return EscapedState(key)
        value = insert_images(request.state, request.assets, names)
        escaped = self._template_escaper.escape(value, key)
        return EscapedState(key, escaped, names, escaped == value)

    def _document(self, question: Question, labels: Sequence[str]) -> dict[str, Any]:
        """Return a question as transformers passes it to a decision template."""
        name, instructions, criteria = question.source
        if question.kind == "noul":
            criteria = {name: (criteria or {}).get(name) for name in self._config.noul_options}
        elif question.kind == "score":
            criteria = {str(number): level for number, level in enumerate(criteria)}
        return {
            "name": name,
            "type": question.kind,
            "instructions": instructions,
            "options": [*criteria],
            "labels": labels,
            "descriptions": [*criteria.values()],
        }

    def _use_template(self, source: str) -> None:
        """Raise UnusableDecisionConfig if a prompt has several marks: a head reads them."""
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.chat_template = source  # its tokens are escaped
        marks = [AddedToken(token, special=True, normalized=False) for token in (MARK, SPLIT)]
        tokenizer.add_tokens(marks)
        self._split = tokenizer.convert_tokens_to_ids(SPLIT)
        self._template_escaper = SpecialTokenEscaper(tokenizer, partial(encode, tokenizer))
        variables = {"state": "", "question": self._document(PROBE, YES_NO)}
        message = {"role": "user", "content": ""}
        prompt = self._template.try_render([message], (), chat_template=source, **variables)
        if prompt.count(MARK) > 1:
            raise UnusableDecisionConfig(f"its template writes several {MARK} in a prompt")

    def _labels(self, question: Question) -> dict[str, int]:
        """Return the labels of its options, in order, with their token ids."""
        labels, count = self._labels_of[question.kind], len(question.options)
        if count > len(labels):
            reason = f"has {count} options; this model distinguishes at most {len(labels)}"
            raise InvalidInput.at(question.param, reason)
        return dict(list(labels.items())[:count])

    def _single_tokens(self, texts: Sequence[str]) -> dict[str, int]:
        """Return those of the texts that are one token each, all different, with its id."""
        text_of: dict[int, str] = {}
        encoded = self._encode([*texts])
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids) == 1 and ids[0] != self._tokenizer.unk_token_id:
                text_of.setdefault(ids[0], text)
        return {text: id_ for id_, text in text_of.items()}

    def _check(self, fits: bool, question: Question) -> None:
        if not fits:
            alone = f"the questions up to this one have more than {MAX_QUESTION_TOKENS} tokens"
            total = f"or, each with the input, more than {MAX_PROMPT_TOKENS}"
            raise InvalidInput.at(question.param, f"{alone}, {total}")


def with_question(messages: Messages, text: str) -> tuple[Mapping[str, Any], ...]:
    """Append a question to the last message if that is the user's, else as a message of its own:
    many templates refuse two user messages in a row."""
    *before, last = messages
    if last["role"] != "user":
        return (*messages, {"role": "user", "content": text})
    return (*before, {**last, "content": f"{last['content']}\n\n{text}"})


def insert_images(value: Any, assets: Collection[str], names: list[str]) -> Any:
    """Replace each text that has placeholders, in lists and mappings, by a list of parts, as in a
    Chat. The placeholders of all parts are added to `names`, in order. Raises InvalidInput for more
    than MAX_MEDIA."""
    if not assets:
        return value
    if isinstance(value, Mapping):
        return {name: insert_images(item, assets, names) for name, item in value.items()}
    if isinstance(value, list):
        return [insert_images(item, assets, names) for item in value]
    pattern = "|".join(map(re.escape, sorted(assets, key=len, reverse=True)))
    if not isinstance(value, str) or not re.search(pattern, value):
        return value
    names += islice((found[0] for found in re.finditer(pattern, value)), MAX_MEDIA + 1)
    if len(names) > MAX_MEDIA:
        raise InvalidInput.at("assets", f"are shown more than {MAX_MEDIA} times in a prompt")
    parts = filter(None, re.split(f"({pattern})", value))
    return [
        {"type": "image"} if part in assets else {"type": "text", "text": part} for part in parts
    ]


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    encoding = tokenizer(texts, add_special_tokens=False, verbose=False)
    ids: list[list[int]] = encoding["input_ids"]
    return ids


@torch.inference_mode()
def label_logprobs(
    logits: Tensor, labels: Sequence[int], temperature: float = 1.0
) -> list[SampledToken]:
    """Return the tokens `labels` with their log-probabilities among these tokens alone, by a row of
    logits [V]; a single token -1 if the logits of some are not finite numbers."""
    chosen = logits[torch.tensor(labels, device=logits.device)].float()
    logprobs = (chosen.double() / temperature).log_softmax(0).tolist()
    if any(map(isnan, logprobs)):
        return [SampledToken(-1)]
    return list(map(SampledToken, labels, logprobs))
