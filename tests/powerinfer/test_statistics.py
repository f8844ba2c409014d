"""Counts of neurons: in files and folders, sound and broken, and their power law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from powerinfer._engine.counts import Counts
from powerinfer._engine.file import ModelFile
from powerinfer.errors import ArgumentError, FileError, FormatError
from powerinfer.models.convert.torch_file import write_torch
from powerinfer.models.rewrite import rewrite
from powerinfer.models.statistics import (
    Summary,
    read_activation_dir,
    read_counts,
    summarise,
    summarise_all,
    write_activation_dir,
)
from tests import models

SPEC = models.SPECS["llama-relu-gqa"]
SHAPE = (SPEC.n_layer, SPEC.n_ff)


def some_counts(n_tokens: int = 1000, shape: tuple[int, int] = SHAPE) -> Counts:
    rng = np.random.default_rng(5)
    return Counts(counts=rng.integers(0, n_tokens + 1, shape).astype(np.uint64), n_tokens=n_tokens)


def make(folder: Path, layers: dict[str, Any]) -> Path:
    """A folder of tensors by file name."""
    folder.mkdir(exist_ok=True)
    for name, values in layers.items():
        write_torch(folder / name, np.asarray(values))
    return folder


# ---- what counts are


@pytest.mark.parametrize(
    ("counts", "n_tokens", "says"),
    [
        (np.zeros((2, 3), np.int64), 1, "uint64"),
        (np.zeros(3, np.uint64), 1, "n_layer, n_ff"),
        (np.zeros((0, 3), np.uint64), 1, "n_layer, n_ff"),
        (np.zeros((2, 3), np.uint64), 0, "over 0 tokens"),
        (np.zeros((2, 3), np.uint64), -5, "over -5 tokens"),
        (np.zeros((2, 3), np.uint64), 1 << 50, "cannot be"),
        (np.array([[0, 1], [2, 7]], np.uint64), 6, "neuron 1 of layer 1 fired 7 times in 6 tokens"),
    ],
)
def test_counts_that_cannot_be(counts: Any, n_tokens: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Counts(counts=counts, n_tokens=n_tokens)


# ---- in a model's file


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """And another reader sees the keys as they are documented: u32, layer by layer, and u64."""
    plain = models.write_dense(tmp_path / "plain.gguf", SPEC)
    counts = some_counts()
    with ModelFile(plain) as file:
        assert read_counts(file) is None
        rewrite(file, tmp_path / "counted.gguf", keys=counts.keys)
    with ModelFile(tmp_path / "counted.gguf") as file:
        found = read_counts(file)
        assert file.metadata.type_name("powerinfer.neuron.counts") == "array of u32"
        assert file.metadata.type_name("powerinfer.neuron.tokens") == "u64"
    assert found is not None and found.n_tokens == 1000
    assert (found.n_layer, found.n_ff) == SHAPE
    np.testing.assert_array_equal(found.counts, counts.counts)
    fields = GGUFReader(tmp_path / "counted.gguf").fields
    assert fields["powerinfer.neuron.counts"].contents() == counts.counts.reshape(-1).tolist()
    assert fields["powerinfer.neuron.tokens"].contents() == 1000


def test_a_count_that_a_file_cannot_hold() -> None:
    n = 1 << 32
    with pytest.raises(ArgumentError, match="4,294,967,296 times, but a file holds"):
        _ = Counts(counts=np.full((1, 2), n, np.uint64), n_tokens=n).keys
    most = Counts(counts=np.full((1, 2), n - 1, np.uint64), n_tokens=n).keys
    assert most["powerinfer.neuron.counts"].dtype == np.uint32


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"powerinfer.neuron.tokens": 7}, "neuron.counts is missing"),
        ({"powerinfer.neuron.counts": [1] * 960}, "neuron.tokens is missing"),
        ({"powerinfer.neuron.counts": [1] * 959, "powerinfer.neuron.tokens": 7}, "959 numbers.*960"),
        ({"powerinfer.neuron.counts": [1] * 961, "powerinfer.neuron.tokens": 7}, "961 numbers"),
        ({"powerinfer.neuron.counts": [0.5] * 960, "powerinfer.neuron.tokens": 7}, "no array of integers"),
        ({"powerinfer.neuron.counts": "many", "powerinfer.neuron.tokens": 7}, "no array of integers"),
        ({"powerinfer.neuron.counts": [1] * 960, "powerinfer.neuron.tokens": "7"}, "no integer"),
        ({"powerinfer.neuron.counts": [1] * 960, "powerinfer.neuron.tokens": True}, "no integer"),
        ({"powerinfer.neuron.counts": [1] * 960, "powerinfer.neuron.tokens": 0}, "0 tokens"),
        ({"powerinfer.neuron.counts": [-1] * 960, "powerinfer.neuron.tokens": 7}, "negative"),
        ({"powerinfer.neuron.counts": [8] * 960, "powerinfer.neuron.tokens": 7}, "fired 8 times in 7"),
    ],
)
def test_keys_that_contradict_the_model(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    meta = models.metadata(SPEC) | keys
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(SPEC, models.draw(SPEC)))
    with ModelFile(path) as file, pytest.raises(FormatError, match=says) as error:
        read_counts(file)
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.feed_forward_length"])
def test_a_file_without_a_shape(key: str, tmp_path: Path) -> None:
    meta = {"general.architecture": "llama", "llama.block_count": 3, "llama.feed_forward_length": 2}
    meta |= {"powerinfer.neuron.counts": [1] * 6, "powerinfer.neuron.tokens": 7}
    with ModelFile(models.write(tmp_path / "sound.gguf", meta, {})) as file:
        found = read_counts(file)
        assert found is not None and found.counts.shape == (3, 2)
    meta[key] = "other" if key == "general.architecture" else 0
    with (
        ModelFile(models.write(tmp_path / "m.gguf", meta, {})) as file,
        pytest.raises(FormatError, match="no positive integer"),
    ):
        read_counts(file)


# ---- in a folder


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    """Twelve layers: the order is that of the numbers, not of the names."""
    counts = some_counts(shape=(12, 40))
    write_activation_dir(tmp_path / "act", counts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["act"]
    assert sorted(p.name for p in (tmp_path / "act").iterdir()) == sorted(
        f"activation_{i}.pt" for i in range(12)
    )
    found = read_activation_dir(tmp_path / "act", n_layer=12, n_ff=40, n_tokens=1000)
    np.testing.assert_array_equal(found.counts, counts.counts)
    assert found.n_tokens == 1000
    assert read_activation_dir(tmp_path / "act").n_tokens == counts.counts.max()


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counts = some_counts(shape=(2, 40))
    write_activation_dir(tmp_path / "act", counts)
    for i, layer in enumerate(counts.counts):
        tensor = torch.load(tmp_path / "act" / f"activation_{i}.pt", weights_only=True)
        assert tensor.shape == (40,) and tensor.tolist() == layer.tolist()


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool"]
)
def test_what_torch_writes_is_read(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([0, 1, 0, 1] if dtype == "bool" else [0, 3, 100, 64])
    for i in range(2):
        torch.save(values.to(getattr(torch, dtype)), tmp_path / f"activation_{i}.pt")
    found = read_activation_dir(tmp_path)
    assert found.counts.tolist() == [values.long().tolist()] * 2
    assert found.n_tokens == int(values.max())


def test_frequencies_become_counts(tmp_path: Path) -> None:
    layers = {"activation_0.pt": [0.0, 0.25, 1e-9], "activation_1.pt": [1.0, 0.5, 0.75]}
    found = read_activation_dir(make(tmp_path / "f", layers), n_tokens=1000)
    assert (found.counts.tolist(), found.n_tokens) == ([[0, 250, 1], [1000, 500, 750]], 1000)
    found = read_activation_dir(tmp_path / "f")
    np.testing.assert_allclose(found.counts / found.n_tokens, [[0, 0.25, 0], [1, 0.5, 0.75]], atol=1e-6)
    layers = {"activation_0.pt": [0.0, 0.25], "activation_1.pt": [0.5, 0.125]}
    found = read_activation_dir(make(tmp_path / "h", layers), n_tokens=1000)
    assert found.counts.tolist() == [[0, 250], [500, 125]]
    # Neither whole nor shares: what they are proportional to.
    layers = {"activation_0.pt": [0.0, 2.5], "activation_1.pt": [10.0, 5.0]}
    found = read_activation_dir(make(tmp_path / "p", layers), n_tokens=100)
    assert found.counts.tolist() == [[0, 25], [100, 50]]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ({}, "holds no activation_0.pt"),
        ({"activation_a.pt": [1], "activation_01.pt": [1], "xactivation_0.pt": [1]}, "holds no activation_0"),
        ({"activation_1.pt": [1, 2]}, "activation_1.pt, but no activation_0.pt"),
        ({"activation_0.pt": [1], "activation_2.pt": [1], "activation_1.pt.bak": [1]}, "no activation_1.pt"),
        ({"activation_0.pt": [1, 2], "activation_1.pt": [1]}, r"activation_1.pt.*shape \[1\], not \[2\]"),
        ({"activation_0.pt": [[1, 2]]}, r"shape \[1, 2\], not \[n_ff\]"),
        ({"activation_0.pt": 5}, r"shape \[\]"),
        ({"activation_0.pt": np.zeros(0)}, r"shape \[0\]"),
        ({"activation_0.pt": [1, -2, 3]}, "-2 of neuron 1"),
        ({"activation_0.pt": [1.0, 2.0, np.nan]}, "nan of neuron 2"),
        ({"activation_0.pt": [1.0, np.inf]}, "inf of neuron 1"),
        ({"activation_0.pt": [1e30]}, r"1e\+30 of neuron 0"),
    ],
)
def test_folders_that_are_broken(layers: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "act", layers)
    with pytest.raises(FormatError, match=says):
        read_activation_dir(folder)


def test_folders_that_do_not_fit_the_model(tmp_path: Path) -> None:
    folder = make(tmp_path / "act", {"activation_0.pt": [1, 9], "activation_1.pt": [1, 2]})
    with pytest.raises(FormatError, match=r"activation_1.pt, but the model has 3 layers"):
        read_activation_dir(folder, n_layer=3)
    with pytest.raises(FormatError, match=r"not \[4\]"):
        read_activation_dir(folder, n_ff=4)
    with pytest.raises(ArgumentError, match="fired 9 times in 8 tokens"):
        read_activation_dir(folder, n_tokens=8)
    write_torch(folder / "activation_0.pt", {"counts": np.ones(2)})
    with pytest.raises(FormatError, match="a dictionary"):
        read_activation_dir(folder)
    (folder / "activation_0.pt").write_bytes(b"no archive")
    with pytest.raises(FormatError, match=r"activation_0\.pt"):
        read_activation_dir(folder)
    with pytest.raises(FileError, match="nowhere"):
        read_activation_dir(tmp_path / "nowhere")
    with pytest.raises(FileError, match="cannot be read"):
        read_activation_dir(folder / "activation_1.pt")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.models.convert import torch_file

    def full(path: Path, value: Any) -> None:
        if path.name == "activation_2.pt":
            raise OSError(28, "No space left on device")
        path.write_bytes(b"x")

    with monkeypatch.context() as patch:
        patch.setattr(torch_file, "write_torch", full)
        with pytest.raises(FileError, match="act cannot be written: the disk is full"):
            write_activation_dir(tmp_path / "act", some_counts())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "act").mkdir()
    write_activation_dir(tmp_path / "act", some_counts())  # an empty one may be there
    with pytest.raises(FileError, match="exists already"):
        write_activation_dir(tmp_path / "act", some_counts())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="exists already"):
        write_activation_dir(tmp_path / "file", some_counts())
    with pytest.raises(FileError, match="cannot be"):
        write_activation_dir(tmp_path / "no" / "act", some_counts())


# ---- the power law


def test_the_summary_of_a_layer_by_hand() -> None:
    """Of 100 firings 50 + 30 are 80 %, 15 more make it 95 %."""
    (one,) = summarise(Counts(counts=np.array([[0, 5, 30, 50, 15, 0, 0, 0]], np.uint64), n_tokens=50))
    assert one == Summary(active=100 / (8 * 50), carry_80=2 / 8, carry_90=3 / 8, never=4 / 8)
    (one,) = summarise(Counts(counts=np.array([[7, 1, 1, 0]], np.uint64), n_tokens=7))
    assert one == Summary(active=9 / 28, carry_80=2 / 4, carry_90=3 / 4, never=1 / 4)
    (even,) = summarise(Counts(counts=np.full((1, 10), 3, np.uint64), n_tokens=3))
    assert even == Summary(active=1.0, carry_80=0.8, carry_90=0.9, never=0.0)
    (silent,) = summarise(Counts(counts=np.zeros((1, 4), np.uint64), n_tokens=9))
    assert silent == Summary(active=0.0, carry_80=0.0, carry_90=0.0, never=1.0)


def test_the_summary_of_all_takes_the_neurons_together() -> None:
    counts = np.array([[100, 0], [5, 5]], np.uint64)
    found = summarise_all(Counts(counts=counts, n_tokens=100))
    assert found == Summary(active=110 / 400, carry_80=0.25, carry_90=0.25, never=0.25)
    assert [one.carry_90 for one in summarise(Counts(counts=counts, n_tokens=100))] == [0.5, 1.0]


def test_summaries_of_large_counts_are_exact() -> None:
    """The largest counts there may be, many of them: no sum rounds or overflows."""
    n = 1 << 40
    (one,) = summarise(Counts(counts=np.full((1, 50_000), n, np.uint64), n_tokens=n))
    assert (one.carry_80, one.carry_90, one.active) == (0.8, 0.9, 1.0)
