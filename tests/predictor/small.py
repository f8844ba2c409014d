"""Small ReLU models, texts, and what their feed-forward does by the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.models.corpus import Corpus
from scripts import make_model
from tests import models, reference

Array = Any

BOS = 1
WORDS = "the rain in a tin has an old noise there it is here one then it ends son of the hater "


def text(n_words: int, seed: int = 1) -> str:
    """Words in random order."""
    words = WORDS.split()
    return " ".join(words[i] for i in np.random.default_rng(seed).integers(0, len(words), n_words))


def corpus(spec: models.Spec, n: int, seed: int = 1) -> Corpus:
    """Random tokens, none of them special."""
    tokens = np.random.default_rng(seed).integers(3, spec.n_vocab, n, dtype=np.int32)
    return Corpus(tokens=tokens, bos=BOS)


def planted(path: Path, *, sparse: bool = False, active: float = 0.1) -> Path:
    """A Llama of 2 layers (n_embd 256, n_ff 1024) whose gates are of rank 31 and a threshold for each neuron:
    a predictor of rank 63 is exact."""
    make_model.write(
        {"powerinfer" if sparse else "gguf": path},
        make_model.SHAPES["tiny-llama"],
        "tiny-llama",
        "F32",
        rank=63,
        active=active,
        activation="relu",
    )
    return path


@dataclass(frozen=True)
class Expected:
    """One layer over some tokens, by the reference: inputs [n, n_embd], mass, scores [n, n_ff]."""

    x: Array
    mass: Array
    scores: Array | None
    doubtful: Array
    """Pairs where rounding may decide whether the neuron is active."""


def expected(path: Path, windows: Any, n_head: int, **how: Any) -> list[Expected]:
    """Every layer, over the windows without their first n_head tokens."""
    model = reference.load(path)
    parts: list[list[reference.LayerTrace]] = []
    for window in windows:
        trace = reference.Trace()
        reference.forward(model, [int(t) for t in window], trace=trace, **how)
        parts.append(trace.layers)
    out = []
    for i in range(int(model.key("block_count"))):
        p = f"blk.{i}."
        down = model.get(p + "ffn_down_t.weight")
        down = model[p + "ffn_down.weight"].T if down is None else down
        norms = np.sqrt(np.sum(down**2, axis=1))

        def joined(name: str, i: int = i) -> Array:
            return np.concatenate([getattr(layers[i], name)[n_head:] for layers in parts])

        x = joined("predictor_input")
        scores = None
        if model.get(p + "fc1.weight") is not None:
            scores = reference.relu(x @ model[p + "fc1.weight"].T) @ model[p + "fc2.weight"].T
        is_gated = model.get(p + "ffn_gate.weight") is not None
        first = joined("ffn_input") @ model[p + ("ffn_gate.weight" if is_gated else "ffn_up.weight")].T
        bias = model.get(p + "ffn_up.bias")
        first = first + (0 if bias is None else bias)
        near = np.abs(first) < 0.03 * np.sqrt(np.mean(first**2))
        if model.arch == "bamboo":
            up = joined("ffn_input") @ model[p + "ffn_up.weight"].T
            near |= np.abs(up) < 0.03 * np.sqrt(np.mean(up**2))
        out.append(Expected(x, np.abs(joined("hidden")) * norms, scores, near))
    return out
