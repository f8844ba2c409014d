"""Train the model that ships with the package, and write it as a Hugging Face folder.

    python scripts/train_demo.py --out FOLDER

The text comes from `demo_text`, the model is in `demo_model`, the folder's format in `demo_folder`. One run
generates the text, trains tokenizer and model, and measures on held-out text; `make_demo.sh` makes the GGUF
file of the folder. It needs torch, sentencepiece and numpy, and takes about seven minutes on one H200.
`--tiny --steps 5` is a quick test of the whole path on a CPU.

Schedule, in shares of the steps:
  0.00-0.10  plain language modelling
  0.10-0.55  a sparsity penalty on the gates pushes the share of active neurons down to the target
  0.55-1.00  the penalty holds it there
  0.60-1.00  half of the sequences lose some neurons at random, so that the model can live with a predictor
             that misses one now and then
  0.70-1.00  weights are rounded to Q4_0 in the forward pass
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from demo_corpus import Windows, make_tokenizer, make_windows
from demo_folder import write_folder
from demo_model import REPORT, DemoModel, Shape
from torch import Tensor

SPARSE_FROM, SPARSE_AT = 0.10, 0.55
DROP_FROM, DROP_SHARE = 0.60, 0.05
QUANT_FROM, QUANT_AT = 0.70, 0.76
USER_WEIGHT = 0.1
"""Weight in the loss of tokens that the model only reads."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one run."""

    shape: Shape
    n_steps: int
    n_batch: int
    n_text_tokens: int
    n_held_out_tokens: int
    n_tokenizer_documents: int
    learning_rate: float
    density: float
    seed: int


class Batches:
    """Windows in a new random order for each pass over the text."""

    def __init__(self, windows: Windows, n_batch: int, device: torch.device, seed: int) -> None:
        self._ids = torch.from_numpy(windows.ids.astype(np.int16)).to(device)
        self._own = torch.from_numpy(windows.own).to(device)
        self._n_batch = n_batch
        self._random = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(self._ids), generator=self._random).to(self._ids.device)
            for start in range(0, len(order) - self._n_batch + 1, self._n_batch):
                rows = order[start : start + self._n_batch]
                yield self._ids[rows].long(), self._own[rows]


def losses(
    model: DemoModel, dtype: torch.dtype, ids: Tensor, own: Tensor, quant: Tensor, drop: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the windows, and the reports of the layers."""
    logits, reports = model(ids[:, :-1], quant, drop, dtype)
    each = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = torch.where(own[:, 1:].flatten(), 1.0, USER_WEIGHT)
    return (each * weight).sum() / weight.sum(), reports


class SparsityControl:
    """Sets the weight of the penalty in each layer so that its share of active neurons follows a target.

    The target falls from one half to the wanted share in equal factors; the last layer may use more than
    twice as many neurons as the first, with `density` as the mean. The control is proportional and integral
    in log space, and lives on the device so that no step waits for it.
    """

    def __init__(self, density: float, n_layer: int, device: torch.device) -> None:
        self._wanted = density * torch.linspace(0.6, 1.4, n_layer, device=device)
        self._integral = torch.full((n_layer,), math.log(0.01), device=device)

    def weights(self, progress: float, density: Tensor) -> Tensor:
        """Weights [n_layer] of the penalty, given the measured shares [n_layer]."""
        if progress < SPARSE_FROM:
            return torch.zeros_like(density)
        done = min(1.0, (progress - SPARSE_FROM) / (SPARSE_AT - SPARSE_FROM))
        error = torch.clamp(torch.log(density / (0.5 * (self._wanted / 0.5) ** done)), -0.5, 0.5)
        self._integral = torch.clamp(self._integral + 0.01 * error, math.log(1e-3), math.log(3.0))
        return torch.exp(self._integral + 2.0 * error)


def train(model: DemoModel, windows: Windows, plan: Plan, device: torch.device, *, compiled: bool) -> None:
    """Train in place; prints a line now and then."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    plain_losses = partial(losses, model, dtype)
    step_losses = torch.compile(plain_losses) if compiled else plain_losses
    control = SparsityControl(plan.density, plan.shape.n_layer, device)
    density = torch.full((plan.shape.n_layer,), 0.5, device=device)
    batches = iter(Batches(windows, plan.n_batch, device, plan.seed))
    start = time.monotonic()
    for step in range(plan.n_steps):
        progress = step / plan.n_steps
        rate = min(1.0, (step + 1) / (0.02 * plan.n_steps + 1)) * (
            0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * rate
        quant = torch.tensor(
            min(1.0, max(0.0, (progress - QUANT_FROM) / (QUANT_AT - QUANT_FROM))), device=device
        )
        drop = torch.zeros(plan.n_batch, 1, 1, device=device)
        if progress >= DROP_FROM:
            drop[::2] = DROP_SHARE
        ids, own = next(batches)
        loss, reports = step_losses(ids, own, quant, drop)
        density = 0.9 * density + 0.1 * reports[:, REPORT.index("density")].detach()
        penalty = (control.weights(progress, density) * reports[:, REPORT.index("spread")]).mean()
        torch.autograd.backward(loss + penalty)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, plan.n_steps // 40) == 0 or step == plan.n_steps - 1:
            done = (step + 1) * plan.n_batch * plan.shape.n_ctx
            took = time.monotonic() - start
            print(
                f"step {step}  loss {float(loss.detach()):.4f}  density {float(density.mean()):.4f}"
                f"  penalty {float(penalty.detach()):.4f}  {done / took / 1e3:.0f} k tokens/s  {took:.0f} s",
                flush=True,
            )


@torch.no_grad()
def evaluate(model: DemoModel, windows: Windows, device: torch.device) -> tuple[float, list[float]]:
    """Perplexity on the tokens that the model writes, and each layer's share of active neurons."""
    total, count = 0.0, 0
    density = torch.zeros(model.shape.n_layer, device=device)
    for start in range(0, len(windows.ids), 8):
        ids = torch.from_numpy(windows.ids[start : start + 8].astype(np.int64)).to(device)
        own = torch.from_numpy(windows.own[start : start + 8]).to(device)[:, 1:].flatten()
        logits, reports = model(ids[:, :-1], None, None, torch.float32)
        each = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        total += float(each[own].sum())
        count += int(own.sum())
        density += reports[:, REPORT.index("density")] * len(ids)
    return math.exp(total / count), [float(v) for v in density / len(windows.ids)]


def run(plan: Plan, out: Path, device: torch.device, *, compiled: bool) -> None:
    clock = time.monotonic()
    shape = plan.shape
    tokenizer = make_tokenizer(plan.seed, shape.n_vocab, plan.n_tokenizer_documents)
    length = shape.n_ctx + 1
    text, held_out = (
        make_windows(
            tokenizer,
            seed=plan.seed,
            n_windows=max(n_least, n // length),
            length=length,
            held_out=is_held_out,
        )
        for n, n_least, is_held_out in (
            (plan.n_text_tokens, plan.n_batch, False),
            (plan.n_held_out_tokens, 2, True),
        )
    )
    print(f"text: {text.ids.size} tokens, held out {held_out.ids.size}, {time.monotonic() - clock:.0f} s")

    torch.manual_seed(plan.seed)
    model = DemoModel(shape).to(device)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {n_parameters} parameters, {asdict(shape)}", flush=True)
    train(model, text, plan, device, compiled=compiled)
    model.eval()
    before, _ = evaluate(model, held_out, device)
    model.round_weights()
    perplexity, density = evaluate(model, held_out, device)
    print(f"perplexity before rounding {before:.4f}, after {perplexity:.4f}, density {density}")

    weights = {name: value.half().cpu().numpy() for name, value in model.hf_weights().items()}
    write_folder(out, shape, tokenizer.model, weights)
    facts = {
        "seed": plan.seed,
        "n_parameters": n_parameters,
        "n_text_tokens": text.ids.size,
        "n_seen_tokens": plan.n_steps * plan.n_batch * shape.n_ctx,
        "n_held_out_tokens": held_out.ids.size,
        "perplexity_before_rounding": before,
        "perplexity": perplexity,
        "active": density,
        "seconds": round(time.monotonic() - clock),
    }
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"wrote {out}, {time.monotonic() - clock:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the demo model and write it as a Hugging Face folder."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--steps", type=int, default=8000, help="training steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="windows of 2048 tokens per step (%(default)s)")
    parser.add_argument(
        "--text-tokens", type=int, default=200_000_000, help="size of the training text (%(default)s)"
    )
    parser.add_argument(
        "--density", type=float, default=0.06, help="wanted share of active neurons (%(default)s)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=1.5e-3, help="peak learning rate (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tiny", action="store_true", help="a miniature of the whole run, to test the script"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.tiny:
        shape = Shape(n_vocab=1024, n_embd=64, n_layer=2, n_head=2, n_head_kv=1, n_ff=256, n_ctx=256)
        sizes = (4, 40_000, 4_000, 400)
    else:
        shape = Shape()
        sizes = (args.batch, args.text_tokens, 600_000, 30_000)
    plan = Plan(shape, args.steps, *sizes, args.learning_rate, args.density, args.seed)
    run(plan, args.out, device, compiled=device.type == "cuda")


if __name__ == "__main__":
    main()
