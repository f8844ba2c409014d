"""Copies of files with keys and tensors changed, against files that gguf wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

import powerinfer.models.rewrite as module
from powerinfer import ArgumentError, FileError, ModelFile
from powerinfer.models.rewrite import NewTensor, from_array, rewrite

NAMES = [f"blk.{i}.ffn_up.weight" for i in range(5)]


def contents() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(3)
    return {name: numbers.normal(size=(4 + i, 64)).astype(np.float32) for i, name in enumerate(NAMES)}


def write(path: Path, tensors: dict[str, np.ndarray], *, per_file: int = 0) -> None:
    """A file, or a split of files NAME-0000i-of-0000n.gguf."""
    out = gguf.GGUFWriter(path, "llama", split_max_tensors=per_file)
    out.add_string("general.name", "a model")
    out.add_uint32("t.number", 7)
    out.add_array("t.words", ["a", "b"])
    for name, value in tensors.items():
        out.add_tensor(name, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "in.gguf", contents())
    return tmp_path / "in.gguf"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the small tensors of these tests are copied in several pieces, as large ones are."""
    monkeypatch.setattr(module, "PIECE_BYTES", 600)


def test_without_changes_it_is_the_same_file(path: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with ModelFile(path) as source:
        rewrite(source, tmp_path / "out.gguf", progress=lambda done, total: steps.append((done, total)))
    assert (tmp_path / "out.gguf").read_bytes() == path.read_bytes()
    total = sum(value.nbytes for value in contents().values())
    assert steps[-1] == (total, total) and {t for _, t in steps} == {total}
    sizes = np.diff([0] + [done for done, _ in steps])
    assert (sizes > 0).all() and (sizes <= 600).all()


def test_keys_and_tensors_are_replaced_in_place_or_appended(path: Path, tmp_path: Path) -> None:
    fc1 = np.random.default_rng(4).normal(size=(300, 32)).astype(np.float16)
    changed = contents()[NAMES[1]] * 2
    with ModelFile(path) as source:
        rewrite(
            source,
            tmp_path / "out.gguf",
            powerinfer=True,
            keys={
                "t.number": 0.5,
                "powerinfer.neuron.tokens": ("u64", 2**40),
                "powerinfer.neuron.counts": np.arange(4, dtype=np.uint32),
            },
            drop_keys={"general.name", "not.there"},
            replace_tensors={"blk.0.fc1.weight": ("Q8_0", fc1), NAMES[1]: ("F16", changed)},
            drop_tensors=[NAMES[3]],
        )
    with ModelFile(tmp_path / "out.gguf") as file:
        assert file.info.is_powerinfer
        new = ["powerinfer.neuron.tokens", "powerinfer.neuron.counts"]
        assert list(file.metadata) == ["general.architecture", "t.number", "t.words", *new]
        assert file.metadata["t.number"] == 0.5
        assert file.metadata[new[0]] == 2**40 and file.metadata.type_name(new[0]) == "u64"
        assert file.metadata[new[1]].tolist() == [0, 1, 2, 3]
        assert [t.name for t in file.tensors] == [*NAMES[:3], NAMES[4], "blk.0.fc1.weight"]
        assert [t.type for t in file.tensors] == ["F32", "F16", "F32", "F32", "Q8_0"]
        packed = gguf.quants.quantize(fc1.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        assert file.raw("blk.0.fc1.weight").tobytes() == packed.tobytes()
        assert file.raw(NAMES[1]).tobytes() == changed.astype(np.float16).tobytes()
        assert file.raw(NAMES[4]).tobytes() == contents()[NAMES[4]].tobytes()


def test_the_magic(path: Path, sparse_path: Path, tmp_path: Path) -> None:
    for source_path, powerinfer, expected in (
        (path, None, b"GGUF"),
        (path, True, b"PWRI"),
        (sparse_path, None, b"PWRI"),
        (sparse_path, False, b"GGUF"),
    ):
        with ModelFile(source_path) as source:
            rewrite(source, tmp_path / "out.gguf", powerinfer=powerinfer)
        data = (tmp_path / "out.gguf").read_bytes()
        assert data[:4] == expected and data[4:] == source_path.read_bytes()[4:]


def test_a_split_becomes_one_file(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "split.gguf", contents(), per_file=2)
    parts = sorted(tmp_path.glob("split-*"))
    assert len(parts) == 3
    with ModelFile(parts[1]) as source:
        rewrite(source, tmp_path / "out.gguf")
        for part in parts:
            with pytest.raises(ArgumentError, match="part of the split model that is read"):
                rewrite(source, part)
    assert (tmp_path / "out.gguf").read_bytes() == path.read_bytes()
    assert sorted(tmp_path.glob("split-*")) == parts


def test_parts_of_a_split_by_other_names(tmp_path: Path) -> None:
    """As Hugging Face's cache has them: links to files that are called by their hashes."""
    write(tmp_path / "split.gguf", contents(), per_file=2)
    parts = sorted(tmp_path.glob("split-*"))
    for i, part in enumerate(parts):
        part.symlink_to(part.rename(tmp_path / f"hash{i}"))
    before = [part.read_bytes() for part in parts]
    with ModelFile(parts[0]) as source:
        for other in (parts[2], tmp_path / "hash1"):
            with pytest.raises(ArgumentError, match="part of the split model"):
                rewrite(source, other)
    assert [part.read_bytes() for part in parts] == before


def test_in_place(path: Path) -> None:
    before = contents()
    with ModelFile(path) as source:
        rewrite(source, path, keys={"t.number": 8}, replace_tensors={NAMES[0]: ("F16", before[NAMES[0]])})
        # What was open is the old file still.
        assert source.metadata["t.number"] == 7
        assert all(np.array_equal(source.dequantize(name), before[name]) for name in NAMES)
    with ModelFile(path) as file:
        assert file.metadata["t.number"] == 8 and file.tensors[0].type == "F16"
        assert all(np.array_equal(file.dequantize(name), before[name]) for name in NAMES[1:])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_error_leaves_all_as_it_was(path: Path) -> None:
    before = path.read_bytes()

    def fail() -> Iterator[bytes]:
        yield bytes(4)
        raise RuntimeError("no more")

    for error, tensor in (
        (RuntimeError, NewTensor(type="F32", shape=(2,), pieces=fail)),
        (ArgumentError, NewTensor(type="F32", shape=(2,), pieces=lambda: [bytes(4)])),
        (ArgumentError, NewTensor(type="F32", shape=(2,), pieces=lambda: [bytes(12)])),
        (ArgumentError, from_array("Q4_0", np.zeros((2, 40)))),
    ):
        with ModelFile(path) as source, pytest.raises(error):
            rewrite(source, path, replace_tensors={"new": tensor})
    with ModelFile(path) as source:
        with pytest.raises(ArgumentError, match="has no tensor 'nothing'"):
            rewrite(source, path, drop_tensors=["nothing"])
        with pytest.raises(ArgumentError, match="cannot hold"):
            rewrite(source, path, keys={"t.number": object()})
        with pytest.raises(FileError):
            rewrite(source, path.parent / "nowhere" / "out.gguf")
        with pytest.raises(ArgumentError, match="arrays of floats"):
            rewrite(source, path, replace_tensors={"new": ("F32", np.arange(4))})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
