"""Adapters of models whose layers lie on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import models, reference
from tests.native.hybrid import (
    ADAPTED,
    ADAPTED_FFN,
    ADAPTED_OWN,
    AMX,
    DEEP,
    IDS,
    adapt,
    beyond_rounding,
    both,
    carried_out,
    drive,
    options,
    place,
    settings,
    without_amx,
    write,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-7b", "falcon-40b", "opt", "qwen2", "gemma3"])
@pytest.mark.parametrize("split", ["all", "some", "mixed"])
def test_a_device_adapts_as_the_cpu(tmp_path: Path, name: str, split: str) -> None:
    with Model(write(tmp_path, name, "dense")) as model:
        with Session(model, **options("auto")) as s:
            plain = drive(s, IDS)
        adapt(model)
        with Session(model, **options("auto")) as s:
            assert beyond_rounding(plain, drive(s, IDS), model.info.n_layer) > 5
        for n_batch, n_threads in ((64, 2), (7, 1)):
            assert both(model, split, "auto", n_batch, n_threads) < 1


@pytest.mark.parametrize("names", [ADAPTED, ADAPTED_FFN, ADAPTED_OWN], ids=["attention", "ffn", "own"])
@pytest.mark.parametrize("rank", [1, 40])
def test_the_budget_holds_them(tmp_path: Path, rank: int, names: tuple[str, ...]) -> None:
    """A plan counts them: where every byte of the budget is used it still fits."""
    rates = engine.Rates(gpu_bytes_per_s=4e12, cpu_bytes_per_s=1e10, handover_us=0, layer_us=0, ffn_us=0)
    with Model(write(tmp_path, DEEP, "dense")) as model:
        plain = engine.compute(model, settings("exact", 64), rates)
        added = adapt(model, rank, names)
        full = engine.compute(model, settings("exact", 64), rates)
        shapes = [delta.shape for name, delta in added.items() if name != "token_embd.weight"]  # the CPU's
        floats = -(-rank // 32) * 32 * sum(map(sum, shapes))  # ranks are filled up to whole vectors
        assert floats and full.full_bytes - plain.full_bytes >= 4 * floats
        assert full.min_bytes > plain.min_bytes
        with Session(model, **options("exact")) as s:
            alone = drive(s, IDS)
        for budget in (full.full_bytes, (full.min_bytes + full.full_bytes) // 2):
            asked = settings("exact", 64, [budget])
            _, plan = carried_out(model, asked, rates)
            with Session(model, plan=plan, device="host", **options("exact")) as s:
                assert beyond_rounding(alone, drive(s, IDS), model.info.n_layer) < 1
                assert 0 < s.info.n_device_bytes <= budget


def changed(path: Path, added: dict[str, np.ndarray]) -> reference.Model:
    """The file with what adapters add to its weights, in float64. An output that is the embedding stays."""
    model = reference.load(path)
    tensors = {"output.weight": model["token_embd.weight"], **model.tensors}
    for name, delta in added.items():
        tensors[name] = tensors[name] + delta
    return replace(model, tensors=tensors)


FFN_NAMES = ["llama-relu-gqa", "bamboo", "falcon-7b", "falcon-40b", "opt", "qwen2", "gemma3"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [None, Kind.Q8_0], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("name", FFN_NAMES)
def test_adapters_of_the_feed_forward(tmp_path: Path, name: str, kind: Kind | None) -> None:
    """With every split of the neurons both sides' parts add up to what changed weights give."""
    if kind is not None and models.SPECS[name].n_ff % 32:
        pytest.skip("rows are no whole blocks")
    with Model(write(tmp_path, name, "dense", kind)) as model:
        with Session(model, **options("auto")) as s:
            plain = drive(s, IDS)
        added = adapt(model, 5, ADAPTED_FFN)
        expected = reference.forward(changed(model.file.path, added), np.array(IDS[:43]))[39:]
        modes = ["exact", "dense"] if models.SPECS[name].relu else ["dense"]
        for i, split in enumerate(["all", "none", "one", "but", "some", "mixed", "cpu"]):
            for sparsity in modes:
                o = options(sparsity, 64 if i % 2 else 7, 1 + i % 2)
                with Session(model, **o) as alone:
                    cpu = drive(alone, IDS)
                plan = place(model, split, sparsity, o["n_batch"])
                with Session(model, plan=plan, device="host", **o) as s:
                    rows = drive(s, IDS)
                int8 = bool(kind)  # integers, at least on one side; a last bit can turn one
                assert beyond_rounding(cpu, rows, model.info.n_layer, int8=int8) < 1, split
                assert beyond_rounding(cpu, plain, model.info.n_layer, int8=int8) > 5, split
                shown = np.stack(rows[:8:2])
                assert reference.relative_error(shown, expected) < (5e-2 if kind or AMX else 1e-3), split


@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_an_adapter_of_one_matrix(tmp_path: Path, which: str) -> None:
    with Model(write(tmp_path, "llama-relu-gqa", "dense")) as model:
        added = adapt(model, 40, [f"ffn_{which}"])
        expected = reference.forward(changed(model.file.path, added), np.array(IDS[:43]))[39:]
        for split in ("some", "none"):
            with Session(model, plan=place(model, split, "exact"), device="host", **options("exact")) as s:
                rows = drive(s, IDS)
            assert reference.relative_error(np.stack(rows[:8:2]), expected) < (2e-2 if AMX else 1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-relu-gqa", "opt", "falcon-7b", "qwen2"])
@pytest.mark.parametrize("split", ["alone", "all", "mixed", "cpu"])
def test_adapters_of_embedding_and_output(tmp_path: Path, name: str, split: str) -> None:
    with Model(write(tmp_path, name, "dense")) as model:
        added = adapt(model, 5, ADAPTED_OWN)
        assert ("output.weight" in added) == any(t.name == "output.weight" for t in model.file.tensors)
        expected = reference.forward(changed(model.file.path, added), np.array(IDS[:43]))[39:]
        for n_batch, n_threads in ((64, 2), (7, 1)):
            o = options("auto", n_batch, n_threads)
            if split != "alone":
                o |= {"plan": place(model, split, "auto", n_batch), "device": "host"}
            with Session(model, **o) as s:
                rows = drive(s, IDS)
            assert reference.relative_error(np.stack(rows[:8:2]), expected) < (2e-2 if AMX else 1e-3)


def test_what_is_read_in_place_without_an_adapter(tmp_path: Path) -> None:
    """A plan that was made before the adapter came is carried out by the CPU."""
    with Model(write(tmp_path, "llama-relu-gqa", "dense")) as model:
        plan = place(model, "near", "exact")
        adapt(model, 5, ADAPTED_FFN)
        with Session(model, **options("exact")) as s:
            alone = drive(s, IDS)
        with Session(model, plan=plan, device="host", **options("exact")) as s:
            assert beyond_rounding(alone, drive(s, IDS), model.info.n_layer) < 1
        with pytest.raises(ArgumentError):
            place(model, "near", "exact")


@pytest.mark.slow
@pytest.mark.skipif(not AMX, reason="no AMX here: the tests above ran without it")
def test_without_amx() -> None:
    without_amx(__file__)
