"""Many clients of all kinds on one server for a while: does it stay up, and does its memory stay flat?

    python scripts/soak_server.py --minutes 60 [--clients 50] [--settle 10] [--model demo]

Starts `powerinfer serve` and lets every client do one thing after the other: short and long answers, streams,
streams that are left, streams that are read slowly, requests that are left before they are answered, answers
held to a form, calls of tools, the other protocols, answers that are stored, wrong and malformed requests,
texts that are too long, embeddings, many prompts with the same beginning. Needs httpx.

Ends with 1 if there was an error that is no client's, if something was still under way at the end, or if the
server's memory grew by more than --growth MiB from the minute after --settle minutes to the last minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

SYSTEM = "You are a helpful animal who tells short stories to children. " * 6
WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "cat",
    "dog",
    "king",
    "tree",
    "who",
    "lived",
    "and",
    "house",
)
JSON = {"Content-Type": "application/json"}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"}},
            "required": ["animal", "legs"],
            "additionalProperties": False,
        }
    },
}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["sun", "sea"]}}}}


@dataclass
class Report:
    """What was seen."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    n_tokens: int = 0
    memory: list[tuple[float, int, int, int]] = field(default_factory=list)  # s, bytes, threads, files

    def add(self, kind: str, seconds: float) -> None:
        self.seconds.setdefault(kind, []).append(seconds)


class Client:
    """One of many, which does one thing after the other."""

    def __init__(self, url: str, seed: int, report: Report) -> None:
        self.random = random.Random(seed)
        self.http = httpx.AsyncClient(base_url=url, timeout=120)
        self.report = report
        self.was_refused = False

    def text(self, n: int) -> str:
        return " ".join(self.random.choices(WORDS, k=n))

    def body(self, *, stream: bool = False) -> dict[str, object]:
        """A chat or a completion, of any length."""
        n = int(self.random.paretovariate(1.2) * 4)
        common = {"max_tokens": self.random.choice((1, 8, 32, 100)), "stream": stream, "temperature": 1.0}
        if self.random.random() < 0.5:
            return common | {"prompt": self.text(min(n, 150))}
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text(min(n, 80))}]
        return common | {"messages": messages}

    @staticmethod
    def path(body: dict[str, object]) -> str:
        return "/v1/chat/completions" if "messages" in body else "/v1/completions"

    async def whole(self) -> None:
        body = self.body()
        answer = await self.http.post(self.path(body), json=body)
        if self.accepts(answer, 200):
            self.report.n_tokens += answer.json()["usage"]["completion_tokens"]

    async def embedding(self) -> None:
        texts = [self.text(self.random.randint(1, 60)) for _ in range(self.random.randint(1, 4))]
        self.accepts(await self.http.post("/v1/embeddings", json={"input": texts}), 200)

    async def stream(self, *, leaves: bool = False, sleeps: bool = False) -> None:
        body = self.body(stream=True)
        begin, first = time.perf_counter(), True
        async with self.http.stream("POST", self.path(body), json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self.accepts(answer, 200)
                return
            last = ""
            async for line in answer.aiter_lines():
                if first:
                    self.report.add("first part", time.perf_counter() - begin)
                    first = False
                if leaves and self.random.random() < 0.2:
                    return
                if sleeps:
                    await asyncio.sleep(self.random.random() * 0.2)
                last = line or last
            if last != "data: [DONE]":
                self.report.wrong.append(f"a stream ended with {last[:200]!r}")

    async def events(self, path: str, body: dict[str, object], end: str) -> None:
        """A stream of another protocol; end: what its last line has."""
        async with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        self.report.outcomes[str(answer.status_code)] += 1
        self.was_refused = answer.status_code == 429
        if answer.status_code != 429 and (answer.status_code != 200 or end not in lines[-1]):
            self.report.wrong.append(f"{path}: {answer.status_code}, {lines[-1][:200] if lines else ''}")

    async def form(self) -> None:
        said = [{"role": "user", "content": self.text(5)}]
        body = {"messages": said, "max_tokens": 60, "response_format": FORM}
        answer = await self.http.post("/v1/chat/completions", json=body)
        if self.accepts(answer, 200) and answer.json()["choices"][0]["finish_reason"] == "stop":
            json.loads(answer.json()["choices"][0]["message"]["content"])

    async def tool(self) -> None:
        body: dict[str, object] = {"messages": [{"role": "user", "content": self.text(5)}], "max_tokens": 60}
        body |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
        await self.events("/v1/chat/completions", body, "[DONE]")

    async def messages(self) -> None:
        body: dict[str, object] = {"messages": [{"role": "user", "content": self.text(20)}], "max_tokens": 30}
        await self.events("/v1/messages", body, "message_stop")

    async def ollama(self) -> None:
        said = [{"role": "user", "content": self.text(20)}]
        body: dict[str, object] = {"model": "demo", "messages": said, "options": {"num_predict": 30}}
        await self.events("/api/chat", body, '"done":true')

    async def stored(self) -> None:
        """Two turns, and gone again."""
        body = {"input": self.text(20), "max_output_tokens": 20, "store": True}
        first = await self.http.post("/v1/responses", json=body)
        if not self.accepts(first, 200):
            return
        id = first.json()["id"]
        more: dict[str, object] = {"input": "and", "max_output_tokens": 20, "previous_response_id": id}
        await self.events("/v1/responses", more, "response.")
        self.accepts(await self.http.delete(f"/v1/responses/{id}"), 200)

    async def tokens(self) -> None:
        self.accepts(await self.http.post("/tokenize", json={"content": self.text(300)}), 200)

    async def leaves_at_once(self) -> None:
        body = self.body() | {"max_tokens": 100}
        with contextlib.suppress(httpx.ReadTimeout):
            await self.http.post(self.path(body), json=body, timeout=httpx.Timeout(5, read=0.02))

    async def malformed(self) -> None:
        data = self.random.choice(
            (b"", b"{", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 5000)
        )
        self.accepts(await self.http.post("/v1/completions", content=data, headers=JSON), 400)

    async def wrong(self) -> None:
        body = self.random.choice(
            ({"prompt": 5}, {"prompt": "a", "max_tokens": -2}, {"prompt": "a", "n": "x"}, {"promt": "a"})
        )
        self.accepts(await self.http.post("/v1/completions", json=body), 422)

    async def too_long(self) -> None:
        self.accepts(await self.http.post("/v1/completions", json={"prompt": self.text(20_000)}), 400)

    async def looks(self) -> None:
        path = self.random.choice(("/health", "/metrics", "/v1/engine", "/v1/models"))
        self.accepts(await self.http.get(path), 200)

    def accepts(self, answer: httpx.Response, status: int) -> bool:
        """Notes what came; busy is an answer too."""
        self.report.outcomes[str(answer.status_code)] += 1
        self.was_refused = answer.status_code == 429
        if answer.status_code not in (status, 429):
            said = answer.text[:300].replace("\n", " ")
            self.report.wrong.append(f"{answer.request.url.path}: {answer.status_code}, not {status}: {said}")
        return answer.status_code == status

    async def run(self, until: float) -> None:
        things: list[tuple[int, str, Callable[[], Awaitable[None]]]] = [
            (30, "answer", self.whole),
            (25, "stream", self.stream),
            (8, "stream, left", lambda: self.stream(leaves=True)),
            (5, "stream, read slowly", lambda: self.stream(sleeps=True)),
            (5, "left at once", self.leaves_at_once),
            (8, "embedding", self.embedding),
            (4, "form", self.form),
            (4, "tool", self.tool),
            (4, "messages", self.messages),
            (4, "ollama", self.ollama),
            (3, "stored", self.stored),
            (3, "tokens", self.tokens),
            (5, "malformed", self.malformed),
            (5, "wrong", self.wrong),
            (2, "too long", self.too_long),
            (5, "look", self.looks),
        ]
        async with self.http:
            while time.monotonic() < until:
                _, name, thing = self.random.choices(things, weights=[weight for weight, _, _ in things])[0]
                begin, self.was_refused = time.perf_counter(), False
                try:
                    await thing()
                except Exception as error:
                    self.report.wrong.append(f"{name}: {error!r}")
                self.report.add(
                    "told to come again" if self.was_refused else name, time.perf_counter() - begin
                )


def look(pid: int) -> tuple[int, int, int]:
    """Resident bytes, threads and open files of a process."""
    folder = Path("/proc") / str(pid)
    pages = int((folder / "statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir(folder / "task")),
        len(os.listdir(folder / "fd")),
    )


async def watch(pid: int, report: Report, until: float) -> None:
    begin = time.monotonic()
    while time.monotonic() < until:
        report.memory.append((time.monotonic() - begin, *look(pid)))
        await asyncio.sleep(1)


async def soak(url: str, pid: int, args: argparse.Namespace) -> Report:
    report = Report()
    until = time.monotonic() + 60 * args.minutes
    clients = [Client(url, args.seed + i, report) for i in range(args.clients)]
    await asyncio.gather(watch(pid, report, until), *(client.run(until) for client in clients))
    async with httpx.AsyncClient(base_url=url) as http:
        for _ in range(100):
            view = (await http.get("/v1/engine")).json()
            if not view["running"] and not view["waiting"]:
                break
            await asyncio.sleep(0.1)
        else:
            report.wrong.append(f"still under way at the end: {json.dumps(view)[:200]}")
    return report


def children(pid: int) -> list[int]:
    """Processes below one."""
    tasks = (Path("/proc") / str(pid) / "task").iterdir()
    own = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own + [below for child in own for below in children(child)]


def show(report: Report, settle_s: float, growth_mib: float) -> int:
    print(f"{'what':22}{'count':>8}{'p50 s':>9}{'p99 s':>9}{'max s':>9}")
    for kind, times in sorted(report.seconds.items()):
        times.sort()
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        print(f"{kind:22}{len(times):8}{p50:9.3f}{p99:9.3f}{times[-1]:9.3f}")
    print("statuses:", dict(sorted(report.outcomes.items())), "tokens of whole answers:", report.n_tokens)
    end_s = report.memory[-1][0]
    begin_s = min(settle_s, end_s / 3)
    for at in (0.0, *(begin_s + (end_s - begin_s) * i / 5 for i in range(6))):
        _, n_bytes, threads, files = min(report.memory, key=lambda m: abs(m[0] - at))
        print(f"{at:6.0f} s  {n_bytes / (1 << 20):8.1f} MiB  {threads} threads  {files} files")
    minute = min(60.0, end_s / 6)
    settled = median(m[1] for m in report.memory if begin_s <= m[0] <= begin_s + minute)
    grown = (median(m[1] for m in report.memory if m[0] >= end_s - minute) - settled) / (1 << 20)
    for line in report.wrong[:20]:
        print("WRONG", line)
    print(
        f"{len(report.wrong)} errors that are no client's; "
        f"memory grew by {grown:.1f} MiB after the first {begin_s / 60:.1f} minutes"
    )
    return int(bool(report.wrong) or grown > growth_mib)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle", type=float, default=10, metavar="MINUTES", help="at most a third of all")
    parser.add_argument("--growth", type=float, default=3, metavar="MIB")
    args = parser.parse_args()
    words = ["serve", args.model, "--port", "0", "-c", "512", "-np", "8", "--max-waiting", "30"]
    server = subprocess.Popen([sys.executable, "-m", "powerinfer", *words], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = server.stderr.readline()
        if "http://" not in line:
            print(line + server.stderr.read(), file=sys.stderr)
            return 1
        report = asyncio.run(soak(line.split()[1], server.pid, args))
        if len(left := children(server.pid)) > 1:  # the one that makes grammars stays
            report.wrong.append(f"{len(left)} processes are left")
        code = show(report, 60 * args.settle, args.growth)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        said = server.stderr.read()
        if said:
            print(f"the server said:\n{said[:3000]}")
        return code if server.returncode == 0 and not said else 1
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
