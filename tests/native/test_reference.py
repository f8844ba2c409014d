"""The reference itself, held to what transformers computed, so that the engine is held to something true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import models, reference

DENSE = sorted(models.SPECS)
SPARSE = sorted(name for name, spec in models.SPECS.items() if spec.predictor)
# transformers works in float32, whose rounding leaves about 1e-6; a wrong formula leaves 1e-2 or more.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", DENSE)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    model = reference.load(golden.write(tmp_path))
    # One pass over all tokens answers for every step: each must be the best choice after those before it.
    rows = reference.forward(model, np.concatenate([golden.prompt, golden.greedy]))
    n_prompt = len(golden.prompt)
    assert reference.relative_error(rows[:n_prompt], golden.logits) < TOLERANCE
    rows = rows[n_prompt - 1 : -1]
    assert rows.argmax(axis=-1).tolist() == golden.greedy.tolist()
    best_two = np.sort(rows, axis=-1)[:, -2:]
    gap = (best_two[:, 1] - best_two[:, 0]) / np.sqrt(np.mean(rows**2, axis=-1))
    assert gap.min() > 0.02  # what lets an engine with F16 rounding be asked for the same tokens


@pytest.mark.parametrize("name", SPARSE)
def test_a_predictor_that_lets_all_pass_changes_nothing(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    predictor = models.draw_predictor(golden.spec)
    model = reference.load(models.write_sparse(tmp_path / "m.gguf", golden.spec, predictor, -1e30))
    logits = reference.forward(model, golden.prompt, predicted=True)
    assert reference.relative_error(logits, golden.logits) < TOLERANCE


@pytest.mark.parametrize("kind", ["predicted", "decode"])
@pytest.mark.parametrize("name", SPARSE)
def test_predicted_goldens(name: str, kind: str, tmp_path: Path) -> None:
    golden = models.golden(name, kind)
    model = reference.load(golden.write(tmp_path))
    assert model.sparse
    trace = reference.Trace()
    tokens = np.concatenate([golden.prompt, golden.greedy])
    logits = reference.forward(model, tokens, predicted=True, n_dense=golden.n_dense, trace=trace)
    rows = logits[golden.rows]
    assert reference.relative_error(rows, golden.logits) < 1e-6  # float32 on disk is all that was lost
    chosen = logits[len(golden.prompt) - 1 : -1].argmax(axis=-1)
    assert chosen.tolist() == golden.greedy.tolist()

    # The predictor must matter, and no score may be so near the threshold that rounding decides.
    dense = reference.forward(model, tokens)
    assert reference.relative_error(rows, dense[golden.rows]) > 0.1
    for layer in trace.layers:
        assert layer.scores is not None
        distance = layer.scores[golden.n_dense :] - golden.threshold
        assert np.abs(distance).min() > 0.015 * np.sqrt(np.mean(distance**2))
        share = layer.predicted[golden.n_dense :].mean()
        assert 0.1 < share < 0.8
        assert layer.predicted[: golden.n_dense].all()
        assert not layer.active[~layer.predicted].any()


@pytest.mark.parametrize("name", ["llama-relu", "bamboo"])
def test_an_exact_predictor_changes_nothing(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    predictor = models.exact_predictor(golden.spec, models.draw(golden.spec))
    model = reference.load(models.write_sparse(tmp_path / "m.gguf", golden.spec, predictor))
    trace = reference.Trace()
    logits = reference.forward(model, golden.prompt, predicted=True, trace=trace)
    assert reference.relative_error(logits, golden.logits) < TOLERANCE
    assert 0.3 < np.mean([layer.predicted.mean() for layer in trace.layers]) < 0.7


def test_the_predictor_sees_the_residual_before_the_norm(tmp_path: Path) -> None:
    """Scaling the norm before the FFN changes what the FFN sees, never what the predictor sees."""
    golden = models.golden("llama-relu", "predicted")
    model = reference.load(golden.write(tmp_path))
    before, after = reference.Trace(), reference.Trace()
    reference.forward(model, golden.prompt, predicted=True, trace=before)
    model.tensors["blk.0.ffn_norm.weight"] *= 3.0
    reference.forward(model, golden.prompt, predicted=True, trace=after)
    np.testing.assert_array_equal(before.layers[0].scores, after.layers[0].scores)


def test_activation_is_what_the_file_says(tmp_path: Path) -> None:
    """A dense llama file is SiLU unless it says relu; a sparse one is ReLU; bamboo and opt need no key."""
    for name, without_key in (
        ("llama-relu", "silu"),
        ("bamboo", "drelu"),
        ("opt", "relu"),
        ("falcon-7b", "gelu"),
    ):
        spec = models.SPECS[name]
        model = reference.load(models.write_dense(tmp_path / f"{name}.gguf", spec))
        assert reference.default_activation(model) == spec.act
        del model.meta["powerinfer.hidden_act"]
        assert reference.default_activation(model) == without_key
        sparse = models.write_sparse(tmp_path / f"{name}-s.gguf", spec, models.draw_predictor(spec))
        assert reference.default_activation(reference.load(sparse)) == spec.act


def test_fatrelu_is_relu_above_its_threshold() -> None:
    x = np.array([-1.0, 0.0, 0.01, 0.02, 3.0])
    assert reference.relu(x, 0.01).tolist() == [0.0, 0.0, 0.0, 0.02, 3.0]
    assert reference.relu(x).tolist() == [0.0, 0.0, 0.01, 0.02, 3.0]


def test_interleaving_undoes_itself() -> None:
    """Rows of pair (i, i + d/2) must become neighbours, head by head."""
    rows = np.arange(16)[:, None] * np.ones((1, 3))
    assert models.interleaved(rows, 2)[:, 0].tolist() == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
        8,
        12,
        9,
        13,
        10,
        14,
        11,
        15,
    ]
