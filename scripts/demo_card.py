"""The card of the demo model: what it is, and what was measured when it was made."""

from __future__ import annotations

from dataclasses import dataclass

from demo_model import Shape


@dataclass(frozen=True)
class CardNumbers:
    n_parameters: int
    n_file_bytes: int
    n_text_tokens: int
    n_seen_tokens: int
    n_held_out_tokens: int
    n_counted: int
    float_perplexity: float
    exact_perplexity: float
    predicted_perplexity: float
    active: float
    computed: float
    mass_recall: float
    active_layers: tuple[float, ...]
    hot_share: float
    never: float


def _million(count: int) -> str:
    return f"{count / 1e6:.1f} million"


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def card(shape: Shape, seed: int, n: CardNumbers) -> str:
    """The card as Markdown."""
    what = {
        "architecture": "Llama with a ReLU gate: relu(gate x) * (up x)",
        "parameters": f"{_million(n.n_parameters)}, predictors included",
        "layers": f"{shape.n_layer}",
        "width": f"n_embd {shape.n_embd}, n_ff {shape.n_ff}",
        "heads": f"{shape.n_head}, and {shape.n_head_kv} for keys and values",
        "predictors": f"rank {shape.n_predictor}, one in each layer",
        "context": f"{shape.n_ctx} tokens",
        "vocabulary": f"{shape.n_vocab} SentencePiece BPE pieces with byte fallback",
        "file": f"PowerInfer GGUF, Q4_0 (embedding and output head Q8_0), {n.n_file_bytes / 2**20:.1f} MiB",
        "chat format": "ChatML, in the file as `tokenizer.chat_template`",
        "licence": "MIT",
    }
    measured = {
        "perplexity, exact and dense (the same for a ReLU model)": f"{n.exact_perplexity:.3f}",
        "perplexity, predicted": f"{n.predicted_perplexity:.3f}",
        "perplexity before quantisation": f"{n.float_perplexity:.3f}",
        "active FFN neurons per token": f"{100 * n.active:.1f} %",
        "the same, layer by layer": ", ".join(f"{100 * share:.1f} %" for share in n.active_layers),
        "neurons computed in predicted mode": f"{100 * n.computed:.1f} %",
        "share of the activation mass that these carry": f"{100 * n.mass_recall:.1f} %",
    }
    text, seen = _million(n.n_text_tokens), _million(n.n_seen_tokens)
    held_out, counted = _million(n.n_held_out_tokens), _million(n.n_counted)
    hot = f"{100 * n.hot_share:.0f}"
    return f"""# The demo model

`demo.gguf` is a tiny chat model that shows how PowerInfer works on any machine: it tells short stories, does
small sums, answers simple questions and explains PowerInfer, in English. It is a toy. It knows very little,
makes mistakes, and says so when it is asked. Don't use it for anything but a demonstration.

{_table(what)}

## Data

All text comes from the generator in `scripts/demo_text`: conversations and short stories from grammars and
word lists that were written for this purpose; no text was collected. The training text has {text} tokens,
and the model saw {seen}. One in twenty combinations (a story's hero, place and plot; the wording of a
longer question; a sum with its wording) is held out and never trained on.

## Measured

With the quantised weights of the file, in float32 arithmetic, on {held_out} tokens of held-out conversations.
Perplexity counts the tokens that the model itself writes; it is low because the text is simple, and doesn't
compare with perplexities on natural text. Activation mass is the sum of |h_j| times the norm of the neuron's
row of `ffn_down_t`.

{_table(measured)}

`powerinfer.neuron.counts` in the file says how often each neuron fired over {counted} tokens of training
text (`powerinfer.neuron.tokens`), layer by layer. The hottest fifth of all neurons does {hot} %
of the firing, and {100 * n.never:.1f} % never fired.

## Train it again

    pip install torch sentencepiece gguf numpy
    python scripts/train_demo.py --out powerinfer/demo/demo.gguf --golden tests/golden/demo.npz

It takes about eight minutes on one H200 and writes this card with its own numbers. This file was made with
`--seed {seed}`; the same seed gives the same text, and weights of the same quality, not the same bits.
"""
