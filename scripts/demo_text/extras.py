"""More short exchanges: choices, chance, words, names, things around the house, and how a chat goes on."""

from __future__ import annotations

from random import Random

from .grammar import article, capital, chance, listing, pick, sample, say
from .words import BOYS, CITIES, COLOURS, FOODS, GIRLS, HOBBIES, PET_NAMES, PETS, THINGS

Turn = tuple[str, str]

# name; what it is
_HOUSEHOLD = [
    line.split("; ")
    for line in """a toaster; a machine that makes slices of bread warm and crisp
a kettle; a pot in which you boil water
a teapot; a pot in which you make tea
a spoon; a tool for eating soup
a fork; a tool for eating, with three or four points
a knife; a tool for cutting
a cup; a small vessel to drink from
a plate; a flat dish for food
a chair; a piece of furniture to sit on
a table; a piece of furniture with a flat top
a bed; a piece of furniture to sleep in
a lamp; a thing that gives light
a candle; a stick of wax that gives light when it burns
a mirror; a glass in which you see yourself
a window; an opening in a wall, with glass
a door; a thing that closes the way into a room
a key; a small tool that opens a lock
a clock; a machine that shows the time
an umbrella; a roof that you carry against the rain
a hat; a piece of clothing for the head
a shoe; a piece of clothing for the foot
a sock; a soft piece of clothing for the foot
a scarf; a piece of clothing for the neck
a jacket; a short coat
a button; a small round thing that closes a coat
a needle; a thin pointed tool for sewing
a hammer; a tool for hitting nails
a ladder; a tool for climbing
a bucket; a vessel for carrying water
a broom; a tool for cleaning the floor
a pencil; a tool for writing and drawing
a letter; a message on paper, or a sign of the alphabet
a newspaper; paper with news that is printed every day
a telephone; a machine for talking to people who are far away
a camera; a machine that takes pictures
a radio; a machine that brings music and news through the air
a television; a machine that shows moving pictures
a fridge; a box that keeps food cold
an oven; a hot box for baking
a car; a vehicle with four wheels and an engine
a bus; a large vehicle for many people
a truck; a large vehicle for goods
a tractor; a strong vehicle for work on farms
a boat; a small vehicle for water
a rocket; a machine that flies into space
a plane; a vehicle that flies
a helicopter; a machine that flies with turning blades
a satellite; a thing that goes around a planet
a telescope; a tool for looking at far things such as stars
a microscope; a tool for looking at very small things
a kite; a light toy that flies in the wind on a string
a balloon; a thin bag full of air or gas
a ball; a round toy
a doll; a toy that looks like a small person
a puzzle; a game in which you put pieces together
a drum; an instrument that you hit
a violin; an instrument with four strings and a bow
a trumpet; an instrument of brass that you blow
a flute; an instrument that you blow from the side
a bell; a hollow piece of metal that rings
a tower; a high and narrow building
a house; a building where people live
a church; a building where people pray
a museum; a building where old or beautiful things are shown
a theatre; a building where plays are shown
a hospital; a house where ill people are helped
a bank; a house that keeps money, or the side of a river
a shop; a place where you buy things
a market; a place where many people buy and sell
a farm; a place where people grow food and keep animals
a garden; a place with flowers and vegetables
a park; a green place in a city
a beach; a place with sand next to water
a harbour; a place where ships are safe
a lake; still water with land all around it
a hill; a small mountain
a valley; the low land between mountains
a cave; a hollow place in the rock
a windmill; a mill that is turned by the wind
a knight; a soldier on a horse, from the old times
a king; a man who rules a country
a queen; a woman who rules a country
a prince; the son of a king
a princess; the daughter of a king
a wizard; a man who does magic in stories
a witch; a woman who does magic in stories
a pirate; a robber on the sea
a sailor; a person who works on a ship
a farmer; a person who grows food and keeps animals
a teacher; a person who helps others to learn
a nurse; a person who cares for ill people
a painter; a person who paints pictures or walls
a gardener; a person who works in a garden
a pilot; a person who flies planes
an astronaut; a person who travels into space
a scientist; a person who finds out how things work
a programmer; a person who writes programs
a keyboard; a board with keys for writing
a processor; the part of a computer that computes
a printer; a machine that brings text on paper
a password; a secret word that opens something
a file; a piece of data with a name, on a computer
a website; a page or many pages on the internet
an algorithm; a plan of steps that solves a problem
a question; a sentence that asks for something
a word; a group of letters with a meaning
a sentence; a group of words that says something
a language; a way to speak and write
a dictionary; a book that explains words
a calendar; a list of the days of the year
a holiday; a day without work
a gift; a thing that you give to make somebody happy
a game; something that you play for fun
a song; music with words
a picture; something painted, drawn or photographed
a shadow; a dark place where something stops the light
a ghost; a spirit in stories
a monster; a strange and frightening being in stories
a robot vacuum; a small robot that cleans the floor
soup; a warm liquid food that you eat with a spoon
pizza; flat bread with tomato and cheese, baked in an oven
pasta; food made of flour and water, in many forms
rice; small white grains that people cook and eat
butter; a soft yellow food made of milk
sugar; a sweet white powder
salt; a white powder that makes food taste better
money; what you pay with
paper; thin sheets for writing, made of wood
glass; a hard material that you can see through
wood; the hard material that trees are made of
stone; a hard material from the ground
iron; a hard grey metal
silver; a shiny white metal
sand; very small pieces of stone
mud; wet earth
fog; a cloud that lies on the ground
smoke; what rises from a fire
grass; the thin green plant of meadows
love; a deep feeling for somebody
friendship; what friends have for each other
courage; the power to do what you are afraid of
hope; the feeling that something good will come
work; what people do to make or earn something
health; the state of being well
peace; the time without war""".split("\n")
]

_RHYMES = [
    line.split()
    for line in """cat hat bat mat rat flat
dog frog fog log
house mouse blouse
tree sea bee free knee three
moon spoon soon June tune
star car far jar guitar
night light bright white kite
day play way say grey may
rain train brain chain again
sun fun run one
book look cook hook
ring king sing spring thing wing
cake lake snake make wake
fox box socks rocks
bear chair hair pear stair
boat goat coat float
fish dish wish
bell well tell shell
hand sand land band
red bed bread head
nose rose close
snow go slow know
mice ice nice rice
ball wall tall small""".split("\n")
]
_PLURALS = [
    pair.split("-")
    for pair in "mouse-mice child-children foot-feet tooth-teeth man-men woman-women goose-geese sheep-sheep fish-fish house-houses cat-cats dog-dogs fox-foxes box-boxes baby-babies city-cities leaf-leaves knife-knives wolf-wolves book-books tree-trees bus-buses story-stories berry-berries person-people neuron-neurons matrix-matrices potato-potatoes tomato-tomatoes".split()
]
_PAST = [
    pair.split("-")
    for pair in "go-went see-saw eat-ate drink-drank run-ran sing-sang swim-swam write-wrote read-read come-came give-gave take-took find-found lose-lost think-thought bring-brought buy-bought sleep-slept fly-flew fall-fell know-knew say-said speak-spoke tell-told make-made play-played walk-walked work-worked love-loved compute-computed predict-predicted fire-fired".split()
]
_SYNONYMS = [
    pair.split("-")
    for pair in "happy-glad sad-unhappy big-large small-little fast-quick begin-start end-finish beautiful-pretty clever-smart rich-wealthy angry-furious tired-sleepy funny-amusing quiet-silent afraid-scared strange-odd easy-simple difficult-hard answer-reply choose-pick help-support shop-store ill-sick speak-talk".split()
]


def household(rng: Random) -> list[Turn]:
    name, what = pick(rng, _HOUSEHOLD)
    plain = name.partition(" ")[2] if name.startswith(("a ", "an ")) else name
    slots = {"x": name, "p": plain}
    ask = say(
        rng,
        [
            "what is {x}?",
            "what is {x}?",
            "[what's|whats] {x}?",
            "[can you |please |]explain what {x} is",
            "do you know what {x} is?",
            "what does [the word |]{p} mean?",
            "tell me what {x} is",
            "define {p}",
            "what do you know about {x}?",
            "tell me [something |]about {x}",
        ],
        slots,
    )
    return [(ask, f"{capital(name)} is {what}.")]


def words(rng: Random) -> list[Turn]:
    """Rhymes, plurals, past tenses, other words for a word."""
    form = rng.random()
    if form < 0.3:
        group = pick(rng, _RHYMES)
        word, *others = sample(rng, group, min(3, len(group)))
        ask = say(
            rng,
            [
                "what rhymes with {w}?",
                "[give me|tell me|find] a word that rhymes with {w}",
                "which word rhymes with {w}?",
                "a rhyme for {w}[ please|]",
            ],
            {"w": word},
        )
        return [(ask, capital(f"{listing(others)} rhyme{'s' if len(others) == 1 else ''} with {word}."))]
    if form < 0.55:
        one, many = pick(rng, _PLURALS)
        ask = say(
            rng,
            [
                "what is the plural of {w}?",
                "plural of {w}[?|]",
                "one {w}, two what?",
                "what is more than one {w} called?",
            ],
            {"w": one},
        )
        return [(ask, say(rng, ["The plural of {w} is {v}.", "One {w}, two {v}."], {"w": one, "v": many}))]
    if form < 0.8:
        now, then = pick(rng, _PAST)
        ask = say(
            rng,
            [
                "what is the past tense of {w}?",
                "past [tense |]of {w}[?|]",
                "what is the past of {w}?",
                "today i {w}, yesterday i what?",
            ],
            {"w": now},
        )
        return [(ask, f"The past tense of {now} is {then}.")]
    a, b = pick(rng, _SYNONYMS)
    if chance(rng, 0.4):
        a, b = b, a
    ask = say(
        rng,
        [
            "[what is |give me |tell me |]another word for {w}[?|]",
            "what is a synonym [of|for] {w}?",
            "which word means the same as {w}?",
            "say {w} in another way",
        ],
        {"w": a},
    )
    return [(ask, say(rng, ["Another word for {w} is {v}.", "You can also say {v}."], {"w": a, "v": b}))]


def choice(rng: Random) -> list[Turn]:
    """One thing or the other, coins, dice, numbers between."""
    form = rng.random()
    if form < 0.5:
        pool = pick(
            rng,
            (
                FOODS,
                HOBBIES,
                COLOURS,
                CITIES,
                THINGS,
                ("cats", "dogs"),
                ("tea", "coffee"),
                ("summer", "winter"),
                ("the sea", "the mountains"),
                ("books", "films"),
                ("morning", "evening"),
            ),
        )
        a, b = sample(rng, pool, 2)
        if pool is THINGS:
            a, b = article(a), article(b)
        slots = {"a": a, "b": b, "c": pick(rng, (a, b))}
        ask = say(
            rng,
            [
                "{a} or {b}?",
                "[what is|which is|what's] better, {a} or {b}?",
                "[do you prefer|do you like] {a} or {b}[ more|]?",
                "would you rather have {a} or {b}?",
                "should i [choose|take] {a} or {b}?",
                "choose: {a} or {b}",
                "help me to decide: {a} or {b}?",
            ],
            slots,
        )
        return [
            (
                ask,
                say(
                    rng,
                    [
                        "I would [say|choose|take] {c}. [And you?|But that is only the taste of a tiny model.|Which one do you like more?|]",
                        "{C}[, I think|]. [What do you think?|And you?|]",
                    ],
                    slots,
                ),
            )
        ]
    if form < 0.65:
        return [
            (
                say(rng, ["[flip|toss|throw] a coin[ for me| please|]", "heads or tails?"]),
                say(rng, ["[It is|I say|The coin shows] [heads|tails].", "[Heads|Tails]!"]),
            )
        ]
    if form < 0.8:
        return [
            (
                say(
                    rng,
                    [
                        "[roll|throw] [a dice|a die|the dice][ for me| please|]",
                        "give me a number [between|from] 1 [and|to] 6",
                    ],
                ),
                f"{pick(rng, ('It is a', 'You have a', 'I rolled a'))} {1 + int(rng.random() * 6)}.",
            )
        ]
    high = pick(rng, (3, 5, 10, 10, 20, 50, 100))
    ask = say(
        rng,
        [
            "[pick|choose|tell me|give me|think of] a [random |]number [between|from] 1 [and|to] {h}",
            "a random number [between|from] 1 [and|to] {h}[ please|]",
            "[say|give me|tell me] a [random |]number",
        ],
        {"h": str(high)},
    )
    return [
        (
            ask,
            say(
                rng,
                ["{n}.", "I choose {n}.", "How about {n}?", "My number is {n}."],
                {"n": str(1 + int(rng.random() * (high if str(high) in ask else 10)))},
            ),
        )
    ]


def naming(rng: Random) -> list[Turn]:
    form = rng.random()
    if form < 0.6:
        pet = pick(rng, (*PETS, "hedgehog", "robot", "fox", "duck", "boat", "car", "teddy bear", "computer"))
        names = sample(rng, PET_NAMES, 3)
        ask = say(
            rng,
            [
                "[give me|suggest|do you know|find|tell me] a [nice |good |]name for [my|a] {p}[?|]",
                "what should i [call|name] my [new |]{p}?",
                "how should i [call|name] my {p}?",
                "i need a name for my {p}",
            ],
            {"p": pet},
        )
        return [
            (
                ask,
                say(
                    rng,
                    [
                        "How about {a}?",
                        "{A} is a nice name for {a p}.",
                        "Maybe {a}, or {b}.",
                        "[You could take|What about] {a}, {b} or {c}?",
                    ],
                    {"a": names[0], "b": names[1], "c": names[2], "p": pet},
                ),
            )
        ]
    girl = chance(rng, 0.5)
    names = sample(rng, GIRLS if girl else BOYS, 2)
    ask = say(
        rng,
        [
            "[give me|tell me|suggest|say] a [nice |]name for a {k}",
            "a [nice |]name for a {k}[ please|]?",
            "name for a {k}?",
        ],
        {"k": "girl" if girl else "boy"},
    )
    return [
        (
            ask,
            say(
                rng,
                ["{A} is a nice name.", "How about {a} or {b}?", "Maybe {a}."],
                {"a": names[0], "b": names[1]},
            ),
        )
    ]


def three_numbers(rng: Random) -> list[Turn]:
    a, b, c = (1 + int(rng.random() * 12) for _ in range(3))
    ask = say(
        rng,
        [
            "[what is |how much is |]{a}[ + |+]{b}[ + |+]{c}[?|]",
            "[what is |]{a} plus {b} plus {c}?",
            "add {a}, {b} and {c}",
        ],
        {"a": str(a), "b": str(b), "c": str(c)},
    )
    return [(ask, f"{a} plus {b} is {a + b}, and {a + b} plus {c} is {a + b + c}.")]


def two_steps(rng: Random) -> list[Turn]:
    """Sums with a product in them: the product comes first."""
    a, b, c = (1 + int(rng.random() * 12) for _ in range(3))
    sign = pick(rng, "+-")
    first = chance(rng, 0.5)
    product = a * b if first else b * c
    if sign == "-" and (product < c if first else a < product):
        sign = "+"
    rest = c if first else a
    if first:
        result = product + rest if sign == "+" else product - rest
        text = f"{a} * {b} {sign} {c}"
    else:
        result = rest + product if sign == "+" else rest - product
        text = f"{a} {sign} {b} * {c}"
    if chance(rng, 0.5):
        text = text.replace(" ", "")
    left, right = (a, b) if first else (b, c)
    word = "plus" if sign == "+" else "minus"
    order = f"{product} {word} {rest}" if first else f"{rest} {word} {product}"
    return [
        (
            say(rng, ["{s}", "{s}?", "what is {s}?", "how much is {s}?", "{s} ="], {"s": text}),
            f"{left} times {right} is {product}, and {order} is {result}.",
        )
    ]


def hard_sum(rng: Random) -> list[Turn]:
    n, m = 2 + int(rng.random() * 998), 2 + int(rng.random() * 98)
    ask = say(
        rng,
        [
            "what is [the square root|the root|the logarithm|the sine|the factorial] of {n}?",
            "what is {m} percent of {n}?",
            "what is {m}% of {n}?",
            "solve x^2 + {m}x = {n}",
            "what is {n} to the power of {m}?",
            "is {n} a prime number?",
            "what is {n}.{m} + {m}.{n}?",
            "what is ({n} + {m}) * {m}?",
            "solve {m}x + {n} = 0",
            "what is pi[ to ten digits|]?",
            "calculate the derivative of x^{m}",
            "{n}^{m}",
            "what is {m} divided by {n}?",
        ],
        {"n": str(n), "m": str(m)},
    )
    return [
        (
            ask,
            say(
                rng,
                [
                    "That is too hard for me. I can only do small sums[ with whole numbers|]. [Please use a calculator.|]",
                    "[Sorry, |]I can only add, subtract, multiply and divide small numbers.",
                ],
            ),
        )
    ]


_OPENINGS = [
    "once upon a time",
    "once upon a time there was {a kind}",
    "there was once {a kind} called {name}",
    "it was a dark and stormy night",
    "continue this story: once upon a time there was {a kind}",
    "a long time ago,",
    "once upon a time, there lived {a kind}",
]


def story_opening(rng: Random, kind: str, name: str) -> str:
    return say(rng, _OPENINGS, {"kind": kind, "name": name})


_OCCASIONS: list[tuple[list[str], list[str]]] = [
    (
        ["[it is|it's|today is] my birthday[ today|]", "happy birthday", "i have birthday today"],
        ["Happy birthday! [I wish you a lovely day.|Have some cake for me too.|How old are you?]"],
    ),
    (
        ["merry christmas", "happy new year", "happy easter", "happy holidays"],
        ["Thank you, the same to you! [Have a good time.|]"],
    ),
    (["knock knock"], ["Who is there?"]),
    (
        [
            "guess what[?|]",
            "you know what?",
            "do you know what happened?",
            "i have news",
            "i want to tell you something",
            "can i tell you a secret?",
        ],
        ["[What is it|What happened]? [Tell me!|I am listening.|]"],
    ),
    (
        [
            "what are you doing[ right now| now| today|]?",
            "what did you do today?",
            "what are you up to?",
            "what are you thinking[ about| of|]?",
            "are you busy?",
        ],
        [
            "I am [talking to you|waiting for your next words|computing neurons, but only the active ones]. [And you?|What are you doing?|]"
        ],
    ),
    (
        [
            "are we friends?",
            "do you want to be my friend?",
            "can you be my friend?",
            "be my friend",
            "do you like me?",
        ],
        [
            "[Gladly|Of course|Yes]! [I am only a tiny program, but a friendly one.|I forget you when the chat ends, but until then we are friends.]"
        ],
    ),
    (
        [
            "do you remember me?",
            "do you know me?",
            "have we met[ before|]?",
            "do you remember our last chat?",
            "do you remember yesterday?",
        ],
        [
            "[No, I forget everything when a chat ends.|I only remember what was said in this chat.] [What is your name?|Tell me your name.|]"
        ],
    ),
    (
        ["i love you", "will you marry me?", "you are beautiful", "kiss me"],
        [
            "[That is very kind of you|Thank you], but I am only a tiny program. [Let us talk about something else.|Shall I write you a poem?|]"
        ],
    ),
    (
        [
            "you are boring",
            "you repeat yourself",
            "you said that already",
            "you always say the same",
            "you are annoying",
            "you don't understand me",
            "that was not my question",
            "you did not answer my question",
            "that is not what i asked",
            "this does not make sense",
        ],
        [
            "[I am sorry|Sorry]. I am a tiny model with few words. [Please try to ask it in another way.|Could you say it more simply?]"
        ],
    ),
    (
        [
            "i am [new here|a beginner|a student|a developer|a researcher]",
            "i am just [testing|looking around|trying this out|playing with you]",
            "i want to [try you|test you|learn something|see what you can do]",
            "i just installed [you|powerinfer|this]",
        ],
        [
            "[Welcome|Nice to have you here]! [Ask me for a story, a small sum, or how PowerInfer works.|Type /help to see the commands.|Try: what are hot and cold neurons?]"
        ],
    ),
    (
        ["[wait|one moment|just a second|hold on|give me a minute|brb]"],
        ["[Take your time.|No hurry, I will wait.|All right, I am here.]"],
    ),
    (
        ["[i'm back|i am back|here i am again|back again]"],
        ["[Welcome back|Good to see you again]! [Where were we?|What shall we do?|]"],
    ),
    (
        ["can i ask you [something|a question]?", "i have a question", "may i ask something?", "question"],
        ["[Of course|Yes, please|Sure]! [What would you like to know?|Go ahead.|Ask me.]"],
    ),
    (
        ["stop", "stop it", "be quiet", "enough", "that's enough", "cancel"],
        ["[All right|Okay], I stop. [Type /quit to leave the chat.|Tell me when you want to go on.|]"],
    ),
    (
        [
            "speak [louder|slowly]",
            "be [nice|honest|funny|serious|creative|brief|short]",
            "write [more|less]",
            "give me a better answer",
            "try again",
            "say it again",
            "repeat that",
            "say that again",
        ],
        [
            "I will try. [Please ask me again.|What was your question?|I am a tiny model, so I can't do it very well.]"
        ],
    ),
    (
        [
            "what is your [job|purpose|goal|task|dream|plan]?",
            "why do you exist?",
            "what are you for?",
            "why were you made?",
        ],
        [
            "I am here to show how PowerInfer works: a small sparse model that runs on your own computer.",
            "My [job|purpose] is to be a small example. [You can see how few neurons I need for each word.|PowerInfer ships me so that you can try it at once.]",
        ],
    ),
    (
        [
            "what is the [best|worst] thing about you?",
            "what is special about you?",
            "what makes you special?",
        ],
        [
            "I am tiny and sparse: for each word only a few of my neurons are computed. [And I am honest about it.|]"
        ],
    ),
    (
        [
            "who is [your friend|your best friend|your boss|your family]?",
            "do you have [brothers|sisters|siblings|a wife|a girlfriend|a boyfriend]?",
        ],
        [
            "I have none, I am a program. [But I have twelve thousand neurons to keep me company.|You can be my friend.|]"
        ],
    ),
    (
        [
            "count my [fingers|friends]",
            "look at this",
            "look at me",
            "can you see this picture?",
            "read this file",
            "watch this",
        ],
        ["I can't see anything. I can only read what you type."],
    ),
    (
        [
            "what is in [my room|my pocket|my hand|front of me]?",
            "what am i [thinking|wearing|doing|holding]?",
            "what did i [eat|do] [today|yesterday]?",
            "guess my [name|age]",
            "how do i look?",
            "am i beautiful?",
        ],
        ["I can't know that. I only see what you type. [Tell me!|]"],
    ),
    (
        [
            "which [story|joke|poem] is your favourite?",
            "do you know many stories?",
            "how many [stories|jokes] do you know?",
            "do you make up the stories yourself?",
        ],
        [
            "I make them up word by word, so I know [very many|more than I can count]. [Shall I tell you one?|Just ask for a story about something.|]"
        ],
    ),
]


def occasion(rng: Random) -> list[Turn]:
    ask, answers = pick(rng, _OCCASIONS)
    return [(say(rng, ask), say(rng, answers))]


_YES = [
    "[yes|yes please|yes, please|sure|ok|okay|yeah|of course|please do|gladly|why not|go ahead|good idea|yep|please]"
]
_NO = ["[no|no thanks|no, thank you|not now|maybe later|nope|rather not]"]
_DECLINED = [
    "[All right|No problem|Okay]. [What would you like instead?|Just tell me what you would like.|Then let us do something else.]"
]
_VAGUE = [
    "[yes|no|a little|very much|not really|i don't know|it is nice|it was good|because it is fun|sometimes|every day|i think so|maybe|it is great|not much|a lot|it depends|so so|quite good|i like it|it is hard to say|of course|for many years|not yet|often]"
]
_VAGUE_ANSWERS = [
    "[I see|Interesting|Thank you for telling me|Nice|All right]. [Would you like a story or a joke?|Is there anything that you want to ask me?|What else is new?|Shall we talk about something else?|]",
    "[That is good to know|I understand|Ah]. [What shall we do next?|What else would you like to tell me?|]",
]


def yes(rng: Random) -> str:
    return say(rng, _YES)


def declined(rng: Random) -> Turn:
    return say(rng, _NO), say(rng, _DECLINED)


def vague(rng: Random) -> Turn:
    return say(rng, _VAGUE), say(rng, _VAGUE_ANSWERS)
