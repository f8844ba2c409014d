"""Llama with a plan: what it settles, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from powerinfer import ArgumentError, Llama, UnsupportedError
from powerinfer.plan import Rates, make_plan


def test_a_plan_settles_what_is_not_said(relu_path: Path, bpe_path: Path, tmp_path: Path) -> None:
    plan = make_plan(relu_path, vram_budget=0, n_ctx=96, n_batch=32, type_k="f32")
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        with Llama(relu_path, plan=given, verbose=False) as llm:
            info = llm.session.info
            assert (info.n_ctx, info.n_batch, llm.n_ctx()) == (96, 32, 96)
    with Llama(relu_path, plan=plan, n_ctx=96, type_k="f32", vram_budget=0, verbose=False) as llm:
        assert llm.n_ctx() == 96
    cases: list[dict[str, Any]] = [
        {"n_ctx": 64},
        {"type_k": "f16"},
        {"n_batch": 64},
        {"sparsity": "dense"},
        {"vram_budget": 1},
    ]
    for wrong in cases:
        with pytest.raises(ArgumentError, match="make it anew"):
            Llama(relu_path, plan=plan, verbose=False, **wrong)
    with pytest.raises(ArgumentError, match="another model"):
        Llama(bpe_path, plan=plan, verbose=False)


def test_a_plan_that_uses_a_gpu_is_refused(relu_path: Path) -> None:
    plan = make_plan(relu_path, vram_budget=16, rates=Rates(cpu_bytes_per_s=1e6))
    assert plan.uses_device
    with pytest.raises(UnsupportedError, match="on a GPU"):
        Llama(relu_path, plan=plan, verbose=False)
