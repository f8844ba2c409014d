"""Families whose layers are attention and one feed-forward, and all alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....errors import UnsupportedError
from ..hyper import Hyper
from ..json_file import Settings
from ..rope import RopeForm
from ..stored import Array, StoredTensor
from .family import (
    ATTENTION,
    HEADS,
    NORM,
    OUTER,
    PERMUTED,
    VOCAB,
    Family,
    Value,
    by_rows,
    flag,
    gated,
    number,
    pairs_of_halves,
    parts_of_rows,
    turned,
)

LLAMA = NORM | ATTENTION | gated("mlp")
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}

GRANITE: dict[str, Value] = {
    "attention.scale": number("attention_multiplier"),
    "embedding_scale": number("embedding_multiplier"),
    "residual_scale": number("residual_multiplier"),
    "logit_scale": number("logits_scaling"),
}


def _no_rope_each(period: int) -> dict[str, tuple[object, ...]]:
    return {"no_rope_layer_interval": (period,), "use_sliding_window": (False,)}


def _check_smollm(c: Settings, h: Hyper) -> None:
    expected = [int((i + 1) % 4 != 0) for i in range(h.n_layer)]
    if c.values.get("no_rope_layers") not in (None, expected):
        raise UnsupportedError(f"{c.where}: no_rope_layers is not each fourth layer, which the engine knows")


def _neox_rows(h: Hyper) -> Array:
    """Fused rows, of each head q, k and v, as all q, all k, all v."""
    rows = np.arange(3 * h.q_width).reshape(h.n_head, 3, h.d_head)
    return np.asarray(rows.swapaxes(0, 1)).ravel()


def _internlm_rows(h: Hyper, which: int | slice) -> Array:
    """Fused rows are, of each key/value head, its q heads, k and v."""
    groups = np.arange(h.q_width + 2 * h.kv_width).reshape(h.n_head_kv, -1, h.d_head)
    return np.asarray(groups[:, which]).ravel()


def _phi_window(c: Settings, _: Hyper) -> int | None:
    return c.integer("sliding_window", default=0, low=0, high=1 << 31) or None


def _ternary(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor]:
    """Published as they were trained: products round them."""
    return {"": replace(t, is_ternary="quantization_config" in h.config and t.view.ndim == 2)}


def _of_each(value: float) -> Value:
    """One number for each layer; the checkpoint may have others."""
    return lambda _, h: np.full(h.n_layer, value, np.float32)


def _check_phi3(c: Settings, h: Hyper) -> None:
    if h.rope is not None and h.rope.kind not in ("", "longrope"):
        raise UnsupportedError(f"{c.where}: the kind of scaling is {h.rope.kind}, and phi3 has longrope")


DENSE = (
    Family(
        arch="apertus",
        names=("apertus", "ApertusForCausalLM"),
        defaults={"rope_theta": 12e6},
        layer=LLAMA | {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        act="xielu",
        acts={"xielu": "xielu"},
        is_gated=False,
        keys=HEADS | VOCAB | {"xielu.beta": _of_each(0.5), "xielu.eps": _of_each(-1e-6)},
        of_weights={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
        only=NO_BIAS,
    ),
    Family(
        arch="arcee",
        names=("arcee", "ArceeForCausalLM"),
        layer=LLAMA,
        changes=PERMUTED,
        act="relu2",
        is_gated=False,
        keys=HEADS | VOCAB,
        only=NO_BIAS,
    ),
    Family(
        arch="nemotron",
        names=("nemotron", "NemotronForCausalLM"),
        layer=LLAMA,
        act="relu2",
        is_gated=False,
        layer_norm=True,
        plus_one=("attn_norm", "ffn_norm", "output_norm"),
        rope=RopeForm(share=0.5),
        rope_none=True,
        keys=HEADS | VOCAB,
        only=NO_BIAS,
    ),
    Family(
        arch="phi3",
        names=("phi3", "Phi3ForCausalLM"),
        layer=NORM
        | {
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        rope=RopeForm(share=1.0, by_length=True),
        keys={"attention.sliding_window": _phi_window},
        check=_check_phi3,
    ),
    Family(
        arch="granite",
        names=("granite", "GraniteForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=LLAMA,
        changes=PERMUTED,
        keys=VOCAB | GRANITE,
        only=NO_BIAS,
        tied=True,
    ),
    Family(
        arch="starcoder2",
        names=("starcoder2", "Starcoder2ForCausalLM"),
        layer=NORM | ATTENTION | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        act="gelu_tanh",
        is_gated=False,
        layer_norm=True,
        tied=True,
    ),
    Family(
        arch="glm4",
        names=("glm4", "Glm4ForCausalLM"),
        defaults={"rms_norm_eps": 1.5625e-07},
        layer=ATTENTION
        | {
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        rope=RopeForm(share=0.5),
        keys=HEADS,
    ),
    Family(
        arch="smollm3",
        names=("smollm3", "SmolLM3ForCausalLM"),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 2e6},
        layer=LLAMA,
        changes=PERMUTED,
        keys=VOCAB,
        only=NO_BIAS | _no_rope_each(4),
        check=_check_smollm,
        tied=True,
    ),
    Family(
        arch="seed_oss",
        names=("seed_oss", "SeedOssForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=LLAMA | {"post_attention_layernorm": "post_attention_norm"},
        keys=HEADS,
        only={"attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(
        arch="hunyuan-dense",
        names=("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
        layer=LLAMA | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
        rope=RopeForm(dynamic=True),
        keys=HEADS,
        only={"attention_bias": (False,)},
        tied=True,
    ),
    Family(
        arch="ernie4_5",
        names=("ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        defaults={"rope_theta": 500000.0},
        layer=LLAMA,
        keys=HEADS,
        only={"use_bias": (False,)},
        tied=True,
    ),
    Family(
        arch="stablelm",
        names=("stablelm", "stablelm_epoch", "StableLmForCausalLM", "StableLMEpochForCausalLM"),
        layer=LLAMA,
        layer_norm=True,
        rope=RopeForm(share=0.25),
        keys={"use_parallel_residual": flag("use_parallel_residual", False)},
        only={"qk_layernorm": (False,)},
    ),
    Family(
        arch="mistral3",
        names=("ministral3", "mistral3", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        layer=LLAMA,
        changes=PERMUTED,
        rope=RopeForm(log_scale=1.0),
        keys=HEADS
        | VOCAB
        | {
            "attention.temperature_scale": lambda c, _: c.object("rope_parameters").number(
                "llama_4_scaling_beta"
            )
        },
    ),
    Family(
        arch="internlm2",
        names=("internlm2", "InternLM2ForCausalLM"),
        layer={
            "attention_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "attention.wqkv": "attn_qkv",
            "attention.wo": "attn_output",
        }
        | gated("feed_forward", of=("w1", "w3", "w2")),
        outer={"tok_embeddings": "token_embd", "norm": "output_norm", "output": "output"},
        changes={
            "attn_qkv": parts_of_rows(
                attn_q=lambda h: _internlm_rows(h, slice(-2))[pairs_of_halves(h.n_head, h.d_head)],
                attn_k=lambda h: _internlm_rows(h, -2)[pairs_of_halves(h.n_head_kv, h.d_head)],
                attn_v=lambda h: _internlm_rows(h, -1),
            )
        },
        keys=HEADS,
        rope=RopeForm(dynamic=True),
        only={"bias": (False,)},
    ),
    Family(
        arch="command-r",
        names=("cohere", "CohereForCausalLM"),
        defaults={"rope_theta": 500000.0},
        layer=NORM | ATTENTION | gated("mlp"),
        layer_norm=True,
        rope_none=True,
        keys={"logit_scale": number("logit_scale", default=0.0625)},
        only={"attention_bias": (False,), "use_qk_norm": (False,)},
        tied=True,
    ),
    Family(
        arch="gptneox",
        names=("gpt_neox", "GPTNeoXForCausalLM"),
        prefix="gpt_neox.",
        outer={
            "embed_in": "token_embd",
            "final_layer_norm": "output_norm",
            "embed_out": "output",
            "lm_head": "output",
        },
        layer=NORM
        | {
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        changes={"attn_qkv": by_rows(_neox_rows)},
        act="gelu",
        is_gated=False,
        layer_norm=True,
        rope=RopeForm(share=0.25),
        keys={"use_parallel_residual": flag("use_parallel_residual", True)},
    ),
    Family(
        arch="phi2",
        names=("phi", "PhiForCausalLM"),
        layer=ATTENTION
        | {
            "input_layernorm": "attn_norm",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        outer=OUTER | {"final_layernorm": "output_norm"},
        act="gelu_tanh",
        is_gated=False,
        layer_norm=True,
        rope=RopeForm(share=0.5),
        only={"qk_layernorm": (False,)},
    ),
    Family(
        arch="gpt2",
        names=("gpt2", "GPT2LMHeadModel"),
        prefix="transformer.",
        layers="h.",
        outer={"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"},
        layer={
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), turned),
        act="gelu_tanh",
        is_gated=False,
        layer_norm=True,
        rope=None,
        n_ff=lambda c, h: c.integer("n_inner", default=4 * h.n_embd, low=1, high=1 << 20),
        only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        tied=True,
    ),
    Family(
        arch="bitnet",
        names=("bitnet", "BitNetForCausalLM"),
        defaults={"rope_theta": 500000.0},
        layer=LLAMA | {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
        changes=dict.fromkeys(
            ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), _ternary
        ),
        only={"attention_bias": (False,)},
        tied=True,
    ),
)
