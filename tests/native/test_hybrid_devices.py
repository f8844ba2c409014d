"""Layers shared out among several devices: x goes from one to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests.gpu import test_hybrid_devices_gpu
from tests.native.hybrid import (
    DEEP,
    IDS,
    Arrays,
    beyond_rounding,
    carried_out,
    drive,
    options,
    place,
    settings,
    write,
)

# Of each of six layers, and of the head; -1: the CPU.
PLACES = {
    "two": ([0, 0, 0, 1, 1, 1], 1),
    "with the CPU between": ([0, -1, 0, 1, -1, 1], -1),
    "three": ([0, 0, 1, 1, 2, 2], 2),
    "the CPU first": ([-1, -1, 0, 0, 1, 1], 1),
    "the CPU last": ([0, 0, 1, 1, -1, -1], -1),
    "the head alone": ([0, 0, 0, 0, -1, -1], 1),
    "one layer each": ([-1, 0, -1, 1, -1, 2], 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(write(tmp_path_factory.mktemp("devices"), DEEP, "dense")) as m:
        yield m


@pytest.fixture(scope="module")
def alone(model: Model) -> Arrays:
    with Session(model, **options("exact")) as s:
        return drive(s, IDS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("split", ["all", "some"])
def test_devices_answer_together(model: Model, alone: Arrays, name: str, split: str) -> None:
    layers, head = PLACES[name]
    n = max(*layers, head) + 1
    plan = place(model, split, "exact", devices=layers, head=head, n_devices=n)
    with Session(model, plan=plan, device=["host"] * n, **options("exact", n_threads=3)) as s:
        got = drive(s, IDS)
        assert beyond_rounding(alone, got, model.info.n_layer) < 1
        steps = s.last_step
        assert [step.n_active_device > 0 for step in steps] == [d >= 0 for d in layers]
        for d in range(n):
            assert s.info.n_device_bytes > 0, d
    again = Session(model, plan=plan, device="host", **options("exact", n_threads=3))
    with again:
        assert all(np.array_equal(a, b) for a, b in zip(got, drive(again, IDS), strict=True))


@pytest.mark.parametrize(
    ("layers", "head"),
    [([1, 1, 1, 0, 0, 0], 0), ([0, 1, 0, 1, 1, 1], 1), ([0, 0, 0, 1, -1, 0], -1), ([0, 0, 0, 1, 1, 1], 0)],
)
def test_a_device_has_one_range_of_layers(model: Model, layers: list[int], head: int) -> None:
    """In the order of the devices: x goes straight from one to the next, and never back."""
    with pytest.raises(ArgumentError, match=r"of the plan is on device 0, must be 1\.\.1"):
        place(model, "all", "exact", devices=layers, head=head, n_devices=2)


def test_each_budget_is_kept(model: Model, alone: Arrays) -> None:
    """What a plan spreads over two or three devices fits into the budget of each."""
    rates = engine.Rates(gpu_bytes_per_s=4e12, cpu_bytes_per_s=1e10, handover_us=0, layer_us=0, ffn_us=0)
    one = engine.compute(model, settings("exact", 64), rates)
    used = set()
    for shares in ((0.4, 0.4), (0.2, 0.7), (0.7, 0.2), (0.3, 0.3, 0.3)):
        budgets = [one.min_bytes + int(share * (one.full_bytes - one.min_bytes)) for share in shares]
        asked = settings("exact", 64, budgets)
        result, plan = carried_out(model, asked, rates)
        used.add(tuple(x.device for x in result.layers))
        with Session(model, plan=plan, device="host", **options("exact")) as s:
            assert beyond_rounding(alone, drive(s, IDS), model.info.n_layer) < 1, shares
            assert s.info.n_device_bytes <= sum(budgets)
    assert len(used) > 1 and any(1 in places for places in used)


def test_devices_hold_no_second_copy_of_k_and_v(model: Model) -> None:
    """Memory of the host is what the CPU's layers take, whoever has the others."""
    sizes = {}
    for layers in ([-1] * 6, [0, 0, 0, -1, -1, -1], [0, 0, 1, 1, -1, -1], [0, 0, 1, 1, 1, 1]):
        n = max(*layers, 0) + 1
        plan = place(model, "all", "exact", devices=layers, head=n - 1, n_devices=n)
        with Session(model, plan=plan, device=["host"] * n, **options("exact")) as s:
            sizes[layers.count(-1)] = s.info.n_kv_bytes
    assert sizes[0] == 0
    assert sizes[6] == 2 * sizes[3] == 3 * sizes[2] > 0


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (["host"], "is for 2 devices, 1 are named"),
        (["host", "host", "host"], "is for 2 devices, 3 are named"),
        (["host:1", "host:1"], "named twice"),
        (["host", "cuda"], "several kinds"),
        (["host", "host:x"], "number of a device"),
        ("host:", "number of a device"),
        ("vulkan", "must be one of"),
        ([], "empty"),
    ],
)
def test_devices_must_be_named_right(model: Model, device: Any, says: str) -> None:
    plan = place(model, "all", "exact", devices=[0, 0, 0, 1, 1, 1], head=1, n_devices=2)
    with pytest.raises(ArgumentError, match=says):
        Session(model, plan=plan, device=device, **options("exact"))


def test_devices_are_chosen_by_number(model: Model, alone: Arrays) -> None:
    plan = place(model, "all", "exact", devices=[0, 0, 0, 1, 1, 1], head=1, n_devices=2)
    for device in (["host:7", "host:3"], ["host", "host:0"], "host"):
        with Session(model, plan=plan, device=device, **options("exact")) as s:
            assert beyond_rounding(alone, drive(s, IDS), model.info.n_layer) < 1


@pytest.mark.parametrize("layers", [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, -1, -1, -1, -1, 1]])
@pytest.mark.parametrize(("split", "sparsity"), [("all", "exact"), ("some", "predicted")])
def test_the_first_device_helps_with_a_token_s_head(
    tmp_path: Path, layers: list[int], split: str, sparsity: str
) -> None:
    """The bits are the same, and it has a copy of some rows."""
    with Model(write(tmp_path, DEEP, "sparse")) as model:
        rows, n_bytes = [], []
        for helps in (False, True):
            more: dict[str, Any] = {"devices": layers, "head": layers[-1], "n_devices": max(layers) + 1}
            plan = place(model, split, sparsity, helps=helps, **more)
            with Session(model, plan=plan, device="host", **options(sparsity)) as s:
                rows.append(drive(s, IDS))
                n_bytes.append(s.info.n_device_bytes)
    assert all(map(np.array_equal, *rows))
    copied = model.info.n_vocab // 16 * 7 // 64 * 64 * model.info.n_embd
    assert n_bytes[1] - n_bytes[0] >= copied


def test_the_gpu_s_test_knows_the_table_of_a_device() -> None:
    """tests/gpu calls a table by its own declaration, which no compiler compares with the header's."""
    header = Path(__file__).parents[2].joinpath("native/device/device.h").read_text()
    table = re.search(r"typedef struct pi_device_ops \{(.*?)\} pi_device_ops;", header, re.DOTALL)
    declared = re.search(r"uint32_t version;(.*?)\} pi_device_ops;", test_hybrid_devices_gpu.CDEF, re.DOTALL)
    version = re.search(r"PI_DEVICE_VERSION = (\d+)", header)
    assert table and declared and version and int(version[1]) == test_hybrid_devices_gpu.VERSION
    members = re.findall(r"\(\*(\w+)\)\(", re.sub(r"/\*.*?\*/", "", table[1], flags=re.DOTALL))
    known = [name for name in re.findall(r"\*(\w+)(?=[,;)])", declared[1]) if name in members]
    assert known == members[: len(known)] and known[-1] == "logits"
