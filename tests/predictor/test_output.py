"""Files and folders that predictors are written to, read by others than what wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.errors import ArgumentError, FileError
from powerinfer.models.convert.predictors import read_predictors
from powerinfer.models.predictor import calibrate, output
from powerinfer.models.predictor.train import Net
from tests import models, reference

Array = Any

RELU = ("llama-relu-gqa", "bamboo", "opt", "falcon-7b", "falcon-40b")
THRESHOLDS = [0.5, -1.25, 2.0]
KIND = {
    "Q8_0": GGMLQuantizationType.Q8_0,
    "Q4_0": GGMLQuantizationType.Q4_0,
    "BF16": GGMLQuantizationType.BF16,
}


def nets_of(spec: models.Spec, rank: int = 32) -> list[Net]:
    """Random ones, of ranks that differ."""
    out = []
    for i in range(spec.n_layer):
        random = np.random.default_rng(i)
        r = rank + 32 * i
        out.append(
            Net(
                fc1=random.standard_normal((r, spec.n_embd), dtype=np.float32),
                fc2=random.standard_normal((spec.n_ff, r), dtype=np.float32),
            )
        )
    return out


def write(source: Path, out: Path, nets: list[Net], type: str = "F16") -> list[str]:
    """Writes the model with predictors; returns what it has to say."""
    notices: list[str] = []
    with ModelFile(source) as file, Model(file, load=False) as model:
        output.write_model(
            file,
            model.info,
            out,
            lambda i: nets[i],
            type=type,
            keys=calibrate.keys("mlp", THRESHOLDS[: model.info.n_layer], model.info.activation),
            notice=notices.append,
        )
    return notices


# What the original's loader accepts, by architecture: names of tensors without layers, and of those within.
OUTER = {
    "llama": {"token_embd.weight", "output_norm.weight", "output.weight"},
    "opt": {"token_embd.weight", "position_embd.weight", "output_norm.weight", "output_norm.bias"},
    "falcon": {"token_embd.weight", "output_norm.weight", "output_norm.bias", "output.weight"},
}
OUTER["bamboo"] = OUTER["llama"]
PREDICTOR = {"fc1.weight", "fc2.weight"}
INNER = {
    "llama": {
        *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
        *("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down_t.weight"),
    },
    "opt": {
        f"{name}.{kind}"
        for name in (
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_up",
            "ffn_down_t",
        )
        for kind in ("weight", "bias")
    },
    "falcon": {
        *("attn_norm.weight", "attn_norm.bias", "attn_qkv.weight", "attn_output.weight"),
        *("ffn_up.weight", "ffn_down_t.weight"),
    },
}
INNER["bamboo"] = INNER["llama"]


@pytest.mark.parametrize("name", RELU)
def test_an_ordinary_file_becomes_a_powerinfer_file(name: str, tmp_path: Path) -> None:
    """Exactly the tensors that the original accepts; the same weights; predictors in F16; the keys."""
    spec = models.SPECS[name]
    source = models.write_dense(tmp_path / "dense.gguf", spec)
    nets = nets_of(spec)
    assert write(source, tmp_path / "out.gguf", nets) == []
    old, new = reference.load(source), reference.load(tmp_path / "out.gguf")
    assert new.sparse and not old.sparse
    inner = INNER[spec.arch] | PREDICTOR
    if spec.two_norms:
        inner |= {"attn_norm_2.weight", "attn_norm_2.bias"}
    wanted = OUTER[spec.arch] | {f"blk.{i}.{n}" for i in range(spec.n_layer) for n in inner}
    assert set(new.tensors) == wanted
    for tensor in wanted:
        if "fc1" in tensor or "fc2" in tensor:
            net = nets[int(tensor.split(".")[1])]
            np.testing.assert_array_equal(new[tensor], getattr(net, tensor.split(".")[2]).astype(np.float16))
        elif "ffn_down_t" in tensor:
            before = old[tensor.replace("_t.", ".")]
            np.testing.assert_array_equal(new[tensor], before.T if before.ndim == 2 else before)
        else:
            np.testing.assert_array_equal(new[tensor], old[tensor])
    added = {
        "powerinfer.sparse_threshold": min(THRESHOLDS[: spec.n_layer]),
        "powerinfer.sparse_thresholds": THRESHOLDS[: spec.n_layer],
        "powerinfer.predictor": "mlp",
    }
    assert {key: new.meta[key] for key in added} == added
    assert {k: v for k, v in new.meta.items() if k not in added} == old.meta


@pytest.mark.parametrize("name", RELU)
def test_the_file_runs_and_answers_as_before(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    source = models.write_dense(tmp_path / "dense.gguf", spec)
    write(source, tmp_path / "out.gguf", nets_of(spec))
    logits = []
    for path in (source, tmp_path / "out.gguf"):
        with Model(path) as model, Session(model, n_ctx=64, n_threads=1, sparsity="exact") as session:
            if path != source:
                assert model.file.info.is_powerinfer and model.info.predictor == "mlp"
                assert model.thresholds == THRESHOLDS[: spec.n_layer]
                assert model.info.sparse_threshold == min(THRESHOLDS[: spec.n_layer])
            session.feed([1, 5, 9, 30])
            logits.append(session.logits().copy())
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_tied_output_gets_its_own_tensor(tmp_path: Path) -> None:
    """The original has no fallback to the embedding, except for OPT, which must not have the tensor."""
    spec = models.SPECS["llama-relu"]
    tensors = models.file_tensors(spec, models.draw(spec))
    del tensors["output.weight"]
    source = models.write(tmp_path / "tied.gguf", models.metadata(spec), tensors)
    write(source, tmp_path / "out.gguf", nets_of(spec))
    new = reference.load(tmp_path / "out.gguf")
    np.testing.assert_array_equal(new["output.weight"], new["token_embd.weight"])

    spec = models.SPECS["opt"]
    tensors = models.file_tensors(spec, models.draw(spec))
    source = models.write(
        tmp_path / "opt.gguf",
        models.metadata(spec),
        {**tensors, "output.weight": tensors["token_embd.weight"]},
    )
    assert write(source, tmp_path / "out.gguf", nets_of(spec)) == []
    assert reference.load(tmp_path / "out.gguf").get("output.weight") is None
    other = tensors["token_embd.weight"][::-1].copy()
    source = models.write(tmp_path / "own.gguf", models.metadata(spec), {**tensors, "output.weight": other})
    (notice,) = write(source, tmp_path / "out.gguf", nets_of(spec))
    assert "output.weight" in notice
    np.testing.assert_array_equal(reference.load(tmp_path / "out.gguf")["output.weight"], other)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_a_quantised_down_is_rounded_again_and_said_so(type: str, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    source = models.write_dense(tmp_path / "dense.gguf", spec, kind=KIND[type])
    (notice,) = write(source, tmp_path / "out.gguf", nets_of(spec), type)
    assert "rounded once more" in notice
    old, new = reference.load(source), reference.load(tmp_path / "out.gguf")
    with ModelFile(tmp_path / "out.gguf") as file:
        types = {tensor.name: tensor.type for tensor in file.tensors}
    for i in range(spec.n_layer):
        rows = np.ascontiguousarray(old[f"blk.{i}.ffn_down.weight"].T, np.float32)
        wanted = quants.dequantize(quants.quantize(rows, KIND[type]), KIND[type])
        np.testing.assert_array_equal(new[f"blk.{i}.ffn_down_t.weight"], wanted)
        assert {types[f"blk.{i}.{n}.weight"] for n in ("ffn_down_t", "fc1", "fc2", "ffn_up")} == {type}


def test_predictors_that_are_there_are_replaced(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    source = models.write_sparse(tmp_path / "sparse.gguf", spec, models.draw_predictor(spec), 3.0)
    nets = nets_of(spec, rank=64)
    write(source, source, nets)  # in place
    new = reference.load(source)
    assert new.sparse
    for i, net in enumerate(nets):
        np.testing.assert_array_equal(new[f"blk.{i}.fc1.weight"], net.fc1.astype(np.float16))
    assert new.meta["powerinfer.sparse_threshold"] == min(THRESHOLDS[:2])


# ---- formats


@pytest.mark.parametrize("type", output.TYPES)
def test_stored_weights_are_what_a_reader_gets(type: str) -> None:
    weights = np.random.default_rng(1).standard_normal((7, 96), dtype=np.float32)
    found = output.as_stored(weights, type)
    if type in KIND:
        wanted = quants.dequantize(quants.quantize(weights, KIND[type]), KIND[type])
    else:
        wanted = weights.astype({"F32": np.float32, "F16": np.float16}[type])
    np.testing.assert_array_equal(found, wanted)


def test_the_format_follows_the_feed_forward(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    wanted = {None: "F16", "BF16": "F16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q5_0": "Q8_0"}
    for kind, type in wanted.items():
        quant = None if kind is None else GGMLQuantizationType[kind]
        path = models.write_dense(tmp_path / "model.gguf", spec, kind=quant)
        with ModelFile(path) as file, Model(file, load=False) as model:
            assert output.predictor_type(file, model.info, "auto") == type
            assert output.predictor_type(file, model.info, "Q4_0") == "Q4_0"
            for wrong in ("Q4_K", "Q9", "IQ2_XXS"):
                with pytest.raises(ArgumentError, match=f"cannot have the format {wrong}"):
                    output.predictor_type(file, model.info, wrong)
            assert output.rank_bytes(model.info, "F16") == 2 * (spec.n_embd + spec.n_ff)
            assert output.rank_bytes(model.info, "Q4_0") == 18 / 32 * (spec.n_embd + spec.n_ff)


# ---- folders


def test_a_folder_is_what_the_original_and_torch_read(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu-gqa"]
    nets = nets_of(spec)
    output.write_folder(tmp_path / "predictors", spec.n_layer, lambda i: nets[i], THRESHOLDS)
    names = {path.name for path in (tmp_path / "predictors").iterdir()}
    assert names == {"model_0.pt", "model_1.pt", "model_2.pt", "config.json"}
    config = json.loads((tmp_path / "predictors" / "config.json").read_text())
    assert config == {"sparse_threshold": -1.25, "sparse_thresholds": THRESHOLDS}
    read = read_predictors(tmp_path / "predictors", n_layer=3, n_embd=spec.n_embd, n_ff=spec.n_ff)
    assert read.thresholds == tuple(THRESHOLDS)
    torch = pytest.importorskip("torch")
    for i, net in enumerate(nets):
        state = torch.load(tmp_path / "predictors" / f"model_{i}.pt", weights_only=True)
        assert set(state) == {"fc1.weight", "fc2.weight"}
        np.testing.assert_array_equal(state["fc1.weight"].numpy(), net.fc1.astype(np.float16))
        np.testing.assert_array_equal(state["fc2.weight"].numpy(), net.fc2.astype(np.float16))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    nets = nets_of(models.SPECS["llama-relu"])

    def load(i: int) -> Net:
        if i:
            raise KeyboardInterrupt
        return nets[i]

    with pytest.raises(KeyboardInterrupt):
        output.write_folder(tmp_path / "predictors", 2, load, [0.0, 0.0])
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    with pytest.raises(FileError, match="exists already"):
        output.write_folder(tmp_path / "full", 2, lambda i: nets[i], [0.0, 0.0])


def test_a_model_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    source = models.write_dense(tmp_path / "dense.gguf", spec)
    nets, calls = nets_of(spec), []

    def load(i: int) -> Net:
        calls.append(i)
        if len(calls) > spec.n_layer:  # the shapes are known; now the weights are wanted
            raise KeyboardInterrupt
        return nets[i]

    with ModelFile(source) as file, Model(file, load=False) as model, pytest.raises(KeyboardInterrupt):
        output.write_model(
            file, model.info, tmp_path / "out.gguf", load, type="F16", keys={}, notice=lambda _: None
        )
    assert [path.name for path in tmp_path.iterdir()] == ["dense.gguf"]
