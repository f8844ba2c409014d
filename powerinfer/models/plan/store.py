"""Reading plans from JSON. A file may come from anywhere: every value is checked before it is used.

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
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..._engine.model import Model
from ..._engine.types import KV_TYPE, SPARSITY
from ...errors import ArgumentTypeError, FileError, FormatError
from .engine import (
    DevicePlan,
    Expectation,
    Ids,
    LayerPlan,
    PlanBytes,
    Rates,
    Settings,
)
from .plan import FORMAT, VERSION, Identity, Plan

_MOST = 1 << 62  # of bytes
_KINDS = ("file", "folder", "split", "given", "heuristic", "dense")

Part = TypeVar("Part")


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


def _rates(table: Any) -> Any:
    """With the name that a rate has now: plans of this version were also written with the older one."""
    if isinstance(table, dict) and "in_place_bytes_per_s" in table:
        return {"zero_copy_bytes_per_s": table["in_place_bytes_per_s"]} | table
    return table


def _settings(table: Any) -> Any:
    """Plans of this version were also written before states lay on devices."""
    return {"n_guesses": 0} | table if isinstance(table, dict) else table


def _model(table: Any) -> Any:
    """Plans of this version were also written before there were mixtures."""
    return {"n_expert": 0, "n_layer_dense": 0} | table if isinstance(table, dict) else table


def from_json(text: str, name: str = "the text") -> Plan:
    """A plan whose parts are of the right types and fit together; `Plan.check` then holds it against a model.

    Raises FormatError.
    """
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
    model = t.part(Identity, _model(table.get("model")))
    settings = t.part(Settings, _settings(table.get("settings")))
    for key, known in (("sparsity", SPARSITY), ("type_k", KV_TYPE), ("type_v", KV_TYPE)):
        if getattr(settings, key) not in known:
            raise t.wrong(f"its {key} is {getattr(settings, key)[:40]!r}")
    statistics = table.get("statistics")
    if t.value(statistics, "kind", str) not in _KINDS:
        raise t.wrong(f"its statistics are of the kind {statistics['kind'][:40]!r}")
    layers = t.value(table, "layers", list)
    if not (model.n_layer and model.n_ff):
        raise t.wrong("its model has no layers, or layers without neurons")
    if model.n_layer_dense >= model.n_layer:
        raise t.wrong(f"{model.n_layer_dense} of its model's {model.n_layer} layers have no experts")
    if len(layers) != model.n_layer:
        raise t.wrong(f"it has {len(layers)} layers, its model has {model.n_layer}")
    plan = Plan(
        model=model,
        settings=settings,
        rates=t.part(Rates, _rates(table.get("rates"))),
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
        expected=t.part(Expectation, table.get("expected"), ("measured",)),
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


def load_plan(plan: Plan | str | os.PathLike[str], model: Model, **asked: Any) -> Plan:
    """A plan, or the one that a file holds, checked as `Plan.check` does.

    Raises FileError, FormatError (no plan, or one that contradicts itself), ArgumentError (a plan for
    something else).
    """
    if not isinstance(plan, (Plan, str, os.PathLike)):
        raise ArgumentTypeError(f"the plan is {plan!r}, it must be a Plan or the path of one")
    if not isinstance(plan, Plan):
        plan = from_json(_read_text(Path(plan)), str(plan))
    plan.check(model, **asked)
    return plan


_MOST_BYTES = 1 << 28


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise FileError(f"{path} is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise FormatError(f"{path} has {path.stat().st_size} bytes, too many for a plan")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise FormatError(f"{path} is no plan: it is not text") from None
