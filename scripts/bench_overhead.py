"""What Llama adds to the engine's own time per token: sampling, text, and the shapes of answers.

    python scripts/bench_overhead.py [MODEL] [-n TOKENS] [-r ROUNDS]

The engine's own time is what it takes itself for the same steps (Session.last_total): a token costs that much
with no Python at all. Ways to generate run in turn, so that a machine that drifts treats them alike:

    loop      Session.feed, Session.logits and Sampler.sample by hand
    call      llm(prompt, max_tokens=n)
    stream    the same with stream=True
    chat      create_chat_completion(stream=True)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from powerinfer import Llama
from powerinfer.sampling import Sampler, Sampling
from powerinfer.session import Session

PROMPT = "Once upon a time"
GOAL_MS = 0.5
"""5 % of a token at 100 tokens/s."""


class Clock:
    """Feeds a session as it is fed, and sums what the engine itself took for single tokens."""

    def __init__(self, session: Session) -> None:
        self.engine_us = 0.0
        self.n_tokens = 0
        self._feed, self._session = session.feed, session
        session.feed = self  # type: ignore[method-assign]

    def __call__(self, tokens: object, **options: object) -> None:
        self._feed(tokens, **options)  # type: ignore[arg-type]
        self.engine_us += self._session.last_total.us
        self.n_tokens += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="What Llama adds to the engine's own time per token.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-n", type=int, default=200, help="tokens (default 200)")
    parser.add_argument("-r", type=int, default=9, help="rounds (default 9)")
    args = parser.parse_args()
    llm = Llama(args.model, verbose=False, n_ctx=args.n + 64, seed=1)
    no_end = {llm.token_eos(): -float("inf")}  # every way makes all n tokens
    clock = Clock(llm.session)
    options = {"max_tokens": args.n, "seed": 1, "logit_bias": no_end}

    def loop() -> None:
        sampler = Sampler(Sampling(), llm.n_vocab(), logit_bias=no_end)
        llm.reset()
        llm.session.feed(llm.tokenize(PROMPT))
        for _ in range(args.n):
            token = sampler.sample(llm.session.logits())
            sampler.accept(token)
            llm.session.feed(np.array([token], np.int32))

    def call() -> None:
        llm(PROMPT, **options)

    def stream() -> None:
        for _ in llm(PROMPT, stream=True, **options):
            pass

    def chat() -> None:
        for _ in llm.create_chat_completion([{"role": "user", "content": PROMPT}], stream=True, **options):
            pass

    ways: list[Callable[[], None]] = [loop, call, stream, chat]
    added: dict[str, list[float]] = {way.__name__: [] for way in ways}
    engine: list[float] = []
    for turn in range(args.r + 1):
        for way in ways:
            clock.engine_us, clock.n_tokens = 0.0, 0
            begin = time.perf_counter()
            way()
            taken_us = (time.perf_counter() - begin) * 1e6
            if turn:  # the first wakes everything up
                added[way.__name__].append((taken_us - clock.engine_us) / clock.n_tokens / 1000)
                engine.append(clock.engine_us / clock.n_tokens / 1000)
    print(f"engine {statistics.median(engine):.3f} ms a token, {args.n} tokens, median of {args.r} rounds")
    for name, times in added.items():
        share = statistics.median(times) / (10 * GOAL_MS * 2)
        print(f"{name:8} + {statistics.median(times):.3f} ms ({share:.1%} at 100 tokens/s)")


if __name__ == "__main__":
    main()
