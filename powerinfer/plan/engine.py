"""The engine's planner: numbers in, a placement with its sizes and times out. native/plan/plan.h has its
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import ArgumentError
from ..session import Model

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.uint32]

SPARSITY = {"auto": 0, "predicted": 1, "exact": 2, "dense": 3}
KV_TYPE = {"f32": 0, "f16": 1, "q8_0": 8}
_DEFAULTS = _native.lib.pi_plan_defaults()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a plan is made for. Zeros of n_ctx and n_pool, and sparsity "auto", are replaced in a plan by what
    they stand for."""

    budget_bytes: int = 0
    """0: all on the CPU."""
    n_ctx: int = 0
    """0: the model's, at most 4096."""
    n_pool: int = 0
    """Positions that all sequences share; 0: n_ctx."""
    n_seq: int = 1
    n_batch: int = 512
    type_k: str = "f16"
    """"f32", "f16" or "q8_0"."""
    type_v: str = "f16"
    sparsity: str = "auto"
    """"auto", "predicted", "exact" or "dense"."""
    group: int = 32
    """Neurons that move together."""
    overhead_bytes: int = _DEFAULTS.overhead_bytes
    """Of the driver's context, code, captured graphs and libraries; the default was measured on one H200."""
    active_share: float = _DEFAULTS.active_share
    """How often a neuron fires, where there are no counts."""
    overshoot: float = _DEFAULTS.overshoot
    """Neurons that a predictor names for each neuron that fires."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds that a plan rests on; bytes per second, and microseconds. The words say where the first three
    are from."""

    gpu_bytes_per_s: float = _DEFAULTS.gpu_bytes_per_s
    cpu_bytes_per_s: float = _DEFAULTS.cpu_bytes_per_s
    pcie_bytes_per_s: float = _DEFAULTS.pcie_bytes_per_s
    handover_us: float = _DEFAULTS.handover_us
    """From the device to the CPU and back, once a layer."""
    layer_us: float = _DEFAULTS.layer_us
    """What the device's kernels of a layer take beyond reading bytes."""
    ffn_us: float = _DEFAULTS.ffn_us
    """The same of its hot neurons' kernel, which runs beside the CPU."""
    gpu: str = "assumed"
    cpu: str = "assumed"
    pcie: str = "assumed"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """One layer: what lies on the device, and the time that is expected of it."""

    on_device: bool
    """Attention, K and V, norms and predictor are on the device."""
    hot: Ids
    """Ids of the neurons on the device, ascending."""
    active_hot: float
    """Of those, computed per token, expected."""
    active_cold: float
    kv_bytes: int
    attention_bytes: int
    norm_bytes: int
    predictor_bytes: int
    ffn_bytes: int
    fixed_us: float
    """Attention, K and V, predictor."""
    gpu_ffn_us: float
    cpu_ffn_us: float
    handover_us: float
    us: float
    """fixed_us + max(gpu_ffn_us, cpu_ffn_us + handover_us)."""


@dataclass(frozen=True, kw_only=True)
class PlanBytes:
    """Device memory by what it holds."""

    kv: int
    attention: int
    norms: int
    predictor: int
    ffn: int
    """Hot neurons."""
    head: int
    """The output matrix."""
    scratch: int
    """Activations, logits and tables, for n_batch tokens and n_seq sequences."""
    staging: int
    """Buffers through which a prompt's cold weights stream."""
    overhead: int
    """The driver's and libraries' own."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Times per token, in microseconds, of one sequence whose context is half full."""

    gpu_us: float
    """The device is busy; partly at the same time as the CPU."""
    cpu_us: float
    handover_us: float
    head_us: float
    """Output matrix."""
    total_us: float
    bound_us: float
    """No plan within the budget is faster than this, by the same arithmetic."""
    active_hot: float
    """Neurons computed per token on the device, all layers."""
    active_cold: float
    stream_bytes: float
    """Weights of the layers that are not on the device."""
    prompt_us: float
    """What bringing those over PCIe takes: the least for each n_batch tokens of a long prompt."""

    @property
    def tokens_per_s(self) -> float:
        return 1e6 / self.total_us


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What the engine's planner answers."""

    settings: Settings
    """As asked, without zeros and "auto"."""
    layers: tuple[LayerPlan, ...]
    head_on_device: bool
    uses_device: bool
    bytes: PlanBytes
    min_bytes: int
    """The least budget that puts anything on the device."""
    full_bytes: int
    """The budget that holds everything."""
    expected: Expectation


def _number(what: str, names: dict[str, int], value: str) -> int:
    if value not in names:
        raise ArgumentError(f"{what} is {value!r}, it must be one of {', '.join(map(repr, names))}")
    return names[value]


def _options(
    model: Model, s: Settings, rates: Rates, counts: Counts | None, n_tokens: int
) -> tuple[Any, Any]:
    """The native options, and what must stay alive as long as they are used."""
    o = _native.ffi.new("pi_plan_options *", _native.lib.pi_plan_defaults())
    o.budget_bytes = _native.fit("budget_bytes", s.budget_bytes, 64, signed=False)
    o.overhead_bytes = _native.fit("overhead_bytes", s.overhead_bytes, 64, signed=False)
    for name in ("n_ctx", "n_pool", "n_seq", "n_batch", "group"):
        setattr(o, name, _native.fit(name, getattr(s, name)))
    o.type_k = _number("type_k", KV_TYPE, s.type_k)
    o.type_v = _number("type_v", KV_TYPE, s.type_v)
    o.sparsity = _number("sparsity", SPARSITY, s.sparsity)
    o.active_share, o.overshoot = s.active_share, s.overshoot
    for name in (
        "gpu_bytes_per_s",
        "cpu_bytes_per_s",
        "pcie_bytes_per_s",
        "handover_us",
        "layer_us",
        "ffn_us",
    ):
        setattr(o, name, getattr(rates, name))
    if counts is None:
        return o, None
    shape = (model.info.n_layer, model.info.n_ff)
    if counts.shape != shape:
        raise ArgumentError(f"the counts are of {counts.shape} neurons, the model has {shape}")
    array = np.ascontiguousarray(counts, np.uint32)
    o.counts = _native.ffi.from_buffer("uint32_t[]", array)
    o.n_tokens = _native.fit("n_tokens", n_tokens, 64, signed=False)
    return o, array


def compute(
    model: Model, settings: Settings, rates: Rates, counts: Counts | None = None, n_tokens: int = 0
) -> Result:
    """The best placement. counts: [n_layer, n_ff] how often each neuron fired over n_tokens.

    Raises ArgumentError (values out of range, or a budget that is too small, and what would do),
    OutOfMemoryError.
    """
    options, _alive = _options(model, settings, rates, counts, n_tokens)
    out = _native.ffi.new("pi_plan **")
    _native.check(_native.lib.pi_plan_new(model.handle, options, out))
    return _read(_native.ffi.gc(out[0], _native.lib.pi_plan_free), settings)


def native_plan(
    model: Model,
    settings: Settings,
    rates: Rates,
    *,
    on_device: Sequence[bool],
    hot: Sequence[Ids],
    head_on_device: bool,
    counts: Counts | None = None,
    n_tokens: int = 0,
) -> Any:
    """The engine's own plan of a given placement, for Session. hot: of each layer, ascending.

    Raises ArgumentError (a placement that cannot be, or takes more than the budget), OutOfMemoryError.
    """
    n_layer = model.info.n_layer
    if len(on_device) != n_layer or len(hot) != n_layer:
        raise ArgumentError(f"the plan has {len(on_device)} layers, the model has {n_layer}")
    options, _alive = _options(model, settings, rates, counts, n_tokens)
    flags = np.array(on_device, np.uint8)
    n_hot = np.array([len(ids) for ids in hot], np.int32)
    ids = np.concatenate([*(np.asarray(i, np.int32) for i in hot), np.zeros(1, np.int32)])  # never empty
    at = _native.ffi.new("pi_placement *")
    at.on_device = _native.ffi.from_buffer("uint8_t[]", flags)
    at.n_hot = _native.ffi.from_buffer("int32_t[]", n_hot)
    at.hot = _native.ffi.from_buffer("int32_t[]", ids)
    at.head_on_device = bool(head_on_device)
    out = _native.ffi.new("pi_plan **")
    _native.check(_native.lib.pi_plan_restore(model.handle, options, at, out))
    return _native.ffi.gc(out[0], _native.lib.pi_plan_free)


def restore(model: Model, settings: Settings, rates: Rates, **placement: Any) -> Result:
    """A given placement with its sizes and times; arguments and errors as native_plan's."""
    return _read(native_plan(model, settings, rates, **placement), settings)


def _read(plan: Any, asked: Settings) -> Result:
    i = _native.ffi.new("pi_plan_info *")
    _native.check(_native.lib.pi_plan_get_info(plan, i))
    settings = Settings(
        **{field.name: getattr(asked, field.name) for field in fields(Settings)}
        | {name: getattr(i, name) for name in ("n_ctx", "n_pool", "n_seq", "n_batch")}
        | {"sparsity": next(name for name, number in SPARSITY.items() if number == i.sparsity)}
    )
    names = [field.name for field in fields(Expectation)]
    return Result(
        settings=settings,
        layers=tuple(_read_layer(plan, index) for index in range(i.n_layer)),
        head_on_device=bool(i.head_on_device),
        uses_device=bool(i.uses_device),
        bytes=PlanBytes(
            kv=i.kv_bytes,
            attention=i.attention_bytes,
            norms=i.norm_bytes,
            predictor=i.predictor_bytes,
            ffn=i.ffn_bytes,
            head=i.head_bytes,
            scratch=i.scratch_bytes,
            staging=i.staging_bytes,
            overhead=i.overhead_bytes,
        ),
        min_bytes=i.min_bytes,
        full_bytes=i.full_bytes,
        expected=Expectation(**{name: getattr(i, name) for name in names}),
    )


def _read_layer(plan: Any, index: int) -> LayerPlan:
    y = _native.ffi.new("pi_plan_layer *")
    _native.check(_native.lib.pi_plan_get_layer(plan, index, y))
    hot = np.empty(y.n_hot + 1, np.int32)  # never empty
    _native.check(_native.lib.pi_plan_hot(plan, index, _native.ffi.from_buffer("int32_t[]", hot)))
    ids = hot[:-1]
    ids.flags.writeable = False
    names = (field.name for field in fields(LayerPlan) if field.name not in ("on_device", "hot"))
    return LayerPlan(on_device=bool(y.on_device), hot=ids, **{name: getattr(y, name) for name in names})
