"""A query and its document as a row of tokens, no longer than the model takes, in pool threads.

    cross-encoders   both texts between the tokenizer's own tokens
    decoders         both in a question that is answered by yes or no

A text is tokenized once, also where its document is cut; only the checkpoint's own template may
take another look at what is left of it. A query is never cut.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from batching.errors import InvalidInput
from worker.embedding.texts import Row, TextReader
from worker.scoring import PairsInput, Truncation
from worker.text.control_tokens import ControlTokens

CUT = Truncation(cuts=True)
WHOLE = Truncation()
# What Qwen3-Reranker was trained on; of its model card.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

# A cut text may make more tokens than were kept of it: it is cut again, by so many more.
MARGINS = (0, 4, 64)

Paths = tuple[str, str]  # what errors about a query and a document name
Pairs = Callable[[PairsInput], list[Row]]


def bounded(reader: TextReader, payload: PairsInput) -> tuple[list[str], list[str]]:
    """Queries and documents, of no more characters than the model's tokens may have."""
    of_documents = CUT if payload.cuts else WHOLE
    numbered = list(zip(payload.pairs, payload.paths, strict=True))
    return (
        [reader.bounded(query, paths[0], WHOLE) for (query, _), paths in numbered],
        [reader.bounded(document, paths[1], of_documents) for (_, document), paths in numbered],
    )


def kept(payload: PairsInput, tokens: int, around: int, limit: int, paths: Paths) -> int:
    """How many of a document's tokens are read beside `around` others."""
    wanted = min(tokens, payload.document_tokens or tokens)
    if wanted + around <= limit:
        return wanted
    if not payload.cuts:
        many = f"has {wanted + around} tokens with its query; the model takes"
        raise InvalidInput.at(paths[1], f"{many} {limit}")
    if around >= limit:
        many = "leaves no room for a document: the model takes"
        raise InvalidInput.at(paths[0], f"{many} {limit} tokens")
    return limit - around


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
        document = document[: kept(payload, len(document), around, self.reader.limit, paths)]
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
    """In Qwen3-Reranker's words, of which the document is the last."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self.control = ControlTokens(reader.tokenizer, reader.encode_all)
        self.before = reader.encode(BEFORE, add_special_tokens=False)
        self.after = reader.encode(AFTER, add_special_tokens=False)

    def __call__(self, payload: PairsInput) -> list[Row]:
        queries, documents = bounded(self.reader, payload)
        task = payload.instruction or INSTRUCTION
        told = {query: f"<Instruct>: {task}\n<Query>: {query}\n<Document>: " for query in queries}
        lengths = {query: len(self.control.plain_ids(text)) for query, text in told.items()}
        rows = []
        for query, document, paths in zip(queries, documents, payload.paths, strict=True):
            ids, before = self.control.plain_ids(told[query] + document), lengths[query]
            around = len(self.before) + before + len(self.after)
            most = kept(payload, len(ids) - before, around, self.reader.limit, paths)
            rows.append(Row([*self.before, *ids[: before + most], *self.after]))
            self.reader.checked(rows[-1].ids, paths[1])
        return rows


class TemplatePairs:
    """In the checkpoint's own template, which knows queries and documents."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self.control = ControlTokens(reader.tokenizer, reader.encode_all)

    def __call__(self, payload: PairsInput) -> list[Row]:
        queries, documents = bounded(self.reader, payload)
        around = {each: len(self._ids(each, "", payload)) for each in dict.fromkeys(queries)}
        made = self.reader.tokenize(
            documents, add_special_tokens=False, return_offsets_mapping=True
        )
        ends = [[end for _, end in each] for each in made["offset_mapping"]]
        rows = []
        for n, (query, paths) in enumerate(zip(queries, payload.paths, strict=True)):
            most = kept(payload, len(ends[n]), around[query], self.reader.limit, paths)
            rows.append(Row(self._fitting(payload, query, documents[n], ends[n][:most])))
            self.reader.checked(rows[-1].ids, paths[1])
        return rows

    def _fitting(
        self, payload: PairsInput, query: str, document: str, ends: Sequence[int]
    ) -> list[int]:
        """Of a document up to the last of its tokens' `ends`, or some before that."""
        for margin in MARGINS:
            at = max(0, len(ends) - 1 - margin)
            ids = self._ids(query, document[: ends[at]] if ends else "", payload)
            if len(ids) <= self.reader.limit:
                break
        return ids

    def _ids(self, query: str, document: str, payload: PairsInput) -> list[int]:
        told = payload.instruction
        messages = [{"role": "system", "content": told}] if told else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        key = self.control.new_key()
        text = self.reader.tokenizer.apply_chat_template(
            self.control.hidden(messages, key), tokenize=False, add_generation_prompt=True
        )
        return self.control.ids(text, key)


def asking(reader: TextReader) -> Pairs:
    """The checkpoint's own template, if that knows queries and documents; else Qwen3-Reranker's."""
    template = reader.tokenizer.chat_template
    knows = isinstance(template, str) and "query" in template and "document" in template
    return TemplatePairs(reader) if knows else QuestionPairs(reader)
