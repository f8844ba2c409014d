"""Counts and times in Prometheus' text format."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Iterator

from .._engine.scheduler import SchedulerStats
from .._engine.scheduler_stats import SECONDS, Times


def histogram(name: str, text: str, times: Times) -> Iterator[str]:
    """How often a time fell below each of some bounds."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    total = 0
    for bound, count in zip((*SECONDS, math.inf), times.counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{"+Inf" if math.isinf(bound) else bound}"}} {total}'
    yield f"{name}_sum {times.sum_s:.6f}"
    yield f"{name}_count {total}"


class Metrics:
    """Of one server. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self.request_s = Times()

    def count(self, path: str, status: int) -> None:
        """A request was answered. path: of a route, never what a client wrote."""
        with self._lock:
            self._requests[path, status] += 1

    def add(self, times: Times, seconds: float) -> None:
        with self._lock:
            times.add(seconds)

    def retry_after_s(self, stats: SchedulerStats) -> int:
        """When there may be a place: what waits, at the time that requests have taken so far."""
        with self._lock:
            each = self.request_s.mean_s or 1.0
        return max(1, min(60, math.ceil(each * (stats.waiting + 1) / stats.max_running)))

    def text(self, stats: SchedulerStats) -> str:
        """All of it."""
        with self._lock:
            requests = sorted(self._requests.items())
            request = self.request_s.copy()
        times: list[str] = []
        for name, text, own in (
            ("request", "Of a request that was computed.", request),
            ("queue", "That a text waited for a place.", stats.queue),
            ("first_token", "From when a prompt came to its first token.", stats.first_token),
            ("between_tokens", "From a token to the next one of the same answer.", stats.between_tokens),
        ):
            times += histogram(f"powerinfer_{name}_seconds", text, own)
        lines = [
            "# HELP powerinfer_requests_total Requests by path and status.",
            "# TYPE powerinfer_requests_total counter",
        ]
        lines += [f'powerinfer_requests_total{{path="{p}",status="{s}"}} {n}' for (p, s), n in requests]
        lines += [
            "# HELP powerinfer_generations_total Generations by the reason why they ended.",
            "# TYPE powerinfer_generations_total counter",
        ]
        lines += [
            f'powerinfer_generations_total{{reason="{r}"}} {n}' for r, n in sorted(stats.n_ended.items())
        ]
        for kind, name, text, value in (
            ("counter", "prompt_tokens_total", "Tokens of prompts.", stats.n_prompt_tokens),
            ("counter", "reused_tokens_total", "Of those, held already.", stats.n_reused_tokens),
            ("counter", "computed_tokens_total", "Tokens computed.", stats.n_computed_tokens),
            ("counter", "generated_tokens_total", "Tokens generated.", stats.n_generated_tokens),
            ("counter", "steps_total", "Steps of the engine.", stats.n_steps),
            ("counter", "preempted_total", "Times that a generation had to give way.", stats.n_preempted),
            ("counter", "evicted_total", "Idle sequences that were forgotten.", stats.n_evicted),
            ("gauge", "running", "Generations under way.", stats.running),
            ("gauge", "waiting", "Requests that wait for a place.", stats.waiting),
            ("gauge", "kv_used_ratio", "Share of the memory for K and V that is taken.", stats.kv_used),
            ("gauge", "tokens_per_second", "Generated in the last seconds.", stats.tokens_per_s),
            ("gauge", "prompt_tokens_per_second", "Read in the last seconds.", stats.prompt_tokens_per_s),
            ("gauge", "resident_bytes", "Memory of the process.", resident_bytes()),
            *_expert_copies(stats),
        ):  # fmt: skip
            lines += [f"# HELP powerinfer_{name} {text}", f"# TYPE powerinfer_{name} {kind}"]
            lines.append(
                f"powerinfer_{name} {value:.6g}" if isinstance(value, float) else f"powerinfer_{name} {value}"
            )
        if (experts := stats.experts) is not None:
            lines += [
                "# HELP powerinfer_expert_routes_total Uses of experts, by where they were computed.",
                "# TYPE powerinfer_expert_routes_total counter",
            ]
            lines += [
                f'powerinfer_expert_routes_total{{where="{where}"}} {n}'
                for where, n in (
                    ("device", experts.n_device),
                    ("streamed", experts.n_streamed),
                    ("zero_copy", experts.n_zero_copy),
                    ("cpu", experts.n_cpu),
                )
            ]
        return "\n".join([*lines, *times, ""])


def _expert_copies(stats: SchedulerStats) -> Iterator[tuple[str, str, str, int]]:
    """Of a mixture."""
    if (experts := stats.experts) is not None:
        yield "counter", "expert_copies_total", "Experts that moved to a device.", experts.n_copies
        yield "counter", "expert_copied_bytes_total", "Their bytes.", experts.copied_bytes


def resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
