"""The planner's C interface called wrongly: an ARGUMENT error with a sentence, never a crash."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine import _native
from powerinfer._engine.session import Model
from tests.plan.drafts import write_model

ffi, lib = _native.ffi, _native.lib
NULL = ffi.NULL
ARGUMENT = 3
LOW, HIGH = -(2**31), 2**31 - 1
N_LAYER, N_FF = 3, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(
        tmp_path_factory.mktemp("m") / "m.gguf", n_layer=N_LAYER, n_ff=N_FF, ranks=[32] * N_LAYER
    )
    with Model(path, load=False) as m:
        yield m


def options(**changes: Any) -> Any:
    o = ffi.new("pi_plan_options *", lib.pi_plan_defaults())
    o.overhead_bytes = 0
    o.budget_bytes = 1 << 40
    for name, value in changes.items():
        setattr(o, name, value)
    return o


def new(model: Model, o: Any) -> Any:
    out = ffi.new("pi_plan **")
    assert lib.pi_plan_new(model.handle, o, out) == 0, _native.message()
    return ffi.gc(out[0], lib.pi_plan_free)


def refused(status: Any, says: str) -> None:
    assert status == ARGUMENT
    assert says in _native.message()


def test_null(model: Model) -> None:
    out, info, layer = ffi.new("pi_plan **"), ffi.new("pi_plan_info *"), ffi.new("pi_plan_layer *")
    plan = new(model, options())
    refused(lib.pi_plan_new(NULL, NULL, out), "NULL")
    refused(lib.pi_plan_new(model.handle, NULL, NULL), "NULL")
    refused(lib.pi_plan_get_info(NULL, info), "NULL")
    refused(lib.pi_plan_get_info(plan, NULL), "NULL")
    refused(lib.pi_plan_get_layer(NULL, 0, layer), "NULL")
    refused(lib.pi_plan_get_layer(plan, 0, NULL), "NULL")
    refused(lib.pi_plan_hot(NULL, 0, ffi.new("int32_t[]", N_FF)), "NULL")
    refused(lib.pi_plan_hot(plan, 0, NULL), "NULL")
    refused(lib.pi_plan_restore(model.handle, NULL, NULL, out), "NULL")
    refused(lib.pi_plan_restore(model.handle, NULL, ffi.new("pi_placement *"), out), "NULL")
    for index in (-1, N_LAYER, HIGH, LOW):
        refused(lib.pi_plan_get_layer(plan, index, layer), f"layer {index} is out of range")
        refused(lib.pi_plan_hot(plan, index, ffi.new("int32_t[]", N_FF)), f"layer {index} is out of range")
    lib.pi_plan_free(NULL)
    assert lib.pi_plan_new(model.handle, NULL, out) == 0  # defaults: no budget
    lib.pi_plan_free(out[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize(
    "name",
    [
        "gpu_bytes_per_s",
        "cpu_bytes_per_s",
        "pcie_bytes_per_s",
        "handover_us",
        "layer_us",
        "ffn_us",
        "active_share",
        "overshoot",
    ],
)
def test_rates_that_are_none(model: Model, name: str, value: float) -> None:
    out = ffi.new("pi_plan **")
    refused(lib.pi_plan_new(model.handle, options(**{name: value}), out), f"{name} is ")
    assert out[0] == NULL


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_ctx", (LOW, -1, (1 << 24) + 1, HIGH)),
        ("n_pool", (LOW, -1, 7, HIGH)),
        ("n_seq", (LOW, -1, 0, HIGH)),
        ("n_batch", (LOW, -1, 0, HIGH)),
        ("group", (LOW, -1, 0, HIGH)),
        ("sparsity", (LOW, -1, 4, HIGH)),
        ("type_k", (LOW, -1, 2, HIGH)),
        ("type_v", (LOW, -1, 2, HIGH)),
        ("overhead_bytes", (2**64 - 1, 2**62)),
    ],
)
def test_numbers_out_of_range(model: Model, name: str, values: tuple[int, ...]) -> None:
    out = ffi.new("pi_plan **")
    for value in values:
        status = lib.pi_plan_new(model.handle, options(**{"n_ctx": 64, name: value}), out)
        refused(status, "KV type" if name.startswith("type") else name)
        assert out[0] == NULL


def test_the_largest_numbers_do_not_overflow(model: Model) -> None:
    most = options(
        n_ctx=1 << 24,
        n_pool=1 << 24,
        n_seq=1 << 16,
        n_batch=1 << 16,
        type_k=0,
        type_v=0,
        overhead_bytes=(1 << 62) - 1,
        budget_bytes=2**64 - 1,
        group=1,
    )
    info = ffi.new("pi_plan_info *")
    lib.pi_plan_get_info(new(model, most), info)
    assert info.full_bytes > 1 << 62 and info.total_bytes <= info.budget_bytes
    assert math.isfinite(info.total_us) and info.min_bytes <= info.full_bytes


def test_modes_that_the_model_does_not_have(tmp_path: Path) -> None:
    out = ffi.new("pi_plan **")
    with Model(write_model(tmp_path / "silu.gguf"), load=False) as silu:
        refused(lib.pi_plan_new(silu.handle, options(sparsity=1), out), "predictors")
        refused(lib.pi_plan_new(silu.handle, options(sparsity=2), out), "ReLU")
    with Model(write_model(tmp_path / "head.gguf", n_head=16, n_head_kv=1), load=False) as small:
        refused(lib.pi_plan_new(small.handle, options(type_k=8), out), "head size 16")
    with Model(write_model(tmp_path / "opt.gguf", "opt", ranks=[32] * 3, n_ctx=128), load=False) as opt:
        refused(lib.pi_plan_new(opt.handle, options(n_ctx=129), out), "learned positions")


def test_counts_need_their_tokens(model: Model) -> None:
    counts = ffi.new("uint32_t[]", N_LAYER * N_FF)
    out = ffi.new("pi_plan **")
    refused(lib.pi_plan_new(model.handle, options(counts=counts), out), "tokens")
    largest = np.full(N_LAYER * N_FF, 2**32 - 1, np.uint32)  # more often than there were tokens: always
    info = ffi.new("pi_plan_info *")
    lib.pi_plan_get_info(new(model, options(counts=ffi.from_buffer("uint32_t[]", largest), n_tokens=1)), info)
    assert info.active_hot + info.active_cold == N_LAYER * N_FF


def test_a_small_budget_says_what_would_do(model: Model) -> None:
    info, out = ffi.new("pi_plan_info *"), ffi.new("pi_plan **")
    lib.pi_plan_get_info(new(model, options(overhead_bytes=5 << 20)), info)
    least = info.min_bytes
    for budget in (1, least - 1):
        o = options(overhead_bytes=5 << 20, budget_bytes=budget)
        refused(lib.pi_plan_new(model.handle, o, out), "too small")
        message = _native.message()
        assert "5.0 MiB" in message and f"{least / 2**20:.1f} MiB are needed" in message
        assert "n_batch 8" in message and "budget of 0" in message
    new(model, options(overhead_bytes=5 << 20, budget_bytes=least))


def test_what_smaller_batches_need_is_true(tmp_path: Path) -> None:
    """Of a model so small that all of it takes less than one part and the buffers for the rest."""
    info, out = ffi.new("pi_plan_info *"), ffi.new("pi_plan **")
    with Model(write_model(tmp_path / "m.gguf", n_layer=1, n_ff=2048), load=False) as model:
        lib.pi_plan_get_info(new(model, options(n_batch=512)), info)
        assert info.min_bytes == info.full_bytes
        refused(lib.pi_plan_new(model.handle, options(n_batch=512, budget_bytes=1), out), "too small")
        (said,) = re.findall(r"\((\S+) MiB with n_batch 8\)", _native.message())
        lib.pi_plan_get_info(new(model, options(n_batch=8)), info)
        assert float(said) == pytest.approx(info.min_bytes / 2**20, abs=0.06)


def test_dense_plans_rest_on_no_counts(model: Model) -> None:
    counts, info = ffi.new("uint32_t[]", N_LAYER * N_FF), ffi.new("pi_plan_info *")
    for sparsity, rests in ((1, 1), (3, 0)):
        lib.pi_plan_get_info(new(model, options(sparsity=sparsity, counts=counts, n_tokens=1)), info)
        assert info.has_counts == rests


def restored(model: Model, on_device: list[int], hot: list[list[int]], **changes: Any) -> tuple[int, Any]:
    """Status and plan of a placement."""
    ids = [i for layer in hot for i in layer]
    keep = (
        ffi.new("uint8_t[]", on_device),
        ffi.new("int32_t[]", [len(layer) for layer in hot]),
        ffi.new("int32_t[]", ids or [0]),
    )
    at = ffi.new("pi_placement *", dict(zip(("on_device", "n_hot", "hot"), keep, strict=True)))
    at.head_on_device = changes.pop("head", 0)
    out = ffi.new("pi_plan **")
    status = lib.pi_plan_restore(model.handle, options(**changes), at, out)
    return status, ffi.gc(out[0], lib.pi_plan_free) if status == 0 else None


@pytest.mark.parametrize(
    ("on_device", "hot", "says"),
    [
        ([1, 1, 1], [[0], [N_FF], []], "hot neuron 0 of layer 1"),
        ([1, 1, 1], [[0], [-1], []], "hot neuron 0 of layer 1"),
        ([1, 1, 1], [[], [3, 3], []], "hot neuron 1 of layer 1"),
        ([1, 1, 1], [[], [4, 3], []], "must be 5.."),
        ([1, 0, 1], [[], [4], []], "layer 1 of the plan lies on the CPU"),
    ],
)
def test_placements_that_cannot_be(
    model: Model, on_device: list[int], hot: list[list[int]], says: str
) -> None:
    status, _ = restored(model, on_device, hot)
    refused(status, says)


def test_a_placement_with_a_wrong_number_of_neurons(model: Model) -> None:
    at = ffi.new("pi_placement *")
    keep = ffi.new("uint8_t[]", [1, 1, 1]), ffi.new("int32_t[]", [0, N_FF + 1, 0]), ffi.new("int32_t[]", [0])
    at.on_device, at.n_hot, at.hot = keep
    out = ffi.new("pi_plan **")
    for n in (N_FF + 1, HIGH, -1, LOW):
        keep[1][1] = n
        refused(lib.pi_plan_restore(model.handle, options(), at, out), f"{n} hot neurons")


def test_a_placement_over_the_budget(model: Model) -> None:
    everything = [list(range(N_FF))] * N_LAYER
    status, plan = restored(model, [1] * N_LAYER, everything, head=1)
    info = ffi.new("pi_plan_info *")
    lib.pi_plan_get_info(plan, info)
    assert status == 0 and info.total_bytes == info.full_bytes and info.n_layer_resident == N_LAYER
    for budget, works in ((info.total_bytes, True), (info.total_bytes - 1, False)):
        status, _ = restored(model, [1] * N_LAYER, everything, head=1, budget_bytes=budget)
        assert (status == 0) == works
    refused(status, f"({info.total_bytes - 1} bytes)")


def test_blocks_of_a_format_stay_together(tmp_path: Path) -> None:
    def type_of(name: str) -> str:
        return "Q8_0" if "down" in name else "F16"

    path = write_model(tmp_path / "q.gguf", n_layer=1, n_ff=64, type_of=type_of)
    with Model(path, load=False) as model:
        status, _ = restored(model, [1], [list(range(33))])
        refused(status, "splits neurons 32..63")
        status, _ = restored(model, [1], [list(range(32, 64))])
        assert status == 0
