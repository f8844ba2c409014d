"""llama-server's own endpoints, after its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from powerinfer import AsyncLlama
from tests.server.conftest import Actor, post, serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")


@pytest.fixture
def http(stage: str) -> Iterator[Any]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=stage, timeout=120, headers=headers) as client:
        yield client


def test_completion(http: Any, playing: Actor) -> None:
    playing.says = "one two three"
    for path in ("/completion", "/completions"):
        whole = post(http, path, prompt="Count:", n_predict=20, cache_prompt=True, seed=-1, n_probs=2)
        assert whole["content"] == "one two three" and whole["stop"] is True and whole["stop_type"] == "eos"
    assert whole["tokens_predicted"] > 2 and whole["tokens_evaluated"] > 1
    assert len(whole["completion_probabilities"][0]["top_logprobs"]) >= 2
    timings = whole["timings"]
    assert timings["predicted_n"] == whole["tokens_predicted"]
    assert timings["cache_n"] + timings["prompt_n"] == whole["tokens_evaluated"]
    assert timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0
    cut = post(http, "/completion", prompt="Count:", n_predict=2)
    assert cut["stop_type"] == "limit" and cut["tokens_predicted"] == 2
    messages = [{"role": "user", "content": "Count:"}]
    for path, asks in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Count:"}),
    ):
        assert post(http, path, n_predict=2, **asks)["usage"]["completion_tokens"] == 2
        assert post(http, path, n_predict=2, max_tokens=3, **asks)["usage"]["completion_tokens"] == 3
    word = post(http, "/completion", prompt="Count:", stop=["two"])
    assert (word["stop_type"], word["stopping_word"], word["content"]) == ("word", "two", "one ")
    text = http.post("/completion", json={"prompt": "Count:", "stream": True}).text
    parts = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert "".join(part["content"] for part in parts) == "one two three"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["timings"]["predicted_n"] == whole["tokens_predicted"]
    ids = post(http, "/completion", prompt="Count:", return_tokens=True)["tokens"]
    assert post(http, "/detokenize", tokens=ids)["content"] == "one two three" and whole["tokens"] == []
    body = {"prompt": "Count:", "stream": True, "return_tokens": True}
    frames = http.post("/completion", json=body).text.split("\n\n")
    told = [json.loads(frame.removeprefix("data: "))["tokens"] for frame in frames if frame]
    assert [token for tokens in told for token in tokens] == ids
    chat = post(http, "/v1/completions", prompt="Count:", return_token_ids=True)
    assert chat["choices"][0]["token_ids"] == ids
    # What has no value asks for nothing: clients send all their settings.
    empty = {"grammar": "", "json_schema": None, "stop": [], "logit_bias": [], "mirostat": 0, "id_slot": -1}
    assert post(http, "/completion", prompt="Count:", **empty)["content"] == "one two three"
    several = post(http, "/completion", prompt=["a", "b"])
    assert [one["index"] for one in several] == [0, 1]


def test_prompts_of_texts_and_tokens(http: Any, playing: Actor) -> None:
    ids = post(http, "/tokenize", content=" upon a time", add_special=False)["tokens"]
    post(http, "/completion", prompt=["Once", *ids, " there"])
    assert playing.asked.endswith("Once upon a time there")


def test_biases(http: Any) -> None:
    assert post(http, "/completion", prompt="a", logit_bias=[[5, -1.5], [6, False]], n_predict=1)
    for bias in ([["word", 1]], [[5]], 5, [[5, True]]):
        assert "logit_bias" in post(http, "/completion", 400, prompt="a", logit_bias=bias)["error"]["message"]


def test_the_prompt_of_a_chat(http: Any, playing: Actor) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = post(http, "/apply-template", messages=messages)["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    chat = post(http, "/chat/completions", messages=messages)
    asked = playing.asked
    post(http, "/completion", prompt=prompt)
    assert playing.asked == asked and chat["object"] == "chat.completion"


def test_timings_of_chats(http: Any, playing: Actor) -> None:
    playing.says = "one two three"
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    whole = post(http, "/v1/chat/completions", **body)
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"]
    text = http.post("/v1/chat/completions", json=body | {"stream": True}).text
    parts = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-2]]
    assert ["timings" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    several = post(http, "/v1/chat/completions", **body, n=3)
    assert several["timings"]["predicted_n"] == several["usage"]["completion_tokens"]


def test_what_there_is(http: Any, stage: str) -> None:
    props = http.get("/props").json()
    assert props["total_slots"] == 4 and "im_start" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 2048 and props["eos_token"] == "<|im_end|>"
    slots = http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not slots[0]["is_processing"]
    assert httpx.get(f"{stage}/v1/health").json() == {
        "status": "ok",
        "models": {"loaded": 1},
    }  # without a key
    assert http.get("/models").json()["data"][0]["id"] == "demo"
    assert post(http, "/embeddings", input="Once")["object"] == "list"


def test_embedding(http: Any) -> None:
    """A list of vectors for each text: https://github.com/ggml-org/llama.cpp, tools/server/README.md."""
    ids = post(http, "/tokenize", content="Once upon", add_special=True)["tokens"]
    plain = post(http, "/v1/embeddings", input=["Once upon", "a time"])["data"]
    for path in ("/embedding", "/embeddings"):
        many = post(http, path, content=["Once upon", "a time"])
        assert [one["index"] for one in many] == [0, 1]
        assert [one["embedding"] for one in many] == [[one["embedding"]] for one in plain]
        assert post(http, path, content="Once upon") == post(http, path, content=ids) == many[:1]
        assert abs(sum(x * x for x in many[0]["embedding"][0]) - 1) < 1e-5
        (raw,) = post(http, path, content="Once upon", embd_normalize=-1)
        assert sum(x * x for x in raw["embedding"][0]) > 1.1
    assert post(http, "/embedding", input="Once upon") == many[:1]
    error = post(http, "/embedding", 400)["error"]
    assert error["code"] == 400 and "content" in error["message"]
    assert post(http, "/embeddings", 400, embd_normalize=2)["error"]["param"] == "content"
    assert len(post(http, "/embeddings", input="Once", encoding_format="base64")["data"][0]["embedding"]) > 99


def test_embedding_of_tokens() -> None:
    llm = AsyncLlama.demo(n_ctx=64, n_parallel=1, n_threads=1, verbose=False, pooling="none")
    with serving(llm) as address, httpx.Client(base_url=address, timeout=120) as client:
        (one,) = post(client, "/embedding", content=[1, 2, 3])
        assert [len(vector) for vector in one["embedding"]] == [llm.llama.n_embd()] * 3
    llm.close()


def test_errors(http: Any) -> None:
    for path, body, word in (
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": "a", "n_predict": "x"}, "n_predict"),
        ("/completion", {"prompt": "word " * 5000}, "n_ctx"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "fill-in-the-middle"),
        ("/apply-template", {"messages": []}, "messages"),
    ):
        error = post(http, path, 400, **body)["error"]
        assert error["code"] == 400 and word in error["message"]
