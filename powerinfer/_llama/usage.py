"""What answers of an AsyncLlama cost, as OpenAI and llama-server tell it, and why they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DeadlineError
from .served import Served


def usage(requests: Sequence[Served]) -> dict[str, Any]:
    """A prompt that has several answers counts once."""
    n_prompt = sum(request.n_prompt for request in requests if request.is_first)
    n_given = sum(request.n_given for request in requests)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_given,
        "total_tokens": n_prompt + n_given,
        "prompt_tokens_details": {
            "cached_tokens": sum(request.n_reused for request in requests if request.is_first)
        },
    }


def timings(requests: Sequence[Served]) -> dict[str, float]:
    """What answers took, as llama-server tells it; waiting for a place is not counted."""
    streams = [stream for request in requests for stream in request.streams]
    begun, first, last = (
        [at for stream in streams if (at := getattr(stream, name)) is not None]
        for name in ("begun_at", "first_at", "last_at")
    )
    one = requests[0]
    n_prompt, n_given = one.n_prompt - one.n_reused, sum(request.n_given for request in requests)
    prompt_s = min(first) - min(begun) if first and begun else 0.0
    given_s = max(last) - min(first) if first else 0.0
    return {
        "cache_n": one.n_reused,
        **_speed("prompt", n_prompt, n_prompt, prompt_s),
        # The first token of an answer is chosen where the prompt ends.
        **_speed("predicted", n_given, max(n_given - len(first), 0), given_s),
    }


def _speed(name: str, n: int, n_timed: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if n_timed else 0.0,
        f"{name}_per_second": n_timed / seconds if seconds else 0.0,
    }


def say_why(request: Served, result: Any) -> None:
    """An answer that was cut off did not stop by itself."""
    reason = request.streams[-1].reason if request.streams else None
    if reason == "time" and not request.n_given:
        raise DeadlineError("the time for this request is over")
    if reason == "time":
        for choice in result["choices"]:
            if choice["finish_reason"] == "stop":
                choice["finish_reason"] = "length"
