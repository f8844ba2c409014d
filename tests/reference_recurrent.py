"""The forward pass of models with recurrent layers in float64 (reference.py), token after token."""

from __future__ import annotations

import math

import numpy as np

from tests import reference
from tests.reference_parts import Array, Ffn, Model, Trace, heads, rms_norm, silu


def convolved(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Of each channel of x [n, channels] a causal convolution by weight [channels, width]."""
    width = weight.shape[1]
    before = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    y = sum(before[j : j + len(x)] * weight[:, j] for j in range(width))
    return np.asarray(y if bias is None else y + bias)


def short_convolution(model: Model, p: str, h: Array) -> Array:
    b, c, x = np.split(h @ model[p + "shortconv.in_proj.weight"].T, 3, axis=1)
    y = c * convolved(b * x, model[p + "shortconv.conv.weight"])
    return np.asarray(y @ model[p + "shortconv.out_proj.weight"].T)


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def sizes(model: Model) -> tuple[int, int, int, int]:
    """Groups, heads, and values of a head's k and v."""
    n_head = int(model.key("ssm.time_step_rank"))
    inner = int(model.key("ssm.inner_size"))
    return int(model.key("ssm.group_count")), n_head, int(model.key("ssm.state_size")), inner // n_head


def delta_net(model: Model, p: str, h: Array, eps: float) -> Array:
    n_group, n_head, n_k, n_v = sizes(model)
    each = n_head // n_group
    qkv = silu(convolved(h @ model[p + "attn_qkv.weight"].T, model[p + "ssm_conv1d.weight"]))
    q, k, v = np.split(qkv, (n_group * n_k, 2 * n_group * n_k), axis=1)
    q, k, v = heads(q, n_group), heads(k, n_group), heads(v, n_head)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    if model.get(p + "ssm_ba.weight") is not None:
        ba = (h @ model[p + "ssm_ba.weight"].T).reshape(len(h), n_group, 2 * each)
        beta, alpha = ba[..., :each].reshape(len(h), -1), ba[..., each:].reshape(len(h), -1)
        group = np.arange(n_head) // each
    else:
        beta, alpha = h @ model[p + "ssm_beta.weight"].T, h @ model[p + "ssm_alpha.weight"].T
        group = np.arange(n_head) % n_group
    decay = np.exp(model[p + "ssm_a"] * softplus(alpha + model[p + "ssm_dt.bias"]))
    rate = 1 / (1 + np.exp(-beta))
    state, out = np.zeros((n_head, n_k, n_v)), np.zeros((len(h), n_head, n_v))
    for t in range(len(h)):
        state *= decay[t][:, None, None]
        kt, qt = k[t][group], q[t][group] / math.sqrt(n_k)
        known = np.einsum("hkv,hk->hv", state, kt)
        state += np.einsum("hk,hv->hkv", kt, rate[t][:, None] * (v[t] - known))
        out[t] = np.einsum("hkv,hk->hv", state, qt)
    z = silu(heads(h @ model[p + "attn_gate.weight"].T, n_head))
    y = rms_norm(out, model[p + "ssm_norm.weight"], eps) * z
    return np.asarray(y.reshape(len(h), -1) @ model[p + "ssm_out.weight"].T)


def mamba(model: Model, p: str, h: Array, eps: float) -> Array:
    n_group, n_head, n_k, n_v = sizes(model)
    wide, keys = n_head * n_v, n_group * n_k
    z, xbc, dt = np.split(h @ model[p + "ssm_in.weight"].T, (wide, 2 * wide + 2 * keys), axis=1)
    xbc = silu(convolved(xbc, model[p + "ssm_conv1d.weight"], model[p + "ssm_conv1d.bias"]))
    x, b, c = np.split(xbc, (wide, wide + keys), axis=1)
    x, b, c = heads(x, n_head), heads(b, n_group), heads(c, n_group)
    rate = softplus(dt + model[p + "ssm_dt.bias"])
    decay = np.exp(model[p + "ssm_a"].ravel() * rate)
    group = np.arange(n_head) // (n_head // n_group)
    state, out = np.zeros((n_head, n_k, n_v)), np.zeros((len(h), n_head, n_v))
    for t in range(len(h)):
        state = decay[t][:, None, None] * state + np.einsum(
            "hk,hv->hkv", b[t][group], rate[t][:, None] * x[t]
        )
        out[t] = np.einsum("hkv,hk->hv", state, c[t][group]) + model[p + "ssm_d"].reshape(-1, 1) * x[t]
    y = out.reshape(len(h), wide) * silu(z)
    norm = model.get(p + "ssm_norm.weight")
    if norm is not None:
        y = rms_norm(heads(y, n_group), norm.reshape(n_group, -1), eps).reshape(len(h), wide)
    return np.asarray(y @ model[p + "ssm_out.weight"].T)


def attention(model: Model, p: str, h: Array, eps: float, n_head_kv: int) -> Array:
    n_head = int(model.key("attention.head_count"))
    gated = model.arch in ("qwen3next", "qwen35", "qwen35moe")
    q = heads(h @ model[p + "attn_q.weight"].T, n_head)
    gate = None
    if gated:
        q, gate = np.split(q, 2, axis=2)
    k, v = (heads(h @ model[p + f"attn_{name}.weight"].T, n_head_kv) for name in "kv")
    if model.get(p + "attn_q_norm.weight") is not None:
        q, k = (
            rms_norm(q, model[p + "attn_q_norm.weight"], eps),
            rms_norm(k, model[p + "attn_k_norm.weight"], eps),
        )
    if bool(model.key("rope.scaling.finetuned", True)):
        q, k = (reference.rotate(x, model, interleaved=False) for x in (q, k))
    q = q * (float(model.key("attention.scale", q.shape[-1] ** -0.5)) * math.sqrt(q.shape[-1]))
    y = reference.attend(q, k, v)
    if gate is not None:
        y = y / (1 + np.exp(-gate.reshape(len(h), -1)))
    return np.asarray(y @ model[p + "attn_output.weight"].T)


def forward(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """lfm2 and lfm2moe (short convolutions), qwen3next, qwen35 and qwen35moe (delta nets), falcon-h1 (Mamba-2
    beside attention), granitehybrid (Mamba-2, scales), nemotron_h and
    nemotron_h_moe (Mamba-2, attention or a feed-forward)."""
    name = (
        "attention.layer_norm_epsilon"
        if model.arch.startswith("nemotron_h")
        else "attention.layer_norm_rms_epsilon"
    )
    eps = float(model.key(name))
    n_layer = int(model.key("block_count"))
    n_head_kv = max(np.atleast_1d(model.key("attention.head_count_kv")).tolist())
    x = model["token_embd.weight"][tokens] * float(model.key("embedding_scale", 1.0))
    residual = float(model.key("residual_scale", 1.0))
    for i in range(n_layer):
        p = f"blk.{i}."
        h, y = rms_norm(x, model[p + "attn_norm.weight"], eps), np.zeros_like(x)
        if model.get(p + "shortconv.conv.weight") is not None:
            y += short_convolution(model, p, h)
        if model.get(p + "attn_qkv.weight") is not None:
            y += delta_net(model, p, h, eps)
        if model.get(p + "ssm_in.weight") is not None:
            y += mamba(model, p, h, eps)
        if model.get(p + "attn_q.weight") is not None:
            y += attention(model, p, h, eps, n_head_kv)
        x = x + residual * y
        if model.arch.startswith("nemotron_h"):  # one block
            if model.get(p + "ffn_gate_inp.weight") is not None:
                x = x + reference.experts(model, i, h, how, trace)
            elif model.get(p + "ffn_up.weight") is not None:
                x = x + reference.ffn(model, i, h, x, how, trace)
            continue
        names = ("post_attention_norm.weight", "ffn_norm.weight", "ffn_norm")
        norm = next(model[p + name] for name in names if model.get(p + name) is not None)
        h = rms_norm(x, norm, eps)
        if model.get(p + "ffn_gate_inp.weight") is not None:
            x = x + residual * reference.experts(model, i, h, how, trace)
        else:
            x = x + residual * reference.ffn(model, i, h, x, how, trace)
    last = model.get("token_embd_norm.weight")
    x = rms_norm(x, model["output_norm.weight"] if last is None else last, eps)
    return x / float(model.key("logit_scale", 1.0))
