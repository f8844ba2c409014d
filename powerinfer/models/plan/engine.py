"""The engine's planner: numbers in, a placement with its sizes and times out. native/plan/plan.h has its
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._engine import _native
from ..._engine.session import Model
from ..._engine.types import KV_TYPE, N_BATCH, SPARSITY, name_of
from ...errors import ArgumentError

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.uint32]

_DEFAULTS = _native.lib.pi_plan_defaults()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a plan is made for. Zeros of n_ctx, n_pool and n_batch, and sparsity "auto", are replaced in a
    plan by what they stand for."""

    budget_bytes: int = 0
    """Of the first device; 0: nothing goes there."""
    more_budgets: tuple[int, ...] = ()
    """Of further devices."""
    n_ctx: int = 0
    """0: the model's, at most 4096."""
    n_pool: int = 0
    """Positions that all sequences share; 0: n_ctx."""
    n_seq: int = 1
    n_guesses: int = 0
    """Of models with recurrent layers: guessed tokens whose states there is room for."""
    n_batch: int = 0
    """Prompt tokens at a time. 0: N_BATCH, or more where weights are left in host memory (`make_plan`)."""
    type_k: str = "f16"
    """"f32", "f16" or "q8_0"."""
    type_v: str = "f16"
    sparsity: str = "auto"
    """"auto", "predicted", "exact" or "dense"."""
    count_neurons: bool = False
    """The session counts which neurons fire."""
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
    zero_copy_bytes_per_s: float = 0.0
    """At which the device's kernels read weights that lie in host memory; 0: they do not."""
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
    """Attention, K and V, norms and predictor are on a device."""
    device: int
    """Which; -1: the CPU."""
    hot: Ids
    """Ids of the neurons on the device, ascending."""
    pcie: Ids
    """Of those whose rows it reads where they lie in host memory."""
    active_hot: float
    """Of the hot ones, computed per token, expected."""
    active_pcie: float
    active_cold: float
    kv_bytes: int
    attention_bytes: int
    norm_bytes: int
    predictor_bytes: int
    ffn_bytes: int
    fixed_us: float
    """Attention, K and V, predictor; on a device of a model whose attention and FFN read the same input
    (Falcon) the predictor alone."""
    gpu_ffn_us: float
    """Hot neurons and those read by zero-copy; of such a model attention, K and V, too."""
    cpu_ffn_us: float
    handover_us: float
    us: float
    """fixed_us + max(gpu_ffn_us, cpu_ffn_us + handover_us)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first tokens took that a model made by a plan."""

    n_tokens: int
    tokens_per_s: float
    """Of the engine alone: without choosing tokens."""
    computed: tuple[float, ...]
    """Neurons of each layer that a token computed, beside active_hot, active_pcie and active_cold of a
    LayerPlan."""


@dataclass(frozen=True, kw_only=True)
class PlanBytes:
    """Device memory by what it holds."""

    kv: int
    """K and V, and the states of recurrent layers."""
    attention: int
    norms: int
    predictor: int
    ffn: int
    """Hot neurons."""
    head: int
    """The output matrix."""
    scratch: int
    """Activations, logits and tables, for n_batch tokens and n_seq sequences, and of host memory that the
    device reads."""
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
    active_pcie: float
    """On the device, with weights that it reads over PCIe."""
    active_cold: float
    stream_bytes: float
    """Weights of the layers that are not on the device."""
    prompt_us: float
    """What bringing those over PCIe takes: the least for each n_batch tokens of a long prompt."""
    measured: Measured | None = None
    """Beside all that: of the plan of an open model, once it made 200 tokens, one at a time; not in files."""

    @property
    def tokens_per_s(self) -> float:
        return 1e6 / self.total_us


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """One device: a range of layers."""

    first_layer: int
    n_layers: int
    """That have their attention there."""
    budget_bytes: int
    scratch_bytes: int
    staging_bytes: int
    overhead_bytes: int
    total_bytes: int
    """These three and all that lies there; not more than the budget."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What the engine's planner answers."""

    settings: Settings
    """As asked, without zeros and "auto"."""
    layers: tuple[LayerPlan, ...]
    head_on_device: bool
    """The output matrix."""
    head_device: int
    """Its device; -1: the CPU."""
    uses_device: bool
    """False: all on the CPU, because the budget is 0 or because that is faster."""
    devices: tuple[DevicePlan, ...]
    """One for each budget."""
    bytes: PlanBytes
    min_bytes: int
    """The least budget that puts anything on the device."""
    full_bytes: int
    """The budget that holds everything."""
    expected: Expectation


def _number(what: str, names: dict[str, int], value: str) -> int:
    """Of a name as plans have it: no other spelling, no number."""
    if value not in names:
        raise ArgumentError(f"{what} is {value!r}, it must be one of {', '.join(map(repr, names))}")
    return names[value]


def _options(
    model: Model, s: Settings, rates: Rates, counts: Counts | None, n_tokens: int
) -> tuple[Any, list[Any]]:
    """The native options, and what must stay alive as long as they are used."""
    o = _native.ffi.new("pi_plan_options *", _native.lib.pi_plan_defaults())
    o.budget_bytes = _native.fit("budget_bytes", s.budget_bytes, 64, signed=False)
    budgets = [_native.fit("budget_bytes", n, 64, signed=False) for n in (s.budget_bytes, *s.more_budgets)]
    alive = [_native.ffi.new("uint64_t[]", budgets)]
    o.n_devices, o.budgets = len(budgets), alive[0]
    o.overhead_bytes = _native.fit("overhead_bytes", s.overhead_bytes, 64, signed=False)
    for name in ("n_ctx", "n_pool", "n_seq", "n_guesses", "group"):
        setattr(o, name, _native.fit(name, getattr(s, name)))
    o.n_batch = _native.fit("n_batch", s.n_batch or N_BATCH)
    o.type_k = _number("type_k", KV_TYPE, s.type_k)
    o.type_v = _number("type_v", KV_TYPE, s.type_v)
    o.sparsity = _number("sparsity", SPARSITY, s.sparsity)
    o.count_neurons = s.count_neurons
    o.active_share, o.overshoot = s.active_share, s.overshoot
    for name in (
        "gpu_bytes_per_s",
        "cpu_bytes_per_s",
        "pcie_bytes_per_s",
        "zero_copy_bytes_per_s",
        "handover_us",
        "layer_us",
        "ffn_us",
    ):
        setattr(o, name, getattr(rates, name))
    if counts is None:
        return o, alive
    shape = (model.info.n_layer, model.info.n_placed)
    if counts.shape != shape:
        raise ArgumentError(f"the counts are of {counts.shape} neurons, the model has {shape}")
    array = np.ascontiguousarray(counts, np.uint32)
    o.counts = _native.ffi.from_buffer("uint32_t[]", array)
    o.n_tokens = _native.fit("n_tokens", n_tokens, 64, signed=False)
    return o, [*alive, array]


def compute(
    model: Model, settings: Settings, rates: Rates, counts: Counts | None = None, n_tokens: int = 0
) -> Result:
    """The best placement. counts: [n_layer, n_placed] how often each neuron fired over n_tokens, or of a
    mixture each expert was used.

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
    devices: Sequence[int] | None = None,
    head_device: int = 0,
    pcie: Sequence[Ids] | None = None,
    counts: Counts | None = None,
    n_tokens: int = 0,
) -> Any:
    """The engine's own plan of a given placement, for Session. hot, pcie: of each layer, ascending. devices,
    head_device: which device those that lie on one are on; None: all on the first.

    Raises ArgumentError (a placement that cannot be, or takes more than the budget), OutOfMemoryError.
    """
    n_layer = model.info.n_layer
    zero_copy = [np.zeros(0, np.int32)] * n_layer if pcie is None else pcie
    places = [0] * n_layer if devices is None else devices
    if {len(on_device), len(hot), len(zero_copy), len(places)} != {n_layer}:
        raise ArgumentError(f"the plan has {len(on_device)} layers, the model has {n_layer}")
    options, _alive = _options(model, settings, rates, counts, n_tokens)
    at = _native.ffi.new("pi_placement *")
    kept: dict[str, npt.NDArray[Any]] = {
        "on_device": np.array(on_device, np.uint8),
        "n_hot": _lengths(hot),
        "hot": _joined(hot),
        "device": np.array([*places, head_device], np.int32),
        "n_pcie": _lengths(zero_copy),
        "pcie": _joined(zero_copy),
    }
    for name, array in kept.items():
        setattr(at, name, _native.ffi.from_buffer(f"{array.dtype.name}_t[]", array))
    at.head_on_device = bool(head_on_device)
    out = _native.ffi.new("pi_plan **")
    _native.check(_native.lib.pi_plan_restore(model.handle, options, at, out))
    return _native.ffi.gc(out[0], _native.lib.pi_plan_free)


def _lengths(lists: Sequence[Ids]) -> Ids:
    return np.array([len(ids) for ids in lists], np.int32)


def _joined(lists: Sequence[Ids]) -> Ids:
    return np.concatenate([*(np.asarray(i, np.int32) for i in lists), np.zeros(1, np.int32)])  # never empty


def restore(model: Model, settings: Settings, rates: Rates, **placement: Any) -> Result:
    """A given placement with its sizes and times; arguments and errors as native_plan's."""
    return _read(native_plan(model, settings, rates, **placement), settings)


def _read(plan: Any, asked: Settings) -> Result:
    i = _native.ffi.new("pi_plan_info *")
    _native.check(_native.lib.pi_plan_get_info(plan, i))
    sizes = {name: getattr(i, name) for name in ("n_ctx", "n_pool", "n_seq", "n_batch")}
    settings = replace(asked, **sizes, sparsity=name_of(SPARSITY, i.sparsity))
    names = [field.name for field in fields(Expectation) if field.name != "measured"]
    return Result(
        settings=settings,
        layers=tuple(_read_layer(plan, index) for index in range(i.n_layer)),
        head_on_device=bool(i.head_on_device),
        head_device=i.head_device,
        uses_device=bool(i.uses_device),
        devices=tuple(_read_device(plan, index) for index in range(i.n_devices)),
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
    ids: dict[str, Any] = {}
    for name, n, read in (
        ("hot", y.n_hot, _native.lib.pi_plan_hot),
        ("pcie", y.n_pcie, _native.lib.pi_plan_pcie),
    ):
        array = np.empty(n + 1, np.int32)  # never empty
        _native.check(read(plan, index, _native.ffi.from_buffer("int32_t[]", array)))
        ids[name] = array[:-1]
        ids[name].flags.writeable = False
    names = (field.name for field in fields(LayerPlan) if field.name not in ("on_device", *ids))
    return LayerPlan(on_device=bool(y.on_device), **ids, **{name: getattr(y, name) for name in names})


def _read_device(plan: Any, index: int) -> DevicePlan:
    d = _native.ffi.new("pi_plan_device *")
    _native.check(_native.lib.pi_plan_get_device(plan, index, d))
    return DevicePlan(**{field.name: getattr(d, field.name) for field in fields(DevicePlan)})
