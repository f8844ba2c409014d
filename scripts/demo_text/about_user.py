"""What users tell about themselves, and what they ask about it later."""

from __future__ import annotations

from random import Random

from .exchange import Exchange, Memory, Turn
from .grammar import capital, chance, expand, listing, pick, sample, say
from .words import CITIES, COLOURS, FOODS, HOBBIES, JOBS, PET_NAMES, PETS, THINGS, made_up, person_name

_ABOUT_USER: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "name": (
        [
            "my name is {v}",
            "i am {v}",
            "i'm {v}",
            "call me {v}",
            "you can call me {v}",
            "[hi|hello|hey], [i am|i'm|my name is] {v}",
            "my name is {v}. what is yours?",
            "this is {v}",
            "people call me {v}",
            "the name is {v}",
        ],
        [
            "[Nice to meet you|Hello|Hi|Pleased to meet you], {v}! [How can I help you?|What can I do for you?|What shall we talk about?|How are you?|]",
            "[That is a nice name|What a nice name], {v}! [Nice to meet you.|What can I do for you?]",
            "Hello, {v}! I am [a tiny demo model|the demo model of PowerInfer]. [What would you like to do?|]",
        ],
        [
            "what is my name?",
            "what's my name?",
            "do you [know|remember] my name?",
            "who am i?",
            "[can you tell|tell] me my name",
            "what am i called?",
            "say my name",
            "did i tell you my name?",
            "do you [remember|know] who i am?",
        ],
        [
            "Your name is {v}.",
            "You are {v}.",
            "You told me that your name is {v}.",
            "[Of course|Yes]: your name is {v}.",
        ],
    ),
    "colour": (
        [
            "my favo[u|]rite colo[u|]r is {v}",
            "i like [the colo[u|]r |]{v} best",
            "{v} is my favo[u|]rite colo[u|]r",
            "mine is {v}",
        ],
        ["{V} is a [nice|beautiful|good] colour.", "[Nice|Good choice]! {V} is a [beautiful|lovely] colour."],
        [
            "what is my favo[u|]rite colo[u|]r?",
            "which colo[u|]r do i like[ best|]?",
            "do you remember my favo[u|]rite colo[u|]r?",
        ],
        ["Your favourite colour is {v}.", "You like {v} best."],
    ),
    "food": (
        [
            "my favo[u|]rite food is {v}",
            "i like to eat {v} most of all",
            "{v} is my favo[u|]rite [food|meal]",
        ],
        [
            "[Mmm|Nice|Good choice], {v}! [I cannot eat, but it sounds good.|Many people like that.|]",
            "{V}? [That sounds tasty.|Enjoy your meal!]",
        ],
        ["what is my favo[u|]rite food?", "what do i like to eat?", "do you remember my favo[u|]rite food?"],
        ["Your favourite food is {v}.", "You like {v} best."],
    ),
    "city": (
        ["i live in {v}", "i am from {v}", "i come from {v}", "my home is {v}", "my city is {v}"],
        [
            "{v}! [Is it nice there?|I have heard of it, but I have never been anywhere.|How do you like it there?]",
            "[How nice|Interesting]. [What do you like about {v}?|How is life in {v}?]",
        ],
        [
            "where do i live?",
            "where am i from?",
            "do you [know|remember] where i live?",
            "which city [do i live in|am i from]?",
        ],
        ["You live in {v}.", "You told me that you live in {v}."],
    ),
    "hobby": (
        ["my hobby is {v}", "i like {v} in my free time", "my favo[u|]rite hobby is {v}"],
        ["{V} [is a nice hobby|sounds like fun]! [Do you do it often?|How long have you been doing it?|]"],
        ["what is my hobby?", "what do i like to do?", "do you remember my hobby?"],
        ["Your hobby is {v}.", "You like {v}."],
    ),
    "job": (
        ["i am {a v}", "i work as {a v}", "my job is {v}", "i'm {a v}"],
        [
            "{A v}! [Do you like your job?|That is a useful job.|How is your work?]",
            "[Interesting|Nice]. [Is it hard to be {a v}?|Do you like being {a v}?]",
        ],
        ["what is my job?", "what do i do for a living?", "do you remember my job?", "what do i work as?"],
        ["You are {a v}.", "You told me that you are {a v}."],
    ),
    "age": (
        ["i am {v} years old", "i'm {v}", "my age is {v}", "i am {v}"],
        [
            "{v}? [That is a good age.|Then you are much older than I am.|I am only a few minutes of training old.]"
        ],
        ["how old am i?", "what is my age?", "do you remember my age?"],
        ["You are {v} years old.", "You told me that you are {v}."],
    ),
    "pet": (
        [
            "i have {a p} called {v}",
            "i have {a p}. [its|her|his] name is {v}",
            "my {p} is called {v}",
            "my {p}'s name is {v}",
            "the name of my {p} is {v}",
        ],
        [
            "{V} is a [nice|good|lovely] name for {a p}. [What does {v} like to do?|How old is {v}?|]",
            "[How nice|Sweet]! {V} is a good name for {a p}.",
        ],
        [
            "what is [the name of my {p}|my {p} called|my {p}'s name]?",
            "what is my pet called?",
            "do you remember my {p}'s name?",
        ],
        ["Your {p} is called {v}.", "[The name of your {p} is|Its name is] {v}."],
    ),
    "number": (
        ["[please |]remember the number {v}", "my [lucky |favo[u|]rite |secret |]number is {v}"],
        [
            "[All right|Okay|Good], I will remember {v}.",
            "{v}. I will [keep it in mind|remember it], as long as we chat.",
        ],
        [
            "what was [the|my] number?",
            "what is my number?",
            "which number did i tell you?",
            "do you remember the number?",
        ],
        ["[The number was|It was] {v}.", "You told me {v}."],
    ),
    "word": (
        [
            "[please |]remember the word {v}",
            "the [secret word|password] is {v}",
            "[please |]remember this word: {v}",
        ],
        ['[All right|Okay|Good], I will remember "{v}".'],
        [
            "what was the [secret |]word?",
            "which word did i tell you?",
            "do you remember the word?",
            "what is the [secret word|password]?",
        ],
        ['The word was "{v}".', 'You told me the word "{v}".'],
    ),
}
_NOT_TOLD = {
    "name": "[You have not told me your name yet.|I don't know your name.] [What is it?|What is your name?|Who are you?]",
    "colour": "[You have not told me yet.|I don't know that yet.] [What is it?|Which colour do you like?]",
    "food": "[You have not told me yet.|I don't know.] [What do you like to eat?|What is it?]",
    "city": "[You have not told me yet.|I don't know where you live.] [Where do you live?|]",
    "hobby": "[You have not told me yet.|I don't know.] [What do you like to do?|]",
    "job": "[You have not told me yet.|I don't know.] [What is your job?|]",
    "age": "[You have not told me.|I don't know that.] [How old are you?|]",
    "pet": "You have not told me [about a pet|that] yet. [What is its name?|]",
    "number": "You have not told me [a|any] number yet.",
    "word": "You have not told me [a|any] word yet.",
}


def _fact_value(rng: Random, fact: str) -> str:
    if fact == "name":
        return person_name(rng)
    if fact == "age":
        return str(6 + int(rng.random() * 80))
    if fact == "number":
        return str(int(rng.random() * pick(rng, (10, 100, 1000, 10000))))
    if fact == "word":
        return pick(rng, THINGS) if chance(rng, 0.6) else made_up(rng)
    if fact == "pet":
        return pick(rng, PET_NAMES) if chance(rng, 0.8) else made_up(rng).capitalize()
    if fact == "city":
        return pick(rng, CITIES) if chance(rng, 0.85) else made_up(rng).capitalize()
    return pick(rng, {"colour": COLOURS, "food": FOODS, "hobby": HOBBIES, "job": JOBS}[fact])


def tell_fact(rng: Random, memory: Memory, fact: str) -> list[Turn]:
    told, answers, _, _ = _ABOUT_USER[fact]
    value = _fact_value(rng, fact)
    pet = pick(rng, PETS)
    memory.facts[fact] = value
    if fact == "pet":
        memory.facts["pet kind"] = pet
    slots = {"v": value, "p": pet}
    return [(say(rng, told, slots), say(rng, answers, slots))]


def tell_name(rng: Random, memory: Memory) -> list[Turn]:
    turns = tell_fact(rng, memory, "name")
    if chance(rng, 0.15):
        value = memory.facts["name"]
        turns = [(value, say(rng, _ABOUT_USER["name"][1], {"v": value}))]
    return turns


_BRIEFLY = {
    "name": "[my name is {v}|i am {v}|i'm {v}]",
    "city": "[i live in {v}|i am from {v}|i come from {v}]",
    "age": "i am {v} years old",
    "hobby": "[i like {v}|my hobby is {v}]",
    "job": "[i am {a v}|i work as {a v}]",
    "food": "i like {v}",
    "colour": "my favourite colour is {v}",
    "pet": "i have {a p} called {v}",
}


def introduction(rng: Random, memory: Memory) -> Exchange:
    """Two or three facts in one message."""
    facts = sample(rng, list(_BRIEFLY), 2 if chance(rng, 0.75) else 3)
    if "name" not in facts and chance(rng, 0.6):
        facts = ["name", *facts[1:]]
    parts = []
    for fact in facts:
        memory.facts[fact] = _fact_value(rng, fact)
        if fact == "pet":
            memory.facts["pet kind"] = pick(rng, PETS)
        parts.append(
            expand(rng, _BRIEFLY[fact], {"v": memory.facts[fact], "p": memory.facts.get("pet kind", "dog")})
        )
    user = listing(parts) if chance(rng, 0.7) else ". ".join(parts)
    if "name" in facts:
        answer = say(rng, _ABOUT_USER["name"][1], {"v": memory.facts["name"]})
    else:
        answer = say(
            rng, ["[Nice|Good to know|Interesting|Thank you for telling me]! [What else should I know?|]"]
        )
    values = " ".join(memory.facts[fact] for fact in facts)
    return Exchange([(user, answer)], user, tuple(values.split()))


def tell(rng: Random, memory: Memory) -> Exchange:
    if chance(rng, 0.25):
        return introduction(rng, memory)
    fact = "name" if chance(rng, 0.4) else pick(rng, list(_ABOUT_USER))
    turns = tell_fact(rng, memory, fact)
    return Exchange(turns, "|".join(turns[0]), (memory.facts[fact], *memory.facts[fact].split()))


def recall(rng: Random, memory: Memory) -> Exchange:
    told = [f for f in memory.facts if f in _ABOUT_USER]
    if told and chance(rng, 0.8):
        fact = pick(rng, told)
    else:
        fact = "name" if chance(rng, 0.5) else pick(rng, list(_ABOUT_USER))
    _, _, ask, answers = _ABOUT_USER[fact]
    slots = {"p": memory.facts.get("pet kind", pick(rng, PETS)), "v": memory.facts.get(fact, "")}
    question = say(rng, ask, slots)
    answer = say(rng, answers, slots) if fact in memory.facts else expand(rng, _NOT_TOLD[fact])
    return Exchange([(question, capital(answer))])


def everything_told(rng: Random, memory: Memory) -> Exchange:
    told = {k: v for k, v in memory.facts.items() if k in ("name", "colour", "food", "city", "hobby", "age")}
    words = {
        "name": "your name is {}",
        "colour": "your favourite colour is {}",
        "food": "your favourite food is {}",
        "city": "you live in {}",
        "hobby": "your hobby is {}",
        "age": "you are {} years old",
    }
    ask = say(
        rng,
        [
            "what do you know about me?",
            "what have i told you[ about me|]?",
            "tell me what you know about me",
            "what do you remember about me?",
        ],
    )
    answer = (
        "You have not told me anything about yourself yet."
        if not told
        else capital(listing([words[k].format(v) for k, v in told.items()]) + ".")
    )
    return Exchange([(ask, answer)])
