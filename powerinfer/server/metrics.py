"""Counts and times in Prometheus' text format."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .._engine.expert_stats import ExpertStats
from .._engine.scheduler import SchedulerStats
from .._engine.scheduler_stats import SECONDS, Times
from .models import Models


def _labels(**labels: object) -> str:
    told = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items() if value is not None)
    return f"{{{told}}}" if told else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def histogram(name: str, times: Times, model: str | None = None) -> Iterator[str]:
    """How often a time fell below each of some bounds."""
    total = 0
    for bound, count in zip((*SECONDS, math.inf), times.counts, strict=True):
        total += count
        yield f"{name}_bucket{_labels(model=model, le='+Inf' if math.isinf(bound) else bound)} {total}"
    yield f"{name}_sum{_labels(model=model)} {times.sum_s:.6f}"
    yield f"{name}_count{_labels(model=model)} {total}"


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

    def retry_after_s(self, stats: Sequence[SchedulerStats]) -> int:
        """When there may be a place: what waits, at the time that requests have taken so far."""
        with self._lock:
            each = self.request_s.mean_s or 1.0
        most = max(((own.waiting + 1) / own.max_running for own in stats), default=1.0)
        return max(1, min(60, math.ceil(each * most)))

    def text(self, models: Models) -> str:
        """All of it. What belongs to a model is labelled with its name where there are several."""
        with self._lock:
            requests = sorted(self._requests.items())
            request = self.request_s.copy()
        all_models = list(models.each())
        many = len(all_models) > 1
        stats = [(model.name if many else None, model.llm.stats()) for model in models.opened]
        lines = _head("powerinfer_requests_total", "counter", "Requests by path and status.")
        lines += [f"powerinfer_requests_total{_labels(path=p, status=s)} {n}" for (p, s), n in requests]
        lines += _head("powerinfer_generations_total", "counter", "Generations by the reason why they ended.")
        for name, own in stats:
            for reason, n in sorted(own.n_ended.items()):
                lines.append(f"powerinfer_generations_total{_labels(model=name, reason=reason)} {n}")
        for kind, metric, text, value in _VALUES:
            found = [(name, value(own)) for name, own in stats]
            lines += _of_models(kind, metric, text, found)
        lines += _of_models("gauge", "resident_bytes", "Memory of the process.", [(None, resident_bytes())])
        if many:
            loaded = [(model.name, int(model.opened is not None)) for model in all_models]
            lines += _of_models("gauge", "model_loaded", "1: the model is open.", loaded)
            loads = [(model.name, model.n_loads) for model in all_models]
            lines += _of_models("counter", "model_loads_total", "Times that it was opened.", loads)
        experts = [(name, own.experts) for name, own in stats if own.experts is not None]
        if experts:
            lines += _expert_lines(experts)
        lines += _head("powerinfer_request_seconds", "histogram", "Of a request that was computed.")
        lines += histogram("powerinfer_request_seconds", request)
        for metric, text, times in _TIMES:
            lines += _head(f"powerinfer_{metric}_seconds", "histogram", text)
            for name, own in stats:
                lines += histogram(f"powerinfer_{metric}_seconds", times(own), name)
        return "\n".join([*lines, ""])


Value = Callable[[SchedulerStats], float]
_VALUES: tuple[tuple[str, str, str, Value], ...] = (
    ("counter", "prompt_tokens_total", "Tokens of prompts.", lambda s: s.n_prompt_tokens),
    ("counter", "reused_tokens_total", "Of those, held already.", lambda s: s.n_reused_tokens),
    ("counter", "computed_tokens_total", "Tokens computed.", lambda s: s.n_computed_tokens),
    ("counter", "generated_tokens_total", "Tokens generated.", lambda s: s.n_generated_tokens),
    ("counter", "steps_total", "Steps of the engine.", lambda s: s.n_steps),
    ("counter", "preempted_total", "Times that a generation had to give way.", lambda s: s.n_preempted),
    ("counter", "evicted_total", "Idle sequences that were forgotten.", lambda s: s.n_evicted),
    ("gauge", "replicas", "Sessions that compute.", lambda s: s.n_replicas),
    ("gauge", "running", "Generations under way.", lambda s: s.running),
    ("gauge", "waiting", "Requests that wait for a place.", lambda s: s.waiting),
    ("gauge", "kv_used_ratio", "Share of the memory for K and V that is taken.", lambda s: s.kv_used),
    ("gauge", "tokens_per_second", "Generated in the last seconds.", lambda s: s.tokens_per_s),
    ("gauge", "prompt_tokens_per_second", "Read in the last seconds.", lambda s: s.prompt_tokens_per_s),
)
_TIMES: tuple[tuple[str, str, Callable[[SchedulerStats], Times]], ...] = (
    ("queue", "That a text waited for a place.", lambda s: s.queue),
    ("first_token", "From when a prompt came to its first token.", lambda s: s.first_token),
    ("between_tokens", "From a token to the next one of the same answer.", lambda s: s.between_tokens),
)


def _of_models(
    kind: str, metric: str, text: str, values: Sequence[tuple[str | None, float]]
) -> Iterator[str]:
    yield from _head(f"powerinfer_{metric}", kind, text)
    for name, value in values:
        shown = f"{value:.6g}" if isinstance(value, float) else value
        yield f"powerinfer_{metric}{_labels(model=name)} {shown}"


def _expert_lines(all_experts: Sequence[tuple[str | None, ExpertStats]]) -> Iterator[str]:
    """Of mixtures."""
    copies = [(name, own.n_copies) for name, own in all_experts]
    yield from _of_models("counter", "expert_copies_total", "Experts that moved to a device.", copies)
    copied = [(name, own.copied_bytes) for name, own in all_experts]
    yield from _of_models("counter", "expert_copied_bytes_total", "Their bytes.", copied)
    yield from _head(
        "powerinfer_expert_routes_total", "counter", "Uses of experts, by where they were computed."
    )
    for name, experts in all_experts:
        for where, n in (
            ("device", experts.n_device),
            ("streamed", experts.n_streamed),
            ("zero_copy", experts.n_zero_copy),
            ("cpu", experts.n_cpu),
        ):
            yield f"powerinfer_expert_routes_total{_labels(model=name, where=where)} {n}"


def resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
