"""A plan: what a budget of device memory holds of one model, and the speed to expect.

    plan = make_plan("model.gguf", vram_budget=8)
    print(plan.expected.tokens_per_s, plan.bytes.ffn)
    plan.save("plan.json")
    plan = load_plan("plan.json", model)  # checked against the model

A plan belongs to one file: the model's shape, its tensors, its size and the statistics it carries are part of
it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from ..._engine.devices import budget_bytes
from ..._engine.file import ModelFile
from ..._engine.session import Model
from ...errors import ArgumentError
from ..writer import PartialFile
from . import engine, gpuidx, sources
from .engine import Ids, LayerPlan, Measured, PlanBytes, Rates, Result, Settings
from .rates import find_rates
from .sources import Statistics

GIB = 1 << 30
FORMAT, VERSION = "powerinfer.plan", 2
MOST_DEVICES = 16
_LONGER_BATCHES, _LOST = (2048, 1024), 1.05  # of the time of a decoded token


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The model that a plan was made for."""

    architecture: str
    activation: str
    predictor: str
    n_layer: int
    n_embd: int
    n_ff: int
    """Neurons of a layer; of a mixture, experts."""
    n_expert: int
    """Of a mixture; 0: it is none."""
    n_layer_dense: int
    """Of a mixture: so many layers at the beginning have no experts; they are placed as a whole."""
    n_vocab: int
    file_bytes: int
    tensors: str
    """SHA-256 of names, types and shapes, in the file's order."""
    weights: str
    """SHA-256 of the first bytes of some tensors: two models of one shape differ there."""
    counts: str
    """SHA-256 of the statistics in the file; "" if it has none."""

    @property
    def unit(self) -> str:
        """What is placed: "neurons" or "experts"."""
        return "experts" if self.n_expert else "neurons"


_SAMPLED_TENSORS, _SAMPLED_BYTES = 32, 256  # little is read, even of a file on a slow disk


def identify(model: Model) -> Identity:
    """The identity of an open model."""
    info, file = model.info, model.file
    weights = hashlib.sha256()
    for t in file.tensors[:: -(-len(file.tensors) // _SAMPLED_TENSORS)]:
        weights.update(file.raw(t.name)[:_SAMPLED_BYTES].tobytes())
    tensors = hashlib.sha256()
    for t in file.tensors:
        tensors.update(f"{t.name}\0{t.type}\0{','.join(map(str, t.shape))}\n".encode("utf-8", "replace"))
    found = sources.from_file(file)
    counts = hashlib.sha256()
    if found is not None and found.counts is not None:
        counts.update(f"{found.n_tokens}\n".encode() + found.counts.astype("<u4").tobytes())
    return Identity(
        architecture=info.architecture,
        activation=info.activation,
        predictor=info.predictor,
        n_layer=info.n_layer,
        n_embd=info.n_embd,
        n_ff=info.n_placed,
        n_expert=info.n_expert,
        n_layer_dense=info.n_layer_dense,
        n_vocab=info.n_vocab,
        file_bytes=file.info.n_bytes,
        tensors=tensors.hexdigest(),
        weights=weights.hexdigest(),
        counts="" if found is None else counts.hexdigest(),
    )


_DEFAULTS = {"n_ctx": 0, "n_pool": 0, "sparsity": "auto"}  # what they are depends on the model
_DIFFERENCES = {
    "file_bytes": "bytes in the file",
    "tensors": "tensors (names, types or shapes)",
    "weights": "weights",
    "counts": "activation statistics in the file",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(engine.Result):
    """Where each part of a model is placed: on a device or on the CPU.

    `Llama.plan` shows the plan of an open model, `powerinfer plan -o FILE` saves one, and `Llama(plan=FILE)`
    follows it. `to_json` of equal plans is equal.

        plan = Llama("model.gguf", vram_budget=8).plan
        plan.hot_share, plan.bytes.total, plan.expected.tokens_per_s, plan.expected.measured
    """

    model: Identity
    rates: Rates
    statistics_kind: str
    statistics: str
    """Where it is known from which neurons are hot."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes, of each device."""
        return (self.settings.budget_bytes, *self.settings.more_budgets)

    @property
    def budget_bytes(self) -> int:
        """Of all devices."""
        return sum(self.budgets)

    @property
    def free_bytes(self) -> int:
        """Of the budgets, what the plan leaves."""
        return self.budget_bytes - self.bytes.total

    @property
    def statistics_source(self) -> str:
        """Where it is known from which neurons are hot: `statistics`."""
        return self.statistics

    @property
    def measured(self) -> Measured | None:
        """What the first tokens took: `expected.measured`."""
        return self.expected.measured

    @property
    def n_hot(self) -> int:
        """Neurons on the device, all layers."""
        return sum(len(layer.hot) for layer in self.layers)

    @property
    def hot_share(self) -> float:
        """Of all neurons, those on the device."""
        return self.n_hot / (self.model.n_ff * (self.model.n_layer - self.model.n_layer_dense))

    def share(self, layer: int) -> float:
        """Of one layer's neurons or experts, those on the device; of a layer that is placed as a whole: 0 or
        1."""
        y = self.layers[layer]
        return float(y.on_device) if layer < self.model.n_layer_dense else len(y.hot) / self.model.n_ff

    @property
    def carried(self) -> float:
        """Of the neurons computed per token, those on the device."""
        total = self.expected.active_hot + self.expected.active_pcie + self.expected.active_cold
        return self.expected.active_hot / total if total else 0.0

    def native(self, model: Model) -> Any:
        """The engine's own plan, for Session. Raises ArgumentError, OutOfMemoryError."""
        return engine.native_plan(model, self.settings, self.rates, **self._placement())

    def _placement(self) -> dict[str, Any]:
        return {
            "on_device": [layer.on_device for layer in self.layers],
            "hot": [layer.hot for layer in self.layers],
            "pcie": [layer.pcie for layer in self.layers],
            "devices": [layer.device for layer in self.layers],
            "head_on_device": self.head_on_device,
            "head_device": self.head_device,
        }

    def with_statistics(self, model: Model, statistics: Statistics) -> Plan:
        """The same placement, and what is to be expected of it by other statistics."""
        again = engine.restore(
            model,
            self.settings,
            self.rates,
            **self._placement(),
            counts=statistics.counts,
            n_tokens=statistics.n_tokens,
        )
        return replace(
            self,
            statistics_kind=statistics.kind,
            statistics=statistics.source,
            layers=again.layers,
            expected=replace(again.expected, measured=self.measured),
        )

    def check(self, model: Model, **asked: Any) -> None:
        """Raises ArgumentError, saying what differs, unless the plan is for this model, takes what it says it
        takes, and was made for what is asked: vram_budget (GiB, or a list with those of each device) and any
        field of Settings. None asks nothing, nor does a value that stands for a default (n_ctx=0,
        sparsity="auto")."""
        here = identify(model)
        for field in fields(Identity):
            own, other = getattr(self.model, field.name), getattr(here, field.name)
            if own != other:
                what = _DIFFERENCES.get(field.name, field.name)
                detail = (
                    ""
                    if field.name in ("tensors", "weights", "counts")
                    else f": {repr(own)[:60]} in the plan, {other!r} here"
                )
                raise ArgumentError(
                    f"the plan was made for another model than {model.file.path}; "
                    f"it differs in {what}{detail}: make it anew"
                )
        budget = asked.pop("vram_budget", None)
        if budget is not None:
            asked |= budget_settings(budget)
        known = {field.name for field in fields(Settings)}
        for name, value in asked.items():
            if name not in known:
                raise ArgumentError(f"a plan has no setting {name!r}; it has {', '.join(sorted(known))}")
            own = getattr(self.settings, name)
            if value is None or (name in _DEFAULTS and value == _DEFAULTS[name]) or value == own:
                continue
            shown = f"{own}, not {value}"
            if name == "budget_bytes":
                shown = f"{own / GIB:.2f} GiB, not {value / GIB:.2f}"
            elif name == "more_budgets":
                shown = f"{1 + len(own)} devices, of other budgets than {len(value) + 1}"
            raise ArgumentError(f"the plan was made for {name} {shown}: make it anew")
        self._check_bytes(model)

    def _check_bytes(self, model: Model) -> None:
        again = engine.restore(model, self.settings, self.rates, **self._placement())
        if again.bytes != self.bytes:
            name = next(
                f.name
                for f in fields(PlanBytes)
                if getattr(again.bytes, f.name) != getattr(self.bytes, f.name)
            )
            raise ArgumentError(
                f"the plan says that {name} takes {getattr(self.bytes, name)} bytes, but it takes "
                f"{getattr(again.bytes, name)}: make it anew"
            )
        if again.devices != self.devices:
            raise ArgumentError("the plan says that its devices hold other bytes than they do: make it anew")

    def to_json(self) -> str:
        """The plan as one line of JSON, which `from_json` reads."""
        n_ff = self.model.n_ff
        layers = [
            _plain(y, ("hot", "pcie")) | {"hot": _pack(y.hot, n_ff), "pcie": _pack(y.pcie, n_ff)}
            for y in self.layers
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "model": _plain(self.model),
                "settings": _plain(self.settings),
                "rates": _plain(self.rates),
                "statistics": {"kind": self.statistics_kind, "source": self.statistics},
                "uses_device": self.uses_device,
                "head_on_device": self.head_on_device,
                "head_device": self.head_device,
                "devices": [_plain(device) for device in self.devices],
                "min_bytes": self.min_bytes,
                "full_bytes": self.full_bytes,
                "bytes": _plain(self.bytes),
                "expected": _plain(self.expected, ("measured",)),
                "layers": layers,
            },
            allow_nan=False,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` into a file. Raises FileError."""
        with PartialFile(path) as file:
            file.write(self.to_json().encode() + b"\n")


def _plain(part: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass of numbers and words; 5 where a float belongs is 5.0."""
    kept = ((f, getattr(part, f.name)) for f in fields(part) if f.name not in without)
    return {f.name: float(value) if f.type == "float" else value for f, value in kept}


def _pack(ids: Ids, n_ff: int) -> str:
    marks = np.zeros(n_ff, np.uint8)
    marks[ids] = 1
    return base64.b64encode(np.packbits(marks, bitorder="little").tobytes()).decode()


def budget_settings(gib: float | Sequence[float]) -> dict[str, Any]:
    """The fields of Settings that say what devices hold. Raises ArgumentError."""
    each = [budget_bytes(n) for n in (gib if isinstance(gib, Sequence) else [gib])]
    if not 1 <= len(each) <= MOST_DEVICES:
        raise ArgumentError(f"vram_budget has {len(each)} numbers, a plan is for 1 to {MOST_DEVICES} devices")
    return {"budget_bytes": each[0], "more_budgets": tuple(each[1:])}


def make_plan(
    model: Model | ModelFile | str | os.PathLike[str],
    *,
    vram_budget: float | Sequence[float],
    settings: Settings | None = None,
    statistics: Statistics | None = None,
    rates: Rates | None = None,
    **changes: Any,
) -> Plan:
    """The plan of least expected time per token.

    model: open, loaded or not, or a file. vram_budget: GiB, or a list with those of each device.
    settings: all else that the plan is for; changes replace single ones: make_plan(..., n_ctx=2048). With
    n_batch 0 it is chosen: where a prompt's batches bring weights to a device, up to 2048.
    statistics: None for the best that is found (`find_statistics`). rates: None to measure the CPU and take
    the GPU's published ones (`find_rates`).

    Raises ArgumentError (a budget that is too small, and what would do; a value out of range), FormatError
    and FileError (model or statistics), OutOfMemoryError.
    """
    if not isinstance(model, Model):
        with Model(model, load=False) as opened:
            return make_plan(
                opened,
                vram_budget=vram_budget,
                settings=settings,
                statistics=statistics,
                rates=rates,
                **changes,
            )
    asked = replace(settings or Settings(), **(budget_settings(vram_budget) | changes))
    known = statistics or sources.find_statistics(model, active_share=asked.active_share)
    speeds = rates or find_rates()
    result = engine.compute(model, asked, speeds, known.counts, known.n_tokens)
    if not asked.n_batch:
        result = _with_longer_batch(model, result, asked, speeds, known)
    return _plan(model, result, speeds, known)


def _with_longer_batch(
    model: Model, result: Result, asked: Settings, rates: Rates, known: Statistics
) -> Result:
    """The same for a larger n_batch, where weights must be brought to a device for each batch of a prompt,
    and decoding loses little by the work space."""
    if not result.uses_device or not result.expected.stream_bytes:
        return result
    for n_batch in _LONGER_BATCHES:
        if n_batch > result.settings.n_ctx:
            continue
        try:
            longer = engine.compute(
                model, replace(asked, n_batch=n_batch), rates, known.counts, known.n_tokens
            )
        except ArgumentError:  # it does not fit
            continue
        if longer.uses_device and longer.expected.total_us <= _LOST * result.expected.total_us:
            return longer
    return result


def _plan(model: Model, result: Result, rates: Rates, known: Statistics) -> Plan:
    if result.settings.sparsity == "dense" and not model.info.n_expert:
        known = sources.dense()
    return Plan(
        model=identify(model),
        rates=rates,
        statistics_kind=known.kind,
        statistics=known.source,
        **{field.name: getattr(result, field.name) for field in fields(Result)},
    )


# ---- the original's split files


def import_gpuidx(
    path: str | os.PathLike[str],
    model: Model,
    *,
    vram_budget: float | None = None,
    settings: Settings | None = None,
    statistics: Statistics | None = None,
    rates: Rates | None = None,
    **changes: Any,
) -> Plan:
    """The plan that the original PowerInfer's split file stands for: its hot neurons, and all else on the
    device.

    vram_budget: GiB that it must not exceed; None: what it takes. statistics price it; they do not change it.

    Raises FileError, FormatError (not a split of this model), ArgumentError (more than the budget).
    """
    split = gpuidx.read_gpuidx(path, model.info.n_layer, model.info.n_ff)
    n_bytes = (1 << 62) if vram_budget is None else budget_bytes(vram_budget)
    asked = replace(settings or Settings(), budget_bytes=n_bytes, **changes)
    known = statistics or sources.find_statistics(model, active_share=asked.active_share)
    speeds = rates or find_rates()
    result = engine.restore(
        model,
        asked,
        speeds,
        on_device=[True] * model.info.n_layer,
        hot=split.hot,
        head_on_device=True,
        counts=known.counts,
        n_tokens=known.n_tokens,
    )
    if vram_budget is None:
        total = result.bytes.total
        result = replace(
            result,
            settings=replace(result.settings, budget_bytes=total),
            devices=(replace(result.devices[0], budget_bytes=total),),
        )
    return _plan(model, result, speeds, known)


def export_gpuidx(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan's hot neurons as the original PowerInfer's split file. Its `split.vram_capacity`, which
    the original compares with the memory left when all else is on the GPU, is what the hot neurons take.

    Raises ArgumentError if attention is not on the device in all layers (the original has no such split),
    FileError.
    """
    left = [i for i, layer in enumerate(plan.layers) if not layer.on_device]
    if left or not plan.head_on_device:
        what = f"layer {left[0]}" if left else "the output matrix"
        raise ArgumentError(
            f"the plan keeps {what} on the CPU, and the original PowerInfer splits neurons only when all "
            "else is on the GPU: a larger budget is needed"
        )
    split = gpuidx.Split(
        hot=tuple(layer.hot.astype(np.int32) for layer in plan.layers), vram_bytes=plan.bytes.ffn
    )
    gpuidx.write_gpuidx(path, split, plan.model.n_ff)


def as_table(plan: Plan) -> dict[str, Any]:
    """A plan as numbers and words, without the ids of its neurons."""
    return {
        "model": asdict(plan.model),
        "settings": asdict(plan.settings),
        "rates": asdict(plan.rates),
        "statistics": {"kind": plan.statistics_kind, "source": plan.statistics},
        "bytes": asdict(plan.bytes) | {"total": plan.bytes.total, "free": plan.free_bytes},
        "min_bytes": plan.min_bytes,
        "full_bytes": plan.full_bytes,
        "uses_device": plan.uses_device,
        "head_on_device": plan.head_on_device,
        "head_device": plan.head_device,
        "devices": [asdict(device) for device in plan.devices],
        "expected": _plain(plan.expected, ("measured",)) | {"tokens_per_s": plan.expected.tokens_per_s},
        "n_hot": plan.n_hot,
        "hot_share": plan.hot_share,
        "carried": plan.carried,
        "layers": [
            {"n_hot": len(y.hot), "n_pcie": len(y.pcie)}
            | {f.name: getattr(y, f.name) for f in fields(LayerPlan) if f.name not in ("hot", "pcie")}
            for y in plan.layers
        ],
    }
