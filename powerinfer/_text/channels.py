"""Answers in the "harmony" format of gpt-oss: messages in channels, of which one is for the reader.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>the answer
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..types import ToolCall

if TYPE_CHECKING:
    from .tool_calls import ToolCallParser

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = (_CHANNEL, "<|start|>", "<|end|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))


def has_channels(template: str) -> bool:
    """Whether a chat template is of this format."""
    return _CHANNEL in template


class ChannelParser:
    """What is said in the channel "final", while it comes; text outside of channels, too, such as a grammar
    demands. `calls` then looks for calls in it."""

    def __init__(self, calls: ToolCallParser | None = None) -> None:
        self._calls = calls
        self._text = ""
        self._in_head = False
        self._is_shown = True

    def push(self, text: str) -> list[str | ToolCall]:
        """Adds text; what is certain by now."""
        self._text += text
        return self._told("".join(self._certain()))

    def finish(self) -> list[str | ToolCall]:
        """The answer is over: what was held back."""
        rest = self._text if self._is_shown and not self._in_head else ""
        told = self._told(rest)
        return told if self._calls is None else told + self._calls.finish()

    def _told(self, text: str) -> list[str | ToolCall]:
        if not text:
            return []
        return [text] if self._calls is None else self._calls.push(text)

    def _certain(self) -> Iterator[str]:
        while True:
            if self._in_head:
                head, mark, rest = self._text.partition(_MESSAGE)
                if not mark:
                    return
                channel = re.match(r"\s*(\w*)", head.rpartition(_CHANNEL)[2] if _CHANNEL in head else "")
                self._is_shown = channel is not None and channel[1] in ("", "final")
                self._text, self._in_head = rest, False
            end = _END.search(self._text)
            body = self._text[: end.start()] if end else self._text[: len(self._text) - self._held_back()]
            self._text = self._text[len(body) :]
            if self._is_shown:
                yield body
            if not end:
                return
            # Marks of channels stay: a head begins with one, or with a role before it.
            self._in_head = end[0] != "<|end|>"
            self._is_shown = False
            if end[0] != _CHANNEL:
                self._text = self._text[len(end[0]) :]

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        last = self._text.rfind("<")
        return len(self._text) - last if last >= 0 and self._begins_mark(self._text[last:]) else 0

    @staticmethod
    def _begins_mark(text: str) -> bool:
        return any(mark.startswith(text) for mark in _ENDS)
