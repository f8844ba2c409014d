"""Small sums, counting and comparing: questions with their answers."""

from __future__ import annotations

from random import Random

from .grammar import chance, pick, say
from .words import person_name

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_GOODS = "apples pears cookies books coins marbles eggs cards pencils sheep cats dogs balls stamps nuts sweets".split()


def spelled(number: int) -> str:
    """0 to 100 in words."""
    if number < 20:
        return _ONES[number]
    if number == 100:
        return "one hundred"
    return _TENS[number // 10 - 2] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def _below(rng: Random, limit: int) -> int:
    return int(rng.random() * limit)


def operation(rng: Random) -> tuple[int, str, int, int]:
    """Two numbers, the sign between them and the result."""
    kind = rng.random()
    if kind < 0.07:
        a = pick(rng, (10, 50, 100)) * (1 + _below(rng, 10))
        b = pick(rng, (1, 5, 10, 50, 100)) * (1 + _below(rng, 9))
        return (a, "+", b, a + b) if chance(rng, 0.6) or b > a else (a, "-", b, a - b)
    if kind < 0.45:
        limit = 11 if chance(rng, 0.5) else 51 if chance(rng, 0.6) else 100
        a, b = _below(rng, limit), _below(rng, limit)
        return a, "+", b, a + b
    if kind < 0.72:
        a = _below(rng, 21 if chance(rng, 0.6) else 100)
        b = _below(rng, a + 1) if chance(rng, 0.93) else _below(rng, 20)
        return a, "-", b, a - b
    if kind < 0.92:
        a, b = _below(rng, 13), _below(rng, 13)
        return a, "*", b, a * b
    b, result = 1 + _below(rng, 12), _below(rng, 13)
    return b * result, "/", b, result


_SIGNS = {
    "+": (["{a}+{b}", "{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}"], "plus", "+"),
    "-": (["{a}-{b}", "{a} - {b}", "{a} minus {b}", "{b} less than {a}"], "minus", "-"),
    "*": (
        [
            "{a}*{b}",
            "{a} * {b}",
            "{a} times {b}",
            "{a} x {b}",
            "{a} multiplied by {b}",
            "the product of {a} and {b}",
        ],
        "times",
        "*",
    ),
    "/": (["{a}/{b}", "{a} / {b}", "{a} divided by {b}", "{a} : {b}"], "divided by", "/"),
}
_ASK = [
    "[what is|what's|how much is|calculate|compute|tell me|can you calculate|do you know|please calculate|whats|what does {sum} make? I mean] {sum}?",
    "{sum}",
    "{sum}?",
    "{sum} =",
    "{sum}=?",
    "[and |]what is {sum}?",
    "[can you tell me|i want to know|do you know] [what {sum} is|how much {sum} is]?",
    "what do you get for {sum}?",
    "solve {sum}",
    "hey, {sum}?",
]
_ASK[0] = _ASK[0].replace("|what does {sum} make? I mean", "")
_ANSWER = [
    "{a} {word} {b} is {result}.",
    "{a} {word} {b} is {result}.",
    "{a} {sign} {b} = {result}",
    "[That is|It is] {result}.",
]


def _say_sum(rng: Random, a: int, op: str, b: int) -> str:
    words = chance(rng, 0.2) and a <= 100 and b <= 100
    wording, word, _ = _SIGNS[op]
    slots = {"a": spelled(a) if words else str(a), "b": spelled(b) if words else str(b)}
    return say(rng, [f"{{a}} {word} {{b}}"] if words else wording, slots)


def arithmetic(rng: Random) -> list[tuple[str, str]]:
    """A sum, and sometimes one that goes on with the result."""
    a, op, b, result = operation(rng)
    _, word, sign = _SIGNS[op]
    slots = {"a": str(a), "b": str(b), "word": word, "sign": sign, "result": str(result)}
    turns = [(say(rng, _ASK, {"sum": _say_sum(rng, a, op, b)}), say(rng, _ANSWER, slots))]
    while chance(rng, 0.25) and 0 <= result <= 60 and len(turns) < 4:
        more, c = pick(rng, "+-*"), 1 + _below(rng, 10)
        if more == "*" and (result > 12 or c > 12):
            more = "+"
        before, result = result, result + c if more == "+" else result - c if more == "-" else result * c
        word = _SIGNS[more][1]
        ask = say(
            rng,
            [
                "and {word} {c}?",
                "[plus|and plus] {c}?" if more == "+" else "[and |]{word} {c}",
                "now {word} {c}",
                "{sign} {c}",
                "[and |]what is that {word} {c}?",
            ],
            {"word": word, "c": str(c), "sign": more},
        )
        turns.append((ask, f"{before} {word} {c} is {result}."))
    if chance(rng, 0.06):
        turns.append(
            (
                say(
                    rng,
                    [
                        "are you sure[ about that|]?",
                        "really?",
                        "is that right?",
                        "is that correct?",
                        "check it again[ please|]",
                    ],
                ),
                say(
                    rng,
                    [
                        "I think so: the result is {r}.",
                        "Yes, I get {r} again. [But I am a tiny model, so please check.|]",
                        "I get {r}. [For large numbers I am not safe.|]",
                    ],
                    {"r": str(result)},
                ),
            )
        )
    return turns


def too_large(rng: Random) -> list[tuple[str, str]]:
    """Sums that the model should not pretend to know."""
    a, b = 1011 + _below(rng, 99999), 1001 + _below(rng, 9999)
    op = pick(rng, "**/+-")
    if op == "*" and chance(rng, 0.7):
        a, b = 13 + _below(rng, 900), 13 + _below(rng, 900)
    ask = say(rng, _ASK, {"sum": say(rng, _SIGNS[op][0][:3], {"a": str(a), "b": str(b)})})
    return [
        (
            ask,
            say(
                rng,
                [
                    "[These numbers are|That is] too [large|big] for me. I can only do small sums.",
                    "I can only do small sums, up to about one hundred. [Please use a calculator for that.|]",
                ],
            ),
        )
    ]


def word_problem(rng: Random) -> list[tuple[str, str]]:
    a, b = 2 + _below(rng, 15), 1 + _below(rng, 12)
    goods, name, giver = pick(rng, _GOODS), person_name(rng), person_name(rng)
    he = pick(rng, ("he", "she"))
    slots = {
        "a": str(a),
        "b": str(b),
        "goods": goods,
        "name": name,
        "giver": giver,
        "he": he,
        "low": str(min(a, b)),
        "high": str(max(a, b)),
    }
    if chance(rng, 0.5):
        slots["r"] = str(a + b)
        ask = say(
            rng,
            [
                "i have {a} {goods} and [buy|get|find] {b} more. how many [{goods} |]do i have[ now|]?",
                "{name} has {a} {goods} and gets {b} more from {giver}. how many does {he} have[ now|]?",
                "if i have {a} {goods} and you give me {b}, how many [do i have|are there]?",
                "there are {a} {goods} on the table. {name} puts {b} more there. how many are there?",
                "how many are {a} {goods} and {b} {goods}?",
            ],
            slots,
        )
        return [
            (
                ask,
                say(
                    rng,
                    [
                        "{a} plus {b} is {r}, so [it is|there are] {r} {goods}.",
                        "{r} {goods}, because {a} plus {b} is {r}.",
                    ],
                    slots,
                ),
            )
        ]
    slots["r"] = str(max(a, b) - min(a, b))
    ask = say(
        rng,
        [
            "i have {high} {goods} and [eat|lose|give away|sell] {low}. how many [are left|do i have left|do i still have]?",
            "{name} has {high} {goods} and gives {low} to {giver}. how many does {he} have left?",
            "if i have {high} {goods} and [lose|give you|sell] {low}, how many are left?",
            "there were {high} {goods}. {low} are gone. how many are left?",
        ],
        slots,
    )
    return [
        (
            ask,
            say(
                rng,
                [
                    "{high} minus {low} is {r}, so {r} {goods} are left.",
                    "{r} {goods}, because {high} minus {low} is {r}.",
                ],
                slots,
            ),
        )
    ]


def counting(rng: Random) -> list[tuple[str, str]]:
    kind = rng.random()
    if kind < 0.3:
        end = 3 + _below(rng, 18)
        start = 1 if chance(rng, 0.6) else 1 + _below(rng, end - 1)
        ask = say(
            rng,
            ["[please |can you |]count [up |]to {end}", "count from {start} to {end}"][
                0 if start == 1 and chance(rng, 0.7) else 1 :
            ][:1],
            {"start": str(start), "end": str(end)},
        )
        return [(ask, ", ".join(str(n) for n in range(start, end + 1)) + pick(rng, (".", "!")))]
    if kind < 0.4:
        start = 3 + _below(rng, 10)
        ask = say(
            rng,
            [
                "count [down|backwards] from {start}[ to 1| to one|]",
                "[can you do |do |]a countdown from {start}",
            ],
            {"start": str(start)},
        )
        return [(ask, ", ".join(str(n) for n in range(start, 0, -1)) + ".")]
    number = _below(rng, 100)
    slots = {
        "n": str(number),
        "next": str(number + 1),
        "last": str(max(number - 1, 0)),
        "double": str(2 * number),
        "half": str(number // 2),
        "even": "even" if number % 2 == 0 else "odd",
        "odd": "odd" if number % 2 == 0 else "even",
        "word": spelled(number),
    }
    if kind < 0.55:
        return [
            (
                say(
                    rng,
                    [
                        "what [number |]comes after {n}?",
                        "which number is next after {n}?",
                        "what is the next number after {n}?",
                    ],
                    slots,
                ),
                say(rng, ["After {n} comes {next}.", "{next} comes after {n}."], slots),
            )
        ]
    if kind < 0.63 and number:
        return [
            (
                say(rng, ["what [number |]comes before {n}?", "which number is before {n}?"], slots),
                say(rng, ["Before {n} comes {last}.", "{last} comes before {n}."], slots),
            )
        ]
    if kind < 0.75:
        right = chance(rng, 0.5)
        slots["asked"] = slots["even"] if right else slots["odd"]
        return [
            (
                say(rng, ["is {n} [an |]{asked}[ number|]?", "is {n} even or odd?"], slots),
                f"{number} is {slots['even']}.",
            )
        ]
    if kind < 0.83 and number <= 50:
        return [
            (
                say(rng, ["what is [the double of|double|twice] {n}?", "double {n}"], slots),
                say(rng, ["The double of {n} is {double}.", "Twice {n} is {double}."], slots),
            )
        ]
    if kind < 0.88 and number % 2 == 0:
        return [
            (
                say(rng, ["what is half of {n}?", "what is the half of {n}?", "half of {n}?"], slots),
                "Half of {n} is {half}.".format(**slots),
            )
        ]
    if kind < 0.93:
        return [
            (
                say(
                    rng,
                    ["write {n} in words", "how do you write {n} in words?", "spell the number {n}"],
                    slots,
                ),
                f"{number} is {spelled(number)} in words.",
            )
        ]
    other = _below(rng, 100)
    while other == number:
        other = _below(rng, 100)
    big = chance(rng, 0.5)
    ask = say(
        rng,
        ["which [number |]is [larger|bigger|greater], {a} or {b}?", "what is more, {a} or {b}?"]
        if big
        else ["which [number |]is smaller, {a} or {b}?", "what is less, {a} or {b}?"],
        {"a": str(number), "b": str(other)},
    )
    low, high = sorted((number, other))
    return [(ask, f"{high} is larger than {low}." if big else f"{low} is smaller than {high}.")]
