"""`powerinfer serve [MODEL]`: OpenAI's HTTP interface and the chat page."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._text.terminal import Bar, sentence
from ..errors import ArgumentError, FileError
from .answers import with_scale
from .options import (
    Parser,
    add_draft_arguments,
    add_model_arguments,
    add_sampling_arguments,
    draft_arguments,
    load_arguments,
    sampling_arguments,
)

if TYPE_CHECKING:
    from ..async_llama import AsyncLlama
    from ..server.models import Adapter, Open, ServedModel

EXAMPLES = """
powerinfer serve                                         the demo model on http://127.0.0.1:8080
powerinfer serve model.gguf --vram-budget 8              with 8 GiB of the GPU's memory
powerinfer serve -m model.gguf -c 8192 -np 4 -a bamboo   4 conversations of 8192 tokens, named bamboo
powerinfer serve model.gguf --replicas 2 --vram-budget 40   two GPUs, each with the whole model
powerinfer serve a.gguf b.gguf --idle-unload 10m         two models, of which one at a time has the GPU
powerinfer serve model.gguf --lora poet=poet.gguf        also under the name poet, with an adapter
powerinfer serve model.gguf --host 0.0.0.0 --api-key-file keys.txt

curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""


_MOST = 10**6  # seconds or MiB


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="[MODEL ...] [options]")
    add_model_arguments(parser, default="demo", several=True)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    server.add_argument("--port", type=int, default=8080, help="0: a free one (default %(default)s)")
    server.add_argument(
        "-a",
        "--alias",
        action="append",
        default=[],
        metavar="NAMES",
        help="what clients call the model, several with commas (default: the file's name); the second -a is "
        "for the second model",
    )
    server.add_argument(
        "--idle-unload",
        type=seconds,
        metavar="TIME",
        help="unload a model that nobody has used for so long, 10m say (default: only where another wants "
        "its GPU memory)",
    )
    server.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FILE[:SCALE]",
        help="an adapter that requests may ask for as a model of this name, or by `lora`; may be repeated; "
        "with several models NAME is MODEL:NAME",
    )
    server.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="that clients must send; may be repeated",
    )
    server.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key on each line")
    server.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help='a name in the Host header that is answered to, besides localhost; "*": any',
    )
    server.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='a web page\'s origin whose scripts browsers may let in, https://example.org; "*": any '
        "(default: none)",
    )
    server.add_argument("--ssl-cert-file", metavar="FILE", help="serve https")
    server.add_argument("--ssl-key-file", metavar="FILE", help="the certificate's private key")
    server.add_argument("-v", "--verbose", action="store_true", help="a line on stderr for each request")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "-np",
        "--parallel",
        type=int,
        default=8,
        metavar="N",
        help="conversations computed at the same time (default %(default)s)",
    )
    limits.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="sessions over which requests are spread, each with the whole model on GPUs of its own; -np, "
        "--kv-tokens and --max-waiting are of each (default %(default)s)",
    )
    limits.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="tokens that all conversations together can hold (default: n_ctx for each)",
    )
    limits.add_argument(
        "--prompt-part",
        type=int,
        metavar="N",
        help="tokens of prompts read between two tokens of others' answers (default: as many as make these "
        "take at most twice as long, if that does not make prompts much slower)",
    )
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; more get status 429 (default %(default)s)",
    )
    limits.add_argument(
        "--strict",
        action="store_true",
        help="refuse fields that are not known, and models that are not served, instead of ignoring them",
    )
    limits.add_argument(
        "--max-body",
        type=float,
        default=8,
        metavar="MIB",
        help="largest body of a request (default %(default)s)",
    )
    limits.add_argument(
        "--per-address",
        type=int,
        metavar="N",
        help="requests of one address at the same time, but of this machine; 0: any number "
        "(default: half of those that the server takes)",
    )
    limits.add_argument(
        "--trusted-proxies",
        default="",
        metavar="LIST",
        help="addresses, with commas, whose X-Forwarded-For is believed (default: none)",
    )
    limits.add_argument(
        "-to",
        "--timeout",
        type=float,
        default=600,
        metavar="SECONDS",
        help="for one answer (default %(default)s)",
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=10,
        metavar="SECONDS",
        help="that answers under way have at the end (default %(default)s)",
    )
    limits.add_argument(
        "--pooling",
        choices=("mean", "last", "cls"),
        help="how embeddings are made of the tokens' vectors (default: as the file says, else mean)",
    )
    limits.add_argument(
        "--max-inputs",
        type=int,
        default=2048,
        metavar="N",
        help="texts of one request for embeddings (default %(default)s)",
    )
    limits.add_argument(
        "--no-normalize",
        action="store_true",
        help="embeddings as the model makes them, instead of length 1",
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="with --context-shift: first tokens that are never forgotten (default: the begin token)",
    )
    decoding.add_argument(
        "--online-statistics",
        action="store_true",
        help="count which neurons fire and move them between the GPU and the CPU",
    )
    add_draft_arguments(parser)
    add_sampling_arguments(parser)


def decoding_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What AsyncLlama is told about drafts, and about what a context shift keeps."""
    if args.keep is not None and args.keep < 0:
        raise ArgumentError(f"--keep is {args.keep}: too small")
    if args.keep is not None and not args.context_shift:
        raise ArgumentError("--keep is for --context-shift, without which nothing is forgotten")
    options: dict[str, Any] = {"n_keep": args.keep, "online_statistics": args.online_statistics}
    if args.draft_model is not None and len(args.model) > 1:
        raise ArgumentError("--draft-model guesses for one model, and several are served")
    return options | draft_arguments(args)


def read_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Of options and file. An empty key, which everybody knows, is an error."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read the keys: {sentence(error)}") from None
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ArgumentError(f"{args.api_key_file} holds no key")
    if not all(key.strip() for key in keys):
        raise ArgumentError("an API key is empty")
    return tuple(keys)


def read_proxies(text: str) -> tuple[str, ...]:
    """Addresses with commas between them."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        for name in names:
            ipaddress.ip_address(name)
    except ValueError as error:
        raise ArgumentError(f"--trusted-proxies: {error}") from None
    return names


def seconds(text: str) -> float:
    """Of --idle-unload."""
    from ..server.settings import duration

    try:
        value = duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 0:
        raise argparse.ArgumentTypeError("it must not be negative")
    return value


def read_names(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """What clients call each model."""
    if len(args.alias) > len(args.model):
        raise ArgumentError(f"there are {len(args.alias)} times -a, and {len(args.model)} models")
    names = []
    for i, path in enumerate(args.model):
        stem = os.path.basename(path).removesuffix(".gguf")
        given = args.alias[i] if i < len(args.alias) else ""
        names.append(tuple(name for name in given.split(",") if name) or (stem,))
    return names


def read_adapters(args: argparse.Namespace, names: list[tuple[str, ...]]) -> list[list[Adapter]]:
    """Of each model."""
    from ..server.models import Adapter

    found: list[list[Adapter]] = [[] for _ in names]
    for text in args.lora:
        name, is_there, path = text.partition("=")
        at = 0
        if ":" in name or len(names) > 1:
            model, _, name = name.rpartition(":")
            at = next((i for i, own in enumerate(names) if model in own), -1)
        if not is_there or not name or not path or at < 0:
            raise ArgumentError(f"--lora {text}: it must be NAME=FILE, with several models MODEL:NAME=FILE")
        found[at].append(Adapter(name, *with_scale(path, f"--lora {text}")))
    return found


def read_origins(given: Sequence[str]) -> tuple[str, ...]:
    """As browsers send them: another spelling, a path or a slash behind it say, would never be met."""
    for origin in given:
        if origin not in ("*", "null") and not re.fullmatch(
            r"[A-Za-z][A-Za-z0-9+.-]*://[^/\\?#@\s]+", origin
        ):
            raise ArgumentError(
                f"--cors {origin}: it must be an origin, https://example.org or http://localhost:3000 say, "
                "without a path or a slash behind it"
            )
    return tuple(origin.lower() for origin in given)


def read_budgets(args: argparse.Namespace, names: list[tuple[str, ...]]) -> list[Any] | None:
    """Of each model; None: they share one."""
    budgets = args.vram_budget
    if not isinstance(budgets, dict):
        return None
    unknown = [name for name in budgets if not any(name in own for own in names)]
    missing = [own[0] for own in names if not any(name in budgets for name in own)]
    if unknown or missing:
        said = f"no model is called {unknown[0]!r}" if unknown else f"{missing[0]!r} has none"
        raise ArgumentError(f"--vram-budget: {said}; each model needs one")
    return [next(budgets[name] for name in own if name in budgets) for own in names]


def served_models(args: argparse.Namespace, names: list[tuple[str, ...]]) -> list[ServedModel]:
    """The models, none of which is open yet."""
    from .._engine.file import ModelFile
    from .._engine.lora import check_adapter
    from ..async_llama import AsyncLlama, may_use_gpu
    from ..server.models import Group, ServedModel

    budgets = read_budgets(args, names)
    if budgets is not None:
        args.vram_budget = max(budgets)
    options = load_arguments(args) | decoding_arguments(args)
    shared = Group() if budgets is None and may_use_gpu(options) else None

    def opener(path: str, own: dict[str, Any]) -> Open:
        def open_model(adapters: Sequence[tuple[str, float]], progress: Any) -> AsyncLlama:
            return AsyncLlama(
                path,
                n_parallel=args.parallel,
                n_pool=args.kv_tokens,
                prompt_part=args.prompt_part,
                max_waiting=args.max_waiting,
                pooling=args.pooling,
                replicas=args.replicas,
                warm_up=True,
                progress=progress,
                lora_path=[path for path, _ in adapters] or None,
                lora_scale=[scale for _, scale in adapters] or 1.0,
                **own,
            )

        return open_model

    found = []
    adapters: list[list[Adapter]] = read_adapters(args, names)
    for i, (path, own_names, own_adapters) in enumerate(zip(args.model, names, adapters, strict=True)):
        own = options if budgets is None else options | {"vram_budget": budgets[i]}
        group = shared if budgets is None else Group() if budgets[i] else None
        found.append(
            ServedModel(
                own_names,
                ModelFile(path),
                opener(path, own),
                tuple(own_adapters),
                group,
                max_requests=args.replicas * (args.parallel + args.max_waiting),
            )
        )
        for adapter in own_adapters:
            with ModelFile(adapter.path) as file:
                check_adapter(file, found[-1].file.metadata.get("general.architecture"))
    return found


def main(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise ArgumentError(f"--port is {args.port}, it must be in 0..65535")
    if not args.host.strip():  # sockets would take it for all addresses
        raise ArgumentError("--host is empty; 0.0.0.0 is all addresses of this machine")
    for name in ("max_body", "timeout", "shutdown_timeout"):
        value, may_be_0 = getattr(args, name), name == "shutdown_timeout"
        if not 0 <= value <= _MOST or (value == 0 and not may_be_0):
            least = "in 0.." if may_be_0 else "more than 0, and at most "
            raise ArgumentError(f"--{name.replace('_', '-')} is {value:g}, it must be {least}{_MOST}")
    if args.max_inputs < 1:
        raise ArgumentError(f"--max-inputs is {args.max_inputs}: too small")
    if args.per_address is not None and args.per_address < 0:
        raise ArgumentError(f"--per-address is {args.per_address}: too small")
    keys = read_keys(args)

    from ..server import Settings, need_extra, serve

    need_extra()
    from ..server.models import Models
    from ..server.run import say

    defaults = sampling_arguments(args)
    most = defaults.pop("max_tokens", None)
    names = read_names(args)
    settings = Settings(
        host=args.host,
        port=args.port,
        names=names[0],
        api_keys=keys,
        allowed_hosts=tuple(args.allowed_host),
        cors_origins=read_origins(args.cors),
        defaults=defaults,
        max_tokens=most if most is not None and most > 0 else None,
        strict=args.strict,
        max_body_bytes=int(args.max_body * (1 << 20)),
        max_per_address=args.per_address,
        trusted_proxies=read_proxies(args.trusted_proxies),
        max_inputs=args.max_inputs,
        normalize=not args.no_normalize,
        timeout_s=args.timeout,
        shutdown_s=args.shutdown_timeout,
        access_log=args.verbose,
        ssl_certfile=args.ssl_cert_file,
        ssl_keyfile=args.ssl_key_file,
    )
    models = Models(
        served_models(args, names),
        idle_s=args.idle_unload,
        timeout_s=args.timeout,
        strict=args.strict,
        say=say,
    )
    with Bar(f"loading {args.model[0]}") as bar:
        models.open_first(bar)
    serve(models, settings)
    return 0
