"""From generated tokens to text that can be shown at once.

A token is some bytes, not characters: a character may end in a later token, and so may a stop string.
`TextStream` holds back what is not yet decided and gives out the rest, so that the parts joined are the whole
text, cut before the stop string, whichever way the text was divided into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from .tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """The text of one generated sequence of tokens.

    tokenizer: gives the bytes of tokens. stop: strings that end the text; the one that is completed first
    counts, and neither it nor what follows is given out. special: also show control tokens: all, or those of
    a set. prompt: the tokens before the first one pushed; they matter only where the tokenizer puts a space
    before a text and the prompt has no text of its own.

    Bytes that cannot be UTF-8 become U+FFFD, but only once that is certain. Not thread-safe.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        special: bool | Set[int] = False,
        prompt: Sequence[int] = (),
    ) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop strings must be strings of at least one character, not {list(stop)!r}")
        self._tokenizer = tokenizer
        self._special = special
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._first = {s[0] for s in self._stop}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # the decoder waits for no more bytes of a character
        self._held = ""
        self._strip_space = tokenizer.strips_space(prompt) and not tokenizer.decode(prompt)
        self._finished = False
        self.stopped: str | None = None
        """The stop string that ended the text, or None."""
        self.n_emitted = 0
        """Characters given out so far."""

    @property
    def position(self) -> int:
        """The offset, in characters from the beginning of the text, at which the text of the next token
        starts."""
        return self.n_emitted + len(self._held)

    def push(self, token: int) -> str:
        """Add one token; the text that can be shown now, often "". After the end of the text always ""."""
        if self._finished:
            return ""
        special = self._special
        data = self._tokenizer.piece(token, special if isinstance(special, bool) else token in special)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        if self._is_whole and data.isascii():
            return self._add(data.decode("ascii"))
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return self._add(text)

    def finish(self) -> str:
        """The generation is over: what was held back. A character that was cut short becomes U+FFFD."""
        if self._finished:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        if not self._finished:
            self._finished = True
            text += self._emit(len(self._held))
        return text

    def _add(self, text: str) -> str:
        if not self._stop:
            self.n_emitted += len(text)
            return text
        self._held += text
        found = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._finished = True
            shown = self._emit(at)
            self._held = ""
            return shown
        return self._emit(len(self._held) - self._undecided())

    def _undecided(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        end = len(self._held)
        for at in range(max(0, end - self._longest + 1), end):
            if self._held[at] in self._first and any(s.startswith(self._held[at:]) for s in self._stop):
                return end - at
        return 0

    def _emit(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.n_emitted += count
        return shown
