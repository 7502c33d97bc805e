"""`POST /detokenize`: the text of token ids, as vLLM answers it."""

from typing import Any

from msgspec import Struct

from batching.errors import InvalidInput
from server.openai.params import TokenId, decode
from server.openai.tokenize import TextEndpoint


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None


class Detokenize(TextEndpoint):
    def answer(self, body: bytes) -> Any:
        generator = self.engine.generator
        request = decode(body, DetokenizeRequest, generator.max_model_len)
        self.models.require(request.model)
        if request.tokens:
            largest = max(request.tokens)
            try:
                generator.token(largest)
            except InvalidInput as error:
                param = f"tokens[{request.tokens.index(largest)}]"
                raise InvalidInput(f"{param}: {error}", param) from None
        return {"prompt": generator.decode(request.tokens)}
