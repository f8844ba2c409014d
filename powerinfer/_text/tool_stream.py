"""Calls in a streamed answer: the name at once, and the arguments as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..types import ToolCall
from .parts import CallPart
from .tool_calls import ToolCallParser

_BEGIN = re.compile(
    r'(?:<\|python_tag\|>)?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BEGIN_ARGS = re.compile(
    r"(?:\[TOOL_CALLS\])?\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]\s*(?=\{)"
)
_SPACE = " \t\r\n,;"


class ToolCallStream(ToolCallParser):
    """A ToolCallParser that does not wait for the end of a call.

    Once its name and the beginning of its arguments are there, a call is told with empty arguments, and
    CallParts follow. What is written otherwise, arguments as a text say, comes whole as in ToolCallParser.
    The name of a call that turns out not to be well formed cannot be taken back.
    """

    _arguments: _Object | None = None  # being read
    _is_behind = False  # a call was told, and its marks are not over
    _n_calls = 0

    @property
    def _is_named(self) -> bool:
        """Calls are name[ARGS]{...}, not objects."""
        return self._form.name == "mistral-args"

    @property
    def _between(self) -> str:
        """What may stand around calls."""
        return _SPACE if self._is_named else _SPACE + "[]}"

    def _told(self, found: Iterable[Any]) -> list[Any]:
        told = []
        for item in found:
            self._n_calls += isinstance(item, dict)
            if self._one and (self._n_calls > 1 or (self._n_calls and isinstance(item, str))):
                continue
            told.append(item)
        return told

    def _certain(self) -> Iterator[Any]:
        while True:
            if self._arguments is not None:
                n = self._arguments.read(self._text)
                part, self._text = self._text[:n], self._text[n:]
                if part:
                    yield CallPart(part)
                if not self._arguments.is_over:
                    return
                self._arguments = None
            if self._is_behind:
                call = self._begin()
                if call is None:
                    if not self._closed():
                        return
                    continue
            else:
                yield from super()._certain()
                call = self._begin() if self._inside else None
                if call is None:
                    return
            yield call
            self._is_behind = True

    def _rest(self, is_cut: bool) -> list[Any]:
        if not self._is_behind:
            return super()._rest(False)
        text, self._text = self._text.lstrip(self._between), ""
        if (
            self._arguments is not None
            or not text
            or (self._form.close and self._form.close.startswith(text))
        ):
            return []
        calls: list[Any] = [*self._calls(text)]
        return calls or [text]

    def _begin(self) -> ToolCall | None:
        """The call whose arguments begin next, if that is certain; the text then begins with them."""
        pattern = _BEGIN_ARGS if self._is_named else _BEGIN
        text = self._text.lstrip(self._between)
        found = pattern.match(text)
        if found is None or found[1] not in self._names:
            return None
        self._text, self._arguments = text[found.end() :], _Object()
        return self._form.call(found[1], "")

    def _closed(self) -> bool:
        """Whether the mark behind a call was there; it is skipped."""
        close = self._form.close
        at = self._text.find(close) if close else -1
        if at < 0:
            return False
        self._text = self._text[at + len(close) :]
        self._inside, self._after_call, self._is_behind = False, True, False
        return True


class WholeAnswerParser(ToolCallParser):
    """A ToolCallParser for answers that nobody sees before their end. A call that is cut off behind its name
    has what there is of its arguments, as it would have in a stream."""

    def _begun_calls(self, text: str) -> list[ToolCall]:
        stream = ToolCallStream(self._form, self._tools, one=self._one)
        calls: list[ToolCall] = []
        for item in [*stream.push(text), *stream.finish()]:
            if isinstance(item, CallPart):
                calls[-1]["function"]["arguments"] += item.text
            elif not isinstance(item, str):
                calls.append(item)
        return calls


class _Object:
    """Finds the end of a JSON object while it comes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False
        self.is_over = False

    def read(self, text: str) -> int:
        """How many of these characters belong to it."""
        for i, c in enumerate(text):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif c == "\\":
                    self._is_escaped = True
                elif c == '"':
                    self._in_text = False
            elif c == '"':
                self._in_text = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return i + 1
        return len(text)
