"""`bench.py vision`: streaming chats with a picture each, beside other servers: a fresh one for
each request, and the same one again and again.

Without --model one of SmolVLM-256M's shape is made, of random weights: a SigLIP-base tower of
512 x 512 pixels, a decoder of SmolLM2-135M's. Like all of its kind it takes no more of a picture
than `SIDE`; beyond 512 it cuts it into frames. transformers serve answers these one after another,
and wants Pillow among its packages, or on PYTHONPATH.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench_generation import launch
from bench_servers import Server, is_ours, load, running, say

SIDE = 512
IDS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PICTURES = ("fresh", "same")


def vision(arguments: argparse.Namespace) -> None:
    """Tokens/s and milliseconds to the first token, of each server in turn."""
    model = str(Path(arguments.model or make_model(arguments.side)).resolve())
    arguments.model = model
    seen: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        launches = [(name, launch(arguments, name, model)) for name in arguments.servers]
        servers = [stack.enter_context(running(*each)) for each in launches]
        for turn in range(arguments.rounds):
            for server in servers:
                for pictures in PICTURES:
                    for clients in arguments.clients:
                        run = measure(arguments, server, pictures, clients, turn)
                        seen.setdefault((pictures, clients, server.name), []).append(run)
    report(seen, arguments.servers)


def measure(
    arguments: argparse.Namespace, server: Server, pictures: str, clients: int, turn: int
) -> dict[str, Any]:
    tokens = arguments.tokens
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if server.name == "transformers":
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        fields = {"generation_config": json.dumps(limits)}
    flags: dict[str, Any] = {
        "--kind": "chat",
        "--model": arguments.model,
        "--picture": arguments.side,
        "--max-tokens": tokens,
        "--words": 12,
        "--concurrency": clients,
        "--requests": max(clients, 3) * arguments.requests,
        "--warmup": 1,
        "--seed": 100 * turn + 10 * clients,
        "--timeout": 600,
        "--fields": json.dumps(fields),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    same = ["--same-picture"] if pictures == "same" else []
    with server.awake():
        run = load(server.port, "", "--stream", *words, *same)
    say(
        bench="vision", server=server.name, pictures=pictures, clients=clients,
        prompt_tokens=round(run["prompt_tokens"] / run["ok"]),
        output_tokens_per_s=run["output_tokens_per_s"], ttft_ms=run["ttft_ms"],
        inter_token_ms=run["inter_token_ms"],
    )  # fmt: skip
    return run


def report(seen: dict[tuple[str, int, str], list[dict[str, Any]]], servers: list[str]) -> None:
    """Each of ours beside each of the others."""
    rates = {key: median(run["output_tokens_per_s"] for run in runs) for key, runs in seen.items()}
    firsts = {key: median(run["ttft_ms"]["p50"] for run in runs) for key, runs in seen.items()}
    for pictures, clients, name in seen:
        for other in servers if is_ours(name) else ():
            if not is_ours(other):
                one, two = (pictures, clients, name), (pictures, clients, other)
                say(
                    bench="vision", server=name, beside=other, pictures=pictures, clients=clients,
                    times=round(rates[one] / rates[two], 2),
                    ttft_times=round(firsts[two] / firsts[one], 2),
                )  # fmt: skip


def make_model(side: int) -> str:
    import torch
    import transformers

    hf: Any = transformers  # not annotated
    folder = Path(tempfile.gettempdir()) / f"onequeue-bench-smolvlm-{side}"
    if (folder / "preprocessor_config.json").exists():
        return str(folder)
    words = tokenizer(hf)
    size = len(words)
    config = hf.Idefics3Config(
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": SIDE, "patch_size": 16,
        },
        text_config=hf.LlamaConfig(
            vocab_size=49280, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        ).to_dict(),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        tie_word_embeddings=True,
        pad_token_id=2,
    )  # fmt: skip
    assert size <= 49280
    torch.manual_seed(0)
    model = hf.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = hf.GenerationConfig(eos_token_id=1, pad_token_id=2, bos_token_id=0)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 64, "processor_class": "Idefics3Processor"})
    )
    images = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": side}, max_image_size={"longest_edge": SIDE}
    )
    images.save_pretrained(folder)
    return str(folder)


def tokenizer(hf: Any) -> Any:
    """Trained on this repository's own text; as large as the decoder's vocabulary is not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(__file__).resolve().parent.parent
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *IDS, *ROWS]
    made.train_from_iterator(
        (path.read_text() for path in sorted(root.glob("*/*.py"))),
        trainers.BpeTrainer(
            vocab_size=49000,
            min_frequency=1,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|endoftext|>", chat_template=TEMPLATE, model_max_length=8192,
        extra_special_tokens={
            "fake_image_token": IDS[0], "image_token": IDS[1],
            "end_of_utterance_token": IDS[2], "global_image_token": IDS[3],
        },
    )  # fmt: skip
