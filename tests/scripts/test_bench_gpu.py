"""bench_gpu.py's rows, and what it measures besides, on the CPU and the stand-in."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from powerinfer import Llama
from powerinfer._engine.session import Model, Session
from powerinfer._llama import online
from tests import models

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_gpu  # noqa: E402
import gpu_rows  # noqa: E402
import make_dense  # noqa: E402
import make_mixture  # noqa: E402
import make_model  # noqa: E402


def test_every_row_has_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows share a file only where make_model.py is called alike for both; and it knows all options."""
    made: dict[str, list[str]] = {}

    def run(command: list[str], **_: object) -> None:
        made.setdefault(command[-1], command[2:-1])
        assert made[command[-1]] == command[2:-1]
        parser_of = {"--format", "--layers", "--type", "--active", "--counted", "--skew", "--rho"}
        assert {word for word in command[3:-2] if word.startswith("--")} <= parser_of | {"--statistics"}

    monkeypatch.setattr(gpu_rows.subprocess, "run", run)
    shapes = {*make_model.SHAPES, *make_mixture.SHAPES, *make_dense.SHAPES}
    for name, row in gpu_rows.ROWS.items():
        assert row.shape in shapes, name
        gpu_rows.make_model(row, tmp_path)
    assert len(made) > 5


def test_fewer_tokens_with_one_sequence_more() -> None:
    assert bench_gpu.fewer({1: 10.0, 2: 20.0, 3: 15.0, 4: 16.0}) == {3: 0.25}


def test_all_numbers_of_sequences_are_measured(relu_path: Path) -> None:
    row = gpu_rows.replace(gpu_rows.DENSE, n_seq=3, depth=1)
    with Model(relu_path) as model, Session(model, n_ctx=256, n_pool=1024, n_seq=3, n_threads=1) as s:
        for seq in range(3):
            s.feed([5], seq=seq)
        rates = bench_gpu.measure_widths(s, row)
        assert list(rates) == [1, 2, 3] and all(rate > 0 for rate in rates.values())
        assert max(map(s.length, range(3))) <= row.depth + bench_gpu.WIDTH_STEPS


def test_what_first_tokens_make_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.SPECS["llama-relu"]
    path = models.write_sparse(tmp_path / "m.gguf", spec, models.draw_predictor(spec), 0.0)
    monkeypatch.setattr(online, "FIRST", 20)
    monkeypatch.setattr(bench_gpu, "FIRST", 20)
    monkeypatch.setattr(bench_gpu, "Llama", partial(Llama, devices="host", seed=1, n_batch=16))
    row = gpu_rows.replace(gpu_rows.BAMBOO, budget=0.002)
    plans = bench_gpu.measure_plans(row, path, 1)
    assert len(plans) == 3 and all(plan["measured_tokens_per_s"] > 0 for plan in plans)


def test_rows_that_are_not_measured_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(bench_gpu.machine, "cpu_name", lambda: "a processor")
    monkeypatch.setattr(bench_gpu.machine, "isa", lambda: "amx")
    here = {"cpu": "a processor", "isa": "amx", "gpu": "a card"}
    assert bench_gpu.earlier(None, "a card") == bench_gpu.earlier(path, "a card") == here | {"rows": {}}
    path.write_text(json.dumps(here | {"commit": "abc", "rows": {"a": {"ms": 1}, "b": {"commit": "def"}}}))
    rows = {"a": {"commit": "abc", "ms": 1}, "b": {"commit": "def"}}
    assert bench_gpu.earlier(path, "a card") == here | {"rows": rows}
    with pytest.raises(ValueError, match="another machine: its gpu is a card, not another"):
        bench_gpu.earlier(path, "another")
    path.write_text("[]")
    with pytest.raises(ValueError, match="no results of this script"):
        bench_gpu.earlier(path, "a card")
