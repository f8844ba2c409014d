"""What Llama adds to the engine's own time per token: sampling, text, and the shapes of answers.

    python scripts/bench_overhead.py [MODEL] [-n TOKENS] [-r ROUNDS] [--together N]

The engine's own time is what it takes itself for the same steps (Session.last_total): a token costs that much
with no Python at all. Ways to generate run in turn, so that a machine that drifts treats them alike:

    loop      Session.feed, Session.logits and Sampler.sample by hand
    call      llm(prompt, max_tokens=n)
    stream    the same with stream=True
    chat      create_chat_completion(stream=True)
    greedy    stream with temperature=0
    stops     stream with two stop strings, which do not come
    penalty   stream with repeat_penalty=1.1
    logprobs  stream with logprobs=5
    together  --together streams of AsyncLlama at once, per step, which gives that many tokens

With a model that no cache holds (any but the demo) Python runs on cold caches, as it does with real models.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from powerinfer import AsyncLlama, Llama
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Session

PROMPT = "Once upon a time"
GOAL_MS = 0.5
"""5 % of a token at 100 tokens/s."""


class Clock:
    """Feeds a session as it is fed, and sums what the engine itself took."""

    def __init__(self, session: Session) -> None:
        self.engine_us = 0.0
        self.n_steps = 0
        self._session = session
        for name in ("feed", "next"):
            setattr(session, name, self._counted(getattr(session, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self.engine_us += self._session.last_total.us
            self.n_steps += 1
            return result

        return counted

    def added_ms(self, way: Callable[[], None]) -> tuple[float, float]:
        """What a step of it took beside the engine, and the engine."""
        self.engine_us, self.n_steps = 0.0, 0
        begin = time.perf_counter()
        way()
        taken_us = (time.perf_counter() - begin) * 1e6
        return (taken_us - self.engine_us) / self.n_steps / 1000, self.engine_us / self.n_steps / 1000


def single(llm: Llama, n: int, no_end: dict[int, float]) -> list[Callable[[], None]]:
    """The ways of one Llama."""
    options: dict[str, Any] = {"max_tokens": n, "seed": 1, "logit_bias": no_end}

    def streaming(**more: Any) -> None:
        for _ in llm(PROMPT, stream=True, **options, **more):
            pass

    def loop() -> None:
        sampler = Sampler(Sampling(), llm.n_vocab(), logit_bias=no_end)
        llm.reset()
        llm.session.feed(llm.tokenize(PROMPT))
        for _ in range(n):
            token = sampler.sample(llm.session.logits())
            sampler.accept(token)
            llm.session.feed(np.array([token], np.int32))

    def call() -> None:
        llm(PROMPT, **options)

    def stream() -> None:
        streaming()

    def chat() -> None:
        for _ in llm.create_chat_completion([{"role": "user", "content": PROMPT}], stream=True, **options):
            pass

    def greedy() -> None:
        streaming(temperature=0.0)

    def stops() -> None:
        streaming(stop=["\n\nUser: nobody", "#!#"])

    def penalty() -> None:
        streaming(repeat_penalty=1.1)

    def logprobs() -> None:
        streaming(logprobs=5)

    return [loop, call, stream, chat, greedy, stops, penalty, logprobs]


def many(llm: AsyncLlama, n: int, no_end: dict[int, float]) -> Callable[[], None]:
    """Streams of AsyncLlama, as many at once as it computes."""

    async def one(i: int) -> None:
        options: dict[str, Any] = {"max_tokens": n, "seed": i, "logit_bias": no_end}
        async for _ in await llm.create_completion(PROMPT, stream=True, **options):
            pass

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(llm.n_parallel)))

    return lambda: asyncio.run(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser(description="What Llama adds to the engine's own time per token.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-n", type=int, default=200, help="tokens (default 200)")
    parser.add_argument("-r", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--together", type=int, default=8, help="streams at once (default 8)")
    args = parser.parse_args()
    llm = Llama(args.model, verbose=False, n_ctx=args.n + 64, seed=1)
    no_end = {llm.token_eos(): -float("inf")}  # every way makes all n tokens
    both = AsyncLlama(args.model, verbose=False, n_ctx=args.n + 64, n_parallel=args.together)
    clock, clock_of_many = Clock(llm.session), Clock(both.llama.session)
    ways = [(way.__name__, way, clock) for way in single(llm, args.n, no_end)]
    ways.append(("together", many(both, args.n, no_end), clock_of_many))
    added: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    engine: list[float] = []
    for turn in range(args.r + 1):
        for name, way, clock in ways:
            beside, own = clock.added_ms(way)
            if turn:  # the first wakes everything up
                added[name].append(beside)
                engine += [own] if name != "together" else []
    both.close()
    print(f"engine {statistics.median(engine):.3f} ms a token, {args.n} tokens, median of {args.r} rounds")
    for name, times in added.items():
        share = statistics.median(times) / (10 * GOAL_MS * 2)
        print(f"{name:8} + {statistics.median(times):.3f} ms ({share:.1%} at 100 tokens/s)")


if __name__ == "__main__":
    main()
