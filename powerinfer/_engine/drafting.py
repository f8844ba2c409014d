"""Drafts by a model: a small one, or the head that the model's own file has for further tokens (NextN, MTP).

    drafter = Drafter(session, n_draft=3)
    guesses = drafter.guess([(sequence, ids, 3), ...])

A drafter has a session beside the engine's, with a sequence for each of the engine's. Before it guesses it
reads what has been added there since, and forgets what it guessed itself. It takes the likeliest token each
time, whatever the sampling: the model chooses by its own logits anyway.

A head reads the model's hidden states, which are there once: of what it did not see when it was computed (a
prefix that was loaded, or evaluated before) it knows nothing, and guesses by the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import ContextError
from .arrays import Ids, common_prefix
from .session import Session
from .types import TokenKind

_NO_IDS = np.empty(0, np.int32)
_TOGETHER = 16
"""Tokens that are read as a prompt is; fewer wait for the next guess."""
_WORTH = 16
"""Fewer tokens are read sooner than copied from another sequence."""


@dataclass(eq=False)
class _Held:
    """What the drafter's sequence of one number holds."""

    ids: Ids = field(default_factory=lambda: _NO_IDS)
    """Of the engine's sequence, those that its entries come from."""
    at: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    """The engine's position of each entry, ascending. A head's entry is of the hidden state there and the
    token behind it; a model's own of the token there."""
    first: int = 0
    hidden: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """Of a head: states at positions from `first` on that are no entries yet."""
    fed: Ids = field(default_factory=lambda: _NO_IDS)
    """The tokens at those positions."""


Wanted = tuple[int, Ids, int]
"""A sequence of the engine, the ids that are known of it (its last one is not computed yet), and how many
more are to be guessed."""


class Drafter:
    """Not thread-safe: it belongs to the engine's thread."""

    def __init__(self, session: Session, n_draft: int, *, is_head: bool = False) -> None:
        """
        session: of the model that guesses; of as many sequences and positions as the engine's, of twice as
            many sequences if it has recurrent layers, which cannot forget a guess: there the second half is
            what guesses are made in.
        n_draft: most tokens guessed at a time.
        is_head: it reads hidden states of the engine's session beside tokens.
        """
        self.session = session
        self.n_draft = n_draft
        self.is_head = is_head
        self._n_vocab = session.model.info.n_vocab
        info = session.info
        self._n_ctx, n_seq = info.n_ctx, info.n_seq
        self._aside = n_seq // 2 if session.model.info.n_recurrent else 0
        self._held = [_Held() for _ in range(self._aside or n_seq)]

    def saw(self, number: int, ids: Ids, first: int, hidden: npt.NDArray[np.float32], n_true: int) -> None:
        """The engine computed ids[first:] of a sequence, all of which is ids; n_true of them are certain, the
        others guesses. hidden: their final states [len(ids) - first, n_embd]. For a head."""
        held = self._held[number]
        same = first - held.first
        if 0 < same <= held.fed.size and np.array_equal(held.fed[:same], ids[held.first : first]):
            held.hidden = np.concatenate([held.hidden[:same], hidden])
        else:
            held.first, held.hidden = first, hidden.copy()
        held.fed = ids[held.first :].copy()
        if len(held.hidden) > _TOGETHER:
            self._read([(number, ids[:n_true], 0)])

    def guess(self, wanted: Sequence[Wanted]) -> list[Ids]:
        """Tokens that may follow each, as many as are wanted or fewer. Raises what Session.feed() does."""
        guesses: list[list[int]] = [[] for _ in wanted]
        rows = self._read(wanted)
        left = [i for i, (_, _, n) in enumerate(wanted) if rows[i] is not None and n > 0]
        at = [row for row in rows if row is not None]
        step = 0
        while left:
            states = [self.session.hidden(at[k]) for k in range(len(left))] if self.is_head else []
            for k, i in enumerate(left):
                guesses[i].append(int(np.argmax(self.session.logits(at[k]))))
            step += 1
            more = [k for k, i in enumerate(left) if wanted[i][2] > step and self._has_room(wanted[i][0])]
            left, states = [left[k] for k in more], [states[k] for k in more] if self.is_head else []
            if not left:
                break
            for i in left if self._aside and step == 1 else ():
                self.session.copy(self._aside + wanted[i][0], wanted[i][0])
            ids = np.array([guesses[i][-1] for i in left], np.int32)
            owners = [self._aside + wanted[i][0] for i in left]
            try:
                self._feed(ids, owners, [TokenKind.GENERATED] * len(left), states)
            except ContextError:
                break
            at = list(range(len(left)))
        for number, _, _ in wanted if self._aside else ():
            self.session.drop(self._aside + number)
        return [np.array(own, np.int32) for own in guesses]

    def close(self) -> None:
        self.session.close()
        self.session.model.close()

    # -- what is read

    def _read(self, wanted: Sequence[Wanted]) -> list[int | None]:
        """Brings sequences up to the ids that are known. Returns the row of the logits behind each that wants
        guesses; None: there is none."""
        ids, owners, kinds, states = [], [], [], []
        rows: list[int | None] = []
        n_rows = 0
        entries = []
        for number, known, n in wanted:
            held = self._held[number]
            places = self._missing(number, known)
            shift = 1 if self.is_head else 0
            is_up_to_date = places.size > 0 and places[-1] + shift == known.size - 1
            rows.append(n_rows if n and is_up_to_date else None)
            n_rows += rows[-1] is not None
            if not places.size:
                continue
            ids.append(known[places + shift])
            owners += [number] * places.size
            kinds += [TokenKind.PROMPT] * (places.size - 1)
            kinds.append(TokenKind.GENERATED if rows[-1] is not None else TokenKind.PROMPT)
            if self.is_head:
                states.append(held.hidden[places - held.first])
            entries.append((number, known, places))
        if not ids:
            return rows
        try:
            self._feed(np.concatenate(ids), owners, kinds, np.concatenate(states) if self.is_head else [])
        except ContextError:  # the pool is full, which others' prefixes may share and these do not
            for number in set(range(len(self._held))) - {number for number, _, _ in wanted}:
                self._forget(number)
            return [None] * len(rows)
        for number, known, places in entries:
            held = self._held[number]
            held.ids, held.at = known.copy(), np.concatenate([held.at, places])
            if self.is_head:
                n = int(places[-1]) + 1 - held.first
                held.first, held.hidden, held.fed = held.first + n, held.hidden[n:].copy(), held.fed[n:]
        return rows

    def _missing(self, number: int, known: Ids) -> npt.NDArray[np.int32]:
        """The positions whose entries a sequence lacks, and can have; what it has in vain is forgotten."""
        held = self._held[number]
        same = common_prefix(held.ids, known)
        if known.size - same > _WORTH:
            same = self._copy_longest(number, known, same)
        # A head's entry knows the token behind its position, too. The last one is made anew, for its logits.
        last = known.size - 1
        n = int(np.searchsorted(held.at, min(same, last) - (1 if self.is_head else 0)))
        self._cut(number, n)
        begin = int(held.at[-1]) + 1 if held.at.size else 0
        if not self.is_head:
            return np.arange(begin, last + 1, dtype=np.int32) if known.max() < self._n_vocab else _NO_IDS
        end = held.first + common_prefix(held.fed, known[held.first :])
        return np.arange(max(begin, held.first), min(end, last), dtype=np.int32)

    def _copy_longest(self, number: int, known: Ids, same: int) -> int:
        """Takes over what another sequence holds of the beginning of these ids, if it is more."""
        each = [common_prefix(other.ids, known) for other in self._held]
        best = int(np.argmax(each))
        source = self._held[best]
        if each[best] < same + _WORTH:
            return same
        n = int(np.searchsorted(source.at, each[best] - (1 if self.is_head else 0)))
        n = self.session.reachable(n, seq=best)
        self.session.copy(number, best, n)
        held = self._held[number]
        held.ids, held.at = source.ids, source.at[:n]
        return each[best]

    def _cut(self, number: int, n: int) -> None:
        """Keeps the first n entries of a sequence, or as many of them as can be gone back to."""
        length = self.session.length(number)
        if n < length:
            n = self.session.reachable(n, seq=number)
            self.session.cut(n, seq=number)
        held = self._held[number]
        held.at = held.at[: min(n, length)]  # it has less where a feed has failed

    def _forget(self, number: int) -> None:
        self.session.drop(number)
        self._held[number] = _Held()

    def _has_room(self, number: int) -> bool:
        return self.session.length(number) < self._n_ctx

    def _feed(
        self,
        ids: Ids,
        owners: Sequence[int],
        kinds: Sequence[TokenKind],
        states: Sequence[npt.NDArray[np.float32]] | npt.NDArray[np.float32],
    ) -> None:
        hidden = np.asarray(states, np.float32) if self.is_head else None
        self.session.feed(ids, seq=owners, want_logits=kinds, hidden=hidden)
