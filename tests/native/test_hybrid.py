"""Sessions whose layers lie partly on a device answer as sessions of the CPU alone. The device is the
stand-in in ordinary memory: it obeys the same plan, budget and hand-over as a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, DeviceError, UnsupportedError, _native
from powerinfer.plan import engine
from powerinfer.session import Model, Session
from tests import models

N_CTX, N_SEQ, N_POOL = 128, 4, 256
# Sums are cut differently on the two sides; AMX rounds a prompt's activations to bf16 on one of them only.
TOLERANCE = 0.1 if _native.isa() == "amx" else 2e-3
# With AMX the CPU rounds prompts to bf16 where the stand-in does not, and a score may cross its threshold.
exact_scores = pytest.mark.skipif(_native.isa() == "amx", reason="AMX rounds what predictors read")
NAMES = [
    "llama-mha",
    "llama-llama3",
    "mistral",
    "llama-relu-gqa",
    "bamboo",
    "falcon-7b",
    "falcon-40b",
    "falcon-gelu",
    "opt",
    "qwen2",
    "qwen3",
]


def write(folder: Path, name: str, form: str, kind: Kind | None = None) -> Path:
    spec = models.SPECS[name]
    if form == "dense":
        return models.write_dense(folder / f"{name}-{form}.gguf", spec, kind=kind)
    return models.write_sparse(folder / f"{name}-{form}.gguf", spec, models.draw_predictor(spec))


def settings(sparsity: str, n_batch: int, budget: int = 1 << 34) -> engine.Settings:
    return engine.Settings(
        budget_bytes=budget,
        n_ctx=N_CTX,
        n_pool=N_POOL,
        n_seq=N_SEQ,
        n_batch=n_batch,
        sparsity=sparsity,
        overhead_bytes=0,
        group=1,
    )


def block(model: Model) -> int:
    """Neurons that a plan must keep together, because down is stored by output in blocks of so many."""
    down = {t.name: t.type for t in model.file.tensors}.get("blk.0.ffn_down.weight")
    return 32 if down in ("Q8_0", "Q4_0") else 1


def place(model: Model, split: str, sparsity: str, n_batch: int) -> Any:
    """all: everything on the device. none: attention only. one, but: one neuron, all but one. some: a part.
    mixed: some layers are the CPU's, and so is the head. cpu: only the head is on the device."""
    n_layer, n_ff, unit = model.info.n_layer, model.info.n_ff, block(model)
    rng = np.random.default_rng(len(split))
    on, hot = [split != "cpu"] * n_layer, []
    for layer in range(n_layer):
        ids = {
            "all": np.arange(n_ff),
            "one": np.arange(unit) + 2 * unit,
            "but": np.delete(np.arange(n_ff), np.arange(unit) + unit),
            "some": np.flatnonzero(np.repeat(rng.random(n_ff // unit) < 0.4, unit)),
        }.get(split, np.array([], np.int64))
        if split == "mixed":
            on[layer] = layer % 2 == 1
            ids = np.arange(unit * 3) if on[layer] else ids
        hot.append(ids.astype(np.int32))
    return engine.native_plan(
        model,
        settings(sparsity, n_batch),
        engine.Rates(),
        on_device=on,
        hot=hot,
        head_on_device=split != "mixed",
    )


def options(sparsity: str, n_batch: int, n_threads: int) -> dict[str, Any]:
    return {
        "n_ctx": N_CTX,
        "n_pool": N_POOL,
        "n_seq": N_SEQ,
        "n_batch": n_batch,
        "sparsity": sparsity,
        "n_threads": n_threads,
    }


def drive(s: Session, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """A prompt, decoding, a shared prefix, several sequences at once, a shift, a state saved and loaded."""
    out: list[np.ndarray[Any, Any]] = []

    def note() -> None:
        out.extend([s.logits(i).copy() for i in range(s.n_logits)] + [s.hidden(0)])

    s.feed(ids[:40])
    note()
    for t in ids[40:43]:
        s.feed([t])
        note()
    s.copy(1, 0, 37)
    s.feed(ids[43:46], seq=1)
    note()
    s.feed(ids[:3], seq=[0, 1, 0], want_logits=True)
    note()
    s.feed(ids[3:6], want_logits=[True, False, True])
    note()
    try:
        s.shift(4, 9)
    except UnsupportedError:  # OPT
        s.cut(20)
    s.feed([ids[5]])
    note()
    s.load(s.save(), seq=2)
    s.feed([ids[6]], seq=2)
    note()
    return out


def both(model: Model, split: str, sparsity: str, n_batch: int, n_threads: int) -> float:
    ids = [int(t) for t in np.random.default_rng(n_batch).integers(3, 290, 50)]
    o = options(sparsity, n_batch, n_threads)
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, sparsity, n_batch), device="host", **o) as hybrid,
    ):
        want, got = drive(alone, ids), drive(hybrid, ids)
    assert len(want) == len(got)
    return max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True))


SPLITS = ["all", "none", "one", "but", "some", "mixed", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.mark.parametrize("name", NAMES)
def test_every_split_answers_as_the_cpu(folder: Path, name: str) -> None:
    with Model(write(folder, name, "dense")) as model:
        modes = ["dense", "exact"] if models.SPECS[name].relu else ["dense"]
        for i, split in enumerate(SPLITS):
            sparsity = modes[i % len(modes)]
            assert both(model, split, sparsity, 64 if i % 2 else 16, 1 + i % 3) < TOLERANCE, split


@exact_scores
@pytest.mark.parametrize("predictor", ["mlp", "sign"])
@pytest.mark.parametrize("name", [n for n in NAMES if models.SPECS[n].predictor])
def test_predicted(folder: Path, name: str, predictor: Any) -> None:
    with Model(write(folder, name, "sparse"), predictor=predictor) as model:
        for i, split in enumerate(SPLITS):
            assert both(model, split, "predicted", 16 if i % 2 else 64, 1 + i % 3) < TOLERANCE, split


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", ["llama-mha", "llama-relu"])
def test_down_stored_by_output(folder: Path, name: str, kind: Kind) -> None:
    """Quantised ordinary files keep down by output: its hot columns are the device's."""
    where = folder / kind.name
    where.mkdir(exist_ok=True)
    with Model(write(where, name, "dense", kind)) as model:
        for split in SPLITS:
            # 8-bit activations on some paths and not on others; wrong columns give errors above 1.
            assert both(model, split, "exact" if "relu" in name else "dense", 64, 2) < 0.3, split


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(write(folder, "llama-relu-gqa", "sparse")) as m:
        yield m


def test_same_bits_every_time(model: Model) -> None:
    ids = list(range(3, 53))
    for n_threads in (1, 3):
        runs = []
        for _ in range(2):
            plan = place(model, "some", "predicted", 64)
            with Session(model, plan=plan, device="host", **options("predicted", 64, n_threads)) as s:
                runs.append(drive(s, ids))
        for a, b in zip(*runs, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("sparsity", ["dense", "exact", pytest.param("predicted", marks=exact_scores)])
def test_every_budget_is_kept(model: Model, sparsity: str) -> None:
    """The stand-in refuses to allocate beyond the budget: whatever a plan promises must fit."""
    rates = engine.Rates(gpu_bytes_per_s=4e12, cpu_bytes_per_s=1e10, handover_us=0, layer_us=0, ffn_us=0)
    full = engine.compute(model, settings(sparsity, 64), rates)
    ids = list(range(3, 53))
    with Session(model, **options(sparsity, 64, 2)) as s:
        want = drive(s, ids)
    used = set()
    for budget in np.linspace(full.min_bytes, full.full_bytes, 9).astype(int):
        result = engine.compute(model, settings(sparsity, 64, int(budget)), rates)
        plan = engine.native_plan(
            model,
            settings(sparsity, 64, int(budget)),
            rates,
            on_device=[x.on_device for x in result.layers],
            hot=[x.hot for x in result.layers],
            head_on_device=result.head_on_device,
        )
        used.add(sum(len(x.hot) for x in result.layers))
        with Session(model, plan=plan, device="host", **options(sparsity, 64, 2)) as s:
            got = drive(s, ids)
        assert max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True)) < TOLERANCE
    assert len(used) > 4


def test_a_plan_of_another_model_is_refused(model: Model, folder: Path) -> None:
    with Model(write(folder, "llama-mha", "dense")) as other:
        plan = place(other, "all", "dense", 64)
    with pytest.raises(ArgumentError, match="layers of"):
        Session(model, plan=plan, device="host", **options("dense", 64, 1))


def test_a_device_needs_its_library(model: Model) -> None:
    plan = place(model, "all", "dense", 64)
    with pytest.raises(DeviceError):
        Session(model, plan=plan, device="cuda", **options("dense", 64, 1))
