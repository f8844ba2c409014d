"""What a conversation is made of: turns, exchanges with their held-out key, and what was said before."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from .grammar import pick

Item = TypeVar("Item")
HELD_OUT_SHARE = 20
Turn = tuple[str, str]
Message = tuple[str, str]


@dataclass
class Memory:
    """What was said so far in the conversation."""

    facts: dict[str, str] = field(default_factory=dict)
    own_name: str = ""
    used: set[str] = field(default_factory=set)
    """Plots, names, jokes and riddles that came up already: the model should not repeat itself."""

    def copy(self) -> Memory:
        return Memory(dict(self.facts), self.own_name, set(self.used))


@dataclass
class Exchange:
    """Some turns that belong together; `key` decides whether they are held out, and "" belongs to both parts."""

    turns: list[Turn]
    key: str = ""
    keep: tuple[str, ...] = ()
    """Words of the user that a slip of the keyboard must not touch."""


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def wording_key(turns: list[Turn]) -> str:
    text = " ".join(user for user, _ in turns).lower()
    return text if len(text) > 28 else ""


def following(rng: Random, items: Sequence[Item], memory: Memory) -> Item:
    """The item after the last one that came up, or any when none did; it is remembered.

    The fixed order lets a small model know what comes next, without a repetition.
    """
    start = next((i for i, item in enumerate(items) if str(item) in memory.used), None)
    if start is None:
        item = pick(rng, items)
    else:
        rest = (items[(start + i) % len(items)] for i in range(len(items)))
        item = next((item for item in rest if str(item) not in memory.used), items[start])
    memory.used.add(str(item))
    return item


Skill = Callable[[Random, Memory], Exchange]
