"""`GET /info` of text-embeddings-inference: the embedding model, or else the reranker."""

from typing import Any

from starlette.requests import Request

from batching.errors import NotReady
from server import __version__
from server.apis.openai.embedding.endpoint import MAX_INPUTS
from server.apis.openai.models import NamedModel
from server.core.settings import Settings
from server.http.operation import JSON, Operation, OperationRoute

INFO = Operation("GET /info", "The model and its limits", {JSON: {"type": "object"}}, errors=[503])
RERANKER = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def info_route(settings: Settings, model: NamedModel) -> OperationRoute:
    async def info(request: Request) -> dict[str, Any]:
        if (info := model.served.info) is None:
            raise NotReady(f"the model {model.id!r} has not been loaded yet", 5)
        return {
            "model_id": model.id,
            "model_dtype": info.dtype,
            "model_type": {"embedding": {"pooling": info.pooling}} if info.pooling else RERANKER,
            "max_concurrent_requests": settings.max_queue_size,
            "max_input_length": model.text_info.max_model_len,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_client_batch_size": MAX_INPUTS,
            "auto_truncate": False,
            "tokenization_workers": len(model.worker_client.prepare.threads),
            "version": __version__,
        }

    return OperationRoute(INFO, info)
