"""What the feed-forward of a model reads and makes over a text: the data that predictors learn from.

    windows = choose_windows(corpus, n_ctx=512, n_train=24576, n_held_out=4096)
    with temporary_folder(parent) as folder:
        layers = collect(model, windows, [0, 1], folder)
        layers[0].inputs(slice(0, 512))  # float32 [512, n_embd]

The text is computed with all neurons. Of every token (but the BOS that begins a window, which is like no
other and never decoded) each layer gives

    x      [n_embd]  what a predictor reads: the residual before ffn_norm, in Falcon the block's input
    mass   [n_ff]    |h_j| * ||row j of down||, what neuron j adds to the residual; 0 where it is silent

Both are kept as float16 in files of a temporary folder: x divided by its own root mean square, which is kept
beside it, so that it cannot overflow; mass in units of a typical token's sum.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..._engine.session import Model, ModelInfo, Progress, Session, Tap
from ...errors import ArgumentError, FileError, FormatError
from ..corpus import Corpus
from .ffn import down_norms

MAX_TAP_BYTES = 512 << 20
_LEAST_WINDOW = 32  # tokens
_N_WINDOWS = 8  # at least, so that both parts of a short text have some
_LEAST_MASS = np.float32(2.0**-24)  # the smallest float16: what is active stays so
_MOST_MASS = np.float32(65504)

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Rows = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Pieces of a text, each computed from an empty context: those to learn from, then those held out."""

    tokens: tuple[npt.NDArray[np.int32], ...]
    n_head: int
    """Tokens at the beginning of each that are not counted: the BOS, if the vocabulary has one."""
    n_train_windows: int

    def count(self, windows: Sequence[npt.NDArray[np.int32]]) -> int:
        return sum(len(window) - self.n_head for window in windows)

    @property
    def n_tokens(self) -> int:
        return self.count(self.tokens)

    @property
    def n_train(self) -> int:
        return self.count(self.tokens[: self.n_train_windows])

    @property
    def n_ctx(self) -> int:
        return max(map(len, self.tokens))


def choose_windows(corpus: Corpus, *, n_ctx: int, n_train: int, n_held_out: int) -> Windows:
    """Windows of at most n_ctx tokens, spread evenly over the text, that hold about so many tokens, or all
    that there are. The held out ones lie between the others.

    Raises ArgumentError for a text that is too short, and for sizes out of range.
    """
    if n_train < 0 or n_held_out < 1:
        raise ArgumentError(
            f"{n_train} tokens to learn from and {n_held_out} held out: both must be positive"
        )
    head = [] if corpus.bos is None else [corpus.bos]
    n_text = len(corpus.tokens)
    width = min(n_ctx - len(head), n_text // _N_WINDOWS)
    if width < _LEAST_WINDOW:
        if n_ctx - len(head) < _LEAST_WINDOW:
            raise ArgumentError(
                f"n_ctx is {n_ctx}: predictors need windows of at least {_LEAST_WINDOW} tokens"
            )
        raise ArgumentError(
            f"the text has {n_text:,} tokens, which is too little: at least {_N_WINDOWS * _LEAST_WINDOW} are "
            "needed, and some ten thousand for a good predictor"
        )
    n_there = n_text // width
    n = min(n_there, max(-(-(n_train + n_held_out) // width), _N_WINDOWS))
    n_held = n if not n_train else min(max(round(n * n_held_out / (n_train + n_held_out)), 1), n - 1)
    starts = np.arange(n) * n_there // n * width
    held = set((np.arange(n_held) * n + n // 2) // n_held)
    order = [i for i in range(n) if i not in held] + sorted(held)
    return Windows(
        tokens=tuple(
            np.concatenate([np.asarray(head, np.int32), corpus.tokens[starts[i] : starts[i] + width]])
            for i in order
        ),
        n_head=len(head),
        n_train_windows=n - n_held,
    )


# ---- running the model


@dataclass(frozen=True)
class Step:
    """One feed: rows of the tap from `skip` on are the samples first .. first + n - 1."""

    skip: int
    first: int
    n: int


def run(
    session: Session, tap: Tap, windows: Windows, *, progress: Progress | None = None
) -> Iterator[tuple[Tap, Step]]:
    """Feeds the windows to a tapped session, and stops after each feed for the caller to take what is there.

    Raises FormatError if the model's values are not finite.
    """
    done, total, step = 0, windows.n_tokens, session.info.n_batch
    for window in windows.tokens:
        session.drop()
        for at in range(0, len(window), step):
            batch = window[at : at + step]
            session.feed(batch, want_logits=None if at + step >= len(window) else False)
            skip = max(windows.n_head - at, 0)
            n = len(batch) - skip
            if n > 0:
                yield tap, Step(skip, done, n)
            done += max(n, 0)
            if progress is not None:
                progress(done, total)
        # What is not finite anywhere has spread to here.
        if not np.isfinite(session.hidden()).all():
            raise FormatError(
                "the model's values are not finite: its weights are broken, or its activation wrong"
            )
    session.drop()


def batch_for(windows: Windows, floats_per_token: int) -> int:
    """Tokens of a feed, so that a tap of so many floats for each stays within its memory."""
    return int(min(512, windows.n_ctx, max(MAX_TAP_BYTES // (4 * floats_per_token), 1)))


# ---- keeping what it does


class LayerData:
    """The samples of one layer: the first n_train to learn from, the others held out."""

    def __init__(self, folder: Path, info: ModelInfo, layer: int, windows: Windows, norms: Floats) -> None:
        self.layer = layer
        self.n = windows.n_tokens
        self.n_train = windows.n_train
        self._norms = norms
        self._unit = np.float32(0)
        self.rms = np.ones(self.n, np.float32)
        self._paths = [folder / f"{name}_{layer}.f16" for name in ("x", "mass")]
        self._x = _mapped(self._paths[0], (self.n, info.n_embd))
        self._mass = _mapped(self._paths[1], (self.n, info.n_ff))

    def put(self, tap: Tap, step: Step) -> None:
        """Takes what the last feed left."""
        rows = slice(step.first, step.first + step.n)
        x = tap.input[self.layer][step.skip :]
        rms = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1)).astype(np.float32)
        self.rms[rows] = np.maximum(rms, np.finfo(np.float32).tiny)
        self._x[rows] = x / self.rms[rows, None]
        mass = np.abs(tap.hidden[self.layer][step.skip :]) * self._norms
        if not self._unit:
            sums = mass.sum(axis=1)
            sums = sums[sums > 0]
            self._unit = np.float32(np.median(sums)) if sums.size else np.float32(0)
        if self._unit:
            mass = np.where(mass > 0, np.clip(mass / self._unit, _LEAST_MASS, _MOST_MASS), np.float32(0))
        self._mass[rows] = mass

    @property
    def n_held_out(self) -> int:
        return self.n - self.n_train

    def halves(self, rows: Rows) -> tuple[Halves, Halves]:
        """Inputs of rms 1 [n, n_embd], and mass [n, n_ff]: float16, as they are kept."""
        return np.asarray(self._x[rows]), np.asarray(self._mass[rows])

    def inputs(self, rows: Rows) -> Floats:
        """[n, n_embd] float32."""
        return self._x[rows].astype(np.float32) * self.rms[rows][:, None]

    def mass(self, rows: Rows) -> Floats:
        """[n, n_ff] float32, above 0 where a neuron is active."""
        return self._mass[rows].astype(np.float32)

    def blocks(self, *, held_out: bool, n_rows: int = 256) -> Iterator[tuple[Floats, Floats]]:
        """Inputs and mass of either part, some rows at a time."""
        first, last = (self.n_train, self.n) if held_out else (0, self.n_train)
        for at in range(first, last, n_rows):
            rows = slice(at, min(at + n_rows, last))
            yield self.inputs(rows), self.mass(rows)

    def delete(self) -> None:
        """Frees the files; the data is gone."""
        del self._x, self._mass
        for path in self._paths:
            path.unlink(missing_ok=True)


def temporary_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for the data of some layers, deleted at the end of a `with`. Raises FileError."""
    try:
        return tempfile.TemporaryDirectory(prefix="activations.", dir=parent)
    except OSError as error:
        raise FileError(f"no temporary folder can be made in {parent}: {error.strerror}") from error


def _mapped(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.float16]:
    """A new array in a file whose room is reserved, so that writing to it cannot fail."""
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(2 * shape[0] * shape[1], 1))
        return np.memmap(path, np.float16, "r+", shape=shape)
    except OSError as error:
        raise FileError(
            f"the folder {path.parent.parent} cannot hold the data to learn from "
            f"({2 * shape[0] * shape[1]:,} bytes more): {error.strerror or error}"
        ) from error


def spool_bytes(info: ModelInfo, n_tokens: int) -> int:
    """What the data of one layer takes in the temporary folder."""
    return n_tokens * 2 * (info.n_embd + info.n_ff)


def collect(
    model: Model,
    windows: Windows,
    layers: Sequence[int],
    folder: Path,
    *,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> list[LayerData]:
    """Runs the windows once and keeps the data of these layers in files of the folder.

    Raises FileError (no room for the files), FormatError (the model's values are not finite).
    """
    info = model.info
    out = [LayerData(folder, info, i, windows, down_norms(model.file, info, i)) for i in layers]
    n_batch = batch_for(windows, (info.n_embd + info.n_ff) * len(layers))
    with (
        Session(
            model, n_ctx=windows.n_ctx, n_batch=n_batch, n_threads=n_threads, sparsity="exact"
        ) as session,
        session.tap(layers, input=True, hidden=True) as tap,
    ):
        for taken, step in run(session, tap, windows, progress=progress):
            for data in out:
                data.put(taken, step)
    return out
