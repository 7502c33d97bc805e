"""Embeddings: texts → token ids → states → vectors → JSON.

    tokenize: token rows, all checks → one vector per row → finish: truncate to `dimensions`,
    normalize, encode

or one per token, the states as they are or those of late interaction (late_interaction.py); or
sparse ones (splade.py).

Token rows run in single_pass.py or, of decoders, in engine.py.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.engines.embedding.late_interaction import FormTokenizer
from worker.engines.embedding.pooling import PoolingHead
from worker.engines.embedding.pooling_runner import PoolingRunner, RowModel, states_of
from worker.engines.embedding.sentence_transformers import QUERY, ROLES, SentenceTransformersConfig
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.messages.protocol import ModelInfo
from worker.messages.scoring import EmbeddingInput, EmbeddingOutput
from worker.model.paged_runner import PagedRunner

Vectors = NDArray[np.float32]

# Of a response with the states of tokens: 8,192 tokens of a model with 1,024 dimensions.
MAX_NUMBERS = 1 << 23


class Embedder(PoolingRunner[EmbeddingInput, EmbeddingOutput]):
    """`allowed_dimensions`: sizes that vectors may be truncated to; None: any, empty: none."""

    warm_up_input = EmbeddingInput(["a"], None)

    def __init__(
        self,
        model: RowModel,
        tokenizer: TextTokenizer,
        config: SentenceTransformersConfig,
        allowed_dimensions: Sequence[int] | None,
        info: ModelInfo,
    ) -> None:
        self.pooling = PoolingHead(config, info.device)
        if config.splade:
            self.warm_up_input = replace(self.warm_up_input, encoding="sparse")
        self.late = late = config.late
        if late:
            self.warm_up_input = replace(self.warm_up_input, encoding="tokens")
            self.queries, self.documents = (
                FormTokenizer(late, tokenizer, form) for form in ("query", "document")
            )
        super().__init__(model, self.pooling, tokenizer, info)
        self.config, self.allowed_dimensions = config, allowed_dimensions
        self.reads_last_state = {*config.poolings} == {"lasttoken"}
        row = TokenRow(tokenizer.encode("a"))
        if late:
            row = self.documents.mark(row, "")
        states = states_of(model, row)
        size = self.head(states, row).shape[-1]
        self.dimensions = config.truncate_dim or size
        self.state_size = size if late else states.shape[1]

    # ── pool threads ──

    def tokenize(self, payload: EmbeddingInput) -> list[TokenRow]:
        self._check_dimensions(payload.dimensions)
        rows = self._rows(payload)
        if payload.encoding == "tokens" or (self.late and payload.encoding == "vectors"):
            self._check_states(payload, sum(len(row.kept or row.ids) for row in rows))
            for row in rows:
                row.is_pooled = False
        elif self.late:
            raise InvalidInput(
                "this model has a vector for each token: POST /embed_all returns them, and "
                "/v1/score compares them"
            )
        elif (payload.encoding == "sparse") != bool(self.config.splade):
            kind, path = ("sparse", "/embed_sparse") if self.config.splade else ("dense", "/embed")
            raise InvalidInput(f"the vectors of this model are {kind}: POST {path} returns them")
        return rows

    def _rows(self, payload: EmbeddingInput) -> list[TokenRow]:
        if not isinstance(payload.inputs[0], str):
            return self._rows_of_ids(payload)
        texts = [text for text in payload.inputs if isinstance(text, str)]
        params = [payload.path(n) for n in range(len(texts))]
        prompt = self._prompt(payload)
        if self.late:
            is_query = payload.prompt in QUERY if payload.prompt else payload.is_query
            forms = self.queries if is_query else self.documents
            return forms.rows(texts, params, prompt, payload.truncation)
        return self.tokenizer.tokenize_rows(texts, params, prompt, payload.truncation)

    def _rows_of_ids(self, payload: EmbeddingInput) -> list[TokenRow]:
        if payload.prompt is not None:
            raise InvalidInput.at("prompt_name", "is for texts, not for token ids")
        tokenizer = self.documents.tokenizer if self.late else self.tokenizer
        rows = []
        for n, ids in enumerate(payload.inputs):
            assert not isinstance(ids, str)
            param, truncation = payload.path(n), payload.truncation
            length = tokenizer.truncated_length(len(ids), param, truncation)
            if length is not None:
                ids = ids[-length:] if truncation.keep_end else ids[:length]
            row = TokenRow(tokenizer.check_ids([*ids], param))
            rows.append(self.documents.mark(row, param) if self.late else row)
        return rows

    def _prompt(self, payload: EmbeddingInput) -> str:
        """Return the prompt before each text. A known role without a prompt has an empty one."""
        prompts = self.config.prompts
        for name, param in ((payload.prompt, "prompt_name"), (payload.role, "input_type")):
            if name is None:
                continue
            if name in prompts:
                return prompts[name]
            takes_roles = param == "input_type" or self.late
            if takes_roles and name in ROLES:
                return self.config.role_prompt(name)
            known = {**prompts, **(ROLES if takes_roles else {})}
            if not known:
                raise InvalidInput.at(param, "must be left out: this model has no prompts")
            raise InvalidInput.at(param, f"must be one of {', '.join(known)}, not {name[:50]!r}")
        if self.late:
            return self.config.role_prompt("query" if payload.is_query else "document")
        return prompts[self.config.default_prompt] if self.config.default_prompt else ""

    def _check_states(self, payload: EmbeddingInput, tokens: int) -> None:
        """Raise InvalidInput if the states of tokens are not kept, or too many for a response."""
        if isinstance(self.model, PagedRunner) and self.reads_last_state:
            raise InvalidInput("this model keeps the state of a text's last token only")
        payload.numbers.append(tokens * self.state_size)
        if sum(payload.numbers) > MAX_NUMBERS:
            reason = f"the vectors would have more than {MAX_NUMBERS} numbers: send fewer texts"
            raise InvalidInput.at(payload.param, reason)

    def _check_dimensions(self, dimensions: int | None) -> None:
        allowed = self.allowed_dimensions
        if dimensions is None or dimensions == self.dimensions:
            return
        if dimensions > self.dimensions:
            reason = f"at most {self.dimensions}, the model's own, not {dimensions}"
        elif allowed is None or dimensions in allowed:
            return
        elif allowed:
            reason = f"one of {', '.join(map(str, allowed))}, not {dimensions}"
        else:
            untrained = "the model was not trained for others (Matryoshka)"
            reason = f"{self.dimensions}, not {dimensions}: {untrained}"
        raise InvalidInput.at("dimensions", f"must be {reason}")

    def result(self, item: WorkItem[EmbeddingInput], raw: list[Tensor]) -> EmbeddingOutput:
        """Return an item's vectors, encoded as its payload requests."""
        payload = item.payload
        if payload.encoding in ("tokens", "sparse"):
            encode = to_numbers if payload.encoding == "tokens" else to_entries
            content = b",".join(encode(output.numpy()) for output in raw)
            return EmbeddingOutput(content, np.empty(0, np.float32), item.tokens)
        if self.late:
            scale = self.late.is_mean and payload.is_query
            rows = [(output / len(output) if scale else output).numpy() for output in raw]
            return EmbeddingOutput(b"", np.empty(0, np.float32), item.tokens, rows)
        dimensions = payload.dimensions or self.dimensions
        normalize = payload.normalize
        if normalize is None:
            normalize = self.pooling.normalizes or payload.dimensions is not None
        stacked = torch.stack(raw).numpy()
        vectors = np.ascontiguousarray(stacked[:, :dimensions], dtype="<f4")
        if normalize:
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(norms, np.float32(1e-12))
        content = b"" if payload.encoding == "vectors" else encode_vectors(vectors, payload)
        return EmbeddingOutput(content, vectors, item.tokens)


def to_numbers(array: Vectors) -> bytes:
    """Return a vector, or a list of them, as JSON."""
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def to_entries(weights: Vectors) -> bytes:
    [active] = weights.nonzero()
    entries = zip(active.tolist(), weights[active], strict=True)
    values = [{"index": index, "value": value} for index, value in entries]
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_vectors(vectors: Vectors, payload: EmbeddingInput) -> bytes:
    """Encode vectors as JSON values, separated by commas, without brackets around them."""
    if payload.encoding == "base64":
        values = [b'"%b"' % base64.b64encode(vector.tobytes()) for vector in vectors]
    else:
        values = [to_numbers(vector) for vector in vectors]
    if payload.encoding == "bare":
        return b",".join(values)
    first = payload.first_index or 0
    entry = b'{"object":"embedding","index":%d,"embedding":%b}'
    return b",".join(entry % (first + n, value) for n, value in enumerate(values))
