"""Plans for several devices, and for neurons that a device reads in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError
from powerinfer._engine.session import Model
from powerinfer.models import plan as plans
from powerinfer.models.plan import Plan, Rates, Settings, engine
from tests.plan.drafts import power_law, write_model
from tests.plan.reference import matrix, row_bytes, vector

N_LAYER, N_FF = 8, 512
RATES = Rates(gpu_bytes_per_s=8e9, cpu_bytes_per_s=1e9, handover_us=5, layer_us=0, ffn_us=0)
SMALL = Settings(n_ctx=64, n_batch=16, overhead_bytes=10_000)
GIB = 1 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = power_law(np.random.default_rng(5), N_LAYER, N_FF, 1000)
    return write_model(
        tmp_path_factory.mktemp("devices") / "m.gguf",
        n_layer=N_LAYER,
        n_ff=N_FF,
        n_embd=512,
        ranks=[32] * N_LAYER,
        counts=counts,
    )


def make(path: Path, budget: float | list[float], rates: Rates = RATES, **more: Any) -> Plan:
    """budget: in bytes."""
    gib = [n / GIB for n in budget] if isinstance(budget, list) else budget / GIB
    return plans.make_plan(path, vram_budget=gib, settings=SMALL, rates=rates, **more)


def check(plan: Plan) -> None:
    """What must hold of every plan: budgets, ranges, sums."""
    places = [y.device for y in plan.layers] + [plan.head_device]
    used = [d for d in places if d >= 0]
    assert used == sorted(used)
    may_help = {places[0], plan.head_device} if plan.head_device == places[-2] >= 0 else {plan.head_device}
    for k, device in enumerate(plan.devices):
        mine = [i for i, y in enumerate(plan.layers) if y.device == k]
        held = sum(
            y.kv_bytes + y.attention_bytes + y.norm_bytes + y.predictor_bytes + y.ffn_bytes
            for y in plan.layers
            if y.device == k
        )
        own = device.scratch_bytes + device.staging_bytes + device.overhead_bytes
        head = device.total_bytes - held - own
        assert head >= 0 if k in may_help else head == 0
        assert device.total_bytes <= device.budget_bytes == plan.budgets[k]
        assert (device.n_layers, device.first_layer) == (len(mine), mine[0] if mine else 0)
        assert bool(own) == (k in places)
    assert plan.bytes.total == sum(device.total_bytes for device in plan.devices)
    assert plan.expected.bound_us <= plan.expected.total_us * (1 + 1e-9)


def test_layers_are_spread_over_devices(path: Path) -> None:
    one = make(path, GIB)
    part = (one.full_bytes - one.min_bytes) // 3
    alone = make(path, one.min_bytes + part)
    two = make(path, [one.min_bytes + part] * 2)
    three = make(path, [one.min_bytes + part, one.min_bytes + part // 2, one.min_bytes + part])
    for plan in (alone, two, three):
        check(plan)
    assert {y.device for y in two.layers} >= {0, 1}
    assert alone.expected.total_us > two.expected.total_us
    # Two devices hold nearly what one of their summed room does.
    own = two.devices[0].scratch_bytes + two.devices[0].staging_bytes + SMALL.overhead_bytes
    pooled = make(path, sum(two.budgets) - own)
    assert two.expected.total_us < 1.1 * pooled.expected.total_us + RATES.handover_us
    assert make(path, [one.min_bytes + part] * 2).to_json() == two.to_json()


def test_all_of_a_model_over_two_devices(path: Path) -> None:
    rates = replace(RATES, handover_us=100)  # dear: mixtures do not pay
    own = make(path, GIB, rates)
    assert own.bytes.total == own.full_bytes and own.bytes.staging == 0
    shared = own.bytes.scratch + own.bytes.overhead
    half = shared + (own.full_bytes - shared) * 6 // 10
    plan = make(path, [half, half], rates)
    check(plan)
    assert plan.n_hot == N_LAYER * N_FF and plan.head_device == 1 and plan.bytes.staging == 0
    crossing = plan.expected.total_us - own.expected.total_us
    assert crossing == pytest.approx(rates.handover_us, rel=1e-6)
    # One that holds everything alone is better than two.
    assert {y.device for y in make(path, [own.full_bytes] * 2, rates).layers} == {0}


def test_the_first_device_helps_with_the_head(path: Path) -> None:
    """With a copy of 7/16 of its rows, if that fits and the time of these is more than a hand-over."""
    with Model(path, load=False) as model:
        n_vocab, n_embd = model.info.n_vocab, model.info.n_embd
        output = next(tensor for tensor in model.file.tensors if tensor.name == "output.weight")
    rows = n_vocab * 7 // 16 // 64 * 64
    copy = matrix(output.type, rows, n_embd) + vector(n_embd)
    hand_over = rows * row_bytes(output.type, n_embd) / (RATES.gpu_bytes_per_s / 1e6)
    one = make(path, GIB)
    shared = one.bytes.scratch + one.bytes.overhead
    half = shared + (one.full_bytes - shared) * 6 // 10
    helped = make(path, [half, half], replace(RATES, handover_us=0.99 * hand_over))
    alone = make(path, [half, half], replace(RATES, handover_us=1.01 * hand_over))
    assert [y.device for y in helped.layers] == [y.device for y in alone.layers]
    assert helped.head_device == alone.head_device == 1
    assert helped.bytes.head - alone.bytes.head == helped.bytes.total - alone.bytes.total == copy > 0
    assert helped.devices[0].total_bytes - alone.devices[0].total_bytes == copy
    assert helped.devices[1] == alone.devices[1]
    # A layer goes to the other device if that makes room for it; where that has none, nobody helps.
    least = helped.devices[0].total_bytes
    fewer = make(path, [least - 1, half * 2 - least + one.full_bytes // N_LAYER], helped.rates)
    assert fewer.devices[0].n_layers == helped.devices[0].n_layers - 1
    assert fewer.bytes.head == helped.bytes.head
    none = make(path, [least - 1, helped.devices[1].total_bytes], helped.rates)
    assert none.bytes.head == alone.bytes.head and none.bytes.total == alone.bytes.total


def test_the_way_between_devices_may_be_too_long(path: Path) -> None:
    """Where it takes longer than the second device saves, one of them is left alone."""
    rates = replace(RATES, handover_us=1e6)
    one = make(path, GIB, rates)
    shared = one.bytes.scratch + one.bytes.overhead
    most, little = (
        one.full_bytes - 1000,
        shared + one.bytes.staging + 3 * (one.full_bytes - shared) // N_LAYER,
    )
    alone = make(path, most, rates)
    plan = make(path, [most, max(little, one.min_bytes)], rates)
    check(plan)
    assert plan.expected.total_us <= alone.expected.total_us


def test_a_device_without_a_budget_is_not_used(path: Path) -> None:
    one = make(path, GIB)
    budget = (one.min_bytes + one.full_bytes) // 2
    plan = make(path, [0, budget])
    check(plan)
    assert {y.device for y in plan.layers} <= {-1, 1} and plan.uses_device
    assert plan.expected.total_us == make(path, budget).expected.total_us
    assert not make(path, [0, 0]).uses_device
    with pytest.raises(ArgumentError, match=r"for device 1 is too small"):
        make(path, [budget, 1000])
    with pytest.raises(ArgumentError, match="1 to 16 devices"):
        make(path, [float(budget)] * 17)


def test_several_devices_are_saved_and_checked(path: Path, tmp_path: Path) -> None:
    one = make(path, GIB)
    budget = one.min_bytes + (one.full_bytes - one.min_bytes) // 3
    plan = make(path, [budget, budget])
    plan.save(tmp_path / "p.json")
    with Model(path, load=False) as model:
        again = plans.load_plan(tmp_path / "p.json", model, vram_budget=[budget / GIB] * 2)
        assert again.to_json() == plan.to_json() and again.devices == plan.devices
        with pytest.raises(ArgumentError, match="make it anew"):
            plans.load_plan(plan, model, vram_budget=budget / GIB)
        # Places that the engine refuses: beyond the devices there are, and not in order.
        for bad in ([5] * N_LAYER, [2] * N_LAYER, [1] * (N_LAYER - 1) + [0]):
            layers = tuple(replace(y, device=d) for y, d in zip(plan.layers, bad, strict=True))
            with pytest.raises(ArgumentError, match="of the plan is on device"):
                replace(plan, layers=layers).check(model)
        little = replace(plan.settings, more_budgets=(plan.devices[1].total_bytes - 1,))
        with pytest.raises(ArgumentError, match=r"the plan takes .* the budget is"):
            replace(plan, settings=little).check(model)


def test_counters_are_counted(path: Path) -> None:
    with_them = make(path, GIB, count_neurons=True)
    more = with_them.full_bytes - make(path, GIB).full_bytes
    assert more == N_LAYER * (4 * N_FF + 256)


# ---- neurons read by zero-copy


def us(path: Path, plan: Plan, rates: Rates) -> float:
    """A token's time from the marks, counted once more."""
    with Model(path, load=False) as model:
        statistics = plans.find_statistics(model)
    assert statistics.counts is not None
    total = 0.0
    for i, y in enumerate(plan.layers):
        p = np.minimum(1, (statistics.counts[i] + 0.5) / (statistics.n_tokens + 1) * 1.2)
        cold = np.setdiff1d(np.arange(N_FF), np.concatenate([y.hot, y.pcie]))
        row = 3 * 2 * 512
        gpu = p[y.hot].sum() * row / rates.gpu_bytes_per_s * 1e6 + (rates.ffn_us if len(y.hot) else 0)
        if len(y.pcie):  # beside them
            gpu = max(gpu, p[y.pcie].sum() * row / rates.zero_copy_bytes_per_s * 1e6 + rates.ffn_us)
        cpu = p[cold].sum() * row / rates.cpu_bytes_per_s * 1e6 + rates.handover_us if len(cold) else 0.0
        total += y.fixed_us + max(gpu, cpu)
    return total + plan.expected.head_us


def test_a_device_reads_in_place_while_it_would_wait(path: Path) -> None:
    rates = replace(RATES, zero_copy_bytes_per_s=5e8)
    one = make(path, GIB)
    budget = one.min_bytes + (one.full_bytes - one.min_bytes) * 3 // 4
    plain = make(path, budget)
    plan = make(path, budget, rates)
    check(plan)
    assert plain.expected.active_pcie == 0 and not any(len(y.pcie) for y in plain.layers)
    assert plan.expected.active_pcie > 0 and plan.expected.total_us < 0.98 * plain.expected.total_us
    assert plan.expected.total_us == pytest.approx(us(path, plan, rates), rel=1e-9)
    for y in plan.layers:
        assert not set(y.pcie) & set(y.hot)
        if len(y.pcie) and len(y.hot) + len(y.pcie) < N_FF:  # both sides end together, but for a neuron
            neuron = 3 * 2 * 512 / 5e8 * 1e6
            assert abs(y.gpu_ffn_us - y.cpu_ffn_us - y.handover_us) <= 3 * neuron
    with Model(path, load=False) as model:
        assert plans.load_plan(plan, model) is plan
        assert plans.from_json(plan.to_json()).to_json() == plan.to_json()


def test_a_weak_cpu_gets_nothing(path: Path) -> None:
    """Where all of it is faster over PCIe there are no cold neurons and no hand-over."""
    rates = replace(RATES, cpu_bytes_per_s=1e8, zero_copy_bytes_per_s=5e9, handover_us=100)
    one = make(path, GIB, rates)
    plan = make(path, (one.min_bytes + one.full_bytes) // 2, rates)
    mixed = [y for y in plan.layers if len(y.pcie)]
    assert mixed and all(len(y.hot) + len(y.pcie) == N_FF and y.handover_us == 0 for y in mixed)


def test_falcon_reads_in_place_behind_attention(tmp_path: Path) -> None:
    """The sides part before attention: the CPU computes beside it."""
    counts = power_law(np.random.default_rng(0), N_LAYER, N_FF, 1000)
    path = write_model(
        tmp_path / "f.gguf", "falcon", n_layer=N_LAYER, n_ff=N_FF, ranks=[32] * N_LAYER, counts=counts
    )
    rates = replace(RATES, zero_copy_bytes_per_s=5e8)
    plan = make(path, make(path, GIB).full_bytes - N_LAYER * 400_000, rates=rates)
    position = 2 * 2 * 2 * 64  # of two KV heads
    attention = 2 * (512 * 256 + 256 * 256) + SMALL.n_ctx / 2 * position
    predictor = 2 * 32 * (256 + N_FF)
    for i, y in enumerate(plan.layers):
        assert y.on_device and y.active_cold > 0
        assert y.fixed_us == pytest.approx(rates.layer_us + predictor / rates.gpu_bytes_per_s * 1e6)
        p = np.minimum(1, (counts[i] + 0.5) / 1001 * 1.2)
        front = attention / rates.gpu_bytes_per_s * 1e6
        hot = p[y.hot].sum() * 2 * 512 / rates.gpu_bytes_per_s * 1e6
        bus = p[y.pcie].sum() * 2 * 512 / rates.zero_copy_bytes_per_s * 1e6
        assert y.gpu_ffn_us == pytest.approx(front + max(hot, bus))
        assert y.us == pytest.approx(y.fixed_us + max(y.gpu_ffn_us, y.cpu_ffn_us + y.handover_us))
        # Where the CPU would take longer than that, the bus takes rows off it.
        p_cold = np.delete(p, y.hot).sum() * 2 * 512 / rates.cpu_bytes_per_s * 1e6
        assert (len(y.pcie) > 0) == (p_cold + rates.handover_us > front + hot)
    assert {len(y.pcie) > 0 for y in plan.layers} == {True, False}


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0"])
def test_types_that_are_read_in_place(tmp_path: Path, kind: str) -> None:
    """Those that devices compute."""
    counts = power_law(np.random.default_rng(5), 4, N_FF, 1000)
    file = write_model(
        tmp_path / "m.gguf",
        n_layer=4,
        n_ff=N_FF,
        n_embd=768,
        ranks=[32] * 4,
        counts=counts,
        type_of=lambda name: kind if ".ffn_" in name else "F16",
    )
    rates = replace(RATES, zero_copy_bytes_per_s=5e8)
    one = make(file, GIB, rates)
    plan = make(file, one.min_bytes + (one.full_bytes - one.min_bytes) // 2, rates)
    assert any(len(y.pcie) for y in plan.layers) == (kind != "Q5_0")


def test_what_cannot_be_read_in_place(path: Path, tmp_path: Path) -> None:
    rates = replace(RATES, zero_copy_bytes_per_s=5e8)
    one = make(path, GIB, rates)
    budget = one.min_bytes + (one.full_bytes - one.min_bytes) // 3
    columns = write_model(tmp_path / "silu.gguf", n_ff=N_FF, type_of=lambda name: "Q8_0")
    whole = make(columns, GIB, rates)
    middle = make(columns, (whole.min_bytes + whole.full_bytes) // 2, rates)
    assert not any(len(y.pcie) for y in middle.layers)
    plan = make(path, budget, rates)
    with Model(path, load=False) as model:
        still = replace(plan, rates=replace(rates, zero_copy_bytes_per_s=0.0))
        with pytest.raises(ArgumentError, match="read by zero-copy"):
            still.check(model)
        both = tuple(replace(y, pcie=y.hot) if len(y.hot) else y for y in plan.layers)
        with pytest.raises(ArgumentError, match="hot and read by zero-copy"):
            replace(plan, layers=both).check(model)


@pytest.mark.parametrize("seed", range(6))
def test_random_devices(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Model(path, load=False) as model:
        info = engine.compute(model, SMALL, RATES)
        budgets = [
            int(rng.choice([0, info.min_bytes + int(rng.integers(0, info.full_bytes))]))
            for _ in range(int(rng.integers(2, 6)))
        ]
        rates = Rates(
            gpu_bytes_per_s=float(rng.choice([1e9, 1e11])),
            cpu_bytes_per_s=1e9,
            zero_copy_bytes_per_s=float(rng.choice([0, 1e9])),
            handover_us=float(rng.choice([0, 40])),
        )
        asked = replace(SMALL, budget_bytes=budgets[0], more_budgets=tuple(budgets[1:]))
        plan = plans.make_plan(model, vram_budget=[n / GIB for n in budgets], settings=SMALL, rates=rates)
        check(plan)
        assert plan.settings == replace(asked, n_pool=64, sparsity="predicted")
        cpu = plans.make_plan(model, vram_budget=0, settings=SMALL, rates=rates)
        assert plan.expected.total_us <= cpu.expected.total_us * (1 + 1e-9)
        plan.check(model)
