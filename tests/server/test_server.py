"""The HTTP server: raw requests, OpenAI's client, limits, keys, ends."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama
from tests.server.conftest import serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def url(demo: AsyncLlama) -> Iterator[str]:
    with serving(demo, ends_model=False, max_body_bytes=20_000, max_tokens=100) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


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


# -- answers


def test_chat(http: Any) -> None:
    body = http.post("/v1/chat/completions", json=CHAT).json()
    assert body["object"] == "chat.completion" and body["model"] == "demo"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == choice["message"]["content"]
    assert all("usage" not in event for event in events)


def test_usage_at_the_end_of_a_stream(http: Any) -> None:
    asked = {"prompt": "Once", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(http.post("/v1/completions", json=asked).text)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in events[:-1])


def test_completions(http: Any) -> None:
    asked: dict[str, Any] = {"prompt": ["Once", "The cat"], "n": 2, "max_tokens": 5, "seed": 3}
    body = http.post("/v1/completions", json=asked).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    asked = {"prompt": "Once upon a", "max_tokens": 30, "temperature": 0}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    assert whole["text"].startswith(" time")
    stop = whole["text"][8:14]
    cut = http.post("/v1/completions", json=asked | {"stop": [stop]}).json()["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)] and cut["finish_reason"] == "stop"
    echo = http.post("/v1/completions", json=asked | {"echo": True}).json()["choices"][0]
    assert echo["text"] == "Once upon a" + whole["text"]
    ids = http.post("/tokenize", json={"content": "Once upon a", "add_special": True}).json()["tokens"]
    again = http.post("/v1/completions", json=asked | {"prompt": ids}).json()["choices"][0]
    assert again["text"] == whole["text"]
    ids = http.post("/tokenize", json={"content": whole["text"]}).json()["tokens"]
    banned = {str(token): -100 for token in ids}
    other = http.post("/v1/completions", json=asked | {"logit_bias": banned}).json()["choices"][0]
    assert other["text"] != whole["text"]


def test_logprobs(http: Any) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 3, "max_tokens": 3}
    content = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])  # greedy
    old = {"prompt": "Once upon", "logprobs": 2, "echo": True, "max_tokens": 2, "temperature": 0}
    shown = http.post("/v1/completions", json=old).json()["choices"][0]["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) >= 4
    assert shown["token_logprobs"][0] is None and all(p <= 0 for p in shown["token_logprobs"][1:])


def test_answers_of_a_given_form(http: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = CHAT | {"response_format": form, "max_tokens": 60}
    content = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["a"], bool)
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    asked = CHAT | {"tools": [tool], "tool_choice": "required", "max_tokens": 90}
    (choice,) = http.post("/v1/chat/completions", json=asked).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    bad = http.post("/v1/completions", json={"prompt": "a", "grammar": "root ::= ("})
    assert bad.status_code == 400 and "grammar" in error_of(bad)["message"]


def test_embeddings(http: Any) -> None:
    floats = http.post("/v1/embeddings", json={"input": ["Once", "The cat"]}).json()
    packed = http.post("/v1/embeddings", json={"input": "Once", "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.allclose(vector, floats["data"][0]["embedding"], atol=0.02 * np.abs(vector).max())
    assert [item["index"] for item in floats["data"]] == [0, 1] and floats["usage"]["prompt_tokens"] >= 2
    assert http.post("/v1/embeddings", json={"input": "a", "dimensions": vector.size}).status_code == 200
    assert http.post("/v1/embeddings", json={"input": "a", "dimensions": 7}).status_code == 400


def test_tokens(http: Any) -> None:
    ids = http.post("/tokenize", json={"content": "Grüße"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": "Grüße"}
    pieces = http.post("/tokenize", json={"content": "Grüße", "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_what_there_is(http: Any) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    models = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["demo", "other"]
    assert http.get("/v1/models/other").json()["id"] == "other"
    assert error_of(http.get("/v1/models/gpt"))["code"] == "model_not_found"
    http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
    view = http.get("/v1/engine").json()
    assert view["model"] == "demo" and len(view["layers"]) == view["n_layer"]
    assert all(0 < layer["computed"] <= 1 and layer["where"] == "cpu" for layer in view["layers"])
    assert view["vram"] is None and 0 <= view["kv_used"] <= 1 and view["tokens_per_second"] > 0
    metrics = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["powerinfer_generated_tokens_total"]) > 0
    assert float(values['powerinfer_requests_total{path="/v1/completions",status="200"}']) >= 1
    buckets = [int(v) for k, v in values.items() if k.startswith("powerinfer_request_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == int(values["powerinfer_request_seconds_count"]) > 0
    description = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in description["paths"]


# -- requests that are wrong

WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": 3}, 422, "prompt"),
    ({}, 422, "prompt"),
    ({"prompt": []}, 422, "prompt"),
    ({"prompt": "a", "max_tokens": "5"}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": 101}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, 422, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 422, "temperature"),
    ({"prompt": "a", "temprature": 1}, 422, "temprature"),
    ({"prompt": "a", "n": 17}, 400, "n"),
    ({"prompt": ["a"] * 17}, 400, "n"),
    ({"prompt": "a", "stop": [""]}, 400, "stop"),
    ({"prompt": "a", "stop": ["x"] * 65}, 400, "stop"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 422, "logit_bias"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), WRONG)
def test_wrong_values(http: Any, body: dict[str, Any], status: int, param: str) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == status
    assert str(error_of(response)["param"]).startswith(param)


def test_of_many_mistakes_one_is_told() -> None:
    """A body of 8 MiB has room for millions; each costs time and memory."""
    from pydantic import BaseModel, ValidationError

    from powerinfer.server import schemas

    n = 1000
    cases: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (schemas.ChatRequest, {"messages": [1] * n}),
        (schemas.ChatRequest, {"messages": [{"role": "user", "content": [1] * n}]}),
        (schemas.ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [1] * n}),
        (schemas.CompletionRequest, {"prompt": [[-1]] * n}),
        (schemas.CompletionRequest, {"prompt": "a", "stop": [1] * n}),
        (schemas.CompletionRequest, {"prompt": "a", **{f"a{i}": 1 for i in range(n)}}),
        (schemas.CompletionRequest, {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(100 * n)}}),
        (schemas.EmbeddingRequest, {"input": [-1] * n}),
        (schemas.DetokenizeRequest, {"tokens": [-1] * n}),
    ]
    for kind, body in cases:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() < 10, (kind, list(body))


def test_one_tool_call_at_most(http: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    tools = [{"type": "function", "function": {"name": n, "parameters": {"enum": [{}]}}} for n in ("f", "g")]
    body = {**CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 100, "n": 4, "temperature": 2.0}
    for more, most in (({}, 8), ({"parallel_tool_calls": False}, 1)):
        answer = http.post("/v1/chat/completions", json=body | {"seed": 1} | more).json()
        counts = [len(choice["message"]["tool_calls"]) for choice in answer["choices"]]
        assert 1 <= max(counts) <= most
        if most == 1:
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}


def test_messages_of_tools_with_parts(http: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    part = [{"type": "text", "text": "Hi"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": part},
        {"role": "user", "content": part},
        {"role": "assistant", "content": part, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": part},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    said = []
    for content in (part, "Hi"):
        body = {"messages": [m | {"content": content} for m in messages], "tools": tools, "max_tokens": 1}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        said.append(response.json()["usage"]["prompt_tokens"])
    assert said[0] == said[1]
    for wrong in ({"tool_calls": 5}, {"content": [{"type": "image_url"}], "tool_calls": [call]}):
        body = {"messages": [messages[1], {"role": "assistant", **wrong}], "tools": tools}
        assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_what_takes_too_long_to_compile(http: Any) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}
    for name, value in (
        ("grammar", "root ::= " + '"a" ' * 3000),
        ("response_format", {"type": "json_object", "schema": schema}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": schema}}]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("powerinfer.server.schemas.MAX_FORM_BYTES", 10_000)
            response = http.post("/v1/chat/completions", json=CHAT | {name: value})
        assert response.status_code == 422 and error_of(response)["param"].startswith(name), response.text


def test_what_is_nested_deeply(http: Any) -> None:
    deep: Any = "a"
    for _ in range(600):
        deep = [deep]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    for body in (
        {"messages": [{"role": "user", "content": "a", "more": deep}]},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}]},
        {**CHAT, "response_format": {"type": "json_object", "schema": {"a": deep}}},
    ):
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code in (200, 400, 422), response.text


def test_wrong_without_a_name(http: Any) -> None:
    for body, code in (
        ({"prompt": "word " * 3000}, "context_length_exceeded"),
        ({"prompt": [10**6]}, "invalid_value"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "invalid_value"),
    ):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400 and error_of(response)["code"] == code
    for message, status in (
        ({}, 422),
        ({"role": "queen", "content": "a"}, 422),
        ({"role": "user", "content": 5}, 422),
        ({"role": "user"}, 400),
        ({"role": "user", "content": [{"type": "image_url"}]}, 400),
    ):
        response = http.post("/v1/chat/completions", json={"messages": [message]})
        assert response.status_code == status
        error_of(response)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nothing",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 9000,
        b'{"prompt": ' + b"1" * 9000 + b"}",
    ],
)
def test_what_is_no_json(http: Any, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and error_of(response)["code"] == "invalid_json"


def test_json_that_is_no_object(http: Any) -> None:
    for body in (b"[]", b'"a"', b"3", b"null"):
        response = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 422)
        error_of(response)


def test_paths_and_methods(http: Any) -> None:
    assert error_of(http.get("/nothing/here"))["code"] == "not_found"
    response = http.get("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error_of(response)
    assert http.post("/health").status_code == 405
    response = http.post("/v1/completions", content=b"prompt=a", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    error_of(response)


def test_large_bodies(http: Any, url: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "x" * 30_000})
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000
        yield b'"}'

    headers = {"Content-Type": "application/json"}
    try:
        response = http.post("/v1/completions", content=pieces(), headers=headers)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the server had closed before all of it was written
    assert http.get("/health").status_code == 200


def test_a_large_body_is_refused_before_it_comes(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {10**9}\r\n\r\n".encode())
        assert b" 413 " in sock.recv(1000).splitlines()[0]


def test_host_names(http: Any) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        response = http.get("/v1/models", headers={"Host": host})
        assert response.status_code == 403 and error_of(response)["code"] == "host_not_allowed"
    for host in ("localhost", "localhost:9", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_no_cors_unless_asked(http: Any, demo: AsyncLlama) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = http.options("/v1/completions", headers=asked)
    assert "access-control-allow-origin" not in response.headers
    with serving(demo, ends_model=False, cors_origins=("https://a.example",), api_keys=("k",)) as address:
        response = httpx.options(f"{address}/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        other = asked | {"Origin": "https://b.example"}
        response = httpx.options(f"{address}/v1/completions", headers=other)
        assert "access-control-allow-origin" not in response.headers


# -- keys


def test_keys(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False, api_keys=("first key", "zweiter-schlüssel")) as address:
        for key in ("first key", "zweiter-schlüssel"):
            headers = {b"Authorization": b"Bearer " + key.encode()}
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
        for given in (None, "Bearer wrong", "Bearer", "Bearer first ke", "Basic first key", "first key"):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/v1/models", "/v1/engine", "/metrics", "/nothing"):
                response = httpx.get(address + path, headers=headers)
                assert response.status_code == 401, (given, path)
                assert error_of(response)["code"] == "invalid_api_key"
            assert (
                httpx.post(f"{address}/v1/completions", json={"prompt": "a"}, headers=headers).status_code
                == 401
            )
        assert httpx.get(f"{address}/health").status_code == 200


# -- clients that leave, too many of them, the end


def wait_until_idle(llm: AsyncLlama) -> None:
    for _ in range(1000):
        stats = llm.stats()
        if not stats.running and not stats.waiting:
            return
        time.sleep(0.01)
    raise AssertionError("something is still under way")


def raw(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, of which nothing has been read."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take a while: what is under way stays so for seconds."""
    from powerinfer.session import Session

    feed = Session.feed

    def slowly(self: Session, *args: Any, **options: Any) -> None:
        time.sleep(0.03)
        feed(self, *args, **options)

    monkeypatch.setattr(Session, "feed", slowly)


FOREVER = {"prompt": "Once", "max_tokens": 100, "temperature": 1.0, "logit_bias": {}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(url: str, demo: AsyncLlama, slow: None, stream: bool) -> None:
    wait_until_idle(demo)
    before = demo.stats().n_ended.get("cancelled", 0)
    sock = raw(url, FOREVER | {"stream": stream})
    while not demo.stats().running:
        time.sleep(0.01)
    if stream:
        sock.recv(100)
    sock.close()
    wait_until_idle(demo)
    assert demo.stats().n_ended["cancelled"] == before + 1


def test_too_many_requests(url: str, demo: AsyncLlama, slow: None, http: Any) -> None:
    socks = [raw(url, FOREVER) for _ in range(12)]  # 4 run, 8 wait
    while demo.stats().running + demo.stats().waiting < 12:
        time.sleep(0.01)
    for stream in (False, True):
        response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
        assert error_of(response)["code"] == "server_busy"
    assert http.get("/health").status_code == 200
    for sock in socks:
        sock.close()
    wait_until_idle(demo)
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_bodies_that_do_not_come(demo: AsyncLlama) -> None:
    with serving(demo, ends_model=False, body_timeout_s=0.2) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in sock.recv(1000).splitlines()[0]


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_headers_that_do_not_come(demo: AsyncLlama, before: bytes) -> None:
    with serving(demo, ends_model=False, headers_timeout_s=0.3) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            if before:
                sock.sendall(before)
                assert b"200 OK" in sock.recv(1000)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            rest = b""
            while part := sock.recv(1000):  # until it is closed
                rest += part
            assert b"HTTP/1.1" not in rest


def test_an_answer_may_take_longer_than_headers(demo: AsyncLlama, slow: None) -> None:
    with serving(demo, ends_model=False, headers_timeout_s=0.2) as address:
        asked = {"prompt": "Once", "max_tokens": 20, "temperature": 1.0}
        assert httpx.post(f"{address}/v1/completions", json=asked, timeout=30).status_code == 200


def test_looking_does_not_wait_for_the_engine(url: str, demo: AsyncLlama) -> None:
    with demo.llama.session._lock, httpx.Client(base_url=url, timeout=20) as http:
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


def test_readers_that_stop_reading(demo: AsyncLlama) -> None:
    from powerinfer.server.events import EventStream

    async def main() -> bool:
        stream = await demo.create_completion("Once", stream=True, max_tokens=50)
        response = EventStream(stream, usage=False, write_timeout_s=0.1)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        await response({"type": "http"}, receive, send)  # type: ignore[arg-type]
        return stream.is_over

    assert asyncio.run(asyncio.wait_for(main(), 20))
    wait_until_idle(demo)


@pytest.fixture
def own(relu_path: Path) -> AsyncLlama:
    return AsyncLlama.demo(n_ctx=256, n_parallel=2, n_threads=1, verbose=False)


@pytest.mark.parametrize(("grace", "ends_well"), [(20.0, True), (0.2, False)])
def test_the_end(own: AsyncLlama, slow: None, grace: float, ends_well: bool) -> None:
    asked = {"prompt": "Once", "max_tokens": 30, "stream": True, "temperature": 0}
    said: list[str] = []

    def client(address: str) -> None:
        said.append(httpx.post(f"{address}/v1/completions", json=asked, timeout=30).text)

    with serving(own, shutdown_s=grace) as address:
        thread = threading.Thread(target=client, args=(address,))
        thread.start()
        while not own.stats().running:
            time.sleep(0.01)
        time.sleep(0.2)
    thread.join(30)
    events = events_of(said[0])
    if ends_well:
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert events[-1]["error"]["code"] == "shutting_down" and len(events) > 1
    own.close()


# -- OpenAI's own client


def test_openai_client(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=20)
    parts = client.chat.completions.create(
        model="demo",
        messages=messages,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    done = client.completions.create(model="demo", prompt="Once", max_tokens=4, n=2, logprobs=1)
    assert len(done.choices) == 2 and len(done.choices[0].logprobs.tokens) == 4
    vectors = client.embeddings.create(model="demo", input=["Once", "The cat"])
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 384
    assert [model.id for model in client.models.list()] == ["demo", "other"]
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model="demo", prompt="a", temperature=-1)


def test_openai_client_with_a_key(demo: AsyncLlama) -> None:
    openai = pytest.importorskip("openai")
    with serving(demo, ends_model=False, api_keys=("secret",)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        assert client.models.list().data
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="guess", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
