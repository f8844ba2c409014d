"""Adapters of attention in layers that lie on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from powerinfer import UnsupportedError
from powerinfer.plan import engine
from powerinfer.session import Model, Session
from tests.native.hybrid import (
    DEEP,
    IDS,
    TOLERANCE,
    adapt,
    apart,
    both,
    carried_out,
    drive,
    options,
    place,
    settings,
    write,
)


@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-7b", "falcon-40b", "opt", "qwen2"])
@pytest.mark.parametrize("split", ["all", "some", "mixed"])
def test_a_device_adapts_as_the_cpu(tmp_path: Path, name: str, split: str) -> None:
    with Model(write(tmp_path, name, "dense")) as model:
        with Session(model, **options("auto")) as s:
            plain = drive(s, IDS)
        adapt(model)
        with Session(model, **options("auto")) as s:
            assert apart(plain, drive(s, IDS)) > 10 * TOLERANCE
        for n_batch, n_threads in ((64, 2), (7, 1)):
            assert both(model, split, "auto", n_batch, n_threads) < TOLERANCE


@pytest.mark.parametrize("rank", [1, 40])
def test_the_budget_holds_them(tmp_path: Path, rank: int) -> None:
    """A plan counts them: where every byte of the budget is used it still fits."""
    rates = engine.Rates(gpu_bytes_per_s=4e12, cpu_bytes_per_s=1e10, handover_us=0, layer_us=0, ffn_us=0)
    with Model(write(tmp_path, DEEP, "dense")) as model:
        plain = engine.compute(model, settings("exact", 64), rates)
        adapt(model, rank)
        full = engine.compute(model, settings("exact", 64), rates)
        shapes = [model.matrix_shape(f"blk.0.attn_{name}.weight") or (0, 0) for name in ("q", "v", "output")]
        floats = -(-rank // 32) * 32 * sum(map(sum, shapes))  # ranks are filled up to whole vectors
        assert full.full_bytes - plain.full_bytes >= 2 * 4 * floats  # of two layers
        assert full.min_bytes > plain.min_bytes
        with Session(model, **options("exact")) as s:
            alone = drive(s, IDS)
        for budget in (full.full_bytes, (full.min_bytes + full.full_bytes) // 2):
            asked = settings("exact", 64, [budget])
            _, plan = carried_out(model, asked, rates)
            with Session(model, plan=plan, device="host", **options("exact")) as s:
                assert apart(alone, drive(s, IDS)) < TOLERANCE
                assert 0 < s.info.n_device_bytes <= budget


def test_adapters_of_the_feed_forward_are_refused(tmp_path: Path) -> None:
    with Model(write(tmp_path, "llama-relu-gqa", "dense")) as model:
        rows, cols = model.matrix_shape("blk.1.ffn_up.weight") or (0, 0)
        model.add_adapter(
            "blk.1.ffn_up.weight", np.ones((1, cols), np.float32), np.ones((rows, 1), np.float32)
        )
        plan = place(model, "some", "exact")
        with pytest.raises(UnsupportedError, match="changes the feed-forward"):
            Session(model, plan=plan, device="host", **options("exact"))
        with Session(model, **options("exact")) as s:
            s.feed(IDS[:3])
