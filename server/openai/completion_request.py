"""The body of `POST /v1/completions`, checked, as a GenerationInput for each prompt."""

from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from batching.errors import InvalidInput
from server.openai.params import (
    Filled,
    GenerationRequest,
    TopLogprobs,
    refuse_unimplemented,
)
from worker.protocol import GenerationInput, Stopping

DEFAULT_MAX_TOKENS = 16

# Parameters of the API that nothing is done with, and the values that ask for nothing.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ()}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
OF_ONE_KIND = Meta(
    extra_json_schema={
        "minItems": 1,
        "anyOf": [IDS, {"items": IDS}, {"items": {"type": "string", "minLength": 1}}],
    }
)

Prompt = str | tuple[int, ...]


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Filled | Annotated[list[str | int | list[int]], OF_ONE_KIND]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    @property
    def most_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def stopping(self) -> Stopping:
        return replace(
            super().stopping(), max_tokens=self.max_tokens, default_tokens=DEFAULT_MAX_TOKENS
        )

    def check(self) -> None:
        super().check()
        # As many candidates as answers leaves nothing to choose from.
        refuse_unimplemented(self, UNIMPLEMENTED | {"best_of": (1, self.n or 1)})
        if self.max_tokens == 0 and not self.echo:
            raise InvalidInput("max_tokens: must be at least 1, or 0 with echo", "max_tokens")

    def generation_inputs(self, most: int) -> list[GenerationInput]:
        """Checks, then one input a prompt. A list makes at most `most` choices in all."""
        self.check()
        prompts = self._prompts()
        sampling, stopping, n = self.sampling(self.logprobs), self.stopping(), self.n or 1
        if len(prompts) > 1 and len(prompts) * n > most:
            many = f"prompt: {len(prompts)} times n={n} is more than {most} choices"
            raise InvalidInput(many, "prompt")
        constraint = self.constraint()
        if constraint and self.echo and self.most_tokens == 0:
            constraint = None  # nothing is said
        return [
            GenerationInput(
                prompt=prompt,
                sampling=sampling,
                stopping=stopping,
                n=n,
                first_choice=number * n,
                echo=bool(self.echo),
                constraint=constraint,
                param=param,
            )
            for number, (param, prompt) in enumerate(prompts.items())
        ]

    def _prompts(self) -> dict[str, Prompt]:
        """The prompts by what errors call them."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return {"prompt": _prompt(given, "prompt")}
        if not given:
            raise InvalidInput("prompt: must not be empty", "prompt")
        kind = type(given[0])
        for n, each in enumerate(given):
            if type(each) is not kind:
                mixed = f"prompt[{n}]: a list has prompts of one kind"
                raise InvalidInput(mixed, f"prompt[{n}]")
        return {f"prompt[{n}]": _prompt(each, f"prompt[{n}]") for n, each in enumerate(given)}


def _prompt(given: Any, param: str) -> Prompt:
    """Text, or token ids; the type has been checked but for what a list of ids holds."""
    if not given:
        raise InvalidInput(f"{param}: must not be empty", param)
    if isinstance(given, str):
        return given
    for n, each in enumerate(given):
        if not isinstance(each, int) or each < 0:
            raise InvalidInput(f"{param}[{n}]: must be a token id", f"{param}[{n}]")
    return tuple(given)
