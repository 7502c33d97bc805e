"""What is asked of a recording: a form's fields, typed and checked.

    fields → a struct → TranscriptionInput

Names are OpenAI's. Empty fields count as absent, unknown ones are ignored, and what the API has and
we have not is refused by name. What needs the model (languages, prompts) is checked in a pool.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.http.form import FILE
from server.http.json import Document
from server.openai.request_fields import convert
from worker.messages.transcription import TranscriptionInput

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
MAX_LANGUAGE = 40  # characters


class TranscriptionRequest(Struct, kw_only=True):
    task: ClassVar[Literal["transcribe", "translate"]] = "transcribe"
    # fields that may come several times
    lists: ClassVar[Sequence[str]] = ("timestamp_granularities", "include")
    # Parameters of the API that nothing is done with, and the values that ask for nothing.
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("keywords", "languages"), ()),
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ()),
        "chunking_strategy": ("auto",),
    }

    model: str | None = None
    prompt: str | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    language: Annotated[str, Meta(max_length=MAX_LANGUAGE)] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    include: list[Literal["logprobs"]] | None = None

    @property
    def format(self) -> Format:
        return self.response_format or "json"

    @property
    def words(self) -> bool:
        return "word" in (self.timestamp_granularities or ())

    @property
    def segments(self) -> bool:
        """Whether verbose_json has them."""
        return "segment" in (self.timestamp_granularities or ("segment",))

    def check(self) -> None:
        """InvalidInput for fields that do not go together."""
        if self.timestamp_granularities and self.format != "verbose_json":
            only = "goes with response_format: verbose_json only"
            raise InvalidInput.at("timestamp_granularities", only)
        for name in ("include", "stream"):
            if getattr(self, name) and self.format != "json":
                raise InvalidInput.at(name, "goes with response_format: json only")

    def input(self, path: str) -> TranscriptionInput:
        """`path`: where the recording is."""
        return TranscriptionInput(
            path,
            self.task,
            language=self.language,
            prompt=self.prompt or "",
            temperature=self.temperature or 0.0,
            words=self.words,
            logprobs=bool(self.include),
        )


class TranslationRequest(TranscriptionRequest, kw_only=True):
    task: ClassVar[Literal["transcribe", "translate"]] = "translate"
    lists: ClassVar[Sequence[str]] = ()
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stream": ("false",),
        **dict.fromkeys(("language", "timestamp_granularities", "include"), ()),
    }


def form_schema(kind: type[TranscriptionRequest]) -> dict[str, Any]:
    """For the OpenAPI document: lists have a field of the name and brackets for each entry."""
    _, components = msgspec.json.schema_components([kind])
    described = components[kind.__name__]["properties"]
    fields = {f"{name}[]" if name in kind.lists else name: each for name, each in described.items()}
    for name, harmless in kind.unimplemented.items():
        nothing = {"description": "Not implemented: leave it out", "enum": ["", *harmless]}
        fields[name] = nothing
    recording = {"type": "string", "format": "binary", "description": "Sound, with a file name"}
    return {"type": "object", "required": [FILE], "properties": {FILE: recording} | fields}


def read_fields(
    fields: Mapping[str, Sequence[str]], kind: type[TranscriptionRequest]
) -> TranscriptionRequest:
    """A checked request, of a form's fields; InvalidInput names the first that does not fit."""
    document: Document = {}
    for given, values in fields.items():
        name, values = given.partition("[")[0], [value for value in values if value]
        if name in kind.unimplemented and any(
            value not in kind.unimplemented[name] for value in values
        ):
            raise InvalidInput.at(name, "is not implemented here, leave it out")
        if name not in kind.__struct_fields__ or not values:
            continue
        if name in kind.lists:
            document[name] = document.get(name, []) + values
        elif len(values) > 1 or name in document:
            raise InvalidInput.at(name, "comes twice")
        else:
            document[name] = values[0]
    if (form := document.get("response_format")) == "diarized_json":
        raise InvalidInput.at("response_format", f"{form} is not implemented here")
    request = convert(document, kind, strict=False)
    request.check()
    return request
