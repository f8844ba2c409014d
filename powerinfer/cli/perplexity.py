"""`powerinfer perplexity MODEL --text FILE`: how well a model predicts a text, and how far modes are apart.

One line for each mode on stdout; from the second on with what sets it apart from the first. The procedure is
in `powerinfer.perplexity`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ..corpus import Corpus, read_corpus
from ..file import ModelFile
from ..perplexity import Perplexity, compare, plan_chunks
from ..session import Model, Session
from .options import MODEL_HELP, SPARSITY
from .table import columns, output_width
from .terminal import Bar, harmless

N_CTX = 512
EXAMPLE = """
example:
  powerinfer perplexity model.gguf --text held-out.txt --sparsity dense,predicted

The text is cut into chunks of --n-ctx tokens; each is computed from an empty context, and the tokens of its
second half are predicted, as llama.cpp does it. In predicted mode every token is computed with the neurons
that the predictor names, those that only give context too. From the second mode on, a line also says: the
perplexity over that of the first mode (its error comes from the tokens one by one, so it is far smaller than
that of either), the mean Kullback-Leibler divergence of the predictions from those of the first mode, and
for how many tokens both find the same one the likeliest.
"""


def sparsities(text: str) -> list[str]:
    """The modes of a comma list."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SPARSITY:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SPARSITY)}")
    return names


def add_text_arguments(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """The text, as several commands take it. group: where --text belongs."""
    group.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="text files, which are one text together; -: standard input",
    )
    parser.add_argument(
        "--special",
        action="store_true",
        help="control tokens that the text spells out, like <|im_end|>, become those tokens (default: all is "
        "plain text)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description or ''}\n{EXAMPLE}"
    parser.usage = "%(prog)s MODEL --text FILE [FILE ...] [options]"
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_text_arguments(parser, parser.add_mutually_exclusive_group(required=True))
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
    parser.add_argument(
        "--predictor",
        choices=("auto", "none", "mlp", "sign"),
        default="auto",
        help="mlp: the file's own; sign: the signs of the weights (default auto: what the file says)",
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="replaces the file's predictor thresholds"
    )
    parser.add_argument(
        "--activation", choices=("relu", "drelu", "silu", "gelu"), help="replaces the file's activation"
    )
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
    return sessions


def main(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        file = stack.enter_context(ModelFile(args.model))
        with Bar(f"loading {args.model}") as bar:
            model = stack.enter_context(
                Model(file, activation=args.activation or "auto", predictor=args.predictor, progress=bar)
            )
        n_ctx = min(N_CTX, model.info.n_ctx_train) if args.n_ctx is None else args.n_ctx
        corpus = read_corpus(file, args.text, special=args.special)
        plan_chunks(len(corpus.with_bos), n_ctx=n_ctx, stride=args.stride, n_chunks=args.chunks)
        sessions = open_sessions(stack, args, model, n_ctx)
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
        rows = [cells(result, results[0]) for result in results]
        for line in columns(rows, width=output_width()):
            print(harmless(line))
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


def cells(result: Perplexity, first: Perplexity) -> list[str]:
    """One line for people."""
    c = result.comparison
    rows = f"{result.ffn_rows:.1%}".replace("%", " %")
    line = [
        result.sparsity,
        f"{result.value:.4f} +/- {result.error:.4f}",
        f"({result.n_tokens:,} tokens, {rows} of FFN rows read)",
    ]
    if c is None:
        return [*line, ""]
    same = f"{c.same_top:.2%}".replace("%", " %")
    return [
        *line,
        f"{c.ratio:.5f} +/- {c.ratio_error:.5f} times {first.sparsity}, KL divergence {c.kl_divergence:.5f}, "
        f"same first choice {same}",
    ]
