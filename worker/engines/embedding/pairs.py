"""Tokenize a query and its document as one row of tokens, in pool threads.

    cross-encoders   both texts between the tokenizer's special tokens
    decoders         both in a prompt whose answer is yes or no

A document is tokenized once, even if it is truncated. A query is never truncated.
"""

from collections.abc import Callable
from itertools import takewhile
from os.path import commonprefix

from batching.errors import ContextExceeded, InvalidInput
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.scoring import ScoringInput, Truncation
from worker.text.chat_template.special_token_escaping import SpecialTokenEscaper

NO_TRUNCATION = Truncation()
# The prompt of Qwen3-Reranker's training, from its model card. Jinja drops a last newline.
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ messages[0].content if messages | length > 2 else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\\n\\n' }}"
)

Params = tuple[str, str]  # the request fields of a query and its document, for errors
PairTokenizer = Callable[[ScoringInput], list[TokenRow]]


class CrossEncoderTokenizer:
    """Puts both texts into one row, with token type ids where the model has them. The special
    tokens around the texts are copied from a sample row of the tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        tokenizer.tokenizer.split_special_tokens = True  # within texts they are ordinary text
        self.has_types = "token_type_ids" in tokenizer.tokenizer.model_input_names
        sample = tokenizer.tokenize(
            ["a"], text_pair=["b"], return_token_type_ids=True, return_special_tokens_mask=True
        )
        [ids], [types], [special] = (
            sample[name] for name in ("input_ids", "token_type_ids", "special_tokens_mask")
        )
        query, document = map(len, tokenizer.encode_all(["a", "b"]))
        start = len(list(takewhile(bool, special)))
        end = len(ids) - len(list(takewhile(bool, special[::-1])))
        # the special tokens before, between and after the two texts
        parts = [slice(start), slice(start + query, end - document), slice(end, None)]
        self.ids, self.types = ([values[part] for part in parts] for values in (ids, types))
        self.query_type, self.document_type = types[start], types[end - 1]

    def __call__(self, payload: ScoringInput) -> list[TokenRow]:
        if payload.instruction is not None:
            raise InvalidInput.at("instruction", "this model takes no instruction")
        queries, documents = checked_texts(self.tokenizer, payload)
        distinct = list(dict.fromkeys(queries))
        ids = self.tokenizer.encode_all([*distinct, *documents])
        query_ids = dict(zip(distinct, ids, strict=False))
        pairs = zip(queries, ids[len(distinct) :], payload.paths, strict=True)
        return [
            self._row(payload, query_ids[query], document, params)
            for query, document, params in pairs
        ]

    def _row(
        self, payload: ScoringInput, query: list[int], document: list[int], params: Params
    ) -> TokenRow:
        before, between, after = self.ids
        around = len(before) + len(query) + len(between) + len(after)
        limit = self.tokenizer.limit
        document = document[document_slice(payload, len(document), around, limit, params)]
        row = TokenRow([*before, *query, *between, *document, *after])
        self.tokenizer.check_ids(row.ids, params[1])
        if self.has_types:
            before, between, after = self.types
            row.token_type_ids = [
                *before, *[self.query_type] * len(query),
                *between, *[self.document_type] * len(document), *after,
            ]  # fmt: skip
        return row


class PromptTokenizer:
    """Puts both texts into a prompt: by the checkpoint's own template, if it has queries and
    documents, or else by Qwen3-Reranker's. Two prompts with different documents show which tokens
    are the document's."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.escaper = SpecialTokenEscaper(tokenizer.tokenizer, tokenizer.encode_all)
        own = tokenizer.tokenizer.chat_template
        is_for_pairs = isinstance(own, str) and "query" in own and "document" in own
        self.template = own if is_for_pairs else QWEN3_TEMPLATE

    def __call__(self, payload: ScoringInput) -> list[TokenRow]:
        queries, documents = checked_texts(self.tokenizer, payload)
        instruction = payload.instruction
        around = {query: self._count_around(instruction, query) for query in dict.fromkeys(queries)}
        rows = []
        for query, document, params in zip(queries, documents, payload.paths, strict=True):
            ids, (before, after) = self._ids(instruction, query, document), around[query]
            tokens = len(ids) - before - after
            limit = self.tokenizer.limit
            part = document_slice(payload, tokens, before + after, limit, params)
            end = before + tokens
            ids = [*ids[:before], *ids[before:end][part], *ids[end:]]
            rows.append(TokenRow(self.tokenizer.check_ids(ids, params[1])))
        return rows

    def _count_around(self, instruction: str | None, query: str) -> tuple[int, int]:
        """Return the tokens before a document, and those after it."""
        one, other = (self._ids(instruction, query, document) for document in ("a", "b"))
        pairs = (one, other), (one[::-1], other[::-1])
        before, after = (len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071  # no paths
        return before, after

    def _ids(self, instruction: str | None, query: str, document: str) -> list[int]:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        key = self.escaper.new_key()
        text = self.tokenizer.tokenizer.apply_chat_template(
            self.escaper.escape(messages, key),
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.escaper.ids(text, key)


def checked_texts(tokenizer: TextTokenizer, payload: ScoringInput) -> tuple[list[str], list[str]]:
    """Return the queries and the documents. Raises InvalidInput for a text that is empty or too
    long; documents may be truncated."""
    for (query, document), params in zip(payload.pairs, payload.paths, strict=True):
        tokenizer.check_length(query, params[0], NO_TRUNCATION)
        tokenizer.check_length(document, params[1], payload.truncation)
    return [query for query, _ in payload.pairs], [document for _, document in payload.pairs]


def document_slice(
    payload: ScoringInput, tokens: int, around: int, limit: int, params: Params
) -> slice:
    """Return the slice of a document's tokens that fits beside `around` others. Raises InvalidInput
    for a query without room for a document and, without truncation, for a long document."""
    truncation = payload.truncation
    limit = min(limit, truncation.max_tokens or limit)
    wanted, room = min(tokens, payload.max_document_tokens or tokens), limit - around
    if wanted > room and not truncation.enabled:
        reason = f"has {wanted + around} tokens with its query"
        raise ContextExceeded.of(limit, params[1], reason)
    if wanted > room < 1:
        raise InvalidInput.at(
            params[0], f"has {around} tokens with its prompt, no room for a document in {limit}"
        )
    count = min(wanted, room)
    return slice(tokens - count, tokens) if truncation.keep_end else slice(count)
