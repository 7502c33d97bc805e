"""`POST /predict` of text-embeddings-inference: a translation to bodies of `POST /`."""

from starlette.types import Scope

from batching.errors import InvalidInput
from server.apis.pipeline.endpoint import PipelineInputParser, PipelineRequest
from server.http.json import Document, parse_json
from server.http.operation import JSON, Operation


class PredictParser(PipelineInputParser):
    """`inputs`: a text, a list of two texts as a pair, or a list of lists of one or two texts."""

    def parse(self, body: bytes, media: str, scope: Scope) -> PipelineRequest:
        return self.read_document(parse_json(body), scope)

    def read_document(self, document: Document, scope: Scope) -> PipelineRequest:
        if "parameters" in document:
            raise InvalidInput.at("parameters", "is of POST /: use truncate and raw_scores")
        for name in ("truncate", "raw_scores"):
            if not isinstance(document.get(name), bool | None):
                raise InvalidInput.at(name, "must be true or false")
        parameters = {"top_k": None, "truncation": document.pop("truncate", None) or False}
        if document.pop("raw_scores", None):
            parameters["function_to_apply"] = "none"
        if isinstance(inputs := document.get("inputs"), list):
            is_batch = any(isinstance(entry, list) for entry in inputs)
            document["inputs"] = [*map(pair_of, inputs)] if is_batch else pair_of(inputs)
        return super().read_document({**document, "parameters": parameters}, scope)


def pair_of(texts: object) -> str | dict[str, str]:
    """Return a pipeline's input. Raises InvalidInput."""
    match texts:
        case [str(text)]:
            return text
        case [str(text), str(pair)]:
            return {"text": text, "text_pair": pair}
    raise InvalidInput.at("inputs", "must be a text, a list of one or two, or a list of such lists")


PREDICT = Operation("POST /predict", "The scores of labels", {JSON: {"type": "array"}}, {JSON: {}})
