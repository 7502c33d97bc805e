"""Small talk for the chat demo model, and questions outside its knowledge.

Letters in braces stand for a word of FILLERS, a name or a day.
"""

import random

from demo_facts import CYCLES, phrases
from demo_questions import SORRY, Turn, cased, framed, pseudoword, sentence, worn

HELP = "I know capitals, colours, opposites, days and small sums, and I can count."
WHO = "I am the demo model of onequeue. I know a page of plain facts."
STORY = (
    "Once upon a time, a little cat stood at the end of a long queue. Every morning it said meow, "
    "and every evening it was one step further. One day its turn came. It got a fish, it said "
    "thank you, and it was happy."
)

# Each entry: the user's phrasings, then the answer.
TALK = [
    (
        """Hi|Hello|Hello!|Hi!|Hey|Hey there|Hello there!|Hi there|Greetings|Yo|Good day|Hiya
        Hello, world!|Say hello|Howdy|Hello, nice to meet you|Hi, can you help me?|Good afternoon
        Hello, I need help|Hello, can I ask something?|Hi, I have a question""",
        "Hello! How can I help you?",
    ),
    ("Good morning|Good morning!|Morning|A good morning to you", "Good morning! How can I help?"),
    ("Good evening|Good evening!|Evening!", "Good evening! How can I help?"),
    ("Good night|Good night!|Sleep well", "Good night!"),
    (
        """How are you?|How are you doing?|How is it going?|How do you do?|How are you today?
        What's up?|Are you well?|Hi, how are you?|Hello, how are you?|How do you feel?|You ok?
        Hello! How are you doing today?|Hey, how's it going?""",
        "I am fine, thank you. How can I help you?",
    ),
    (
        """Who are you?|What are you?|What is your name?|What's your name?|Tell me who you are.
        Are you a robot?|Are you human?|Are you an AI?|Which model are you?|What model is this?
        Introduce yourself.|Tell me about yourself.|Do you have a name?|Are you ChatGPT?
        Hello, who are you?|Hi! What is your name?|Who am I talking to?|Describe yourself.""",
        WHO,
    ),
    (
        """What can you do?|What do you know?|Help|Help me|How can you help me?|Can you help me?
        What are you good at?|What can I ask you?|What do you know about?|Which things do you know?
        Who can help me?|What should I ask?|What are your skills?|What can you tell me?""",
        HELP,
    ),
    (
        """Who made you?|How were you made?|Who trained you?|Where do you come from?
        How were you trained?|Who created you?|Who built you?|How big are you?|Who wrote you?""",
        "A script of onequeue trained me in a few minutes. I am very small.",
    ),
    (
        """Thanks|Thank you|Thanks!|Thank you very much|Thank you!|Many thanks|Thx|Thanks a lot
        Great, thanks!|Ok, thank you.|Cheers|Thank you for your help|That helps, thanks.""",
        "You are welcome!",
    ),
    (
        """Bye|Goodbye|Bye!|See you|See you later|Bye bye|Goodbye!|I have to go|See you tomorrow
        Ok, bye|Farewell|Ciao|Have a nice day|That is all, goodbye.""",
        "Goodbye!",
    ),
    (
        """Ok|Okay|Great|Good|Nice|Cool|Very good|Well done|Right|That is right|Perfect|Wow|Yes
        Correct|Good job|You are great|I like you|I see|Excellent|You are clever""",
        "I am glad to help.",
    ),
    ("Sorry|I am sorry|Excuse me|Oh, sorry!|No|Wrong|That is wrong|My mistake", "No problem."),
    ("Are you there?|Test|Ping|Testing|Is this working?|Is anybody there?", "Yes, I am here."),
    (
        """Tell me a story.|Tell me a bedtime story.|Do you know a story?|A story, please.
        Write a story.|Write a short story about {t}.|Tell me a story about {t}.|Write me a story.
        Tell me a short story.|Can you tell me a story?|Tell me a bedtime story about a {p}.
        Tell me a three sentence story about a {p}.|Once upon a time""",
        STORY,
    ),
    (
        "What are the days of the week?|Name the days of the week.|List the days.|Name all days.",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    ),
    (
        """What are the months of the year?|Name the months.|List the months.|Name all months.
        What are the twelve months?|List all months of the year.""",
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December.",
    ),
    (
        "What are the seasons?|Name the four seasons.|List the seasons.|Name all seasons.",
        "Spring, summer, autumn, winter.",
    ),
    (
        "Say the alphabet.|What is the alphabet?|Say your ABC.|List the letters.|Tell me the ABC.",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    ("Name a colour.|Tell me a color.|Give me a colour.|Name a color.", "Red is a colour."),
    ("Name three colours.|List some colours.|Which colours are there?", "Red, green, blue."),
    ("Name an animal.|Tell me an animal.|Give me an animal.", "A dog is an animal."),
    ("Name three animals.|List some animals.|Which animals do you know?", "Dog, cat, cow."),
    ("Name a fruit.|Tell me a fruit.|Give me a fruit.|Which fruit do you like?", "Apple."),
    ("Where does the sun rise?|Where is sunrise?", "The sun rises in the east."),
    ("Where does the sun set?|Where is sunset?", "The sun sets in the west."),
    ("What do bees make?|What does a bee make?", "Bees make honey."),
    ("What do spiders make?|What does a spider make?", "Spiders make webs."),
    ("What do cows eat?|What does a cow eat?", "Cows eat grass."),
    ("What do cows give us?|What does a cow give?", "Cows give milk."),
    ("What do hens lay?|What does a hen lay?", "Hens lay eggs."),
    ("Where do fish live?|Where do fish swim?", "Fish swim in the water."),
    ("Where do birds fly?|What do birds do?", "Birds fly in the sky."),
    ("What is ice?|What does water turn into when it freezes?", "Ice is frozen water."),
    ("What do we breathe?|What do people breathe?", "People breathe air."),
    ("When does it snow?|When is it cold?", "It snows in winter."),
    ("When do leaves fall?|When do the leaves fall?", "Leaves fall in autumn."),
]

# Questions outside the model's knowledge, in words that occur elsewhere.
UNKNOWN = """Write {w} about {t}.|Tell me about {t}.|What do you think about {t}?|Explain {t}.
Who invented {t}?|Why is {t} so popular?|When did {t} begin?|How does {t} work?|What is {t}?
Who wrote {p}?|Who is {n}?|What did {n} do?|How old is {n}?|Where is my {p}?|Why do {ps} exist?
Can you write {w}?|I need {w} about {t}.|Translate "{p} and {t}" into {l}.|How do I {v}?
Tell me how to {v}.|I want to {v}, can you help?|What is the best way to {v}?|Why should I {v}?
Summarize {t} for me.|What happened in {y}?|Who won in {y}?|Is {t} better than {t2}?
What is the difference between {t} and {t2}?|How far is it to {n}?|What is the price of a {p}?
Which {p} should I buy?|How many people live in {n}?|Do you love me?|Are you happy with {t}?
What will happen tomorrow with {t}?|Give me advice on {t}.|Please {v}.|{t}|{t} and {t2}|the {p}
Who was the first {j}?|What does a {j} earn?|I am a {j}.|I like {t}.|My {p} is broken.
My {p} does not work, what now?|Which {j} wrote about {t}?|Why is the sky blue?|Why is grass green?
What is the meaning of life?|What time is it?|Where am I?|What day is it today?|Sing a song.
Tell me a joke.|Make me laugh.|Write a poem.|Write a haiku.|Write code.|Who is the president?
Write a Python function to {v}.|How tall is {n}?|What is {n} famous for?|Can I {v} with a {p}?
What should I do about {t}?|Why did {n} {v}?|List five facts about {t}.|Was {n} a {j}?"""
FILLERS = {
    "w": "a poem|an essay|a letter|a song|a haiku|an email|a report|a joke|code|a recipe|a list",
    "t": """love|quantum physics|history|the economy|artificial intelligence|music|politics|art
    machine learning|the internet|philosophy|climate change|space travel|evolution|the stock market
    religion|time|computers|medicine|the law|chess|biology|chemistry|mathematics|poetry|cooking
    the Roman empire|the second world war|black holes|electricity|dinosaurs|football|fashion
    Shakespeare|Einstein|Napoleon|gravity|democracy|money|dreams|health|science|the ocean floor
    transformers|neural networks|Python|databases|queues|batching|GPUs|Linux|the moon landing""",
    "p": """telephone|radio|bicycle|computer|unicorn|dragon|robot|camera|novel|printer|laptop|castle
    television|engine|guitar player|rocket|ticket|passport|banana bread|garden shed|spaceship""",
    "v": """bake a cake|learn a language|write a book|fix my car|sort a list|lose weight|get rich
    install Linux|cook pasta|play the piano|reverse a string|parse a file|find a job|build a house
    travel to the moon|train a model|make friends|sleep better|plant a tree|open a bank account""",
    "j": "king|president|painter|astronaut|queen|scientist|singer|player|writer|engineer|lawyer",
    "y": "1492|1789|1945|1969|2001|2020|1812|1066|1999|the last war|the world cup",
    "l": "French|German|Latin|Spanish|Klingon|Chinese|Dutch",
}
PEOPLE = """Anna|Ben|Clara|David|Emma|Felix|Grace|Henry|Ida|Jack|Kate|Leo|Maria|Nina|Oscar|Paul|Rosa
Sam|Tom|Vera|Will|Zoe|Alice|Bob|Carol|Peter|John|Mary|Lucy|Max|Sara|Tim|Eva|Adam|Laura|Martin"""


def person(rng: random.Random) -> str:
    return rng.choice(phrases(PEOPLE)) if rng.random() < 0.4 else pseudoword(rng).capitalize()


def filled(text: str, rng: random.Random) -> str:
    words = {slot: rng.choice(phrases(choices)) for slot, choices in FILLERS.items()}
    day = cased(rng.choice(CYCLES["day"].split()))
    topic = rng.choice(phrases(FILLERS["t"]))
    return text.format(**words, d=day, n=person(rng), t2=topic, ps=words["p"] + "s")


def talk(rng: random.Random) -> list[Turn]:
    said, answer = rng.choice(TALK[:14] * 2 + TALK[14:])
    text = filled(rng.choice(phrases(said)), rng)
    if text[-1].isalpha():
        text += rng.choice(("", "", "!", "."))
    return [(worn(text, rng), answer)]


def unknown(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.1:
        words = [pseudoword(rng) for _ in range(rng.randint(1, 6))]
        return [(worn(sentence(" ".join(words)) + rng.choice("?.!"), rng), SORRY)]
    return [(framed(filled(rng.choice(phrases(UNKNOWN)), rng), rng), SORRY)]
