"""Predictors by singular values against numpy's own decomposition and the gates themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model
from powerinfer.models.predictor import ffn
from powerinfer.models.predictor.ffn import First, down_norms, read_first
from powerinfer.models.predictor.svd import Inputs, decompose
from tests import models, reference

Array = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def first_of(folder: Path, name: str) -> tuple[First, reference.Model, Path]:
    path = folder / f"{name}.gguf"
    if not path.exists():
        models.write_dense(path, models.SPECS[name])
    with ModelFile(path) as file, Model(file, load=False) as model:
        return read_first(file, model.info, 1), reference.load(path), path


def inputs_like(spec: models.Spec, n: int) -> Array:
    """A residual stream: correlated channels, a mean, sizes that differ."""
    random = np.random.default_rng(5)
    mix = random.standard_normal((spec.n_embd, spec.n_embd)) * np.geomspace(1, 0.05, spec.n_embd)
    x = random.standard_normal((n, spec.n_embd)) @ mix.T + 0.3
    return (x * random.uniform(0.3, 3, (n, 1))).astype(np.float32)


def deciding(model: reference.Model, x: Array) -> Array:
    """What decides whether neurons of layer 1 are active, by the reference's norms."""
    x = x.astype(np.float64)
    if model.arch == "falcon":
        h = reference.layer_norm(x, model["blk.1.attn_norm.weight"], model["blk.1.attn_norm.bias"], 1e-5)
        return h @ model["blk.1.ffn_up.weight"].T
    if model.arch == "opt":
        h = reference.layer_norm(x, model["blk.1.ffn_norm.weight"], model["blk.1.ffn_norm.bias"], 1e-5)
        return h @ model["blk.1.ffn_up.weight"].T + model["blk.1.ffn_up.bias"]
    if model.arch == "nemotron":
        h = reference.layer_norm(x, model["blk.1.ffn_norm.weight"], model["blk.1.ffn_norm.bias"], 1e-5)
        return h @ model["blk.1.ffn_up.weight"].T
    if model.arch == "arcee":
        return reference.rms_norm(x, model["blk.1.ffn_norm.weight"], 1e-5) @ model["blk.1.ffn_up.weight"].T
    return reference.rms_norm(x, model["blk.1.ffn_norm.weight"], 1e-5) @ model["blk.1.ffn_gate.weight"].T


@pytest.mark.parametrize(
    "name", ["llama-relu", "bamboo", "falcon-7b", "falcon-40b", "opt", "arcee", "nemotron"]
)
def test_what_decides_is_a_product_with_the_input(name: str, folder: Path) -> None:
    """Norm weight, norm bias, mean and neuron bias are worked into rows and bias."""
    first, model, _ = first_of(folder, name)
    x = inputs_like(models.SPECS[name], 50)
    found = x @ first.rows.T / first.scale(x)[:, None] + first.bias
    # The norms' epsilon of 1e-5 on mean squares above 0.01 is a relative 5e-4.
    assert reference.relative_error(found, deciding(model, x)) < 1e-3


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("name", ["llama-relu", "bamboo", "llama-relu-gqa"])
def test_full_rank_has_the_sign_of_the_gate(name: str, with_inputs: bool, folder: Path) -> None:
    first, model, _ = first_of(folder, name)
    spec = models.SPECS[name]
    x = inputs_like(spec, 300)
    net = decompose(first, 2 * spec.n_embd, Inputs([x]) if with_inputs else None)
    gate = deciding(model, x)
    sure = np.abs(gate) > 1e-4 * np.sqrt(np.mean(gate**2))  # float32 sums of 200 products
    assert sure.mean() > 0.99
    assert ((net.scores(x) >= 0) == (gate > 0))[sure].all()


def test_lower_ranks_are_the_truncated_decomposition(folder: Path) -> None:
    first, _, _ = first_of(folder, "llama-relu-gqa")
    u, s, v = np.linalg.svd(first.rows.astype(np.float64), full_matrices=False)
    x = inputs_like(models.SPECS["llama-relu-gqa"], 40)
    for rank in (2, 32, 64, 190):
        n = rank // 2
        net = decompose(first, rank)
        assert net.fc1.shape == (rank, 96) and net.fc2.shape == (320, rank)
        wanted = x @ v[:n].T @ (u[:, :n] * s[:n]).T
        assert reference.relative_error(net.scores(x), wanted) < 1e-5


def test_sample_inputs_make_the_error_the_least_that_a_rank_allows(folder: Path) -> None:
    """The mean squared error over the samples, each in units of its own rms, is the sum of the squares of
    what was cut off of G C^(1/2); no approximation of that rank has a smaller one."""
    first, _, _ = first_of(folder, "llama-relu-gqa")
    x = inputs_like(models.SPECS["llama-relu-gqa"], 2000)
    unit = (x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True))).astype(np.float64)
    inputs = Inputs(np.array_split(x, 7))
    left = np.linalg.svd(first.rows @ np.linalg.cholesky(unit.T @ unit / len(unit)), compute_uv=False)
    true = unit @ first.rows.T
    for rank in (16, 48):
        net = decompose(first, rank, inputs)
        found = net.scores(unit.astype(np.float32)) * inputs.scale
        error = np.mean(np.sum((found - true) ** 2, axis=1))
        assert error == pytest.approx(np.sum(left[rank // 2 :] ** 2), rel=1e-3)
        plain = decompose(first, rank).scores(unit.astype(np.float32))
        assert error < 0.7 * np.mean(np.sum((plain - true) ** 2, axis=1))


@pytest.mark.parametrize("name", ["opt", "falcon-40b"])
def test_biases_are_followed_where_there_are_sample_inputs(name: str, folder: Path) -> None:
    """Neurons have thresholds of their own; without them the best single threshold misjudges many more."""
    first, model, _ = first_of(folder, name)
    spec = models.SPECS[name]
    x, fresh = inputs_like(spec, 4000)[:3000], inputs_like(spec, 4000)[3000:]
    active = deciding(model, fresh) > 0
    found = decompose(first, 2 * spec.n_embd, Inputs([x])).scores(fresh) > 0
    plain = decompose(first, 2 * spec.n_embd).scores(fresh) > 0
    assert (found == active).mean() > 0.98
    if name == "opt":  # its up bias has a mean of -0.3
        assert (plain == active).mean() < 0.95


def test_a_shifted_relu_moves_the_point(folder: Path) -> None:
    first, model, _ = first_of(folder, "llama-relu")
    shifted = First(rows=first.rows, bias=first.bias - np.float32(0.8), centred=False)
    x = inputs_like(models.SPECS["llama-relu"], 4000)
    net = decompose(shifted, 128, Inputs([x[:3000]]))
    active = deciding(model, x[3000:]) > 0.8
    assert 0.05 < active.mean() < 0.4
    assert ((net.scores(x[3000:]) > 0) == active).mean() > 0.97


@pytest.mark.parametrize("name", ["llama-relu", "falcon-7b"])
def test_down_norms_are_the_same_in_both_layouts(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in pieces of a few rows."""
    monkeypatch.setattr(ffn, "_PIECE", 1000)
    spec = models.SPECS[name]
    _, model, path = first_of(folder, name)
    sparse = models.write_sparse(folder / f"{name}-sparse.gguf", spec, models.draw_predictor(spec))
    wanted = np.sqrt(np.sum(model["blk.0.ffn_down.weight"] ** 2, axis=0))
    for one in (path, sparse):
        with ModelFile(one) as file, Model(file, load=False) as opened:
            np.testing.assert_allclose(down_norms(file, opened.info, 0), wanted, rtol=1e-6)
