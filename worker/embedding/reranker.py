"""Relevance of documents to queries: pairs → token ids → one number each.

    cross-encoder   both texts in one row, a head with one label
    yes or no       a decoder is asked whether the document answers the query; the score is how much
                    likelier it would say the one than the other

Entries of the registry like a pipeline. A document that is too long is cut, where the request wants
that; a query never is. Scores go through the checkpoint's activation, sigmoid if it names none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batching.errors import InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from worker.embedding.rows import RowModel
from worker.embedding.texts import Row, TextReader
from worker.protocol import ModelInfo
from worker.scoring import PairsInput, Scored, Truncation
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

Encode = Callable[[str, str, str | None], Row]  # a query, a document, an instruction


class Reranker:
    """Implements worker.protocol.Runner and Tokenizing. `encode` makes a pair's row; `score`, one
    number [rows] for each row."""

    def __init__(
        self,
        reader: TextReader,
        encode: Encode,
        score: Callable[[Sequence[Row]], Tensor],
        activation: nn.Module | None,
        info: ModelInfo,
    ) -> None:
        self.reader = reader
        self.encode_pair, self.score = encode, score
        self.activation = activation or nn.Sigmoid()
        self.info = info
        self.max_model_len = reader.limit
        self.takes_images = False
        self.encode, self.decode, self.token = reader.encode, reader.decode, reader.token

    # ── pool threads ──

    def prepare(self, item: WorkItem) -> None:
        payload: PairsInput = item.payload
        numbered = zip(payload.pairs, payload.paths, strict=True)
        rows = [self._row(payload, pair, paths) for pair, paths in numbered]
        counts = [len(row.ids) for row in rows]
        item.prepared = rows
        item.rows, item.tokens, item.width = len(rows), sum(counts), max(counts)

    def _row(self, payload: PairsInput, pair: tuple[str, str], paths: tuple[str, str]) -> Row:
        query = self.reader.bounded(pair[0], paths[0], WHOLE)
        document = self.reader.bounded(pair[1], paths[1], CUT if payload.cuts else WHOLE)
        if (most := payload.document_tokens) is not None:
            document = self._shortened(document, most)
        row = self.encode_pair(query, document, payload.instruction)
        for margin in MARGINS:
            if (over := len(row.ids) - self.reader.limit) <= 0:
                break
            if not payload.cuts:
                many = f"has {len(row.ids)} tokens with its query; the model takes"
                raise InvalidInput.at(paths[1], f"{many} {self.reader.limit}")
            kept = len(self._tokens(document)) - over - margin
            if kept < 1:
                many = "leaves no room for a document: the model takes"
                raise InvalidInput.at(paths[0], f"{many} {self.reader.limit} tokens")
            document = self._shortened(document, kept)
            row = self.encode_pair(query, document, payload.instruction)
        self.reader.checked(row.ids, paths[1])
        return row

    def _tokens(self, text: str) -> list[int]:
        return self.reader.encode(text, add_special_tokens=False)

    def _shortened(self, text: str, most: int) -> str:
        """The text of its first tokens."""
        made = self.reader.tokenize([text], add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in made["offset_mapping"][0]]
        return text if len(ends) <= most else text[: ends[most - 1]]

    def finish(self, item: WorkItem, raw: Tensor) -> Scored:
        payload: PairsInput = item.payload
        if not raw.isfinite().all():
            raise ItemFailed("the model gave no finite number for this input")
        scores: Tensor = raw if payload.raw else self.activation(raw)
        return Scored(scores.tolist(), item.tokens)

    # ── the worker thread ──

    @torch.inference_mode()
    def forward(self, prepared: list[Any]) -> list[Tensor]:
        """The numbers of each item's pairs."""
        scores = self.score([row for each in prepared for row in each]).float().cpu()
        return list(torch.split(scores, [len(each) for each in prepared]))

    def warm_up(self) -> None:
        item = WorkItem(PairsInput([("a", "a")], [("query", "documents")]), float("inf"), 0.0)
        self.prepare(item)
        [raw] = self.forward([item.prepared])
        self.finish(item, raw)


def cross_encoding(reader: TextReader) -> Encode:
    """Both texts in one row, told apart where the model does that."""
    typed = "token_type_ids" in reader.tokenizer.model_input_names
    reader.tokenizer.split_special_tokens = True  # in texts; those around them are the model's

    def encode(query: str, document: str, instruction: str | None) -> Row:
        if instruction is not None:
            raise InvalidInput.at("instruction", "is for models that read one; this one does not")
        made = reader.tokenize([query], text_pair=[document], return_token_type_ids=typed)
        types = made["token_type_ids"][0] if typed else None
        return Row(made["input_ids"][0], types)

    return encode


def asking(reader: TextReader) -> Encode:
    """The checkpoint's own template, if that knows queries and documents; else Qwen3-Reranker's."""
    template = reader.tokenizer.chat_template
    knows = isinstance(template, str) and "query" in template and "document" in template
    control = ControlTokens(reader.tokenizer, reader.encode_all)
    before = reader.encode(BEFORE, add_special_tokens=False)
    after = reader.encode(AFTER, add_special_tokens=False)

    def rendered(query: str, document: str, instruction: str | None) -> Row:
        system = [{"role": "system", "content": instruction}] if instruction else []
        messages = [
            *system, {"role": "query", "content": query}, {"role": "document", "content": document},
        ]  # fmt: skip
        key = control.new_key()
        text = reader.tokenizer.apply_chat_template(
            control.hidden(messages, key), tokenize=False, add_generation_prompt=True
        )
        return Row(control.ids(text, key))

    def built(query: str, document: str, instruction: str | None) -> Row:
        told = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return Row([*before, *control.plain_ids(told), *after])

    return rendered if knows else built


def by_label(rows: RowModel) -> Callable[[Sequence[Row]], Tensor]:
    return lambda pairs: rows(pairs)[:, 0]


def by_answer(rows: RowModel, direction: Tensor) -> Callable[[Sequence[Row]], Tensor]:
    """`direction` [H]: the output weights of one answer less those of the other."""

    def score(pairs: Sequence[Row]) -> Tensor:
        ends = torch.tensor([len(row.ids) for row in pairs], device=rows.device).cumsum(0)
        return rows(pairs)[ends - 1].float() @ direction

    return score
