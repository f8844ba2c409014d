"""Random models of published shapes in which nothing is planted: no predictors, silent neurons or experts.
`make_model.py` calls this when it is given the name of such a shape.

Channel 0 of the residual stream is constant (every token's embedding has it, nothing writes it), so that the
end token is never likely. What a layer adds to the residual is small, so that values stay near unit variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from make_mixture import D_DELTA, INTERVAL, N_CONV
from numpy.typing import NDArray
from planted import CONSTANT, END, Array, Tensor, file_keys, normals, types_of

from powerinfer._engine import formats
from powerinfer.models.quantize import MIXTURES, find_mixture
from powerinfer.models.writer import GGUFWriter


@dataclass(frozen=True)
class Shape:
    arch: str
    """gemma3, gemma3n, phi3 or qwen35."""
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    window: int = 0
    """gemma3, gemma3n: positions that five layers of six, or four of five, see."""
    n_delta: int = 0
    """qwen35: heads of q and k of a gated delta net, which three layers of four are; of v twice as many."""

    n_embd_layer: int = 0
    """gemma3n: width of embeddings per layer; a third of layers cut gates, a third read others' K and V."""

    @property
    def is_fused(self) -> bool:
        """q, k and v are one matrix; gate and up, too."""
        return self.arch == "phi3"

    @property
    def is_tied(self) -> bool:
        """The head is the embedding."""
        return self.arch.startswith("gemma3")

    def is_delta(self, layer: int) -> bool:
        return self.n_delta > 0 and (layer + 1) % INTERVAL != 0


SHAPES = {
    "tiny-gemma3": Shape("gemma3", 6, 256, 4, 2, 64, 512, 512, 4096, 1e6, window=64),
    "tiny-gemma3n": Shape("gemma3n", 10, 256, 4, 2, 64, 512, 512, 4096, 1e6, window=64, n_embd_layer=32),
    "tiny-phi-4": Shape("phi3", 2, 256, 4, 2, 64, 512, 512, 4096, 250000.0),
    "tiny-qwen35": Shape("qwen35", 4, 256, 4, 2, 64, 512, 512, 4096, 1e7, n_delta=2),
    "gemma3-12b": Shape("gemma3", 48, 3840, 16, 8, 256, 15360, 262144, 131072, 1e6, window=1024),
    "gemma3n-e2b": Shape(
        "gemma3n", 30, 2048, 8, 2, 256, 8192, 262144, 32768, 1e6, window=512, n_embd_layer=256
    ),
    "phi-4": Shape("phi3", 40, 5120, 40, 10, 128, 17920, 100352, 16384, 250000.0),
    "qwen3.5-9b": Shape("qwen35", 32, 4096, 16, 4, 256, 12288, 248320, 262144, 1e7, n_delta=16),
}


def matrices(s: Shape) -> dict[str, tuple[int, int]]:
    """Those of layers, [rows, cols]."""
    d, q, kv, delta = s.n_embd, s.n_head * s.d_head, s.n_head_kv * s.d_head, s.n_delta * D_DELTA
    out = {"attn_output": (d, q), "ffn_down": (d, s.n_ff)}
    if s.is_fused:
        return out | {"attn_qkv": (q + 2 * kv, d), "ffn_up": (2 * s.n_ff, d)}
    heads = 2 * q if s.n_delta else q  # a head's query, and what gates it
    out |= {"attn_q": (heads, d), "attn_k": (kv, d), "attn_v": (kv, d)}
    out |= {"ffn_gate": (s.n_ff, d), "ffn_up": (s.n_ff, d)}
    if s.n_embd_layer:
        out |= {"laurel_l": (RANK, d), "laurel_r": (d, RANK)}
        out |= {"inp_gate": (s.n_embd_layer, d), "proj": (d, s.n_embd_layer)}
    if s.n_delta:
        out |= {"attn_qkv": (4 * delta, d), "attn_gate": (2 * delta, d), "ssm_out": (d, 2 * delta)}
        out |= {"ssm_alpha": (2 * s.n_delta, d), "ssm_beta": (2 * s.n_delta, d)}
    return out


def outer(s: Shape) -> dict[str, tuple[int, ...]]:
    """Of models with several streams and embeddings per layer, outside layers: shapes."""
    if not s.n_embd_layer:
        return {}
    d, wide = s.n_embd, s.n_layer * s.n_embd_layer
    streams = dict.fromkeys(("altup_proj", "altup_unembd_proj"), (N_STREAM - 1, d, d))
    return streams | {"per_layer_token_embd": (s.n_vocab, wide), "per_layer_model_proj": (wide, d)}


N_STREAM, RANK = 4, 64
OF_DELTA = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out")
OF_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def weights(s: Shape, seed: np.random.SeedSequence) -> Iterator[tuple[str, Array]]:
    """The matrices of all layers, which share them, and those before and after."""
    embd_seed, head_seed, *seeds = seed.spawn(2 + len(matrices(s)))
    for own, (name, shape) in zip(seed.spawn(len(outer(s))), outer(s).items(), strict=True):
        yield name, normals(own, math.prod(shape[:-1]), shape[-1], 1 / math.sqrt(s.n_embd))
    embd = normals(embd_seed, s.n_vocab, s.n_embd, 1.0)
    embd[:, 0] = CONSTANT
    if s.is_tied:
        embd[END, 0] = -CONSTANT
    yield "token_embd", embd
    del embd
    if not s.is_tied:
        head = normals(head_seed, s.n_vocab, s.n_embd, 1 / math.sqrt(s.n_embd))
        head[END, 0] = -CONSTANT
        yield "output", head
        del head
    for own, (name, (rows, cols)) in zip(seeds, matrices(s).items(), strict=True):
        writes = rows == s.n_embd and name in ("attn_output", "ffn_down", "ssm_out")
        matrix = normals(own, rows, cols, (0.3 / s.n_layer if writes else 1.0) / math.sqrt(cols))
        if writes:
            matrix[0] = 0
        yield name, matrix


def tensors(s: Shape) -> list[Tensor]:
    """All tensors of a file, in its order."""
    d = s.n_embd
    out = [Tensor("token_embd.weight", (s.n_vocab, d), "token_embd")]
    if not s.is_tied:
        out.append(Tensor("output.weight", (s.n_vocab, d), "output"))
    out.append(Tensor("output_norm.weight", (d,), value=1.0))
    out += [Tensor(f"{name}.weight", shape, name) for name, shape in outer(s).items()]
    if s.n_embd_layer:
        out.append(Tensor("per_layer_proj_norm.weight", (s.n_embd_layer,), value=1.0))
    norms = {"attn_norm": 1.0, "ffn_norm": 1.0}
    if s.is_tied:  # what a layer adds has this size
        norms |= {"post_attention_norm": 0.3 / s.n_layer, "post_ffw_norm": 0.3 / s.n_layer}
    if s.n_embd_layer:
        norms |= {
            "laurel_post_norm": 0.3,
            "post_norm": 0.3,
            "altup_router_norm": 1.0,
            "altup_correct_scale": 1.0,
        }
    if s.arch == "qwen35":
        norms = {"attn_norm": 1.0, "post_attention_norm": 1.0}
    for i in range(s.n_layer):
        p = f"blk.{i}."
        out += [Tensor(f"{p}{name}.weight", (d,), value=value) for name, value in norms.items()]
        if s.n_embd_layer:
            sizes = {"router": (N_STREAM, d), "predict_coef": (N_STREAM**2, N_STREAM)}
            sizes["correct_coef"] = (N_STREAM, N_STREAM)
            out += [Tensor(f"{p}altup_{name}.weight", shape) for name, shape in sizes.items()]
        left_out = OF_ATTENTION if s.is_delta(i) else OF_DELTA if s.n_delta else ()
        out += [
            Tensor(f"{p}{name}.weight", shape, name)
            for name, shape in matrices(s).items()
            if name not in left_out
        ]
        if s.is_delta(i):
            n = 2 * s.n_delta
            out += [
                Tensor(f"{p}ssm_conv1d.weight", (2 * n * D_DELTA, N_CONV), value=0.5),
                Tensor(f"{p}ssm_a", (n,), value=-0.5),
                Tensor(f"{p}ssm_dt.bias", (n,), value=-1.0),
                Tensor(f"{p}ssm_norm.weight", (D_DELTA,), value=1.0),
            ]
        elif not s.is_fused:
            out += [Tensor(f"{p}attn_{x}_norm.weight", (s.d_head,), value=1.0) for x in "qk"]
    return out


def keys(s: Shape, name: str, file_type: int) -> dict[str, Any]:
    """The keys of a file."""
    of_arch: dict[str, Any] = {
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": s.d_head // 4 if s.n_delta else s.d_head,
        "rope.freq_base": s.rope_base,
    }
    if not s.is_fused:
        of_arch |= {"attention.key_length": s.d_head, "attention.value_length": s.d_head}
    if s.arch == "gemma3":
        of_arch |= {"attention.sliding_window": s.window, "rope.scaling.type": "linear"}
        of_arch["rope.scaling.factor"] = 8.0
    if s.n_embd_layer:
        third = s.n_layer // 3
        cut = np.full(s.n_layer, -np.inf, np.float32)
        cut[:third] = 1.6448534727096558
        of_arch |= {
            "feed_forward_length": np.full(s.n_layer, s.n_ff, np.int32),
            "attention.sliding_window": s.window,
            "attention.sliding_window_pattern": np.arange(s.n_layer) % 5 != 4,
            "attention.shared_kv_layers": third,
            "embedding_length_per_layer_input": s.n_embd_layer,
            "activation_sparsity_scale": cut,
            "altup.active_idx": 0,
            "altup.num_inputs": N_STREAM,
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 30.0,
        }
    if s.n_delta:
        quarter = s.d_head // 8
        of_arch |= {
            "full_attention_interval": INTERVAL,
            "rope.dimension_sections": np.array([quarter, 0, 0, 0], np.int32),
            "ssm.conv_kernel": N_CONV,
            "ssm.state_size": D_DELTA,
            "ssm.group_count": s.n_delta,
            "ssm.time_step_rank": 2 * s.n_delta,
            "ssm.inner_size": 2 * s.n_delta * D_DELTA,
        }
    return file_keys(s.arch, name, file_type, s.n_vocab, of_arch)


def write(path: Path, s: Shape, name: str, mixture: str, *, pure: bool = False, seed: int = 1) -> None:
    """Writes one file. Raises FileError."""
    mixture = find_mixture(mixture)
    meta = keys(s, name, MIXTURES[mixture][0])
    listed = tensors(s)
    types = types_of(listed, meta, mixture, "", pure) | {t.name: "F32" for t in listed if not t.matrix}
    wanted = {(t.matrix, types[t.name]) for t in listed}
    encoded: dict[tuple[str, str], NDArray[np.uint8]] = {}
    for matrix, values in weights(s, np.random.SeedSequence(seed)):
        for type in sorted(type for one, type in wanted if one == matrix):
            encoded[matrix, type] = formats.quantize(values, type)
    with GGUFWriter(path, powerinfer=False) as writer:
        for key, value in meta.items():
            writer.add(key, value)
        for t in listed:
            writer.add_tensor(t.name, types[t.name], t.shape)
        for t in listed:
            writer.write(encoded[t.matrix, types[t.name]] if t.matrix else np.full(t.shape, t.value, "<f4"))
