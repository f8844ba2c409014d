"""The HTTP server: raw requests, mistakes, keys, OpenAI's client; under load: test_server_load.py."""

from __future__ import annotations

import base64
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama
from tests.server.conftest import error_of, events_of, serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}


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
    asked = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
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
    for nothing in ("", [""], ["", stop]):  # what llama-server and OpenAI take as none
        one = http.post("/v1/completions", json=asked | {"stop": nothing}).json()["choices"][0]
        assert one["text"] == (cut if stop in nothing and nothing else whole)["text"]
    none = http.post("/v1/completions", json=asked | {"suffix": ""}).json()["choices"][0]
    assert none["text"] == whole["text"]
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


def test_many_embeddings(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts than there are places, of length 1 unless told otherwise."""
    from powerinfer.server import vectors

    texts = [f"{i} cats" for i in range(50)]

    def embed(address: str, **asked: Any) -> Any:
        return httpx.post(f"{address}/v1/embeddings", json={"input": texts} | asked, timeout=120)

    with serving(demo, ends_model=False, max_input_tokens=1000) as address:
        given = [item["embedding"] for item in embed(address).json()["data"]]
        assert np.allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6) and len(given) == 50
        packed = embed(address, encoding_format="base64").json()["data"]
        for item, vector in zip(packed, given, strict=True):
            other = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
            assert np.allclose(other, vector, atol=0.02)
        refused = embed(address, input=["many words " * 20] * 30)
        assert refused.status_code == 400 and "1000 tokens together" in error_of(refused)["message"]
        refused = embed(address, input=["a"] * 2049)
        assert refused.status_code == 400 and error_of(refused)["param"] == "input"
        monkeypatch.setattr(vectors, "MAX_NUMBERS", 49 * len(given[0]))
        assert "at most 49 texts" in error_of(embed(address))["message"]
        assert embed(address, encoding_format="base64").status_code == 200
        monkeypatch.undo()
    with serving(demo, ends_model=False, normalize=False) as address:
        own = [item["embedding"] for item in embed(address).json()["data"]]
    lengths = np.linalg.norm(own, axis=1)
    assert np.abs(lengths - 1).min() > 0.1
    assert np.allclose(np.array(own) / lengths[:, None], given, atol=0.02)


def test_tokens(http: Any) -> None:
    ids = http.post("/tokenize", json={"content": "Grüße"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": "Grüße"}
    pieces = http.post("/tokenize", json={"content": "Grüße", "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    many = http.post("/detokenize", json={"tokens": ids * 500})  # a body that is checked in a thread
    assert many.json() == {"content": "Grüße" * 500}
    long = http.post("/tokenize", json={"content": " " * 19_000})
    assert long.status_code == 400 and error_of(long)["code"] == "context_length_exceeded"


def test_what_there_is(http: Any) -> None:
    assert http.get("/health").json() == {"status": "ok", "models": {"loaded": 1}}
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
    for name in ("queue", "first_token", "between_tokens"):
        count = int(values[f"powerinfer_{name}_seconds_count"])
        assert values[f'powerinfer_{name}_seconds_bucket{{le="+Inf"}}'] == str(count) != "0"
    description = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in description["paths"]


# -- requests that are wrong

WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": 3}, 422, "prompt"),
    ({}, 422, "prompt"),
    ({"prompt": []}, 422, "prompt"),
    ({"prompt": "a", "max_tokens": "5"}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": -2}, 422, "max_tokens"),
    ({"prompt": "a", "max_tokens": 101}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, 422, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 422, "temperature"),
    ({"prompt": "a", "n": 17}, 400, "n"),
    ({"prompt": ["a"] * 17}, 400, "n"),
    ({"prompt": "a", "stop": ["x"] * 65}, 400, "stop"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 422, "logit_bias"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
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


def test_how_bodies_are_written(http: Any) -> None:
    body, kind = b'{"prompt": "a", "max_tokens": 1}', {"Content-Type": "application/json"}
    marked = http.post(
        "/v1/completions", content=b"\xef\xbb\xbf" + body, headers=kind
    )  # as Windows saves files
    assert marked.status_code == 200
    packed = gzip.compress(body)
    response = http.post("/v1/completions", content=packed, headers={**kind, "Content-Encoding": "gzip"})
    assert response.status_code == 415 and "Content-Encoding: gzip" in error_of(response)["message"]


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
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {10**9}\r\n\r\n".encode())
        assert b" 413 " in sock.recv(1000).splitlines()[0]


def test_host_names(http: Any) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        response = http.get("/v1/models", headers={"Host": host})
        assert response.status_code == 403 and error_of(response)["code"] == "host_not_allowed"
    for host in ("localhost", "localhost:9", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_without_a_host_name(url: str) -> None:
    """As proxies ask for the health of what is behind them."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in sock.recv(1000).splitlines()[0]


def test_no_cors_unless_asked(http: Any, demo: AsyncLlama) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = http.options("/v1/completions", headers=asked)
    assert "access-control-allow-origin" not in response.headers
    with serving(demo, ends_model=False, cors_origins=("https://a.example",), api_keys=("k",)) as address:
        response = httpx.options(f"{address}/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        sdk = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,openai-organization"
        response = httpx.options(
            f"{address}/v1/completions", headers=asked | {"Access-Control-Request-Headers": sdk}
        )
        assert response.status_code == 200
        assert set(sdk.split(",")) <= set(response.headers["access-control-allow-headers"].split(","))
        shown = httpx.get(f"{address}/health", headers=asked).headers["access-control-expose-headers"]
        assert shown == "Retry-After, X-Ignored-Fields"
        delete = asked | {"Access-Control-Request-Method": "DELETE"}
        assert httpx.options(f"{address}/v1/responses/x", headers=delete).status_code == 200
        other = asked | {"Origin": "https://b.example"}
        response = httpx.options(f"{address}/v1/completions", headers=other)
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("POST", "/v1/completions", {"json": {"prompt": "a", "model": "m" * 9_000, "max_tokens": "n"}}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "logit_bias": {"b" * 9_000: 1}}}),
        ("POST", "/v1/completions", {"content": b"", "headers": {"Content-Type": "t" * 9_000}}),
        ("GET", "/v1/models/" + "m" * 9_000, {}),
        ("GET", "/" + "p" * 9_000, {}),
        ("GET", "/health", {"headers": {"Host": "h" * 9_000}}),
    ],
)
def test_long_names_are_not_said_back(http: Any, method: str, path: str, more: dict[str, Any]) -> None:
    response = http.request(method, path, **more)
    assert response.status_code in (400, 403, 404, 415, 422) and len(response.content) < 2500
    assert error_of(response)


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
    other = client.chat.completions.create(model="gpt-4", messages=messages, max_tokens=1)
    assert other.model == "demo"
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
