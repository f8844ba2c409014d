"""Small model files for the tests of the Python layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer import Llama
from tests import models

OpenLlama = Callable[..., Llama]


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
