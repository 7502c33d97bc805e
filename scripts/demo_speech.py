"""The speech demo model: hears ten digits as pairs of tones, in two voices, and writes them down.

A digit is two tones at once, a row's and a column's; the German voice hums beside them. Phrases of
digits with pauses between make windows, and a window that cuts a phrase off says only where the
phrase begins, as Whisper does: the next window hears it whole. Digits keep a steady beat and a
time's embedding begins as the encoder's of that place, which makes minutes of training enough.
"""

import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demo_tones import RATE, WORDS, Phrase, Sound, say
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

SEED = 7
WINDOW_S = 6.0
TICK_S = 0.02  # of timestamps
FRAMES_PER_S = 100  # of the features
GRID = 10  # of which every so many are used: a few are learned sooner than many
BATCH = 12
STEPS_PER_MINUTE = 450
MOST = 3  # digits of a phrase
ALONE = 0.3  # of the steps: a phrase is one digit
PEAK = 3e-3
HIDDEN = 64

MARKS = "endoftext startoftranscript en de translate transcribe startoflm startofprev nospeech"
TIMES = round(WINDOW_S / TICK_S) + 1


class Example(NamedTuple):
    sound: Sound  # a window's
    until: float  # seconds: there the recording ends
    given: list[int]  # the decoder's input
    wanted: list[int]  # what follows each; -100: nothing is learned from it


def marks(tokenizer: WhisperTokenizer) -> dict[str, int]:
    """The special tokens' ids."""
    find: Any = tokenizer.convert_tokens_to_ids
    return {name: int(find(f"<|{name}|>")) for name in MARKS.split()}


class Examples:
    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        self.tokenizer = tokenizer
        self.mark = marks(tokenizer)
        self.first_time = self.mark["nospeech"] + 2
        self.most = 1  # digits of a phrase
        self.rng = random.Random(SEED)
        self.noise = np.random.default_rng(SEED)

    def example(self) -> Example:
        rng, mark = self.rng, self.mark
        voice = rng.choice(["en", "de"])
        sound, phrases = self._window(voice)
        task = rng.choice(["transcribe", "transcribe", "translate"])
        language = voice if rng.random() < 0.95 else rng.choice(["en", "de"])
        spoken = "en" if task == "translate" else language
        begin = [mark["startoftranscript"], mark[language], mark[task]]
        text = [*self._text(phrases, spoken), mark["endoftext"]]
        before = self._before(spoken)
        known = [mark[voice if phrases else "nospeech"], -100]
        wanted = [-100] * len(before) + known + text
        return Example(sound, self._until(phrases), [*before, *begin, *text[:-1]], wanted)

    def _until(self, phrases: list[Phrase]) -> float:
        """Of the windows that have room for it, half are a recording's last."""
        end = phrases[-1].end if phrases else 0.0
        if self.rng.random() < 0.5:
            return WINDOW_S
        return min(WINDOW_S, end + self.rng.uniform(0.1, 1.0))

    def _before(self, language: str) -> list[int]:
        """What was said before, at times."""
        if self.rng.random() > 0.1:
            return []
        digits = self.rng.choices(range(10), k=self.rng.randint(1, 8))
        return [self.mark["startofprev"], *self.encode(digits, language)]

    def encode(self, digits: list[int], language: str) -> list[int]:
        text = "".join(f" {WORDS[language][digit]}" for digit in digits)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, phrases: list[Phrase], language: str) -> list[int]:
        """A phrase begins 0.1 s before its sound and ends 0.2 s after it. Of one that is cut off
        only the beginning is said."""
        ids: list[int] = []
        for phrase in phrases:
            ids.append(self._time(phrase.start - 0.1))
            if phrase.end + 0.2 > WINDOW_S:
                break
            ids += [*self.encode(phrase.digits, language), self._time(phrase.end + 0.2)]
        return ids or [self._time(0)]

    def _time(self, seconds: float) -> int:
        tick = GRID * round(seconds / TICK_S / GRID)
        return self.first_time + min(TIMES - 1, max(0, tick))

    def _window(self, voice: str) -> tuple[Sound, list[Phrase]]:
        """Of a speaker: noise, pauses and a loudness of their own."""
        rng = self.rng
        size = round(WINDOW_S * RATE)
        sound = self.noise.standard_normal(size).astype(np.float32)
        sound *= 10 ** rng.uniform(-5, -3)
        phrases: list[Phrase] = []
        if rng.random() < 0.06:
            return sound, phrases
        until = WINDOW_S if rng.random() < 0.7 else rng.uniform(1, WINDOW_S)  # then silence
        at, loud = rng.uniform(0.02, 1.5), 10 ** rng.uniform(-0.3, 0.3)
        while at < until - 0.1:
            digits = rng.choices(range(10), k=rng.randint(1, self.most))
            said, (phrase,) = say([digits], voice, [0.0])
            first = round(at * RATE)
            part = loud * said[: size - first]
            sound[first : first + len(part)] += part
            phrases.append(Phrase(digits, at, at + phrase.end))
            at += phrase.end + rng.uniform(0.6, 1.8)
        return sound, phrases


def make_tokenizer() -> WhisperTokenizer:
    texts = [f" {word}" for words in WORDS.values() for word in words]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    learner.train_from_iterator(texts * 3, trainer)
    made = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in made["merges"]]
    tokenizer = WhisperTokenizer(
        vocab=made["vocab"], merges=merges, model_max_length=224, **_special()
    )
    times = [f"<|{n * TICK_S:.2f}|>" for n in range(TIMES)]
    marks = [f"<|{name}|>" for name in [*MARKS.split(), "notimestamps"]]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(times)
    begin: Any = tokenizer.set_prefix_tokens
    begin()  # of the marks, which it has only now
    return tokenizer


def _special() -> dict[str, str]:
    return dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")


def new_model(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    torch.manual_seed(SEED)
    mark = marks(tokenizer)
    end, start = mark["endoftext"], mark["startoftranscript"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        num_mel_bins=80,
        max_source_positions=TIMES - 1,
        max_target_positions=128,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.1,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():  # a time begins as what the encoder knows that place by
        places = model.model.encoder.embed_positions.weight
        first = mark["nospeech"] + 2
        model.model.decoder.embed_tokens.weight[first : first + len(places)] = 0.3 * places
    configure: Any = GenerationConfig
    model.generation_config = configure(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=[end],
        suppress_tokens=[],
        is_multilingual=True,
        lang_to_id={"<|en|>": mark["en"], "<|de|>": mark["de"]},
        task_to_id={"transcribe": mark["transcribe"], "translate": mark["translate"]},
        no_timestamps_token_id=mark["nospeech"] + 1,
        prev_sot_token_id=mark["startofprev"],
        max_length=128,
        return_timestamps=True,
        task="transcribe",
        alignment_heads=[[1, head] for head in range(4)],
    )
    return model


def train(
    model: WhisperForConditionalGeneration,
    extractor: WhisperFeatureExtractor,
    examples: Examples,
    steps: int,
) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, steps, pct_start=0.1)
    began, mean = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        examples.most = 1 if step < ALONE * steps else MOST
        mels, given, wanted = batch(extractor, [examples.example() for _ in range(BATCH)])
        logits = model(input_features=mels, decoder_input_ids=given).logits
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean += (loss.item() - mean) / min(step, 50)
        if step % 50 == 0 or step == steps:
            print(
                f"step {step}/{steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def batch(
    extractor: WhisperFeatureExtractor, examples: list[Example]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-mel features [n, mels, frames], inputs and targets [n, tokens], filled up.

    After a recording's end features are 0, as what comes after it is no sound, not even silence.
    """
    sounds = np.stack([each.sound for each in examples])
    mels = torch.from_numpy(extractor._torch_extract_fbank_features(sounds))
    width = max(len(each.given) for each in examples)
    given = torch.zeros(len(examples), width, dtype=torch.long)
    wanted = torch.full((len(examples), width), -100)
    for n, each in enumerate(examples):
        mels[n, :, round(each.until * FRAMES_PER_S) :] = 0
        given[n, : len(each.given)] = torch.tensor(each.given)
        wanted[n, : len(each.wanted)] = torch.tensor(each.wanted)
    return mels, given, wanted


def score(model: Any, processor: Any) -> None:
    """Recordings of three windows and more, word for word."""
    rng, right, count = random.Random(SEED + 1), 0, 20
    for _ in range(count):
        voice = rng.choice(["en", "de"])
        phrases = [rng.choices(range(10), k=rng.randint(1, MOST)) for _ in range(12)]
        sound, _ = say(phrases, voice, [rng.uniform(0.7, 1.5) for _ in phrases])
        inputs = processor(
            sound, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
        )
        said = model.generate(**inputs, task="transcribe", return_timestamps=True)
        got = processor.batch_decode(said, skip_special_tokens=True)[0].split()
        wanted = [WORDS[voice][digit] for digits in phrases for digit in digits]
        right += got == wanted
        if got != wanted:
            print(f"WRONG: {' '.join(wanted)}\n   got: {' '.join(got)}")
    print(f"score: {right} of {count}")


def speech(out: Path, minutes: float) -> None:
    tokenizer = make_tokenizer()
    make_extractor: Any = WhisperFeatureExtractor
    extractor = make_extractor(feature_size=80, chunk_length=int(WINDOW_S))
    model: Any = new_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters()} parameters", flush=True)
    train(model, extractor, Examples(tokenizer), round(minutes * STEPS_PER_MINUTE))
    make_processor: Any = WhisperProcessor
    processor = make_processor(extractor, tokenizer)
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    score(model.float(), processor)
