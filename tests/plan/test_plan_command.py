"""`powerinfer plan`: what it prints and writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model
from powerinfer.cli import main, plan, plan_text
from powerinfer.models import plan as plans
from tests import models
from tests.native import test_mixtures as mixtures
from tests.plan.drafts import power_law, write_model

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
N_LAYER, N_FF = 30, 512
RATES = ("--gpu-gbps", "8", "--cpu-gbps", "1", "--pcie-gbps", "2", "--handover-us", "1")
SMALL = ("--overhead-mib", "0", "-b", "16", "-c", "64")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = power_law(np.random.default_rng(0), N_LAYER, N_FF, 1000)
    folder = tmp_path_factory.mktemp("plan")
    return write_model(folder / "m.gguf", n_layer=N_LAYER, n_ff=N_FF, ranks=[32] * N_LAYER, counts=counts)


def run(capsys: Captured, *words: object) -> str:
    assert main(["plan", *map(str, words), *RATES, *SMALL]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return out.out


def fails(capsys: Captured, *words: object) -> str:
    assert main(["plan", *map(str, words), *RATES, *SMALL]) == 1
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1
    return out.err


def test_json_says_what_the_library_says(path: Path, capsys: Captured) -> None:
    table = json.loads(run(capsys, path, "--vram-budget", "0.02", "--json"))
    rates = plans.find_rates(gpu_gbps=8, cpu_gbps=1, pcie_gbps=2, handover_us=1)
    settings = plans.Settings(overhead_bytes=0, n_batch=16, n_ctx=64)
    plan = plans.make_plan(path, vram_budget=0.02, rates=rates, settings=settings)
    assert table["bytes"]["total"] == plan.bytes.total <= 0.02 * 2**30
    assert table["expected"]["tokens_per_s"] == plan.expected.tokens_per_s > table["cpu_tokens_per_s"]
    assert [layer["n_hot"] for layer in table["layers"]] == [len(layer.hot) for layer in plan.layers]
    assert table["statistics"]["kind"] == "file" and len(table["layers"]) == N_LAYER


def test_for_people(path: Path, capsys: Captured) -> None:
    text = run(capsys, path, "--vram-budget", "0.02")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[0].startswith("model") and "m.gguf: llama, 30 layers of 512 neurons, predicted" in lines[0]
    assert "over 1,000 tokens" in text and "8 GB/s as given" in text and "hand-over" in text
    (total,) = (line for line in lines if line.startswith("in all"))
    assert float(total.split()[2]) <= float(total.split()[-1]) == pytest.approx(0.02)
    every = run(capsys, path, "--vram-budget", "0.02", "--layers").splitlines()
    assert len(every) >= len(lines) and sum(line.split()[:2] == ["7", "GPU"] for line in every) == 1
    assert "#" in text and "\x1b" not in text
    assert "on the CPU only" not in text and "device " not in text
    cpu = run(capsys, path, "--vram-budget", "0")
    numbers = [float(n) for n in re.findall(r"= (\S+) \+ (\S+) \+ (\S+) ms, each bytes / 1.0 GB/s", cpu)[0]]
    assert sum(numbers) == pytest.approx(
        float(re.findall(r"on the CPU alone: (\S+) ms", cpu)[0]), rel=0.01
    )  # three digits


def test_narrow_terminals(path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, and the speed is never what is cut off."""
    for width in (80, 50):
        for module in (plan, plan_text):
            monkeypatch.setattr(module, "output_width", lambda width=width: width)
        for budgets in ("0.02", "0.0001,0.02,1", "0"):
            lines = run(capsys, path, "--vram-budget", budgets).splitlines()
            assert max(map(len, lines)) <= width
            assert sum("tokens/s" in line for line in lines) >= 1
            assert not any("\u2026" in line for line in lines if "driver" in line)


def test_budgets_side_by_side(path: Path, capsys: Captured) -> None:
    lines = run(capsys, path, "--vram-budget", "0.0001,0.02,1").splitlines()
    rows = [line.split() for line in lines if " GiB  " in line]
    assert [row[0] for row in rows] == ["0.0001", "0.02", "1"]
    assert "too small" in " ".join(rows[0])
    assert float(rows[1][2]) < float(rows[2][2])
    table = json.loads(run(capsys, path, "--vram-budget", "0.0001,0.02", "--json"))
    assert "too small" in table["plans"][0]["error"] and table["plans"][1]["n_hot"] > 0
    lines = run(
        capsys, path
    ).splitlines()  # sizes that cards have: the smallest of them holds all of this model
    assert [line.split()[0] for line in lines if " GiB  " in line] == ["2"]


def test_written_files(path: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ("--vram-budget", "0.05", "-o", tmp_path / "p.json", "--export-gpuidx", tmp_path / "s.gpuidx")
    run(capsys, path, *words)
    with Model(path, load=False) as model:
        plan = plans.load_plan(tmp_path / "p.json", model, n_ctx=64, vram_budget=0.05)
        split = plans.read_gpuidx(tmp_path / "s.gpuidx", N_LAYER, N_FF)
    for layer, ids in zip(plan.layers, split.hot, strict=True):
        np.testing.assert_array_equal(layer.hot, ids)
    table = json.loads(run(capsys, path, "--import-gpuidx", tmp_path / "s.gpuidx", "--json"))
    assert table["n_hot"] == plan.n_hot and table["bytes"]["total"] == plan.bytes.total
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "s.gpuidx"]


def test_room_for_guesses(tmp_path: Path, capsys: Captured) -> None:
    """States of recurrent layers, one place more for each."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["qwen35"])
    out, total = tmp_path / "p.json", {}
    for n in (0, 6):
        table = json.loads(run(capsys, path, "--vram-budget", "2", "--json", "-o", out, "--n-guesses", n))
        total[n] = table["bytes"]["total"]
        with Model(path, load=False) as model:
            assert plans.load_plan(out, model, n_ctx=64, vram_budget=2).settings.n_guesses == n
            assert model.info.n_state_bytes > 0
            state = model.info.n_state_bytes
    assert 6 * state <= total[6] - total[0] <= 6 * (state + 256 * 4)  # rounded up in each layer


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_picture(kind: str, path: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, path, "--vram-budget", "0.02", "--picture", tmp_path / f"p.{kind}")
    data = (tmp_path / f"p.{kind}").read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]) and len(data) > 5000


def test_a_picture_of_a_model_with_a_strange_name(path: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    strange = tmp_path / "a$\\frac$b\u6a21.gguf"
    strange.symlink_to(path)
    run(capsys, strange, "--vram-budget", "0.02", "--picture", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_what_is_wrong_is_said(path: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "too small" in fails(capsys, path, "--vram-budget", "0.0001")
    assert "numbers of GiB" in fails(capsys, path, "--vram-budget", "eight")
    assert "--vram-budget is nan" in fails(capsys, path, "--vram-budget", "nan")
    assert "needs one --vram-budget" in fails(capsys, path, "--vram-budget", "1,2", "-o", tmp_path / "p.json")
    assert "needs one --vram-budget" in fails(capsys, path, "--picture", tmp_path / "p.png")
    assert "ends in .png" in fails(capsys, path, "--vram-budget", "1", "--picture", tmp_path / "p.gif")
    assert "cannot be written" in fails(capsys, path, "--vram-budget", "1", "-o", tmp_path / "no" / "p.json")
    assert "cannot open" in fails(capsys, tmp_path / "none.gguf", "--vram-budget", "1")
    assert "does not exist" in fails(capsys, path, "--import-gpuidx", tmp_path / "none")
    assert "on the CPU" in fails(capsys, path, "--vram-budget", "0", "--export-gpuidx", tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(path: Path, tmp_path: Path) -> None:
    """The extra is named; nothing else needs it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    command = [sys.executable, "-m", "powerinfer", "plan", str(path), "--vram-budget", "1", *RATES]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    done = subprocess.run(command, capture_output=True, env=env, timeout=100)
    assert done.returncode == 0 and b"tokens/s" in done.stdout
    command += ["--picture", str(tmp_path / "p.png")]
    done = subprocess.run(command, capture_output=True, env=env, timeout=100)
    assert done.returncode == 1 and b"powerinfer[plot]" in done.stderr and not (tmp_path / "p.png").exists()


def test_the_demo(capsys: Captured) -> None:
    assert main(["plan", "demo", "--vram-budget", "1", "--gpu", "4090", "--cpu-gbps", "20"]) == 0
    assert "tokens/s expected" in capsys.readouterr().out


def test_several_devices(path: Path, capsys: Captured) -> None:
    text = run(capsys, path, "--vram-budget", "0.02+0.03")
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("device "))
    assert lines[at + 1].split()[0] == "0" and lines[at + 2].startswith("1")
    assert float(lines[at + 1].split()[-3]) == pytest.approx(0.02)
    assert "of a budget of 0.050" in text
    table = json.loads(run(capsys, path, "--vram-budget", "0.02+0.03", "--json"))
    assert [d["budget_bytes"] for d in table["devices"]] == [int(0.02 * 2**30), int(0.03 * 2**30)]
    assert {layer["device"] for layer in table["layers"]} <= {-1, 0, 1}
    swept = run(capsys, path, "--vram-budget", "0.02,0.02+0.03")
    assert "0.02+0.03 GiB" in swept and "0.02 GiB" in swept
    assert "for one device" in fails(
        capsys, path, "--vram-budget", "1+1", "--import-gpuidx", path.with_name("x")
    )
    assert "1 to 16 devices" in fails(capsys, path, "--vram-budget", "+".join(["1"] * 17))


def test_neurons_read_in_place(path: Path, capsys: Captured) -> None:
    text = run(capsys, path, "--vram-budget", "0.02", "--zero-copy-gbps", "4")
    assert "more are read over PCIe" in text and re.search(r"by zero-copy: \S+ us \+ bytes / 4 GB/s", text)
    assert "4 GB/s by zero-copy as given" in text
    assert "read over PCIe" not in run(capsys, path, "--vram-budget", "0.02")


# -- mixtures


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With counts by which of each layer's experts one is used by all tokens, others seldom."""
    counts = np.tile(np.array([1000, 700, 500, 300, 200, 150, 100, 50], np.uint32), (5, 1))
    rng = np.random.default_rng(3)
    counts = np.stack([rng.permutation(row) for row in counts])
    more = {"powerinfer.expert.counts": counts.ravel(), "powerinfer.expert.tokens": np.uint64(1000)}
    return mixtures.write(tmp_path_factory.mktemp("plan") / "m.gguf", "mixtral", more=more)


def test_a_mixture_s_budgets(mixture: Path, capsys: Captured) -> None:
    """Places and hit rates are those of the plan; by hand, from the counts."""
    gib = [6.0 / 1024, 6.3 / 1024, 8 / 1024]
    budgets = ",".join(map(str, gib))
    table = json.loads(run(capsys, mixture, "--vram-budget", budgets, "--json"))
    rates = plans.find_rates(gpu_gbps=8, cpu_gbps=1, pcie_gbps=2, handover_us=1)
    settings = plans.Settings(overhead_bytes=0, n_batch=16, n_ctx=64)
    before = 0.0, table["cpu_tokens_per_s"]
    for budget, shown in zip(gib, table["plans"], strict=True):
        plan = plans.make_plan(mixture, vram_budget=budget, rates=rates, settings=settings)
        assert shown["places"] == [len(layer.hot) for layer in plan.layers]
        with Model(mixture, load=False) as model:
            counts = find_counts(model)
            other = plans.make_plan(
                model,
                vram_budget=budget,
                rates=rates,
                settings=settings,
                statistics=plans.unknown_experts(model),
            )
        counts += 0.5  # planners take nothing for impossible
        by_hand = sum(row[layer.hot].sum() for row, layer in zip(counts, plan.layers, strict=True))
        assert shown["hit_rate"] == pytest.approx(by_hand / counts.sum())
        assert shown["assumed"]["hit_rate"] == other.carried
        assert shown["assumed"]["tokens_per_s"] == other.expected.tokens_per_s
        speed = shown["expected"]["tokens_per_s"]
        assert shown["tokens_per_s_per_gib"] == pytest.approx((speed - before[1]) / (budget - before[0]))
        before = budget, speed
    assert 0 < table["plans"][1]["hit_rate"] < table["plans"][2]["hit_rate"] == 1
    text = run(capsys, mixture, "--vram-budget", budgets)
    head = next(line for line in text.splitlines() if line.lstrip().startswith("budget"))
    assert head.split("  ")[-3:] == ["a layer", "found there", "assumed"]
    assert "by the file's counts and as assumed without any" in " ".join(text.split())
    row = text.splitlines()[text.splitlines().index(head) + 2]
    places = table["plans"][1]["places"]
    wanted = f"{min(places)}" if min(places) == max(places) else f"{min(places)}-{max(places)}"
    assert row.split()[-3:-1] == [wanted, f"{table['plans'][1]['hit_rate']:.0%}"]


def find_counts(model: Model) -> Any:
    found = plans.find_statistics(model).counts
    assert found is not None
    return found.astype(float)


def test_a_mixture_s_plan_for_people(mixture: Path, tmp_path: Path, capsys: Captured) -> None:
    text = run(capsys, mixture, "--vram-budget", 8 / 1024)
    assert "places       8 of 8 experts in every layer" in text
    assert "found there  100% of those that a token chooses (without the file's counts" in text
    assert "hot neurons" not in text and "\nexperts " in text
    text = run(capsys, mixture, "--vram-budget", 6.3 / 1024)
    assert re.search(r"^places {7}(of 8 experts \d in layers? |\d of 8 experts in every layer)", text, re.M)
    bare = mixtures.write(tmp_path / "n.gguf", "mixtral")
    text = run(capsys, bare, "--vram-budget", 6.3 / 1024)
    assert "some are used by three times as many tokens as others (assumed)" in " ".join(text.split())
    shown = json.loads(run(capsys, bare, "--vram-budget", 6.3 / 1024, "--json"))
    assert shown["assumed"]["hit_rate"] == shown["hit_rate"] > 0
    text = " ".join(run(capsys, bare, "--vram-budget", "0.001,0.0062").split())
    assert "too small" in text and "assumed gain" not in text and "a session finds out which" in text
