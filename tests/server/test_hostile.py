"""The HTTP server: clients that want to stall it. Grammars: test_grammars.py."""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from powerinfer import AsyncLlama
from tests.server.conftest import error_of, serving
from tests.server.test_server_load import FOREVER, Steps, raw, steps, wait_for, wait_until_idle

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

__all__ = ["steps"]


def place(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("http://").split(":")
    return host, int(port)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it, for which this waits."""
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def test_answers_are_sent_at_once(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm is off on each connection: else each answer after the first waits for 40 ms."""
    from powerinfer.server.connections import Connections

    seen: list[int] = []
    add = Connections.add

    def added(self: Connections, connection: Any) -> None:
        sock = connection.transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        add(self, connection)

    monkeypatch.setattr(Connections, "add", added)
    with serving(demo, ends_model=False) as address:
        assert httpx.get(f"{address}/health").status_code == 200
    assert seen and all(seen)


# -- connections


def test_idle_connections_keep_nobody_out(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False, max_connections=5) as address, ExitStack() as stack:
        where = place(address)
        idle = [stack.enter_context(closing(socket.create_connection(where, 20))) for _ in range(12)]
        assert httpx.get(f"{address}/health").status_code == 200
        asked = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120)
        assert asked.status_code == 200
        assert all(is_closed(sock) for sock in idle[:6])
        assert len(idle) == 12


def test_connections_with_a_request_are_kept(demo: AsyncLlama, steps: Steps) -> None:
    with serving(demo, ends_model=False, max_connections=3) as address, ExitStack() as stack:
        asked = raw(address, FOREVER | {"max_tokens": 3})
        wait_for(lambda: demo.stats().running + demo.stats().waiting == 1)
        for _ in range(9):
            stack.enter_context(closing(socket.create_connection(place(address), 20)))
        assert httpx.get(f"{address}/health").status_code == 200
        steps.allow()
        assert b"200 OK" in asked.recv(1000)
        asked.close()
    wait_until_idle(demo)


def test_health_answers_when_all_places_are_taken(demo: AsyncLlama, steps: Steps) -> None:
    with serving(demo, ends_model=False) as address:
        socks = [raw(address, FOREVER) for _ in range(40)]
        wait_for(lambda: demo.stats().running + demo.stats().waiting == 12)
        for method in ("GET", "HEAD"):
            assert httpx.request(method, f"{address}/health").status_code == 200
        said = httpx.post(f"{address}/v1/completions", json={"prompt": "a"}, timeout=120)
        assert said.status_code == 429 and int(said.headers["retry-after"]) >= 1
        assert error_of(said)["type"] == "rate_limit_error"
        for sock in socks:
            sock.close()
        steps.allow()
    wait_until_idle(demo)


def test_limits_of_an_address(demo: AsyncLlama, steps: Steps) -> None:
    """This machine has none, but those for whom its proxy asks have."""
    settings: dict[str, Any] = {"max_per_address": 2, "trusted_proxies": ("127.0.0.1",)}
    with serving(demo, ends_model=False, **settings) as address, ExitStack() as stack:

        def ask(client: str, **more: Any) -> Any:
            headers = {"X-Forwarded-For": client} if client else {}
            return httpx.post(f"{address}/v1/completions", headers=headers, timeout=120, **more)

        host, _ = place(address)
        for i in range(4):
            body = json.dumps(FOREVER | {"max_tokens": 2}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n"
            if i < 2:
                head += "X-Forwarded-For: 2001:db8::1\r\n"
            sock = stack.enter_context(closing(socket.create_connection(place(address), 20)))
            sock.sendall(f"{head}\r\n".encode() + body)
        wait_for(lambda: demo.stats().running + demo.stats().waiting == 4)
        refused = ask("2001:db8::2", json={"prompt": "a"})  # of the same network
        assert refused.status_code == 429 and error_of(refused)["code"] == "server_busy"
        assert "2001:db8::/64" in error_of(refused)["message"]
        steps.allow()
        for client in ("", "2001:db8:1::1", "192.0.2.7"):
            assert ask(client, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until_idle(demo)


def test_addresses() -> None:
    from powerinfer.server.connections import address_of

    assert [address_of(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")] == [None] * 4
    assert [address_of(name) for name in ("testclient", None, "")] == [None] * 3
    assert address_of("::ffff:192.0.2.1") == address_of("192.0.2.1") == "192.0.2.1"
    assert address_of("fe80::1%eth0") == "fe80::/64"


def test_slow_bodies_take_no_places(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False) as address, ExitStack() as stack:
        host, _ = place(address)
        for _ in range(40):  # more than there are places
            sock = stack.enter_context(closing(socket.create_connection(place(address), 20)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        asked = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120)
        assert asked.status_code == 200


# -- clients that do not read


def test_an_answer_that_nobody_reads_is_cut_off(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one, whose connection would stay for ever: closing waits until all is written."""
    from powerinfer.server.app import Endpoints
    from powerinfer.server.problems import json_response

    async def much(_: Endpoints) -> Any:
        return json_response("x" * (32 << 20))

    monkeypatch.setattr(Endpoints, "health", much)
    with serving(demo, ends_model=False, write_timeout_s=0.4) as address:
        host, _ = place(address)
        with socket.create_connection(place(address), 20) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            sock.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            ended = threading.Event()

            def peer() -> None:
                """The kernel of the other side says so."""
                poll = select.poll()
                poll.register(sock, 0)  # errors and the end alone
                if poll.poll(30_000):
                    ended.set()

            thread = threading.Thread(target=peer)
            thread.start()
            thread.join()
            assert ended.is_set()


def in_kernel(*ports: int) -> bool:
    """Whether the kernel has such a connection, also one that no process has any more."""
    lines = [line.split()[1:3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [f"0100007F:{port:04X}" for port in ports] in lines


def test_an_answer_that_nobody_reads_does_not_stay_in_the_kernel(
    demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fits there, on a connection that is closed as soon as it is written."""
    from powerinfer.server.app import Endpoints
    from powerinfer.server.problems import json_response

    async def some(_: Endpoints) -> Any:
        return json_response("x" * (200 << 10))

    monkeypatch.setattr(Endpoints, "health", some)
    with serving(demo, ends_model=False, write_timeout_s=0.4) as address, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        host, port = place(address)
        sock.connect((host, port))
        sock.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        own, end = sock.getsockname()[1], time.monotonic() + 20
        assert in_kernel(port, own)
        while in_kernel(port, own) and time.monotonic() < end:
            time.sleep(0.02)
        assert not in_kernel(port, own)


def test_a_slow_reader_is_not_cut_off(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.server.app import Endpoints
    from powerinfer.server.problems import json_response

    async def much(_: Endpoints) -> Any:
        return json_response("x" * (3 << 20))

    monkeypatch.setattr(Endpoints, "health", much)
    with serving(demo, ends_model=False, write_timeout_s=1.0) as address:
        host, _ = place(address)
        with socket.create_connection(place(address), 20) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            sock.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            n, pause = 0, threading.Event()
            while part := sock.recv(1 << 18):
                n += len(part)
                pause.wait(0.03)
            assert n > 3 << 20


# -- bodies


def test_why_a_body_is_too_large_can_be_read(url: str, http: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": "a" * (30 << 20)})
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"
    assert http.get("/health").status_code == 200  # on the same connection

    def parts() -> Any:
        for _ in range(300):
            yield b"x" * 100_000

    response = http.post("/v1/completions", content=parts(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413


def test_bodies_that_are_dear_to_read(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False) as address:

        def said(body: bytes) -> tuple[int, str]:
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{address}/v1/completions", content=body, headers=headers, timeout=120)
            return answer.status_code, error_of(answer)["message"]

        for body, why in (
            (b"[" * 4_000_000 + b"]" * 4_000_000, "nested too deeply"),
            (b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}", "lists or objects"),
            (b'{"prompt": [' + b"1," * 2_000_000 + b"1]}", "too many"),
        ):
            status, message = said(body)
            assert status == 400 and why in message
        status, message = said(json.dumps({"prompt": '[{"\\' * 400_000}).encode())
        assert status == 400 and "n_ctx" in message  # what is in a string costs nothing


def test_what_json_costs() -> None:
    from powerinfer.server import json_body

    def slow(text: bytes) -> tuple[int, int, int]:
        depth = deepest = values = containers = 0
        inside = escaped = False
        for c in text:
            if inside:
                if escaped:
                    escaped = False
                elif c == 0x5C:
                    escaped = True
                elif c == 0x22:
                    inside = False
                continue
            inside = c == 0x22
            if c in b"[{":
                depth, containers = depth + 1, containers + 1
                deepest = max(deepest, depth)
            depth -= c in b"]}"
            values += c == 0x2C
        return deepest, values + containers + 1, containers

    random.seed(4)
    for part in (1, 2, 7, json_body._PART):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_body, "_PART", part)
            for _ in range(40):
                value = [
                    "".join(random.choices('a\\"[]{},', k=random.randrange(9))),
                    {"".join(random.choices('\\"é', k=3)): random.choice([1, [[]], {"b": "\\"}])},
                ] * random.randrange(1, 4)
                text = json.dumps(value, ensure_ascii=random.random() < 0.5).encode()
                assert json_body.cost(text) == slow(text)


def test_many_bodies_at_once(demo: AsyncLlama) -> None:
    """Those that are held have a size together, however few they are."""
    with serving(demo, ends_model=False, max_body_bytes=100_000) as address, ExitStack() as stack:
        host, _ = place(address)
        socks = []
        for _ in range(5):
            sock = stack.enter_context(closing(socket.create_connection(place(address), 20)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b" " * 90_000)
            socks.append(sock)
        answers = []
        for sock in socks:
            sock.settimeout(0.5)
            try:
                answers.append(sock.recv(1000))
            except TimeoutError:
                answers.append(b"")
        assert any(b" 429 " in answer and b"retry-after" in answer for answer in answers)
    with serving(demo, ends_model=False) as address:
        assert httpx.get(f"{address}/health").status_code == 200
