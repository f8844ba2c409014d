"""Contexts of a model whose layers have windows: what is found again, and what is computed anew."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from powerinfer import Llama
from tests import reference
from tests.native.test_windows import SPEC, write

PROMPT = [int(t) for t in np.arange(5, 205) * 31 % SPEC.n_vocab]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write(tmp_path_factory.mktemp("m") / "m.gguf"))


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with open_model(path) as llm:
        yield llm


def open_model(path: Path, n_batch: int = 64) -> Llama:
    return Llama(path, n_ctx=256, n_batch=n_batch, n_threads=2, context_shift=True, n_keep=4, verbose=False)


def greedy(llm: Llama, prompt: list[int], n: int) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0.0), n))


def is_as_computed(llm: Llama, path: Path) -> None:
    """What follows the ids that are held is what a model says that computes them all."""
    with open_model(path, 256) as other:
        other.eval(llm.input_ids.tolist())
        assert reference.relative_error(llm.scores[-1], other.scores[-1]) < 2e-2


def test_a_window_that_reaches_into_what_stays(llm: Llama, path: Path) -> None:
    """Such a shift is not possible: what stays is computed anew."""
    tokens = greedy(llm, PROMPT, 180)
    assert len(tokens) == 180 and llm.n_tokens <= 256
    held = llm.input_ids.tolist()
    assert held[4:] == (PROMPT + tokens[:-1])[-(len(held) - 4) :]
    is_as_computed(llm, path)
    llm.reset()
    llm.eval(PROMPT)
    llm.eval(PROMPT[:60])
    assert llm.input_ids[0] == PROMPT[0] and 60 < llm.n_tokens < 256
    is_as_computed(llm, path)


def test_prefixes(llm: Llama, path: Path) -> None:
    """One that ends within the window is shared, one in front of what is held is computed again."""
    tokens = greedy(llm, PROMPT, 40)
    assert greedy(llm, PROMPT, 40) == tokens
    other = [*PROMPT[:20], *PROMPT[:100]]
    first = greedy(llm, other, 5)
    with open_model(path) as fresh:
        assert greedy(fresh, other, 5) == first
