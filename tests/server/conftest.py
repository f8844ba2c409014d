"""Small models, and a server on a free port of the loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from powerinfer import AsyncLlama
from tests import models


@pytest.fixture(scope="session")
def relu_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ReLU Llama without predictors, 320 tokens (SentencePiece), trained for 256 positions."""
    return models.write_dense(tmp_path_factory.mktemp("models") / "relu.gguf", models.SPECS["llama-relu"])


@pytest.fixture(scope="session")
def sparse_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with predictors."""
    spec = models.SPECS["llama-relu"]
    path = tmp_path_factory.mktemp("models") / "sparse.gguf"
    return models.write_sparse(path, spec, models.draw_predictor(spec), 0.0)


@contextmanager
def serving(llm: AsyncLlama, *, ends_model: bool = True, **settings: Any) -> Iterator[str]:
    """The address of a server that runs in a thread.

    ends_model: tell the model that the end is near, as the server does; else others may go on with it.
    """
    from powerinfer.server import Settings
    from powerinfer.server.run import address, open_server

    options = Settings(**{"port": 0, "names": ("demo", "other"), "shutdown_s": 5.0, **settings})
    server, sock = open_server(llm, options)
    if not ends_model:
        server.begin_close = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield address(options, sock)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def demo() -> Iterator[AsyncLlama]:
    """The demo model, four conversations at once."""
    llm = AsyncLlama.demo(n_ctx=512, n_parallel=4, max_waiting=8, n_threads=1, verbose=False)
    yield llm
    llm.close()
