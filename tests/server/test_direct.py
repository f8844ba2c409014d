"""Right bodies go to their endpoints directly; what is wrong is told as FastAPI tells it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import error_of, post

fastapi = pytest.importorskip("fastapi")

GENERATE = {"prompt": "Once", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that FastAPI is asked for."""
    found: list[str] = []
    call = fastapi.FastAPI.__call__

    async def noted(self: Any, scope: Any, receive: Any, send: Any) -> None:
        found.append(scope.get("path", ""))
        await call(self, scope, receive, send)

    monkeypatch.setattr(fastapi.FastAPI, "__call__", noted)
    return found


def test_right_bodies_pass_nothing_else(http: Any, asked: list[str]) -> None:
    text = post(http, "/v1/completions", **GENERATE)["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=GENERATE | {"stream": True}) as response:
        assert response.status_code == 200 and "[DONE]" in "".join(response.iter_text())
    post(http, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert post(http, "/completion", prompt="Once", n_predict=2, temperature=0)["content"] == text
    post(http, "/api/generate", prompt="Once", stream=False, options={"num_predict": 2})
    assert post(http, "/tokenize", content="Once")["tokens"]
    assert asked == []
    assert http.get("/v1/models").status_code == 200 and asked == ["/v1/models"]


def test_a_long_body_is_checked_beside_the_event_loop(http: Any, asked: list[str]) -> None:
    from powerinfer.server.json_body import SMALL_BYTES

    post(http, "/v1/completions", **GENERATE, user="u" * SMALL_BYTES)
    assert asked == ["/v1/completions"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": "many"}, 422, "max_tokens"),
        ("/v1/completions", ["Once"], 422, "body"),
        ("/v1/chat/completions", {"messages": "Hi"}, 422, "messages"),
        ("/tokenize", {}, 422, "content"),
    ],
)
def test_wrong_bodies_are_told_as_ever(
    http: Any, asked: list[str], path: str, body: Any, status: int, param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status and error_of(response)["param"] == param
    assert asked == [path]


def test_errors_of_endpoints_are_answered(http: Any, asked: list[str]) -> None:
    """Each kind by its own handler."""
    ids = http.post("/v1/completions", json=GENERATE | {"prompt": [10**6]})
    assert ids.status_code == 400 and error_of(ids)["code"] == "invalid_value"
    options = http.post("/v1/completions", json=GENERATE | {"stream_options": {"include_usage": True}})
    assert options.status_code == 400 and error_of(options)["param"] == "stream_options"
    assert (
        http.post("/v1/completions", content="{", headers={"Content-Type": "application/json"}).status_code
        == 400
    )
    assert asked == []
