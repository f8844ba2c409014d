"""Small model files for the tests of the Python layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer import Llama
from tests import models

OpenLlama = Callable[..., Llama]


@pytest.fixture(scope="session")
def relu_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ReLU Llama without predictors, 320 tokens (SentencePiece), trained for 256 positions."""
    return models.write_dense(tmp_path_factory.mktemp("models") / "relu.gguf", models.SPECS["llama-relu"])


@pytest.fixture(scope="session")
def sparse_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with predictors, as PowerInfer writes it."""
    spec = models.SPECS["llama-relu"]
    predictor = models.draw_predictor(spec)
    return models.write_sparse(tmp_path_factory.mktemp("models") / "sparse.gguf", spec, predictor, 0.0)


@pytest.fixture(scope="session")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with a byte-level vocabulary of 320 tokens."""
    return models.write_dense(tmp_path_factory.mktemp("models") / "bpe.gguf", models.SPECS["qwen2"])


@pytest.fixture(scope="session")
def opt_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OPT, whose positions are learned."""
    return models.write_dense(tmp_path_factory.mktemp("models") / "opt.gguf", models.SPECS["opt"])


@pytest.fixture
def llama(relu_path: Path) -> OpenLlama:
    """Opens the ReLU Llama on one thread."""

    def open_llama(path: Path = relu_path, **options: object) -> Llama:
        return Llama(path, **{"n_threads": 1, "verbose": False, "seed": 1, **options})  # type: ignore[arg-type]

    return open_llama
