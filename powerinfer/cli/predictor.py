"""`powerinfer predictor train|svd|sign|calibrate|check`: predictors of active neurons.

Tables are on stdout, what goes on meanwhile on stderr. Files appear when they are complete.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .._engine.file import ModelFile
from .._engine.session import Activation, Model, ModelInfo, Predictor
from .._text.table import columns, facts, output_width
from .._text.terminal import Bar, harmless, one_line
from ..errors import ArgumentError, UnsupportedError
from ..models.corpus import STDIN, Corpus, read_corpus
from ..models.perplexity import plan_chunks
from ..models.predictor import build, calibrate, check, output, report, train
from ..models.predictor.curve import Curve
from ..models.predictor.data import Windows, choose_windows
from ..models.predictor.ffn import check_is_sparse, has_tensor
from ..models.profile import check_can_plot
from ..models.rewrite import rewrite
from ..models.writer import check_new_dir, check_new_file
from .info import skips_down
from .predictor_options import N_CTX, add_arguments

__all__ = ["add_arguments", "main"]


# ---- what all actions do


def main(args: argparse.Namespace) -> int:
    _check_arguments(args)
    action = {"train": _make, "svd": _make, "sign": _calibrate, "calibrate": _calibrate, "check": _check}
    return action[args.action](args)


def _check_arguments(args: argparse.Namespace) -> None:
    """Raises what would only be found out after a long run."""
    least = {
        "tokens": 1,
        "held_out": 1,
        "steps": 1,
        "batch": 1,
        "single": 1,
        "chunks": 0,
        "rank": 0,
        "seed": 0,
    }
    for name, value in least.items():
        given = getattr(args, name, value)
        if given < value:
            raise ArgumentError(f"--{name.replace('_', '-')} is {given}, it must be at least {value}")
    for name in ("target", "accuracy"):
        share = getattr(args, name, None)
        if share is not None and not 0 < share < 1:
            raise ArgumentError(f"--{name} is {share:g}, it must be a share between 0 and 1")
    for name in ("budget", "spool_gib"):
        if not 0 < getattr(args, name, 1) < math.inf:
            raise ArgumentError(f"--{name.replace('_', '-')} must be a number above 0")
    if not math.isfinite(getattr(args, "threshold", None) or 0):
        raise ArgumentError(f"--threshold is {args.threshold:g}, it must be a number")
    if getattr(args, "rank", 0) % 32:
        raise ArgumentError(f"--rank is {args.rank}, it must be a multiple of 32")
    _check_names(args)
    if getattr(args, "plot", None) is not None:
        check_can_plot(args.plot)
    if getattr(args, "predictors_dir", None) is not None:
        check_new_dir(Path(args.predictors_dir))
    if args.action in ("train", "svd") and args.output is None and args.predictors_dir is None:
        raise ArgumentError(
            "nothing would be written: name a file with -o, or a folder with --predictors-dir"
        )
    if args.action == "train":
        train.choose_device(train.import_torch(), args.device)


def _check_names(args: argparse.Namespace) -> None:
    """Raises ArgumentError for a result that would replace an input, or another result; only a model may be
    replaced by a model. Raises FileError for one that cannot be written."""
    taken = {os.path.realpath(path): "the text" for path in args.text or () if path != STDIN}
    model = os.path.realpath(args.model)
    for name in ("output", "predictors_dir", "work_dir", "report", "plot"):
        path = getattr(args, name, None)
        if path is None:
            continue
        option, real = f"--{name.replace('_', '-')}", os.path.realpath(path)
        held = "the model" if real == model and name != "output" else taken.get(real)
        if held is not None:
            raise ArgumentError(f"{option} is {path}, which is {held}: name another")
        taken[real] = f"{option} as well"
        if name in ("output", "report", "plot"):
            check_new_file(path)


def _load(args: argparse.Namespace, file: ModelFile, predictor: Predictor) -> Model:
    """The model, once it is known that it has something to predict."""
    activation: Activation = args.activation or "auto"
    with Model(file, activation=activation, predictor="none", load=False) as model:
        check_is_sparse(model.info)
    with Bar(f"loading {args.model}") as bar:
        return Model(file, activation=activation, predictor=predictor, progress=bar)


def _n_ctx(args: argparse.Namespace, info: ModelInfo) -> int:
    return min(N_CTX, info.n_ctx_train) if args.n_ctx is None else int(args.n_ctx)


def _windows(
    args: argparse.Namespace, info: ModelInfo, corpus: Corpus, n_train: int, n_held_out: int
) -> Windows:
    """The text's windows; says so if there is less than was asked for."""
    windows = choose_windows(corpus, n_ctx=_n_ctx(args, info), n_train=n_train, n_held_out=n_held_out)
    if windows.n_tokens < 0.9 * (n_train + n_held_out):
        _notice(
            f"the text has only {windows.n_tokens:,} of the {n_train + n_held_out:,} tokens that were "
            "wanted: more text makes better predictors"
        )
    return windows


def _notice(text: str) -> None:
    print(f"powerinfer: {one_line(text)}", file=sys.stderr)


class _Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _notice(text)


# ---- train and svd


def _make(args: argparse.Namespace) -> int:
    with ModelFile(args.model) as file, _load(args, file, "none") as model:
        info = model.info
        windows = None
        if args.text is not None:
            corpus = read_corpus(file, args.text, special=args.special)
            windows = _windows(args, info, corpus, args.tokens, args.held_out)
        type = output.predictor_type(
            file, info, args.predictor_type if args.predictor_type != "AUTO" else "auto"
        )
        own = sum(t.n_bytes for t in file.tensors if ".fc1." not in t.name and ".fc2." not in t.name)
        goal = build.Goal(
            target=args.target,
            size_by=getattr(args, "size_by", "accuracy"),
            accuracy=getattr(args, "accuracy", 0.95),
            budget_bytes=args.budget * own,
            rank=args.rank,
            type=type,
        )
        build.check_budget(info, goal)
        if has_tensor(file, "blk.0.fc1.weight") and args.output is not None:
            _notice("the model has predictors already: the result has the new ones in their place")
        if args.output is not None:
            check_new_file(args.output, n_bytes=file.info.n_bytes)
        work = _open_work(args, file, windows, goal)
        written = False
        try:
            results = _run(args, model, windows, goal, work)
            if results is None:
                return 130
            _write(args, file, info, goal, work, [result.threshold for result in results])
            written = True
        finally:
            # What was trained is worth keeping, if it is not written.
            keep = args.action == "train" and work.is_begun() and not written
            if args.work_dir is None and not keep:
                work.delete()
            work.close()
        _show_results(args, results, goal, info, own)
    return 0


def _write(
    args: argparse.Namespace,
    file: ModelFile,
    info: ModelInfo,
    goal: build.Goal,
    work: build.Work,
    thresholds: list[float],
) -> None:
    if args.output is not None:
        with Bar(f"writing {args.output}") as bar:
            output.write_model(
                file,
                info,
                Path(args.output),
                work.net,
                type=goal.type,
                keys=calibrate.keys("mlp", thresholds, info.activation),
                notice=_Notices(),
                progress=bar,
            )
    if args.predictors_dir is not None:
        output.write_folder(Path(args.predictors_dir), info.n_layer, work.net, thresholds)


def _open_work(
    args: argparse.Namespace, file: ModelFile, windows: Windows | None, goal: build.Goal
) -> build.Work:
    target = Path(args.output or args.predictors_dir).absolute()
    folder = args.work_dir
    run = {
        "action": args.action,
        "model": build.digest_of(file),
        "activation": args.activation,
        "text": None if windows is None else build.digest_of_windows(windows),
        "goal": asdict(goal),
    }
    if args.action == "train":
        run["training"] = {"steps": args.steps, "batch": args.batch, "seed": args.seed}
    return build.Work(Path(folder or target.with_name(f".{target.name}.work")), run, own=folder is None)


def _run(
    args: argparse.Namespace, model: Model, windows: Windows | None, goal: build.Goal, work: build.Work
) -> list[build.LayerResult] | None:
    """What became of the layers; None if Ctrl-C came first."""
    threads = args.n_threads or 0
    if args.action == "svd":
        return build.decompose_all(
            model, windows, goal, work, stage=Bar, n_threads=threads, spool_gib=args.spool_gib
        )
    assert windows is not None
    options = train.Options(
        steps=args.steps, batch=args.batch, seed=args.seed, device=args.device, n_threads=threads
    )
    finished: list[int] = []

    def say(result: build.LayerResult) -> None:
        finished.append(result.layer)
        assert result.point is not None
        by_bytes = goal.size_by == "bytes"
        tried = ", ".join(
            f"{trial.rank}: {report.percent(trial.bytes if by_bytes else trial.accuracy)}"
            for trial in result.tried
        )
        _notice(
            f"layer {result.layer} has rank {result.rank} ({goal.size_by} by rank {tried}); "
            f"{report.percent(result.point.computed)} computed, {report.percent(result.point.active)} active"
        )

    try:
        return build.train_all(
            model,
            windows,
            goal,
            options,
            work,
            stage=Bar,
            say=say,
            n_threads=threads,
            spool_gib=args.spool_gib,
        )
    except KeyboardInterrupt:
        _notice(f"stopped; the same command goes on with the layers that are missing in {work.folder}")
        return None


def _show_results(
    args: argparse.Namespace,
    results: Sequence[build.LayerResult],
    goal: build.Goal,
    info: ModelInfo,
    model_bytes: int,
) -> None:
    n_bytes = sum(result.rank for result in results) * output.rank_bytes(info, goal.type)
    share = n_bytes / model_bytes
    missed = [r for r in results if r.point and r.point.accuracy < goal.accuracy]
    if missed and args.action == "train" and goal.size_by == "accuracy" and not goal.rank:
        _notice(
            f"{len(missed)} of {len(results)} layers stay below an accuracy of "
            f"{report.percent(goal.accuracy)} within the budget"
        )
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "type": goal.type,
                    "bytes": int(n_bytes),
                    "share": share,
                    "layers": [
                        {**asdict(r), "accuracy": None if r.point is None else r.point.accuracy}
                        for r in results
                    ],
                },
                indent=2,
            )
        )
        return
    head = ["layer", "rank", "threshold", "active", "computed", "recall", "precision", "mass", "accuracy"]
    head.append("bytes")
    rows = [head]
    for r in results:
        p = r.point
        values = [] if p is None else [p.active, p.computed, p.recall, p.precision, p.mass, p.accuracy]
        if r.bytes is not None:
            values.append(r.bytes)
        cells = [report.percent(v) for v in values] or ["-"] * 7
        rows.append([str(r.layer), str(r.rank), f"{r.threshold:.4g}", *cells])
    for line in columns(rows, right=range(len(head)), width=output_width()):
        print(line)
    print(f"\npredictors: {goal.type}, {n_bytes / 2**20:,.2f} MiB, {report.percent(share)} of the model")


# ---- sign and calibrate


def _calibrate(args: argparse.Namespace) -> int:
    kind: Predictor = "sign" if args.action == "sign" else "auto"
    with ModelFile(args.model) as file, _load(args, file, kind) as model:
        info = model.info
        if info.predictor == "none":
            raise UnsupportedError(
                "the model has no predictors to calibrate: `powerinfer predictor train` makes some"
            )
        if kind == "sign" and has_tensor(file, "blk.0.fc1.weight"):
            _notice(
                "the model's own predictors stay in the result, but are not used; the original PowerInfer, "
                "which knows no signs, would use them with the thresholds of signs"
            )
        if kind == "sign" and not info.n_expert and not skips_down(file, info):
            _notice(
                "ffn_down is quantised and stays stored by output: all of it is read for each token, and "
                "only rows of gate and up are left out; start from a file in F16 or BF16 if there is one"
            )
        check_new_file(args.output, n_bytes=file.info.n_bytes)
        corpus = read_corpus(file, args.text, special=args.special)
        windows = _windows(args, info, corpus, 0, args.tokens)
        with Bar("calibrating") as bar:
            curves = calibrate.measure(model, windows, n_threads=args.n_threads or 0, progress=bar)
        thresholds = [curve.threshold(args.target) for curve in curves]
        keys = calibrate.keys(info.predictor, thresholds, info.activation)
        with Bar(f"writing {args.output}") as bar:
            rewrite(file, args.output, keys=keys, progress=bar)
        _show_curves(args, model, curves, thresholds)
    return 0


def _show_curves(
    args: argparse.Namespace, model: Model, curves: Sequence[Curve], thresholds: Sequence[float]
) -> None:
    points = [curve.at(threshold) for curve, threshold in zip(curves, thresholds, strict=True)]
    if args.json:
        layers = [{"layer": i, **asdict(p), "accuracy": p.accuracy} for i, p in enumerate(points)]
        print(
            json.dumps({"model": args.model, "predictor": model.info.predictor, "layers": layers}, indent=2)
        )
        return
    rows = [["layer", "threshold", "active", "computed", "recall", "precision", "mass"]]
    for i, p in enumerate(points):
        shares = (p.active, p.computed, p.recall, p.precision, p.mass)
        rows.append([str(i), f"{p.threshold:.4g}", *map(report.percent, shares)])
    for line in columns(rows, right=range(7), width=output_width()):
        print(line)


# ---- check


def _check(args: argparse.Namespace) -> int:
    with ModelFile(args.model) as file, _load(args, file, args.predictor) as model:
        info = model.info
        corpus = read_corpus(file, args.text, special=args.special)
        n_ctx = _n_ctx(args, info)
        plan_chunks(len(corpus.with_bos), n_ctx=n_ctx, n_chunks=args.chunks)
        with Model(file, activation=args.activation or "auto", load=False) as own:
            if args.threshold is None and info.predictor != "none" and own.info.predictor != info.predictor:
                _notice(
                    f"the file has no thresholds for {info.predictor}, so those used mean little: look at "
                    "the trade-off, or calibrate first"
                )
        result = check.check_predictor(
            model,
            corpus,
            n_ctx=n_ctx,
            n_tokens=args.tokens,
            n_single=args.single,
            n_chunks=args.chunks,
            sweep=args.sweep,
            thresholds=None if args.threshold is None else [args.threshold] * info.n_layer,
            n_threads=args.n_threads or 0,
            stage=Bar,
        )
        title = one_line(Path(file.path).name)
    if args.plot is not None:
        report.plot(result, Path(args.plot), title=title)
    if args.report is not None:
        how = (
            f"`{title}`, predictor {result.predictor}: {result.n_tokens:,} tokens of text that it was "
            f"checked with, in windows of {n_ctx}."
        )
        picture = ""
        if args.plot is not None:
            picture = os.path.relpath(args.plot, Path(args.report).absolute().parent)
        page = report.markdown(result, title=f"Predictor of {title}", how=how, picture=picture)
        report.write_text(Path(args.report), page)
    if args.json:
        print(json.dumps({"model": args.model, **report.as_json(result)}, indent=2))
        return 0
    width = output_width()
    for line in facts(report.summary(result), width=width):
        print(harmless(line))
    tables = (
        [list(report.LAYER_HEAD), *report.layer_rows(result)],
        [report.trade_head(result), *report.trade_rows(result)],
    )
    for rows in tables:
        print()
        for line in columns(rows, right=range(len(rows[0])), width=width):
            print(line)
    return 0
