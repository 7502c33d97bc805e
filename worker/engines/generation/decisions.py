"""Questions about one input, without generation: a prompt for each, and its labels' probabilities.

    messages → text (chat_template/template.py), divided where the question goes → token ids of the
    input, once
    question → ids after those → a sequence without output, which shares the input's blocks

The text is divided after the input's last word, where a token ends whatever follows. The ids are
then those of each whole prompt, and all prompts of an input have the same prefix. Special tokens in
a client's text remain text (special_token_escaping.py).
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from batching.fair_share import Priority
from batching.request_queue import WorkItem
from batching.sequence import Chunk, PrefixedTokens, TokenIds
from worker.engines.generation.output import PromptOutput
from worker.messages.decisions import LETTERS, YES_NO, DecisionInput, Question
from worker.messages.generation import Chat
from worker.model.sampler import SampledToken
from worker.text.chat_template.special_token_escaping import SpecialTokenEscaper
from worker.text.chat_template.template import ChatTemplate
from worker.text.long_text import TokenLimit, tokenizing

# Tokens of one request: of its questions alone, which are held in memory; and of all its prompts,
# each with the input, which are looked up and attended to.
MAX_QUESTION_TOKENS = 1 << 17
MAX_PROMPT_TOKENS = 1 << 22
# Questions of a request that have normal priority; the others do not delay other requests.
MAX_FOREGROUND_QUESTIONS = 8
WORD_END = re.compile(r"(?<=\w)(?=[\s.,;:!?。、，！？])")
WORD_END_CHARS = 100  # at the end of the input, in which the last words are looked for

Messages = Sequence[Mapping[str, Any]]


class SharedPrompt(NamedTuple):
    """The common parts of all prompts of a request."""

    ids: TokenIds  # the prefix
    last_word: str  # in `ids`; encoded with a question, since some tokenizers begin texts otherwise
    last_word_tokens: int
    before: str  # text between the prefix and the question
    after: str  # text after the question
    key: str  # of the escaped special tokens


class LabelScores(PromptOutput):
    """The response to a question: the probabilities of its labels."""

    def __init__(
        self,
        item: WorkItem,
        number: int,
        ids: PrefixedTokens,
        labels: tuple[int, ...],
        input_tokens: int,
    ) -> None:
        super().__init__(item, ids, number)
        if number >= MAX_FOREGROUND_QUESTIONS:
            self.priority = Priority.BACKGROUND
        self.labels = labels
        # counted with the first question
        self._counted_tokens = input_tokens if number else 0

    def score(self, logits: Tensor, chunk: Chunk) -> list[SampledToken]:
        """Score the labels as the prompt's next token, by the logits [1, V] of its last one."""
        return label_logprobs(logits[0], self.labels)

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
    ) -> None:
        self._tokenizer: Any = tokenizer  # calls of it are not annotated
        self._escaper = SpecialTokenEscaper(tokenizer, self._encode)
        self._template = template
        self._max_model_len = max_model_len
        self._token_limit = token_limit
        self._letters = self._single_tokens([*LETTERS, *map("".join, product(LETTERS, repeat=2))])
        yes_no = self._single_tokens(YES_NO)
        self._yes_no = yes_no if len(yes_no) == 2 else self._letters

    def create_outputs(self, item: WorkItem, request: DecisionInput) -> list[LabelScores]:
        """Return a LabelScores for each question, and set `item.tokens`.

        Raise InvalidInput where the input or a question cannot be served."""
        shared = self._shared_prompt(request)
        outputs: list[LabelScores] = []
        question_tokens = 0
        for number, question in enumerate(request.questions):
            labels = self._labels(question)
            escaped = self._escaper.escape(question.text([*labels]), shared.key)
            text = f"{shared.before}{escaped}{shared.after}"
            is_long = self._token_limit.is_exceeded(text, MAX_QUESTION_TOKENS)
            self._check(not is_long, question)
            with tokenizing(len(text)):
                ids = self._escaper.ids(shared.last_word + text, shared.key)
            prompt = PrefixedTokens(shared.ids, ids[shared.last_word_tokens :])
            question_tokens += len(prompt.own)
            prompt_tokens = question_tokens + (number + 1) * len(shared.ids)
            fits = question_tokens <= MAX_QUESTION_TOKENS and prompt_tokens <= MAX_PROMPT_TOKENS
            self._check(fits, question)
            if len(prompt) > self._max_model_len:
                raise self._too_long(f"{len(prompt)}, with the question,", question.param)
            label_ids, input_tokens = tuple(labels.values()), len(shared.ids)
            outputs.append(LabelScores(item, number, prompt, label_ids, input_tokens))
        item.tokens = len(shared.ids) + question_tokens
        return outputs

    # ── the input ──

    def _shared_prompt(self, request: DecisionInput) -> SharedPrompt:
        marker, key = secrets.token_hex(16), self._escaper.new_key()  # where the question goes
        messages = self._escaper.escape(request.messages, key)
        chat = Chat(with_question(messages, marker), (), {"enable_thinking": False})
        try:
            text, separator, after = self._template.render(chat).text.partition(marker)
        except InvalidInput as error:
            error.param = request.param
            raise
        if not separator or marker in after:
            reason = "this model's chat template changes the text of messages"
            raise InvalidInput.at(request.param, reason)
        if self._token_limit.is_exceeded(text, self._max_model_len):
            raise self._too_long(f"more than {self._max_model_len}", request.param)
        matches = WORD_END.finditer(text, max(0, len(text) - WORD_END_CHARS))
        ends = [match.start() for match in matches]
        end = ends[-1] if ends else len(text)
        last_word = text[ends[-2] : end] if len(ends) > 1 else ""
        with tokenizing(end):
            ids = self._escaper.ids(text[:end], key)
        if len(ids) >= self._max_model_len:
            raise self._too_long(str(len(ids)), request.param)
        last_word_tokens = len(self._escaper.ids(last_word, key)) if last_word else 0
        return SharedPrompt(TokenIds(ids), last_word, last_word_tokens, text[end:], after, key)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoding: Any = self._tokenizer(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoding["input_ids"]
        return ids

    def _too_long(self, tokens: str, param: str) -> InvalidInput:
        limit = f"this model's context holds {self._max_model_len}"
        return InvalidInput(f"{param}: the input has {tokens} tokens; {limit}", param)

    # ── a question ──

    def _labels(self, question: Question) -> dict[str, int]:
        """Return the labels of its options, in order, with their token ids."""
        labels, count = self._letters, len(question.options)
        if question.kind == "predicate":
            labels = self._yes_no
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


@torch.inference_mode()
def label_logprobs(logits: Tensor, labels: Sequence[int]) -> list[SampledToken]:
    """Return the tokens `labels` with their log-probabilities among these tokens alone, by a row of
    logits [V]; a single token -1 if the logits of some are not finite numbers."""
    chosen = logits[torch.tensor(labels, device=logits.device)].float()
    logprobs = chosen.double().log_softmax(0).tolist()
    if any(map(isnan, logprobs)):
        return [SampledToken(-1)]
    return list(map(SampledToken, labels, logprobs))
