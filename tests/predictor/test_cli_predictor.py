"""The command `powerinfer predictor`, end to end on small models."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer._engine.session import Model
from powerinfer.cli import main
from powerinfer.cli import predictor as command
from powerinfer.models.predictor import build
from powerinfer.models.writer import PartialFile
from tests import models, reference
from tests.predictor.small import planted, text

Captured = pytest.CaptureFixture[str]
QUICK = ("--tokens", "900", "--held-out", "300", "-c", "64", "-t", "1")
TRAIN = (*QUICK, "--steps", "20", "--batch", "64", "--budget", "0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.gguf, an ordinary ReLU Llama with planted gates; silu.gguf; a text to learn from, and another."""
    folder = tmp_path_factory.mktemp("predictor")
    planted(folder / "model.gguf")
    models.write_dense(folder / "silu.gguf", models.SPECS["llama-mha"])
    (folder / "text.txt").write_text(text(1500))
    (folder / "held.txt").write_text(text(800, seed=2))
    return folder


def run(folder: Path, *words: str) -> int:
    """The command with names of files in the folder."""
    files = {"model.gguf", "silu.gguf", "text.txt", "held.txt"}
    return main(["predictor", *(str(folder / word) if word in files else word for word in words)])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def check(folder: Path, path: Path, capsys: Captured, *more: str) -> dict[str, object]:
    capsys.readouterr()
    words = ("--text", "held.txt", "--tokens", "300", "-c", "64", "-t", "1", "--single", "4", "--chunks", "2")
    assert run(folder, "check", str(path), *words, "--json", *more) == 0
    out: dict[str, object] = json.loads(capsys.readouterr().out)
    assert out["n_disagreed"] == 0
    return out


# ---- what is made


def test_train_makes_a_powerinfer_file_and_a_folder(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("torch")
    out, predictors = tmp_path / "out.gguf", tmp_path / "predictors"
    words = ("train", "model.gguf", "--text", "text.txt", *TRAIN, "--rank", "96")
    assert run(folder, *words, "-o", str(out), "--predictors-dir", str(predictors)) == 0
    shown = capsys.readouterr()
    assert names(tmp_path) == {"out.gguf", "predictors"}  # the working folder is gone
    lines = shown.out.splitlines()
    head = "layer rank threshold active computed recall precision mass accuracy bytes"
    assert lines[0].split() == head.split()
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "96"], ["1", "96"]]
    assert "predictors: F16" in shown.out
    assert "layer 0 has rank 96" in shown.err
    new = reference.load(out)
    assert (
        new.sparse
        and new.meta["powerinfer.predictor"] == "mlp"
        and new["blk.1.fc2.weight"].shape == (1024, 96)
    )
    thresholds = new.meta["powerinfer.sparse_thresholds"]
    assert [f"{x:.4g}" for x in thresholds] == [line.split()[2] for line in lines[1:3]]
    assert json.loads((predictors / "config.json").read_text())["sparse_thresholds"] == thresholds
    result = check(folder, out, capsys)
    assert result["predictor"] == "mlp"
    assert all(layer["point"]["mass"] > 0.9 for layer in result["layers"])  # type: ignore[attr-defined]


def test_the_size_is_searched_within_the_budget(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "out.gguf"
    words = ("train", "model.gguf", "--text", "text.txt", *TRAIN, "--accuracy", "0.999", "--json")
    assert run(folder, *words, "--budget", "0.15", "-o", str(out)) == 0
    shown = capsys.readouterr()
    made = json.loads(shown.out)
    assert 0.02 < made["share"] <= 0.15 and made["type"] == "F16"
    for layer in made["layers"]:
        accuracies = {trial["rank"]: trial["accuracy"] for trial in layer["tried"]}
        assert len(accuracies) > 1
        assert layer["accuracy"] == accuracies[layer["rank"]] == max(accuracies.values())
    assert "2 of 2 layers stay below an accuracy of 99.9 %" in shown.err
    n_bytes = sum(2 * layer["rank"] * (256 + 1024) for layer in made["layers"])
    assert made["bytes"] == n_bytes
    assert run(folder, *words, "--budget", "0.15", "--size-by", "bytes", "-o", str(out)) == 0
    shown = capsys.readouterr()
    assert "below" not in shown.err
    for layer in json.loads(shown.out)["layers"]:
        read = {trial["rank"]: trial["bytes"] for trial in layer["tried"]}
        assert layer["bytes"] == read[layer["rank"]] == min(read.values())


def test_svd_needs_no_text(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out.gguf"
    assert run(folder, "svd", "model.gguf", "--rank", "128", "--budget", "1", "-o", str(out)) == 0
    assert "128" in capsys.readouterr().out
    assert reference.load(out).meta["powerinfer.sparse_thresholds"] == [0.0, 0.0]
    result = check(folder, out, capsys)
    for layer in result["layers"]:  # type: ignore[attr-defined]
        assert layer["point"]["recall"] > 0.99 and layer["point"]["precision"] > 0.99  # the gates' rank is 32
    words = (
        "svd",
        "model.gguf",
        "--text",
        "text.txt",
        *QUICK,
        "--budget",
        "1",
        "--rank",
        "64",
        "--target",
        "0.97",
    )
    assert run(folder, *words, "-o", str(out)) == 0
    result = check(folder, out, capsys)
    assert all(layer["point"]["mass"] > 0.93 for layer in result["layers"])  # type: ignore[attr-defined]
    assert names(tmp_path) == {"out.gguf"}


def test_sign_adds_keys_alone(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out.gguf"
    assert (
        run(folder, "sign", "model.gguf", "--text", "text.txt", "--tokens", "600", "-t", "1", "-o", str(out))
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "threshold", "active", "computed", "recall", "precision", "mass"]
    old, new = reference.load(folder / "model.gguf"), reference.load(out)
    assert not new.sparse and set(new.tensors) == set(old.tensors)
    assert new.meta["powerinfer.predictor"] == "sign"
    with Model(out) as model:
        assert model.info.predictor == "sign"
        assert [f"{x:.4g}" for x in model.thresholds] == [line.split()[1] for line in lines[1:]]
    result = check(folder, out, capsys)
    assert result["predictor"] == "sign"


def test_sign_warns_of_a_quantised_down(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    small = tmp_path / "small.gguf"
    assert main(["quantize", str(folder / "model.gguf"), str(small), "Q8_0"]) == 0
    words = ("--text", "text.txt", "--tokens", "300", "-t", "1", "-o", str(tmp_path / "out.gguf"))
    for model, warns in ((str(small), True), ("model.gguf", False)):
        capsys.readouterr()
        assert run(folder, "sign", model, *words) == 0
        assert ("ffn_down is quantised and stays stored by output" in capsys.readouterr().err) == warns


def test_calibrating_moves_thresholds_and_nothing_else(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    source = planted(tmp_path / "sparse.gguf", sparse=True)
    out = tmp_path / "out.gguf"
    words = ("--text", "text.txt", "--tokens", "600", "-t", "1", "-c", "64")
    assert run(folder, "calibrate", str(source), *words, "--target", "0.9", "-o", str(out)) == 0
    old, new = reference.load(source), reference.load(out)
    assert new.sparse and all(
        x > 0 for x in new.meta["powerinfer.sparse_thresholds"]
    )  # the predictor is exact at 0
    for name, value in old.tensors.items():
        np.testing.assert_array_equal(new[name], value)
    capsys.readouterr()
    assert run(folder, "calibrate", "model.gguf", *words, "-o", str(out)) == 1
    assert "no predictors to calibrate" in capsys.readouterr().err


def test_a_quantised_model_gets_predictors_of_its_format(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    spec = models.SPECS["llama-relu"]
    source = models.write_dense(tmp_path / "q.gguf", spec, kind=GGMLQuantizationType.Q8_0)
    out = tmp_path / "out.gguf"
    words = ("svd", str(source), "--rank", "32", "--budget", "1")
    assert run(folder, *words, "-o", str(out), "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["type"] == "Q8_0"
    assert shown.err.count("rounded once more") == 1
    assert run(folder, *words, "-o", str(out), "--predictor-type", "f16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["type"] == "F16"


# ---- check


def test_check_shows_and_writes(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    source = planted(tmp_path / "sparse.gguf", sparse=True)
    (tmp_path / "docs").mkdir()
    page, picture = tmp_path / "docs" / "check.md", tmp_path / "check.png"
    words = ("--text", "held.txt", "--tokens", "300", "-c", "64", "-t", "1", "--single", "4", "--chunks", "2")
    assert run(folder, "check", str(source), *words, "--report", str(page), "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    for word in ("perplexity", "FFN rows read", "agree on all", "recall", "target", "99.9 %"):
        assert word in out
    assert "](../check.png)" in page.read_text()
    assert picture.stat().st_size > 1000
    assert run(folder, "check", str(source), *words, "--threshold", "1e9") == 0
    out = capsys.readouterr().out
    assert "0.0 %" in out  # nothing is predicted any more


def test_json_is_json(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    out = check(folder, folder / "model.gguf", capsys, "--predictor", "sign", "--sweep")
    text = json.dumps(out)
    assert "NaN" not in text and "Infinity" not in text
    assert len(out["trade_off"]) == 6  # type: ignore[arg-type]


# ---- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train", "silu.gguf", "--text", "text.txt", "-o", "x.gguf"),
            "activation is silu.*--activation relu",
        ),
        (
            ("sign", "silu.gguf", "--text", "text.txt", "-o", "x.gguf"),
            "the model's activation is silu: no neuron is ever silent",
        ),
        (("check", "silu.gguf", "--text", "held.txt"), "no neuron is ever silent"),
        (("check", "model.gguf", "--text", "held.txt"), "has no predictor"),
        (("sign", "model.gguf", "--text", "missing.txt", "-o", "x.gguf"), "missing.txt.*cannot be read"),
        (("sign", "missing.gguf", "--text", "text.txt", "-o", "x.gguf"), "missing.gguf"),
        (("svd", "model.gguf"), "nothing would be written"),
        (("svd", "model.gguf", "-o", "nowhere/x.gguf"), "nowhere/x.gguf cannot be written"),
        (("svd", "model.gguf", "-o", "x.gguf", "--rank", "33"), "multiple of 32"),
        (("svd", "model.gguf", "-o", "x.gguf", "--rank", "-32"), "at least 0"),
        (("svd", "model.gguf", "-o", "x.gguf", "--budget", "0.0001"), "take [1-9].* KiB, but the budget is"),
        (("svd", "model.gguf", "-o", "x.gguf", "--budget", "-1"), "above 0"),
        (("svd", "model.gguf", "-o", "x.gguf", "--budget", "nan"), "above 0"),
        (("svd", "model.gguf", "-o", "x.gguf", "--budget", "inf"), "above 0"),
        (("svd", "model.gguf", "-o", "x.gguf", "--spool-gib", "inf"), "above 0"),
        (("check", "model.gguf", "--text", "held.txt", "--threshold", "nan"), "--threshold is nan"),
        (("check", "model.gguf", "--text", "held.txt", "--threshold", "inf"), "--threshold is inf"),
        (("check", "model.gguf", "--text", "short.txt", "--report", "short.txt"), "which is the text"),
        (("svd", "model.gguf", "--text", "short.txt", "-o", "./short.txt"), "which is the text"),
        (("svd", "model.gguf", "-o", "x", "--predictors-dir", "x"), "which is --output as well"),
        (
            ("train", "model.gguf", "--text", "text.txt", *TRAIN, "-o", "x.gguf", "--device", "meta"),
            "on the device meta",
        ),
        (("svd", "model.gguf", "-o", "x.gguf", "--target", "1.5"), "between 0 and 1"),
        (("svd", "model.gguf", "-o", "x.gguf", "--predictor-type", "Q4_K"), "cannot have the format Q4_K"),
        (("svd", "model.gguf", "-o", "x.gguf", "--text", "short.txt"), "too little"),
        (("check", "model.gguf", "--text", "short.txt", "--predictor", "sign"), "at least"),
        (("check", "model.gguf", "--text", "held.txt", "--plot", "x.bmp"), "picture's name ends in"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: Sequence[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("the rain")
    if words[0] == "train":
        pytest.importorskip("torch")
    assert run(folder, *words) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("powerinfer: ")
    assert re.search(message, line), line
    assert names(tmp_path) == {"short.txt"}


def test_training_without_torch_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(folder, "train", "model.gguf", "--text", "text.txt", "-o", str(tmp_path / "x.gguf")) == 1
    assert "pip install torch (the extra powerinfer[train])" in capsys.readouterr().err


def test_a_text_shorter_than_wanted_is_said(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "x.gguf"
    assert (
        run(
            folder,
            "sign",
            "model.gguf",
            "--text",
            "text.txt",
            "--tokens",
            "90000",
            "-c",
            "64",
            "-t",
            "1",
            "-o",
            str(out),
        )
        == 0
    )
    assert "of the 90,000 tokens that were wanted" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["train", "svd", "sign", "calibrate", "check"])
def test_help_opens_with_an_example(action: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["predictor", action, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"  powerinfer predictor {action} " in shown
    assert shown.index("example:") < shown.index("options:")


def test_a_report_does_not_replace_the_model(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    source = planted(tmp_path / "sparse.gguf", sparse=True)
    assert run(folder, "check", str(source), "--text", "held.txt", "--report", str(source)) == 1
    assert "which is the model" in capsys.readouterr().err
    assert source.read_bytes()[:4] == b"PWRI"


def test_what_becomes_of_a_models_own_predictors_is_said(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    source = planted(tmp_path / "sparse.gguf", sparse=True)
    out = tmp_path / "out.gguf"
    assert run(folder, "svd", str(source), "--rank", "32", "--budget", "1", "-o", str(out)) == 0
    assert "the new ones in their place" in capsys.readouterr().err
    assert reference.load(out)["blk.0.fc2.weight"].shape == (1024, 32)
    words = ("--text", "text.txt", "--tokens", "300", "-c", "64", "-t", "1")
    assert run(folder, "sign", str(source), *words, "-o", str(out)) == 0
    assert "stay in the result, but are not used" in capsys.readouterr().err
    more = ("--single", "1", "--chunks", "2", "--predictor", "sign")
    for path, is_said in ((source, True), (out, False)):
        assert run(folder, "check", str(path), *words, *more) == 0
        assert ("no thresholds for sign" in capsys.readouterr().err) == is_said


# ---- runs that end early


def test_ctrl_c_keeps_what_is_finished(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The same command goes on with the other layer, and leaves the file that an undisturbed run leaves."""
    pytest.importorskip("torch")
    words = ("train", "model.gguf", "--text", "text.txt", *TRAIN, "--rank", "32", "-o")
    assert run(folder, *words, str(tmp_path / "whole.gguf")) == 0
    original, trained = build.train_layer, []

    def once(*args: object) -> object:
        if trained:
            raise KeyboardInterrupt
        trained.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "train_layer", once)
    out = tmp_path / "out.gguf"
    capsys.readouterr()
    assert run(folder, *words, str(out)) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert names(tmp_path) == {"whole.gguf", ".out.gguf.work"}
    monkeypatch.setattr(build, "train_layer", original)
    assert run(folder, *words, str(out)) == 0
    assert capsys.readouterr().err.count("has rank") == 1
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert names(tmp_path) == {"whole.gguf", "out.gguf"}


def test_another_run_starts_afresh_but_not_in_a_folder_of_the_user(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pytest.importorskip("torch")
    words = (
        "train",
        "model.gguf",
        "--text",
        "text.txt",
        *TRAIN,
        "--rank",
        "32",
        "-o",
        str(tmp_path / "x.gguf"),
    )
    work = tmp_path / "work"
    assert run(folder, *words, "--work-dir", str(work)) == 0
    assert names(work) == {
        "run.json",
        *(f"{n}_{i}.{e}" for n, e in (("model", "pt"), ("layer", "json")) for i in (0, 1)),
    }
    capsys.readouterr()
    assert run(folder, *words, "--work-dir", str(work)) == 0  # everything is there
    assert "has rank" not in capsys.readouterr().err
    assert run(folder, *words, "--work-dir", str(work), "--seed", "7") == 1
    assert "another run (training)" in capsys.readouterr().err


def test_a_killed_run_leaves_no_file_that_looks_finished(folder: Path, tmp_path: Path) -> None:
    """Killed as soon as there is anything, and again somewhat later."""
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "powerinfer", "predictor", "train", str(folder / "model.gguf"), "--text"]
    words += [str(folder / "text.txt"), *TRAIN, "--steps", "100000", "-o", str(tmp_path / "out.gguf")]
    words += ["--predictors-dir", str(tmp_path / "predictors")]
    process = subprocess.Popen(words, env=os.environ, cwd=Path(__file__).parents[2])
    work = tmp_path / ".out.gguf.work"
    while process.poll() is None and not list(work.glob("activations.*/mass_*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(tmp_path) == {".out.gguf.work"}
    assert not list(work.glob("layer_*.json"))


def test_a_full_disk_leaves_the_old_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    words = ("svd", "model.gguf", "--rank", "32", "--budget", "1", "-o", str(out))
    original, written = PartialFile.write, []

    def write(self: PartialFile, data: object) -> None:
        """The fourth piece finds the disk full."""
        written.append(self.path)
        if written.count(out) == 4:
            self.stream.close()
            self.stream = open("/dev/full", "wb")  # noqa: SIM115
        original(self, data)

    monkeypatch.setattr(PartialFile, "write", write)
    assert run(folder, *words) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert out.read_bytes() == b"old"
    assert names(tmp_path) == {"out.gguf"}


def test_arguments_are_checked_before_anything_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ModelFile", None)  # opening a model would be a TypeError
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    assert run(folder, "svd", "model.gguf", "--predictors-dir", str(tmp_path / "there")) == 1
    assert run(folder, "svd", "model.gguf", "-o", str(tmp_path)) == 1
    assert run(folder, "check", "model.gguf", "--text", "held.txt", "--single", "0") == 1
