"""How likely tokens were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama
from powerinfer._text.logprobs import NEVER, log_softmax, token_logprob

OpenLlama = Callable[..., Llama]
MESSAGES = [{"role": "user", "content": "the tree"}]


def expected(llm: Llama, prompt: list[int], ids: list[int]) -> np.ndarray:
    """Log probabilities [n, n_vocab] after a prompt and after each id but the last, in float64."""
    llm.reset()
    llm.eval(prompt[:-1])
    rows = []
    for token in [prompt[-1], *ids[:-1]]:
        llm.eval([token])
        rows.append(llm.scores[-1].astype(np.float64))
    logits = np.stack(rows)
    logits -= logits.max(1, keepdims=True)
    result: np.ndarray = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return result


def test_log_softmax() -> None:
    logits = np.array([[0.0, 0.0], [1000.0, -np.inf]], np.float32)
    assert np.allclose(log_softmax(logits), [[math.log(0.5)] * 2, [0.0, -np.inf]])
    assert np.allclose(Llama.logits_to_logprobs(logits.T, axis=0), log_softmax(logits).T)
    assert Llama.logits_to_logprobs([1.0, 1.0]).dtype == np.float32
    assert np.array_equal(logits, np.array([[0.0, 0.0], [1000.0, -np.inf]], np.float32))


def test_token_logprob() -> None:
    row = np.array([-2.0, -1.0, -np.inf, -1.0], np.float32)
    entry = token_logprob(row, 2, 3)
    assert entry.top == ((1, -1.0), (3, -1.0), (0, -2.0)) and entry.logprob == NEVER
    assert token_logprob(row, 0, 0).top == () and len(token_logprob(row, 0, 9).top) == 4
    json.dumps(token_logprob(row, 2, 4).top, allow_nan=False)


@pytest.mark.parametrize("stream", [False, True])
def test_completion(llama: OpenLlama, stream: bool) -> None:
    llm = llama()
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logit_bias": {2: -math.inf}}
    result: Any = llm("the tree", logprobs=3, stream=stream, **options)
    told: dict[str, list[Any]] = {}
    text = ""
    for part in result if stream else [result]:
        choice = part["choices"][0]
        text += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            told.setdefault(key, []).extend(values)
    assert text == llm("the tree", **options)["choices"][0]["text"]
    prompt = llm.tokenize("the tree")
    ids = list(islice(llm.generate(prompt, temp=0.0, logit_bias={2: -math.inf}), 12))
    rows = expected(llm, prompt, ids)
    assert len(told["tokens"]) == len(told["text_offset"]) == len(told["top_logprobs"]) == 12
    for i, (token, row) in enumerate(zip(ids, rows, strict=True)):
        # Two float32 roundings of numbers below 32, and sums of 320 in float64.
        assert told["token_logprobs"][i] == pytest.approx(row[token], abs=1e-5)
        shown, best = told["top_logprobs"][i].values(), sorted(row)[-3:]
        assert max(shown) == pytest.approx(best[-1], abs=1e-5) and 1 <= len(shown) <= 4
        assert min(shown) > min(best[0], row[token]) - 1e-5
    assert told["text_offset"][0] == len("the tree")
    for i in range(11):  # where pieces are whole characters the offsets cut the text into them
        begin, end = (offset - len("the tree") for offset in told["text_offset"][i : i + 2])
        if "\ufffd" not in told["tokens"][i] + told["tokens"][i + 1]:
            assert text[begin:end] == told["tokens"][i]


def test_the_prompt_too(llama: OpenLlama) -> None:
    llm = llama(n_batch=1)
    choice = llm("the tree", max_tokens=2, temperature=0.0, logprobs=1, echo=True)["choices"][0]
    told = choice["logprobs"]
    assert told is not None
    prompt = llm.tokenize("the tree")
    rows = expected(llm, prompt[:1], prompt[1:])
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    shown = told["token_logprobs"][1 : len(prompt)]
    assert shown == pytest.approx([row[token] for row, token in zip(rows, prompt[1:], strict=True)], abs=1e-5)
    assert told["text_offset"][len(prompt)] == len("the tree") and choice["text"].startswith("the tree")


@pytest.mark.parametrize("stream", [False, True])
def test_chat(llama: OpenLlama, stream: bool) -> None:
    llm = llama(chat_format="chatml")
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "logit_bias": {2: -math.inf}}
    result: Any = llm.create_chat_completion(
        MESSAGES, logprobs=True, top_logprobs=2, stream=stream, **options
    )
    content = []
    for part in result if stream else [result]:
        choice = part["choices"][0]
        content += (choice["logprobs"] or {"content": []})["content"]
    assert len(content) == 8
    for entry in content:
        assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"} and len(entry["top_logprobs"]) == 2
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        if entry["logprob"] == entry["top_logprobs"][0]["logprob"]:
            assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
    plain = llm.create_chat_completion(MESSAGES, logprobs=True, **options)["choices"][0]["logprobs"]
    assert plain is not None and [e["top_logprobs"] for e in plain["content"]] == [[]] * 8
    assert [e["logprob"] for e in plain["content"]] == [e["logprob"] for e in content]


def test_they_are_the_models_own(llama: OpenLlama) -> None:
    """Neither bias nor processors nor the grammar change them."""
    llm = llama()
    plain = llm("the", max_tokens=1, temperature=0.0, logprobs=0)["choices"][0]["logprobs"]
    other = llm("the", max_tokens=1, logprobs=5, logit_bias={"7": 100.0}, temperature=0.0)["choices"][0]
    assert other["logprobs"] is not None and plain is not None
    assert other["logprobs"]["tokens"] == [llm.detokenize([7]).decode("utf-8", "replace")]
    assert max(v for v in other["logprobs"]["top_logprobs"][0].values()) == plain["token_logprobs"][0]  # type: ignore[union-attr]

    def only_seven(ids: np.ndarray, scores: np.ndarray) -> None:
        scores[:7] = scores[8:] = -np.inf

    same = llm("the", max_tokens=1, logprobs=5, logits_processor=only_seven)["choices"][0]["logprobs"]
    assert same == other["logprobs"]


def test_tokens_behind_a_stop_string_are_not_told(llama: OpenLlama) -> None:
    llm = llama()
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "logit_bias": {2: -math.inf}}
    text = llm("the tree", **options)["choices"][0]["text"]
    stop = text[10:13]
    for stream in (False, True):
        result: Any = llm("the tree", stop=stop, logprobs=0, stream=stream, **options)
        parts = [part["choices"][0] for part in (result if stream else [result])]
        end = len("the tree") + text.index(stop)
        offsets = [o for part in parts for o in (part["logprobs"] or {"text_offset": []})["text_offset"]]
        assert offsets and max(offsets) < end
        assert "".join(part["text"] for part in parts) == text[: text.index(stop)]


def test_bad_counts(llama: OpenLlama) -> None:
    for value in (-1, 101, True, "3"):
        with pytest.raises(ArgumentError, match="logprobs"):
            llama()("the", logprobs=value)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="top_logprobs"):
        llama().create_chat_completion(MESSAGES, top_logprobs=2)
