"""The log-probabilities of a sequence's tokens, as they are told with its text."""

from collections.abc import Iterator
from dataclasses import replace

from worker.deltas import TokenLogprob
from worker.model.sampler import SampledToken
from worker.text.detokenizer import Piece, Share, Tokens, Vocabulary


class ContentLogprobs:
    """The log-probabilities of the tokens whose text is shown as content, as far as it is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._silent: list[TokenLogprob] = []  # without text: part of a character that is to come
        self._last: Tokens | None = None  # those of the last text
        self._shown: Tokens | None = None  # the last whose text is shown to its end
        self._open: Tokens | None = None  # shown in part
        self._text = ""  # as much of it

    def piece(self, text: str, sampled: SampledToken) -> Piece:
        """The text that a token has made certain."""
        self._silent.append(token_logprob(self._vocabulary, sampled, text))
        if not text:
            return Piece("")
        tokens, self._silent = tuple(self._silent), []
        self._last = tokens
        return Piece(text, [Share(text, tokens)])

    def rest(self, text: str, sampled: SampledToken) -> Piece:
        """Half a character in the end: of the last token without text; if none, of `sampled`."""
        if not self._silent:
            return self.piece(text, sampled)
        *silent, last = self._silent
        self._silent, self._last = [], (*silent, replace(last, text=text))
        return Piece(text, [Share(text, self._last)])

    def show(self, piece: Piece) -> Iterator[TokenLogprob]:
        """The tokens whose text is shown with this piece."""
        for share in piece.shares:
            if share.tokens is not self._open:
                yield from self.close()
                self._open, self._text = share.tokens, ""
            self._text += share.text
            if share.ends:
                self._shown = share.tokens
                yield from self.close()

    def finish(self) -> Iterator[TokenLogprob]:
        """Tokens that never got a text go with the content before them."""
        if self._last is self._shown:
            yield from self._silent

    def close(self) -> Iterator[TokenLogprob]:
        """The token of which a part is shown, if there is one: no more of it will be."""
        if self._open is not None:
            *silent, token = self._open
            yield from silent
            part = self._text != token.text
            yield replace(token, text=self._text, raw=self._text.encode()) if part else token
            self._open = None


def token_logprob(vocabulary: Vocabulary, sampled: SampledToken, text: str) -> TokenLogprob:
    raw = vocabulary.token(sampled.token)[1]
    top = (TokenLogprob(id_, *vocabulary.token(id_), logprob) for id_, logprob in sampled.top)
    return TokenLogprob(sampled.token, text, raw, sampled.logprob, tuple(top), sampled.rank)
