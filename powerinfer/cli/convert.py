"""`powerinfer convert HF_DIR -o OUT.gguf`: a published checkpoint becomes a file that the engine reads."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from .._engine.activations import ACTIVATIONS
from .._text.table import columns, facts, output_width
from .._text.terminal import Bar, one_line
from ..errors import ArgumentError
from .info import size
from .options import Parser

if TYPE_CHECKING:
    from ..models.convert.check import Check
    from ..models.convert.conversion import Conversion

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")

EXAMPLES = """
powerinfer convert Mistral-7B -o mistral.gguf --type Q8_0
powerinfer convert ReluLLaMA-7B --predictors Predictor-7B -o relu.gguf --check
powerinfer convert my-lora --base Mistral-7B -o lora.gguf     an adapter of PEFT
"""

MORE = """
Reads safetensors or PyTorch files, of which nothing is executed, of all
families that the engine runs (docs/models.md). With predictors the result is a
PowerInfer file, which the original reads as well; without, an ordinary GGUF
file. --check asks transformers, if the engine's own reading of checkpoints
does not know the family. A folder with adapter_config.json is a LoRA adapter:
--base names the folder of its model, of which config.json is read, and weights
that the adapter has copies of.
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="HF_DIR -o FILE [options]", more=MORE)
    parser.add_argument("folder", metavar="HF_DIR", help="a folder with config.json, weights and tokenizer")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    parser.add_argument(
        "--type", choices=_TYPES, type=str.upper, help="of the matrices (default F16, of an adapter F32)"
    )
    parser.add_argument("--base", metavar="HF_DIR", help="of an adapter: the model that it was trained for")
    parser.add_argument(
        "--predictors", metavar="DIR", help="a folder of model_0.pt, model_1.pt ... and perhaps config.json"
    )
    parser.add_argument(
        "--activation", metavar="DIR", help="a folder of activation_0.pt ...: how often each neuron fires"
    )
    parser.add_argument(
        "--transpose-down",
        action="store_true",
        help="without predictors, for ReLU models: store ffn_down as the rows of neurons, so that those of "
        "silent ones are not read in any format; llama.cpp does not read such a file",
    )
    parser.add_argument(
        "--no-mtp",
        action="store_true",
        help="leave out the layer that guesses at further tokens, which some checkpoints have",
    )
    parser.add_argument(
        "--hidden-act",
        choices=ACTIVATIONS,
        default="",
        help="what the model was trained with, if config.json errs",
    )
    parser.add_argument(
        "--pre", metavar="NAME", default="", help="the pre-tokenizer, if it is not recognised"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare answers: a few prompts through the checkpoint, slowly and exactly, and the file",
    )


def main(args: argparse.Namespace) -> int:
    from ..models.convert.adapter import is_adapter
    from ..models.convert.check import check
    from ..models.convert.conversion import convert, open_source
    from ..models.convert.transformers_model import require_transformers

    if is_adapter(args.folder):
        return _adapter(args)
    if args.base:
        raise ArgumentError(f"--base is for adapters, and {args.folder} has no adapter_config.json")
    args.type = args.type or "F16"
    if args.predictors and args.transpose_down:
        raise ArgumentError(
            "--transpose-down is for files without predictors: those with are transposed anyway"
        )
    if args.check:
        require_transformers(open_source(args.folder, hidden_act=args.hidden_act).hyper)
    with Bar("converting") as bar:
        done = convert(
            args.folder,
            args.output,
            type=args.type,
            predictors=args.predictors,
            activation=args.activation,
            hidden_act=args.hidden_act,
            pre=args.pre,
            transpose_down=args.transpose_down,
            next_head=not args.no_mtp,
            progress=bar,
        )
    for line in facts(summary(done), width=output_width()):
        print(line)
    if not args.check:
        return 0
    with Bar("checking") as bar:
        result = check(
            open_source(args.folder, hidden_act=args.hidden_act), args.output, type=args.type, progress=bar
        )
    print()
    for line in show_check(result, args.type):
        print(line)
    return 0 if result.passed else 1


def _adapter(args: argparse.Namespace) -> int:
    from ..models.convert.adapter import convert_adapter

    for name in ("predictors", "activation", "transpose_down", "no_mtp", "hidden_act", "pre", "check"):
        if getattr(args, name):
            raise ArgumentError(f"--{name.replace('_', '-')} is for models, and {args.folder} is an adapter")
    if not args.base:
        raise ArgumentError(f"{args.folder} is an adapter: --base names the folder of its model")
    done = convert_adapter(args.folder, args.output, base=args.base, type=args.type or "F32")
    ranks = ", ".join(map(str, done.ranks))
    rows = [
        ("file", f"{one_line(str(done.path))}: a LoRA adapter for {done.arch} models, {done.type}"),
        ("changes", f"{done.n_matrices} matrices, by ranks of {ranks}, alpha {done.alpha:g}"),
    ]
    for line in facts(rows, width=output_width()):
        print(line)
    return 0


def summary(done: Conversion) -> list[tuple[str, str]]:
    """What was written, and what the user should know about it."""
    h = done.hyper
    kind = "PowerInfer GGUF" if done.is_powerinfer else "GGUF"
    act = h.act + (f" above {h.act_threshold:g}" if h.act_threshold else "")
    rows = [
        (
            "file",
            f"{one_line(str(done.path))}: {kind}, {done.n_tensors} tensors, {size(done.n_bytes)} {done.type}",
        ),
        ("model", f"{h.arch}, {h.n_layer} layers, {h.n_embd} wide, {h.n_ff} neurons a layer, {act}"),
    ]
    found = done.predictors
    if found is not None:
        ranks = (
            f"{min(found.ranks)}..{max(found.ranks)}" if len(set(found.ranks)) > 1 else str(found.ranks[0])
        )
        threshold = "0 (none given)" if found.threshold is None else f"{found.threshold:g}"
        if found.thresholds:
            threshold = f"{min(found.thresholds):g}..{max(found.thresholds):g} by layer"
        rows.append(("predictors", f"{len(found.ranks)}, of rank {ranks}, threshold {threshold}"))
    if done.n_counted_tokens:
        rows.append(
            ("activation", f"counts of {h.n_layer} layers, the hottest neuron's is {done.n_counted_tokens}")
        )
    if done.fallbacks:
        shown = _some(done.fallbacks)
        rows.append(("F16 instead", f"{shown}: rows that do not divide into the blocks of {done.type}"))
    if done.left_out:
        rows.append(("left out", f"{_some(done.left_out)}: nothing that the file lacks"))
    rows += [("note", one_line(note)) for note in done.notes]
    return rows


def _some(names: tuple[str, ...]) -> str:
    """Tensors' names, those that differ in the layer only as one."""
    kinds = Counter(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    shown = [one_line(kind) + (f" ({n})" if n > 1 else "") for kind, n in kinds.most_common(4)]
    return ", ".join(shown) + (" and more" if len(kinds) > 4 else "")


def show_check(result: Check, type: str) -> list[str]:
    """A line per prompt, then what it means."""
    rows = [("prompt", "tokens", "same top", "KL", "distance", "unexplained", "bound")]
    for prompt in result.prompts:
        text = one_line(prompt.text)
        rows.append(
            (
                text if len(text) <= 20 else text[:17] + "...",  # 79 columns in all
                str(prompt.n_tokens),
                f"{prompt.same_top:.0%}",
                f"{prompt.kl:.1e}",
                f"{prompt.distance:.1e}",
                f"{prompt.unexplained:.1e}",
                f"{prompt.bound:.1e}",
            )
        )
    lines = list(columns(rows, right=range(1, 7), width=output_width()))
    verdict = "as the checkpoint does" if result.passed else "NOT as the checkpoint does"
    also = " and activations of 8 bits" if type.startswith("Q") else ""
    words = (
        "distance: the largest difference of two logits, as a share of their span; unexplained: the same, to "
        f"the checkpoint with weights rounded to {type}; bound: what other orders of sums{also} explain."
    )
    lines += ["", f"The file answers {verdict} (all neurons, {result.mode} mode)."]
    return lines + textwrap.wrap(words, output_width() or 110)
