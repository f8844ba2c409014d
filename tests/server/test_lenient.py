"""Fields that other servers take, fields that nobody knows, and the strict server that refuses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama, Llama
from tests.server.conftest import error_of, serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
ONCE = {"prompt": "Once upon a", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def strict(demo: AsyncLlama) -> Iterator[Any]:
    with (
        serving(demo, ends_model=False, strict=True) as address,
        httpx.Client(base_url=address, timeout=120) as client,
    ):
        yield client


def completion(http: Any, **more: Any) -> Any:
    response = http.post("/v1/completions", json=ONCE | more)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(http: Any, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"content": text}).json()["tokens"]
    return tokens


def test_unknown_fields_are_named(http: Any, strict: Any) -> None:
    odd = {"temprature": 1, "grün\r\nX: y": 2, "x" * 1000: 3}
    for path, body in (("/v1/completions", ONCE), ("/v1/chat/completions", CHAT)):
        for stream in (False, True):
            asked = {"stream": stream, "stream_options": {"odd": 1}} if stream else {}
            response = http.post(path, json=body | odd | asked)
            assert response.status_code == 200, response.text
            named = response.headers["x-ignored-fields"].split(", ")
            assert named[:2] == ["temprature", "gr%C3%BCn%0D%0AX:%20y"] and named[2] == "x" * 48
            assert named[3:] == (["stream_options.odd"] if stream else [])
        assert "x-ignored-fields" not in http.post(path, json=body).headers
        response = strict.post(path, json=body | odd)
        assert response.status_code == 422 and error_of(response)["param"] == "temprature"
    many = http.post("/v1/completions", json=ONCE | {f"a{i}": 1 for i in range(2000)})
    assert many.status_code == 200 and len(many.headers["x-ignored-fields"]) < 1000
    stored = http.post("/v1/chat/completions", json=CHAT | {"store": True})
    assert stored.headers["x-ignored-fields"] == "store"
    empty = http.post("/v1/completions", json=ONCE | {"0": 1, "": 1})
    assert empty.status_code == 200 and empty.headers["x-ignored-fields"] == '0, ""'
    assert strict.post("/v1/chat/completions", json=CHAT | {"store": True}).status_code == 400


def test_another_models_name(http: Any, strict: Any) -> None:
    assert completion(http, model="gpt-4")["model"] == "demo"
    for path, body in (("/v1/completions", ONCE), ("/v1/embeddings", {"input": "a"})):
        response = strict.post(path, json=body | {"model": "gpt" * 1000})
        assert response.status_code == 404 and error_of(response)["param"] == "model"
        assert len(response.content) < 500


def test_limits_of_answers(http: Any, strict: Any) -> None:
    assert completion(http, max_tokens=-1)["usage"]["completion_tokens"] <= 100  # the server's limit
    until = strict.post("/v1/completions", json=ONCE | {"max_tokens": -1, "ignore_eos": True}).json()
    assert until["choices"][0]["finish_reason"] == "length"
    assert until["usage"]["total_tokens"] == 513  # n_ctx, and a token that is not computed
    for path, body in (("/v1/completions", ONCE), ("/v1/chat/completions", CHAT)):
        none = http.post(path, json=body | {"max_tokens": 0}).json()
        (choice,) = none["choices"]
        assert none["usage"]["completion_tokens"] == 0 < none["usage"]["prompt_tokens"]
        assert choice["finish_reason"] == "length" and not choice.get("text", "")
    shown = completion(http, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert shown["text"] == ONCE["prompt"] and len(shown["logprobs"]["tokens"]) > 2
    stream = http.post("/v1/completions", json=ONCE | {"max_tokens": 0, "stream": True}).text
    assert stream.count("data: ") == 2  # the end, [DONE]


def test_stops(http: Any) -> None:
    whole = completion(http)["choices"][0]["text"]
    ids = ids_of(http, ONCE["prompt"] + whole)[len(ids_of(http, ONCE["prompt"])) :]
    at = next(i for i in range(1, len(ids)) if ids[i] not in ids[:i])
    ended = completion(http, stop_token_ids=[ids[at]])
    assert ended["usage"]["completion_tokens"] == at
    choice = ended["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[at]
    assert whole.startswith(choice["text"]) and choice["text"] != whole
    later = completion(http, stop_token_ids=[ids[at]], min_tokens=at + 2)
    assert later["usage"]["completion_tokens"] >= at + 2
    word = completion(http, stop=[whole[5:9]])["choices"][0]
    assert word["stop_reason"] == whole[5:9]
    assert http.post("/v1/completions", json=ONCE | {"stop_token_ids": [10**6]}).status_code == 400


def test_min_tokens_and_ignore_eos(http: Any) -> None:
    one = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 100}
    short = http.post("/v1/chat/completions", json=one).json()["usage"]["completion_tokens"]
    if short < 100:
        longer = http.post("/v1/chat/completions", json=one | {"min_tokens": short + 5}).json()
        assert longer["usage"]["completion_tokens"] >= short + 5
    every = http.post("/v1/chat/completions", json=one | {"ignore_eos": True}).json()
    assert every["usage"]["completion_tokens"] == 100 and every["choices"][0]["finish_reason"] == "length"


def test_other_names(http: Any) -> None:
    same = completion(http, repeat_penalty=1.5, penalty_last_n=-1)["choices"]
    assert completion(http, repetition_penalty=1.5)["choices"] == same
    assert completion(http)["choices"] != same
    few = completion(http, repeat_penalty=1.5, penalty_last_n=2)["choices"]
    assert completion(http, repetition_penalty=1.5, repeat_last_n=2)["choices"] == few
    assert completion(http, top_k=-1)["choices"]


def test_forms(http: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for name, value in (
        ("json_schema", schema),
        ("guided_json", schema),
        ("guided_json", json.dumps(schema)),
        ("structured_outputs", {"json": schema}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": schema}}),
    ):
        text = completion(http, max_tokens=40, **{name: value})["choices"][0]["text"]
        assert json.loads(text)["a"] in (1, 2), name
    for name, value, expected in (
        ("guided_regex", "[0-9]{3}", str.isdigit),
        ("structured_outputs", {"regex": "[0-9]{3}"}, str.isdigit),
        ("guided_choice", ["rot", "grün"], ["rot", "grün"].__contains__),
        ("structured_outputs", {"choice": ['say "x"']}, ['say "x"'].__contains__),
        ("guided_grammar", 'root ::= "ab" | "cd"', ["ab", "cd"].__contains__),
    ):
        text = completion(http, **{name: value})["choices"][0]["text"]
        assert expected(text), (name, text)  # type: ignore[operator]
    chat = http.post("/v1/chat/completions", json=CHAT | {"guided_choice": ["yes"]}).json()
    assert chat["choices"][0]["message"]["content"] == "yes"
    both = http.post("/v1/completions", json=ONCE | {"guided_regex": "a", "guided_choice": ["a"]})
    assert both.status_code == 400 and "guided_regex and guided_choice" in error_of(both)["message"]


def test_prompt_logprobs(http: Any) -> None:
    whole = completion(http, prompt_logprobs=2, n=2, seed=1)["choices"]
    told = whole[0]["prompt_logprobs"]
    assert "prompt_logprobs" not in whole[1]
    ids = ids_of(http, ONCE["prompt"])
    assert told[0] is None and len(told) - len(ids) in (0, 1)  # with a BOS token
    with Llama.demo(logits_all=True, n_threads=1, verbose=False) as llm:
        own = llm.tokenize(ONCE["prompt"].encode(), add_bos=True)
        llm.eval(own)
        rows = np.array(llm.scores, np.float64)[: len(own)]
    for i, entry in enumerate(told[1:], 1):
        row = rows[i - 1] - np.log(np.exp(rows[i - 1] - rows[i - 1].max()).sum()) - rows[i - 1].max()
        assert entry[str(own[i])]["logprob"] == pytest.approx(row[own[i]], abs=0.05)
        assert entry[str(own[i])]["rank"] == pytest.approx(1 + (row > row[own[i]]).sum(), abs=2)
        assert 2 <= len(entry) <= 3
    chat = http.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    stream = http.post("/v1/completions", json=ONCE | {"prompt_logprobs": 1, "stream": True})
    assert stream.status_code == 400


def test_a_message_goes_on(http: Any) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Once upon a "}]
    body = CHAT | {"messages": begun}
    on = http.post("/v1/chat/completions", json=body | {"continue_final_message": True}).json()
    new = http.post("/v1/chat/completions", json=body).json()
    assert on["usage"]["prompt_tokens"] < new["usage"]["prompt_tokens"]
    assert on["choices"][0]["message"]["content"] != new["choices"][0]["message"]["content"]
    wrong = http.post("/v1/chat/completions", json=CHAT | {"continue_final_message": True})
    assert wrong.status_code == 400
    plain = http.post("/v1/chat/completions", json=CHAT | {"add_generation_prompt": False}).json()
    asked = http.post("/v1/chat/completions", json=CHAT).json()
    assert plain["usage"]["prompt_tokens"] < asked["usage"]["prompt_tokens"]


def test_variables_of_the_template(http: Any) -> None:
    for more in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert http.post("/v1/chat/completions", json=CHAT | more).status_code == 200
    for name in ("messages", "tools", "safe", "bos_token", "add_generation_prompt"):
        response = http.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {name: 1}})
        assert response.status_code == 400 and name in error_of(response)["message"]
