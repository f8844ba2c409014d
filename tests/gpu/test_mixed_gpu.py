"""Prompts and sequences' next tokens in one program of a GPU, and prompts whose products read weights as they
are. Run only when asked for: without a GPU, or in a build without the CUDA backend, they fail.

    pytest tests/gpu/test_mixed_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, make_plan
from tests import models
from tests.native import test_hybrid_mixed as mixed
from tests.native import test_layer_parts as parts
from tests.native.hybrid import beyond_rounding, write

SPEC = replace(
    models.SPECS["llama-relu"], name="heads", n_embd=1024, n_head=16, n_head_kv=16, n_ff=512, n_ctx=1024
)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q8_0])
@pytest.mark.parametrize(
    ("prompts", "ends", "n_next"),
    [({10: 48}, [10], 9), ({11: 24}, [], 10), ({10: 37, 11: 5}, [11], 10), *mixed.CASES[2:], *mixed.LONG],
)
def test_prompts_beside_sequences(
    tmp_path: Path, kind: Kind | None, prompts: dict[int, int], ends: list[int], n_next: int
) -> None:
    """In one program, with the answers that they have apart; also where attention gives its result in F16."""
    with Model(write(tmp_path, SPEC, "dense", kind)) as m, mixed.opened(m, device="cuda") as s:
        got, want, n = mixed.both_ways(s, prompts, ends, n_next)
        n_all = sum(prompts.values()) + len(ends) + n_next
        assert n == (n_all if n_all <= s.info.n_mixed else len(ends) + n_next)
        assert s.info.n_mixed in (64, {Kind.F32: 64, Kind.F16: 256}.get(kind, 240))  # the second on Hopper
        assert beyond_rounding(want, got, m.info.n_layer, int8=kind in (Kind.Q4_0, Kind.Q8_0)) < 1


@pytest.mark.parametrize("kind", [None, Kind.Q4_0])
def test_no_more_programs_are_kept_than_a_plan_counts(tmp_path: Path, kind: Kind | None) -> None:
    """Of shapes that come twice in a row; nothing else may use the GPU."""
    seqs = [4, 5, 6]
    with Model(write(tmp_path, SPEC, "dense", kind)) as m, mixed.opened(m, device="cuda") as s:

        def step(n: int) -> int:
            for q in (3, *seqs):
                s.drop(q)
            kinds = [mixed.PROMPT] * n + [mixed.GENERATED] * 3
            mixed.feed(s, [9] * n + [5, 6, 7], [3] * n + seqs, kinds)
            assert s.last_step[0].n_tokens == n + 3
            return s.info.n_device_bytes

        sizes = [n for n in (*range(16, 60), *range(70, 124)) if n + 3 <= s.info.n_mixed]
        for n in sizes:  # kernels are loaded when they are first used
            step(n)
        used = [
            [step(n) for _ in range(3)][-1] for n in sizes
        ]  # the second time recorded, the third that is run
    assert used[-1] - used[9] <= 4 << 20, [u - used[0] >> 10 for u in used]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_prompts_of_more_tokens_than_products_take_at_once(tmp_path: Path, kind: Kind) -> None:
    """Their products are computed in parts, which read the weights as they are."""
    rng = np.random.default_rng(6)
    with Model(write(tmp_path, SPEC, "dense", kind)) as m, Session(m, n_ctx=1024, n_threads=2) as alone:
        asked = Settings(n_ctx=1024, n_batch=512, sparsity="dense", overhead_bytes=1 << 30, group=1)
        plan = make_plan(m, vram_budget=4, settings=asked)
        with Session(m, plan=plan.native(m), device="cuda", n_ctx=1024, n_threads=2, sparsity="dense") as s:
            for n in (65, 80, 81, 100, 113, 128, 129, 200, 257, 300):
                for each in (s, alone):
                    each.drop()
                ids = rng.integers(3, 290, n).tolist()
                wants = [False] * (n - 3) + [True] * 3
                s.feed(ids, want_logits=wants)
                alone.feed(ids, want_logits=wants)
                got, want = ([each.logits(i).copy() for i in range(3)] for each in (s, alone))
                assert beyond_rounding(want, got, m.info.n_layer, int8=True) < 1, n


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0])
def test_parts_layer_by_layer(tmp_path: Path, kind: Kind) -> None:
    """In front of others' rounds, which have the answers that they have without it, as has what follows."""
    with Model(write(tmp_path, SPEC, "dense", kind)) as m, mixed.opened(m, device="cuda") as s:
        case = parts.Case(s)
        assert s.info.n_part > 50
        for layers in (1, 2, 100):
            n = -(-m.info.n_layer // layers)
            for _ in range(3):  # programs are recorded meanwhile
                case.begin()
                made = parts.Rounds(s, layers).run(s)
                assert len(made.chosen) == n and made.native.part_left == 0 < made.native.part_ns
                got = case.ends(n)
            chosen, want = case.wanted(n)
            assert np.array_equal(made.chosen, chosen) and parts.same(got, want)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0])
def test_a_few_of_a_prompt_far_behind(tmp_path: Path, kind: Kind) -> None:
    """They read K and V together there, by themselves and beside others' next tokens."""
    rng = np.random.default_rng(6)
    spec = replace(SPEC, n_ctx=2048)
    sizes = {"n_ctx": 2048, "n_pool": 4 * 2048, "n_seq": 4}
    with (
        Model(write(tmp_path, spec, "dense", kind)) as m,
        Session(m, n_threads=2, sparsity="dense", **sizes) as alone,
    ):
        asked = Settings(**sizes, n_batch=512, sparsity="dense", overhead_bytes=1 << 30, group=1)
        plan = make_plan(m, vram_budget=4, settings=asked)
        with Session(m, plan=plan.native(m), device="cuda", n_threads=2, sparsity="dense", **sizes) as s:
            for each in (s, alone):
                each.feed(rng.integers(3, 290, 900).tolist(), seq=3, want_logits=False)
                rng = np.random.default_rng(6)
            for n, n_next in ((7, 1), (5, 3), (7, 0), (7, 1), (7, 1)):
                fed = rng.integers(3, 290, n + n_next).tolist()
                for each in (s, alone):
                    for q in range(3):
                        each.drop(q)
                        each.feed([5, 6, 7 + q], seq=q, want_logits=False)
                    each.feed(fed, seq=[3] * n + [*range(n_next)], want_logits=[False] * n + [True] * n_next)
                    each.feed([9], seq=3)
                got, want = ([each.logits(0).copy()] for each in (s, alone))
                assert s.last_step[0].n_tokens == 1
                assert beyond_rounding(want, got, m.info.n_layer, int8=kind == Kind.Q4_0) < 1, (n, n_next)
