"""The page about performance says what its raw results say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from scripts import performance_tables as tables

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "model": "llama-2-7b-8l-Q4_K_M.gguf",
    "model_types": {"Q4_K": 3, "Q6_K": 1},
    "isa": "amx",
    "threads": 2,
    "test": "tg32",
    "n_prompt": 0,
    "n_seq": 1,
    "sparsity": "dense",
    "tokens_per_s": 10.0,
    "median": 10.0,
    "spread": 0.25,
    "bytes_per_token": 1e9,
    "read_gb_s": 10.0,
    "ceiling_gb_s": 20.0,
    "ceilings_gb_s": [19.0, 21.0],
    "share": 0.5,
    "active": 0.1,
    "gflop_per_s": None,
    "command": "powerinfer bench /home/me/models/m.gguf -p 0",
    "n_parameters": 1000,
    "n_vocab": 10,
    "n_embd": 10,
    "cpu": "a processor",
    "n_cores": 2,
    "memory_bytes": 1 << 34,
    "os": "Linux",
    "huge_pages": "madvise",
    "build": "gcc",
    "commit": "abc",
    "version": "1",
}


def write(folder: Path, part: str, *rows: object) -> None:
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_the_pages_are_up_to_date(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "python scripts/performance_tables.py"
    assert page.count("<!-- table:") == page.count("<!-- end -->") == len(tables._TABLE.findall(page))


def test_numbers_of_sequences_of_each_file_and_set(tmp_path: Path) -> None:
    rows = [RUN | {"isa": isa, "n_seq": n, "median": 10.0 * n} for isa in ("amx", "avx2") for n in (1, 8)]
    write(tmp_path, "widths", *rows, RUN | {"model": "b.gguf", "n_seq": 2})
    assert tables.widths_table(tmp_path).splitlines() == [
        "| model | set | 1 | 2 | 8 |",
        "|---|---|---:|---:|---:|",
        "| llama-2-7b-8l-Q4_K_M | amx | 10 |  | 80 |",
        "| llama-2-7b-8l-Q4_K_M | avx2 | 10 |  | 80 |",
        "| b | amx |  | 10 |  |",
    ]


def test_sequences_are_compared_with_one_of_the_same_run(tmp_path: Path) -> None:
    budget = {"budgets": [8 << 30]}
    eight = {"n_seq": 8, "median": 45.0, "tokens_per_s": 45.0}
    write(tmp_path, "many", RUN, RUN | eight, RUN | budget | {"median": 30.0}, RUN | eight | budget)
    cells = [line.split(" | ") for line in tables.many_table(tmp_path).splitlines()[2:]]
    assert [(row[1], row[2], row[-1]) for row in cells] == [
        *(("none", "1", "1.00 |"), ("none", "8", "4.50 |")),
        *(("8", "1", "1.00 |"), ("8", "8", "1.50 |")),
    ]


def test_modes_are_compared_with_dense(tmp_path: Path) -> None:
    write(tmp_path, "decode", RUN, RUN | {"sparsity": "exact", "median": 15.0, "share": None})
    lines = tables.decode_table(tmp_path).splitlines()
    assert lines[2] == "| Q4_K_M | dense | 10.00 ± 0.25 | 1000 | 10.0 | 20.0 | 50 % | 10.0 % | 1.00 |"
    assert lines[3].endswith("|  | 10.0 % | 1.50 |")
    write(tmp_path, "decode", RUN | {"share_spread": 0.034})
    assert " | 50 % ± 3 | " in tables.decode_table(tmp_path)
    machine = tables.machine_table(tmp_path)
    assert "a processor, 2 cores, 16 GiB" in machine and "19.0 to 21.0 GB/s" in machine


def test_a_crashed_peer_stands_in_the_table(tmp_path: Path) -> None:
    peer = {"version": "1", "system_info": "CPU | X", "failures": {"pp8": "ended by SIGSEGV: tiles"}}
    own = {"tokens_per_s": 10.0}
    results = [
        {"test": "pp8", "mode": "dense", "powerinfer": own, "share": None, "peers": {}},
        {
            "test": "tg4",
            "mode": "dense",
            "powerinfer": own,
            "share": 0.5,
            "peers": {"native": {"tokens_per_s": 5.0, "ratio": 2.0}},
        },
    ]
    report = {"powerinfer": RUN, "peers": {"native": peer}, "results": results}
    report |= {"threads": 2, "command": "bench_peers.py m.gguf"}
    special = report | {"threads": 1, "command": "bench_peers.py m.gguf --no-mmap"}
    write(tmp_path, "peers", report, special)
    lines = tables.peers_table(tmp_path).splitlines()
    assert lines[2] == "| native (amx here) | Q4_K_M, pp8, dense | 10.00 | ended by SIGSEGV |  |  |"
    assert lines[3] == "| native (amx here) | Q4_K_M, tg4, dense | 10.00 | 5.00 | **2.00** | 50 % |"
    assert lines[5].startswith("| native (amx here) | Q4_K_M, tg4, dense, 1 thread, memory of its own |")
    assert "CPU , X" in tables.peer_versions_table(tmp_path)


def test_mixtures_beside_the_peer(tmp_path: Path) -> None:
    peers = {"avx512": {"tokens_per_s": 20.0, "ratio": 3.0}}
    row = {"mode": "exact", "powerinfer": {"tokens_per_s": 60.0}, "peers": peers, "bytes_per_token": 5e8}
    results = [row | {"test": "pp512", "share": None}, row | {"test": "tg32", "share": 0.9}]
    about = RUN | {"model": "m-8l-Q4_0.powerinfer.gguf"}
    write(tmp_path, "mixtures", {"powerinfer": about, "peers": {}, "results": results, "threads": 2})
    lines = tables.mixtures_table(tmp_path).splitlines()
    assert lines[2] == "| m-8l-Q4_0 | pp512, exact | amx | 60 | 20 | **3.00** |  |  |"
    assert lines[3] == "| m-8l-Q4_0 | tg32, exact | amx | 60 | 20 | **3.00** | 500 | 90 % |"
    write(tmp_path, "mixtures-many", RUN)
    assert "| 1 | 10.00 ± 0.25 |" in tables.mixtures_many_table(tmp_path)


def test_lines_of_the_kernels(tmp_path: Path) -> None:
    line = "avx512 Q4_0  2 threads: read  30.1 GB/s | dot  26.2 ( 87 %) | axpy  16.4 ( 54 %) | rows 2.0 (7 %)"
    line += " | listed   9.0 ( 30 %) | exact  18.5 (101 %) | in cache: dot 43.7, axpy 54.4\n"
    (tmp_path / "kernels.txt").write_text(line, encoding="utf-8")
    last = tables.kernels_table(tmp_path).splitlines()[-1]
    assert last == "| avx512 | Q4_0 | 30.1 | 26.2 (87 %) | 16.4 (54 %) | 9.0 (30 %) |  | 18.5 (101 %) |"


GPU_RUN = {
    "shape": "falcon-40b",
    "type": "F16",
    "layers": 20,
    "prompts": [64, 512],
    "budget": 8.4,
    "sparsity": "predicted",
    "active": 200.0,
    "active_gpu": 50.0,
    "tokens_per_s": 50.0,
    "best_tokens_per_s": 62.5,
    "goal_here": 75.0,
    "ms": 20.0,
    "mb_per_token": 9000.0,
    "share_if_all_on_gpu": 0.125,
    "gpu_counted_gib": 8.125,
    "prompt_tokens_per_s": {"64": 1234.4},
    "plan": {"hot_share": 0.25, "expected_tokens_per_s": 40.0},
    "ceilings": {
        "before": {"gpu": 4100.0, "cpu": 150.0, "copy": 55.5, "in_place": 51.0, "threads": 15},
        "after": {"gpu": 4200.0, "cpu": 100.0, "copy": 55.25, "in_place": 51.0, "threads": 15},
    },
}


def test_tables_of_a_gpu(tmp_path: Path) -> None:
    report = {"commit": "", "cpu": "a processor", "isa": "amx", "gpu": "a card", "rows": {"falcon": GPU_RUN}}
    (tmp_path / "gpu.json").write_text(json.dumps(report), encoding="utf-8")
    last = tables.gpu_decode_table(tmp_path).splitlines()[-1]
    assert last.startswith(
        "| falcon-40b F16, 20 layers | predicted | 8.12 of 8.4 | 25 % | 25 % | 50.0 | 62.5 |"
    )
    assert last.endswith("| 75 | 150, 100 | 40.0 | 9000 | 450 | 12 % |  |")
    older = {name: value for name, value in GPU_RUN.items() if name != "goal_here"}
    (tmp_path / "gpu.json").write_text(json.dumps(report | {"rows": {"falcon": older}}), encoding="utf-8")
    assert "| 62.5 |  | 150, 100 | 40.0 |" in tables.gpu_decode_table(tmp_path)
    last = tables.gpu_prompt_table(tmp_path).splitlines()[-1]
    assert last == "| falcon-40b F16, 20 layers | 8.4 GiB | 64 | 1,234 | 25 % |"
    long = GPU_RUN | {"layers": 0, "prompts": [256, 4096]}
    assert tables.row_title(long) == "falcon-40b F16, chunks of 2048"
    machine = tables.gpu_machine_table(tmp_path)
    assert "a processor, 15 threads, amx" in machine and "commit" not in machine
    rows = {"a": GPU_RUN | {"commit": "abc", "date": "2026-11-29"}, "b": GPU_RUN}
    (tmp_path / "gpu.json").write_text(json.dumps(report | {"commit": "def", "rows": rows}), encoding="utf-8")
    assert "| commit | abc (2026-11-29), def |" in tables.gpu_machine_table(tmp_path)
    one, other = tables.gpu_decode_table(tmp_path).splitlines()[-2:]
    assert one.endswith("| 12 % | abc (2026-11-29) |") and other.endswith("| 12 % | def |")
    assert "| 4,100 to 4,200 GB/s, in 2 measurements" in machine and "| 55.2 to 55.5 GB/s |" in machine


def test_commands_without_places(tmp_path: Path) -> None:
    write(tmp_path, "decode", RUN, RUN)
    assert list(tables.commands(tmp_path)) == ["POWERINFER_ISA=amx powerinfer bench m.gguf -p 0"]


def test_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import performance_pictures as pictures

    assert not pictures.roofline(tmp_path, tmp_path / "r.png")
    write(tmp_path, "decode", RUN)
    write(tmp_path, "prompt", RUN | {"n_prompt": 8, "gflop_per_s": 500.0, "bytes_per_token": 1e8})
    write(tmp_path, "peak", {"threads": 2, "avx2_fma": 200})
    assert pictures.roofline(tmp_path, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    pictures.speed_picture(tables.FOLDERS, tmp_path / "speed.svg")
    drawn = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    named = set(re.findall("<!-- (.*?) -->", drawn))
    assert {"F16, llama.cpp", "Q4_0, predicted"} <= named
    measured = {
        f" {ours:.0f}"
        for (kind, _), (ours, _, _) in tables.beside(
            tables.FOLDERS / next(iter(tables.MACHINES)), "tg"
        ).items()
        if kind in ("F16", "Q4_0")
    }
    assert len(measured) == 6 and measured <= {f" {name.strip()}" for name in named}


@pytest.mark.parametrize("words", [[], ["models", "out", "nonsense"]])
def test_the_script_refuses(words: list[str], tmp_path: Path) -> None:
    program = ["bash", str(ROOT / "scripts" / "bench_cpu.sh"), *words]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr
