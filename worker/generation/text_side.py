"""What both generators do alike: from requests to token ids, and from model output to text.

How the model is run is not here: engine.py packs steps, static.py steps whole batches.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Literal

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.deltas import Delta
from worker.generation.output import SequenceOutput, make_choices
from worker.generation.request import Prompts
from worker.model.language_model import LanguageModel
from worker.protocol import Chat, ModelInfo
from worker.text.detokenizer import Vocabulary


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
        form = self.prompts.template.answers
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
        prepared = self.prompts.prepare(item.payload)
        item.prepared = make_choices(item, prepared, self.vocabulary)
        item.tokens = len(prepared.ids)

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        return self.prompts.encode(prompt, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.text_of(ids, skip_special=False)

    def token(self, token_id: int) -> str:
        if not 0 <= token_id < self.language.vocab_size:
            raise InvalidInput(f"{token_id} is no token id of this model", "tokens")
        return self.vocabulary.token(token_id)[0]

    def call_id(self, name: str, index: int) -> str:
        return self.prompts.template.call_id(name, index)

    def close(self) -> None:
        self.prompts.grammars.close()


def collect(
    live: MutableMapping[WorkItem, list[Any]],
    said: Iterable[tuple[SequenceOutput, Delta | None]],
    failed: Mapping[WorkItem, Exception],
) -> tuple[list[tuple[WorkItem, Delta]], list[tuple[WorkItem, Exception | None]]]:
    """What a step gave to whom. `live` has the items' choices, each as something's `choice`;
    items leave it when all have ended."""
    given = [(choice.item, delta) for choice, delta in said if choice.item not in failed]
    done: list[tuple[WorkItem, Exception | None]] = list(failed.items())
    for item in dict.fromkeys(item for item, _ in given):
        if all(each.choice.ended for each in live[item]):
            del live[item]
            done.append((item, None))
    return [(item, delta) for item, delta in given if delta], done
