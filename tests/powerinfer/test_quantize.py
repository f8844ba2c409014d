"""`powerinfer quantize`: formats as llama.cpp chooses them, weights by gguf, logits by the float64 reference.

tests/golden/mixtures.json holds what llama.cpp's own code (llama_tensor_get_type, as in llama-cpp-python
0.3.36) answered for models of several shapes: the format of a kind of matrix, or "3*Q6_K 20*Q4_K" over the
layers.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from powerinfer import ArgumentError, FormatError, ModelFile
from powerinfer._engine.file import TensorInfo
from powerinfer._engine.session import Model, Session
from powerinfer.cli import main
from powerinfer.models.quantize import FAST, MIXTURES, Change, choose_types, find_mixture, quantize_model
from tests import models, reference

GOLDEN = json.loads((models.GOLDEN / "mixtures.json").read_text(encoding="utf-8"))["models"]
ALL_PASS = -1e30

WIDE = models.Spec(
    "wide-llama",
    "llama",
    n_layer=3,
    n_embd=256,
    n_head=4,
    n_head_kv=2,
    n_ff=512,
    act="relu",
    predictor=(256, 64, 40),
)
SPECS = {
    "llama": WIDE,
    "bamboo": replace(WIDE, name="wide-bamboo", family="bamboo", act="drelu"),
    "falcon": replace(WIDE, name="wide-falcon", family="falcon", n_head_kv=1),
    "opt": replace(WIDE, name="wide-opt", family="opt", tied=True, n_head_kv=4),
    "qwen2": replace(WIDE, name="wide-qwen2", family="qwen2", act="silu", predictor=()),
}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """F16 files of SPECS, with predictors that let all neurons pass where there are some."""
    folder = tmp_path_factory.mktemp("models")
    out = {}
    for name, spec in SPECS.items():
        path = folder / f"{name}.gguf"
        if spec.predictor:
            models.write_sparse(path, spec, models.draw_predictor(spec), ALL_PASS)
        else:
            models.write_dense(path, spec)
        out[name] = path
    return out


def quantize(source: Path, out: Path, mixture: str, **options: Any) -> list[Change]:
    chosen = {key: options.pop(key) for key in tuple(options) if key.endswith("_type") or key == "pure"}
    with ModelFile(source) as file:
        changes = choose_types(file, mixture, **chosen)
        quantize_model(file, out, mixture, changes, **options)
    return changes


def read(path: Path) -> dict[str, tuple[str, Any]]:
    """Every tensor's type and bytes, by gguf."""
    copy = path.with_suffix(".copy")
    copy.write_bytes(b"GGUF" + path.read_bytes()[4:])  # gguf refuses the PowerInfer magic
    return {t.name: (t.tensor_type.name, np.array(t.data)) for t in gguf.GGUFReader(copy).tensors}


# ---- which format ----


def expected_types(
    model: dict[str, Any], mixture: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Name, shape and format of every matrix of a golden."""
    d, ff = model["n_embd"], model["n_ff"]
    kv = d // model["n_head"] * model["n_head_kv"]
    rows = {"token_embd": 1000, "output": 1000, "attn_k": kv, "attn_v": kv, "attn_qkv": d + 2 * kv}
    rows |= {"ffn_up": ff, "ffn_gate": ff}
    for kind, text in mixture.items():
        if kind == "file_type":
            continue
        types: list[str] = []
        for run in text.split():
            n, _, type = run.rpartition("*")
            types += [type] * int(n or 0 if "*" in run else model["n_layer"])
        shape = (rows.get(kind, d), ff if kind == "ffn_down" else d)
        if kind in ("token_embd", "output"):
            yield f"{kind}.weight", shape, text
        else:
            assert len(types) == model["n_layer"]
            yield from ((f"blk.{i}.{kind}.weight", shape, type) for i, type in enumerate(types))


@pytest.mark.parametrize("i", range(len(GOLDEN)))
def test_types_are_those_of_llama_cpp(i: int) -> None:
    model = GOLDEN[i]
    arch = model["arch"]
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": model["n_layer"],
        f"{arch}.attention.head_count": model["n_head"],
        f"{arch}.attention.head_count_kv": model["n_head_kv"],
    }
    assert set(model["mixtures"]) == set(MIXTURES) - {"COPY", "MXFP4_MOE"}
    for name, mixture in model["mixtures"].items():
        assert MIXTURES[name][0] == mixture["file_type"]
        expected = list(expected_types(model, mixture))
        tensors = [TensorInfo(name=n, type="F32", shape=shape, n_bytes=0) for n, shape, _ in expected]
        source: Any = SimpleNamespace(path="x", tensors=tensors, metadata=metadata)
        found = choose_types(source, name.lower(), pure=model["pure"])
        assert [(c.tensor.name, c.type) for c in found] == [(n, type) for n, _, type in expected], name


def test_a_powerinfer_file(files: dict[str, Path]) -> None:
    """ffn_down_t is treated as ffn_down is, token_embd stands for the output in OPT files, and predictors
    have formats of their own, by the length of their rows; nothing else changes."""
    with ModelFile(files["llama"]) as file:
        types = {c.tensor.name: c.type for c in choose_types(file, "Q4_K_M")}
        # Of three layers the last is in the last eighth; 3 // 8 is 0, so layer 2 would be even otherwise.
        assert [types[f"blk.{i}.ffn_down_t.weight"] for i in range(3)] == ["Q4_K", "Q4_K", "Q6_K"]
        assert [types[f"blk.{i}.fc1.weight"] for i in range(3)] == ["Q5_K"] * 3
        assert [types[f"blk.{i}.fc2.weight"] for i in range(3)] == ["Q5_K", "Q8_0", "F16"]
        assert (types["output.weight"], types["token_embd.weight"]) == ("Q6_K", "Q4_K")
        assert all(type == "F32" for name, type in types.items() if "norm" in name)
        types = {c.tensor.name: c.type for c in choose_types(file, "Q4_0")}
        assert [types[f"blk.{i}.fc2.weight"] for i in range(3)] == ["Q4_0", "Q4_0", "F16"]
    with ModelFile(files["opt"]) as file:
        types = {c.tensor.name: c.type for c in choose_types(file, "Q4_K_S")}
        assert (types["token_embd.weight"], types["position_embd.weight"]) == ("Q6_K", "F16")
        assert types["blk.0.ffn_down_t.weight"] == "Q4_K" and types["blk.0.ffn_down_t.bias"] == "F32"


def test_chosen_formats(files: dict[str, Path]) -> None:
    with ModelFile(files["llama"]) as file:
        changes = choose_types(
            file, "q4_k", predictor_type="q8_0", output_type="Q5_K", embedding_type="iq4_nl"
        )
        types = {c.tensor.name: c.type for c in changes}
        assert (types["output.weight"], types["token_embd.weight"]) == ("Q5_K", "IQ4_NL")
        assert [types[f"blk.{i}.fc2.weight"] for i in range(3)] == ["Q8_0", "Q8_0", "F16"]
        assert [c.wanted for c in changes if c.tensor.name == "blk.2.fc2.weight"] == ["Q8_0"]
        pure = {c.type for c in choose_types(file, "Q6_K", pure=True) if "fc" not in c.tensor.name}
        assert pure == {"Q6_K", "F32"}
        copy = choose_types(file, "copy", predictor_type="Q8_0")
        assert all(c.type == c.tensor.type and not c.wanted for c in copy)
        for bad in ({"predictor_type": "Q9"}, {"output_type": "IQ2_XS"}):
            with pytest.raises(ArgumentError, match=r"not a weight format|cannot be written"):
                choose_types(file, "Q4_0", **bad)
    with pytest.raises(ArgumentError, match="'Q4_K_X' is not a mixture"):
        find_mixture("Q4_K_X")


def test_keys_that_are_not_what_they_should_be() -> None:
    """Nothing of a hostile file is believed further than it must be."""
    tensors = [TensorInfo(name="blk.99999999999.attn_v.weight", type="F16", shape=(8, 256), n_bytes=4096)]
    for metadata in (
        {},
        {"general.architecture": 5, "5.block_count": "x"},
        {"llama.attention.head_count": [b""]},
    ):
        source: Any = SimpleNamespace(path="x", tensors=tensors, metadata=metadata)
        assert [c.type for c in choose_types(source, "Q4_K_M")] == ["Q6_K"]


def test_experts_have_the_formats_of_other_feed_forwards() -> None:
    """All of a layer's experts are one tensor; the router stays as it is."""
    shapes = {"ffn_gate_inp": (4, 256), "ffn_up_exps": (4, 256, 256), "ffn_down_exps": (4, 256, 256)}
    tensors = [
        TensorInfo(name=f"blk.0.{name}.weight", type="F16", shape=shape, n_bytes=2 * math.prod(shape))
        for name, shape in shapes.items()
    ]
    source: Any = SimpleNamespace(path="x", tensors=tensors, metadata={"general.architecture": "qwen3moe"})
    changes = choose_types(source, "Q4_K_M")
    assert [c.type for c in changes] == ["F16", "Q4_K", "Q6_K"]
    assert changes[1].n_bytes == 4 * 256 * 144


# ---- what is written ----


@pytest.mark.parametrize("mixture", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_bytes_are_those_of_the_package(files: dict[str, Path], tmp_path: Path, mixture: str) -> None:
    """Where gguf has the format; the output's Q6_K it cannot write."""
    out = tmp_path / "out.gguf"
    quantize(files["llama"], out, mixture)
    before, after = read(files["llama"]), read(out)
    assert list(after) == list(before)
    n_compared = 0
    for name, (type, data) in after.items():
        if type == before[name][0]:
            assert np.array_equal(data, before[name][1])
        elif type not in ("Q6_K", "Q5_K"):
            weights = before[name][1].astype(np.float32)
            expected = quants.quantize(weights, Kind[type]) if type != "F32" else weights
            assert data.tobytes() == np.ascontiguousarray(expected).tobytes(), name
            n_compared += 1
    assert n_compared >= (18 if mixture != "F16" else 0)


# The square root of ggml's error on normal weights, from tests/core/test_quant_write.py, with some room.
ERROR = {"Q2_K": 0.32, "Q3_K": 0.17, "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.02, "IQ4_NL": 0.09, "Q8_0": 0.006}
ERROR |= {"Q4_0": 0.11, "F16": 1e-3}


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Experts alone get the format, all other matrices Q8_0; routers stay; bytes are those of the package."""
    out = tmp_path / "out.gguf"
    path = models.write_dense(tmp_path / "in.gguf", models.SPECS["qwen3moe"])
    quantize(path, out, "mxfp4_moe")
    source = read(path)
    for name, (type, data) in read(out).items():
        expected = "Q8_0" if source[name][0] == "F16" else source[name][0]
        if "_exps." in name:
            expected = "MXFP4"
            wanted = quants.quantize(source[name][1].astype(np.float32), Kind.MXFP4)
            np.testing.assert_array_equal(data.view(np.uint8).reshape(wanted.shape), wanted)
        assert type == expected, name


@pytest.mark.parametrize("mixture", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL"])
def test_every_tensor_is_near_what_it_was(files: dict[str, Path], tmp_path: Path, mixture: str) -> None:
    out = tmp_path / "out.gguf"
    changes = quantize(files["llama"], out, mixture)
    before, after = read(files["llama"]), read(out)
    for change in changes:
        name = change.tensor.name
        type, data = after[name]
        assert type == change.type and data.nbytes == change.n_bytes
        weights = before[name][1].astype(np.float64)
        error = np.sqrt(((quants.dequantize(data, Kind[type]) - weights) ** 2).sum() / (weights**2).sum())
        assert error < ERROR.get(type, 1e-12), name


def test_keys_and_magic_are_kept(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(files["llama"], out, "Q5_K_M")
    with ModelFile(files["llama"]) as old, ModelFile(out) as new:
        assert new.info.is_powerinfer
        before, after = dict(old.raw_metadata()), dict(new.raw_metadata())
        assert new.metadata["general.file_type"] == 17 and new.metadata["general.quantization_version"] == 2
        assert new.metadata.type_name("general.file_type") == "u32"
        assert "powerinfer.sparse_threshold" in before
        for key in before:
            assert before[key] == after[key] or key == "general.file_type"
        assert set(after) - set(before) == {"general.quantization_version"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "mixture"),
    [(name, "Q4_K_M") for name in SPECS] + [("llama", "Q3_K_L"), ("llama", "IQ4_NL"), ("falcon", "Q8_0")],
)
def test_it_runs(files: dict[str, Path], tmp_path: Path, name: str, mixture: str) -> None:
    """The engine's logits against the float64 reference, which reads the same file through gguf."""
    out = tmp_path / "out.gguf"
    quantize(files[name], out, mixture)
    tokens = np.arange(3, 13) * 17 % SPECS[name].n_vocab
    expected = reference.forward(reference.load(out), tokens)
    modes: list[Any] = ["dense", "exact", "predicted"] if SPECS[name].predictor else ["dense"]
    for mode in modes:
        with Model(out) as model, Session(model, sparsity=mode, n_threads=1) as session:
            session.feed(tokens, want_logits=True)
            rows = np.stack([session.logits(i).copy() for i in range(len(tokens))])
        # Integer dot products take activations as 8-bit blocks, as in tests/native/test_logits.py.
        assert reference.relative_error(rows, expected) < 3e-2, mode
    # And it is the model it was, but for what the weights lost: a wrong row would leave 1 or more.
    original = reference.forward(reference.load(files[name]), tokens)
    assert reference.relative_error(expected, original) < 0.6


@pytest.mark.parametrize("type", ["COPY", "Q4_0", "Q4_K"])
def test_down_by_neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
    """Of a squared-ReLU model: rows have the values that gguf's own quantisation gives them, those of silent
    neurons are not read, and answers are those of all rows."""
    spec = replace(WIDE, name="wide-arcee", family="arcee", act="relu2", predictor=())
    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    models.write_dense(path, spec)
    monkeypatch.setattr("powerinfer.models.rewrite.PIECE_BYTES", 100_000)
    with ModelFile(path) as source:
        quantize_model(source, out, type, choose_types(source, type, pure=True, down_by_neuron=True))
    before, after = reference.load(path).tensors, reference.load(out).tensors
    assert {name.replace("ffn_down_t", "ffn_down") for name in after} == set(before)
    for i in range(spec.n_layer):
        turned = np.ascontiguousarray(before[f"blk.{i}.ffn_down.weight"].T, np.float32)
        kept = after[f"blk.{i}.ffn_down_t.weight"]
        if type == "Q4_0":
            turned = quants.dequantize(quants.quantize(turned, Kind.Q4_0), Kind.Q4_0)
        assert np.array_equal(kept, turned) if type != "Q4_K" else np.abs(kept - turned).max() < 0.2
    tokens = np.arange(3, 13) * 17 % spec.n_vocab
    read, rows = {}, {}
    for mode in ("dense", "exact"):
        with Model(out) as model, Session(model, sparsity=mode, n_threads=1) as session:
            assert model.info.can_skip_down
            rows[mode], read[mode] = [], 0
            for token in tokens:
                session.feed([token])
                rows[mode].append(session.logits().copy())
                read[mode] += sum(step.ffn_bytes for step in session.last_step)
    assert np.array_equal(rows["dense"], rows["exact"])
    assert 0.5 < read["exact"] / read["dense"] < 0.8  # up, and about half of down
    expected = reference.forward(reference.load(out), tokens)
    assert reference.relative_error(np.stack(rows["exact"]), expected) < 3e-2


def test_down_by_neuron_of_neurons_that_are_never_silent(files: dict[str, Path]) -> None:
    with ModelFile(files["qwen2"]) as source, pytest.raises(ArgumentError, match="no neuron is ever silent"):
        choose_types(source, "Q4_0", down_by_neuron=True)
    with ModelFile(files["llama"]) as source, pytest.raises(ArgumentError, match="has no ffn_down"):
        choose_types(source, "Q4_0", down_by_neuron=True)


def test_pieces_and_threads_do_not_matter(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(files["llama"], tmp_path / "a.gguf", "Q4_K_M", n_threads=1)
    monkeypatch.setattr("powerinfer.models.rewrite.PIECE_BYTES", 5000)
    steps: list[tuple[int, int]] = []
    quantize(
        files["llama"],
        tmp_path / "b.gguf",
        "Q4_K_M",
        n_threads=3,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert steps[-1][0] == steps[-1][1] and max(np.diff([done for done, _ in steps])) <= 5000


def test_quantised_weights_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    quantize(files["llama"], first, "Q8_0")
    with pytest.raises(ArgumentError, match=r"token_embd\.weight is Q8_0 already"):
        quantize(first, second, "Q4_0")
    assert not second.exists()
    quantize(first, second, "Q4_0", allow_requantize=True)
    read_back = quants.dequantize(read(first)["blk.0.attn_q.weight"][1], Kind.Q8_0)
    assert np.array_equal(read(second)["blk.0.attn_q.weight"][1], quants.quantize(read_back, Kind.Q4_0))
    # What has its format already is copied, quantised or not.
    quantize(first, second, "Q8_0")
    assert second.read_bytes() == first.read_bytes()
    quantize(first, second, "COPY")
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    "value, mixture",
    [(np.nan, "Q4_0"), (np.inf, "F32"), (7e4, "Q6_K"), (-7e4, "F16"), (3.4e38, "BF16")],  # that rounds to inf
)
def test_weights_that_cannot_be_written(tmp_path: Path, value: float, mixture: str) -> None:
    weights = np.zeros((600, 256), np.float32)
    weights[599, 3] = value
    kind = Kind.BF16 if mixture == "F32" else None
    data = quants.quantize(weights, Kind.BF16) if kind else weights
    out = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    out.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(FormatError, match=rf"blk\.0\.ffn_up\.weight has weights that {mixture} cannot hold"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", mixture)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
    if value == 7e4:
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "BF16")


# ---- the command ----


def test_the_command(files: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    source, out = str(files["llama"]), tmp_path / "out.gguf"
    assert main(["quantize", source, str(out), "q4_k_m", "--dry-run"]) == 0
    dry = capsys.readouterr()
    assert not out.exists() and dry.err == ""
    line = next(line for line in dry.out.splitlines() if line.startswith("blk.2.ffn_down_t.weight"))
    assert line.split() == ["blk.2.ffn_down_t.weight", "512", "x", "256", "F16", "Q6_K", "107,520"]
    assert main(["quantize", source, str(out), "q4_k_m", "-t", "2"]) == 0
    table = capsys.readouterr().out
    assert dry.out.endswith(table)
    assert "1 tensor is F16 instead of Q8_0, whose blocks the rows do not fill" in table
    assert table.splitlines()[0].split() == ["type", "tensors", "before", "after", "bits", "per", "weight"]
    data = {name: data for name, (_, data) in read(out).items()}
    weights = sum(t.size for _, t in read(files["llama"]).values())
    bits = 8 * sum(t.nbytes for t in data.values()) / weights
    total = next(line for line in table.splitlines() if line.startswith("all "))
    assert total.split()[1] == str(len(data)) and total.split()[-1] == f"{bits:.2f}"
    before = out.read_bytes()
    assert main(["quantize", source, str(out), "q4_k_m", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total"]["n_bytes"] == sum(t.nbytes for t in data.values())
    assert {t["name"]: t["type"] for t in told["tensors"]} == {n: t for n, (t, _) in read(out).items()}
    assert out.read_bytes() == before


def test_a_split_and_the_demo(tmp_path: Path, capsys: Captured) -> None:
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=1)
    for i in range(3):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", np.full((4, 256), i + 1.0, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part = tmp_path / "split-00002-of-00003.gguf"
    assert main(["quantize", str(part), str(tmp_path / "one.gguf"), "Q4_K_S"]) == 0
    with ModelFile(tmp_path / "one.gguf") as file:
        assert not any(key.startswith("split.") for key in file.metadata)
        for i in range(3):
            assert np.allclose(file.dequantize(f"blk.{i}.ffn_up.weight"), i + 1, rtol=2**-10)
    for target in (part, tmp_path / "split-00001-of-00003.gguf"):
        assert main(["quantize", str(part), str(target), "Q4_K_S"]) == 1
    assert "name" in capsys.readouterr().err
    assert main(["quantize", "demo", str(tmp_path / "demo.gguf"), "Q8_0", "--allow-requantize"]) == 0
    with Model(tmp_path / "demo.gguf") as model:
        assert model.info.n_layer > 0


def test_a_dry_run_refuses_what_the_run_would(
    files: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    quantize(files["qwen2"], tmp_path / "q8.gguf", "Q8_0")
    words = ["quantize", str(tmp_path / "q8.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 1
        captured = capsys.readouterr()
        assert (
            captured.out == "" and "is Q8_0 already" in captured.err and "--allow-requantize" in captured.err
        )
        assert main([*words, *more, "--allow-requantize"]) == 0
        capsys.readouterr()


def test_formats_without_fast_kernels_are_named(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["quantize", str(files["qwen2"]), str(tmp_path / "out.gguf"), "Q5_1", "--dry-run"]
    assert main(words) == 0
    assert "slowly" not in capsys.readouterr().out
    others = tuple(type for type in FAST if type != "Q5_1")
    monkeypatch.setattr("powerinfer.cli.quantize.FAST", others)
    assert main(words) == 0
    assert "Q5_1 will run slowly" in capsys.readouterr().out


def test_every_format_that_mixtures_write_has_fast_kernels() -> None:
    assert {type for _, type in MIXTURES.values() if type} <= set(FAST)


@pytest.mark.parametrize(
    "words, text",
    [
        (["Q7_K"], "'Q7_K' is not a mixture"),
        (["Q4_0", "--predictor-type", "Q7"], "'Q7' is not a weight format"),
        (["Q4_0", "-t", "-1"], "--n-threads is -1"),
    ],
)
def test_wrong_words(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, words: list[str], text: str
) -> None:
    assert main(["quantize", str(files["llama"]), str(tmp_path / "out.gguf"), *words]) == 1
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_not_overwritten(files: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(files["qwen2"].read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    for name in ("in.gguf", "link.gguf"):
        assert main(["quantize", str(source), str(tmp_path / name), "Q4_0"]) == 1
        assert "a name of its own" in capsys.readouterr().err
    assert source.read_bytes() == files["qwen2"].read_bytes()


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_being_told_to_end_leaves_nothing(
    files: dict[str, Path], tmp_path: Path, number: str, code: int
) -> None:
    """Gigabytes of a hidden file, otherwise, that nobody looks for."""
    script = (
        "import signal, sys, time\n"
        "from powerinfer import cli\nfrom powerinfer._engine import formats\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup, and what runs tests with it, has it ignored
        "def slow(*_, **__):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(60)\n"
        "formats.quantize = slow\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = [sys.executable, "-c", script, "quantize", files["llama"], tmp_path / "out.gguf", "Q8_0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.Signals[number])
        assert process.wait() == code
        assert process.stderr.read() == b""
    assert list(tmp_path.iterdir()) == []
