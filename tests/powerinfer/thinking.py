"""A model that thinks before it answers, as far as those who stream its answers can tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from powerinfer import Llama

THOUGHT, ANSWER = "Well, they ask.", "Yes."


def thinking(monkeypatch: pytest.MonkeyPatch, *, is_cut: bool = False) -> list[dict[str, Any]]:
    """Makes each Llama one; is_cut: max_tokens ends the thought. Returns what answers are asked with."""
    asked: list[dict[str, Any]] = []
    deltas = [{"role": "assistant"}, *({"reasoning_content": THOUGHT[i : i + 6]} for i in (0, 6, 12))]
    deltas += [{}] if is_cut else [{"content": ANSWER}, {}]

    def create(self: Llama, messages: Any, **options: Any) -> Iterator[Any]:
        asked.append(options)
        for i, delta in enumerate(deltas):
            reason = None if i < len(deltas) - 1 else "length" if is_cut else "stop"
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    monkeypatch.setattr(Llama, "create_chat_completion", create)
    return asked
