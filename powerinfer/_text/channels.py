"""Answers in the "harmony" format of gpt-oss: messages in channels, of which "final" is for the reader.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>the answer
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"its": "arguments"}<|call|>

The prompt ends behind the role, so an answer may begin within a message's head, as OpenAI's own template
writes calls:
 to=functions.NAME<|channel|>commentary json<|message|>{"its": "arguments"}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .parts import Thought

if TYPE_CHECKING:
    from .tool_calls import ToolCallParser

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = (_CHANNEL, "<|start|>", "<|end|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
_TO = "to=functions."


def has_channels(template: str) -> bool:
    """Whether a chat template is of this format."""
    return _CHANNEL in template


class ChannelParser:
    """What is said in the channel "final", and what is remarked for the reader, while it comes; text outside
    of channels, too, such as a grammar demands. Thoughts are told apart. `calls` makes calls of what is said
    to functions, and looks for calls in the answer if its format is another."""

    def __init__(self, calls: ToolCallParser | None = None) -> None:
        self._calls = calls
        self._text = ""
        self._has_begun = False
        self._in_head = False
        self._channel = "final"
        self._function: str | None = None
        """Which the message is for; its text is collected."""
        self._arguments = ""

    def push(self, text: str) -> list[Any]:
        """Adds text; what is certain by now."""
        self._text += text
        return [item for body in self._certain() for item in self._told(body)]

    def finish(self, *, is_cut: bool = False) -> list[Any]:
        """The answer is over: what was held back. is_cut: it would have gone on."""
        told = self._told("" if self._in_head else self._text) + self._called(is_cut=is_cut)
        return told if self._calls is None else told + self._calls.finish(is_cut=is_cut)

    def _told(self, body: Any) -> list[Any]:
        """What a piece of the message says."""
        if not isinstance(body, str):
            return [body]
        if self._function is not None:
            self._arguments += body
            return []
        if not body or self._channel == "":
            return []
        if self._channel == "analysis":
            return [Thought(body)]
        return [body] if self._calls is None or self._calls.in_channels else self._calls.push(body)

    def _called(self, *, is_cut: bool = False) -> list[Any]:
        """At the end of a message to a function: the call, or its text where it is none."""
        name, text, self._function, self._arguments = self._function, self._arguments, None, ""
        if name is None or self._calls is None:
            return []
        return list(self._calls.called(name, text, is_cut=is_cut))

    def _certain(self) -> Iterator[Any]:
        if not self._has_begun:
            begin = self._text.lstrip()[: len(_TO)]
            if begin != _TO and _TO.startswith(begin):
                return
            self._has_begun, self._in_head = True, begin == _TO
        while True:
            if self._in_head:
                head, mark, rest = self._text.partition(_MESSAGE)
                if not mark:
                    return
                channel = re.match(r"\s*(\w*)", head.rpartition(_CHANNEL)[2] if _CHANNEL in head else "")
                function = _FUNCTION.search(head)
                self._function = None if function is None else function[1]
                said = channel[1] if channel is not None else ""
                is_known = said in ("final", "analysis") or (said == "commentary" and "to=" not in head)
                self._channel = said if is_known else "" if said else "final"
                self._text, self._in_head = rest, False
            end = _END.search(self._text)
            body = self._text[: end.start()] if end else self._text[: len(self._text) - self._held_back()]
            self._text = self._text[len(body) :]
            yield body
            if not end:
                return
            yield from self._called()
            # Marks of channels stay: a head begins with one, or with a role before it.
            self._in_head = end[0] != "<|end|>"
            self._channel = ""
            if end[0] != _CHANNEL:
                self._text = self._text[len(end[0]) :]

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        last = self._text.rfind("<")
        return len(self._text) - last if last >= 0 and self._begins_mark(self._text[last:]) else 0

    @staticmethod
    def _begins_mark(text: str) -> bool:
        return any(mark.startswith(text) for mark in _ENDS)
