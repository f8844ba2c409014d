"""Random mixtures of experts of published shapes, whose routers have the skew and locality that were asked
for. `make_model.py` calls this when it is given the name of such a shape.

What is planted: the product of a router with token t is, for expert e,

    skew * b_e + z_t,e        b_e ~ N(0, 1) drawn once for each layer and expert, z ~ N(0, 1)
    z_t = rho * z_(t-1) + sqrt(1 - rho^2) * noise

The first term comes from channel 0 of the residual stream, which is constant (every token's embedding has
it, nothing writes it): a router's row holds skew * b_e / CONSTANT there. The second is what the rest of the
row, a random direction, makes of the rest of the residual. With rho 0 that is the token's own embedding,
independent from token to token as long as tokens are random. With another rho, one layer's attention weighs
the positions before a token by rho^distance (q and k are the same for all tokens, and one pair of RoPE's
channels, which turns slowly, makes the score -A sin(omega * distance)), and writes the mean of what it reads
to channels that nothing else uses. That is an AR(1) process, whose variance is larger at the beginning of a
text, and routers behind it read those channels alone. A router that stands before that attention
(SmallThinker's first layers) reads the token itself.

So layers choose independently of each other, and a token of a text that repeats itself chooses alike. What a
layer adds to the residual is small, so that the law holds to the last layer; a guess at the next layer's
choice from this layer's residual is therefore better than real models allow.

Experts of ReLU models have thresholds at channel 0: a neuron is active for a share of the tokens, by a power
law with the mean that was asked for. Eight experts of one layer are drawn; the others are theirs with the
rows of gate and up shifted against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planted import (
    BLOCK,
    CONSTANT,
    END,
    Array,
    Tensor,
    file_keys,
    firing,
    normals,
    thresholds,
    types_of,
)

from powerinfer._engine import formats
from powerinfer._engine.session import Model, Session
from powerinfer.models.quantize import MIXTURES, find_mixture
from powerinfer.models.writer import GGUFWriter


@dataclass(frozen=True)
class Shape:
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_expert: int
    n_used: int
    n_ff: int
    """Of an expert."""
    n_vocab: int
    n_ctx: int
    rope_base: float
    n_ff_dense: int = 0
    """What feed_forward_length says; 0: n_ff."""
    window: int = 0
    """Positions; smallthinker: of three layers of four, the fourth has no RoPE; gpt-oss: of every other."""
    n_delta: int = 0
    """Heads of q and k of a gated delta net, which three layers of four are, with twice as many of v; their
    experts have one of all tokens beside them."""

    @property
    def is_relu(self) -> bool:
        return self.arch == "smallthinker"

    @property
    def has_early_router(self) -> bool:
        return self.arch == "smallthinker"

    @property
    def has_biases(self) -> bool:
        """Of attention, router and experts; all are 0. And sinks, norms and rotation as gpt-oss has them."""
        return self.arch == "gpt-oss"

    @property
    def has_head_norms(self) -> bool:
        return self.arch in ("qwen3moe", "glm4moe") or self.n_delta > 0

    @property
    def has_next(self) -> bool:
        """A layer behind the others guesses at a further token."""
        return self.arch == "glm4moe"

    @property
    def rotates_neighbours(self) -> bool:
        return self.arch == "llama"

    def is_delta(self, layer: int) -> bool:
        return self.n_delta > 0 and (layer + 1) % INTERVAL != 0

    @property
    def d_delta(self) -> int:
        """Values of all heads of q, or of k; of v twice as many."""
        return self.n_delta * D_DELTA

    @property
    def d_query(self) -> int:
        """Rows of q: heads of models with delta nets are gated."""
        return self.n_head * self.d_head * (2 if self.n_delta else 1)

    @property
    def state_layer(self) -> int:
        """Whose attention keeps z with rho: the first that knows positions."""
        return 1 if self.arch == "smallthinker" and self.window else 0

    @property
    def n_state(self) -> int:
        """Channels of what it keeps."""
        return min(self.n_head_kv * self.d_head, self.n_embd // 2 // BLOCK * BLOCK)

    def has_state(self, layer: int) -> bool:
        """Whether the router of that layer reads what that attention keeps."""
        return layer > self.state_layer if self.has_early_router else layer >= self.state_layer


INTERVAL = 4  # of so many layers the last attends
D_DELTA, N_CONV = 128, 4  # values of a delta net's head, tokens of its convolution

SHAPES = {
    "tiny-mixtral": Shape("llama", 2, 256, 4, 2, 64, 8, 2, 512, 512, 4096, 1e6),
    "tiny-qwen3moe": Shape("qwen3moe", 3, 256, 4, 2, 64, 32, 4, 256, 512, 4096, 1e6, 768),
    "tiny-smallthinker": Shape("smallthinker", 6, 256, 4, 2, 64, 16, 4, 256, 512, 4096, 1.5e6, 0, 512),
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 8, 2, 14336, 32000, 32768, 1e6),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6, 6144),
    "tiny-glm4moe": Shape("glm4moe", 3, 256, 4, 2, 64, 32, 4, 256, 512, 4096, 1e6, 768),
    # Of no published model: the sizes of qwen3-30b-a3b, with a head for a further token behind them.
    "glm-30b-a3b": Shape("glm4moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6, 6144),
    "tiny-qwen35moe": Shape("qwen35moe", 4, 256, 4, 2, 64, 32, 4, 256, 512, 4096, 1e7, n_delta=2),
    "tiny-qwen3next": Shape("qwen3next", 4, 256, 4, 2, 64, 32, 4, 256, 512, 4096, 1e7, n_delta=2),
    "qwen3.5-35b-a3b": Shape("qwen35moe", 40, 2048, 16, 2, 256, 256, 8, 512, 248320, 262144, 1e7, n_delta=16),
    "qwen3-next-80b-a3b": Shape(
        "qwen3next", 48, 2048, 16, 2, 256, 512, 10, 512, 151936, 262144, 1e7, n_delta=16
    ),
    "tiny-gpt-oss": Shape("gpt-oss", 4, 256, 4, 2, 64, 16, 4, 256, 512, 4096, 150000.0, 0, 128),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 131072, 150000.0, 0, 128),
    "smallthinker-4b": Shape("smallthinker", 32, 1536, 12, 2, 128, 32, 4, 768, 151936, 32768, 1.5e6),
    "smallthinker-21b": Shape(
        "smallthinker", 52, 2560, 28, 4, 128, 64, 6, 768, 151936, 16384, 1.5e6, 0, 4096
    ),
}

N_DRAWN = 8  # experts that are drawn
N_COUNTED = 8192  # tokens that counts are made of
SLOWEST = 5e-4  # of RoPE's angles, what the pair that knows distances turns by from one position to the next
STATISTICS = ("planted", "none", "wrong")


@dataclass(frozen=True)
class Law:
    """What routers do."""

    skew: float = 0.5
    rho: float = 0.0

    def biases(self, s: Shape, seed: np.random.SeedSequence) -> Array:
        """skew * b, [n_layer, n_expert]."""
        b = np.random.default_rng(seed).standard_normal((s.n_layer, s.n_expert))
        return (self.skew * b).astype(np.float32)


def counts_of(s: Shape, biases: Array, seed: np.random.SeedSequence) -> NDArray[np.uint32]:
    """[n_layer, n_expert]: how often N_COUNTED tokens choose each expert by this law."""
    rng = np.random.Generator(np.random.SFC64(seed))
    out = np.empty(biases.shape, np.uint32)
    for layer, bias in enumerate(biases):
        z = rng.standard_normal((N_COUNTED, s.n_expert), dtype=np.float32) + bias
        chosen = np.argpartition(-z, s.n_used - 1, axis=1)[:, : s.n_used]
        out[layer] = np.bincount(chosen.ravel(), minlength=s.n_expert)
    return out


# ---- matrices


def token_channels(s: Shape, law: Law) -> slice:
    """Channels that hold what is a token's own."""
    return slice(1, s.n_embd - s.n_state if law.rho else s.n_embd)


def size_of(s: Shape, law: Law, *, with_state: bool) -> float:
    """Root mean square of the residual."""
    own = token_channels(s, law)
    total = CONSTANT**2 + own.stop - own.start + (s.n_state if law.rho and with_state else 0)
    return math.sqrt(total / s.n_embd)


def router(s: Shape, law: Law, layer: int, bias: Array, rng: np.random.Generator) -> Array:
    """[n_expert, n_embd] of one layer."""
    with_state = bool(law.rho) and s.has_state(layer)
    reads = slice(s.n_embd - s.n_state, s.n_embd) if with_state else token_channels(s, law)
    n = reads.stop - reads.start
    out = np.zeros((s.n_expert, s.n_embd), np.float32)
    out[:, reads] = rng.standard_normal((s.n_expert, n)) / math.sqrt(n)
    out[:, 0] = bias / CONSTANT
    if not s.has_early_router:  # it reads what a norm has divided
        out *= size_of(s, law, with_state=s.state_layer <= layer)
    return out


def state_matrices(s: Shape, law: Law, seed: np.random.SeedSequence) -> Iterator[tuple[str, Array]]:
    """q, k, v and output of the attention that keeps z."""
    d, dh = s.n_embd, s.d_head
    scale = size_of(s, law, with_state=False)
    angles = s.rope_base ** (-np.arange(0, dh, 2) / dh)
    pair = int(np.abs(np.log(angles / SLOWEST)).argmin())
    first, second = (2 * pair, 2 * pair + 1) if s.rotates_neighbours else (pair, pair + dh // 2)
    size = score_size(s, law, float(angles[pair])) * scale / CONSTANT
    q, k = np.zeros((s.n_head, dh, d), np.float32), np.zeros((s.n_head_kv, dh, d), np.float32)
    q[:, first, 0], k[:, second, 0] = -size, size
    yield "state_q", q.reshape(-1, d)
    yield "state_k", k.reshape(-1, d)
    own = token_channels(s, law)
    v = normals(seed, s.n_head_kv * dh, d, scale / math.sqrt(own.stop - own.start))
    v[:, : own.start], v[:, own.stop :] = 0, 0
    yield "state_v", v
    output = np.zeros((d, s.n_head, dh), np.float32)
    gain = math.sqrt((1 + law.rho) / (1 - law.rho))  # a mean by rho^distance has less variance
    for i in range(s.n_state):
        output[d - s.n_state + i, i // dh * (s.n_head // s.n_head_kv), i % dh] = gain
    yield "state_output", output.reshape(d, -1)


def score_size(s: Shape, law: Law, angle: float) -> float:
    """What q and k must both be so that a score falls by -log(rho) from position to position."""
    return math.sqrt(-math.log(law.rho) / angle * math.sqrt(s.d_head))


def delta_shapes(s: Shape) -> dict[str, tuple[int, int]]:
    """Of a delta net's matrices; a file has ssm_ba or the two before it."""
    d, n = s.n_embd, 2 * s.n_delta
    rows = {
        "attn_qkv": 4 * s.d_delta,
        "attn_gate": 2 * s.d_delta,
        "ssm_alpha": n,
        "ssm_beta": n,
        "ssm_ba": 2 * n,
    }
    return {name: (count, d) for name, count in rows.items()} | {"ssm_out": (d, 2 * s.d_delta)}


def delta_tensors(s: Shape, p: str) -> list[Tensor]:
    """Those of a gated delta net."""
    left_out = ("ssm_ba",) if s.arch == "qwen35moe" else ("ssm_alpha", "ssm_beta")
    out = [
        Tensor(f"{p}{name}.weight", shape, name)
        for name, shape in delta_shapes(s).items()
        if name not in left_out
    ]
    n = 2 * s.n_delta
    return [
        *out,
        Tensor(f"{p}ssm_conv1d.weight", (4 * s.d_delta, N_CONV), value=0.5),
        Tensor(f"{p}ssm_a", (n,), value=-0.5),
        Tensor(f"{p}ssm_dt.bias", (n,), value=-1.0),
        Tensor(f"{p}ssm_norm.weight", (D_DELTA,), value=1.0),
    ]


def layer_matrices(
    s: Shape, law: Law, seed: np.random.SeedSequence, active: float, *, by_neuron: bool
) -> Iterator[tuple[str, Array]]:
    """The matrices that layers share, [rows, cols], one at a time; of experts those of all that are drawn."""
    seeds = seed.spawn(9)
    d, q, kv = s.n_embd, s.n_head * s.d_head, s.n_head_kv * s.d_head
    added = 0.3 / s.n_layer
    n = min(s.n_expert, N_DRAWN)
    written = token_channels(s, law)

    def writes(matrix: Array) -> Array:
        """A matrix whose output goes to a token's own channels alone: [..., d, cols]."""
        matrix[..., : written.start, :] = 0
        matrix[..., written.stop :, :] = 0
        return matrix

    yield "attn_q", normals(seeds[0], s.d_query, d, 1 / math.sqrt(d))
    yield "attn_k", normals(seeds[1], kv, d, 1 / math.sqrt(d))
    yield "attn_v", normals(seeds[2], kv, d, 1 / math.sqrt(d))
    yield "attn_output", writes(normals(seeds[3], d, q, added / math.sqrt(q)))
    if law.rho:
        yield from state_matrices(s, law, seeds[4])
    if s.n_delta:
        of_delta = seeds[4].spawn(8)
        for i, name in enumerate(("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_ba")):
            yield name, normals(of_delta[i], delta_shapes(s)[name][0], d, 1 / math.sqrt(d))
        yield "ssm_out", writes(normals(of_delta[5], d, 2 * s.d_delta, added / math.sqrt(2 * s.d_delta)))
        yield "ffn_gate_shexp", normals(of_delta[6], s.n_ff, d, 1 / math.sqrt(d))
        yield "ffn_down_shexp", writes(normals(of_delta[7], d, s.n_ff, added / math.sqrt(s.n_ff)))
    gate = normals(seeds[5], n * s.n_ff, d, 1 / math.sqrt(d))
    if s.is_relu:
        rng = np.random.default_rng(seeds[6])
        t = np.concatenate([thresholds(firing(rng, s.n_ff, active)) for _ in range(n)])
        gate[:, 0] = -t / CONSTANT
        gate[:, 1:BLOCK] = 0  # a block's step is that of its largest weight
    yield "ffn_gate_exps", gate
    del gate
    yield "ffn_up_exps", normals(seeds[7], n * s.n_ff, d, 1 / math.sqrt(d))
    down = normals(seeds[8], n * d, s.n_ff, added / math.sqrt(s.n_ff))
    one_by_one = writes(down.reshape(n, d, s.n_ff))
    if by_neuron:
        yield "ffn_down_t_exps", np.ascontiguousarray(one_by_one.swapaxes(1, 2)).reshape(-1, d)
    else:
        yield "ffn_down_exps", down


def outer_matrices(s: Shape, law: Law, seed: np.random.SeedSequence) -> Iterator[tuple[str, Array]]:
    """The matrices before the first and after the last layer."""
    seeds = seed.spawn(2)
    embd = normals(seeds[0], s.n_vocab, s.n_embd, 1.0)
    embd[:, token_channels(s, law).stop :] = 0
    embd[:, 0] = CONSTANT
    yield "token_embd", embd
    del embd
    head = normals(seeds[1], s.n_vocab, s.n_embd, 1 / math.sqrt(s.n_embd))
    head[:, 0] = 0
    head[END, 0] = -CONSTANT
    yield "output", head
    if s.has_next:
        yield "join", normals(seed.spawn(1)[0], s.n_embd, 2 * s.n_embd, 1 / math.sqrt(2 * s.n_embd))


# ---- files


def tensors(s: Shape, law: Law, *, by_neuron: bool) -> list[Tensor]:
    """All tensors of a file, in its order. A matrix "router 3" is that of layer 3."""
    d, q, kv = s.n_embd, s.n_head * s.d_head, s.n_head_kv * s.d_head
    out = [
        Tensor("token_embd.weight", (s.n_vocab, d), "token_embd"),
        Tensor("output.weight", (s.n_vocab, d), "output"),
        Tensor("output_norm.weight", (d,), value=1.0),
    ]
    attention = {"q": (s.d_query, d), "k": (kv, d), "v": (kv, d), "output": (d, q)}
    experts = {"gate": (s.n_ff, d), "up": (s.n_ff, d), "down": (d, s.n_ff)}
    if by_neuron:
        del experts["down"]
        experts["down_t"] = (s.n_ff, d)
    for i in range(s.n_layer + s.has_next):
        p = f"blk.{i}."
        keeps = bool(law.rho) and i == s.state_layer
        norms = ("attn", "post_attention" if s.has_biases or s.has_next or s.n_delta else "ffn")
        out += [Tensor(f"{p}{name}_norm.weight", (d,), value=1.0) for name in norms]
        if s.is_delta(i):
            out += delta_tensors(s, p)
        elif s.has_head_norms:
            angle = s.rope_base ** (-np.arange(0, s.d_head, 2) / s.d_head)
            slow = float(angle[np.abs(np.log(angle / SLOWEST)).argmin()])
            value = score_size(s, law, slow) / math.sqrt(s.d_head) if keeps else 1.0
            out += [Tensor(f"{p}attn_{name}_norm.weight", (s.d_head,), value=value) for name in "qk"]
        stem = "state" if keeps else "attn"
        if not s.is_delta(i):
            out += [
                Tensor(f"{p}attn_{name}.weight", shape, f"{stem}_{name}") for name, shape in attention.items()
            ]
        if s.n_delta:
            out.append(Tensor(f"{p}ffn_gate_inp_shexp.weight", (d,)))
            for name, matrix in (("gate", "gate"), ("up", "gate"), ("down", "down")):
                shape = (d, s.n_ff) if name == "down" else (s.n_ff, d)
                out.append(Tensor(f"{p}ffn_{name}_shexp.weight", shape, f"ffn_{matrix}_shexp"))
        out.append(Tensor(f"{p}ffn_gate_inp.weight", (s.n_expert, d), f"router {min(i, s.n_layer - 1)}"))
        for name, shape in experts.items():
            out.append(Tensor(f"{p}ffn_{name}_exps.weight", (s.n_expert, *shape), f"ffn_{name}_exps"))
        if i == s.n_layer:
            names = ("enorm", "hnorm", "shared_head_norm")
            out += [Tensor(f"{p}nextn.{name}.weight", (d,), value=1.0) for name in names]
            out.append(Tensor(f"{p}nextn.eh_proj.weight", (d, 2 * d), "join"))
        if s.has_biases:
            out += [Tensor(f"{p}attn_{name}.bias", shape[:1]) for name, shape in attention.items()]
            out += [
                Tensor(f"{p}attn_sinks.weight", (s.n_head,)),
                Tensor(f"{p}ffn_gate_inp.bias", (s.n_expert,)),
            ]
            out += [
                Tensor(f"{p}ffn_{name}_exps.bias", (s.n_expert, shape[0])) for name, shape in experts.items()
            ]
    return out


def keys(s: Shape, name: str, file_type: int) -> dict[str, Any]:
    """The keys of a file, but for counts."""
    of_arch: dict[str, Any] = {
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer + s.has_next,
        "feed_forward_length": s.n_ff_dense or s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.d_head,
        "attention.value_length": s.d_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": s.d_head,
        "rope.freq_base": s.rope_base,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
    }
    if s.arch != "llama":
        of_arch["expert_feed_forward_length"] = s.n_ff
    if s.arch == "smallthinker":
        of_arch["expert_gating_func"] = 2
    if s.has_next:
        of_arch |= {"nextn_predict_layers": 1, "expert_gating_func": 1}
    if s.window:
        of_arch["attention.sliding_window"] = s.window
    if s.n_delta:
        of_arch |= {"expert_shared_feed_forward_length": s.n_ff, "full_attention_interval": INTERVAL}
        of_arch |= {
            "rope.dimension_count": s.d_head // 4,
            "ssm.conv_kernel": N_CONV,
            "ssm.state_size": D_DELTA,
        }
        of_arch |= {"ssm.group_count": s.n_delta, "ssm.time_step_rank": 2 * s.n_delta}
        of_arch["ssm.inner_size"] = 2 * s.d_delta
    if s.arch == "gpt-oss":
        of_arch |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
        of_arch["rope.scaling.original_context_length"] = 4096
    return file_keys(s.arch, name, file_type, s.n_vocab, of_arch)


def check(path: Path, s: Shape, law: Law, n_tokens: int, seed: int = 1) -> str:
    """What the engine counts over so many random tokens, beside what was planted."""
    biased, counted = np.random.SeedSequence(seed).spawn(6)[2:4]
    planted = counts_of(s, law.biases(s, biased), counted).astype(np.float64)
    with Model(path) as model:
        n_batch = min(n_tokens, 512)
        with Session(model, n_ctx=n_tokens + 8, n_batch=n_batch, count_neurons=True) as session:
            for at in range(0, n_tokens, n_batch):
                n = min(n_batch, n_tokens - at)
                wanted = np.arange(n) == 0  # the last layer is counted from there on
                tokens = np.random.default_rng(at).integers(3, s.n_vocab, n, np.int32)
                session.feed(tokens, want_logits=wanted)
            found = session.neuron_counts().counts[:, : s.n_expert].astype(np.float64)
    shares = []
    for part in (0.1, 0.25, 0.5):
        best = np.argsort(-planted, axis=1)[:, : max(1, round(part * s.n_expert))]
        two = [float(np.take_along_axis(c, best, axis=1).sum() / c.sum()) for c in (planted, found)]
        shares.append(f"{part:.0%} of the experts: {two[1]:.1%} ({two[0]:.1%})")
    return f"share of the uses over {n_tokens} tokens (and planted): {', '.join(shares)}"


def pieces(s: Shape, t: Tensor, data: NDArray[np.uint8], n_drawn: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a stack of experts, from the rows of those that were drawn."""
    drawn = data.reshape(n_drawn, -1, data.shape[-1])
    for e in range(s.n_expert):
        rows, again = drawn[e % n_drawn], e // n_drawn
        # Rows of down are outputs, which stay where they are.
        shift = {"ffn_gate_exps": 1, "ffn_up_exps": 3}.get(t.matrix, 0) * again % len(rows)
        yield rows[shift:]
        yield rows[:shift]


def write(
    path: Path,
    s: Shape,
    name: str,
    mixture: str,
    law: Law,
    *,
    active: float = 0.4,
    pure: bool = False,
    by_neuron: bool = False,
    statistics: str = "planted",
    seed: int = 1,
) -> None:
    """Writes one file. Raises FileError.

    by_neuron: rows of experts' down belong to neurons. statistics: counts of experts that the file has,
    "planted" (of its own law), "none", or "wrong" (of other biases)."""
    mixture = find_mixture(mixture)
    layer, outer, biased, counted, routed, other = np.random.SeedSequence(seed).spawn(6)
    biases = law.biases(s, biased)
    meta = keys(s, name, MIXTURES[mixture][0])
    if statistics != "none":
        counts = counts_of(s, biases if statistics == "planted" else law.biases(s, other), counted)
        meta |= {"powerinfer.expert.counts": counts.ravel(), "powerinfer.expert.tokens": ("u64", N_COUNTED)}
    listed = tensors(s, law, by_neuron=by_neuron)
    types = types_of(listed, meta, mixture, "", pure) | {t.name: "F32" for t in listed if not t.matrix}
    wanted = {(t.matrix, types[t.name]) for t in listed}
    encoded: dict[tuple[str, str], NDArray[np.uint8]] = {}
    of_layers = layer_matrices(s, law, layer, active, by_neuron=by_neuron)
    for matrices in (outer_matrices(s, law, outer), of_layers):
        for matrix, weights in matrices:
            for type in sorted(type for one, type in wanted if one == matrix):
                encoded[matrix, type] = formats.quantize(weights, type)
    rng = np.random.default_rng(routed)
    routers = [router(s, law, i, bias, rng) for i, bias in enumerate(biases)]
    with GGUFWriter(path, powerinfer=False) as writer:
        for key, value in meta.items():
            if isinstance(value, tuple):
                writer.add(key, value[1], value[0])
            else:
                writer.add(key, value)
        for t in listed:
            writer.add_tensor(t.name, types[t.name], t.shape)
        for t in listed:
            for data in _data(s, t, types[t.name], encoded, routers):
                if len(data):
                    writer.write(data)


def _data(
    s: Shape,
    t: Tensor,
    type: str,
    encoded: dict[tuple[str, str], NDArray[np.uint8]],
    routers: Sequence[Array],
) -> Iterator[NDArray[Any]]:
    """The bytes of a tensor."""
    if not t.matrix:
        yield np.full(t.shape, t.value, "<f4")
    elif t.matrix.startswith("router "):
        yield formats.quantize(routers[int(t.matrix.removeprefix("router "))], type)
    elif len(t.shape) == 3:
        yield from pieces(s, t, encoded[t.matrix, type], min(s.n_expert, N_DRAWN))
    else:
        yield encoded[t.matrix, type]
