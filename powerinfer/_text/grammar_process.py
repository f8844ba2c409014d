"""The process that keeps other people's grammars: what grammars.py starts and talks to.

Compiling a grammar and asking which tokens it allows are native calls that may take minutes for a hundred
bytes, take memory without end, and cannot be interrupted. So each grammar has a process of its own, forked
from this one, which has the vocabulary; the system limits its time and memory, and it can be killed.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

FORK, KILL = b"F", b"K"
"""Commands, before the number of a child: 8 bytes. FORK comes with the child's end of a socket."""
READY = b"R"
BEGUN, ANSWERED, FAILED = b"B", b"M", b"E"
"""What a message of a child begins with. BEGUN comes first, or there is no child; with ANSWERED comes a mask,
with FAILED what is wrong with the grammar."""

COMPILE_CPU_S = 5
MASK_CPU_S = 2
MEMORY_BYTES = 512 << 20
"""Beyond what the vocabulary takes."""
FAIR_S = 1.0
"""Of compiling, with a tenth of what others take; then with what they leave."""
DEAR_S = 0.02
"""A mask that takes longer is computed when nobody else wants the processor, and so are the next ones."""


def write(sock: socket.socket, data: bytes) -> None:
    sock.sendall(len(data).to_bytes(4, "little") + data)


def read(sock: socket.socket) -> bytes | None:
    """None at the end."""
    size = _exactly(sock, 4)
    return None if size is None else _exactly(sock, int.from_bytes(size, "little"))


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    parts = []
    while n:
        part = sock.recv(min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def main(number: int) -> None:
    """number: of the socket that commands come from. The vocabulary comes on stdin."""
    control = socket.socket(fileno=number)
    for name in (signal.SIGINT, signal.SIGTERM):  # for all of a terminal; this one ends with its parent
        signal.signal(name, signal.SIG_IGN)
    try:
        from . import grammar

        tokenizer = pickle.load(sys.stdin.buffer)
        grammar.vocabulary(tokenizer)
    except Exception as error:
        control.send(FAILED + str(error).encode()[:1000])
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody writes to them
    control.send(READY)
    _serve(control, tokenizer)


def _serve(control: socket.socket, tokenizer: Any) -> None:
    children: dict[bytes, int] = {}
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    poll = select.poll()
    for end in (control, wake):
        poll.register(end, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if wake.fileno() in ready:
            wake.recv(4096)
            ended = set(_ended())
            children = {name: pid for name, pid in children.items() if pid not in ended}
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        name = message[1:]
        if message[:1] == FORK:
            try:
                pid = os.fork()
            except OSError:  # the other end sees that nobody is there
                os.close(fds[0])
                continue
            if not pid:
                signal.set_wakeup_fd(-1)
                for end in (control, wake, woken):
                    end.close()
                _child(socket.socket(fileno=fds[0]), tokenizer)
            children[name] = pid
            os.close(fds[0])
        elif name in children:  # not waited for, so the number is its own still
            os.kill(children[name], signal.SIGKILL)
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)


def _ended() -> Any:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            yield pid


def _limit_cpu(seconds: int) -> None:
    """From now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _child(sock: socket.socket, tokenizer: Any) -> None:
    """Never returns."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            n_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        _limit_cpu(COMPILE_CPU_S)
        write(sock, BEGUN)
        _answer(sock, tokenizer)
    except BaseException as error:
        with suppress(BaseException):
            write(sock, FAILED + (str(error) or type(error).__name__).encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _yield_processor(thread: int | None = None, level: int = 19) -> None:
    """A thread, this one say, runs when others leave it time, or with less of theirs at a lower level."""
    os.setpriority(os.PRIO_PROCESS, thread or threading.get_native_id(), level)


def _answer(sock: socket.socket, tokenizer: Any) -> None:
    from . import grammar

    given = read(sock)
    if given is None:
        return
    kind, text = given[:1], given[1:].decode("utf-8", "surrogatepass")
    made: list[Any] = []

    def compile() -> None:
        _yield_processor(level=10)
        try:
            form = grammar.LlamaGrammar.unchecked(grammar.of_gbnf(text) if kind == b"G" else text)
            constraint = grammar.Constraint(form, tokenizer)
            begin = time.thread_time()
            made.extend((constraint, constraint.bits(), time.thread_time() - begin))
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=compile)  # priority belongs to threads, and cannot be raised again
    thread.start()
    thread.join(FAIR_S)
    if thread.is_alive():
        _yield_processor(thread.native_id)
    thread.join()
    if len(made) == 1:
        raise made[0]
    constraint, bits, seconds = made
    is_dear = False
    while True:
        if not is_dear and seconds > DEAR_S:
            is_dear = True
            _yield_processor()
        write(sock, ANSWERED + bits)
        _limit_cpu(MASK_CPU_S)
        token = read(sock)
        if token is None:
            return
        begin = time.thread_time()
        constraint.accept(int.from_bytes(token, "little"))
        bits = constraint.bits()
        seconds = time.thread_time() - begin


if __name__ == "__main__":
    main(int(sys.argv[1]))
