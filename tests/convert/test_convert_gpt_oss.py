"""Checkpoints of gpt-oss and GLM: experts in MXFP4 and as floats, what their configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.convert.conversion import convert, open_source
from powerinfer.models.convert.forward import SourceModel
from powerinfer.models.convert.gpt_oss import Packed
from tests import models, reference
from tests.convert import folders, gguf_raw

N_LAYER, N_EXPERT, D, FF, HEAD, N_HEAD, N_KV, VOCAB = 2, 4, 64, 96, 32, 4, 2, 301
SPEC = models.SPECS["qwen3moe"]
PROMPT = [3, 250, 17, 40, 99, 120, 7, 201]

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": D,
    "initial_context_length": 64,
    "intermediate_size": FF,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "num_attention_heads": N_HEAD,
    "num_experts_per_tok": 2,
    "num_hidden_layers": N_LAYER,
    "num_key_value_heads": N_KV,
    "num_local_experts": N_EXPERT,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 4,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def attention(p: str, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    rows = {"q_proj": (N_HEAD * HEAD, D), "k_proj": (N_KV * HEAD, D), "v_proj": (N_KV * HEAD, D)}
    rows |= {"o_proj": (D, N_HEAD * HEAD)}
    out: dict[str, tuple[int, ...]] = {f"{p}self_attn.{name}.weight": shape for name, shape in rows.items()}
    with_bias = rows if bias else ["q_proj", "k_proj", "v_proj"]
    out |= {f"{p}self_attn.{name}.bias": rows[name][:1] for name in with_bias}
    return out | {f"{p}input_layernorm.weight": (D,), f"{p}post_attention_layernorm.weight": (D,)}


OUTER = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}


def fill(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Random tensors; norms near 1."""
    rng, out = np.random.default_rng(2), {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape) / max(shape[-1], 1) ** 0.5 / (1 if len(shape) > 1 else 2)
        out[name] = (value + ("norm" in name)).astype(np.float16)
    return out


def gpt_oss(folder: Path, *, packed: bool = True, **changes: Any) -> tuple[Path, dict[str, Any]]:
    shapes: dict[str, tuple[int, ...]] = dict(OUTER)
    for i in range(N_LAYER):
        p = f"model.layers.{i}."
        shapes |= attention(p)
        shapes |= {f"{p}self_attn.sinks": (N_HEAD,), f"{p}mlp.router.weight": (N_EXPERT, D)}
        shapes |= {f"{p}mlp.router.bias": (N_EXPERT,)}
        shapes |= {f"{p}mlp.experts.gate_up_proj_bias": (N_EXPERT, 2 * FF)}
        shapes |= {f"{p}mlp.experts.down_proj_bias": (N_EXPERT, D)}
        if not packed:
            shapes |= {f"{p}mlp.experts.gate_up_proj": (N_EXPERT, D, 2 * FF)}
            shapes |= {f"{p}mlp.experts.down_proj": (N_EXPERT, FF, D)}
    weights, rng = fill(shapes), np.random.default_rng(3)
    for i in range(N_LAYER if packed else 0):
        for name, rows, cols in (("gate_up_proj", 2 * FF, D), ("down_proj", D, FF)):
            stem, blocks = f"model.layers.{i}.mlp.experts.{name}", (N_EXPERT, rows, cols // 32)
            weights[stem + "_blocks"] = rng.integers(0, 256, (*blocks, 16), dtype=np.uint8)
            weights[stem + "_scales"] = rng.integers(121, 124, blocks, dtype=np.uint8)
    folders.write_folder(folder, SPEC, weights=weights)
    config = {key: value for key, value in GPT_OSS.items() if packed or key != "quantization_config"}
    folders.write_json(folder / "config.json", config | changes)
    return folder, weights


def unpacked(blocks: Any, scales: Any) -> Any:
    """By the format's definition: [..., rows, cols], a byte's low half first."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    pairs = np.stack([values[blocks & 15], values[blocks >> 4]], axis=-1)
    weights = pairs.reshape(*blocks.shape[:-1], 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return weights.reshape(*scales.shape[:-1], -1)


def test_packed_experts_keep_their_weights(tmp_path: Path) -> None:
    """Read back by gguf; rows of gate and up, which take turns, apart."""
    folder, weights = gpt_oss(tmp_path / "hf")
    done = convert(folder, tmp_path / "out.gguf", type="Q8_0")
    assert [note for note in done.notes if "MXFP4" in note]
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    for i in range(N_LAYER):
        p, own = f"model.layers.{i}.mlp.experts.", f"blk.{i}."
        both = unpacked(weights[p + "gate_up_proj_blocks"], weights[p + "gate_up_proj_scales"])
        down = unpacked(weights[p + "down_proj_blocks"], weights[p + "down_proj_scales"])
        np.testing.assert_array_equal(found[own + "ffn_gate_exps.weight"], both[:, ::2])
        np.testing.assert_array_equal(found[own + "ffn_up_exps.weight"], both[:, 1::2])
        np.testing.assert_array_equal(found[own + "ffn_down_exps.weight"], down)
        bias = weights[p + "gate_up_proj_bias"].astype(np.float32)
        np.testing.assert_array_equal(found[own + "ffn_gate_exps.bias"], bias[:, ::2])
        np.testing.assert_array_equal(found[own + "ffn_up_exps.bias"], bias[:, 1::2])
        np.testing.assert_array_equal(
            found[own + "attn_sinks.weight"], weights[f"model.layers.{i}.self_attn.sinks"]
        )
        assert {kinds[f"{own}ffn_{name}_exps.weight"] for name in ("gate", "up", "down")} == {"MXFP4"}
        assert kinds[own + "ffn_gate_inp.weight"] == kinds[own + "ffn_down_exps.bias"] == "F32"
        assert kinds[own + "attn_q.weight"] == "Q8_0"
        assert own + "post_attention_norm.weight" in found and own + "ffn_norm.weight" not in found
    with ModelFile(tmp_path / "out.gguf") as file:
        keys = dict(file.metadata.items())
    assert keys["gpt-oss.attention.sliding_window"] == 4 and keys["gpt-oss.expert_feed_forward_length"] == FF
    assert keys["gpt-oss.rope.scaling.type"] == "yarn" and "powerinfer.hidden_act" not in keys
    assert "gpt-oss.expert_gating_func" not in keys and "gpt-oss.expert_weights_norm" not in keys


def test_floats_are_turned(tmp_path: Path) -> None:
    """As fine-tuned models are published: [cols, rows], columns of gate and up in turn."""
    folder, weights = gpt_oss(tmp_path / "hf", packed=False)
    convert(folder, tmp_path / "out.gguf", type="F16")
    found = gguf_raw.read(tmp_path / "out.gguf").tensors
    both = weights["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight"].floats(), both[:, :, 1::2].swapaxes(1, 2))
    down = weights["model.layers.1.mlp.experts.down_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(found["blk.1.ffn_down_exps.weight"].floats(), down)


def test_packed_and_floats_are_the_same_model(tmp_path: Path) -> None:
    """The forward pass over either form of the same weights."""
    folder, weights = gpt_oss(tmp_path / "packed")
    plain = {k: v for k, v in weights.items() if not k.endswith(("_blocks", "_scales"))}
    for name in [name for name in weights if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        values = unpacked(weights[name], weights[stem + "_scales"]).swapaxes(1, 2)
        plain[stem] = np.ascontiguousarray(values.astype(np.float32))
    other = folders.write_folder(tmp_path / "plain", SPEC, weights=plain)
    config = {key: value for key, value in GPT_OSS.items() if key != "quantization_config"}
    folders.write_json(other / "config.json", config)
    rows = []
    for path in (folder, other):
        source = open_source(path)
        rows.append(SourceModel(source.checkpoint, source.hyper).logits([PROMPT])[0])
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("packed", [True, False])
def test_the_engine_gives_the_checkpoint_s_answers(packed: bool, tmp_path: Path) -> None:
    folder, _ = gpt_oss(tmp_path / "hf", packed=packed)
    convert(folder, tmp_path / "out.gguf")
    source = open_source(folder)
    (expected,) = SourceModel(source.checkpoint, source.hyper).logits([PROMPT])
    options: Any = {"n_threads": 1, "type_k": "f32", "type_v": "f32"}
    with Model(tmp_path / "out.gguf") as model, Session(model, **options) as session:
        rows = []
        for token in PROMPT:
            session.feed([token])
            rows.append(session.logits().copy())
    # In MXFP4 activations are rounded to 8 bits.
    assert reference.relative_error(np.stack(rows), expected) < (3e-2 if packed else 1e-4)


def test_bytes_of_a_block() -> None:
    """Weight j of 0..15 is the low half of byte j, weight j + 16 the high half."""
    codes = np.arange(32) % 16
    blocks = (codes[::2] | codes[1::2] << 4).astype(np.uint8).reshape(1, 1, 1, 16)
    (raw,) = Packed("x", blocks, np.full((1, 1, 1), 127, np.uint8)).raw()
    assert raw.tolist() == [[127, *(codes[j] | codes[j + 16] << 4 for j in range(16))]]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"swiglu_limit": 5.0}, UnsupportedError, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, UnsupportedError, "swiglu_alpha"),
        ({"layer_types": ["full_attention"] * 2}, UnsupportedError, "layer_types"),
        ({"attention_bias": False}, UnsupportedError, "attention_bias"),
        ({"sliding_window": None}, FormatError, "sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "awq"),
        ({"rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": True}}, UnsupportedError, "truncate"),
        ({"intermediate_size": 64}, FormatError, "gate_up_proj"),
        ({"num_local_experts": 5}, FormatError, r"\[5"),
        ({"hidden_act": "relu"}, UnsupportedError, "the activation is relu"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    folder, _ = gpt_oss(tmp_path / "hf", **changes)
    with pytest.raises(error, match=says):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


# ---- GLM


def glm(folder: Path, **changes: Any) -> Path:
    shapes: dict[str, tuple[int, ...]] = dict(OUTER)
    for i in range(3):  # the last one is part of one that guesses at further tokens
        p = f"model.layers.{i}."
        shapes |= attention(p, bias=False)
        if i == 0:
            shapes |= {f"{p}mlp.{n}_proj.weight": (192, D) for n in ("gate", "up")}
            shapes |= {f"{p}mlp.down_proj.weight": (D, 192)}
            continue
        shapes |= {f"{p}mlp.gate.weight": (N_EXPERT, D), f"{p}mlp.gate.e_score_correction_bias": (N_EXPERT,)}
        stems = [f"experts.{e}" for e in range(N_EXPERT)] + ["shared_experts"]
        for stem in stems:
            shapes |= {f"{p}mlp.{stem}.{n}_proj.weight": (FF, D) for n in ("gate", "up")}
            shapes |= {f"{p}mlp.{stem}.down_proj.weight": (D, FF)}
    shapes |= {"model.layers.2.enorm.weight": (D,), "model.layers.2.shared_head.norm.weight": (D,)}
    folders.write_folder(folder, SPEC, weights=fill(shapes))
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": 192,
        "max_position_embeddings": 256,
        "moe_intermediate_size": FF,
        "n_group": 1,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": N_HEAD,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": N_KV,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": VOCAB,
    }
    folders.write_json(folder / "config.json", config | changes)
    return folder


def test_glm(tmp_path: Path) -> None:
    done = convert(glm(tmp_path / "hf"), tmp_path / "out.gguf")
    assert done.left_out and all(name.startswith("model.layers.2.") for name in done.left_out)
    file = gguf_raw.read(tmp_path / "out.gguf")
    keys = {key.partition(".")[2]: value for key, (_, value) in file.keys.items()}
    assert keys["architecture"] == b"glm4moe" and keys["block_count"] == 2
    assert keys["leading_dense_block_count"] == 1 and keys["rope.dimension_count"] == HEAD // 2
    assert keys["expert_gating_func"] == 2 and keys["expert_weights_scale"] == 2.5
    assert keys["expert_shared_count"] == 1 and keys["expert_feed_forward_length"] == FF
    names = set(file.tensors)
    assert {"blk.0.ffn_gate.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_shexp.weight"} <= names
    assert {"blk.1.exp_probs_b.bias", "blk.0.attn_q.bias", "blk.1.post_attention_norm.weight"} <= names
    assert not names & {
        "blk.0.attn_output.bias",
        "blk.0.attn_q_norm.weight",
        "blk.1.ffn_gate_inp_shexp.weight",
    }
    assert file.tensors["blk.1.exp_probs_b.bias"].type == "F32"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"n_group": 2}, UnsupportedError, "n_group"),
        ({"first_k_dense_replace": 2}, FormatError, "first_k_dense_replace"),
        ({"partial_rotary_factor": 0.03}, FormatError, "rotated in pairs"),
        ({"partial_rotary_factor": 1.5}, FormatError, "a share in 0..1"),
        ({"num_hidden_layers": 1, "first_k_dense_replace": 0}, FormatError, "mlp.gate"),
    ],
)
def test_what_glm_is_refused(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        convert(glm(tmp_path / "hf", **changes), tmp_path / "out.gguf")
