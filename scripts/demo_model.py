"""The demo model in PyTorch: a ReLU-gated Llama whose FFN neurons come with a predictor.

One block computes

    x = x + attention(rms_norm(x))                       grouped-query, RoPE on neighbouring pairs
    predicted = fc2 . relu(fc1 . x) >= 0                 for each FFN neuron, from the un-normed residual
    n = rms_norm(x)
    x = x + ffn_down_t^T . (relu(ffn_gate . n) * (ffn_up . n))

which is what a PowerInfer file of architecture `llama` holds. Weights are float32; the matrix products run
in the dtype that is asked for. `fake_q4_0` rounds a weight to what Q4_0 can hold and lets the gradient pass,
so that the last part of the training sees the weights that will be in the file.
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
    """Sizes of the model, in the words of the file's keys."""

    n_vocab: int = 4096
    n_embd: int = 384
    n_layer: int = 8
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 1536
    n_predictor: int = 64
    n_ctx: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def fake_q4_0(weight: Tensor, amount: Tensor | None) -> Tensor:
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
    """Cosines and sines [n_pos, head_dim / 2]; pair i of a head turns by pos * base^(-2 i / head_dim)."""
    exponent = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angle = torch.arange(n_pos, device=device, dtype=torch.float32)[:, None] * shape.rope_base**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., n_pos, heads, head_dim]: the elements 2i and 2i+1 form pair i."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


REPORT = ("density", "penalty", "predictor_loss", "computed", "mass_recall")
"""What a layer reports to the trainer: share of neurons with an open gate, L1 / L2 of the gates (scale-free,
1 when all are equal), loss of the predictor, share of neurons predicted, share of the activation mass that
these carry."""


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_embd, n_kv = shape.n_embd, shape.head_dim * shape.n_head_kv
        out_std = 0.02 / (2 * shape.n_layer) ** 0.5

        def matrix(rows: int, cols: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) * std)

        self.attn_norm = nn.Parameter(torch.ones(n_embd))
        self.attn_q = matrix(n_embd, n_embd)
        self.attn_k = matrix(n_kv, n_embd)
        self.attn_v = matrix(n_kv, n_embd)
        self.attn_output = matrix(n_embd, n_embd, out_std)
        self.ffn_norm = nn.Parameter(torch.ones(n_embd))
        self.ffn_gate = matrix(shape.n_ff, n_embd)
        self.ffn_up = matrix(shape.n_ff, n_embd)
        self.ffn_down_t = matrix(shape.n_ff, n_embd, out_std)
        self.fc1 = matrix(shape.n_predictor, n_embd, n_embd**-0.5)
        self.fc2 = matrix(shape.n_ff, shape.n_predictor, 0.5 * shape.n_predictor**-0.5)

    def attention(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor],
        quant: Tensor | None,
        dtype: torch.dtype,
        cache: list[Tensor] | None = None,
    ) -> Tensor:
        """Causal self-attention of x [batch, n_pos, n_embd]; `cache` (earlier keys, values) grows."""
        shape, (n_batch, n_pos, _) = self.shape, x.shape
        h = rms_norm(x, self.attn_norm, shape.norm_eps).to(dtype)
        q = functional.linear(h, fake_q4_0(self.attn_q, quant).to(dtype))
        k = functional.linear(h, fake_q4_0(self.attn_k, quant).to(dtype))
        v = functional.linear(h, fake_q4_0(self.attn_v, quant).to(dtype))
        q = rotate(q.view(n_batch, n_pos, shape.n_head, shape.head_dim).float(), *table).to(dtype)
        k = rotate(k.view(n_batch, n_pos, shape.n_head_kv, shape.head_dim).float(), *table).to(dtype)
        v = v.view(n_batch, n_pos, shape.n_head_kv, shape.head_dim)
        causal = n_pos > 1
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 1), torch.cat((cache[1], v), 1)
                assert n_pos == 1, "a filled cache takes one token at a time"
            cache[:] = [k, v]
        group = shape.n_head // shape.n_head_kv
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        )
        y = y.transpose(1, 2).reshape(n_batch, n_pos, shape.n_embd)
        return functional.linear(y, fake_q4_0(self.attn_output, quant).to(dtype))

    def scores(self, x: Tensor, quant: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Predictor scores [..., n_ff] of the un-normed residual x."""
        hidden = functional.relu(functional.linear(x.to(dtype), fake_q4_0(self.fc1, quant).to(dtype)))
        return functional.linear(hidden, fake_q4_0(self.fc2, quant).to(dtype))

    def neurons(self, x: Tensor, quant: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """relu(gate) and relu(gate) * up, each [..., n_ff]."""
        n = rms_norm(x, self.ffn_norm, self.shape.norm_eps).to(dtype)
        gate = functional.relu(functional.linear(n, fake_q4_0(self.ffn_gate, quant).to(dtype)))
        return gate, gate * functional.linear(n, fake_q4_0(self.ffn_up, quant).to(dtype))

    def down(self, hidden: Tensor, quant: Tensor | None, dtype: torch.dtype) -> Tensor:
        return hidden @ fake_q4_0(self.ffn_down_t, quant).to(dtype)


def contribution(hidden: Tensor, down_t: Tensor) -> Tensor:
    """How much each neuron adds to the residual, |h_j| * |row j of down_t|; in sum, the activation mass."""
    return hidden.float().abs() * down_t.float().square().sum(1).sqrt()


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
        self, ids: Tensor, quant: Tensor | None, masked: Tensor, positive_weight: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Logits [batch, n_pos, n_vocab] of ids [batch, n_pos], and the reports [n_layer, len(REPORT)].

        `quant` is the share of fake quantisation; `masked` [batch, 1, 1] is 1 where a sequence computes
        predicted neurons only; `positive_weight` says how much dearer a missed neuron of average contribution
        is than one that is computed in vain.
        """
        x = functional.embedding(ids, self.token_embd)
        table = rope_table(self.shape, ids.shape[1], ids.device)
        reports = []
        for block in self.layers():
            x = x + block.attention(x, table, quant, dtype)
            scores = block.scores(x.detach(), quant, dtype)
            gate, hidden = block.neurons(x, quant, dtype)
            predicted, active = scores >= 0, gate > 0
            with torch.no_grad():
                mass = contribution(hidden, block.ffn_down_t)
                total = mass.sum(-1, keepdim=True) + 1e-9
                recall = (mass * predicted).sum() / total.sum()
                share = mass / total * active.float().sum(-1, keepdim=True)
                weight = torch.where(active, positive_weight * (0.2 + 0.8 * share), 1.0)
            magnitude = gate.float()
            spread = magnitude.sum(-1) / (magnitude.square().sum(-1) + 1e-6).sqrt() * self.shape.n_ff**-0.5
            predictor_loss = functional.binary_cross_entropy_with_logits(
                scores.float(), active.float(), weight=weight
            )
            reports.append(
                torch.stack(
                    (active.float().mean(), spread.mean(), predictor_loss, predicted.float().mean(), recall)
                )
            )
            keep = 1 - masked.to(dtype) * (~predicted).to(dtype)
            x = x + block.down(hidden * keep, quant, dtype)
        y = rms_norm(x, self.output_norm, self.shape.norm_eps).to(dtype)
        return functional.linear(y, self.output.to(dtype)), torch.stack(reports)

    @torch.no_grad()
    def count_active(self, ids: Tensor) -> Tensor:
        """How often each neuron fires over ids [batch, n_pos]: [n_layer, n_ff], float32, no predictor."""
        dtype = torch.float32
        x = functional.embedding(ids, self.token_embd)
        table = rope_table(self.shape, ids.shape[1], ids.device)
        counts = []
        for block in self.layers():
            x = x + block.attention(x, table, None, dtype)
            gate, hidden = block.neurons(x, None, dtype)
            counts.append((gate > 0).sum((0, 1)))
            x = x + block.down(hidden, None, dtype)
        return torch.stack(counts)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the file."""
        result = {
            "token_embd.weight": self.token_embd,
            "output_norm.weight": self.output_norm,
            "output.weight": self.output,
        }
        for i, block in enumerate(self.layers()):
            result |= {f"blk.{i}.{name}.weight": value for name, value in block.named_parameters()}
        return {name: value.detach() for name, value in result.items()}

    @torch.no_grad()
    def step(self, ids: Tensor, caches: list[list[Tensor]], pos: int, *, predicted: bool = False) -> Tensor:
        """Float32 logits [n_vocab] of the last of ids [n_pos] at positions pos.., to generate text."""
        dtype = torch.float32
        cos, sin = rope_table(self.shape, pos + len(ids), ids.device)
        x = functional.embedding(ids[None], self.token_embd)
        for block, cache in zip(self.layers(), caches, strict=True):
            x = x + block.attention(x, (cos[pos:], sin[pos:]), None, dtype, cache)
            _, hidden = block.neurons(x, None, dtype)
            if predicted:
                hidden = hidden * (block.scores(x, None, dtype) >= 0)
            x = x + block.down(hidden, None, dtype)
        return functional.linear(rms_norm(x[0, -1], self.output_norm, self.shape.norm_eps), self.output)


def generate(
    model: DemoModel,
    ids: list[int],
    *,
    n_new: int,
    stop: int,
    temperature: float = 0.0,
    seed: int = 0,
    predicted: bool = False,
) -> list[int]:
    """Continue `ids` by at most `n_new` tokens, not counting `stop`, which ends the text."""
    device = model.token_embd.device
    random = torch.Generator(device="cpu").manual_seed(seed)
    caches: list[list[Tensor]] = [[] for _ in range(model.shape.n_layer)]
    logits = model.step(torch.tensor(ids, device=device), caches, 0, predicted=predicted).cpu()
    out: list[int] = []
    while len(out) < n_new and len(ids) + len(out) < model.shape.n_ctx:
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=random))
        if token == stop:
            break
        out.append(token)
        last = torch.tensor([token], device=device)
        logits = model.step(last, caches, len(ids) + len(out) - 1, predicted=predicted).cpu()
    return out
