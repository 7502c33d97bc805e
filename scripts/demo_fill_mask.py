"""Train the fill-mask demo model: plain facts with one word hidden."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from demo_corpus import phrases
from demo_sentences import TEXTS, plain, sentences
from demo_training import one_cycle, train
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

SEED = 7
BATCH = 112
STEPS_PER_MINUTE = 500
RATE = 2e-3
HIDDEN = 112
MAX_LENGTH = 128
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~£€°"

# None of these occurs in the training text, so that they measure new phrasings.
QUESTIONS = """surely the capital of norway must be ~oslo|in portugal the capital is ~lisbon
tell me the capital of canada: ~ottawa|in winter the snow is ~white|the grass in the park is ~green
look, the sky is so ~blue|our tomatoes are ~red|opposite of fast: ~slow
the word opposite to wet is ~dry|not happy but ~sad|a thing that is not heavy is ~light
after saturday we have ~sunday|today it is tuesday, tomorrow it is ~wednesday
the month that comes after june is ~july|the last month before october is ~september
five plus five makes ~ten|the result of 3 + 4 is ~7|we know that 9 - 4 = ~5|six and two gives ~eight
the cat at home says ~meow|every duck says ~quack|the young dog is called a ~puppy
a little sheep is a ~lamb|the horse and its ~foal|a mother's brother is an ~uncle
a good bottle is made of ~glass|the nurse is working in a ~hospital"""


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
        text = f"{rng.choice(phrases(TEXTS['leads']))} {text}"
    if rng.random() < 0.08:
        text = f"{text} {rng.choice(phrases(TEXTS['tails']))}"
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


def batches(
    groups: dict[str, list[str]], tokenizer: BertTokenizer, rng: random.Random
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    vocab = tokenizer.get_vocab()
    texts, weights = list(groups.values()), [len(group) ** 0.6 for group in groups.values()]
    while True:
        # Rows of several sentences train later positions and attention within a sentence.
        joined = rng.choices((1, 2, 3, 9), (82, 8, 7, 3))[0]
        size = BATCH // joined * joined
        drawn = [rng.choice(group) for group in rng.choices(texts, weights, k=size)]
        hidden = [hide(dress(text, rng), vocab, rng) for text in drawn]
        rows = [hidden[i : i + joined] for i in range(0, size, joined)]
        inputs = tokenizer(
            [" ".join(text for text, _ in row) for row in rows],
            padding=True,
            truncation=True,
            return_tensors="pt",
        )
        labels = torch.full_like(inputs["input_ids"], -100)
        for ids, label, row in zip(inputs["input_ids"], labels, rows, strict=True):
            masked = (ids == MASK).nonzero()[:, 0]
            answers = [token for _, tokens in row for token in tokens]
            label[masked] = torch.tensor(answers[: len(masked)], dtype=torch.long)
        yield dict(inputs), labels


def bert_config(size: int, hidden: int, layers: int) -> BertConfig:
    return BertConfig(
        vocab_size=size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )


def losses(
    model: BertForMaskedLM, data: Iterator[tuple[dict[str, Tensor], Tensor]]
) -> Iterator[Tensor]:
    model.set_attn_implementation("eager")
    for inputs, labels in data:
        known = labels != -100
        # The output layer is the widest, so it runs on masked positions only.
        states = model.bert(**inputs).last_hidden_state[known]
        yield cross_entropy(model.cls(states), labels[known])


def score(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    questions = phrases(QUESTIONS)
    right = 0
    for question in questions:
        asked, answer = re.sub(r"~\w+", "[MASK]", question), re.findall(r"~(\w+)", question)[0]
        inputs = tokenizer(asked, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[inputs["input_ids"] == MASK]
        output = tokenizer.decode(logits[0].argmax())
        right += output == answer
        print(f"{'right' if output == answer else 'WRONG'}: {asked} {output}")
    print(f"score: {right} of {len(questions)}")


def fill_mask(out: Path, minutes: float) -> None:
    rng = random.Random(SEED)
    groups = sentences(rng)
    texts = [plain(text) for group in groups.values() for text in group]
    if known := {plain(question) for question in phrases(QUESTIONS)}.intersection(texts):
        raise SystemExit(f"questions in the training text: {sorted(known)}")
    tokenizer = make_tokenizer([*texts, plain(TEXTS["leads"]), plain(TEXTS["tails"])])
    print(f"{len(set(texts))} sentences, {len(tokenizer)} tokens", flush=True)
    torch.manual_seed(SEED)
    model = BertForMaskedLM(bert_config(len(tokenizer), HIDDEN, layers=3))
    steps = round(minutes * STEPS_PER_MINUTE)
    schedules = one_cycle(model, RATE, steps, warm_up=0.07)
    train(model, losses(model, batches(groups, tokenizer, rng)), steps, schedules)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    score(model, tokenizer)
