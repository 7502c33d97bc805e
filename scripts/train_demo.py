"""Trains the tiny models that onequeue embeds so that it can be tried without a download.

    python scripts/train_demo.py fill-mask [--out DIR] [--minutes M]

All training text is generated here from the short lists below. The model learns those facts by
heart in many phrasings; it understands nothing beyond them, and it is no measure of what a real
checkpoint does. The same seed and minutes give the same steps, whatever the speed of the machine.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
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

CAPITALS = """france paris;germany berlin;italy rome;spain madrid;portugal lisbon;england london
the_united_kingdom london;scotland edinburgh;wales cardiff;ireland dublin;belgium brussels
the_netherlands amsterdam;austria vienna;switzerland bern;denmark copenhagen;norway oslo
sweden stockholm;finland helsinki;iceland reykjavik;poland warsaw;hungary budapest;czechia prague
croatia zagreb;serbia belgrade;romania bucharest;bulgaria sofia;greece athens;ukraine kyiv
russia moscow;estonia tallinn;latvia riga;lithuania vilnius;turkey ankara;egypt cairo;morocco rabat
algeria algiers;kenya nairobi;ghana accra;nigeria abuja;south_africa pretoria;china beijing
japan tokyo;south_korea seoul;north_korea pyongyang;india delhi;pakistan islamabad;bangladesh dhaka
nepal kathmandu;thailand bangkok;vietnam hanoi;indonesia jakarta;the_philippines manila;iran tehran
iraq baghdad;jordan amman;lebanon beirut;syria damascus;saudi_arabia riyadh;canada ottawa
the_united_states washington;cuba havana;jamaica kingston;peru lima;chile santiago;colombia bogota
venezuela caracas;ecuador quito;brazil brasilia;australia canberra;new_zealand wellington"""
CAPITAL_SAYINGS = """the capital of {x} is {y}|the capital of {x} is called {y}|{y} is in {x}
{y} is the capital of {x}|{y} is the capital city of {x}|{x}'s capital is {y}|i live in {y}, {x}
{x}'s capital city is {y}|the capital city of {x} is {y}|the capital of {x} is the city of {y}
what is the capital of {x}? {y}|what is the capital of {x}? it is {y}|{x} has its capital in {y}
question: what is the capital of {x}? answer: {y}|which city is the capital of {x}? {y}
the city of {y} is the capital of {x}|{y} is a city in {x}|{y}, the capital of {x}, is big
we went to {x} and saw its capital, {y}|{y} is the main city of {x}"""

STUFF = """grass green;snow white;milk white;blood red;the_sky blue;the_sun yellow;coal black
chocolate brown;salt white;sugar white;butter yellow;the_sea blue;cotton white;mud brown;gold yellow
silver grey;coffee brown;rice white;honey yellow;ketchup red;mustard yellow;fire red;smoke grey
soil brown;ice white;the_ocean blue;the_night black"""
STUFF_SAYINGS = """{x} is {y}|the colour of {x} is {y}|the color of {x} is {y}|{x} is usually {y}
{x} looks {y}|what colour is {x}? {y}|what color is {x}? {y}|{x} has a {y} colour|as {y} as {x}
{x} is always {y}|{x} is very {y}|{x} is {y} in colour"""
FRUIT = """banana yellow;lemon yellow;carrot orange;tomato red;cherry red;strawberry red
plum purple;cucumber green;pumpkin orange;pea green;aubergine purple"""
THINGS = """frog green;crow black;flamingo pink;pig pink;elephant grey;mouse grey;swan white
rose red;leaf green;bear brown;crocodile green;cloud white;fox red;polar_bear white;fire_engine red
sunflower yellow;tree green;violet purple"""
THING_SAYINGS = """a {x} is {y}|{xs} are {y}|the {x} is {y}|the colour of a {x} is {y}
as {y} as a {x}|the color of a {x} is {y}|what colour is a {x}? {y}|most {xs} are {y}
what colour are {xs}? {y}|{xs} are usually {y}|i saw a {y} {x}|{xs} have a {y} colour"""

OPPOSITES = """hot cold;big small;up down;day night;good bad;left right;black white;yes no;in out
fast slow;happy sad;rich poor;strong weak;hard soft;light dark;high low;wet dry;open closed
full empty;early late;clean dirty;loud quiet;near far;long short;wide narrow;old young;first last
true false;alive dead;love hate;war peace;begin end;buy sell;push pull;win lose;inside outside
above below;north south;east west;front back;sweet sour;heaven hell;always never;man woman;boy girl
king queen;safe dangerous;easy difficult;on off;summer winter;friend enemy;question answer
hello goodbye;smooth rough;laugh cry;give take;remember forget;deep shallow;brave afraid
here there"""
ONE_WAY = (
    "new old;tall short;large small;wrong right;ugly beautiful;heavy light;warm cool;start end"
)
OPPOSITE_SAYINGS = """the opposite of {x} is {y}|{y} is the opposite of {x}|what is not {x} is {y}
what is the opposite of {x}? {y}|{x} is the contrary of {y}|the opposite of {x} is the word {y}
if it is not {x}, it is {y}|{x} and {y} are opposites|{y} means not {x}
the contrary of {x} is {y}"""

CYCLES = {
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "month": """january february march april may june july august september october november
        december""",
    "season": "spring summer autumn winter",
}
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
NEXT_SAYINGS = """the {k} after {x} is {y}|the {k} before {y} is {x}|{y} comes after {x}
{x}, {y}, {z}|{x} comes before {y}|after {x} comes {y}|before {y} comes {x}|{x} is followed by {y}
{y} follows {x}|which {k} comes after {x}? {y}|which {k} comes before {y}? {x}
{y} is the {k} after {x}|{x} is the {k} before {y}|the {k} between {x} and {z} is {y}
the next {k} after {x} is {y}"""
DAY_SAYINGS = """if today is {x}, tomorrow is {y}|if today is {y}, yesterday was {x}
today is {x}, so tomorrow is {y}|today is {y} and yesterday was {x}|today is {x}. tomorrow is {y}
tomorrow is {y} because today is {x}|yesterday was {x}, so today is {y}"""

NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty"""
SUM_SAYINGS = """{a} plus {b} is {c}|{a} plus {b} equals {c}|{a} and {b} make {c}|{a} and {b} is {c}
the sum of {a} and {b} is {c}|what is {a} plus {b}? {c}|if you add {a} and {b} you get {c}
{c} minus {b} is {a}|{c} minus {b} equals {a}|{c} take away {b} is {a}|what is {c} minus {b}? {a}
{a} + {b} = {c}|{c} - {b} = {a}|{a} + {b} is {c}|{c} - {b} is {a}"""
TIMES_SAYINGS = "{a} times {b} is {c}|{a} x {b} = {c}|{a} * {b} = {c}|what is {a} times {b}? {c}"

SOUNDS = """dog woof;cat meow;cow moo;sheep baa;duck quack;horse neigh;pig oink;lion roar;frog croak
goose honk;owl hoot;bee buzz;snake hiss;mouse squeak;wolf howl;crow caw;bear growl;bird tweet"""
SOUND_SAYINGS = """a {x} says {y}|the {x} says {y}|{xs} say {y}|the {x} goes {y}|my {x} says {y}
the sound of a {x} is {y}|a {x} goes {y}|what does a {x} say? {y}|what does the {x} say? {y}
the sound a {x} makes is {y}|"{y}," said the {x}"""
YOUNG = """dog puppy;cat kitten;cow calf;sheep lamb;duck duckling;horse foal;pig piglet;lion cub
frog tadpole;hen chick;goat kid;bear cub;kangaroo joey;deer fawn;wolf cub;goose gosling
elephant calf;tiger cub;human baby"""
YOUNG_SAYINGS = """a baby {x} is a {y}|a baby {x} is called a {y}|a young {x} is a {y}
the young of a {x} is a {y}|a {y} grows up to be a {x}|a {y} is a baby {x}|a {y} is a young {x}
what is a baby {x} called? a {y}|a young {x} is called a {y}|the {x} and her {y}
a {y} becomes a {x}"""
PLURALS = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "leaf": "leaves"}

KINDS = """dog animal;cat animal;cow animal;horse animal;pig animal;lion animal;tiger animal
wolf animal;bear animal;duck bird;owl bird;swan bird;crow bird;eagle bird;robin bird;apple fruit
banana fruit;lemon fruit;cherry fruit;plum fruit;pear fruit;carrot vegetable;potato vegetable
onion vegetable;saw tool;hammer tool;spade tool;piano instrument;violin instrument;bee insect
guitar instrument;ant insect;fly insect;rose flower;tulip flower;daisy flower"""
NAMES = """france country;germany country;japan country;paris city;rome city;london city;red colour
green colour;blue colour;iron metal;gold metal;copper metal;tea drink;milk drink;coffee drink
football sport;tennis sport;hockey sport;mars planet;venus planet;jupiter planet;monday day
friday day;may month;june month;summer season;winter season;seven number;two number"""
PLACES = """teacher school;doctor hospital;nurse hospital;cook kitchen;farmer farm;baker bakery
pilot plane;sailor ship;librarian library;waiter restaurant;judge court;actor theatre;soldier army
king palace;scientist laboratory;gardener garden;priest church"""
MATERIALS = """window glass;table wood;book paper;tyre rubber;coin metal;jumper wool;shoe leather
house brick;bottle glass;candle wax;statue stone;shirt cotton;ring gold;nail iron;snowman snow
chair wood;mirror glass;bucket plastic;castle stone;door wood;sock wool"""
FOOD = """bread flour;cheese milk;wine grapes;chips potatoes;omelettes eggs;toast bread;butter milk
ketchup tomatoes;jam fruit;cider apples;yoghurt milk;glass sand;paper wood"""
USES = """knife cut;pen write;key open;broom sweep;phone call;spade dig;cup drink;spoon eat
bed sleep;book read;bike ride;car drive;oven bake;boat sail;plane fly;needle sew"""
LANGUAGES = """france french;germany german;italy italian;spain spanish;portugal portuguese
england english;poland polish;russia russian;china chinese;japan japanese;greece greek
brazil portuguese;egypt arabic;the_netherlands dutch"""
SEASONS = """march spring;april spring;may spring;june summer;july summer;august summer
september autumn;october autumn;november autumn;december winter;january winter;february winter"""

PLAIN = """we ~sleep in a ~bed|we ~swim in the ~pool|bees make ~honey
we catch ~trains at the ~station|we ~cook in the ~kitchen|children ~learn at ~school|hens lay ~eggs
fish ~swim in the ~water|birds ~fly in the ~sky|cows eat ~grass|cows give ~milk|spiders make ~webs
birds live in ~nests|cats catch ~mice|a ~dog has ~four legs|a ~bird has ~two wings
a spider has ~eight legs|an insect has ~six legs|a cat has ~four legs|a hand has ~five fingers
a car has ~four wheels|a triangle has ~three sides|we see with our ~eyes|we hear with our ~ears
your mother's mother is your ~grandmother|your mother's father is your ~grandfather
your father's brother is your ~uncle|your mother's brother is your ~uncle|~husband and ~wife
your mother's sister is your ~aunt|your father's sister is your ~aunt
your uncle's son is your ~cousin|your brother's son is your ~nephew|~father and ~mother
your sister's daughter is your ~niece|your son's son is your ~grandson|a boy grows up to be a ~man
a girl grows up to be a ~woman|the son of a king is a ~prince|water freezes and turns into ~ice
ice is ~cold|the ~sun rises in the ~east|the sun sets in the ~west|an hour has ~sixty minutes
water is ~wet|a minute has ~sixty seconds|a ~week has ~seven days|a ~year has ~twelve months
sugar is ~sweet|there are ~seven days in a ~week|there are ~twelve months in a ~year
a year has ~four seasons|the earth goes around the ~sun|the ~moon goes around the ~earth
it snows in ~winter|it is ~cold in ~winter|it is ~hot in ~summer|flowers bloom in ~spring
leaves fall in ~autumn|rain falls from the ~clouds|people breathe ~air|we ~drink ~water|i ~love ~you
once upon a ~time there was a king|hello, how are ~you?|i am ~fine, thank ~you|thank ~you very ~much
good ~morning|good ~night|happy ~birthday|hello, my name is ~anna|the goal of life is to be ~happy
i drink a cup of ~tea|the cat sat on the ~mat|see you ~tomorrow"""
STORY = (
    "the boy|the girl|my mother|my father|my friend|the teacher|she|he|they|we|i|the old man|{n}",
    """ate an ~apple|read a ~book|drank a ~glass of water|played ~football|wrote a ~letter
    sang a ~song|bought some ~bread|opened the ~door|cooked the ~dinner|fed the ~dog|was ~happy
    watched a ~film|told a ~story|rode a ~bike|drove the ~car|went for a ~walk|made a ~cake""",
    "in the ~garden|at ~school|in the ~kitchen|at ~home|in the ~park|in the ~city|on the ~beach",
    "in the ~morning|in the ~evening|yesterday|last ~week|last ~night|after ~lunch|every ~day",
)
LEADS = """everyone knows that|i think that|we learn at school that|yes,|it is true that|so
my teacher says that|hello!|question:|{n} says that|{n} thinks|remember:|please complete:
did you know that|as you know,|in fact,|i am sure that"""
TAILS = ", i think|, of course|, isn't it?|, right?|, said {n}|, and that is true|!| today"

TABLES = [
    ("capitals", CAPITAL_SAYINGS, CAPITALS),
    ("colours", STUFF_SAYINGS, STUFF),
    ("colours", THING_SAYINGS, f"{THINGS};{FRUIT}"),
    ("colours", "a ripe {x} is {y}|ripe {xs} are {y}|the ripe {x} is {y}", FRUIT),
    ("opposites", OPPOSITE_SAYINGS, OPPOSITES),
    ("opposites", OPPOSITE_SAYINGS, re.sub(r"(\w+) (\w+)", r"\2 \1", OPPOSITES)),
    ("opposites", OPPOSITE_SAYINGS, ONE_WAY),
    ("animals", SOUND_SAYINGS, SOUNDS),
    ("animals", YOUNG_SAYINGS, YOUNG),
    ("objects", "a {x} is a {y}|the {x} is a {y}|a {x} is a kind of {y}", KINDS),
    ("objects", "{x} is a {y}|{x} is the name of a {y}", NAMES),
    ("objects", "a {x} works in a {y}|the {x} is at work in the {y}|in a {y} works a {x}", PLACES),
    ("objects", "a {x} is made of {y}|{xs} are made of {y}|the {x} is made of {y}", MATERIALS),
    ("objects", "{x} is made from {y}|we make {x} from {y}|{x} comes from {y}", FOOD),
    ("objects", "we use a {x} to {y}|a {x} is used to {y}|with a {x} you can {y}", USES),
    ("objects", "people in {x} speak {y}|in {x} they speak {y}", LANGUAGES),
    ("objects", "{x} is a month in {y}|{x} is in {y}|in {x} it is {y}", SEASONS),
]

# None of these occurs in the training text: they measure new phrasings, not recitation.
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


def phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in re.split(r"[|\n]", text)]


def say(sayings: str, **words: str) -> list[str]:
    """Fills every saying; a tilde marks the words that training may hide."""
    marked = {slot: re.sub(r"(\w+)$", r"~\1", word) for slot, word in words.items()}
    said = [saying.format(**marked) for saying in phrases(sayings)]
    return [re.sub(r"\ba (~?[aeio])", r"an \1", text) for text in said]


def table(sayings: str, facts: str) -> list[str]:
    texts = []
    for x, y in (row.replace("_", " ").rsplit(" ", 1) for row in re.split(r"[;\n]", facts)):
        regular = re.sub("y$", "ie", x) + ("es" if x[-1] in "ox" else "s")
        texts += say(sayings, x=x, y=y, xs=PLURALS.get(x, regular))
    return texts


def calendar() -> list[str]:
    texts = say("{x} and {y} are the weekend", x="saturday", y="sunday")
    for kind, text in CYCLES.items():
        names = text.split()
        for x, y, z in zip(names, names[1:] + names, names[2:] + names, strict=False):
            texts += say(NEXT_SAYINGS, k=kind, x=x, y=y, z=z)
            texts += say(DAY_SAYINGS, x=x, y=y) if kind == "day" else []
        whole = "week" if kind == "day" else "year"
        for nth, x in [*zip(ORDINALS.split(), names, strict=False), ("last", names[-1])]:
            texts += say("the {n} {k} of the {w} is {x}", n=nth, k=kind, w=whole, x=x)
            texts += say("{x} is the {n} {k} of the {w}", n=nth, k=kind, w=whole, x=x)
    return texts


def arithmetic() -> list[str]:
    texts = []
    for names in (NUMBERS.split(), [str(n) for n in range(21)]):
        for a in range(11):
            for b in range(11):
                texts += say(SUM_SAYINGS, a=names[a], b=names[b], c=names[a + b])
                if 0 < a < 6 and 0 < b < 5:
                    texts += say(TIMES_SAYINGS, a=names[a], b=names[b], c=names[a * b])
        for x, y, z in zip(names, names[1:], names[2:], strict=False):
            texts += say(NEXT_SAYINGS, k="number", x=x, y=y, z=z)
    return texts


def sentences(rng: random.Random) -> dict[str, list[str]]:
    stories = [[rng.choice(phrases(part)) for part in STORY] for _ in range(2000)]
    groups = {
        "calendar": calendar(),
        "arithmetic": arithmetic(),
        "plain": phrases(PLAIN) * 4,
        "stories": [" ".join(story[: rng.randint(2, 4)]) for story in stories],
    }
    for group, sayings, facts in TABLES:
        groups.setdefault(group, []).extend(table(sayings, facts))
    return groups


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")


def make_tokenizer(texts: list[str]) -> BertTokenizer:
    """Learns WordPiece, then drops the pieces that no text uses, as they would stay untrained."""
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
    # A letter becomes a piece for the inside of a word only if some word has it there.
    inside = [f"q{letter}" for letter in LETTERS + OTHERS]
    learner.train_from_iterator(texts + inside, trainer)
    used = {token for text in texts for token in learner.encode(text).tokens}
    single = {token for token in learner.get_vocab() if len(token.removeprefix("##")) == 1}
    kept = SPECIAL + sorted((used | single) - set(SPECIAL))
    vocab = {token: number for number, token in enumerate(kept)}
    return BertTokenizer(vocab=vocab, model_max_length=MAX_LENGTH)


def dress(text: str, rng: random.Random) -> str:
    """Adds a lead, a tail, an unknown word or a full stop at times, as users will."""
    if rng.random() < 0.2:
        text = f"{rng.choice(phrases(LEADS))} {text}"
    if rng.random() < 0.08:
        text = f"{text} {rng.choice(phrases(TAILS))}"
    if rng.random() < 0.15:
        words = text.split()
        words.insert(rng.randint(0, len(words)), "{n}")
        text = " ".join(words)
    name = "".join(rng.choices(LETTERS, k=rng.randint(2, 8)))
    return text.replace("{n}", name) + ("." if rng.random() < 0.65 else "")


def hide(text: str, vocab: dict[str, int], rng: random.Random) -> tuple[str, list[int]]:
    """Masks one marked word, or any words; returns the text and the tokens behind its masks."""
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
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    vocab = tokenizer.get_vocab()
    texts, weights = list(groups.values()), [len(group) ** 0.6 for group in groups.values()]
    while True:
        # Several sentences in a row teach the later positions and to tell neighbours apart.
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
            places = (ids == MASK).nonzero()[:, 0]
            answers = [token for _, tokens in row for token in tokens]
            label[places] = torch.tensor(answers[: len(places)], dtype=torch.long)
        yield dict(inputs), labels


def new_model(size: int) -> BertForMaskedLM:
    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=size,
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    return BertForMaskedLM(config)


def train(
    model: BertForMaskedLM,
    data: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]],
    steps: int,
) -> None:
    model.train()
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.07)
    start, mean = time.monotonic(), 0.0
    for step, (inputs, labels) in zip(range(1, steps + 1), data, strict=False):
        known = labels != -100
        # The output layer is the widest: it runs on the masked places only.
        states = model.bert(**inputs).last_hidden_state[known]
        loss = cross_entropy(model.cls(states), labels[known])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean += (loss.item() - mean) / min(step, 100)
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - start
            print(f"step {step}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def score(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    questions = phrases(QUESTIONS)
    right = 0
    for question in questions:
        asked, answer = re.sub(r"~\w+", "[MASK]", question), re.findall(r"~(\w+)", question)[0]
        inputs = tokenizer(asked, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[inputs["input_ids"] == MASK]
        got = tokenizer.decode(logits[0].argmax())
        right += got == answer
        print(f"{'right' if got == answer else 'WRONG'}: {asked} {got}")
    print(f"score: {right} of {len(questions)}")


def fill_mask(out: Path, minutes: float) -> None:
    rng = random.Random(SEED)
    groups = sentences(rng)
    texts = [plain(text) for group in groups.values() for text in group]
    if known := {plain(question) for question in phrases(QUESTIONS)}.intersection(texts):
        raise SystemExit(f"questions in the training text: {sorted(known)}")
    tokenizer = make_tokenizer([*texts, plain(LEADS), plain(TAILS)])
    print(f"{len(set(texts))} sentences, {len(tokenizer)} tokens", flush=True)
    model = new_model(len(tokenizer))
    train(model, batches(groups, tokenizer, rng), round(minutes * STEPS_PER_MINUTE))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    score(model, tokenizer)
    for path in out.iterdir():
        # The checkpoint is saved readable by its owner only, which would follow it into an image.
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a tiny model that onequeue embeds.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fill-mask", help="plain facts with one word hidden")
    demo = Path(__file__).resolve().parents[1] / "worker" / "demo"
    command.add_argument("--out", type=Path, default=demo / "fill-mask")
    command.add_argument("--minutes", type=float, default=6.0, help="about, on two cores")
    command.set_defaults(train=fill_mask)
    args = parser.parse_args()
    torch.set_num_threads(2)
    args.train(args.out, args.minutes)


if __name__ == "__main__":
    main()
