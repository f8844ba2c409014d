"""Answers: OpenAI's shapes, ends, stop strings, streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, ContextError, Llama, UnsupportedError
from powerinfer._text.answer import best
from tests.powerinfer.greedy import PROMPT

OpenLlama = Callable[..., Llama]

MESSAGES = [{"role": "user", "content": "the tree"}]
EOS = 2


def text_of(llm: Llama, prompt: str = "the tree", **options: Any) -> str:
    return llm.create_completion(prompt, **{"max_tokens": 40, "temperature": 0.0, **options})["choices"][0][
        "text"
    ]


def streamed(chunks: Iterator[Any]) -> tuple[list[str], list[Any]]:
    """The parts of text, and the finish reasons of all chunks."""
    parts, reasons = [], []
    for chunk in chunks:
        choice = chunk["choices"][0]
        reasons.append(choice["finish_reason"])
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if text:
            parts.append(text)
    return parts, reasons


def test_completion(llama: OpenLlama) -> None:
    llm = llama()
    result = llm("the tree", max_tokens=9, temperature=0.0, logit_bias={EOS: -math.inf})
    assert set(result) == {"id", "object", "created", "model", "choices", "usage"}
    assert result["object"] == "text_completion" and result["id"].startswith("cmpl-")
    assert result["model"] == llm.model_path and result["created"] > 1_700_000_000
    choice = result["choices"][0]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    n_prompt = len(llm.tokenize(b"the tree"))
    assert result["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 9,
        "total_tokens": n_prompt + 9,
    }
    assert llm("the tree", max_tokens=1, model="mine")["model"] == "mine"
    assert llm("x", max_tokens=1)["id"] != llm("x", max_tokens=1)["id"]


def test_the_text_is_that_of_the_tokens(llama: OpenLlama) -> None:
    llm = llama()
    prompt = llm.tokenize(b"the tree")
    tokens = []
    for token in llm.generate(prompt, temp=0.0):
        if token == EOS or len(tokens) == 40:
            break
        tokens.append(token)
    assert text_of(llm) == llm.detokenize(tokens, prev_tokens=prompt).decode("utf-8", "replace")
    assert text_of(llm, prompt) == text_of(llm, b"the tree") == text_of(llm)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["relu", "bpe"])
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_stream_joined_is_the_whole(
    llama: OpenLlama, which: str, temperature: float, relu_path: Path, bpe_path: Path
) -> None:
    """Bytes that are no whole characters come up all the time with random weights."""
    llm = llama({"relu": relu_path, "bpe": bpe_path}[which])
    for seed in range(8):
        options: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": seed, "top_k": 0}
        whole = llm("the tree", **options)["choices"][0]
        parts, reasons = streamed(llm("the tree", stream=True, **options))
        assert "".join(parts) == whole["text"]
        assert reasons[-1] == whole["finish_reason"] and set(reasons[:-1]) <= {None}
        assert all(parts)


def test_characters_are_not_torn(llama: OpenLlama) -> None:
    llm = llama()
    data = "añ🙂é".encode()
    script = [3 + byte for byte in data]  # byte tokens

    def follow(ids: np.ndarray, scores: np.ndarray) -> None:
        at = len(ids) - 1
        scores[:] = -np.inf
        scores[script[at] if at < len(script) else EOS] = 0.0

    parts, reasons = streamed(llm([1], stream=True, logits_processor=follow))
    assert parts == ["a", "ñ", "🙂", "é"] and reasons[-1] == "stop"


def test_end_token(llama: OpenLlama) -> None:
    result = llama()("the", logit_bias={EOS: 1000.0})
    assert result["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert result["usage"]["completion_tokens"] == 0
    assert llama()("the", logit_bias={str(EOS): 1000.0})["choices"][0]["text"] == ""


def test_stop_strings(llama: OpenLlama) -> None:
    llm = llama()
    text = text_of(llm)
    assert len(text) > 12
    for begin, end in ((4, 6), (5, 8), (7, 12), (0, 1), (len(text) - 2, len(text))):
        stop = text[begin:end]
        expected = text[: text.index(stop)]
        for options in ({"stop": stop}, {"stop": [stop, "nowhere"]}):
            result = llm("the tree", max_tokens=40, temperature=0.0, **options)["choices"][0]
            assert (result["text"], result["finish_reason"]) == (expected, "stop")
            parts, reasons = streamed(llm("the tree", max_tokens=40, temperature=0.0, stream=True, **options))
            assert "".join(parts) == expected and reasons[-1] == "stop"
    for nothing in ("", [""], ["", "nowhere"]):  # what clients send that have none
        assert text_of(llm, stop=nothing) == text


def test_a_stop_string_that_does_not_come_is_given_out(llama: OpenLlama) -> None:
    llm = llama()
    text = text_of(llm)
    assert text_of(llm, stop=text[-3:] + "never") == text


def test_echo(llama: OpenLlama) -> None:
    llm = llama()
    text = text_of(llm)
    assert text_of(llm, echo=True) == text_of(llm, b"the tree", echo=True) == "the tree" + text  # type: ignore[arg-type]
    parts, _ = streamed(llm("the tree", max_tokens=40, temperature=0.0, echo=True, stream=True))
    assert parts[0] == "the tree" and "".join(parts) == "the tree" + text
    assert text_of(llm, llm.tokenize(b"the tree"), echo=True) == "the tree" + text  # type: ignore[arg-type]


def test_max_tokens(llama: OpenLlama) -> None:
    llm = llama(n_ctx=30)
    no_end = {"logit_bias": {EOS: -math.inf}, "temperature": 0.0}
    n_prompt = len(llm.tokenize(b"the tree"))
    for max_tokens in (None, 0, -1, 1000):
        result = llm("the tree", max_tokens=max_tokens, **no_end)
        # The last token is never computed, so one more than the rest of the context.
        assert result["usage"]["completion_tokens"] == 30 - n_prompt + 1
        assert result["choices"][0]["finish_reason"] == "length"
    assert llm("the tree", max_tokens=3, **no_end)["usage"]["completion_tokens"] == 3
    assert llm([1] * 30, **no_end)["usage"]["completion_tokens"] == 1


def test_max_tokens_with_context_shift(llama: OpenLlama) -> None:
    llm = llama(n_ctx=30, context_shift=True)
    no_end = {"logit_bias": {EOS: -math.inf}, "temperature": 0.0}
    assert llm("the tree", max_tokens=100, **no_end)["usage"]["completion_tokens"] == 100
    assert llm("the tree", **no_end)["usage"]["completion_tokens"] == 30


def test_errors_come_at_once_also_with_stream(llama: OpenLlama) -> None:
    llm = llama(n_ctx=10)
    for stream in (False, True):
        with pytest.raises(ContextError, match="n_ctx is 10"):
            llm([5] * 11, stream=stream)
        with pytest.raises(ArgumentError, match="no tokens"):
            llm([], stream=stream)
        with pytest.raises(ArgumentError, match="top_p"):
            llm("the", top_p=-1, stream=stream)
        with pytest.raises(TypeError, match="'top_q'"):
            llm("the", top_q=1, stream=stream)
        for name, value in (("suffix", "x"), ("tfs_z", 0.5)):
            with pytest.raises(UnsupportedError, match=name):
                llm("the", stream=stream, **{name: value})
        for name, bad in (
            *(("logprobs", -1), ("logprobs", True), ("grammar", "x"), ("logit_bias", {"a": 1})),
            *(("n", 0), ("n", "2"), ("best_of", 0)),
        ):
            with pytest.raises(ArgumentError, match=name):
                llm("the", stream=stream, **{name: bad})
        for name, bad in (
            ("tools", [{}]),
            ("functions", 5),
            ("tool_choice", "required"),
            ("response_format", {"type": "xml"}),
            ("top_logprobs", 3),
        ):
            with pytest.raises(ArgumentError, match=name.rstrip("s")):
                llm.create_chat_completion(MESSAGES, stream=stream, **{name: bad})
    llm("the", max_tokens=1, logprobs=None, grammar=None)
    llama().create_chat_completion(MESSAGES, max_tokens=1, response_format={"type": "text"})


def test_seeds(llama: OpenLlama) -> None:
    llm = llama()
    options: dict[str, Any] = {"temperature": 5.0, "max_tokens": 20, "top_k": 0, "min_p": 0.0}
    one = text_of(llm, seed=7, **options)
    assert text_of(llm, seed=7, **options) == one
    assert text_of(llm, seed=8, **options) != one
    assert text_of(llama(seed=4), **options) == text_of(llama(seed=4), **options)


def test_stopping_criteria(llama: OpenLlama) -> None:
    llm = llama()
    n_prompt = len(llm.tokenize(b"the tree"))
    result = llm(
        "the tree",
        temperature=0.0,
        logit_bias={EOS: -math.inf},
        stopping_criteria=lambda ids, logits: len(ids) == n_prompt + 4,
    )
    assert result["choices"][0]["finish_reason"] == "stop" and result["usage"]["completion_tokens"] == 4


def test_chat(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml")
    assert llm.chat_format == "chatml"
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logit_bias": {EOS: -math.inf}}
    result = llm.create_chat_completion(MESSAGES, **options)
    assert set(result) == {"id", "object", "created", "model", "choices", "usage"}
    assert result["object"] == "chat.completion" and result["id"].startswith("chatcmpl-")
    choice = result["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    prompt = llm.input_ids.tolist()[: result["usage"]["prompt_tokens"]]
    assert llm.detokenize(prompt).decode() == "<|im_start|>user\nthe tree<|im_end|>\n<|im_start|>assistant\n"
    assert choice["message"]["content"] == text_of(llm, prompt, **options)  # type: ignore[arg-type]

    chunks = list(llm.create_chat_completion(MESSAGES, stream=True, **options))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chunks[-1]["choices"][0]["delta"] == {}
    parts, reasons = streamed(iter(chunks))
    assert "".join(parts) == choice["message"]["content"] and reasons[-1] == "length"
    with pytest.raises(ValueError, match="role"):
        llm.create_chat_completion([{"role": "nobody", "content": "x"}])


def test_a_second_turn_reuses_the_first(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml")
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
    first = llm.create_chat_completion(MESSAGES, **options)
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    llm.create_chat_completion([*MESSAGES, answer, {"role": "user", "content": "and"}], **options)
    # The answer's ids may come back as others; of the prompt, whole parts are computed as in a longer one.
    assert llm.timings.n_reused >= first["usage"]["prompt_tokens"] - 1


def test_the_stop_strings_of_a_chat_format_end_an_answer(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml")
    script = [3 + byte for byte in b"good<|im_end|>more"]

    def follow(ids: np.ndarray, scores: np.ndarray) -> None:
        start.setdefault("n", len(ids))
        scores[:] = -np.inf
        scores[script[len(ids) - start["n"]]] = 0.0

    start: dict[str, int] = {}
    result = llm.create_chat_completion(MESSAGES, logits_processor=follow, max_tokens=len(script))
    assert result["choices"][0]["message"]["content"] == "good"
    assert result["choices"][0]["finish_reason"] == "stop"


def texts(result: Any) -> list[str]:
    return [c["text"] if "text" in c else c["message"]["content"] for c in result["choices"]]


def test_several_answers(llama: OpenLlama) -> None:
    llm = llama(seed=3)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5}
    alone = [llm("the tree", seed=40 + i, **options) for i in range(3)]
    result = llm("the tree", n=3, seed=40, **options)
    assert texts(result) == [texts(one)[0] for one in alone] and len(set(texts(result))) == 3
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
    n_tokens = sum(one["usage"]["completion_tokens"] for one in alone)
    n_prompt = alone[0]["usage"]["prompt_tokens"]
    assert result["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
    }
    parts = ["", "", ""]
    chunks = list(llm("the tree", n=3, seed=40, stream=True, **options))
    for chunk in chunks:
        (choice,) = chunk["choices"]
        parts[choice["index"]] += choice["text"]
    assert parts == texts(result) and len({chunk["id"] for chunk in chunks}) == 1
    chat = llm.create_chat_completion(MESSAGES, n=2, seed=1, **options)
    one = llm.create_chat_completion(MESSAGES, seed=2, **options)
    assert texts(chat)[1] == texts(one)[0] and len(chat["choices"]) == 2


@pytest.mark.parametrize("seed", [-1, 0xFFFFFFFF, 0xFFFFFFFE, -2, 2**64 - 1])
def test_seeds_that_follow_each_other(llama: OpenLlama, seed: int) -> None:
    """A random seed is followed by random ones, none other is; not even beside the one that means random."""
    results = [
        texts(llama(seed=own)("the tree", n=3, max_tokens=12, temperature=2, top_k=0, top_p=1, seed=seed))
        for own in (1, 2)
    ]
    is_random = seed in (-1, 0xFFFFFFFF)
    assert [a == b for a, b in zip(*results, strict=True)] == [not is_random] * 3
    assert len(set(results[0])) == 3


def test_the_best_of_several(llama: OpenLlama) -> None:
    llm = llama()
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 2.0, "seed": 11}
    every = llm("the tree", n=6, logprobs=0, echo=True, **options)

    def likelihood(choice: Any) -> float:
        own = choice["logprobs"]["token_logprobs"][-5:]
        return sum(own) / len(own)

    order = sorted(every["choices"], key=likelihood, reverse=True)
    assert order[0]["index"]  # not the first anyway
    result = llm("the tree", n=2, best_of=6, echo=True, **options)
    assert texts(result) == [choice["text"] for choice in order[:2]]
    assert [(c["index"], c["logprobs"]) for c in result["choices"]] == [(0, None), (1, None)]
    assert result["usage"] == every["usage"]
    told = llm("the tree", best_of=6, logprobs=0, echo=True, **options)
    assert told["choices"][0]["logprobs"] == order[0]["logprobs"]
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(ArgumentError, match="best_of"):
            llm("the tree", **wrong)
    assert len(list(llm("the tree", n=2, best_of=2, stream=True, **options))) > 2


def test_the_best_of_several_that_stop_strings_end() -> None:
    """There are no logprobs of the tokens of a stop string, and those of the prompt do not count."""

    def result(text: str, rated: list[float | None], n_tokens: int) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": {"token_logprobs": rated}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": n_tokens}}

    for before in ([], [None, -50.0]):
        bad = result("bad", [*before, -9.0, -9.0, -0.1], 4)
        good = result("good", [*before, -1.0, -2.0], 6)
        empty = result("empty", [*before], 3)
        chosen = best([empty, bad, good], 2, echo=bool(before), tell=True)
        assert texts(chosen) == ["good", "bad"]
        assert chosen["usage"]["completion_tokens"] == 13


def test_a_stream_that_is_left_early(llama: OpenLlama) -> None:
    llm = llama()
    for n in range(4):
        stream = llm("the tree", stream=True, max_tokens=20, temperature=0)
        for _ in range(n):
            next(stream)
        del stream
    assert text_of(llm) == text_of(llama())


def test_tokens_beyond_the_vocabulary_never_come(llama: OpenLlama, tmp_path: Path) -> None:
    from tests import models

    spec = models.SPECS["llama-relu"]
    meta = models.metadata(spec)
    for key in ("tokens", "scores", "token_type"):
        meta[f"tokenizer.ggml.{key}"] = meta[f"tokenizer.ggml.{key}"][:300]
    path = models.write(tmp_path / "padded.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    llm = llama(path)
    assert llm.n_vocab() == 320
    llm("the", temperature=100.0, top_k=0, min_p=0.0, top_p=1.0, max_tokens=200)
    assert llm.input_ids.max() < 300


def test_ids_of_an_answer(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml")
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 5}
    plain = llm.create_completion(PROMPT, **options)["choices"][0]
    assert "token_ids" not in plain
    made = [token for token, _ in zip(llm.generate(PROMPT, temp=1.0, seed=5), range(9), strict=False)]
    asked = {**options, "return_token_ids": True}
    whole = llm.create_completion(PROMPT, echo=True, **asked)["choices"][0]
    assert whole["token_ids"] == made and len(made) == 9

    def joined(stream: Iterator[Any]) -> list[int]:
        return [token for part in stream for token in part["choices"][0]["token_ids"]]

    assert joined(llm.create_completion(PROMPT, stream=True, **asked)) == made
    two = llm.create_completion(PROMPT, n=2, **asked)["choices"]
    assert two[0]["token_ids"] == made != two[1]["token_ids"]
    messages = [{"role": "user", "content": "a"}]
    one = llm.create_chat_completion(messages, **asked)["choices"][0]["token_ids"]
    assert joined(llm.create_chat_completion(messages, stream=True, **asked)) == one and len(one) == 9
