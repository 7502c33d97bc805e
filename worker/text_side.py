"""What both generators do alike: from requests to token ids, and from model output to text.

How the model is run is not here: generation.py packs steps, static.py steps whole batches.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from batching.errors import InvalidInput, ItemFailed, OutOfMemory
from batching.request_queue import WorkItem
from worker import failures
from worker.choices import Choice, token_logprob
from worker.detokenize import Vocabulary
from worker.language_model import LanguageModel
from worker.payloads import Chat, ModelInfo
from worker.prompts import Prepared, Prompts
from worker.sampling import Choice as Sampled
from worker.streams import Delta, TokenLogprob


class TextSide:
    """`prepare`, `encode`, `decode` and `token` run in pool threads."""

    def __init__(
        self,
        language: LanguageModel,
        max_model_len: int,
        batching: Literal["continuous", "static"],
        why: str = "",
    ) -> None:
        self.language = language
        self.max_model_len = max_model_len
        self.prompts = Prompts(
            language.tokenizer, language.defaults, language.vocab_size, max_model_len
        )
        form = self.prompts.answering.form
        self.vocabulary = Vocabulary(language.tokenizer, form.marks if form else None)
        self.info = ModelInfo(
            "text-generation",
            language.name,
            str(language.device),
            str(language.dtype).removeprefix("torch."),
            language.parameters,
            batching,
            why,
        )

    def prepare(self, item: WorkItem) -> None:
        self.prompts.prepare(item)

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        return self.prompts.encode(prompt, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.text_of(ids, skip_special=False)

    def token(self, token_id: int) -> str:
        if not 0 <= token_id < self.language.vocab_size:
            raise InvalidInput(f"{token_id} is no token id of this model", "tokens")
        return self.vocabulary.token(token_id)[0]

    def echoed(self, prepared: Prepared, scores: Sequence[Sampled]) -> list[TokenLogprob]:
        """The prompt's entries with their texts, which joined are the prompt's; `scores` are of
        its tokens but the first."""
        if not prepared.wants_prompt_logprobs:
            return []
        scores = [Sampled(prepared.ids[0], None, ()), *scores]
        stream = self.vocabulary.stream([])
        texts = [stream.push(score.token) for score in scores]
        texts[-1] += stream.flush()
        return [
            token_logprob(self.vocabulary, score, text)
            for score, text in zip(scores, texts, strict=True)
        ]

    def close(self) -> None:
        self.prompts.grammars.close()

    def diagnose(self, error: Exception) -> Literal["item", "memory", "fatal"]:
        return failures.diagnose(error)


def collect(
    live: MutableMapping[WorkItem, list[Any]],
    touched: Iterable[Choice],
    failed: Mapping[WorkItem, Exception],
) -> tuple[list[tuple[WorkItem, Delta]], list[tuple[WorkItem, Exception | None]]]:
    """What a step gave to whom. `live` has the items' choices, each as something's `choice`;
    items leave it when all have ended."""
    deltas: list[tuple[WorkItem, Delta]] = []
    done: list[tuple[WorkItem, Exception | None]] = list(failed.items())
    for choice in touched:
        if (delta := choice.take()) and choice.item not in failed:
            deltas.append((choice.item, delta))
        ours = live.get(choice.item)
        if ours and all(each.choice.ended for each in ours):
            del live[choice.item]
            done.append((choice.item, None))
    return deltas, done


def as_failure(error: Exception, kind: str) -> ItemFailed:
    """What an item that alone made a step raise is told."""
    if isinstance(error, ItemFailed):
        return error
    if kind == "memory":
        return OutOfMemory("this input does not fit into memory")
    failure = ItemFailed("the model failed on this input")
    failure.__cause__ = error.with_traceback(None)
    return failure
