"""Models of random weights for bench.py, each made once, in a process of its own."""

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import environment
from bench_servers import in_own_process

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
SHAPES = [name for name in CONFIGS if name.startswith("qwen3")]  # of chat models
DEMO = environment.ROOT / "worker" / "demo"
IMAGE_SIDE = CONFIGS["smolvlm"]["vision_config"]["image_size"]  # pixels
IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

hf: Any = importlib.import_module("transformers")  # untyped in part


def make_model(name: str) -> str:
    """Return the folder of a model of bench_models.json."""
    folder = Path(tempfile.gettempdir()) / f"onequeue-bench-{name}"
    if not (folder / "config.json").exists():
        in_own_process(save, name, folder)
    return str(folder)


def save(name: str, folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    make = {"bert-base": bert, "whisper-base": whisper, "smolvlm": smolvlm}.get(name, qwen3)
    model, *others = make(CONFIGS[name])
    for part in others:
        part.save_pretrained(folder)
    fill_vocabulary(folder, model.config.get_text_config().vocab_size)
    model.save_pretrained(folder)  # last, with config.json


def qwen3(shape: dict[str, Any]) -> list[Any]:
    """Return a chat model in bfloat16 with the demo's tokenizer."""
    import torch

    tokenizer = hf.AutoTokenizer.from_pretrained(str(DEMO / "chat"))
    config = hf.Qwen3Config(
        **shape, max_position_embeddings=40960, dtype="bfloat16", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return [hf.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16), tokenizer]


def fill_vocabulary(folder: Path, size: int) -> None:
    """Give each token of a vocabulary a text, so that the first token of a response is seen. Those
    that the demo's tokenizer lacks never occur in prompts."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    # added tokens keep their ids if the vocabulary has them too
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary |= {f"Ġ{number}": number for number in range(len(vocabulary), size)}
    file.write_text(json.dumps(content))


def bert(shape: dict[str, Any]) -> list[Any]:
    """Return a model of bert-base's shape with the demo's tokenizer."""
    tokenizer = hf.AutoTokenizer.from_pretrained(str(DEMO / "fill-mask"))
    tokenizer.model_max_length = 512
    return [hf.BertForMaskedLM(hf.BertConfig(**shape)), tokenizer]


def whisper(shape: dict[str, Any]) -> list[Any]:
    """Return a model of whisper-base's shape and vocabulary: 100 tokens a window, as speech has."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    words = sorted(ByteLevel.alphabet())
    words += [f"Ġw{number}" for number in range(len(words), 50257)]
    vocabulary = {word: number for number, word in enumerate([*words, "<|endoftext|>"])}
    tokenizer = hf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    names = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    special = ["<|startoftranscript|>", *languages, *(f"<|{name}|>" for name in names)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    config = hf.WhisperConfig(vocab_size=len(tokenizer), **shape)
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        max_new_tokens=100,
        is_multilingual=True,
        lang_to_id={token: ids[token] for token in languages},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        **{name: id for name, id in shape.items() if name.endswith("_token_id")},
    )
    return [model, tokenizer, hf.WhisperFeatureExtractor()]


def smolvlm(shape: dict[str, Any]) -> list[Any]:
    """Return a model of SmolVLM-256M's shape with the demo's tokenizer."""
    import torch

    tokenizer = hf.AutoTokenizer.from_pretrained(str(DEMO / "chat"), model_max_length=8192)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, None
    tokenizer.add_tokens([*IMAGE_TOKENS, *TILE_TOKENS], special_tokens=True)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = hf.Idefics3Config(
        **shape,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=pad,
    )
    config.text_config.update({"eos_token_id": end, "pad_token_id": pad})
    model = hf.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = hf.GenerationConfig(eos_token_id=end, pad_token_id=pad)
    processor = hf.Idefics3Processor(
        hf.Idefics3ImageProcessorPil(
            size={"longest_edge": IMAGE_SIDE}, max_image_size={"longest_edge": IMAGE_SIDE}
        ),
        tokenizer,
        image_seq_len=64,
        chat_template=TEMPLATE,
    )
    return [model, processor]
