"""Hybrid sessions in predicted mode: the device scores the neurons, and both sides compute those it names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, UnsupportedError
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from tests import models
from tests.core import capi
from tests.native import hybrid
from tests.native.hybrid import (
    DEEP,
    IDS,
    NAMES,
    SPLITS,
    apart,
    beyond_rounding,
    both,
    drive,
    exactly,
    options,
    place,
    write,
)
from tests.native.test_hybrid import check_every_budget

if hybrid.AMX:

    @pytest.mark.slow
    def test_without_amx() -> None:
        hybrid.without_amx(__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predicted")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(write(folder, "llama-relu-gqa", "sparse")) as m:
        yield m


@exactly
@pytest.mark.parametrize("predictor", ["mlp", "sign"])
@pytest.mark.parametrize("name", [n for n in NAMES if models.SPECS[n].predictor])
def test_predicted(folder: Path, name: str, predictor: Any) -> None:
    with Model(write(folder, name, "sparse"), predictor=predictor) as model:
        for i, split in enumerate(SPLITS):
            assert both(model, split, "predicted", 16 if i % 2 else 64, 1 + i % 3) < 1, split


@exactly
def test_every_budget_is_kept(model: Model) -> None:
    check_every_budget(model, "predicted")


@exactly
@pytest.mark.parametrize("split", ["some", "mixed"])
def test_prompts_can_be_masked_too(model: Model, split: str) -> None:
    """With mask_prompts a prompt's tokens take the predictor's neurons as well, on both sides."""
    o = options("predicted") | {"mask_prompts": True}
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, "predicted"), device="host", **o) as s,
        Session(model, **options("predicted")) as unmasked,
    ):
        want, other = drive(alone, IDS), drive(unmasked, IDS)
        assert beyond_rounding(want, drive(s, IDS), model.info.n_layer) < 1
    assert beyond_rounding(want, other, model.info.n_layer) > 5


@exactly
@pytest.mark.parametrize("split", ["all", "some", "mixed"])
def test_thresholds_change_on_both_sides(model: Model, split: str) -> None:
    n_layer = model.info.n_layer
    o = options("predicted")
    answers = []
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, "predicted"), device="host", **o) as s,
    ):
        for thresholds in (0.4, [0.1 * (k + 1) for k in range(n_layer)], -1e30, 1e30):
            for x in (alone, s):
                if isinstance(thresholds, list):
                    x.set_thresholds(thresholds)
                else:
                    x.set_threshold(thresholds)
                x.drop()
                x.feed(IDS[:5])
                x.feed(IDS[5:7], want_logits=True)
            want, got = alone.logits(1).copy(), s.logits(1).copy()
            assert beyond_rounding([want], [got], n_layer) < 1, thresholds
            answers.append(got)
            if thresholds == 1e30:
                assert all(step.n_computed == step.n_predicted == 0 for step in s.last_step)
        with pytest.raises(ArgumentError, match="threshold is nan, it must be a number"):
            s.set_threshold(float("nan"))
        s.feed([IDS[7]])
        assert all(step.n_predicted == 0 for step in s.last_step)
    assert len({a.tobytes() for a in answers}) == 4


@exactly
@pytest.mark.parametrize("split", ["some", "mixed"])
def test_the_mode_changes_between_feeds(model: Model, split: str) -> None:
    with (
        Session(model, **options("predicted")) as alone,
        Session(model, plan=place(model, split, "predicted"), device="host", **options("predicted")) as s,
    ):
        for mode in ("exact", "predicted", "dense", "predicted"):
            for x in (alone, s):
                x.set_sparsity(mode)  # type: ignore[arg-type]
                x.feed([IDS[3]])
            assert beyond_rounding([alone.logits()], [s.logits()], model.info.n_layer) < 1, mode


def test_predictors_that_were_not_sent_cannot_be_used(model: Model) -> None:
    with Session(model, plan=place(model, "some", "exact"), device="host", **options("exact")) as s:
        with pytest.raises(UnsupportedError, match="when it is opened"):
            s.set_sparsity("predicted")
        s.set_sparsity("dense")
        s.feed([3])
        assert s.info.sparsity == "dense"


@exactly
@pytest.mark.parametrize("n_tok", [1, 3, 8])
def test_what_a_step_did_is_counted_as_on_the_cpu(model: Model, n_tok: int) -> None:
    """Both sides' neurons together are those that the CPU alone would have taken; hits are the device's."""
    for sparsity in ("predicted", "exact", "dense"):
        o = options(sparsity)
        with Session(model, **o) as alone:
            alone.feed(IDS[:n_tok], want_logits=True)
            want, total = alone.last_step, alone.last_total.bytes
        for split in SPLITS:
            with Session(model, plan=place(model, split, sparsity), device="host", **o) as s:
                s.feed(IDS[:n_tok], want_logits=True)
                got, got_total = s.last_step, s.last_total.bytes
            for layer, (a, b) in enumerate(zip(want, got, strict=True)):
                place_of = (sparsity, split, layer)
                for name in ("n_tokens", "n_sparse", "n_predicted", "n_computed", "n_active"):
                    assert getattr(a, name) == getattr(b, name), (*place_of, name)
                on_device = split != "cpu" and (split != "mixed" or layer % 2 == 1)
                if split in ("all", "weak"):
                    assert b.hit_rate == 1, place_of
                elif split in ("none", "cpu") or not on_device:
                    assert b.hit_rate == 0, place_of
                elif split in ("some", "near", "only"):
                    assert 0 < b.n_active_device < b.n_active, place_of
                else:  # the one neuron may be silent
                    assert 0 <= b.n_active_device <= b.n_active, place_of
                if n_tok == 1:
                    assert (a.n_rows, a.ffn_bytes, a.bytes) == (b.n_rows, b.ffn_bytes, b.bytes), place_of
                else:  # tokens share rows, which a device does not tell
                    assert a.n_rows <= b.n_rows <= 3 * model.info.n_ff, place_of
                assert (b.ffn_us > 0) == (not on_device or split not in ("all", "weak")), place_of
            if n_tok == 1:
                assert total == got_total, (sparsity, split)


@exactly
def test_a_long_prompt_is_counted_too(model: Model) -> None:
    for sparsity in ("predicted", "exact"):
        o = options(sparsity)
        with (
            Session(model, **o) as alone,
            Session(model, plan=place(model, "some", sparsity), device="host", **o) as s,
        ):
            for x in (alone, s):
                x.feed(IDS[:40], want_logits=sparsity == "exact")
            # Alone, nothing is computed behind the last layer for tokens whose logits nobody wants.
            n = len(s.last_step) - (sparsity != "exact")
            for a, b in zip(alone.last_step[:n], s.last_step[:n], strict=True):
                for name in (
                    "n_tokens",
                    "n_sparse",
                    "n_predicted",
                    "n_computed",
                    "n_active",
                    "n_rows",
                    "ffn_bytes",
                ):
                    assert getattr(a, name) == getattr(b, name), (sparsity, name)


@exactly
@pytest.mark.parametrize("split", ["cpu", "some", "all", "mixed"])
def test_neurons_are_counted_on_both_sides(model: Model, split: str) -> None:
    o = options("predicted") | {"count_neurons": True}
    with (
        Session(model, **o) as alone,
        Session(model, plan=place(model, split, "predicted"), device="host", **o) as s,
    ):
        for x in (alone, s):
            with pytest.raises(ArgumentError, match="no tokens"):
                x.neuron_counts()
            x.feed(IDS[:40])
            x.feed(IDS[40:43], want_logits=True)
            x.feed([IDS[43]])
        want, got = alone.neuron_counts(), s.neuron_counts(reset=True)
        assert want.n_tokens == got.n_tokens == 44
        assert np.array_equal(want.counts, got.counts)
        with pytest.raises(ArgumentError, match="no tokens"):
            s.neuron_counts()
        s.feed([IDS[44]])
        after = s.neuron_counts()
        assert after.n_tokens == 1
        assert after.counts.sum(axis=1).tolist() == [step.n_active for step in s.last_step]


@exactly
@pytest.mark.parametrize("split", ["cpu", "some"])
def test_counts_are_those_of_the_hidden_values(model: Model, split: str) -> None:
    """A tapped session of the CPU shows which products are not 0, whatever was computed together."""
    o = options("exact")
    with Session(model, **o) as tapped, tapped.tap(hidden=True) as tap:
        tapped.feed(IDS[:44])
        want = np.stack([(tap.hidden[layer] != 0).sum(axis=0) for layer in range(model.info.n_layer)])
    with Session(model, plan=place(model, split, "exact"), device="host", count_neurons=True, **o) as s:
        for n in (range(36), range(36, 37), range(37, 44)):
            s.feed([IDS[i] for i in n])
        got = s.neuron_counts()
    assert got.n_tokens == 44
    assert np.array_equal(want, got.counts)


def test_counts_must_be_asked_for(model: Model) -> None:
    with Session(model, **options("exact")) as s:
        s.feed([3])
        with pytest.raises(ArgumentError, match="without count_neurons"):
            s.neuron_counts()


def still(folder: Path) -> Path:
    """A model whose layers add nothing to the residual, so that all see the same."""
    folder.mkdir(exist_ok=True)
    path = write(folder, DEEP, "sparse")
    data = path.read_bytes()
    with ModelFile(path) as file:
        for name in (tensor.name for tensor in file.tensors):
            if "attn_output" in name or "ffn_down" in name:
                weights = file.raw(name).tobytes()
                assert data.count(weights) == 1
                data = data.replace(weights, bytes(len(weights)))
    path.write_bytes(data)
    return path


@exactly
def test_a_device_guesses_the_next_layers_neurons(folder: Path) -> None:
    """By the next layer's own predictor: where the residual stays as it is, the guess is right."""
    o = options("predicted")
    with (
        Model(still(folder / "still")) as model,
        Session(model, plan=place(model, "none", "predicted"), device="host", **o) as s,
    ):
        for ids in (IDS[:9], IDS[9:10], IDS[10:11]):
            s.feed(ids)
        first, *others = s.last_step
        assert first.n_foreseen == 0 < first.n_predicted
        assert [step.n_foreseen for step in others] == [step.n_predicted for step in others]
        s.feed(IDS[11:13], want_logits=True)
        assert not any(step.n_foreseen for step in s.last_step)  # of several tokens it does not pay
    with Model(write(folder, DEEP, "sparse")) as model:
        for split in ("none", "some", "near"):
            with Session(model, plan=place(model, split, "predicted"), device="host", **o) as s:
                s.feed(IDS[:9])
                s.feed(IDS[9:10])
                right = [(step.n_foreseen, step.n_predicted) for step in s.last_step[1:]]
                assert all(0 <= n <= of for n, of in right) and any(n for n, _ in right), split
                assert any(n < of for n, of in right), split


def test_members_compute_what_they_fetched() -> None:
    """Random marks and guesses, by the C program hybrid_assign_check."""
    done = subprocess.run(
        capi.program("hybrid_assign_check"), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@exactly
def test_neither_a_guess_nor_threads_change_a_bit(folder: Path) -> None:
    """Who computes a cold neuron hangs on both, but the sum over all of them has one order."""

    def decode(n_threads: int, look_ahead: bool) -> tuple[hybrid.Arrays, list[int]]:
        plan, o = place(model, "some", "predicted"), options("predicted", n_threads=n_threads)
        with Session(model, plan=plan, device="host", look_ahead=look_ahead, **o) as s:
            logits = []
            for i in IDS[:12]:
                s.feed([i])
                logits.append(s.logits(0).copy())
            return logits, [step.n_foreseen for step in s.last_step]

    with Model(write(folder, DEEP, "sparse")) as model:
        want, none = decode(1, False)
        assert not any(none)
        for n_threads in (1, 2, 3, 5):
            got, foreseen = decode(n_threads, True)
            assert any(foreseen)
            assert apart(got, want) == 0
