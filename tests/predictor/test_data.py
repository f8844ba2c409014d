"""Windows of a text, and the data that a run of them leaves, against the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model, Tap
from powerinfer.errors import ArgumentError, FileError, FormatError
from powerinfer.models.corpus import Corpus
from powerinfer.models.predictor import data as module
from powerinfer.models.predictor.data import Windows, choose_windows, collect, temporary_folder
from tests import models, rounding
from tests.predictor.small import BOS, corpus, expected

Array = Any

RELU = ("llama-relu-gqa", "bamboo", "opt", "arcee", "nemotron", "falcon-7b", "falcon-40b")
# F16 weights and KV cache, and what is kept as float16; with AMX activations are bf16.
TOLERANCE, AMX_TOLERANCE = 3e-3, 1.5e-2


def numbered(n: int, bos: int | None = BOS) -> Corpus:
    """A text whose tokens say where they stand."""
    return Corpus(tokens=np.arange(10, 10 + n, dtype=np.int32), bos=bos)


# ---- windows


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize(
    ("n_text", "n_train", "n_held"), [(100_000, 6000, 1000), (5000, 4096, 800), (900, 20000, 4000)]
)
def test_windows_are_pieces_of_the_text_that_do_not_overlap(
    n_text: int, n_train: int, n_held: int, bos: int | None
) -> None:
    windows = choose_windows(numbered(n_text, bos), n_ctx=128, n_train=n_train, n_held_out=n_held)
    head = 0 if bos is None else 1
    assert windows.n_head == head
    bodies = [window[head:] for window in windows.tokens]
    for window, body in zip(windows.tokens, bodies, strict=True):
        assert len(window) <= 128 and (np.diff(body) == 1).all()
        assert not head or window[0] == BOS
    every = np.concatenate(bodies)
    assert len(np.unique(every)) == len(every) == windows.n_tokens
    n_wanted = min(n_train + n_held, n_text)
    assert 0.8 * n_wanted <= windows.n_tokens <= max(n_wanted + 128, 8 * 128)
    n_held_out = windows.n_tokens - windows.n_train
    share = n_held / (n_train + n_held)
    assert abs(n_held_out - share * windows.n_tokens) <= 128
    assert 0 < windows.n_train < windows.n_tokens


def test_windows_are_spread_over_the_text_and_the_held_out_ones_between_the_others() -> None:
    windows = choose_windows(numbered(100_000), n_ctx=101, n_train=5000, n_held_out=1000)
    starts = np.array([window[1] for window in windows.tokens]) - 10
    held = starts[windows.n_train_windows :]
    assert len(starts) == 60 and len(held) == 10
    assert starts.min() < 2000 and starts.max() > 96_000
    gaps = np.diff(np.sort(starts))
    assert gaps.max() <= 2 * gaps.min() + 100
    assert held.min() > starts[: windows.n_train_windows].min()
    assert held.max() < starts[: windows.n_train_windows].max()
    assert np.diff(np.sort(held)).max() < 15_000


def test_everything_can_be_held_out() -> None:
    windows = choose_windows(numbered(4000), n_ctx=128, n_train=0, n_held_out=2000)
    assert windows.n_train == 0 and windows.n_train_windows == 0
    assert 2000 <= windows.n_tokens < 2128


def test_a_short_text_gets_short_windows_and_a_shorter_one_an_error() -> None:
    assert choose_windows(numbered(256), n_ctx=512, n_train=200, n_held_out=50).n_ctx == 33
    with pytest.raises(ArgumentError, match=r"255 tokens, which is too little: at least 256"):
        choose_windows(numbered(255), n_ctx=512, n_train=200, n_held_out=50)
    with pytest.raises(ArgumentError, match="n_ctx is 20"):
        choose_windows(numbered(9000), n_ctx=20, n_train=200, n_held_out=50)
    with pytest.raises(ArgumentError, match="both must be positive"):
        choose_windows(numbered(9000), n_ctx=128, n_train=200, n_held_out=0)


# ---- the data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def error(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", RELU)
def test_data_is_what_the_reference_sees(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds of 7 tokens, so that windows are cut; rows of both parts in their order; the BOS left out."""
    path = models.dense_file(folder, name)
    windows = choose_windows(corpus(models.SPECS[name], 300), n_ctx=40, n_train=200, n_held_out=60)
    monkeypatch.setattr(module, "batch_for", lambda *_: 7)
    wanted = expected(path, windows.tokens, windows.n_head)
    tolerance = AMX_TOLERANCE if rounding.BF16 else TOLERANCE
    layers = [1, 0]
    with Model(path, predictor="none") as model, temporary_folder(folder) as temporary:
        for layer, got in zip(layers, collect(model, windows, layers, Path(temporary)), strict=True):
            assert got.layer == layer and got.n == windows.n_tokens and got.n_train == windows.n_train
            assert got.n_held_out == got.n - got.n_train
            one = wanted[layer]
            everything = slice(0, got.n)
            assert error(got.inputs(everything), one.x) < tolerance
            np.testing.assert_allclose(got.rms, np.sqrt(np.mean(one.x**2, axis=1)), rtol=tolerance)
            mass = got.mass(everything)
            differs = (mass > 0) != (one.mass > 0)
            assert not (differs & ~one.doubtful).any()
            x, half = got.halves(everything)
            np.testing.assert_allclose(np.mean(x.astype(np.float64) ** 2, axis=1), 1, rtol=2e-3)
            np.testing.assert_array_equal(half.astype(np.float32), mass)
            unit = mass.sum() / one.mass.sum()
            assert error(mass / unit, one.mass) < 2 * tolerance
            parts = [list(got.blocks(held_out=held, n_rows=13)) for held in (False, True)]
            joined = [np.concatenate([block[i] for part in parts for block in part]) for i in range(2)]
            np.testing.assert_array_equal(joined[0], got.inputs(everything))
            np.testing.assert_array_equal(joined[1], mass)
            assert sum(len(x) for x, _ in parts[1]) == got.n_held_out
        assert any(Path(temporary).iterdir())
    assert not Path(temporary).exists()


def test_data_is_deleted_layer_by_layer(folder: Path) -> None:
    path = models.dense_file(folder, "llama-relu")
    windows = choose_windows(corpus(models.SPECS["llama-relu"], 300), n_ctx=40, n_train=200, n_held_out=60)
    with Model(path) as model, temporary_folder(folder) as temporary:
        first, second = collect(model, windows, [0, 1], Path(temporary))
        before = second.mass(slice(0, 5))
        first.delete()
        assert {file.name for file in Path(temporary).iterdir()} == {"x_1.f16", "mass_1.f16"}
        np.testing.assert_array_equal(second.mass(slice(0, 5)), before)


def test_what_is_active_stays_so_however_little_it_adds(folder: Path) -> None:
    """Masses of 1e-20 of a token's sum are below the least float16."""
    path = models.dense_file(folder, "llama-relu")
    windows = choose_windows(corpus(models.SPECS["llama-relu"], 300), n_ctx=40, n_train=200, n_held_out=60)
    with Model(path) as model, temporary_folder(folder) as temporary:
        tiny = np.ones(model.info.n_ff, np.float32)
        tiny[::2] = 1e-20
        got = module.LayerData(Path(temporary), model.info, 0, windows, tiny)

        tap = Tap()
        tap.input = {0: np.full((4, model.info.n_embd), 3e4, np.float32)}
        tap.hidden = {0: np.ones((4, model.info.n_ff), np.float32)}
        got.put(tap, module.Step(1, 0, 3))
        assert (got.mass(slice(0, 3)) > 0).all()
        np.testing.assert_allclose(got.inputs(slice(0, 3)), 3e4, rtol=1e-3)
        assert not (got.mass(slice(3, 4)) > 0).any()


def test_a_full_disk_is_an_error_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = models.dense_file(folder, "llama-relu")
    windows = choose_windows(corpus(models.SPECS["llama-relu"], 300), n_ctx=40, n_train=200, n_held_out=60)
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with (
        Model(path) as model,
        temporary_folder(folder) as temporary,
        pytest.raises(FileError, match=r"cannot hold the data to learn from.*No space left"),
    ):
        collect(model, windows, [0], Path(temporary))


def test_broken_weights_are_an_error(folder: Path) -> None:
    spec = models.SPECS["llama-relu"]
    tensors = models.file_tensors(spec, models.draw(spec))
    tensors["blk.0.ffn_up.weight"] = np.full_like(tensors["blk.0.ffn_up.weight"], np.nan)
    path = models.write(folder / "nan.gguf", models.metadata(spec), tensors)
    windows = choose_windows(corpus(spec, 300), n_ctx=40, n_train=200, n_held_out=60)
    with (
        Model(path) as model,
        temporary_folder(folder) as temporary,
        pytest.raises(FormatError, match="not finite"),
    ):
        collect(model, windows, [0], Path(temporary))


def test_a_tap_stays_within_its_memory() -> None:
    windows = Windows(tokens=(np.zeros(512, np.int32),), n_head=1, n_train_windows=1)
    wide = 80 * (8192 + 28672)
    assert module.batch_for(windows, wide) * wide * 4 <= module.MAX_TAP_BYTES
    assert module.batch_for(windows, 100) == 512
    assert module.batch_for(windows, 1 << 40) == 1
