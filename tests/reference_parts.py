"""What the reference's forward passes are made of (reference.py): files, norms, rotation, attention, the
feed-forward and mixtures of experts, in float64."""

from __future__ import annotations

import math
import tempfile
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
