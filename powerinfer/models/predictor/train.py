"""One layer's predictor as a two-layer perceptron without biases, trained with PyTorch:

    score = fc2 . relu(fc1 . x)          a neuron is predicted where its score reaches the threshold

The loss is the binary cross-entropy of "is active" over all neurons, with two weights: active neurons are
rarer than silent ones and count for as much in sum; and among the active neurons of a token one that adds
much to the residual is missed more dearly than one that adds little. Inputs are divided by the layer's
typical root mean square, which grows a hundredfold from the first layer to the last; half of the factor is
then worked into each matrix, so that both keep sizes that float16 holds well, and scores are alike in all
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._extras import how
from ...errors import FormatError, PowerInferError, UnsupportedError
from .data import LayerData

Floats = npt.NDArray[np.float32]

RATE = 5e-3
RATE_COLUMNS = 384  # inputs up to which the rate of fc1 is RATE; more inputs need smaller steps
RATE_RANK = 256  # the same of fc2
WARM_UP = 0.08
LEAST_SHARE = 0.2  # of an active neuron's weight that does not depend on what it adds
MOST_WEIGHT = 100.0  # of active neurons over silent ones
# A token whose residual is far larger than usual (texts have a few) weighs at most that much more: with no
# biases its scores are only scaled, their signs stay.
MOST_SCALE = 4.0
N_CHECKS = 12  # of the held out loss
PATIENCE = 3  # checks without a better loss, after which training stops
CHECK_ROWS = 1024
SMALL = 1 << 22  # weights of a gate below which threads spend their time waiting for one another


@dataclass(frozen=True, kw_only=True)
class Options:
    """How one perceptron is trained."""

    steps: int = 1200
    batch: int = 512
    """Tokens of a step."""
    seed: int = 1
    device: str = "auto"
    """"cpu", "cuda", or "auto": the GPU if PyTorch has one."""
    n_threads: int = 0
    """Of PyTorch on the CPU; 0: as it likes, but one for small layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Net:
    """A predictor as files have it: it reads the residual as it is."""

    fc1: Floats
    """[rank, n_embd]"""
    fc2: Floats
    """[n_ff, rank]"""
    steps: int = 0
    """That it was trained for."""
    loss: float = math.nan
    """Of the held out tokens."""

    @property
    def rank(self) -> int:
        return len(self.fc1)

    def scores(self, x: Floats) -> Floats:
        """[n, n_ff] of inputs [n, n_embd]."""
        return np.asarray(np.maximum(x @ self.fc1.T, 0) @ self.fc2.T)


def import_torch() -> Any:
    """PyTorch. Raises UnsupportedError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            f"training needs PyTorch, which is not installed: {how('train')}; "
            "`predictor svd` and `predictor sign` need no training"
        ) from error
    return torch


def choose_device(torch: Any, name: str) -> Any:
    """The device of a name. Raises UnsupportedError for a GPU that PyTorch does not see."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("PyTorch sees no CUDA device here: --device cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UnsupportedError(f"PyTorch knows no device {name!r}") from error


class Trainer:
    """Trains perceptrons of any rank on the data of one layer. The same seed gives the same bits on a CPU
    with the same number of threads, whatever was trained before."""

    def __init__(self, data: LayerData, options: Options) -> None:
        self._torch = import_torch()
        self._device = choose_device(self._torch, options.device)
        n_weights = data.inputs(slice(0, 1)).size * data.mass(slice(0, 1)).size
        if options.n_threads or n_weights < SMALL:
            self._torch.set_num_threads(options.n_threads or 1)
        self._data = data
        self._options = options
        self._scale = float(np.median(data.rms[: data.n_train]))
        active = float(np.mean([np.mean(mass > 0) for _, mass in data.blocks(held_out=False)]))
        self._active_weight = min(max((1 - active) / max(active, 1e-9), 1.0), MOST_WEIGHT)

    def _batch(self, rows: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Inputs and mass of some samples, float32 on the device."""
        size = np.clip(self._data.rms[rows] / self._scale, 1 / MOST_SCALE, MOST_SCALE)
        x, mass, size = (
            self._torch.from_numpy(values).to(self._device).float()
            for values in (*self._data.halves(rows), size[:, None])
        )
        return x * size, mass

    def _targets(self, mass: Any) -> tuple[Any, Any]:
        """Which neurons are active, and the weight of each in the loss."""
        active = (mass > 0).to(mass.dtype)
        mean = mass.sum(1, keepdim=True) / active.sum(1, keepdim=True).clamp_(min=1)
        worth = (mass / mean.clamp_(min=1e-12)).mul_(1 - LEAST_SHARE).add_(LEAST_SHARE)
        weight = worth.mul_(self._active_weight).sub_(1).mul_(active).add_(1)
        return active, weight

    def _loss(self, fc1: Any, fc2: Any, x: Any, mass: Any) -> Any:
        torch = self._torch
        active, weight = self._targets(mass)
        scores = torch.relu(x @ fc1.T) @ fc2.T
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, active, weight=weight)

    def _gradients(self, fc1: Any, fc2: Any, x: Any, mass: Any) -> tuple[Any, Any]:
        """Of the loss, by hand: a third of the time that autograd takes."""
        active, weight = self._targets(mass)
        hidden = self._torch.relu(x @ fc1.T)
        slope = (hidden @ fc2.T).sigmoid_().sub_(active).mul_(weight).div_(mass.numel())
        back = (slope @ fc2).mul_(hidden > 0)
        return back.T @ x, slope.T @ hidden

    def train(self, rank: int, *, progress: Callable[[int, int], None] | None = None) -> Net:
        """A predictor of this rank.

        Raises FormatError if it does not become finite, UnsupportedError if PyTorch cannot do it.
        """
        try:
            return self._train(rank, progress)
        except PowerInferError:
            raise
        except RuntimeError as error:  # what PyTorch raises, for too little memory of the device as well
            raise UnsupportedError(
                f"PyTorch cannot train on the device {self._device}: {' '.join(str(error).split())}"
            ) from error

    def _train(self, rank: int, progress: Callable[[int, int], None] | None) -> Net:
        torch, options, data = self._torch, self._options, self._data
        random = np.random.default_rng([options.seed, data.layer, rank])
        n_embd, n_ff = data.inputs(slice(0, 1)).shape[1], data.mass(slice(0, 1)).shape[1]

        def parameter(rows: int, columns: int, std: float) -> Any:
            values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
            return torch.from_numpy(values).to(self._device)

        fc1 = parameter(rank, n_embd, n_embd**-0.5)
        fc2 = parameter(n_ff, rank, 0.5 * rank**-0.5)
        rates = (RATE * min(1.0, RATE_COLUMNS / n_embd), RATE * min(1.0, RATE_RANK / rank))
        optimiser = torch.optim.AdamW(
            [{"params": [fc1], "lr": rates[0]}, {"params": [fc2], "lr": rates[1]}],
            betas=(0.9, 0.99),
            weight_decay=0.01,
        )
        held = np.arange(data.n_train, data.n)
        held = held[np.linspace(0, len(held) - 1, min(CHECK_ROWS, len(held))).astype(np.int64)]
        every = max(1, options.steps // N_CHECKS)
        best, kept, waited, done = math.inf, (fc1.clone(), fc2.clone()), 0, 0
        order = np.empty(0, np.int64)
        for step in range(options.steps):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step, options.steps)
            if len(order) < options.batch:
                order = np.concatenate([order, random.permutation(data.n_train)])
            rows, order = order[: options.batch], order[options.batch :]
            fc1.grad, fc2.grad = self._gradients(fc1, fc2, *self._batch(np.sort(rows)))
            optimiser.step()
            if (step + 1) % every == 0 or step + 1 == options.steps:
                parts = np.array_split(held, -(-len(held) // 256))
                loss = sum(float(self._loss(fc1, fc2, *self._batch(p))) * len(p) for p in parts) / len(held)
                if not math.isfinite(loss):
                    raise FormatError(
                        f"the predictor of layer {data.layer} does not train: its loss is {loss}"
                    )
                waited += 1
                if loss < best:
                    best, kept, waited = loss, (fc1.clone(), fc2.clone()), 0
                    done = step + 1
                if waited >= PATIENCE:
                    break
            if progress is not None:
                progress(step + 1, options.steps)
        half = np.float32(math.sqrt(self._scale))
        return Net(
            fc1=kept[0].cpu().numpy() / half,
            fc2=kept[1].cpu().numpy() / half,
            steps=done,
            loss=best,
        )


def schedule(step: int, steps: int) -> float:
    """What the rate is multiplied with: up to 1 in a straight line, then down to 0 along a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
