"""What is shown on a terminal: text that cannot steer it, and a bar while something takes long."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import PowerInferError

if TYPE_CHECKING:
    from rich.progress import Progress

# All control characters but tab and newline (a carriage return would let a text overwrite itself), and the
# marks that turn the direction of writing around for all that follows.
_HARMFUL = dict.fromkeys(
    (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
)


def harmless(text: str) -> str:
    """The text without what could steer a terminal, and with U+FFFD for what cannot be written as UTF-8."""
    return text.translate(_HARMFUL).encode("utf-8", "replace").decode("utf-8")


def one_line(text: str) -> str:
    """A harmless text on a single line."""
    return " ".join(harmless(text).split())


def sentence(error: BaseException) -> str:
    """What an error says, without the number that the system's own errors begin with."""
    if isinstance(error, OSError) and not isinstance(error, PowerInferError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def is_smart(stream: object) -> bool:
    """Whether a stream is a terminal that understands escape sequences."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("", "dumb")


DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Aside:
    """Text that is not what a program is asked for, dim on stderr; without a terminal it never appears."""

    def __init__(self) -> None:
        self._enabled = is_smart(sys.stderr)
        self._is_open = False

    def write(self, text: str) -> None:
        if not self._enabled:
            return
        sys.stderr.write(("" if self._is_open else DIM) + harmless(text))
        sys.stderr.flush()
        self._is_open = True

    def close(self) -> None:
        """What comes next stands by itself."""
        if self._is_open:
            sys.stderr.write(f"{PLAIN}\n\n")
            sys.stderr.flush()
            self._is_open = False


def _bar_width() -> int:
    """Columns of the terminal that stderr is, less two for the ^C that it shows: behind a full line that
    would stand on the next one, and the bar would stay."""
    try:
        return max(os.get_terminal_size(sys.stderr.fileno()).columns - 2, 1)
    except OSError:
        return 78


class Bar:
    """A progress bar on stderr: call it as bar(done, total). It appears once `after` seconds have passed with
    something left to do, and disappears at the end; without a terminal it never appears."""

    def __init__(self, text: str, *, after: float = 0.5, is_bytes: bool = False) -> None:
        """is_bytes: what is counted are bytes, whose number and rate are shown."""
        self._text = one_line(text)
        self._is_bytes = is_bytes
        self._due = time.perf_counter() + after
        self._enabled = is_smart(sys.stderr)
        self._shown: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.close()
            return
        if self._shown is None:
            if not self._enabled or time.perf_counter() < self._due:
                return
            self._shown = self._show(total)
        self._shown.console.width = _bar_width()
        self._shown.update(self._shown.task_ids[0], completed=done, total=total)

    def say(self, text: str) -> None:
        """Changes the words beside the bar."""
        self._text = one_line(text)
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], description=self._text)

    def _show(self, total: int) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            ProgressColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.table import Column

        name = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        rates: list[ProgressColumn] = [TaskProgressColumn()]
        if self._is_bytes:
            rates = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        shown = Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            *rates,
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, highlight=False, emoji=False, width=_bar_width()),
            transient=True,
            expand=True,
        )
        shown.add_task(self._text, total=total)
        shown.start()
        return shown

    def close(self) -> None:
        """Takes the bar away."""
        if self._shown is not None:
            shown, self._shown = self._shown, None
            shown.stop()
        self._enabled = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
