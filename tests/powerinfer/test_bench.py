"""The instrument: which cases are measured, what is counted, and how it is printed."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import bench
from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from powerinfer.bench.measure import prompt_flop
from powerinfer.cli import main
from powerinfer.errors import ArgumentError, ClosedError
from scripts import make_mixture, make_model
from tests.native.test_mixtures import write as write_mixture

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read rate is measured over a few megabytes."""
    monkeypatch.setattr("powerinfer._engine.machine.sample_bytes", lambda most: 8 << 20)


def printed(words: str, capsys: Captured) -> list[dict[str, Any]]:
    assert main(["bench", *shlex.split(words), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return [json.loads(line) for line in captured.out.splitlines()]


# -- cases


def test_lists_are_combined() -> None:
    found = bench.cases(["8,16", "8"], ["0"], ["4,2"], ["0,64"])
    assert [case.name for case in found] == [
        *("pp8", "pp16", "pp4+tg2"),
        *("pp8 @ d64", "pp16 @ d64", "pp4+tg2 @ d64"),
    ]
    assert [case.n_tokens for case in found] == [8, 16, 6] * 2


def test_sequences_multiply_decoding_alone() -> None:
    found = bench.cases(["8"], ["4"], ["4,2"], ["0"], ["1,3"])
    assert [case.name for case in found] == ["pp8", "tg4", "tg4 x 3", "pp4+tg2"]
    assert [case.n_tokens for case in found] == [8, 4, 12, 6]
    with pytest.raises(ArgumentError, match="-np 0"):
        bench.cases(["8"], ["4"], [], ["0"], ["0"])


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "1.5", "1e3", "1_0", "²", "٣", "1 2"])
def test_bad_lists_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="-p"):
        bench.numbers("-p", ["4", text])


@pytest.mark.parametrize("text", ["0", "-1"])
def test_a_batch_of_no_tokens_is_refused(text: str, capsys: Captured) -> None:
    assert main(["bench", "demo", "-b", text]) == 1
    assert f"-b {text}" in capsys.readouterr().err


# -- what is measured


def test_each_mode_reads_its_own_bytes(capsys: Captured) -> None:
    out = printed("demo -p 32 -n 4 -r 2 -t 1 --sparsity dense,exact,predicted", capsys)
    assert [(r["test"], r["sparsity"]) for r in out] == [
        (test, mode) for test in ("pp32", "tg4") for mode in ("dense", "exact", "predicted")
    ]
    dense, exact, predicted = out[3:]
    assert dense["bytes_per_token"] > exact["bytes_per_token"] > predicted["bytes_per_token"]
    assert dense["computed"] == 1 and exact["computed"] == exact["active"] == dense["active"]
    assert 0 < predicted["active"] <= predicted["computed"] < 1
    assert dense["logits"] == exact["logits"] != predicted["logits"]
    for r in out:
        assert len(r["seconds"]) == 2 and min(r["seconds"]) > 0
        speeds = [(r["n_prompt"] + r["n_gen"]) / s for s in r["seconds"]]
        assert r["tokens_per_s"] == pytest.approx(np.mean(speeds))
        assert r["median"] == pytest.approx(np.median(speeds))
        assert r["spread"] == pytest.approx(np.std(speeds, ddof=1))
    for r in out[:3]:  # a prompt has no share of the read rate
        assert r["share"] is r["read_gb_s"] is None and r["gflop_per_s"] > 0
        assert 0 < r["bytes_per_token"] < dense["bytes_per_token"]  # one pass over the weights for 32 tokens
    for r in out[3:]:
        assert r["gflop_per_s"] is None
        rates = [4 * r["bytes_per_token"] / s / 1e9 for s in r["seconds"]]
        assert r["read_gb_s"] == pytest.approx(np.median(rates))
        assert min(r["ceilings_gb_s"]) <= r["ceiling_gb_s"] <= max(r["ceilings_gb_s"])


def test_tokens_are_paired_with_the_ceilings_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 30 ms, in the second repetition of 15: a slice ends once it has taken 50 ms, the last one with
    the tokens, and each has its own two ceilings."""
    now, steps = 0.0, iter([0.5, *[0.03] * 5, 0.5, *[0.015] * 5])  # the first of each wakes the threads
    rates = iter([9e9, 9e9, 10e9, 12e9, 8e9, 8e9, 20e9])
    sizes = []
    with Model("demo") as model, Session(model, n_ctx=64, n_threads=1) as session:
        feed = session.feed

        def slow_feed(*args: Any, **how: Any) -> None:
            nonlocal now
            feed(*args, **how)
            now += next(steps)
            sizes.append(session.last_total.bytes)

        monkeypatch.setattr(session, "feed", slow_feed)
        monkeypatch.setattr("time.perf_counter", lambda: now)
        monkeypatch.setattr("powerinfer._engine.read_probe.ReadProbe.next", lambda probe: next(rates))
        case = bench.Case(n_prompt=0, n_gen=5, depth=0)
        (r,) = bench.measure(session, case, ["dense"], repetitions=2, warm_up=False, ceiling_bytes=8 << 20)
    first, second = sizes[1:6], sizes[7:]
    shares = [sum(first[:2]) / 0.06 / 9e9, sum(first[2:4]) / 0.06 / 9.5e9, first[4] / 0.03 / 11e9]
    shares += [sum(second[:4]) / 0.06 / 8e9, second[4] / 0.015 / 14e9]
    low, middle, high = np.percentile(shares, (25, 50, 75))
    assert r.share == pytest.approx(middle) and r.share_spread == pytest.approx((high - low) / 2)
    assert sorted(r.ceilings_gb_s) == [8, 8, 9, 9, 10, 12, 20] and r.ceiling_gb_s == 9
    assert next(steps, None) is next(rates, None) is None


def test_a_probe_reads_with_the_threads_of_its_session() -> None:
    with Model("demo") as model, Session(model, n_ctx=64, n_threads=2) as session:
        probe = session.read_probe(1 << 20, 3)
        rates = [probe.next() for _ in range(7)]  # a slice may be slow on a busy machine
        assert min(rates) > 0 and 1e6 < max(rates) < 1e13
        with pytest.raises(ArgumentError, match="0 slices"):
            session.read_probe(1 << 20, 0)
    with pytest.raises(ClosedError):
        probe.next()


def test_threads_beside_a_device_are_those_of_a_session(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which leaves a core to the driver where there are four or more; on the CPU it is all of them."""
    monkeypatch.setattr(machine, "cores", lambda: 1)
    with Model("demo") as model, Session(model, n_ctx=64) as session:
        usual = session.info.n_threads
    words = "demo -p 8 -n 0 -r 1 --no-warmup"
    assert [r["threads"] for r in printed(words, capsys)] == [1]
    out = printed(f"{words} --vram-budget 1 --devices host", capsys)
    assert [r["threads"] for r in out] == [usual - (usual >= 4)]


def test_a_result_says_how_to_repeat_it(capsys: Captured) -> None:
    words = "demo -p 8,4 -n 0 -pg 4,2 -d 0,16 -t 1,2 -r 1 -b 64 --threshold 0.5 --no-warmup"
    out = printed(words, capsys)
    assert len(out) == 2 * 3 * 2
    assert {r["threads"] for r in out} == {1, 2} and {r["depth"] for r in out} == {0, 16}
    again = shlex.split(out[0]["command"])
    assert again[:2] == ["powerinfer", "bench"]
    assert [(r["test"], r["threads"]) for r in printed(shlex.join(again[2:]), capsys)] == [
        (r["test"], r["threads"]) for r in out
    ]
    needed = ("version", "cpu", "os", "isa", "model", "model_digest", "model_types", "n_parameters", "commit")
    assert all(name in out[0] for name in needed)
    assert {r["sparsity"] for r in out} == {"predicted"}  # what "auto" means for the demo


def test_weights_that_were_copied(capsys: Captured) -> None:
    mapped, copied = (
        printed(f"demo -p 0 -n 2 -r 1 -t 1 {flags}", capsys)[0]
        for flags in ("", "--no-mmap --predictor-type F32")
    )
    assert (mapped["use_mmap"], copied["use_mmap"]) == (True, False)
    assert "--no-mmap" in copied["command"] and "--predictor-type F32" in copied["command"]
    assert mapped["bytes_per_token"] != copied["bytes_per_token"]  # the predictors are twice as long or more


def test_depth_is_read_too(capsys: Captured) -> None:
    """K and V of 128 positions more, in half precision: to the byte."""
    shallow, deep = printed("demo -p 0 -n 2 -d 0,128 -r 1 -t 1 --sparsity dense", capsys)
    assert (shallow["test"], deep["test"]) == ("tg2", "tg2 @ d128")
    kv = 2 * 2 * deep["n_layer"] * deep["n_embd"] // deep["n_head"] * deep["n_head_kv"]
    assert deep["bytes_per_token"] - shallow["bytes_per_token"] == 128 * kv


def test_a_session_is_left_at_its_depth() -> None:
    with Model("demo") as model, Session(model, n_ctx=64, n_threads=1) as session:
        case = bench.Case(n_prompt=4, n_gen=3, depth=10)
        ticks: list[int] = []
        results = bench.measure(
            session, case, ["dense", "exact"], repetitions=2, tick=lambda: ticks.append(1)
        )
        assert session.length() == 10 and len(ticks) == 6
        assert [r.sparsity for r in results] == ["dense", "exact"]
        assert all(r.ceiling_gb_s is None and r.share is None for r in results)


def test_sequences_of_a_case_before_take_no_room(capsys: Captured) -> None:
    out = printed("demo -p 0 -n 2 -pg 1500,2 -d 500 -np 4 -r 1 -t 1 --sparsity dense", capsys)
    assert [r["test"] for r in out] == ["tg2 x 4 @ d500", "pp1500+tg2 @ d500"]


def test_sequences_are_decoded_together(capsys: Captured) -> None:
    """Dense: the weights are read once for all of them, and K and V of each."""
    one, four = printed("demo -p 0 -n 3 -d 100 -np 1,4 -r 1 -t 1 --sparsity dense", capsys)
    assert (one["test"], four["test"], four["n_seq"]) == ("tg3 @ d100", "tg3 x 4 @ d100", 4)
    assert four["tokens_per_s"] == pytest.approx(12 / four["seconds"][0])
    kv = 2 * 2 * one["n_layer"] * one["n_embd"] // one["n_head"] * one["n_head_kv"] * 102
    weights = one["bytes_per_token"] - kv
    assert weights > 0 and four["bytes_per_token"] - kv == pytest.approx(weights / 4, rel=0.02)


def test_a_budget_of_device_memory(capsys: Captured) -> None:
    words = "demo -p 8 -n 2 -np 2 -r 1 -t 1 --sparsity dense,predicted --vram-budget 0.03 --devices host"
    out = printed(words, capsys)
    assert [(r["test"], r["sparsity"]) for r in out] == [
        (test, mode) for mode in ("dense", "predicted") for test in ("pp8", "tg2 x 2")
    ]
    assert all(r["budgets"] == [int(0.03 * 2**30)] and "GiB" in r["plan"] for r in out)
    assert all(r["ceiling_gb_s"] is r["share"] is None for r in out)
    assert "--vram-budget 0.03 --devices host" in out[0]["command"]


def test_operations_of_a_prompt(tmp_path: Path) -> None:
    s = make_model.SHAPES["tiny-llama"]
    make_model.write({"powerinfer": tmp_path / "m.gguf"}, s, "m", "F16", rank=96)
    with Model(tmp_path / "m.gguf") as model, Session(model, n_ctx=64, n_threads=1) as session:
        flop = prompt_flop(session, bench.Case(n_prompt=3, n_gen=0, depth=5))
    kv = s.n_embd // s.n_head * s.n_head_kv
    rest = 2 * s.n_embd**2 + 3 * s.n_embd * s.n_ff  # what the last layer computes for the last token alone
    weights = s.n_layer * (2 * s.n_embd * kv + rest) - rest
    attention = 4 * s.n_embd * ((s.n_layer - 1) * (6 + 7 + 8) + 8)
    assert flop == 2 * (3 * weights + rest + s.n_vocab * s.n_embd) + attention


def test_operations_and_bytes_of_a_mixture_are_those_of_the_chosen_experts(tmp_path: Path) -> None:
    s = make_mixture.SHAPES["tiny-qwen3moe"]
    make_mixture.write(tmp_path / "m.gguf", s, "m", "Q8_0", make_mixture.Law())
    with Model(tmp_path / "m.gguf") as model, Session(model, n_ctx=64, n_threads=1) as session:
        flop = prompt_flop(session, bench.Case(n_prompt=3, n_gen=0, depth=0))
        assert bench.expert_bytes(model) == s.n_layer * s.n_used * 3 * s.n_embd * s.n_ff * 34 // 32
        session.feed([5])
        read = session.last_total.bytes
        assert bench.expert_bytes(model) < read < 2 * bench.expert_bytes(model)
    q, kv = s.n_head * s.d_head, s.n_head_kv * s.d_head
    rest = s.n_embd * (2 * q + s.n_expert + 3 * s.n_used * s.n_ff)
    weights = s.n_layer * (2 * s.n_embd * kv + rest) - rest
    attention = 4 * q * ((s.n_layer - 1) * (1 + 2 + 3) + 3)
    assert flop == 2 * (3 * weights + rest + s.n_vocab * s.n_embd) + attention


# -- what a file and a process are like


def test_digests_tell_models_apart(tmp_path: Path) -> None:
    found = set()
    for seed in (1, 1, 2):
        path = tmp_path / f"{len(found)}.gguf"
        make_model.write({"gguf": path}, make_model.SHAPES["tiny-llama"], "m", "F16", rank=96, seed=seed)
        with Model(path) as model:
            found.add(bench.file_digest(model.file))
    assert len(found) == 2


def test_huge_pages_are_read_from_smaps() -> None:
    smaps = """\
7f0000000000-7f0004000000 r--s 00000000 08:01 42 /models/a b.gguf
Size:              65536 kB
Rss:               40960 kB
AnonHugePages:         0 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:      8192 kB
7f0010000000-7f0012000000 rw-p 00000000 00:00 0
Rss:               32768 kB
AnonHugePages:     20480 kB
7f0020000000-7f0020800000 rw-p 00000000 00:00 0
Rss:                8192 kB
AnonHugePages:      8192 kB
7f0030000000-7f0034000000 r-xp 00000000 08:01 43 /lib/large.so
Rss:               65536 kB
"""
    assert bench.resident_pages(smaps) == ((40960 + 32768) << 10, (8192 + 20480) << 10)
    assert bench.resident_pages("") == (0, 0)
    block = np.ones(32 << 20, np.uint8)
    resident, huge = bench.resident_pages()
    assert resident >= block.nbytes and 0 <= huge <= resident


# -- what is printed


def test_the_table_fits_80_columns(capsys: Captured) -> None:
    words = "demo -p 8 -n 2 -pg 4,2 -d 0,1024 -r 2 -t 1,2 --sparsity dense,exact,predicted"
    assert main(["bench", *words.split()]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == "" and all(len(line) <= 80 for line in lines)
    heads = [line.split()[0:2] for line in lines if "tokens/s" in line]
    assert heads == [["1", "thread"]] * 2 + [["2", "threads"]] * 2
    assert len([line for line in lines if line.startswith("tg2 @ d1024")]) == 2 * 3
    assert "GiB" in captured.out or "MiB" in captured.out


def test_what_may_fit_in_the_cache(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Said of a model of 13 MiB where the cache has half of that, and not where it has less."""
    for mib, told in ((1, False), (8, True)):
        monkeypatch.setattr("powerinfer._engine.machine.cache_bytes", lambda n=mib: n << 20)
        assert main(["bench", "demo", "-p", "4", "-n", "0", "-r", "1", "-t", "1"]) == 0
        assert ("may fit in the processor's cache" in capsys.readouterr().out) == told


def test_spread_needs_two_runs(capsys: Captured) -> None:
    (result,) = printed("demo -p 4 -n 0 -r 1 -t 1", capsys)
    assert result["spread"] == 0 and math.isfinite(result["tokens_per_s"])


def test_a_mixture_s_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_mixture(tmp_path / "m.gguf", "mixtral")
    words = ["bench", str(path), "-p", "0", "-n", "4", "-r", "1", "-t", "1", "--no-warmup", "-b", "16"]
    budget = ["--devices", "host", "--vram-budget", str(6.6 / 1024)]
    assert main([*words, *budget, "--json"]) == 0
    (result,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert 0 < result["hit_rate"] < 1
    n_hits = result["hit_rate"] * 4 * 5 * 3  # tokens, layers, experts of a token
    assert n_hits == pytest.approx(round(n_hits))
    assert main([*words, *budget]) == 0
    shown = capsys.readouterr().out
    assert "hits" in shown and "active" not in shown
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "hits" not in shown and "active" in shown
