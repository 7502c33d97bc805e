"""Messages of language models: a prompt with its media, and the options of its generation.

server/apis/openai parses requests into them, input_processor.py prepares them. No torch.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from worker.messages.adapters import Adapter

INPUT = "input"  # the argument of a custom tool
# The sampling parameters that a request may leave to the model.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LIMITS = "mm_processor_kwargs"  # the field of a request with the limits of its media
WHITE = (255, 255, 255)
TRANSCRIBE = "Transcribe the recording verbatim. Return the transcript only."
MAX_FRAMES = 768  # of a video; Qwen's processors choose no more themselves
MAX_MEDIA = 20  # of a request's prompt, all kinds together
MediaKind = Literal["image", "audio", "video"]
NOUNS: Mapping[MediaKind, str] = {"image": "an image", "audio": "a recording", "video": "a video"}
PLURALS: Mapping[MediaKind, str] = {"image": "images", "audio": "recordings", "video": "videos"}
# Why a model of text alone refuses media, by kind.
TEXT_ONLY: Mapping[MediaKind, str] = {
    kind: f"this model takes text, no {plural}" for kind, plural in PLURALS.items()
}


@dataclass(frozen=True)
class MediaInput:
    """An image, recording or video of a chat: the bytes of a file, or a link to fetch them from."""

    data: bytes
    detail: str  # `low` downscales an image
    param: str  # the field that errors about it name
    link: str = ""
    # for the processor: `min_pixels` and `max_pixels` of an image, `fps` or `num_frames`
    limits: tuple[tuple[str, float], ...] = ()
    background: tuple[int, int, int] = WHITE  # of transparent pixels
    kind: MediaKind = "image"
    in_video: bool = False  # the sound of the video before it

    @property
    def is_low_detail(self) -> bool:
        """Whether the image is downscaled before it is encoded."""
        return self.detail == "low"

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that identify the data and the options."""
        options = f"{self.kind}{self.is_low_detail}{self.limits}{self.background}".encode()
        person = hashlib.blake2b(options, digest_size=16).digest()
        return hashlib.blake2b(self.data, digest_size=32, person=person).digest()

    def cache_key(self, cache_namespace: bytes) -> bytes:
        """Return 32 bytes that identify the file within a cache namespace."""
        return hashlib.blake2b(self.digest, digest_size=32, key=cache_namespace).digest()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the model's chat template renders.

    Messages have `role` and `content` (text or None), and any other key that the template reads. A
    content with media is a list of parts, {"type": "text", "text": …} and {"type": "image"} or
    another kind; `media` has the files of all these parts, in order.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None  # of the reasoning: `none`, `minimal`, `low`, …
    media: tuple[MediaInput, ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()  # for retrieval-augmented generation
    template: str | None = None  # instead of the model's

    @property
    def num_tool_calls(self) -> int:
        return sum(len(message.get("tool_calls") or ()) for message in self.messages)


def without_video_sound(chat: Chat) -> Chat:
    """Return a chat without the parts of sounds whose tokens the processor puts in their videos."""
    messages = [
        {**message, "content": [part for part in parts if not part.get("in_video")]}
        if isinstance(parts := message.get("content"), list)
        else message
        for message in chat.messages
    ]
    return replace(chat, messages=tuple(messages))


def transcription_chat(prompt: str | None, language: str | None) -> Chat:
    """Return a message that asks for the text of a recording, without its file."""
    text = prompt or TRANSCRIBE
    if language:
        text = f"{text} Its language is {language}."
    content = [{"type": "audio"}, {"type": "text", "text": text}]
    return Chat(({"role": "user", "content": content},))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. None: the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # 0: of the chosen token; k: also of the k best
    logprob_token_ids: tuple[int, ...] = ()  # scored instead of the k best
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values that a request gets if it omits them. `configured`: the checkpoint's
    generation_config or SAMPLING_DEFAULTS sets one of them; else they are those of the API."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    configured: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """The conditions that end a choice, besides the model's end-of-sequence tokens."""

    # None: `default_tokens` or the checkpoint's limit, as far as the context has room
    max_tokens: int | None = None
    min_tokens: int | None = None  # None: the default of the checkpoint's generation_config
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    includes_stop: bool = False  # the text has the stop string, or the stop token, that ended it
    default_tokens: int | None = None  # None: the checkpoint's limit
    # the field that errors about `max_tokens` name
    param: str = field(default="max_tokens", compare=False)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the whole text of a response."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any  # a JSON schema, a regular expression, a list of texts, a Lark grammar
    param: str  # the field that errors about it name


@dataclass(frozen=True, slots=True)
class ToolCallPolicy:
    """Which of the chat's tools a response may call."""

    names: tuple[str, ...]
    required: bool = False  # the response is one or more calls
    parallel: bool = True  # more than one call is allowed
    # By name, the constraints of custom tools' inputs: of functions with one argument, INPUT. None:
    # any text.
    inputs: Mapping[str, Constraint | None] = field(default_factory=dict)

    @property
    def input_constraints(self) -> dict[str, Constraint]:
        """The constraints of those inputs that have one, of the tools that may be called."""
        named = ((name, self.inputs.get(name)) for name in self.names)
        return {name: constraint for name, constraint in named if constraint}


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One prompt, to be continued `n` times. The text goes to the item's stream; the future
    resolves to None when all choices have finished."""

    prompt: Chat | str | tuple[int, ...]
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    n: int = 1
    first_choice: int = 0  # the number of the first choice: prompts of a list share a stream
    suffix: str | None = None  # fill-in-the-middle: the text after the generated one
    truncate: int | None = None  # keep that many tokens of the prompt's end; -1: those that fit
    drops_oldest: bool = False  # messages of a chat that does not fit
    echo: bool = False  # the response starts with the prompt's text and its log-probabilities
    prompt_logprobs: int | None = None  # as `sampling.logprobs`, for the prompt's tokens
    token_ids: bool = False  # deltas have the ids of the prompt and the output
    skips_special: bool = True  # special tokens have no text, unless they are delimiters
    constraint: Constraint | None = None
    tool_policy: ToolCallPolicy | None = None  # None: text that looks like a call stays text
    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # replaces the generation_config's fields
    thinking_tokens: int | None = None  # the limit of the reasoning; None: no limit
    thinking_is_optional: bool = False  # no limit, rather than an error, for a model without
    param: str = "messages"  # the field that errors about the prompt name
    adapter: Adapter | None = None  # None: the model as it is
    cache_namespace: bytes = b""  # cached prefixes and images are shared within it alone

    @property
    def called_tools(self) -> list[Mapping[str, Any]]:
        """The chat's tools that may be called."""
        names = self.tool_policy.names if self.tool_policy else ()
        tools = self.prompt.tools if isinstance(self.prompt, Chat) else ()
        return [tool for tool in tools if tool["function"]["name"] in names]

    @property
    def strict_tools(self) -> list[str]:
        """The names of tools whose calls must match their constraints: strict functions, and custom
        tools with a grammar."""
        inputs = self.tool_policy.input_constraints if self.tool_policy else {}
        functions = [tool["function"] for tool in self.called_tools]
        return [f["name"] for f in functions if f.get("strict") is True or f["name"] in inputs]
