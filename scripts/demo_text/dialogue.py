"""Conversations: what the user says, what the model answers, and what both remember.

A conversation is a chain of skills. A skill gives a few turns that belong together and a key; keys that hash into the
held-out part (one in twenty) appear only in held-out conversations, so that no wording, story or sum of the held-out
text was trained on. Very short turns ("hello") have no key and appear in both.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import extras, knowledge, smalltalk, stories, sums, unknown
from .about_user import everything_told, recall, tell, tell_fact, tell_name
from .exchange import Exchange, Memory, Message, Skill, Turn, following, is_held_out, wording_key
from .facts import MORE, animals, calendar, capitals, colours, concept, echo, kinds, opposites, why
from .grammar import capital, chance, expand, pick, sample, say
from .manner import first_sentence, system, typed
from .product import PRODUCT, Entry
from .smalltalk import TALK
from .words import CITIES, COLOURS, FOODS, HOBBIES, THINGS, VERBS_ING, person_name


def _extra_slots(rng: Random) -> dict[str, str]:
    thing = pick(rng, (*FOODS, *HOBBIES))
    fav, favourite = pick(
        rng,
        (
            ("colour", pick(rng, COLOURS)),
            ("food", pick(rng, FOODS)),
            ("animal", pick(rng, ("the owl", "the fox", "the hedgehog", "the whale"))),
            ("number", "zero"),
            ("book", "a good dictionary"),
            ("word", "relu"),
            ("season", pick(rng, knowledge.SEASONS)),
            ("day", pick(rng, knowledge.DAYS)),
            ("sport", "chess"),
            ("film", "any film with a robot"),
            ("song", "the humming of a fan"),
            ("game", "riddles"),
        ),
    )
    _, _, lines = pick(rng, smalltalk.VERSES)
    fact = pick(rng, knowledge.CONCEPTS)
    return {
        "thing": thing,
        "place": pick(
            rng,
            (
                "zoo",
                "beach",
                "market",
                "museum",
                "park",
                "library",
                "cinema",
                "theatre",
                "lake",
                "forest",
                "school",
                "office",
                "dentist",
                "supermarket",
                "gym",
                "station",
                "garden",
                "city",
                "pool",
            ),
        ),
        "verb": pick(rng, (*VERBS_ING, *HOBBIES)),
        "fav": fav,
        "favourite": favourite,
        "city": pick(rng, CITIES),
        "food": pick(rng, FOODS),
        "idea": pick(rng, smalltalk.IDEAS[0]),
        "do": pick(rng, smalltalk.IDEAS[1]),
        "question": pick(rng, smalltalk.QUESTIONS),
        "advice": pick(rng, smalltalk.ADVICE),
        "rhyme_song": ", ".join(_lower_first(expand(rng, x)) for x in lines[:2]) + ", la la la.",
        "fact": capital(f"{fact[1]}.") if chance(rng, 0.4) else pick(rng, fact[2]),
    }


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


_SIMPLER = [
    "[can you say it simpler|in simple words please|i don't understand|i do not understand that|can you explain that again|say it again|what do you mean|explain it like i am five|what does that mean|huh][?|]"
]


def from_entry(rng: Random, entry: Entry, memory: Memory) -> Exchange:
    slots = _extra_slots(rng)
    template = pick(rng, entry.answers)
    ask, answer = say(rng, entry.ask, slots), expand(rng, template, slots)
    if entry.name == "who are you" and memory.own_name:
        answer = expand(
            rng,
            "[My name is|I am|You can call me] {me}. I am [a tiny demo model|the demo model of PowerInfer].",
            {"me": memory.own_name},
        )
    turns = [(ask, answer)]
    used = {template}
    while entry.more and chance(rng, 0.25) and len(turns) < 3:
        further = chance(rng, 0.7)
        order = (*entry.more, *entry.answers) if further else (*entry.answers, *entry.more)
        rest = [t for t in order if t not in used]
        template = pick(rng, rest[:2])
        used.add(template)
        turns.append((say(rng, MORE if further else _SIMPLER), expand(rng, template, slots)))
    return Exchange(turns, wording_key(turns[:1]))


def product(rng: Random, memory: Memory) -> Exchange:
    return from_entry(rng, pick(rng, PRODUCT[:7]) if chance(rng, 0.4) else pick(rng, PRODUCT), memory)


def talk(rng: Random, memory: Memory) -> Exchange:
    exchange = from_entry(rng, pick(rng, TALK), memory)
    name = memory.facts.get("name")
    if name and chance(rng, 0.12) and "! " in exchange.turns[0][1]:
        user, answer = exchange.turns[0]
        exchange.turns[0] = (user, answer.replace("! ", f", {name}! ", 1))
    return exchange


def hello(rng: Random, memory: Memory) -> Exchange:
    user = say(rng, smalltalk.HELLO_ASK)
    if "how" in user and chance(rng, 0.8):
        answer = say(
            rng,
            [
                "[Hello|Hi]! [I am fine, thank you.|I am well, thanks.] [And you?|How are you?|How can I help you?]"
            ],
        )
    elif memory.facts.get("name"):
        answer = say(rng, smalltalk.HELLO_NAMED, memory.facts)
    else:
        answer = say(rng, smalltalk.HELLO)
    turns = [(user, answer)]
    if "And you?" in answer or "How are you?" in answer or "How about you?" in answer:
        if chance(rng, 0.5):
            turns.append(from_entry(rng, TALK[1 if chance(rng, 0.7) else 2], memory).turns[0])
    elif "your name" in answer and chance(rng, 0.7):
        turns += tell_name(rng, memory)
    return Exchange(turns)


def a_story(rng: Random, memory: Memory) -> Exchange:
    ask, answer, told = stories.request(rng, memory.used)
    turns = [(ask, answer)]
    keys = [told.key]
    for user, reply, key in stories.follow_ups(
        rng, told, int(rng.random() * 4) if chance(rng, 0.5) else 0, memory.used
    ):
        turns.append((user, reply))
        if key:
            keys.append(key)
    held = {is_held_out(k) for k in keys}
    return Exchange(turns, keys[0] if len(held) == 1 else "mixed", (told.slots["kind"], told.slots["thing"]))


def sum_up(rng: Random, memory: Memory) -> Exchange:
    kind = rng.random()
    maker = (
        sums.arithmetic
        if kind < 0.6
        else sums.word_problem
        if kind < 0.75
        else sums.counting
        if kind < 0.95
        else sums.too_large
    )
    turns = maker(rng)
    return Exchange(turns, "|".join(turns[0]))


def out_of_scope(rng: Random, memory: Memory) -> Exchange:
    turns = [unknown.turn(rng)]
    return Exchange(turns, wording_key(turns))


def joke(rng: Random, memory: Memory) -> Exchange:
    turns: list[Turn] = []
    while not turns or (chance(rng, 0.45) and len(turns) < 5):
        told = following(rng, smalltalk.JOKES, memory)
        turns.append((say(rng, smalltalk.JOKE_AGAIN if turns else smalltalk.JOKE_ASK), told))
    if chance(rng, 0.2):
        turns.append(from_entry(rng, next(e for e in TALK if e.name == "laugh"), memory).turns[0])
    return Exchange(turns)


def riddle(rng: Random, memory: Memory) -> Exchange:
    question, answer = following(rng, smalltalk.RIDDLES, memory)
    turns = [
        (
            say(rng, smalltalk.RIDDLE_ASK),
            pick(rng, ("", "", "Gladly: ", "Here is one: ", "Listen: ", "All right: ")) + question,
        )
    ]
    kind = rng.random()
    plain = answer.partition(" ")[2]
    if kind < 0.35:
        turns.append((say(rng, smalltalk.GIVE_UP), expand(rng, "[It is|The answer is] {r}.", {"r": answer})))
    elif kind < 0.65:
        turns.append(
            (
                say(
                    rng,
                    ["[is it |i think it is |it is |maybe |]{r}[?|]", "{p}[?|]"],
                    {"r": answer, "p": plain},
                ),
                expand(rng, "[Yes, that is right|Correct|Very good|Exactly]! It is {r}.", {"r": answer}),
            )
        )
    elif kind < 0.9:
        wrong = pick(rng, THINGS)
        while wrong in answer:
            wrong = pick(rng, THINGS)
        turns.append(
            (
                say(rng, ["[is it |i think it is |it is |maybe |]{a w}[?|]", "{w}[?|]"], {"w": wrong}),
                say(
                    rng,
                    [
                        "[No, not {a w}|Not quite|No, sorry]. It is {r}.",
                        "[Nice idea|Good try], but the answer is {r}.",
                    ],
                    {"w": wrong, "r": answer},
                ),
            )
        )
    return Exchange(turns)


def verse(rng: Random, memory: Memory) -> Exchange:
    topic, _, lines = pick(rng, smalltalk.VERSES)
    if chance(rng, 0.25):
        ask = say(rng, smalltalk.VERSE_ANY)
    else:
        ask = say(rng, smalltalk.VERSE_ASK, {"topic": topic})
    chosen = sample(rng, lines, 4 if chance(rng, 0.8) else 2)
    first = (
        "" if chance(rng, 0.75) else pick(rng, ("A little poem:\n", "Here is my poem:\n", "I will try:\n"))
    )
    body = "\n".join(expand(rng, line) + ("." if i % 2 else ",") for i, line in enumerate(chosen))
    return Exchange([(ask, first + body)], f"verse|{topic}|{body}")


def _keyed(maker: Callable[[Random], list[Turn]]) -> Skill:
    """A skill from a function that needs no memory; its wording and answer are the key."""

    def skill(rng: Random, memory: Memory) -> Exchange:
        turns = maker(rng)
        words = "|".join(turns[0])
        return Exchange(
            turns, words if len(turns[0][0]) > 28 else "", tuple(turns[0][0].rstrip("?").split()[-2:])
        )

    skill.__name__ = maker.__name__
    return skill


def opening(rng: Random, memory: Memory) -> Exchange:
    """The user begins a story, the model goes on."""
    kind, name = pick(rng, stories.HEROES), person_name(rng)
    asked = extras.story_opening(rng, kind, name)
    told = stories.continued(rng, kind, name, asked, memory.used)
    return Exchange([(asked, told.text)], told.key, (kind, name))


def _reply(rng: Random, memory: Memory, said: str) -> Skill | None:
    """What the user may say when the last answer ended with a question or an offer."""
    question = said[max(said.rfind(". "), said.rfind("! "), said.rfind("? ")) + 1 :].strip()
    if not question.endswith("?"):
        return None
    asks = question.lower()

    def accepted(skill: Skill) -> Skill:
        def go(rng: Random, memory: Memory) -> Exchange:
            exchange = skill(rng, memory)
            if chance(rng, 0.25):
                return Exchange([extras.declined(rng)])
            turns = [(extras.yes(rng), exchange.turns[0][1]), *exchange.turns[1:]]
            return Exchange(turns, exchange.key, exchange.keep)

        go.__name__ = f"accepted_{skill.__name__}"
        return go

    def telling(fact: str) -> Skill:
        def go(rng: Random, memory: Memory) -> Exchange:
            turns = tell_fact(rng, memory, fact)
            value = memory.facts[fact]
            if chance(rng, 0.5):
                turns = [
                    (
                        expand(
                            rng,
                            "[{v}|it is {v}|in {v}|{v}]" if fact == "city" else "[{v}|it is {v}|{v}]",
                            {"v": value},
                        ),
                        turns[0][1],
                    )
                ]
            return Exchange(turns, "|".join(turns[0]), (value, *value.split()))

        go.__name__ = f"telling_{fact}"
        return go

    def mood(rng: Random, memory: Memory) -> Exchange:
        return Exchange(from_entry(rng, TALK[1 if chance(rng, 0.75) else 2], memory).turns[:1])

    def anything(rng: Random, memory: Memory) -> Exchange:
        return Exchange([extras.vague(rng)])

    if asks.startswith(("and you", "how are you", "how about you", "how is your day")):
        return mood
    if "story or a joke" in asks or "story or" in asks:
        return None
    for word, skill in (
        ("another one", None),
        ("another joke", joke),
        ("story", a_story),
        ("joke", joke),
        ("riddle", riddle),
        ("poem", verse),
    ):
        if word in asks and asks.startswith(
            ("shall", "would", "do you want", "another", "maybe ask", "just")
        ):
            if skill is None:
                skill = a_story if "tell you" in asks or "hear" in asks else joke
            return accepted(skill)
    for start, fact in (
        ("what is your name", "name"),
        ("who are you", "name"),
        ("where do you live", "city"),
        ("what is your favourite colour", "colour"),
        ("which colour do you like", "colour"),
        ("what is your favourite food", "food"),
        ("what do you like to eat", "food"),
        ("what do you like to do", "hobby"),
        ("how old are you", "age"),
        ("what is your job", "job"),
        ("do you have a pet", "pet"),
    ):
        if asks.startswith(start):
            return telling(fact)
    if asks.startswith(
        (
            "is it",
            "do you like",
            "how do you like",
            "what do you like about",
            "why do you like",
            "how is life",
            "do you do that",
            "how does it feel",
            "how is it",
            "is it nice",
            "how long",
            "is it hard",
            "what do you think",
            "do you go",
            "how was it",
            "what does",
            "what happened",
            "do you",
        )
    ):
        return anything
    return None


_SKILLS: list[tuple[Skill, float]] = [
    (product, 20),
    (talk, 19),
    (a_story, 14),
    (sum_up, 11),
    (out_of_scope, 11),
    (tell, 9),
    (recall, 4),
    (everything_told, 0.7),
    (concept, 6),
    (why, 3.5),
    (animals, 5),
    (colours, 3),
    (calendar, 3.5),
    (opposites, 3),
    (kinds, 4),
    (capitals, 3),
    (joke, 2.5),
    (riddle, 2),
    (verse, 3),
    (echo, 3),
    (hello, 2.5),
    (_keyed(extras.household), 5),
    (_keyed(extras.words), 3.5),
    (_keyed(extras.choice), 3),
    (_keyed(extras.naming), 1.5),
    (_keyed(extras.three_numbers), 1.2),
    (_keyed(extras.two_steps), 1.0),
    (_keyed(extras.hard_sum), 1.2),
    (_keyed(extras.occasion), 5),
    (opening, 1.2),
]
_TABLE = [
    (skill, sum(w for _, w in _SKILLS[: i + 1]) / sum(w for _, w in _SKILLS))
    for i, (skill, _) in enumerate(_SKILLS)
]


def _skill(rng: Random) -> Skill:
    x = rng.random()
    return next(skill for skill, upto in _TABLE if x < upto or upto > 0.999999)


def _exchange(rng: Random, memory: Memory, skill: Skill, held_out: bool) -> Exchange:
    """An exchange of the right part; the memory keeps only what was really said."""
    for _ in range(400):
        trial = memory.copy()
        exchange = skill(rng, trial)
        if not exchange.key or (exchange.key != "mixed" and is_held_out(exchange.key) == held_out):
            memory.facts, memory.used = trial.facts, trial.used
            return exchange
    raise RuntimeError(f"{skill.__name__} gave nothing for this part of the text")


def conversation(rng: Random, *, held_out: bool) -> list[Message]:
    """A whole conversation, from one exchange to many."""
    memory = Memory()
    messages: list[Message] = []
    style: Callable[[Random, str], str] | None = None
    if chance(rng, 0.28):
        text, style = system(rng, memory)
        messages.append(("system", text))
    length = rng.random()
    count = 1 if length < 0.25 else 2 + int(rng.random() * 4) if length < 0.8 else 5 + int(rng.random() * 12)
    for i in range(count):
        skill = hello if i == 0 and chance(rng, 0.3) else _skill(rng)
        if i and memory.facts and chance(rng, 0.2):
            skill = recall
        answer_to = _reply(rng, memory, messages[-1][1]) if i and chance(rng, 0.5) else None
        if answer_to is not None:
            skill = answer_to
        exchange = _exchange(rng, memory, skill, held_out)
        for user, answer in exchange.turns:
            messages.append(("user", typed(rng, user, exchange.keep)))
            if style is not None and (style is not first_sentence or skill is not a_story):
                answer = style(rng, answer)
            messages.append(("assistant", answer))
    return messages


def plain_text(rng: Random, *, held_out: bool) -> list[Message]:
    """Text without a conversation around it: a story, or some facts."""
    if chance(rng, 0.8):
        while True:
            told = stories.story(rng, length=pick(rng, ("short", "normal", "long")))
            if is_held_out(told.key) == held_out:
                return [("plain", told.text)]
    memory = Memory()
    texts = [from_entry(rng, entry, memory).turns[0][1] for entry in sample(rng, PRODUCT, 3)]
    texts += [f"{what}. {' '.join(facts)}" for _, what, facts in sample(rng, knowledge.CONCEPTS, 2)]
    rng.shuffle(texts)
    return [("plain", " ".join(texts[: 1 + int(rng.random() * 4)]))]


def document(rng: Random, *, held_out: bool) -> list[Message]:
    """One training document."""
    return plain_text(rng, held_out=held_out) if chance(rng, 0.06) else conversation(rng, held_out=held_out)
