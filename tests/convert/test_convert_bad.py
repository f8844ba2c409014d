"""Folders that cannot be converted: each gives one error that names what is wrong, and no file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer.errors import ArgumentError, FileError, FormatError, PowerInferError, UnsupportedError
from powerinfer.models.convert.conversion import convert
from powerinfer.models.convert.torch_file import write_torch
from tests import models
from tests.convert import folders

RELU = models.SPECS["llama-relu"]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return folders.write_folder(tmp_path / "hf", RELU)


def refused(folder: Path, says: str, kind: type[Exception] = FormatError, **options: Any) -> None:
    """The conversion fails with this, and leaves nothing."""
    out = (folder if folder.is_dir() else folder.parent) / "out" / "x.gguf"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(kind) as caught:
        convert(folder, out, **options)
    assert isinstance(caught.value, PowerInferError)
    assert says in str(caught.value), str(caught.value)
    assert list(out.parent.iterdir()) == []


def change_config(folder: Path, spec: models.Spec = RELU, **values: Any) -> None:
    config = {k: v for k, v in {**folders.config(spec), **values}.items() if v != "DELETE"}
    folders.write_json(folder / "config.json", config)


# ---- config.json


@pytest.mark.parametrize(
    "name",
    [
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"),
        *("max_position_embeddings", "num_key_value_heads"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1.5, "64", [64], {"a": 1}, True, float("nan")])
def test_sizes(name: str, value: Any, hf: Path) -> None:
    change_config(hf, **{name: value})
    refused(hf, name)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hidden_size": "DELETE"}, "has no hidden_size"),
        ({"vocab_size": "DELETE"}, "has no vocab_size"),
        ({"num_attention_heads": 3}, "does not divide into 3 heads"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"head_dim": -2}, "head_dim is -2"),
        ({"head_dim": 1}, "head_dim is 1"),
        ({"head_dim": 3}, "heads of 3 values cannot be rotated"),
        ({"hidden_size": 66, "num_attention_heads": 22, "num_key_value_heads": 22}, "heads of 3 values"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": 1e400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 5}, "hidden_act is 5"),
        ({"hidden_act": "fatrelu"}, "no hidden_act_param"),
        ({"hidden_act": "fatrelu", "hidden_act_param": -1}, "hidden_act_param is -1"),
        ({"hidden_act": "fatrelu", "hidden_act_param": "x"}, "hidden_act_param is 'x'"),
        ({"rope_scaling": 5}, "rope_scaling is 5"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 1}}, "high_freq_factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": -5}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": ["yarn"], "factor": 4}}, "type is ['yarn']"),
        ({"sliding_window": -3}, "sliding_window"),
        ({"quantization_config": 3}, "quantization_config is 3"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], says: str, hf: Path) -> None:
    change_config(hf, **values)
    refused(hf, says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"model_type": "mpt", "architectures": ["MPTForCausalLM"]},
            "the architecture is 'MPTForCausalLM'",
        ),
        ({"model_type": "mamba", "architectures": None}, "the architecture is 'mamba'"),
        ({"model_type": "DELETE", "architectures": "DELETE"}, "the architecture is none"),
        ({"model_type": "DELETE", "architectures": [5]}, "the architecture is none"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"hidden_act": "tanh\x1b[31m"}, "the activation is"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1.0}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised already (gptq)"),
    ],
)
def test_models_that_are_not_run(values: dict[str, Any], says: str, hf: Path) -> None:
    change_config(hf, **values)
    refused(hf, says, UnsupportedError)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("falcon-7b", {"alibi": True}, "alibi"),
        ("falcon-7b", {"bias": True}, "bias"),
        ("falcon-7b", {"parallel_attn": False}, "parallel_attn"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"enable_bias": False}, "enable_bias"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"activation_function": "quick_gelu"}, "quick_gelu"),
    ],
)
def test_falcons_and_opts_that_are_not_run(
    name: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    spec = models.SPECS[name]
    folder = folders.write_folder(tmp_path / "hf", spec)
    change_config(folder, spec, **values)
    refused(folder, says, UnsupportedError)


def test_two_activations(tmp_path: Path) -> None:
    spec = models.SPECS["falcon-7b"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    change_config(folder, spec, activation="gelu", hidden_act="relu")
    refused(folder, "activation 'gelu' and hidden_act 'relu'")
    convert(folder, tmp_path / "out.gguf", hidden_act="gelu")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"3", b"[" * 100_000])
def test_a_config_that_is_none(data: bytes, hf: Path) -> None:
    (hf / "config.json").write_bytes(data)
    refused(hf, "config.json")


def test_folders_that_are_none(tmp_path: Path, hf: Path) -> None:
    refused(tmp_path / "nothing", "is not a folder", FileError)
    refused(hf / "config.json", "is not a folder", FileError)
    (hf / "config.json").unlink()
    refused(hf, "config.json cannot be read", FileError)
    (hf / "model.safetensors").unlink()
    refused(hf, "has no weights", FileError)


# ---- tensors


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.__delitem__(name)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), "no tensor model.layers.1.mlp.up_proj.weight"),
        (without("model.norm.weight"), "no tensor model.norm.weight"),
        (without("lm_head.weight"), "no tensor lm_head.weight"),
        (
            put("model.layers.2.mlp.up_proj.weight", np.zeros((2, 2), np.float16)),
            "layers.2.mlp.up_proj.weight, which",
        ),
        (put("model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32)), "q_proj.bias, which"),
        (put("model.layers.0.mlp.experts.0.w1.weight", np.zeros((2, 2), np.float16)), "experts.0.w1.weight"),
        (put("lora_A.weight", np.zeros((2, 2), np.float16)), "lora_A.weight"),
        (put("model.norm.weight", np.zeros(63, np.float32)), "shape [63], by config.json it must be [64]"),
        (put("lm_head.weight", np.zeros((64, 320), np.float16)), "shape [64, 320]"),
        (put("model.norm.weight", np.zeros(64, np.int64)), "type I64"),
        (put("model.norm.weight", np.full(64, np.nan, np.float32)), "no numbers or infinite"),
        (put("model.norm.weight", np.full(64, -np.inf, np.float32)), "no numbers or infinite"),
        (put("model.norm.weight", np.full(64, 1e300)), "no numbers or infinite"),
        (put("model.norm.weight", np.linspace(-1e300, 1, 64)), "no numbers or infinite"),
        (put("lm_head.weight", np.full((320, 64), 65520.0, np.float32)), "size 65520, which F16 cannot hold"),
    ],
)
def test_weights(change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path) -> None:
    weights = dict(models.draw(RELU))
    change(weights)
    refused(folders.write_folder(tmp_path / "hf", RELU, weights=weights), says)


def test_large_weights_fit_other_types(tmp_path: Path) -> None:
    weights = dict(models.draw(RELU)) | {"lm_head.weight": np.full((320, 64), 65520.0, np.float32)}
    folder = folders.write_folder(tmp_path / "hf", RELU, weights=weights)
    convert(folder, tmp_path / "out.gguf", type="BF16")
    weights["lm_head.weight"][:] = 65519  # rounds to the largest F16
    folders.write_weights(folder, weights, "safetensors")
    convert(folder, tmp_path / "out.gguf")


def test_buffers_are_listed_as_left_out(tmp_path: Path) -> None:
    weights = dict(models.draw(RELU)) | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    folder = folders.write_folder(tmp_path / "hf", RELU, weights=weights)
    done = convert(folder, tmp_path / "out.gguf")
    assert done.left_out == tuple(name for name in weights if "inv_freq" in name)


@pytest.mark.parametrize("said", [True, None])
def test_a_head_that_is_not_the_embedding_it_is_tied_to(said: bool | None, tmp_path: Path) -> None:
    """Where the config only leaves it open, the head counts."""
    folder = folders.write_folder(tmp_path / "hf", RELU)
    change_config(folder, tie_word_embeddings="DELETE" if said is None else said)
    if said:
        refused(folder, "lm_head.weight is not the embedding")
    else:
        plain = folders.write_folder(tmp_path / "plain" / "hf", RELU)
        convert(folder, tmp_path / "a.gguf")
        convert(plain, tmp_path / "b.gguf")
        assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_second_copy_of_the_embedding(tmp_path: Path) -> None:
    spec = models.SPECS["opt"]
    weights = dict(models.draw(spec))
    weights["lm_head.weight"] = weights["model.decoder.embed_tokens.weight"]
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    done = convert(folder, tmp_path / "out.gguf")
    assert done.left_out == ("lm_head.weight",)
    weights["lm_head.weight"] = weights["lm_head.weight"] * np.float16(2)
    folders.write_weights(folder, weights, "safetensors")
    refused(folder, "lm_head.weight is not the embedding")


def test_an_opt_with_a_head_of_its_own(tmp_path: Path) -> None:
    """Which an ordinary file can hold, and the original's cannot."""
    spec = models.SPECS["opt"]
    weights = dict(models.draw(spec))
    weights["lm_head.weight"] = weights["model.decoder.embed_tokens.weight"] * np.float16(2)
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    change_config(folder, spec, tie_word_embeddings=False)
    convert(folder, tmp_path / "out.gguf")
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    refused(folder, "no place for an output head", UnsupportedError, predictors=given)


def test_the_other_names_of_opt(tmp_path: Path) -> None:
    """Published without the first word as well."""
    spec = models.SPECS["opt"]
    convert(folders.write_folder(tmp_path / "a" / "hf", spec), tmp_path / "a.gguf")
    weights = {name.removeprefix("model."): value for name, value in models.draw(spec).items()}
    folder = folders.write_folder(tmp_path / "b" / "hf", spec, weights=weights)
    convert(folder, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


# ---- shards


@pytest.mark.parametrize("form", ["shards", "bin-shards"])
def test_shards(form: str, tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "hf", RELU, form=form)
    index = next(folder.glob("*.index.json"))
    name = "model.norm.weight"
    placed = dict.fromkeys(models.draw(RELU), "")

    def place(**values: Any) -> None:
        real = {n: f"{index.name.split('.')[0]}-0000{i % 3 + 1}-of-00003.x" for i, n in enumerate(placed)}
        suffix = ".safetensors" if form == "shards" else ".bin"
        real = {n: file.replace(".x", suffix) for n, file in real.items()}
        folders.write_json(index, {"weight_map": {**real, **values}})

    place()
    convert(folder, tmp_path / "ok.gguf")
    place(**{name: "../../../etc/passwd"})
    refused(folder, "which is not a file's name")
    place(**{name: 5})
    refused(folder, "which is not a file's name")
    place(ghost=next(folder.glob("*-00001-*")).name)
    refused(folder, "promises a tensor 'ghost'")
    place(**{name: "nowhere.bin"})
    refused(folder, "nowhere.bin cannot be read", FileError)
    folders.write_json(index, {"weight_map": {}})
    refused(folder, "names no tensors")
    folders.write_json(index, {})
    refused(folder, "names no tensors")
    index.unlink()
    next(folder.glob("*-00002-*")).unlink()
    refused(folder, "number 2 is missing", FileError)


def test_shards_without_an_index(tmp_path: Path) -> None:
    """A number that a file's name makes up is not counted to, and two sets of parts are not mixed."""
    folder = folders.write_folder(tmp_path / "hf", RELU, form="shards")
    (folder / "model.safetensors.index.json").unlink()
    first = folder / "model-00001-of-00003.safetensors"
    (folder / "model-00001-of-00001.safetensors").write_bytes(first.read_bytes())
    refused(folder, "has more than 3 parts")
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model-00001-of-99999999999999.safetensors")
    refused(folder, "of the 99999999999999 parts of the weights, number 2 is missing", FileError)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """The index says which counts; without one it is an error."""
    folder = folders.write_folder(tmp_path / "hf", RELU, form="shards")
    weights = models.draw(RELU)
    path = folder / "model-00001-of-00003.safetensors"
    names = list(weights)[::3]
    twice = list(weights)[1]
    folders.write_safetensors(path, {**{n: weights[n] for n in names}, twice: weights[twice] * np.float16(2)})
    convert(folder, tmp_path / "a.gguf")
    convert(folders.write_folder(tmp_path / "b" / "hf", RELU), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "two files have a tensor")


def test_a_checkpoint_that_runs_code(tmp_path: Path) -> None:
    import pickle
    import zipfile

    proof = tmp_path / "proof"

    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    folder = folders.write_folder(tmp_path / "hf", RELU)
    (folder / "model.safetensors").unlink()
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(RELU))
    for path in (folder / "pytorch_model.bin", given / "model_1.pt"):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x/data.pkl", pickle.dumps({"a": Runs()}, 2))
    refused(folder, "system, which is not allowed")
    folders.write_weights(folder, models.draw(RELU), "bin")
    refused(folder, "system, which is not allowed", predictors=given)
    assert not proof.exists()


# ---- predictors and statistics


def test_predictors(hf: Path, tmp_path: Path) -> None:
    drawn = models.draw_predictor(RELU)
    given = tmp_path / "predictors"

    def refuse(says: str, kind: type[Exception] = FormatError) -> None:
        refused(hf, says, kind, predictors=given)

    refuse("cannot be read", FileError)
    folders.write_predictors(given, drawn)
    (given / "readme.md").write_text("ignored")
    (given / "model_1.pt").rename(given / "model_01.pt")
    refuse("has no model_1.pt; the model has 2 layers", FileError)
    (given / "model_01.pt").rename(given / "model_1.pt")
    convert(hf, tmp_path / "ok.gguf", predictors=given)
    write_torch(given / "model_2.pt", {"fc1.weight": drawn[0][0]})
    refuse("has model_2.pt, but the model has 2 layers only")
    (given / "model_2.pt").unlink()
    fc1, fc2 = drawn[1]
    for content, says in (
        ({"fc1.weight": fc1}, "holds fc1.weight; expected"),
        (
            {"fc1.weight": fc1, "fc2.weight": fc2, "fc1.bias": fc1[0]},
            "holds fc1.bias, fc1.weight, fc2.weight;",
        ),
        ({"fc1.weight": fc1.T, "fc2.weight": fc2}, "they must be [r, 64] and [192, r]"),
        ({"fc1.weight": fc1[:31], "fc2.weight": fc2}, "they must be"),
        ({"fc1.weight": fc1, "fc2.weight": fc2[:191]}, "they must be"),
        ({"fc1.weight": fc1[0], "fc2.weight": fc2}, "they must be"),
        ({"fc1.weight": fc1[:0], "fc2.weight": fc2[:, :0]}, "they must be"),
        ({"fc1.weight": fc1.astype(np.int32), "fc2.weight": fc2}, "not floats"),
        ({"fc1.weight": fc1, "fc2.weight": fc2.astype(np.int64)}, "not floats"),
        (fc1, "holds a single tensor"),
    ):
        write_torch(given / "model_1.pt", content)
        refuse(says)
    folders.write_predictors(given, drawn)
    for config, says in (
        ({"sparse_threshold": "0.5"}, "sparse_threshold is '0.5'"),
        ({"sparse_threshold": float("nan")}, "sparse_threshold"),
        ({"sparse_thresholds": [1]}, "a list of 2 numbers"),
        ({"sparse_thresholds": [1, "a"]}, "sparse_thresholds[1]"),
        ([], "not hold a JSON object"),
    ):
        folders.write_json(given / "config.json", config)
        refuse(says)


def test_predictors_need_a_relu(tmp_path: Path) -> None:
    spec = models.SPECS["llama-mha"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    refused(folder, "the activation silu no neuron is ever silent", UnsupportedError, predictors=tmp_path)
    refused(folder, "of use for ReLU models only", UnsupportedError, transpose_down=True)


def test_activation_of_another_model(hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "activation"
    refused(hf, "cannot be read", FileError, activation=folder)
    folder.mkdir()
    for i in range(2):
        write_torch(folder / f"activation_{i}.pt", np.ones(RELU.n_ff + i, np.int64))
    refused(hf, "activation_1.pt", activation=folder)
    write_torch(folder / "activation_1.pt", np.ones(RELU.n_ff, np.int64))
    convert(hf, tmp_path / "ok.gguf", activation=folder)
    write_torch(folder / "activation_2.pt", np.ones(RELU.n_ff, np.int64))
    refused(hf, "2 layers", activation=folder)


def test_options(hf: Path) -> None:
    refused(hf, "the type is 'Q9'", ArgumentError, type="Q9")
    refused(hf, "hidden_act is 'tanh'", ArgumentError, hidden_act="tanh")


# ---- what the output must not be


def test_an_output_that_is_an_input(hf: Path, tmp_path: Path) -> None:
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(RELU))
    (tmp_path / "link").symlink_to(hf / "model.safetensors")
    blob = tmp_path / "blob"
    (hf / "config.json").rename(blob)
    (hf / "config.json").symlink_to(blob)
    for out in (hf / "model.safetensors", tmp_path / "link", hf / "config.json", given / "model_1.pt"):
        before = out.read_bytes()
        with pytest.raises(ArgumentError, match="belongs to what is converted"):
            convert(hf, out, predictors=given)
        assert out.read_bytes() == before
    for _ in range(2):  # beside the inputs, and once more over the first
        convert(hf, hf / "out.bin", predictors=given)


def test_the_name_of_a_folder_in_the_cache(tmp_path: Path) -> None:
    """Of which the last part is a hash."""
    cached = tmp_path / "models--SparseLLM--ReluLLaMA-7B" / "snapshots" / ("5f" * 20)
    folders.write_folder(cached, RELU)
    convert(cached, tmp_path / "out.gguf")
    with ModelFile(tmp_path / "out.gguf") as file:
        assert file.metadata["general.name"] == "ReluLLaMA-7B"


# ---- the file appears whole or not at all


class Full:
    """A file that no more than so many bytes fit into."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        n = memoryview(data).nbytes
        if n > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= n
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    def opened(*args: Any, **options: Any) -> Full:
        return Full(open(*args, **options), room)

    monkeypatch.setattr("powerinfer.models.writer.open", opened, raising=False)


@pytest.mark.parametrize("room", [0, 5000, 100_000])
def test_a_full_disk(room: int, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, room)
    refused(hf, "the disk is full", FileError)


def test_an_old_file_stays(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    fill_disk(monkeypatch, 9000)
    with pytest.raises(FileError):
        convert(hf, out)
    assert out.read_bytes() == b"old"


def test_ctrl_c(hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(hf, out / "x.gguf", progress=interrupt)
    assert list(out.iterdir()) == []


def test_being_killed(hf: Path, tmp_path: Path) -> None:
    """What remains has another name, and a second try sweeps it away."""
    out = tmp_path / "out"
    out.mkdir()
    program = (
        "import os, signal, sys\n"
        "from powerinfer.models.convert.conversion import convert\n"
        "def kill(done, total):\n"
        "    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert(sys.argv[1], sys.argv[2], progress=kill)\n"
    )
    command = [sys.executable, "-c", program, str(hf), str(out / "x.gguf")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not (out / "x.gguf").exists()
    convert(hf, out / "x.gguf")
    assert [path.name for path in out.iterdir()] == ["x.gguf"]


def test_progress(hf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = convert(hf, tmp_path / "out.gguf", progress=lambda *args: seen.append(args))
    totals = {total for _, total in seen}
    assert totals == {done.n_bytes}
    assert seen[-1][0] == done.n_bytes and [a for a, _ in seen] == sorted(a for a, _ in seen)


def test_memory_stays_near_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 32 MB no more is held than a few pieces."""
    import tracemalloc

    monkeypatch.setattr("powerinfer.models.convert.stored._CHUNK_BYTES", 1 << 18)
    spec = models.Spec("large", "llama", n_embd=256, n_ff=4096, n_vocab=320, n_layer=4, act="relu", n_ctx=64)
    weights = {
        name: np.zeros(shape, np.float16 if len(shape) == 2 else np.float32) for name, shape in shapes(spec)
    }
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    size = (folder / "model.safetensors").stat().st_size
    convert(folder, tmp_path / "warm.gguf")
    tracemalloc.start()
    convert(folder, tmp_path / "out.gguf", type="Q8_0", transpose_down=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 20e6
    assert peak < 4e6


def shapes(spec: models.Spec) -> list[tuple[str, tuple[int, ...]]]:
    d, f = spec.n_embd, spec.n_ff
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (spec.n_vocab, d))]
    for i in range(spec.n_layer):
        p = f"model.layers.{i}."
        out += [(f"{p}self_attn.{part}_proj.weight", (d, d)) for part in "qkvo"]
        out += [(f"{p}{norm}_layernorm.weight", (d,)) for norm in ("input", "post_attention")]
        out += [(p + "mlp.gate_proj.weight", (f, d)), (p + "mlp.up_proj.weight", (f, d))]
        out += [(p + "mlp.down_proj.weight", (d, f))]
    return [*out, ("model.norm.weight", (d,)), ("lm_head.weight", (spec.n_vocab, d))]
