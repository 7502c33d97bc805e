"""The fields of an audio request: a form, typed and checked.

    fields → TranscriptionRequest → TranscriptionInput (worker)

Names are OpenAI's. Empty fields count as absent, unknown ones are ignored. A parameter of the API
that is not implemented is an error. Languages and prompts are checked by the model's `prepare`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.types import Scope

from batching.errors import InvalidInput
from server.apis.openai.request_fields import convert_body
from server.http.form import FILE
from server.http.json import Document
from worker.messages.transcription import TranscriptionInput

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
MAX_LANGUAGE = 40  # characters


class TranscriptionRequest(Struct, kw_only=True):
    task: ClassVar[Literal["transcribe", "translate"]] = "transcribe"
    # Fields that may be repeated.
    lists: ClassVar[Sequence[str]] = ("timestamp_granularities", "include")
    # Parameters of the API without effect here, and the values that are accepted.
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("keywords", "languages"), ()),
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ()),
        "chunking_strategy": ("auto",),
    }

    model: str | None = None
    prompt: str | None = None
    response_format: AudioFormat | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    language: Annotated[str, Meta(max_length=MAX_LANGUAGE)] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    include: list[Literal["logprobs"]] | None = None

    @property
    def format(self) -> AudioFormat:
        return self.response_format or "json"

    @property
    def words(self) -> bool:
        return "word" in (self.timestamp_granularities or ())

    @property
    def segments(self) -> bool:
        """Whether verbose_json has segments."""
        return "segment" in (self.timestamp_granularities or ("segment",))

    def check(self) -> None:
        """Raise InvalidInput for fields that cannot be combined."""
        if self.timestamp_granularities and self.format != "verbose_json":
            reason = f"requires response_format verbose_json, not {self.format}"
            raise InvalidInput.at("timestamp_granularities", reason)
        for name in ("include", "stream"):
            if getattr(self, name) and self.format != "json":
                raise InvalidInput.at(name, f"requires response_format json, not {self.format}")

    def transcription_input(self, path: str) -> TranscriptionInput:
        """Return the model's input for the recording at `path`."""
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
    """Return the JSON schema of a form. A list is a field `name[]` for each of its entries."""
    _, components = msgspec.json.schema_components([kind])
    described = components[kind.__name__]["properties"]
    fields = {
        f"{name}[]" if name in kind.lists else name: schema for name, schema in described.items()
    }
    for name, accepted in kind.unimplemented.items():
        fields[name] = {"description": "Not implemented: leave it out", "enum": ["", *accepted]}
    recording = {"type": "string", "format": "binary", "description": "Audio, with a file name"}
    return {"type": "object", "required": [FILE], "properties": {FILE: recording} | fields}


def read_fields(
    fields: Mapping[str, Sequence[str]], kind: type[TranscriptionRequest], scope: Scope
) -> TranscriptionRequest:
    """Return a checked request; InvalidInput names the first field that is wrong."""
    document: Document = {}
    for key, values in fields.items():
        name, values = key.partition("[")[0], [value for value in values if value]
        if name in kind.lists:
            values = document.get(name, []) + values
        elif name in kind.__struct_fields__ and (len(values) > 1 or (values and name in document)):
            raise InvalidInput.at(name, "is given twice")
        if values:
            document[name] = values if name in kind.lists else values[0]
    request = convert_body(document, kind, scope, strict=False)
    request.check()
    return request
