"""The models of a server: which there are, which are open, and who uses them.

A model is opened when somebody asks for it, beside the event loop, one at a time, and closed when nobody has
used it for a while or another wants its place; never while a request is in flight. An adapter (LoRA) is a
property of a model in the engine, so the model with it is opened beside the one without: weights that lie in
a file's mapping are in memory once, and no K or V of one is ever the other's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from .._engine.file import ModelFile
from ..async_llama import AsyncLlama
from ..errors import ArgumentError, ClosedError, DeadlineError
from .problems import Problem, shown

_log = logging.getLogger("uvicorn.error")

State = Literal["unloaded", "waiting", "loading", "loaded", "unloading", "failed"]
Strengths = tuple[tuple[int, float], ...]
"""Adapters by their numbers, each with its scale; none of 0."""

USED = "powerinfer.models"
"""Where an ASGI scope has the models that its request uses."""

MAX_ADAPTED = 4
"""Sets of adapters of one model that are open at the same time, where weights are in memory once."""
_MAX_KNOWN = 64  # sets that a model has a record of


@dataclass(frozen=True)
class Adapter:
    name: str
    path: str
    scale: float = 1.0
    """Where a request names it and says no other."""


@dataclass(frozen=True, eq=False)
class Group:
    """Models that want the same memory."""

    most: int = 1
    """That are open at the same time."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from when one waits for its place until it has it."""


Open = Callable[[Sequence[tuple[str, float]], Callable[[int, int], None]], AsyncLlama]
"""Opens a model with adapters (path, scale); calls the second argument while it loads."""


@dataclass(eq=False)
class ServedModel:
    """One model, or one with adapters."""

    names: tuple[str, ...]
    """The first is the one that answers carry."""
    file: ModelFile
    """Open as long as the server."""
    open: Open | None = None
    """None: it is open, and stays so."""
    adapters: tuple[Adapter, ...] = ()
    group: Group | None = None
    max_requests: int = 72
    """That it computes or lets wait."""

    state: State = "unloaded"
    error: str | None = None
    """Of the last attempt to open it."""
    opened: AsyncLlama | None = None
    info: Any = None
    """As it was when the model was opened: reading it waits for the step that the engine is at."""
    created: int = field(default_factory=lambda: int(time.time()))
    n_loads: int = 0
    n_users: int = 0
    is_leaving: bool = False
    """Who asks for it now waits until it is closed, and opens it anew."""
    last_used: float = 0.0
    keep_s: float = math.inf
    """How long it is kept after its last use."""
    loading: asyncio.Task[None] | None = None
    strengths: Strengths = ()
    """Of adapters, of this one."""
    default: Strengths = ()
    """Of adapters, where a request names none."""
    adapted: dict[Strengths, ServedModel] = field(default_factory=dict)
    longest: int = 0
    """Characters that n_ctx tokens can have; each has a byte or more."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def llm(self) -> AsyncLlama:
        if self.opened is None:
            raise Problem(503, f"the model {self.name!r} is not loaded", code="model_not_loaded")
        return self.opened

    @property
    def template(self) -> str:
        """The chat template in use."""
        if self.opened is not None:
            return self.opened.llama._format.template
        return str(self.file.metadata.get("tokenizer.chat_template", ""))

    @property
    def template_for_tools(self) -> str:
        """That of conversations with tools."""
        if self.opened is not None:
            return self.opened.llama._format.for_tools().template
        return str(self.file.metadata.get("tokenizer.chat_template.tool_use", "")).strip() or self.template

    def use(self, llm: AsyncLlama) -> None:
        """It is open."""
        self.opened, self.state, self.error = llm, "loaded", None
        self.info = llm.llama.info()
        self.n_loads += 1
        self.last_used = time.monotonic()
        tokenizer = llm.llama.tokenizer
        piece = max(len(tokenizer.piece(token, True)) for token in range(tokenizer.n_vocab))
        self.longest = piece * llm.llama.n_ctx()

    def each(self) -> Iterator[ServedModel]:
        """With what it is under other adapters."""
        yield self
        yield from self.adapted.values()


def of_one(llm: AsyncLlama, names: tuple[str, ...]) -> ServedModel:
    """A model that somebody has opened."""
    most = llm.n_parallel + llm.max_waiting
    model = ServedModel(names, llm.llama.file, max_requests=most)
    model.use(llm)
    return model


class Models:
    """All of a server. What awaits, and release(), belong to its event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        idle_s: float | None = None,
        timeout_s: float = 600.0,
        strict: bool = False,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        """idle_s: after which an unused model is closed; None: not for that. timeout_s: that a request waits
        for its model. strict: a name that is not known is an error, also where there is only one model."""
        self.all = list(models)
        self.idle_s = idle_s
        self._timeout_s = timeout_s
        self._strict = strict
        self._say = say
        self._lock = asyncio.Lock()
        self._changed: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._grace_s = 0.0
        self._named: dict[str, tuple[ServedModel, int | None]] = {}
        for model in self.all:
            for name in model.names:
                self._add(name, model, None)
        for model in self.all:
            for i, adapter in enumerate(model.adapters):
                self._add(f"{model.name}:{adapter.name}", model, i)
                if len(self.all) == 1:
                    self._add(adapter.name, model, i)

    def _add(self, name: str, model: ServedModel, adapter: int | None) -> None:
        if name in self._named:
            raise ArgumentError(f"two models are called {name!r}")
        self._named[name] = model, adapter

    # -- by name

    @property
    def first(self) -> ServedModel:
        return self.all[0]

    @property
    def names(self) -> list[str]:
        """All that clients may ask for."""
        return list(self._named)

    @property
    def known(self) -> list[tuple[str, ServedModel, str | None]]:
        """The same, each with its model, which need not be open, and with the name of the one without its
        adapter."""
        return [
            (name, model, None)
            if i is None
            else (
                name,
                model.adapted.get(((i, model.adapters[i].scale),)) or self._unknown(model, i),
                model.name,
            )
            for name, (model, i) in self._named.items()
        ]

    def _unknown(self, model: ServedModel, i: int) -> ServedModel:
        return ServedModel((f"{model.name}:{model.adapters[i].name}",), model.file, created=model.created)

    def each(self) -> Iterator[ServedModel]:
        for model in self.all:
            yield from model.each()

    @property
    def opened(self) -> list[ServedModel]:
        return [model for model in self.each() if model.opened is not None]

    def base(self, name: str | None, *, strict: bool = False) -> tuple[ServedModel, int | None]:
        """The model of a name, and which of its adapters it stands for. Raises Problem 404."""
        if name is None:
            return self.first, None
        found = self._named.get(name) or self._named.get(name.removesuffix(":latest"))
        if found is not None:
            return found
        if len(self.all) == 1 and not self.first.adapters and not (strict or self._strict):
            return self.first, None
        known = ", ".join(map(repr, self.names))
        raise Problem(
            404,
            f"the model {shown(name, 100)!r} is not served here; there is {known}",
            code="model_not_found",
            param="model",
        )

    def find(self, name: str | None, lora: Sequence[tuple[int, float]] | None = None) -> ServedModel:
        """What a request asks for. lora: numbers and scales of adapters, which win over the name's."""
        model, adapter = self.base(name)
        if lora is not None:
            strengths = self.strengths(model, lora)
        elif adapter is not None:
            strengths = ((adapter, model.adapters[adapter].scale),)
        else:
            strengths = model.default
        return self._adapted(model, strengths) if strengths else model

    def strengths(self, model: ServedModel, lora: Sequence[tuple[int, float]]) -> Strengths:
        """Checked; raises Problem."""
        if len({i for i, _ in lora}) < len(lora):
            raise Problem(400, "lora names an adapter twice", param="lora", code="invalid_value")
        for i, _ in lora:
            if i >= len(model.adapters):
                said = f"the model {model.name!r} has {len(model.adapters)} adapters, there is no number {i}"
                raise Problem(400, said, param="lora", code="invalid_value")
        return tuple(sorted((i, scale) for i, scale in lora if scale))

    def _adapted(self, model: ServedModel, strengths: Strengths) -> ServedModel:
        found = model.adapted.get(strengths)
        if found is None:
            idle = [m for m in model.adapted.values() if m.state in ("unloaded", "failed") and not m.n_users]
            if len(model.adapted) >= _MAX_KNOWN and idle:
                del model.adapted[idle[0].strengths]
            if len(model.adapted) >= _MAX_KNOWN:
                raise Problem(429, "the server is busy: too many sets of adapters", code="server_busy")
            if model.open is None:
                raise Problem(400, "this model was opened without adapters", param="lora", code="unsupported")
            words = [
                model.adapters[i].name + ("" if scale == model.adapters[i].scale else f"@{scale:g}")
                for i, scale in strengths
            ]
            found = model.adapted[strengths] = ServedModel(
                (f"{model.name}:{'+'.join(words)}",),
                model.file,
                model.open,
                model.adapters,
                model.group or self._group_of(model),
                strengths=strengths,
                created=model.created,
            )
        return found

    def _group_of(self, model: ServedModel) -> Group:
        return next((m.group for m in model.adapted.values() if m.group is not None), Group(MAX_ADAPTED))

    def name_of(self, model: ServedModel) -> str:
        """What answers say; of adapters no more than where a request names them."""
        base = next((each for each in self.all if model in each.adapted.values()), model)
        return base.name if model.strengths and model.strengths == base.default else model.name

    def one(self, name: str | None) -> ServedModel:
        """An open model to look at: of this name, or the first, or the one that was used last."""
        if name is not None:
            return self.find(name)
        if self.first.opened is not None or not self.opened:
            return self.first
        return max(self.opened, key=lambda model: model.last_used)

    # -- use

    async def take(
        self,
        name: str | None,
        lora: Sequence[tuple[int, float]] | None = None,
        used: list[ServedModel] | None = None,
    ) -> ServedModel:
        """An open model, which stays so until release(). Raises Problem, ClosedError, DeadlineError.

        used: gets it in the very moment in which it is taken. Whoever waits for this may be cancelled, and
        never see what it returns.
        """
        model, used = self.find(name, lora), [] if used is None else used
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while model.is_leaving:
            await _until(self._next_change(), deadline)
        model.n_users += 1
        used.append(model)
        try:
            while model.opened is None:
                if self._is_closing:
                    raise ClosedError("the server is shutting down")
                if model.loading is None:
                    model.loading = asyncio.ensure_future(self._load(model))
                    model.loading.add_done_callback(_seen)
                await _until(model.loading, deadline)
            return model
        except BaseException:
            if model in used:
                used.remove(model)
                self.release(model)
            raise

    def take_open(
        self, name: str | None, lora: Sequence[tuple[int, float]] | None, used: list[ServedModel]
    ) -> bool:
        """The same at once; False where it would wait."""
        model = self.find(name, lora)
        if model.is_leaving or model.opened is None:
            return False
        model.n_users += 1
        used.append(model)
        return True

    def release(self, model: ServedModel) -> None:
        """The request is over."""
        model.n_users -= 1
        model.last_used = time.monotonic()
        self._ring()
        if not model.n_users and model.opened is not None:
            self._close_later(model, self.kept_s(model))

    def kept_s(self, model: ServedModel) -> float:
        """How long after its last use a model is closed."""
        return math.inf if self.idle_s is None or model.open is None else min(model.keep_s, self.idle_s)

    def _close_later(self, model: ServedModel, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        used = model.last_used

        def look() -> None:
            is_idle = not model.n_users and not model.is_leaving and model.last_used == used
            if is_idle and model.opened is not None and not self._is_closing:
                model.is_leaving = True
                self._begin(self._close(model, "which nobody used"))

        asyncio.get_running_loop().call_later(max(seconds, 0.0), look)

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ring(self) -> None:
        if self._changed is not None and not self._changed.done():
            with suppress(RuntimeError):  # the loop is gone
                self._changed.set_result(None)
        self._changed = None

    def _next_change(self) -> asyncio.Future[None]:
        """Over when something has changed. Shared: not to be cancelled."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    async def _change(self) -> None:
        await asyncio.shield(self._next_change())

    # -- opening and closing

    async def _load(self, model: ServedModel) -> None:
        try:
            model.state = "waiting"
            async with model.group.lock if model.group is not None else nullcontext():
                await self._make_room(model)
                async with self._lock:
                    if model.n_users:  # or nobody waits any more
                        await self._open(model)
                    else:
                        model.state = "unloaded"
        except ClosedError:
            model.state = "unloaded"
            raise
        except Exception as error:
            model.state, model.error = "failed", str(error) or type(error).__name__
            self._say(f"cannot load {model.name}: {model.error}")
            said = f"the model {model.name!r} could not be loaded: {model.error}"
            raise Problem(500, said, code="model_load_failed", param="model") from error
        finally:
            model.loading = None
            self._ring()

    async def _open(self, model: ServedModel) -> None:
        model.state = "loading"
        begin = time.monotonic()
        llm = await self._aside(lambda: self._opened(model))
        model.use(llm)
        self._say(f"loaded {model.name} in {time.monotonic() - begin:.1f} s")
        if self._is_closing:
            llm.begin_close(grace_s=self._grace_s)

    def _opened(self, model: ServedModel) -> AsyncLlama:
        assert model.open is not None

        def go_on(*_: int) -> None:
            if self._is_closing:
                raise ClosedError("the server is shutting down")

        go_on()
        return model.open([(model.adapters[i].path, scale) for i, scale in model.strengths], go_on)

    async def _make_room(self, model: ServedModel) -> None:
        """Closes models of its group until there is a place; waits for those in use."""
        while model.group is not None and model.n_users:
            there = [m for m in self.each() if m.group is model.group and m.opened is not None]
            leaving = [m for m in self.each() if m.group is model.group and m.state == "unloading"]
            if len(there) + len(leaving) < model.group.most:
                return
            if not there:
                await self._change()
                continue
            other = min(there, key=lambda m: (m.n_users > 0, m.last_used))
            if other.is_leaving:  # for another reason
                await self._change()
                continue
            other.is_leaving = True
            try:
                while other.n_users and model.n_users and not self._is_closing:
                    await self._change()
                if self._is_closing:
                    raise ClosedError("the server is shutting down")
            finally:
                other.is_leaving = False
            if not other.n_users:
                await self._close(other, f"for {model.name}")
            self._ring()

    async def _close(self, model: ServedModel, why: str) -> None:
        llm, model.opened = model.opened, None
        model.is_leaving, model.state = True, "unloading"
        try:
            if llm is not None:
                await self._aside(llm.close)
        finally:
            model.is_leaving, model.state = False, "unloaded"
            self._say(f"unloaded {model.name}, {why}")
            self._ring()

    async def _aside(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function)

    def open_first(self, progress: Callable[[int, int], None]) -> None:
        """Opens the first model, here, before there is a loop. Raises what opening raises."""
        model = self.first
        assert model.open is not None
        model.use(model.open([], progress))

    def begin_close(self, *, grace_s: float) -> None:
        """No new requests; those under way have grace_s seconds. A model that is being loaded is not."""
        self._is_closing, self._grace_s = True, grace_s
        for model in self.opened:
            model.llm.begin_close(grace_s=grace_s)
        self._ring()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Closes all that are open. Blocks; the loop runs no more."""
        self._is_closing = True
        for model in self.opened:
            model.llm.close()
            model.opened, model.state = None, "unloaded"


async def _until(future: asyncio.Future[None], deadline: float) -> None:
    """Until it is over, of which it raises what it raised. Not by wait_for(), whose task goes on for a moment
    when this one is cancelled."""
    done, _ = await asyncio.wait({future}, timeout=max(deadline - asyncio.get_running_loop().time(), 0))
    if not done:
        raise DeadlineError("the time for this request is over: its model was not loaded yet")
    future.result()


def _seen(task: asyncio.Task[None]) -> None:
    """What it raised was said, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


class Releasing:
    """An ASGI layer: what a request has taken is released when its answer is written."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        used: list[ServedModel] = []
        scope[USED] = used
        try:
            await self._app(scope, receive, send)
        finally:
            while used:
                self._models.release(used.pop())
