"""Grammars of strangers: nobody else waits for them, and they end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    AsyncLlama,
    BusyError,
    ClosedError,
    DeadlineError,
    Llama,
    OutOfMemoryError,
)
from powerinfer._engine.scheduler import Scheduler
from powerinfer._text import grammar_process
from powerinfer._text.grammar import LlamaGrammar, grammar_of_format
from powerinfer._text.grammars import Grammars
from tests.server.scheduling import choice, prompt

pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")

# Of 1.3 KB; each pattern more takes llguidance several times longer, and no limit of its own ends it.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"^.*a0.{{{i}}}$"} for i in range(40)]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": ENDLESS}}
DOUBLING = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)) + '\nr30 ::= "a"'


def endless() -> LlamaGrammar:
    made = grammar_of_format(FORMAT)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def grammars(demo: AsyncLlama) -> Iterator[Grammars]:
    made = Grammars(demo.llama.tokenizer, most=6)
    yield made
    made.close()


def allowed(constraint: Any, n_vocab: int) -> list[int]:
    logits = np.zeros(n_vocab + 3, np.float32)
    constraint.mask(logits)
    return [int(i) for i in np.flatnonzero(np.isfinite(logits))]


@pytest.mark.parametrize(
    "form", ['root ::= "yes" | "no" [a-z]{2} "."', LlamaGrammar.from_json_schema({"enum": ["ab", 17]})]
)
def test_masks_are_those_of_this_process(grammars: Grammars, demo: AsyncLlama, form: Any) -> None:
    tokenizer = demo.llama.tokenizer
    here = (LlamaGrammar.from_string(form) if isinstance(form, str) else form).constraint(tokenizer)
    there = grammars.constraint(form)
    for i in range(20):
        tokens = allowed(here, tokenizer.n_vocab)
        assert allowed(there, tokenizer.n_vocab) == tokens
        if here.is_complete:
            break
        here.accept(tokens[i % len(tokens)])
        there.accept(tokens[i % len(tokens)])
    assert here.is_complete
    there.close()


def test_what_is_wrong_is_said(grammars: Grammars, demo: AsyncLlama) -> None:
    for form in ("root ::= (", DOUBLING, LlamaGrammar.unchecked("%llguidance {}\nstart: nothing")):
        with pytest.raises(ArgumentError, match="the grammar is not valid"):
            grammars.constraint(form)
    constraint = grammars.constraint('root ::= "a"')
    constraint.accept(demo.llama.tokenize("b", add_bos=False)[-1])
    with pytest.raises(ArgumentError, match="does not fit the grammar"):
        allowed(constraint, 10)
    constraint.close()
    assert grammars._n == 0


def test_compiling_ends(grammars: Grammars) -> None:
    with pytest.raises(DeadlineError):
        grammars.constraint(endless(), deadline=time.monotonic() + 0.2)
    asked: list[int] = []
    with pytest.raises(ClosedError):
        grammars.constraint(endless(), is_gone=lambda: len(asked) > 3 or bool(asked.append(0)))
    assert grammars._n == 0


def test_time_and_memory_have_limits(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that the process sets itself."""
    import resource

    set_to: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.update({which: limits}))
    monkeypatch.setattr(grammar_process.os, "_exit", lambda _: None)
    monkeypatch.setattr(grammar_process, "_answer", lambda *_: None)
    grammar_process._child(None, None)  # type: ignore[arg-type]
    assert 0 < set_to[resource.RLIMIT_CPU][0] - time.process_time() <= grammar_process.COMPILE_CPU_S + 2
    assert set_to[resource.RLIMIT_AS][0] >= grammar_process.MEMORY_BYTES


def test_only_so_many(grammars: Grammars) -> None:
    held = [grammars.constraint('root ::= "a"') for _ in range(6)]
    with pytest.raises(BusyError):
        grammars.constraint('root ::= "a"')
    held.pop().close()
    held.append(grammars.constraint('root ::= "a"'))
    for constraint in held:
        constraint.close()
        constraint.close()
    assert grammars._n == 0


def test_some_wait_for_others_to_end(demo: AsyncLlama) -> None:
    own = Grammars(demo.llama.tokenizer, most=3, most_alive=1)
    first = own.constraint('root ::= "a"')
    with pytest.raises(DeadlineError):
        own.constraint('root ::= "a"', deadline=time.monotonic() + 0.1)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    own.constraint('root ::= "a"').close()
    timer.join()
    own.constraint('root ::= "a"').close()
    assert own._n == 0
    own.close()


def test_the_process_is_started_again(grammars: Grammars) -> None:
    grammars.constraint('root ::= "a"').close()
    assert grammars._process is not None
    grammars._process.kill()
    grammars._process.wait()
    grammars.constraint('root ::= "a"').close()


def test_no_process_is_no_fault_of_the_grammar(
    demo: AsyncLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powerinfer.server.problems import problem_of

    fails_once = """
import os
def fail():
    os.fork = fork
    raise BlockingIOError(11, "Resource temporarily unavailable")
fork, os.fork = os.fork, fail
"""
    (tmp_path / "sitecustomize.py").write_text(fails_once)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = Grammars(demo.llama.tokenizer, most=1)
    with pytest.raises(OutOfMemoryError, match="no process for a grammar") as said:
        own.constraint('root ::= "a"')
    assert problem_of(said.value).status == 503
    process = own._process
    own.constraint('root ::= "a"').close()
    assert own._process is process
    own.close()
    own = Grammars(demo.llama.tokenizer, most=1)
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)")
    with pytest.raises(OutOfMemoryError):
        own.constraint('root ::= "a"')
    assert own._n == 0


def test_others_do_not_wait_for_a_grammar(make: Callable[..., Scheduler]) -> None:
    """One whose mask does not come takes no part in steps; then it goes on as if it had come at once."""

    class Slow:
        is_complete = False
        is_ready = True

        def __init__(self) -> None:
            self.n = 0

        def mask(self, logits: Any) -> None:
            logits[[token for token in range(logits.size) if token % 7 != self.n % 7]] = -np.inf

        def accept(self, token: int) -> None:
            self.n += 1
            self.is_ready = self.n != 3 or let_go.is_set()

        def close(self) -> None:
            self.is_ready = True

    let_go = threading.Event()
    scheduler = make()
    let_go.set()
    want = list(scheduler.submit(prompt(9), choice(constraint=Slow()), limit=12))
    let_go.clear()
    slow = Slow()
    stream = scheduler.submit(prompt(9), choice(constraint=slow), limit=12)
    got = [next(stream) for _ in range(3)]
    assert len(list(scheduler.submit(prompt(5), choice(), limit=40))) == 40
    assert not stream.has_more
    slow.is_ready = True
    assert got + list(stream) == want
    waiting = Slow()
    left = scheduler.submit(prompt(9), choice(constraint=waiting), limit=12)
    for _ in range(3):
        next(left)
    left.cancel()
    assert list(left) == [] and left.reason == "cancelled" and waiting.is_ready


def test_answers_with_and_without_a_process(demo: AsyncLlama) -> None:
    options: dict[str, Any] = {"grammar": 'root ::= "yes" | "no" [a-c]{2,9} "."', "temperature": 1.5}

    async def main() -> list[dict[str, Any]]:
        work = [demo.create_completion("Once", seed=seed, logprobs=1, **options) for seed in range(6)]
        return list(await asyncio.gather(*work))

    results = asyncio.run(asyncio.wait_for(main(), 120))
    with Llama.demo(n_ctx=512, n_threads=1, verbose=False) as llm:
        for seed, result in enumerate(results):
            alone = llm.create_completion("Once", seed=seed, logprobs=1, **options)
            assert result["choices"][0]["text"] == alone["choices"][0]["text"]
            assert result["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
            assert result["choices"][0]["finish_reason"] == alone["choices"][0]["finish_reason"] == "stop"
            tokens = [choices["choices"][0]["logprobs"]["tokens"] for choices in (result, alone)]
            assert tokens[0] == tokens[1]


def test_clients_that_leave_while_their_grammar_is_compiled(
    demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of theirs is left, and another grammar is compiled at once: those that wait are not begun."""
    assert demo._grammars is not None
    begin = Mock(side_effect=demo._grammars._begin)
    monkeypatch.setattr(demo._grammars, "_begin", begin)

    async def main() -> None:
        tasks = [
            asyncio.ensure_future(
                demo.create_chat_completion([{"role": "user", "content": "a"}], response_format=FORMAT)
            )
            for _ in range(8)
        ]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        result = await demo.create_completion("a", grammar='root ::= "x"')
        assert result["choices"][0]["text"] == "x"

    asyncio.run(asyncio.wait_for(main(), 120))
    for _ in range(3000):
        if not demo._grammars._n:
            break
        time.sleep(0.01)
    assert not demo._grammars._n
    assert begin.call_count <= 3  # two at a time, and the other


def test_the_end_does_not_wait_for_grammars() -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from tests.server.conftest import serving

    llm = AsyncLlama.demo(n_ctx=256, n_parallel=2, n_threads=1, verbose=False)
    with serving(llm) as url:
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": FORMAT}

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120))

        answers: list[Any] = []
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert llm._grammars is not None
        for _ in range(3000):
            if llm._grammars._n == 4 and llm._grammars._process is not None:
                break
            time.sleep(0.01)
        process = llm._grammars._process
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [503] * 4
    assert {json.loads(answer.text)["error"]["code"] for answer in answers} == {"shutting_down"}
    llm.close()
    assert process is not None and process.poll() is not None
