"""Sessions on a GPU answer as sessions of the CPU alone, whatever lies where. Run only when asked for:
without a GPU, or in a build without the CUDA backend, they fail.

    pytest tests/gpu/test_hybrid_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session, TokenKind
from powerinfer.models.plan import Settings, engine
from powerinfer.models.quantize import choose_types, quantize_model
from tests import models, reference
from tests.native import test_window_memory, test_windows
from tests.native.hybrid import (
    ADAPTED,
    ADAPTED_FFN,
    ADAPTED_OWN,
    AMX,
    IDS,
    NAMES,
    SPLITS,
    adapt,
    apart,
    drive,
    exactly,
    options,
    place,
    without_amx,
    write,
)

# Prompts are multiplied in F16 on the GPU, and with AMX in bf16 on the CPU: values are rounded to 11 (8) bits
# before each of some 10 products in a row, whose sums are of size 1 to 10.
ROUNDED_TO_F16 = 0.03
TOLERANCE = 0.2 if AMX else ROUNDED_TO_F16
WIDE = replace(
    models.SPECS["llama-relu"], name="wide", n_embd=256, n_head=4, n_ff=512, n_ctx=1024, predictor=(256, 256)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def ample(**more: Any) -> Settings:
    """A budget for all of a small model."""
    return Settings(budget_bytes=1 << 34, overhead_bytes=0, group=1, **more)


def both(model: Model, split: str, sparsity: str, n_batch: int, n_threads: int) -> float:
    o = options(sparsity, n_batch, n_threads)
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, sparsity, n_batch), device="cuda", **o) as hybrid,
    ):
        return apart(drive(alone, IDS), drive(hybrid, IDS))


@pytest.mark.parametrize("names", [ADAPTED, ADAPTED_FFN, ADAPTED_OWN], ids=["attention", "ffn", "own"])
@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-40b", "opt", "qwen2"])
def test_adapters(folder: Path, name: str, names: tuple[str, ...]) -> None:
    with Model(write(folder, name, "dense")) as model:
        adapt(model, 5, names)
        for split in ("all", "some", "one", "mixed", "none"):
            assert both(model, split, "auto", 64, 2) < TOLERANCE, split


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_adapters_of_a_wide_model(folder: Path, kind: str) -> None:
    """Whose down is transposed, or stored by output. Activations are rounded to 8 bits beside weights of 8
    bits, and of prompts to F16 on the GPU and to BF16 by some CPUs."""
    path = models.write_dense(folder / f"adapted-{kind}.gguf", WIDE, kind=Kind[kind])
    with Model(path) as model:
        with Session(model, **options("exact")) as s:
            plain = drive(s, IDS)
        adapt(model, 40, ADAPTED_FFN)
        with Session(model, **options("exact")) as s:
            change = apart(plain, drive(s, IDS))
        for split in ("all", "some"):
            for sparsity in ("exact", "dense"):
                assert both(model, split, sparsity, 1, 2) < change / (100 if kind == "F16" else 10)
                assert both(model, split, sparsity, 64, 2) < change / 10


@pytest.mark.parametrize("split", ["all", "part", "none", "layers"])
def test_windows_and_norms_behind_blocks(folder: Path, split: str) -> None:
    path = test_windows.write(folder / f"windows-{split}.gguf")
    expected = test_windows.forward(reference.load(path), test_windows.tokens())
    with Model(path) as model:
        test_windows.check_on_device(model, expected, "cuda", split)


@pytest.mark.parametrize("split", ["all", "layers"])
def test_windows_give_back_what_lies_behind_them(folder: Path, split: str) -> None:
    with Model(test_windows.write(folder / f"window-memory-{split}.gguf")) as model:
        test_window_memory.check_on_device(model, "cuda", split)


@pytest.mark.parametrize("name", NAMES)
def test_every_split_answers_as_the_cpu(folder: Path, name: str) -> None:
    with Model(write(folder, name, "dense")) as model:
        for sparsity in ["dense", "exact"] if models.SPECS[name].relu else ["dense"]:
            for i, split in enumerate(SPLITS):
                assert both(model, split, sparsity, 64 if i % 2 else 16, 1 + i % 3) < TOLERANCE, split


@exactly
@pytest.mark.parametrize("predictor", ["auto", "sign"])
@pytest.mark.parametrize("name", [name for name in NAMES if models.SPECS[name].predictor])
def test_predicted(folder: Path, name: str, predictor: Literal["auto", "sign"]) -> None:
    """With 8 tokens at a time nothing is rounded to F16, so that both sides name the same neurons."""
    with Model(write(folder, name, "sparse"), predictor=predictor) as model:
        for i, split in enumerate(SPLITS):
            o = options("predicted", 8, 1 + i % 3)
            with (
                Session(model, **o) as alone,
                Session(model, plan=place(model, split, "predicted", 8), device="cuda", **o) as hybrid,
            ):
                steps = [
                    np.abs(a - b).max() for a, b in zip(drive(alone, IDS), drive(hybrid, IDS), strict=True)
                ]
            # A score within rounding of its threshold may still go either way.
            assert np.median(steps) < 2e-3 and np.quantile(steps, 0.8) < TOLERANCE, (split, steps)


@pytest.mark.skipif(not AMX, reason="done above")
def test_predicted_without_amx() -> None:
    without_amx(__file__)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize(
    "kind",
    [
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    ],
)
def test_every_type(folder: Path, kind: str, form: str) -> None:
    path = folder / f"{kind}-{form}.gguf"
    if kind in ("F32", "F16", "BF16"):
        if form == "dense":
            models.write_dense(path, WIDE, kind=Kind[kind])
        else:
            models.write_sparse(path, WIDE, models.draw_predictor(WIDE), kind=Kind[kind])
    else:
        with ModelFile(write(folder, WIDE, form)) as source:
            quantize_model(source, path, kind, choose_types(source, kind, pure=True))
    with Model(path) as model:
        for split in SPLITS:
            if form == "dense" and split in ("one", "but") and kind.endswith("_K"):
                continue  # a block of down's columns is half a layer
            # Activations are rounded to 8 bits on some paths and not on others.
            limit = TOLERANCE if kind in ("F32", "F16", "BF16") else 0.6
            try:
                assert both(model, split, "exact", 64, 2) < limit, split
            except ArgumentError as error:
                assert "together" in str(error)


@exactly
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_broad_models(folder: Path, kind: str) -> None:
    """For more than 4 tokens an input of 2048 columns is made once, not by every block of a product."""
    path = folder / f"broad-{kind}.gguf"
    spec = replace(WIDE, name="broadest", n_embd=2048, n_ff=1024, n_head=16, predictor=(64, 64))
    if kind in ("F16", "BF16"):
        models.write_sparse(path, spec, models.draw_predictor(spec), kind=Kind[kind])
    else:
        with ModelFile(write(folder, spec, "sparse")) as source:
            quantize_model(source, path, kind, choose_types(source, kind, pure=True))
    limit = TOLERANCE if kind in ("F16", "BF16") else 0.6
    with Model(path) as model:
        for split in ("all", "some", "near"):
            assert both(model, split, "exact", 8, 2) < limit, split
        if kind != "F16":
            return
        for split in ("all", "near"):
            o = options("predicted", 8)
            plan = place(model, split, "predicted", 8)
            with Session(model, **o) as alone, Session(model, plan=plan, device="cuda", **o) as hybrid:
                pairs = zip(drive(alone, IDS), drive(hybrid, IDS), strict=True)
                steps = [np.abs(a - b).max() for a, b in pairs]
            assert np.median(steps) < limit, (split, steps)


@pytest.mark.parametrize("split", ["all", "some", "none", "mixed"])
@pytest.mark.parametrize("n", [9, 17, 64, 100, 333, 600])
def test_prompts(folder: Path, n: int, split: str) -> None:
    ids = np.random.default_rng(n).integers(3, 290, n, np.int32)
    with Model(write(folder, WIDE, "dense")) as model:
        o: dict[str, Any] = {"n_ctx": 1024, "n_batch": 256, "sparsity": "exact", "n_threads": 4}
        n_layer, n_ff = model.info.n_layer, model.info.n_ff
        on = [split != "mixed" or layer == 0 for layer in range(n_layer)]
        some = np.arange(n_ff) if split == "all" else np.arange(0 if split == "none" else 100)
        plan = engine.native_plan(
            model,
            ample(**{k: o[k] for k in ("n_ctx", "n_batch", "sparsity")}),
            engine.Rates(),
            on_device=on,
            hot=[(some if there else some[:0]).astype(np.int32) for there in on],
            head_on_device=split != "mixed",
        )
        with Session(model, **o) as alone, Session(model, plan=plan, device="cuda", **o) as hybrid:
            for s in (alone, hybrid):
                s.feed(ids)
            assert np.abs(alone.logits() - hybrid.logits()).max() < TOLERANCE
            for s in (alone, hybrid):
                s.feed([7])
            assert np.abs(alone.logits() - hybrid.logits()).max() < TOLERANCE


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M"])
def test_many_sequences(folder: Path, kind: str, form: str) -> None:
    """Of more sequences than kernels for decoding take, each answers as on the CPU; some end and
    others begin on the way. There it is one token at a time with the same weights in F32, here never
    fewer than nine, so that all that is rounded are the inputs of the GPU's products, to F16. Sparse: down
    is stored by neuron."""
    name, n_seq = f"many-{form}-{kind}", 320
    path, exact = folder / f"{name}.gguf", folder / f"{name}-F32.gguf"
    if kind == "F16" and form == "dense":
        models.write_dense(path, WIDE, kind=Kind.F16)
    elif kind == "F16":
        models.write_sparse(path, WIDE, models.draw_predictor(WIDE), kind=Kind.F16)
    else:
        with ModelFile(write(folder, WIDE, form)) as source:
            quantize_model(source, path, kind, choose_types(source, kind, pure=not kind.endswith("_M")))
    with ModelFile(path) as source:
        quantize_model(source, exact, "F32", choose_types(source, "F32", pure=True), allow_requantize=True)
    rng = np.random.default_rng(4)
    o: dict[str, Any] = {
        "n_ctx": 64,
        "n_pool": 64 * n_seq,
        "n_seq": n_seq,
        "n_batch": n_seq,
        "sparsity": "exact",
    }
    with Model(path) as model, Model(exact) as in_floats:
        n_layer, n_ff = model.info.n_layer, model.info.n_ff
        plan = engine.native_plan(
            model,
            ample(**o),
            engine.Rates(),
            on_device=[True] * n_layer,
            hot=[np.arange(n_ff, dtype=np.int32)] * n_layer,
            head_on_device=True,
        )
        with (
            Session(in_floats, n_threads=2, **o) as alone,
            Session(model, plan=plan, device="cuda", **o) as s,
        ):
            for n in (40, 30, 20, 9, 100, 17, 129, 24, 12, 70, 9, 200, 145, 40, 256, 225, 300):
                for x in (alone, s):
                    x.drop(n % n_seq)
                sequences = rng.permutation(n_seq)[:n].tolist()
                ids = rng.integers(3, 290, n, np.int32)
                s.feed(ids, seq=sequences, want_logits=True)
                for i, seq in enumerate(sequences):
                    alone.feed([ids[i]], seq=seq)
                    away = np.abs(alone.logits() - s.logits(i)).max()
                    assert away < ROUNDED_TO_F16, (n, i, away)


@pytest.mark.parametrize("act", ["relu", "opt"])
def test_long_prompts_neurons_in_pieces(folder: Path, act: str) -> None:
    """Of 1200 tokens hidden values of 6912 neurons (13824 without a gate) are made at once, then those of the
    others; of 64 tokens those of all. The CPU counts which fire."""
    n_ff, name = (7680, "llama-relu") if act == "relu" else (14336, "opt")
    sizes: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 2, "n_ctx": 1280, "predictor": (16, 32)}
    spec = replace(models.SPECS[name], name=f"long-{act}", n_ff=n_ff, **sizes)
    ids = np.random.default_rng(3).integers(3, 290, 1200, np.int32)
    mode: dict[str, Any] = {"n_ctx": 1280, "sparsity": "predicted"}
    more: dict[str, Any] = mode | {"n_threads": 4, "mask_prompts": True, "count_neurons": True}
    found = []
    with Model(write(folder, spec, "sparse")) as model:
        for n_batch, device in ((1200, "cuda"), (64, "cuda"), (64, "cpu")):
            plan = engine.native_plan(
                model,
                ample(count_neurons=True, n_batch=n_batch, **mode),
                engine.Rates(),
                on_device=[True] * model.info.n_layer,
                hot=[np.arange(n_ff, dtype=np.int32)] * model.info.n_layer,
                head_on_device=True,
            )
            there: dict[str, Any] = {"plan": plan, "device": "cuda"} if device == "cuda" else {}
            with Session(model, n_batch=n_batch, **there, **more) as s:
                s.feed(ids)
                found.append((s.logits().copy(), s.neuron_counts().counts.astype(np.int64)))
    (pieces, counts), (whole, all_counts), (_, cpu_counts) = found
    assert np.abs(pieces - whole).max() < 0.03
    assert cpu_counts[:, -500:].sum() > 1000
    assert np.abs(counts - all_counts).sum() <= all_counts.sum() // 500
    assert np.abs(counts - cpu_counts).sum() <= cpu_counts.sum() // 20


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_prompts_stream_without_pinned_weights(folder: Path, kind: str, form: str) -> None:
    """What passes through the ring is what the GPU would have read itself; 600 tokens in chunks of 256."""
    path = folder / f"ring-{kind}-{form}.gguf"
    spec = replace(WIDE, name="broad", n_embd=1024, n_ff=4096, n_head=8, predictor=(64, 64))
    with ModelFile(write(folder, spec, form)) as source:
        quantize_model(source, path, kind, choose_types(source, kind, pure=True))
    ids = np.random.default_rng(8).integers(3, 290, 600, np.int32)
    o: dict[str, Any] = {"n_ctx": 1024, "n_batch": 256, "sparsity": "exact"}
    found = []
    with Model(path) as model:
        for pin in (True, False):
            plan = engine.native_plan(
                model,
                Settings(budget_bytes=1 << 34, overhead_bytes=0, group=256, **o),
                engine.Rates(),
                on_device=[True] * model.info.n_layer,
                hot=[np.arange(256, 768, dtype=np.int32)] * model.info.n_layer,
                head_on_device=True,
            )
            with Session(model, plan=plan, device="cuda", pin_weights=pin, **o) as s:
                s.feed(ids)
                assert all(step.n_active_device == step.n_active > 0 for step in s.last_step)
                found.append(s.logits().copy())
                s.feed([7])
                found.append(s.logits().copy())
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])


@exactly
@pytest.mark.parametrize("split", ["some", "all", "mixed", "near", "weak"])
def test_neurons_are_counted(folder: Path, split: str) -> None:
    """Products of 8 tokens and of one are not rounded, so that both sides see the same neurons fire; of a
    prompt's a few lie within rounding of 0."""
    o = options("predicted") | {"count_neurons": True}
    with Model(write(folder, "llama-relu-gqa", "sparse")) as model:
        plan = place(model, split, "predicted")
        with Session(model, **o) as alone, Session(model, plan=plan, device="cuda", **o) as s:
            assert (s.info.n_zero_copy > 0) == (split in ("near", "weak"))
            for x in (alone, s):
                for i in range(0, 40, 8):
                    x.feed(IDS[i : i + 8], want_logits=True)
                for token in IDS[40:44]:
                    x.feed([token])
            want, got = alone.neuron_counts(), s.neuron_counts(reset=True)
            assert want.n_tokens == got.n_tokens == 44 and want.counts.sum() > 1000
            seen = want.counts.astype(np.int64)
            assert np.abs(seen - got.counts.astype(np.int64)).sum() <= seen.sum() // 500
            for x in (alone, s):
                x.feed(IDS[:40])
            prompt, here = alone.neuron_counts(), s.neuron_counts()
            there = prompt.counts.astype(np.int64) - seen
            assert here.n_tokens == 40
            assert np.abs(there - here.counts.astype(np.int64)).sum() <= there.sum() // 50


def test_more_sequences_than_a_program_takes(folder: Path) -> None:
    """More than products read weights for in their own format: each answers as on the CPU."""
    path, n_seq = folder / "320.gguf", 320
    models.write_dense(path, WIDE, kind=Kind.F16)
    o: dict[str, Any] = {
        "n_ctx": 64,
        "n_pool": 64 * n_seq,
        "n_seq": n_seq,
        "n_batch": n_seq,
        "sparsity": "exact",
    }
    rng = np.random.default_rng(6)
    with Model(path) as model:
        n_layer, n_ff = model.info.n_layer, model.info.n_ff
        on_device: dict[str, Any] = {"on_device": [True] * n_layer, "head_on_device": True}
        hot = [np.arange(n_ff, dtype=np.int32)] * n_layer
        plan = engine.native_plan(model, ample(**o), engine.Rates(), hot=hot, **on_device)
        with Session(model, n_threads=2, **o) as alone, Session(model, plan=plan, device="cuda", **o) as s:
            for n in (320, 65, 128, 257):
                sequences, ids = rng.permutation(n_seq)[:n].tolist(), rng.integers(3, 290, n, np.int32)
                for x in (alone, s):
                    x.feed(ids, seq=sequences, want_logits=[TokenKind.GENERATED] * n)
                steps = [np.abs(alone.logits(i) - s.logits(i)).max() for i in range(n)]
                assert max(steps) < TOLERANCE, (n, steps)
