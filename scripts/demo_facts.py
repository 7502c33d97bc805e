"""The plain facts that both demo models learn: pairs and short lists, in lower case.

A pair is "x y", separated from the next by a semicolon or a line; its last word is y, and an
underscore stands for a space within x. The phrasings are in demo_sentences.py and
demo_questions.py.
"""

import re

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

STUFF = """grass green;snow white;milk white;blood red;the_sky blue;the_sun yellow;coal black
chocolate brown;salt white;sugar white;butter yellow;the_sea blue;cotton white;mud brown;gold yellow
silver grey;coffee brown;rice white;honey yellow;ketchup red;mustard yellow;fire red;smoke grey
soil brown;ice white;the_ocean blue;the_night black"""

FRUIT = """banana yellow;lemon yellow;carrot orange;tomato red;cherry red;strawberry red
plum purple;cucumber green;pumpkin orange;pea green;aubergine purple"""

THINGS = """frog green;crow black;flamingo pink;pig pink;elephant grey;mouse grey;swan white
rose red;leaf green;bear brown;crocodile green;cloud white;fox red;polar_bear white;fire_engine red
sunflower yellow;tree green;violet purple"""

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

CYCLES = {
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "month": """january february march april may june july august september october november
        december""",
    "season": "spring summer autumn winter",
}

ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"

NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty"""

SOUNDS = """dog woof;cat meow;cow moo;sheep baa;duck quack;horse neigh;pig oink;lion roar;frog croak
goose honk;owl hoot;bee buzz;snake hiss;mouse squeak;wolf howl;crow caw;bear growl;bird tweet"""

YOUNG = """dog puppy;cat kitten;cow calf;sheep lamb;duck duckling;horse foal;pig piglet;lion cub
frog tadpole;hen chick;goat kid;bear cub;kangaroo joey;deer fawn;wolf cub;goose gosling
elephant calf;tiger cub;human baby"""

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

PARTS = """a_week/seven days;a_year/twelve months;a_year/four seasons;an_hour/sixty minutes
a_minute/sixty seconds;a_day/twenty-four hours;a_dog/four legs;a_cat/four legs;a_horse/four legs
a_cow/four legs;a_bird/two legs;a_bird/two wings;a_spider/eight legs;an_insect/six legs
a_hand/five fingers;a_car/four wheels;a_bike/two wheels;a_triangle/three sides
a_square/four sides;a_person/two eyes;a_person/two ears;a_person/two hands;a_month/four weeks"""
FAMILY = """mother's_mother grandmother;mother's_father grandfather;father's_mother grandmother
father's_father grandfather;father's_brother uncle;mother's_brother uncle;mother's_sister aunt
father's_sister aunt;uncle's_son cousin;aunt's_daughter cousin;brother's_son nephew
sister's_son nephew;brother's_daughter niece;sister's_daughter niece;son's_son grandson
daughter's_daughter granddaughter"""


def phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in re.split(r"[|\n]", text)]


def pairs(facts: str) -> list[tuple[str, str]]:
    rows = (row.replace("_", " ").rsplit(" ", 1) for row in re.split(r"[;\n]", facts))
    return [(x, y) for x, y in rows]


def swapped(facts: str) -> str:
    return re.sub(r"(\w+) (\w+)", r"\2 \1", facts)


def plural(noun: str) -> str:
    return PLURALS.get(noun, re.sub("y$", "ie", noun) + ("es" if noun[-1] in "ox" else "s"))


def with_article(text: str) -> str:
    """Replace a by an before a vowel; a tilde may mark the word."""
    return re.sub(r"\b([Aa]) (~?[aeioAEIO])", r"\1n \2", text)
