"""Embeddings: texts → token ids → states → vectors → JSON.

    read: tokens, and all that can be refused → a vector of each row → finish: shortened,
    normalised, written

How rows are run is scorer.py's.
"""

import base64
from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray
from torch import Tensor

from batching.errors import InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from worker.embedding.head import Head
from worker.embedding.paged_rows import PagedRows
from worker.embedding.rows import RowModel
from worker.embedding.scorer import Scorer
from worker.embedding.sentence_transformers import SentenceTransformersConfig
from worker.embedding.texts import Row, TextReader
from worker.messages.protocol import ModelInfo
from worker.messages.scoring import Embedded, EmbeddingInput

Vectors = NDArray[np.float32]

# What clients call a text, and the prompts' names that mean it.
QUERY = ("query", "search_query")
DOCUMENT = ("document", "passage", "corpus", "search_document")
ROLES = {**dict.fromkeys(QUERY, QUERY), **dict.fromkeys(DOCUMENT, DOCUMENT)}


class Embedder(Scorer):
    """`sizes`: those that its vectors may be shortened to; None for any, empty for none."""

    smallest = EmbeddingInput(["a"], None)

    def __init__(
        self,
        rows: RowModel | PagedRows,
        reader: TextReader,
        files: SentenceTransformersConfig,
        sizes: Sequence[int] | None,
        info: ModelInfo,
    ) -> None:
        self.head = Head(files, rows.device)
        super().__init__(rows, self.head.pool, reader, info)
        self.files, self.sizes = files, sizes
        [vector] = self.forward([[Row(reader.encode("a"))]])
        self.size = files.truncate_dim or vector.shape[1]

    # ── pool threads ──

    def read(self, payload: EmbeddingInput) -> list[Row]:
        self._check_size(payload.dimensions)
        return self._ids(payload) if isinstance(payload.inputs[0], list) else self._texts(payload)

    def _texts(self, payload: EmbeddingInput) -> list[Row]:
        paths = [payload.path(n) for n in range(len(payload.inputs))]
        texts = [text for text in payload.inputs if isinstance(text, str)]
        return self.reader.rows(texts, paths, self._prompt(payload), payload.truncation)

    def _ids(self, payload: EmbeddingInput) -> list[Row]:
        """Token ids as they are."""
        if payload.prompt is not None:
            raise InvalidInput.at("prompt_name", "goes with texts, not with token ids")
        rows = []
        for n, ids in enumerate(payload.inputs):
            assert isinstance(ids, list)
            path, truncation = payload.path(n), payload.truncation
            if (most := self.reader.most(len(ids), path, truncation)) is not None:
                ids = ids[-most:] if truncation.left else ids[:most]
            rows.append(Row(self.reader.checked(ids, path)))
        return rows

    def _prompt(self, payload: EmbeddingInput) -> str:
        """What stands before each text. A role that every model knows needs no prompt."""
        prompts = self.files.prompts
        for name, param in ((payload.prompt, "prompt_name"), (payload.role, "input_type")):
            if name is None:
                continue
            if name in prompts:
                return prompts[name]
            if param == "input_type" and name in ROLES:
                return next((prompts[each] for each in ROLES[name] if each in prompts), "")
            known = [*prompts, *(ROLES if param == "input_type" else ())]
            may = f"one of {', '.join(known)}" if known else "left out: this model has no prompts"
            raise InvalidInput.at(param, f"must be {may}, not {name[:50]!r}")
        return prompts[self.files.default_prompt] if self.files.default_prompt else ""

    def _check_size(self, wanted: int | None) -> None:
        if wanted is None or wanted == self.size:
            return
        if wanted > self.size:
            raise InvalidInput.at("dimensions", f"is {wanted}; the model has {self.size}")
        if self.sizes is not None and wanted not in self.sizes:
            if self.sizes:
                may = f"must be one of {', '.join(map(str, self.sizes))}"
                raise InvalidInput.at("dimensions", f"{may}, not {wanted}")
            only = f"must be {self.size}: this model was not trained for others (Matryoshka)"
            raise InvalidInput.at("dimensions", only)

    def finish(self, item: WorkItem, raw: Tensor) -> Embedded:
        payload: EmbeddingInput = item.payload
        if not raw.isfinite().all():
            raise ItemFailed("the model gave no finite numbers for this input")
        size = payload.dimensions or self.size
        unit = payload.normalize
        if unit is None:
            unit = self.head.normalizes or payload.dimensions is not None
        vectors = np.ascontiguousarray(raw.numpy()[:, :size], dtype="<f4")
        if unit:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        content = b"" if payload.form == "vectors" else written(vectors, payload)
        return Embedded(content, vectors, item.tokens)

    # ── the worker thread ──

    def head_of(self, kept: Tensor) -> Tensor:
        """Vectors [texts, D]."""
        made: Tensor = self.head.layers(kept)
        return made


def written(vectors: Vectors, payload: EmbeddingInput) -> bytes:
    """Vectors as JSON, with commas between them and no brackets around."""
    if payload.form == "base64":
        each = [b'"%b"' % base64.b64encode(vector.tobytes()) for vector in vectors]
    else:
        each = [orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY) for vector in vectors]
    if payload.form == "bare":
        return b",".join(each)
    first = payload.first or 0
    head = b'{"object":"embedding","index":%d,"embedding":%b}'
    return b",".join(head % (first + n, vector) for n, vector in enumerate(each))
