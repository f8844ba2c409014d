"""Connections: how many there may be, and which are closed because nothing comes or nobody reads.

A connection without a request costs next to nothing, so it never keeps others out: where there are too many,
the one that has been idle the longest makes room.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import socket
import struct
import termios
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_PROGRESS_BYTES = 16 << 10  # that a client reads in the time for it, or all that there is


def address_of(host: object) -> str | None:
    """What is counted as one client: an address, of IPv6 its network. None: this machine, or nobody knows."""
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            network = ipaddress.ip_network((address, 64), strict=False)
            return None if address.is_loopback else str(network)
        address = address.ipv4_mapped
    return None if address.is_loopback else str(address)


class _Counting:
    """A transport that knows how much was written to it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.n_written = 0

    def write(self, data: bytes) -> None:
        self.n_written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connections:
    """Those of one server, all in its event loop."""

    def __init__(
        self,
        *,
        most: int,
        most_of_one: int | None,
        proxies: tuple[str, ...],
        headers_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        """most_of_one: of an address that is neither this machine nor one of the proxies; None: any number.
        The times: for a request's headers to arrive, and for a client to read some of what was written."""
        self._most, self._most_of_one = most, most_of_one
        self._proxies = {address_of(proxy) for proxy in proxies}
        self.headers_timeout_s = headers_timeout_s
        self._write_timeout_s = write_timeout_s
        self.kernel_timeout_ms = max(1, int(2000 * write_timeout_s))  # later: it does not tell the client
        self._all: dict[Any, None] = {}  # the one that was used last is the last
        self._of: Counter[str] = Counter()

    def protocol(self) -> Any:
        return _protocol(self)

    def add(self, connection: Any) -> None:
        """Closes another one, or this one, if there are too many."""
        if not self._all:
            asyncio.get_running_loop().call_later(self._write_timeout_s / 8, self._look)
        peer = connection.transport.get_extra_info("peername")
        address = connection.address = address_of(peer[0]) if peer else None
        is_counted = self._most_of_one is not None and address is not None and address not in self._proxies
        self._all[connection] = None
        if is_counted and address is not None:
            self._of[address] += 1
            if self._of[address] > (self._most_of_one or 0):
                self._close_one(connection, address)
        else:
            connection.address = None
        if len(self._all) > self._most:
            self._close_one(connection, None)

    def used(self, connection: Any) -> None:
        if connection in self._all:
            del self._all[connection]
            self._all[connection] = None

    def remove(self, connection: Any) -> None:
        if connection not in self._all:
            return
        del self._all[connection]
        if connection.address is not None:
            self._of[connection.address] -= 1
            if not self._of[connection.address]:
                del self._of[connection.address]

    def _close_one(self, newest: Any, address: str | None) -> None:
        found = newest
        for other in self._all:
            if other is not newest and other.is_idle and address in (None, other.address):
                found = other
                break
        self.remove(found)  # now, not when the loop comes to it: more may be waiting
        found.cut_off()

    def _look(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._all if not c.reads(now, self._write_timeout_s)]:
            connection.cut_off()
        if self._all:
            asyncio.get_running_loop().call_later(self._write_timeout_s / 8, self._look)


def _protocol(connections: Connections) -> Any:
    """uvicorn's, which obeys these rules."""
    base: Any = AutoHTTPProtocol

    class Ruled(base):  # type: ignore[misc]
        address: str | None = None
        _patience: asyncio.TimerHandle | None = None
        _after: Any = None  # the request after which that began
        _mark: tuple[float, int] | None = None  # when the client last read something, and how much is next

        def connection_made(self, transport: Any) -> None:
            with suppress(OSError, AttributeError):  # what lies in the kernel when it is closed ends, too
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, connections.kernel_timeout_ms)
            super().connection_made(_Counting(transport))
            self._wait()
            connections.add(self)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            connections.used(self)
            super().data_received(data)
            if self.is_idle and (self._patience is None or self._after is not self.cycle):
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._patience is not None:
                self._patience.cancel()
            connections.remove(self)
            super().connection_lost(exc)

        @property
        def is_idle(self) -> bool:
            """Between requests."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def reads(self, now: float, timeout_s: float) -> bool:
            """Whether the client reads what was written, or the time for it is not over."""
            n_written = self.transport.n_written
            n_read = n_written - self.transport.get_write_buffer_size() - self._in_kernel()
            if n_read >= n_written:
                self._mark = None
            elif self._mark is None or n_read >= self._mark[1]:
                self._mark = now, min(n_read + _PROGRESS_BYTES, n_written)
            return self._mark is None or now - self._mark[0] < timeout_s

        def _in_kernel(self) -> int:
            """Bytes that the other side has not acknowledged."""
            sock = self.transport.get_extra_info("socket")
            try:
                return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]  # type: ignore[no-any-return]
            except (OSError, ValueError, AttributeError):
                return 0

        def cut_off(self) -> None:
            """At once: close() would wait until all is written, and the kernel go on trying after abort()."""
            with suppress(OSError, AttributeError):
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

        def _wait(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
            self._after = self.cycle
            self._patience = self.loop.call_later(connections.headers_timeout_s, self._look)

        def _look(self) -> None:
            self._patience = None
            if self.cycle is self._after and self.is_idle and not self.transport.is_closing():
                self.transport.close()

    return Ruled
