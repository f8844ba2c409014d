"""Training of one layer's perceptron."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.corpus import Corpus
from powerinfer.models.predictor import train as module
from powerinfer.models.predictor.build import evaluate
from powerinfer.models.predictor.data import LayerData, choose_windows, collect, temporary_folder
from powerinfer.models.predictor.train import Options, Trainer, schedule
from scripts import make_model
from tests.predictor.small import BOS, planted

Array = Any

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayerData]:
    """Layer 0 of a model whose gates are of rank 31 and a threshold for each neuron."""
    folder = tmp_path_factory.mktemp("planted")
    path = planted(folder / "model.gguf")
    n_vocab = make_model.SHAPES["tiny-llama"].n_vocab
    tokens = np.random.default_rng(1).integers(3, n_vocab, 6000, dtype=np.int32)
    windows = choose_windows(Corpus(tokens=tokens, bos=BOS), n_ctx=128, n_train=4800, n_held_out=1000)
    with Model(path) as model, temporary_folder(folder) as temporary:
        yield collect(model, windows, [0], Path(temporary))[0]


def test_the_gradient_is_that_of_the_loss(data: LayerData) -> None:
    trainer = Trainer(data, Options(n_threads=1))
    random = np.random.default_rng(2)
    fc1 = torch.from_numpy(random.standard_normal((16, 256), dtype=np.float32) / 16).requires_grad_()
    fc2 = torch.from_numpy(random.standard_normal((1024, 16), dtype=np.float32)).requires_grad_()
    x, mass = trainer._batch(np.arange(100))
    trainer._loss(fc1, fc2, x, mass).backward()
    found = trainer._gradients(fc1.detach(), fc2.detach(), x, mass)
    for gradient, parameter in zip(found, (fc1, fc2), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)


def test_the_loss_weighs_rare_and_heavy_neurons_more(data: LayerData) -> None:
    """Both classes count alike in sum, and a neuron's weight grows with what it adds."""
    trainer = Trainer(data, Options(n_threads=1))
    _, mass = trainer._batch(np.arange(data.n_train))
    active, weight = (tensor.numpy() for tensor in trainer._targets(mass))
    assert (weight[active == 0] == 1).all()
    assert weight[active == 1].sum() == pytest.approx((active == 0).sum(), rel=0.02)
    heavy = np.argmax(mass.numpy(), axis=1)
    assert (weight[np.arange(len(weight)), heavy] >= weight.max(axis=1)).all()


def test_a_planted_predictor_is_found(data: LayerData) -> None:
    net = Trainer(data, Options(n_threads=1, steps=500, batch=256)).train(96)
    curve = evaluate(net, data, "F16")
    point = curve.at(curve.threshold(0.999))
    assert point.active == pytest.approx(0.1, abs=0.04)
    assert point.recall > 0.95 and point.precision > 0.9
    assert curve.at(curve.threshold(0.99)).accuracy > 0.97


def test_the_same_seed_gives_the_same_bits(data: LayerData) -> None:
    options = Options(n_threads=1, steps=12, batch=64)
    trainer = Trainer(data, options)
    one = trainer.train(32)
    trainer.train(64)  # whatever was trained before
    two, other = trainer.train(32), Trainer(data, Options(n_threads=1, steps=12, batch=64, seed=2)).train(32)
    np.testing.assert_array_equal(one.fc1, two.fc1)
    np.testing.assert_array_equal(one.fc2, two.fc2)
    assert not np.array_equal(one.fc1, other.fc1)


def test_the_best_state_is_kept_when_more_steps_do_harm(
    data: LayerData, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(data, Options(n_threads=1, steps=60, batch=64))
    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0, 0.5])

    def loss(*_: object) -> float:
        return next(losses)

    monkeypatch.setattr(module, "N_CHECKS", 12)
    monkeypatch.setattr(module, "CHECK_ROWS", 16)
    monkeypatch.setattr(trainer, "_loss", loss)
    net = trainer.train(32)
    assert net.loss == 1.0 and net.steps == 10  # the second check; three without a better one ended it
    assert next(losses) == 0.5


def test_a_training_that_explodes_is_an_error(data: LayerData, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(data, Options(n_threads=1, steps=2, batch=64))
    monkeypatch.setattr(trainer, "_loss", lambda *_: float("nan"))
    with pytest.raises(FormatError, match="layer 0 does not train"):
        trainer.train(32)


def test_the_size_of_inputs_does_not_matter(data: LayerData) -> None:
    """A model whose residual is a thousand times larger has the same decisions, and factors of float16."""

    class Larger:
        layer, n, n_train, rms = data.layer, data.n, data.n_train, data.rms * np.float32(1024)
        halves, blocks, mass, inputs = data.halves, data.blocks, data.mass, data.inputs

    options = Options(n_threads=1, steps=20, batch=64)
    one, other = Trainer(data, options).train(32), Trainer(Larger(), options).train(32)  # type: ignore[arg-type]
    rows = slice(0, 50)
    np.testing.assert_allclose(
        one.scores(data.inputs(rows)),
        other.scores(data.inputs(rows) * np.float32(1024)),
        rtol=1e-3,
        atol=1e-4,
    )
    assert np.abs(other.fc1.astype(np.float16)).max() > 1e-3


def test_the_rate_rises_and_falls() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[0] < 0.2 and max(rates) == 1.0 and rates[-1] < 0.01
    peak = rates.index(1.0)
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak + 1 :]) < 0).all()
    assert schedule(0, 1) == 1.0


def test_missing_torch_and_missing_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="no device 'toaster'"):
        module.choose_device(torch, "toaster")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="--device cpu"):
            module.choose_device(torch, "cuda")
        assert module.choose_device(torch, "auto").type == "cpu"
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"powerinfer\[train\]"):
        module.import_torch()
