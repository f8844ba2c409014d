"""What an answer has beside text and whole tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """A part of an answer that is not for the reader: `reasoning_content`."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """More of the arguments of the call that was told last."""

    text: str


def held_back(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
