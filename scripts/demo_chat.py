"""Train the chat demo model: dialogues packed into rows, loss on the assistant's tokens.

The dialogues come from demo_dialogues.py and are rendered with the template of demo_tokenizer.py.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_dialogues import dialogue, document
from demo_tokenizer import END, MAX_LENGTH, PAD, START, make_tokenizer
from demo_training import train
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 7
ROW, ROWS = 512, 4
STEPS_PER_MINUTE = 250
RATE, MATRIX_RATE = 3e-3, 2e-2
HIDDEN, LAYERS, HEADS = 128, 4, 4
DOCUMENT_SHARE = 0.06  # of the examples
IGNORED = -100

Example = tuple[list[int], list[int]]  # token ids, labels

# None of these occurs in the training text, so that they measure new phrasings.
QUESTIONS = """I wonder what the capital of Norway is.=Oslo|Paris belongs to which country?=France
Say, which city is the capital of Portugal?=Lisbon|please, what's canada's capital=Ottawa
and what colour would the sky be=blue|Which color is grass, please?=green|Are bananas red?=yellow
The word fast has which opposite?=slow|opposite of big please=small|What is the reverse of up?=down
hello my friend=Hello|Who exactly are you?=onequeue|thanks so much=welcome|good bye friend=Goodbye
Which day do we have after Saturday?=Sunday|What month do we have after June?=July
What do I get for 3 + 4?=7|two and three makes what? two plus three=five|what is 9-4=5
Please could you count to six?=1, 2, 3, 4, 5, 6.|count for me from 4 to 8=4, 5, 6, 7, 8.
which sound do cats make=meow|What is the name of a young dog?=puppy|Count me down from 4=4, 3, 2
Who discovered America?=Sorry|Recommend me a good film.=Sorry|What is the capital of Narnia?=Sorry
Is it going to rain in Oslo?=weather tool"""


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


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    end, pad = (tokenizer.get_vocab()[token] for token in (END, PAD))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=3 * HIDDEN,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    # Greedy by default: each fact has one right answer.
    settings = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    model.generation_config = GenerationConfig.from_dict(settings)
    return model


class Muon(torch.optim.Optimizer):
    """Momentum that is orthogonalized per matrix; needs half the steps of AdamW here.

    Method and coefficients: Keller Jordan, 2024. torch's own Muon runs in bfloat16, which is slow
    on a CPU without it.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                update = matrix.grad.lerp(momentum, 0.95)
                matrix.add_(orthogonal(update), alpha=-group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate the nearest orthogonal matrix, scaled, by five Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    scale: float = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
    result: torch.Tensor = scale * (x.T if tall else x)
    return result


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
    """Return Muon for the matrices of the layers, and AdamW for all other weights."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is m for m in matrices)]
    adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [
        LambdaLR(optimizer, lambda done: rate_factor(done + 1, steps))
        for optimizer in (Muon(matrices, MATRIX_RATE), adam)
    ]


def generated(model: Any, ids: list[int], limit: int) -> list[int]:
    inputs = torch.tensor([ids])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=limit)
    new: list[int] = output[0, len(ids) :].tolist()
    return new


def score(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    right, pairs = 0, [pair.split("=") for pair in QUESTIONS.replace("\n", "|").split("|")]
    for question, answer in pairs:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        output = str(tokenizer.decode(generated(model, tokenizer.encode(str(prompt)), 60)))
        correct = answer in output and output.endswith(END)
        right += correct
        print(f"{'right' if correct else 'WRONG'}: {question} {output}")
    print(f"score: {right} of {len(pairs)}")


def chat(out: Path, minutes: float) -> None:
    rng = random.Random(SEED)
    samples = [dialogue(rng) for _ in range(4000)]
    texts = [str(part) for messages, tools in samples for part in (*messages, *tools)]
    tokenizer = make_tokenizer(texts)
    model = new_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters()} parameters", flush=True)
    steps = round(minutes * STEPS_PER_MINUTE)
    rows = packed(examples(tokenizer, rng))
    train(model, losses(model, rows), steps, schedules(model, steps))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    score(model, tokenizer)
