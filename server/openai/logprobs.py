"""Log-probabilities of tokens as answers have them."""

import orjson

from server.http.json import Document
from worker.messages.deltas import TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def prompt_document(chosen: TokenLogprob) -> orjson.Fragment | None:
    """A prompt's token and the likeliest in its place, by their ids."""
    if chosen.logprob is None:
        return None
    ranked = [*enumerate(chosen.top, start=1), (chosen.rank, chosen)]
    document: Document = {}
    for rank, each in ranked:
        scored = {"logprob": finite(each.logprob), "rank": rank, "decoded_token": each.text}
        document.setdefault(str(each.token_id), scored)
    return _written(document)


def logprob_document(each: TokenLogprob) -> orjson.Fragment:
    """A token, its log-probability and the likeliest others, as chat and responses have it."""
    return _written(token_document(each) | {"top_logprobs": list(map(token_document, each.top))})


def _written(document: Document) -> orjson.Fragment:
    """At once: hundreds of thousands together would be slow to make, and hold the interpreter until
    they are all written."""
    return orjson.Fragment(orjson.dumps(document))


def token_document(each: TokenLogprob) -> Document:
    """A token and its log-probability."""
    return {"token": each.text, "logprob": finite(each.logprob), "bytes": list(each.raw)}


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
