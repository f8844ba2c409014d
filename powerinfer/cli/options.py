"""Options that several commands share."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .._engine.activations import ACTIVATIONS
from .._llama.options import RANGES, in_range
from ..errors import ArgumentError
from .llama_cpp import add_always, add_instead

SPARSITY = ("auto", "predicted", "exact", "dense")
CPU_BATCH = 128  # a conversation that begins waits for no more of another's prompt
MODEL_HELP = 'a GGUF file, hf:OWNER/REPO[:FORMAT], or "demo"'


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with examples; then comes one line of usage, and lines are as written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self.examples = ""

    def open_with(self, examples: str, *, usage: str, more: str = "") -> None:
        """examples: commands, one on each line. usage: what follows the command's name.
        more: paragraphs below the command's description."""
        lines = examples.strip().splitlines()
        title = "examples" if len(lines) > 1 else "example"
        self.examples = "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines), "", ""])
        self.usage = f"%(prog)s {usage}"
        self.description = f"{self.description or ''}\n\n{more.strip()}".strip()

    def format_help(self) -> str:
        return self.examples + super().format_help()

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Ends the program because of words that no option or argument takes."""
        known = [name[2:] for name in self._option_string_actions if name.startswith("--")]
        given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        meant = [near for name in given for near in difflib.get_close_matches(name, known, 1, 0.75)]
        near = f" (is {' '.join(f'--{name}' for name in meant)} meant?)" if meant else ""
        if not given and any(action.dest == "prompt" for action in self._actions):
            near = " (put the prompt in quotes)"
        self.error(f"unrecognized arguments: {' '.join(words)}{near}; {self.prog} --help lists what there is")


def add_model(
    parser: argparse.ArgumentParser,
    *,
    default: str | None = None,
    group: argparse._ActionsContainer | None = None,
    several: bool = False,
) -> None:
    """MODEL, or -m MODEL; `choose_model` settles which is meant. group: where -m is shown. several: there may
    be more than one."""
    shown = MODEL_HELP if default is None else f"{MODEL_HELP} (the default)"
    parser.add_argument("model", metavar="MODEL", nargs="*" if several else "?", help=shown)
    (group or parser).add_argument(
        "-m", "--model", dest="model_option", metavar="MODEL", help="the same as MODEL"
    )
    parser.set_defaults(default_model=default, usage_error=parser.error)


def add_activation(group: argparse._ActionsContainer) -> None:
    group.add_argument("--activation", choices=ACTIVATIONS, help="replaces the file's activation")


def add_predictor(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--predictor",
        choices=("auto", "none", "mlp", "sign"),
        default="auto",
        help="mlp: the file's own; sign: the signs of the weights (default auto: what the file says)",
    )


def add_model_arguments(
    parser: argparse.ArgumentParser, *, default: str | None = None, several: bool = False
) -> None:
    """MODEL and how to load it. `load_arguments` turns the latter into arguments of Llama. several: there may
    be more than one, with a budget for each."""
    group = parser.add_argument_group("model")
    add_model(parser, default=default, group=group, several=several)
    group.add_argument(
        "-hf", "--hf-repo", dest="hub_option", metavar="OWNER/REPO[:FORMAT]", help="the same as hf:OWNER/REPO"
    )
    group.add_argument(
        "-c",
        "--n-ctx",
        "--ctx-size",
        type=context_size,
        metavar="N",
        help='context size in tokens; "auto": what memory holds (default: the model\'s, at most 4096)',
    )
    group.add_argument(
        "--context-shift",
        action="store_true",
        help="when the context is full, forget its older half and go on, instead of stopping",
    )
    add_compute_arguments(group)
    group.add_argument(
        "--vram-budget",
        type=vram_budgets if several else vram_budget,
        metavar="GIB",
        help="GPU memory to use, 8,8 of two GPUs, 0: CPU (default: what is free)"
        + ("; a=6,b=2: of each model by its name" if several else ""),
    )
    group.add_argument(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        type=layers,
        metavar="N",
        help="a budget that holds N layers; 0: CPU, all: what is free",
    )
    group.add_argument(
        "-dev",
        "--devices",
        "--device",
        type=devices,
        metavar="NAMES",
        help='the GPUs to use: "cuda:1", "cuda:0,cuda:1"',
    )
    add_activation(group)
    group.add_argument(
        "--chat-format", metavar="NAME", help="replaces the file's chat template: chatml, llama-2, ..."
    )
    group.add_argument(
        "--chat-template-file", metavar="FILE", help="replaces it by the Jinja template of a file"
    )

    group.add_argument(
        "-ctk",
        "--cache-type-k",
        dest="type_k",
        metavar="TYPE",
        help="of the cached keys: f32, f16 or q8_0 (default f16)",
    )
    group.add_argument(
        "-ctv", "--cache-type-v", dest="type_v", metavar="TYPE", help="of the cached values (default f16)"
    )
    group.add_argument(
        "--mlock", dest="use_mlock", action="store_true", help="keep the weights in RAM, never paged out"
    )
    add_always(parser, is_server=several)
    add_instead(parser)


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """What guesses tokens, which the model then checks together; `draft_arguments` has the arguments."""
    group = parser.add_argument_group("drafts")
    group.add_argument(
        "--mtp", action="store_true", help="guess with the head that the file has for it (NextN, MTP layers)"
    )
    group.add_argument(
        "-md",
        "--draft-model",
        "--model-draft",
        metavar="MODEL",
        help="guess with a small model of the same vocabulary",
    )
    group.add_argument(
        "--draft",
        "--draft-max",
        dest="draft_max",
        type=int,
        metavar="N",
        help="tokens guessed at a time (default: 3 of a head or a model); with neither, up to N tokens that "
        "repeat what came before",
    )
    group.add_argument(
        "--draft-ngram",
        type=int,
        default=2,
        metavar="N",
        help="how many of the last tokens are looked for; fewer where those are not found "
        "(default %(default)s)",
    )


def draft_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for Llama. Raises ArgumentError."""
    n, model = args.draft_max, "mtp" if args.mtp else args.draft_model
    if args.mtp and args.draft_model is not None:
        raise ArgumentError("--mtp and --draft-model: one of them can guess")
    if (n is not None and n < 0) or args.draft_ngram < 1:
        raise ArgumentError("--draft-max must be 0 or more, and --draft-ngram at least 1")
    if model is not None:
        return {"draft_model": model, "n_draft": n} if n != 0 else {}
    if not n:
        return {}
    from ..compat.llama_speculative import LlamaPromptLookupDecoding

    return {"draft_model": LlamaPromptLookupDecoding(max_ngram_size=args.draft_ngram, num_pred_tokens=n)}


def layers(text: str) -> int:
    """Of -ngl."""
    try:
        return -1 if text in ("all", "auto") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of layers, nor all or auto") from None


def context_size(text: str) -> int | str:
    """Of --n-ctx."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, nor auto") from None


def vram_budget(text: str) -> float | list[float]:
    """Of --vram-budget: a number, or one for each device."""
    try:
        each = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB, nor a list of them") from None
    return each if len(each) > 1 else each[0]


def vram_budgets(text: str) -> float | list[float] | dict[str, float]:
    """The same, or one for each model, by name."""
    if "=" not in text:
        return vram_budget(text)
    pairs = [word.rpartition("=") for word in text.split(",")]
    try:
        return {name: float(value) for name, _, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like a=6,b=2 (GiB)") from None


def devices(text: str) -> list[str]:
    """Of --devices. CUDA1 is what llama.cpp calls cuda:1."""
    return [re.sub(r"^CUDA(?=\d)", "cuda:", word.strip()) for word in text.split(",")]


def add_compute_arguments(group: argparse._ActionsContainer) -> None:
    """Threads, batch and sparsity."""
    group.add_argument(
        "-t",
        "--n-threads",
        "--threads",
        type=int,
        metavar="N",
        help="threads (default: physical cores)",
    )
    group.add_argument(
        "-b",
        "--n-batch",
        "--batch-size",
        type=int,
        metavar="N",
        help=f"prompt tokens computed together (default {CPU_BATCH}; with a GPU 512, or up to 2048)",
    )
    group.add_argument(
        "-ub", "--n-ubatch", "--ubatch-size", type=int, metavar="N", help="the same, where it is less"
    )
    group.add_argument(
        "--sparsity", choices=SPARSITY, default="auto", help="which neurons are computed (default auto)"
    )
    add_predictor(group)
    group.add_argument(
        "--predictor-type",
        metavar="TYPE",
        help="rewrites fc1 and fc2 in a weight format while loading, Q8_0 say",
    )
    group.add_argument("--threshold", type=float, metavar="X", help="replaces the file's predictor threshold")
    group.add_argument(
        "--no-mmap",
        dest="use_mmap",
        action="store_false",
        help="copy the weights into memory of huge pages: slower to load, faster to read",
    )


def choose_model(args: argparse.Namespace) -> None:
    """Settles in args.model what MODEL, -m and the default say. The only word beside -m is the prompt, where
    there can be one."""
    if (repo := getattr(args, "hub_option", None)) is not None:
        if args.model_option is not None:
            raise ArgumentError(f"two models: {args.model_option} and -hf {repo}")
        args.model_option = f"hf:{repo.removeprefix('hf:')}"
    if isinstance(args.model, list):
        if args.model and args.model_option is not None:
            raise ArgumentError(f"two models: {args.model[0]} and {args.model_option}")
        named = args.default_model if args.model_option is None else args.model_option
        args.model = args.model or [named]
        return
    if args.model_option is not None and getattr(args, "prompt", "") is None:
        args.model, args.prompt = None, args.model
    if args.model is not None and args.model_option is not None:
        raise ArgumentError(f"two models: {args.model} and {args.model_option}")
    given = (args.model, args.model_option, args.default_model)
    args.model = next((name for name in given if name is not None), None)  # "" is none, and refused as such
    if args.model is None:
        args.usage_error("the following arguments are required: MODEL")


def find_models(args: argparse.Namespace) -> None:
    """Fetches models of the hub, unless they are here; their paths then stand in args.model."""
    models = getattr(args, "model", None)
    if models is None or "model_option" not in args:
        return
    from .._engine.devices import choose_devices
    from .._engine.file import find_model
    from ..hub import is_reference

    budget = getattr(args, "vram_budget", None)
    if isinstance(budget, dict):
        budget = max(budget.values())
    if getattr(args, "n_gpu_layers", None) == 0 and budget is None:
        budget = 0

    def found(name: str) -> str:
        if not is_reference(name):
            return name
        if budget and "devices" in args:  # without a GPU for it nothing is fetched
            choose_devices(budget, args.devices)
        return str(find_model(name, vram_budget=budget))

    args.model = [found(name) for name in models] if isinstance(models, list) else found(models)


def load_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for Llama."""
    names = (
        *("n_ctx", "n_threads", "n_batch", "vram_budget", "devices", "sparsity", "threshold", "activation"),
        *("predictor", "predictor_type", "use_mmap", "chat_format", "context_shift"),
        *("n_ubatch", "type_k", "type_v", "use_mlock", "n_gpu_layers"),
    )
    options = {name: getattr(args, name) for name in names}
    if args.chat_template_file is not None:
        if args.chat_format is not None:
            raise ArgumentError("--chat-format and --chat-template-file: one of them is enough")
        options["chat_format"] = _format_of(args.chat_template_file)
    if options["n_batch"] is None:
        from .._engine import machine

        on_cpu = args.vram_budget == 0 or (args.vram_budget is None and args.n_gpu_layers == 0)
        on_cpu = on_cpu or not (args.devices or machine.gpus().gpus)
        options["n_batch"] = CPU_BATCH if on_cpu else None
    return options


def _format_of(file: str) -> str:
    """The name under which the template of a file is known from now on. Raises ArgumentError, OSError."""
    from .._text.chat_format import ChatFormat, register_chat_format

    template = Path(file).read_text(encoding="utf-8", errors="replace")
    if not template.strip():
        raise ArgumentError(f"the chat template {file} is empty")
    name = f"of {file}"
    register_chat_format(name, ChatFormat(name, template))
    return name


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How answers are chosen; `sampling_arguments` turns them into arguments of the create_ methods."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        "--n-predict",
        "--predict",
        type=int,
        metavar="N",
        help="most tokens of an answer (default, and 0 and -1: until the context is full)",
    )
    shown = "(default %(default)s)"
    group.add_argument(
        "--temperature",
        "--temp",
        type=float,
        metavar="X",
        default=0.8,
        help=f"0: always the likeliest token {shown}",
    )
    group.add_argument("--top-k", type=int, metavar="N", default=40, help=f"0: off {shown}")
    group.add_argument("--top-p", type=float, metavar="X", default=0.95, help=f"1: off {shown}")
    group.add_argument("--min-p", type=float, metavar="X", default=0.05, help=f"0: off {shown}")
    group.add_argument("--repeat-penalty", type=float, metavar="X", default=1.0, help=f"1: off {shown}")
    group.add_argument("-s", "--seed", type=int, metavar="N", help="makes the answer repeatable")
    for name, kind, metavar, text in _FURTHER:
        flags = [f"--{name.replace('_', '-')}", *_LLAMA_CPP.get(name, ())]
        group.add_argument(*flags, dest=name, type=kind, metavar=metavar, help=text)


# Samplers that are off unless asked for.
_FURTHER: tuple[tuple[str, type, str, str], ...] = (
    ("presence_penalty", float, "X", "for tokens that are there already"),
    ("frequency_penalty", float, "X", "the same, as often as they are"),
    ("penalty_last_n", int, "N", "how far back these and --repeat-penalty look (default 64; -1: everywhere)"),
    ("typical_p", float, "X", "keep tokens whose surprise is the usual one; 1: off"),
    ("top_n_sigma", float, "X", "keep logits within so many standard deviations of the largest"),
    ("xtc_probability", float, "P", "how often the likeliest tokens are excluded"),
    (
        "xtc_threshold",
        float,
        "P",
        "which: all but the least likely of those at least so likely (default 0.1)",
    ),
    ("dynatemp_range", float, "X", "the temperature goes so far up and down with the entropy"),
    ("dynatemp_exponent", float, "X", "of the share of entropy (default 1)"),
    ("dry_multiplier", float, "X", "penalty for sequences that come again"),
    ("dry_base", float, "X", "by how much it grows with each token (default 1.75)"),
    ("dry_allowed_length", int, "N", "shorter sequences may come again (default 2)"),
    ("dry_penalty_last_n", int, "N", "how far back to look (default -1: everywhere)"),
    ("mirostat_mode", int, "N", "1: mirostat, 2: mirostat 2.0"),
    ("mirostat_tau", float, "X", "its target surprise in bits (default 5)"),
    ("mirostat_eta", float, "X", "its learning rate (default 0.1)"),
)

_LLAMA_CPP = {
    "penalty_last_n": ("--repeat-last-n",),
    "typical_p": ("--typical",),
    "mirostat_mode": ("--mirostat",),
    "mirostat_tau": ("--mirostat-ent",),
    "mirostat_eta": ("--mirostat-lr",),
}
"""Its names of them."""


_FLAGS = {
    "type_k": "cache-type-k",
    "type_v": "cache-type-v",
    "use_mlock": "mlock",
    "n_parallel": "parallel",
    "n_pool": "kv-tokens",
}
_ARGUMENTS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "vram_budget", "devices", "sparsity"),
    *("chat_format", "activation", "predictor", "predictor_type", "threshold", *_FLAGS),
    *("max_waiting", "replicas", "prompt_part"),
)


def in_options(text: str) -> str:
    """A message in the words of the command line: n_ctx=64 is --n-ctx 64 there."""

    def flag(name: str) -> str:
        return f"--{_FLAGS.get(name, name.replace('_', '-'))}"

    names = "|".join(_ARGUMENTS)
    text = re.sub(
        rf"\b({names})=([\w.,:\"-]*[\w\"])", lambda m: f"{flag(m[1])} {m[2]}".replace('"', ""), text
    )
    text = re.sub(rf"(?<!'s )\b({names}) is ", lambda m: f"{flag(m[1])} is ", text)  # but a model's own
    return text.replace("use_mmap=False", "--no-mmap")


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the create_ methods of Llama; those that were not given are left out."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
    further = (name for name, *_ in _FURTHER)
    for name, (least, most) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            flag = "--temp" if name == "temperature" else f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} is {value}, it must be {in_range(least, most)}")
    return {name: value for name in (*names, *further) if (value := getattr(args, name)) is not None}
