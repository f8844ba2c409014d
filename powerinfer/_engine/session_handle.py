"""What all parts of a session share: the engine's handle, and the lock under which it is called."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import ClosedError
from .interrupt import Interrupt
from .model import Model


class SessionHandle:
    """A native session, until it is closed."""

    model: Model
    interrupt: Interrupt
    _handle: Any
    _lock: threading.RLock

    @property
    def handle(self) -> Any:
        """The native session. Raises ClosedError after close(), ArgumentError (Interrupt.check)."""
        self.interrupt.check()
        if self._handle is None:
            raise ClosedError("the session is closed")
        return self._handle

    def close(self) -> None:
        """Frees the session; later calls raise ClosedError."""
        self._handle = None  # freed with the last reference: a call in another thread may still hold one
