"""The fill-mask and the embedding demo model, on sentences: facts in many phrasings, and stories.

Fill-mask learns to restore a hidden word. The embedding model gives phrasings of one fact similar
vectors. Its loss includes the first 16 and 32 numbers of a vector alone (Matryoshka), so that
requests may set `dimensions`. No file configures its pooling, since the normalized mean is the
default.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase, digits, punctuation

import torch
from demo_texts import PHRASES, TABLES, Table, fill, with_article
from demo_training import SEED, Demo, one_cycle, refuse_known, untrained
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import BertForMaskedLM, BertModel, BertTokenizer

ROWS = 112  # sentences per batch
RATE, WARM_UP = 2e-3, 0.07
MAX_LENGTH = 128
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASK = SPECIAL.index("[MASK]")
IN_WORDS = ascii_lowercase + digits + "£€°"
FACTS = 96  # per batch
TEMPERATURE = 0.06
# The part of a target distribution that is shared by all facts of one kind.
SAME_KIND_SHARE = 0.1


# ── sentences ──


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")


def sayings_of_facts() -> Iterator[tuple[Table, list[str]]]:
    """Yield the phrasings of each fact, with marks, and its table."""
    for table in (table for table in TABLES if "sayings" in table.sections):
        sayings = [text for name in table.sections["sayings"] for text in PHRASES[name]]
        for fact in table.facts:
            own = {slot: table.first(slot) for slot in "kw"}
            marked = {slot: re.sub(r"(\w+)$", r"~\1", word) for slot, word in (own | fact).items()}
            yield table, [with_article(saying.format(**marked)) for saying in sayings]


def sentences(rng: random.Random) -> dict[str, list[str]]:
    groups = {
        "plain": PHRASES["plain"] * 4,
        "stories": [fill("{story}", rng, n="{n}") for _ in range(2000)],
    }
    for table, texts in sayings_of_facts():
        groups.setdefault(table.first("group"), []).extend(texts)
    return groups


def facts() -> list[tuple[str, list[str]]]:
    """Return the kind of each fact, and its phrasings; sums are not among them."""
    known = [
        (table, texts)
        for table, texts in sayings_of_facts()
        if table.first("group") != "arithmetic"
    ]
    kinds = [(table.first("k", table.first("group")), texts) for table, texts in known]
    kinds += [("plain", [text]) for text in PHRASES["plain"]]
    return [(kind, [plain(text) for text in texts]) for kind, texts in kinds]


# ── fill-mask ──


def make_tokenizer(texts: list[str]) -> BertTokenizer:
    """Return WordPiece with the words of the texts, and with letters for all others."""
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    normalize_text = normalizers.BertNormalizer(lowercase=True).normalize_str
    words = {word for text in texts for word, _ in split(normalize_text(text))}
    letters = {*punctuation, *IN_WORDS} | {f"##{letter}" for letter in IN_WORDS}
    kept = SPECIAL + sorted(words | letters)
    vocab = {token: number for number, token in enumerate(kept)}
    return BertTokenizer(vocab=vocab, model_max_length=MAX_LENGTH)


def dress(text: str, rng: random.Random) -> str:
    """Add a lead, a tail, an unknown word or a full stop at random, as users may."""
    if rng.random() < 0.15:
        words = text.split()
        words.insert(rng.randint(0, len(words)), "{n}")
        text = " ".join(words)
    name = "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8)))
    return fill("{dressed}", rng, said=text, n=name) + ("." if rng.random() < 0.65 else "")


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
    rng, questions = random.Random(SEED), PHRASES["masked"]
    groups = sentences(rng)
    texts = [plain(text) for group in groups.values() for text in group]
    refuse_known([plain(question) for question in questions], set(texts))
    tokenizer = make_tokenizer([*texts, *map(plain, PHRASES["leads"] + PHRASES["tails"])])
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
    lead = f"{plain(rng.choice(PHRASES['leads']))} " if rng.random() < 0.15 else ""
    return lead + " ".join(words) + ("." if rng.random() < 0.4 else "")


def embed(model: BertModel, tokenizer: BertTokenizer, texts: Sequence[str]) -> Tensor:
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
    triples = [*zip(*[iter(PHRASES["triples"])] * 3, strict=True)]
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
