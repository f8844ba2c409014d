"""Columns of text, without a frame: whole lines where they go to a file, wrapped or cut in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Sequence

from rich.cells import cell_len, set_cell_size


def output_width() -> int | None:
    """Columns of the terminal that stdout is, or None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(
    rows: Sequence[Sequence[str]], *, right: Container[int] = (), width: int | None = None
) -> Iterator[str]:
    """A line for each row, cells padded to the width of their column.

    right: columns that are aligned to the right. width: longer lines are cut, with an ellipsis.
    """
    sizes = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = []
        for i, (cell, size) in enumerate(zip(row, sizes, strict=True)):
            padding = " " * (size - cell_len(cell))
            cells.append(padding + cell if i in right else cell + padding)
        line = "  ".join(cells).rstrip()
        if width is not None and cell_len(line) > width:
            line = set_cell_size(line, width - 1) + "…"
        yield line


def facts(rows: Sequence[tuple[str, str]], *, width: int | None = None) -> Iterator[str]:
    """Names and what is to be said of them. width: longer lines go on under their beginning."""
    size = max((cell_len(name) for name, _ in rows), default=0) + 2
    for name, text in rows:
        head = name + " " * (size - cell_len(name))
        if width is None or width < size + 16:
            yield head + text
            continue
        lines = textwrap.wrap(text, width - size, break_on_hyphens=False) or [""]
        yield head + lines[0]
        yield from (" " * size + line for line in lines[1:])


def paragraph(text: str, *, width: int | None = None) -> str:
    """A text on one line, or broken between words where that is longer than width."""
    return text if width is None else textwrap.fill(text, max(width, 1), break_on_hyphens=False)
