"""`powerinfer quantize IN OUT TYPE`: a model in a smaller weight format."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .._engine.file import ModelFile
from .._text.table import columns, output_width, paragraph
from .._text.terminal import Bar
from ..models.quantize import FAST, Change, check_requantize, choose_types, find_mixture, quantize_model
from .info import short, size
from .llama_cpp import add_quantize
from .options import MODEL_HELP, Parser

EXAMPLES = """
powerinfer quantize model-f16.gguf model-q4.gguf Q4_K_M
powerinfer quantize model-f16.gguf model-q4.gguf Q4_K_M --dry-run
"""

MORE = "The result is a GGUF or PowerInfer file as IN is, with all its keys; nothing is loaded whole."

TYPES = """
types, with bits per weight; names and mixtures are llama.cpp's, in any case:
  Q2_K_S Q2_K Q3_K_S Q3_K_M Q3_K_L   2.6 to 4.3, at a price
  Q4_K_S Q4_K_M Q4_0 IQ4_NL Q4_1     4.5 to 5; Q4_K_M is a good choice
  Q5_K_S Q5_K_M Q5_0 Q5_1 Q6_K       5.5 to 6.6, hardly worse than the original
  Q8_0 F16 BF16 F32                  8.5, 16, 16, 32
  MXFP4_MOE                          4.25 in experts, as in gpt-oss; Q8_0 elsewhere
  COPY                               every tensor as it is; joins a split model
A format whose blocks (K formats: 256 weights) the rows of a matrix do not fill is replaced by one that fits;
the table says where, and which formats will run slowly here. The original PowerInfer runs F16 and Q4_0 files.
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="IN OUT TYPE [options]", more=MORE)
    parser.epilog = TYPES
    parser.add_argument("source", metavar="IN", help=f"{MODEL_HELP}; any part of a split model")
    parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("type", metavar="TYPE", help="see below")
    add_quantize(parser)
    parser.add_argument(
        "-t", "--n-threads", type=int, metavar="N", default=0, help="threads (default: physical cores)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be written, and write nothing"
    )
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="also quantise weights that are quantised already; their errors add up",
    )
    parser.add_argument("--pure", action="store_true", help="one format for all matrices, no exceptions")
    parser.add_argument(
        "--predictor-type",
        metavar="FORMAT",
        default="",
        help="of fc1 and fc2 (default: TYPE if that is Q4_0, Q8_0 or a float; else Q5_K, or Q8_0)",
    )
    parser.add_argument("--output-tensor-type", metavar="FORMAT", default="", help="of the output matrix")
    parser.add_argument(
        "--token-embedding-type", metavar="FORMAT", default="", help="of the token embeddings"
    )
    parser.add_argument(
        "--down-by-neuron",
        action="store_true",
        help="of ReLU models: rows of silent neurons are then not read; no other program reads the result",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    mixture = find_mixture(args.type)
    with ModelFile(args.source) as source:
        changes = choose_types(
            source,
            mixture,
            predictor_type=args.predictor_type,
            output_type=args.output_tensor_type,
            embedding_type=args.token_embedding_type,
            pure=args.pure,
            down_by_neuron=args.down_by_neuron,
        )
        if args.dry_run and not args.allow_requantize:
            check_requantize(changes)
        if not args.dry_run:
            with Bar(f"{mixture}: {args.out}") as bar:
                quantize_model(
                    source,
                    args.out,
                    mixture,
                    changes,
                    allow_requantize=args.allow_requantize,
                    n_threads=args.n_threads or args.n_threads_last or 0,
                    progress=bar,
                )
    if args.json:
        print(json.dumps(as_json(mixture, changes), indent=2))
    else:
        show(changes, each=args.dry_run)
    return 0


@dataclass
class Sum:
    """Of some tensors."""

    n_tensors: int = 0
    n_weights: int = 0
    n_bytes_before: int = 0
    n_bytes: int = 0

    def add(self, change: Change) -> None:
        self.n_tensors += 1
        self.n_weights += math.prod(change.tensor.shape)
        self.n_bytes_before += change.tensor.n_bytes
        self.n_bytes += change.n_bytes

    @property
    def bits(self) -> float:
        """Per weight, in the result."""
        return 8 * self.n_bytes / max(1, self.n_weights)


def sums(changes: Sequence[Change]) -> tuple[dict[str, Sum], Sum]:
    """For each format of the result, the most bytes first, and in all."""
    of_type: dict[str, Sum] = {}
    total = Sum()
    for change in changes:
        of_type.setdefault(change.type, Sum()).add(change)
        total.add(change)
    return dict(sorted(of_type.items(), key=lambda item: -item[1].n_bytes)), total


def as_json(mixture: str, changes: Sequence[Change]) -> dict[str, object]:
    """All that the tables say, and every tensor."""
    of_type, total = sums(changes)

    def record(one: Sum) -> dict[str, object]:
        return {**asdict(one), "bits_per_weight": one.bits}

    return {
        "mixture": mixture,
        "total": record(total),
        "types": {name: record(one) for name, one in of_type.items()},
        "tensors": [
            {
                "name": change.tensor.name,
                "shape": list(change.tensor.shape),
                "type_before": change.tensor.type,
                "type": change.type,
                "wanted": change.wanted or change.type,
                "n_bytes_before": change.tensor.n_bytes,
                "n_bytes": change.n_bytes,
            }
            for change in changes
        ],
    }


def show(changes: Sequence[Change], *, each: bool) -> None:
    """Tables for people: with `each`, every tensor first."""
    width = output_width()
    if each:
        rows = [["tensor", "shape", "is", "becomes", "bytes"]]
        rows += [
            [
                short(c.tensor.name, 100),
                " x ".join(map(str, c.tensor.shape)),
                c.tensor.type,
                c.type,
                f"{c.n_bytes:,}",
            ]
            for c in changes
        ]
        print("\n".join(columns(rows, right=(4,), width=width)), end="\n\n")
    of_type, total = sums(changes)
    rows = [["type", "tensors", "before", "after", "bits per weight"]]
    rows += [
        [name, str(one.n_tensors), size(one.n_bytes_before), size(one.n_bytes), f"{one.bits:.2f}"]
        for name, one in [*of_type.items(), ("all", total)]
    ]
    print("\n".join(columns(rows, right=(1, 2, 3, 4), width=width)))
    for (wanted, type), n in Counter((c.wanted, c.type) for c in changes if c.wanted).items():
        what = "1 tensor is" if n == 1 else f"{n} tensors are"
        print(paragraph(f"{what} {type} instead of {wanted}, whose blocks the rows do not fill", width=width))
    slow = [name for name in of_type if name not in FAST]
    if slow:
        formats = " and ".join(filter(None, [", ".join(slow[:-1]), slow[-1]]))
        text = f"{formats} will run slowly: this engine has fast kernels for {', '.join(FAST)}"
        print(paragraph(text, width=width))
