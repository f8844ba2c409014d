"""Writes a random model of a published shape, for measurements: right sizes, types and sparsity, no meaning.

    python scripts/make_model.py llama-2-7b --layers 8 --type Q4_0 -o model.gguf
    python scripts/make_model.py bamboo-7b --format powerinfer --active 0.1 -o model.gguf
    python scripts/make_model.py qwen3-30b-a3b --type Q4_0 --skew 0.5 -o model.gguf
    python scripts/make_model.py gpt-oss-20b --type MXFP4_MOE -o model.gguf

`--format powerinfer` has a predictor and ffn_down transposed, `gguf` (the default) is a file that llama.cpp
reads too, where it knows the architecture (Bamboo becomes "llama", OPT it does not know), and `both` writes
both from the same weights: model.gguf and model.powerinfer.gguf. Either holds how often each neuron fires.
Of SmallThinker, which needs no predictor, `powerinfer` has the experts' ffn_down stored by neuron.

What is planted: channel 0 of the residual stream is constant (every token's embedding has it, nothing
writes it), so a neuron's row can hold a threshold there. A row of the first FFN matrix (the gate, or up where
there is none) is one of some hundred patterns B or its negative, less the threshold, and the predictor is
the same product, fc1 = [B; -B; constant], fc2 = [1 and -1 at the pattern, -threshold]: a neuron is predicted
exactly when it is active. Patterns are whole multiples of a step, up to eight of it in every block of 32, and
nothing else stands in a threshold's block, so that this stays true in four bits. A layer norm takes the mean
away first, which changes nothing, because these rows sum to zero. Shares of tokens for which neurons fire
follow a power law with the mean that was asked for; counts are what this law makes of 1,000,000 tokens.
Bamboo's second ReLU lets everything through. The end token is never likely, so answers end only where they
are cut off.

What is planted in mixtures of experts is described in make_mixture.py. Shapes of make_dense.py (Gemma 3,
Phi-4, Qwen3.5) have nothing planted.

All layers share their matrices, which are made and quantised once, so a file is written about as fast as the
disk takes it, yet every layer's bytes are its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import make_dense
import make_mixture
import numpy as np
from numpy.typing import NDArray
from planted import BLOCK, CONSTANT, END, Array, Tensor, firing, normals, thresholds, tokenizer_keys, types_of

from powerinfer._engine import formats
from powerinfer._engine.counts import Counts
from powerinfer.errors import PowerInferError
from powerinfer.models.quantize import MIXTURES, find_mixture
from powerinfer.models.writer import GGUFWriter


@dataclass(frozen=True)
class Shape:
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int = 4096
    head_dim: int = 0
    """0: as many heads as fill the width."""

    @property
    def gated(self) -> bool:
        return self.arch in ("llama", "bamboo")

    @property
    def with_bias(self) -> bool:
        """Of norms, which take the mean away."""
        return self.arch in ("falcon", "opt", "nemotron")

    @property
    def d_head(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def d_q(self) -> int:
        return self.n_head * self.d_head

    @property
    def d_kv(self) -> int:
        return self.n_head_kv * self.d_head


SHAPES = {
    "tiny-llama": Shape("llama", 2, 256, 4, 2, 1024, 512),
    "tiny-bamboo": Shape("bamboo", 2, 256, 4, 2, 1024, 512),
    "tiny-falcon": Shape("falcon", 2, 256, 4, 2, 1024, 512),
    "tiny-opt": Shape("opt", 2, 256, 4, 4, 1024, 512, 514),
    "tiny-arcee": Shape("arcee", 2, 256, 4, 2, 1024, 512),
    "tiny-nemotron": Shape("nemotron", 2, 256, 6, 2, 1024, 512, head_dim=64),
    "llama-2-7b": Shape("llama", 32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": Shape("llama", 40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": Shape("llama", 80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": Shape("llama", 80, 8192, 64, 8, 28672, 128256, 8192),
    "mistral-7b": Shape("llama", 32, 4096, 32, 8, 14336, 32000),
    "bamboo-7b": Shape("bamboo", 32, 4096, 32, 8, 14336, 32000),
    "falcon-7b": Shape("falcon", 32, 4544, 71, 1, 18176, 65024, 2048),
    "falcon-40b": Shape("falcon", 60, 8192, 128, 8, 32768, 65024, 2048),
    "falcon-180b": Shape("falcon", 80, 14848, 232, 8, 59392, 65024, 2048),
    "opt-1.3b": Shape("opt", 24, 2048, 32, 32, 8192, 50272, 2050),
    "opt-6.7b": Shape("opt", 32, 4096, 32, 32, 16384, 50272, 2050),
    "opt-13b": Shape("opt", 40, 5120, 40, 40, 20480, 50272, 2050),
    "opt-30b": Shape("opt", 48, 7168, 56, 56, 28672, 50272, 2050),
    "opt-66b": Shape("opt", 64, 9216, 72, 72, 36864, 50272, 2050),
    "opt-175b": Shape("opt", 96, 12288, 96, 96, 49152, 50272, 2050),
    "afm-4.5b": Shape("arcee", 36, 2560, 20, 4, 18432, 128000, 65536, 128),
    "minitron-8b": Shape("nemotron", 32, 4096, 48, 8, 16384, 256000, head_dim=128),
}
for family in ("prosparse", "relullama"):
    SHAPES |= {f"{family}-{size}": SHAPES[f"llama-2-{size}"] for size in ("7b", "13b", "70b")}

UP = 4.0  # mean of Bamboo's up products, which its second ReLU thus lets through
N_TOKENS = 1_000_000  # what neurons are counted over


# ---- matrices


def patterns(rng: np.random.Generator, n: int, n_embd: int) -> tuple[Array, Array]:
    """B, [n, n_embd], whose rows have length 1, sum to zero and are whole multiples of a step; and the row
    that a threshold is multiplied with, which sums to zero as well and shares no block with B."""
    free = min(256, n_embd // 4) // BLOCK * BLOCK  # columns left to the threshold
    half = (n_embd - free) // 2 // BLOCK
    steps = np.clip(np.rint(rng.standard_normal((n, half, BLOCK)) * 3.4), -7, 7).astype(np.float32)
    extreme = rng.integers(0, BLOCK, (n, half, 1))
    np.put_along_axis(steps, extreme, rng.choice(np.array([-8, 8], np.float32), (n, half, 1)), axis=2)
    b = np.zeros((n, n_embd), np.float32)
    b[:, free : free + half * BLOCK] = steps.reshape(n, -1)
    b[:, free + half * BLOCK : free + 2 * half * BLOCK] = -steps.reshape(n, -1)
    b /= np.sqrt((b * b).sum(axis=1, keepdims=True))
    constant = np.zeros(n_embd, np.float32)
    constant[0] = 1
    constant[BLOCK:free] = -1 / (free - BLOCK)
    return b, constant


def layer_matrices(
    s: Shape, seed: np.random.SeedSequence, rank: int, shares: Array, forms: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    """The matrices of one layer, [rows, cols], one at a time. Activations stay near unit variance: what all
    layers add to the residual, which is nearly the same for each, is small beside it, so that every layer is
    as sparse as the first."""
    first_seed, *seeds = seed.spawn(9)

    def normal(i: int, rows: int, cols: int, scale: float) -> Array:
        return normals(seeds[i], rows, cols, scale / np.sqrt(cols))

    d = s.n_embd
    added = 0.3 / s.n_layer
    rng = np.random.Generator(np.random.SFC64(first_seed))
    n_patterns = (rank - 1) // 2
    if n_patterns > BLOCK:  # so that 1 and -1 stand in different blocks of a row of fc2
        n_patterns -= n_patterns % BLOCK
    b, constant = patterns(rng, n_patterns, d)
    t = thresholds(shares) / np.float32(CONSTANT)
    pattern = rng.permutation(s.n_ff) % n_patterns
    sign = rng.choice(np.array([-1, 1], np.float32), s.n_ff)
    neuron = np.arange(s.n_ff)

    first = b[pattern]
    first *= sign[:, None]
    first -= t[:, None] * constant
    if "powerinfer" in forms:
        fc1, fc2 = np.zeros((rank, d), np.float32), np.zeros((s.n_ff, rank), np.float32)
        fc1[:n_patterns], fc1[n_patterns : 2 * n_patterns], fc1[rank - 1] = b, -b, constant
        fc2[neuron, pattern], fc2[neuron, n_patterns + pattern], fc2[:, rank - 1] = sign, -sign, -t
        yield "fc1", fc1
        yield "fc2", fc2
    yield "ffn_gate" if s.gated else "ffn_up", first
    del first
    if s.gated:
        up = normal(0, s.n_ff, d, 1.0)
        if s.arch == "bamboo":
            up[:, 0] = UP / CONSTANT  # up is so many standard deviations above zero
        yield "ffn_up", up
        del up
    if s.arch == "falcon":
        yield "attn_qkv", normal(1, s.d_q + 2 * s.d_kv, d, 1.0)
    else:
        yield "attn_q", normal(1, s.d_q, d, 1.0)
        yield "attn_k", normal(2, s.d_kv, d, 1.0)
        yield "attn_v", normal(3, s.d_kv, d, 1.0)
    output = normal(4, d, s.d_q, added)
    output[0, :] = 0  # nothing writes channel 0
    yield "attn_output", output
    del output
    # Bamboo's hidden values are UP times as large as those of others.
    down = normal(5, s.n_ff, d, added / UP if s.arch == "bamboo" else added)
    down[:, 0] = 0
    if "powerinfer" in forms:
        yield "ffn_down_t", down
    if "gguf" in forms:
        yield "ffn_down", np.ascontiguousarray(down.T)


def outer_matrices(s: Shape, seed: np.random.SeedSequence) -> Iterator[tuple[str, Array]]:
    """The matrices before the first and after the last layer."""
    seeds = seed.spawn(3)
    embd = normals(seeds[0], s.n_vocab, s.n_embd, 1.0)
    embd[:, 0] = CONSTANT
    if s.arch == "opt":  # the output head is the same matrix
        embd[END, 0] = -CONSTANT
    yield "token_embd", embd
    del embd
    if s.arch == "opt":
        pos = normals(seeds[1], s.n_ctx, s.n_embd, 0.1)
        pos[:, 0] = 0
        yield "position_embd", pos
    else:
        head = normals(seeds[2], s.n_vocab, s.n_embd, 1 / np.sqrt(s.n_embd))
        head[END, 0] = -CONSTANT
        yield "output", head


# ---- files


def tensors(s: Shape, form: str, rank: int) -> list[Tensor]:
    """All tensors of a file, in its order."""
    d = s.n_embd

    def norm(name: str) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", (d,), value=1.0)
        if s.with_bias:
            yield Tensor(f"{name}.bias", (d,))

    out = [Tensor("token_embd.weight", (s.n_vocab, d), "token_embd")]
    if s.arch == "opt":
        out.append(Tensor("position_embd.weight", (s.n_ctx, d), "position_embd"))
    else:
        out.append(Tensor("output.weight", (s.n_vocab, d), "output"))
    out.extend(norm("output_norm"))
    sizes = {"attn_output": (d, s.d_q), "ffn_up": (s.n_ff, d)}
    if s.arch == "falcon":
        sizes["attn_qkv"] = (s.d_q + 2 * s.d_kv, d)
    else:
        sizes |= {"attn_q": (s.d_q, d), "attn_k": (s.d_kv, d), "attn_v": (s.d_kv, d)}
    if s.gated:
        sizes["ffn_gate"] = (s.n_ff, d)
    if form == "powerinfer":
        sizes |= {"ffn_down_t": (s.n_ff, d), "fc1": (rank, d), "fc2": (s.n_ff, rank)}
    else:
        sizes["ffn_down"] = (d, s.n_ff)
    norms = ["attn_norm"] if s.arch == "falcon" else ["attn_norm", "ffn_norm"]
    if s.arch == "falcon" and s.n_head_kv > 1:
        norms.append("attn_norm_2")
    for i in range(s.n_layer):
        for name in norms:
            out.extend(norm(f"blk.{i}.{name}"))
        for name, shape in sizes.items():
            out.append(Tensor(f"blk.{i}.{name}.weight", shape, name))
            if s.arch == "opt" and name not in ("fc1", "fc2"):
                n = shape[1] if name == "ffn_down_t" else shape[0]
                out.append(Tensor(f"blk.{i}.{name}.bias", (n,)))
    return out


def keys(s: Shape, name: str, form: str, activation: str, file_type: int, counts: Counts) -> dict[str, Any]:
    """The keys of a file."""
    arch = "llama" if form == "gguf" and s.arch == "bamboo" else s.arch
    out: dict[str, Any] = {"general.architecture": arch, "general.name": f"random {name}"}
    out |= {"general.quantization_version": 2, "general.file_type": file_type}
    of_arch: dict[str, Any] = {
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
    }
    if s.head_dim:
        of_arch |= {"attention.key_length": s.head_dim, "attention.value_length": s.head_dim}
    if s.gated or s.arch == "arcee":
        of_arch |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": s.d_head}
    elif s.arch != "opt":
        of_arch["attention.layer_norm_epsilon"] = 1e-5
    if s.arch == "nemotron":
        of_arch["rope.dimension_count"] = s.d_head // 2
    out |= {f"{arch}.{key}": value for key, value in of_arch.items()}
    if form == "powerinfer":
        out["powerinfer.sparse_threshold"] = 0.0
    planted = {"bamboo": "drelu", "arcee": "relu2", "nemotron": "relu2"}.get(s.arch, "relu")
    if activation or (form == "gguf" and s.arch != "opt"):
        out["powerinfer.hidden_act"] = activation or planted
    return out | tokenizer_keys(s.n_vocab) | counts.keys


def write(
    paths: dict[str, Path],
    s: Shape,
    name: str,
    mixture: str,
    *,
    rank: int = 1024,
    active: float = 0.1,
    counted: float = 0,
    activation: str = "",
    predictor_type: str = "",
    pure: bool = False,
    seed: int = 1,
) -> None:
    """Writes the forms that `paths` names ("gguf", "powerinfer"), with the same weights. Raises FileError.

    counted: what the counts in the file say of `active`; 0: the truth."""
    mixture, forms = find_mixture(mixture), list(paths)
    own, layer, outer = np.random.SeedSequence(seed).spawn(3)
    shares = firing(np.random.default_rng(own), s.n_ff, active)
    said = firing(np.random.default_rng(own), s.n_ff, counted) if counted else shares
    fired = np.rint(said.astype(np.float64) * N_TOKENS).astype(np.uint64)
    counts = Counts(counts=np.tile(fired, (s.n_layer, 1)), n_tokens=N_TOKENS)
    lists = {form: tensors(s, form, rank) for form in forms}
    metas = {form: keys(s, name, form, activation, MIXTURES[mixture][0], counts) for form in forms}
    types, wanted = {}, set()
    for form in forms:
        types[form] = types_of(lists[form], metas[form], mixture, predictor_type, pure)
        wanted |= {(t.matrix, types[form][t.name]) for t in lists[form]}
    encoded: dict[tuple[str, str], NDArray[np.uint8]] = {}
    for matrices in (outer_matrices(s, outer), layer_matrices(s, layer, rank, shares, forms)):
        for matrix, weights in matrices:
            for type in sorted(type for other, type in wanted if other == matrix):
                encoded[matrix, type] = formats.quantize(weights, type)
    for form, path in paths.items():
        with GGUFWriter(path, powerinfer=form == "powerinfer") as writer:
            for key, value in metas[form].items():
                if isinstance(value, tuple):
                    writer.add(key, value[1], value[0])
                else:
                    writer.add(key, value)
            for t in lists[form]:
                writer.add_tensor(t.name, types[form][t.name], t.shape)
            for t in lists[form]:
                data = (
                    encoded[t.matrix, types[form][t.name]] if t.matrix else np.full(t.shape, t.value, "<f4")
                )
                writer.write(data)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*SHAPES, *make_dense.SHAPES, *make_mixture.SHAPES]
    p.add_argument("shape", choices=names, metavar="SHAPE", help=", ".join(names))
    p.add_argument("-o", "--out", type=Path, required=True, help="the file (both: the name of the plain one)")
    p.add_argument("--format", default="gguf", choices=["gguf", "powerinfer", "both"], help="default gguf")
    p.add_argument("--layers", type=int, metavar="N", help="fewer layers than the published shape")
    p.add_argument(
        "--type",
        default="F16",
        metavar="TYPE",
        help=f"formats as `powerinfer quantize` gives them (default F16): {', '.join(MIXTURES)}",
    )
    p.add_argument("--pure", action="store_true", help="one format for all matrices")
    p.add_argument("--predictor-type", default="", metavar="TYPE", help="of fc1 and fc2 (default: by --type)")
    p.add_argument("--rank", type=int, default=1024, metavar="N", help="predictor width (default 1024)")
    p.add_argument(
        "--active",
        type=float,
        metavar="X",
        help="mean share of active neurons (default 0.1; of the experts of ReLU models 0.4)",
    )
    p.add_argument(
        "--counted",
        type=float,
        metavar="X",
        help="the mean share by the counts in the file, whatever --active is; in the same order",
    )
    p.add_argument(
        "--skew",
        type=float,
        default=0.5,
        metavar="X",
        help="mixtures of experts: how unevenly a router chooses, 0 for evenly (default 0.5)",
    )
    p.add_argument(
        "--rho",
        type=float,
        default=0.0,
        metavar="X",
        help="how much of what makes a choice stays from token to token, from 0 up to 0.99 (default 0)",
    )
    p.add_argument(
        "--statistics",
        default="planted",
        choices=make_mixture.STATISTICS,
        help="counts of experts in the file: its own (the default), none, or those of another router",
    )
    p.add_argument(
        "--activation",
        default="",
        choices=["relu", "drelu", "silu", "gelu"],
        help="written as powerinfer.hidden_act, in place of the planted one",
    )
    p.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="compute N tokens of a mixture and print how they used its experts, beside what was planted",
    )
    p.add_argument("--seed", type=int, default=1, metavar="N")
    a = p.parse_args()
    try:
        if a.shape in make_mixture.SHAPES:
            paths = _write_mixture(p, a)
        elif a.shape in make_dense.SHAPES:
            paths = _write_plain(p, a)
        else:
            paths = _write_dense(p, a)
    except PowerInferError as error:
        print(f"make_model.py: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path}: {path.stat().st_size / 2**30:.2f} GiB", file=sys.stderr)
    return 0


def _n_layer(p: argparse.ArgumentParser, a: argparse.Namespace, most: int) -> int:
    """How many layers are to be written."""
    if a.layers is not None and not 1 <= a.layers <= most:
        p.error(f"--layers {a.layers}: {a.shape} has 1 to {most}")
    return a.layers or most


def _share(p: argparse.ArgumentParser, a: argparse.Namespace, name: str, default: float) -> float:
    """The mean share of active neurons that an option gives."""
    given = getattr(a, name)
    if given is not None and not 0 < given < 0.9:
        p.error(f"--{name} {given} is not between 0 and 0.9")
    return default if given is None else float(given)


def _write_mixture(p: argparse.ArgumentParser, a: argparse.Namespace) -> list[Path]:
    s = make_mixture.SHAPES[a.shape]
    s = replace(s, n_layer=_n_layer(p, a, s.n_layer))
    if a.format != "gguf" and not s.is_relu:
        p.error(f"--format {a.format}: experts have no predictors, and those of {a.shape} no silent neurons")
    if not 0 <= a.skew <= 10:
        p.error(f"--skew {a.skew} is not between 0 and 10")
    if a.rho and (s.has_biases or s.n_delta):
        what = "attends to sinks" if s.has_biases else "has recurrent layers"
        p.error(f"--rho {a.rho}: {a.shape} {what}, which this does not allow for")
    if not 0 <= a.rho <= 0.99:
        p.error(f"--rho {a.rho} is not between 0 and 0.99")
    law, paths = make_mixture.Law(a.skew, a.rho), _paths(a)
    for form, path in paths.items():
        make_mixture.write(
            path,
            s,
            a.shape,
            a.type,
            law,
            active=_share(p, a, "active", 0.4),
            pure=a.pure,
            by_neuron=form == "powerinfer",
            statistics=a.statistics,
            seed=a.seed,
        )
        if a.check > 0:
            print(make_mixture.check(path, s, law, a.check, a.seed), file=sys.stderr)
    return list(paths.values())


def _paths(a: argparse.Namespace) -> dict[str, Path]:
    """What is written, by form."""
    if a.format == "both":
        return {"gguf": a.out, "powerinfer": a.out.with_suffix(".powerinfer" + a.out.suffix)}
    return {a.format: a.out}


def _write_plain(p: argparse.ArgumentParser, a: argparse.Namespace) -> list[Path]:
    s = make_dense.SHAPES[a.shape]
    s = replace(s, n_layer=_n_layer(p, a, s.n_layer))
    if a.format != "gguf":
        p.error(f"--format {a.format}: {a.shape} has no predictor")
    make_dense.write(a.out, s, a.shape, a.type, pure=a.pure, seed=a.seed)
    return [a.out]


def _write_dense(p: argparse.ArgumentParser, a: argparse.Namespace) -> list[Path]:
    s = SHAPES[a.shape]
    s = replace(s, n_layer=_n_layer(p, a, s.n_layer))
    if not 3 <= a.rank <= s.n_ff:
        p.error(f"--rank {a.rank} is not between 3 and the {s.n_ff} neurons of a layer")
    paths = _paths(a)
    write(
        paths,
        s,
        a.shape,
        a.type,
        rank=a.rank,
        active=_share(p, a, "active", 0.1),
        counted=_share(p, a, "counted", 0),
        activation=a.activation,
        predictor_type=a.predictor_type,
        pure=a.pure,
        seed=a.seed,
    )
    return list(paths.values())


if __name__ == "__main__":
    sys.exit(main())
