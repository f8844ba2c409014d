"""The HTTP server: clients that leave or stop reading, too many of them, what does not come, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from powerinfer import AsyncLlama
from tests.server.conftest import error_of, events_of, serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")


def raw(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, of which nothing has been read."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((host, int(port)), timeout=120)
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


class Steps:
    """The engine's steps, which wait until they are allowed: what is under way stays so."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def allow(self, n: int = 10**6) -> None:
        self._allowed.release(n)

    def wait(self) -> None:
        assert self._allowed.acquire(timeout=120)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    from powerinfer._engine.session import Session

    feed, run, steps = Session.feed, Session.run_rounds, Steps()

    def later(self: Session, *args: Any, **options: Any) -> list[int]:
        steps.wait()
        return feed(self, *args, **options)

    def run_one(self: Session, rounds: Any, n: int) -> None:
        steps.wait()
        rounds.most = 1
        run(self, rounds, n)

    monkeypatch.setattr(Session, "feed", later)
    monkeypatch.setattr(Session, "run_rounds", run_one)
    yield steps
    steps.allow()


def wait_for(true: Callable[[], bool]) -> None:
    for _ in range(12000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in two minutes")


def wait_until_idle(llm: AsyncLlama) -> None:
    wait_for(lambda: not llm.stats().running and not llm.stats().waiting)


# Drawn tokens might be the end of the text.
FOREVER = {"prompt": "Once", "max_tokens": 100, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(url: str, demo: AsyncLlama, steps: Steps, stream: bool) -> None:
    wait_until_idle(demo)
    before = demo.stats().n_ended.get("cancelled", 0)
    sock = raw(url, FOREVER | {"stream": stream})
    steps.allow(3)
    wait_for(lambda: demo.stats().running == 1)
    if stream:
        sock.recv(100)
    (job,) = demo.scheduler.engine._running
    sock.close()
    wait_for(lambda: job.stream.is_cancelled)
    steps.allow()
    wait_until_idle(demo)
    assert demo.stats().n_ended["cancelled"] == before + 1


def test_too_many_requests(url: str, demo: AsyncLlama, steps: Steps, http: Any) -> None:
    socks = [raw(url, FOREVER) for _ in range(12)]
    wait_for(lambda: demo.stats().running + demo.stats().waiting == 12)
    steps.allow(1)
    wait_for(lambda: (demo.stats().running, demo.stats().waiting) == (4, 8))
    for stream in (False, True):
        response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
        assert error_of(response)["code"] == "server_busy"
    assert http.get("/health").status_code == 200
    for sock in socks:
        sock.close()
    steps.allow()
    wait_until_idle(demo)
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_bodies_that_do_not_come(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False, body_timeout_s=0.2) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in sock.recv(1000).splitlines()[0]


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_headers_that_do_not_come(demo: AsyncLlama, before: bytes) -> None:
    with serving(demo, ends_model=False, headers_timeout_s=1.0) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as sock:
            if before:
                sock.sendall(before)
                assert b"200 OK" in sock.recv(1000)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            rest = b""
            while part := sock.recv(1000):  # until it is closed
                rest += part
            assert b"HTTP/1.1" not in rest


def test_an_answer_may_take_longer_than_headers(demo: AsyncLlama, steps: Steps) -> None:
    with serving(demo, ends_model=False, headers_timeout_s=1.0) as address:
        threading.Timer(1.5, steps.allow).start()
        assert httpx.post(f"{address}/v1/completions", json=FOREVER, timeout=120).status_code == 200


def test_looking_does_not_wait_for_the_engine(url: str, demo: AsyncLlama) -> None:
    with demo.llama.session._lock, httpx.Client(base_url=url, timeout=120) as http:
        for path in ("/health", "/v1/models", "/v1/models/demo", "/v1/engine", "/metrics"):
            assert http.get(path).status_code == 200


def test_paths_behind_a_proxy() -> None:
    from powerinfer.server import Settings
    from powerinfer.server.guard import Guard

    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{", "more_body": False}

    async def send(message: Any) -> None:
        pass

    guard = Guard(app, Settings(), open_paths=set(), post_paths={"/v1/completions"}, max_requests=1)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers, "root_path": "/llm"}
    asyncio.run(guard(scope | {"path": "/llm/v1/completions"}, receive, send))
    assert not passed  # the body was looked at


def test_protocols_behind_a_proxy(demo: AsyncLlama) -> None:
    from powerinfer.server import create_app

    async def main() -> None:
        transport = httpx.ASGITransport(create_app(demo), root_path="/llm")  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/llm") as http:
            said = (await http.post("/v1/messages", json={"messages": []})).json()
            assert said["type"] == "error"  # as Anthropic words it
            metrics = (await http.get("/metrics")).text
            assert 'path="/v1/messages"' in metrics

    asyncio.run(main())


def test_clients_that_leave_leave_no_errors_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The answer of one that has gone may fail, which nobody asks for."""
    from powerinfer.server.events import Gone, unless_gone

    async def main() -> None:
        async def fails() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("busy")

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with pytest.raises(Gone):
            await unless_gone(SimpleNamespace(receive=receive), fails())  # type: ignore[arg-type]
        await asyncio.sleep(0.01)

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


def test_told_twice_to_end() -> None:
    from powerinfer.server.run import quiet

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    async def main() -> None:
        task = asyncio.ensure_future(quiet(app)({"type": "http"}, nothing, nothing))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(main())


def test_clients_that_leave_at_once_hold_no_model(demo: AsyncLlama) -> None:
    """Whenever they leave: a model that seems to be used is never unloaded."""
    from powerinfer.server import Settings, create_app
    from powerinfer.server.models import Models, of_one

    models = Models([of_one(demo, ("demo",))])
    app = create_app(models, Settings())
    data = json.dumps(FOREVER).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}

    async def one(n_waits: int, *, is_cancelled: bool) -> None:
        received = 0

        async def receive() -> dict[str, Any]:
            nonlocal received
            received += 1
            if received == 1:
                return {"type": "http.request", "body": data, "more_body": False}
            for _ in range(n_waits if not is_cancelled else 10**9):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        task = asyncio.ensure_future(app({**scope}, receive, send))
        if is_cancelled:
            for _ in range(n_waits):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        for _ in range(5):
            await asyncio.sleep(0)
        assert models.first.n_users == 0, n_waits

    async def main() -> None:
        for n_waits in range(8):
            await one(n_waits, is_cancelled=False)
            await one(n_waits, is_cancelled=True)

    asyncio.run(main())
    wait_until_idle(demo)


def test_readers_that_stop_reading(demo: AsyncLlama) -> None:
    from powerinfer.server.events import EventStream, openai_events

    async def main() -> bool:
        stream = await demo.create_completion(**FOREVER, stream=True)
        response = EventStream(stream, openai_events(stream, usage=False), write_timeout_s=0.1)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        await response({"type": "http"}, receive, send)  # type: ignore[arg-type]
        return stream.is_over

    assert asyncio.run(asyncio.wait_for(main(), 120))
    wait_until_idle(demo)


def test_what_waits_is_written_together(demo: AsyncLlama) -> None:
    """A token goes out when no other is there; those that came while one was written go in one piece."""
    from powerinfer.server.events import EventStream, openai_events

    written: list[bytes] = []
    steps = Steps()

    def later(_: Any, scores: Any) -> Any:
        steps.wait()
        return scores

    async def main() -> None:
        async def until(true: Callable[[], bool]) -> None:
            while not true():
                await asyncio.sleep(0.005)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        async def send(message: dict[str, Any]) -> None:
            written.append(message.get("body", b""))
            if len(written) == 3:
                steps.allow()
                await until(lambda: not demo.stats().running)  # all of the answer is made

        stream = await demo.create_completion(**FOREVER, stream=True, logits_processor=[later])
        response = EventStream(stream, openai_events(stream, usage=False), write_timeout_s=60)
        task = asyncio.ensure_future(response({"type": "http"}, receive, send))  # type: ignore[arg-type]
        for n in (2, 3):
            steps.allow(1)
            await until(lambda n=n: len(written) == n)  # type: ignore[misc]
        await task

    asyncio.run(asyncio.wait_for(main(), 120))
    events = events_of(b"".join(written).decode())
    assert len(events) > 50 and len(written) < 20
    assert [len(events_of((data + b"data: [DONE]\n\n").decode())) for data in written[1:3]] == [1, 1]


@pytest.mark.parametrize("how", ["cancelled", "fails"])
def test_a_stream_that_never_begins_frees_its_place(demo: AsyncLlama, steps: Steps, how: str) -> None:
    """While somebody has it still."""
    from powerinfer.server.events import EventStream, openai_events

    async def main() -> bool:
        stream = await demo.create_completion(**FOREVER, stream=True)
        response = EventStream(stream, openai_events(stream, usage=False), write_timeout_s=10)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        async def send(message: dict[str, Any]) -> None:
            if how == "fails":
                raise ConnectionError
            await asyncio.sleep(60)

        task = asyncio.ensure_future(response({"type": "http"}, receive, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        return stream.is_over

    assert asyncio.run(main())
    steps.allow()
    wait_until_idle(demo)


@pytest.fixture
def own(relu_path: Path) -> AsyncLlama:
    return AsyncLlama.demo(n_ctx=256, n_parallel=2, n_threads=1, verbose=False)


@pytest.mark.parametrize(("grace", "ends_well"), [(20.0, True), (0.2, False)])
def test_the_end(own: AsyncLlama, steps: Steps, grace: float, ends_well: bool) -> None:
    asked = FOREVER | {"max_tokens": 30, "stream": True}
    said: list[str] = []

    def client(address: str) -> None:
        said.append(httpx.post(f"{address}/v1/completions", json=asked, timeout=120).text)

    def go_on() -> None:
        wait_for(lambda: own.scheduler.is_closing)
        if not ends_well:
            time.sleep(grace + 0.05)
        steps.allow()

    with serving(own, shutdown_s=grace) as address:
        threads = [threading.Thread(target=client, args=(address,)), threading.Thread(target=go_on)]
        for thread in threads:
            thread.start()
        steps.allow(3)
        wait_for(lambda: own.stats().n_generated_tokens >= 2)
    for thread in threads:
        thread.join(30)
    events = events_of(said[0])
    if ends_well:
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert events[-1]["error"]["code"] == "shutting_down" and len(events) > 1
    own.close()
