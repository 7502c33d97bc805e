"""A query and its document as a row of tokens, no longer than the model takes, in pool threads.

    cross-encoders   both texts between the tokenizer's own tokens
    decoders         both in a question that is answered by yes or no

A document is tokenized once, also where it is cut. A query is never cut.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from batching.errors import InvalidInput
from worker.embedding.texts import Row, TextReader
from worker.messages.scoring import PairsInput, Truncation
from worker.text.chat_template.special_token_escaping import SpecialTokenEscaper

WHOLE = Truncation()
# What Qwen3-Reranker was trained on; of its model card. Jinja drops a last newline.
QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ messages[0].content if messages | length > 2 else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\\n\\n' }}"
)

Paths = tuple[str, str]  # what errors about a query and a document name
Pairs = Callable[[PairsInput], list[Row]]


def bounded(reader: TextReader, payload: PairsInput) -> tuple[list[str], list[str]]:
    """Queries and documents, of no more characters than the model's tokens may have."""
    numbered = list(zip(payload.pairs, payload.paths, strict=True))
    return (
        [reader.bounded(query, paths[0], WHOLE) for (query, _), paths in numbered],
        [
            reader.bounded(document, paths[1], payload.truncation)
            for (_, document), paths in numbered
        ],
    )


def kept(payload: PairsInput, tokens: int, around: int, limit: int, paths: Paths) -> slice:
    """Which of a document's tokens are read beside `around` others."""
    truncation = payload.truncation
    limit = min(limit, truncation.tokens or limit)
    wanted, room = min(tokens, payload.document_tokens or tokens), limit - around
    if wanted > room and not truncation.cuts:
        many = f"has {wanted + around} tokens with its query; the model takes"
        raise InvalidInput.at(paths[1], f"{many} {limit}")
    if wanted > room < 1:
        many = f"leaves no room for a document in {limit} tokens"
        raise InvalidInput.at(paths[0], many)
    most = min(wanted, room)
    return slice(tokens - most, tokens) if truncation.left else slice(most)


class TextPairs:
    """Both texts in one row, told apart where the model does that. What stands around them is seen
    in a row of the tokenizer's."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        reader.tokenizer.split_special_tokens = True  # in texts; those around them are the model's
        self.typed = "token_type_ids" in reader.tokenizer.model_input_names
        seen = reader.tokenize(
            ["a"], text_pair=["b"], return_token_type_ids=True, return_special_tokens_mask=True
        )
        [ids], [types], [special] = (
            seen[f] for f in ("input_ids", "token_type_ids", "special_tokens_mask")
        )
        one, other = map(len, reader.encode_all(["a", "b"]))
        begin = len(list(takewhile(bool, special)))
        end = len(ids) - len(list(takewhile(bool, special[::-1])))
        self.around = [slice(begin), slice(begin + one, end - other), slice(end, None)]
        self.ids, self.types = ([each[part] for part in self.around] for each in (ids, types))
        self.type_of = types[begin], types[end - 1]

    def __call__(self, payload: PairsInput) -> list[Row]:
        if payload.instruction is not None:
            raise InvalidInput.at("instruction", "is for models that read one; this one does not")
        queries, documents = bounded(self.reader, payload)
        distinct = list(dict.fromkeys(queries))
        ids = self.reader.encode_all([*distinct, *documents])
        known = dict(zip(distinct, ids, strict=False))
        found = zip(queries, ids[len(distinct) :], payload.paths, strict=True)
        return [self._row(payload, known[query], each, paths) for query, each, paths in found]

    def _row(self, payload: PairsInput, query: list[int], document: list[int], paths: Paths) -> Row:
        before, between, after = self.ids
        around = len(before) + len(query) + len(between) + len(after)
        document = document[kept(payload, len(document), around, self.reader.limit, paths)]
        row = Row([*before, *query, *between, *document, *after])
        self.reader.checked(row.ids, paths[1])
        if self.typed:
            before, between, after = self.types
            one, other = self.type_of
            row.types = [
                *before, *[one] * len(query), *between, *[other] * len(document), *after,
            ]  # fmt: skip
        return row


class QuestionPairs:
    """In a question: in the checkpoint's own template, if that knows queries and documents, else in
    Qwen3-Reranker's words. Which tokens of it are the document's is seen in two questions that
    differ in nothing else."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self.control = SpecialTokenEscaper(reader.tokenizer, reader.encode_all)
        own = reader.tokenizer.chat_template
        knows = isinstance(own, str) and "query" in own and "document" in own
        self.template = own if knows else QUESTION

    def __call__(self, payload: PairsInput) -> list[Row]:
        queries, documents = bounded(self.reader, payload)
        told = payload.instruction
        around = {each: self._around(told, each) for each in dict.fromkeys(queries)}
        rows = []
        for query, document, paths in zip(queries, documents, payload.paths, strict=True):
            ids, (before, after) = self._ids(told, query, document), around[query]
            tokens = len(ids) - before - after
            part = kept(payload, tokens, before + after, self.reader.limit, paths)
            end = before + tokens
            ids = [*ids[:before], *ids[before:end][part], *ids[end:]]
            rows.append(Row(self.reader.checked(ids, paths[1])))
        return rows

    def _around(self, told: str | None, query: str) -> tuple[int, int]:
        """How many tokens stand before a document, and how many after it."""
        one, other = (self._ids(told, query, document) for document in ("a", "b"))
        return _alike(one, other), _alike(one[::-1], other[::-1])

    def _ids(self, told: str | None, query: str, document: str) -> list[int]:
        messages = [{"role": "system", "content": told}] if told else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        key = self.control.new_key()
        text = self.reader.tokenizer.apply_chat_template(
            self.control.hidden(messages, key),
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.control.ids(text, key)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
