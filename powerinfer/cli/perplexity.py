"""`powerinfer perplexity MODEL --text FILE`: how well a model predicts a text, and how far modes are apart.

A table of the modes on stdout, and one of what sets them apart from the first. The procedure is in
`powerinfer.models.perplexity`.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from .._engine.file import ModelFile
from .._engine.session import Model, Session
from .._text.table import columns, output_width
from .._text.terminal import Bar
from ..errors import ArgumentError
from ..models.corpus import Corpus, read_corpus
from ..models.perplexity import Perplexity, compare, plan_chunks
from .options import SPARSITY, Parser, add_activation, add_model, add_predictor

N_CTX = 512
EXAMPLES = """
powerinfer perplexity model.gguf --text held-out.txt --sparsity dense,predicted
powerinfer perplexity -m model.gguf -f held-out.txt -c 2048 --chunks 20
"""

MORE = """
The text is cut into chunks of --n-ctx tokens; each is computed from an empty context, and the tokens of its
second half are predicted, as llama.cpp does it. In predicted mode every token is computed with the neurons
that the predictor names, those that only give context too. FFN rows: the share of the feed-forward's weights
that such tokens need when they come one at a time.
A second table compares with the first mode. ratio: the perplexity divided by that one's (the error comes
from the tokens one by one, so it is far smaller than that of either); KL div.: the mean Kullback-Leibler
divergence of the predictions; same top: for how many tokens both find the same one the likeliest.
"""


def sparsities(text: str) -> list[str]:
    """The modes of a comma list."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SPARSITY:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SPARSITY)}")
    return names


def add_text_arguments(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer, *, required: bool = False
) -> None:
    """The text, as several commands take it. group: where --text belongs."""
    group.add_argument(
        "-f",
        "--text",
        metavar="FILE",
        nargs="+",
        action="extend",
        required=required,
        help="text files, which are one text together; -: standard input",
    )
    parser.add_argument(
        "--special",
        action="store_true",
        help="control tokens that the text spells out, like <|im_end|>, become those tokens (default: all is "
        "plain text)",
    )


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="MODEL --text FILE [FILE ...] [options]", more=MORE)
    add_model(parser)
    add_text_arguments(parser, parser, required=True)
    parser.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        metavar="N",
        help=f"tokens of a chunk (default {N_CTX}, or what the model was trained with if that is less)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        default=0,
        help="begin a chunk every N tokens and predict the last N of each (llama.cpp's --ppl-stride N with "
        "-c C takes chunks of C + N/2 tokens)",
    )
    parser.add_argument(
        "--chunks", type=int, metavar="N", default=0, help="only the first N chunks (default all)"
    )
    parser.add_argument(
        "--sparsity",
        type=sparsities,
        action="extend",
        metavar="MODE",
        help="auto (the default), predicted, exact or dense; a comma list compares them",
    )
    add_predictor(parser)
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="replaces the file's predictor thresholds"
    )
    add_activation(parser)
    parser.add_argument("-t", "--n-threads", type=int, metavar="N", help="threads (default: physical cores)")
    parser.add_argument(
        "-b",
        "--n-batch",
        type=int,
        metavar="N",
        default=N_CTX,
        help="tokens computed together, and logits held; 1: one at a time, as in generation, which is "
        "slow (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def open_sessions(stack: ExitStack, args: argparse.Namespace, model: Model, n_ctx: int) -> list[Session]:
    """One session for each mode that was asked for; a mode that "auto" means as well comes once."""
    sessions: list[Session] = []
    for sparsity in dict.fromkeys(args.sparsity or ["auto"]):
        session = Session(
            model,
            n_ctx=n_ctx,
            n_batch=min(args.n_batch, n_ctx),
            n_threads=args.n_threads or 0,
            sparsity=sparsity,
            mask_prompts=True,
        )
        if session.info.sparsity in [other.info.sparsity for other in sessions]:
            session.close()
            continue
        sessions.append(stack.enter_context(session))
        if args.threshold is not None:
            session.set_threshold(args.threshold)
    if args.threshold is not None and all(session.info.sparsity != "predicted" for session in sessions):
        raise ArgumentError("--threshold is for predicted mode, which is not among the modes to be measured")
    return sessions


def main(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        file = stack.enter_context(ModelFile(args.model))
        corpus = read_corpus(file, args.text, special=args.special)
        with Bar(f"loading {args.model}") as bar:
            model = stack.enter_context(
                Model(file, activation=args.activation or "auto", predictor=args.predictor, progress=bar)
            )
        n_ctx = min(N_CTX, model.info.n_ctx_train) if args.n_ctx is None else args.n_ctx
        plan_chunks(len(corpus.with_bos), n_ctx=n_ctx, stride=args.stride, n_chunks=args.chunks)
        sessions = open_sessions(stack, args, model, n_ctx)
        if n_ctx > model.info.n_ctx_train:
            print(
                f"powerinfer: the model was trained with a context of {model.info.n_ctx_train:,} tokens: "
                f"with {n_ctx:,} it may predict far worse",
                file=sys.stderr,
            )
        bar = stack.enter_context(Bar("perplexity"))
        results = compare(
            sessions,
            corpus.with_bos,
            n_ctx=n_ctx,
            stride=args.stride,
            bos=corpus.bos,
            n_chunks=args.chunks,
            progress=bar,
            running=lambda results: bar.say(
                "perplexity " + ", ".join(f"{r.sparsity} {r.value:.4f}" for r in results)
            ),
        )
    if args.json:
        print(json.dumps(as_json(args, corpus, n_ctx, results), indent=2))
    else:
        show(results, n_ctx=n_ctx)
    return 0


def as_json(
    args: argparse.Namespace, corpus: Corpus, n_ctx: int, results: list[Perplexity]
) -> dict[str, Any]:
    """What a program reads."""
    return {
        "model": args.model,
        "n_tokens": len(corpus.with_bos),
        "n_ctx": n_ctx,
        "stride": args.stride,
        "results": [asdict(result) for result in results],
    }


def show(results: list[Perplexity], *, n_ctx: int) -> None:
    """Tables for people: the modes, and how each of the others compares with the first."""
    width, first = output_width(), results[0]
    rows = [["mode", "perplexity", "FFN rows"]]
    rows += [[r.sparsity, f"{r.value:.4f} ± {r.error:.4f}", percent(r.ffn_rows, 1)] for r in results]
    print("\n".join(columns(rows, right=(1, 2), width=width)))
    rows = [[f"vs {first.sparsity}", "ratio", "KL div.", "same top"]]
    for result in results:
        if (c := result.comparison) is not None:
            ratio = f"{c.ratio:.5f} ± {c.ratio_error:.5f}"
            rows.append([result.sparsity, ratio, f"{c.kl_divergence:.5f}", percent(c.same_top, 2)])
    if len(rows) > 1:
        print("\n" + "\n".join(columns(rows, right=(1, 2, 3), width=width)))
    chunks = "1 chunk" if first.n_chunks == 1 else f"{first.n_chunks:,} chunks"
    print(f"\n{first.n_tokens:,} tokens predicted, in {chunks} of {n_ctx:,}")


def percent(share: float, n_digits: int) -> str:
    return f"{100 * share:.{n_digits}f} %"
