"""The log-probabilities of an output's tokens, as its text is shown."""

from collections.abc import Iterator
from dataclasses import replace

from worker.messages.deltas import TokenLogprob
from worker.model.sampler import SampledToken
from worker.text.detokenizer import TextSpan, Tokens, TokenSpan, Vocabulary


class ContentLogprobs:
    """The log-probabilities of tokens whose text is shown as content, as far as it is shown."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._without_text: list[TokenLogprob] = []  # parts of a character that is not complete
        self._last: Tokens | None = None  # those of the last text
        self._shown: Tokens | None = None  # the last whose text is shown to its end
        self._open: Tokens | None = None  # those whose text is shown in part
        self._open_text = ""  # that part

    def span(self, text: str, sampled: SampledToken) -> TextSpan:
        """Return the text that a token completes, with its tokens."""
        self._without_text.append(token_logprob(self._vocabulary, sampled, text))
        if not text:
            return TextSpan("")
        tokens, self._without_text = tuple(self._without_text), []
        self._last = tokens
        return TextSpan(text, [TokenSpan(text, tokens)])

    def rest(self, text: str, sampled: SampledToken) -> TextSpan:
        """Return the pending text at the end. It belongs to the last token without text, or else to
        `sampled`."""
        if not self._without_text:
            return self.span(text, sampled)
        *others, last = self._without_text
        self._without_text, self._last = [], (*others, replace(last, text=text))
        return TextSpan(text, [TokenSpan(text, self._last)])

    def show(self, span: TextSpan) -> Iterator[TokenLogprob]:
        """Yield the tokens whose text is complete with this span."""
        for part in span.token_spans:
            if part.tokens is not self._open:
                yield from self.close()
                self._open, self._open_text = part.tokens, ""
            self._open_text += part.text
            if part.ends_token:
                self._shown = part.tokens
                yield from self.close()

    def finish(self) -> Iterator[TokenLogprob]:
        """Yield the tokens without text at the end, after the content before them."""
        if self._last is self._shown:
            yield from self._without_text

    def close(self) -> Iterator[TokenLogprob]:
        """Yield the token that is shown in part, if there is one: the rest of it never will be."""
        if self._open is not None:
            *others, token = self._open
            text = self._open_text
            yield from others
            yield token if text == token.text else replace(token, text=text, raw=text.encode())
            self._open = None


def token_logprob(vocabulary: Vocabulary, sampled: SampledToken, text: str) -> TokenLogprob:
    raw = vocabulary.token(sampled.token)[1]
    top = (TokenLogprob(id_, *vocabulary.token(id_), logprob) for id_, logprob in sampled.top)
    return TokenLogprob(sampled.token, text, raw, sampled.logprob, tuple(top), sampled.rank)
