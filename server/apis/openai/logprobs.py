"""Log-probabilities: the worker's TokenLogprob, converted to the structs of responses."""

from typing import Any

from msgspec import UNSET

from server.apis.openai.response_schemas import (
    PromptLogprob,
    ScoredToken,
    ScoredTokenWithTop,
    encode_now,
)
from worker.messages.deltas import Delta, TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


def prompt_fields(delta: Delta) -> dict[str, Any]:
    """Return the fields about a prompt's tokens, of the first delta of a choice."""
    return {
        "prompt_token_ids": delta.prompt_ids or UNSET,
        "prompt_logprobs": list(map(prompt_logprob, delta.prompt_logprobs)) or UNSET,
    }


def prompt_logprob(chosen: TokenLogprob) -> dict[str, PromptLogprob] | None:
    """Return a prompt's token and the likeliest at its position, by token id.

    None for the first token, which has no log-probability."""
    if chosen.logprob is None:
        return None
    scores: dict[str, PromptLogprob] = {}
    for rank, token in [*enumerate(chosen.top, start=1), (chosen.rank, chosen)]:
        score = PromptLogprob(clamp(token.logprob), rank, token.text)
        scores.setdefault(str(token.token_id), score)
    return encode_now(scores)


def scored_token_with_top(token: TokenLogprob, names_id: bool = False) -> ScoredTokenWithTop:
    """`names_id`: the id is in place of the text."""
    top = [scored_token(other, names_id) for other in token.top]
    text = token_name(token, names_id)
    scored = ScoredTokenWithTop(text, clamp(token.logprob), list(token.raw), top)
    return encode_now(scored)


def scored_token(token: TokenLogprob, names_id: bool = False) -> ScoredToken:
    return ScoredToken(token_name(token, names_id), clamp(token.logprob), list(token.raw))


def token_name(token: TokenLogprob, names_id: bool) -> str:
    return f"token_id:{token.token_id}" if names_id else token.text


def clamp(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
