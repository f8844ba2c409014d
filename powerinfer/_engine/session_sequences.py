"""The sequences of a session: what each holds of K, V and states; how it is cut, shared, moved and saved."""

from __future__ import annotations

from ..errors import ArgumentError
from . import _native
from .session_handle import SessionHandle


class SessionSequences(SessionHandle):
    """A session's methods for its sequences, between feeds."""

    def length(self, seq: int = 0) -> int:
        """Positions that a sequence holds."""
        with self._lock:
            length = int(_native.lib.pi_seq_length(self.handle, _native.fit("seq", seq)))
        if length < 0:
            raise ArgumentError(f"sequence {seq} is out of range")
        return length

    def reachable(self, n: int, *, seq: int = 0) -> int:
        """The most positions, at most n, that a sequence can be cut to or copied: n, or 0 where layers with a
        window have given back what the next token sees. In a model with recurrent layers those of the next
        checkpoint, or 0."""
        with self._lock:
            reachable = int(
                _native.lib.pi_seq_reachable(self.handle, _native.fit("seq", seq), _native.fit("n", n))
            )
        if reachable < 0:
            raise ArgumentError(f"sequence {seq} or {n} positions are out of range")
        return reachable

    def reusable_prefix(self, n_same: int, n_held_prompt: int, n_prompt: int, *, seq: int = 0) -> int:
        """How many of n_same tokens, with which a prompt of n_prompt begins and what a sequence holds for
        another one of n_held_prompt, were computed just as they would be for this one and can be taken."""
        with self._lock:
            return int(
                _native.lib.pi_prefix_reusable(
                    self.handle, _native.fit("seq", seq), n_same, n_held_prompt, n_prompt
                )
            )

    def cut(self, n_keep: int, *, seq: int = 0) -> None:
        """Keeps the first n_keep positions of a sequence, which must be reachable().

        Raises ArgumentError, UnsupportedError.
        """
        with self._lock:
            _native.check(
                _native.lib.pi_seq_cut(self.handle, _native.fit("seq", seq), _native.fit("n_keep", n_keep))
            )

    def copy(self, dst: int, src: int, n: int | None = None) -> None:
        """Makes dst the first n positions of src (None: all). Memory is shared until one of them writes.
        Raises UnsupportedError if these are not reachable()."""
        with self._lock:
            count = self.length(src) if n is None else _native.fit("n", n)
            _native.check(
                _native.lib.pi_seq_copy(self.handle, _native.fit("dst", dst), _native.fit("src", src), count)
            )

    def drop(self, seq: int = 0) -> None:
        """Forgets a sequence."""
        with self._lock:
            _native.check(_native.quick("pi_seq_drop", self.handle, _native.fit("seq", seq)))

    def shift(self, n_keep: int, n_drop: int, *, seq: int = 0) -> None:
        """Keeps the first n_keep positions, drops the n_drop after them and moves the rest down.

        Raises UnsupportedError for models with learned positions (OPT) or recurrent layers, and where a
        layer's window would reach into the first n_keep positions, which it no longer holds.
        """
        with self._lock:
            _native.check(
                _native.lib.pi_seq_shift(
                    self.handle,
                    _native.fit("seq", seq),
                    _native.fit("n_keep", n_keep),
                    _native.fit("n_drop", n_drop),
                )
            )

    def save(self, *, seq: int = 0) -> bytes:
        """K and V of a sequence."""
        ffi, lib = _native.ffi, _native.lib
        with self._lock:
            out = bytearray(lib.pi_seq_state_bytes(self.handle, _native.fit("seq", seq)))
            _native.check(lib.pi_seq_state_save(self.handle, seq, ffi.from_buffer(out), len(out)))
        return bytes(out)

    def load(self, state: bytes, *, seq: int = 0) -> None:
        """Replaces a sequence by one that save() gave.

        Raises FormatError if the state is broken or of another model's shape or KV types, ContextError
        if it is too long.
        """
        with self._lock:
            data = _native.ffi.from_buffer(state)
            _native.check(
                _native.lib.pi_seq_state_load(self.handle, _native.fit("seq", seq), data, len(state))
            )
