"""Compute tests/golden/checkpoint-*.npz: what transformers says of small random checkpoints, in float32.

For maintainers; needs torch and transformers. Run from the repository root:

    python scripts/golden_checkpoints.py [NAME ...]

Of many random prompts the one is kept whose smallest distance between the best and the second logit, over
64 greedy steps and relative to the rms of that row's logits, is largest; of a mixture of experts also the
distance between the last expert that a token has and the first that it has not.
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

N_GREEDY, N_PROMPTS, N_ROUNDS = 64, 48, 8
LEAST_GAP = 0.03
DISTINCT = 3  # greedy tokens; small random models soon repeat themselves


def build(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The model with its drawn weights, and their shapes."""
    case = checkpoints.CASES[name]
    kind = "LMHeadModel" if case.model == "GPT2" else "ForCausalLM"
    text = f"{case.model}TextConfig"  # of those that see, too
    config = getattr(transformers, text if hasattr(transformers, text) else f"{case.model}Config")(
        **checkpoints.config_of(case), attn_implementation="eager"
    )
    model = getattr(transformers, case.model + kind)(config)
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {
        n: tuple(p.shape)
        for n, p in named
        if isinstance(p, torch.nn.Parameter) or n.endswith(checkpoints.BUFFERS)
    }
    state = {n: torch.from_numpy(checkpoints.draw(name, n, s).astype(np.float32)) for n, s in shapes.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight", "embed_out.weight"} if case.value("tie_word_embeddings") else set()
    if unexpected or [n for n in missing if n in shapes and n not in tied]:
        raise ValueError(f"{name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval(), shapes


class Routes:
    """Beside a run: for each sequence, the smallest distance between experts chosen and not, relative to
    their spread over all. What prompts are rounded to counts more, so theirs must be larger."""

    def __init__(self, n_sequences: int, n_prompt: int, n_expert: int) -> None:
        self.gap = np.full(n_sequences, np.inf)
        self.n_prompt, self.n_expert, self.topk = n_prompt, n_expert, torch.topk

    def __enter__(self) -> Routes:
        def watched(x: torch.Tensor, k: int, *rest: Any, **more: Any) -> Any:
            if x.shape[-1] == self.n_expert and k < self.n_expert:
                best = self.topk(x, k + 1).values
                gap = ((best[..., k - 1] - best[..., k]) / x.std(-1)).reshape(len(self.gap), -1)
                gap[:, : self.n_prompt] /= 4
                self.gap = np.minimum(self.gap, gap.min(1).values.numpy())
            return self.topk(x, k, *rest, **more)

        self.method = torch.Tensor.topk
        torch.topk = torch.Tensor.topk = watched
        return self

    def __exit__(self, *_: object) -> None:
        torch.topk, torch.Tensor.topk = self.topk, self.method


def continued(model: Any, prompts: torch.Tensor, n_expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [n, N_GREEDY] and the smallest relative gap of each; n_expert: 0, or of a mixture."""
    n = prompts.shape[1]
    with torch.no_grad():
        ids = model.generate(
            prompts, max_new_tokens=N_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with Routes(len(prompts), n, n_expert) as routes:
            rows = model(input_ids=ids, use_cache=False).logits[:, n - 1 : -1]
    top = rows.topk(2).values
    gaps = (top[..., 0] - top[..., 1]) / rows.pow(2).mean(-1).sqrt()
    gaps[rows.argmax(-1) != ids[:, n:]] = 0
    return ids[:, n:].numpy(), np.minimum(gaps.min(1).values.numpy(), 8 * routes.gap)


def main() -> int:
    for name in sys.argv[1:] or checkpoints.CASES:
        case = checkpoints.CASES[name]
        model, shapes = build(name)
        n_expert = case.keys.get("expert_count", 0)
        rng = np.random.default_rng(len(name))
        best: tuple[float, Any, Any] = (-1.0, None, None)
        for _ in range(N_ROUNDS):
            prompts = rng.integers(3, checkpoints.N_VOCAB, (N_PROMPTS, case.n_prompt))
            greedy, gaps = continued(model, torch.from_numpy(prompts), n_expert)
            for i in np.argsort(-gaps)[:3]:
                if len(set(greedy[i].tolist())) >= DISTINCT and gaps[i] > best[0]:
                    best = (float(gaps[i]), prompts[i], greedy[i])
            if best[0] > LEAST_GAP:
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
