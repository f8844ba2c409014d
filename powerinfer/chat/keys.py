"""Keys of the chat's input line: what Tab completes, and Alt-Enter for a new line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

Words = Mapping[str, Sequence[str] | None]


class CommandCompleter(Completer):
    """Completes commands at the beginning of a line, and the first word behind one."""

    def __init__(self, words: Callable[[], Words]) -> None:
        """words: gives the commands, and what may follow each; None: a file."""
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        words, text = self._words(), document.text_before_cursor
        command, space, rest = text.partition(" ")
        follow: Sequence[str] | None = list(words) if not space else words.get(command, ())
        if follow is None:
            yield from self._paths.get_completions(Document(rest), complete_event)
            return
        typed = rest if space else text
        for word in follow:
            if word.startswith(typed) and (space or typed):
                yield Completion(word, start_position=-len(typed))


def bindings() -> KeyBindings:
    """Alt-Enter is a new line."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
