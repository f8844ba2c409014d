"""The arguments of `powerinfer predictor train|svd|sign|calibrate|check`."""

from __future__ import annotations

import argparse

from .._engine.activations import SILENT
from ..models.predictor import build, calibrate, check, report, train
from .options import Parser, add_model
from .perplexity import add_text_arguments

N_CTX = 512
N_TRAIN, N_HELD_OUT, N_CALIBRATE = 24576, 4096, 8192

EXAMPLES = """
powerinfer predictor train model.gguf --text corpus.txt -o sparse.gguf
powerinfer predictor check sparse.gguf --text held-out.txt
"""

MORE = '"powerinfer predictor ACTION --help" shows the options of each.'

# Each with what it does, an example, and what else there is to say.
ACTIONS = {
    "train": (
        "train a small network for each layer (needs PyTorch)",
        "powerinfer predictor train model.gguf --text corpus.txt -o sparse.gguf",
        """
Each layer gets a perceptron with two layers. Its size is searched: from what the layer's sparsity and
skewness suggest it grows until --accuracy is reached, or shrinks as long as it is, within --budget.
Thresholds are set so that --target of the activation mass is kept on tokens that were held out. If the run
is broken off, the same command goes on with the layers that are missing. "bytes" in the table is what a
token reads in the feed-forward, predictor included, over dense mode: where predictors lie in the same memory
as the model, --size-by bytes makes it the least.
""",
    ),
    "svd": (
        "make predictors from the weights by singular values, without training",
        "powerinfer predictor svd model.gguf --text corpus.txt -o sparse.gguf",
        """
With --text the approximation is best where inputs lie, and thresholds are calibrated; without, they are 0.
Needs about four times the size of trained predictors for the same accuracy.
""",
    ),
    "sign": (
        "let the signs of the weights predict: no training, no further tensors",
        "powerinfer predictor sign model.gguf --text corpus.txt -o sign.gguf",
        """
The score of a neuron is the mean of sign(w) * sign(x) over its row of the gate and the layer's input; the
engine takes the signs from the weights when it loads the model. Thresholds are calibrated on the text.
""",
    ),
    "calibrate": (
        "set the thresholds of the predictors that a model has",
        "powerinfer predictor calibrate sparse-q4_0.gguf --text corpus.txt -o calibrated.gguf",
        """
For predictors that come without thresholds of each layer, and after quantising, which moves scores.
""",
    ),
    "check": (
        "measure what a model's predictors find, miss and cost",
        "powerinfer predictor check sparse.gguf --text held-out.txt --report check.md --plot check.png",
        f"The text should be one that the predictors were not made with.\n{report.LEGEND}",
    ),
}


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parser.open_with(EXAMPLES, usage="ACTION MODEL [options]", more=MORE)
    for name, (text, example, more) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        needs_text = "" if name == "svd" else " --text FILE [FILE ...]"
        action.open_with(example, usage=f"MODEL{needs_text} [options]", more=more)
        action.set_defaults(parser=action)
        add_model(action)
        add_text_arguments(action, action.add_mutually_exclusive_group(required=name != "svd"))
        _add_run_arguments(action, name)
        if name == "check":
            _add_check_arguments(action)
        else:
            _add_output_arguments(action, name)
        if name == "svd":
            action.set_defaults(work_dir=None)


def _add_run_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    group = parser.add_argument_group("how the text is run")
    learns = name in ("train", "svd")
    default = N_TRAIN if learns else check.N_TOKENS if name == "check" else N_CALIBRATE
    what = "learn from" if learns else "measure" if name == "check" else "calibrate with"
    group.add_argument(
        "--tokens", type=int, metavar="N", default=default, help=f"tokens to {what} (default %(default)s)"
    )
    if learns:
        group.add_argument(
            "--held-out",
            type=int,
            metavar="N",
            default=N_HELD_OUT,
            help="tokens of the text that are kept apart, for sizes and thresholds (default %(default)s)",
        )
        group.add_argument(
            "--spool-gib",
            type=float,
            metavar="X",
            default=build.SPOOL_GIB,
            help="room for temporary files beside the output; with less, the text is run for fewer layers at "
            "a time (default %(default)g)",
        )
    group.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        metavar="N",
        help=f"tokens of a window (default {N_CTX}, or what the model was trained with if that is less)",
    )
    group.add_argument("-t", "--n-threads", type=int, metavar="N", help="threads (default: physical cores)")
    group.add_argument("--activation", choices=SILENT, help="replaces the file's activation")


def _add_output_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    makes = name in ("train", "svd")
    group = parser.add_argument_group("what is written")
    group.add_argument(
        "-o",
        "--output",
        metavar="OUT.gguf",
        required=not makes,
        help="the model with predictors; MODEL itself is allowed",
    )
    if makes:
        group.add_argument(
            "--predictors-dir", metavar="DIR", help="a new folder of model_0.pt ... and config.json"
        )
        group.add_argument(
            "--predictor-type",
            type=str.upper,
            metavar="TYPE",
            default="auto",
            help="weight format of the predictors: F32, F16, BF16, Q8_0 or Q4_0 (default: that of a "
            "quantised feed-forward if it is one of these, Q8_0 for other quantised ones, else F16)",
        )
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group = parser.add_argument_group("what is wanted")
    group.add_argument(
        "--target",
        type=float,
        metavar="X",
        default=calibrate.TARGET,
        help="share of each layer's activation mass to keep: sum of |h| * ||down row|| (default %(default)g)",
    )
    if makes:
        group.add_argument(
            "--budget",
            type=float,
            metavar="X",
            default=0.1,
            help="most bytes of all predictors, as a share of the model's (default %(default)g)",
        )
        group.add_argument(
            "--rank", type=int, metavar="N", default=0, help="hidden units of every layer, a multiple of 32"
        )
    if name == "train":
        group.add_argument(
            "--size-by",
            choices=("accuracy", "bytes"),
            default="accuracy",
            help="what the search of sizes looks for (default %(default)s)",
        )
        group.add_argument(
            "--accuracy",
            type=float,
            metavar="X",
            default=0.95,
            help="share of the neurons to be rightly predicted or left out where --target is kept "
            "(default %(default)g)",
        )
        _add_training_arguments(parser)


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how they are trained")
    defaults = train.Options()
    group.add_argument(
        "--steps", type=int, metavar="N", default=defaults.steps, help="of one training (default %(default)s)"
    )
    group.add_argument(
        "--batch",
        type=int,
        metavar="N",
        default=defaults.batch,
        help="tokens of a step (default %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=defaults.seed,
        help="of all random choices (default %(default)s)",
    )
    group.add_argument(
        "--device",
        default=defaults.device,
        help="cpu, cuda, or auto: a GPU if PyTorch has one (default auto)",
    )
    group.add_argument(
        "--work-dir",
        metavar="DIR",
        help="keep finished layers there, and after the end as well (default: a hidden folder beside the "
        "output, deleted at the end)",
    )


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--predictor",
        choices=("auto", "mlp", "sign"),
        default="auto",
        help="default auto: what the file says",
    )
    group.add_argument("--threshold", type=float, metavar="X", help="replaces the file's thresholds")
    group.add_argument(
        "--single",
        type=int,
        metavar="N",
        default=check.N_SINGLE,
        help="tokens computed one at a time, for rows and bytes (default %(default)s)",
    )
    group.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        default=check.N_CHUNKS,
        help="chunks of the text for perplexity; 0: all (default %(default)s)",
    )
    group.add_argument("--sweep", action="store_true", help="perplexity at each point of the trade-off, too")
    group = parser.add_argument_group("what is written")
    group.add_argument("--report", metavar="OUT.md", help="a page in Markdown")
    group.add_argument("--plot", metavar="OUT.png", help="a picture (.png, .svg or .pdf)")
    group.add_argument("--json", action="store_true", help="print JSON instead of the tables")
