"""`GET /info` of text-embeddings-inference: the embedding model, the reranker or else
the text classifier at `POST /`."""

from typing import Any

from starlette.requests import Request

from batching.errors import NotReady
from server import __version__
from server.apis.openai.embedding.endpoint import MAX_INPUTS
from server.apis.openai.models import NamedModel
from server.core.settings import Settings
from server.http.operation import JSON, Operation, OperationRoute
from worker.messages.protocol import ModelInfo

INFO = Operation("GET /info", "The model and its limits", {JSON: {"type": "object"}}, errors=[503])
RERANKER = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def model_type(info: ModelInfo) -> dict[str, Any]:
    if info.pooling:
        return {"embedding": {"pooling": info.pooling}}
    if not info.labels:
        return RERANKER
    names = {str(n): label for n, label in info.labels.items()}
    return {"classifier": {"id2label": names, "label2id": {names[n]: int(n) for n in names}}}


def info_route(settings: Settings, model: NamedModel) -> OperationRoute:
    async def info(request: Request) -> dict[str, Any]:
        if (info := model.served.info) is None:
            raise NotReady(f"the model {model.id!r} has not been loaded yet", 5)
        return {
            "model_id": model.id,
            "model_dtype": info.dtype,
            "model_type": model_type(info),
            "max_concurrent_requests": settings.max_queue_size,
            "max_input_length": info.max_length or model.text_info.max_model_len,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_client_batch_size": MAX_INPUTS,
            "auto_truncate": False,
            "tokenization_workers": len(model.worker_client.prepare.threads),
            "version": __version__,
        }

    return OperationRoute(INFO, info)
