"""The text on which a demo model is trained: conversations and stories, drawn from templates.

    python scripts/demo_text.py [COUNT [SEED]]      prints samples

The templates lie in `demo_templates`: `words.txt` holds lists and tables of words, `talks.txt` exchanges in
groups with their weights. What a line may say:

    [this|that|]    one of these; they nest
    {food}          an item of the list `food`; {Food} with a capital, {a food} with its article
    {animal.young}  of a row of the table `animal` the cell `young`; {animal2.young}: of another row
    {a+b}           a sum; a > b > c are small numbers
    {nonsense}      a word that no dictionary has

A slot keeps its value through an exchange. An exchange is a few lines:

    = a system message               > what the user says, in several wordings
    :name = a slot of its own        < what the model answers, in several wordings
    ...  others may come between     ? as `>`, of a turn that may as well be left out
    & group  one exchange of that group may follow
"""

from __future__ import annotations

import re
import sys
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent / "demo_templates"
Message = tuple[str, str]
"""Role (system, user, assistant or plain) and text."""
HELD_OUT_SHARE = 20
SHORT = 28
"""A question of fewer characters, a greeting say, has too few wordings: it belongs to both parts."""
_SLOT = re.compile(r"\{(?:(a|A|spell|count) )?([^{}]+)\}")
_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_BLANKS = re.compile("  +")
_SUM = re.compile(r"[abc0-9]+(?:[-+*][abc0-9]+)*")


@dataclass
class Turn:
    ask: list[str]
    answers: list[str] = field(default_factory=list)
    optional: bool = False


@dataclass
class Exchange:
    system: str = ""
    own: dict[str, str] = field(default_factory=dict)
    parts: list[list[Turn]] = field(default_factory=lambda: [[]])
    follow: str = ""


@dataclass
class Group:
    weight: float
    exchanges: list[Exchange]


@cache
def words() -> dict[str, list[dict[str, str]]]:
    """The rows of every list and table; a list's only column has no name."""
    tables: dict[str, list[dict[str, str]]] = {}
    columns: list[str] = []
    for line in (FOLDER / "words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            name, *columns = line[3:].split()
            rows = tables[name] = []
        elif columns:
            rows.append(dict(zip(columns, line.split("; "), strict=True)))
        else:
            rows += [{"": item} for item in line.split("; ") if item]
    return tables


@cache
def talks() -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for block in (FOLDER / "talks.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("== "):
            _, name, weight = lines.pop(0).split()
            group = groups[name] = Group(float(weight), [])
        if lines:
            group.exchanges.append(_exchange(lines))
    return groups


def _exchange(lines: list[str]) -> Exchange:
    exchange = Exchange()
    for line in lines:
        mark, text = line[0], line[1:].strip().replace("\\n", "\n")
        turns = exchange.parts[-1]
        if mark in ">?":
            if not turns or turns[-1].answers:
                turns.append(Turn([], optional=mark == "?"))
            turns[-1].ask.append(text)
        elif mark == "<":
            turns[-1].answers.append(text)
        elif mark == ":":
            name, _, template = text.partition(" = ")
            exchange.own[name] = template
        elif line == "...":
            exchange.parts.append([])
        elif mark == "=":
            exchange.system = text
        elif mark == "&":
            exchange.follow = text
        else:
            raise ValueError(f"unknown line in talks.txt: {line!r}")
    return exchange


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    sounds_closed = noun.startswith(("uni", "use", "eu", "one"))
    return f"an {noun}" if noun[:1].lower() in "aeiou" and not sounds_closed else f"a {noun}"


def nonsense(rng: Random) -> str:
    starts, middles, ends = (
        "b ch d f gl h k m pl r s st t v z",
        "a e i o u ai oo",
        "n r l m s t k nd lin ber vik",
    )
    syllables = (
        rng.choice(starts.split()) + rng.choice(middles.split()) for _ in range(rng.choice((1, 2, 2)))
    )
    return "".join(syllables) + rng.choice(ends.split())


class Drawn:
    """What an exchange's slots are."""

    def __init__(self, rng: Random, own: dict[str, str]) -> None:
        self.rng, self.own = rng, own
        self.values: dict[str, str] = {}
        self.rows: dict[str, dict[str, str]] = {}
        limit = rng.choice((5, 12, 12, 20, 100))
        self.numbers = dict(zip("cba", sorted(rng.sample(range(1, limit + 3), 3)), strict=True))

    def _row(self, name: str) -> dict[str, str]:
        if name not in self.rows:
            table = name.rstrip("0123456789")
            taken = [row for key, row in self.rows.items() if key.rstrip("0123456789") == table]
            rows = words()[table]
            while (row := self.rng.choice(rows)) in taken:
                pass
            self.rows[name] = row
        return self.rows[name]

    def slot(self, name: str) -> str:
        if name not in self.values:
            if name.rstrip("0123456789") == "nonsense":
                value = nonsense(self.rng)
            elif _SUM.fullmatch(name):
                value = str(eval(name, {"__builtins__": {}}, self.numbers))
            elif name in self.own:
                value = self.expand(self.own[name])
            else:
                table, _, column = name.partition(".")
                value = self.expand(self._row(table)[column])
            self.values[name] = value
        return self.values[name]

    def _slot(self, match: re.Match[str]) -> str:
        form, name = match.groups()
        value = self.slot(name[:1].lower() + name[1:])
        if form == "spell":
            return " - ".join(value.upper())
        if form == "count":
            return ", ".join(str(i) for i in range(1, int(value) + 1))
        if form:
            value = article(value)
        return capital(value) if form == "A" or name[0].isupper() else value

    def expand(self, template: str) -> str:
        """One text of the template."""
        while (text := _INNERMOST.sub(self._choose, template)) != template:
            template = text
        return _SLOT.sub(self._slot, template)

    def _choose(self, match: re.Match[str]) -> str:
        return str(self.rng.choice(match[1].split("|")))

    def turn(self, turn: Turn) -> list[Message]:
        said = ("user", turn.ask), ("assistant", turn.answers)
        return [
            (role, _BLANKS.sub(" ", self.expand(self.rng.choice(wordings)).strip(" ")))
            for role, wordings in said
        ]


def typed(rng: Random, text: str) -> str:
    """The user's words the way people type them."""
    if rng.random() < 0.1:  # a slip of the keyboard
        i = rng.randrange(len(text))
        text = text[:i] + text[i + 1 : i + 2] + text[i] + text[i + 2 :]
    text = rng.choice((capital, capital, capital, str, str.lower))(text)
    return text.rstrip("?") or text if rng.random() < 0.2 else text


Parts = list[list[Message]]


def exchange(rng: Random, group: str) -> tuple[str, Parts]:
    """A system message, or "", and the messages of an exchange in parts that may lie apart."""
    chosen = rng.choice(talks()[group].exchanges)
    drawn = Drawn(rng, chosen.own)
    parts = [
        [message for turn in part if not turn.optional or rng.random() < 0.35 for message in drawn.turn(turn)]
        for part in chosen.parts
    ]
    if chosen.follow and rng.random() < 0.4:
        turns = [turn for other in talks()[chosen.follow].exchanges for turn in other.parts[0]]
        for turn in rng.sample(turns, rng.choice((1, 1, 2))):
            parts[-1] += drawn.turn(turn)
    return drawn.expand(chosen.system), parts


def is_held_out(rng: Random, parts: Parts) -> bool:
    """By the first question and its answer."""
    said = "|".join(text for _, text in parts[0][:2])
    short = len(parts[0][0][1]) < SHORT
    return (rng.randrange(1 << 32) if short else zlib.crc32(said.encode())) % HELD_OUT_SHARE == 0


def _of_part(rng: Random, group: str, *, held_out: bool) -> tuple[str, Parts]:
    while True:
        system, parts = exchange(rng, group)
        if is_held_out(rng, parts) == held_out:
            return system, parts


def conversation(rng: Random, *, held_out: bool) -> list[Message]:
    named = [(name, group.weight) for name, group in talks().items() if group.weight]
    pending: Parts = []
    messages: list[Message] = []
    if rng.random() < 0.28:
        system, pending = _of_part(rng, "system", held_out=held_out)
        messages.append(("system", system))
    for i in range(rng.choice((1, 2, 3, 4, 5, 8, 12))):
        group = rng.choices([name for name, _ in named], [weight for _, weight in named])[0]
        if i == 0 and rng.random() < 0.3:
            group = "opening"
        _, (now, *later) = _of_part(rng, group, held_out=held_out)
        messages += now
        if pending and rng.random() < 0.5:
            messages += pending.pop(0)
        pending = [*later, *pending] if rng.random() < 0.5 else [*pending, *later]
    messages += [message for part in pending for message in part]
    return [(role, typed(rng, text) if role == "user" else text) for role, text in messages]


def document(rng: Random, *, held_out: bool) -> list[Message]:
    """One training document: a conversation, or now and then a story alone."""
    if rng.random() < 0.05:
        return [("plain", _of_part(rng, "stories", held_out=held_out)[1][0][1][1])]
    return conversation(rng, held_out=held_out)


def main(count: int = 5, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(count):
        for role, text in document(rng, held_out=False):
            print(f"{role:>9}: {text}")
        print()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
