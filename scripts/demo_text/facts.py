"""Skills that answer questions about things: animals, colours, days, opposites, kinds, capitals, explanations."""

from __future__ import annotations

from random import Random

from . import knowledge
from .exchange import Exchange, Memory, wording_key
from .grammar import article, capital, chance, expand, listing, pick, sample, say
from .words import COLOURS, FOODS, THINGS, made_up, person_name

MORE = [
    "[tell me more|more|more please|go on|can you tell me more|can you say more|anything else|what else|please explain more|more details please|continue|and what else][?|]"
]


def concept(rng: Random, memory: Memory) -> Exchange:
    name, what, facts = pick(rng, knowledge.CONCEPTS)
    plain = name.partition(" ")[2] if name.startswith(("a ", "an ", "the ")) else name
    slots = {"x": name, "p": plain}
    ask = say(
        rng,
        [
            "what is {x}?",
            "what is {x}?",
            "[what's|whats|what exactly is] {x}?",
            "[can you |could you |please |]explain {x}[ to me|]",
            "[can you |could you |please |]tell me [something |more |]about {x}",
            "do you know what {x} is?",
            "what do you know about {x}?",
            "{p}",
            "what does {p} mean?",
            "describe {x}",
            "tell me a fact about {x}",
            "i want to know what {x} is",
            "define {p}",
        ],
        slots,
    )
    order = sample(rng, facts, len(facts))
    turns = [(ask, " ".join([f"{what}.", *order[: 1 + int(rng.random() * 2)]]))]
    if chance(rng, 0.2):
        rest = order[2:] if turns[0][1].count(".") > 2 else order[1:]
        turns.append(
            (
                say(rng, MORE),
                rest[0]
                if rest
                else expand(
                    rng,
                    "[That is all I know about {x}.|I don't know more about {x}.] [I am a tiny model.|A bigger model knows more.|]",
                    slots,
                ),
            )
        )
    return Exchange(turns, wording_key(turns[:1]))


def why(rng: Random, memory: Memory) -> Exchange:
    ask, answers = pick(rng, knowledge.WHY)
    question = say(rng, ask)
    lead = pick(rng, ("", "", "", "do you know ", "can you tell me ", "tell me, ", "please tell me "))
    return Exchange([(lead + question, say(rng, answers))], wording_key([(lead + question, "")]))


def animals(rng: Random, memory: Memory) -> Exchange:
    row = pick(rng, knowledge.ANIMALS)
    name, sound, young, home, food, legs, flies, kind, _ = row
    other = pick(rng, knowledge.ANIMALS)
    s = {
        "n": name,
        "sound": sound,
        "young": young,
        "home": home,
        "food": food,
        "legs": legs,
        "kind": kind,
        "o": other[0],
        "okind": other[7],
    }
    form = int(rng.random() * 9)
    if form == 0:
        if sound == "nothing at all":
            answer = "{A n} makes no sound that we can hear."
        elif sound == "talk":
            answer = "A parrot squawks, and some parrots can talk."
        else:
            answer = '{A n} says "{sound}".'
        ask = [
            "what sound does {a n} make?",
            "what does {a n} say?",
            "which sound does {a n} make?",
            "how does {a n} sound?",
            "what noise does {a n} make?",
            "what sound do {n}s make?",
        ]
        if name in ("whale", "dolphin"):
            answer = {"whale": "A whale sings long songs.", "dolphin": "A dolphin clicks and whistles."}[name]
    elif form == 1:
        ask, answer = (
            [
                "what is a baby {n} called?",
                "what is the young of {a n} called?",
                "how do you call a young {n}?",
                "what do you call a baby {n}?",
                "name of a baby {n}?",
            ],
            "[A young {n}|A baby {n}|The young of {a n}] is called {a young}.",
        )
    elif form == 2:
        ask, answer = (
            [
                "where does {a n} live?",
                "where do {n}s live?",
                "what is the home of {a n}?",
                "where can i find {a n}?",
            ],
            "{A n} lives in {a home}.",
        )
        plural = home.split()[0] in ("warm", "water", "grassland", "cold") or home == "water"
        answer = {
            "warm stones": "A snake lives under warm stones.",
            "water": "A fish lives in water.",
            "cold south": "A penguin lives in the cold south.",
        }.get(
            home,
            "{A n} lives in the {home}."
            if home
            in ("savanna", "jungle", "ocean", "sea", "desert", "forest", "cold south", "bamboo forest")
            or plural
            else answer,
        )
        if name in ("goat", "turtle", "hedgehog", "giraffe"):
            answer = {
                "goat": "A goat lives on farms and in the mountains.",
                "turtle": "A turtle lives near the water and carries its house with it.",
                "hedgehog": "A hedgehog lives under a pile of leaves.",
                "giraffe": "A giraffe lives in the savanna.",
            }[name]
    elif form == 3:
        ask, answer = (
            [
                "what does {a n} eat?",
                "what do {n}s eat?",
                "what is the food of {a n}?",
                "what can i feed {a n}?",
                "what do {n}s like to eat?",
            ],
            "{A n} eats {food}.",
        )
    elif form == 4:
        ask, answer = (
            [
                "how many legs does {a n} have?",
                "how many legs has {a n}?",
                "does {a n} have legs?",
                "how many legs do {n}s have?",
            ],
            "{A n} has {legs} legs.",
        )
    elif form == 5:
        ask = ["can {a n} fly?", "can {n}s fly?", "does {a n} fly?"]
        answer = {
            "yes": "Yes, {a n} can fly.",
            "no": "No, {a n} cannot fly.",
            "hardly": "{A n} can hardly fly, only a few metres.",
        }[flies]
    elif form == 6:
        ask, answer = (
            [
                "what kind of animal is {a n}?",
                "is {a n} a [mammal|bird|fish|insect|reptile]?",
                "is {a n} a mammal or a bird?",
            ],
            "{A n} is {a kind}.",
        )
    elif form == 7:
        while abs(int(other[8]) - int(row[8])) < 2:
            other = pick(rng, knowledge.ANIMALS)
        s["o"] = other[0]
        large, small = (s["n"], s["o"]) if int(row[8]) > int(other[8]) else (s["o"], s["n"])
        s.update(large=large, small=small)
        if chance(rng, 0.6):
            ask, answer = (
                [
                    "[which|what|who] is [bigger|larger], {a n} or {a o}?",
                    "is {a n} [bigger|larger] than {a o}?",
                ],
                "{A large} is [bigger|larger] than {a small}.",
            )
        else:
            ask, answer = (
                ["[which|what] is smaller, {a n} or {a o}?", "is {a n} smaller than {a o}?"],
                "{A small} is smaller than {a large}.",
            )
    else:
        ask = [
            "tell me [something |]about {n}s",
            "tell me [something |]about [the|a] {n}",
            "what do you know about {n}s?",
            "what is {a n}?",
            "describe {a n}",
        ]
        parts = [
            "{A n} is {a kind}.",
            "It eats {food}.",
            "It has {legs} legs.",
            "A young {n} is called {a young}.",
        ]
        answer = parts[0] + " " + " ".join(sample(rng, parts[1:], 1 + int(rng.random() * 3)))
    question, reply = say(rng, ask, s), expand(rng, answer, s)
    question = (
        question.replace("mouses", "mice")
        .replace("wolfs", "wolves")
        .replace("sheeps", "sheep")
        .replace("gooses", "geese")
        .replace("butterflys", "butterflies")
        .replace("fishs", "fish")
        .replace("foxs", "foxes")
        .replace("donkeys", "donkeys")
        .replace("octopuss", "octopuses")
        .replace("deers", "deer")
        .replace("monkeys", "monkeys")
    )
    turns = [(question, reply)]
    if chance(rng, 0.15) and form in (0, 3, 4, 5):
        nxt = pick(rng, knowledge.ANIMALS)
        s2 = {"n": nxt[0]}
        again = {
            3: f"{capital(article(nxt[0]))} eats {nxt[4]}.",
            4: f"{capital(article(nxt[0]))} has {nxt[5]} legs.",
            5: {
                "yes": "Yes, {a n} can fly.",
                "no": "No, {a n} cannot fly.",
                "hardly": "{A n} can hardly fly.",
            }[nxt[6]],
            0: '{A n} says "' + nxt[1] + '".',
        }[form]
        if not (form == 0 and nxt[1] in ("nothing at all", "talk", "song", "click")):
            turns.append(
                (say(rng, ["and {a n}?", "what about {a n}?", "and the {n}?"], s2), expand(rng, again, s2))
            )
    return Exchange(turns, wording_key(turns[:1]), (name, other[0]))


def colours(rng: Random, memory: Memory) -> Exchange:
    colour = pick(rng, list(knowledge.COLOURED))
    thing = pick(rng, knowledge.COLOURED[colour].split(";"))
    slots = {"c": colour, "t": thing}
    kind = rng.random()
    if kind < 0.6:
        ask = [
            "[what|which] colo[u|]r is {t}?",
            "what is the colo[u|]r of {t}?",
            "what colo[u|]r does {t} have?",
            "tell me the colo[u|]r of {t}",
        ]
        answer = expand(
            rng, "{T} is {c}." if colour != "gold" else "{T} is often made of gold, so it is golden.", slots
        )
        if thing in ("rice", "coal", "blood"):
            answer = capital(f"{thing} is {colour}.")
    elif kind < 0.8:
        ask, answer = (
            [
                "what is {c}?",
                "name [something|a thing] that is {c}",
                "tell me something {c}",
                "[can you |]give me [something|a thing] that is {c}",
            ],
            expand(rng, "{T} is {c}.", slots),
        )
    else:
        a, b, mixed = pick(rng, knowledge.MIXES)
        if chance(rng, 0.5):
            a, b = b, a
        ask = [
            f"[what|which colo[u|]r] do you get if you mix {a} and {b}?",
            f"what [do|does] {a} and {b} make?",
            f"[mix|what is] {a} [and|plus|with] {b}?",
        ]
        answer = expand(
            rng,
            "[{A} and {B} make|If you mix {A} and {B}, you get] {m}.".replace("{A}", a).replace("{B}", b),
            {"m": mixed},
        )
    question = say(rng, ask, slots)
    return Exchange([(question, capital(answer))], wording_key([(question, "")]))


def calendar(rng: Random, memory: Memory) -> Exchange:
    kind = rng.random()
    if kind < 0.66:
        names, what = pick(
            rng,
            (
                (knowledge.DAYS, "day"),
                (knowledge.DAYS, "day"),
                (knowledge.MONTHS, "month"),
                (knowledge.SEASONS, "season"),
                (list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "letter"),
            ),
        )
        i, forward = int(rng.random() * len(names)), chance(rng, 0.6)
        if what == "letter" and (i == 25 if forward else i == 0):
            i = 5
        answer_name = names[(i + (1 if forward else -1)) % len(names)]
        slots = {"x": names[i], "y": answer_name, "w": what}
        if forward:
            ask, answer = (
                [
                    "[what|which] {w} comes after {x}?",
                    "what comes after {x}?",
                    "what is the [next|following] {w} after {x}?",
                    "what follows {x}?",
                ],
                "[After {x} comes {y}.|{Y} comes after {x}.]",
            )
        else:
            ask, answer = (
                [
                    "[what|which] {w} comes before {x}?",
                    "what comes before {x}?",
                    "what is the {w} before {x}?",
                ],
                "[Before {x} comes {y}.|{Y} comes before {x}.]",
            )
        if what == "day" and chance(rng, 0.25):
            if forward:
                ask, answer = (
                    ["if today is {x}, what [day |]is tomorrow?", "today is {x}. what [day |]is tomorrow?"],
                    "Then tomorrow is {y}.",
                )
            else:
                ask, answer = (
                    [
                        "if today is {x}, what [day |]was yesterday?",
                        "today is {x}. what [day |]was yesterday?",
                    ],
                    "Then yesterday was {y}.",
                )
        question = say(rng, ask, slots)
        return Exchange(
            [(question, capital(expand(rng, answer, slots)))], wording_key([(question, "")]), (names[i],)
        )
    if kind < 0.76:
        i = int(rng.random() * 12)
        slots = {"m": knowledge.MONTHS[i], "d": str(knowledge.MONTH_DAYS[i])}
        answer = "{m} has {d} days." if i != 1 else "February has 28 days, and 29 in a leap year."
        return Exchange(
            [
                (
                    say(
                        rng,
                        [
                            "how many days [does|has] {m}[ have|]?",
                            "how long is {m}?",
                            "how many days are [there |]in {m}?",
                        ],
                        slots,
                    ),
                    expand(rng, answer, slots),
                )
            ]
        )
    what, per, count = pick(rng, knowledge.AMOUNTS)
    slots = {"w": what, "p": per, "c": count}
    question = say(
        rng,
        [
            "how many {w} are [there |]in {p}?",
            "how many {w} does {p} have?",
            "how many {w} has {p}?",
            "number of {w} in {p}?",
        ],
        slots,
    )
    verb = (
        "There are {c} {w} in {p}."
        if per
        in (
            "a week",
            "a day",
            "an hour",
            "a minute",
            "the alphabet",
            "the solar system",
            "the world",
            "the rainbow",
            "a century",
            "a year",
            "a kilometre",
            "a kilogram",
            "a metre",
            "a byte",
            "a decade",
            "a dozen",
            "a kilobyte",
            "a football team",
            "twenty-four",
        )
        else "{P} has {c} {w}."
    )
    if what in ("vowels",) or "," in count or "about" in count:
        verb = "The number of {w} in {p} is {c}." if what != "toes" else verb
    if per == "two feet":
        verb = "Two feet have ten toes."
    return Exchange([(question, expand(rng, verb, slots))], wording_key([(question, "")]))


def opposites(rng: Random, memory: Memory) -> Exchange:
    a, b = pick(rng, knowledge.OPPOSITES)
    if chance(rng, 0.5):
        a, b = b, a
    slots = {"a": a, "b": b}
    ask = say(
        rng,
        [
            "what is the opposite of {a}?",
            "what's the opposite of {a}?",
            "the opposite of {a}[?| please]",
            "opposite of {a}[?|]",
            "[tell me|do you know|give me] the opposite of {a}[?|]",
            "which word is the opposite of {a}?",
            "what is the contrary of {a}?",
        ],
        slots,
    )
    turns = [
        (
            ask,
            say(
                rng,
                [
                    "The opposite of {a} is {b}.",
                    "The opposite of {a} is {b}.",
                    "It is {b}.",
                    "{B} is the opposite of {a}.",
                ],
                slots,
            ),
        )
    ]
    while chance(rng, 0.2) and len(turns) < 3:
        c, d = pick(rng, knowledge.OPPOSITES)
        turns.append(
            (
                say(rng, ["and [of |]{c}?", "and the opposite of {c}?", "what about {c}?"], {"c": c}),
                expand(rng, "The opposite of {c} is {d}.", {"c": c, "d": d}),
            )
        )
    return Exchange(turns, wording_key(turns[:1]), (a,))


_COUNTS = ("zero", "one", "two", "three", "four", "five")


def kinds(rng: Random, memory: Memory) -> Exchange:
    kind = pick(rng, list(knowledge.KINDS))
    members = knowledge.KINDS[kind].split()
    plural = knowledge.PLURALS.get(kind, kind + "s")
    mass = kind in knowledge.MASS_KINDS
    form = rng.random()
    if form < 0.4:
        count = 1 + int(rng.random() * 5)
        first = int(rng.random() * len(members))
        chosen = [members[(first + i) % len(members)] for i in range(count)]
        slots = {
            "k": kind,
            "ks": plural,
            "n": _COUNTS[count] if chance(rng, 0.6) else str(count),
            "list": listing(chosen),
        }
        if count == 1:
            ask = [
                "[name|tell me|give me|say] {a k}",
                "can you name {a k}?",
                "do you know {a k}?",
                "what is {a k}, for example?",
            ]
            answer = "[{List}.|{List} is {a k}.]" if mass else "[{A list}.|{A list} is {a k}.]"
        else:
            ask = [
                "[name|tell me|give me|list|say] {n} {ks}",
                "can you name {n} {ks}?",
                "do you know {n} {ks}?",
                "{n} {ks}[, please| please|]",
                "[tell me|list|name] [some|a few] {ks}",
                "which {ks} do you know?",
            ]
            answer = "[{List}.|{N} {ks} are {list}.|For example {list}.]"
            slots["n"] = slots["n"]
        question = say(rng, ask, slots)
        if "{n}" in answer.lower() and _COUNTS[count] not in question and str(count) not in question:
            answer = "For example {list}."
        return Exchange(
            [(question, capital(expand(rng, answer, slots)))],
            wording_key([(question, "")]),
            tuple(kind.split()),
        )
    member = pick(rng, members)
    if kind == "tree" and member == "lime":
        member = "oak"
    named = member if mass else article(member)
    slots = {"m": named, "k": kind}
    if form < 0.6:
        ask, answer = (
            [
                "what kind of thing is {m}?",
                "what is {m}?",
                "what sort of thing is {m}?",
                "do you know what {m} is?",
            ],
            "{M} is {a k}.",
        )
        return Exchange([(say(rng, ask, slots), capital(expand(rng, answer, slots)))], "", (member,))
    other = pick(rng, list(knowledge.KINDS))
    if chance(rng, 0.5):
        asked = kind
        answer = "Yes, {m} is {a k}."
    else:
        while (
            other == kind
            or member in knowledge.KINDS[other].split()
            or {other, kind} in ({"bird", "animal"}, {"insect", "animal"}, {"toy", "sport"})
        ):
            other = pick(rng, list(knowledge.KINDS))
        asked = other
        answer = "No, {m} is {a k}."
    slots["q"] = asked
    question = say(rng, ["is {m} {a q}?", "tell me, is {m} {a q}?", "do you think {m} is {a q}?"], slots)
    return Exchange([(question, expand(rng, answer, slots))], question, (member, asked))


def capitals(rng: Random, memory: Memory) -> Exchange:
    country, city = pick(rng, knowledge.CAPITALS)
    slots = {"x": country, "y": city}
    if chance(rng, 0.75):
        ask = say(
            rng,
            [
                "what is the capital of {x}?",
                "what's the capital of {x}?",
                "[tell me|do you know|name] the capital [of|city of] {x}[?|]",
                "capital of {x}[?|]",
                "which city is the capital of {x}?",
                "the capital of {x}?",
            ],
            slots,
        )
        answer = say(
            rng,
            [
                "The capital of {x} is {y}.",
                "The capital of {x} is {y}.",
                "{Y} is the capital of {x}.",
                "It is {y}.",
            ],
            slots,
        )
    else:
        ask = say(
            rng,
            [
                "where is {y}?",
                "in which country is {y}?",
                "what country is {y} in?",
                "{y} is the capital of which country?",
            ],
            slots,
        )
        answer = expand(rng, "{Y} is in {x}. [It is the capital.|It is the capital of {x}.|]", slots)
    answer = answer.replace("D.C..", "D.C.")
    turns = [(ask, answer)]
    if chance(rng, 0.2) and "capital" in ask:
        country, city = pick(rng, knowledge.CAPITALS)
        turns.append(
            (
                say(rng, ["and [of |]{x}?", "what about {x}?"], {"x": country}),
                f"The capital of {country} is {city}.".replace("D.C..", "D.C."),
            )
        )
    if chance(rng, 0.08) and "capital" in ask:
        unknown = made_up(rng).capitalize()
        turns.append(
            (
                say(rng, ["and [of |]{x}?", "what about {x}?"], {"x": unknown}),
                f"I don't know the capital of {unknown}.",
            )
        )
    return Exchange(turns, wording_key(turns[:1]), tuple(country.split()))


_SAYINGS = [
    "the {a} [likes|sees|has|finds] the {b}",
    "i am a happy {a}",
    "good {time}, {name}",
    "{a} and {b}",
    "{name} is my friend",
    "the sun is shining",
    "one {a}, two {a}s",
    "{a}",
    "{name}",
    "my {a} is {colour}",
    "there is a {colour} {a} on the {b}",
    "the {quality} {colour} {a}",
    "the {quality} {a} [jumps over|runs to|looks at] the {quality2} {b}",
    "i [love|need|want] {a} and {b}",
]
_OPPOSED = [word for pair in knowledge.OPPOSITES for word in pair]
_SPELLED = sorted(
    {
        *(word for thing in (*THINGS, *FOODS) for word in thing.split()),
        *(row[0] for row in knowledge.ANIMALS),
        *(word for members in knowledge.KINDS.values() for word in members.split()),
        *(name.split()[-1] for name, _, _ in knowledge.CONCEPTS),
        *_OPPOSED,
    }
)


def _saying(rng: Random) -> str:
    """Something to be repeated: a small sentence, or a chain of any words."""
    if chance(rng, 0.35):
        words = (*_SPELLED, "the", "a", "is", "and", "of", "in", "my", "to")
        return " ".join(
            pick(rng, words) if chance(rng, 0.85) else made_up(rng) for _ in range(2 + int(rng.random() * 6))
        )
    slots = {
        "a": pick(rng, THINGS) if chance(rng, 0.7) else made_up(rng),
        "b": pick(rng, THINGS),
        "name": person_name(rng),
        "time": pick(rng, ("morning", "evening", "day")),
        "colour": pick(rng, COLOURS),
        "quality": pick(rng, _OPPOSED),
        "quality2": pick(rng, _OPPOSED),
    }
    return say(rng, _SAYINGS, slots)


def echo(rng: Random, memory: Memory) -> Exchange:
    """Say this, spell that: copying what the user wrote."""
    form = rng.random()
    if form < 0.5:
        text = _saying(rng)
        order = expand(rng, "[say|repeat|repeat this:|please say|can you say|repeat after me:|write|echo]")
        ask = f'{order} "{text}"' if chance(rng, 0.4) else f"{order} {text}"
        return Exchange([(ask, capital(text) + ".")], ask, tuple(text.split()))
    if form < 0.75:
        word = pick(rng, _SPELLED) if chance(rng, 0.8) else made_up(rng)
        ask = say(
            rng,
            ["spell {w}", "how do you spell {w}?", "spell the word {w}", "can you spell {w}?"],
            {"w": word},
        )
        return Exchange([(ask, " - ".join(word.upper()))], ask, (word,))
    if form < 0.87:
        word = pick(rng, _SPELLED)
        first = chance(rng, 0.6)
        ask = say(
            rng,
            ["what is the {p} letter of {w}?", "what letter does {w} {v} with?"],
            {"w": word, "p": "first" if first else "last", "v": "start" if first else "end"},
        )
        letter = word[0 if first else -1].upper()
        return Exchange(
            [(ask, f"The {'first' if first else 'last'} letter of {word} is {letter}.")], ask, (word,)
        )
    slots = {"name": person_name(rng)}
    ask = say(
        rng,
        [
            "say [hello|hi] to {name}",
            "greet {name}[ for me|]",
            "please say hello to my [friend|mother|brother|sister|wife|son|daughter] {name}",
        ],
        slots,
    )
    return Exchange(
        [(ask, expand(rng, "Hello, {name}! [Nice to meet you.|How are you?|]", slots))], ask, (slots["name"],)
    )
