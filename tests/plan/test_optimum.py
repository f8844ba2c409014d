"""The engine's plans against an exact solver of the same program: never over the budget, within 1 % of the
best.

The cases are random: families, formats, modes, rates at which either side is the slow one, hand-overs that
are free or dear (then a layer that is whole on the device gains most), budgets from the least to more than
enough.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model
from powerinfer.models.plan.engine import Rates, Settings, compute
from tests.plan.drafts import power_law, write_model
from tests.plan.reference import Asked, Reference

CASES = 60
TOLERANCE = 0.01  # what a plan may be slower than the best one
WHOLE = 0.25  # the same for one that puts everything on devices


def late(*cases: Any) -> list[Any]:
    """Cases that `make slow` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def first(n_cases: int, n_usual: int) -> list[Any]:
    return [*range(n_usual), *late(*range(n_usual, n_cases))]


def allowed(got: Any) -> float:
    """How many times the best plan's time this one may take."""
    whole = got.head_on_device and all(y.on_device and y.active_cold == 0 for y in got.layers)
    return 1 + (WHOLE if whole else TOLERANCE)


SUMS = 1e-9  # both sides add the same few thousand doubles in another order


def draw_model(rng: np.random.Generator, path: Path) -> tuple[Path, dict[str, Any]]:
    family = str(rng.choice(["llama", "llama", "bamboo", "falcon", "opt", "qwen2", "qwen3"]))
    mode = "dense" if family.startswith("qwen") else str(rng.choice(["predicted", "exact", "dense"]))
    n_layer = int(rng.integers(1, 7))
    n_ff = int(rng.choice([192, 512, 768, 1000] if mode == "predicted" else [256, 512, 1024]))
    ranks = [32 * int(r) for r in rng.integers(1, 5, n_layer)] if mode == "predicted" else []
    kinds = rng.choice(["F16", "F32", "Q8_0", "Q4_0", "Q6_K", "BF16"], 40)

    def type_of(name: str) -> str:
        if name.startswith(("blk", "output")) and "fc" not in name:
            kind = str(kinds[sum(map(ord, name)) % len(kinds)])
            return "Q4_0" if kind == "Q6_K" and "ffn_down.weight" in name and n_ff % 256 else kind
        return "F16"

    n_tokens = int(rng.choice([1000, 20_000_000]))
    counts = power_law(rng, n_layer, n_ff, n_tokens)
    act = {"exact": "relu", "dense": "gelu" if family == "falcon" else "silu"}.get(mode, "")
    write_model(
        path,
        family,
        n_layer=n_layer,
        n_ff=n_ff,
        n_head_kv=4 if family == "opt" else int(rng.choice([1, 2, 4])),
        type_of=type_of,
        ranks=ranks,
        act="" if family in ("bamboo", "opt") else act,
        tied=family == "opt" or bool(rng.integers(2)),
        two_norms=family == "falcon" and bool(rng.integers(2)),
        counts=counts,
    )
    return path, {"mode": mode, "counts": counts if rng.random() < 0.8 else None, "n_tokens": n_tokens}


def draw_case(rng: np.random.Generator, path: Path) -> tuple[Path, Asked]:
    path, about = draw_model(rng, path)
    cpu = 1e9
    return path, Asked(
        n_ctx=int(rng.choice([1, 64, 300])),
        n_batch=int(rng.choice([1, 16, 32, 100])),
        n_seq=int(rng.choice([1, 3])),
        n_pool=int(rng.choice([300, 512])),
        type_k=str(rng.choice(["f16", "q8_0", "f32"])),
        type_v=str(rng.choice(["f16", "q8_0"])),
        group=int(rng.choice([16, 32, 32, 100])),
        overhead=int(rng.choice([0, 200_000])),
        gpu=cpu * float(rng.choice([0.5, 2, 8, 8, 40])),
        cpu=cpu,
        handover=float(rng.choice([0, 6, 30, 300])),
        layer_us=float(rng.choice([0, 0, 16])),
        ffn_us=float(rng.choice([0, 9])),
        share=0.15,
        overshoot=float(rng.choice([1, 1.2, 3])),
        **about,
    )


USUAL = Asked(
    n_ctx=64,
    n_batch=16,
    n_seq=1,
    n_pool=64,
    type_k="f16",
    type_v="f16",
    mode="predicted",
    group=64,
    overhead=0,
    gpu=8e9,
    cpu=1e9,
    handover=6,
    layer_us=0,
    ffn_us=0,
    share=0.15,
    overshoot=1.2,
)


def plan(model: Model, a: Asked, budget: int, *more: int) -> Any:
    settings = Settings(
        budget_bytes=budget,
        more_budgets=more,
        n_ctx=a.n_ctx,
        n_pool=a.n_pool,
        n_seq=a.n_seq,
        n_batch=a.n_batch,
        type_k=a.type_k,
        type_v=a.type_v,
        sparsity=a.mode,
        group=a.group,
        overhead_bytes=a.overhead,
        active_share=a.share,
        overshoot=a.overshoot,
    )
    rates = Rates(
        gpu_bytes_per_s=a.gpu,
        cpu_bytes_per_s=a.cpu,
        handover_us=a.handover,
        layer_us=a.layer_us,
        ffn_us=a.ffn_us,
    )
    return compute(model, settings, rates, a.counts, a.n_tokens)


def check_arithmetic(r: Reference, a: Asked, got: Any) -> float:
    """Recomputes a plan's bytes and time from the file; returns the time."""
    if not got.uses_device:
        assert got.bytes.total == 0 and not any(y.on_device or len(y.hot) for y in got.layers)
        none = np.zeros(r.n_ff, bool)
        return sum(r.layer_us(i, False, none, handover=False) for i in range(r.n_layer)) + r.head_us(
            False, handover=False
        )
    us = r.head_us(got.head_on_device)
    total = a.overhead + r.scratch + (r.head_bytes + r.head_norm if got.head_on_device else 0)
    cold = False  # on a device
    for i, y in enumerate(got.layers):
        hot = np.zeros(r.n_ff, bool)
        hot[y.hot] = True
        assert len(y.hot) == hot.sum() and (y.on_device or not hot.any())
        assert (np.diff(y.hot) > 0).all()
        assert (hot.reshape(-1, r.layers[i].block).min(1) == hot.reshape(-1, r.layers[i].block).max(1)).all()
        us += r.layer_us(i, y.on_device, hot)
        if y.on_device:
            e = r.layers[i]
            sizes = (e.kv, e.attention, e.norms, e.predictor, r.ffn(i, int(hot.sum())))
            assert (y.kv_bytes, y.attention_bytes, y.norm_bytes, y.predictor_bytes, y.ffn_bytes) == sizes
            total += sum(sizes)
        p = r.active(i)
        np.testing.assert_allclose((y.active_hot, y.active_cold), (p[hot].sum(), p[~hot].sum()), rtol=SUMS)
        cold = cold or (y.on_device and not hot.all())
    total += r.staging if cold else 0
    assert got.bytes.total == total
    return us


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", first(CASES, 15))
def test_best_within_a_hundredth(case: int, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    rng = np.random.default_rng(case)
    path, asked = draw_case(rng, tmp_path / "m.gguf")
    with ModelFile(path) as file, Model(file, load=False) as model:
        reference = Reference(file, asked)
        everything = plan(model, asked, 1 << 40)
        assert check_arithmetic(reference, asked, everything) == pytest.approx(
            everything.expected.total_us, rel=SUMS
        )
        low, high = everything.min_bytes, everything.full_bytes
        middle = [int(low + (high - low) * rng.uniform(0, 1)) for _ in range(3)]
        for budget in (low, *middle, high):
            got = plan(model, asked, budget)
            assert got.bytes.total <= budget
            us = check_arithmetic(reference, asked, got)
            assert us == pytest.approx(got.expected.total_us, rel=SUMS)
            best = reference.best(budget)
            assert got.expected.bound_us <= best * (1 + 1e-6)
            assert best * (1 - 1e-6) <= us <= best * allowed(got)


@pytest.mark.parametrize("seed", [1, *late(2, 3, 4, 7)])
def test_more_layers_than_are_tried_exhaustively(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    rng = np.random.default_rng(seed)
    n_layer, n_ff = 24, 1024
    counts = power_law(rng, n_layer, n_ff, 1000)
    ranks = [32 * int(r) for r in rng.integers(1, 9, n_layer)]
    path = write_model(tmp_path / "m.gguf", n_layer=n_layer, n_ff=n_ff, ranks=ranks)
    asked = replace(USUAL, handover=float(rng.choice([0, 30, 200])), counts=counts, n_tokens=1000)
    with ModelFile(path) as file, Model(file, load=False) as model:
        reference = Reference(file, asked)
        everything = plan(model, asked, 1 << 40)
        budget = (everything.min_bytes + everything.full_bytes) // 2
        got = plan(model, asked, budget)
        us = check_arithmetic(reference, asked, got)
        best = reference.best(budget)
        assert got.bytes.total <= budget and got.expected.bound_us <= best * (1 + 1e-6)
        assert best * (1 - 1e-6) <= us <= best * allowed(got)


@pytest.mark.parametrize("share", [0.5, *late(0.3, 0.6)])
def test_nothing_is_left_that_would_help(share: float, tmp_path: Path) -> None:
    """More options than can be tried: what the budget has left holds no step that saves time."""
    rng = np.random.default_rng(0)
    n_layer, n_ff = 20, 8192
    counts = power_law(rng, n_layer, n_ff, 1000)
    path = write_model(
        tmp_path / "m.gguf",
        n_layer=n_layer,
        n_embd=32,
        n_head=2,
        n_head_kv=2,
        n_ff=n_ff,
        ranks=[32] * n_layer,
        type_of=lambda name: "Q4_0",
    )
    asked = replace(USUAL, n_ctx=16384, n_pool=16384, group=8, gpu=40e9, counts=counts, n_tokens=1000)
    with ModelFile(path) as file, Model(file, load=False) as model:
        reference = Reference(file, asked)
        whole = plan(model, asked, 1 << 40)
        budget = int(whole.min_bytes + share * (whole.full_bytes - whole.min_bytes))
        got = plan(model, asked, budget)
    assert budget - got.bytes.total >= 0
    for i, y in enumerate(got.layers):
        used = reference.fixed(i) + reference.ffn(i, len(y.hot)) if y.on_device else 0
        n_bytes, us = map(np.array, reference.options(i))
        fits = n_bytes <= used + budget - got.bytes.total
        assert us[fits].min() >= y.us * (1 - 1e-6) - (0 if y.on_device else asked.handover)


@pytest.mark.parametrize("family", ["bamboo", "falcon", "llama"])
def test_work_space_of_long_chunks(family: str, tmp_path: Path) -> None:
    """Of many tokens hidden values are made a part of the neurons at a time, but where down is stored by
    output; of wide models a few tokens leave fewer parts of a sum."""
    by_output = family == "llama"
    for n_embd, n_ff in ((64, 40_000), (4096, 512)):
        path = write_model(
            tmp_path / f"{n_embd}.gguf",
            family,
            n_layer=1,
            n_embd=n_embd,
            n_ff=n_ff,
            type_of=lambda name: "Q4_0",
            ranks=[] if by_output else [32],
            act="silu" if by_output else "",
        )
        found = []
        needed = n_seen = 0
        for n_batch in (1, 8, 9, 512, 762, 1000, 1536, 2048, 3000, 8192):
            asked = replace(USUAL, n_batch=n_batch, mode="dense" if by_output else "predicted", group=32)
            with ModelFile(path) as file, Model(file, load=False) as model:
                got = plan(model, asked, 1 << 40)
                reference = Reference(file, asked)
                assert got.bytes.scratch == reference.scratch
            if not by_output:  # what a prompt's last chunk takes, too, which may be of any length
                for n in range(n_seen + 1, n_batch + 1):
                    most = (64 << 20) // 4 // n // reference.n_first // 256 * 256
                    needed = max(needed, n * min(n_ff, 16384, max(256, most)))
                assert reference.hidden >= needed
                n_seen = n_batch
            found.append(got.bytes.scratch)
        assert found == sorted(found)
        if n_embd == 64 and not by_output:
            # 64 MiB of gates and ups and their product in 16 bits, not gigabytes
            assert found[-1] - found[-3] < 6144 * 4 * (12 * n_embd + n_ff // 32 + 200)


def test_repeatable(tmp_path: Path) -> None:
    path, asked = draw_case(np.random.default_rng(3), tmp_path / "m.gguf")
    with Model(path, load=False) as model:
        whole = plan(model, asked, 1 << 40)
        one, other = (plan(model, asked, (whole.min_bytes + whole.full_bytes) // 2) for _ in range(2))
    assert one.expected == other.expected and one.bytes == other.bytes
    for a, b in zip(one.layers, other.layers, strict=True):
        np.testing.assert_array_equal(a.hot, b.hot)


@pytest.mark.parametrize("seed", first(12, 6))
def test_two_devices(seed: int, tmp_path: Path) -> None:
    """Never slower than the best division by more than a hundredth and the way between the devices."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng([4, seed])
    path, asked = draw_case(rng, tmp_path / "m.gguf")
    with ModelFile(path) as file, Model(file, load=False) as model:
        reference = Reference(file, asked)
        everything = plan(model, asked, 1 << 40)
        low, high = everything.min_bytes, everything.full_bytes
        budgets = (
            int(low + (high - low) * rng.uniform(0, 0.8)),
            int(low + (high - low) * rng.uniform(0, 0.8)),
        )
        got = plan(model, asked, *budgets)
        best = reference.best_of_two(budgets)
    assert got.expected.total_us <= best * allowed(got) + asked.handover
    assert got.expected.bound_us <= best * (1 + 1e-6)
