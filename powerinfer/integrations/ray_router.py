"""Between Ray's proxy and several replicas: a request goes where the beginning of its text was computed last,
so that its K and V are there.

Ray's proxy hands requests on before their bodies have come, so an entry stands before the replicas: it reads
the body, and Ray asks PrefixRouter which replica gets it. Ray's own router by prefixes needs vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..server.json_body import parsed
from ..server.problems import Problem
from ..server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]

MAX_KNOWN = 100_000
"""Beginnings of texts that a router remembers."""
_TEXT_CUTS = [64 << i for i in range(20)]
_SENT = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
)


def beginnings(body: Any) -> list[str]:
    """Names of the beginnings of a request's text, the shorter ones first: up to each of its messages, or
    up to 64, 128, 256 ... characters. Those of a conversation's next request begin with the same."""
    if not isinstance(body, Mapping):
        return []
    head = [body.get(name) for name in ("model", "lora", "system", "instructions", "tools")]
    said = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), None)
    if isinstance(said, str):
        parts: Any = [said[a:b] for a, b in zip([0, *_TEXT_CUTS], _TEXT_CUTS, strict=False) if b <= len(said)]
        parts = parts or [said]
    else:
        parts = said if isinstance(said, list) else []
    so_far = hashlib.blake2b(_bytes(head), digest_size=16)
    names = []
    for part in parts[:1000]:
        so_far.update(_bytes(part))
        names.append(so_far.copy().hexdigest())
    return names


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica that has computed the longest beginning of a request's text, unless it has much
    more to do than another; else the one with the least to do."""

    def initialize_state(self, *, most_ahead: int = 8) -> None:  # type: ignore[override, unused-ignore]
        """most_ahead: requests that the replica may have more than the one with the fewest."""
        self._most_ahead = most_ahead
        self._known: OrderedDict[str, ReplicaID] = OrderedDict()
        self._n_sent: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        n_open = {
            r.replica_id: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas
        }
        # Of several with as little to do the one that was sent the least, or the first would get all.
        by_load = sorted(candidate_replicas, key=lambda r: (n_open[r.replica_id], self._n_sent[r.replica_id]))
        for name in reversed(_names(pending_request)):
            replica_id = self._known.get(name)
            if replica_id in n_open and n_open[replica_id] - min(n_open.values()) <= self._most_ahead:
                return [[self.curr_replicas[replica_id]], by_load]
        return [by_load[:1], by_load[1:]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._n_sent[replica_id] += 1
        for name in _names(pending_request):
            self._known[name] = replica_id
            self._known.move_to_end(name)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _names(request: PendingRequest | None) -> list[str]:
    return [] if request is None else request.kwargs.get("beginnings", [])


class Entry:
    """An ASGI application that hands requests on to replicas."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        """replicas: Ray's handle of them."""
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_s

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self._body_timeout_s)
        except asyncio.TimeoutError:
            await Problem(408, "the body did not arrive in time", code="timeout").response()(
                scope, receive, send
            )
            return
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        if body is None:
            return
        names: list[str] = []
        if body:
            with suppress(Problem):  # which the replica tells
                names = beginnings(await parsed(body))
        sent = {name: scope[name] for name in _SENT if name in scope}
        answer = self._replicas.remote(sent, body, beginnings=names)
        write = asyncio.ensure_future(_write(answer, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({write, gone}, return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        finally:
            if not write.done():
                answer.cancel()
            write.cancel()
            gone.cancel()

    async def _read(self, receive: Any) -> bytes | None:
        """None: the client has gone."""
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            if sum(map(len, parts)) > self._max_body_bytes:
                said = f"the body is larger than {self._max_body_bytes} bytes"
                raise Problem(413, said, code="body_too_large")
            if not message.get("more_body", False):
                return b"".join(parts)


async def _write(answer: AsyncIterator[list[Message]], send: Any) -> None:
    async for messages in answer:
        for message in messages:
            await send(message)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(app: Any, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
    """What an ASGI application sends to a request; those messages together that come while nobody reads. Left
    early, it is told that the client has gone."""
    given = False
    gone, some = asyncio.Event(), asyncio.Event()
    ready: list[Message] = []

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        ready.append(message)
        some.set()

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: some.set())
    try:
        while not task.done() or ready:
            await some.wait()
            some.clear()
            messages = ready[:]
            ready.clear()
            if messages:
                yield messages
        task.result()
    finally:
        gone.set()
        if not task.done():
            await asyncio.wait({task}, timeout=1)
            task.cancel()
