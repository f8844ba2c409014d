"""Writes a random model of a published shape, for measurements: right sizes, types and sparsity, no meaning.

    python scripts/make_model.py bamboo-7b --layers 8 --type F16 --active 0.1 --predictor -o model.gguf

What is planted: channel 0 of the residual stream is constant (every token's embedding has it, nothing
writes it), so a neuron's row can hold a threshold there. Rows of the first FFN matrix (the gate, or up
where there is none) are low-rank, A.B - threshold, and the predictor is the same product, fc1 = [B; -B;
e0], fc2 = [A, -A, -threshold]: a neuron is predicted exactly when it is active, up to rounding. A layer
norm takes the mean away first, which changes nothing, because these rows sum to zero. Thresholds follow a
power law over neurons with the mean that was asked for. Bamboo's second ReLU lets everything through. The
end token is never likely, so answers end only where they are cut off.

All layers share their matrices, so a file is written about as fast as the disk takes it, yet every layer's
bytes are its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


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

    @property
    def gated(self) -> bool:
        return self.arch in ("llama", "bamboo")


SHAPES = {
    "tiny-llama": Shape("llama", 2, 256, 4, 2, 1024, 512),
    "tiny-bamboo": Shape("bamboo", 2, 256, 4, 2, 1024, 512),
    "tiny-falcon": Shape("falcon", 2, 256, 4, 2, 1024, 512),
    "tiny-opt": Shape("opt", 2, 256, 4, 4, 1024, 512, 514),
    "llama-2-7b": Shape("llama", 32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": Shape("llama", 40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": Shape("llama", 80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "bamboo-7b": Shape("bamboo", 32, 4096, 32, 8, 14336, 32000),
    "falcon-40b": Shape("falcon", 60, 8192, 128, 8, 32768, 65024, 2048),
    "opt-6.7b": Shape("opt", 32, 4096, 32, 32, 16384, 50272, 2050),
    "opt-30b": Shape("opt", 48, 7168, 56, 56, 28672, 50272, 2050),
    "opt-66b": Shape("opt", 64, 9216, 72, 72, 36864, 50272, 2050),
    "opt-175b": Shape("opt", 96, 12288, 96, 96, 49152, 50272, 2050),
}
CONSTANT = 4.0  # what channel 0 of the residual holds; the other channels are near 1
END = 2  # id of the end token


def thresholds(rng: np.random.Generator, n: int, active: float) -> Array:
    """Per neuron t with P(N(0,1) > t) following a power law (exponent 1.3) of mean `active`, shuffled."""
    f = (np.arange(n) + n / 50) ** -1.3
    for _ in range(50):
        f = np.minimum(0.98, f * (active / f.mean()))
    inverse = NormalDist().inv_cdf
    return rng.permutation(np.array([inverse(1 - max(p, 1e-6)) for p in f], np.float32))


def layer_matrices(s: Shape, rng: np.random.Generator, rank: int, active: float) -> dict[str, Array]:
    """The matrices of one layer, [rows, cols], with fc1 and fc2. Activations stay near unit variance."""

    def normal(rows: int, cols: int, scale: float) -> Array:
        m = rng.standard_normal((rows, cols), dtype=np.float32)
        m *= scale / np.sqrt(cols)
        return m

    d, kv = s.n_embd, s.n_embd // s.n_head * s.n_head_kv
    half = (rank - 1) // 2
    b, a = normal(half, d, 1.0), normal(s.n_ff, half, 1.0)
    b[:, 0] = 0
    b[:, 1:] -= b[:, 1:].mean(axis=1, keepdims=True)
    constant = np.full(d, -1 / d, np.float32)  # channel 0 without the mean
    constant[0] += 1
    t = thresholds(rng, s.n_ff, active) / CONSTANT
    first = a @ b  # N(0, 1) on unit inputs
    first -= t[:, None] * constant
    fc1 = np.zeros((rank, d), np.float32)
    fc1[:half], fc1[half : 2 * half], fc1[2 * half] = b, -b, constant
    fc2 = np.zeros((s.n_ff, rank), np.float32)
    fc2[:, :half], fc2[:, half : 2 * half], fc2[:, 2 * half] = a, -a, -t
    m = {"attn_output": normal(d, d, 0.1), "fc1": fc1, "fc2": fc2}
    if s.arch == "falcon":
        m["attn_qkv"] = normal(d + 2 * kv, d, 1.0)
    else:
        m |= {"attn_q": normal(d, d, 1.0), "attn_k": normal(kv, d, 1.0), "attn_v": normal(kv, d, 1.0)}
    m["ffn_gate" if s.gated else "ffn_up"] = first
    if s.gated:
        m["ffn_up"] = normal(s.n_ff, d, 1.0)
        if s.arch == "bamboo":
            m["ffn_up"][:, 0] = 1  # up is 4 standard deviations above zero
    m["ffn_down_t"] = normal(s.n_ff, d, 0.1)
    m["attn_output"][0, :] = m["ffn_down_t"][:, 0] = 0  # nothing writes channel 0
    return m


def tokenizer_keys(w: gguf.GGUFWriter, n_vocab: int) -> None:
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    types = [2, 3, 3] + [6] * 256
    for i in range(n_vocab - len(tokens)):
        tokens.append(f"▁w{i}".encode())
        types.append(1)
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens[:n_vocab])
    w.add_token_scores([-float(i) for i in range(n_vocab)])
    w.add_token_types(types[:n_vocab])
    w.add_bos_token_id(1)
    w.add_eos_token_id(END)


def keys(w: gguf.GGUFWriter, s: Shape, name: str, sparse: bool, activation: str) -> None:
    w.add_name(f"random {name}")
    w.add_context_length(s.n_ctx)
    w.add_embedding_length(s.n_embd)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    if s.gated:
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(s.n_embd // s.n_head)
    elif s.arch == "falcon":
        w.add_layer_norm_eps(1e-5)
    if sparse:
        w.add_float32("powerinfer.sparse_threshold", 0.0)
    if activation:
        w.add_string("powerinfer.hidden_act", activation)
    tokenizer_keys(w, s.n_vocab)


def tensors(
    s: Shape, rng: np.random.Generator, rank: int, active: float, sparse: bool
) -> Iterator[tuple[str, Array]]:
    """All tensors in file order."""
    layer = layer_matrices(s, rng, rank, active)
    if not sparse:
        layer["ffn_down"] = np.ascontiguousarray(layer.pop("ffn_down_t").T)
        del layer["fc1"], layer["fc2"]
    ones, zeros = np.ones(s.n_embd, np.float32), np.zeros(s.n_embd, np.float32)
    norms = ["attn_norm"] + (["attn_norm_2"] if s.arch == "falcon" else ["ffn_norm"])
    embd = rng.standard_normal((s.n_vocab, s.n_embd), dtype=np.float32)
    embd[:, 0] = CONSTANT
    if s.arch == "opt":  # the output head is the same matrix
        embd[END, 0] = -CONSTANT
    yield "token_embd.weight", embd
    if s.arch == "opt":
        pos = rng.standard_normal((s.n_ctx, s.n_embd), dtype=np.float32) * np.float32(0.1)
        pos[:, 0] = 0
        yield "position_embd.weight", pos
    else:
        head = rng.standard_normal((s.n_vocab, s.n_embd), dtype=np.float32) / np.float32(np.sqrt(s.n_embd))
        head[END, 0] = -CONSTANT
        yield "output.weight", head
    with_bias = s.arch in ("falcon", "opt")
    yield "output_norm.weight", ones
    if with_bias:
        yield "output_norm.bias", zeros
    for i in range(s.n_layer):
        for n in norms:
            yield f"blk.{i}.{n}.weight", ones
            if with_bias:
                yield f"blk.{i}.{n}.bias", zeros
        for n, m in layer.items():
            yield f"blk.{i}.{n}.weight", m
            if s.arch == "opt" and n not in ("fc1", "fc2"):
                yield (
                    f"blk.{i}.{n}.bias",
                    np.zeros(m.shape[1] if n == "ffn_down_t" else m.shape[0], np.float32),
                )


def write(
    path: Path,
    s: Shape,
    name: str,
    kind: gguf.GGMLQuantizationType,
    *,
    rank: int,
    active: float,
    sparse: bool,
    activation: str,
    seed: int,
) -> None:
    """Streams the file to path + ".part" and renames it; layers' encoded matrices are made once."""
    part = path.with_name(path.name + ".part")
    w = gguf.GGUFWriter(part, s.arch)
    keys(w, s, name, sparse, activation)
    encoded: dict[int, NDArray[np.generic]] = {}

    def encode(m: Array) -> NDArray[np.generic]:
        if m.ndim == 1:
            return m
        if id(m) not in encoded:
            encoded[id(m)] = gguf.quants.quantize(m, kind)
        return encoded[id(m)]

    items = [(n, m, encode(m)) for n, m in tensors(s, np.random.default_rng(seed), rank, active, sparse)]
    for n, m, e in items:
        w.add_tensor_info(
            n, e.shape, e.dtype, e.nbytes, raw_dtype=kind if m.ndim > 1 else gguf.GGMLQuantizationType.F32
        )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _, _, e in items:
        w.write_tensor_data(e)
    w.close()
    if sparse:
        with part.open("r+b") as f:
            f.write(b"PWRI")
    os.replace(part, path)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("-o", "--out", type=Path, required=True)
    p.add_argument("--layers", type=int, help="fewer layers than the published shape")
    p.add_argument("--type", default="F16", choices=["F32", "F16", "BF16", "Q8_0", "Q4_0"])
    p.add_argument("--active", type=float, default=0.1, help="mean share of active neurons (default 0.1)")
    p.add_argument(
        "--predictor", action="store_true", help="a PowerInfer file: fc1, fc2, ffn_down transposed"
    )
    p.add_argument("--rank", type=int, default=1024, help="predictor width (default 1024)")
    p.add_argument(
        "--activation",
        default="",
        choices=["", "relu", "drelu", "silu", "gelu"],
        help="written as powerinfer.hidden_act",
    )
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    s = SHAPES[a.shape]
    if a.layers:
        s = Shape(**{**s.__dict__, "n_layer": a.layers})
    write(
        a.out,
        s,
        a.shape,
        gguf.GGMLQuantizationType[a.type],
        rank=min(a.rank, s.n_ff),
        active=a.active,
        sparse=a.predictor,
        activation=a.activation,
        seed=a.seed,
    )
    print(f"{a.out}: {a.out.stat().st_size / 2**30:.2f} GiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
