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
