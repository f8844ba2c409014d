"""The loop of the chat: read a line, answer it or run its command."""

from __future__ import annotations

from .._text.terminal import sentence
from ..errors import PowerInferError
from . import commands
from .chat import Chat


def run(chat: Chat) -> int:
    """Runs until the input ends. Returns the exit code: through a pipe, 1 if something failed."""
    chat.ui.words = {f"/{name}": command.words for name, command in commands.COMMANDS.items()}
    failed = False
    try:
        while True:
            failed = not _turn(chat) or failed
    except EOFError:
        return int(failed and not chat.ui.interactive)


def _turn(chat: Chat) -> bool:
    """One line; False if something failed. Raises EOFError at the end of the input."""
    line = None
    try:
        line = chat.ui.read()
        chat.hinted = False
        if commands.is_command(line):
            commands.run(chat, line)
        elif line:
            chat.answer(line)
    except KeyboardInterrupt:
        if not chat.ui.interactive:
            raise
        if not chat.hinted:
            chat.ui.note("Ctrl-D or /quit ends the chat.")
        chat.hinted = True
    except BrokenPipeError:
        raise
    except (PowerInferError, OSError) as error:
        if line is None:  # an input that cannot be read: the next time would be the same
            raise
        chat.ui.error(sentence(error))
        return False
    return True
