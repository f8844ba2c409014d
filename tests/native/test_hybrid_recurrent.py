"""Models with recurrent layers on a device, against the float64 reference: whatever lies where, whatever was
taken back, copied or saved."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from powerinfer.models.plan import engine
from tests import models, reference, rounding

NAMES = ["lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "falcon-h1", "granitehybrid", "nemotron_h"]
NAMES += ["nemotron_h_moe"]
SPLITS = ["all", "some", "none", "odd", "first", "cpu"]
N_CTX, N_GUESSES = 128, 4
F32 = {"type_k": "f32", "type_v": "f32"}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 290, 61)]
GENERATED, PROMPT = TokenKind.GENERATED, TokenKind.PROMPT


def place(
    model: Model,
    split: str,
    n_batch: int,
    devices: Any = None,
    sparsity: str = "dense",
    rates: engine.Rates = engine.Rates(),  # noqa: B008 (frozen)
) -> Any:
    """all, some, none: of neurons or experts, of all layers. odd: some of every other layer; first: all of
    the first layer; cpu: nothing but the head. devices: of each layer, and of the head."""
    n = model.info.n_layer
    on = [{"odd": i % 2 == 1, "first": i == 0, "cpu": False}.get(split, True) for i in range(n)]
    names = {t.name for t in model.file.tensors}
    parts = ("up_exps",) if model.info.n_expert else ("up", "down")
    feeds = [any(f"blk.{i}.ffn_{part}.weight" in names for part in parts) for i in range(n)]
    hot = []
    for i, here in enumerate(on):
        n_placed = model.info.n_placed if feeds[i] else 0
        ids = {"all": range(n_placed), "none": (), "first": range(n_placed)}.get(split, range(0, n_placed, 3))
        hot.append(np.array(ids if here else (), np.int32))
    asked = engine.Settings(
        budget_bytes=1 << 34,
        more_budgets=(1 << 34,) if devices else (),
        n_ctx=N_CTX,
        n_pool=2 * N_CTX,
        n_seq=3,
        n_guesses=N_GUESSES,
        n_batch=n_batch,
        sparsity=sparsity,
        overhead_bytes=0,
        group=1,
        **F32,
    )
    return engine.native_plan(
        model,
        asked,
        rates,
        on_device=on,
        hot=hot,
        head_on_device=split != "odd",
        devices=devices[:-1] if devices else None,
        head_device=devices[-1] if devices else 0,
    )


def opened(model: Model, plan: Any, n_batch: int, n_threads: int = 2, **more: Any) -> Session:
    sizes: dict[str, Any] = {"sparsity": "dense", "device": "host"}
    sizes |= {"n_ctx": N_CTX, "n_pool": 2 * N_CTX, "n_seq": 3, "n_batch": n_batch, "n_threads": n_threads}
    return Session(model, plan=plan, **sizes | F32 | more)


def fed(s: Session, ids: list[int], seq: int = 0) -> Any:
    rows = []
    for token in ids:
        s.feed([token], seq=seq)
        rows.append(s.logits().copy())
    return np.stack(rows)


@functools.cache
def answers(path: Path) -> Any:
    return reference.forward(reference.load(path), TOKENS)


def drive(path: Path, m: Model, plan: Any, n_batch: int, n_threads: int, split: str, **more: Any) -> None:
    """Tokens one by one, a few at a time, a prompt; each sequence gone on with as if alone."""
    expected = answers(path)
    close = 4e-2 if rounding.BF16 else 2e-2 if more.get("device", "host") != "host" else 2e-3  # F16 on a GPU
    with opened(m, plan, n_batch, n_threads, **more) as s:
        assert reference.relative_error(fed(s, TOKENS[:20]), expected[:20]) < 1e-5, split
        s.drop()
        for k in range(0, 28, 7):
            s.feed(TOKENS[k : k + 7], want_logits=[GENERATED] * 7)
            got = np.stack([s.logits(j) for j in range(7)])
            assert reference.relative_error(got, expected[k : k + 7]) < 1e-5, split
        assert s.reachable(27) == 21  # where the last of these feeds began
        s.cut(21)
        assert reference.relative_error(fed(s, TOKENS[21:30]), expected[21:30]) < 1e-5, split
        s.feed(TOKENS, seq=1)
        if n_batch > 32:
            assert reference.relative_error(s.logits(), expected[-1]) < close, split
            assert s.reachable(60, seq=1) == 60
            s.copy(2, 1, 60)
            s.feed(TOKENS[60:], seq=2, want_logits=[GENERATED])
            assert reference.relative_error(s.logits(), expected[-1]) < close, split
            s.drop(1)
            for at, end in ((0, 13), (13, 40), (40, 61)):
                s.feed(TOKENS[at:end], seq=1)
            assert reference.relative_error(s.logits(), expected[-1]) < close, split
            s.drop(1)
            s.drop(2)
            both = [t for t in TOKENS[:24] for _ in range(2)]
            s.feed(both, seq=[1, 2] * 24, want_logits=[PROMPT] * 46 + [GENERATED] * 2)
            for i in range(2):
                assert reference.relative_error(s.logits(i), expected[23]) < close, split
        saved = s.save()
        s.feed(TOKENS[30:34], want_logits=[GENERATED] * 4)
        s.load(saved, seq=2)
        assert reference.relative_error(fed(s, TOKENS[30:40], 2), expected[30:40]) < 1e-5, split


def drive_guesses(path: Path, m: Model, split: str, device: Any = "host") -> None:
    """Guesses of two sequences, side by side, are taken back to between them, where there are states."""
    expected = answers(path)
    with opened(m, place(m, split, 64), 64, device=device, n_guesses=N_GUESSES) as s:
        for right in (0, 1, 2):  # of two guesses
            s.drop()
            s.drop(1)
            fed(s, TOKENS[:9])
            fed(s, TOKENS[:4], 1)
            wrong = [5, 6, 7]
            first, second = TOKENS[9 : 10 + right] + wrong[right:2], TOKENS[4 : 5 + right] + wrong[right:2]
            s.feed(
                [t for pair in zip(first, second, strict=True) for t in pair],
                seq=[0, 1] * 3,
                want_logits=[GENERATED] * 6,
            )
            assert [s.reachable(n) for n in (10, 11, 12)] == [10, 11, 12]
            s.cut(10 + right)
            s.cut(5 + right, seq=1)
            for seq, at in ((0, 10 + right), (1, 5 + right)):
                found = fed(s, TOKENS[at : at + 3], seq)
                assert reference.relative_error(found, expected[at : at + 3]) < 1e-5, (split, right)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_taken_back(name: str, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as m:
        drive_guesses(path, m, "all")
        drive_guesses(path, m, "odd")


def test_many_generated_tokens_leave_no_checkpoints(tmp_path: Path) -> None:
    """More than a device takes as decoding; a prompt's checkpoint stays, where others go on."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["lfm2"])
    seqs = [0, 1, 2] * 3
    with Model(path) as m, opened(m, place(m, "all", 64), 64) as s:
        for seq in range(3):
            s.feed(TOKENS[:30], seq=seq)
        for _ in range(3):
            s.feed([5] * len(seqs), seq=seqs, want_logits=[GENERATED] * len(seqs))
        for seq in range(3):
            assert [s.reachable(n, seq=seq) for n in (38, 36, 35, 29)] == [36, 36, 29, 29]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    drive_splits(name, tmp_path, "host")


def drive_splits(name: str, folder: Path, device: Any) -> None:
    path = models.write_dense(folder / "m.gguf", models.SPECS[name])
    sparsity = "exact" if name == "nemotron_h" else "dense"  # squared ReLU
    with Model(path) as m:
        for i, split in enumerate(SPLITS):
            n_batch = 64 if i % 2 == 0 else 16
            plan = place(m, split, n_batch, sparsity=sparsity)
            drive(path, m, plan, n_batch, 1 + i % 3, split, sparsity=sparsity, device=device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["lfm2moe", "qwen35"])
def test_two_devices(name: str, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    n = models.SPECS[name].n_layer
    with Model(path) as m:
        for devices in ([0] * (n // 2) + [1] * (n - n // 2) + [1], [0] * n + [1]):
            drive(path, m, place(m, "some", 64, devices), 64, 2, str(devices))


@pytest.mark.parametrize("name", ["qwen35moe", "falcon-h1", "lfm2", "nemotron_h_moe"])
def test_a_plan_of_its_own(name: str, tmp_path: Path) -> None:
    """What a budget holds: weights, K, V and states of all layers; and a session takes no more."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    spec = models.SPECS[name]
    with Model(path) as m:
        rates = engine.Rates(cpu_bytes_per_s=1e7, handover_us=0, layer_us=0, ffn_us=0)
        settings = engine.Settings(
            budget_bytes=1 << 30,
            n_ctx=N_CTX,
            n_seq=3,
            n_guesses=N_GUESSES,
            n_batch=64,
            overhead_bytes=0,
            **F32,
        )
        whole = engine.compute(m, settings, rates)
        assert all(layer.on_device for layer in whole.layers)
        parts = (".attn_", ".ssm_", ".shortconv.", ".ffn_gate_inp", "_shexp")
        moved = [
            t.n_bytes
            for t in m.file.tensors
            if any(part in t.name for part in parts) and "conv1d" not in t.name and "conv.conv" not in t.name
        ]
        matrices = sum(n for n in moved if n >= 1024)
        assert matrices <= whole.bytes.attention <= matrices + 1024 * len(moved)
        states = (9 + N_GUESSES) * m.info.n_state_bytes
        n_attends = m.info.n_layer if name == "falcon-h1" else sum(kind == "a" for kind in spec.layers)
        kv = n_attends * 2 * 4 * N_CTX * spec.n_head_kv * spec.d_head
        assert states + kv <= whole.bytes.kv <= states + kv + m.info.n_layer * 13 * 256
        plan = engine.native_plan(
            m,
            replace(settings, budget_bytes=whole.bytes.total),
            rates,
            on_device=[True] * m.info.n_layer,
            hot=[layer.hot for layer in whole.layers],
            head_on_device=True,
        )
        with opened(m, plan, 64, n_pool=N_CTX, n_guesses=N_GUESSES) as s:
            s.feed(TOKENS)
            assert s.info.n_device_bytes <= whole.bytes.total
            assert s.info.n_kv_bytes == 0


def test_adapters_of_gated_heads(tmp_path: Path) -> None:
    """q's rows are a device's in two matrices, and so are an adapter's."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["qwen35"])
    rng = np.random.default_rng(3)
    with Model(path) as m:
        shapes = {t.name: t.shape for t in m.file.tensors}
        layer = models.SPECS["qwen35"].layers.index("a")
        for name in (f"blk.{layer}.attn_{one}.weight" for one in ("q", "output")):
            rows, cols = shapes[name]
            a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, cols), (rows, 4)))
            m.add_adapter(name, a, b, scale=0.2)
        sizes: dict[str, Any] = {"n_ctx": N_CTX, "sparsity": "dense", "n_batch": 16, "n_threads": 2}
        with Session(m, **sizes, **F32) as alone:
            expected = fed(alone, TOKENS[:12])
        with opened(m, place(m, "all", 16), 16) as s:
            found = fed(s, TOKENS[:12])
        assert reference.relative_error(found, expected) < 1e-5
        assert reference.relative_error(found, answers(path)[:12]) > 1e-2


def drive_experts_without_gates(folder: Path, device: str) -> None:
    """Experts come to where they are used, some are read in host memory; answers stay what they are."""
    path = models.write_dense(folder / "m.gguf", models.SPECS["nemotron_h_moe"])
    tokens = TOKENS[:2] * 60
    expected = reference.forward(reference.load(path), tokens)
    bus = engine.Rates(cpu_bytes_per_s=1e9, zero_copy_bytes_per_s=1e12, handover_us=0, layer_us=0, ffn_us=0)
    with Model(path) as m:
        for rates in (engine.Rates(), bus):
            with opened(m, place(m, "some", 64, rates=rates), 64, device=device) as s:
                for k, token in enumerate(tokens):
                    s.feed([token])
                    assert reference.relative_error(s.logits(), expected[k]) < 1e-5
                found = s.experts()
            assert sum(layer.n_copies for layer in found) > 0
            assert (sum(layer.n_zero_copy for layer in found) > 0) == (rates is bus)


def test_experts_without_gates(tmp_path: Path) -> None:
    drive_experts_without_gates(tmp_path, "host")
