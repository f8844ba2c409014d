"""All layers of a model: budgets, order, and runs that were broken off."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model
from powerinfer.errors import ArgumentError, FileError, FormatError
from powerinfer.models.convert.torch_file import write_torch
from powerinfer.models.corpus import Corpus
from powerinfer.models.predictor import build, size
from powerinfer.models.predictor.build import Goal, LayerResult, Work, decompose_all, train_all
from powerinfer.models.predictor.data import Windows, choose_windows
from powerinfer.models.predictor.output import as_stored, rank_bytes
from powerinfer.models.predictor.train import Options
from tests import models, reference
from tests.predictor.small import BOS, expected, planted

Array = Any
QUICK = Options(n_threads=1, steps=24, batch=64)


@contextmanager
def stage(_: str) -> Iterator[Any]:
    yield lambda done, total: None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("planted") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, predictor="none") as opened:
        yield opened


def windows_of(seed: int = 1) -> Windows:
    tokens = np.random.default_rng(seed).integers(3, 512, 2600, dtype=np.int32)
    return choose_windows(Corpus(tokens=tokens, bos=BOS), n_ctx=128, n_train=2000, n_held_out=500)


def goal_of(model: Model, **changes: Any) -> Goal:
    info = model.info
    values = {"target": 0.98, "budget_bytes": 2 * 160 * rank_bytes(info, "F16"), "type": "F16", **changes}
    return Goal(**values)


def train(model: Model, work: Work, goal: Goal, **changes: Any) -> list[LayerResult]:
    said: list[int] = []
    arguments: dict[str, Any] = {
        "stage": stage,
        "say": lambda r: said.append(r.layer),
        "n_threads": 1,
        **changes,
    }
    return train_all(model, windows_of(), goal, QUICK, work, **arguments)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ---- runs


def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    goal = goal_of(model)
    whole = train(model, Work(tmp_path / "whole", {}, own=False), goal)

    def stop(result: LayerResult) -> None:
        raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        train(model, Work(broken, {}, own=False), goal, say=stop)
    assert len(list(broken.glob("layer_*.json"))) == 1
    assert not list(broken.glob("activations.*"))
    kept = bytes_of(broken)
    # What a kill leaves: data, half a file, a predictor whose layer is not finished.
    (broken / "activations.dead").mkdir()
    (broken / "activations.dead" / "x_0.f16").write_bytes(b"0" * 100)
    finished = int(next(broken.glob("layer_*.json")).stem[6:])
    write_torch(broken / f"model_{1 - finished}.pt", {"fc1.weight": np.zeros((3, 3), np.float32)})
    trained: list[int] = []
    gc.collect()  # the run that was broken off lets go of its folder
    again = train(model, Work(broken, {}, own=False), goal, say=lambda result: trained.append(result.layer))
    assert trained == [1 - finished]
    assert again == whole
    assert bytes_of(broken) == bytes_of(tmp_path / "whole")
    assert {name: data for name, data in bytes_of(broken).items() if name in kept} == kept


def test_less_room_changes_nothing(model: Model, tmp_path: Path) -> None:
    """The text is run once for each layer instead of once for both."""
    pytest.importorskip("torch")
    goal = goal_of(model, rank=32)
    runs: list[str] = []

    @contextmanager
    def counted(text: str) -> Iterator[Any]:
        runs.append(text)
        yield lambda done, total: None

    one = train(model, Work(tmp_path / "one", {}, own=True), goal, stage=counted)
    assert sum("running the text" in text for text in runs) == 1
    two = train(model, Work(tmp_path / "two", {}, own=True), goal, stage=counted, spool_gib=0.003)
    assert sum("running the text" in text for text in runs) == 3
    assert one == two
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_results_are_those_of_the_stored_predictor(path: Path, model: Model, tmp_path: Path) -> None:
    """Recall, precision and the rest, recomputed from the saved weights on the reference's inputs.

    The engine's inputs and the reference's differ by rounding, so a few pairs change sides."""
    pytest.importorskip("torch")
    work = Work(tmp_path / "work", {}, own=True)
    results = train(model, work, goal_of(model, rank=64, type="Q8_0"))
    windows = windows_of()
    held = windows.tokens[windows.n_train_windows :]
    for result, one in zip(results, expected(path, held, windows.n_head), strict=True):
        net = work.net(result.layer)
        hidden = reference.relu(one.x @ as_stored(net.fc1, "Q8_0").T)
        predicted = hidden @ as_stored(net.fc2, "Q8_0").T >= result.threshold
        active = one.mass > 0
        point = result.point
        assert point is not None and result.rank == 64 and [t.rank for t in result.tried] == [64]
        assert point.threshold == result.threshold
        assert point.mass >= 0.98
        assert one.mass[predicted].sum() / one.mass.sum() == pytest.approx(point.mass, abs=0.003)
        assert predicted.mean() == pytest.approx(point.computed, abs=0.01)
        assert active.mean() == pytest.approx(point.active, abs=0.01)
        assert (predicted & active).sum() / active.sum() == pytest.approx(point.recall, abs=0.01)
        assert (predicted == active).mean() == pytest.approx(point.accuracy, abs=0.01)
        # F32 rows of 256: one for what is predicted, two more for what is active too; the predictor is Q8_0.
        n_bytes = 64 * (256 + 1024) * 34 / 32 + 1024 * 256 * 4 * (point.computed + 2 * point.active_computed)
        assert result.bytes == pytest.approx(n_bytes / (3 * 1024 * 256 * 4))
        assert [(t.accuracy, t.bytes) for t in result.tried] == [(point.accuracy, result.bytes)]


def test_svd_reaches_its_target_without_training(path: Path, model: Model, tmp_path: Path) -> None:
    """The planted gates are of rank 31, and two hidden units make one singular value."""
    work = Work(tmp_path / "work", {}, own=True)
    goal = goal_of(model, rank=64)
    results = decompose_all(model, windows_of(), goal, work, stage=stage, n_threads=1)
    for result in results:
        assert result.point is not None and result.rank == 64
        assert result.point.mass >= 0.98
        assert result.point.computed < 0.25
    without = decompose_all(model, None, goal, work, stage=stage)
    assert [(r.rank, r.threshold, r.point) for r in without] == [(64, 0.0, None)] * 2


# ---- budgets


def test_a_predictor_of_any_layer_stays_within_the_budget(model: Model) -> None:
    """Whatever the layers take of what they may, the sum is within, and none is left without."""
    info = model.info
    one = rank_bytes(info, "Q4_0")
    for budget_rank in (64, 100, 1000):
        goal = goal_of(model, type="Q4_0", budget_bytes=budget_rank * one)
        build.check_budget(info, goal)
        for greedy in (True, False):
            used = 0.0
            for left in range(info.n_layer, 0, -1):
                allowed = build.allowed_sizes(info, goal, used, left)
                assert allowed and allowed == size.sizes(allowed[-1]) and allowed[-1] <= info.n_embd
                used += (allowed[-1] if greedy else allowed[0]) * one
            assert used <= goal.budget_bytes


def test_a_budget_that_holds_nothing_is_an_error(model: Model) -> None:
    info = model.info
    short = goal_of(model, budget_bytes=63 * rank_bytes(info, "F16"))
    with pytest.raises(ArgumentError, match=r"rank 32 in F16 take .* the budget is"):
        build.check_budget(info, short)
    with pytest.raises(ArgumentError, match="rank 192"):
        build.check_budget(info, goal_of(model, rank=192))
    assert build.svd_rank(info, goal_of(model)) == 160
    assert build.svd_rank(info, goal_of(model, rank=64)) == 64
    assert build.svd_rank(info, goal_of(model, budget_bytes=1e9)) == 512  # exact already


def test_layers_that_need_little_come_first(model: Model) -> None:
    busy, calm = size.Activity(active=0.2, skewness=0.3), size.Activity(active=0.01, skewness=0.8)
    assert build.layer_order(model.info, [busy, calm]) == [1, 0]
    assert build.layer_order(model.info, [calm, calm]) == [0, 1]


# ---- the working folder


def test_a_folder_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    Work(folder, {"text": "a", "model": "m"}, own=False)
    (folder / "layer_0.json").write_text("{}")
    Work(folder, {"text": "a", "model": "m"}, own=False)
    assert (folder / "layer_0.json").exists()
    with pytest.raises(ArgumentError, match=r"holds another run \(text\)"):
        Work(folder, {"text": "b", "model": "m"}, own=False)
    Work(folder, {"text": "b", "model": "m"}, own=True)
    assert [file.name for file in folder.iterdir()] == ["run.json"]
    other = tmp_path / "documents"
    other.mkdir()
    (other / "thesis.txt").touch()
    with pytest.raises(ArgumentError, match="must be a new folder"):
        Work(other, {}, own=False)
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]


def test_one_run_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    first = Work(folder, {"text": "a"}, own=True)
    (folder / "activations.1").mkdir()
    for run in ({"text": "a"}, {"text": "b"}):
        with pytest.raises(ArgumentError, match="is being used by another run"):
            Work(folder, run, own=True)
    assert (folder / "activations.1").exists()
    first.close()
    Work(folder, {"text": "b"}, own=True).delete()
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    other = tmp_path / "documents"
    other.mkdir()
    link = tmp_path / ".out.gguf.work"
    link.symlink_to(other)
    with pytest.raises(FileError, match="cannot be used"):
        Work(link, {}, own=True)
    assert not list(other.iterdir())
    (other / ".run.json.0123abcd.partial").touch()  # of a run that was killed at once
    Work(other, {}, own=True).close()
    (other / "run.json").unlink()
    (other / "thesis.txt").touch()
    with pytest.raises(ArgumentError, match="holds other things"):
        Work(other, {}, own=True)
    assert (other / "thesis.txt").exists()


@pytest.mark.parametrize("what", ["shape", "nan", "threshold", "layer"])
def test_a_finished_layer_that_does_not_fit_is_not_written(model: Model, tmp_path: Path, what: str) -> None:
    pytest.importorskip("torch")
    goal = goal_of(model, rank=32)
    work = Work(tmp_path / "work", {}, own=True)
    train(model, work, goal)
    net = work.net(0)
    if what == "shape":
        write_torch(work.folder / "model_0.pt", {"fc1.weight": net.fc1[:, 1:], "fc2.weight": net.fc2})
    elif what == "nan":
        write_torch(work.folder / "model_0.pt", {"fc1.weight": net.fc1 * np.nan, "fc2.weight": net.fc2})
    elif what == "threshold":
        content = json.loads((work.folder / "layer_0.json").read_text())
        (work.folder / "layer_0.json").write_text(json.dumps({**content, "threshold": float("nan")}))
    else:
        shutil.copy(work.folder / "layer_1.json", work.folder / "layer_0.json")
    with pytest.raises(FormatError, match=r"_0\.(pt|json) is damaged"):
        train(model, work, goal)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", {}, own=True)
    for content in ("{", "[1]", '{"tried": 3}', '{"tried": [], "point": {}}'):
        (work.folder / "layer_3.json").write_text(content)
        with pytest.raises(FormatError, match=r"layer_3\.json is damaged"):
            work.result(3)
    write_torch(work.folder / "model_3.pt", {"fc1.weight": np.zeros((3, 3), np.float32)})
    with pytest.raises(FormatError, match=r"model_3\.pt is damaged"):
        work.net(3)
    (work.folder / "run.json").write_text("{")
    with pytest.raises(ArgumentError, match="another run"):
        Work(work.folder, {}, own=False)


def test_digests_tell_models_and_texts_apart(tmp_path: Path) -> None:
    from powerinfer._engine.file import ModelFile

    spec = models.SPECS["llama-relu"]
    tensors = models.file_tensors(spec, models.draw(spec))
    digests = set()
    for change in ("", "weight", "key"):
        changed = {name: value.copy() for name, value in tensors.items()}
        meta = models.metadata(spec)
        if change == "weight":
            changed["blk.1.ffn_up.weight"][0, 0] += 1
        if change == "key":
            meta["powerinfer.hidden_act_threshold"] = 0.25
        path = models.write(tmp_path / "model.gguf", meta, changed)
        with ModelFile(path) as file:
            digests.add(build.digest_of(file))
            assert build.digest_of(file) in digests
    assert len(digests) == 3
    assert build.digest_of_windows(windows_of()) == build.digest_of_windows(windows_of())
    assert build.digest_of_windows(windows_of(1)) != build.digest_of_windows(windows_of(2))


def test_results_survive_being_written(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", {}, own=True)
    curve = build.Curve()
    curve.add(np.array([[0.1, 2.0, -3.0]], np.float32), np.array([[0.0, 1.0, 0.5]], np.float32))
    net = build.Net(fc1=np.ones((32, 4), np.float32), fc2=np.ones((3, 32), np.float32))
    trial = size.Trial(rank=32, accuracy=0.9, bytes=0.5)
    point = curve.at(curve.threshold(0.6))
    result = LayerResult(
        layer=5, rank=32, threshold=point.threshold, point=point, skewness=0.25, bytes=0.5, tried=(trial,)
    )
    work.finish(net, result)
    assert work.result(5) == result
    assert work.result(4) is None
    np.testing.assert_array_equal(work.net(5).fc2, net.fc2)
    assert json.loads((work.folder / "layer_5.json").read_text())["point"]["threshold"] == result.threshold
    work.delete()
    assert not (tmp_path / "work").exists()
