"""The forward pass of every architecture in float64, written for reading: what the engine is held to.

Whole sequences at once, full attention, no cache, no blocks, no kernels; it shares no code with the
engine. `load` reads a GGUF or PowerInfer file through the gguf package and dequantises everything;
`forward` returns the logits of every position, and per layer, when asked, which neurons were predicted
and which were active.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, quants
from numpy.typing import NDArray

Array = NDArray[Any]

RECURRENT = (
    "lfm2",
    "lfm2moe",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
)
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


@dataclass(frozen=True)
class Model:
    """Metadata and float64 tensors of a file; sparse: its magic is PWRI, it has a predictor per layer."""

    meta: dict[str, Any]
    tensors: dict[str, Array]
    sparse: bool

    @property
    def arch(self) -> str:
        return str(self.meta["general.architecture"])

    def key(self, name: str, default: Any = None) -> Any:
        """Value of `{arch}.{name}`; without a default the key must be there."""
        value = self.meta.get(f"{self.arch}.{name}", default)
        if value is None:
            raise KeyError(f"{self.arch}.{name}")
        return value

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]

    def get(self, name: str) -> Array | None:
        return self.tensors.get(name)


@dataclass
class LayerTrace:
    """What one layer's FFN did; every array is [n_tokens, n_ff] but the inputs.

    scores: predictor scores, or None without a predictor in use; predicted: score >= threshold (all True
    without one); gated: predicted and the activated gate (of an ungated FFN: the activated up) is not zero;
    active: what is multiplied with its down row, which is hidden, is not zero. predictor_input and ffn_input:
    [n_tokens, n_embd], the latter after its norm.
    """

    scores: Array | None
    predicted: Array
    gated: Array
    active: Array
    hidden: Array
    predictor_input: Array
    ffn_input: Array


@dataclass
class Trace:
    """Filled by `forward`, one entry per layer."""

    layers: list[LayerTrace] = field(default_factory=list)
    routers: list[Array] = field(default_factory=list)
    """[n_tokens, n_expert] products of each layer's router, where a layer has one."""


# ---- files -------------------------------------------------------------------------------------------------


def load(path: Path | str) -> Model:
    """Read one file whole. gguf refuses the PowerInfer magic, so it gets a copy with the usual one."""
    raw = Path(path).read_bytes()
    sparse = raw[:4] == b"PWRI"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model.gguf"
        copy.write_bytes(b"GGUF" + raw[4:])
        reader = GGUFReader(copy)
        meta = {name: one.contents() for name, one in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {}
        for tensor in reader.tensors:
            rows = quants.dequantize(tensor.data, tensor.tensor_type)
            tensors[tensor.name] = np.array(rows, dtype=np.float64).reshape(tensor.shape[::-1])
    return Model(meta, tensors, sparse)


# ---- pieces ------------------------------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + eps) * weight + bias)


def relu(x: Array, threshold: float = 0.0) -> Array:
    """What exceeds the threshold; with one above 0 this is ProSparse's FATReLU."""
    return np.where(x > threshold, x, 0.0)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """The exact one, through the error function."""
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))))


def gelu_tanh(x: Array) -> Array:
    """GELU's approximation by tanh."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def frequencies(model: Model, head_dim: int, *, window: bool) -> tuple[Array, float]:
    """Rotation per position of each pair of a head, and the factor that yarn puts on q and k.

    window: of a layer that sees a window only. It has a base of its own, and nothing stretches it.
    """
    dim = int(model.key("rope.dimension_count", head_dim))
    if window:
        dim = int(model.key("rope.dimension_count_swa", dim))
    if window:
        return float(model.key("rope.freq_base_swa")) ** (-np.arange(0, dim, 2) / dim), 1.0
    base = float(model.key("rope.freq_base", 10000.0))
    freq = base ** (-np.arange(0, dim, 2) / dim)
    divisors = model.get("rope_freqs.weight")  # Llama 3.1
    if divisors is not None:
        freq = freq / divisors
    kind = model.key("rope.scaling.type", "none")
    if kind == "none":
        return freq, 1.0
    factor = float(model.key("rope.scaling.factor"))
    if kind == "linear":
        return freq / factor, 1.0
    if kind != "yarn":
        raise ValueError(f"unknown rope scaling {kind}")

    # YaRN (arXiv 2309.00071): pairs that turn more than beta_fast times within the original context keep
    # their frequency, those that turn less than beta_slow times are interpolated, a ramp between.
    n_ctx_orig = int(model.key("rope.scaling.original_context_length"))

    def pair_turning(times: float) -> float:
        return dim * math.log(n_ctx_orig / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(32.0), pair_turning(1.0)
    if model.arch != "gpt-oss":
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return freq * (1 - ramp) + freq / factor * ramp, 1 + 0.1 * math.log(factor)


def rotate(x: Array, model: Model, *, interleaved: bool, window: bool = False) -> Array:
    """Rotate [n_tokens, n_head, head_dim] by position: pairs (2i, 2i+1), or (i, i + dim/2) as in NeoX."""
    freq, scale = frequencies(model, x.shape[-1], window=window)
    angle = np.arange(x.shape[0])[:, None, None] * freq
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    half, out = len(freq), np.array(x)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def soft_capped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def attend(
    q: Array,
    k: Array,
    v: Array,
    window: int | None = None,
    sinks: Array | None = None,
    cap: float = 0.0,
    scale: float | None = None,
) -> Array:
    """Causal attention of q [n, n_head, d] over k, v [n, n_head_kv, d] -> [n, n_head * d].

    v may be of another d. window: how many of the last positions are seen, the token's own included. sinks:
    of each head a score of a position without a value. cap: of scores, by tanh; 0: none. scale: of scores;
    None: 1 / sqrt(d).
    """
    n, n_head, d = q.shape
    shared = n_head // k.shape[1]
    seen = np.tri(n, dtype=bool)
    if window is not None:
        seen &= ~np.tri(n, k=-window, dtype=bool)
    out = np.empty((n, n_head, v.shape[2]))
    for h in range(n_head):  # one by one: the scores of all heads together would be larger than any cache
        scores = soft_capped(q[:, h] @ k[:, h // shared].T * (scale or 1 / math.sqrt(d)), cap)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((n, 1), sinks[h])], axis=1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = weights[:, :n] @ v[:, h // shared] / weights.sum(axis=-1, keepdims=True)
    return out.reshape(n, -1)


def heads(x: Array, n_head: int) -> Array:
    return np.asarray(x.reshape(x.shape[0], n_head, -1))


# ---- the FFN -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ffn:
    """How the FFN is run: activation by name, and the threshold when the predictor decides."""

    activation: str
    activation_threshold: float
    predictor_thresholds: Array | None  # one of each layer
    dense: Array  # of each token, whether it uses all neurons in any case

    def act(self, x: Array) -> Array:
        if self.activation in ("relu", "drelu"):
            return relu(x, self.activation_threshold)
        if self.activation == "relu2":
            return np.square(relu(x))
        if self.activation == "clamped":  # up is clamped, too
            gate = np.minimum(x, 7)
            return np.asarray(gate / (1 + np.exp(-1.702 * gate)))
        return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[self.activation](x)


def ffn(model: Model, layer: int, x: Array, predictor_input: Array, how: Ffn, trace: Trace | None) -> Array:
    """FFN output for its normalised input x; neurons that are not predicted contribute nothing at all."""
    p = f"blk.{layer}."
    scores = None
    predicted = np.ones((x.shape[0], model[p + "ffn_up.weight"].shape[0]), dtype=bool)
    if how.predictor_thresholds is not None:
        scores = relu(predictor_input @ model[p + "fc1.weight"].T) @ model[p + "fc2.weight"].T
        predicted = scores >= how.predictor_thresholds[layer]
        predicted[how.dense] = True

    up = x @ model[p + "ffn_up.weight"].T
    up_bias = model.get(p + "ffn_up.bias")
    if up_bias is not None:
        up = up + up_bias
    gate = model.get(p + "ffn_gate.weight")
    if gate is None:
        first = hidden = how.act(up)
    else:
        first = how.act(x @ gate.T)
        hidden = first * (relu(up) if how.activation == "drelu" else up)
    hidden = np.where(predicted, hidden, 0.0)

    down_t, name = model.get(p + "ffn_down_t.weight"), "ffn_down_t"
    if down_t is None:
        down_t, name = model[p + "ffn_down.weight"].T, "ffn_down"
    out = hidden @ down_t
    down_bias = model.get(p + f"{name}.bias")
    if down_bias is not None:
        out = out + down_bias
    if trace is not None:
        gated = predicted & (first != 0)
        trace.layers.append(LayerTrace(scores, predicted, gated, hidden != 0, hidden, predictor_input, x))
    return np.asarray(out)


def in_best_groups(model: Model, rank: Array, n_best: int) -> Array:
    """rank [n_expert], -inf for experts that are not in the groups whose n_best best add up to the most."""
    groups = rank.reshape(int(model.key("expert_group_count", 1)), -1)
    best = np.argsort(-np.sort(groups, axis=1)[:, -n_best:].sum(axis=1), kind="stable")
    out = np.full_like(groups, -np.inf)
    for g in best[: int(model.key("expert_group_used_count", len(groups)))]:
        out[g] = groups[g]
    return out.ravel()


def experts(
    model: Model, layer: int, x: Array, how: Ffn, trace: Trace | None, router_input: Array | None = None
) -> Array:
    """A mixture of experts: the best n_used of each token by the router's products with its input, each
    weighted by the softmax over all of them or by its sigmoid; and the expert of all tokens, if there is."""
    p = f"blk.{layer}."
    logits = (x if router_input is None else router_input) @ model[p + "ffn_gate_inp.weight"].T
    if model.get(p + "ffn_gate_inp.bias") is not None:
        logits = logits + model[p + "ffn_gate_inp.bias"]
    bias = model.get(p + "exp_probs_b.bias")
    by_sigmoid = model.arch in ("glm4moe", "lfm2moe", "nemotron_h_moe")
    usual = by_sigmoid or (model.arch == "deepseek2" and bias is not None)
    sigmoids = int(model.key("expert_gating_func", 1 + usual)) == 2
    always = ("llama", "qwen3moe", "smallthinker", "gpt-oss", "glm4moe")  # gpt-oss: softmax of the chosen
    normed = bool(model.key("expert_weights_norm", model.arch in (*always, *RECURRENT)))
    n_best = 1 if model.arch == "deepseek2" and not sigmoids else 2
    out = np.zeros_like(x)

    def expert(suffix: str, token: Array, e: Any = ...) -> Array:
        def product(name: str, x: Array) -> Array:
            bias = model.get(f"{p}ffn_{name}_{suffix}.bias")
            by_neuron = model.get(f"{p}ffn_{name}_t_{suffix}.weight")
            w = model[f"{p}ffn_{name}_{suffix}.weight"][e] if by_neuron is None else by_neuron[e].T
            y = w @ x
            return np.asarray(y if bias is None else y + bias[e])

        up = product("up", token)
        if model.get(f"{p}ffn_gate_{suffix}.weight") is None:  # Nemotron-H's
            return product("down", how.act(up))
        gate = product("gate", token)
        if how.activation == "drelu":
            up = relu(up)
        if how.activation == "clamped":
            up = np.clip(up, -7, 7) + 1
        return product("down", how.act(gate) * up)

    for t, token in enumerate(x):
        weights = np.exp(logits[t] - logits[t].max())
        weights = 1 / (1 + np.exp(-logits[t])) if sigmoids else weights / weights.sum()
        rank = in_best_groups(model, weights if bias is None else weights + bias, n_best)
        chosen = np.argsort(-rank, kind="stable")[: int(model.key("expert_used_count"))]
        scale = float(model.key("expert_weights_scale", 1.0)) / (weights[chosen].sum() if normed else 1)
        for e in chosen:
            out[t] += scale * weights[e] * expert("exps", token, e)
        if model.get(p + "ffn_up_shexp.weight") is not None:
            router = model.get(p + "ffn_gate_inp_shexp.weight")
            share = 1.0 if router is None else 1 / (1 + math.exp(-float(router @ token)))
            out[t] += share * expert("shexp", token)
    if trace is not None:
        trace.routers.append(logits)
    return out


def default_activation(model: Model) -> str:
    """What the file says, else what its architecture means; PowerInfer files are ReLU models."""
    named = model.meta.get("powerinfer.hidden_act")
    if named is not None:
        return str(named)
    if model.arch == "bamboo":
        return "drelu"
    if model.arch in ("arcee", "nemotron"):
        return "relu2"
    if model.arch == "opt" or model.sparse:
        return "relu"
    own = {
        "falcon": "gelu",
        "smallthinker": "relu",
        "gpt-oss": "clamped",
        "nemotron_h": "relu2",
        "nemotron_h_moe": "relu2",
    }
    return "gelu_tanh" if model.arch.startswith("gemma") else own.get(model.arch, "silu")


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
            low = rms_norm(a @ model[p + "attn_q_a.weight"].T, model[p + "attn_q_a_norm.weight"], eps)
            q = heads(low @ model[p + "attn_q_b.weight"].T, n_head)
        n_nope = q.shape[2] - n_rot
        latent, k_rot = np.split(a @ model[p + "attn_kv_a_mqa.weight"].T, [rank], axis=1)
        latent = rms_norm(latent, model[p + "attn_kv_a_norm.weight"], eps)
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
        body = importlib.import_module("tests.reference_recurrent").forward  # it needs this module
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
