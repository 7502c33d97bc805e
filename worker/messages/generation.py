"""What a language model is asked for: a prompt, with its images, and how to continue it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

TEXT_ALONE = "this model takes text, no images"


@dataclass(frozen=True)
class ImageInput:
    """An image of a conversation, as a file's bytes, not yet decoded. `detail`: how large it is to
    be looked at. `param`: the field of the request that errors about it name. `link`: where its
    bytes are still to be fetched from. `cache_namespace`: the work item's, set when it is
    prepared: the encoder's output is cached for requests of that namespace alone."""

    data: bytes
    detail: str
    param: str
    link: str = ""
    cache_namespace: bytes = b""

    @property
    def is_low_detail(self) -> bool:
        """Whether the image is downscaled before it is encoded."""
        return self.detail == "low"

    @cached_property
    def digest(self) -> bytes:
        """Return 32 bytes that identify the data, the detail and the cache namespace."""
        person, key = b"low" * self.is_low_detail, self.cache_namespace
        return hashlib.blake2b(self.data, digest_size=32, key=key, person=person).digest()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template. Messages have `role` and
    `content` (text or None), or whatever else the template reads. The content of one with images
    is a list of parts, {"type": "text", "text": …} and {"type": "image"}: `images` are those
    of all such parts, in order."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None  # how much to think first: `none`, `minimal`, `low`, …
    images: tuple[ImageInput, ...] = ()

    @property
    def calls(self) -> int:
        """How many have been made."""
        return sum(len(message.get("tool_calls") or ()) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen. None: as the checkpoint's generation_config says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: of the best k as well


class SamplingDefaults(Protocol):
    """What a request that leaves these open gets."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a choice ends, besides the model's end-of-sequence tokens."""

    max_tokens: int | None = None  # None: `default_tokens`, or fewer if the context is full
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    default_tokens: int | None = None  # None: as many as the context holds
    # the field of the request that errors about it name
    param: str = field(default="max_tokens", compare=False)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text must be as a whole, whatever the model would rather say."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any  # a JSON schema, a regular expression, a list of texts, a grammar in Lark's notation
    param: str  # the field of the request that errors about it name


@dataclass(frozen=True, slots=True)
class Calls:
    """Which of the chat's tools an answer may call."""

    names: tuple[str, ...]
    required: bool = False  # nothing but calls, at least one
    parallel: bool = True  # more than one


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One prompt and how to continue it, `n` times; the text goes to the item's stream as it comes.

    A prompt is a conversation, text, or token ids. Choices are numbered from `first_choice` on,
    so that the prompts of a list share a stream. `echo`: the prompt's text, and log-probabilities
    if asked for, come first. `prompt_logprobs`: those of the prompt's tokens, with so many of the
    likeliest others (as many as `sampling.logprobs` where that is echoed), and `token_ids`, of the
    prompt and the output, come in deltas of their own fields. The item's future resolves to None
    when all choices have ended.
    """

    prompt: Chat | str | tuple[int, ...]
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    n: int = 1
    first_choice: int = 0
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    constraint: Constraint | None = None
    calls: Calls | None = None  # None: what looks like a call is text
    thinking_tokens: int | None = None  # reasoning is ended after so many; None: never
    param: str = "messages"  # the field of the request that errors about the prompt name
    background: bool = False  # nobody waits for it: it comes after all that somebody waits for
    cache_salt: str = ""  # what the client makes its own part of the prefix cache by

    @property
    def called_tools(self) -> list[Mapping[str, Any]]:
        """Those of the chat's tools that may be called."""
        names = self.calls.names if self.calls else ()
        tools = self.prompt.tools if isinstance(self.prompt, Chat) else ()
        return [tool for tool in tools if tool["function"]["name"] in names]
