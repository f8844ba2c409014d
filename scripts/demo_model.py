"""The demo model in PyTorch: a Llama with a ReLU gate. One block computes

    x = x + attention(rms_norm(x))             grouped-query; RoPE pairs element i of a head with i + half
    n = rms_norm(x)
    x = x + down . (relu(gate . n) * (up . n))

as `LlamaForCausalLM` does with `hidden_act` "relu". Weights are float32; the matrix products run in the dtype
that is asked for. `fake_q4_0` rounds a weight to what Q4_0 can hold and lets the gradient pass, so that the
last part of the training sees the weights that will be in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Q4_BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    n_vocab: int = 4096
    n_embd: int = 384
    n_layer: int = 8
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 1536
    n_ctx: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def fake_q4_0(weight: Tensor, amount: Tensor | float | None) -> Tensor:
    """`weight` moved by `amount` (0 to 1, None: 0) towards its Q4_0 rounding, with the gradient of `weight`.

    A block of 32 values shares the scale d = (value of largest magnitude) / -8, kept as float16, and each
    value becomes d * (clip(floor(value / d + 8.5), 0, 15) - 8).
    """
    if amount is None:
        return weight
    blocks = weight.detach().float().reshape(-1, Q4_BLOCK)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = torch.where(-low > high, low, high) / -8.0
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)
    steps = torch.clamp(torch.floor(blocks * inverse + 8.5), 0, 15) - 8
    rounded = (steps * scale.to(torch.float16).float()).reshape(weight.shape)
    return weight + amount * (rounded - weight.detach())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(shape: Shape, n_pos: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n_pos, 1, head_dim / 2]; pair i of a head turns by pos * base^(-2 i / head_dim)."""
    exponent = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angle = torch.arange(n_pos, device=device, dtype=torch.float32)[:, None] * shape.rope_base**-exponent
    return angle.cos()[:, None], angle.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., n_pos, heads, head_dim]: the elements i and i + head_dim / 2 form pair i."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


REPORT = ("density", "spread")
"""What a layer reports to the trainer: the share of neurons with an open gate, and L1 / L2 of the gates
(scale-free, 1 when all are equal, small when few are open), which the trainer pushes down."""


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_embd, n_kv = shape.n_embd, shape.head_dim * shape.n_head_kv
        out_std = 0.02 / (2 * shape.n_layer) ** 0.5

        def matrix(rows: int, cols: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * std)

        self.attn_norm = nn.Parameter(torch.ones(n_embd))
        self.q = matrix(n_embd, n_embd)
        self.k = matrix(n_kv, n_embd)
        self.v = matrix(n_kv, n_embd)
        self.attn_output = matrix(n_embd, n_embd, out_std)
        self.ffn_norm = nn.Parameter(torch.ones(n_embd))
        self.gate = matrix(shape.n_ff, n_embd)
        self.up = matrix(shape.n_ff, n_embd)
        # One row per neuron, as a PowerInfer file has it: rows are what Q4_0 cuts into blocks.
        self.down_t = matrix(shape.n_ff, n_embd, out_std)

    def attention(
        self, x: Tensor, table: tuple[Tensor, Tensor], quant: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Causal self-attention of x [batch, n_pos, n_embd]."""
        shape, (n_batch, n_pos, _) = self.shape, x.shape
        h = rms_norm(x, self.attn_norm, shape.norm_eps).to(dtype)
        q = functional.linear(h, fake_q4_0(self.q, quant).to(dtype))
        k = functional.linear(h, fake_q4_0(self.k, quant).to(dtype))
        v = functional.linear(h, fake_q4_0(self.v, quant).to(dtype))
        q = rotate(q.view(n_batch, n_pos, shape.n_head, shape.head_dim).float(), *table).to(dtype)
        k = rotate(k.view(n_batch, n_pos, shape.n_head_kv, shape.head_dim).float(), *table).to(dtype)
        v = v.view(n_batch, n_pos, shape.n_head_kv, shape.head_dim)
        group = shape.n_head // shape.n_head_kv
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        y = y.transpose(1, 2).reshape(n_batch, n_pos, shape.n_embd)
        return functional.linear(y, fake_q4_0(self.attn_output, quant).to(dtype))

    def ffn(
        self, x: Tensor, quant: Tensor | None, drop: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The FFN's output, and the report [len(REPORT)]."""
        n = rms_norm(x, self.ffn_norm, self.shape.norm_eps).to(dtype)
        gate = functional.relu(functional.linear(n, fake_q4_0(self.gate, quant).to(dtype)))
        hidden = gate * functional.linear(n, fake_q4_0(self.up, quant).to(dtype))
        magnitude = gate.float()
        spread = magnitude.sum(-1) / (magnitude.square().sum(-1) + 1e-6).sqrt() * self.shape.n_ff**-0.5
        report = torch.stack(((gate > 0).float().mean(), spread.mean()))
        if drop is not None:
            hidden = torch.where(torch.rand_like(hidden) < drop, 0, hidden)
        return hidden @ fake_q4_0(self.down_t, quant).to(dtype), report


class DemoModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.output = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.02)

    def layers(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(
        self, ids: Tensor, quant: Tensor | None, drop: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Logits [batch, n_pos, n_vocab] of ids [batch, n_pos], and the reports [n_layer, len(REPORT)].

        `quant` is the share of fake quantisation; `drop` [batch, 1, 1] is the share of FFN neurons that a
        sequence loses at random, None: no neuron.
        """
        x = functional.embedding(ids, self.token_embd)
        table = rope_table(self.shape, ids.shape[1], ids.device)
        reports = []
        for block in self.layers():
            x = x + block.attention(x, table, quant, dtype)
            y, report = block.ffn(x, quant, drop, dtype)
            x = x + y
            reports.append(report)
        y = rms_norm(x, self.output_norm, self.shape.norm_eps).to(dtype)
        return functional.linear(y, self.output.to(dtype)), torch.stack(reports)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round every weight to the float16 of its Q4_0 value (embedding, output and norms: to float16).

        Q4_0 of the rounded weights has the same bits as Q4_0 of the weights before: the value of largest
        magnitude in a block is -8 d, which float16 holds exactly, and the others are off by far less than the
        half step that it takes to round differently.
        """
        for block in self.layers():
            for matrix in (block.q, block.k, block.v, block.attn_output, block.gate, block.up, block.down_t):
                matrix.copy_(fake_q4_0(matrix, 1.0))
        for parameter in self.parameters():
            parameter.copy_(parameter.half().float())

    def hf_weights(self) -> dict[str, Tensor]:
        """The weights by their names in a Hugging Face folder."""
        result: dict[str, Tensor] = {"model.embed_tokens.weight": self.token_embd}
        for i, block in enumerate(self.layers()):
            for name, value in (
                ("input_layernorm", block.attn_norm),
                ("self_attn.q_proj", block.q),
                ("self_attn.k_proj", block.k),
                ("self_attn.v_proj", block.v),
                ("self_attn.o_proj", block.attn_output),
                ("post_attention_layernorm", block.ffn_norm),
                ("mlp.gate_proj", block.gate),
                ("mlp.up_proj", block.up),
                ("mlp.down_proj", block.down_t.T),
            ):
                result[f"model.layers.{i}.{name}.weight"] = value
        result |= {"model.norm.weight": self.output_norm, "lm_head.weight": self.output}
        return {name: value.detach() for name, value in result.items()}
