"""From a request to what the generator runs: token ids, resolved sampling, limits.

Runs in pool threads. The tokenizer never truncates or pads, so threads may share it; lengths are
checked here. What a request leaves open comes from the checkpoint's generation_config.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.grammar.compiler import Grammars
from worker.model.logits_processors import SamplingParams
from worker.protocol import Chat, GenerationInput, Sampling, Stopping
from worker.text.answer_plan import Answering, AnswerPlan
from worker.text.template_names import check_names, own_names
from worker.text.turns import Turns


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt ready to run, `n` choices of it."""

    ids: list[int]
    params: SamplingParams
    max_tokens: int
    ends: dict[int, int | None]  # ids that end a choice, and what is told as its stop reason
    echo: bool
    answer: AnswerPlan

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.echo and self.params.logprobs is not None


class Prompts:
    """`vocab_size` counts the rows of the model's output, `max_model_len` tokens in all."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        defaults: GenerationConfig,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = tuple(id_ for id_ in end_ids(defaults, tokenizer) if id_ < vocab_size)
        self.defaults = default_sampling(defaults)
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_ids)
        self.answering = Answering(tokenizer, self.grammars)
        self.turns = Turns(self._rendered)
        self.own_names = own_names(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def prepare(self, request: GenerationInput) -> Prepared:
        """InvalidInput says what cannot be served."""
        text, ids = self._prompt(request)
        ends: dict[int, int | None] = {id_: id_ for id_ in request.stopping.stop_token_ids}
        self._check_ids(request.stopping.stop_token_ids, "stop_token_ids")
        if not request.stopping.ignore_eos:
            ends |= dict.fromkeys(self.eos_ids)
        return Prepared(
            ids,
            self._params(request.sampling, request.stopping, tuple(ends)),
            self._max_tokens(len(ids), request),
            ends,
            request.echo,
            self.answering.plan(request, text),
        )

    def _prompt(self, request: GenerationInput) -> tuple[str, list[int]]:
        """The prompt's text, if it is one, and its tokens."""
        prompt = request.prompt
        text = ""
        if isinstance(prompt, tuple):
            self._check_ids(prompt, request.param)
            ids = list(prompt)
        else:
            text = self.render(prompt) if isinstance(prompt, Chat) else prompt
            ids = self._ids(text, not isinstance(prompt, Chat), request.param)
        if not ids:
            raise InvalidInput("the prompt has no tokens", request.param)
        if len(ids) >= self.max_model_len + (request.stopping.max_tokens == 0):
            raise InvalidInput(
                f"the prompt has {len(ids)} tokens; this model's context holds "
                f"{self.max_model_len}, with the answer",
                request.param,
            )
        return text, ids

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, Chat):
            return self._ids(self.render(prompt), False, "messages")
        return self._ids(prompt, add_special_tokens, "messages")

    def _ids(self, text: str, special: bool, param: str) -> list[int]:
        """`special`: the tokenizer adds its own; templates write them."""
        if len(text) > self.max_model_len * self.longest_token:
            raise InvalidInput(
                f"the prompt has more than {len(text) // self.longest_token} tokens; this "
                f"model's context holds {self.max_model_len}",
                param,
            )
        call: Any = self.tokenizer
        ids: list[int] = call(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def render(self, chat: Chat) -> str:
        """The chat template's text; InvalidInput with the template's own reason, if it has one."""
        if not self.tokenizer.chat_template:
            raise InvalidInput("this model has no chat template: use /v1/completions", "messages")
        check_names(chat.template_kwargs, self.own_names)
        variables = self.answering.effort(chat) | dict(chat.template_kwargs)
        try:
            return self._rendered(
                self.turns.told(chat.messages),
                [dict(tool) for tool in chat.tools] or None,
                chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **variables,
            )
        except InvalidInput:
            raise
        except Exception as error:  # whatever a template raises
            raise InvalidInput(_refusal(error), "messages") from error

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **variables,
        )
        assert isinstance(text, str)
        return text

    def _check_ids(self, ids: Any, param: str) -> None:
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
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
        own = self.defaults
        self._check_ids(asked.logit_bias, "logit_bias")

        def chosen(name: str) -> Any:
            value = getattr(asked, name)
            return getattr(own, name) if value is None else value

        return SamplingParams(
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=chosen("top_k"),
            min_p=chosen("min_p"),
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=chosen("repetition_penalty"),
            logit_bias=tuple(asked.logit_bias.items()),
            seed=secrets.randbits(64) if asked.seed is None else asked.seed,
            logprobs=asked.logprobs,
            min_tokens=stopping.min_tokens,
            end_ids=ends if stopping.min_tokens else (),
        )


def _refusal(error: Exception) -> str:
    """What a template says by raise_exception is meant to be read; other errors are its insides."""
    if type(error) is TemplateError and error.message:
        return f"the model's chat template refuses the messages: {error.message[:500]}"
    return "the model's chat template cannot render these messages"


def end_ids(defaults: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All of the checkpoint's end-of-sequence tokens."""
    ids = getattr(defaults, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def default_sampling(defaults: GenerationConfig) -> SamplingParams:
    """What the checkpoint says, else the OpenAI API's defaults; `do_sample: false` is greedy."""

    def own(name: str, otherwise: float) -> Any:
        value = getattr(defaults, name, None)
        return otherwise if value is None else value

    greedy = getattr(defaults, "do_sample", None) is False
    return SamplingParams(
        temperature=0.0 if greedy else own("temperature", 1.0),
        top_p=own("top_p", 1.0),
        top_k=own("top_k", 0),
        min_p=own("min_p", 0.0),
        repetition_penalty=own("repetition_penalty", 1.0),
    )
