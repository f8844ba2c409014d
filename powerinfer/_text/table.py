"""Columns of text, without a frame: whole lines in a file, wrapped or in parts in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Sequence

from rich.cells import cell_len


def output_width() -> int | None:
    """Columns of the terminal that stdout is, or None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(
    rows: Sequence[Sequence[str]], *, right: Container[int] = (), width: int | None = None
) -> Iterator[str]:
    """A line for each row, cells padded to the width of their column.

    right: columns that are aligned to the right. width: where lines would be longer, a last column of words
    is wrapped; else the table comes in parts, each with its first column.
    """
    sizes = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    last = len(sizes) - 1
    before = sum(sizes[:last]) + 2 * last
    if width is None or before + sum(sizes[last:]) <= width:
        yield from (_line(row, range(last + 1), sizes, right) for row in rows)
    elif last not in right and before + 16 <= width:
        for row in rows:
            parts = textwrap.wrap(row[last], width - before, break_on_hyphens=False) or [""]
            yield _line([*row[:last], parts[0]], range(last + 1), sizes, right)
            yield from (" " * before + part for part in parts[1:])
    else:
        at = 1
        while at <= last:
            end = at + 1
            while end <= last and sum(sizes[:1] + sizes[at : end + 1]) + 2 * (end + 1 - at) <= width:
                end += 1
            if at > 1:
                yield ""
            yield from (_line(row, [0, *range(at, end)], sizes, right) for row in rows)
            at = end


def _line(row: Sequence[str], chosen: Sequence[int], sizes: Sequence[int], right: Container[int]) -> str:
    cells = []
    for i in chosen:
        padding = " " * (sizes[i] - cell_len(row[i]))
        cells.append(padding + row[i] if i in right else row[i] + padding)
    return "  ".join(cells).rstrip()


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
