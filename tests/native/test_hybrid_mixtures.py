"""Mixtures of experts whose layers lie partly on a device, against the float64 reference: whatever experts
are where, decoded tokens to sums of floats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, UnsupportedError
from powerinfer._engine import devices
from powerinfer._engine.loader import Loader
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import reference, rounding
from tests.native import test_mixtures
from tests.native.test_mixtures import N_LAYER, SPEC, TOKENS, VARIANTS, draw, write

N_CTX, N_USED = 128, 3
# Experts of a layer that are on the device; "mixed": of every other layer; "cpu": of none, but the head is.
SPLITS: dict[str, Sequence[int]] = {
    "all": range(SPEC.n_expert),
    "none": (),
    "one": (3,),
    "but": (0, 1, 2, 3, 4, 6, 7),
    "some": (1, 2, 5, 6),
    "mixed": (0, 3, 7),
}
DEVICES = [name for name in VARIANTS if name not in ("olmoe", "glm4moe", "gpt-oss")]
SLOW = engine.Rates(
    cpu_bytes_per_s=1e7, handover_us=0, layer_us=0, ffn_us=0
)  # a host that gains by all bytes
F32 = {"type_k": "f32", "type_v": "f32"}


def settings(n_batch: int, budgets: Sequence[int] = (1 << 34,), **change: Any) -> engine.Settings:
    return engine.Settings(
        budget_bytes=budgets[0],
        more_budgets=tuple(budgets[1:]),
        **{"n_ctx": N_CTX, "n_pool": N_CTX, "n_seq": 4, "n_batch": n_batch, "sparsity": "dense"}
        | {"overhead_bytes": 0, "group": 1}
        | F32
        | change,
    )


def place(model: Model, split: str, n_batch: int, devices: Sequence[int] | None = None, **change: Any) -> Any:
    on = [split != "mixed" or layer % 2 == 1 for layer in range(N_LAYER)]
    hot = [np.array(SPLITS[split] if here else (), np.int32) for here in on]
    return engine.native_plan(
        model,
        settings(n_batch, [1 << 34] * (max(devices) + 1 if devices else 1), **change),
        engine.Rates(),
        on_device=on,
        hot=hot,
        head_on_device=split != "mixed",
        devices=devices,
        head_device=devices[-1] if devices else 0,
    )


def opened(model: Model, plan: Any, n_batch: int = 64, n_threads: int = 2, **more: Any) -> Session:
    sizes: dict[str, Any] = {"sparsity": "dense", "device": "host"}
    sizes |= {"n_ctx": N_CTX, "n_pool": N_CTX, "n_seq": 4, "n_batch": n_batch, "n_threads": n_threads}
    return Session(model, plan=plan, **sizes | F32 | more)


def decoded(s: Session) -> np.ndarray[Any, Any]:
    rows = []
    for token in TOKENS:
        s.feed([token])
        rows.append(s.logits().copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", DEVICES)
def test_every_split_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for i, split in enumerate(SPLITS):
            n_batch = 64 if i % 2 else 16
            with opened(m, place(m, split, n_batch), n_batch, 1 + i % 3) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5, split
                s.drop()
                for k in range(0, 35, 7):  # a few tokens at a time are shared with the CPU, too
                    s.feed(TOKENS[k : k + 7], want_logits=True)
                    got = np.stack([s.logits(j) for j in range(7)])
                    assert reference.relative_error(got, expected[k : k + 7]) < 1e-5, split
                s.drop()
                s.feed(TOKENS)
                if not rounding.BF16:  # rounded inputs of a prompt choose other experts where two are as good
                    assert reference.relative_error(s.logits(), expected[-1]) < 2e-3, split
                assert np.isfinite(s.logits()).all()


def test_members_that_are_layers_ahead(tmp_path: Path) -> None:
    """Every other layer is the device's alone, so that a member who has nothing to do in a layer may be two
    layers ahead of another; if they came to disagree about the work, they would wait for each other."""
    path = write(tmp_path / "m.gguf", "mixtral")
    expected = reference.forward(reference.load(path), TOKENS)
    hot = [np.arange(SPEC.n_expert if layer % 2 else 6, dtype=np.int32) for layer in range(N_LAYER)]
    with Model(path) as m:
        plan = engine.native_plan(
            m, settings(64), engine.Rates(), on_device=[True] * N_LAYER, hot=hot, head_on_device=True
        )
        with opened(m, plan, n_threads=4, live_experts=False) as s:
            for _ in range(2):
                assert reference.relative_error(decoded(s), expected) < 1e-5
                s.drop()


@pytest.mark.parametrize("name", ["mixtral", "groups"])
def test_scores_that_are_no_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's experts are different all the same: of one expert there is room for a route of each token."""

    def drawn(label: str, *shape: int) -> Any:
        return draw(label, *shape) * np.float16(np.nan if "/router" in label else 1)

    monkeypatch.setattr(test_mixtures, "draw", drawn)
    with Model(write(tmp_path / "m.gguf", name, {"expert_used_count": 4})) as m:
        eight: Any = {"n_seq": 8, "n_pool": 8 * N_CTX, "count_neurons": True}
        with opened(m, place(m, "none", 64, **eight), **eight) as s:
            s.feed(TOKENS[:8], seq=list(range(8)), want_logits=True)
            assert (s.neuron_counts().counts <= 8).all()


def test_two_devices(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "smallthinker")
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for sparsity in ("dense", "exact"):
            plan = place(m, "some", 64, [0, 0, 0, 1, 1], sparsity=sparsity)
            with opened(m, plan, sparsity=sparsity) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5


def test_weights_that_a_device_does_not_map(tmp_path: Path) -> None:
    """A prompt's experts come another way, and answers have the same bits."""
    with Model(write(tmp_path / "m.gguf", "groups")) as m:
        rows = []
        for pinned in (True, False):
            with opened(m, place(m, "one", 64), pin_weights=pinned, live_experts=False) as s:
                s.feed(TOKENS)
                rows.append(s.logits().copy())
        assert np.array_equal(*rows)


def test_norms_over_all_heads_are_refused(tmp_path: Path) -> None:
    with (
        Model(write(tmp_path / "m.gguf", "olmoe")) as m,
        pytest.raises(UnsupportedError, match="norms over all heads"),
    ):
        place(m, "some", 64)


def test_a_gpu_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the model to the CPU, with a warning."""
    monkeypatch.setattr(devices, "_warned", set())
    found = devices.Devices(kind="host", indices=(0,), budgets=(1 << 30,), automatic=True)
    said: dict[str, Any] = {"n_ctx": 0, "n_batch": 16, "sparsity": "auto", "type_k": None, "type_v": None}
    with (
        Model(write(tmp_path / "m.gguf", "olmoe")) as model,
        pytest.warns(UserWarning, match="is not used: layer 0 has norms over all heads"),
        Loader(model, devices=found, **said).open() as s,
    ):
        s.feed([3])


def test_budgets(tmp_path: Path) -> None:
    """From the least to everything: what a plan promises is held, and answers stay."""
    path = write(tmp_path / "m.gguf", "qwen2moe")
    expected = reference.forward(reference.load(path), TOKENS)
    rates = SLOW
    with Model(path) as m:
        whole = engine.compute(m, settings(64), rates)
        least = whole.min_bytes
        with pytest.raises(ArgumentError, match="too small"):
            engine.compute(m, settings(64, [least - 1]), rates)
        seen = set()
        for budget in np.linspace(least, whole.full_bytes, 7).astype(int):
            asked = settings(64, [int(budget)])
            plan = engine.compute(m, asked, rates)
            assert plan.bytes.total <= budget
            seen.add(sum(len(layer.hot) for layer in plan.layers))
            native = engine.native_plan(
                m,
                asked,
                rates,
                on_device=[layer.on_device for layer in plan.layers],
                hot=[layer.hot for layer in plan.layers],
                head_on_device=plan.head_on_device,
            )
            with opened(m, native) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5
                assert s.info.n_device_bytes <= budget
        assert len(seen) > 3 and max(seen) == N_LAYER * SPEC.n_expert


def test_counts_choose_the_experts_of_a_plan(tmp_path: Path) -> None:
    """Those that are used most lie on the device; the session counts uses, on whatever side they are."""
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m:
        with Session(m, n_threads=1, n_ctx=N_CTX, count_neurons=True, **F32) as s:
            for token in TOKENS:
                s.feed([token])
            counts = s.neuron_counts()
        assert counts.counts.shape == (N_LAYER, SPEC.n_expert)
        assert (counts.counts.sum(axis=1) == len(TOKENS) * N_USED).all()
        with opened(m, place(m, "some", 64), count_neurons=True) as s:
            for token in TOKENS:
                s.feed([token])
            assert np.array_equal(s.neuron_counts().counts, counts.counts)
        whole = engine.compute(m, settings(64), SLOW)
        budget = (whole.min_bytes + 3 * whole.full_bytes) // 4
        plan = engine.compute(
            m, settings(64, [budget]), SLOW, counts.counts.astype(np.uint32), counts.n_tokens
        )
        for layer, row in zip(plan.layers, counts.counts, strict=True):
            if 0 < len(layer.hot) < SPEC.n_expert:
                rest = np.delete(row, layer.hot)
                assert row[layer.hot].min() >= rest.max()


def test_experts_move_to_where_they_are_used(tmp_path: Path) -> None:
    """They come from the wrong places to those that the uses ask for, and answers stay what they are."""
    path = write(tmp_path / "m.gguf", "smallthinker")
    tokens = TOKENS[:2] * 120
    expected = reference.forward(reference.load(path), tokens[:N_CTX])
    with Model(path) as m:
        with Session(m, n_threads=1, n_ctx=N_CTX, count_neurons=True, **F32) as s:
            for token in tokens[:N_CTX]:
                s.feed([token])
            uses = s.neuron_counts().counts
        worst = [np.sort(np.argsort(row, kind="stable")[:3]).astype(np.int32) for row in uses]
        plan = engine.native_plan(
            m,
            settings(64),
            engine.Rates(),
            on_device=[True] * N_LAYER,
            hot=worst,
            head_on_device=True,
        )
        hits = []
        with opened(m, plan) as s:
            for k, token in enumerate(tokens[:N_CTX]):
                s.feed([token])
                assert reference.relative_error(s.logits(), expected[k]) < 1e-5
                hits.append(sum(layer.n_resident for layer in s.experts()))
            moved = s.experts()
        assert sum(layer.n_copies for layer in moved) >= N_LAYER
        for layer, row in zip(moved, uses, strict=True):
            assert layer.resident.sum() == layer.n_places == 3 or layer.resident.sum() == 2  # one on its way
            assert layer.n_routes == row.sum()
        with opened(m, plan, live_experts=False) as s:
            for token in tokens[:N_CTX]:
                s.feed([token])
            assert hits[-1] > 2 * sum(layer.n_resident for layer in s.experts())
            for layer, ids in zip(s.experts(), worst, strict=True):
                assert not layer.n_copies and np.array_equal(np.flatnonzero(layer.resident), ids)


def test_without_a_device_no_expert_has_a_place(tmp_path: Path) -> None:
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m, Session(m, n_threads=1) as s:
        s.feed(TOKENS)
        assert not any(layer.resident.any() or layer.n_routes for layer in s.experts())


@pytest.mark.slow
def test_experts_that_come_and_go_under_seven_sequences(tmp_path: Path) -> None:
    """Thousands of tokens whose experts change all the time; every answer is a CPU's. (The stand-in would
    multiply eight as it does a prompt.)"""
    random = np.random.default_rng(5)
    with Model(write(tmp_path / "m.gguf", "smallthinker")) as m:
        seven: Any = {"n_ctx": N_CTX, "n_seq": 7, "n_pool": 7 * N_CTX}
        plan = place(m, "some", 64, **seven)
        n_copies, worst, low = 0, 0.0, 0
        with (
            opened(m, plan, **seven) as s,
            Session(m, **seven, **F32) as cpu,
        ):
            for step in range(1250):
                if s.length(0) == N_CTX:
                    for k in range(7):
                        s.drop(k)
                        cpu.drop(k)
                if step % 50 == 0:  # what is being said changes, and with it the experts
                    low = random.integers(0, 280)
                ids = (low + random.integers(0, 4, 7)).tolist()
                for x in (s, cpu):
                    x.feed(ids, seq=list(range(7)), want_logits=True)
                for k in range(7):
                    a, b = s.logits(k), cpu.logits(k)
                    worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
            n_copies = sum(layer.n_copies for layer in s.experts())
        assert n_copies > 100
        assert worst < 1e-5
