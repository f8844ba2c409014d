"""`powerinfer serve [MODEL]`: OpenAI's HTTP interface and the chat page."""

from __future__ import annotations

import argparse
import ipaddress
import os
from pathlib import Path
from typing import Any

from .._text.terminal import Bar
from ..errors import ArgumentError, FileError
from .options import (
    Parser,
    add_model_arguments,
    add_sampling_arguments,
    load_arguments,
    sampling_arguments,
)

EXAMPLES = """
powerinfer serve                                         the demo model on http://127.0.0.1:8080
powerinfer serve model.gguf --vram-budget 8              with 8 GiB of the GPU's memory
powerinfer serve -m model.gguf -c 8192 -np 4 -a bamboo   4 conversations of 8192 tokens, named bamboo
powerinfer serve model.gguf --host 0.0.0.0 --api-key-file keys.txt

curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""


_MOST = 10**6  # seconds or MiB


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="[MODEL] [options]")
    add_model_arguments(parser, default="demo")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    server.add_argument("--port", type=int, default=8080, help="0: a free one (default %(default)s)")
    server.add_argument(
        "-a",
        "--alias",
        metavar="NAMES",
        help="what clients call the model, several with commas (default: the file's name)",
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
        "--kv-tokens",
        type=int,
        metavar="N",
        help="tokens that all conversations together can hold (default: n_ctx for each)",
    )
    limits.add_argument(
        "--prompt-part",
        type=int,
        metavar="N",
        help="tokens of a prompt read between two tokens of others' answers (default 128)",
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
        "--timeout", type=float, default=600, metavar="SECONDS", help="for one answer (default %(default)s)"
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
        default="mean",
        help="how embeddings are made of the tokens' vectors (default %(default)s)",
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
        "--draft",
        "--draft-max",
        dest="draft_max",
        type=int,
        default=0,
        metavar="N",
        help="guess up to N tokens that repeat what came before, where few answers are under way "
        "(default 0: none)",
    )
    decoding.add_argument(
        "--draft-ngram",
        type=int,
        default=2,
        metavar="N",
        help="how many of the last tokens are looked for; fewer where those are not found "
        "(default %(default)s)",
    )
    decoding.add_argument(
        "--online-statistics",
        action="store_true",
        help="count which neurons fire and move them between the GPU and the CPU",
    )
    add_sampling_arguments(parser)


def decoding_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What AsyncLlama is told about drafts, and about what a context shift keeps."""
    if args.keep is not None and args.keep < 0:
        raise ArgumentError(f"--keep is {args.keep}: too small")
    if args.keep is not None and not args.context_shift:
        raise ArgumentError("--keep is for --context-shift, without which nothing is forgotten")
    if args.draft_max < 0 or args.draft_ngram < 1:
        raise ArgumentError("--draft-max must be 0 or more, and --draft-ngram at least 1")
    options: dict[str, Any] = {"n_keep": args.keep, "online_statistics": args.online_statistics}
    if not args.draft_max:
        return options
    from ..compat.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(max_ngram_size=args.draft_ngram, num_pred_tokens=args.draft_max)
    return options | {"draft_model": draft}


def read_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Of options and file. An empty key, which everybody knows, is an error."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read the keys in {args.api_key_file}: {error}") from None
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


def main(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise ArgumentError(f"--port is {args.port}, it must be in 0..65535")
    for name in ("max_body", "timeout", "shutdown_timeout"):
        if not 0 <= getattr(args, name) <= _MOST:
            raise ArgumentError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be in 0..{_MOST}"
            )
    if args.max_inputs < 1:
        raise ArgumentError(f"--max-inputs is {args.max_inputs}: too small")
    if args.per_address is not None and args.per_address < 0:
        raise ArgumentError(f"--per-address is {args.per_address}: too small")
    keys = read_keys(args)

    from ..server import Settings, need_extra, serve

    need_extra()
    from ..async_llama import AsyncLlama

    defaults = sampling_arguments(args)
    most = defaults.pop("max_tokens", None)
    stem = os.path.basename(args.model).removesuffix(".gguf")
    settings = Settings(
        host=args.host,
        port=args.port,
        names=tuple(name for name in (args.alias or stem).split(",") if name) or (stem,),
        api_keys=keys,
        allowed_hosts=tuple(args.allowed_host),
        cors_origins=tuple(args.cors),
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
    options = load_arguments(args) | decoding_arguments(args)
    with Bar(f"loading {args.model}") as bar:
        llm = AsyncLlama(
            args.model,
            n_parallel=args.parallel,
            n_pool=args.kv_tokens,
            prompt_part=args.prompt_part,
            max_waiting=args.max_waiting,
            pooling=args.pooling,
            progress=bar,
            **options,
        )
    serve(llm, settings)
    return 0
