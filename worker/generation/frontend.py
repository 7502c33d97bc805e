"""What the generation engine does in pool threads: from requests to token ids, and ids as text.

How the model is run is not here (engine.py), nor what becomes of sampled tokens (output.py).
"""

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.generation.output import make_choices
from worker.generation.request import Prompts
from worker.model.language_model import LanguageModel
from worker.protocol import Chat, ModelInfo
from worker.text.detokenizer import Vocabulary


class Frontend:
    """`why`: why the model does not run on paged memory, if it does not."""

    def __init__(self, language: LanguageModel, max_model_len: int, why: str = "") -> None:
        self.language = language
        self.info = ModelInfo(
            "text-generation",
            language.name,
            str(language.device),
            str(language.dtype).removeprefix("torch."),
            language.parameters,
            "static" if why else "continuous",
            why,
        )
        self.max_model_len = max_model_len
        self.prompts = Prompts(
            language.tokenizer, language.defaults, language.vocab_size, max_model_len
        )
        form = self.prompts.template.answers
        self.vocabulary = Vocabulary(language.tokenizer, form.marks if form else None)

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
