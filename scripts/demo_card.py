"""The card of the demo model: what it is, and what the commands measured when `make_demo.sh` made it.

    python scripts/demo_card.py FOLDER WORK

reads FOLDER/{config,training}.json and WORK/{profile,check,perplexity}.json, and writes WORK/README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def million(count: int) -> str:
    return f"{count / 1e6:.1f} million"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def card(
    *,
    config: dict[str, Any],
    training: dict[str, Any],
    profile: dict[str, Any],
    check: dict[str, Any],
    perplexity: dict[str, Any],
    n_file_bytes: int,
) -> str:
    """The card as Markdown. The arguments: what the files of these names hold."""
    modes = {result["sparsity"]: result for result in perplexity["results"]}
    predicted = modes["predicted"]["comparison"]
    n_tokens = modes["dense"]["n_tokens"]
    layers = check["layers"]
    ranks = [layer["rank"] for layer in layers]

    def mean(name: str) -> float:
        return float(sum(layer["point"][name] for layer in layers)) / len(layers)

    what = {
        "architecture": "Llama with a ReLU gate: relu(gate x) * (up x)",
        "parameters": f"{million(training['n_parameters'])}, and those of the predictors",
        "layers": f"{config['num_hidden_layers']}",
        "width": f"n_embd {config['hidden_size']}, n_ff {config['intermediate_size']}",
        "heads": f"{config['num_attention_heads']}, and {config['num_key_value_heads']} for keys and values",
        "predictors": f"one in each layer, of rank {', '.join(map(str, ranks))}",
        "context": f"{config['max_position_embeddings']} tokens",
        "vocabulary": f"{config['vocab_size']} SentencePiece BPE pieces with byte fallback",
        "file": f"PowerInfer GGUF, Q4_0 (embedding and output head Q8_0), {n_file_bytes / 2**20:.1f} MiB",
        "chat format": "ChatML, in the file as `tokenizer.chat_template`",
        "licence": "MIT",
    }
    measured = {
        f"perplexity, {mode}": f"{result['value']:.4f} ± {result['error']:.4f}"
        for mode, result in modes.items()
    } | {
        "predicted over dense": f"{predicted['ratio']:.5f} ± {predicted['ratio_error']:.5f}",
        "same first choice, predicted and dense": f"{100 * predicted['same_top']:.2f} %",
        "active FFN neurons per token": percent(mean("active")),
        "the same, layer by layer": ", ".join(percent(layer["point"]["active"]) for layer in layers),
        "neurons computed in predicted mode": percent(mean("computed")),
        "of the active neurons, found": percent(mean("recall")),
        "share of the activation mass that these carry": percent(mean("mass")),
        "FFN weight rows read in predicted mode, over dense": percent(check["rows"]),
        "FFN bytes read in predicted mode, predictors included, over dense": percent(check["bytes"]),
    }
    everything = profile["all"]
    return f"""# The demo model

`demo.gguf` is a tiny chat model that shows how PowerInfer works on any machine: it tells short stories, does
small sums, answers simple questions and explains PowerInfer, in English. It is a toy. It knows very little,
makes mistakes, and says so when it is asked. Don't use it for anything but a demonstration.

{table(what)}

## Data

All text comes from `scripts/demo_text.py`: conversations and short stories from templates and word lists that
were written for this purpose; no text was collected. The training text has
{million(training["n_text_tokens"])} tokens, and the model saw {million(training["n_seen_tokens"])}.
One in twenty exchanges, by the wording of question and answer, is held out and never trained on, neither by
the model nor by its predictors.

## Measured

By `powerinfer perplexity` and `powerinfer predictor check` with this file, on held-out conversations:
{n_tokens:,} tokens in windows of {perplexity["n_ctx"]}, what the user says included. On the tokens that the
model itself writes the perplexity is {training["perplexity"]:.3f}, which the training script measured with
weights rounded to Q4_0. Both are low because the text is simple, and don't compare with perplexities on
natural text. Activation mass is the sum of |h_j| times the norm of the neuron's row of `ffn_down_t`. The
whole check is in [docs/demo-predictor.md](../../docs/demo-predictor.md).

{table(measured)}

`powerinfer.neuron.counts` in the file says how often each neuron fired over {profile["n_tokens"]:,} tokens
of training text (`powerinfer.neuron.tokens`), layer by layer: {percent(everything["carry_80"])} of all
neurons do 80 % of the firing, and {percent(everything["never"])} never fired.

## Make it again

    pip install '.[plot,train]' gguf sentencepiece transformers
    python scripts/train_demo.py --out powerinfer-demo
    sh scripts/make_demo.sh powerinfer-demo work

The first takes about seven minutes on one H200 and writes a Hugging Face folder. The second makes the file of
it with the commands that any other model takes, and this card with its own numbers;
[docs/bring-your-own-model.md](../../docs/bring-your-own-model.md) goes through them. This file was made with
`--seed {training["seed"]}`; the same seed gives the same text, and weights of the same quality, not the same
bits.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model's card.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what train_demo.py wrote")
    parser.add_argument("work", type=Path, metavar="WORK", help="what make_demo.sh wrote so far")
    args = parser.parse_args()

    def read(path: Path) -> dict[str, Any]:
        return dict(json.loads(path.read_text(encoding="utf-8")))

    text = card(
        config=read(args.folder / "config.json"),
        training=read(args.folder / "training.json"),
        profile=read(args.work / "profile.json"),
        check=read(args.work / "check.json"),
        perplexity=read(args.work / "perplexity.json"),
        n_file_bytes=(args.work / "demo.gguf").stat().st_size,
    )
    (args.work / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
