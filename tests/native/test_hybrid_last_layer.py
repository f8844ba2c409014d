"""Of a prompt's last layer devices compute only tokens whose logits are wanted, and at least as many as their
operations for prompts take: to the answers, K and V of computing all, which a session does that keeps every
token's hidden state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from tests.native import test_hybrid_mixtures as mixtures
from tests.native.hybrid import IDS, N_CTX, N_POOL, N_SEQ, beyond_rounding, options, place, write

LEAST = 9  # one more than tokens that are handed over within a layer


def same(model: Model, plan: Callable[[], Any], o: dict[str, Any], *, on_device: bool = True) -> list[Any]:
    """Feeds (tokens, sequences, wants) give the same; returns the last layer's steps."""
    feeds: list[tuple[int, Any, Any]] = [
        (40, 0, False),
        (20, 0, None),
        (30, 1, [False] * 10 + [True] * 20),
        (24, [2, 3] * 12, [TokenKind.PROMPT] * 22 + [TokenKind.SCORED] * 2),
        (4, 0, True),
    ]
    steps = []
    with (
        Session(model, plan=plan(), device="host", **o) as s,
        Session(model, plan=plan(), device="host", keep_hidden=True, **o) as all_of_them,
    ):
        for n, seq, wants in feeds:
            got = []
            for x in (s, all_of_them):
                x.feed(IDS[:n], seq=seq, want_logits=wants)
                got.append([x.logits(i).copy() for i in range(x.n_logits)] if x.n_logits else [])
            assert len(got[0]) == len(got[1])
            if got[0]:
                assert beyond_rounding(got[0], got[1], model.info.n_layer) < 1
            steps.append(s.last_step[-1])
            assert {step.n_tokens for step in s.last_step[:-1]} == {n}
            assert all_of_them.last_step[-1].n_tokens == n
        for seq in range(N_SEQ):
            assert s.save(seq=seq) == all_of_them.save(seq=seq)
    if on_device:
        assert [step.n_tokens for step in steps] == [0, LEAST, 20, LEAST, 4]
    assert (steps[0].n_rows, steps[0].n_routes, steps[0].ffn_bytes) == (0, 0, 0)
    assert 0 < steps[0].bytes < steps[1].bytes
    return steps


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [
        ("llama-relu-gqa", "exact"),
        ("falcon-7b", "dense"),  # blocks side by side
        ("gemma3", "dense"),
        ("olmo3", "dense"),  # norms of all heads together
        ("deepseek2-dense", "dense"),
    ],
)
def test_a_prompt(name: str, sparsity: str, tmp_path: Path) -> None:
    with Model(write(tmp_path, name, "dense")) as model:
        same(model, lambda: place(model, "some", sparsity), options(sparsity))
        n = model.info.n_layer
        apart = {"devices": [0] * n, "n_devices": 2, "head": 1}
        same(model, lambda: place(model, "all", sparsity, **apart), options(sparsity))
        for on in (0, -1):  # the last layer, the CPU computing the head; or the other way round
            one = {"devices": [0] * (n - 1) + [on], "head": -1 - on}
            same(
                model,
                lambda one=one: place(model, "none", sparsity, **one),
                options(sparsity),
                on_device=on == 0,
            )


@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe", "glm4moe"])
def test_a_prompt_of_a_mixture(name: str, tmp_path: Path) -> None:
    with Model(mixtures.write_device(tmp_path / "m.gguf", name)) as model:
        o = options("dense") | mixtures.F32 | {"live_experts": False}
        sizes = {"n_ctx": N_CTX, "n_pool": N_POOL}
        for split in ("some", "all"):
            steps = same(model, lambda split=split: mixtures.place(model, split, 64, **sizes), o)
            assert [step.n_routes for step in steps] == [
                step.n_tokens * model.info.n_expert_used for step in steps
            ]
