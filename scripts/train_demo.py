"""Train the model that ships with the package, and write its file and its card.

    python scripts/train_demo.py --out powerinfer/demo/demo.gguf

The text comes from `demo_text`, the model is in `demo_model`, the file format in `demo_file`. One run
generates the text, trains tokenizer and model, quantises, measures on held-out text with the quantised
weights, and writes FILE, README.md beside it and, with --golden, reference logits. It needs torch,
sentencepiece, numpy and gguf, and takes about eight minutes on one H200. `--tiny --steps 5` is a quick test
of the whole path on a CPU.

Schedule, in shares of the steps (the predictors learn all the time, without touching the model):
  0.00-0.10  plain language modelling
  0.10-0.55  a sparsity penalty on the gates pushes the share of active neurons down to the target
  0.55-1.00  the penalty holds it there
  0.60-1.00  half of the sequences compute predicted neurons only, so that the model can live with a miss
  0.70-1.00  weights are rounded to Q4_0 in the forward pass
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from demo_card import CardNumbers, card
from demo_corpus import Windows, make_tokenizer, make_windows
from demo_file import IM_END, Message, Tokenizer, dequantised, write_file
from demo_model import REPORT, DemoModel, Shape, generate
from numpy.typing import NDArray
from torch import Tensor

SPARSE_FROM, SPARSE_AT = 0.10, 0.55
MASK_FROM = 0.60
QUANT_FROM, QUANT_AT = 0.70, 0.76
USER_WEIGHT = 0.1
"""Weight in the loss of tokens that the model only reads."""
POSITIVE_WEIGHT = 40.0
"""How much dearer a missed neuron is to the predictor than one computed in vain."""

TALKS: list[list[str]] = [
    [
        "Hi!",
        "My name is Anna.",
        "What can you do?",
        "Tell me a story about a dragon and a lighthouse.",
        "Who helped the dragon?",
        "What is my name?",
    ],
    [
        "who are you?",
        "what is PowerInfer",
        "what are hot and cold neurons?",
        "tell me more",
        "how do i install it?",
        "thanks, bye",
    ],
    [
        "What is 7 + 5?",
        "and plus 10?",
        "What is 9 times 8?",
        "i have 12 apples and eat 5. how many are left?",
        "count to 10",
    ],
    [
        "What colour is the sky?",
        "what comes after tuesday?",
        "opposite of cold",
        "what does a cow say",
        "Is a carrot a fruit?",
        "Name three birds.",
    ],
    [
        "Who is the president of France?",
        "Write a python program that sorts a list",
        "What is the capital of Italy?",
        "Why is the sky blue?",
        "fghjk dfgh",
    ],
    ["tell me a joke", "another one", "tell me a riddle", "i don't know", "Write a poem about the sea."],
    [
        "I have a dog called Rex.",
        "I live in Berlin.",
        "what is the name of my dog?",
        "Where do I live?",
        "what is my favourite colour?",
    ],
    ["HELLO", "HOW ARE YOU?", "i am fine", "why sparse?", "how do i use it from python?", "are you chatgpt?"],
    [
        "Once upon a time",
        "tell me a story about a fox",
        "what was the fox called?",
        "continue",
        "tell me another story about a little robot and a red kite",
    ],
    [
        "What is a lighthouse?",
        "do you like pizza?",
        "I am sad",
        "what is the meaning of life?",
        "How does the predictor work?",
        "what does vram_budget mean?",
    ],
]
GOLDEN_TALKS: list[list[Message]] = [
    [("user", "What are hot and cold neurons?")],
    [("user", "Tell me a story about a fox and a lighthouse.")],
    [("system", "You are a helpful assistant."), ("user", "What is 7 + 5?")],
]


@dataclass(frozen=True)
class Plan:
    """Sizes of one run."""

    shape: Shape
    n_steps: int
    n_batch: int
    n_text_tokens: int
    n_held_out_tokens: int
    n_profile_tokens: int
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
    model: DemoModel, dtype: torch.dtype, ids: Tensor, own: Tensor, quant: Tensor, masked: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the windows, and the reports of the layers."""
    logits, reports = model(ids[:, :-1], quant, masked, POSITIVE_WEIGHT, dtype)
    each = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = torch.where(own[:, 1:].flatten(), 1.0, USER_WEIGHT)
    return (each * weight).sum() / weight.sum(), reports


def is_predictor(name: str) -> bool:
    return name.endswith(("fc1", "fc2"))


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
    named = dict(model.named_parameters())
    groups = {
        "matrices": [p for n, p in named.items() if p.ndim > 1 and not is_predictor(n)],
        "vectors": [p for p in named.values() if p.ndim == 1],
        "predictors": [p for n, p in named.items() if is_predictor(n)],
    }
    decay = {"matrices": 0.1, "vectors": 0.0, "predictors": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": p, "weight_decay": decay[name]} for name, p in groups.items()],
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
        masked = torch.zeros(plan.n_batch, 1, 1, device=device)
        if progress >= MASK_FROM:
            masked[::2] = 1
        ids, own = next(batches)
        loss, reports = step_losses(ids, own, quant, masked)
        mean = dict(zip(REPORT, reports.mean(0), strict=True))
        density = 0.9 * density + 0.1 * reports[:, REPORT.index("density")].detach()
        pressure = control.weights(progress, density)
        penalty = (pressure * reports[:, REPORT.index("penalty")]).mean()
        (loss + penalty + mean["predictor_loss"] * plan.shape.n_layer).backward()
        torch.nn.utils.clip_grad_norm_([*groups["matrices"], *groups["vectors"]], 1.0)
        torch.nn.utils.clip_grad_norm_(groups["predictors"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, plan.n_steps // 40) == 0 or step == plan.n_steps - 1:
            done = (step + 1) * plan.n_batch * plan.shape.n_ctx
            text = "  ".join(f"{name} {float(value.detach()):.4f}" for name, value in mean.items())
            took = time.monotonic() - start
            print(
                f"step {step}  loss {float(loss.detach()):.4f}  {text}"
                f"  weighted penalty {float(penalty.detach()):.4f}"
                f"  {done / took / 1e3:.0f} k tokens/s  {took:.0f} s",
                flush=True,
            )


@dataclass(frozen=True)
class Measured:
    """Perplexity on the tokens that the model writes, and for each name of REPORT its mean in each layer."""

    perplexity: float
    layers: dict[str, list[float]]

    def mean(self, name: str) -> float:
        return sum(self.layers[name]) / len(self.layers[name])

    def line(self) -> str:
        layers = "; ".join(f"{name} {' '.join(f'{v:.4f}' for v in row)}" for name, row in self.layers.items())
        return f"perplexity {self.perplexity:.4f}; {layers}"


@torch.no_grad()
def evaluate(model: DemoModel, windows: Windows, device: torch.device, *, predicted: bool) -> Measured:
    """What the model does on the windows, in float32."""
    total, count, seen = 0.0, 0, 0
    sums = torch.zeros(model.shape.n_layer, len(REPORT), device=device)
    for start in range(0, len(windows.ids), 8):
        ids = torch.from_numpy(windows.ids[start : start + 8].astype(np.int64)).to(device)
        own = torch.from_numpy(windows.own[start : start + 8]).to(device)[:, 1:].flatten()
        masked = torch.full((len(ids), 1, 1), float(predicted), device=device)
        logits, reports = model(ids[:, :-1], None, masked, POSITIVE_WEIGHT, torch.float32)
        each = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        total += float(each[own].sum())
        count += int(own.sum())
        sums += reports * len(ids)
        seen += len(ids)
    layers = sums / seen
    return Measured(
        perplexity=math.exp(total / count),
        layers={name: [float(v) for v in layers[:, i]] for i, name in enumerate(REPORT)},
    )


def count_neurons(model: DemoModel, windows: Windows, device: torch.device) -> tuple[NDArray[np.uint32], int]:
    counts = torch.zeros(model.shape.n_layer, model.shape.n_ff, dtype=torch.int64, device=device)
    n_tokens = 0
    for start in range(0, len(windows.ids), 8):
        ids = torch.from_numpy(windows.ids[start : start + 8, :-1].astype(np.int64)).to(device)
        counts += model.count_active(ids)
        n_tokens += ids.numel()
    return counts.cpu().numpy().astype(np.uint32), n_tokens


def load_weights(model: DemoModel, tensors: dict[str, NDArray[np.float32]]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_tensors().items():
            parameter.copy_(torch.from_numpy(tensors[name]))


def talk(
    model: DemoModel, tokenizer: Tokenizer, questions: list[str], temperature: float, seed: int
) -> list[Message]:
    """A conversation with the model, in predicted mode."""
    messages: list[Message] = []
    for question in questions:
        messages.append(("user", question))
        ids = generate(
            model,
            tokenizer.prompt(messages),
            n_new=300,
            stop=IM_END,
            temperature=temperature,
            seed=seed,
            predicted=True,
        )
        messages.append(("assistant", tokenizer.decode(ids)))
    return messages


def write_golden(path: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """For some prompts i, computed in float32 with every neuron: `ids_i`; `logits_i` after the last of them;
    the greedy answer `greedy_i` with its end token; and `margin_i`, by how much each greedy token led over
    the second best.

    Where several wordings are as likely, the margin is small, and another arithmetic may choose the other.
    """
    arrays: dict[str, Any] = {}
    device = model.token_embd.device
    for i, messages in enumerate(GOLDEN_TALKS):
        ids = tokenizer.prompt(messages)
        caches: list[list[Tensor]] = [[] for _ in range(model.shape.n_layer)]
        logits = model.step(torch.tensor(ids, device=device), caches, 0)
        arrays[f"ids_{i}"] = np.array(ids, np.int32)
        arrays[f"logits_{i}"] = logits.cpu().numpy()
        greedy: list[int] = []
        margins: list[float] = []
        while len(greedy) < 96 and IM_END not in greedy:
            best = torch.topk(logits, 2)
            greedy.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            logits = model.step(torch.tensor(greedy[-1:], device=device), caches, len(ids) + len(greedy) - 1)
        arrays[f"greedy_{i}"] = np.array(greedy, np.int32)
        arrays[f"margin_{i}"] = np.array(margins, np.float32)
    np.savez_compressed(path, **arrays)


def run(
    plan: Plan, out: Path, golden: Path | None, device: torch.device, *, compiled: bool, n_talks: int
) -> None:
    clock = time.monotonic()
    shape = plan.shape
    tokenizer = make_tokenizer(plan.seed, shape.n_vocab, plan.n_tokenizer_documents)
    length = shape.n_ctx + 1
    text = make_windows(
        tokenizer,
        seed=plan.seed,
        n_windows=max(plan.n_batch, plan.n_text_tokens // length),
        length=length,
        held_out=False,
    )
    held_out = make_windows(
        tokenizer,
        seed=plan.seed,
        n_windows=max(2, plan.n_held_out_tokens // length),
        length=length,
        held_out=True,
    )
    print(
        f"text: {text.ids.size} tokens, held out {held_out.ids.size}, {time.monotonic() - clock:.0f} s",
        flush=True,
    )

    torch.manual_seed(plan.seed)
    model = DemoModel(shape).to(device)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {n_parameters} parameters, {asdict(shape)}", flush=True)
    train(model, text, plan, device, compiled=compiled)
    model.eval()
    before = evaluate(model, held_out, device, predicted=False)

    tensors = {name: value.cpu().numpy().astype(np.float32) for name, value in model.named_tensors().items()}
    load_weights(model, dequantised(tensors))
    exact = evaluate(model, held_out, device, predicted=False)
    predicted = evaluate(model, held_out, device, predicted=True)
    n_profile = min(len(text.ids), max(1, plan.n_profile_tokens // length))
    counts, n_counted = count_neurons(model, Windows(text.ids[:n_profile], text.own[:n_profile]), device)
    for title, measured in (("before quantisation", before), ("exact", exact), ("predicted", predicted)):
        print(f"{title}: {measured.line()}")

    write_file(
        out,
        sizes={k: v for k, v in asdict(shape).items() if isinstance(v, int)},
        rope_base=shape.rope_base,
        norm_eps=shape.norm_eps,
        tokenizer=tokenizer,
        tensors=tensors,
        counts=counts,
        n_counted=n_counted,
        threshold=0.0,
        description="A tiny ReLU-sparse chat model that shows how PowerInfer works. It knows little.",
    )
    hottest = np.sort(counts.astype(np.float64), axis=None)[::-1]
    hot_share = float(hottest[: counts.size // 5].sum() / max(1.0, hottest.sum()))
    numbers = CardNumbers(
        n_parameters=n_parameters,
        n_file_bytes=out.stat().st_size,
        n_text_tokens=text.ids.size,
        n_seen_tokens=plan.n_steps * plan.n_batch * shape.n_ctx,
        n_held_out_tokens=held_out.ids.size,
        n_counted=n_counted,
        float_perplexity=before.perplexity,
        exact_perplexity=exact.perplexity,
        predicted_perplexity=predicted.perplexity,
        active=exact.mean("density"),
        computed=predicted.mean("computed"),
        mass_recall=predicted.mean("mass_recall"),
        active_layers=tuple(exact.layers["density"]),
        hot_share=hot_share,
        never=float((counts == 0).mean()),
    )
    out.with_name("README.md").write_text(card(shape, plan.seed, numbers))
    if golden is not None:
        write_golden(golden, model, tokenizer)
    for i, questions in enumerate(TALKS[:n_talks]):
        for temperature in (0.0, 0.7):
            print(f"--- temperature {temperature}")
            for role, said in talk(model, tokenizer, questions, temperature, seed=i):
                print(f"{role:>9}: {said}")
    print(f"wrote {out}, {out.stat().st_size} bytes, {time.monotonic() - clock:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo model and write its file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--golden", type=Path, metavar="FILE", help="also write reference logits (.npz)")
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
        shape = Shape(
            n_vocab=1024, n_embd=64, n_layer=2, n_head=2, n_head_kv=1, n_ff=256, n_predictor=32, n_ctx=256
        )
        plan = Plan(
            shape, args.steps, 4, 40_000, 4_000, 4_000, 400, args.learning_rate, args.density, args.seed
        )
    else:
        plan = Plan(
            Shape(),
            args.steps,
            args.batch,
            args.text_tokens,
            600_000,
            2_000_000,
            30_000,
            args.learning_rate,
            args.density,
            args.seed,
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run(
        plan,
        args.out,
        args.golden,
        device,
        compiled=device.type == "cuda",
        n_talks=1 if args.tiny else len(TALKS),
    )


if __name__ == "__main__":
    main()
