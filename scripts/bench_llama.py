"""What `Llama` costs beside the engine: the time to open a model, and what it adds to a token.

    python scripts/bench_llama.py model.gguf

A model is opened several times, tokenizer included, after it has been read once. Then an answer is streamed
with top-k sampling, and the time from token to token is compared with the engine's own, which it measures
itself. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from powerinfer import Llama
from powerinfer._engine import machine
from powerinfer.bench import commit


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("model", metavar="MODEL")
    p.add_argument("-n", type=int, default=48, metavar="N", help="tokens of the answer (default 48)")
    p.add_argument("-r", type=int, default=3, metavar="N", help="openings (default 3)")
    a = p.parse_args()
    opened = []
    for _ in range(a.r + 1):
        start = time.perf_counter()
        llm = Llama(a.model, n_ctx=512, sparsity="dense", verbose=False)
        opened.append(time.perf_counter() - start)
        n_tokens = llm.n_ctx()
        llm.close()
    llm = Llama(a.model, n_ctx=n_tokens, sparsity="dense", verbose=False)
    times: list[float] = []
    engine: list[float] = []
    options: dict[str, Any] = {"max_tokens": a.n, "temperature": 1.0, "top_k": 40, "seed": 1}
    last = time.perf_counter()
    for _ in llm.create_completion([1, 300, 301, 302], stream=True, **options):
        now = time.perf_counter()
        times.append(now - last)
        engine.append(llm.session.last_total.us * 1e-6)
        last = now
    # The first tokens wake threads and read the prompt; the last ones close the answer.
    pairs = list(zip(times, engine, strict=True))[4:-2]
    added = statistics.median(t - e for t, e in pairs)
    print(
        json.dumps(
            {
                "model": a.model.rpartition("/")[2],
                "cpu": machine.cpu_name(),
                "isa": machine.isa(),
                "commit": commit(),
                "open_s": opened[1:],
                "token_ms": 1e3 * statistics.median(t for t, _ in pairs),
                "engine_ms": 1e3 * statistics.median(e for _, e in pairs),
                "added_ms": 1e3 * added,
                "share_at_100_per_s": added / 0.01,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
