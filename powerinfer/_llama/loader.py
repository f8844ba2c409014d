"""Opening the session that a Llama computes with: on the CPU, or after a plan for the chosen devices.

n_ctx="auto" is the context that the model was trained with, halved until K and V take a quarter of the memory
that they are to lie in or less, but not below 512: of the budgets of all devices, or of the RAM that is left
when the weights are in it (an eighth of what is free, if that is more).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from .._engine.cuda import WITHOUT_CUBLAS, load_cublas
from .._engine.devices import GIB, Budget, Devices, Names, choose_devices, facts_of, warn_once
from .._engine.machine import available_bytes
from .._engine.session import Model, Session
from .._engine.types import KV_TYPE, N_BATCH, SPARSITY, Progress, name_of, number_of
from .._engine.warn import warn
from ..errors import (
    ArgumentError,
    DeviceError,
    FileError,
    FormatError,
    OutOfMemoryError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from ..models.plan import Plan, Rates, Settings, Statistics

ContextSize = int | Literal["auto"] | None
_LEAST_CONTEXT = 512
_KV_SHARE, _FREE_SHARE = 4, 8
_WHOLE_BYTES = 1 << 46  # more than any model
_BESIDE_CONTEXT = 120 << 20  # code that is loaded later, captured graphs, libraries


class Loader:
    """One model's session: how it is opened, and the plan that it follows."""

    def __init__(
        self,
        model: Model,
        *,
        devices: Devices | None,
        plan: Plan | str | os.PathLike[str] | None = None,
        names: Names = None,
        vram_budget: Budget = None,
        n_gpu_layers: int | None = None,
        online: bool = False,
        say: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        """
        devices: what choose_devices() gave; None with a plan.
        plan: a Plan or the path of one, for the devices that `names` names and these budgets; None: one is
            made if there are devices.
        n_gpu_layers: of the devices so much as holds that many layers; None: all of their budgets.
        online: count which neurons fire.
        say: told how the plan came about, one sentence at a time.
        options: of Session, where n_ctx may be "auto", and type_k and type_v None.
        """
        if isinstance(options["n_ctx"], str) and options["n_ctx"] != "auto":
            raise ArgumentError(f'n_ctx is {options["n_ctx"]!r}, it must be a number or "auto"')
        self.model = model
        self.devices = devices
        self.options = options
        self._asked = dict(options)
        self._n_ctx = options["n_ctx"]
        self.online = online
        self.say = say
        self.plan: Plan | None = None
        self.statistics: Statistics | None = None
        self._given = plan
        self._names, self._budget = names, vram_budget
        self._n_layers = n_gpu_layers

    def beside(self, devices: Devices | None) -> Loader:
        """Of another session of the same model, with the same options, on other devices."""
        return Loader(self.model, devices=devices, online=self.online, say=self.say, **self._asked)

    def open(self, progress: Progress | None = None) -> Session:
        """progress: called while weights are brought to devices.

        Raises FileError, FormatError, ArgumentError (a plan for another model, or for other options than
        those given; a budget that is too small, and what would do), DeviceError, OutOfMemoryError, and what
        Session raises."""
        if self._given is not None:
            self._follow(self._given)
        else:
            self._settle_context()
            if self.devices is not None:
                self._make()
        self._check_context()
        _warn_of_memory(self.model, self.plan)
        return self.session(progress)

    def _check_context(self) -> None:
        """Raises OutOfMemoryError where K and V would take more memory than is free; warns of a context
        beyond what the model was trained for."""
        info, settings = self.model.info, self._settings()
        n_ctx = settings.n_ctx or min(info.n_ctx_train, 4096)
        shape: dict[str, Any] = {"n_pool": settings.n_pool, "n_seq": settings.n_seq}
        shape |= {"n_batch": settings.n_batch or N_BATCH}
        shape |= {"type_k": settings.type_k, "type_v": settings.type_v}
        try:
            n_bytes = self.model.kv_bytes(n_ctx, **shape)
        except ArgumentError:  # which Session says in its words
            return
        if self.plan is not None and self.plan.uses_device:
            n_bytes -= min(n_bytes, self.plan.bytes.kv)
        free = available_bytes()
        if free is not None and n_bytes > free:
            fits = auto_context(self.model, _host_room(self.model), replace(settings, n_pool=0))
            pool = settings.n_pool if settings.n_pool > n_ctx else 0
            what = f"n_ctx={n_ctx}" + (f" and {pool:,} tokens of all conversations" if pool else "")
            raise OutOfMemoryError(
                f"K/V for {what} takes {n_bytes / GIB:.1f} GiB, and {free / GIB:.1f} are free; "
                f'n_ctx="auto" would take {fits:,}'
            )
        if n_ctx > info.n_ctx_train:
            warn(
                f"n_ctx={n_ctx} is more than the {info.n_ctx_train} tokens that the model was trained for: "
                "what it says beyond those may make no sense"
            )

    def session(self, progress: Progress | None = None, *, strict: bool = False) -> Session:
        """A session of the plan as it is. strict: never on the CPU where the plan uses a device."""
        options = dict(self.options)
        for name in ("type_k", "type_v"):
            options[name] = "f16" if options.get(name) is None else options[name]
        options["n_batch"] = options["n_batch"] or _usual_batch(self.model, options["n_ctx"])
        if self.plan is None or not self.plan.uses_device or self.devices is None:
            return Session(self.model, **options)
        options["n_batch"] = self.plan.settings.n_batch
        try:
            session = Session(
                self.model,
                plan=self.plan.native(self.model),
                device=self.devices.names,
                count_neurons=self.online,
                progress=progress,
                **options,
            )
        except (DeviceError, OutOfMemoryError, UnsupportedError) as error:
            if strict or not self.devices.automatic:
                raise
            warn_once(str(error))
            self.plan = self.devices = None
            return Session(self.model, **options)
        _warn_of_mapping(self.plan, session)
        return session

    def _give_up(self, error: Exception) -> None:
        """The CPU computes after all, where nobody asked for a GPU; else raises."""
        if self.devices is None or not self.devices.automatic:
            raise error
        warn_once(str(error))
        self.plan = self.devices = None
        self._settle_context()

    # ---- a plan that was given

    def _follow(self, plan: Plan | str | os.PathLike[str]) -> None:
        from ..models.plan import load_plan

        options = self.options
        if options["n_ctx"] == "auto":
            options["n_ctx"] = 0
        asked: dict[str, Any] = {"n_ctx": options["n_ctx"], "vram_budget": self._budget}
        asked["sparsity"] = name_of(SPARSITY, number_of("sparsity", SPARSITY, options["sparsity"]))
        if options["n_batch"]:
            asked["n_batch"] = options["n_batch"]
        for name, default in (("n_seq", 1), ("n_pool", 0)):
            if options.get(name, default) != default:
                asked[name] = options[name]
        for name in ("type_k", "type_v"):
            if options[name] is not None:
                asked[name] = name_of(KV_TYPE, number_of(name, KV_TYPE, options[name]))
        if self.online:
            asked["count_neurons"] = True
        found = load_plan(plan, self.model, **asked)
        for name in ("n_ctx", "n_pool", "n_seq", "n_batch", "type_k", "type_v", "sparsity"):
            options[name] = getattr(found.settings, name)
        self.plan = found
        if not found.uses_device:
            return
        if options.get("n_guesses"):
            options["n_guesses"] = found.settings.n_guesses
        self.devices = choose_devices([n / GIB for n in found.budgets], self._names)
        self.say(summary(found))

    # ---- a plan that is made

    def _settle_context(self) -> None:
        if self._n_ctx == "auto":
            self.options["n_ctx"] = "auto"
            room = _host_room(self.model) if self.devices is None else sum(self.devices.budgets)
            self.options["n_ctx"] = auto_context(self.model, room, self._settings())

    def _settings(self) -> Settings:
        from ..models.plan import Settings

        o = self.options
        names: dict[str, Any] = {
            name: name_of(KV_TYPE, number_of(name, KV_TYPE, o[name]))
            for name in ("type_k", "type_v")
            if o.get(name) is not None
        }
        overhead = Settings().overhead_bytes
        if self.devices is not None and self.devices.kind == "host":
            overhead = 0
        elif self.devices is not None:
            opened = max(facts_of("cuda", index).context_bytes for index in self.devices.indices)
            overhead = max(overhead, opened + _BESIDE_CONTEXT)
        return Settings(
            n_ctx=0 if o["n_ctx"] == "auto" else o["n_ctx"],
            n_pool=o.get("n_pool", 0),
            n_seq=o.get("n_seq", 1),
            n_guesses=o.get("n_guesses", 0) if self.model.info.n_recurrent else 0,
            n_batch=o["n_batch"],
            sparsity=name_of(SPARSITY, number_of("sparsity", SPARSITY, o["sparsity"])),
            overhead_bytes=overhead,
            count_neurons=self.online,
            group=1 if overhead == 0 else Settings().group,
            **names,
        )

    def _rates(self) -> Rates:
        from ..models.plan.rates import HOST_RATES, device_rates

        assert self.devices is not None
        if self.devices.kind == "host":
            return HOST_RATES
        return device_rates([facts_of("cuda", index) for index in self.devices.indices], zero_copy=True)

    def _make(self) -> None:
        from ..models.plan import find_statistics

        try:
            self.statistics = find_statistics(self.model)
            if self._n_layers is not None:
                self._take_layers(self._n_layers)
            self._plan(self.statistics)
        except (ArgumentError, FileError, FormatError, UnsupportedError) as error:
            self._give_up(error)
            return
        assert self.plan is not None
        self.say(summary(self.plan))
        if self.devices is not None and self.devices.kind == "cuda" and load_cublas() is None:
            self.say(f"cuBLASLt is {WITHOUT_CUBLAS}")

    def _take_layers(self, n: int) -> None:
        """Makes the budgets what the last N layers take, or less where less is free."""
        from ..models.plan import engine

        assert self.devices is not None
        n_layer, free = self.model.info.n_layer, sum(self.devices.budgets)
        settings = replace(self._settings(), budget_bytes=_WHOLE_BYTES)
        whole = engine.compute(self.model, settings, self._rates())
        sizes = [
            y.kv_bytes + y.attention_bytes + y.norm_bytes + y.predictor_bytes + y.ffn_bytes
            for y in whole.layers
        ]
        n_bytes = whole.bytes.total - sum(sizes[: max(n_layer - n, 0)])
        if n <= n_layer:
            n_bytes -= whole.bytes.head
        n_bytes = max(n_bytes, whole.min_bytes)
        told = (
            f"n_gpu_layers={n}: a budget of {n_bytes / GIB:.2f} GiB holds as much as "
            f"{min(n, n_layer)} of {n_layer} layers"
        )
        if n_bytes >= free:
            self.say(f"{told}; {free / GIB:.2f} GiB are free, and what fits there is taken")
            return
        self.say(told)
        budgets, left = [], n_bytes
        for budget in self.devices.budgets:
            budgets.append(min(budget, left))
            left -= budgets[-1]
        used = [i for i, budget in enumerate(budgets) if budget]
        self.devices = replace(
            self.devices,
            indices=tuple(self.devices.indices[i] for i in used),
            budgets=tuple(budgets[i] for i in used),
        )

    def _plan(self, statistics: Statistics) -> None:
        assert self.devices is not None
        while True:
            try:
                plan = self.planned(self.devices, statistics)
                break
            except ArgumentError:  # a small GPU beside a large one must not be in its way
                if not self.devices.automatic or len(self.devices.indices) == 1:
                    raise
                self.devices = self.devices.without_least()
        if self.devices.automatic and len(self.devices.indices) > 1:
            one = self.devices.first()
            alone = self.planned(one, statistics)
            if alone.expected.total_us <= plan.expected.total_us:
                plan, self.devices = alone, one
        self.plan = plan

    def needed_bytes(self) -> int:
        """What the best plan takes of the devices' memory. Raises ArgumentError (a budget that is too small),
        FileError, FormatError, UnsupportedError."""
        from ..models.plan import find_statistics

        if self.devices is None:
            return 0
        plan = self.planned(self.devices, find_statistics(self.model))
        return plan.bytes.total if plan.uses_device else 0

    def planned(self, devices: Devices, statistics: Statistics) -> Plan:
        """The best plan for these. Raises ArgumentError."""
        from ..models.plan import make_plan

        settings, rates = self._settings(), None
        if self._given is not None and self.plan is not None:
            settings, rates = self.plan.settings, self.plan.rates
        rates = rates or self._rates()
        try:
            return make_plan(
                self.model,
                vram_budget=[n / GIB for n in devices.budgets],
                settings=settings,
                rates=rates,
                statistics=statistics,
            )
        except ArgumentError as error:
            hint = _what_fits(self.model, settings, rates, devices.budgets)
            raise ArgumentError(f"{error}{hint}") from None


@contextmanager
def loading_bar(wanted: bool, text: str) -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal."""
    if not wanted:
        yield None
        return
    from .._text.terminal import Bar

    with Bar(text) as bar:
        yield bar


def batch_of(n_batch: int | None, n_ubatch: int | None) -> int:
    """The smaller one of those that are given; 0: it is to be chosen."""
    given = [n for n in (n_batch, n_ubatch) if n is not None]
    if 0 in given:
        raise ArgumentError("n_batch is 0, at least 1 is needed")
    return min(given, default=0)


def auto_context(model: Model, room_bytes: int, settings: Settings) -> int:
    """The context that n_ctx="auto" stands for, where K and V are to lie in that much memory."""
    shape: dict[str, Any] = {"n_seq": settings.n_seq, "n_batch": settings.n_batch or N_BATCH}
    types: dict[str, Any] = {"type_k": settings.type_k, "type_v": settings.type_v}
    n_ctx = model.info.n_ctx_train
    while n_ctx > _LEAST_CONTEXT and model.kv_bytes(n_ctx, **shape, **types) > room_bytes // _KV_SHARE:
        n_ctx = max(n_ctx // 2, _LEAST_CONTEXT)
    return n_ctx


def _usual_batch(model: Model, n_ctx: int) -> int:
    """Prompt tokens at a time on the CPU. Of a mixture's batch each expert gets a share: with four times as
    many a processor with AMX computed prompts of 2,048 1.45 times as fast (Qwen3-30B-A3B), for 270 MB."""
    if not model.info.n_expert:
        return N_BATCH
    return max(N_BATCH, min(4 * N_BATCH, n_ctx or model.info.n_ctx_train))


def _free_bytes() -> int:
    """RAM that is free, or that the container may use if that is less; 0: unknown."""
    return available_bytes() or 0


def _host_room(model: Model) -> int:
    """Memory that is left for K and V when the weights are in it."""
    free = _free_bytes()
    return max(free - model.info.n_weight_bytes, free // _FREE_SHARE)


def _what_fits(model: Model, settings: Settings, rates: Rates, budgets: tuple[int, ...]) -> str:
    """What smaller sizes would make the budgets do, as the end of a sentence."""
    from ..models.plan import engine

    budget = min((n for n in budgets if n), default=0)
    most = settings.n_batch or N_BATCH
    for n_batch in (most, 128, 32, 8):
        n_ctx = settings.n_ctx or min(model.info.n_ctx_train, 4096)
        while n_batch <= most and n_ctx >= 64:
            smaller = replace(settings, n_ctx=n_ctx, n_pool=0, n_batch=n_batch, budget_bytes=0)
            try:
                least = engine.compute(model, smaller, rates).min_bytes
            except ArgumentError:  # of another argument, which the first error names
                return ""
            if least <= budget:
                return f"; n_ctx={n_ctx} with n_batch={n_batch} would fit"
            n_ctx //= 2
    return ""


def summary(plan: Plan) -> str:
    """A plan in a sentence."""
    if not plan.uses_device:
        return "plan: everything stays on the CPU, which is faster at these rates"
    n_device = sum(layer.on_device for layer in plan.layers)
    where = f"{plan.bytes.total / GIB:.2f} of {plan.budget_bytes / GIB:.2f} GiB"
    if len(plan.budgets) > 1:
        each = ", ".join(f"{d.total_bytes / GIB:.2f}" for d in plan.devices)
        where += f" ({each})"
    pcie = sum(len(layer.pcie) for layer in plan.layers)
    zero_copy = f", {pcie} read by zero-copy over PCIe" if pcie else ""
    return (
        f"plan: {where}, attention of {n_device} of {len(plan.layers)} layers, {plan.hot_share:.0%} of the "
        f"{plan.model.unit}, which are {plan.carried:.0%} of those computed{zero_copy}; "
        f"{plan.expected.tokens_per_s:.1f} tokens/s expected; statistics: {plan.statistics}; "
        f"PCIe: {plan.rates.pcie}"
    )


def _warn_of_mapping(plan: Plan, session: Session) -> None:
    """Warns where a device cannot read weights in host memory: the plan's, or those of prompts."""
    planned = sum(len(layer.pcie) for layer in plan.layers)
    info = session.info
    missing = planned - info.n_zero_copy
    if info.n_unmapped_bytes and not missing:
        warn(
            f"the GPU's driver cannot map {info.n_unmapped_bytes / GIB:.2f} GiB of the weights in host "
            "memory: long prompts copy them through a small buffer and are slower"
            + (
                ", and the GPU reads no experts there, so that fewer tokens/s are to be expected than the "
                "plan says"
                if plan.expected.active_pcie
                else ""
            )
        )
    if missing:
        warn(
            f"of {planned} neurons the plan wants the GPU to read the weights in host memory, which cannot "
            f"be mapped for {missing} of them: the CPU computes those, and fewer tokens/s are to be expected "
            "than the plan says"
        )


def _warn_of_memory(model: Model, plan: Plan | None) -> None:
    """Warns where the weights that stay in RAM are more than is free."""
    free = _free_bytes()
    here = model.info.n_weight_bytes
    if plan is not None and plan.uses_device:
        b = plan.bytes
        here -= min(here, b.attention + b.predictor + b.ffn + b.head)
    if free and here > free:
        warn(
            f"{here / GIB:.1f} GiB of the weights of {model.file.path.name} stay in RAM, and "
            f"{free / GIB:.1f} GiB are free: parts of them are read from disk for every token"
        )
