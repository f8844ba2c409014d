"""Predictors for all layers of a model: one after the other, within a budget, and so that a run which was
broken off goes on where it was.

Finished layers lie in a working folder in the original's layout, model_{i}.pt, each with a layer_{i}.json
that says what came of it; run.json says which model, text and options they belong to.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..._engine.file import ModelFile
from ..._engine.session import Model, ModelInfo, Progress
from ...errors import ArgumentError, FileError, FormatError, PowerInferError
from ..convert.torch_file import read_torch, write_torch
from ..corpus import Corpus
from ..profile import profile
from ..writer import PartialFile
from . import size
from .curve import Curve, Point
from .data import LayerData, Windows, collect, spool_bytes, temporary_folder
from .ffn import read_first, read_row_bytes
from .output import as_stored, rank_bytes
from .svd import Inputs, decompose
from .train import Net, Options, Trainer

VERSION = 1
PROFILE_TOKENS = 4096
SPOOL_GIB = 4.0


class Stage(Protocol):
    """Shows what takes long: stage("reading") is used in a `with`, and called with (done, total)."""

    def __call__(self, text: str) -> AbstractContextManager[Progress]: ...


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """What became of one layer."""

    layer: int
    rank: int
    threshold: float
    point: Point | None = None
    """What the predictor does on the held out tokens at its threshold; None without a text."""
    skewness: float | None = None
    """Share of all activity that the hottest fifth of the neurons has."""
    bytes: float | None = None
    """That a token reads in the feed-forward, predictor included, over those of dense mode."""
    tried: tuple[size.Trial, ...] = ()
    """Sizes in the order in which they were tried."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What predictors shall reach."""

    target: float
    """Share of the activation mass to keep; thresholds follow from it."""
    size_by: str = "accuracy"
    """"accuracy", or "bytes": the size with which the fewest are read."""
    accuracy: float = 0.95
    """That a layer's predictor shall have at that threshold."""
    budget_bytes: float
    """For all layers."""
    rank: int = 0
    """Of every layer; 0: as accuracy needs and the budget allows."""
    type: str
    """Weight format of the predictors."""


# ---- the working folder


def digest_of(file: ModelFile) -> str:
    """Of keys, names, shapes and some bytes of each tensor: another model has another one."""
    state = hashlib.sha256()
    for key, data in file.raw_metadata():
        state.update(key.encode() + data)
    for tensor in file.tensors:
        raw = file.raw(tensor.name)
        state.update(f"{tensor.name} {tensor.type} {tensor.shape}".encode())
        state.update(raw[:4096].tobytes() + raw[-4096:].tobytes())
    return state.hexdigest()


def digest_of_windows(windows: Windows) -> str:
    state = hashlib.sha256()
    for window in windows.tokens:
        state.update(b"|" + np.ascontiguousarray(window, "<i4").tobytes())
    return state.hexdigest()


class Work:
    """The working folder of one run, which no other run can use before it is closed."""

    def __init__(self, folder: Path, run: dict[str, Any], *, own: bool) -> None:
        """run: what the layers belong to, as JSON has it. own: the folder is this program's own choice, so
        what another run left in it is thrown away; else that is an error.

        Raises FileError, ArgumentError.
        """
        self.folder = folder
        wanted = json.loads(json.dumps({"version": VERSION, **run}))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The folder of this program's own choice is deleted at the end: a link is none.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
            lock = os.open(folder, flags)
            self.close = weakref.finalize(self, os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentError(f"the folder {folder} is being used by another run") from None
            found = self._read("run.json")
            if found is not None and found != wanted:
                differs = ", ".join(k for k in wanted if (found or {}).get(k) != wanted[k]) or "more options"
                if not own:
                    raise ArgumentError(
                        f"the folder {folder} holds another run ({differs}): name another --work-dir, or "
                        "delete it"
                    )
                self._empty()
                found = None
            if found is None:
                # A run that was killed at once leaves a part of run.json.
                if any(not path.name.startswith(".run.json.") for path in folder.iterdir()):
                    what = "move it away" if own else "--work-dir must be a new folder"
                    raise ArgumentError(f"the folder {folder} holds other things: {what}")
                self._write("run.json", wanted)
            for left in folder.glob("activations.*"):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            if isinstance(error, PowerInferError):
                raise
            raise FileError(f"the folder {folder} cannot be used: {error.strerror or error}") from error

    def _empty(self) -> None:
        """Deletes what is in the folder; the folder stays, and with it the lock."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with PartialFile(self.folder / name) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())

    def result(self, layer: int) -> LayerResult | None:
        """Of a finished layer."""
        content = self._read(f"layer_{layer}.json")
        if content is None:
            return None
        try:
            tried = tuple(size.Trial(**trial) for trial in content.pop("tried"))
            result = LayerResult(point=Point(**content.pop("point")), tried=tried, **content)
            numbers = (result.rank, result.threshold, result.bytes, *vars(result.point).values())
            if result.layer != layer or not all(map(math.isfinite, numbers)):
                raise ValueError("its numbers are not those of this layer")
            return result
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"{self.folder}/layer_{layer}.json is damaged: delete the folder") from error

    def finished(self, layer: int, info: ModelInfo) -> LayerResult | None:
        """Of a finished layer, once it is known that its predictor fits it and the model."""
        result = self.result(layer)
        if result is not None:
            net = self.net(layer)
            shapes = (net.fc1.shape, net.fc2.shape)
            if shapes != ((result.rank, info.n_embd), (info.n_ff, result.rank)) or not (
                np.isfinite(net.fc1).all() and np.isfinite(net.fc2).all()
            ):
                raise FormatError(f"{self.folder}/model_{layer}.pt is damaged: delete the folder")
        return result

    def net(self, layer: int) -> Net:
        """The predictor of a finished layer."""
        content = read_torch(self.folder / f"model_{layer}.pt")
        if not isinstance(content, dict) or set(content) != {"fc1.weight", "fc2.weight"}:
            raise FormatError(f"{self.folder}/model_{layer}.pt is damaged: delete the folder")
        return Net(fc1=content["fc1.weight"], fc2=content["fc2.weight"])

    def finish(self, net: Net, result: LayerResult) -> None:
        """Keeps a layer. Its JSON file comes last: what it describes is complete."""
        write_torch(self.folder / f"model_{result.layer}.pt", {"fc1.weight": net.fc1, "fc2.weight": net.fc2})
        self._write(f"layer_{result.layer}.json", asdict(result))

    def is_begun(self) -> bool:
        """Whether any layer is finished."""
        return any(self.folder.glob("layer_*.json"))

    def delete(self) -> None:
        """Throws the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


# ---- one layer


def evaluate(net: Net, data: LayerData, type: str) -> Curve:
    """The held out tokens' curve of a predictor as it will be stored."""
    stored = Net(fc1=as_stored(net.fc1, type), fc2=as_stored(net.fc2, type))
    curve = Curve()
    for x, mass in data.blocks(held_out=True):
        curve.add(stored.scores(x), mass)
    return curve


def share_of_bytes(file: ModelFile, info: ModelInfo, layer: int, rank: int, point: Point, type: str) -> float:
    """Bytes that a token reads in the feed-forward with a predictor of this rank, over dense mode's."""
    rows = read_row_bytes(file, info, layer)
    n_bytes = rank * rank_bytes(info, type)
    return rows.share(n_bytes, info.n_ff, point.computed, point.active_computed)


def conclude(model: Model, net: Net, curve: Curve, layer: int, goal: Goal, **more: Any) -> LayerResult:
    point = curve.at(curve.threshold(goal.target))
    share = share_of_bytes(model.file, model.info, layer, net.rank, point, goal.type)
    return LayerResult(
        layer=layer, rank=net.rank, threshold=point.threshold, point=point, bytes=share, **more
    )


def train_layer(
    model: Model,
    data: LayerData,
    activity: size.Activity,
    goal: Goal,
    options: Options,
    allowed: list[int],
    stage: Stage,
) -> tuple[Net, LayerResult]:
    """Trains predictors of different sizes until one is as wanted, or of the one size that was asked for."""
    trainer = Trainer(data, options)
    made: dict[int, tuple[Net, LayerResult]] = {}

    def measure(rank: int) -> size.Trial:
        with stage(f"layer {data.layer}: training rank {rank}") as progress:
            net = trainer.train(rank, progress=progress)
        curve = evaluate(net, data, goal.type)
        result = conclude(model, net, curve, data.layer, goal, skewness=activity.skewness)
        made[rank] = net, result
        assert result.point is not None and result.bytes is not None
        return size.Trial(rank=rank, accuracy=result.point.accuracy, bytes=result.bytes)

    first = size.first_size(activity, model.info.n_embd, allowed)
    if goal.rank:
        trials = [measure(goal.rank)]
    elif goal.size_by == "bytes":
        trials = size.search_least(measure, first=first, allowed=allowed)
    else:
        trials = size.search(measure, first=first, allowed=allowed, target=goal.accuracy)
    by_bytes = goal.size_by == "bytes"
    best = size.chosen_least(trials) if by_bytes else size.chosen(trials, goal.accuracy)
    net, result = made[best.rank]
    return net, replace(result, tried=tuple(trials))


# ---- all layers


def check_budget(info: ModelInfo, goal: Goal) -> None:
    """Raises ArgumentError if the budget does not hold what was asked for."""
    rank = goal.rank or size.UNIT
    needed = info.n_layer * rank * rank_bytes(info, goal.type)
    if needed > goal.budget_bytes:
        unit, name = (1 << 20, "MiB") if goal.budget_bytes >= 1 << 20 else (1 << 10, "KiB")
        raise ArgumentError(
            f"predictors of rank {rank} in {goal.type} take {needed / unit:,.1f} {name}, but the budget is "
            f"{goal.budget_bytes / unit:,.1f} {name}: raise --budget, or take a smaller --predictor-type"
        )


def allowed_sizes(info: ModelInfo, goal: Goal, used_bytes: float, n_left: int) -> list[int]:
    """The sizes that the next of n_left layers may have: an equal part of what the layers before left over,
    and no more than n_embd, where a predictor costs as much as what it spares."""
    most = (goal.budget_bytes - used_bytes) / n_left / rank_bytes(info, goal.type)
    return size.sizes(int(min(most, max(info.n_embd, size.UNIT))))


def layer_order(info: ModelInfo, activities: Sequence[size.Activity]) -> list[int]:
    """Layers by the size that they suggest, the smallest first: what those don't need is left to others."""
    every = size.sizes(1 << 30 if info.n_embd > 1 << 20 else info.n_embd)
    return sorted(range(info.n_layer), key=lambda i: (size.first_size(activities[i], info.n_embd, every), i))


def train_all(
    model: Model,
    windows: Windows,
    goal: Goal,
    options: Options,
    work: Work,
    *,
    stage: Stage,
    say: Callable[[LayerResult], None],
    n_threads: int = 0,
    spool_gib: float = SPOOL_GIB,
) -> list[LayerResult]:
    """Trains what is not finished yet. say: called after each layer.

    Raises ArgumentError, FileError, FormatError, UnsupportedError (no PyTorch).
    """
    info = model.info
    check_budget(info, goal)
    text = Corpus(
        tokens=np.concatenate([window[windows.n_head :] for window in windows.tokens]),
        bos=int(windows.tokens[0][0]) if windows.n_head else None,
    )
    with stage("counting active neurons") as progress:
        n_count = min(PROFILE_TOKENS, len(text.tokens))
        counts = profile(
            model, text, n_ctx=windows.n_ctx, n_tokens=n_count, n_threads=n_threads, progress=progress
        )
    activities = [size.activity_of(layer, counts.n_tokens) for layer in counts.counts]
    order = layer_order(info, activities)
    results = {i: result for i in order if (result := work.finished(i, info)) is not None}
    waiting = [i for i in order if i not in results]
    for group in _groups(waiting, info, windows, spool_gib):
        with temporary_folder(work.folder) as folder:
            with stage(f"running the text for layers {_numbers(group)}") as progress:
                collected = collect(
                    model, windows, group, Path(folder), n_threads=n_threads, progress=progress
                )
            for data in collected:
                used = sum(results[i].rank for i in results) * rank_bytes(info, goal.type)
                allowed = allowed_sizes(info, goal, used, info.n_layer - len(results))
                net, result = train_layer(model, data, activities[data.layer], goal, options, allowed, stage)
                work.finish(net, result)
                results[data.layer] = result
                data.delete()
                say(result)
    return [results[i] for i in range(info.n_layer)]


def _groups(layers: Sequence[int], info: ModelInfo, windows: Windows, gib: float) -> list[list[int]]:
    """Layers whose data fits into the temporary folder's share together."""
    n = max(1, int(gib * 2**30 / spool_bytes(info, windows.n_tokens)))
    return [list(layers[at : at + n]) for at in range(0, len(layers), n)]


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (" ..." if len(layers) > 4 else "")


def svd_rank(info: ModelInfo, goal: Goal) -> int:
    """The rank of every layer: what was asked for, or what the budget holds; twice n_embd is exact."""
    check_budget(info, goal)
    most = goal.budget_bytes / info.n_layer / rank_bytes(info, goal.type)
    full = -(-2 * info.n_embd // size.UNIT) * size.UNIT
    return goal.rank or min(int(most) // size.UNIT * size.UNIT, full)


def decompose_all(
    model: Model,
    windows: Windows | None,
    goal: Goal,
    work: Work,
    *,
    stage: Stage,
    n_threads: int = 0,
    spool_gib: float = SPOOL_GIB,
) -> list[LayerResult]:
    """Predictors by singular values. Without windows there are no sample inputs, and no figures but the rank:
    the threshold is 0."""
    info, file = model.info, model.file
    rank = svd_rank(info, goal)
    out: list[LayerResult] = []
    if windows is None:
        with stage("singular values") as progress:
            for i in range(info.n_layer):
                net = decompose(read_first(file, info, i), rank)
                out.append(LayerResult(layer=i, rank=rank, threshold=0.0))
                work.finish(net, out[-1])
                progress(i + 1, info.n_layer)
        return out
    for group in _groups(range(info.n_layer), info, windows, spool_gib):
        with temporary_folder(work.folder) as folder:
            with stage(f"running the text for layers {_numbers(group)}") as progress:
                collected = collect(
                    model, windows, group, Path(folder), n_threads=n_threads, progress=progress
                )
            with stage("singular values") as progress:
                for done, data in enumerate(collected, 1):
                    inputs = Inputs(x for x, _ in data.blocks(held_out=False))
                    net = decompose(read_first(file, info, data.layer), rank, inputs)
                    curve = evaluate(net, data, goal.type)
                    out.append(conclude(model, net, curve, data.layer, goal))
                    work.finish(net, out[-1])
                    data.delete()
                    progress(done, len(collected))
    return out
