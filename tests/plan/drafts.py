"""Small model files of every family for tests of plans: right shapes, types and keys; the weights are
zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer._engine import formats
from powerinfer.models.writer import GGUFWriter

TypeOf = Callable[[str], str]
"""The weight format of a matrix, by its name in the file."""


def write_model(
    path: Path,
    family: str = "llama",
    *,
    n_layer: int = 3,
    n_embd: int = 256,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 512,
    n_vocab: int = 288,
    n_ctx: int = 512,
    type_of: TypeOf = lambda name: "F16",
    ranks: Sequence[int] = (),
    act: str = "",
    tied: bool = False,
    two_norms: bool = False,
    counts: NDArray[Any] | None = None,
    n_tokens: int = 1000,
) -> Path:
    """A file that the engine opens; with ranks (one per layer) a PowerInfer file. act: "" says nothing."""
    head = n_embd // n_head
    n_kv = head * n_head_kv
    norm_bias = family in ("falcon", "opt")
    with GGUFWriter(path, powerinfer=bool(ranks)) as w:
        sizes: list[tuple[str, str, tuple[int, ...]]] = []

        def matrix(name: str, rows: int, cols: int) -> None:
            sizes.append((f"{name}.weight", type_of(f"{name}.weight"), (rows, cols)))

        def vector(name: str, n: int) -> None:
            sizes.append((name, "F32", (n,)))

        def norm(name: str) -> None:
            vector(f"{name}.weight", n_embd)
            if norm_bias:
                vector(f"{name}.bias", n_embd)

        w.add("general.architecture", family)
        for key, value in (
            ("context_length", n_ctx),
            ("embedding_length", n_embd),
            ("block_count", n_layer),
            ("feed_forward_length", n_ff),
            ("attention.head_count", n_head),
        ):
            w.add(f"{family}.{key}", value)
        if family == "opt":
            n_kv = n_embd
            matrix("position_embd", n_ctx + 2, n_embd)
        else:
            w.add(f"{family}.attention.head_count_kv", n_head_kv)
            kind = "layer_norm_epsilon" if family == "falcon" else "layer_norm_rms_epsilon"
            w.add(f"{family}.attention.{kind}", 1e-5)
        if act:
            w.add("powerinfer.hidden_act", act)
        if counts is not None:
            w.add("powerinfer.neuron.counts", counts.astype(np.uint32).reshape(-1))
            w.add("powerinfer.neuron.tokens", n_tokens, "u64")
        matrix("token_embd", n_vocab, n_embd)
        norm("output_norm")
        if not tied:
            matrix("output", n_vocab, n_embd)
        for i in range(n_layer):
            blk = f"blk.{i}."
            norm(blk + "attn_norm")
            if two_norms:
                norm(blk + "attn_norm_2")
            if family == "falcon":
                matrix(blk + "attn_qkv", n_embd + 2 * n_kv, n_embd)
            else:
                norm(blk + "ffn_norm")
                for name, rows in (("q", n_embd), ("k", n_kv), ("v", n_kv)):
                    matrix(blk + f"attn_{name}", rows, n_embd)
                    if family in ("opt", "qwen2"):
                        vector(blk + f"attn_{name}.bias", rows)
                if family == "qwen3":
                    vector(blk + "attn_q_norm.weight", head)
                    vector(blk + "attn_k_norm.weight", head)
                if family not in ("opt",):
                    matrix(blk + "ffn_gate", n_ff, n_embd)
            matrix(blk + "attn_output", n_embd, n_embd)
            matrix(blk + "ffn_up", n_ff, n_embd)
            down = "ffn_down_t" if ranks else "ffn_down"
            matrix(blk + down, *((n_ff, n_embd) if ranks else (n_embd, n_ff)))
            if family == "opt":
                vector(blk + "attn_output.bias", n_embd)
                vector(blk + "ffn_up.bias", n_ff)
                vector(blk + f"{down}.bias", n_embd)
            if ranks:
                matrix(blk + "fc1", ranks[i], n_embd)
                matrix(blk + "fc2", n_ff, ranks[i])
        for name, kind, shape in sizes:
            w.add_tensor(name, kind, shape)
        for _, kind, shape in sizes:
            w.write(bytes(formats.row_bytes(kind, shape[-1]) * int(np.prod(shape[:-1]))))
    return path


def power_law(rng: np.random.Generator, n_layer: int, n_ff: int, n_tokens: int) -> NDArray[Any]:
    """Counts as models have them: few neurons fire often, most rarely; each layer with its own steepness."""
    rows = []
    for _ in range(n_layer):
        f = (np.arange(n_ff) + 1 + n_ff / 50) ** -rng.uniform(0.3, 2.0)
        f = np.minimum(0.95, f / f.mean() * rng.uniform(0.02, 0.3))
        rows.append(rng.permutation(rng.binomial(n_tokens, f)))
    return np.stack(rows).astype(np.uint32)
