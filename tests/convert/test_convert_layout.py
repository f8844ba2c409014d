"""What exactly a converted file contains: tensors, their dims, types and values, keys and their types.

The lists are written out from the description of what the original's loader accepts, and the file is read by
its bytes, so nothing here depends on the converter or on the engine's reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer.models.convert.conversion import convert
from powerinfer.models.convert.hyper import Hyper
from powerinfer.models.convert.keys import note_on_original
from powerinfer.models.convert.torch_file import write_torch
from tests import models
from tests.convert import folders, gguf_raw

# name: dims, the contiguous one first; d: embedding, f: neurons, v: vocabulary, kv: all heads of k, r: rank.
LLAMA = {
    "token_embd.weight": "d v",
    "output_norm.weight": "d",
    "output.weight": "d v",
    "blk.N.attn_norm.weight": "d",
    "blk.N.attn_q.weight": "d d",
    "blk.N.attn_k.weight": "d kv",
    "blk.N.attn_v.weight": "d kv",
    "blk.N.attn_output.weight": "d d",
    "blk.N.ffn_norm.weight": "d",
    "blk.N.ffn_gate.weight": "d f",
    "blk.N.ffn_up.weight": "d f",
    "blk.N.ffn_down_t.weight": "d f",
    "blk.N.fc1.weight": "d r",
    "blk.N.fc2.weight": "r f",
}
FALCON = {
    "token_embd.weight": "d v",
    "output_norm.weight": "d",
    "output_norm.bias": "d",
    "output.weight": "d v",
    "blk.N.attn_norm.weight": "d",
    "blk.N.attn_norm.bias": "d",
    "blk.N.attn_qkv.weight": "d d+2kv",
    "blk.N.attn_output.weight": "d d",
    "blk.N.ffn_up.weight": "d f",
    "blk.N.ffn_down_t.weight": "d f",
    "blk.N.fc1.weight": "d r",
    "blk.N.fc2.weight": "r f",
}
FALCON_40B = FALCON | {"blk.N.attn_norm_2.weight": "d", "blk.N.attn_norm_2.bias": "d"}
OPT = {
    "token_embd.weight": "d v",
    "position_embd.weight": "d p",
    "output_norm.weight": "d",
    "output_norm.bias": "d",
    **{f"blk.N.attn_{part}.weight": "d d" for part in ("q", "k", "v", "output")},
    **{f"blk.N.attn_{part}.bias": "d" for part in ("norm", "q", "k", "v", "output")},
    "blk.N.attn_norm.weight": "d",
    "blk.N.ffn_norm.weight": "d",
    "blk.N.ffn_norm.bias": "d",
    "blk.N.ffn_up.weight": "d f",
    "blk.N.ffn_up.bias": "f",
    "blk.N.ffn_down_t.weight": "d f",
    "blk.N.ffn_down_t.bias": "d",
    "blk.N.fc1.weight": "d r",
    "blk.N.fc2.weight": "r f",
}
SPARSE = {
    "llama-relu": LLAMA,
    "llama-relu-gqa": LLAMA,
    "bamboo": LLAMA,
    "falcon-7b": FALCON,
    "falcon-40b": FALCON_40B,
    "opt": OPT,
}


def dims(spec: models.Spec, text: str, layer: int) -> tuple[int, ...]:
    kv = spec.n_head_kv * spec.d_head
    sizes = {
        "d": spec.n_embd,
        "f": spec.n_ff,
        "v": spec.n_vocab,
        "kv": kv,
        "d+2kv": spec.n_embd + 2 * kv,
        "p": spec.n_ctx + 2,
        "r": spec.predictor[layer] if spec.predictor else 0,
    }
    return tuple(sizes[part] for part in text.split())


def expected_dims(spec: models.Spec, table: dict[str, str]) -> dict[str, tuple[int, ...]]:
    out = {}
    for name, text in table.items():
        for i in range(spec.n_layer if "N" in name else 1):
            out[name.replace("N", str(i))] = dims(spec, text, i)
    return out


def convert_sparse(name: str, folder: Path, **options: Any) -> gguf_raw.RawFile:
    spec = models.SPECS[name]
    hf = folders.write_folder(folder / "My-Model", spec)
    given = folders.write_predictors(folder / "predictors", models.draw_predictor(spec), 0.25)
    convert(hf, folder / "out.gguf", predictors=given, **options)
    return gguf_raw.read(folder / "out.gguf")


@pytest.mark.parametrize("name", SPARSE)
def test_tensors_of_a_powerinfer_file(name: str, tmp_path: Path) -> None:
    file = convert_sparse(name, tmp_path)
    assert (file.magic, file.version) == (b"PWRI", 3)
    expected = expected_dims(models.SPECS[name], SPARSE[name])
    assert {tensor: raw.ne for tensor, raw in file.tensors.items()} == expected
    for tensor, raw in file.tensors.items():
        assert raw.type == ("F16" if len(raw.ne) == 2 else "F32"), tensor


def tokenizer_keys(spec: models.Spec) -> dict[str, str]:
    kind = "llama" if spec.family in folders.SENTENCEPIECE else "gpt2"
    keys = {"model": "string"}
    if kind == "gpt2":
        keys["pre"] = "string"
    keys["tokens"] = "array of string"
    if kind == "llama":
        keys["scores"] = "array of f32"
    keys["token_type"] = "array of i32"
    if kind == "gpt2":
        keys["merges"] = "array of string"
    ids = ["bos_token_id", "eos_token_id"]
    if kind == "llama":
        ids.insert(0, "unknown_token_id")
    keys |= dict.fromkeys(ids, "u32")
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def llama_keys(a: str) -> dict[str, str]:
    return {
        "general.architecture": "string",
        "general.name": "string",
        f"{a}.context_length": "u32",
        f"{a}.embedding_length": "u32",
        f"{a}.block_count": "u32",
        f"{a}.feed_forward_length": "u32",
        f"{a}.rope.dimension_count": "u32",
        f"{a}.attention.head_count": "u32",
        f"{a}.attention.head_count_kv": "u32",
        f"{a}.attention.layer_norm_rms_epsilon": "f32",
        f"{a}.rope.freq_base": "f32",
        "general.file_type": "u32",
        "powerinfer.sparse_threshold": "f32",
    }


FALCON_KEYS = {
    "general.architecture": "string",
    "general.name": "string",
    "falcon.context_length": "u32",
    "falcon.tensor_data_layout": "string",
    "falcon.embedding_length": "u32",
    "falcon.feed_forward_length": "u32",
    "falcon.block_count": "u32",
    "falcon.attention.head_count": "u32",
    "falcon.attention.head_count_kv": "u32",
    "falcon.attention.layer_norm_epsilon": "f32",
    "general.file_type": "u32",
    "powerinfer.sparse_threshold": "f32",
}
OPT_KEYS = {
    "general.architecture": "string",
    "general.name": "string",
    "opt.context_length": "u32",
    "opt.embedding_length": "u32",
    "opt.block_count": "u32",
    "opt.feed_forward_length": "u32",
    "opt.attention.head_count": "u32",
    "general.file_type": "u32",
    "powerinfer.sparse_threshold": "f32",
}


@pytest.mark.parametrize("name", SPARSE)
def test_keys_of_a_powerinfer_file(name: str, tmp_path: Path) -> None:
    """Names, types and order; a ReLU model needs none that the original does not write."""
    spec = models.SPECS[name]
    file = convert_sparse(name, tmp_path)
    own = {"falcon": FALCON_KEYS, "opt": OPT_KEYS}.get(spec.arch) or llama_keys(spec.arch)
    assert [(key, kind) for key, (kind, _) in file.keys.items()] == list(
        {**own, **tokenizer_keys(spec)}.items()
    )
    value = {
        key.split(".", 1)[1] if key.startswith(spec.arch) else key: v for key, (_, v) in file.keys.items()
    }
    assert value["general.architecture"] == spec.arch.encode()
    assert value["general.name"] == b"My-Model"
    assert value["context_length"] == spec.n_ctx + (2 if spec.arch == "opt" else 0)
    assert value["embedding_length"] == spec.n_embd
    assert value["block_count"] == spec.n_layer
    assert value["feed_forward_length"] == spec.n_ff
    assert value["attention.head_count"] == spec.n_head
    assert value["general.file_type"] == 1
    assert value["powerinfer.sparse_threshold"] == 0.25
    if spec.arch != "opt":
        assert value["attention.head_count_kv"] == spec.n_head_kv
    if spec.arch == "falcon":
        assert value["tensor_data_layout"] == b"jploski"
        assert value["attention.layer_norm_epsilon"] == np.float32(1e-5)
    elif spec.arch != "opt":
        assert value["rope.dimension_count"] == spec.d_head
        assert value["attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
        assert value["rope.freq_base"] == spec.rope.base


def test_without_a_threshold_there_is_no_key(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    hf = folders.write_folder(tmp_path / "hf", spec)
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    convert(hf, tmp_path / "out.gguf", predictors=given)
    assert "powerinfer.sparse_threshold" not in gguf_raw.read(tmp_path / "out.gguf").keys


def test_thresholds_of_each_layer(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    hf = folders.write_folder(tmp_path / "hf", spec)
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    folders.write_json(given / "config.json", {"sparse_thresholds": [0.5, -0.25]})
    convert(hf, tmp_path / "out.gguf", predictors=given)
    keys = gguf_raw.read(tmp_path / "out.gguf").keys
    assert keys["powerinfer.sparse_threshold"] == ("f32", -0.25)
    assert keys["powerinfer.sparse_thresholds"][0] == "array of f32"
    np.testing.assert_array_equal(keys["powerinfer.sparse_thresholds"][1], [0.5, -0.25])
    folders.write_json(given / "config.json", {"sparse_thresholds": [0.5, -0.25], "sparse_threshold": -1})
    convert(hf, tmp_path / "out.gguf", predictors=given)
    assert gguf_raw.read(tmp_path / "out.gguf").keys["powerinfer.sparse_threshold"] == ("f32", -1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, ""),
        ({"act_threshold": 0.01}, "gives other answers with this file: it takes every gate above 0"),
        ({"n_ff": 1000}, "gives other answers with this file: it masks layers of up to 1000"),
        ({"pre": "falcon"}, "gives other answers with this file: it cuts words as GPT-2 does"),
        ({"pre": "gpt-2"}, ""),
        ({"type": "Q4_0"}, ""),
        ({"type": "Q8_0", "act_threshold": 0.01}, "cannot run this file: it computes F16 and Q4_0 only"),
        ({"arch": "qwen2"}, "cannot run this file: it does not know qwen2"),
        ({"arch": "opt", "n_ctx": 2048}, ""),
        ({"arch": "opt", "n_ctx": 1024}, "cannot run this file: it takes OPT models of 2048 positions"),
        ({"qkv_bias": True}, "no place for attention biases"),
        ({"d_head": 32}, "as wide as the embedding"),
        ({"tensors": {"rope_freqs.weight"}}, "Llama 3's rotation"),
    ],
)
def test_what_is_said_of_the_original(values: dict[str, Any], says: str) -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_head_kv": 4, "d_head": 16, "n_ff": 1024}
    options = {"tensors": set[str](), "type": "F16", "pre": ""}
    options |= {key: values.pop(key) for key in list(values) if key in options}
    names = {"family": "llama", "arch": "llama", "act": "relu", "norm_eps": 1e-5}
    hyper = Hyper(**{**sizes, **names, "n_vocab": 320, "n_ctx": 256, **values})
    note = note_on_original(hyper, options.pop("tensors"), **options)
    assert says in note and bool(says) == bool(note)


# ---- values ------------------------------------------------------------------------------------------------


def test_values_of_a_llama_file(tmp_path: Path) -> None:
    spec, name = models.SPECS["llama-relu-gqa"], "llama-relu-gqa"
    tensors = convert_sparse(name, tmp_path).tensors
    published = models.draw(spec)
    d = spec.d_head
    for layer in range(spec.n_layer):
        p = f"model.layers.{layer}."
        for part, heads in (("q", spec.n_head), ("k", spec.n_head_kv)):
            old = published[f"{p}self_attn.{part}_proj.weight"]
            new = tensors[f"blk.{layer}.attn_{part}.weight"].floats()
            for head in range(heads):
                for pair in range(d // 2):
                    np.testing.assert_array_equal(new[head * d + 2 * pair], old[head * d + pair])
                    np.testing.assert_array_equal(new[head * d + 2 * pair + 1], old[head * d + d // 2 + pair])
        same = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
        same |= {"mlp.up_proj": "ffn_up", "input_layernorm": "attn_norm"}
        same |= {"post_attention_layernorm": "ffn_norm"}
        for source, target in same.items():
            new = tensors[f"blk.{layer}.{target}.weight"].floats()
            np.testing.assert_array_equal(new, published[f"{p}{source}.weight"])
        down = published[p + "mlp.down_proj.weight"]
        np.testing.assert_array_equal(tensors[f"blk.{layer}.ffn_down_t.weight"].floats(), down.T)
        fc1, fc2 = models.draw_predictor(spec)[layer]
        np.testing.assert_array_equal(tensors[f"blk.{layer}.fc1.weight"].floats(), fc1)
        np.testing.assert_array_equal(tensors[f"blk.{layer}.fc2.weight"].floats(), fc2)
    for source, target in (
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("model.norm", "output_norm"),
    ):
        np.testing.assert_array_equal(tensors[f"{target}.weight"].floats(), published[f"{source}.weight"])


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b"])
def test_values_of_falcons_fused_projection(name: str, tmp_path: Path) -> None:
    """Of each kv head: its q heads, k, v; in the file all q, all k, all v."""
    spec = models.SPECS[name]
    tensors = convert_sparse(name, tmp_path).tensors
    d, share = spec.d_head, spec.n_head // spec.n_head_kv
    for layer in range(spec.n_layer):
        old = models.draw(spec)[f"transformer.h.{layer}.self_attention.query_key_value.weight"]
        old = old.reshape(spec.n_head_kv, share + 2, d, spec.n_embd)
        new = tensors[f"blk.{layer}.attn_qkv.weight"].floats().reshape(-1, d, spec.n_embd)
        for kv in range(spec.n_head_kv):
            for i in range(share):
                np.testing.assert_array_equal(new[kv * share + i], old[kv, i])
            np.testing.assert_array_equal(new[spec.n_head + kv], old[kv, share])
            np.testing.assert_array_equal(new[spec.n_head + spec.n_head_kv + kv], old[kv, share + 1])


def test_falcons_two_norms(tmp_path: Path) -> None:
    """The FFN's norm is the one that a file with a single norm has."""
    spec = models.SPECS["falcon-40b"]
    tensors, published = convert_sparse("falcon-40b", tmp_path).tensors, models.draw(spec)
    for kind in ("weight", "bias"):
        ffn, attention = (published[f"transformer.h.1.ln_{part}.{kind}"] for part in ("mlp", "attn"))
        np.testing.assert_array_equal(tensors[f"blk.1.attn_norm.{kind}"].floats(), ffn)
        np.testing.assert_array_equal(tensors[f"blk.1.attn_norm_2.{kind}"].floats(), attention)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_types(kind: str, tmp_path: Path) -> None:
    """Matrices get the type, vectors are F32, and rows that do not divide into its blocks stay F16."""
    spec = models.SPECS["llama-relu-gqa"]  # a predictor of rank 48 and one of 40
    hf = folders.write_folder(tmp_path / "hf", spec)
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    done = convert(hf, tmp_path / "out.gguf", type=kind, predictors=given)
    file = gguf_raw.read(tmp_path / "out.gguf")
    odd = set() if kind in ("F32", "BF16") else {"blk.1.fc2.weight", "blk.2.fc2.weight"}
    assert set(done.fallbacks) == odd
    for name, raw in file.tensors.items():
        expected = "F32" if len(raw.ne) == 1 else "F16" if name in odd else kind
        assert raw.type == expected, name
    assert file.keys["general.file_type"][1] == {"F32": 0, "BF16": 32, "Q8_0": 7, "Q4_0": 2}[kind]
    assert ("general.quantization_version" in file.keys) == kind.startswith("Q")


def test_rounding_to_q8_0(tmp_path: Path) -> None:
    """Each weight is within half a step of what was published, a step being the block's largest / 127."""
    file = convert_sparse("llama-relu", tmp_path, type="Q8_0")
    published = models.draw(models.SPECS["llama-relu"])
    for source, target, turn in (
        ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", False),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down_t.weight", True),
    ):
        old = published[source].astype(np.float64)
        old = (old.T if turn else old).reshape(-1, 32)
        new = file.tensors[target].floats().astype(np.float64).reshape(-1, 32)
        step = np.abs(old).max(axis=1, keepdims=True) / 127
        # The scale itself is an F16: 2^-11 of it, 127 times.
        assert (np.abs(new - old) <= step * (0.5 + 127 * 2**-11) + 1e-12).all()


# ---- ordinary files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.CONVERTED)
def test_an_ordinary_file(name: str, tmp_path: Path) -> None:
    """llama.cpp's names: ffn_down as published, no predictor, no second copy of a tied embedding."""
    spec = models.SPECS[name]
    convert(folders.write_folder(tmp_path / "hf", spec), tmp_path / "out.gguf")
    file = gguf_raw.read(tmp_path / "out.gguf")
    assert (file.magic, file.version) == (b"GGUF", 3)
    expected = models.file_tensors(spec, models.draw(spec))
    assert set(file.tensors) == set(expected)
    for tensor, value in expected.items():
        assert file.tensors[tensor].type == ("F16" if value.dtype == np.float16 else "F32")
        if tensor == "rope_freqs.weight":
            np.testing.assert_allclose(file.tensors[tensor].floats(), value, rtol=1e-6)
        else:
            np.testing.assert_array_equal(file.tensors[tensor].floats(), value, tensor)
    plain = {
        "llama": "silu",
        "bamboo": "drelu",
        "falcon": "gelu",
        "opt": "relu",
        "qwen2": "silu",
        "qwen3": "silu",
        "qwen2moe": "silu",
        "qwen3moe": "silu",
        "olmoe": "silu",
        "glm4moe": "silu",
        "gpt-oss": "clamped",
    }
    said = file.keys.get("powerinfer.hidden_act", ("string", plain[spec.arch].encode()))
    assert said == ("string", spec.act.encode())
    assert ("powerinfer.hidden_act" in file.keys) == (plain[spec.arch] != spec.act)
    assert not [key for key in file.keys if key.startswith("powerinfer.") and key != "powerinfer.hidden_act"]


@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn", "qwen2-yarn"])
def test_keys_of_stretched_rotations(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    convert(folders.write_folder(tmp_path / "hf", spec), tmp_path / "out.gguf")
    keys, a = gguf_raw.read(tmp_path / "out.gguf").keys, spec.arch
    assert keys[f"{a}.rope.scaling.type"] == ("string", spec.rope.kind.encode())
    assert keys[f"{a}.rope.scaling.factor"] == ("f32", spec.rope.factor)
    assert keys[f"{a}.rope.scaling.original_context_length"] == ("u32", spec.rope.n_ctx_orig)


@pytest.mark.parametrize("base", [10000.0, 500042.0])
def test_falcons_rotation(base: float, tmp_path: Path) -> None:
    """The original's converter writes no base; one that is not the usual must be written."""
    spec = models.SPECS["falcon-7b"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    folders.write_json(folder / "config.json", folders.config(spec) | {"rope_theta": base})
    convert(folder, tmp_path / "out.gguf")
    found = gguf_raw.read(tmp_path / "out.gguf").keys.get("falcon.rope.freq_base")
    assert found == (None if base == 10000 else ("f32", base))


def test_yarns_own_numbers(tmp_path: Path) -> None:
    """attention_factor is the whole magnitude, attn_factor what is left of it beside 1 + 0.1 ln 4."""
    spec = models.SPECS["llama-yarn"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    config = folders.config(spec)
    config["rope_scaling"] |= {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}
    folders.write_json(folder / "config.json", config)
    convert(folder, tmp_path / "out.gguf")
    keys = gguf_raw.read(tmp_path / "out.gguf").keys
    assert keys["llama.rope.scaling.attn_factor"][1] == pytest.approx(1.5 / 1.1386294, rel=1e-6)
    assert keys["llama.rope.scaling.yarn_beta_fast"] == ("f32", 16)
    assert keys["llama.rope.scaling.yarn_beta_slow"] == ("f32", 2)


def test_a_tied_head_of_a_powerinfer_file(tmp_path: Path) -> None:
    """The original's loader wants output.weight, so there the embedding stands twice."""
    spec = models.SPECS["llama-relu"]
    weights = dict(models.draw(spec))
    del weights["lm_head.weight"]
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    folders.write_json(folder / "config.json", folders.config(spec) | {"tie_word_embeddings": True})
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec))
    convert(folder, tmp_path / "out.gguf", predictors=given)
    tensors = gguf_raw.read(tmp_path / "out.gguf").tensors
    assert tensors["output.weight"] == tensors["token_embd.weight"]


def test_activation_statistics(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    counts = np.arange(spec.n_layer * spec.n_ff).reshape(spec.n_layer, spec.n_ff) * 3
    (tmp_path / "activation").mkdir()
    for i, row in enumerate(counts):
        write_torch(tmp_path / "activation" / f"activation_{i}.pt", row.astype(np.int64))
    done = convert(folder, tmp_path / "out.gguf", activation=tmp_path / "activation")
    keys = gguf_raw.read(tmp_path / "out.gguf").keys
    kind, values = keys["powerinfer.neuron.counts"]
    assert kind == "array of u32"
    np.testing.assert_array_equal(values, counts.ravel())
    assert keys["powerinfer.neuron.tokens"] == ("u64", counts.max())
    assert done.n_counted_tokens == counts.max()


def test_attention_biases_of_llama(tmp_path: Path) -> None:
    """q's and k's biases are reordered like their rows."""
    spec = models.SPECS["llama-mha"]
    weights = dict(models.draw(spec))
    for layer in range(spec.n_layer):
        for part in "qkvo":
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.arange(64, dtype=np.float32)
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    folders.write_json(folder / "config.json", folders.config(spec) | {"attention_bias": True})
    convert(folder, tmp_path / "out.gguf")
    tensors = gguf_raw.read(tmp_path / "out.gguf").tensors
    np.testing.assert_array_equal(tensors["blk.1.attn_q.bias"].floats()[:6], [0, 8, 1, 9, 2, 10])
    np.testing.assert_array_equal(tensors["blk.1.attn_k.bias"].floats()[:6], [0, 8, 1, 9, 2, 10])
    np.testing.assert_array_equal(tensors["blk.1.attn_v.bias"].floats()[:6], [0, 1, 2, 3, 4, 5])
    assert "blk.1.attn_output.bias" in tensors
