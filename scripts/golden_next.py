"""Computes tests/golden/next-*.npz: what transformers' MTP layer answers, in float32, for the architectures
whose MTP layers transformers knows. For maintainers; run from the repository root like make_goldens.py:

    python scripts/golden_next.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from golden_models import build

from tests import models, next_head

N_ROWS = 12  # the last ones of the prompt


def make(name: str) -> None:
    spec = models.SPECS[name]
    longer = next_head.longer(spec)
    weights = models.draw(longer)
    whole = build(longer, weights)
    main = build(spec, models.draw(spec))
    main.config.num_mtp_layers = 1
    mtp = MtpModel(main, 1).float().eval()
    layer = mtp.layers[0]
    layer.mtp_block.load_state_dict(whole.model.layers[spec.n_layer].state_dict())
    _, tensors = next_head.with_head(spec)
    own = {
        "enorm": layer.enorm,
        "hnorm": layer.hnorm,
        "eh_proj": layer.eh_proj,
        "shared_head_norm": layer.post_norm,
    }
    for part, module in own.items():
        value = tensors[f"blk.{spec.n_layer}.nextn.{part}.weight"]
        module.weight.data = torch.from_numpy(value.astype(np.float32))
    prompt = torch.from_numpy(np.random.default_rng(6).integers(3, spec.n_vocab, (1, spec.n_prompt)))
    with torch.no_grad():
        hidden = main(prompt, output_hidden_states=True).hidden_states[-1][:, :-1]
        embeddings = main.get_input_embeddings()(prompt[:, 1:])
        positions = torch.arange(1, prompt.shape[1])[None]
        mask = create_causal_mask(mtp.config, embeddings, None, None, positions)
        said = layer(
            embeddings,
            hidden,
            position_embeddings=mtp.rotary_emb(embeddings, positions),
            attention_mask=mask,
            position_ids=positions,
            cache=None,
        )
        logits = main.lm_head(said)[0, -N_ROWS:]
    path = Path(models.GOLDEN) / f"next-{name}.npz"
    np.savez_compressed(
        path,
        prompt=prompt[0].numpy().astype(np.int32),
        hidden=hidden[0].numpy(),
        logits=logits.numpy(),
        checksum=models.checksum(tensors),
    )
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    for name in ("deepseek2-v3", "glm4moe"):
        make(name)
