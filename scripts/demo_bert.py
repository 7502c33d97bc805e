"""The fill-mask and the embedding demo model, on sentences: facts in many phrasings, and stories.

A tilde marks a word that training may mask, {n} stands for any name.

Fill-mask learns to restore a hidden word. The embedding model gives phrasings of one fact similar
vectors. Its loss includes the first 16 and 32 numbers of a vector alone (Matryoshka), so that
requests may set `dimensions`. No file configures its pooling, since the normalized mean is the
default.
"""

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from demo_corpus import CYCLES, TEXTS, drawn, pairs, phrases, plural, with_article
from demo_training import SEED, Demo, one_cycle, refuse_known, untrained
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import BertForMaskedLM, BertModel, BertTokenizer

ROWS = 112  # sentences per batch
RATE, WARM_UP = 2e-3, 0.07
MAX_LENGTH = 128
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~£€°"
FACTS = 96  # per batch
TEMPERATURE = 0.06
# The part of a target distribution that is shared by all facts of one kind.
SAME_KIND_SHARE = 0.1


# ── sentences ──


def say(sayings: str, **words: str) -> list[str]:
    """Fill every phrasing; a tilde marks the words that training may mask."""
    marked = {slot: re.sub(r"(\w+)$", r"~\1", word) for slot, word in words.items()}
    return [with_article(saying.format(**marked)) for saying in phrases(sayings)]


def tables() -> Iterator[tuple[str, list[str]]]:
    """Yield a group and the phrasings of each fact."""
    for line in TEXTS["sentence_tables"].splitlines():
        group, sayings, names = line.split()
        for x, y in pairs(";".join(TEXTS[name] for name in names.split(";"))):
            yield group, say(TEXTS[sayings], x=x, y=y, xs=plural(x))


def cycle(kind: str) -> Iterator[list[str]]:
    """Yield the phrasings of the order of two or three days, months or seasons."""
    names = CYCLES[kind]
    for x, y, z in zip(names, names[1:] + names, names[2:] + names, strict=False):
        texts = say(TEXTS["next_sayings"], k=kind, x=x, y=y, z=z)
        yield texts + (say(TEXTS["day_sayings"], x=x, y=y) if kind == "day" else [])


def calendar() -> Iterator[str]:
    yield from say("{x} and {y} are the weekend", x="saturday", y="sunday")
    for kind, names in CYCLES.items():
        yield from (text for texts in cycle(kind) for text in texts)
        whole = "week" if kind == "day" else "year"
        for nth, x in [*zip(TEXTS["ordinals"].split(), names, strict=False), ("last", names[-1])]:
            yield from say(TEXTS["nth_sayings"], n=nth, k=kind, w=whole, x=x)


def arithmetic() -> Iterator[str]:
    for names in (TEXTS["numbers"].split(), [str(n) for n in range(21)]):
        for a in range(11):
            for b in range(11):
                yield from say(TEXTS["sum_sayings"], a=names[a], b=names[b], c=names[a + b])
                if 0 < a < 6 and 0 < b < 5:
                    yield from say(TEXTS["times_sayings"], a=names[a], b=names[b], c=names[a * b])
        for x, y, z in zip(names, names[1:], names[2:], strict=False):
            yield from say(TEXTS["next_sayings"], k="number", x=x, y=y, z=z)


def sentences(rng: random.Random) -> dict[str, list[str]]:
    story = [TEXTS[f"story_{part}"] for part in range(4)]
    stories = [[rng.choice(phrases(part)) for part in story] for _ in range(2000)]
    groups = {
        "calendar": [*calendar()],
        "arithmetic": [*arithmetic()],
        "plain": phrases(TEXTS["plain"]) * 4,
        "stories": [" ".join(story[: rng.randint(2, 4)]) for story in stories],
    }
    for group, texts in tables():
        groups.setdefault(group, []).extend(texts)
    return groups


def facts() -> list[tuple[str, list[str]]]:
    """Return the kind of each fact, and its phrasings."""
    collected = [*tables(), *((kind, texts) for kind in CYCLES for texts in cycle(kind))]
    collected += [("plain", [text]) for text in phrases(TEXTS["plain"])]
    return [(kind, [plain(text) for text in texts]) for kind, texts in collected]


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")


# ── fill-mask ──


def make_tokenizer(texts: list[str]) -> BertTokenizer:
    """Train WordPiece, then drop the tokens that no text uses, which would stay untrained."""
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=20_000,
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=list(LETTERS + OTHERS),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    # WordPiece has a token for a letter inside a word only if a training word has it there.
    inside = [f"q{letter}" for letter in LETTERS + OTHERS]
    learner.train_from_iterator(texts + inside, trainer)
    used = {token for text in texts for token in learner.encode(text).tokens}
    single = {token for token in learner.get_vocab() if len(token.removeprefix("##")) == 1}
    kept = SPECIAL + sorted((used | single) - set(SPECIAL))
    vocab = {token: number for number, token in enumerate(kept)}
    return BertTokenizer(vocab=vocab, model_max_length=MAX_LENGTH)


def dress(text: str, rng: random.Random) -> str:
    """Add a lead, a tail, an unknown word or a full stop at random, as users may."""
    if rng.random() < 0.2:
        text = f"{drawn('leads', rng)} {text}"
    if rng.random() < 0.08:
        text = f"{text} {drawn('tails', rng)}"
    if rng.random() < 0.15:
        words = text.split()
        words.insert(rng.randint(0, len(words)), "{n}")
        text = " ".join(words)
    name = "".join(rng.choices(LETTERS, k=rng.randint(2, 8)))
    return text.replace("{n}", name) + ("." if rng.random() < 0.65 else "")


def hide(text: str, vocab: dict[str, int], rng: random.Random) -> tuple[str, list[int]]:
    """Mask one marked word, or any words; return the text and the tokens that are masked."""
    words = re.findall(r"~?\w+|[^\w\s~]", text)
    marked = [i for i, word in enumerate(words) if word[0] == "~"]
    words = [word.strip("~") for word in words]
    spots = [i for i, word in enumerate(words) if word in vocab and rng.random() < 0.15]
    if marked and (not spots or rng.random() < 0.8):
        spots = [rng.choice(marked)]
    hidden = [vocab[words[i]] for i in spots]
    return " ".join("[MASK]" if i in spots else word for i, word in enumerate(words)), hidden


def masked_batches(
    groups: dict[str, list[str]], tokenizer: BertTokenizer, rng: random.Random
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    vocab = tokenizer.get_vocab()
    texts, weights = list(groups.values()), [len(group) ** 0.6 for group in groups.values()]
    while True:
        # Rows of several sentences train later positions and attention within a sentence.
        joined = rng.choices((1, 2, 3, 9), (82, 8, 7, 3))[0]
        size = ROWS // joined * joined
        chosen = [rng.choice(group) for group in rng.choices(texts, weights, k=size)]
        hidden = [hide(dress(text, rng), vocab, rng) for text in chosen]
        rows = [hidden[i : i + joined] for i in range(0, size, joined)]
        joined_texts = [" ".join(text for text, _ in row) for row in rows]
        inputs = tokenizer(joined_texts, padding=True, truncation=True, return_tensors="pt")
        labels = torch.full_like(inputs["input_ids"], -100)
        for ids, label, row in zip(inputs["input_ids"], labels, rows, strict=True):
            masked = (ids == MASK).nonzero()[:, 0]
            answers = [token for _, tokens in row for token in tokens]
            label[masked] = torch.tensor(answers[: len(masked)], dtype=torch.long)
        yield dict(inputs), labels


def fill_mask(out: Path, steps: int) -> Demo:
    rng, questions = random.Random(SEED), phrases(TEXTS["masked"])
    groups = sentences(rng)
    texts = [plain(text) for group in groups.values() for text in group]
    refuse_known([plain(question) for question in questions], set(texts))
    tokenizer = make_tokenizer([*texts, plain(TEXTS["leads"]), plain(TEXTS["tails"])])
    model = untrained(BertForMaskedLM, "fill-mask", len(tokenizer))

    def losses() -> Iterator[Tensor]:
        model.set_attn_implementation("eager")
        for inputs, labels in masked_batches(groups, tokenizer, rng):
            known = labels != -100
            # The output layer is the widest, so it runs on masked positions only.
            states = model.bert(**inputs).last_hidden_state[known]
            yield cross_entropy(model.cls(states), labels[known])

    def score() -> Iterator[tuple[bool, str]]:
        for question in questions:
            asked, answer = re.sub(r"~\w+", "[MASK]", question), re.findall(r"~(\w+)", question)[0]
            inputs = tokenizer(asked, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs).logits[inputs["input_ids"] == MASK]
            output = tokenizer.decode(logits[0].argmax())
            yield output == answer, f"{asked} {output}"

    return Demo(model, tokenizer, losses(), one_cycle(model, RATE, steps, WARM_UP), score)


# ── embedding ──


def question_only(text: str) -> str:
    """Return a question without its answer, or the text."""
    return text[: text.index("?") + 1] if "?" in text else text


def shorten(text: str, rng: random.Random) -> str:
    """Add a lead, drop a word or the full stop at random, as users may."""
    words = text.split()
    if len(words) > 4 and rng.random() < 0.3:
        words.pop(rng.randrange(len(words)))
    lead = f"{plain(drawn('leads', rng))} " if rng.random() < 0.15 else ""
    return lead + " ".join(words) + ("." if rng.random() < 0.4 else "")


def embed(model: BertModel, tokenizer: BertTokenizer, texts: list[str]) -> Tensor:
    """Return the means of the tokens' states [texts, hidden]."""
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    states: Tensor = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][:, :, None]
    means: Tensor = (states * real).sum(1) / real.sum(1)
    return means


def loss_of(vectors: Tensor, kinds: list[str], sizes: list[int]) -> Tensor:
    """Return the loss: a first phrasing should be most similar to its fact's second one, then to
    facts of the same kind."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind = torch.tensor([numbers[name] for name in kinds])
    same_kind = (kind[:, None] == kind).float()
    shared = SAME_KIND_SHARE * same_kind / same_kind.sum(1, keepdim=True)
    target = (1 - SAME_KIND_SHARE) * torch.eye(FACTS) + shared
    total = torch.zeros(())
    for size in sizes:
        first, second = normalize(vectors[:, :size], dim=1).view(2, FACTS, size)
        scores = first @ second.T / TEMPERATURE
        total = total + cross_entropy(scores, target) + cross_entropy(scores.T, target)
    return total / (2 * len(sizes))


def embedding(out: Path, steps: int) -> Demo:
    """Return the model with the fill-mask model's tokenizer, trained on the same sentences."""
    tokenizer = BertTokenizer.from_pretrained(out.parent / "fill-mask")
    known, rng = facts(), random.Random(SEED)
    # A text, a related one, an unrelated one.
    triples = [line.split("|") for line in TEXTS["triples"].splitlines()]
    texts = {text for _, sayings in known for text in sayings}
    refuse_known([text for triple in triples for text in triple[:2]], texts)
    model = untrained(BertModel, "embedding", len(tokenizer), add_pooling_layer=False)

    def losses() -> Iterator[Tensor]:
        """Compare two phrasings of each of FACTS facts."""
        model.set_attn_implementation("eager")
        while True:
            sample = rng.sample(known, FACTS)
            firsts = [shorten(question_only(rng.choice(texts)), rng) for _, texts in sample]
            seconds = [shorten(rng.choice(texts), rng) for _, texts in sample]
            vectors = embed(model, tokenizer, firsts + seconds)
            yield loss_of(vectors, [kind for kind, _ in sample], sizes)

    def score() -> Iterator[tuple[bool, str]]:
        for triple in triples:
            with torch.no_grad():
                text, related, unrelated = normalize(embed(model, tokenizer, triple), dim=1)
            near, far = float(text @ related), float(text @ unrelated)
            yield near > far, f"{near:.2f} against {far:.2f}: {' | '.join(triple)}"

    sizes = model.config.matryoshka_dimensions
    schedules = one_cycle(model, RATE, steps, WARM_UP)
    return Demo(model, tokenizer, losses(), schedules, score, max_norm=math.inf)
