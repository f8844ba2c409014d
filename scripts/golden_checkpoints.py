"""Compute tests/golden/checkpoint-*.npz: what transformers says of small random checkpoints, in float32.

For maintainers; needs torch and transformers. Run from the repository root:

    python scripts/golden_checkpoints.py [NAME ...]

Of many random prompts the one is kept whose smallest distance between the best and the second logit, over
64 greedy steps and relative to the rms of that row's logits, is largest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import checkpoints
from tests.models import GOLDEN

N_GREEDY, N_PROMPTS, N_ROUNDS = 64, 48, 4
DISTINCT = 3  # greedy tokens; small random models soon repeat themselves


def build(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The model with its drawn weights, and their shapes."""
    case = checkpoints.CASES[name]
    kind = "LMHeadModel" if case.model == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{case.model}Config")(
        **checkpoints.config_of(case), attn_implementation="eager"
    )
    model = getattr(transformers, case.model + kind)(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    state = {n: torch.from_numpy(checkpoints.draw(name, n, s).astype(np.float32)) for n, s in shapes.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight", "embed_out.weight"} if case.value("tie_word_embeddings") else set()
    if unexpected or [n for n in missing if n not in tied and "rotary" not in n and "masked_bias" not in n]:
        raise ValueError(f"{name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval(), shapes


def continued(model: Any, prompts: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [n, N_GREEDY] and the smallest relative gap of each."""
    ids, gaps = prompts, []
    for _ in range(N_GREEDY):
        with torch.no_grad():
            row = model(input_ids=ids, use_cache=False).logits[:, -1]
        top = row.topk(2).values
        gaps.append(((top[:, 0] - top[:, 1]) / row.pow(2).mean(1).sqrt()).numpy())
        ids = torch.cat([ids, row.argmax(1, keepdim=True)], 1)
    return ids[:, prompts.shape[1] :].numpy(), np.min(gaps, axis=0)


def main() -> int:
    for name in sys.argv[1:] or checkpoints.CASES:
        case = checkpoints.CASES[name]
        model, shapes = build(name)
        rng = np.random.default_rng(len(name))
        best: tuple[float, Any, Any] = (-1.0, None, None)
        for _ in range(N_ROUNDS):
            prompts = rng.integers(3, checkpoints.N_VOCAB, (N_PROMPTS, case.n_prompt))
            greedy, gaps = continued(model, torch.from_numpy(prompts))
            for i in np.argsort(-gaps)[:3]:
                if len(set(greedy[i].tolist())) >= DISTINCT and gaps[i] > best[0]:
                    best = (float(gaps[i]), prompts[i], greedy[i])
            if best[0] > 0.03:
                break
        gap, prompt, tokens = best
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(prompt)[None]).logits[0].numpy()
        np.savez_compressed(
            GOLDEN / f"checkpoint-{name}.npz",
            names=np.array(list(shapes)),
            shapes=np.array([",".join(map(str, s)) for s in shapes.values()]),
            prompt=prompt.astype(np.int32),
            logits=logits.astype(np.float32),
            greedy=tokens.astype(np.int32),
        )
        print(
            f"{name}: gap {gap:.3f}, {len(set(tokens.tolist()))} distinct tokens, logits {logits.std():.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
