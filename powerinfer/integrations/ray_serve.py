"""The server on a Ray cluster: N replicas behind one OpenAI route, and offline work. Needs powerinfer[ray].

    serve run powerinfer.ray_serve:app model=/models/bamboo-7b.gguf replicas=4

    from ray import serve
    serve.run(deployment("/models/bamboo-7b.gguf", replicas=4))

    ray.data.read_json("questions.json").map_batches(
        Answers, fn_constructor_kwargs={"model": "/models/bamboo-7b.gguf"}, concurrency=4, batch_size=64)

Every replica opens the model for itself, so each machine must find the file at the same path. Replicas on one
machine share the file's pages in memory, not its cores: give each a part of them with `n_threads`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from .._extras import how
from ..errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ray.serve import Application

    from ..async_llama import AsyncLlama

_MAX_ENTERED = 10_000  # requests on their way to replicas

_llm: AsyncLlama | None = None
"""This replica's; a process has one replica."""


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise UnsupportedError(
            f"a deployment needs {error.name}, which is not installed: {how('ray')}"
        ) from None
    return serve


def _start(model: str, names: tuple[str, ...], server: dict[str, Any], options: dict[str, Any]) -> Any:
    """Opens the model in a replica; returns the server as an ASGI application."""
    global _llm
    from ..async_llama import AsyncLlama
    from ..server import Settings, create_app

    _llm = AsyncLlama(model, verbose=False, **options)
    return create_app(_llm, Settings(names=names, **server))


def _check() -> None:
    """Raises if the engine has failed: Ray then starts another replica."""
    if _llm is not None and _llm.scheduler.last_error is not None:
        raise RuntimeError(f"the engine failed: {_llm.scheduler.last_error}")


def _stop() -> None:
    global _llm
    if _llm is not None:
        _llm.close()
        _llm = None


def deployment(
    model: str,
    *,
    replicas: int = 1,
    name: str | None = None,
    n_parallel: int = 8,
    max_waiting: int = 64,
    num_cpus: float = 1,
    num_gpus: float = 0,
    server: Mapping[str, Any] | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """An application for `ray.serve.run`: all routes of `powerinfer serve`, the chat page among them.

    model: path of a GGUF file on every machine, or "demo".
    replicas: processes that have the model open. Of several a request goes to the one that has computed the
        longest beginning of its text, unless that has n_parallel requests more than another: then, and where
        none has, to the one that has least to do.
    name: what clients call the model; None: the file's name.
    n_parallel, max_waiting: of each replica, as in AsyncLlama; past their sum Ray keeps requests back.
    num_cpus, num_gpus: what Ray sets aside for each replica; `vram_budget` wants a part of a GPU.
    server: arguments of server.Settings: api_keys, allowed_hosts, cors_origins, max_tokens, timeout_s ...
        Ray's proxy has the address, so any Host header is answered unless allowed_hosts says otherwise.
    autoscaling: Ray's autoscaling_config, instead of `replicas`: {"min_replicas": 1, "max_replicas": 4}, one
        for each n_parallel (target_ongoing_requests) open requests, those that wait included.
    options: of Llama: n_ctx, n_threads, vram_budget, sparsity ...

    What /metrics and /v1/engine say is what one replica says of itself.
    Raises ArgumentError, and UnsupportedError if Ray is not installed.
    """
    serve = _ray_serve()
    if replicas < 1:
        raise ArgumentError(f"replicas is {replicas}, it must be at least 1")
    names = (name or os.path.basename(model).removesuffix(".gguf"),)
    settings = {"allowed_hosts": ("*",), **(server or {})}
    llama = {"n_parallel": n_parallel, "max_waiting": max_waiting, **options}

    def build() -> Any:  # called in each replica
        return _start(model, names, settings, llama)

    class PowerInfer:
        def check_health(self) -> None:
            _check()

        def __del__(self) -> None:
            _stop()

    given: dict[str, Any] = {
        "name": "powerinfer",
        "max_ongoing_requests": n_parallel + max_waiting,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": 20,
    }
    if replicas == 1 and autoscaling is None:
        one: Application = serve.deployment(serve.ingress(build)(PowerInfer), **given).bind()
        return one

    from ray.serve.config import RequestRouterConfig

    from ..server import Settings
    from . import ray_router

    class Replica(PowerInfer):
        def __init__(self) -> None:
            self._app = build()

        async def answer(self, scope: Any, body: bytes, *, beginnings: list[str]) -> AsyncIterator[list[Any]]:
            """beginnings: for the router."""
            async for messages in ray_router.answered(self._app, scope, body):
                yield messages

    given["request_router_config"] = RequestRouterConfig(
        request_router_class=ray_router.PrefixRouter,  # type: ignore[arg-type, unused-ignore]
        request_router_kwargs={"most_ahead": n_parallel},
    )
    if autoscaling is None:
        given["num_replicas"] = replicas
    else:
        given["autoscaling_config"] = {"target_ongoing_requests": n_parallel, **autoscaling}

    class Entry:
        def __init__(self, replicas: Any) -> None:
            pass

    def enter() -> Any:
        replicas = serve.get_deployment_handle("powerinfer", serve.get_replica_context().app_name)
        return ray_router.Entry(replicas, Settings(**settings))

    several: Application = serve.deployment(
        serve.ingress(enter)(Entry),
        name="entry",
        max_ongoing_requests=_MAX_ENTERED,
        ray_actor_options={"num_cpus": 0},
    ).bind(serve.deployment(Replica, **given).bind())
    return several


_NUMBERS: dict[str, type] = {
    **dict.fromkeys(
        ("replicas", "n_parallel", "max_waiting", "n_ctx", "n_pool", "n_threads", "prompt_part"), int
    ),
    **dict.fromkeys(("num_cpus", "num_gpus", "vram_budget", "threshold"), float),
}


def app(args: Mapping[str, Any]) -> Application:
    """deployment() for `serve run powerinfer.ray_serve:app model=FILE replicas=4` and for Ray's configuration
    files. Arguments of a command line come as text."""
    given = dict(args)
    if "model" not in given:
        raise ArgumentError("model=FILE is missing")
    for key, kind in _NUMBERS.items():
        if isinstance(value := given.get(key), str):
            try:
                given[key] = kind(value)
            except ValueError:
                raise ArgumentError(f"{key}={value} is not a number") from None
    return deployment(given.pop("model"), **given)


class Answers:
    """For `Dataset.map_batches`: adds a column with the model's answers. Rows of a batch are computed
    together, and a system prompt that they share is read once."""

    def __init__(
        self,
        model: str,
        *,
        column: str = "prompt",
        into: str = "answer",
        system: str | None = None,
        n_parallel: int = 8,
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Opens the model.

        column: the questions. into: the answers. system: a system prompt for all.
        n_parallel: rows computed at the same time.
        sampling: arguments of create_chat_completion: temperature, max_tokens, seed, response_format ...
        options: of Llama.
        """
        from ..async_llama import AsyncLlama

        self._column, self._into = column, into
        self._head = [{"role": "system", "content": system}] if system else []
        self._sampling = dict(sampling or {})
        self._n_parallel = n_parallel
        self._llm = AsyncLlama(model, n_parallel=n_parallel, verbose=False, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        if self._column not in batch:
            raise ArgumentError(
                f"the rows have no column {self._column!r}; they have {', '.join(map(repr, batch))}"
            )
        answers = asyncio.run(self._answer_all([str(text) for text in batch[self._column]]))
        return {**batch, self._into: np.array(answers, dtype=object)}

    async def _answer_all(self, questions: list[str]) -> list[str]:
        places = asyncio.Semaphore(self._n_parallel)

        async def answer(question: str) -> str:
            async with places:
                messages = [*self._head, {"role": "user", "content": question}]
                result = await self._llm.create_chat_completion(messages, **self._sampling)
            return str(result["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*map(answer, questions)))

    def close(self) -> None:
        """Frees the model; the object cannot be used afterwards."""
        self._llm.close()
