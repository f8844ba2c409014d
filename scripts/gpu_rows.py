"""The rows that bench_gpu.py and gpu_timeline.py measure: a model, its budget and how it is used."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from powerinfer._engine.session import Sparsity


@dataclass(frozen=True)
class Row:
    what: str
    shape: str
    type: str
    budget: float
    """GiB."""
    sparsity: Sparsity
    layers: int = 0
    """0: all."""
    active: float = 0.1
    prompts: tuple[int, ...] = (64, 512)
    goal: float = 0
    """Tokens per second, decoding; 0: none was set."""
    by_neuron: bool = False
    """A mixture's down."""
    skew: float = -1
    """Of a mixture's routers (make_mixture.py); below 0: the model is none."""
    zero_copy: bool = True
    look_ahead: bool = True
    rho: float = 0
    statistics: str = "planted"
    """Of experts, in the file."""
    n_warm: int = 8
    """Tokens that are decoded before those that are timed."""
    n_seq: int = 1
    """Sequences that decode side by side; rates are of all together."""
    depth: int = 64
    """Tokens of each in front of those that are decoded."""
    gpus: int = 1
    """That share the layers; budget: of each."""
    replicas: int = 1
    """Sessions, on a GPU each; n_seq: of each."""
    n_batch: int = 0
    """Tokens of a prompt at a time; 0: as many as `Llama` takes where nothing is said."""
    plain: bool = False
    """A file as llama.cpp has it: without predictors, down not by neuron."""
    counted: float = 0
    """The mean share of active neurons by the statistics in the file; 0: the truth. Otherwise it is also said
    what the first tokens make of the plan."""
    widths: bool = False
    """Also every number of sequences up to n_seq: whether one more ever makes fewer tokens/s."""


GOAL_CPU = 100
"""GB/s of the CPU that goals are for."""

QWEN3 = Row(
    "Qwen3-30B-A3B Q4_0, skew 0.5",
    "qwen3-30b-a3b",
    "Q4_0",
    8,
    "auto",
    prompts=(512, 2048),
    goal=150,
    skew=0.5,
)
SMALLTHINKER = replace(
    QWEN3,
    what="SmallThinker-21B-A3B Q4_0, skew 0.5, 40 % active",
    shape="smallthinker-21b",
    active=0.4,
    goal=200,
)
BAMBOO = Row(
    "Bamboo-7B F16, 10 % active", "bamboo-7b", "F16", 8, "predicted", prompts=(64, 512, 2048), goal=260
)
DENSE = Row("Llama-2-7B F16, all resident, dense", "llama-2-7b", "F16", 40, "dense", goal=250)
SPARSE = Row("Llama-2-7B F16, all resident, 10 % active", "llama-2-7b", "F16", 40, "predicted", goal=430)
Q4_DENSE = Row("Llama-2-7B Q4_0, all resident, dense", "llama-2-7b", "Q4_0", 40, "dense", goal=450)
GPT_OSS = replace(
    QWEN3, what="gpt-oss-20b MXFP4, skew 0.5", shape="gpt-oss-20b", type="MXFP4_MOE", active=0.4, goal=0
)

ROWS = {
    "bamboo-8g": BAMBOO,
    "bamboo-8g-512": replace(
        BAMBOO, what="the same, 512 tokens of a prompt at a time", prompts=(64, 512), n_batch=512
    ),
    "bamboo-8g-2048": replace(
        BAMBOO, what="the same, 2,048 at a time", prompts=(256, 2048), n_batch=2048, goal=0
    ),
    "bamboo-8g-8-sequences": replace(BAMBOO, what="the same, 8 sequences", n_seq=8, goal=0),
    "bamboo-8g-counted-10": replace(
        BAMBOO, what="the same, 18 % active, 10 % by its statistics", active=0.18, counted=0.1, goal=0
    ),
    "falcon-8g": Row(
        "Falcon-40B F16, 20 layers, 5 % active", "falcon-40b", "F16", 8.4, "predicted", 20, 0.05, (64,), 60
    ),
    "llama-70b-24g": Row(
        "Llama-2-70B Q4_0, 18 % active", "llama-2-70b", "Q4_0", 24, "predicted", 0, 0.18, (64,), 50
    ),
    "llama-dense": DENSE,
    "llama-dense-16k": replace(DENSE, what="the same, 16,384 positions", depth=16384, goal=165),
    "llama-sparse": SPARSE,
    "llama-sparse-8-sequences": replace(SPARSE, what="the same, 8 sequences", n_seq=8, goal=0),
    "llama-sparse-two-gpus": replace(SPARSE, what="the same, over two GPUs", budget=10, gpus=2),
    "llama-q4-dense": Q4_DENSE,
    "llama-q4-dense-two-replicas": replace(
        Q4_DENSE, what="the same, 64 sequences on each of two GPUs", n_seq=64, replicas=2, goal=0
    ),
    **{
        f"llama-{name}-{n}-sequences{form}": replace(
            DENSE,
            what=f"Llama-2-7B {type}{', an ordinary file' * bool(form)}, all resident, {n} sequences",
            type=type,
            n_seq=n,
            depth=1,
            goal=goal,
            plain=bool(form),
            widths=n == 64,
        )
        for name, type, form, goals in (
            ("dense", "F16", "", (0, 3200, 6000, 10000)),
            ("q4-dense", "Q4_0", "", (0, 4000, 6000, 9000)),
            ("q4-dense", "Q4_0", "-plain", (0, 4000, 6000, 9000)),
            ("q4-k-dense", "Q4_K_M", "", (0, 4000, 6000, 9000)),
            ("q4-k-dense", "Q4_K_M", "-plain", (0, 4000, 6000, 9000)),
        )
        for n, goal in zip((8, 16, 32, 64), goals, strict=True)
    },
    **{
        f"llama-dense-{n}-sequences-{depth}": replace(
            DENSE,
            what=f"Llama-2-7B F16, {n} sequences of {depth:,} positions",
            n_seq=n,
            depth=depth,
            budget=budget,
            goal=0,
        )
        for n, depth, budget in ((16, 512, 40), (64, 512, 60), (16, 2048, 60), (64, 2048, 120))
    },
    "qwen3-8g": QWEN3,
    "qwen3-8g-skew-0": replace(QWEN3, what="the same, skew 0", skew=0, goal=0),
    "qwen3-8g-skew-1": replace(QWEN3, what="the same, skew 1", skew=1, goal=0),
    "qwen3-8g-rho": replace(QWEN3, what="the same, skew 0.5, rho 0.8", rho=0.8, goal=0),
    "qwen3-8g-none": replace(
        QWEN3, what="the same after 200 tokens, no statistics", statistics="none", n_warm=200
    ),
    "qwen3-8g-wrong": replace(
        QWEN3, what="the same after 200 tokens, wrong statistics", statistics="wrong", n_warm=200
    ),
    "qwen3-8g-8-sequences": replace(QWEN3, what="the same, 8 sequences", n_seq=8, goal=350),
    "qwen3-3g": replace(QWEN3, what="the same, most experts in host memory", budget=3.1, goal=72),
    "qwen3-resident": replace(QWEN3, what="the same, all resident", budget=40, goal=420),
    "qwen3-resident-64-sequences": replace(
        QWEN3, what="the same, 64 sequences", budget=40, n_seq=64, depth=1, goal=0, widths=True
    ),
    "smallthinker-8g": SMALLTHINKER,
    "smallthinker-resident": replace(SMALLTHINKER, what="the same, all resident", budget=40, goal=400),
    "smallthinker-8g-by-neuron": replace(SMALLTHINKER, what="the same, down by neuron", by_neuron=True),
    "smallthinker-resident-by-neuron": replace(
        SMALLTHINKER, what="the same, all resident", by_neuron=True, budget=40, goal=400
    ),
    "gpt-oss-8g": GPT_OSS,
    "gpt-oss-resident": replace(GPT_OSS, what="the same, all resident", budget=40),
    "mixtral-8g": replace(QWEN3, what="Mixtral-8x7B Q4_0, skew 0.5", shape="mixtral-8x7b", goal=0),
}


def make_model(row: Row, folder: Path) -> Path:
    of_router = "" if row.skew < 0 else f"-{row.skew:g}-{row.rho:g}-{row.statistics}"
    form = "-by-neuron" if row.by_neuron else "-plain" if row.plain else ""
    if row.counted:
        form += f"-counted-{row.counted:g}"
    path = folder / f"{row.shape}-{row.layers}-{row.type}-{row.active:g}{of_router}{form}.gguf"
    if path.exists():
        return path
    for old in folder.glob("*-*-*-*.gguf"):
        old.unlink()
    script = Path(__file__).with_name("make_model.py")
    command = [sys.executable, str(script), row.shape, "--type", row.type, "--active", str(row.active)]
    if row.layers:
        command += ["--layers", str(row.layers)]
    if row.counted:
        command += ["--counted", str(row.counted)]
    if row.skew < 0:
        command += ["--format", "gguf" if row.plain else "powerinfer"]
    else:
        command += ["--skew", str(row.skew), "--rho", str(row.rho), "--statistics", row.statistics]
    if row.by_neuron:
        command += ["--format", "powerinfer"]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path
