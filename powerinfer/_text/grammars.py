"""Grammars of people whom one does not know: each is compiled and followed in a process of its own.

    grammars = Grammars(tokenizer)
    constraint = grammars.constraint('root ::= "yes" | "no"')
    constraint.is_ready                 # never waits; mask() does
    constraint.close()

See grammar_process.py for the other side, and why.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError, BusyError, ClosedError, DeadlineError, OutOfMemoryError, UnsupportedError
from .grammar import LlamaGrammar, Logits, allowed_of_bits, need_llguidance
from .grammar_process import ANSWERED, BEGUN, FORK, KILL, READY, write

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_AT_ONCE = 2  # grammars that are compiled at the same time
_TICK_S = 0.05  # how often a thread that waits looks whether it still should
_START_S = 120.0
_NO_PROCESS = "the system has no process for a grammar"


class Grammars:
    """Makes constraints for one vocabulary. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, most: int, most_alive: int = 32) -> None:
        """most: grammars at the same time, those that wait included. most_alive: that have a process. The
        first starts the process that makes the others."""
        self._tokenizer = tokenizer
        self._most = most
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._alive = threading.Semaphore(most_alive)
        self._places = threading.Semaphore(_AT_ONCE)
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._names = count()
        self._n = 0
        self._closed = False

    def constraint(
        self,
        grammar: LlamaGrammar | str,
        *,
        deadline: float | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> RemoteConstraint:
        """What holds one answer to a grammar, or to GBNF. Waits until it is compiled.

        deadline: of time.monotonic(). is_gone: asked now and then whether nobody wants it any more.

        Raises ArgumentError for a grammar that is not valid or takes too long or too much memory,
        OutOfMemoryError where the system has no process for it, BusyError, DeadlineError, ClosedError,
        UnsupportedError.
        """
        need_llguidance()
        with self._lock:
            if self._n >= self._most:
                raise BusyError(f"{self._n} grammars are in use or wait to be compiled")
            self._n += 1
        made: RemoteConstraint | None = None
        is_alive = False
        try:
            while not (is_alive := self._alive.acquire(timeout=_TICK_S)):
                self._check(deadline, is_gone)
            while not self._places.acquire(timeout=_TICK_S):
                self._check(deadline, is_gone)
            try:
                self._check(deadline, is_gone)
                made = self._begin()
                is_gbnf = isinstance(grammar, str)
                text = grammar if isinstance(grammar, str) else grammar.text
                made.begin((b"G" if is_gbnf else b"L") + text.encode("utf-8", "surrogatepass"))
                while not made.wait(_TICK_S):
                    self._check(deadline, is_gone)
            finally:
                self._places.release()
            made.check()
            return made
        except BaseException:
            if made is None:
                self._give_back(is_alive)
            else:
                made.close()
                self._send(KILL, made.name, [], starts=False)
            raise

    def _check(self, deadline: float | None, is_gone: Callable[[], bool]) -> None:
        if self._closed or is_gone():
            raise ClosedError("the request was cancelled")
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineError("the time for this request is over")

    def _begin(self) -> RemoteConstraint:
        ours, other = socket.socketpair()
        try:
            with other:
                name = self._send(FORK, next(self._names).to_bytes(8, "little"), [other.fileno()])
        except BaseException:
            ours.close()
            raise

        return RemoteConstraint(ours, name, self._tokenizer.n_vocab, self._give_back)

    def _give_back(self, is_alive: bool = True) -> None:
        if is_alive:
            self._alive.release()
        with self._lock:
            self._n -= 1

    def _send(self, command: bytes, name: bytes, fds: list[int], *, starts: bool = True) -> bytes:
        with self._starting:
            for again in (True, False):
                if self._control is None:
                    if not starts:
                        return name
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [command + name], fds)
                    return name
                except OSError:  # somebody has ended it
                    self._stop()
                    if not again:
                        raise
        return name

    def _start(self) -> None:
        if self._closed:
            raise ClosedError("the request was cancelled")
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_START_S)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            with other:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.grammar_process", str(other.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError as error:
            ours.close()
            raise OutOfMemoryError(f"{_NO_PROCESS}: {error}") from None
        self._process, self._control = process, ours
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(pickle.dumps(self._tokenizer))
            said = ours.recv(2000)
        except OSError as error:
            said = str(error).encode()
        if said != READY:
            self._stop()
            if not said:
                raise OutOfMemoryError(_NO_PROCESS)
            raise UnsupportedError(said[1:].decode("utf-8", "replace"))

    def _stop(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            process.kill()
            process.wait()

    def close(self) -> None:
        """Ends all of them, whatever they do."""
        self._closed = True
        with self._starting:
            self._stop()


class RemoteConstraint:
    """A Constraint whose grammar is in another process. Belongs to one answer and one thread at a time."""

    def __init__(self, sock: socket.socket, name: bytes, n_vocab: int, end: Callable[[], None]) -> None:
        self._sock = sock
        self.name = name
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.setblocking(False)
        self._n_vocab = n_vocab
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._is_begun = False
        self._bits: bytes | None = None
        self._error: Exception | None = None

    is_complete = False
    """Not known at once: after a complete answer the mask allows nothing but its end."""

    def begin(self, grammar: bytes) -> None:
        self._sock.setblocking(True)
        with suppress(OSError):  # it has ended, which reading shows
            write(self._sock, grammar)
        self._sock.setblocking(False)

    @property
    def is_ready(self) -> bool:
        """Whether mask() would not wait."""
        while self._bits is None and self._error is None:
            try:
                part = self._sock.recv(1 << 18)
            except BlockingIOError:
                return False
            except OSError:
                part = b""
            if not part:
                too_much = ArgumentError("the grammar takes too much time or memory")
                self._error = too_much if self._is_begun else OutOfMemoryError(_NO_PROCESS)
            self._buffer += part
            while len(self._buffer) >= (end := 4 + int.from_bytes(self._buffer[:4], "little")) > 4:
                message = bytes(self._buffer[4:end])
                del self._buffer[:end]
                if message[:1] == BEGUN:
                    self._is_begun = True
                elif message[:1] == ANSWERED:
                    self._bits = message[1:]
                else:
                    self._error = ArgumentError(message[1:].decode("utf-8", "replace"))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Until it is ready, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._poll.poll(max(left * 1000, 1))
        return True

    def check(self) -> None:
        """Raises ArgumentError if the grammar has failed, OutOfMemoryError if it was never begun."""
        if self._error is not None:
            raise self._error

    def mask(self, logits: Logits) -> None:
        """As Constraint.mask(); waits for the other process."""
        while not self.wait(1.0):
            pass
        self.check()
        assert self._bits is not None
        logits[~allowed_of_bits(self._bits, logits.size, self._n_vocab)] = -np.inf

    def accept(self, token: int) -> None:
        """As Constraint.accept(), but what is wrong with the token is told by the next mask()."""
        self._bits = None
        with suppress(OSError):
            write(self._sock, token.to_bytes(4, "little"))

    def close(self) -> None:
        """Ends the process, when it next listens. May be called from any thread, and again."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            with suppress(OSError):  # not closed: another thread may be reading
                self._sock.shutdown(socket.SHUT_RDWR)
            end()

    def __del__(self) -> None:
        self.close()
        self._sock.close()
