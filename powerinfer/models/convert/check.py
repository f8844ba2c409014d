"""Does the file answer as the checkpoint does? A few prompts through both, and the distance between them.

The file is run by the engine: one token at a time, K and V in float32, all neurons (exact mode for a ReLU
model). The checkpoint is run by forward.py, or by transformers where its family is a row of the table; twice:
as it is, and with its matrices rounded to the file's format. The distance to the first is what the user gets;
much of it is the rounding's and says nothing about the conversion. The distance to the second is what the
rounding does not explain, and must be small. For quantised formats it is run once more, to see what rounding
to 8 bits does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._engine.file import ModelFile
from ..._engine.session import Model, Session
from ..._text.tokenizer import Tokenizer
from .conversion import Source
from .forward import SourceModel
from .transformers_model import transformers_logits

PROMPTS = (
    "The capital of France is Paris, and the capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a miller who had three sons. When he died he left the eldest his mill, the "
    "second his donkey, and the youngest nothing but his cat. What shall I do with a cat, said the youngest",
)
_MOST_TOKENS = 48  # of a prompt

# What may stay unexplained. Sums of some thousands of float32 terms err by 1e-6 to 1e-5 of their size, and
# the layers of a model widen that some ten times.
_OF_ARITHMETIC = 5e-4
# With quantised weights the engine rounds activations to 8 bits in blocks of 32, which is what Q8_0 does with
# weights. So how far Q8_0's rounding of the weights moves the logits of these prompts says how far that of
# the activations does; the factor is for activations being rounded anew before each product, for values that
# are spread less evenly than weights, and for the largest of many differences.
_OF_ACTIVATIONS = 4.0
_OF_OTHER_ROWS = 2.0

Logits = npt.NDArray[np.float32]
Progress = Callable[[int, int], object]


@dataclass(frozen=True, kw_only=True)
class PromptCheck:
    """The answers to one prompt, compared at each of its tokens.

    A distance is the largest difference of two logits, as a share of the span from the lowest to the highest.
    """

    text: str
    n_tokens: int
    distance: float
    """From the file to the checkpoint."""
    same_top: float
    """Share of the tokens after which both think the same token the likeliest."""
    kl: float
    """Mean Kullback-Leibler divergence of the file's probabilities from the checkpoint's, in nats."""
    unexplained: float
    """Distance from the file to the checkpoint with its weights rounded to the file's format."""
    bound: float
    """The largest `unexplained` that arithmetic explains."""


@dataclass(frozen=True, kw_only=True)
class Check:
    prompts: tuple[PromptCheck, ...]
    mode: str
    """Of the engine: "exact" or "dense"."""

    @property
    def passed(self) -> bool:
        # The bound is infinite where the checkpoint's own answers are no numbers.
        return all(prompt.unexplained <= prompt.bound < math.inf for prompt in self.prompts)


@np.errstate(over="ignore", invalid="ignore")  # what is no number shows in the distances
def check(
    source: Source,
    path: str | os.PathLike[str],
    *,
    type: str,
    texts: Sequence[str] = PROMPTS,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> Check:
    """Runs the texts through the checkpoint and through the file that was made of it.

    type: the format of the file's matrices. Raises what opening a model raises.
    """
    mode: Any = "exact" if source.hyper.is_relu else "dense"
    with ModelFile(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        by_neuron = ("blk.0.ffn_down_t.weight", "blk.0.ffn_down_t_exps.weight")
        transposed = any(tensor.name in by_neuron for tensor in file.tensors)
        with Model(file) as model:
            most = min(_MOST_TOKENS, model.info.n_ctx_train)
            prompts = [_tokens(tokenizer, text, most) for text in texts]
            actual = _engine_logits(model, prompts, mode, n_threads)
    kinds = list(dict.fromkeys(["F32", *(["Q8_0"] if type.startswith("Q") else []), type]))
    answers = {}
    for i, kind in enumerate(kinds):
        shown = _part_of(progress, i, len(kinds)) if progress is not None else None
        if source.hyper.row is not None:
            folder = str(source.checkpoint.folder)
            answers[kind] = transformers_logits(folder, source.hyper, prompts, type=kind, progress=shown)
            continue
        computed = SourceModel(source.checkpoint, source.hyper, type=kind, down_transposed=transposed)
        answers[kind] = computed.logits(prompts, progress=shown)
    results = []
    for i, text in enumerate(texts):
        limit = _OF_ARITHMETIC
        if "Q8_0" in answers:
            limit += _OF_ACTIVATIONS * _distance(answers["F32"][i], answers["Q8_0"][i])
        if source.hyper.row is not None and type != "F32":
            # Rounded along other rows than the file's, weights are others, but as far from what they were.
            limit += _OF_OTHER_ROWS * _distance(answers["F32"][i], answers[type][i])
        results.append(_compare(text, answers["F32"][i], answers[type][i], actual[i], limit))
    return Check(prompts=tuple(results), mode=mode)


def _part_of(progress: Progress, part: int, parts: int) -> Progress:
    """Progress of one of several passes of the same length."""
    return lambda done, total: progress(part * total + done, parts * total)


def _tokens(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    return tokenizer.encode(text, add_bos=True, special=False)[:most] or [0]


def _engine_logits(model: Model, prompts: Sequence[Sequence[int]], mode: Any, n_threads: int) -> list[Logits]:
    out = []
    longest = max(len(prompt) for prompt in prompts)
    options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "sparsity": mode, "n_threads": n_threads}
    with Session(model, n_ctx=longest, n_batch=1, **options) as session:
        for prompt in prompts:
            rows = []
            for token in prompt:
                session.feed([token])
                rows.append(session.logits().copy())
            session.drop(0)
            out.append(np.stack(rows))
    return out


def _compare(text: str, source: Logits, rounded: Logits, actual: Logits, bound: float) -> PromptCheck:
    p, q = _log_softmax(source), _log_softmax(actual)
    return PromptCheck(
        text=text,
        n_tokens=len(source),
        distance=_distance(source, actual),
        same_top=float(np.mean(source.argmax(axis=1) == actual.argmax(axis=1))),
        kl=float(np.mean(np.sum(np.exp(p) * (p - q), axis=1))),
        unexplained=_distance(rounded, actual),
        bound=bound,
    )


def _distance(a: Logits, b: Logits) -> float:
    span = np.maximum(a.max(axis=1) - a.min(axis=1), np.float32(1e-30))
    value = float((np.abs(a - b).max(axis=1) / span).max())
    return value if np.isfinite(value) else float("inf")


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))
