"""The forward pass of every architecture in float64, written for reading: what the engine is held to.

Whole sequences at once, full attention, no cache, no blocks, no kernels; it shares no code with the
engine. `load` reads a GGUF or PowerInfer file through the gguf package and dequantises everything;
`forward` returns the logits of every position, and per layer, when asked, which neurons were predicted
and which were active.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests import reference_recurrent
from tests.reference_parts import (
    RECURRENT,
    Array,
    Ffn,
    LayerTrace,
    Model,
    Trace,
    attend,
    default_activation,
    experts,
    ffn,
    frequencies,
    heads,
    layer_norm,
    load,
    relu,
    rms_norm,
    rotate,
    silu,
    soft_capped,
)

__all__ = [
    "ARCHITECTURES",
    "RECURRENT",
    "Ffn",
    "LayerTrace",
    "Model",
    "Trace",
    "attend",
    "default_activation",
    "experts",
    "ffn",
    "forward",
    "greedy",
    "heads",
    "layer_norm",
    "load",
    "relative_error",
    "relu",
    "rms_norm",
    "rotate",
    "silu",
]

ARCHITECTURES = (
    "llama",
    "arcee",
    "nemotron",
    "bamboo",
    "falcon",
    "opt",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "olmoe",
    "smallthinker",
    "gpt-oss",
    "glm4moe",
    "olmo2",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "llama4",
    *RECURRENT,
    "deepseek2",
)


# ---- architectures -----------------------------------------------------------------------------------------


def llama(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """llama, mistral, bamboo, qwen2 (q, k, v biases), qwen3 (norms on each q and k head), and mixtures of
    experts: mixtral, qwen2moe, qwen3moe, olmoe (norms over all of q and of k), smallthinker (the router reads
    the layer's input; three of four layers have a window, the fourth no rotation).

    gpt-oss: biases everywhere, sinks, windows on even layers, clamped experts. glm4moe: layers without
    experts first, then sigmoids with a bias for the choice and a shared expert.

    arcee and nemotron: no gate, squared ReLU; nemotron has LayerNorms with bias.

    And the Gemmas: a scaled embedding; the second and third have norms after attention and FFN, and a window
    in even layers, or in all but each sixth; the second caps scores and logits.
    """
    layer_normed = model.arch == "nemotron"
    eps = float(model.key(f"attention.layer_norm_{'' if layer_normed else 'rms_'}epsilon"))
    n_head = int(model.key("attention.head_count"))
    n_head_kv = int(model.key("attention.head_count_kv", n_head))
    interleaved = model.arch in ("llama", "bamboo", "arcee")

    def projected(x: Array, name: str, n: int) -> Array:
        y = x @ model[f"{name}.weight"].T
        bias = model.get(f"{name}.bias")
        y = y if bias is None else y + bias
        norm = model.get(f"{name}_norm.weight")
        if norm is not None and norm.size == y.shape[1]:
            return heads(rms_norm(y, norm, eps), n)
        return heads(y, n) if norm is None else rms_norm(heads(y, n), norm, eps)

    def normed(x: Array, name: str) -> Array:
        weight = model[f"{name}.weight"]
        return layer_norm(x, weight, model[f"{name}.bias"], eps) if layer_normed else rms_norm(x, weight, eps)

    def after(y: Array, name: str) -> Array:
        norm = model.get(f"{name}.weight")
        return y if norm is None else rms_norm(y, norm, eps)

    gemma, oss = model.arch.startswith("gemma"), model.arch == "gpt-oss"
    cap = float(model.key("attn_logit_softcapping", 0.0))
    x = model["token_embd.weight"][tokens]
    if gemma:
        x = x * math.sqrt(x.shape[1])
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        width = int(model.key("attention.sliding_window", 0))
        alternate = oss or model.arch == "gemma2"
        seen = i % 2 == 1 if alternate else i % 6 == 5 if gemma else i % 4 == 0  # all positions
        windowed = width > 0 and not seen
        window = width if windowed else None
        before = x
        a = normed(x, p + "attn_norm")
        q, k = projected(a, p + "attn_q", n_head), projected(a, p + "attn_k", n_head_kv)
        if gemma or oss or not width or windowed:
            q, k = (
                rotate(y, model, interleaved=interleaved, window=model.arch == "gemma3" and windowed)
                for y in (q, k)
            )
        v = projected(a, p + "attn_v", n_head_kv)
        attention = (
            attend(q, k, v, window, model.get(p + "attn_sinks.weight"), cap)
            @ model[p + "attn_output.weight"].T
        )
        if model.get(p + "attn_output.bias") is not None:
            attention = attention + model[p + "attn_output.bias"]
        if model.arch in ("gpt-oss", "glm4moe"):  # their name for the norm before the feed-forward
            x = x + attention
            h = rms_norm(x, model[p + "post_attention_norm.weight"], eps)
        else:
            x = x + after(attention, p + "post_attention_norm")
            h = normed(x, p + "ffn_norm")
        if model.key("expert_count", 0) and i >= int(model.key("leading_dense_block_count", 0)):
            early = before if model.arch == "smallthinker" else None
            x = x + experts(model, i, h, how, trace, early)
        else:
            x = x + after(ffn(model, i, h, x, how, trace), p + "post_ffw_norm")
    return normed(x, "output_norm")


def falcon(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Attention and FFN side by side on the block's input, which is also what the predictor sees."""
    eps = float(model.key("attention.layer_norm_epsilon"))
    n_head = int(model.key("attention.head_count"))
    n_head_kv = int(model.key("attention.head_count_kv", n_head))

    def norm(x: Array, name: str) -> Array:
        return layer_norm(x, model[f"{name}.weight"], model[f"{name}.bias"], eps)

    x = model["token_embd.weight"][tokens]
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        for_ffn = norm(x, p + "attn_norm")
        for_attention = for_ffn if model.get(p + "attn_norm_2.weight") is None else norm(x, p + "attn_norm_2")
        qkv = heads(for_attention @ model[p + "attn_qkv.weight"].T, n_head + 2 * n_head_kv)
        q, k, v = np.split(qkv, (n_head, n_head + n_head_kv), axis=1)
        q, k = rotate(q, model, interleaved=False), rotate(k, model, interleaved=False)
        attention = attend(q, k, v) @ model[p + "attn_output.weight"].T
        x = x + attention + ffn(model, i, for_ffn, x, how, trace)
    return norm(x, "output_norm")


def olmo2(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Norms behind attention and FFN, none before them; norms over all of q and of k. OLMo 3: three layers
    with a window, whose rotation nothing stretches, then a full one."""
    eps = float(model.key("attention.layer_norm_rms_epsilon"))
    n_head, n_head_kv = (int(model.key(f"attention.head_count{kind}")) for kind in ("", "_kv"))
    width = int(model.key("attention.sliding_window", 0))
    x = model["token_embd.weight"][tokens]
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        near = width > 0 and i % 4 != 3
        q, k = (
            rotate(
                heads(rms_norm(x @ model[f"{p}{name}.weight"].T, model[f"{p}{name}_norm.weight"], eps), n),
                model,
                interleaved=False,
                window=near,
            )
            for name, n in (("attn_q", n_head), ("attn_k", n_head_kv))
        )
        v = heads(x @ model[p + "attn_v.weight"].T, n_head_kv)
        attention = attend(q, k, v, width if near else None) @ model[p + "attn_output.weight"].T
        x = x + rms_norm(attention, model[p + "post_attention_norm.weight"], eps)
        x = x + rms_norm(ffn(model, i, x, x, how, trace), model[p + "post_ffw_norm.weight"], eps)
    return np.asarray(rms_norm(x, model["output_norm.weight"], eps))


LATENT_EPS = 1e-6
"""Transformers' DeepseekV2RMSNorm and DeepseekV3RMSNorm of latents are given none."""


def deepseek2(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Latent attention as it was trained: keys and values of all heads are made of a position's latent.
    YaRN is in the scale of the scores."""
    eps = float(model.key("attention.layer_norm_rms_epsilon"))
    n_head, n_rot = int(model.key("attention.head_count")), int(model.key("rope.dimension_count"))
    rank, n_layer = int(model.key("attention.kv_lora_rank")), int(model.key("block_count"))
    grown = math.log(float(model.key("rope.scaling.factor", 1.0)))
    scale = (1 + float(model.key("rope.scaling.yarn_log_multiplier", 0.0)) * grown) ** 2

    def rotated(y: Array) -> Array:
        _, magnitude = frequencies(model, n_rot, window=False)
        return np.asarray(rotate(y, model, interleaved=True) / magnitude)

    x = model["token_embd.weight"][tokens]
    for i in range(n_layer - int(model.key("nextn_predict_layers", 0))):
        p = f"blk.{i}."
        a = rms_norm(x, model[p + "attn_norm.weight"], eps)
        if model.get(p + "attn_q_a.weight") is None:
            q = heads(a @ model[p + "attn_q.weight"].T, n_head)
        else:
            low = rms_norm(a @ model[p + "attn_q_a.weight"].T, model[p + "attn_q_a_norm.weight"], LATENT_EPS)
            q = heads(low @ model[p + "attn_q_b.weight"].T, n_head)
        n_nope = q.shape[2] - n_rot
        latent, k_rot = np.split(a @ model[p + "attn_kv_a_mqa.weight"].T, [rank], axis=1)
        latent = rms_norm(latent, model[p + "attn_kv_a_norm.weight"], LATENT_EPS)
        both = model.get(p + "attn_kv_b.weight")
        if both is None:
            k = np.einsum("tc,hcn->thn", latent, model[p + "attn_k_b.weight"])
            v = np.einsum("tc,hvc->thv", latent, model[p + "attn_v_b.weight"])
        else:  # files from before absorption
            k, v = np.split(heads(latent @ both.T, n_head), [n_nope], axis=2)
        shared = np.repeat(rotated(k_rot[:, None]), n_head, axis=1)
        q = np.concatenate([q[..., :n_nope], rotated(q[..., n_nope:])], axis=2) * scale
        attention = attend(q, np.concatenate([k, shared], axis=2), v)
        x = x + attention @ model[p + "attn_output.weight"].T
        h = rms_norm(x, model[p + "ffn_norm.weight"], eps)
        dense = i < int(model.key("leading_dense_block_count", 0)) or not model.key("expert_count", 0)
        x = x + (ffn(model, i, h, x, how, trace) if dense else experts(model, i, h, how, trace))
    return rms_norm(x, model["output_norm.weight"], eps)


def cohere2(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Attention and FFN side by side behind one LayerNorm without bias; three layers with a window and
    rotation, then one with neither; logits are scaled."""
    eps = float(model.key("attention.layer_norm_epsilon"))
    n_head, n_head_kv = (int(model.key(f"attention.head_count{kind}")) for kind in ("", "_kv"))
    zero = np.zeros(int(model.key("embedding_length")))
    x = model["token_embd.weight"][tokens]
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        a = layer_norm(x, model[p + "attn_norm.weight"], zero, eps)
        q, k, v = (
            heads(a @ model[f"{p}attn_{name}.weight"].T, n)
            for name, n in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv))
        )
        window = None
        if i % 4 != 3:
            window = int(model.key("attention.sliding_window"))
            q, k = rotate(q, model, interleaved=True), rotate(k, model, interleaved=True)
        attention = attend(q, k, v, window) @ model[p + "attn_output.weight"].T
        x = x + attention + ffn(model, i, a, x, how, trace)
    return layer_norm(x, model["output_norm.weight"], zero, eps) * float(model.key("logit_scale"))


def gemma4(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Layers with a window and full ones, whose heads are of another size and rotate with other frequencies;
    the last ones may use K and V of the last earlier layer of their kind. Norms before and behind blocks and
    over heads, of v without weight; where there is no v, it is what k is made of. A gate lets a token's
    embedding for the layer into the stream, and a number scales what a layer leaves."""
    eps = float(model.key("attention.layer_norm_rms_epsilon"))
    n_head, n_layer = int(model.key("attention.head_count")), int(model.key("block_count"))
    kv: dict[bool, tuple[Array, Array]] = {}
    first_shared = n_layer - int(model.key("attention.shared_kv_layers"))

    def per_layer(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, list) else value

    x = model["token_embd.weight"][tokens]
    x = x * math.sqrt(x.shape[1])
    n = int(model.key("embedding_length_per_layer_input"))
    own = None
    if n:
        said = heads(model["per_layer_token_embd.weight"][tokens], n_layer) * math.sqrt(n)
        made = heads(x @ model["per_layer_model_proj.weight"].T / math.sqrt(x.shape[1]), n_layer)
        own = (said + rms_norm(made, model["per_layer_proj_norm.weight"], eps)) / math.sqrt(2)
    for i in range(n_layer):
        p = f"blk.{i}."
        near = bool(model.key("attention.sliding_window_pattern")[i])
        size = int(model.key("attention.key_length_swa" if near else "attention.key_length"))
        n_kv = int(per_layer(model.key("attention.head_count_kv"), i))
        a = rms_norm(x, model[p + "attn_norm.weight"], eps)

        def turned(y: Array, name: str, near: bool = near) -> Array:
            return rotate(rms_norm(y, model[name], eps), model, interleaved=False, window=near)

        q = turned(heads(a @ model[p + "attn_q.weight"].T, n_head), p + "attn_q_norm.weight")
        assert q.shape[2] == size
        if i < first_shared:
            k = heads(a @ model[p + "attn_k.weight"].T, n_kv)
            weight = model.get(p + "attn_v.weight")
            v = k if weight is None else heads(a @ weight.T, n_kv)
            kv[near] = turned(k, p + "attn_k_norm.weight"), rms_norm(v, np.ones(size), eps)
        window = int(model.key("attention.sliding_window")) if near else None
        attention = attend(q, *kv[near], window, scale=1.0) @ model[p + "attn_output.weight"].T
        x = x + rms_norm(attention, model[p + "post_attention_norm.weight"], eps)
        h = rms_norm(x, model[p + "ffn_norm.weight"], eps)
        x = x + rms_norm(ffn(model, i, h, x, how, trace), model[p + "post_ffw_norm.weight"], eps)
        if own is not None:
            gate = how.act(x @ model[p + "inp_gate.weight"].T) * own[:, i]
            x = x + rms_norm(gate @ model[p + "proj.weight"].T, model[p + "post_norm.weight"], eps)
        x = x * model[p + "layer_output_scale.weight"]
    return rms_norm(x, model["output_norm.weight"], eps)


def llama4(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Three layers that see a chunk, with norms of q and k behind their rotation, then one that sees all,
    with q scaled by position. In some layers a mixture: the best expert reads its input times its sigmoid,
    and another one reads what it is."""
    eps = float(model.key("attention.layer_norm_rms_epsilon"))
    n_head, n_head_kv = (int(model.key(f"attention.head_count{kind}")) for kind in ("", "_kv"))
    x = model["token_embd.weight"][tokens]
    n, chunk = len(x), int(model.key("attention.sliding_window"))
    position = np.arange(n)

    def gated(x: Array, p: str, suffix: str, e: Any = ...) -> Array:
        gate, up, down = (model[f"{p}ffn_{name}{suffix}.weight"][e] for name in ("gate", "up", "down"))
        return np.asarray((how.act(x @ gate.T) * (x @ up.T)) @ down.T)

    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        a = rms_norm(x, model[p + "attn_norm.weight"], eps)
        q, k, v = (
            heads(a @ model[f"{p}attn_{name}.weight"].T, size)
            for name, size in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv))
        )
        if i % 4 == 3:
            turns = np.floor((position + 1) / float(model.key("attention.temperature_length")))
            scale = 1 + float(model.key("attention.temperature_scale")) * np.log1p(turns)
            attention = attend(q * scale[:, None, None], k, v)
        else:
            one = np.ones(q.shape[2])
            q, k = (rms_norm(rotate(y, model, interleaved=True), one, eps) for y in (q, k))
            attention = np.concatenate(
                [attend(q[c : c + chunk], k[c : c + chunk], v[c : c + chunk]) for c in range(0, n, chunk)]
            )
        x = x + attention @ model[p + "attn_output.weight"].T
        h = rms_norm(x, model[p + "ffn_norm.weight"], eps)
        if (i + 1) % int(model.key("interleave_moe_layer_step")):
            x = x + ffn(model, i, h, x, how, trace)
            continue
        logits = h @ model[p + "ffn_gate_inp.weight"].T
        if trace is not None:
            trace.routers.append(logits)
        out = gated(h, p, "_shexp")
        for t, e in enumerate(logits.argmax(axis=1)):
            out[t] += gated(h[t] / (1 + np.exp(-logits[t, e])), p, "_exps", e)
        x = x + out
    return rms_norm(x, model["output_norm.weight"], eps)


def opt(model: Model, tokens: Array, how: Ffn, trace: Trace | None) -> Array:
    """Learned positions that start at row 2, biases everywhere, LayerNorm with eps 1e-5."""
    eps = 1e-5
    n_head = int(model.key("attention.head_count"))

    def linear(x: Array, name: str) -> Array:
        return np.asarray(x @ model[f"{name}.weight"].T + model[f"{name}.bias"])

    def norm(x: Array, name: str) -> Array:
        return layer_norm(x, model[f"{name}.weight"], model[f"{name}.bias"], eps)

    x = model["token_embd.weight"][tokens] + model["position_embd.weight"][2 : 2 + len(tokens)]
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        a = norm(x, p + "attn_norm")
        q, k, v = (heads(linear(a, p + f"attn_{name}"), n_head) for name in "qkv")
        x = x + linear(attend(q, k, v), p + "attn_output")
        x = x + ffn(model, i, norm(x, p + "ffn_norm"), x, how, trace)
    return norm(x, "output_norm")


def forward(
    model: Model,
    tokens: Any,
    *,
    predicted: bool = False,
    n_dense: int | Array = 0,
    threshold: float | Sequence[float] | None = None,
    activation: str | None = None,
    trace: Trace | None = None,
) -> Array:
    """Logits [n_tokens, n_vocab] of one sequence from position 0.

    predicted: only neurons with score >= threshold count; the threshold, or that of each layer, is the file's
    unless given, 0 without either. The first n_dense tokens, or those that a mask [n_tokens] names, use all
    neurons even so. Otherwise all count, which is both `dense` and `exact`. activation overrides the file's.
    """
    if model.arch not in ARCHITECTURES:
        raise ValueError(f"no reference for {model.arch}")
    if threshold is None:
        threshold = model.meta.get(
            "powerinfer.sparse_thresholds", model.meta.get("powerinfer.sparse_threshold", 0.0)
        )
    n_layer = int(model.key("block_count"))
    how = Ffn(
        activation or default_activation(model),
        float(model.meta.get("powerinfer.hidden_act_threshold", 0.0)),
        np.broadcast_to(np.asarray(threshold, np.float64), n_layer) if predicted else None,
        np.arange(len(tokens)) < n_dense if isinstance(n_dense, int) else n_dense,
    )
    body = {
        "falcon": falcon,
        "cohere2": cohere2,
        "olmo2": olmo2,
        "gemma4": gemma4,
        "llama4": llama4,
        "opt": opt,
        "deepseek2": deepseek2,
    }.get(model.arch, llama)
    if model.arch in RECURRENT:
        body = reference_recurrent.forward
    x = body(model, np.asarray(tokens, dtype=np.int64), how, trace)
    output = model.get("output.weight")
    logits = x @ (model["token_embd.weight"] if output is None else output).T
    return np.asarray(soft_capped(logits, float(model.key("final_logit_softcapping", 0.0))))


def greedy(model: Model, prompt: Any, n: int, **how: Any) -> list[int]:
    """The n most likely tokens after the prompt, one at a time; `how` is for `forward`."""
    tokens = [int(token) for token in prompt]
    for _ in range(n):
        tokens.append(int(np.argmax(forward(model, tokens, **how)[-1])))
    return tokens[-n:] if n else []


def relative_error(a: Any, b: Any) -> float:
    """||a - b|| / ||b|| over all entries, in float64."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape} differ")
    return float(np.sqrt(np.sum((a - b) ** 2) / np.sum(b**2)))
