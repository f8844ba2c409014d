"""Models whose recurrent layers the CPU begins and a device goes on with, against the float64 reference:
whatever neurons and experts are where."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from powerinfer.models.plan import engine
from tests import models, reference, rounding

NAMES = ["lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "falcon-h1"]
REFUSED = ["granitehybrid", "nemotron_h", "nemotron_h_moe"]
SPLITS = ["all", "some", "none", "odd", "first", "cpu"]
N_CTX = 128
F32 = {"type_k": "f32", "type_v": "f32"}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 290, 61)]
GENERATED, PROMPT = TokenKind.GENERATED, TokenKind.PROMPT


def place(model: Model, split: str, n_batch: int, devices: Any = None) -> Any:
    """all, some, none: of neurons or experts, of all layers. odd: some of every other layer; first: all of
    the first layer; cpu: nothing but the head. devices: of each layer, and of the head."""
    n = model.info.n_layer
    on = [{"odd": i % 2 == 1, "first": i == 0, "cpu": False}.get(split, True) for i in range(n)]
    hot = []
    for i, here in enumerate(on):
        n_placed = model.info.n_placed if i >= model.info.n_layer_dense else 0
        ids = {"all": range(n_placed), "none": (), "first": range(n_placed)}.get(split, range(0, n_placed, 3))
        hot.append(np.array(ids if here else (), np.int32))
    asked = engine.Settings(
        budget_bytes=1 << 34,
        more_budgets=(1 << 34,) if devices else (),
        n_ctx=N_CTX,
        n_pool=2 * N_CTX,
        n_seq=3,
        n_batch=n_batch,
        sparsity="dense",
        overhead_bytes=0,
        group=1,
        **F32,
    )
    return engine.native_plan(
        model,
        asked,
        engine.Rates(),
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


def drive(path: Path, m: Model, plan: Any, n_batch: int, n_threads: int, split: str) -> None:
    """Tokens one by one, a few at a time, a prompt; each sequence gone on with as if alone."""
    expected = answers(path)
    close = 4e-2 if rounding.BF16 else 2e-3
    with opened(m, plan, n_batch, n_threads) as s:
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
            assert s.reachable(60, seq=1) == 56
            s.copy(2, 1, 56)
            s.feed(TOKENS[56:], seq=2, want_logits=[PROMPT] * 4 + [GENERATED])
            assert reference.relative_error(s.logits(), expected[-1]) < close, split
        saved = s.save()
        s.feed(TOKENS[30:34], want_logits=[GENERATED] * 4)
        s.load(saved, seq=2)
        assert reference.relative_error(fed(s, TOKENS[30:40], 2), expected[30:40]) < 1e-5, split


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as m:
        for i, split in enumerate(SPLITS):
            n_batch = 64 if i % 2 == 0 else 16
            drive(path, m, place(m, split, n_batch), n_batch, 1 + i % 3, split)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["lfm2moe", "qwen35"])
def test_two_devices(name: str, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    n = models.SPECS[name].n_layer
    with Model(path) as m:
        for devices in ([0] * (n // 2) + [1] * (n - n // 2) + [1], [0] * n + [1]):
            drive(path, m, place(m, "some", 64, devices), 64, 2, str(devices))


@pytest.mark.parametrize("name", ["qwen35moe", "falcon-h1"])
def test_a_plan_of_its_own(name: str, tmp_path: Path) -> None:
    """What a budget holds: recurrent blocks' weights and states are not among it."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as m:
        rates = engine.Rates(cpu_bytes_per_s=1e7, handover_us=0, layer_us=0, ffn_us=0)
        settings = engine.Settings(budget_bytes=1 << 30, n_ctx=N_CTX, n_seq=3, n_batch=64, overhead_bytes=0)
        whole = engine.compute(m, settings, rates)
        assert all(layer.on_device for layer in whole.layers)
        assert whole.bytes.kv == 0  # attention is gated, or beside a recurrent block
        others = (".ffn_gate_inp", "_shexp")  # of a mixture's layer; of another nothing but neurons
        most = sum(t.n_bytes + 256 for t in m.file.tensors if any(part in t.name for part in others))
        assert whole.bytes.attention <= most


@pytest.mark.parametrize("name", REFUSED)
def test_what_devices_do_not_know_is_refused(name: str, tmp_path: Path) -> None:
    with (
        Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as m,
        pytest.raises(UnsupportedError, match="the CPU computes such a model"),
    ):
        engine.compute(m, engine.Settings(budget_bytes=1 << 30), engine.Rates())
