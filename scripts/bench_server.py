"""What clients of `powerinfer serve` see: the time to the first token, between tokens, and tokens/s together.

    python scripts/bench_server.py [--model demo] [--clients 1,8,32,64] [--seconds 10] [--hostile idle,unread]
    python scripts/bench_server.py --url http://127.0.0.1:8080 --json

Starts a server (or takes the one at --url), and keeps N clients on it, each of which asks for one streamed
completion after the other. Any server of OpenAI's /v1/completions will do. Its HTTP client is its own,
plain sockets, so that it costs little beside the server, with which it shares the machine.

A time between tokens is one between two parts that were read with text in them. Several tokens may come in
one part; tokens/s count those that the server's usage tells, of each answer the share whose text came in the
time that is measured. That has prompts in it, and the time from the end of an answer to the next first token,
in which a client streams nothing. What came "while all stream" is counted between the first token of the last
answer that began and the last of the first that ended, again and again: it compares with what
`powerinfer bench -p 0 -np N` tells, which reads no prompts. Answers of one length begin and end together
again and again: of two or three such times in a run one more or less is some 3 % of its tokens/s.

With many tokens a second one process of clients is not enough: --processes shares them out.

--hostile adds clients that are not measured, --rude of each kind (8): long (prompts of --long tokens, one
after the other), idle (a connection without a request),
unread (a stream that nobody reads), dear (a grammar that takes long to compile), cancelled (a stream that is
left after its first part).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORDS = ("once", "upon", "a", "time", "there", "was", "cat", "dog", "king", "tree", "who", "lived")
DEAR = 'root ::= ([a-z]* [a-z0-9]* " "?){200}'  # a second of a processor to compile
READ_BYTES = 1 << 16


class WrongError(Exception):
    """An answer that no server should give."""


@dataclass
class Address:
    host: str
    port: int


@dataclass
class Seen:
    """By the clients that are measured."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    n_tokens: float = 0
    n_answers: int = 0
    parts: list[list[tuple[float, float]]] = field(default_factory=list)
    """Of each answer, whenever it came: when each part was read, and about how many tokens it had."""
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.first_s += other.first_s
        self.between_s += other.between_s
        self.n_tokens += other.n_tokens
        self.n_answers += other.n_answers
        self.parts += other.parts
        self.statuses += other.statuses
        self.wrong += other.wrong


class Connection:
    """One HTTP/1.1 connection, a request after the other."""

    def __init__(self, at: Address, *, small: bool = False) -> None:
        """small: holds little that was not read."""
        self._at, self._small = at, small
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            sock = socket.socket()
            if self._small:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, (self._at.host, self._at.port))
            except BaseException:
                sock.close()
                raise
            self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
        return self._reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        """Sends a request and reads the answer's head; body() reads the rest."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._at.host}:{self._at.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        is_used = self._writer is not None
        try:
            reader, first = await self._sent(head.encode() + data)
        except (EOFError, ConnectionError):
            if not is_used:
                raise
            self.close()  # by the server between two requests, as it may
            reader, first = await self._sent(head.encode() + data)
        headers = {}
        while line := (await reader.readuntil(b"\r\n")).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(first[1]), headers

    async def _sent(self, data: bytes) -> tuple[asyncio.StreamReader, list[bytes]]:
        """The first line of the answer."""
        reader, writer = await self.open()
        writer.write(data)
        await writer.drain()
        return reader, (await reader.readuntil(b"\r\n")).split()

    async def body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The parts in which it comes."""
        reader, _ = await self.open()
        if headers.get("transfer-encoding") != "chunked":
            if "content-length" not in headers:
                raise WrongError("an answer says neither its length nor that it is chunked")
            yield await reader.readexactly(int(headers["content-length"]))
            return
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            data = await reader.readexactly(size + 2)
            yield data[:-2]
        await reader.readuntil(b"\r\n")


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """What stands behind `data:`."""
    left = b""
    async for part in parts:
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


class Client:
    """One that is measured."""

    def __init__(self, at: Address, args: argparse.Namespace, seed: int, seen: Seen) -> None:
        self._args, self._seen = args, seen
        self._random = random.Random(seed)
        self._connection = Connection(at)

    def _body(self) -> dict[str, Any]:
        prompt = " ".join(self._random.choices(WORDS, k=self._args.words))
        body = {"prompt": prompt, "max_tokens": self._args.tokens, "temperature": 1.0, "stream": True}
        return body | {"model": self._args.name, "stream_options": {"include_usage": True}}

    async def run(self, since: float, until: float) -> None:
        """What comes between these times counts, whenever its answer began: a server is never seen empty."""
        while time.perf_counter() < until:
            await self._noted(since, until)

    async def _noted(self, since: float, until: float) -> None:
        try:
            await self._one(since, until)
        except (OSError, EOFError, ValueError, KeyError, WrongError) as error:
            self._seen.wrong.append(repr(error)[:300])
            self._connection.close()
            await asyncio.sleep(0.1)

    async def _one(self, since: float, until: float) -> None:
        seen, begin = self._seen, time.perf_counter()
        status, headers = await self._connection.post("/v1/completions", self._body())
        seen.statuses[status] += 1
        parts = self._connection.body(headers)
        if status != 200:
            said = b"".join([part async for part in parts])
            if status != 429:
                raise WrongError(f"{status}: {said[:200]!r}")
            await asyncio.sleep(min(float(headers["retry-after"]), 1))  # KeyError: it must be there
            return
        last, n_tokens, n_all, n_counted, end = begin, None, 0, 0, ""
        came: list[tuple[float, int]] = []
        async for data in events(parts):
            end = data
            if data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise WrongError(data[:200])
            if chunk.get("usage"):
                n_tokens = int(chunk["usage"]["completion_tokens"])
            if chunk["choices"] and (text := chunk["choices"][0]["text"]):
                now = time.perf_counter()
                if since <= now <= until:
                    (seen.between_s if n_all else seen.first_s).append(now - last)
                    n_counted += len(text)
                n_all += len(text)
                came.append((now, len(text)))
                last = now
        if end != "[DONE]" or n_tokens is None:
            raise WrongError(f"a stream ended with {end[:200]!r} and usage {n_tokens}")
        seen.n_answers += since <= time.perf_counter() <= until
        each = n_tokens / max(n_all, 1)
        seen.n_tokens += each * n_counted
        seen.parts.append([(at, each * length) for at, length in came])

    def close(self) -> None:
        self._connection.close()


# -- clients that one does not wish for


def _asks(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {"model": args.name, "prompt": "once", "max_tokens": 400, "stream": True} | more


async def long(at: Address, args: argparse.Namespace) -> None:
    connection = Connection(at)
    try:
        ids = [random.randint(5, 250) for _ in range(args.long)]
        status, headers = await connection.post("/v1/completions", _asks(args, prompt=ids, max_tokens=4))
        said = b"".join([part async for part in connection.body(headers)])
        if status != 200:
            print(f"a long prompt: {status} {said[:200]!r}", file=sys.stderr)
            await asyncio.sleep(1)
    finally:
        connection.close()


async def idle(at: Address, args: argparse.Namespace) -> None:
    connection = Connection(at)
    try:
        reader, _ = await connection.open()
        await reader.read()  # until the server closes it
    finally:
        connection.close()


async def unread(at: Address, args: argparse.Namespace) -> None:
    connection = Connection(at, small=True)
    try:
        await connection.post("/v1/completions", _asks(args, logprobs=5))
        await asyncio.sleep(3600)
    finally:
        connection.close()


async def dear(at: Address, args: argparse.Namespace) -> None:
    connection = Connection(at)
    try:
        _, headers = await connection.post("/v1/completions", _asks(args, guided_grammar=DEAR))
        async for _ in connection.body(headers):
            pass
    finally:
        connection.close()


async def cancelled(at: Address, args: argparse.Namespace) -> None:
    connection = Connection(at)
    try:
        _, headers = await connection.post("/v1/completions", _asks(args))
        async for _ in connection.body(headers):
            return
    finally:
        connection.close()


HOSTILE: dict[str, Callable[[Address, argparse.Namespace], Awaitable[None]]] = {
    "long": long,
    "idle": idle,
    "unread": unread,
    "dear": dear,
    "cancelled": cancelled,
}


async def again(kind: str, at: Address, args: argparse.Namespace, met: Counter[str]) -> None:
    """For ever: whatever the server does to such a client is right."""
    while True:
        with contextlib.suppress(OSError, EOFError, ValueError, WrongError):
            await HOSTILE[kind](at, args)
        met[kind] += 1
        await asyncio.sleep(0.05)


# -- a measurement


def share(times: list[float], percent: int) -> float | None:
    """In milliseconds; None without times."""
    times = sorted(times)
    return 1000 * times[min(len(times) - 1, len(times) * percent // 100)] if times else None


def while_all_stream(
    parts: Sequence[Sequence[tuple[float, float]]], n: int, since: float, until: float
) -> tuple[float, float]:
    """Tokens that came while n answers were under way, between their first and their last parts, and for how
    many seconds they were, between these times."""
    ends = [edge for own in parts if own for edge in ((own[0][0], 1), (own[-1][0], -1))]
    spans, n_under_way, begin = [], 0, since
    for at, change in sorted([*ends, (until, 0)]):
        if n_under_way >= n and max(begin, since) < min(at, until):
            spans.append((max(begin, since), min(at, until)))
        n_under_way, begin = n_under_way + change, at
    seconds = sum(end - first for first, end in spans)
    came = sorted(part for own in parts for part in own)
    n_tokens, i = 0.0, 0
    for first, end in spans:
        while i < len(came) and came[i][0] <= first:
            i += 1
        while i < len(came) and came[i][0] <= end:
            n_tokens += came[i][1]
            i += 1
    return n_tokens, seconds


async def watch(
    at: Address, seeds: Sequence[int], args: argparse.Namespace, since: float, until: float
) -> Seen:
    """What a client for each of the seeds sees."""
    seen = Seen()
    clients = [Client(at, args, seed, seen) for seed in seeds]
    tasks = [asyncio.ensure_future(client.run(since, until)) for client in clients]
    await asyncio.wait(tasks, timeout=until - time.perf_counter() + args.patience)
    stuck = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    seen.wrong += [repr(error) for error in ended if isinstance(error, Exception)]
    for client in clients:
        client.close()
    if stuck:
        seen.wrong.append(f"{stuck} answers did not end in {args.patience} s more")
    return seen


def watch_apart(at: Address, seeds: Sequence[int], args: argparse.Namespace, *times: float) -> Seen:
    """The same in a process of its own: their clock is one."""
    return asyncio.run(watch(at, seeds, args, *times))


async def measure(at: Address, n: int, args: argparse.Namespace, pool: Executor) -> dict[str, Any]:
    met: Counter[str] = Counter()
    rude = [
        asyncio.ensure_future(again(kind, at, args, met)) for kind in args.hostile for _ in range(args.rude)
    ]
    loop, seen = asyncio.get_running_loop(), Seen()
    try:
        if rude:
            await asyncio.sleep(0.5)
        since = time.perf_counter() + args.warm
        times = since, since + args.seconds
        shares = [range(i, n, args.processes) for i in range(args.processes)]
        for part in await asyncio.gather(
            *(loop.run_in_executor(pool, watch_apart, at, share, args, *times) for share in shares if share)
        ):
            seen.add(part)
    finally:
        for each in rude:
            each.cancel()
        await asyncio.gather(*rude, return_exceptions=True)
    n_tokens, steady_s = while_all_stream(seen.parts, n, *times)
    return {
        "clients": n,
        "tokens_per_s": seen.n_tokens / args.seconds,
        "steady_tokens_per_s": n_tokens / steady_s if steady_s else None,
        "steady_s": steady_s,
        "answers": seen.n_answers,
        "first_ms": [share(seen.first_s, 50), share(seen.first_s, 99)],
        "between_ms": [share(seen.between_s, 50), share(seen.between_s, 99)],
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "hostile": dict(met),
        "wrong": seen.wrong,
    }


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Any:
    """The address of one, which is ended afterwards if it was started here."""
    if args.url is not None:
        parts = urlsplit(args.url)
        if parts.scheme != "http" or parts.hostname is None:
            raise SystemExit(f"--url {args.url!r} is not http://HOST:PORT")
        yield Address(parts.hostname, parts.port or 80)
        return
    words = ["serve", args.model, "--port", "0", "-np", str(args.parallel)]
    command = [sys.executable, "-m", "powerinfer", *words, "--max-waiting", "256"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        line = child.stderr.readline()
        if "http://" not in line:
            raise SystemExit(line + child.stderr.read())
        parts = urlsplit(line.split()[1])
        assert parts.hostname is not None and parts.port is not None
        yield Address(parts.hostname, parts.port)
        if child.poll() is not None:
            raise SystemExit(f"the server has ended with {child.returncode}")
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
    finally:
        child.kill()
        child.wait()


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="what `powerinfer serve` opens")
    parser.add_argument("--parallel", type=int, default=8, help="its -np")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--name", help="of the model in requests (--model)")
    parser.add_argument("--clients", default="1,8,32,64", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--seconds", type=float, default=10, help="measured for each number of clients")
    parser.add_argument("--warm", type=float, default=1, help="seconds before them")
    parser.add_argument("--patience", type=float, default=60, help="seconds for the last answers to end")
    parser.add_argument("--words", type=int, default=12, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--hostile", default="", help=f"kinds with commas between: {','.join(HOSTILE)}")
    parser.add_argument("--rude", type=int, default=8, help="clients of each of these kinds")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.hostile = [kind for kind in args.hostile.split(",") if kind]
    if unknown := set(args.hostile) - set(HOSTILE):
        parser.error(f"--hostile does not know {', '.join(sorted(unknown))}")
    args.name = args.name or args.model

    on = machine()
    with server(args) as at, ProcessPoolExecutor(args.processes) as pool:
        list(pool.map(abs, range(args.processes)))  # they begin now
        rows = [asyncio.run(measure(at, n, args, pool)) for n in args.clients]
    wrong = [said for row in rows for said in row["wrong"]]
    if args.json:
        how = {key: value for key, value in vars(args).items() if key != "json"}
        print(json.dumps({"machine": on, "options": how, "rows": rows}, indent=1))
        return int(bool(wrong))
    where = args.url or f"powerinfer serve {args.model} -np {args.parallel}"
    print(f"{where}; {on['cpu']}, {on['cores']} cores, {on['system']}, Python {on['python']}, {on['date']}")
    print(
        f"prompts of {args.words} words, answers of up to {args.tokens} tokens, {args.seconds:g} s each",
        end="",
    )
    print(f"; hostile: {', '.join(args.hostile)}, {args.rude} of each" if args.hostile else "")
    print(
        "\n| clients | tokens/s | while all stream | answers | first token p50, p99 ms "
        "| between p50, p99 ms | told to wait |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        first, between = (", ".join(map(shown, row[name])) for name in ("first_ms", "between_ms"))
        told = row["statuses"].get("429", 0)
        steady = row["steady_tokens_per_s"]
        share_s = row["steady_s"] / args.seconds
        shown_steady = "-" if steady is None else f"{steady:.0f} ({share_s:.0%} of the time)"
        print(
            f"| {row['clients']} | {row['tokens_per_s']:.0f} | {shown_steady} | {row['answers']} "
            f"| {first} | {between} | {told} |"
        )
    for said in wrong[:20]:
        print("WRONG", said)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
