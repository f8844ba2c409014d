"""Ollama's API: requests after its documentation, and its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from tests import models
from tests.server.conftest import TOOL, Actor, post

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
HI = {"model": "llama3.2", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def http(stage: str) -> Iterator[Any]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=stage, timeout=120, headers=headers) as client:
        yield client


def lines(response: Any) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat(http: Any, playing: Actor) -> None:
    playing.says = f"<think>Let me look</think>I look. {CALL}"
    asked = HI | {"tools": TOOLS, "think": True}
    whole = post(http, "/api/chat", **asked, stream=False)
    message = whole["message"]
    assert whole["done"] is True and whole["done_reason"] == "stop" and whole["model"] == "demo"
    assert message["thinking"] == "Let me look" and message["content"].strip() == "I look."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert whole["eval_count"] > 10 and whole["prompt_eval_count"] > 10 and whole["total_duration"] > 0
    parts = lines(http.post("/api/chat", json=asked))  # a stream, unless told otherwise
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 5
    for name in ("thinking", "content"):
        text = "".join(part["message"].get(name, "") for part in parts)
        assert text.strip() == message[name].strip()
    (made,) = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert made["function"] == call["function"] and parts[-1]["eval_count"] == whole["eval_count"]
    history = [*HI["messages"], message | {"tool_calls": [{"function": call["function"]}]}]  # type: ignore[misc]
    history.append({"role": "tool", "tool_name": "weather", "content": "Rain"})
    playing.says = "It rains."
    last = post(http, "/api/chat", messages=history, stream=False)
    assert last["message"] == {"role": "assistant", "content": "It rains."}
    assert "<|im_start|>tool\nRain<|im_end|>" in playing.asked and "<tool_call>" in playing.asked


def test_half_a_call_is_none(http: Any, playing: Actor) -> None:
    """It would be run with other arguments than the model was about to write."""
    playing.says = "I look. " + CALL[: CALL.index("Köln")]
    asked = HI | {"tools": TOOLS, "options": {"num_predict": playing.n_said()}}
    parts = lines(http.post("/api/chat", json=asked))
    assert "".join(part["message"]["content"] for part in parts).strip() == "I look."
    assert parts[-1]["done_reason"] == "length" and not any("tool_calls" in part["message"] for part in parts)
    whole = post(http, "/api/chat", **asked, stream=False)
    assert whole["message"] == {"role": "assistant", "content": "I look."}


def test_options(http: Any, playing: Actor) -> None:
    playing.says = "one two three four"
    options = {"num_predict": 2, "temperature": 0.5, "top_k": 5, "seed": -1, "repeat_last_n": 3, "num_ctx": 9}
    response = http.post("/api/chat", json=HI | {"options": options, "stream": False, "keep_alive": "5m"})
    assert response.headers["x-ignored-fields"] == "options.num_ctx, keep_alive"
    assert response.json()["done_reason"] == "length" and response.json()["eval_count"] == 2
    stopped = post(http, "/api/chat", **HI, options={"stop": ["three"], "num_predict": -1}, stream=False)
    assert stopped["message"]["content"] == "one two "
    assert post(http, "/api/chat", model="x")["done_reason"] == "load"
    told = post(http, "/api/chat", **HI, logprobs=True, top_logprobs=2, stream=False)["logprobs"]
    assert (
        "".join(entry["token"] for entry in told).startswith("one two") and len(told[0]["top_logprobs"]) == 2
    )


def test_generate(http: Any, playing: Actor) -> None:
    playing.says = "<think>Hm</think>Hello"
    whole = post(http, "/api/generate", model="x", prompt="Hi", system="Be kind", stream=False)
    assert whole["response"] == "Hello" and whole["thinking"] == "Hm"
    assert "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in playing.asked
    playing.says = "Hello"
    raw = {"model": "x", "prompt": "Once", "raw": True, "options": {"num_predict": 5}}
    parts = lines(http.post("/api/generate", json=raw))
    assert "".join(part["response"] for part in parts) == "Hello" and parts[-1]["done"]
    assert playing.asked.endswith("Once") and "im_start" not in playing.asked
    assert post(http, "/api/generate", model="x")["done_reason"] == "load"
    assert "fill" in post(http, "/api/generate", 400, prompt="a", suffix="b")["error"]


def test_forms(http: Any, playing: Actor) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    playing.says = '{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        whole = post(http, "/api/chat", **HI, format=form, stream=False)
        assert json.loads(whole["message"]["content"]) == {"a": 1}


def test_embeddings(http: Any) -> None:
    whole = post(http, "/api/embed", model="x", input=["Once", "The cat"])
    assert len(whole["embeddings"]) == 2 and whole["prompt_eval_count"] >= 2
    assert np.linalg.norm(whole["embeddings"][0]) == pytest.approx(1)
    assert post(http, "/api/embed", input="Once")["embeddings"][0] == pytest.approx(whole["embeddings"][0])
    assert post(http, "/api/embed", input=[])["embeddings"] == []
    assert "dimensions" in post(http, "/api/embed", 400, input="a", dimensions=-1)["error"]
    one = post(http, "/api/embeddings", model="x", prompt="Once")["embedding"]
    assert one == pytest.approx(whole["embeddings"][0])
    assert post(http, "/api/embeddings", prompt="")["embedding"] == []


def test_what_there_is(http: Any) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert model["name"] == "demo" and model["details"]["family"] == "llama" and model["size"] > 10**7
    assert http.get("/api/ps").json()["models"][0]["context_length"] == 2048
    shown = post(http, "/api/show", model="demo")
    assert shown["model_info"]["llama.block_count"] == 8 and "im_start" in shown["template"]
    assert shown["model_info"]["tokenizer.ggml.tokens"] is None
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert http.get("/api/version").json()["version"]


@pytest.mark.parametrize("mark", ["[THINK]", "<seed:think>", "<|channel>thought", "<|channel|>", ""])
def test_what_thinks_is_said_by_the_template(mark: str, tmp_path: Path) -> None:
    from powerinfer.server import ollama
    from powerinfer.server.models import ServedModel

    spec = models.SPECS["qwen3"]
    tensors = models.file_tensors(spec, models.draw(spec))
    plain, marked = "{{ messages }}", f"{{{{ messages }}}}{mark}"
    for template, for_tools in ((marked, " "), (plain, marked + "{{ tools }}")):
        named = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": for_tools}
        path = models.write(tmp_path / "x.gguf", models.metadata(spec) | named, tensors)
        with ModelFile(path) as file:
            shown = ollama._shown(ServedModel(("x",), file))
        wanted = ["completion", *["tools"] * ("tools" in for_tools), *["thinking"] * bool(mark)]
        assert (shown["capabilities"], shown["template"]) == (wanted, template)


def test_errors(http: Any, stage: str) -> None:
    for body, word in (
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images"),
        ({"messages": [{"role": "queen", "content": "a"}]}, "role"),
        ({"format": "xml"}, "xml"),
        ({"options": {"top_p": 2.0}}, "top_p"),
    ):
        assert word in post(http, "/api/chat", 400, **HI | body)["error"]
    assert list(httpx.get(f"{stage}/api/tags").json()) == ["error"]
    assert list(http.post("/api/pull", json={"model": "x"}).json()) == ["error"]


def test_ollamas_client(stage: str, playing: Actor) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=stage, headers={"Authorization": "Bearer secret"})
    playing.says = f"Yes. {CALL}"
    whole = client.chat(model="x", messages=HI["messages"], tools=TOOLS)
    assert whole.message.content.strip() == "Yes."
    assert whole.message.tool_calls[0].function.arguments == {"city": "Köln"}
    parts = list(client.chat(model="x", messages=HI["messages"], tools=TOOLS, stream=True))
    assert "".join(part.message.content for part in parts).strip() == "Yes." and parts[-1].done
    assert client.generate(model="x", prompt="Hi").response
    assert len(client.embed(model="x", input="Once").embeddings[0]) == 384
    assert client.list().models[0].model == "demo" and "completion" in client.show("x").capabilities
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate(model="x", prompt="Hi", images=[b"x"])
