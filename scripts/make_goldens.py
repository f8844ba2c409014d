"""Compute tests/golden/*.npz: logits and greedy tokens of small random models, by transformers in float32.

For maintainers; needs torch and transformers, which the tests do not. Run from the repository root:

    python scripts/make_goldens.py [NAME ...]

The weights are those of tests/specs.py, already rounded to F16. Predicted goldens (of models with a sparse
twin) come from tests/reference.py, as transformers knows no predictor, and are checked against the same
transformers model with its FFN masked by hooks. There are two for each: NAME-predicted asks the predictor for
every token, NAME-decode has all neurons for the prompt but its last token, as the engine does when only that
one wants logits.

Two things make the goldens robust against the rounding of a correct engine (F16 K and V, tiles of bf16):

- Greedy tokens: of many random prompts, the one is kept whose smallest distance between the best and the
  second logit, over all 64 steps and relative to the rms of that row's logits, is largest; it must be at
  least GAP.
- Masks: a predictor score next to the threshold would flip with the last bit of its input and change the
  answer by a whole neuron. For the tokens of the golden, fc2 is moved as little as it takes to keep every
  score a margin away from the threshold, on the side on which it was drawn. So no mask changes, the answer is
  the one of the random predictor, and a correct engine cannot land on the other side.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import golden_recurrent
from golden_models import build

from tests import models, reference

N_GREEDY = 64
N_BATCHES = 16  # of candidate prompts that are tried for a golden
N_KEPT = 12  # of them, those with the largest gaps are kept
BATCH_TOKENS = 256 * 40  # of the prompts of a batch
GOOD_GAP = 0.05  # enough: no further batch is tried
GAP = 0.03
MARGINS = (0.05, 0.04, 0.03, 0.02)  # of the rms distance to the threshold; the first that a row allows
# Different tokens in a continuation: one that repeats itself tests little, and its like inputs with unlike
# masks leave the predictor's rows no room to move. The smaller number where no prompt reaches the larger.
DISTINCT = (36, 20)
SPARSE_SHARE = 0.4  # of the neurons, about, a random predictor lets through


def mask_ffn(spec: models.Spec, model: Any, predictor: Any, threshold: float, n_dense: int) -> None:
    """Make the model's FFNs obey a predictor: hooks note its input and zero inputs of the down projection."""
    for i, (fc1, fc2) in enumerate(predictor):
        if spec.family == "falcon":
            layer = model.transformer.h[i]
            source, down = layer, layer.mlp.dense_4h_to_h
        elif spec.family == "opt":
            layer = model.model.decoder.layers[i]
            source, down = layer.final_layer_norm, layer.fc2
        else:
            layer = model.model.layers[i]
            source, down = layer.post_attention_layernorm, layer.mlp.down_proj
        one, two = torch.from_numpy(fc1.astype(np.float32)), torch.from_numpy(fc2.astype(np.float32))
        seen: dict[str, Any] = {}

        def note(_: nn.Module, args: Any, seen: Any = seen) -> None:
            seen["residual"] = args[0]

        def mask(_: nn.Module, args: Any, seen: Any = seen, one: Any = one, two: Any = two) -> Any:
            scores = torch.relu(seen["residual"] @ one.T) @ two.T
            keep = (scores >= threshold).view(seen["shape"])
            if keep.shape[1] > 1:  # from position 0 on, not a step
                keep[:, :n_dense] = True
            return (torch.where(keep.view(args[0].shape), args[0], 0.0),)

        def note_shape(_: nn.Module, args: Any, kwargs: Any, seen: Any = seen) -> None:
            seen["shape"] = (*(args[0] if args else kwargs["hidden_states"]).shape[:2], spec.n_ff)

        layer.register_forward_pre_hook(note_shape, with_kwargs=True)
        source.register_forward_pre_hook(note)
        down.register_forward_pre_hook(mask)


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None).logits
    return out


def gaps(logits: torch.Tensor) -> torch.Tensor:
    """Distance of the two best logits over the rms of all, along the last axis."""
    best = logits.topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]) / logits.square().mean(-1).sqrt()


def best_prompts(spec: models.Spec, model: Any, n_good: int, min_distinct: int) -> list[tuple[float, Any]]:
    """(gap, prompt and greedy continuation) of the N_KEPT most clearly decided candidates, best first.

    The search ends early when n_good of them have a gap of GOOD_GAP.
    """
    n_batch = BATCH_TOKENS // spec.n_prompt
    words = np.random.PCG64(zlib.crc32(f"{spec.name}/prompts".encode()))
    kept: list[tuple[float, Any]] = []
    for _ in range(N_BATCHES):
        floor = kept[-1][0] if len(kept) == N_KEPT else GAP
        drawn = words.random_raw(n_batch * spec.n_prompt) % spec.n_vocab
        tokens = torch.from_numpy(drawn.astype(np.int64).reshape(n_batch, -1))
        smallest = torch.full((n_batch,), torch.inf)
        cache, last = DynamicCache(config=model.config), tokens
        for _ in range(N_GREEDY):
            logits = logits_of(model, last, cache)[:, -1]
            smallest = torch.minimum(smallest, gaps(logits))
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
            clear = torch.nonzero(smallest > floor).flatten()
            tokens, smallest = tokens[clear], smallest[clear]
            if not len(tokens):
                break
            golden_recurrent.select(cache, clear)
            last = tokens[:, -1:]
        for row, gap in zip(tokens.numpy(), smallest.tolist(), strict=True):
            if distinct(row[spec.n_prompt :]) >= min_distinct:
                kept.append((gap, row))
        kept = sorted(kept, key=lambda one: -one[0])[:N_KEPT]
        if len(kept) >= n_good and kept[n_good - 1][0] >= GOOD_GAP:
            break
    return kept


def distinct(tokens: Any) -> int:
    return len(set(tokens.tolist()))


def save(name: str, spec: models.Spec, weights: models.Tensors, **arrays: Any) -> None:
    path = models.GOLDEN / f"{name}.npz"
    np.savez_compressed(path, checksum=np.uint32(models.checksum(weights)), **arrays)
    print(f"    {path.name}: {path.stat().st_size} bytes, logits std {arrays['logits'].std():.2f}")


def report(gap: float, continuation: Any, error: float) -> None:
    n = distinct(continuation)
    print(f"    gap {gap:.3f}, {n} distinct tokens, reference against transformers {error:.1e}")


def make_dense(spec: models.Spec, weights: models.Tensors) -> None:
    model = build(spec, weights)
    gap, tokens = best_prompts(spec, model, 1, DISTINCT[-1])[0]
    prompt, continuation = np.split(tokens.astype(np.int32), [spec.n_prompt])
    logits = logits_of(model, torch.from_numpy(tokens)[None, : spec.n_prompt])[0].numpy()
    with TemporaryDirectory() as folder:
        file = reference.load(models.write_dense(Path(folder) / "model.gguf", spec))
    error = reference.relative_error(reference.forward(file, prompt), logits)
    report(gap, continuation, error)
    save(spec.name, spec, weights, gap=np.float32(gap), prompt=prompt, greedy=continuation, logits=logits)


def spread(predictor: Any, trace: reference.Trace, threshold: float, n_dense: int) -> tuple[Any, float]:
    """The predictor with fc2 moved so that no traced score is near the threshold and none changes its side.

    Also the smallest margin left: a row whose tokens don't allow the full margin gets a smaller one. A row
    that allows none at all makes the margin 0.
    """
    out, smallest = [], np.inf
    for (fc1, fc2), layer in zip(predictor, trace.layers, strict=True):
        hidden = np.maximum(layer.predictor_input[n_dense:] @ fc1.astype(np.float64).T, 0)  # [n, r]
        distances = hidden @ fc2.astype(np.float64).T - threshold  # [n, n_ff]
        side = np.where(distances >= 0, 1.0, -1.0)
        typical = np.sqrt(np.mean(distances**2))
        moved = fc2.copy()
        for j, row in enumerate(fc2.astype(np.float64)):
            for margin in MARGINS:
                found = apart(row, hidden, side[:, j], threshold, margin * typical)
                if found is not None:
                    moved[j] = found
                    break
            else:
                return None, 0.0
        left = side * (hidden @ moved.astype(np.float64).T - threshold) / typical
        smallest = min(smallest, float(left.min()))
        out.append((fc1, moved))
    return out, smallest


def apart(row: Any, hidden: Any, side: Any, threshold: float, distance: float) -> Any:
    """The F16 row (nearly) nearest to `row` that keeps its scores on their side by `distance`, or None."""
    exact = row.copy()
    for _ in range(3000):
        rounded = exact.astype(np.float16).astype(np.float64)
        short = distance - side * (hidden @ rounded - threshold)
        worst = int(short.argmax())
        if short[worst] <= 0:
            return rounded
        step = 1.05 * distance - side[worst] * (hidden[worst] @ exact - threshold)
        exact += side[worst] * step * hidden[worst] / (hidden[worst] @ hidden[worst])
    return None


def make_predicted(spec: models.Spec, weights: models.Tensors, *, n_dense: int) -> None:
    """A predicted golden whose first n_dense tokens use all neurons: none, or a prompt but its last token."""
    predictor = models.draw_predictor(spec)
    with TemporaryDirectory() as folder:

        def load(predictor: Any, threshold: float | None = None) -> reference.Model:
            path = Path(folder) / "model.gguf"
            return reference.load(models.write_sparse(path, spec, predictor, threshold))

        how: dict[str, Any] = {"predicted": True, "n_dense": n_dense}
        probe, trace = np.arange(spec.n_ctx // 2) % spec.n_vocab, reference.Trace()
        reference.forward(load(predictor), probe, predicted=True, trace=trace)
        scores = np.concatenate([layer.scores.ravel() for layer in trace.layers if layer.scores is not None])
        threshold = float(np.float32(round(float(np.quantile(scores, 1 - SPARSE_SHARE)), 3)))

        model = build(spec, weights)
        mask_ffn(spec, model, predictor, threshold, n_dense)
        candidates = itertools.chain.from_iterable(
            best_prompts(spec, model, N_KEPT, least) for least in DISTINCT
        )
        for gap, tokens in candidates:  # noqa: B007 - both are used after the loop
            trace = reference.Trace()
            before = reference.forward(load(predictor, threshold), tokens, trace=trace, **how)
            moved, margin = spread(predictor, trace, threshold, n_dense)
            if margin >= MARGINS[-1]:
                break
        else:
            raise ValueError(f"{spec.name}: no prompt lets the scores stay away from the threshold")
        trace = reference.Trace()
        logits = reference.forward(load(moved, threshold), tokens, trace=trace, **how)
    prompt, continuation = np.split(tokens.astype(np.int32), [spec.n_prompt])
    if not np.allclose(logits, before, rtol=1e-9, atol=1e-9):
        raise ValueError(f"{spec.name}: moving fc2 has changed the answer")
    if not np.array_equal(logits[spec.n_prompt - 1 : -1].argmax(-1), continuation):
        raise ValueError(f"{spec.name}: reference and masked transformers choose different tokens")
    error = reference.relative_error(logits, logits_of(model, torch.from_numpy(tokens)[None])[0].numpy())
    report(gap, continuation, error)
    shares = [f"{x.predicted[n_dense:].mean():.2f}/{x.active[n_dense:].mean():.2f}" for x in trace.layers]
    print(f"    threshold {threshold:.3f}, margin {margin:.3f}, predicted/active shares {' '.join(shares)}")
    arrays: dict[str, Any] = {"prompt": prompt, "greedy": continuation, "threshold": threshold}
    for i, (fc1, fc2) in enumerate(moved):
        arrays |= {f"fc1_{i}": fc1, f"fc2_{i}": fc2}
    rows = logits[n_dense:-1] if n_dense else logits[: spec.n_prompt]
    name = f"{spec.name}-{'decode' if n_dense else 'predicted'}"
    save(name, spec, weights, gap=np.float32(gap), logits=rows.astype(np.float32), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="specs of tests/specs.py (default: all)")
    names = parser.parse_args().names or list(models.SPECS)
    torch.set_num_threads(1)  # the models are too small for more
    models.GOLDEN.mkdir(exist_ok=True)
    for name in names:
        spec = models.SPECS[name]
        weights = models.draw(spec)
        print(name, flush=True)
        make_dense(spec, weights)
        if spec.predictor:
            make_predicted(spec, weights, n_dense=0)
            make_predicted(spec, weights, n_dense=spec.n_prompt - 1)


if __name__ == "__main__":
    main()
