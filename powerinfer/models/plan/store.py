"""Plans as JSON. A file may come from anywhere: every value is checked before it is used.

{"format": "powerinfer.plan", "version": 2, "model": {...}, "settings": {...}, "rates": {...},
 "statistics": {"kind": ..., "source": ...}, "uses_device": ..., "head_on_device": ...,
 "head_device": ..., "devices": [{...}, ...], "min_bytes": ..., "full_bytes": ..., "bytes": {...},
 "expected": {...},
 "layers": [{"on_device": ..., "hot": "base64 of one bit per neuron, lowest bit first", "pcie": the same,
             ...}, ...]}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ...errors import FormatError
from .engine import (
    KV_TYPE,
    SPARSITY,
    DevicePlan,
    Expectation,
    Ids,
    LayerPlan,
    PlanBytes,
    Rates,
    Settings,
)

if TYPE_CHECKING:
    from .plan import Plan

FORMAT, VERSION = "powerinfer.plan", 2
_MOST = 1 << 62  # of bytes
_KINDS = ("file", "folder", "split", "given", "heuristic", "dense")

Part = TypeVar("Part")


def to_json(plan: Plan) -> str:
    """One line. Raises nothing: a plan holds finite numbers only."""
    n_ff = plan.model.n_ff
    layers = [
        _plain(y, ("hot", "pcie")) | {"hot": _pack(y.hot, n_ff), "pcie": _pack(y.pcie, n_ff)}
        for y in plan.layers
    ]
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "model": _plain(plan.model),
            "settings": _plain(plan.settings),
            "rates": _plain(plan.rates),
            "statistics": {"kind": plan.statistics_kind, "source": plan.statistics},
            "uses_device": plan.uses_device,
            "head_on_device": plan.head_on_device,
            "head_device": plan.head_device,
            "devices": [_plain(device) for device in plan.devices],
            "min_bytes": plan.min_bytes,
            "full_bytes": plan.full_bytes,
            "bytes": _plain(plan.bytes),
            "expected": _plain(plan.expected),
            "layers": layers,
        },
        allow_nan=False,
    )


def _plain(part: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass of numbers and words; 5 where a float belongs is 5.0."""
    kept = ((f, getattr(part, f.name)) for f in fields(part) if f.name not in without)
    return {f.name: float(value) if f.type == "float" else value for f, value in kept}


def _pack(ids: Ids, n_ff: int) -> str:
    marks = np.zeros(n_ff, np.uint8)
    marks[ids] = 1
    return base64.b64encode(np.packbits(marks, bitorder="little").tobytes()).decode()


class _Text:
    """What is wrong with a plan's text, by the name of its source."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, fact: str) -> FormatError:
        return FormatError(f"{self.name} is no plan: {fact}")

    def value(self, table: Any, key: str, kind: type) -> Any:
        """A member of that type."""
        if not isinstance(table, dict) or key not in table:
            raise self.wrong(f"it lacks {key!r}")
        value: Any = table[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < _MOST else math.inf
        if type(value) is not kind:
            raise self.wrong(f"{key!r} is {str(value)[:40]!r}, not {kind.__name__}")
        number: Any = value
        least = -1 if key in ("device", "head_device") else 0  # -1: the CPU
        if kind in (int, float) and not least <= number <= _MOST:  # NaN as well
            raise self.wrong(f"{key!r} is {str(value)[:40]}")
        return value

    def numbers(self, table: Any, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(self.value({key: n}, key, int) for n in self.value(table, key, list))

    def part(self, cls: type[Part], table: Any, without: tuple[str, ...] = (), **more: Any) -> Part:
        """A dataclass of numbers, words and truths."""
        kinds = {"int": int, "float": float, "str": str, "bool": bool}
        values = {
            f.name: self.value(table, f.name, kinds[str(f.type)])
            for f in fields(cls)  # type: ignore[arg-type]
            if f.name not in without and str(f.type) != "tuple[int, ...]"
        }
        values |= {
            f.name: self.numbers(table, f.name)
            for f in fields(cls)  # type: ignore[arg-type]
            if str(f.type) == "tuple[int, ...]"
        }
        return cls(**values, **more)


def from_json(text: str, name: str = "the text") -> Plan:
    """A plan whose parts are of the right types and fit together; `Plan.check` then holds it against a model.

    Raises FormatError.
    """
    from .plan import Identity, Plan

    t = _Text(name)

    def refuse(word: str) -> NoReturn:
        raise t.wrong(f"it holds {word}")

    try:
        table = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise t.wrong(f"it is not JSON ({error})") from None
    if t.value(table, "format", str) != FORMAT:
        raise t.wrong(f"its format is {table['format'][:40]!r}")
    if t.value(table, "version", int) != VERSION:
        raise t.wrong(f"its version is {table['version']}, this program reads {VERSION}")
    model = t.part(Identity, table.get("model"))
    settings = t.part(Settings, table.get("settings"))
    for key, known in (("sparsity", SPARSITY), ("type_k", KV_TYPE), ("type_v", KV_TYPE)):
        if getattr(settings, key) not in known:
            raise t.wrong(f"its {key} is {getattr(settings, key)[:40]!r}")
    statistics = table.get("statistics")
    if t.value(statistics, "kind", str) not in _KINDS:
        raise t.wrong(f"its statistics are of the kind {statistics['kind'][:40]!r}")
    layers = t.value(table, "layers", list)
    if not (model.n_layer and model.n_ff):
        raise t.wrong("its model has no layers, or layers without neurons")
    if len(layers) != model.n_layer:
        raise t.wrong(f"it has {len(layers)} layers, its model has {model.n_layer}")
    plan = Plan(
        model=model,
        settings=settings,
        rates=t.part(Rates, table.get("rates")),
        statistics_kind=statistics["kind"],
        statistics=t.value(statistics, "source", str),
        layers=tuple(_layer(t, layer, model.n_ff) for layer in layers),
        head_on_device=t.value(table, "head_on_device", bool),
        head_device=t.value(table, "head_device", int),
        devices=tuple(t.part(DevicePlan, device) for device in t.value(table, "devices", list)),
        uses_device=t.value(table, "uses_device", bool),
        bytes=t.part(PlanBytes, table.get("bytes")),
        min_bytes=t.value(table, "min_bytes", int),
        full_bytes=t.value(table, "full_bytes", int),
        expected=t.part(Expectation, table.get("expected")),
    )
    _fit(t, plan)
    return plan


def _layer(t: _Text, table: Any, n_ff: int) -> LayerPlan:
    ids = {name: _unpack(t, t.value(table, name, str), n_ff) for name in ("hot", "pcie")}
    return t.part(LayerPlan, table, tuple(ids), **ids)


def _unpack(t: _Text, text: str, n_ff: int) -> Ids:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise t.wrong("the hot neurons of a layer are not base64") from None
    if len(data) != -(-n_ff // 8):
        raise t.wrong(f"the hot neurons of a layer are not {n_ff} bits")
    marks = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if marks[n_ff:].any():
        raise t.wrong(f"the hot neurons of a layer are not {n_ff} bits")
    ids = np.flatnonzero(marks).astype(np.int32)
    ids.flags.writeable = False
    return ids


def _fit(t: _Text, plan: Plan) -> None:
    """What must be true among the parts themselves."""
    if plan.bytes.total > plan.budget_bytes:
        raise t.wrong(f"it takes {plan.bytes.total} bytes of a budget of {plan.budget_bytes}")
    on_device = plan.head_on_device or any(layer.on_device for layer in plan.layers)
    if len(plan.devices) != 1 + len(plan.settings.more_budgets):
        raise t.wrong(f"it has {len(plan.devices)} devices and {1 + len(plan.settings.more_budgets)} budgets")
    if (
        any((y.device >= 0) != y.on_device for y in (*plan.layers,))
        or (plan.head_device >= 0) != plan.head_on_device
    ):
        raise t.wrong("a layer or the output matrix is on a device and has none, or the other way round")
    beyond = [k for k in (*(y.device for y in plan.layers), plan.head_device) if k >= len(plan.devices)]
    if beyond:
        raise t.wrong(f"something lies on device {beyond[0]} of {len(plan.devices)}")
    if plan.uses_device != on_device:
        raise t.wrong("it says that it uses the device, and nothing lies there, or the other way round")
    if plan.expected.total_us <= 0:
        raise t.wrong("it expects a token to take no time")
