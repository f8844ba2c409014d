"""What callers give by mistake is refused with one sentence and the package's own error."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama, Llama, PowerInferError
from powerinfer._engine.sampling import sampling_of
from powerinfer._llama import loader
from powerinfer.cli import main

MESSAGES = [{"role": "user", "content": "hi"}]
ONE: dict[str, Any] = {"max_tokens": 1}


@pytest.fixture(scope="module")
def llm(relu_path: Any) -> Any:
    with Llama(relu_path, n_threads=1, verbose=False, seed=1, embedding=True) as found:
        yield found


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tokenize 5": (lambda m: m.tokenize(5), "the text is 5, it must be text"),
    "tokenize None": (lambda m: m.tokenize(None), "the text is None"),
    "detokenize text": (lambda m: m.detokenize("abc"), "tokens is str, it must be a list of token ids"),
    "detokenize 5": (lambda m: m.detokenize(5), "tokens is int"),
    "bytearray": (
        lambda m: m(bytearray(b"a"), **ONE),
        "the prompt is bytearray, it must be text or token ids",
    ),
    "memoryview": (lambda m: m(memoryview(b"a"), **ONE), "the prompt is memoryview"),
    "no prompt": (lambda m: m(None, **ONE), "the prompt is NoneType"),
    "texts": (lambda m: m(["a", "b"], **ONE), "the prompt is a list of prompts: give one at a time"),
    "lists of ids": (lambda m: m([[3], [4]], **ONE), "the prompt is a list of prompts"),
    "number": (lambda m: m(5, **ONE), "the prompt is int"),
    "halves": (lambda m: m([1.5, 2], **ONE), "the prompt holds numbers that are not whole"),
    "truth": (lambda m: m([True], **ONE), "the prompt holds numbers that are not whole"),
    "mapping": (lambda m: m({"a": 1}, **ONE), "the prompt is dict"),
    "set": (lambda m: m({3, 4}, **ONE), "the prompt is set"),
    "lists to generate": (
        lambda m: next(m.generate([[3, 4], [5]])),
        "tokens must be a sequence of integers, not of lists",
    ),
    "lists to eval": (lambda m: m.eval([[3, 4], [5]]), "not of lists"),
    "suffix": (lambda m: m("a", 5, **ONE), "suffix is 5, it must be text"),
    "1.5 tokens": (lambda m: m("a", max_tokens=1.5), "max_tokens is 1.5, it must be a whole number"),
    "text tokens": (lambda m: m("a", max_tokens="5"), "max_tokens is '5', it must be a whole number"),
    "nan tokens": (lambda m: m("a", max_tokens=math.nan), "max_tokens is nan"),
    "true tokens": (lambda m: m("a", max_tokens=True), "max_tokens is True"),
    "chat's tokens": (lambda m: m.create_chat_completion(MESSAGES, max_tokens="5"), "max_tokens is '5'"),
    "seed": (lambda m: m("a", seed="x", **ONE), "seed is 'x', it must be a whole number"),
    "half a seed": (lambda m: m("a", seed=1.5, **ONE), "seed is 1.5"),
    "set_seed": (lambda m: m.set_seed("x"), "seed is 'x'"),
    "generate's seed": (lambda m: next(m.generate([3], seed="x")), "seed is 'x'"),
    "stop 5": (lambda m: m("a", stop=5, **ONE), "stop is 5, it must be a text or a list of texts"),
    "stop bytes": (lambda m: m("a", stop=b"x", **ONE), "stop is b'x', it must be"),
    "stop of numbers": (lambda m: m("a", stop=[5], **ONE), "stop holds 5, it must hold texts alone"),
    "nan": (lambda m: m("a", temperature=math.nan, **ONE), "temperature is nan, it must be a number"),
    "text": (lambda m: m("a", temperature="x", **ONE), "temperature is 'x', it must be a number"),
    "none": (lambda m: m("a", temperature=None, **ONE), "temperature is None"),
    "top_k": (lambda m: m("a", top_k=1.5, **ONE), "top_k is 1.5, it must be a whole number"),
    "sample": (lambda m: (m.eval([3]), m.sample(top_p="x")), "top_p is 'x'"),
    "processor": (
        lambda m: m("a", logits_processor=5, **ONE),
        "logits_processor is 5, it must be a function",
    ),
    "criteria": (lambda m: m("a", stopping_criteria=[5], **ONE), r"stopping_criteria is \[5\]"),
    "breakers": (lambda m: m("a", dry_sequence_breakers=5, **ONE), "dry_sequence_breakers is no list"),
    "min_tokens": (lambda m: m("a", min_tokens="x", **ONE), "min_tokens is 'x'"),
    "load_state": (lambda m: m.load_state("foo"), "the state is str, it must be what save_state"),
    "load None": (lambda m: m.load_state(None), "the state is NoneType"),
    "no messages": (lambda m: m.create_chat_completion(None), "messages is NoneType, it must be a list"),
    "messages": (lambda m: m.create_chat_completion("hi"), "messages is str, it must be a list of dicts"),
    "embed": (lambda m: m.embed(5), "the input is int, it must be a text or several"),
    "create_embedding": (lambda m: m.create_embedding(5), "the input is int, it must be a text or several"),
    "image": (
        lambda m: m.create_chat_completion([{"role": "user", "content": [{"type": "image_url"}]}]),
        "only parts of type 'text' are supported, no images",
    ),
    "part": (
        lambda m: m.create_chat_completion([{"role": "user", "content": [{"type": "text", "content": "a"}]}]),
        "a part of type 'text' whose text is NoneType, not a string",
    ),
    "cache": (lambda m: m.set_cache(5), "the cache is int"),
    "threshold": (lambda m: m.set_threshold("x"), "threshold is 'x', it must be a number"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(llm: Any, name: str) -> None:
    call, says = CALLS[name]
    with pytest.raises(PowerInferError, match=says) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_ctx": 1.5}, "n_ctx is 1.5, it must be a whole number"),
        ({"n_threads": "x"}, "n_threads is 'x'"),
        ({"n_batch": "x"}, "n_batch is 'x'"),
        ({"n_seq": "x"}, "n_seq is 'x'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"threshold": "x"}, "threshold is 'x', it must be a number"),
        ({"last_n_tokens_size": "x"}, "last_n_tokens_size is 'x'"),
        ({"lora_path": 5}, "lora_path is 5, it must be a path or a list of paths"),
        ({"predictor_type": 5}, "5 is no name of a weight format"),
        ({"plan": 5}, "the plan is 5, it must be a Plan or the path of one"),
        ({"progress": 5}, "progress is 5, it must be a function"),
        ({"prompt_progress": "x"}, "prompt_progress is 'x', it must be a function"),
        ({"chat_handler": 5}, "chat_handler is 5, it must be a function"),
        ({"draft_model": 5}, "draft_model is 5, it must be a function"),
        ({"lora_path": ["nowhere.gguf"], "lora_scale": "x"}, "lora_scale is 'x', it must be a number"),
    ],
)
def test_arguments(relu_path: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PowerInferError, match=says):
        Llama(relu_path, verbose=False, **options)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "the model's path is empty"),
        (b"m.gguf", "the model's path is b'm.gguf', it must be text or a Path"),
        (next(os.scandir(b"/")), "the model's path is <DirEntry b'.*, it must be text or a Path"),
        (None, "the model's path is None"),
        (5, "the model's path is 5"),
        ("llama3", "models have no short names here"),
        (".", r"\. is a folder"),
        ("\ud800.gguf", r"'\\ud800.gguf' has characters that no path can have"),
    ],
)
def test_paths(path: Any, says: str) -> None:
    for kind in (Llama, AsyncLlama):
        with pytest.raises(PowerInferError, match=says):
            kind(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_parallel": "x"}, "n_parallel is 'x', it must be a whole number"),
        ({"n_parallel": 1.5}, "n_parallel is 1.5"),
        ({"n_parallel": 0}, "n_parallel is 0, it must be at least 1"),
        ({"replicas": True}, "replicas is True"),
        ({"max_waiting": math.nan}, "max_waiting is nan"),
        ({"max_waiting": -1}, "max_waiting is -1, it must be at least 0"),
        ({"prompt_part": 0}, "prompt_part is 0, it must be at least 1"),
        ({"n_ctx": 1.5}, "n_ctx is 1.5, it must be a whole number"),
    ],
)
def test_arguments_of_many(relu_path: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PowerInferError, match=says):
        AsyncLlama(relu_path, verbose=False, **options)


def test_what_is_meant_passes(llm: Any) -> None:
    """numpy's numbers, arrays and tuples of ids, several stops."""
    ids = np.array([3, 4], np.int64)
    one = np.int32(1)
    for prompt in (ids, tuple(ids), [np.int32(3)], range(3, 5), "a", b"a"):
        assert llm(prompt, max_tokens=one, seed=np.int64(3), temperature=np.float32(0.5), stop=("x", "y"))
    assert llm.detokenize(ids) == llm.detokenize([3, 4])


def test_many_at_the_same_time(relu_path: Any) -> None:
    async def ask() -> None:
        async with AsyncLlama(relu_path, n_parallel=2, n_threads=1, verbose=False) as llm:
            for prompt, options, says in (
                (bytearray(b"a"), {}, "the prompt is bytearray"),
                ("a", {"max_tokens": 1.5}, "max_tokens is 1.5"),
                ("a", {"stop": 5}, "stop is 5"),
                ("a", {"seed": "x"}, "seed is 'x'"),
                (None, {}, "the prompt is NoneType, it must be text or token ids"),
                ({"a": 1}, {}, "the prompt is dict"),
                ({3, 4}, {}, "the prompt is set"),
                (np.array(3), {}, "the prompt is ndarray"),
                (["a", None], {}, "the prompt is NoneType"),
            ):
                with pytest.raises(PowerInferError, match=says):
                    await llm.create_completion(prompt, **options)  # type: ignore[arg-type]
            for wrong, says in (
                (None, "the input is NoneType, it must be a list of token ids"),
                ({"a": 1}, "the input is dict"),
                (b"ab", "the input is bytes"),
                ([1.5], "must be a sequence of integers"),
                ([], "input is empty"),
            ):
                with pytest.raises(PowerInferError, match=says):
                    await llm.embed(wrong)  # type: ignore[arg-type]
            several = await llm.embed(np.array([[3, 4], [5, 6]]))  # type: ignore[arg-type]
            assert several == [await llm.embed([3, 4]), await llm.embed((5, 6))]
            assert await llm.embed(iter([3, 4])) == several[0]  # type: ignore[arg-type]

    asyncio.run(ask())


def test_conversations_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said of what was given, and not of a pool that nobody asked for."""
    monkeypatch.setattr(loader, "available_bytes", lambda: 1 << 30)
    with pytest.raises(PowerInferError, match=r"K/V for n_ctx=1000000 and 16,777,216 tokens of all conv"):
        AsyncLlama("demo", n_parallel=64, n_ctx=1_000_000, vram_budget=0, verbose=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temp", "nan"], "--temp is nan, it must be between 0 and 1000"),
        (["--temp", "-1"], "--temp is -1.0, it must be between 0 and 1000"),
        (["-n", "-5"], "--max-tokens is -5, it must be at least -2"),
        (["--top-p", "2"], "--top-p is 2.0, it must be between 0 and 1"),
        (["--min-p", "-0.5"], "--min-p is -0.5, it must be between 0 and 1"),
        (["--repeat-penalty", "0"], "--repeat-penalty is 0.0"),
        (["--n-ctx", "0.5"], "0.5"),
        (["--n-ctx", "20000000"], "--n-ctx is 20000000, must be"),
        (["-ctk", "q4_0"], "--cache-type-k is 'q4_0', it must be one of"),
        (["--vram-budget", "much"], "'much' is not a number of GiB"),
    ],
)
def test_options(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["run", "demo", "hi", *words]) == 1
    except SystemExit as end:
        assert end.code == 2
    assert says in capsys.readouterr().err


def test_breakers_that_are_read_once() -> None:
    options = sampling_of("it", {"dry_sequence_breakers": iter(["a", "b"])}, 64)
    assert options.dry_sequence_breakers == ("a", "b")
