"""A small text grammar: `[one|another|]` picks an alternative, `{slot}` inserts a word.

Alternatives nest. `{slot}` inserts the slot's text, `{Slot}` the same with a capital, `{a slot}` and `{A slot}` put the
fitting article in front. `<<` and `>>` stand for square brackets in the text. Templates are parsed once and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import TypeVar

Item = TypeVar("Item")
Node = str | tuple[str, str] | list["tuple[Node, ...]"]


def pick(rng: Random, items: Sequence[Item]) -> Item:
    return items[int(rng.random() * len(items))]


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def sample(rng: Random, items: Sequence[Item], count: int) -> list[Item]:
    return rng.sample(list(items), count)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """The noun with `a` or `an`."""
    sounds_like_you = noun.startswith(("uni", "use", "eu", "one"))
    starts_open = noun[:1].lower() in "aeiou" and not sounds_like_you
    return f"an {noun}" if starts_open or noun.startswith("honest") else f"a {noun}"


def listing(items: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


@cache
def _parse(template: str) -> tuple[Node, ...]:
    stack: list[list[tuple[Node, ...]]] = []
    current: list[Node] = []
    start = 0

    def text_until(end: int) -> None:
        text = template[start:end]
        while "{" in text:
            before, _, rest = text.partition("{")
            slot, _, text = rest.partition("}")
            if before:
                current.append(before)
            form, _, name = slot.rpartition(" ")
            current.append((form, name))
        if text:
            current.append(text)

    outer: list[list[Node]] = []
    for i, char in enumerate(template):
        if char not in "[|]":
            continue
        if char == "|" and not stack:
            raise ValueError(f"a bar outside brackets in {template!r}")
        text_until(i)
        start = i + 1
        if char == "[":
            outer.append(current)
            stack.append([])
            current = []
        elif char == "|":
            stack[-1].append(tuple(current))
            current = []
        else:
            stack[-1].append(tuple(current))
            choice: Node = stack.pop()
            current = outer.pop()
            current.append(choice)
    if stack:
        raise ValueError(f"a bracket is not closed in {template!r}")
    text_until(len(template))
    return tuple(current)


def _render(rng: Random, nodes: Sequence[Node], slots: Mapping[str, str], out: list[str]) -> None:
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif isinstance(node, list):
            _render(rng, node[int(rng.random() * len(node))], slots, out)
        else:
            form, name = node
            value = slots[name] if name in slots else capital(slots[name.lower()])
            if form:
                value = article(value)
                if form == "A":
                    value = capital(value)
            out.append(value)


def expand(rng: Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """One text of the template."""
    out: list[str] = []
    _render(rng, _parse(template), slots or {}, out)
    text = "".join(out).strip(" ")
    return text.replace("<<", "[").replace(">>", "]") if "<<" in text else text


def say(rng: Random, templates: Sequence[str], slots: Mapping[str, str] | None = None) -> str:
    """One text of one of the templates."""
    return expand(rng, pick(rng, templates), slots)
