"""Chats of thousands of messages: checked beside the event loop, in parts, with the answers of short ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.server.conftest import error_of

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")


@pytest.fixture
def messages() -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i}"} for i in range(301)]


def test_the_same_value(messages: list[dict[str, Any]]) -> None:
    from powerinfer.server.messages import MessagesRequest
    from powerinfer.server.schemas import ChatRequest, validated

    for kind in (ChatRequest, MessagesRequest):
        body = {"messages": [message | {"name": "x"} for message in messages], "max_tokens": 3, "more": 1}
        assert validated(kind, body) == kind.model_validate(body)
        assert body["messages"][0] == messages[0] | {"name": "x"}  # what was given stays


@pytest.mark.parametrize("wrong", [5, 140, 300])
def test_where_it_is_wrong(http: Any, messages: list[dict[str, Any]], wrong: int) -> None:
    messages[wrong] = {"role": "nobody", "content": "x" * 9000}
    error = error_of(http.post("/v1/chat/completions", json={"messages": messages}))
    assert error["param"] == f"messages.{wrong}.role" and "'system'" in error["message"]
    other = http.post("/v1/messages", json={"messages": messages, "max_tokens": 1})
    assert other.status_code == 400 and f"messages.{wrong}.role" in other.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_no_part_is_long_on_the_loop(
    http: Any, messages: list[dict[str, Any]], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked and turned into other shapes there is at most a part of a list."""
    from pydantic import TypeAdapter

    from powerinfer.server import app, json_body, schemas

    where: dict[str, set[str]] = {}

    def noting(name: str, original: Any) -> Any:
        def call(*given: Any) -> Any:
            where.setdefault(name, set()).add(threading.current_thread().name)
            return original(*given)

        return call

    sizes: list[int] = []
    validate = TypeAdapter.validate_python

    def seen(self: Any, value: Any, *more: Any, **options: Any) -> Any:
        if isinstance(value, list):
            sizes.append(len(value))
        return validate(self, value, *more, **options)

    monkeypatch.setattr(TypeAdapter, "validate_python", seen)
    monkeypatch.setattr(json_body, "validated", noting("body", schemas.validated))
    monkeypatch.setattr(schemas, "validated", noting("made", schemas.validated))
    monkeypatch.setattr(app.Endpoints, "_messages", noting("dump", app.Endpoints._messages))
    for message in messages:
        message["content"] *= 12
    body = {"input" if path.endswith("responses") else "messages": messages, "model": "demo", "max_tokens": 1}
    assert "tokens and n_ctx is 512" in http.post(path, json=body).text
    assert {"body", "dump"} <= set(where) and ("made" in where) == (path != "/v1/chat/completions")
    assert all(name.startswith("powerinfer-aside") for names in where.values() for name in names), where
    assert sizes and max(sizes) <= schemas.PART
