"""Thresholds and checks: the engine's figures against the float64 reference and plain counting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.errors import ArgumentError
from powerinfer.models.corpus import Corpus
from powerinfer.models.predictor import calibrate, check, report
from powerinfer.models.predictor.check import Check, check_predictor
from powerinfer.models.predictor.data import Windows, choose_windows
from powerinfer.models.rewrite import rewrite
from tests import models, reference, rounding
from tests.predictor.small import BOS, corpus, expected, planted

Array = Any


@contextmanager
def stage(_: str) -> Iterator[Any]:
    yield lambda done, total: None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A predictor that is exact but for rounding, with thresholds that make it miss some."""
    folder = tmp_path_factory.mktemp("planted")
    source = planted(folder / "plain.gguf", sparse=True)
    with ModelFile(source) as file:
        rewrite(file, folder / "model.gguf", keys=calibrate.keys("mlp", [0.4, -0.3], "relu"))
    return folder / "model.gguf"


def text_of(n: int, seed: int = 3) -> Corpus:
    return Corpus(tokens=np.random.default_rng(seed).integers(3, 512, n, dtype=np.int32), bos=BOS)


def windows_of(n: int = 500) -> Windows:
    return choose_windows(text_of(n), n_ctx=64, n_train=0, n_held_out=n)


# ---- calibration


@pytest.mark.parametrize("kind", ["mlp", "sign"])
def test_thresholds_keep_the_target_when_it_is_counted_by_hand(kind: Any, path: Path) -> None:
    """On what a tap shows: scores and hidden values of the same run; down rows are the gguf package's."""
    windows = windows_of()
    weights = reference.load(path)
    with Model(path, predictor=kind) as model:
        curves = calibrate.measure(model, windows, n_threads=1)
        scores: list[list[Array]] = [[], []]
        mass: list[list[Array]] = [[], []]
        with (
            Session(model, n_ctx=64, n_batch=64, n_threads=1, sparsity="exact") as session,
            session.tap(hidden=True, score=True) as tap,
        ):
            for window in windows.tokens:
                session.drop()
                session.feed(window)
                for i in range(2):
                    norms = np.linalg.norm(weights[f"blk.{i}.ffn_down_t.weight"], axis=1)
                    scores[i].append(tap.score[i][1:].copy())
                    mass[i].append(np.abs(tap.hidden[i][1:].astype(np.float64)) * norms)
    for i, curve in enumerate(curves):
        score, added = np.concatenate(scores[i]), np.concatenate(mass[i])
        assert curve.n_tokens == windows.n_tokens == len(score)
        for target in (0.9, 0.99):
            predicted = score >= np.float32(curve.threshold(target))
            kept = added[predicted].sum() / added.sum()
            assert kept >= target - 1e-6
            # The scores of signs come in steps of 2/256, each with many pairs.
            assert kept < target + (0.05 if kind == "sign" else 0.005)
            point = curve.at(curve.threshold(target))
            assert point.computed == predicted.mean()
            assert point.mass == pytest.approx(kept, abs=1e-6)


def test_keys_are_what_the_engine_reads(path: Path) -> None:
    with Model(path) as model:
        assert model.info.predictor == "mlp" and model.info.activation == "relu"
        np.testing.assert_array_equal(model.thresholds, np.float32([0.4, -0.3]))
        assert model.info.sparse_threshold == np.float32(-0.3)


# ---- the check


@pytest.fixture(scope="module")
def checked(path: Path) -> Check:
    with Model(path) as model:
        return check_predictor(
            model,
            text_of(500),
            n_ctx=64,
            n_tokens=500,
            n_single=12,
            n_chunks=4,
            n_threads=1,
            sweep=True,
            stage=stage,
        )


def test_layers_are_what_the_reference_counts(checked: Check, path: Path) -> None:
    """Recall and the rest, from the reference's scores and hidden values of every neuron. A few pairs lie so
    near to the threshold, or to silence, that rounding decides them."""
    windows = windows_of()
    tolerance = 0.01 if rounding.BF16 else 0.003
    for layer, one in zip(checked.layers, expected(path, windows.tokens, windows.n_head), strict=True):
        threshold = (0.4, -0.3)[layer.layer]
        assert one.scores is not None
        predicted, active = one.scores >= threshold, one.mass > 0
        point = layer.point
        assert layer.rank == 63 and point.threshold == pytest.approx(threshold)
        assert point.computed == pytest.approx(predicted.mean(), abs=tolerance)
        assert point.active == pytest.approx(active.mean(), abs=tolerance)
        assert point.recall == pytest.approx((predicted & active).sum() / active.sum(), abs=3 * tolerance)
        assert point.precision == pytest.approx(
            (predicted & active).sum() / predicted.sum(), abs=3 * tolerance
        )
        assert point.mass == pytest.approx(one.mass[predicted].sum() / one.mass.sum(), abs=tolerance)
        assert point.accuracy == pytest.approx((predicted == active).mean(), abs=tolerance)
    assert (
        0.3 < checked.layers[0].point.recall < 0.98
    )  # its threshold is above 0, where the predictor is exact
    assert checked.layers[1].point.recall > 0.99


def test_predicted_mode_is_what_the_reference_does(checked: Check, path: Path) -> None:
    """The engine's counters in predicted mode: there what the first layer misses changes what the second
    reads."""
    model = reference.load(path)
    predicted, active = np.zeros(2), np.zeros(2)
    n = 0
    for window in windows_of().tokens:
        trace = reference.Trace()
        reference.forward(model, [int(t) for t in window], predicted=True, threshold=[0.4, -0.3], trace=trace)
        n += len(window)
        for i, layer in enumerate(trace.layers):
            predicted[i] += layer.predicted.sum()
            active[i] += layer.active.sum()
    tolerance = 0.01 if rounding.BF16 else 0.003
    for i, layer in enumerate(checked.layers):
        assert layer.computed == pytest.approx(predicted[i] / (n * 1024), abs=tolerance)
        assert layer.active == pytest.approx(active[i] / (n * 1024), abs=tolerance)


def test_counters_and_taps_agree(checked: Check) -> None:
    assert checked.n_disagreed == 0
    windows = windows_of()
    n_pairs = sum(len(window) for window in windows.tokens) * 1024
    assert checked.n_counted == sum(round(layer.computed * n_pairs) for layer in checked.layers)
    assert checked.n_tokens == windows.n_tokens


def test_a_disagreement_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thresholds that the counting does not know of."""
    with Model(path) as model:
        monkeypatch.setattr(Session, "set_thresholds", lambda *_: None)
        counted = check._predicted_run(model, windows_of(), [5.0, 5.0], 1, lambda *_: None)
    assert counted.n_disagreed > 0


def test_rows_and_bytes_are_those_of_single_tokens(checked: Check, path: Path) -> None:
    """Gate rows of what is predicted, up and down rows of what is active; F32 rows of 256."""
    for layer in checked.layers:
        dense, exact, predicted = layer.dense_mode, layer.exact_mode, layer.predicted_mode
        assert dense.rows == 3 * 1024 and dense.bytes == 3 * 1024 * 256 * 4
        assert layer.predictor_bytes == 63 * (256 + 1024) * 4
        assert exact.rows == pytest.approx(exact.bytes / (256 * 4))
        assert predicted.bytes == pytest.approx(predicted.rows * 256 * 4 + layer.predictor_bytes)
        assert 1024 < exact.rows < 1024 * 1.5
        assert layer.rows == predicted.rows / dense.rows and layer.bytes == predicted.bytes / dense.bytes
        # 12 tokens against 500: shares of 1024 neurons, which vary by a few percent of themselves.
        share = (layer.computed + 2 * layer.active) / 3
        assert layer.rows == pytest.approx(share, rel=0.15)
    assert checked.rows == pytest.approx(np.mean([layer.rows for layer in checked.layers]))
    assert checked.bytes == pytest.approx(np.mean([layer.bytes for layer in checked.layers]))


def test_the_trade_off_goes_from_little_to_much(checked: Check) -> None:
    settings = checked.trade_off
    assert [setting.target for setting in settings] == list(check.TARGETS)
    for name in ("computed", "recall", "mass"):
        assert (np.diff([getattr(setting, name) for setting in settings]) >= 0).all()
    assert (np.diff([setting.precision for setting in settings]) <= 0).all()
    assert all(setting.mass >= setting.target for setting in settings)
    divergences = [
        s.perplexity.comparison.kl_divergence for s in settings if s.perplexity and s.perplexity.comparison
    ]
    assert len(divergences) == len(settings) and divergences[-1] < divergences[0]


def test_perplexity_is_that_of_the_reference(checked: Check, path: Path) -> None:
    model, text = reference.load(path), text_of(500).with_bos
    for result, how in (
        (checked.exact, {}),
        (checked.predicted, {"predicted": True, "threshold": [0.4, -0.3]}),
    ):
        nll = []
        for start in range(0, 4 * 64, 64):
            chunk = text[start : start + 64].copy()
            inputs = [BOS, *map(int, chunk[1:])]
            logits = reference.forward(model, inputs, **how)
            logits -= logits.max(axis=1, keepdims=True)
            p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            nll += [-p[i, chunk[i + 1]] for i in range(32, 63)]
        assert result.n_tokens == len(nll)
        assert result.value == pytest.approx(np.exp(np.mean(nll)), rel=0.01)


@pytest.mark.parametrize("name", ["bamboo", "opt", "falcon-40b"])
def test_every_family_can_be_checked(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    path = models.write_sparse(tmp_path / "sparse.gguf", spec, models.draw_predictor(spec), 0.1)
    for kind in ("mlp", "sign"):
        with Model(path, predictor=kind) as model:
            result = check_predictor(
                model,
                corpus(spec, 400),
                n_ctx=40,
                n_tokens=100,
                n_single=3,
                n_chunks=1,
                n_threads=1,
                stage=stage,
            )
        assert result.n_disagreed == 0 and result.predictor == kind
        assert all(
            layer.dense_mode.rows == (3 if name == "bamboo" else 2) * spec.n_ff for layer in result.layers
        )
        assert result.layers[0].rank == (0 if kind == "sign" else spec.predictor[0])
        assert result.layers[0].predictor_bytes > 0


def test_thresholds_can_be_tried_without_writing_them(path: Path, checked: Check) -> None:
    """With one that nothing reaches no neuron is computed, in no run."""
    with Model(path) as model:
        result = check_predictor(
            model,
            text_of(500),
            n_ctx=64,
            n_tokens=100,
            n_single=3,
            n_chunks=2,
            thresholds=[1e9, -0.3],
            n_threads=1,
            stage=stage,
        )
    first, second = result.layers
    assert first.point.computed == first.point.recall == first.point.mass == 0
    assert first.computed == first.active == 0
    assert first.predicted_mode.rows == 0 and first.predicted_mode.bytes == first.predictor_bytes
    assert second.point.recall > 0.99 and second.computed > 0.05 and second.predicted_mode.rows > 0
    assert result.predicted.value != result.exact.value
    assert result.n_disagreed == 0


def test_a_model_without_a_predictor_says_how_to_get_one(tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "dense.gguf", models.SPECS["llama-relu"])
    with Model(path) as model, pytest.raises(ArgumentError, match="predictor train"):
        check_predictor(model, corpus(models.SPECS["llama-relu"], 400), n_ctx=40, stage=stage)


# ---- reports


def test_the_page_has_the_figures(checked: Check) -> None:
    page = report.markdown(checked, title="Check of a test", how="So it was.", picture="check.png")
    lines = page.splitlines()
    assert lines[0] == "# Check of a test" and "![" in page and "(check.png)" in page
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    for row in [*report.layer_rows(checked), *report.trade_rows(checked)]:
        assert "| " + " | ".join(row) + " |" in tables
    first, p = checked.layers[0], checked.layers[0].point
    shares = (p.active, p.computed, first.computed, p.recall, p.precision, p.mass, first.rows, first.bytes)
    assert report.layer_rows(checked)[0] == ["0", "63", *(f"{100 * share:.1f} %" for share in shares)]
    names = ("active", "computed", "engine", "recall", "precision", "mass", "rows", "bytes")
    assert ("layer", "rank", *names) == report.LAYER_HEAD
    assert f"{100 * first.point.recall:.1f} %" in page and f"{100 * first.rows:.1f} %" in page
    assert f"{checked.predicted.value:.4f} predicted" in page
    assert "agree on all" in page


def test_a_picture_is_drawn(checked: Check, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(checked, tmp_path / "check.png", title="a $ test")
    assert (tmp_path / "check.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report.plot(checked, tmp_path / "check.svg", title="test")
    drawn = (tmp_path / "check.svg").read_text()
    assert "<svg" in drawn


def test_single_tokens_come_from_all_parts_and_are_counted(path: Path) -> None:
    """A text of 8 windows of 62 tokens and BOS, of which the later half of each is computed singly."""
    fed: list[int] = []
    feed = Session.feed

    def spy(self: Session, tokens: Array, **how: Any) -> Any:
        if len(tokens) > 1:
            fed.append(0)
        else:
            fed[-1] += 1
        return feed(self, tokens, **how)

    windows = windows_of()
    with Model(path) as model, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "feed", spy)
        for wanted, each in ((16, [2] * 8), (10**6, [32] * 8)):
            fed.clear()
            n, _ = check._single_tokens(model, windows, [0.4, -0.3], wanted, 1, lambda done, total: None)
            assert n == sum(each)
            assert fed == [*each, *each, 1]  # predicted, exact, dense
