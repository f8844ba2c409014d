"""Token windows for the training of the demo model, generated in parallel: the same for any number of cores.

A window holds whole documents, the last one cut at the end, so that every window begins with the beginning
of a text and position 0 is what it is when the model is used.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from demo_file import Tokenizer, train_tokenizer
from demo_text import document
from numpy.typing import NDArray

_WINDOWS_PER_TASK = 64


@dataclass(frozen=True)
class Windows:
    """Token ids [n, length] and, of the same shape, whether the model is the one who writes the token."""

    ids: NDArray[np.uint16]
    own: NDArray[np.bool_]


def tokenizer_lines(seed: int, n_documents: int) -> Iterator[str]:
    rng = Random(f"{seed}/tokenizer")
    for _ in range(n_documents):
        for role, text in document(rng, held_out=False):
            yield role
            yield from text.split("\n")


def make_tokenizer(seed: int, n_vocab: int, n_documents: int) -> Tokenizer:
    return Tokenizer(train_tokenizer(tokenizer_lines(seed, n_documents), n_vocab))


@dataclass(frozen=True)
class _Task:
    seed: int
    number: int
    n_windows: int
    length: int
    held_out: bool
    model: bytes


def _fill(task: _Task) -> Windows:
    rng = Random(f"{task.seed}/{'held out' if task.held_out else 'train'}/{task.number}")
    tokenizer = Tokenizer(task.model)
    ids = np.zeros((task.n_windows, task.length), np.uint16)
    own = np.zeros((task.n_windows, task.length), np.bool_)
    for row in range(task.n_windows):
        end = 0
        while end < task.length:
            text, mine = tokenizer.conversation(document(rng, held_out=task.held_out))
            n = min(len(text), task.length - end)
            ids[row, end : end + n] = text[:n]
            own[row, end : end + n] = mine[:n]
            end += n
    return Windows(ids, own)


def make_windows(tokenizer: Tokenizer, *, seed: int, n_windows: int, length: int, held_out: bool) -> Windows:
    """`n_windows` windows of `length` tokens each."""
    sizes = [min(_WINDOWS_PER_TASK, n_windows - start) for start in range(0, n_windows, _WINDOWS_PER_TASK)]
    tasks = [_Task(seed, i, size, length, held_out, tokenizer.model) for i, size in enumerate(sizes)]
    with multiprocessing.Pool() as pool:
        parts = pool.map(_fill, tasks, chunksize=1)
    return Windows(np.concatenate([p.ids for p in parts]), np.concatenate([p.own for p in parts]))
