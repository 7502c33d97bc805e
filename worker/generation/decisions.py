"""What the generation engine makes of questions about one input: a prompt each, and their answers.

    messages → text (chat_template/template.py), cut where the question goes → ids of the input,
    once
    question → ids behind those → a sequence that is only run, and shares the input's blocks

The text is cut behind the input's last word: there, tokens end whatever follows, so that the ids
are those of each prompt as a whole, and its prefix is the same whatever else is asked. Control
tokens are the template's alone (special_token_escaping.py).
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
from batching.request_queue import WorkItem
from batching.sequence import PrefixedTokens
from worker.generation.output import PreparedPrompt
from worker.messages.decisions import LETTERS, YES_NO, DecisionInput, Question
from worker.messages.deltas import Delta
from worker.messages.generation import Chat
from worker.model.sampler import SampledToken, SamplingParams
from worker.text.chat_template.special_token_escaping import SpecialTokenEscaper
from worker.text.chat_template.template import ChatTemplate

# Of one request: tokens that its questions have beside the input, which are what is kept of them,
# and tokens of all prompts, each with the input, which are looked up and attended to.
MOST_OWN = 1 << 17
MOST_SEEN = 1 << 22
WORD_END = re.compile(r"(?<=\w)(?=[\s.,;:!?。、，！？])")
NEAR = 100  # characters in which the last words are looked for
# So many questions of a request come in their turn; more are not to keep others waiting.
FIRST = 8

Messages = Sequence[Mapping[str, Any]]


class SharedPrompt(NamedTuple):
    """What all prompts of a request begin with, and what is around their questions."""

    ids: list[int]
    word: str  # the last in `ids`: some tokenizers begin a text otherwise than they go on
    skip: int  # tokens of that
    before: str
    after: str
    key: str  # stands for control tokens


class LabelScores:
    """The answer to a question: of a SequenceOutput, what the engine asks where nothing is
    generated."""

    def __init__(
        self, item: WorkItem, number: int, ids: Any, labels: tuple[int, ...], shared: int
    ) -> None:
        self.item = item
        self.background = item.payload.background or number >= FIRST
        self.prepared = PreparedPrompt(ids, SamplingParams(), 0, {}, labels=labels)
        self.started = False
        self.finished = False
        self._shared = shared  # tokens of the input
        self._delta = Delta(number)

    def score(self, logits: Tensor, positions: range) -> list[SampledToken]:
        """How likely the labels are after the last token."""
        return label_logprobs(logits[0], self.prepared.labels)

    def add_prompt_scores(self, scores: Sequence[SampledToken]) -> None:
        self._delta.probabilities = [exp(each.logprob or 0.0) for each in scores]

    def start(self, cached_tokens: int) -> None:
        """The prompt has been run, `cached` of its tokens were known. The input counts with the
        first question."""
        counted = self._shared if self._delta.choice else 0
        self._delta.prompt_tokens = len(self.prepared.ids) - counted
        self._delta.cached_tokens = max(0, cached_tokens - counted)
        self._delta.finish_reason = "stop"
        self.started = self.finished = True

    def take_delta(self) -> Delta:
        return self._delta


class Decisions:
    """From requests to verdicts, in pool threads. `longest_token`: in characters."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        max_model_len: int,
        longest_token: int,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._control = SpecialTokenEscaper(tokenizer, self._encode)
        self._template = template
        self._max_model_len = max_model_len
        self._longest_token = longest_token
        self._letters = self._single_tokens([*LETTERS, *map("".join, product(LETTERS, repeat=2))])
        yes_no = self._single_tokens(YES_NO)
        self._yes_no = yes_no if len(yes_no) == 2 else self._letters

    def prepare(self, item: WorkItem) -> None:
        """InvalidInput says what cannot be asked."""
        request: DecisionInput = item.payload
        shared = self._shared(request)
        item.prepared, own, characters = [], 0, 0
        for number, question in enumerate(request.questions):
            labels = self._labels(question)
            asked = self._control.hidden(question.asked([*labels]), shared.key)
            text = f"{shared.before}{asked}{shared.after}"
            characters += len(text)
            self._check(characters <= MOST_OWN * self._longest_token, question)
            behind = self._control.ids(shared.word + text, shared.key)[shared.skip :]
            ids = PrefixedTokens(shared.ids, behind)
            own += len(behind)
            seen = own + (number + 1) * len(shared.ids)
            self._check(own <= MOST_OWN and seen <= MOST_SEEN, question)
            if len(ids) > self._max_model_len:
                raise self._too_long(f"{len(ids)}, with the question,", question.param)
            verdict = LabelScores(item, number, ids, tuple(labels.values()), len(shared.ids))
            item.prepared.append(verdict)
        item.tokens = len(shared.ids) + own

    # ── the input ──

    def _shared(self, request: DecisionInput) -> SharedPrompt:
        place, key = secrets.token_hex(16), self._control.new_key()  # where the question goes
        messages = self._control.hidden(request.messages, key)
        chat = Chat(with_question(messages, place), (), {"enable_thinking": False})
        try:
            text, found, after = self._template.render(chat).text.partition(place)
        except InvalidInput as error:
            error.param = request.param
            raise
        if not found or place in after:
            cannot = "the model's chat template does not show a message as it is"
            raise InvalidInput(cannot, request.param)
        if len(text) > self._max_model_len * self._longest_token:
            raise self._too_long(f"more than {len(text) // self._longest_token}", request.param)
        ends = [match.start() for match in WORD_END.finditer(text, max(0, len(text) - NEAR))]
        cut = ends[-1] if ends else len(text)
        word = text[ends[-2] : cut] if len(ends) > 1 else ""
        ids = self._control.ids(text[:cut], key)
        if len(ids) >= self._max_model_len:
            raise self._too_long(str(len(ids)), request.param)
        skip = len(self._control.ids(word, key)) if word else 0
        return SharedPrompt(ids, word, skip, text[cut:], after, key)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        made: Any = self._tokenizer(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = made["input_ids"]
        return ids

    def _too_long(self, tokens: str, param: str) -> InvalidInput:
        holds = f"this model's context holds {self._max_model_len}"
        return InvalidInput(f"{param}: the input has {tokens} tokens; {holds}", param)

    # ── a question ──

    def _labels(self, question: Question) -> dict[str, int]:
        """Of its options, in order; their token ids."""
        labels, count = self._letters, len(question.options)
        if question.kind == "predicate":
            labels = self._yes_no
        if count > len(labels):
            most = f"has {count} options; this model can tell {len(labels)} apart"
            raise InvalidInput.at(question.param, most)
        return dict(list(labels.items())[:count])

    def _single_tokens(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of the texts that are a token each, and another than those before."""
        found: dict[int, str] = {}
        encoded = self._encode([*texts])
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids) == 1 and ids[0] != self._tokenizer.unk_token_id:
                found.setdefault(ids[0], text)
        return {text: id_ for id_, text in found.items()}

    def _check(self, fits: bool, question: Question) -> None:
        if not fits:
            many = f"up to here, the questions have more than {MOST_OWN} tokens"
            several = f"or with the input before each more than {MOST_SEEN}"
            raise InvalidInput.at(question.param, f"{many}, {several}")


def with_question(messages: Messages, text: str) -> tuple[Mapping[str, Any], ...]:
    """The user's last words go on with it: many templates take no two messages of theirs."""
    *before, last = messages
    if last["role"] != "user":
        return (*messages, {"role": "user", "content": text})
    return (*before, {**last, "content": f"{last['content']}\n\n{text}"})


@torch.inference_mode()
def label_logprobs(logits: Tensor, labels: Sequence[int]) -> list[SampledToken]:
    """The tokens `labels`, as likely as each is to come if one of them does, by a row of logits
    [V]; a single -1 where that holds no usable numbers."""
    chosen = logits[torch.tensor(labels, device=logits.device)].float()
    logprobs = chosen.double().log_softmax(0).tolist()
    if any(map(isnan, logprobs)):
        return [SampledToken(-1)]
    return list(map(SampledToken, labels, logprobs))
