"""`bench.py vision`: streaming chats with one image each, beside other servers: a new image for
each request, and the same image in all.

Without --model, a model of SmolVLM-256M's shape with random weights is used: a SigLIP-base encoder
of 512 x 512 pixels and SmolLM2-135M's decoder. It resizes images to `--side`, and cuts them into
tiles beyond 512. transformers serve runs these requests one after another and needs Pillow.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench_generation import launch
from bench_servers import Server, is_ours, print_json, run_load_test, running

ENCODER_SIDE = 512  # pixels
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
IMAGES = ("fresh", "same")  # a new image per request, or one for all

Runs = dict[tuple[str, int, str], list[dict[str, Any]]]  # by images, clients and server


def vision(arguments: argparse.Namespace) -> None:
    """Measure tokens/s and the time to the first token of each server in turn."""
    model = str(Path(arguments.model or make_model(arguments.side)).resolve())
    arguments.model = model
    runs: Runs = {}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, launch(arguments, name, model)))
            for name in arguments.servers
        ]
        for round_ in range(arguments.rounds):
            for server in servers:
                for images in IMAGES:
                    for clients in arguments.clients:
                        run = measure(arguments, server, images, clients, round_)
                        runs.setdefault((images, clients, server.name), []).append(run)
    report(runs, arguments.servers)


def measure(
    arguments: argparse.Namespace, server: Server, images: str, clients: int, round_: int
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
        "--seed": 100 * round_ + 10 * clients,
        "--timeout": 600,
        "--fields": json.dumps(fields),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    same = ["--same-picture"] if images == "same" else []
    with server.resumed():
        run = run_load_test(server.port, "", "--stream", *words, *same)
    print_json(
        bench="vision", server=server.name, pictures=images, clients=clients,
        prompt_tokens=round(run["prompt_tokens"] / run["ok"]),
        output_tokens_per_s=run["output_tokens_per_s"], ttft_ms=run["ttft_ms"],
        inter_token_ms=run["inter_token_ms"],
    )  # fmt: skip
    return run


def report(runs: Runs, servers: list[str]) -> None:
    """Compare each onequeue with each of the other servers."""
    rates = {
        key: median(run["output_tokens_per_s"] for run in rounds) for key, rounds in runs.items()
    }
    firsts = {key: median(run["ttft_ms"]["p50"] for run in rounds) for key, rounds in runs.items()}
    for images, clients, name in runs:
        for other in servers if is_ours(name) else ():
            if not is_ours(other):
                one, two = (images, clients, name), (images, clients, other)
                print_json(
                    bench="vision", server=name, beside=other, pictures=images, clients=clients,
                    times=round(rates[one] / rates[two], 2),
                    ttft_times=round(firsts[two] / firsts[one], 2),
                )  # fmt: skip


def make_model(side: int) -> str:
    """Save a model of SmolVLM-256M's shape with random weights that resizes images to `side`."""
    import torch
    import transformers

    hf: Any = transformers  # not annotated
    folder = Path(tempfile.gettempdir()) / f"onequeue-bench-smolvlm-{side}"
    if (folder / "preprocessor_config.json").exists():
        return str(folder)
    tokenizer = make_tokenizer(hf)
    config = hf.Idefics3Config(
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": ENCODER_SIDE, "patch_size": 16,
        },
        text_config=hf.LlamaConfig(
            vocab_size=49280, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        ).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        tie_word_embeddings=True,
        pad_token_id=2,
    )  # fmt: skip
    assert len(tokenizer) <= 49280
    torch.manual_seed(0)
    model = hf.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = hf.GenerationConfig(eos_token_id=1, pad_token_id=2, bos_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 64, "processor_class": "Idefics3Processor"})
    )
    processor = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": side}, max_image_size={"longest_edge": ENCODER_SIDE}
    )
    processor.save_pretrained(folder)
    return str(folder)


def make_tokenizer(hf: Any) -> Any:
    """Train a tokenizer on this repository's code. It is smaller than the decoder's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(__file__).resolve().parent.parent
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *IMAGE_TOKENS, *TILE_TOKENS]
    bpe.train_from_iterator(
        (path.read_text() for path in sorted(root.glob("*/*.py"))),
        trainers.BpeTrainer(
            vocab_size=49000,
            min_frequency=1,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|endoftext|>", chat_template=TEMPLATE, model_max_length=8192,
        extra_special_tokens={
            "fake_image_token": IMAGE_TOKENS[0], "image_token": IMAGE_TOKENS[1],
            "end_of_utterance_token": IMAGE_TOKENS[2], "global_image_token": IMAGE_TOKENS[3],
        },
    )  # fmt: skip
