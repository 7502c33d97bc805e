"""Late interaction (ColBERT): a vector for each token of a query or a document, compared by MaxSim.

A query and a document have their own prompt and length. A query may be filled up with expansion
tokens, a document may leave out tokens such as punctuation. All of it is read from the files of
sentence-transformers' MultiVectorEncoder, or of PyLate.
"""

import copy
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import AddedToken, PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.scoring import Truncation
from worker.model.loading import LoadingFailed

Form = Literal["query", "document"]
MODEL_TYPES = ("MultiVectorEncoder", "ColBERT")  # ColBERT: PyLate up to version 3
PYLATE_DENSE = "pylate.models.Dense.Dense"
PYLATE_KEYS = {
    "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LateInteraction:
    lengths: Mapping[str, int | None]  # tokens by form
    expansion: Mapping[str, Any] | None  # of queries: strategy, length, attend, token
    mask: Mapping[str, Any]  # the file of MultiVectorMask
    prefixes: Mapping[str, str]  # PyLate's, by form: each is one token if the tokenizer has it
    is_mean: bool  # scores are divided by the tokens of the query

    def register_prefixes(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make prefixes that the tokenizer knows special tokens, so that they are not split."""
        known = tokenizer.get_vocab()
        for prefix in filter(str.strip, self.prefixes.values()):
            name = next((name for name in (prefix, prefix.split()[0]) if name in known), None)
            if name and tokenizer.tokenize(name) != [name]:
                token = AddedToken(name, normalized=False, special=True)
                tokenizer.add_special_tokens({"additional_special_tokens": [token]})


def read_late_interaction(
    general: Mapping[str, Any], transformer: Mapping[str, Any], mask: Mapping[str, Any] | None
) -> LateInteraction:
    """Read the settings of a model by its files: those of the model, of its transformer, and of its
    MultiVectorMask, which PyLate's lack. Raises LoadingFailed for unsupported ones."""
    tasks, modalities = transformer.get("transformer_task"), transformer.get("modality_config")
    if tasks not in (None, "feature-extraction") or {*(modalities or ())} - {"text"}:
        raise LoadingFailed("its vectors are of images or of chat messages, not of texts alone")
    settings = {**general, **transformer}
    expansion = settings.get("query_expansion")
    if "query_expansion" not in settings and PYLATE_KEYS & {*general}:
        attends = general.get("attend_to_expansion_tokens", general.get("attend_to_mask_tokens"))
        length = general.get("query_length") or 32
        expansion = {"strategy": "fixed", "attend": bool(attends), "length": length}
        if general.get("do_query_expansion") is False:
            expansion = None
    if mask is None:
        if general.get("model_type") == "MultiVectorEncoder":
            raise LoadingFailed("its modules.json has no MultiVectorMask")
        words = general.get("skiplist_words")
        mask = {"skiplist_words": [*string.punctuation] if words is None else words}
    return LateInteraction(
        {form: settings.get(f"{form}_length") for form in ("query", "document")},
        expansion,
        mask,
        {form: general.get(f"{form}_prefix") or "" for form in ("query", "document")},
        general.get("similarity_fn_name") == "meanmaxsim",
    )


class FormTokenizer:
    """Tokenizes queries or documents, and marks the tokens that have a vector."""

    def __init__(self, config: LateInteraction, tokenizer: TextTokenizer, form: Form) -> None:
        """Raises LoadingFailed for an expansion that the model cannot run."""
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.limit = min(tokenizer.limit, config.lengths[form] or tokenizer.limit)
        self._min_length = 0
        if form == "query" and config.expansion:
            self._set_expansion(config.expansion)
        hf, mask = tokenizer.tokenizer, config.mask
        self._skipped: set[int] = set()
        tasks = mask.get("skiplist_tasks")
        if form in (["document"] if tasks is None else tasks):
            words = mask.get("skiplist_words") or ()
            ids = {word: hf.convert_tokens_to_ids(word) for word in words}
            unknown = hf.unk_token_id
            self._skipped = {n for word, n in ids.items() if n != unknown or word == hf.unk_token}
        allowed = mask.get("keep_only_token_ids") if form == "document" else None
        self._allowed = {*allowed} if allowed else None  # None: all

    def _set_expansion(self, expansion: Mapping[str, Any]) -> None:
        strategy, length = expansion.get("strategy"), expansion.get("length")
        limit, hf = self.tokenizer.limit, self.tokenizer.tokenizer
        token = expansion.get("token") or hf.mask_token or hf.eos_token
        self._expansion_id: Any = None if token is None else hf.convert_tokens_to_ids(token)
        is_unknown = self._expansion_id == hf.unk_token_id and token != hf.unk_token
        if self._expansion_id is None or is_unknown or hf.padding_side != "right":
            raise LoadingFailed("its tokenizer cannot fill up queries at the right")
        if strategy not in ("fixed", "min") or not isinstance(length, int):
            raise LoadingFailed(f"its query expansion is not supported: {expansion}"[:200])
        if not 0 < length <= limit:
            raise LoadingFailed(f"its queries have {length} tokens, not 1 to {limit}")
        self._min_length, self._attends = length, bool(expansion.get("attend"))
        if strategy == "fixed":
            self.tokenizer.limit = length

    def rows(
        self, texts: Sequence[str], params: Sequence[str], prompt: str, truncation: Truncation
    ) -> list[TokenRow]:
        rows = self.tokenizer.tokenize_rows(texts, params, prompt, truncation)
        return [self.mark(row, param) for row, param in zip(rows, params, strict=True)]

    def mark(self, row: TokenRow, param: str) -> TokenRow:
        """Expand a row, and set which of its tokens have a vector. Raises InvalidInput for none."""
        row.is_pooled = False
        if (missing := self._min_length - len(row.ids)) > 0:
            row.attended = None if self._attends else len(row.ids)
            row.ids = [*row.ids, *[self._expansion_id] * missing]
        compared = (self._allowed or {*row.ids}) - self._skipped
        row.kept = [n for n, token_id in enumerate(row.ids) if token_id in compared]
        if not row.kept:
            raise InvalidInput.at(param, "has no tokens that this model compares")
        return row
