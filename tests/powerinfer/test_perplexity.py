"""Perplexity: values, errors and comparisons against numpy on the reference's float64 logits; the command."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer._engine.session import Model, Session
from powerinfer._text.terminal import Bar
from powerinfer.cli import main
from powerinfer.errors import ArgumentError, FormatError
from powerinfer.models.perplexity import Perplexity, compare, perplexity, plan_chunks
from tests import models, reference, rounding

Array = Any
Captured = pytest.CaptureFixture[str]

SPARSE = ("llama-relu", "bamboo", "falcon-40b", "opt")
BOS = 1
# Relative error of logits with F16 weights and an F32 KV cache while so few tokens are computed together that
# nothing else is rounded, and with an F16 cache and many tokens (AMX rounds their activations to bf16).
FEW, FEW_TOKENS = 1e-4, 1 if rounding.BF16 else 8
MANY = 1e-2 if rounding.BF16 else 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def sparse_file(folder: Path, name: str) -> Path:
    """A model whose predictor is sure: an fc2 row is all positive or all negative, so no score is near 0."""
    spec = models.SPECS[name]
    path = folder / f"{name}.gguf"
    if not path.exists():
        sign = np.where(np.random.default_rng(3).random(spec.n_ff) < 0.3, -1, 1).astype(np.float16)
        predictor = [(fc1, np.abs(fc2) * sign[:, None]) for fc1, fc2 in models.draw_predictor(spec)]
        models.write_sparse(path, spec, predictor)
    return path


def text_of(name: str, n: int) -> Array:
    return np.random.default_rng(n).integers(3, models.SPECS[name].n_vocab, n, dtype=np.int32)


def windows(tokens: Array, n_ctx: int, stride: int) -> list[tuple[Array, int]]:
    """Every chunk, and the first of its positions that predict the next one, by llama.cpp's rule."""
    if not stride:
        return [(tokens[i : i + n_ctx], n_ctx // 2) for i in range(0, len(tokens) - n_ctx + 1, n_ctx)]
    n = math.ceil((len(tokens) - n_ctx) / stride)
    return [(tokens[i * stride : i * stride + n_ctx], n_ctx - stride - 1) for i in range(n)]


def expected_log_probs(
    model: reference.Model, tokens: Array, n_ctx: int, stride: int, bos: int | None, **how: Any
) -> tuple[Array, Array, reference.Trace]:
    """log p [n, n_vocab] of what is predicted, and the tokens that came, by chunks and float64."""
    rows, targets, trace = [], [], reference.Trace()
    for chunk, first in windows(tokens, n_ctx, stride):
        fed = chunk.copy()
        if bos is not None:
            fed[0] = bos
        logits = reference.forward(model, fed[:-1], trace=trace, **how)
        rows.append(logits[first:])
        targets.append(chunk[first + 1 :])
    logits = np.concatenate(rows)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), np.concatenate(targets), trace


def nll_of(log_p: Array, targets: Array) -> Array:
    return -log_p[np.arange(len(targets)), targets]


def limit(error: float, log_p: Array) -> float:
    """How far a mean of nll may be off where logits are off by this share of their size: a nll is a mean of
    logits less a logit, each of which is off by that on average."""
    logits = log_p - log_p.mean(axis=1, keepdims=True)
    return 2 * error * float(np.sqrt(np.mean(logits**2)))


def open_few(path: Path, mode: Any, n_ctx: int, n_batch: int = FEW_TOKENS) -> Session:
    kv = "f32" if n_batch <= 8 else "f16"
    return Session(
        Model(path),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_threads=2,
        sparsity=mode,
        type_k=kv,
        type_v=kv,
        mask_prompts=True,
    )


# ---- values


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("n_ctx", "stride"), [(16, 0), (17, 0), (16, 5), (12, 11), (16, 1)])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("name", SPARSE)
def test_value_and_error_are_numpys(name: str, mode: str, n_ctx: int, stride: int, folder: Path) -> None:
    path, tokens = sparse_file(folder, name), text_of(name, 41)
    model = reference.load(path)
    log_p, targets, _ = expected_log_probs(model, tokens, n_ctx, stride, BOS, predicted=mode == "predicted")
    nll = nll_of(log_p, targets)
    with open_few(path, mode, n_ctx) as session:
        found = perplexity(session, tokens, n_ctx=n_ctx, stride=stride, bos=BOS)
        assert session.length() == 0
    assert (found.sparsity, found.n_tokens) == (mode, len(nll))
    assert found.n_chunks == len(windows(tokens, n_ctx, stride))
    assert found.value == pytest.approx(math.exp(nll.mean()), rel=limit(FEW, log_p))
    error = math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(len(nll))
    assert found.error == pytest.approx(error, rel=10 * limit(FEW, log_p))
    assert found.comparison is None


@pytest.mark.parametrize("mode", ["dense", "predicted"])
def test_many_tokens_at_once(mode: str, folder: Path) -> None:
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 128)
    model = reference.load(path)
    log_p, targets, _ = expected_log_probs(model, tokens, 64, 0, None, predicted=mode == "predicted")
    with open_few(path, mode, 64, n_batch=64) as session:
        found = perplexity(session, tokens, n_ctx=64)
    mean = nll_of(log_p, targets).mean()
    assert found.value == pytest.approx(math.exp(mean), rel=limit(MANY, log_p))


def test_the_mask_is_on_every_token(folder: Path) -> None:
    """Were those that only give context computed with all neurons, the value would be another one."""
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    model = reference.load(path)
    means = []
    for n_dense in (0, 8, 16):
        log_p, targets, _ = expected_log_probs(model, tokens, 16, 0, BOS, predicted=True, n_dense=n_dense)
        means.append(nll_of(log_p, targets).mean())
    tolerance = limit(FEW, log_p)
    assert min(abs(means[0] - means[1]), abs(means[0] - means[2])) > 5 * tolerance
    with open_few(path, "predicted", 16) as session:
        found = perplexity(session, tokens, n_ctx=16, bos=BOS)
    assert math.log(found.value) == pytest.approx(means[0], abs=tolerance)


def test_a_session_that_masks_no_prompts_is_refused(folder: Path) -> None:
    """It would measure dense mode in the first half of each chunk."""
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    with Model(path) as model, Session(model, n_ctx=16, sparsity="predicted") as session:
        with pytest.raises(ArgumentError, match="mask_prompts=True"):
            perplexity(session, tokens, n_ctx=16)
        session.set_sparsity("exact")
        perplexity(session, tokens, n_ctx=16)


def test_models_that_are_never_silent(folder: Path) -> None:
    path, tokens = models.write_dense(folder / "qwen3.gguf", models.SPECS["qwen3"]), text_of("qwen3", 50)
    log_p, targets, _ = expected_log_probs(reference.load(path), tokens, 20, 0, None)
    with open_few(path, "auto", 32) as session:
        found = perplexity(session, tokens, n_ctx=20)
    assert (found.sparsity, found.ffn_rows) == ("dense", 1.0)
    assert math.log(found.value) == pytest.approx(nll_of(log_p, targets).mean(), abs=limit(FEW, log_p))


def test_what_the_sequence_held_before_does_not_matter(folder: Path) -> None:
    path, tokens = sparse_file(folder, "opt"), text_of("opt", 40)
    found = []
    with open_few(path, "exact", 32) as session:
        for _ in range(2):
            found.append(perplexity(session, tokens, n_ctx=16, bos=BOS))
            session.feed([5, 6, 7])
    assert found[0] == found[1]


def test_memory_is_that_of_n_batch_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No feed keeps more logits than n_batch, and none are asked for in the first half of a chunk."""
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    feeds: list[tuple[int, int]] = []
    feed = Session.feed

    def spy(self: Session, ids: Any, **options: Any) -> None:
        feed(self, ids, **options)
        feeds.append((len(ids), self.n_logits))

    monkeypatch.setattr(Session, "feed", spy)
    with open_few(path, "dense", 32, n_batch=7) as session:
        perplexity(session, tokens, n_ctx=32)
    assert feeds == [(7, 0), (7, 0), (7, 5), (7, 7), (3, 3)] * 2


# ---- comparisons


@pytest.mark.parametrize("name", SPARSE)
def test_modes_side_by_side(name: str, folder: Path) -> None:
    path, tokens = sparse_file(folder, name), text_of(name, 70)
    model = reference.load(path)
    dense, targets, _ = expected_log_probs(model, tokens, 16, 6, BOS)
    masked, _, _ = expected_log_probs(model, tokens, 16, 6, BOS, predicted=True)
    with open_few(path, "dense", 16) as one, open_few(path, "predicted", 16) as two:
        first, second = compare([one, two], tokens, n_ctx=16, stride=6, bos=BOS)
        alone = perplexity(two, tokens, n_ctx=16, stride=6, bos=BOS)
    assert first.comparison is None and second.comparison is not None
    assert (second.value, second.error) == (alone.value, alone.error)
    c, tolerance = second.comparison, limit(FEW, dense) + limit(FEW, masked)
    difference = nll_of(masked, targets) - nll_of(dense, targets)
    assert c.ratio == pytest.approx(math.exp(difference.mean()), rel=tolerance)
    assert c.ratio == pytest.approx(second.value / first.value, rel=1e-9)
    error = math.exp(difference.mean()) * difference.std(ddof=1) / math.sqrt(len(difference))
    assert c.ratio_error == pytest.approx(error, rel=0.02)
    kl = np.sum(np.exp(dense) * (dense - masked), axis=1).mean()
    assert kl > 0.01
    assert c.kl_divergence == pytest.approx(kl, abs=tolerance)
    # Where two tokens are as likely, rounding may decide.
    same = np.mean(dense.argmax(axis=1) == masked.argmax(axis=1))
    assert c.same_top == pytest.approx(same, abs=1.01 / len(targets))
    assert 0 < same < 1


def test_exact_equals_dense(folder: Path) -> None:
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    with open_few(path, "dense", 32) as one, open_few(path, "exact", 32) as two:
        first, second = compare([one, two], tokens, n_ctx=32)
    assert second.comparison is not None
    assert second.comparison.ratio == pytest.approx(1, abs=1e-5)
    assert second.comparison.kl_divergence == pytest.approx(0, abs=1e-6)
    assert (first.ffn_rows, second.comparison.same_top) == (1.0, 1.0)
    assert second.ffn_rows < 0.8


# ---- rows of the feed-forward


def expected_rows(trace: reference.Trace, gated: bool, skip_down: bool = True) -> float:
    needed = total = 0
    for layer in trace.layers:
        needed += int(layer.predicted.sum()) + (int(layer.gated.sum()) if gated else 0)
        needed += int(layer.active.sum()) if skip_down else layer.active.size
        total += (3 if gated else 2) * layer.active.size
    return needed / total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_batch", [1, 8, 64])
@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("name", SPARSE)
def test_rows_are_those_that_decoding_reads(name: str, mode: str, n_batch: int, folder: Path) -> None:
    """The same figure by the row-sparse operator and by matrix products, and the reference's."""
    path, tokens = sparse_file(folder, name), text_of(name, 64)
    _, _, trace = expected_log_probs(reference.load(path), tokens, 32, 0, None, predicted=mode == "predicted")
    with open_few(path, mode, 32, n_batch=n_batch) as session:
        found = perplexity(session, tokens, n_ctx=32)
        gated = session.model.info.is_gated
        if n_batch == 1:
            session.drop()
            session.feed([3])
            read = sum(step.n_rows for step in session.last_step)
            assert read < (3 if gated else 2) * session.model.info.n_ff * session.model.info.n_layer
    # A gate may lie so near to 0 that rounding decides its sign.
    assert found.ffn_rows == pytest.approx(expected_rows(trace, gated), rel=0.01)


def test_a_down_that_cannot_be_skipped_is_counted_whole(folder: Path) -> None:
    spec = models.SPECS["llama-relu"]
    path = models.write_dense(folder / "q8.gguf", spec, kind=GGMLQuantizationType.Q8_0)
    tokens = text_of("llama-relu", 64)
    _, _, trace = expected_log_probs(reference.load(path), tokens, 32, 0, None)
    with open_few(path, "exact", 32) as session:
        assert not session.model.info.can_skip_down
        found = perplexity(session, tokens, n_ctx=32)
        session.feed([3])
        assert sum(s.n_rows for s in session.last_step) > 2 * spec.n_ff * spec.n_layer
    # 8-bit activations decide some more gates.
    assert found.ffn_rows == pytest.approx(expected_rows(trace, True, skip_down=False), rel=0.03)


# ---- which tokens


def test_chunks() -> None:
    plan = plan_chunks(1024, n_ctx=512)
    assert (list(plan.starts), plan.first, plan.n_predicted) == ([0, 512], 256, 510)
    assert len(plan_chunks(1535, n_ctx=512).starts) == 2
    assert len(plan_chunks(1536, n_ctx=512).starts) == 3
    plan = plan_chunks(2048, n_ctx=512, stride=256)
    assert (list(plan.starts), plan.first, plan.n_predicted) == (list(range(0, 1537, 256))[:6], 255, 6 * 256)
    assert len(plan_chunks(2049, n_ctx=512, stride=256).starts) == 7
    assert list(plan_chunks(2048, n_ctx=512, stride=256, n_chunks=2).starts) == [0, 256]
    assert len(plan_chunks(2048, n_ctx=512, n_chunks=99).starts) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(n_tokens=1023, n_ctx=512), r"1,023 tokens.*512.*1,024"),
        (dict(n_tokens=99, n_ctx=3), "at least 4"),
        (dict(n_tokens=99, n_ctx=-4), "at least 4"),
        (dict(n_tokens=99, n_ctx=8, stride=8), "1 to n_ctx - 1 = 7"),
        (dict(n_tokens=99, n_ctx=8, stride=-1), "stride is -1"),
        (dict(n_tokens=99, n_ctx=8, n_chunks=-1), "cannot be negative"),
        (dict(n_tokens=99, n_ctx=4, n_chunks=1), "only 1 token"),
        (dict(n_tokens=100, n_ctx=50, stride=1, n_chunks=1), "only 1 token"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        plan_chunks(**options)  # type: ignore[arg-type]


def test_arguments_that_cannot_be(folder: Path) -> None:
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    with pytest.raises(ArgumentError, match="no session"):
        compare([], tokens, n_ctx=16)
    with open_few(path, "dense", 16) as session:
        for bad in (320, -1):
            with pytest.raises(ArgumentError, match=f"token {bad} is outside"):
                perplexity(session, [*tokens.tolist(), bad], n_ctx=16)
        with pytest.raises(ArgumentError, match="room for 16 tokens"):
            perplexity(session, tokens, n_ctx=17)
        with pytest.raises(ArgumentError, match="sequence of integers"):
            perplexity(session, [0.5] * 64, n_ctx=16)  # type: ignore[list-item]


def test_a_broken_model_says_so(folder: Path) -> None:
    spec = models.SPECS["llama-relu"]
    tensors = dict(models.file_tensors(spec, models.draw(spec)))
    tensors["blk.1.attn_norm.weight"] = np.full(spec.n_embd, np.nan, np.float32)
    path = models.write(folder / "nan.gguf", models.metadata(spec), tensors)
    with open_few(path, "dense", 16) as session, pytest.raises(FormatError, match="not finite"):
        perplexity(session, text_of("llama-relu", 64), n_ctx=16)


def test_progress_and_running_results(folder: Path) -> None:
    path, tokens = sparse_file(folder, "llama-relu"), text_of("llama-relu", 64)
    steps: list[tuple[int, int]] = []
    running: list[Perplexity] = []
    with open_few(path, "dense", 16, n_batch=8) as session:
        found = perplexity(
            session,
            tokens,
            n_ctx=16,
            progress=lambda done, total: steps.append((done, total)),
            running=lambda results: running.extend(results),
        )
        two = perplexity(session, tokens, n_ctx=16, n_chunks=2)
    assert steps == [(done, 60) for start in (0, 15, 30, 45) for done in (start + 8, start + 15)]
    assert [one.n_chunks for one in running] == [1, 2, 3, 4]
    assert running[-1] == found and running[1] == two


def test_the_first_result_may_be_of_one_token(folder: Path) -> None:
    running: list[Perplexity] = []
    with open_few(sparse_file(folder, "llama-relu"), "dense", 16) as session:
        tokens = text_of("llama-relu", 64)
        found = perplexity(
            session, tokens, n_ctx=16, stride=1, n_chunks=2, running=lambda results: running.extend(results)
        )
    assert [one.n_tokens for one in running] == [1, 2] and running[1] == found
    assert math.isinf(running[0].error) and 0 < found.error < math.inf


# ---- the command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("it was the best of times it was the worst of times " * 8)
    return path


def test_the_tables_say_what_was_measured(sparse_path: Path, text: Path, capsys: Captured) -> None:
    words = ["perplexity", str(sparse_path), "--text", str(text), "-c", "64", "-t", "1"]
    assert main([*words, "--sparsity", "dense,exact", "--sparsity", "predicted"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 50  # also in half a terminal nothing is cut off
    modes, others, (last,) = (part.splitlines() for part in out.split("\n\n"))
    assert modes.pop(0).split() == ["mode", "perplexity", "FFN", "rows"]
    assert others.pop(0).split() == ["vs", "dense", "ratio", "KL", "div.", "same", "top"]
    assert main([*words, "--sparsity", "dense,exact,predicted", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["n_ctx"], told["stride"]) == (64, 0)
    results = told["results"]
    for line, result in zip(modes, results, strict=True):
        found = re.fullmatch(r"(\w+) +(\d+\.\d{4}) ± (\d+\.\d{4}) +([\d.]+) %", line)
        assert found and found[1] == result["sparsity"]
        assert float(found[2]) == pytest.approx(result["value"], abs=1e-4)
        assert float(found[3]) == pytest.approx(result["error"], abs=1e-4)
        assert float(found[4]) == pytest.approx(100 * result["ffn_rows"], abs=0.051)
    assert results[0]["comparison"] is None
    for line, result in zip(others, results[1:], strict=True):
        found = re.fullmatch(r"(\w+) +([\d.]+) ± ([\d.]+) +([\d.]+) +([\d.]+) %", line)
        assert found and found[1] == result["sparsity"]
        c = result["comparison"]
        expected = [c["ratio"], c["ratio_error"], c["kl_divergence"]]
        assert [float(x) for x in found.groups()[1:4]] == pytest.approx(expected, abs=1e-5)
        assert float(found[5]) == pytest.approx(100 * c["same_top"], abs=0.0051)
    n_chunks = told["n_tokens"] // 64
    assert last == f"{31 * n_chunks} tokens predicted, in {n_chunks} chunks of 64"


def test_one_mode_is_compared_with_nothing(relu_path: Path, text: Path, capsys: Captured) -> None:
    assert main(["perplexity", str(relu_path), "--text", str(text), "-c", "64", "--chunks", "1"]) == 0
    out = capsys.readouterr().out
    assert "vs" not in out and out.endswith("\n\n31 tokens predicted, in 1 chunk of 64\n")


def test_a_context_beyond_the_models_own_is_spoken_of(
    relu_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "long.txt").write_text("it was the best of times it was the worst of times " * 24)
    words = ["perplexity", str(relu_path), "--text", str(tmp_path / "long.txt"), "--chunks", "1", "-c"]
    for n_ctx, says in (("256", ""), ("257", "context of 256 tokens: with 257 it may")):
        assert main([*words, n_ctx]) == 0
        err = capsys.readouterr().err
        assert says in err and bool(says) == bool(err)


def run_json(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["perplexity", *words, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_the_command_measures_what_the_function_does(sparse_path: Path, text: Path, capsys: Captured) -> None:
    """BOS before the text and in front of every chunk; the mask of the mode on every token."""
    from powerinfer._engine.file import ModelFile
    from powerinfer.models.corpus import read_corpus

    corpus = read_corpus(ModelFile(sparse_path), [text])
    assert corpus.bos == 1
    told = run_json(capsys, str(sparse_path), "--text", str(text), "-c", "32", "-t", "1", "--stride", "10")
    with Session(Model(sparse_path), n_ctx=32, n_batch=32, n_threads=1, mask_prompts=True) as session:
        found = perplexity(session, [1, *corpus.tokens.tolist()], n_ctx=32, stride=10, bos=1)
    assert told["n_tokens"] == len(corpus.tokens) + 1
    assert told["results"][0]["value"] == found.value
    assert told["results"][0]["sparsity"] == "predicted"


def test_text_from_several_places_is_one_text(
    relu_path: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "many hands make light work and time will tell " * 4
    (tmp_path / "all").write_text(whole)
    (tmp_path / "a").write_text(whole[:70])
    (tmp_path / "b").write_text(whole[70:] + "\n")
    words = [str(relu_path), "-c", "16", "-t", "1", "--chunks", "3", "--text"]
    expected = run_json(capsys, *words, str(tmp_path / "all"))
    assert (
        run_json(capsys, *words, str(tmp_path / "a"), str(tmp_path / "b"))["results"] == expected["results"]
    )
    told = run_json(capsys, *words, str(tmp_path / "a"), "--text", str(tmp_path / "b"))
    assert told["results"] == expected["results"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(whole.encode())))
    assert run_json(capsys, *words, "-")["results"] == expected["results"]
    assert expected["results"][0]["n_chunks"] == 3


def test_special_tokens_are_text_unless_asked_for(relu_path: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "turns.txt"
    path.write_text("one two</s>" * 20)
    words = [str(relu_path), "-c", "16", "-t", "1", "--text", str(path)]
    plain, special = run_json(capsys, *words), run_json(capsys, *words, "--special")
    assert plain["n_tokens"] == special["n_tokens"] + 20 * 3 - 19  # "</s>" by letters; a space after each


def test_modes_that_are_the_same_come_once(relu_path: Path, text: Path, capsys: Captured) -> None:
    words = [str(relu_path), "-c", "32", "-t", "1", "--text", str(text)]
    told = run_json(capsys, *words, "--sparsity", "auto,exact,dense", "--sparsity", "exact")
    assert [result["sparsity"] for result in told["results"]] == ["exact", "dense"]


def test_threshold_and_predictor(sparse_path: Path, text: Path, capsys: Captured) -> None:
    words = [str(sparse_path), "-c", "32", "-t", "1", "--text", str(text), "--sparsity", "predicted"]
    shares = [
        run_json(capsys, *words, "--threshold", x)["results"][0]["ffn_rows"] for x in ("-99", "0", "99")
    ]
    assert 1 > shares[0] > shares[1] > shares[2] == 0
    signs = run_json(capsys, *words, "--predictor", "sign", "--threshold", "-1")["results"][0]["ffn_rows"]
    assert signs == shares[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", "TEXT", "-c", "512"], r"tokens, but perplexity with chunks of 512 needs at least 1,024"),
        (["--text", "EMPTY"], "the text is empty"),
        (["--text", "nowhere.txt"], "nowhere.txt.*No such file"),
        (["--text", "."], "Is a directory"),
        (["--text", "TEXT", "-c", "32", "--stride", "32"], "stride is 32"),
        (["--text", "TEXT", "-c", "32", "--chunks", "-1"], "negative"),
        (["--text", "TEXT", "-c", "32", "--sparsity", "predicted"], "needs a model with predictors"),
        (["--text", "TEXT", "-c", "32", "-b", "0"], "--n-batch"),
        (["--text", "TEXT", "-c", "32", "--threshold", "nan"], "--threshold is nan, it must be a number"),
        (["--text", "TEXT", "-c", "32", "--threshold", "0.5"], "--threshold is for predicted mode"),
    ],
)
def test_errors_are_one_line(
    words: list[str], says: str, relu_path: Path, text: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "empty").write_text("\n")
    named = {"TEXT": str(text), "EMPTY": str(tmp_path / "empty")}
    assert main(["perplexity", str(relu_path), *(named.get(word, word) for word in words)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(says, captured.err)


@pytest.mark.parametrize(
    "words", [["x.gguf"], ["x.gguf", "--text"], ["x", "--text", "y", "--sparsity", "most"]]
)
def test_wrong_usage(words: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(["perplexity", *words])
    assert end.value.code == 2
    assert "usage: powerinfer" in capsys.readouterr().err


def test_the_bar_shows_the_estimate_so_far(
    sparse_path: Path, text: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Recorder(Bar):
        def say(self, words: str) -> None:
            said.append(words)

    monkeypatch.setattr("powerinfer.cli.perplexity.Bar", Recorder)
    words = [str(sparse_path), "-c", "32", "-t", "1", "--text", str(text), "--sparsity", "dense,exact"]
    dense, exact = run_json(capsys, *words)["results"]
    assert len(said) == dense["n_chunks"] > 2
    assert said[-1] == f"perplexity dense {dense['value']:.4f}, exact {exact['value']:.4f}"


def test_the_words_beside_a_bar_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer._text.terminal.is_smart", lambda stream: True)
    with Bar("one", after=0) as bar:
        bar.say("two")
        bar(1, 3)
        assert bar._shown is not None and bar._shown.tasks[0].description == "two"
        bar.say("three\x1b[31m\nfour")
        assert bar._shown.tasks[0].description == "three[31m four"
    bar.say("five")  # it is gone


def test_a_bar_leaves_room_for_what_the_terminal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ^C of Ctrl-C; and the terminal may change its size."""
    monkeypatch.setattr("powerinfer._text.terminal.is_smart", lambda stream: True)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: 2, write=lambda text: None, flush=int))
    with Bar("one", after=0) as bar:
        for columns in (80, 50):
            monkeypatch.setattr(os, "get_terminal_size", lambda fd, n=columns: os.terminal_size((n, 24)))
            bar(1, 3)
            assert bar._shown is not None and bar._shown.console.width == columns - 2


def test_the_demo(tmp_path: Path, capsys: Captured) -> None:
    """A text like those that it was trained on: it predicts that far better than chance does."""
    turns = (("user", "Who are you?"), ("assistant", "I am the PowerInfer demo."))
    text = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
    (tmp_path / "chat.txt").write_text(text * 12)
    words = ["demo", "--text", str(tmp_path / "chat.txt"), "--special", "-c", "64", "--chunks", "3"]
    told = run_json(capsys, *words, "--sparsity", "dense,exact", "-t", "2")
    dense, exact = told["results"]
    assert dense["value"] < 100
    assert exact["comparison"]["ratio"] == pytest.approx(1, abs=0.01)
    assert exact["ffn_rows"] < 0.5
