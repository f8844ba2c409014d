"""Breaking lines between words while a text streams to a terminal.

A word is shown as far as it is known. When it turns out too long for its line, what was shown of it is
erased and written again at the beginning of the next. Beside a wide character (Chinese, Japanese) a line
may be broken anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

_ATOMS = re.compile(r"\n|[^\S\n]+|[^\s]+")


class Wrap:
    """Writes a text piece by piece; of control characters it may hold tab and newline.

    write: gets what the terminal shall do. width: cells of a line at the moment; the last one stays empty,
    because terminals disagree about where the cursor is after it.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._gap = ""  # spaces that were not written yet
        self._word = ""  # what the line ends in, if it may go on
        self._out: list[str] = []

    def push(self, text: str) -> None:
        """Shows a piece."""
        limit = max(self._width() - 1, 8)
        for atom in _ATOMS.findall(text):
            if atom == "\n":
                self._break()
            elif atom.isspace():
                self._gap = (self._gap + atom.expandtabs(4))[: limit // 2]
                self._word = ""
            else:
                for part in _breakable(atom):
                    self._place(part, limit)
        self._write("".join(self._out))
        self._out.clear()

    def _break(self) -> None:
        self._out.append("\n")
        self._column, self._gap, self._word = 0, "", ""

    def _place(self, part: str, limit: int) -> None:
        cells = cell_len(part)
        wide = cells > len(part)
        if wide:
            self._word = ""
        if self._gap:
            if self._column and self._column + len(self._gap) + cells > limit:
                self._break()
            self._out.append(self._gap)
            self._column += len(self._gap)
            self._gap = ""
        elif self._column + cells > limit:
            word, size = self._word, cell_len(self._word)
            if size < self._column:
                if size:
                    self._out.append(f"\x1b[{size}D\x1b[K")
                self._break()
                self._out.append(word)
                self._column, self._word = size, word
        for char in part if self._column + cells > limit else (part,):  # longer than a line
            size = cell_len(char)
            if self._column + size > limit:
                self._break()
            self._out.append(char)
            self._column += size
            self._word += char
        if wide:
            self._word = ""


def _breakable(atom: str) -> list[str]:
    """A run without spaces, cut before and after each wide character; what has no width stays with it."""
    if cell_len(atom) <= len(atom):
        return [atom]
    parts: list[str] = []
    narrow = False
    for char in atom:
        size = cell_len(char)
        if parts and (size == 0 or (size == 1 and narrow)):
            parts[-1] += char
        else:
            parts.append(char)
        if size:
            narrow = size == 1
    return parts
