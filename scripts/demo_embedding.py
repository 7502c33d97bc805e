"""Train the embedding demo model: phrasings of one fact get similar vectors.

The loss is contrastive, on the sentences of demo_sentences.py. It includes the first 16 and 32
numbers of a vector alone (Matryoshka), so that requests may set `dimensions`.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from demo_corpus import CYCLES, pairs, phrases, plural
from demo_fill_mask import bert_config
from demo_sentences import TABLES, TEXTS, plain, say
from demo_training import one_cycle, train
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import BertModel, BertTokenizer

SEED = 7
FACTS = 96  # per batch
STEPS_PER_MINUTE = 1500
RATE = 2e-3
HIDDEN = 64
SIZES = (16, 32, 64)
TEMPERATURE = 0.06
# The part of a target distribution that is shared by all facts of one kind.
SAME_KIND_SHARE = 0.1

# A text, a related one, an unrelated one. None occurs in the training text.
TRIPLES = """tell me the capital of france!|surely paris is the capital of france|a cow says moo
which sound does the cat make?|my cat always says meow|the capital of italy is rome
is the grass in the park green?|grass is green here|a plane can fly
what do we call a young dog?|every baby dog is a puppy|milk is white
tomorrow is friday|the day after thursday is friday, isn't it?|a frog is green
what is not hot but the contrary?|cold is the opposite of hot, right?|bees make honey
the doctor at work|a doctor works in the hospital|monday comes before tuesday
what language do they speak in spain?|people in spain speak spanish, of course|snow is white
how is bread made?|we make our bread from flour|the lion says roar
the month before july|june comes right before july|a baby sheep is a lamb"""

Fact = tuple[str, list[str]]  # its kind and its phrasings


def facts() -> list[Fact]:
    collected: list[Fact] = []
    for group, sayings, table in TABLES:
        for x, y in pairs(table):
            collected.append((group, say(sayings, x=x, y=y, xs=plural(x))))
    for kind, text in CYCLES.items():
        names = text.split()
        sayings = TEXTS["next_sayings"] + (f"|{TEXTS['day_sayings']}" if kind == "day" else "")
        for x, y, z in zip(names, names[1:] + names, names[2:] + names, strict=False):
            collected.append((kind, say(sayings, k=kind, x=x, y=y, z=z)))
    collected += [("plain", [text]) for text in phrases(TEXTS["plain"])]
    return [(kind, [plain(text) for text in texts]) for kind, texts in collected]


def question_only(text: str) -> str:
    """Return a question without its answer, or the text."""
    return text[: text.index("?") + 1] if "?" in text else text


def dress(text: str, rng: random.Random) -> str:
    """Add a lead, drop a word or the full stop at random, as users may."""
    words = text.split()
    if len(words) > 4 and rng.random() < 0.3:
        words.pop(rng.randrange(len(words)))
    lead = f"{plain(rng.choice(phrases(TEXTS['leads'])))} " if rng.random() < 0.15 else ""
    return lead + " ".join(words) + ("." if rng.random() < 0.4 else "")


def batches(known: list[Fact], rng: random.Random) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two phrasings of each of FACTS facts, and the facts' kinds."""
    while True:
        sample = rng.sample(known, FACTS)
        firsts = [dress(question_only(rng.choice(texts)), rng) for _, texts in sample]
        seconds = [dress(rng.choice(texts), rng) for _, texts in sample]
        yield firsts + seconds, [kind for kind, _ in sample]


def new_model(size: int) -> BertModel:
    torch.manual_seed(SEED)
    config = bert_config(size, HIDDEN, layers=2)
    config.is_matryoshka = True
    config.matryoshka_dimensions = list(SIZES)
    return BertModel(config, add_pooling_layer=False)


def embed(model: BertModel, tokenizer: BertTokenizer, texts: list[str]) -> Tensor:
    """Return the means of the tokens' states [texts, HIDDEN]."""
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    states: Tensor = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][:, :, None]
    means: Tensor = (states * real).sum(1) / real.sum(1)
    return means


def loss_of(vectors: Tensor, kinds: list[str]) -> Tensor:
    """Return the loss: a first phrasing should be most similar to its fact's second one, then to
    facts of the same kind."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind = torch.tensor([numbers[name] for name in kinds])
    same_kind = (kind[:, None] == kind).float()
    target = (1 - SAME_KIND_SHARE) * torch.eye(FACTS) + SAME_KIND_SHARE * same_kind / same_kind.sum(
        1, keepdim=True
    )
    total = torch.zeros(())
    for size in SIZES:
        first, second = normalize(vectors[:, :size], dim=1).view(2, FACTS, size)
        scores = first @ second.T / TEMPERATURE
        total = total + cross_entropy(scores, target) + cross_entropy(scores.T, target)
    return total / (2 * len(SIZES))


def losses(model: BertModel, tokenizer: BertTokenizer) -> Iterator[Tensor]:
    model.set_attn_implementation("eager")
    for texts, kinds in batches(facts(), random.Random(SEED)):
        yield loss_of(embed(model, tokenizer, texts), kinds)


def score(model: BertModel, tokenizer: BertTokenizer) -> None:
    right, triples = 0, phrases_of_triples()
    for triple in triples:
        with torch.no_grad():
            text, related, unrelated = normalize(embed(model, tokenizer, triple), dim=1)
        near, far = float(text @ related), float(text @ unrelated)
        right += near > far
        print(f"{near:.2f} against {far:.2f}: {' | '.join(triple)}")
    print(f"score: {right} of {len(triples)}")


def phrases_of_triples() -> list[list[str]]:
    return [line.split("|") for line in TRIPLES.splitlines()]


def embedding(out: Path, minutes: float) -> None:
    """Train and save the model with the fill-mask model's tokenizer, trained on the same sentences.
    No file configures pooling, since the normalized mean is the default."""
    tokenizer = BertTokenizer.from_pretrained(out.parent / "fill-mask")
    known = facts()
    texts = {text for _, sayings in known for text in sayings}
    if leaked := {text for triple in phrases_of_triples() for text in triple[:2]} & texts:
        raise SystemExit(f"questions in the training text: {sorted(leaked)}")
    print(f"{len(known)} facts, {len(texts)} sentences, {len(tokenizer)} tokens", flush=True)
    model = new_model(len(tokenizer))
    steps = round(minutes * STEPS_PER_MINUTE)
    schedules = one_cycle(model, RATE, steps, warm_up=0.07)
    train(model, losses(model, tokenizer), steps, schedules, max_norm=math.inf)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    score(model, tokenizer)
