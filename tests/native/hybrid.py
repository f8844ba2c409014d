"""What tests of hybrid sessions share: models, plans that split them in every way, and a drive through all
that a session can do. Devices are stand-ins in ordinary memory, which obey the same plan, budget and
hand-over as a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, UnsupportedError
from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import models, rounding

AMX = rounding.BF16
N_CTX, N_SEQ, N_POOL = 128, 4, 256
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
    "arcee",
    "nemotron",
    "qwen2",
    "qwen3",
    "olmo3",
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma4-large",
    "deepseek2-dense",
]
SPLITS = ["all", "none", "one", "but", "some", "mixed", "cpu", "near", "weak", "only"]
DEEP = replace(models.SPECS["llama-relu-gqa"], name="deep", n_layer=6, predictor=(32, 48, 40, 32, 48, 40))

Arrays = list[np.ndarray[Any, Any]]
IDS = [int(t) for t in np.random.default_rng(64).integers(3, 290, 50)]


def exactly(test: Callable[..., Any]) -> Any:
    """Of tests in which both sides must name the same neurons: with AMX a rounded score may cross its
    threshold on one side only, so `without_amx` runs the file once more."""
    return None if AMX else test


def without_amx(file: str) -> None:
    run_again(file, POWERINFER_ISA="avx512")


def run_again(file: str, **environment: str) -> None:
    """Runs a file's tests in a process of its own, where what is chosen once can be another."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write(folder: Path, spec: models.Spec | str, form: str, kind: Kind | None = None) -> Path:
    spec = models.SPECS[spec] if isinstance(spec, str) else spec
    path = folder / f"{spec.name}-{form}.gguf"
    if form == "dense":
        return models.write_dense(path, spec, kind=kind)
    return models.write_sparse(path, spec, models.draw_predictor(spec))


ADAPTED = ("attn_qkv", "attn_q", "attn_v", "attn_output")
ADAPTED_FFN = ("ffn_gate", "ffn_up", "ffn_down")
ADAPTED_OWN = ("token_embd", "output")


def adapt(model: Model, rank: int = 5, names: Sequence[str] = ADAPTED) -> dict[str, np.ndarray[Any, Any]]:
    """Gives the model adapters of these matrices, of the first and the last layer, that change its answers by
    more than rounding does; returns what they add to each."""
    random = np.random.default_rng(8)
    added = {}
    for layer in (0, model.info.n_layer - 1):
        for name in names:
            full = f"{name}.weight" if name in ADAPTED_OWN else f"blk.{layer}.{name}.weight"
            shape = model.matrix_shape(full)
            if shape is None or full in added:
                continue
            a = random.normal(0, shape[1] ** -0.5, (rank, shape[1])).astype(np.float32)
            b = random.normal(0, 0.3, (shape[0], rank)).astype(np.float32)
            model.add_adapter(full, a, b, scale=0.5)
            added[full] = 0.5 * b.astype(np.float64) @ a.astype(np.float64)
    return added


def settings(sparsity: str, n_batch: int, budgets: Sequence[int] = (1 << 34,)) -> engine.Settings:
    return engine.Settings(
        budget_bytes=budgets[0],
        more_budgets=tuple(budgets[1:]),
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


def reads_in_place(model: Model) -> bool:
    """Whether a plan may let a device read neurons in host memory: rows that are there as in the file."""
    up = {t.name: t.type for t in model.file.tensors}["blk.0.ffn_up.weight"]
    return model.info.can_skip_down and up in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def place(
    model: Model,
    split: str,
    sparsity: str,
    n_batch: int = 64,
    *,
    devices: Sequence[int] | None = None,
    head: int = 0,
    n_devices: int = 1,
    helps: bool = False,
) -> Any:
    """all: everything on the device. none: attention only. one, but: one neuron, all but one. some: a part.
    mixed: some layers are the CPU's, and so is the head. cpu: only the head is on the device. near: a part on
    the device, a part read in place by it, the rest the CPU's; weak: nothing the CPU's; only: nothing on the
    device. devices, head: which of n_devices a layer, and the head, lies on; -1: the CPU. helps: the first
    helps the last with a token's head, of however few bytes."""
    n_layer, n_ff, unit = model.info.n_layer, model.info.n_ff, block(model)
    rng = np.random.default_rng(len(split))
    on, hot, pcie = [split != "cpu"] * n_layer, [], []
    for layer in range(n_layer):
        if devices is not None:
            on[layer] = devices[layer] >= 0
        elif split == "mixed":
            on[layer] = layer % 2 == 1
        ids = {
            "all": np.arange(n_ff),
            "one": np.arange(unit) + 2 * unit,
            "but": np.delete(np.arange(n_ff), np.arange(unit) + unit),
            "some": np.flatnonzero(np.repeat(rng.random(n_ff // unit) < 0.4, unit)),
            "near": np.flatnonzero(np.repeat(rng.random(n_ff // unit) < 0.3, unit)),
            "weak": np.arange(unit * 2, unit * 5),
            "mixed": np.arange(unit * 3),
        }.get(split, np.array([], np.int64))
        hot.append((ids if on[layer] else ids[:0]).astype(np.int32))
        share = {"near": 0.6, "weak": 1.0, "only": 0.3}.get(split, 0.0)
        far = rng.random(n_ff) < (share if on[layer] and reads_in_place(model) else 0)
        far[hot[layer]] = False
        pcie.append(np.flatnonzero(far).astype(np.int32))
    return engine.native_plan(
        model,
        settings(sparsity, n_batch, [1 << 34] * n_devices),
        engine.Rates(zero_copy_bytes_per_s=1e10, **({"handover_us": 0.0} if helps else {})),
        on_device=on,
        hot=hot,
        pcie=pcie,
        head_on_device=head >= 0 if devices is not None else split != "mixed",
        devices=None if devices is None else [max(d, 0) for d in devices],
        head_device=max(head, 0),
    )


def options(sparsity: str, n_batch: int = 64, n_threads: int = 2) -> dict[str, Any]:
    return {
        "n_ctx": N_CTX,
        "n_pool": N_POOL,
        "n_seq": N_SEQ,
        "n_batch": n_batch,
        "sparsity": sparsity,
        "n_threads": n_threads,
    }


def drive(s: Session, ids: list[int]) -> Arrays:
    """A prompt, decoding, a shared prefix, several sequences at once, a shift, a state saved and loaded."""
    out: Arrays = []

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


def apart(a: Arrays, b: Arrays) -> float:
    assert len(a) == len(b)
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def beyond_rounding(a: Arrays, b: Arrays, n_layer: int, *, int8: bool = False) -> float:
    """How far two answers are apart, as a share of what rounding allows; by root mean squares.

    Where the set multiplies prompts in bf16, one side rounds both factors to 2^7 steps in a binade.
    Elsewhere both round K and V to F16, 2^10 steps, and sums cut differently may fall on two of them.
    With int8 one side also rounds activations to 8 bits: 127 steps to the largest of 32, which is at most
    sqrt(32) times their root mean square.
    Rounding is off by a step / sqrt(12). A layer has four products, the head one;
    errors add up as their root."""
    step = 2.0 ** (-7 if AMX else -10) * math.sqrt(2)
    product = math.hypot(step, math.sqrt(32) / 127 if int8 else 0) / math.sqrt(12)
    allowed = product * math.sqrt(4 * n_layer + 1)
    want, got = (np.concatenate([x.ravel() for x in arrays]) for arrays in (a, b))
    return float(np.linalg.norm(want - got) / np.linalg.norm(want)) / allowed


def both(
    model: Model, split: str, sparsity: str, n_batch: int, n_threads: int, *, int8: bool = False
) -> float:
    """How far the answers with and without a device are apart, as a share of what rounding allows."""
    o = options(sparsity, n_batch, n_threads)
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, sparsity, n_batch), device="host", **o) as hybrid,
    ):
        return beyond_rounding(drive(alone, IDS), drive(hybrid, IDS), model.info.n_layer, int8=int8)


def carried_out(model: Model, asked: engine.Settings, rates: engine.Rates) -> tuple[Any, Any]:
    """What the engine computes for a budget, and the native plan that follows it."""
    result = engine.compute(model, asked, rates)
    plan = engine.native_plan(
        model,
        asked,
        rates,
        on_device=[layer.on_device for layer in result.layers],
        hot=[layer.hot for layer in result.layers],
        head_on_device=result.head_on_device,
        devices=[max(layer.device, 0) for layer in result.layers],
        head_device=max(result.head_device, 0),
    )
    return result, plan


def has_second_gpu() -> bool:
    try:
        machine.device_facts("cuda", 1)
    except ArgumentError:
        return False
    return True
