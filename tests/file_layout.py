"""From the layout in which a checkpoint is published to that of a file: names, and the order of rows.

These are the steps of converters, written again, since tests share no code with what they check.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.specs import Spec

Array = NDArray[Any]
Tensors = dict[str, Array]


def recurrent() -> ModuleType:
    """Models with recurrent layers; the module needs models.py."""
    return importlib.import_module("tests.recurrent")


def interleaved(rows: Array, n_head: int) -> Array:
    """Rows of q or k from half-split rotation order (x_i with x_{i+d/2}) to pairs (x_2i with x_2i+1)."""
    heads = rows.reshape(n_head, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def regrouped(fused: Array, spec: Spec) -> Array:
    """Falcon's fused rows, per kv group [its q heads, k, v], to all q, all k, all v."""
    per_group = spec.n_head // spec.n_head_kv + 2
    groups = fused.reshape(spec.n_head_kv, per_group, spec.d_head, spec.n_embd)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, spec.n_embd) for part in parts])


LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.w1": "ffn_gate",
    "block_sparse_moe.w3": "ffn_up",
    "block_sparse_moe.w2": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}
SHARED_NAMES = {f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
OSS_NAMES = (
    LLAMA_NAMES
    | SHARED_NAMES
    | {
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
        "mlp.gate.correction": "exp_probs_b",
    }
)
LLAMA4_NAMES = {name.replace("mlp.", "feed_forward."): new for name, new in LLAMA_NAMES.items()}
LATENT_NAMES = (
    LLAMA_NAMES
    | SHARED_NAMES
    | {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "mlp.gate.correction": "exp_probs_b",
    }
)
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA4_NAMES = GEMMA_NAMES | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
FALCON_NAMES = {
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "word_embeddings": "token_embd",
    "ln_f": "output_norm",
}
OPT_NAMES = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
}


def file_name(spec: Spec, name: str) -> str:
    """Published tensor name -> name in a GGUF file."""
    stem, kind = name.rsplit(".", 1)
    if stem == "lm_head":
        return f"output.{kind}"
    families = {
        "falcon": FALCON_NAMES,
        "opt": OPT_NAMES,
        "olmo2": GEMMA_NAMES,
        "llama4": LLAMA4_NAMES,
        "gemma2": GEMMA_NAMES,
        "gemma3": GEMMA_NAMES,
        "gemma4": GEMMA4_NAMES,
    }
    families["deepseek2"] = LATENT_NAMES
    names = (families | dict.fromkeys(("gpt-oss", "glm4moe"), OSS_NAMES)).get(spec.family, LLAMA_NAMES)
    parts = stem.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if layer is None:
        # OPT calls the norm before the output and the one before each FFN by the same name.
        return f"{'output_norm' if parts[-1] == 'final_layer_norm' else names[parts[-1]]}.{kind}"
    inner = ".".join(parts[layer + 1 :])
    if ".experts." in inner:
        return f"blk.{parts[layer]}.{names[inner.replace('experts.', '')]}_exps.{kind}"
    return f"blk.{parts[layer]}.{'ffn_norm' if inner == 'final_layer_norm' else names[inner]}.{kind}"


def file_tensors(spec: Spec, weights: Tensors) -> Tensors:
    """The tensors of an ordinary (dense) GGUF file."""
    if spec.layers:
        return recurrent().file_tensors(spec, stacked(weights))
    out: Tensors = {}
    for name, value in stacked(weights).items():
        new = file_name(spec, name)
        if spec.arch in ("llama", "bamboo", "arcee") and ".attn_q." in new:
            value = interleaved(value, spec.n_head)
        elif spec.arch in ("llama", "bamboo", "arcee") and ".attn_k." in new:
            value = interleaved(value, spec.n_head_kv)
        elif "attn_qkv" in new:
            value = regrouped(value, spec)
        elif spec.is_gemma and spec.family != "gemma4" and new.endswith("norm.weight"):
            value = 1 + value  # files hold what is multiplied with
        elif new.endswith("ffn_gate_inp_shexp.weight"):
            value = value[0].astype(np.float32)
        elif ".attn_kv_b." in new:
            of_heads = value.reshape(spec.n_head, -1, spec.kv_rank)
            key, value = np.split(of_heads, [spec.d_head - spec.d_rot], axis=1)
            out[new.replace("kv_b", "k_b")] = np.ascontiguousarray(key.swapaxes(1, 2))
            new, value = new.replace("kv_b", "v_b"), np.ascontiguousarray(value)
        out[new] = value
    if spec.family == "falcon" and spec.tied:
        out["output.weight"] = out["token_embd.weight"]
    if spec.rope.kind == "llama3":
        out["rope_freqs.weight"] = llama3_divisors(spec)
    if spec.family == "gemma4":  # of full layers a quarter is rotated
        pairs = np.arange(spec.head_full // 2)
        out["rope_freqs.weight"] = np.where(pairs < len(pairs) // 4, 1.0, 1e30).astype(np.float32)
    return out


def stacked(weights: Tensors) -> Tensors:
    """The matrices of a layer's experts, published one by one, as one tensor [n_expert, rows, cols]."""
    out: Tensors = {}
    experts: dict[str, list[Array]] = {}
    for name, value in weights.items():
        before, _, rest = name.partition(".experts.")
        if rest:
            experts.setdefault(f"{before}.experts.{rest.partition('.')[2]}", []).append(value)
        else:
            # Converters leave routers as floats.
            out[name] = value.astype(np.float32) if name.endswith(".gate.weight") else value
    return out | {name: np.stack(values) for name, values in experts.items()}


def llama3_divisors(spec: Spec) -> Array:
    """What Llama 3.1 divides each rotation frequency by: 1 for short wavelengths, factor for long ones."""
    rope = spec.rope
    wavelength = 2 * np.pi * rope.base ** (np.arange(0, spec.d_head, 2) / spec.d_head)
    smooth = (rope.n_ctx_orig / wavelength - rope.low) / (rope.high - rope.low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)


def sparse_tensors(dense: Tensors, predictor: Sequence[tuple[Array, Array]]) -> Tensors:
    """The tensors of a PowerInfer file: `ffn_down` transposed and renamed, one predictor per layer."""
    out: Tensors = {}
    for name, value in dense.items():
        transposed = np.ascontiguousarray(value.T)  # leaves a bias as it is
        out.update(
            {name.replace("ffn_down.", "ffn_down_t."): transposed} if "ffn_down." in name else {name: value}
        )
    for i, (fc1, fc2) in enumerate(predictor):
        out[f"blk.{i}.fc1.weight"] = fc1
        out[f"blk.{i}.fc2.weight"] = fc2
    return out
