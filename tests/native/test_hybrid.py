"""Sessions whose layers lie partly on a device answer as sessions of the CPU alone, whatever is where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, DeviceError, UnsupportedError
from powerinfer._engine import _native
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import models
from tests.native.hybrid import (
    IDS,
    NAMES,
    SPLITS,
    beyond_rounding,
    both,
    carried_out,
    drive,
    options,
    place,
    settings,
    write,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


# Each architecture with half of the splits; the other half is slow.
HALVES = [
    pytest.param(name, half, marks=[pytest.mark.slow] * (half != i % 2))
    for i, name in enumerate(NAMES)
    for half in (0, 1)
]


@pytest.mark.parametrize(("name", "half"), HALVES)
def test_every_split_answers_as_the_cpu(folder: Path, name: str, half: int) -> None:
    with Model(write(folder, name, "dense")) as model:
        modes = ["dense", "exact"] if models.SPECS[name].relu else ["dense"]
        for i, split in list(enumerate(SPLITS))[half::2]:
            sparsity = modes[i // 2 % len(modes)]
            assert both(model, split, sparsity, 64 if i % 2 else 16, 1 + i % 3) < 1, split


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", ["llama-mha", "llama-relu"])
def test_down_stored_by_output(folder: Path, name: str, kind: Kind) -> None:
    """Quantised ordinary files keep down by output: its hot columns are the device's."""
    where = folder / kind.name
    where.mkdir(exist_ok=True)
    with Model(write(where, name, "dense", kind)) as model:
        for split in SPLITS:
            assert both(model, split, "exact" if "relu" in name else "dense", 64, 2, int8=True) < 1, split


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama-mha", None), ("gemma3", None), ("llama-mha", Kind.Q8_0), ("llama-relu", Kind.Q4_0)],
)
def test_a_neuron_that_is_left_out_is_beyond_rounding(folder: Path, name: str, kind: Kind | None) -> None:
    """The measure of the tests above sees one neuron of each layer that nobody computed."""
    where = folder / f"left-{kind}"
    where.mkdir(exist_ok=True)
    path = write(where, name, "dense", kind)
    answers = []
    for left_out in (False, True):
        with Model(path) as m:
            for layer in range(m.info.n_layer if left_out else 0):
                down = f"blk.{layer}.ffn_down.weight"
                column = m.file.dequantize(down)[:, 3:4]
                one = np.zeros((1, m.info.n_ff), np.float32)
                one[0, 3] = 1
                m.add_adapter(down, one, -np.ascontiguousarray(column), scale=1.0)
            with Session(m, **options("exact" if "relu" in name else "dense")) as s:
                answers.append(drive(s, IDS))
            n_layer = m.info.n_layer
    assert beyond_rounding(*answers, n_layer, int8=kind is not None) > 1


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(write(folder, "llama-relu-gqa", "sparse")) as m:
        yield m


def test_same_bits_every_time(model: Model) -> None:
    for n_threads in (1, 3):
        runs = []
        for _ in range(2):
            plan = place(model, "some", "predicted")
            with Session(model, plan=plan, device="host", **options("predicted", 64, n_threads)) as s:
                runs.append(drive(s, IDS))
        for a, b in zip(*runs, strict=True):
            assert np.array_equal(a, b)


def test_prompts_behind_others_where_every_other_layer_is_the_cpus(model: Model) -> None:
    """The CPU's layers share counters that the device's layers in between do not touch."""
    for n_threads in (1, 3):
        o = options("exact", 64, n_threads)
        for on in ([-1, 0, -1], [0, -1, 0], [-1, 0, 0], [-1, -1, 0]):
            plan = place(model, "some", "exact", devices=on, head=-1)
            with Session(model, **o) as alone, Session(model, plan=plan, device="host", **o) as s:
                for x in (alone, s):
                    x.feed(IDS[:16])
                    x.feed(IDS[:40])
                    x.feed(IDS[:20])
                assert beyond_rounding([alone.logits()], [s.logits()], model.info.n_layer) < 1, on


def test_a_timeline_of_both_sides(model: Model) -> None:
    """Each side's moments follow each other; where nothing is cold, the CPU has none."""
    for split in ("some", "all", "mixed"):
        plan = place(model, split, "predicted")
        with Session(model, plan=plan, device="host", timeline=True, **options("predicted")) as s:
            assert s.last_timeline == [{}, {}, {}]  # before the first step
            for _ in range(2):
                s.feed([5])
                last = -1.0
                for layer, moments in enumerate(s.last_timeline):
                    there = split != "mixed" or layer % 2 == 1
                    cold = there and split != "all"
                    device = (
                        "qkv",
                        "attention",
                        "output",
                        "predict",
                        *(("marks",) if cold else ()),
                        "hot",
                        "merge",
                    )
                    cpu = ("input", "list", "answer") if cold else ()
                    assert list(moments) == [*(device if there else ()), *cpu]
                    for side in (device if there else (), cpu):
                        assert all(moments[a] <= moments[b] for a, b in pairwise(side))
                    if there:
                        assert last < moments["qkv"] and last < moments["merge"]
                        last = moments["merge"]
    with Session(model, plan=place(model, "some", "exact"), device="host", **options("exact")) as s:
        s.feed([5])
        with pytest.raises(ArgumentError, match="without timeline"):
            _ = s.last_timeline


def test_several_that_generate_are_a_chunk_behind_prompts(model: Model) -> None:
    """A step of decoding, with its kernels; a single one is computed with the prompt before it."""
    o = options("exact")
    ids = np.random.default_rng(5).integers(3, 290, 40)
    with (
        Session(model, plan=place(model, "some", "exact"), device="host", **o) as s,
        Session(model, **o) as cpu,
    ):
        for n, seq, kinds, n_last in (
            (30, [0] * 20 + [1] * 10, [0] * 30, 30),
            (23, [2] * 19 + [0, 1, 2, 3], [0] * 19 + [1] * 4, 4),
            (20, [2] * 19 + [0], [0] * 19 + [1], 20),
            (20, [2] * 18 + [3] * 2, [0] * 18 + [1] * 2, 20),  # guesses of one
        ):
            for x in (s, cpu):
                x.feed(ids[:n], seq=seq, want_logits=kinds)
            assert s.last_step[0].n_tokens == n_last
            got, want = ([x.logits(i).copy() for i in range(x.n_logits)] for x in (s, cpu))
            assert not want or beyond_rounding(want, got, model.info.n_layer) < 1


@pytest.mark.slow
def test_logits_of_many_tokens_leave_in_parts(folder: Path) -> None:
    """128 MiB of pinned memory hold the logits of 239 tokens here: the others are computed after them."""
    spec = replace(models.SPECS["llama-relu-gqa"], name="wordy", n_vocab=140000, n_layer=1)
    with Model(write(folder, spec, "dense")) as m:
        o = options("exact", 512) | {"n_ctx": 512, "n_pool": 512}
        plan = engine.native_plan(
            m,
            replace(settings("exact", 512), n_ctx=512, n_pool=512),
            engine.Rates(),
            on_device=[True],
            hot=[np.arange(100, dtype=np.int32)],
            head_on_device=True,
        )
        ids = np.random.default_rng(5).integers(3, 290, 300)
        with Session(m, **o) as alone, Session(m, plan=plan, device="host", **o) as s:
            s.feed(ids[:40])
            assert s.last_step[0].n_tokens < 40  # of the last layer what is wanted
            s.cut(0)
            for x in (alone, s):
                x.feed(ids, want_logits=True)
            assert s.n_logits == 300 and s.last_step[0].n_tokens == 300 - (128 << 20) // (4 * 140000)
            for i in (0, 238, 239, 299):
                assert beyond_rounding([alone.logits(i)], [s.logits(i)], 1) < 1


@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_every_budget_is_kept(model: Model, sparsity: str) -> None:
    check_every_budget(model, sparsity)


def check_every_budget(model: Model, sparsity: str) -> None:
    """The stand-in refuses to allocate beyond the budget: whatever a plan promises must fit."""
    rates = engine.Rates(gpu_bytes_per_s=4e12, cpu_bytes_per_s=1e10, handover_us=0, layer_us=0, ffn_us=0)
    full = engine.compute(model, settings(sparsity, 64), rates)
    with Session(model, **options(sparsity)) as s:
        want = drive(s, IDS)
    used = set()
    for budget in np.linspace(full.min_bytes, full.full_bytes, 9).astype(int):
        asked = settings(sparsity, 64, [int(budget)])
        result, plan = carried_out(model, asked, rates)
        used.add(sum(len(x.hot) for x in result.layers))
        with Session(model, plan=plan, device="host", **options(sparsity)) as s:
            got = drive(s, IDS)
            assert s.info.n_device_bytes <= budget
        assert beyond_rounding(want, got, model.info.n_layer) < 1
    assert len(used) > 4


@pytest.mark.parametrize("n_batch", [16, 64])
def test_every_token_of_a_prompt_may_want_logits(model: Model, n_batch: int) -> None:
    o = options("exact", n_batch)
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, "some", "exact", n_batch), device="host", **o) as s,
    ):
        for x in (alone, s):
            x.feed(IDS[:40], want_logits=True)
        assert s.n_logits == 40
        want, got = ([x.logits(i).copy() for i in range(40)] for x in (alone, s))
        assert beyond_rounding(want, got, model.info.n_layer) < 1


def test_layers_on_a_device_cannot_be_tapped(model: Model) -> None:
    with Session(model, plan=place(model, "cpu", "exact"), device="host", **options("exact")) as s:
        with pytest.raises(UnsupportedError, match="tapped"), s.tap(hidden=True):
            pass
        s.feed([3])


def test_the_driver_is_left_a_core(model: Model) -> None:
    cores = _native.lib.pi_cpu_cores()
    plan, o = place(model, "all", "exact"), options("exact", n_threads=0)
    with Session(model, **o) as alone, Session(model, plan=plan, device="host", **o) as s:
        assert alone.info.n_threads == cores
        assert s.info.n_threads == (cores - 1 if cores >= 4 else cores)


def test_a_plan_of_another_model_is_refused(model: Model, folder: Path) -> None:
    with Model(write(folder, "llama-mha", "dense")) as other:
        plan = place(other, "all", "dense")
    with pytest.raises(ArgumentError, match="layers of"):
        Session(model, plan=plan, device="host", **options("dense"))


def test_a_device_needs_its_library(model: Model) -> None:
    plan = place(model, "all", "dense")
    with pytest.raises(DeviceError):
        Session(model, plan=plan, device="cuda", **options("dense"))
