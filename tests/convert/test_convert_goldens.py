"""Folders of every family, converted, give the logits that transformers gives for their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model, Session
from powerinfer.models.convert.conversion import convert
from tests import models, reference, rounding
from tests.convert import folders, gguf_raw

SPARSE = sorted(name for name in models.CONVERTED if models.SPECS[name].predictor)
N_THREADS = 2

# As in tests/native/test_logits.py: F16 weights and an F16 KV cache; AMX rounds a prompt to bf16.
TOLERANCE = 2e-3
AMX_TOLERANCE = 1e-2


def tolerance() -> float:
    return AMX_TOLERANCE if rounding.BF16 else TOLERANCE


def logits(path: Path, tokens: Any, sparsity: Any) -> Any:
    with Session(Model(path), sparsity=sparsity, n_threads=N_THREADS) as session:
        session.feed(tokens, want_logits=True)
        return np.stack([session.logits(i).copy() for i in range(len(tokens))])


def modes(spec: models.Spec) -> list[str]:
    return ["dense", "exact", "auto"] if spec.relu else ["dense", "auto"]


@pytest.mark.parametrize("name", models.CONVERTED)
def test_plain_files(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    convert(folder, tmp_path / "out.gguf")
    for mode in modes(golden.spec):
        rows = logits(tmp_path / "out.gguf", golden.prompt, mode)
        assert reference.relative_error(rows, golden.logits) < tolerance(), mode


@pytest.mark.parametrize("name", SPARSE)
def test_powerinfer_files(name: str, tmp_path: Path) -> None:
    """All neurons give the dense answers; those that the predictor names, the predicted ones."""
    dense, predicted = models.golden(name), models.golden(name, "predicted")
    folder = folders.write_folder(tmp_path / "hf", dense.spec)
    given = folders.write_predictors(tmp_path / "predictors", predicted.predictor, predicted.threshold)
    convert(folder, tmp_path / "out.gguf", predictors=given)
    for mode in ("dense", "exact"):
        rows = logits(tmp_path / "out.gguf", dense.prompt, mode)
        assert reference.relative_error(rows, dense.logits) < tolerance(), mode
    rows = logits(tmp_path / "out.gguf", predicted.prompt, "predicted")
    assert reference.relative_error(rows, predicted.logits) < tolerance()


@pytest.mark.parametrize("name", ["llama-relu", "bamboo", "opt", "falcon-40b"])
def test_neurons_as_rows_without_predictors(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    done = convert(folder, tmp_path / "out.gguf", transpose_down=True)
    assert not done.is_powerinfer
    assert "blk.0.ffn_down_t.weight" in gguf_raw.read(tmp_path / "out.gguf").tensors
    for mode in modes(golden.spec):
        rows = logits(tmp_path / "out.gguf", golden.prompt, mode)
        assert reference.relative_error(rows, golden.logits) < tolerance(), mode
    with Model(tmp_path / "out.gguf") as model:
        assert model.info.can_skip_down and model.info.n_layer_down_transposed == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", models.CONVERTED)
def test_quantised_plain_files(name: str, tmp_path: Path) -> None:
    """Rounding moves the answer far less than a wrong weight does; the engine computes what is there."""
    golden = models.golden(name)
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    path = tmp_path / "out.gguf"
    convert(folder, path, type="Q8_0")
    check_quantised(path, golden, modes(golden.spec))


@pytest.mark.parametrize("name", SPARSE)
def test_quantised_powerinfer_files(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(golden.spec), -1e20)
    path = tmp_path / "out.gguf"
    convert(folder, path, type="Q8_0", predictors=given)
    check_quantised(path, golden, ["dense", "exact", "predicted"])


def check_quantised(path: Path, golden: models.Golden, modes: list[str]) -> None:
    expected = reference.forward(reference.load(path), golden.prompt)
    # Blocks of 32 values of a bell curve err by 0.5 % of their size; a few layers with sharp attention make
    # ten times that of it. Logits of other weights are at 1.4.
    assert reference.relative_error(expected, golden.logits) < 0.15
    for mode in modes:
        rows = logits(path, golden.prompt, mode)
        assert reference.relative_error(rows, expected) < 3e-2, mode  # as in test_logits.py


@pytest.mark.parametrize("form", ["shards", "bin", "bin-shards"])
@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-40b", "opt"])
def test_the_form_of_the_weights_does_not_matter(name: str, form: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    convert(folders.write_folder(tmp_path / "a" / "hf", spec), tmp_path / "a.gguf")
    convert(folders.write_folder(tmp_path / "b" / "hf", spec, form=form), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_shards_without_an_index(tmp_path: Path) -> None:
    spec = models.SPECS["qwen3"]
    convert(folders.write_folder(tmp_path / "a" / "hf", spec), tmp_path / "a.gguf")
    folder = folders.write_folder(tmp_path / "b" / "hf", spec, form="shards")
    (folder / "model.safetensors.index.json").unlink()
    convert(folder, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("name", ["llama-llama3", "llama-linear", "qwen2-yarn", "mistral"])
def test_the_names_of_transformers_5(name: str, tmp_path: Path) -> None:
    """It writes the rotation under another name, with the base within."""
    golden = models.golden(name)
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    config = folders.config(golden.spec)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
    folders.write_json(folder / "config.json", config)
    convert(folder, tmp_path / "out.gguf")
    rows = logits(tmp_path / "out.gguf", golden.prompt, "dense")
    assert reference.relative_error(rows, golden.logits) < tolerance()


@pytest.mark.parametrize("predictors", [False, True])
def test_fatrelu(predictors: bool, tmp_path: Path) -> None:
    """ProSparse names its threshold in config.json; it changes the answer by much."""
    golden = models.golden("llama-relu-gqa")
    spec = golden.spec
    folder = folders.write_folder(tmp_path / "hf", spec)
    config = folders.config(spec) | {"hidden_act": "fatrelu", "hidden_act_param": 0.5}
    folders.write_json(folder / "config.json", config)
    given = None
    if predictors:
        given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    done = convert(folder, tmp_path / "out.gguf", predictors=given)
    assert (done.hyper.act, done.hyper.act_threshold) == ("relu", 0.5)
    keys = gguf_raw.read(tmp_path / "out.gguf").keys
    assert keys["powerinfer.hidden_act"] == ("string", b"relu")
    assert keys["powerinfer.hidden_act_threshold"] == ("f32", 0.5)
    expected = reference.forward(reference.load(tmp_path / "out.gguf"), golden.prompt)
    assert reference.relative_error(golden.logits, expected) > 0.2
    rows = logits(tmp_path / "out.gguf", golden.prompt, "exact")
    # A gate within rounding of the threshold is a whole neuron more or less.
    assert reference.relative_error(rows, expected) < 10 * tolerance()


def test_an_activation_by_hand(tmp_path: Path) -> None:
    """--hidden-act against config.json, as for checkpoints that were fine-tuned with another."""
    golden = models.golden("llama-relu")
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    folders.write_json(folder / "config.json", folders.config(golden.spec) | {"hidden_act": "silu"})
    convert(folder, tmp_path / "out.gguf", hidden_act="relu")
    rows = logits(tmp_path / "out.gguf", golden.prompt, "exact")
    assert reference.relative_error(rows, golden.logits) < tolerance()


@pytest.mark.parametrize(
    ("name", "type"), [("llama-relu-gqa", "F16"), ("falcon-40b", "Q8_0"), ("opt", "Q4_0")]
)
def test_pieces_make_the_same_file(
    name: str, type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in pieces of 32 rows: reordered, regrouped and transposed ones too."""
    folder = folders.write_folder(tmp_path / "hf", models.SPECS[name])
    convert(folder, tmp_path / "a.gguf", type=type, transpose_down=True)
    monkeypatch.setattr("powerinfer.models.convert.stored._CHUNK_BYTES", 1)
    seen: list[int] = []
    convert(folder, tmp_path / "b.gguf", type=type, transpose_down=True, progress=lambda n, _: seen.append(n))
    assert len(seen) > 2 * len(gguf_raw.read(tmp_path / "a.gguf").tensors)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_drelu_makes_a_bamboo(tmp_path: Path) -> None:
    """Whatever the family is called: the name tells every reader that both products are rectified."""
    golden = models.golden("bamboo")
    folder = folders.write_folder(tmp_path / "hf", golden.spec)
    config = folders.config(golden.spec)
    for values in (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "drelu"},
        {"model_type": "mistral", "hidden_act": "relu"},
    ):
        folders.write_json(folder / "config.json", config | values)
        assert convert(folder, tmp_path / "out.gguf").hyper.arch == "bamboo"
        rows = logits(tmp_path / "out.gguf", golden.prompt, "exact")
        assert reference.relative_error(rows, golden.logits) < tolerance()
