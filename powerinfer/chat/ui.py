"""How the chat reads and shows: line editing, history and colours in a terminal; plain lines through a pipe.

Answers go to stdout; notes and errors go there too in a terminal, and else to stderr, so that
`... | powerinfer chat > answer.txt` holds the answers alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._text.terminal import DIM, PLAIN, harmless, is_smart

if TYPE_CHECKING:
    from .keys import Words
from .wrap import Wrap


def history_file() -> Path | None:
    """Where the lines that were typed are kept; None if there is no place for them."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        path = Path(base) / "powerinfer" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError):
        return None
    return path if os.access(path, os.R_OK | os.W_OK) else None


class Ui:
    """Reads from stdin and writes to stdout and stderr as they are when it is made."""

    def __init__(self, *, history: bool = True) -> None:
        """history: keep the lines that are typed for the next time, in a terminal."""
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.toolbar: Callable[[], str] = str
        """Gives the line at the bottom of the terminal while a line is read."""
        self.words: Words = {}
        """What the tab key completes: words at the beginning of a line, and what may follow each; None: names
        of files."""
        self.history = history_file() if history and self.interactive else None
        """Where lines that are typed are kept."""
        # A note is wrapped between words in a terminal and stays a line in a pipe.
        options = {"highlight": False, "emoji": False, "soft_wrap": not self.interactive}
        self._notes = Console(stderr=not self.interactive, **options)  # type: ignore[arg-type]
        self._wraps = self.interactive and is_smart(sys.stdout)
        self._read = self._terminal_reader() if self.interactive else self._pipe_reader()
        self._wrap: Wrap | None = None
        self._at_line_start = True
        self._thinks = False

    @property
    def width(self) -> int:
        """Columns of the terminal at the moment."""
        return self._notes.width

    def _terminal_reader(self) -> Callable[[], str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import ANSI
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        from .keys import CommandCompleter, bindings

        history: History = InMemoryHistory() if self.history is None else FileHistory(str(self.history))
        session: PromptSession[str] = PromptSession(
            history=history,
            completer=CommandCompleter(lambda: self.words),
            complete_while_typing=False,
            key_bindings=bindings(),
            enable_suspend=True,
            bottom_toolbar=(lambda: harmless(self.toolbar())) if self._wraps else None,
        )
        colour = not os.environ.get("NO_COLOR")
        first, more = ("\x1b[1;32m> \x1b[0m", "\x1b[32m. \x1b[0m") if colour else ("> ", ". ")
        return lambda: self._joined(
            lambda again: session.prompt(
                ANSI(more if again else first),
                prompt_continuation=lambda width, line, wraps: ANSI("  " if wraps else more),
            )
        )

    @staticmethod
    def _pipe_reader() -> Callable[[], str]:
        asks = sys.stdin.isatty() and sys.stderr.isatty()  # somebody types, the answers go to a file

        def line(again: bool) -> str:
            if asks:
                print(". " if again else "> ", end="", file=sys.stderr, flush=True)
            text = sys.stdin.readline()
            if not text:
                raise EOFError
            return text.rstrip("\r\n")

        return lambda: Ui._joined(line)

    @staticmethod
    def _joined(line: Callable[[bool], str]) -> str:
        """Lines that end in a backslash go on in the next."""
        parts = [line(False)]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            try:
                parts.append(line(True))
            except EOFError:
                break
        return "\n".join(parts).strip()

    def read(self) -> str:
        """The next line of the user. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        return self._read().encode("utf-8", "replace").decode("utf-8")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While an answer is written: keys are not echoed into it (they count as typed at the next prompt),
        and its last line is ended, however it ends. In a terminal Ctrl-C ends the answer and no more."""
        self._wrap = (
            Wrap(sys.stdout.write, lambda: shutil.get_terminal_size().columns) if self._wraps else None
        )
        self._at_line_start = True
        with quiet_keys() if self.interactive else nullcontext():
            try:
                yield
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if not self._at_line_start:
                    self._show(" ...")
            finally:
                if not self._at_line_start:
                    self._show("\n")
                self._end_thought()

    def write(self, text: str) -> None:
        """A piece of an answer."""
        if self._thinks:
            self._show("\n" if self._at_line_start else "\n\n")
            self._end_thought()
        self._show(text)

    def think(self, text: str) -> None:
        """A piece of the thought before an answer: dim, and in a terminal alone."""
        if not self.interactive:
            return
        if not self._thinks and self._wraps:
            sys.stdout.write(DIM)
        self._thinks = True
        self._show(text)

    def _end_thought(self) -> None:
        if self._thinks and self._wraps:
            sys.stdout.write(PLAIN)
            sys.stdout.flush()
        self._thinks = False

    def _show(self, text: str) -> None:
        text = harmless(text)
        if self._wrap is not None:
            self._wrap.push(text)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n") if text else self._at_line_start

    def note(self, what: str | Table) -> None:
        """Something that is not part of an answer."""
        self._notes.print(Text(harmless(what)) if isinstance(what, str) else what, style="dim")

    def error(self, text: str) -> None:
        """Something that went wrong."""
        self._notes.print(Text(harmless(text)), style="red")


@contextmanager
def quiet_keys() -> Iterator[None]:
    """The terminal does not show what is typed meanwhile, ^C included."""
    try:
        import termios

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError, termios.error):
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(number, termios.TCSADRAIN, quiet)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
