"""A processor that takes sound only in conversations which mistral-common renders (Voxtral's),
called with text and sound like others."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worker.text.tekken import INSTALL, fast_tokenizer, lacks_mistral_common
from worker.vision.modality import ReplacedPart


def with_fast_tokenizer(processor: Any) -> Any:
    """Return a processor with a fast tokenizer, called with sound where it has a part for it.
    Raises ImportError if this needs mistral-common, which is not installed."""
    fast = fast_tokenizer(processor.tokenizer)
    takes_sound = "audio" in inspect.signature(type(processor).__call__).parameters
    if hasattr(processor, "feature_extractor") and not takes_sound:
        if lacks_mistral_common(fast):
            raise ImportError(f"mistral-common is not installed: {INSTALL}")
        if fast is not processor.tokenizer:
            return MistralProcessor(processor, fast)
    processor.tokenizer = fast
    return processor


class MistralProcessor:
    """`processor`: the library's, with the tokenizer of mistral-common."""

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        self._mistral, self.tokenizer = processor.tokenizer.tokenizer, tokenizer
        self.audio_token, self.audio_token_id = processor.audio_token, processor.audio_token_id
        self.to_json_string = processor.to_json_string

        def read(recordings: Any, _: Mapping[str, Any]) -> dict[str, Any]:
            options = processor._merge_kwargs()["audio_kwargs"]
            features = processor._retrieve_input_features(recordings, **options)
            return {"input_features": features}

        self.feature_extractor = ReplacedPart(processor.feature_extractor, read)

    def __call__(
        self, text: Sequence[str], text_kwargs: Any, audio: Sequence[np.ndarray] = ()
    ) -> dict[str, Any]:
        """Replace the audio token of each recording by all its tokens."""
        encoded = [self._encode(recording) for recording in audio]
        tokens = iter([each.tokens for each in encoded])
        [ids] = self.tokenizer(text, **text_kwargs)["input_ids"].tolist()
        spans = (next(tokens) if id_ == self.audio_token_id else [id_] for id_ in ids)
        outputs = {"input_ids": [[id_ for span in spans for id_ in span]]}
        if encoded:
            outputs |= self.feature_extractor([each.audio.audio_array for each in encoded])
        return outputs

    def _encode(self, recording: np.ndarray) -> Any:
        from mistral_common.tokens.tokenizers.audio import Audio

        audio = Audio(recording, self.feature_extractor.sampling_rate, "wav")
        return self._mistral.instruct_tokenizer.audio_encoder.encode_audio(audio)

    def apply_transcription_request(self, audio: Sequence[np.ndarray], language: str = "") -> Any:
        """Return a conversation that renders as mistral-common's request: what the request has
        behind the recording begins the response."""
        from mistral_common.protocol.transcription.request import TranscriptionRequest
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        file = self._encode(audio[0]).audio.to_base64("wav")
        try:
            request = TranscriptionRequest(audio=file, language=language or None)
        except ValueError as error:
            raise ValueError(f"{language!r} is not a language of ISO 639-1, such as en") from error
        tokens = self._mistral.encode_transcription(request).tokens
        text = self._mistral.decode(tokens, SpecialTokenPolicy.KEEP).rpartition("[/INST]")[2]
        user = {"role": "user", "content": [{"type": "audio"}]}
        assistant = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        return [[user, assistant]], {"continue_final_message": True}
