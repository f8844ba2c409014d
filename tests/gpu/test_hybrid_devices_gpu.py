"""Sessions on GPUs give everything back, keep their budgets, repeat their bits and answer on two GPUs as on
one; what a GPU refuses, and a CPU that never answers it. Run only when asked for: without a GPU, or in a
build without the CUDA backend, they fail.

    pytest tests/gpu/test_hybrid_devices_gpu.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI
from gguf import GGMLQuantizationType as Kind

import powerinfer
from powerinfer import ArgumentError, OutOfMemoryError
from powerinfer._engine import machine
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, engine, make_plan
from powerinfer.models.quantize import choose_types, quantize_model
from tests import models
from tests.gpu.test_hybrid_gpu import TOLERANCE, WIDE
from tests.native.hybrid import (
    AMX,
    DEEP,
    IDS,
    Arrays,
    apart,
    drive,
    exactly,
    has_second_gpu,
    options,
    place,
    without_amx,
    write,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(write(folder, "llama-relu-gqa", "sparse")) as m:
        yield m


def open_some(model: Model, split: str = "some", **changes: Any) -> Session:
    plan = place(model, split, "predicted", 64)
    return Session(model, plan=plan, device="cuda", **options("predicted", 64, 2) | changes)


@pytest.mark.parametrize("split", ["all", "some", "mixed", "near"])
def test_same_bits_every_time(model: Model, split: str) -> None:
    runs: list[Arrays] = []
    for _ in range(3):
        with open_some(model, split) as s:
            runs += [drive(s, IDS)]
            for seq in range(4):
                s.drop(seq)
            runs += [drive(s, IDS)]
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert np.array_equal(a, b)


def test_closing_gives_everything_back(model: Model) -> None:
    open_some(model).close()
    before = machine.device_facts("cuda").free_bytes
    for _ in range(1000):
        with open_some(model) as s:
            s.feed(IDS[:1])
    assert before - machine.device_facts("cuda").free_bytes <= 4 << 20


def test_a_budget_is_kept(folder: Path) -> None:
    """What the driver gives out is within the budget, the peak of loading and of prompts included."""
    with Model(write(folder, WIDE, "dense")) as model:
        settings = Settings(n_ctx=1024, n_batch=256, sparsity="exact")
        free = machine.device_facts("cuda").free_bytes
        plan = make_plan(model, vram_budget=1, settings=settings)
        o: dict[str, Any] = {"n_ctx": 1024, "n_batch": 256, "sparsity": "exact"}
        with Session(model, plan=plan.native(model), device="cuda", **o) as s:
            s.feed(list(range(3, 203)))
            s.feed([5])
            used = free - machine.device_facts("cuda").free_bytes
            assert used < plan.bytes.total - plan.bytes.overhead + (192 << 20)
            assert used <= s.info.n_device_bytes <= 1 << 30


ON_TWO = [[0, 0, 0, 1, 1, 1], [0, -1, 0, 1, -1, 1], [0, 0, 1, 1, -1, -1]]


def open_two(
    model: Model, layers: list[int], split: str, sparsity: str, n_batch: int = 64, **more: Any
) -> Session:
    if not has_second_gpu():
        pytest.skip("one GPU")
    plan = place(model, split, sparsity, n_batch, devices=layers, head=layers[-1], n_devices=2)
    o = {"device": ["cuda:0", "cuda:1"]} | options(sparsity, n_batch, 3) | more
    return Session(model, plan=plan, **o)


@pytest.mark.parametrize("layers", ON_TWO)
@pytest.mark.parametrize("split", ["all", "some", "near"])
def test_two_gpus(folder: Path, layers: list[int], split: str) -> None:
    with (
        Model(write(folder, DEEP, "sparse")) as model,
        open_two(model, layers, split, "exact") as hybrid,
        Session(model, **options("exact", 64, 3)) as alone,
    ):
        assert apart(drive(alone, IDS), drive(hybrid, IDS)) < TOLERANCE
        assert [step.n_active_device > 0 for step in hybrid.last_step] == [layer >= 0 for layer in layers]
        on_one = {"devices": [min(layer, 0) for layer in layers], "head": min(layers[-1], 0)}
        with Session(
            model, plan=place(model, split, "exact", **on_one), device="host", **options("exact")
        ) as s:
            assert hybrid.info.n_zero_copy == s.info.n_zero_copy
            assert (s.info.n_zero_copy > 0) == (split == "near")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_the_first_gpu_helps_with_a_token_s_head(folder: Path, kind: str) -> None:
    """The bits are those of one GPU; of Q4_0 nobody helps."""
    if not has_second_gpu():
        pytest.skip("one GPU")
    path = folder / f"head-{kind}.gguf"
    spec = replace(WIDE, name="head", n_layer=4, n_vocab=3001)
    if kind in ("F32", "F16"):
        models.write_dense(path, spec, kind=Kind[kind])
    else:
        with ModelFile(write(folder, spec, "dense")) as source:
            quantize_model(source, path, kind, choose_types(source, kind, pure=True))
    with Model(path) as model:
        rows = []
        for layers, helps in (([0] * 4, True), ([0, 0, 1, 1], False), ([0, 0, 1, 1], True)):
            plan = place(model, "all", "exact", devices=layers, head=layers[-1], n_devices=2, helps=helps)
            with Session(model, plan=plan, device=["cuda:0", "cuda:1"], **options("exact", 64, 3)) as s:
                rows.append(drive(s, IDS))
        assert all(map(np.array_equal, rows[0], rows[1])) and all(map(np.array_equal, rows[0], rows[2]))


def test_sessions_share_pinned_memory(folder: Path) -> None:
    """Who opened first may close first."""
    with Model(write(folder, DEEP, "sparse")) as model:
        plan, o = place(model, "near", "exact"), {"device": "cuda"} | options("exact")
        first = Session(model, plan=plan, **o)
        with Session(model, plan=plan, **o) as second:
            assert 0 < first.info.n_zero_copy == second.info.n_zero_copy
            expected = drive(first, IDS)
            first.close()
            assert all(map(np.array_equal, expected, drive(second, IDS)))


@exactly
@pytest.mark.parametrize("layers", ON_TWO)
def test_two_gpus_predicted(folder: Path, layers: list[int]) -> None:
    with (
        Model(write(folder, DEEP, "sparse")) as model,
        open_two(model, layers, "some", "predicted", 8, count_neurons=True) as hybrid,
        Session(model, **options("predicted", 8, 3), count_neurons=True) as alone,
    ):
        pairs = zip(drive(alone, IDS), drive(hybrid, IDS), strict=True)
        steps = [float(np.abs(a - b).max()) for a, b in pairs]
        assert np.median(steps) < 2e-3 and np.quantile(steps, 0.8) < TOLERANCE, steps
        want, got = alone.neuron_counts(), hybrid.neuron_counts()
        assert want.n_tokens == got.n_tokens
        seen = want.counts.astype(np.int64)
        assert np.abs(seen - got.counts.astype(np.int64)).sum() <= seen.sum() // 100


@pytest.mark.skipif(not AMX, reason="done above")
def test_two_gpus_predicted_without_amx() -> None:
    without_amx(__file__)


def test_two_gpus_repeat_their_bits(folder: Path) -> None:
    """The two change places, too."""
    runs: list[Arrays] = []
    with Model(write(folder, DEEP, "sparse")) as model:
        for names in (["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]) * 2:
            with open_two(model, ON_TWO[1], "some", "predicted", device=names) as s:
                runs.append(drive(s, IDS))
    for run in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_refusals(model: Model) -> None:
    plan = place(model, "some", "predicted", 64)
    with pytest.raises(ArgumentError, match=r"no CUDA device 9[79]|the last is"):
        Session(model, plan=plan, device="cuda:97", **options("predicted"))
    big = engine.native_plan(
        model,
        Settings(budget_bytes=1 << 50, n_ctx=128, n_batch=64, n_seq=4, n_pool=256, sparsity="dense"),
        engine.Rates(),
        on_device=[True] * model.info.n_layer,
        hot=[np.arange(model.info.n_ff, dtype=np.int32)] * model.info.n_layer,
        head_on_device=True,
    )
    with pytest.raises(OutOfMemoryError, match="are free"):
        Session(model, plan=big, device="cuda", **options("dense"))


VERSION = 22
CDEF = """
typedef struct { const void *ops; uint32_t *cancelled; int64_t wait_ns; } pi_device;
typedef struct { const uint32_t *base; uint32_t add; } te_ticket;
typedef struct { const float *partial; int32_t n_parts, n_tok, cols; const float *add, *bias; size_t ld_add;
                 float *y; size_t ldy; const uint64_t *words; te_ticket ticket; const int32_t *expected;
                 struct { int32_t kind; float eps; const float *w, *b; } norm; float *normed;
                 float scale; uint32_t *cancelled; uint64_t limit_ns; } te_merge_args;
typedef struct { const float *x; int32_t n_rows, cols; const int32_t *n_largest; float *rows;
                 uint64_t *largest; int32_t *n_found; } pi_device_logits;
typedef void pi_device_program(void *ctx, pi_device *dev);
typedef struct {
    uint32_t version; const char *kind; const char *(*error)(void);
    int (*open)(int32_t, uint64_t, pi_device **); void (*close)(pi_device *); void *get_info;
    void *reserve; void *(*alloc)(pi_device *, size_t); void *(*share)(pi_device *, size_t);
    void *stride, *map, *zero_copy, *pack; int (*upload)(pi_device *, void *, const void *, size_t);
    int (*download)(pi_device *, void *, const void *, size_t); void *copy;
    int (*launch)(pi_device *, pi_device_program *, void *, uint64_t);
    void (*look)(pi_device *); bool (*ended)(pi_device *, int32_t);
    int (*finish)(pi_device *);
    void *begin, *end, *linear, *attention, *latent, *recurrent, *gate, *marks, *ffn, *cut, *route, *experts;
    void (*merge)(pi_device *, const te_merge_args *);
    void *load; void (*logits)(pi_device *, const pi_device_logits *);
} pi_device_ops;
const pi_device_ops *pi_device_cuda(void), *pi_device_host(void);
"""


def cuda_library() -> str:
    beside = Path(os.environ.get("POWERINFER_LIBRARY") or Path(powerinfer.__file__).parent / "lib" / "lib")
    return str(beside.with_name("libpowerinfer_cuda.so"))


@pytest.mark.parametrize("key", [0, 1])
def test_a_cpu_that_never_answers(key: int) -> None:
    """A program's wait ends after wait_ns with an error, and the device works on. key 0: no graph."""
    ffi = FFI()
    ffi.cdef(CDEF)
    ops = ffi.dlopen(cuda_library()).pi_device_cuda()
    assert ops.version == VERSION, "CDEF is of another version"
    out = ffi.new("pi_device **")
    assert ops.open(0, 0, out) == 0, ffi.string(ops.error())
    dev = out[0]
    dev.wait_ns = 200_000_000
    x, number = ffi.cast("float *", ops.alloc(dev, 1024)), ops.alloc(dev, 256)
    words = ffi.cast("uint64_t *", ops.share(dev, 256 * 8))
    a = ffi.new("te_merge_args *", {"y": x, "ldy": 256, "n_tok": 1, "cols": 256, "words": words})
    a.ticket.base, a.ticket.add = ffi.cast("uint32_t *", number), 5
    program = ffi.callback("pi_device_program", lambda _ctx, device: ops.merge(device, a))
    assert ops.launch(dev, program, ffi.NULL, key) == 0
    assert ops.finish(dev) == 8 and b"timed out" in ffi.string(ops.error())
    for i in range(256):
        words[i] = 5 << 32 | 0x3F800000
    assert ops.launch(dev, program, ffi.NULL, key) == 0 and ops.finish(dev) == 0
    host = ffi.new("float[256]")
    assert ops.download(dev, host, x, 1024) == 0 and set(host) == {1.0}
    ops.close(dev)
