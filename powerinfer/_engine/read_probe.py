"""How fast a session's threads can read memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from . import _native


class ReadProbe:
    """Memory that a session's own threads read by plain loads: how fast they can, at this moment. Slices take
    turns, so that what was read is no longer in a cache when it is read again."""

    def __init__(
        self,
        session: Callable[[], Any],
        lock: AbstractContextManager[Any],
        slice_bytes: int,
        n_slices: int,
    ) -> None:
        """session: gives the native session, which lives as long as the probe, or raises ClosedError."""
        out = _native.ffi.new("pi_read_probe **")
        sizes = _native.fit("slice_bytes", slice_bytes, 64, False), _native.fit("n_slices", n_slices)
        _native.check(_native.lib.pi_read_probe_open(session(), *sizes, out))
        self._session, self._lock = session, lock
        self._handle: Any = _native.ffi.gc(out[0], _native.lib.pi_read_probe_close, sizes[0] * sizes[1])

    def next(self) -> float:
        """Bytes per second of the next slice. Raises ClosedError after the session's close()."""
        rate = _native.ffi.new("double *")
        with self._lock:
            self._session()
            _native.check(_native.lib.pi_read_probe_next(self._handle, rate))
        return float(rate[0])
