"""Mixtures of experts whose layers lie partly on a device, against the float64 reference: whatever experts
are where, decoded tokens to sums of floats."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer import ArgumentError
from powerinfer._engine import devices
from powerinfer._engine.session import Model, Session
from powerinfer._llama.loader import Loader
from powerinfer.models.plan import engine
from tests import models, reference, rounding
from tests.core import capi
from tests.native import test_mixtures
from tests.native.test_mixtures import N_LAYER, SPEC, TOKENS, VARIANTS, by_neuron, draw, write

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
# Elsewhere one: on few CPUs several mostly wait for each other and for the device.
THREADS = {"but": 2, "some": 3}
# Files whose down is stored by neuron, of these variants.
BY_NEURON: dict[str, tuple[str, dict[str, Any]]] = {
    "smallthinker by neuron": ("smallthinker", {}),
    "dReLU by neuron": ("mixtral", {"powerinfer.hidden_act": "drelu"}),
    "SiLU and a shared expert by neuron": ("qwen2moe", {}),
}
DEVICES = [*VARIANTS, *BY_NEURON]
SLOW = engine.Rates(
    cpu_bytes_per_s=1e7, handover_us=0, layer_us=0, ffn_us=0
)  # a host that gains by all bytes
F32 = {"type_k": "f32", "type_v": "f32"}


def write_device(path: Path, name: str, kind: GGMLQuantizationType | None = None) -> Path:
    """The file of a name of DEVICES; kind: of the matrices, where down is stored by neuron."""
    if name not in BY_NEURON:
        return write(path, name)
    variant, change = BY_NEURON[name]
    return by_neuron(write(path.with_suffix(".plain"), variant, change), path, kind)


def settings(n_batch: int, budgets: Sequence[int] = (1 << 34,), **change: Any) -> engine.Settings:
    return engine.Settings(
        budget_bytes=budgets[0],
        more_budgets=tuple(budgets[1:]),
        **{"n_ctx": N_CTX, "n_pool": N_CTX, "n_seq": 4, "n_batch": n_batch, "sparsity": "dense"}
        | {"overhead_bytes": 0, "group": 1}
        | F32
        | change,
    )


def place(
    model: Model,
    split: str,
    n_batch: int,
    devices: Sequence[int] | None = None,
    rates: engine.Rates = engine.Rates(),  # noqa: B008 (frozen)
    **change: Any,
) -> Any:
    asked = settings(n_batch, [1 << 34] * (max(devices) + 1 if devices else 1), **change)
    return engine.native_plan(model, asked, rates, **placement(model, split, devices))


def placement(model: Model, split: str, devices: Sequence[int] | None = None) -> dict[str, Any]:
    on = [split != "mixed" or layer % 2 == 1 for layer in range(model.info.n_layer)]
    names = {t.name for t in model.file.tensors}
    has = [
        here and f"blk.{i}.ffn_up.weight" not in names for i, here in enumerate(on)
    ]  # experts on the device
    return {
        "on_device": on,
        "hot": [np.array(SPLITS[split] if experts else (), np.int32) for experts in has],
        "head_on_device": split != "mixed",
        "devices": devices,
        "head_device": devices[-1] if devices else 0,
    }


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
    path = write_device(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for i, split in enumerate(SPLITS):
            n_batch = 64 if i % 2 else 16
            with opened(m, place(m, split, n_batch), n_batch, THREADS.get(split, 1)) as s:
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


@pytest.mark.parametrize("name", ["smallthinker", "smallthinker by neuron", "olmoe", "glm4moe", "gpt-oss"])
def test_two_devices(name: str, tmp_path: Path) -> None:
    path = write_device(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for sparsity in ("dense", "exact") if name.startswith("smallthinker") else ("dense",):
            plan = place(m, "some", 64, [0, 0, 0, 1, 1], sparsity=sparsity)
            with opened(m, plan, sparsity=sparsity) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5


@pytest.mark.parametrize("name", ["groups", "smallthinker by neuron"])
def test_weights_that_a_device_does_not_map(name: str, tmp_path: Path) -> None:
    """A prompt's experts come another way, and answers have the same bits."""
    with Model(write_device(tmp_path / "m.gguf", name)) as m:
        rows = []
        for pinned in (True, False):
            with opened(m, place(m, "one", 64), pin_weights=pinned, live_experts=False) as s:
                s.feed(TOKENS)
                rows.append(s.logits().copy())
        assert np.array_equal(*rows)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_down_by_neuron_in_blocks(kind: str, tmp_path: Path) -> None:
    """Beside the CPU's answer: sums are rounded otherwise, and then now and then one of the bytes that
    activations become, of 127 steps to the largest of 32."""
    step = 32**0.5 / 127 / 12**0.5
    path = write_device(tmp_path / "m.gguf", "smallthinker by neuron", GGMLQuantizationType[kind])
    with Model(path) as m, Session(m, n_ctx=N_CTX, n_threads=2, sparsity="dense", **F32) as cpu:
        want = decoded(cpu)
        for split in ("all", "some", "none"):
            with opened(m, place(m, split, 64)) as s:
                got = decoded(s)
                errors = [reference.relative_error(a, b) for a, b in zip(got, want, strict=True)]
                assert errors[0] < 1e-5, split
                assert np.median(errors) < step * (5 * N_LAYER + 1) ** 0.5, split
                s.drop()
                s.feed(TOKENS, want_logits=True)
                errors = [reference.relative_error(s.logits(i), row) for i, row in enumerate(want)]
                assert np.median(errors) < step * (5 * N_LAYER + 1) ** 0.5, split


def test_silent_neurons_are_read_on_neither_side(tmp_path: Path) -> None:
    """The CPU leaves out their rows of up and down, in exact mode, the device those of down."""
    read: dict[tuple[str, str], float] = {}
    with Model(write_device(tmp_path / "m.gguf", "smallthinker by neuron")) as m:
        for split in ("all", "none"):
            for sparsity in ("dense", "exact"):
                with opened(m, place(m, split, 64, sparsity=sparsity), sparsity=sparsity) as s:
                    decoded(s)
                    step = s.last_step
                    read[split, sparsity] = sum(layer.ffn_bytes for layer in step)
                    assert 0.3 < step[0].n_active / step[0].n_predicted < 0.7
    whole = read["none", "dense"]
    assert 0.6 < read["none", "exact"] / whole < 0.75
    assert read["all", "dense"] == read["all", "exact"]
    assert 0.78 < read["all", "exact"] / whole < 0.88


def test_a_gpu_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the model to the CPU, with a warning."""
    monkeypatch.setattr(devices, "_warned", set())
    found = devices.Devices(kind="host", indices=(0,), budgets=(1 << 30,), automatic=True)
    said: dict[str, Any] = {"n_ctx": 0, "n_batch": 16, "sparsity": "auto", "type_k": None, "type_v": None}
    file = reference.load(write(tmp_path / "m.gguf", "mixtral"))
    mixed = {
        name: value.astype(np.float32 if "gate" in name or value.ndim < 2 else np.float16)
        for name, value in file.tensors.items()
    }
    with (
        Model(models.write(tmp_path / "m.gguf", file.meta, mixed)) as model,
        pytest.warns(UserWarning, match="is not used: layer 0 has experts whose gate and up are of two"),
        Loader(model, devices=found, **said).open() as s,
    ):
        s.feed([3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2moe", "olmoe", "glm4moe", "gpt-oss", "dReLU by neuron"])
def test_budgets(name: str, tmp_path: Path) -> None:
    """From the least to everything: what a plan promises is held, and answers stay."""
    path = write_device(tmp_path / "m.gguf", name)
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
            with opened(m, native, n_threads=1) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5
                assert s.info.n_device_bytes <= budget
        assert len(seen) > 3 and max(seen) == (N_LAYER - m.info.n_layer_dense) * SPEC.n_expert


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


@pytest.mark.parametrize("name", ["smallthinker", "smallthinker by neuron", "gpt-oss"])
def test_experts_move_to_where_they_are_used(name: str, tmp_path: Path) -> None:
    """They come from the wrong places to those that the uses ask for, and answers stay what they are."""
    path = write_device(tmp_path / "m.gguf", name)
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
        hits, copies = [], 0
        with opened(m, plan) as s:
            for k, token in enumerate(tokens[:N_CTX]):
                s.feed([token])
                copies += sum(step.n_copies for step in s.last_step)
                assert reference.relative_error(s.logits(), expected[k]) < 1e-5
                hits.append(sum(layer.n_resident for layer in s.experts()))
            moved = s.experts()
        assert sum(layer.n_copies for layer in moved) == copies >= N_LAYER
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
    """Uses are counted nevertheless: those that a session which counts neurons has seen."""
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m, Session(m, n_threads=1, count_neurons=True) as s:
        s.feed(TOKENS)
        assert [step.n_routes for step in s.last_step] == [len(TOKENS) * N_USED] * N_LAYER
        s.feed(TOKENS[:1])
        assert all(step.n_routes == step.n_routes_cpu == N_USED for step in s.last_step)
        found, counts = s.experts(), s.neuron_counts().counts
        assert not any(layer.resident.any() or layer.n_resident or layer.n_streamed for layer in found)
        assert np.array_equal(np.stack([layer.uses for layer in found]), counts)
        assert [layer.n_cpu for layer in found] == [(len(TOKENS) + 1) * N_USED] * N_LAYER
        assert not any(layer.hit_rate for layer in found)
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m, Session(m, n_threads=1) as s:
        s.feed(TOKENS)  # of the last layer's tokens only those whose logits are wanted
        assert [layer.n_routes for layer in s.experts()] == [len(TOKENS) * N_USED] * (N_LAYER - 1) + [N_USED]


@pytest.mark.parametrize("split", ["all", "none", "one", "some", "mixed"])
def test_where_routes_were_computed(split: str, tmp_path: Path) -> None:
    """By the steps' numbers and by the session's, beside the routes that a CPU counts."""
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m:
        uses = []
        with Session(m, n_threads=1, n_ctx=N_CTX, count_neurons=True, **F32) as s:
            for token in TOKENS:
                s.feed([token])
                uses.append(s.neuron_counts(reset=True).counts.astype(int))
        with opened(m, place(m, split, 64), live_experts=False) as s:
            there = np.stack([layer.resident for layer in s.experts()])
            assert there.sum() == sum(
                len(SPLITS[split]) for i in range(N_LAYER) if split != "mixed" or i % 2 == 1
            )
            for token, of_token in zip(TOKENS, uses, strict=True):
                s.feed([token])
                for layer, step in enumerate(s.last_step):
                    assert step.n_routes == N_USED and not step.n_routes_streamed
                    assert step.n_routes_device == of_token[layer, there[layer]].sum()
            total = sum(uses)
            for layer, found in enumerate(s.experts()):
                assert np.array_equal(found.uses, total[layer])
                assert found.n_routes == len(TOKENS) * N_USED and not found.n_copies
                assert found.n_resident == total[layer, there[layer]].sum()
                assert found.n_cpu == total[layer, ~there[layer]].sum()
            before = s.experts()
            s.drop()
            s.feed(TOKENS[:40])  # a prompt: whatever has no place is brought there
            last = len(before) - 1  # computes as few tokens as a prompt may have on a device
            for layer, (step, old, new) in enumerate(zip(s.last_step, before, s.experts(), strict=True)):
                assert step.n_routes == new.n_routes - old.n_routes
                assert step.n_routes_device == new.n_resident - old.n_resident
                assert step.n_routes_streamed == new.n_streamed - old.n_streamed
                if split != "mixed":
                    assert not step.n_routes_cpu and step.n_routes == (40 if layer < last else 9) * N_USED
                    assert step.n_routes_streamed or split == "all"


def read_in_place(share: float, n_missing: int) -> int:
    """Of so many experts those that a device reads in host memory, which takes it 1 / share as long as the
    CPU, so that both are done soonest."""
    return min(range(n_missing + 1), key=lambda k: (max(n_missing - k, k / share), k))


# A CPU and a bus to which nothing else matters; the bus is as fast, half as fast, the only one.
IN_PLACE = {
    share: engine.Rates(
        cpu_bytes_per_s=1e9, zero_copy_bytes_per_s=1e9 * share, handover_us=0, layer_us=0, ffn_us=0
    )
    for share in (1.0, 0.5, 1e9)
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", IN_PLACE)
@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe", "groups"])
def test_missing_experts_are_shared_with_the_bus(name: str, share: float, tmp_path: Path) -> None:
    """The device reads some of them in host memory, as many as make a token soonest done; the answer is the
    reference's, whoever computes what, and has the same bits each time."""
    path = write(tmp_path / "m.gguf", name)
    tokens = TOKENS[:30]
    expected = reference.forward(reference.load(path), tokens)
    with Model(path) as m:
        for split in ("none", "some", "but", "mixed"):
            plan, runs = place(m, split, 64, rates=IN_PLACE[share]), []
            layers = engine.restore(m, settings(64), IN_PLACE[share], **placement(m, split)).layers
            pays = [layer.active_pcie > 0 for layer in layers]
            assert any(pays) or split != "none"
            for _ in range(2):
                with opened(m, plan, live_experts=False) as s:
                    rows, n, found = [], 0, s.experts()
                    for token in tokens:
                        s.feed([token])
                        rows.append(s.logits().copy())
                        before, found = found, s.experts()
                        for i, step in enumerate(s.last_step):
                            new, hits = (
                                getattr(found[i], key) - getattr(before[i], key)
                                for key in ("n_routes", "n_resident")
                            )
                            assert step.n_zero_copy == pays[i] * read_in_place(share, new - hits), split
                            n += step.n_zero_copy
                    s.feed(TOKENS[:3])  # of several tokens the CPU computes all that are missing
                    assert n == sum(layer.n_zero_copy for layer in s.experts())
                    assert n > 0 or split != "none"
                assert reference.relative_error(np.stack(rows), expected) < 1e-5, split
                runs.append(np.stack(rows))
            assert np.array_equal(*runs)


def test_a_plan_expects_what_the_bus_brings(tmp_path: Path) -> None:
    """Experts that are read in host memory make it faster; without that, or where the device does not map
    the file, all are the CPU's."""
    with Model(write(tmp_path / "m.gguf", "mixtral")) as m:
        found = {}
        for share, rates in IN_PLACE.items():
            for rate in (0.0, rates.zero_copy_bytes_per_s):
                asked = {"rates": replace(rates, zero_copy_bytes_per_s=rate)}
                hot = [np.arange(0, dtype=np.int32)] * N_LAYER
                plan = engine.restore(
                    m, settings(64), **asked, on_device=[True] * N_LAYER, hot=hot, head_on_device=True
                )
                found[share, rate > 0] = plan.expected
        for share in IN_PLACE:
            without, shared = found[share, False], found[share, True]
            assert without.active_pcie == 0 < shared.active_pcie
            assert shared.active_pcie + shared.active_cold == pytest.approx(without.active_cold)
            assert shared.total_us < without.total_us
        seldom = engine.restore(m, settings(64), IN_PLACE[1.0], **placement(m, "but"))
        assert seldom.expected.active_pcie == 0 < seldom.expected.active_cold
        with opened(m, place(m, "none", 64, rates=IN_PLACE[1.0]), pin_weights=False) as s:
            s.feed([3])
            assert not any(layer.n_zero_copy for layer in s.experts())


@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe", "mixtral"])
def test_fetching_ahead_changes_no_bits(name: str, tmp_path: Path) -> None:
    """What a router chose that reads its layer's input is known, others are guessed a layer ahead, of several
    tokens, too."""
    with Model(write(tmp_path / "m.gguf", name)) as m:
        for split in ("none", "some"):
            runs = []
            for ahead in (False, True):
                plan = place(m, split, 64)
                with opened(m, plan, live_experts=False, look_ahead=ahead, n_threads=3) as s:
                    rows = [*decoded(s)]
                    steps = s.last_step
                    s.feed(TOKENS[:5], want_logits=True)
                    rows += [s.logits(j).copy() for j in range(5)]
                    runs.append(np.stack(rows))
                    for found in (steps, s.last_step):
                        assert (sum(step.n_foreseen for step in found) > 0) == ahead
                        assert all(step.n_foreseen <= step.n_routes_cpu for step in found)
                        if ahead and name == "smallthinker":
                            assert all(step.n_foreseen == step.n_routes_cpu for step in found[1:])
            assert np.array_equal(*runs)


def test_experts_find_their_places() -> None:
    """Without counts, with wrong ones and where what is used changes, by the C program hybrid_cache_check."""
    done = subprocess.run(
        capi.program("hybrid_cache_check"), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("n_seq", [12, 256])
@pytest.mark.parametrize("split", ["all", "some"])
@pytest.mark.parametrize("name", ["qwen2moe", "smallthinker by neuron"])
def test_steps_of_many_sequences(name: str, split: str, n_seq: int, tmp_path: Path) -> None:
    """Of more than kernels for decoding take. With all experts there such a step of up to 64 is recorded, and
    the stand-in sees that it makes the same calls each time."""
    n_steps, n_batch = 4, max(n_seq, 64)
    many: dict[str, Any] = {"n_seq": n_seq, "n_pool": 64 * n_seq}
    path = write_device(tmp_path / "m.gguf", name)
    loaded = reference.load(path)
    want = [reference.forward(loaded, TOKENS[q : q + n_steps]) for q in range(12)]
    with Model(path) as m, opened(m, place(m, split, n_batch, **many), n_batch, **many) as s:
        for step in range(n_steps):
            order = list(range(n_seq))[:: -1 if step % 2 else 1]
            s.feed([TOKENS[q % 12 + step] for q in order], seq=order, want_logits=True)
            for i, q in enumerate(order):
                if not rounding.BF16:
                    assert reference.relative_error(s.logits(i), want[q % 12][step]) < 2e-3, (step, q)


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
