"""The chat demo model: dialogues packed into rows, with the loss on the assistant's tokens.

The dialogues come from demo_texts.py. The templates of the embedded tokenizer render them in
ChatML turns with Qwen's tool calls, and describe how to parse the output.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from demo_texts import PHRASES, dialogue, document
from demo_training import DEMO, SEED, Demo, forget_origin, untrained
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROW, ROWS = 512, 4
RATE, MATRIX_RATE = 3e-3, 2e-2
DOCUMENT_SHARE = 0.06  # of the examples
IGNORED = -100

Example = tuple[list[int], list[int]]  # token ids, labels


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train byte pair encoding on the texts. Special tokens, tags and templates are those of the
    embedded tokenizer. Every byte is a token, so that any text in NFC is decoded exactly. The tags
    are not special, so that decoding without special tokens keeps them."""
    old: Any = AutoTokenizer.from_pretrained(DEMO / "chat")
    new = old.train_new_from_iterator(texts, old.vocab_size, show_progress=False)
    tokenizer: PreTrainedTokenizerFast = forget_origin(new)
    return tokenizer


def labelled(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of the assistant's tokens up to its end of turn; elsewhere IGNORED. `<think>`
    and the start of a JSON document are not labels, because a request chooses those."""
    opening = tokenizer.encode(f"{START}assistant\n")
    vocab = tokenizer.get_vocab()
    end, think, document, brace = (vocab.get(token) for token in (END, "<think>", '{"', "{"))
    labels, is_labelled = [IGNORED] * len(ids), False
    for index, token in enumerate(ids):
        is_first = ids[index - len(opening) : index] == opening
        if is_first and token in (document, brace):
            is_labelled = True
        elif is_labelled and think not in ids[index - 1 : index + 1]:
            labels[index] = token
            is_labelled = token != end
        elif ids[index - len(opening) + 1 : index + 1] == opening:
            is_labelled = True
    return labels


def examples(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Example]:
    """Yield dialogues and documents that fit into a row."""
    while True:
        if rng.random() < DOCUMENT_SHARE:
            ids = tokenizer.encode(document(rng) + PAD)
            labels = ids
        else:
            messages, tools = dialogue(rng)
            text = tokenizer.apply_chat_template(messages, tools=[*tools] or None, tokenize=False)
            ids = tokenizer.encode(str(text))
            labels = labelled(ids, tokenizer)
        if len(ids) <= ROW:
            yield ids, labels


def packed(stream: Iterator[Example]) -> Iterator[torch.Tensor]:
    """Yield rows [3, ROW]: ids, labels, and positions that restart with each example."""
    waiting = [next(stream) for _ in range(64)]
    while True:
        row: list[Example] = []
        room = ROW
        for example in sorted(waiting, key=lambda example: -len(example[0])):
            if len(example[0]) <= room:
                row.append(example)
                waiting.remove(example)
                waiting.append(next(stream))
                room -= len(example[0])
        ids = [token for example, _ in row for token in example] + [0] * room
        labels = [label for _, example in row for label in example] + [IGNORED] * room
        positions = [index for example, _ in row for index in range(len(example))]
        yield torch.tensor([ids, labels, positions + list(range(room))])


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor at a step: a short warm-up, then a decay to zero."""
    return min(step / (0.03 * steps), 1.0, (steps - step + 1) / (0.7 * steps))


def losses(model: Qwen2ForCausalLM, rows: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        ids, labels, positions = torch.stack([next(rows) for _ in range(ROWS)], dim=1)
        # Positions that restart keep attention within an example.
        states = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        known = labels[:, 1:] != IGNORED
        known &= positions[:, 1:] > 0
        yield cross_entropy(model.lm_head(states[:, :-1][known]), labels[:, 1:][known])


def schedules(model: Qwen2ForCausalLM, steps: int) -> list[LRScheduler]:
    """Return Muon for the matrices of the layers, which needs half the steps of AdamW here, and
    AdamW for all other weights."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0)
    adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [
        LambdaLR(optimizer, lambda done: rate_factor(done + 1, steps)) for optimizer in (muon, adam)
    ]


def chat(out: Path, steps: int) -> Demo:
    rng = random.Random(SEED)
    samples = [dialogue(rng) for _ in range(4000)]
    texts = [str(part) for messages, tools in samples for part in (*messages, *tools)]
    tokenizer = make_tokenizer(texts)
    model = untrained(Qwen2ForCausalLM, "chat", len(tokenizer))
    # Greedy by default: each fact has one right answer.
    model.generation_config = GenerationConfig.from_pretrained(DEMO / "chat")

    def score() -> Iterator[tuple[bool, str]]:
        generate: Any = model.generate
        for question, answer in (pair.split("=") for pair in PHRASES["asked"]):
            messages = [{"role": "user", "content": question}]
            prompt: Any = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = generate(**prompt, max_new_tokens=60)[0, prompt["input_ids"].shape[1] :]
            output = str(tokenizer.decode(ids))
            yield answer in output and output.endswith(END), f"{question} {output}"

    rows = losses(model, packed(examples(tokenizer, rng)))
    return Demo(model, tokenizer, rows, schedules(model, steps), score)
