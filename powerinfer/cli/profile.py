"""`powerinfer profile MODEL --text FILE...`: how often each neuron fires, and where those counts go. Of a
mixture, how often each expert is used.

The table is on stdout. Files appear when they are complete; nothing is written if counting is broken off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .._engine.activations import SILENT
from .._engine.counts import Counts
from .._engine.file import ModelFile
from .._engine.session import Activation, Model
from .._text.table import columns, output_width, paragraph
from .._text.terminal import Bar, one_line
from ..errors import ArgumentError
from ..models.corpus import read_corpus
from ..models.profile import check_can_be_profiled, check_can_plot, plot, profile
from ..models.rewrite import check_target, rewrite
from ..models.statistics import (
    ExpertSummary,
    Summary,
    read_activation_dir,
    summarise,
    summarise_all,
    summarise_all_experts,
    summarise_experts,
    write_activation_dir,
)
from ..models.writer import check_new_dir, check_new_file
from .options import Parser, add_model
from .perplexity import add_text_arguments, percent

EXAMPLES = """
powerinfer profile model.gguf --text corpus.txt -o profiled.gguf --plot neurons.png
powerinfer profile -m model.gguf -f corpus.txt --in-place
"""

MORE = """
The text is computed with all neurons, in windows of --n-ctx tokens, and for each neuron is counted how often
it fires. The counts go into the file as the keys powerinfer.neuron.counts and powerinfer.neuron.tokens; its
tensors stay as they are. Without -o or --in-place only the table is shown. It says of each layer which share
of the neurons fires for a token (active), how many of them, the hottest ones, do 80 % and 90 % of all firing
(80 % by, 90 % by), and how many never fired.

Of a mixture of experts it is counted how often each expert is used (powerinfer.expert.counts and
powerinfer.expert.tokens), and the table says which share of all uses the most used 10, 25 and 50 % of a
layer's experts have. A plan for a GPU begins with these.
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="MODEL --text FILE [FILE ...] [options]", more=MORE)
    add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    add_text_arguments(parser, source)
    source.add_argument(
        "--read-activation",
        metavar="DIR",
        help="do not run the model: take the counts of activation_0.pt, activation_1.pt ... in DIR",
    )
    group = parser.add_argument_group("what is written")
    target = group.add_mutually_exclusive_group()
    target.add_argument("-o", "--output", metavar="OUT.gguf", help="the model with the counts")
    target.add_argument("--in-place", action="store_true", help="MODEL itself gets the counts")
    group.add_argument("--activation-dir", metavar="DIR", help="a new folder of activation_0.pt ...")
    group.add_argument("--plot", metavar="OUT.png", help="a picture of the power law (.png, .svg or .pdf)")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group = parser.add_argument_group("how it is counted")
    group.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        default=0,
        help="count over the first N tokens of the text (default all); with --read-activation: over how many "
        "tokens was counted",
    )
    group.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        metavar="N",
        default=0,
        help="tokens of a window (default 512, or what the model was trained with if that is less)",
    )
    group.add_argument("-t", "--n-threads", type=int, metavar="N", help="threads (default: physical cores)")
    group.add_argument(
        "-b",
        "--n-batch",
        type=int,
        metavar="N",
        default=512,
        help="tokens computed together (default %(default)s; fewer for wide models)",
    )
    group.add_argument("--activation", choices=SILENT, help="replaces the file's activation")


def check_outputs(args: argparse.Namespace, file: ModelFile, target: str | Path | None) -> None:
    """Raises what would only be found out after a long run. target: where the model with the counts goes."""
    if target is not None:
        check_target(file, target)
        check_new_file(target, n_bytes=file.info.n_bytes)
    if args.plot is not None:
        check_can_plot(args.plot)
        check_new_file(args.plot)
    if args.activation_dir is not None:
        check_new_dir(args.activation_dir)


def count(args: argparse.Namespace, file: ModelFile) -> Counts | None:
    """The counts; None if Ctrl-C came first."""
    if args.tokens < 0:
        raise ArgumentError(f"--tokens is {args.tokens}, it cannot be negative")
    activation: Activation = args.activation or "auto"
    with Model(file, activation=activation, predictor="none", load=False) as model:
        info = model.info
    if args.read_activation is not None:
        return read_activation_dir(
            args.read_activation,
            n_layer=info.n_layer,
            n_ff=info.n_expert or info.n_ff,
            n_tokens=args.tokens or None,
            unit="experts" if info.n_expert else "neurons",
        )
    check_can_be_profiled(info)
    corpus = read_corpus(file, args.text, special=args.special)
    done = 0
    with Bar(f"loading {args.model}") as bar:
        model = Model(file, activation=activation, predictor="none", progress=bar)
    with model, Bar("counting") as bar:

        def progress(now: int, total: int) -> None:
            nonlocal done
            done = now
            bar(now, total)

        try:
            return profile(
                model,
                corpus,
                n_ctx=args.n_ctx,
                n_tokens=args.tokens,
                n_batch=args.n_batch,
                n_threads=args.n_threads or 0,
                progress=progress,
            )
        except KeyboardInterrupt:
            bar.close()
            print(
                f"powerinfer: stopped after {done:,} tokens were counted; nothing was written",
                file=sys.stderr,
            )
            return None


def main(args: argparse.Namespace) -> int:
    with ModelFile(args.model) as file:
        target = file.path if args.in_place else args.output
        check_outputs(args, file, target)
        counts = count(args, file)
        if counts is None:
            return 130
        try:
            write(args, file, target, counts)
        finally:  # counting took long: what it found is shown, even if it cannot be kept
            show(args, counts)
    return 0


def write(args: argparse.Namespace, file: ModelFile, target: str | Path | None, counts: Counts) -> None:
    """All that was asked for."""
    if target is not None:
        with Bar(f"writing {target}") as bar:
            rewrite(file, target, keys=counts.keys, progress=bar)
    if args.activation_dir is not None:
        write_activation_dir(args.activation_dir, counts)
    if args.plot is not None:
        plot(counts, args.plot, title=one_line(Path(file.path).name))


def show(args: argparse.Namespace, counts: Counts) -> None:
    """Prints the power law, or how uneven the use of experts is."""
    is_mixture = counts.unit == "experts"
    total: Summary | ExpertSummary
    layers: Sequence[Summary | ExpertSummary]
    if is_mixture:
        total, layers = summarise_all_experts(counts), summarise_experts(counts)
    else:
        total, layers = summarise_all(counts), summarise(counts)
    if args.json:
        out = {
            "model": args.model,
            "n_tokens": counts.n_tokens,
            "n_layer": counts.n_layer,
            "n_expert" if is_mixture else "n_ff": counts.n_ff,
            "all": asdict(total),
            "layers": [asdict(layer) for layer in layers],
        }
        print(json.dumps(out, indent=2))
        return
    width = output_width()
    if isinstance(total, ExpertSummary):
        text = f"the most used quarter of the experts has {percent(total.carried_25, 1)} of the uses"
        rows = [["layer", "top 10 %", "top 25 %", "top 50 %", "never"]]
    else:
        text = f"{percent(total.active, 1)} of the neurons fire for a token; "
        text += f"the hottest {percent(total.carry_80, 1)} do 80 % of the firing"
        rows = [["layer", "active", "80 % by", "90 % by", "never"]]
    print(paragraph(f"over {counts.n_tokens:,} tokens: {text}", width=width), end="\n\n")
    each: list[Summary | ExpertSummary] = [*layers, total]
    names = [*map(str, range(len(layers))), "all"]
    rows += [cells(*one) for one in zip(names, each, strict=True)]
    for line in columns(rows, right=range(5), width=width):
        print(line)


def cells(name: str, one: Summary | ExpertSummary) -> list[str]:
    if isinstance(one, ExpertSummary):
        shares = (one.carried_10, one.carried_25, one.carried_50, one.never)
    else:
        shares = (one.active, one.carry_80, one.carry_90, one.never)
    return [name, *(percent(share, 1) for share in shares)]
