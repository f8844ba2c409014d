"""Short stories: a hero, a friend, a place, a thing and one of many plots, and questions about what happened.

A story is a list of beats; every beat has several wordings, and every wording several alternatives, so that the same
hero, place and plot almost never give the same text twice. Combinations of hero, place and plot are held out whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import capital, chance, expand, pick, say
from .plots import ENDINGS, MORALS, OPENINGS, PLOTS, Plot
from .words import BOYS, GIRLS, THINGS, made_up

HEROES = tuple(
    """fox rabbit bear owl mouse hedgehog cat dog dragon robot girl boy turtle squirrel duck frog wolf goat penguin
    elephant lion snail bee horse pig otter badger crow knight princess prince pirate wizard baker sailor gardener
    fisherman king queen witch giant elf ghost inventor painter musician shepherd farmer clockmaker astronaut whale
    dolphin monkey tiger parrot kitten puppy spider ant beaver deer sheep cow donkey swan unicorn mermaid fairy troll
    monster chef postman nurse teacher doctor detective sparrow seal crab octopus camel kangaroo koala panda giraffe
    crocodile lizard bat moth butterfly ladybird mole goose hen rooster lamb""".split()
)
TRAITS = tuple(
    """small brave curious kind shy clever lazy cheerful old young quiet funny patient proud gentle hungry sleepy busy
    honest stubborn careful clumsy lonely happy little tiny grumpy friendly polite bold""".split()
)
PLACES: tuple[tuple[str, str], ...] = tuple(
    (name, where)
    for name, where in (
        line.strip().split(" = ")
        for line in """
    forest = in a [green|deep|quiet|dark|wide] forest
    lighthouse = in [an old|a white|a tall|a lonely] lighthouse by the sea
    village = in a [small|sleepy|little|busy] village
    castle = in a [grey|great|silent|high] castle
    island = on a [tiny|warm|green|far] island
    mountain = on a [high|snowy|windy|steep] mountain
    river = beside a [wide|cold|clear|lazy] river
    lake = near a [blue|still|deep|silver] lake
    desert = in a [hot|wide|golden|dry] desert
    city = in a [big|loud|bright|grey] city
    farm = on a [small|sunny|busy|quiet] farm
    garden = in a [wild|large|hidden|sunny] garden
    cave = in a [dark|warm|deep|hidden] cave
    library = in [an old|a dusty|a huge|a quiet] library
    harbour = in a [busy|foggy|small|windy] harbour
    beach = on a [long|sunny|white|quiet] beach
    valley = in a [green|misty|peaceful|hidden] valley
    swamp = in a [muddy|foggy|strange|green] swamp
    moon = on the [silent|pale|cold|far] moon
    ship = on a [big|wooden|rusty|proud] ship
    market = near a [loud|colourful|crowded|famous] market
    bakery = in a [warm|tiny|sweet-smelling|cosy] bakery
    school = in a [little|cheerful|red|noisy] school
    tower = in a [tall|crooked|round|stone] tower
    meadow = in a [flowery|sunny|wide|soft] meadow
    windmill = in [an old|a creaking|a white|a tall] windmill
    train station = near a [small|forgotten|busy|windy] train station
    museum = in a [quiet|grand|dusty|strange] museum
    orchard = in [an apple|a sunny|an old|a sweet-smelling] orchard
    spaceship = in a [shiny|silver|tiny|fast] spaceship
    zoo = in a [large|friendly|busy|green] zoo
    bridge = under [an old|a stone|a wooden|a long] bridge
    house = in a [small|crooked|yellow|cosy] house
    kingdom = in a [far|peaceful|rich|small] kingdom
    jungle = in a [hot|green|loud|thick] jungle
    theatre = in [an old|a small|a golden|a famous] theatre
    workshop = in a [tidy|messy|warm|dusty] workshop
    hill = on a [green|round|windy|lonely] hill
    park = in a [green|quiet|large|pretty] park
    ocean = in the [deep|blue|wide|cold] ocean""".strip().splitlines()
    )
)
OBJECTS = tuple(
    o.strip()
    for o in """golden key, silver bell, old map, red lantern, blue stone, wooden flute, music box, brass compass,
    glass bottle, little drum, green scarf, paper boat, magic hat, warm blanket, shiny coin, broken clock, red kite,
    letter, small boat, green seed, crystal ball, feather, honey cake, storybook, seashell, silver spoon, telescope,
    paintbrush, woollen hat, copper kettle, white pearl, yellow umbrella, toy train, rope, mirror, basket, ring, crown,
    violin, candle, snow globe, pocket watch, treasure chest, wooden horse, jar of honey, bag of marbles, star map,
    magic wand, blue button, bicycle""".replace("\n", " ").split(",")
)
SKILLS = (
    *(
        "swim",
        "sing",
        "fly",
        "dance",
        "read",
        "paint",
        "write",
        "cook",
        "climb",
        "whistle",
        "jump",
        "skate",
        "ski",
    ),
    *(
        "play the piano",
        "play the violin",
        "play chess",
        "count",
        "run fast",
        "bake bread",
        "tell jokes",
        "draw",
    ),
    *(
        "ride a bicycle",
        "speak",
        "juggle",
        "sew",
        "sail",
        "do magic",
        "build houses",
        "play football",
        "read maps",
    ),
)
THEMES = (
    "friendship",
    "courage",
    "kindness",
    "the sea",
    "winter",
    "summer",
    "space",
    "love",
    "the night",
    "hope",
    "patience",
    "sharing",
    "the stars",
    "animals",
    "a long journey",
    "magic",
    "the rain",
    "autumn",
    "spring",
    "home",
)


@dataclass(frozen=True)
class Story:
    """One story and what can be asked about it."""

    text: str
    key: str
    slots: dict[str, str]
    plot: Plot
    ending: str

    def questions(self, rng: Random) -> list[tuple[str, str]]:
        """Questions with their answers, in random order."""
        slots = self.slots
        found = [
            (say(rng, ask, slots), say(rng, answer, slots))
            for ask, answer in (*_GENERAL, *((q, a) for q, a in self.plot.questions))
        ]
        found.append((say(rng, _HOW_END), self.ending))
        rng.shuffle(found)
        return found


_HOW_END = [
    "how did [it|the story] end?",
    "what happened [at the end|in the end]?",
    "what was the end of the story?",
]
_GENERAL: tuple[tuple[list[str], list[str]], ...] = (
    (
        [
            "what was the name of the {kind}?",
            "what was the {kind} called?",
            "what was the {kind}'s name?",
            "who was [the story|it] about?",
            "who was the hero?",
        ],
        [
            "The {kind} was called {name}.",
            "The name of the {kind} was {name}.",
            "It was about {name}, the {kind}.",
        ],
    ),
    (
        [
            "where did {name} live?",
            "where did the {kind} live?",
            "where did the story happen?",
            "where was {name}'s home?",
        ],
        ["{Name} lived {where}.", "It happened {where}.", "{Name} the {kind} lived {where}."],
    ),
    (
        ["who [was|is] {friend}?", "and who was {friend}?"],
        [
            "{Friend} was {a friendkind}, a friend of {name}.",
            "{Friend} was the {friendkind} who helped {name}.",
        ],
    ),
    (
        [
            "who helped {name}?",
            "who helped the {kind}?",
            "did {name} have a friend?",
            "who was the friend of {name}?",
        ],
        [
            "{Friend} the {friendkind} helped {name}.",
            "{Name} had a friend called {friend}, {a friendkind}.",
            "It was {friend}, {a friendkind}.",
        ],
    ),
    (
        ["what was {name} like?", "what kind of {kind} was {name}?", "describe {name}."],
        [
            "{Name} was {a trait} {kind}.",
            "{Name} was very {trait}.",
            "{Name} was {a kind}, and very {trait}.",
        ],
    ),
    (
        ["what can we learn from the story?", "what is the moral?", "what does the story teach us?"],
        ["{moral}"],
    ),
)


def _pronouns(girl: bool) -> dict[str, str]:
    if girl:
        return {"he": "she", "him": "her", "his": "her", "self": "herself"}
    return {"he": "he", "him": "him", "his": "his", "self": "himself"}


def _is_girl(rng: Random, kind: str) -> bool:
    if kind in ("girl", "princess", "queen", "witch", "mermaid", "fairy", "hen", "cow", "goose"):
        return True
    return kind not in (
        "boy",
        "prince",
        "king",
        "wizard",
        "fisherman",
        "postman",
        "rooster",
        "knight",
    ) and chance(rng, 0.5)


def _new(rng: Random, names: tuple[str, ...], used: set[str]) -> str:
    name = pick(rng, names)
    while name in used:
        name = pick(rng, names)
    return name


def _plot(rng: Random, name: str | None, used: set[str]) -> Plot:
    """The named plot, or the first one after a used plot, or any when none was used.

    The fixed order lets a small model know what comes next; a free choice among the rest it would not learn.
    """
    for i, plot in enumerate(PLOTS):
        after = PLOTS[i - 1].name in used and plot.name not in used
        if plot.name == name or (name is None and after):
            return plot
    return pick(rng, PLOTS)


def story(
    rng: Random,
    *,
    kind: str | None = None,
    friendkind: str | None = None,
    place: str | None = None,
    thing: str | None = None,
    name: str | None = None,
    plot: str | None = None,
    skill: str | None = None,
    length: str = "normal",
    used: set[str] | None = None,
) -> Story:
    """A story; what is not given is drawn. `length` is short, normal or long.

    Plots and names in `used` are not taken again, and those of this story are added. The hero's name comes from
    one half of the names, the friend's from the other, so that a small model doesn't mix them up.
    """
    used = set() if used is None else used
    kind = kind or pick(rng, HEROES)
    friendkind = friendkind or pick(rng, HEROES)
    while friendkind == kind:
        friendkind = pick(rng, HEROES)
    thing = thing or pick(rng, OBJECTS)
    where_from = dict(PLACES)
    place = place or pick(rng, PLACES)[0]
    where = expand(rng, where_from[place]) if place in where_from else f"near {place}"
    girl = name in GIRLS if name in GIRLS or name in BOYS else _is_girl(rng, kind)
    name = name or _new(rng, (GIRLS if girl else BOYS)[::2], used)
    girl_friend = _is_girl(rng, friendkind)
    friend = name
    while friend == name:
        friend = _new(rng, (GIRLS if girl_friend else BOYS)[1::2], used)
    chosen = _plot(rng, plot, used)
    used.update((name, friend, chosen.name))
    slots = {
        "kind": kind,
        "name": name,
        "friendkind": friendkind,
        "friend": friend,
        "place": place,
        "where": where,
        "thing": thing,
        "trait": pick(rng, TRAITS),
        "number": pick(rng, ("two", "three", "four", "five", "six", "seven")),
        "weather": pick(rng, ("rain", "snow", "wind", "fog", "sunshine")),
        "food": pick(
            rng, ("bread", "soup", "apple pie", "berries", "cheese", "cake", "honey", "nuts", "pancakes")
        ),
        "skill": skill or pick(rng, SKILLS),
        "his_friend": "her" if girl_friend else "his",
        **_pronouns(girl),
    }
    slots["moral"] = expand(rng, pick(rng, chosen.morals or MORALS), slots)
    return retell(rng, chosen, slots, length)


def retell(rng: Random, plot: Plot, slots: dict[str, str], length: str) -> Story:
    """A story of the plot, with other words each time."""
    beats = [say(rng, OPENINGS, slots)]
    for beat in plot.beats:
        if length == "short" and beat.optional:
            continue
        if beat.optional and length == "normal" and chance(rng, 0.35):
            continue
        beats.append(say(rng, beat.texts, slots))
    ending = say(rng, plot.endings, slots)
    beats.append(ending)
    if length == "long" or chance(rng, 0.5):
        beats.append(say(rng, ENDINGS, slots))
    key = f"story|{slots['kind']}|{slots['place']}|{plot.name}"
    return Story(" ".join(beats), key, slots, plot, ending)


_ASK = [
    "[please |can you |could you |would you |will you |]tell me [a|a short|a little|a nice|a bedtime|a good] story{about}",
    "tell [me |us |]a story{about}[ please|, please|]",
    "[i want|i would like|i'd like|I want to hear] a story{about}",
    "[write|make up|invent|give me|compose] a [short |little |]story{about}",
    "[do you know|have you got|how about|what about] a story{about}",
    "[a|one] story{about}[ please|, please|]",
    "story{about}[ please|]",
    "[can|could] you write [me |]a [small |short |nice |]story{about}",
    "let me hear a story{about}",
]
_LEADS = [
    "Here is a story.",
    "Sure!",
    "Of course.",
    "Gladly.",
    "Yes!",
    "With pleasure.",
    "All right.",
    "Listen.",
]


def opened(rng: Random, text: str) -> str:
    """The text, now and then with a word to the listener in front."""
    return f"{pick(rng, _LEADS)} {text}" if chance(rng, 0.25) else text


_ABOUT_PLOT = [
    ("{a kind} [who|that] is afraid of the dark", "dark"),
    ("{a kind} and the dark", "dark"),
    ("{a kind} in a storm", "storm"),
    ("{a kind} and a [big |terrible |]storm", "storm"),
    ("{a kind} [who|that] [finds|found] a [treasure|map|treasure map]", "map"),
    ("{a kind} and a treasure", "map"),
    ("{a kind} [who|that] [lost|loses] {a thing}", "lost"),
    ("{a kind} [who|that] [wins|won] a race", "race"),
    ("a race with {a kind}", "race"),
    ("{a kind} and a birthday", "gift"),
    ("{a kind} [who|that] makes {a thing}", "gift"),
    ("{a kind} [who|that] [gets|has] a wish", "wish"),
    ("{a kind} [who|that] repairs {a thing}", "repair"),
    ("{a kind} and a strange sound", "sound"),
    ("{a kind} with a sick friend", "sick"),
    ("{a kind} and a new neighbour", "newcomer"),
    ("{a kind} in a [hard|cold] winter", "share"),
    ("{a kind} [who|that] builds something", "build"),
]


def request(rng: Random, used: set[str]) -> tuple[str, str, Story]:
    """What the user asks, the whole answer, and the story in it."""
    given: dict[str, str] = {}
    form = rng.random()
    place = pick(rng, PLACES)[0]
    kind = pick(rng, HEROES)
    if chance(rng, 0.3):
        kind = pick(rng, THINGS) if chance(rng, 0.9) else made_up(rng)
    other = pick(rng, HEROES) if chance(rng, 0.8) else pick(rng, THINGS)
    while other == kind:
        other = pick(rng, HEROES)
    thing = pick(rng, OBJECTS)
    slots = {"kind": kind, "place": place, "thing": thing, "other": other}
    on_place = "the moon" if place == "moon" else "the ocean" if place == "ocean" else "{a place}"
    if form < 0.22:
        about = ""
    elif form < 0.44:
        about, given = "{a kind}", {"kind": kind}
    elif form < 0.60:
        about, given = f"{{a kind}} and {on_place}", {"kind": kind, "place": place}
    elif form < 0.72:
        about, given = "{a kind} and {a other}", {"kind": kind, "friendkind": other}
    elif form < 0.82:
        about, given = "{a kind} and {a thing}", {"kind": kind, "thing": thing}
    elif form < 0.86:
        about, given = on_place, {"place": place}
    elif form < 0.88:
        about, given = "{a thing}", {"thing": thing}
    elif form < 0.91:
        skill = pick(rng, SKILLS)
        slots["skill"] = skill
        about = "{a kind} [who|that] [wants to|wanted to|learns to|learned to|could not|cannot|can't] {skill}"
        given = {"kind": kind, "skill": skill, "plot": "learn"}
    elif form < 0.94:
        about, plot = pick(rng, _ABOUT_PLOT)
        given = {"kind": kind, "plot": plot}
        if "{thing}" in about or "{a thing}" in about:
            given["thing"] = thing
    elif form < 0.97:
        name = pick(rng, GIRLS if _is_girl(rng, kind) else BOYS)
        if chance(rng, 0.25):
            name = made_up(rng).capitalize()
        slots["named"] = name
        about, given = "{a kind} [called|named] {named}", {"kind": kind, "name": name}
    else:
        slots["theme"] = pick(rng, THEMES)
        about = "{theme}"
    if about:
        about = "[about|with] " + about if form < 0.88 else "about " + about
    length = pick(rng, ("normal", "normal", "normal", "short", "long"))
    if length == "short" and chance(rng, 0.5):
        about += "[ in a few sentences|, but keep it short| (short)]"
    elif length == "long" and chance(rng, 0.5):
        about += "[, a long one| and make it long|, please make it long]"
    about = expand(rng, about, slots)
    about = f" {about}" if about else ""
    ask = say(rng, _ASK, {"about": about})
    told = story(rng, length=length, used=used, **given)
    ask += pick(
        rng, ("", "", ".", "?" if ask[:2] in ("ca", "co", "wo", "wi", "do", "ha", "ho", "wh") else "!")
    )
    return ask, opened(rng, told.text), told


def continued(rng: Random, kind: str, name: str, asked: str, used: set[str]) -> Story:
    """A story that goes on from an opening that the user wrote."""
    return story(rng, kind=kind if kind in asked else None, name=name if name in asked else None, used=used)


_AGAIN = [
    "[another one|another story|one more|tell me another one|again|more|another][ please|, please|]",
    "[that was nice|I liked that|lovely|good story|great]. [another one|one more|tell me another story][ please|]?",
    "[can you tell|tell] me [another|a different|a new] story[?|]",
]
_MORE = [
    "[what happened next|and then|what happened then|what happened after that]?",
    "[go on|continue|continue the story|please go on|tell me more|keep going]",
]
_NEXT = [
    "The next [day|morning|week], {name} [visited|met|went to see] {friend} again. They [drank tea|sat in the sun|ate"
    " {food}] and [laughed about|talked about|remembered] everything that had happened[ {where}|].",
    "[After that|From then on], {name} told the story of the {thing} to everyone {where}. {Friend} [always|often] added"
    " [a few|some] [funny|new|strange] details.",
    "[Some time later|A year later], {name} and {friend} went on another [journey|adventure|walk], and this time they"
    " took [the {thing}|a lot of {food}|a big bag] with them.",
    "[Then|After all that] {name} slept for [a long time|{number} hours|a whole day]. When {he} woke up, {friend} had made"
    " {food} for both of them.",
    "[Well,|After that] {name} [put|kept] the {thing} [on a shelf|next to {his} bed|in a safe place]. [Every|Each] evening"
    " {he} looked at it and [smiled|thought of {friend}|felt happy].",
]
_LONGER = [
    "[make it longer|longer please|a longer version|tell it longer|i want it longer][ please|]",
    "can you make it longer?",
]
_SHORTER = [
    "[make it shorter|shorter please|a shorter version|tell it shorter|i want it shorter][ please|]",
    "can you make it shorter?",
]
_LIKED = (
    [
        "[thank you|thanks|nice story|I liked it|that was a nice story|what a nice story|lovely|beautiful|great story][!|.|]",
        "[I liked|I like] {name}[!|.|]",
        "[good|nice] one[!|.|]",
    ],
    [
        "[I am glad you liked it.|Thank you!|You are welcome.|I am happy that you liked it.] [Shall I tell you another one?|Would you"
        " like to hear another one?|Just ask if you want another story.|You can also ask me about {name}.]"
    ],
)


def follow_ups(rng: Random, told: Story, count: int, used: set[str]) -> list[tuple[str, str, str]]:
    """Up to `count` turns (user, answer, held-out key) after a story."""
    turns: list[tuple[str, str, str]] = []
    asked = told.questions(rng)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.62 and asked:
            ask, answer = asked.pop()
            turns.append((ask, capital(answer), ""))
        elif kind < 0.69:
            length = "long" if chance(rng, 0.5) else "short"
            again = retell(rng, told.plot, told.slots, length)
            turns.append((say(rng, _LONGER if length == "long" else _SHORTER), opened(rng, again.text), ""))
        elif kind < 0.79:
            turns.append((say(rng, _MORE), say(rng, _NEXT, told.slots), ""))
        elif kind < 0.88:
            turns.append((say(rng, _LIKED[0], told.slots), say(rng, _LIKED[1], told.slots), ""))
        else:
            told = story(rng, used=used)
            asked = told.questions(rng)
            turns.append((say(rng, _AGAIN), opened(rng, told.text), told.key))
    return turns
