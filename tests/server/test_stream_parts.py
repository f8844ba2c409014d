"""What a stream costs its event loop: how it begins, waits for its parts and writes them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, AsyncLlama, LogitsProcessorList
from powerinfer.server.guard import _within
from powerinfer.server.problems import encode_part
from tests.server.test_async_llama import run

SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "stream": True}


def test_what_comes_while_others_are_written_is_not_waited_for(demo: AsyncLlama) -> None:
    """All of an answer is there when the first part has gone out."""

    written = threading.Event()

    def wait(_: Any, logits: Any) -> Any:  # the engine's thread: else all may be there before anybody waits
        assert written.wait(20)
        return logits

    async def main() -> None:
        options = SHORT | {"logits_processor": LogitsProcessorList([wait])}
        stream = await demo.create_completion("Once upon a time", **options)
        n_written = 0

        async def write() -> None:
            nonlocal n_written
            n_written += 1
            written.set()
            while demo.stats().running or demo.stats().waiting:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)

        stream.before_waiting = write
        chunks = [chunk async for chunk in stream]
        assert chunks[-1]["choices"][0]["finish_reason"] is not None
        assert n_written

    run(main())


def threads_of(llm: AsyncLlama, monkeypatch: pytest.MonkeyPatch, prompt: Any, options: dict[str, Any]) -> int:
    """How many calls go to threads for one stream."""
    calls: list[Any] = []
    submit = llm._submit

    def noted(*call: Any) -> Any:
        calls.append(call)
        return submit(*call)

    monkeypatch.setattr(llm, "_submit", noted)

    async def main() -> None:
        stream = await llm.create_completion(prompt, **(SHORT | options))
        assert [chunk async for chunk in stream]

    run(main())
    monkeypatch.undo()
    return len(calls)


@pytest.mark.parametrize("prompt", ["Once", [5, 6, 7]])
def test_a_short_stream_begins_without_a_thread(
    demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    options = {"stop": "zebra", "seed": 3, "grammar": None, "logprobs": None}
    with demo._preparing, demo._preparing:  # threads that make long prompts do not hold it up
        assert threads_of(demo, monkeypatch, prompt, options) == 0
    assert demo.begins_at_once(prompt, options)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Once " * 120, {}),
        (["Once", "A dog"], {}),
        ("Once", {"n": 2}),
        ("Once", {"stop": ["x" * 300, "y" * 300]}),
        ("Once", {"stop_token_ids": [5] * 600}),
        ("Once", {"stop_token_ids": {5, 6}}),
        (np.arange(5, 9, dtype=np.int32), {}),
        ("Once", {"grammar": 'root ::= "a"+'}),
        ("Once", {"response_format": {"type": "json_object"}}),
        ("Once", {"echo": True, "logprobs": 1}),
        ("Once", {"dry_multiplier": 1.0}),
        ("Once", {"logits_processor": LogitsProcessorList([lambda _, logits: logits])}),
    ],
)
def test_what_may_take_time_has_one(
    demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch, prompt: Any, options: dict[str, Any]
) -> None:
    assert threads_of(demo, monkeypatch, prompt, options) > 0
    assert not demo.begins_at_once(prompt, options)


def test_a_time_that_is_over_and_a_task_that_is_cancelled() -> None:
    """They are not taken for each other."""

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await _within(0.01, asyncio.sleep(30))
        await asyncio.sleep(0)  # nothing of it is left
        await _within(30, asyncio.sleep(0))
        task = asyncio.ensure_future(_within(30, asyncio.sleep(30)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_short_stream_that_is_refused(demo: AsyncLlama) -> None:
    """Its place among the requests is free again."""

    async def main() -> None:
        with pytest.raises(ArgumentError, match="1000000"):
            await demo.create_completion([5, 1000000], stream=True)
        assert not demo._requests

    run(main())


@pytest.mark.parametrize(
    "value",
    [
        {"id": "cmpl-1", "choices": [{"text": 'ü\u2028"\\/\x01\x7f\n', "logprobs": None}], "usage": None},
        {"text": "\ud83d", "n": 1},
        {"text": "NaN and Infinity", "logprob": -0.25},
        [1e-7, 1e22, 0.1, -0.0, 3.0, 2**70, True, None, (1, 2), {1: 2}],
    ],
)
def test_json_is_what_pythons_encoder_writes(value: Any) -> None:
    want = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    got = encode_part(value)
    assert json.loads(got) == json.loads(want)
    assert got.replace(b"1e-7", b"1e-07") == want


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"logprob": float("-inf")}]])
def test_what_json_has_not_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_part(value)
