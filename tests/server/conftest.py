"""Small models, and a server on a free port of the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from powerinfer import AsyncLlama
from powerinfer._engine.engine import Engine
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Model, Session


@pytest.fixture
def make(relu_path: Path) -> Iterator[Callable[..., Scheduler]]:
    """Opens schedulers of small sessions."""
    made: list[Scheduler] = []

    def make_scheduler(path: Path = relu_path, *, n_seq: int = 8, **more: Any) -> Scheduler:
        names = ("max_running", "max_waiting", "prompt_part", "n_keep", "n_guesses")
        own = {"max_waiting": 64} | {name: more.pop(name) for name in names if name in more}
        draft = more.pop("draft", None)
        options = {"n_ctx": 256, "n_pool": 2048, "n_threads": 1, "type_k": "f32", "type_v": "f32", **more}
        made.append(Scheduler(Engine(Session(Model(path), n_seq=n_seq, **options), **own), draft=draft))
        return made[-1]

    yield make_scheduler
    for scheduler in made:
        scheduler.close()


@contextmanager
def serving(llm: AsyncLlama, *, ends_model: bool = True, **settings: Any) -> Iterator[str]:
    """The address of a server that runs in a thread.

    ends_model: tell the model that the end is near, as the server does; else others may go on with it.
    """
    from powerinfer.server import Settings
    from powerinfer.server.run import address, open_server

    options = Settings(**{"port": 0, "names": ("demo", "other"), "shutdown_s": 5.0, **settings})
    server, sock = open_server(llm, options)
    if not ends_model:
        server.begin_close = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield address(options, sock)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def demo() -> Iterator[AsyncLlama]:
    """The demo model, four conversations at once."""
    llm = AsyncLlama.demo(n_ctx=512, n_parallel=4, max_waiting=8, n_threads=1, verbose=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(demo: AsyncLlama) -> Iterator[str]:
    with serving(demo, ends_model=False, max_body_bytes=20_000, max_tokens=100) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[Any]:
    httpx = pytest.importorskip("httpx")
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def post(http: Any, path: str, status: int = 200, **body: Any) -> Any:
    """What the server answers to that, which must have this status."""
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content if m.content is not none }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if effort is defined %}{{ effort }}{% endif %}{# <think> #}"
)


class Actor:
    """A model that says what it is told, token by token, and knows what it was asked."""

    def __init__(self) -> None:
        from powerinfer._text.chat_format import ChatFormat, register_chat_format

        register_chat_format("test-actor", ChatFormat("actor", TEMPLATE))
        options: dict[str, Any] = {"n_ctx": 2048, "n_parallel": 4, "n_threads": 1, "verbose": False}
        self.llm = AsyncLlama.demo(chat_format="test-actor", **options)
        self.says = ""
        self.asked = ""

    def n_said(self) -> int:
        """Tokens of what it says, without the end."""
        return len(self.llm.llama.tokenizer.encode(self.says, add_bos=False, space_prefix=False))

    def choice(
        self, original: Any, served: Any, options: Any, seed: Any, bias: Any, *hooks: Any, **more: Any
    ) -> Any:
        tokenizer = self.llm.llama.tokenizer
        ids = [*tokenizer.encode(self.says, add_bos=False, space_prefix=False), tokenizer.eos]
        n_prompt: list[int] = []

        def force(input_ids: Any, scores: Any) -> Any:
            n_prompt.append(len(input_ids))
            if len(n_prompt) == 1:
                self.asked = tokenizer.decode(input_ids.tolist(), special=True).decode()
            scores[:] = -1e9
            scores[ids[min(len(input_ids) - n_prompt[0], len(ids) - 1)]] = 0
            return scores

        return original(served, options, seed, bias, [force], None, **more)


@pytest.fixture(scope="session")
def playing() -> Iterator[Actor]:
    from powerinfer._llama.served import Served

    actor = Actor()
    original = Served._choice
    with pytest.MonkeyPatch.context() as patch:

        def choice(self: Any, *given: Any, **more: Any) -> Any:
            if self._llama is not actor.llm.llama:
                return original(self, *given, **more)
            return actor.choice(original, self, *given, **more)

        patch.setattr(Served, "_choice", choice)
        yield actor
    actor.llm.close()


@pytest.fixture(scope="module")
def stage(playing: Actor) -> Iterator[str]:
    """The address of the actor."""
    with serving(playing.llm, ends_model=False, names=("demo",), api_keys=("secret",)) as address:
        yield address


TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def named_events(text: str) -> list[dict[str, Any]]:
    """Of a stream whose events have names, which are their types."""
    events = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(response: Any) -> dict[str, Any]:
    """Every error has the same body."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    result: dict[str, Any] = body["error"]
    return result


def events_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
