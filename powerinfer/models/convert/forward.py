"""The checkpoint's own answer: a forward pass in numpy float32 over the published weights.

It shares nothing with the engine or with what the conversion does to rows and rotation: weights are
taken as they are published, and the formulas are those of the models' publications. Layer by layer, for all
prompts together, so that every weight is read once; a large matrix in pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .checkpoint import Checkpoint
from .gpt_oss import Packed
from .hyper import Experts, Hyper
from .layout import expert_names
from .rounding import rounded

Array = npt.NDArray[np.float32]

_DOWN = ("mlp.down_proj", "mlp.dense_4h_to_h", ".fc2")

_EXPERT_DOWN = re.compile(r"\.experts\.\d+\.(w2|down|down_proj)$")

_erf = np.frompyfunc(math.erf, 1, 1)


class SourceModel:
    """A checkpoint that can be computed. Slow: for a few short prompts."""

    def __init__(
        self, checkpoint: Checkpoint, hyper: Hyper, *, type: str = "F32", down_transposed: bool = False
    ) -> None:
        """type: compute with the matrices as this format rounds them. down_transposed: its blocks run along
        the other dimension of the down projection."""
        self._type = type
        self._down_transposed = down_transposed
        self._checkpoint = checkpoint
        self._hyper = hyper
        prefixes = {"falcon": ("transformer.",), "opt": ("model.decoder.", "decoder.")}
        names = prefixes.get(hyper.family, ("model.",))
        self._prefix = next((p for p in names if any(n.startswith(p) for n in checkpoint)), names[0])
        self._rotation = _frequencies(hyper)

    def logits(
        self, prompts: Sequence[Sequence[int]], *, progress: Callable[[int, int], object] | None = None
    ) -> list[Array]:
        """Of each prompt the logits [n_tokens, n_vocab] of all its tokens.

        progress: called as progress(layers done, layers in all).
        """
        h = self._hyper
        layer = {"falcon": self._falcon_layer, "opt": self._opt_layer}.get(h.family, self._llama_layer)
        lengths = [len(prompt) for prompt in prompts]
        bounds = np.cumsum(lengths)[:-1]
        positions = np.concatenate([np.arange(n) for n in lengths])
        embedding = {"falcon": "word_embeddings"}.get(h.family, "embed_tokens")
        x = self._rows(embedding, np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts]))
        if h.family == "opt":
            x = x + self._rows("embed_positions", positions + 2)
        for i in range(h.n_layer):
            x = layer(i, x, positions, bounds)
            if progress is not None:
                progress(i + 1, h.n_layer + 1)
        final = {"falcon": "ln_f", "opt": "final_layer_norm"}.get(h.family, "norm")
        x = self._norm(final, x)
        head = "lm_head"
        if head + ".weight" not in self._checkpoint:
            head = self._prefix + embedding
        out = self._linear(head, x, prefix="")
        if progress is not None:
            progress(h.n_layer + 1, h.n_layer + 1)
        return np.split(out, bounds)

    # ---- the three kinds of layers

    def _llama_layer(self, i: int, x: Array, positions: npt.NDArray[np.int64], bounds: Array) -> Array:
        p = f"layers.{i}."
        normed = self._norm(p + "input_layernorm", x)
        q, k, v = (self._linear(f"{p}self_attn.{name}_proj", normed) for name in "qkv")
        if self._hyper.family == "olmoe":  # over all heads
            q = self._norm(p + "self_attn.q_norm", q)
            k = self._norm(p + "self_attn.k_norm", k)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self._hyper.family in ("qwen3", "qwen3moe") or self._hyper.head_norms:
            q = self._norm(p + "self_attn.q_norm", q)
            k = self._norm(p + "self_attn.k_norm", k)
        before, window = x, self._hyper.window_of(i)
        still = self._hyper.family == "smallthinker" and self._hyper.window and not window
        sinks = self._checkpoint.tensors.get(f"{self._prefix}{p}self_attn.sinks")
        attended = self._attention(
            q,
            k,
            v,
            positions,
            bounds,
            window=window,
            rotates=not still,
            sinks=None if sinks is None else sinks.floats(),
        )
        x = x + self._linear(p + "self_attn.o_proj", attended)
        normed = self._norm(p + "post_attention_layernorm", x)
        experts = self._hyper.experts_of(i)
        if experts is not None and self._hyper.family == "gpt-oss":
            return x + self._gpt_oss_mixture(experts, i, normed)
        if experts is not None:
            return x + self._mixture(experts, p, normed, before)
        return x + self._gated(p + "mlp.gate_proj", p + "mlp.up_proj", p + "mlp.down_proj", normed)

    def _gated(self, gate: str, up: str, down: str, x: Array) -> Array:
        """A gated feed-forward of matrices of these names."""
        opened, value = self._activate(self._linear(gate, x)), self._linear(up, x)
        if self._hyper.act == "drelu":
            value = np.maximum(value, 0)
        return self._linear(down, opened * value)

    def _mixture(self, experts: Experts, p: str, x: Array, before: Array) -> Array:
        """before: what the layer read, which SmallThinker's router reads."""
        names, early = expert_names(self._hyper), self._hyper.family == "smallthinker"
        # A file's router is of floats.
        products = self._linear(p + names.router, before if early else x, type="F32")
        weights = _sigmoid(products) if experts.is_sigmoid else _softmax(products)
        bias = self._checkpoint.tensors.get(f"{self._prefix}{p}{names.router}.e_score_correction_bias")
        score = weights if bias is None else weights + bias.floats()
        best = np.argsort(-score, axis=1, kind="stable")[:, : experts.n_used]
        chosen = np.take_along_axis(weights, best, axis=1)
        if experts.is_normed:
            chosen = chosen / chosen.sum(axis=1, keepdims=True)
        chosen = chosen * np.float32(experts.scale)
        out = np.zeros_like(x)
        for e in np.unique(best):
            tokens, rank = np.nonzero(best == e)
            one = p + names.expert % e
            made = self._gated(one + names.gate, one + names.up, one + names.down, x[tokens])
            out[tokens] += chosen[tokens, rank][:, None] * made
        if experts.n_ff_shared:
            is_glm = self._hyper.family == "glm4moe"
            one = p + ("mlp.shared_experts." if is_glm else "mlp.shared_expert.")
            shared = self._gated(one + "gate_proj", one + "up_proj", one + "down_proj", x)
            if not is_glm:
                shared *= _sigmoid(self._linear(p + "mlp.shared_expert_gate", x, type="F32"))
            out += shared
        return out

    def _gpt_oss_mixture(self, experts: Experts, i: int, x: Array) -> Array:
        """The weights are the softmax over the chosen; gate and up are clamped."""
        p = f"{self._prefix}layers.{i}.mlp.experts."
        products = self._linear(f"layers.{i}.mlp.router", x, type="F32")
        best = np.argsort(-products, axis=1, kind="stable")[:, : experts.n_used]
        chosen = _softmax(np.take_along_axis(products, best, axis=1))
        bias, down_bias = (
            self._checkpoint.tensors[f"{p}{name}_bias"].floats() for name in ("gate_up_proj", "down_proj")
        )
        out = np.zeros_like(x)
        for e in np.unique(best):
            tokens, rank = np.nonzero(best == e)
            both = x[tokens] @ self._expert(p + "gate_up_proj", int(e)).T + bias[e]
            gate, up = np.minimum(both[:, ::2], 7), np.clip(both[:, 1::2], -7, 7)
            hidden = np.asarray(gate * _sigmoid(np.float32(1.702) * gate) * (up + 1), np.float32)
            made = hidden @ self._expert(p + "down_proj", int(e)).T + down_bias[e]
            out[tokens] += chosen[tokens, rank][:, None] * made
        return out

    def _expert(self, name: str, e: int) -> Array:
        """[rows, cols] of one of gpt-oss's experts. In MXFP4 it stays as it is."""
        tensors = self._checkpoint.tensors
        if name + "_blocks" in tensors:
            packed = Packed(name, tensors[name + "_blocks"].view, tensors[name + "_scales"].view)
            return packed.floats(e)
        turned = np.ascontiguousarray(tensors[name].floats(e, 1)[0].T)
        return rounded(turned, self._type)

    def _falcon_layer(self, i: int, x: Array, positions: npt.NDArray[np.int64], bounds: Array) -> Array:
        h, p = self._hyper, f"h.{i}."
        attn_in = self._norm(p + ("ln_attn" if h.two_norms else "input_layernorm"), x)
        mlp_in = self._norm(p + "ln_mlp", x) if h.two_norms else attn_in
        fused = self._linear(p + "self_attention.query_key_value", attn_in)
        groups = fused.reshape(len(x), h.n_head_kv, h.n_head // h.n_head_kv + 2, h.d_head)
        q = groups[:, :, :-2].reshape(len(x), h.n_head, h.d_head)
        attended = self._attention(q, groups[:, :, -2], groups[:, :, -1], positions, bounds)
        hidden = self._activate(self._linear(p + "mlp.dense_h_to_4h", mlp_in))
        x = x + self._linear(p + "self_attention.dense", attended)
        return x + self._linear(p + "mlp.dense_4h_to_h", hidden)

    def _opt_layer(self, i: int, x: Array, positions: npt.NDArray[np.int64], bounds: Array) -> Array:
        p = f"layers.{i}."
        normed = self._norm(p + "self_attn_layer_norm", x)
        q, k, v = (self._heads(self._linear(f"{p}self_attn.{name}_proj", normed)) for name in "qkv")
        x = x + self._linear(p + "self_attn.out_proj", self._attention(q, k, v, positions, bounds))
        hidden = self._activate(self._linear(p + "fc1", self._norm(p + "final_layer_norm", x)))
        return x + self._linear(p + "fc2", hidden)

    # ---- their parts

    def _rows(self, name: str, numbers: npt.NDArray[np.int64]) -> Array:
        tensor = self._checkpoint.tensors[f"{self._prefix}{name}.weight"]
        return rounded(np.concatenate([tensor.floats(int(i), 1) for i in numbers]), self._type)

    def _linear(self, name: str, x: Array, *, prefix: str | None = None, type: str = "") -> Array:
        """x [n, cols] . weight [rows, cols] transposed, and the bias if there is one."""
        name = (self._prefix if prefix is None else prefix) + name
        weight = self._checkpoint.tensors[name + ".weight"]
        is_down = name.endswith(_DOWN) or _EXPERT_DOWN.search(name) is not None
        transposed = self._down_transposed and is_down
        out = np.empty((len(x), weight.shape[0]), np.float32)
        at = 0
        for chunk in weight.chunks():
            chunk = rounded(chunk, type or self._type, transposed=transposed)
            np.matmul(x, chunk.T, out=out[:, at : at + len(chunk)])
            at += len(chunk)
        if name + ".bias" in self._checkpoint:
            out += self._checkpoint.tensors[name + ".bias"].floats()
        return out

    def _norm(self, name: str, x: Array) -> Array:
        """Over the last dimension: LayerNorm where there is a bias, else RMSNorm."""
        name = self._prefix + name
        weight = self._checkpoint.tensors[name + ".weight"].floats()
        bias = self._checkpoint.tensors.get(name + ".bias")
        if bias is None:
            scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self._hyper.norm_eps))
            return np.asarray(x / scale * weight, np.float32)
        x = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self._hyper.norm_eps))
        return np.asarray(x / scale * weight + bias.floats(), np.float32)

    def _activate(self, x: Array) -> Array:
        act = self._hyper.act
        if act in ("relu", "drelu"):
            return np.where(x > self._hyper.act_threshold, x, np.float32(0))
        if act == "relu2":
            return np.square(np.where(x > 0, x, np.float32(0)))
        if act == "silu":
            return np.asarray(x / (1 + np.exp(-np.clip(x, -80, None))), np.float32)
        if act == "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
            return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)
        return np.asarray(0.5 * x * (1 + _erf(x / np.float32(math.sqrt(2))).astype(np.float32)), np.float32)

    def _heads(self, x: Array) -> Array:
        return x.reshape(len(x), -1, self._hyper.d_head)

    def _attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: npt.NDArray[np.int64],
        bounds: Array,
        *,
        window: int = 0,
        rotates: bool = True,
        sinks: Array | None = None,
    ) -> Array:
        """Causal, each prompt by itself. q [n, n_head, d], k and v [n, n_head_kv, d] to [n, n_head * d].

        window: positions that a token sees, its own among them; 0: all. sinks: of each head, one more score,
        which no value belongs to."""
        if rotates:
            q, k = self._rotate(q, positions), self._rotate(k, positions)
        share = q.shape[1] // k.shape[1]
        out = []
        for q1, k1, v1 in zip(np.split(q, bounds), np.split(k, bounds), np.split(v, bounds), strict=True):
            k1, v1 = np.repeat(k1, share, axis=1), np.repeat(v1, share, axis=1)
            scores = np.einsum("qhd,khd->hqk", q1, k1) / np.float32(math.sqrt(q.shape[2]))
            scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
            if window:
                scores[:, np.tril(np.ones(scores.shape[1:], bool), -window)] = -np.inf
            if sinks is not None:
                last = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
                scores = np.concatenate([scores, last], axis=2)
            weights = _softmax(scores)[..., : len(k1)]
            out.append(np.einsum("hqk,khd->qhd", weights, v1).reshape(len(q1), -1))
        return np.concatenate(out)

    def _rotate(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        """Pairs half a head apart, by position times frequency."""
        if self._rotation is None:
            return x
        n = self._hyper.d_rot
        if n and n < x.shape[-1]:  # the rest stays
            return np.concatenate([self._rotate(x[..., :n], positions), x[..., n:]], axis=-1)
        frequency, magnitude = self._rotation
        angles = positions[:, None, None] * frequency
        cos, sin = (np.asarray(f(angles) * magnitude, np.float32) for f in (np.cos, np.sin))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _softmax(x: Array) -> Array:
    """Over the last dimension."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float32)


def _frequencies(h: Hyper) -> tuple[npt.NDArray[np.float64], float] | None:
    """Radians per position of each pair, and what cos and sin are multiplied by."""
    rope = h.rope
    if rope is None:
        return None
    d = h.d_rot or h.d_head
    plain = 1 / rope.base ** (np.arange(0, d, 2) / d)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        turns = rope.n_ctx_orig * plain / (2 * math.pi)  # within the original context
        share = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
        return plain * share + plain / rope.factor * (1 - share), 1.0
    if rope.kind == "yarn":
        # The pairs that turn beta_fast and beta_slow times within the original context.
        first, last = (
            d * math.log(rope.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if not rope.exact:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, d - 1)
        share = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
        magnitude = rope.magnitude or 1 + 0.1 * math.log(rope.factor)
        return plain * (1 - share) + plain / rope.factor * share, magnitude
    return plain, 1.0
