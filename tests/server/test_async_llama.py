"""AsyncLlama: many answers at once, streams, cancelling, closing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    AsyncLlama,
    BusyError,
    ClosedError,
    ContextError,
    DeadlineError,
    Llama,
    LogitsProcessorList,
)
from powerinfer._engine.sampling import Sampler
from powerinfer._engine.session import Session

PROMPTS = ["Once upon a time", "The cat", "A dog", "My name is", "One day", "Two friends"]
CHAT = [{"role": "user", "content": "Hello"}]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def idle(llm: AsyncLlama) -> None:
    for _ in range(1000):
        stats = llm.stats()
        if not stats.running and not stats.waiting:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("something is still under way")


def text_of(result: dict[str, Any]) -> str:
    choice = result["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_answers_at_the_same_time(demo: AsyncLlama) -> None:
    async def main() -> list[dict[str, Any]]:
        work = [demo.create_completion(p, max_tokens=12, temperature=0, stop="zebra") for p in PROMPTS]
        results = await asyncio.gather(*work)
        await idle(demo)
        return list(results)

    before = demo.stats()
    results = run(main())
    after = demo.stats()
    with Llama.demo(n_ctx=512, n_threads=1, verbose=False) as llm:
        for p, result in zip(PROMPTS, results, strict=True):
            alone = llm.create_completion(p, max_tokens=12, temperature=0, stop="zebra")
            assert set(result) == {*alone, "timings"}
            assert result["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
            assert set(alone["usage"]) <= set(result["usage"])
            assert len(text_of(result)) > 10
    assert after.n_steps - before.n_steps < 12 * len(PROMPTS) / 1.5


def test_streams(demo: AsyncLlama) -> None:
    async def main() -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
        whole = await demo.create_chat_completion(CHAT, temperature=0)
        stream = await demo.create_chat_completion(CHAT, temperature=0, stream=True)
        chunks = [chunk async for chunk in stream]
        assert stream.usage == whole["usage"] | {
            "prompt_tokens_details": stream.usage["prompt_tokens_details"]
        }
        return text_of(whole), whole["usage"], chunks

    text, usage, chunks = run(main())
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_several_answers_and_prompts(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    reset = Sampler.reset
    monkeypatch.setattr(Sampler, "reset", lambda self, seed: (seeds.append(seed), reset(self, seed))[1])

    async def main() -> None:
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "seed": 7}
        result = await demo.create_completion(PROMPTS[:2], n=2, **options)
        assert [choice["index"] for choice in result["choices"]] == [0, 1, 2, 3]
        assert sorted(seeds) == [7, 7, 8, 8]
        one = await demo.create_completion(PROMPTS[0], **options)
        assert result["usage"]["completion_tokens"] > one["usage"]["completion_tokens"]
        stream = await demo.create_completion(PROMPTS[:2], n=2, stream=True, **options)
        parts: dict[int, str] = {}
        async for chunk in stream:
            choice = chunk["choices"][0]
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
        assert sorted(parts) == [0, 1, 2, 3]
        n_prompt = sum(len(demo.llama.tokenize(p)) for p in PROMPTS[:2])
        assert stream.usage["prompt_tokens"] == result["usage"]["prompt_tokens"] == n_prompt

    run(main())


def test_the_best_of_several(demo: AsyncLlama) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "seed": 7, "n": 3}
        result = await demo.create_completion(PROMPTS[:2], best_of=4, logprobs=0, **options)
        assert [choice["index"] for choice in result["choices"]] == list(range(6))
        rows = [choice["logprobs"]["token_logprobs"] for choice in result["choices"]]
        rated = [np.mean(row) for row in rows]
        assert rated[:3] == sorted(rated[:3], reverse=True) and rated[3:] == sorted(rated[3:], reverse=True)
        assert result["usage"]["completion_tokens"] > sum(map(len, rows))  # the others count too
        result = await demo.create_completion(PROMPTS[:2], best_of=4, **options)
        assert [choice["logprobs"] for choice in result["choices"]] == [None] * 6
        with pytest.raises(ArgumentError, match="best_of"):
            await demo.create_completion("x", best_of=2, stream=True)

    run(main())


def test_refusals_come_at_once(demo: AsyncLlama) -> None:
    async def main() -> None:
        for stream in (False, True):
            with pytest.raises(ContextError):
                await demo.create_completion("word " * 2000, stream=stream)
            with pytest.raises(ArgumentError):
                await demo.create_completion("x", temperature=0.5, mirostat_mode=9, stream=stream)
            with pytest.raises(TypeError):
                await demo.create_completion("x", n_tokens=5, stream=stream)
            with pytest.raises(ArgumentError):
                await demo.create_completion("x", n=0, stream=stream)
        with pytest.raises(ArgumentError):
            await demo.create_completion([])
        with pytest.raises(ArgumentError):
            await demo.embed([])

    run(main())


GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
"""A drawn end of text would keep a gate from being reached."""


LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "logit_bias": {2: -100}}


def gate() -> tuple[LogitsProcessorList, threading.Event, threading.Event]:
    """A processor that waits for the second event before the third token, and sets the first then."""
    reached, go = threading.Event(), threading.Event()
    calls = []

    def wait(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            reached.set()
            go.wait(20)

    return LogitsProcessorList([wait]), reached, go


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_a_task_frees_its_place(demo: AsyncLlama, stream: bool) -> None:
    async def main() -> None:
        hooks, reached, go = gate()

        async def answer() -> None:
            options: dict[str, Any] = {"logits_processor": hooks, "temperature": 0}
            result = await demo.create_completion("Once", stream=stream, **options)
            if stream:
                async for _ in result:
                    pass

        before = demo.stats().n_ended.get("cancelled", 0)
        task = asyncio.create_task(answer())
        while not reached.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        go.set()
        await idle(demo)
        assert demo.stats().n_ended["cancelled"] == before + 1

    run(main())


def test_leaving_a_stream_frees_its_place(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stream has a name, and where the reader is cancelled while it does something else."""
    run_rounds = Session.run_rounds

    def slowly(self: Session, rounds: Any, n: int) -> None:
        """So that no answer ends by itself, however late it is left."""
        rounds.most = 1
        time.sleep(0.02)
        run_rounds(self, rounds, n)

    monkeypatch.setattr(Session, "run_rounds", slowly)

    async def main() -> None:
        async def reads() -> None:
            async for _ in await demo.create_completion("Once", stream=True, **LONG):
                await asyncio.sleep(60)

        before = demo.stats()
        stream = await demo.create_completion("Once", stream=True, **LONG)
        async for _ in stream:
            break
        assert stream.is_over
        async for _ in await demo.create_completion("Once", stream=True, **LONG):
            break
        task = asyncio.create_task(reads())
        while demo.stats().n_generated_tokens == before.n_generated_tokens or not demo.stats().running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(demo)
        assert demo.stats().n_ended["cancelled"] == before.n_ended.get("cancelled", 0) + 3

    run(main())


def test_streams_that_nobody_reads_are_read_later(demo: AsyncLlama) -> None:
    async def main() -> None:
        options: dict[str, Any] = LONG | {"max_tokens": 100, "n": 2}
        stream = await demo.create_completion("Once", stream=True, **options)
        await idle(demo)  # the engine is done with it
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        whole = await demo.create_completion("Once", **options)
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert not demo._requests
        left = await demo.create_completion("Once", stream=True, **options)
        await idle(demo)
        del left
        for _ in range(1000):
            if not demo._requests:
                break
            await asyncio.sleep(0.01)
        assert not demo._requests

    run(main())


def test_a_whole_answer_wakes_nobody_before_its_end(demo: AsyncLlama) -> None:
    """Unless a stop string is looked for."""
    waiting: list[bool] = []

    async def main(stop: str | None) -> None:
        def look(ids: Any, logits: Any) -> Any:
            waiting.extend(stream.has_more for request in demo._requests for stream in request.streams)
            return logits

        result = await demo.create_completion(
            "Once", **LONG | {"max_tokens": 40}, stop=stop, logits_processor=[look]
        )
        assert result["usage"]["completion_tokens"] == 40 and len(text_of(result)) > 40
        assert result["timings"]["predicted_n"] == 40

    run(main(None))
    assert len(waiting) == 40 and not any(waiting)
    run(main("zebra zebra"))
    texts = run(answers_with(demo, "whole")), run(answers_with(demo, "stream"))
    assert texts[0] == texts[1]


def test_a_stop_string_ends_what_is_computed(demo: AsyncLlama) -> None:
    """Whole answers too are looked at while they are made, where one is looked for."""
    seen: list[int] = []

    def look(ids: Any, logits: Any) -> Any:
        seen.append(1)
        for _ in range(1000 if len(seen) == 30 else 0):  # who reads it has time to find the stop string
            if all(stream.is_cancelled for request in set(demo._requests) for stream in request.streams):
                break
            time.sleep(0.01)
        return logits

    async def main() -> None:
        text = text_of(await demo.create_completion("Once", **LONG | {"max_tokens": 12}))
        result = await demo.create_completion("Once", **LONG, stop=text[8:14], logits_processor=[look])
        assert text_of(result) == text[:8] and result["choices"][0]["finish_reason"] == "stop"
        await idle(demo)

    run(main())
    assert 5 < len(seen) <= 30


async def answers_with(llm: AsyncLlama, how: str) -> list[str]:
    """With logprobs, and a stop string in one of them."""
    found = []
    for stop in (None, "and"):
        options: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": 2, "stop": stop}
        if how == "whole":
            found.append(text_of(await llm.create_completion("Once", **options)))
        else:
            stream = await llm.create_completion("Once", stream=True, **options)
            found.append("".join([chunk["choices"][0]["text"] async for chunk in stream]))
    return found


def test_a_handler_s_stream_may_wait_for_whatever_it_likes(relu_path: Path) -> None:
    """Its parts are made in a thread, as far ahead as there is room; what it raises comes to the reader."""

    def handler(*, llama: Any, messages: Any, stream: bool, **_: Any) -> Any:
        def parts() -> Any:
            for i in range(5):
                whole = llama.create_completion([5, 6, 7 + i], max_tokens=4, temperature=0)
                text = whole["choices"][0]["text"]
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
                yield {"id": "x", "created": 1, "choices": [choice]}
            for chunk in llama.create_completion([5, 6, 7], max_tokens=4, temperature=0, stream=True):
                choice = {
                    "index": 0,
                    "delta": {"content": chunk["choices"][0]["text"]},
                    "finish_reason": None,
                }
                yield {"id": "x", "created": 1, "choices": [choice]}
            if messages[0]["content"] == "fail":
                raise ArgumentError("as it was asked to")

        return parts()

    async def main() -> None:
        options: dict[str, Any] = {"n_parallel": 2, "n_threads": 1, "verbose": False}
        async with AsyncLlama(relu_path, chat_handler=handler, **options) as llm:
            stream = await llm.create_chat_completion(CHAT, stream=True)
            texts = [chunk["choices"][0]["delta"]["content"] async for chunk in stream]
            assert len(texts) >= 7 and "".join(texts[5:]) == texts[0] and not llm._requests
            failing = [{"role": "user", "content": "fail"}]
            with pytest.raises(ArgumentError, match="asked to"):
                async for _ in await llm.create_chat_completion(failing, stream=True):
                    pass
            left = await llm.create_chat_completion(CHAT, stream=True)
            async for _ in left:
                break
            del left
            assert not llm._requests

    run(main())


def test_one_that_is_dropped_ends_its_threads(relu_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        llm = AsyncLlama(relu_path, n_parallel=1, n_threads=1, verbose=False)
        run(llm.create_completion([5, 6, 7], max_tokens=2))
        del llm
    for _ in range(1000):  # a thread drops what it has called a moment after the result is there
        gc.collect()
        if set(threading.enumerate()) <= before:
            return
        time.sleep(0.01)
    raise AssertionError(set(threading.enumerate()) - before)


def test_cancelling_a_vector_frees_its_place(relu_path: Path) -> None:
    async def main() -> None:
        async with AsyncLlama(relu_path, n_parallel=1, n_threads=1, verbose=False) as llm:
            hooks, reached, go = gate()
            first = asyncio.create_task(llm.create_completion([5, 6, 7], logits_processor=hooks, **GREEDY))
            while not reached.is_set():
                await asyncio.sleep(0.005)
            task = asyncio.create_task(llm.embed([5, 6, 7]))
            while not llm.stats().waiting:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not llm.stats().waiting
            go.set()
            await first

    run(main())


def test_leaving_a_stream(demo: AsyncLlama) -> None:
    async def main() -> None:
        stream = await demo.create_completion("Once upon a time", stream=True, temperature=1.0)
        async for _ in stream:
            break
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        await idle(demo)

    run(main())


def test_time_is_over(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (len(calls) >= 3))
    monkeypatch.setattr("powerinfer._engine.admission.time", clock)

    async def main() -> None:
        options: dict[str, Any] = {"logits_processor": lambda *_: calls.append(1), "temperature": 0}
        result = await demo.create_completion("Once", **options, timeout_s=500)
        assert result["choices"][0]["finish_reason"] == "length"
        assert result["usage"]["completion_tokens"] == 3
        with pytest.raises(DeadlineError):
            await demo.create_completion("Once", timeout_s=-1.0)

    run(main())


def test_an_error_on_the_way_ends_the_stream(demo: AsyncLlama) -> None:
    async def main() -> None:
        calls = []

        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) == 4:
                raise ZeroDivisionError

        stream = await demo.create_completion("Once", stream=True, logits_processor=fail, temperature=0)
        with pytest.raises(ZeroDivisionError):
            async for _ in stream:
                pass
        await idle(demo)

    run(main())


def test_too_many(relu_path: Path) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"n_threads": 1, "verbose": False}
        async with AsyncLlama(relu_path, n_parallel=1, max_waiting=1, **options) as llm:
            hooks, reached, go = gate()
            first = asyncio.create_task(llm.create_completion([1, 5], logits_processor=hooks, **GREEDY))
            while not reached.is_set():
                await asyncio.sleep(0.005)
            second = asyncio.create_task(llm.create_completion([1, 6], max_tokens=2))
            while not llm.stats().waiting:
                await asyncio.sleep(0.005)
            with pytest.raises(BusyError):
                await llm.create_completion([1, 7])
            go.set()
            await asyncio.gather(first, second)
        with pytest.raises(ClosedError):
            await llm.create_completion([1, 5])
        llm.close()

    run(main())


def test_closing_ends_what_has_no_thread_yet(relu_path: Path) -> None:
    """All threads are busy: a stream whose answer has not begun ends, and so does what was asked later."""

    async def main() -> None:
        llm = AsyncLlama(relu_path, n_parallel=1, max_waiting=0, n_threads=1, verbose=False)
        go = threading.Event()
        opened = asyncio.ensure_future(llm.create_completion([1, 5], stream=True, **GREEDY))
        await asyncio.sleep(0)
        time.sleep(0.2)  # the stream is made, and the loop has not seen it
        busy = [llm._in_thread(go.wait, 60) for _ in range(8)]
        stream = await opened
        late = asyncio.ensure_future(llm.create_completion([1, 5], **GREEDY))
        tokens = asyncio.ensure_future(llm.tokenize("a"))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(llm.aclose())
        while not llm._closed:
            await asyncio.sleep(0.005)
        go.set()
        await closing
        with pytest.raises(ClosedError):
            await late
        assert await tokens
        with suppress(ClosedError, StopAsyncIteration):
            while True:
                await asyncio.wait_for(anext(stream), 120)
        with pytest.raises(ClosedError):
            await llm.tokenize("a")
        await asyncio.gather(*busy)

    run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_is_told(relu_path: Path) -> None:
    llm = AsyncLlama(relu_path, n_parallel=1, n_threads=1, verbose=False)
    run(llm.create_completion([1, 5], **GREEDY))
    child = os.fork()
    if not child:  # pragma: no cover
        status = 1
        try:
            signal.alarm(20)
            run(llm.create_completion([1, 5], **GREEDY))
        except ClosedError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    llm.close()


def test_closing_ends_what_is_under_way(relu_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLlama(relu_path, n_parallel=1, n_threads=1, verbose=False)
        hooks, reached, go = gate()
        task = asyncio.create_task(llm.create_completion([1, 5], logits_processor=hooks, **GREEDY))
        while not reached.is_set():
            await asyncio.sleep(0.005)
        closing = asyncio.create_task(llm.aclose())
        while not llm.scheduler.is_closing:
            await asyncio.sleep(0.005)
        go.set()
        await closing
        with pytest.raises(ClosedError):
            await task

    run(main())


def test_vectors(relu_path: Path) -> None:
    async def main() -> None:
        async with AsyncLlama(relu_path, n_threads=1, verbose=False, pooling="last") as llm:
            one = await llm.embed([1, 5, 9])
            several = await llm.create_embedding([[1, 5, 9], [1, 6]], normalize=True, model="m")
            assert several["usage"] == {"prompt_tokens": 5, "total_tokens": 5} and several["model"] == "m"
            first = np.array(several["data"][0]["embedding"])
            assert np.allclose(np.linalg.norm(first), 1, atol=1e-5)
            assert np.allclose(first * np.linalg.norm(one), one, atol=1e-4)

    run(main())


def test_tokens(demo: AsyncLlama) -> None:
    async def main() -> None:
        ids = await demo.tokenize("Grüße", add_bos=False)
        assert await demo.detokenize(ids) == "Grüße"
        with pytest.raises(ArgumentError):
            await demo.detokenize([10**6])

    run(main())


@pytest.mark.parametrize("options", [{"logits_all": True}, {"n_seq": 2}, {"n_parallel": 0}])
def test_options_of_one_context_are_refused(relu_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        AsyncLlama(relu_path, **options)


def test_a_layer_without_tokens_has_no_share(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a prompt the last layer computes K and V alone."""
    from powerinfer.server.live import engine_view

    with Llama.demo(n_ctx=64, n_threads=1, sparsity="dense", verbose=False) as llm:
        llm.session.feed([1, 5, 9], want_logits=False)
        stats = replace(demo.stats(), layers=tuple(llm.last_step))
    monkeypatch.setattr(demo, "stats", lambda: stats)
    *others, last = [layer["computed"] for layer in engine_view(demo, demo.llama.info(), "demo")["layers"]]
    assert set(others) == {1} and last is None


def test_partly_on_a_device() -> None:
    from powerinfer.server.live import engine_view

    options: dict[str, Any] = {"devices": "host", "vram_budget": 0.018, "n_batch": 64}

    async def main() -> None:
        async with AsyncLlama.demo(n_ctx=256, n_parallel=4, n_threads=1, verbose=False, **options) as llm:
            work = [llm.create_completion(p, max_tokens=6, temperature=0) for p in PROMPTS]
            results = await asyncio.gather(*work)
            view = engine_view(llm, llm.llama.info(), "demo")
        assert all(len(text_of(result)) > 6 for result in results)
        assert 0 < view["vram"]["used_bytes"] <= view["vram"]["budget_bytes"] == int(0.018 * (1 << 30))
        assert {layer["where"] for layer in view["layers"]} == {"cpu", "both"}
        assert all(0 <= layer["on_device"] < 1 and 0 < layer["computed"] <= 1 for layer in view["layers"])

    run(main())
