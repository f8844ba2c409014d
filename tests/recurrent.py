"""Small models with recurrent layers: their weights as published, and as files have them (models.py)."""

from __future__ import annotations

import numpy as np

from tests.models import Array, Meta, Tensors, interleaved, normal
from tests.specs import Spec

FAMILIES = ("lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "falcon-h1", "granitehybrid", "nemotron_h")
GRANITE = {"attention.scale": 0.15, "embedding_scale": 1.5, "residual_scale": 0.75, "logit_scale": 1.25}
PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")
"""Their norms multiply by 1 + weight, but those of delta nets."""


class Drawn:
    """Weights of one model while they are drawn."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.out = spec, Tensors()

    def matrix(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        drawn = normal(f"{self.spec.name}/{name}", rows, cols) * gain / cols**0.5
        self.out[f"{name}.weight"] = drawn.astype(np.float16)

    def vector(self, name: str, n: int, mean: float, std: float) -> None:
        self.out[name] = (mean + normal(f"{self.spec.name}/{name}", n) * std).astype(np.float32)

    def norm(self, name: str, n: int, *, one: float = 1.0) -> None:
        self.vector(f"{name}.weight", n, one, 0.25)

    def conv(self, name: str, n: int, *, bias: bool = False) -> None:
        drawn = normal(f"{self.spec.name}/{name}", n, 1, self.spec.n_conv) * 0.6
        self.out[f"{name}.weight"] = drawn.astype(np.float32)
        if bias:
            self.vector(f"{name}.bias", n, 0.0, 0.2)

    def attention(self, p: str, out: str = "o_proj") -> None:
        s = self.spec
        qw, kw = s.n_head * s.d_head, s.n_head_kv * s.d_head
        self.matrix(p + "q_proj", 2 * qw if s.family in PLUS_ONE else qw, s.n_embd)
        self.matrix(p + "k_proj", kw, s.n_embd)
        self.matrix(p + "v_proj", kw, s.n_embd)
        self.matrix(p + out, s.n_embd, qw)

    def mamba(self, p: str) -> None:
        s = self.spec
        wide, channels = s.n_ssm_head * s.d_ssm, s.n_ssm_head * s.d_ssm + 2 * s.n_ssm_group * s.n_state
        self.matrix(p + "in_proj", wide + channels + s.n_ssm_head, s.n_embd)
        self.conv(p + "conv1d", channels, bias=True)
        self.vector(p + "A_log", s.n_ssm_head, 0.0, 0.5)
        self.vector(p + "D", s.n_ssm_head, 1.0, 0.25)
        self.vector(p + "dt_bias", s.n_ssm_head, -1.0, 0.5)
        if s.family != "falcon-h1":
            self.norm(p + "norm", wide)
        self.matrix(p + "out_proj", s.n_embd, wide)

    def delta(self, p: str) -> None:
        s = self.spec
        keys, wide = s.n_ssm_group * s.n_state, s.n_ssm_head * s.d_ssm
        if s.family == "qwen3next":
            self.matrix(p + "in_proj_qkvz", 2 * keys + 2 * wide, s.n_embd)
            self.matrix(p + "in_proj_ba", 2 * s.n_ssm_head, s.n_embd)
        else:
            self.matrix(p + "in_proj_qkv", 2 * keys + wide, s.n_embd)
            self.matrix(p + "in_proj_z", wide, s.n_embd)
            self.matrix(p + "in_proj_b", s.n_ssm_head, s.n_embd)
            self.matrix(p + "in_proj_a", s.n_ssm_head, s.n_embd)
        self.conv(p + "conv1d", 2 * keys + wide)
        self.vector(p + "A_log", s.n_ssm_head, 0.0, 0.5)
        self.vector(p + "dt_bias", s.n_ssm_head, -1.0, 0.5)
        self.norm(p + "norm", s.d_ssm)
        self.matrix(p + "out_proj", s.n_embd, wide)

    def mlp(self, p: str, names: tuple[str, str, str], width: int, gain: float = 2.0) -> None:
        gate, up, down = names
        if gate:
            self.matrix(p + gate, width, self.spec.n_embd)
        self.matrix(p + up, width, self.spec.n_embd)
        self.matrix(p + down, self.spec.n_embd, width, gain)

    def experts(self, p: str, names: tuple[str, str, str]) -> None:
        self.matrix(p + "gate", self.spec.n_expert, self.spec.n_embd)
        for e in range(self.spec.n_expert):
            self.mlp(f"{p}experts.{e}.", names, self.spec.n_ff_expert)


def draw(spec: Spec) -> Tensors:
    """Weights under their published names; 2-D ones F16, others F32."""
    d, out = spec.n_embd, Drawn(spec)
    proj = ("gate_proj", "up_proj", "down_proj")
    out.matrix("model.embed_tokens", spec.n_vocab, d, d**0.5)
    for i, kind in enumerate(spec.layers):
        p = f"model.layers.{i}."
        if spec.family in ("lfm2", "lfm2moe"):
            out.norm(p + "operator_norm", d)
            out.norm(p + "ffn_norm", d)
            if kind == "a":
                out.attention(p + "self_attn.", "out_proj")
                out.norm(p + "self_attn.q_layernorm", spec.d_head)
                out.norm(p + "self_attn.k_layernorm", spec.d_head)
            else:
                out.matrix(p + "conv.in_proj", 3 * d, d)
                out.conv(p + "conv.conv", d)
                out.matrix(p + "conv.out_proj", d, d)
            if spec.n_expert and i >= spec.n_dense:
                out.experts(p + "feed_forward.", ("w1", "w3", "w2"))
                out.vector(p + "feed_forward.expert_bias", spec.n_expert, 0.0, 0.002)
            else:
                out.mlp(p + "feed_forward.", ("w1", "w3", "w2"), spec.n_ff)
        elif spec.family in PLUS_ONE:
            out.norm(p + "input_layernorm", d, one=0)
            out.norm(p + "post_attention_layernorm", d, one=0)
            if kind == "a":
                out.attention(p + "self_attn.")
                out.norm(p + "self_attn.q_norm", spec.d_head, one=0)
                out.norm(p + "self_attn.k_norm", spec.d_head, one=0)
            else:
                out.delta(p + "linear_attn.")
            if spec.n_expert:
                out.experts(p + "mlp.", proj)
                out.mlp(p + "mlp.shared_expert.", proj, spec.n_ff_shared)
                out.matrix(p + "mlp.shared_expert_gate", 1, d)
            else:
                out.mlp(p + "mlp.", proj, spec.n_ff)
        elif spec.family == "falcon-h1":
            out.norm(p + "input_layernorm", d)
            out.norm(p + "pre_ff_layernorm", d)
            out.attention(p + "self_attn.")
            out.mamba(p + "mamba.")
            out.mlp(p + "feed_forward.", proj, spec.n_ff)
        elif spec.family == "granitehybrid":
            out.norm(p + "input_layernorm", d)
            out.norm(p + "post_attention_layernorm", d)
            if kind == "a":
                out.attention(p + "self_attn.")
            else:
                out.mamba(p + "mamba.")
            out.experts(p + "block_sparse_moe.", proj)
            out.mlp(p + "shared_mlp.", proj, spec.n_ff_shared)
        elif spec.family in ("nemotron_h", "nemotron_h_moe"):
            out.norm(p + "norm", d)
            if kind == "a":
                out.attention(p + "mixer.")
            elif kind == "r":
                out.mamba(p + "mixer.")
            elif spec.n_expert:
                out.experts(p + "mixer.", ("", "up_proj", "down_proj"))
                out.vector(p + "mixer.gate.e_score_correction_bias", spec.n_expert, 0.0, 0.002)
                out.mlp(p + "mixer.shared_experts.", ("", "up_proj", "down_proj"), spec.n_ff_shared)
            else:
                out.mlp(p + "mixer.", ("", "up_proj", "down_proj"), spec.n_ff)
        else:
            raise ValueError(spec.family)
    last = {"lfm2": "embedding_norm", "lfm2moe": "embedding_norm", "falcon-h1": "final_layernorm"}
    last |= dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "norm_f")
    out.norm(f"model.{last.get(spec.family, 'norm')}", d, one=0 if spec.family in PLUS_ONE else 1)
    out.matrix("lm_head", spec.n_vocab, d, 2.0)
    if spec.n_expert:
        keep_order(spec, out.out)
    return out.out


def keep_order(spec: Spec, weights: Tensors) -> None:
    """Keeps a token's experts far from changing places, as models.separate_experts does."""
    n = spec.n_expert
    order = np.argsort(normal(f"{spec.name}/ladder", spec.n_vocab, n), axis=1, kind="stable")
    weights["model.embed_tokens.weight"][:, :n] = (order - (n - 1) / 2) * 0.5
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if stem.endswith(("o_proj", "out_proj", "down_proj", ".w2")):
            value[:n] /= 32
        elif stem.endswith(("post_attention_layernorm", "ffn_norm")) or is_before_experts(spec, stem):
            value[:n] = 0 if spec.family in PLUS_ONE else 1
        elif stem.endswith((".mlp.gate", "feed_forward.gate", "moe.gate", "mixer.gate")):
            value /= 32
            value[:, :n] += np.eye(n, dtype=value.dtype)


def is_before_experts(spec: Spec, stem: str) -> bool:
    """Whether it is the norm of a Nemotron-H layer that has experts."""
    parts = stem.split(".")
    return parts[3:] == ["norm"] and spec.layers[int(parts[2])] == "f"


# ---- as in files -------------------------------------------------------------------------------------------

NAMES = {
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "mamba.in_proj": "ssm_in",
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    "mixer.in_proj": "ssm_in",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
} | {
    f"{block}.{name}": f"ssm_{new}"
    for block in ("linear_attn", "mamba", "mixer")
    for name, new in (("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))
}
for _block, _end in (
    ("mlp", ""),
    ("feed_forward", ""),
    ("mlp.shared_expert", "_shexp"),
    ("shared_mlp", "_shexp"),
    ("block_sparse_moe", ""),
    ("mixer", ""),
    ("mixer.shared_experts", "_shexp"),
):
    NAMES |= {f"{_block}.{name}_proj": f"ffn_{name}{_end}" for name in ("gate", "up", "down")}


def tiled(spec: Spec, value: Array, width: int) -> Array:
    """Rows of v heads, `width` each, from those of a k head together to those of all k heads in turn."""
    grouped = value.reshape(spec.n_ssm_group, -1, width, *value.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(0, 1)).reshape(value.shape)


def split_qkvz(spec: Spec, value: Array) -> tuple[Array, Array]:
    """Qwen3-Next's rows, of each k head its q, k, v and z, as all q, k and v, and all z."""
    per_head = spec.n_ssm_head // spec.n_ssm_group * spec.d_ssm
    groups = value.reshape(spec.n_ssm_group, -1, spec.n_embd)
    cuts = (spec.n_state, 2 * spec.n_state, 2 * spec.n_state + per_head)
    q, k, v, z = (part.reshape(-1, spec.n_embd) for part in np.split(groups, cuts, axis=1))
    return np.concatenate([q, k, v]), z


def file_tensors(spec: Spec, weights: Tensors) -> Tensors:
    """The tensors of a file, of weights whose experts are stacked."""
    out: Tensors = {"token_embd.weight": weights["model.embed_tokens.weight"]}
    keys = 2 * spec.n_ssm_group * spec.n_state
    for name, value in weights.items():
        parts = name.split(".")
        if name == "lm_head.weight":
            out["output.weight"] = value
        elif parts[1] in ("norm", "norm_f", "final_layernorm"):
            out["output_norm.weight"] = value + 1 if spec.family in PLUS_ONE else value
        elif parts[1] == "embedding_norm":
            out["token_embd_norm.weight"] = value
        if parts[1] != "layers":
            continue
        p, inner = f"blk.{parts[2]}.", ".".join(parts[3:])
        stem, _, kind = inner.rpartition(".")
        is_mamba = stem in ("mamba", "mixer")
        if kind == "A_log":
            a = -np.exp(value)
            out[p + "ssm_a"] = a[:, None] if is_mamba else tiled_or_not(spec, a, 1)
        elif kind == "D":
            out[p + "ssm_d"] = value[:, None]
        elif kind == "dt_bias":
            out[p + "ssm_dt.bias"] = value if is_mamba else tiled_or_not(spec, value, 1)
        elif kind in ("expert_bias", "e_score_correction_bias"):
            out[p + "exp_probs_b.bias"] = value
        elif stem == "pre_ff_layernorm":
            out[p + "ffn_norm"] = value
        elif stem == "linear_attn.in_proj_qkvz":
            out[p + "attn_qkv.weight"], out[p + "attn_gate.weight"] = split_qkvz(spec, value)
        else:
            experts = ".experts." in inner
            if spec.family == "granitehybrid" and stem == "post_attention_layernorm":
                stem = "ffn_norm"
            if spec.family == "granitehybrid" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                value = interleaved(value, spec.n_head if "q_proj" in stem else spec.n_head_kv)
            new = NAMES[stem.replace(".experts.", ".")] + ("_exps" if experts else "")
            if "conv" in stem and value.ndim == 3:
                value = value[:, 0]
            if spec.family in PLUS_ONE and stem.endswith("norm") and stem != "linear_attn.norm":
                value = value + 1
            if new == "ffn_gate_inp_shexp":
                value = value[0].astype(np.float32)
            if stem in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
                value = np.concatenate([value[:keys], tiled_or_not(spec, value[keys:], spec.d_ssm)])
            if stem == "linear_attn.in_proj_z":
                value = tiled_or_not(spec, value, spec.d_ssm)
            if stem in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
                value = tiled_or_not(spec, value, 1)
            if stem == "linear_attn.out_proj":
                value = np.ascontiguousarray(tiled_or_not(spec, value.T, spec.d_ssm).T)
            if stem in ("mamba.norm", "mixer.norm"):
                value = value.reshape(spec.n_ssm_group, -1)
            out[p + new + f".{kind}"] = value
    return out


def tiled_or_not(spec: Spec, value: Array, width: int) -> Array:
    return value if spec.family == "qwen3next" else tiled(spec, value, width)


def metadata(spec: Spec) -> Meta:
    """What the files of these architectures say beyond others."""
    meta: Meta = {}
    if spec.family in ("lfm2", "lfm2moe"):
        meta["shortconv.l_cache"] = spec.n_conv
    else:
        meta["ssm.conv_kernel"] = spec.n_conv
        meta["ssm.state_size"] = spec.n_state
        meta["ssm.group_count"] = spec.n_ssm_group
        meta["ssm.time_step_rank"] = spec.n_ssm_head
        meta["ssm.inner_size"] = spec.n_ssm_head * spec.d_ssm
    if spec.family in PLUS_ONE:
        meta["attention.recurrent_layers"] = [kind == "r" for kind in spec.layers]
        meta["full_attention_interval"] = 4
    elif spec.family in ("nemotron_h", "nemotron_h_moe"):
        meta["attention.head_count_kv"] = [spec.n_head_kv if kind == "a" else 0 for kind in spec.layers]
        meta["feed_forward_length"] = [spec.n_ff if kind == "f" else 0 for kind in spec.layers]
        meta["attention.layer_norm_epsilon"] = 1e-5
        meta["rope.scaling.finetuned"] = False
    elif "r" in spec.layers:
        meta["attention.head_count_kv"] = [spec.n_head_kv if kind == "a" else 0 for kind in spec.layers]
    if spec.family == "granitehybrid":
        meta |= GRANITE | {"rope.scaling.finetuned": False}
    if spec.family in ("qwen35", "qwen35moe"):
        meta["rope.dimension_sections"] = [2, 1, 1, 0]
    if spec.family == "nemotron_h_moe":
        meta |= {"expert_group_count": 1, "expert_group_used_count": 1, "expert_shared_count": 1}
        meta |= {"expert_weights_norm": True, "expert_weights_scale": 1.5}
    if spec.family == "lfm2moe":
        meta["leading_dense_block_count"] = spec.n_dense
        meta["expert_gating_func"] = 2
    return {f"{spec.arch}.{name}": value for name, value in meta.items()}
