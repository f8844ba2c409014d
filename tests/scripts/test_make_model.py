"""Random models of published shapes: they load, run in every mode, and are as sparse as was asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from powerinfer.session import Model, Session, Sparsity
from scripts import make_model

ROOT = Path(__file__).resolve().parents[2]
MODES: tuple[Sparsity, ...] = ("dense", "exact", "predicted")
ACTIVE = 0.1


def decode(model: Model, mode: Sparsity, n: int) -> tuple[list[int], dict[str, float]]:
    """n greedy tokens, and the shares of neurons that were predicted, computed and active."""
    tokens, counts = [], dict.fromkeys(("n_predicted", "n_computed", "n_active"), 0)
    pairs = 0
    with Session(model, n_ctx=128, n_threads=1, sparsity=mode) as session:
        session.feed([1, 5, 9, 300])
        for _ in range(n):
            tokens.append(int(session.logits().argmax()))
            session.feed(tokens[-1:])
            for step in session.last_step:
                pairs += step.n_sparse * model.info.n_ff
                for name in counts:
                    counts[name] += getattr(step, name)
    return tokens, {name: count / pairs for name, count in counts.items()}


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-bamboo", "tiny-falcon", "tiny-opt"])
def test_a_sparse_model_runs_in_every_mode(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_model.write(
        path,
        make_model.SHAPES[shape],
        shape,
        gguf.GGMLQuantizationType.F32,
        rank=129,
        active=ACTIVE,
        sparse=True,
        activation="",
        seed=1,
    )
    assert path.read_bytes()[:4] == b"PWRI"
    with Model(path) as model:
        assert model.info.architecture == shape.removeprefix("tiny-")
        assert model.info.has_predictor and model.info.can_skip_down
        results = {mode: decode(model, mode, 24) for mode in MODES}
    dense_tokens, dense = results["dense"]
    assert make_model.END not in dense_tokens
    # 2 layers x 24 tokens x 1024 neurons; tokens differ much more than so many coin flips would.
    assert ACTIVE * 0.6 < dense["n_active"] < ACTIVE * 1.6
    for mode in ("exact", "predicted"):
        tokens, shares = results[mode]
        assert tokens == dense_tokens, mode
        # Rounding may turn single neurons whose gate is next to zero.
        assert shares["n_active"] == pytest.approx(dense["n_active"], rel=0.01), mode
    assert results["predicted"][1]["n_predicted"] == pytest.approx(dense["n_active"], rel=0.01)
    assert results["exact"][1]["n_predicted"] == 1
    assert dense["n_computed"] == 1
    for mode in ("exact", "predicted"):
        assert results[mode][1]["n_computed"] == pytest.approx(dense["n_active"], rel=0.01)


def test_the_asked_share_is_what_thresholds_mean() -> None:
    rng = np.random.default_rng(3)
    for active in (0.02, 0.1, 0.4):
        t = make_model.thresholds(rng, 4096, active)
        sample = rng.standard_normal((256, 1), dtype=np.float32)
        assert (sample > t).mean() == pytest.approx(active, rel=0.25)


def test_the_program_writes_a_dense_file(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    program = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "tiny-llama", "--layers", "1"]
    subprocess.run([*program, "--type", "Q8_0", "--activation", "relu", "-o", str(path)], check=True)
    with Model(path) as model:
        info = model.info
        assert (info.n_layer, info.activation, info.has_predictor) == (1, "relu", False)
        assert not info.can_skip_down  # quantised, and not transposed
        assert decode(model, "exact", 8)[0] == decode(model, "dense", 8)[0]
    assert list(tmp_path.iterdir()) == [path]
