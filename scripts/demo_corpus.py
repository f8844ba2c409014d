"""Text for the demo model, generated: token windows for its training, and plain files for the commands.

    python scripts/demo_corpus.py --out DIR

writes `training.txt`, on which neurons are counted and predictors are trained, and `held-out.txt`, on which
everything is measured. Control tokens are written out (`<|im_start|>`); the commands read them with
`--special`.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from demo_text import document
from demo_tokenizer import Tokenizer, render, train_tokenizer
from numpy.typing import NDArray

_WINDOWS_PER_TASK = 64


@dataclass(frozen=True)
class Windows:
    """Token ids [n, length] and, of the same shape, whether the model is the one who writes the token.

    A window holds whole documents, the last one cut at the end, so that every window begins with the
    beginning of a text and position 0 is what it is when the model is used.
    """

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
    """`n_windows` windows of `length` tokens each: the same for any number of cores."""
    sizes = [min(_WINDOWS_PER_TASK, n_windows - start) for start in range(0, n_windows, _WINDOWS_PER_TASK)]
    tasks = [_Task(seed, i, size, length, held_out, tokenizer.model) for i, size in enumerate(sizes)]
    with multiprocessing.Pool() as pool:
        parts = pool.map(_fill, tasks, chunksize=1)
    return Windows(np.concatenate([p.ids for p in parts]), np.concatenate([p.own for p in parts]))


def write_text(path: Path, *, seed: int, n_bytes: int, held_out: bool) -> None:
    """At least `n_bytes` of whole conversations; training and held-out text share no held-out key."""
    rng = Random(f"{seed}/{'held out' if held_out else 'train'} text")
    n = 0
    with open(path, "w", encoding="utf-8") as file:
        while n < n_bytes:
            text = render(document(rng, held_out=held_out))
            file.write(text)
            n += len(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write text files for the demo model.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--training-bytes", type=int, default=2_000_000, help="(%(default)s)")
    parser.add_argument("--held-out-bytes", type=int, default=500_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "training.txt", seed=args.seed, n_bytes=args.training_bytes, held_out=False)
    write_text(args.out / "held-out.txt", seed=args.seed, n_bytes=args.held_out_bytes, held_out=True)


if __name__ == "__main__":
    main()
