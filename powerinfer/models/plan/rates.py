"""The speeds that a plan rests on: measured here, given, or those that a card's maker publishes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..._engine import machine
from ..._engine.machine import DeviceFacts
from ...errors import ArgumentError
from .engine import Rates

CARD_SHARE = 0.85
"""Of a published memory bandwidth, what reading weights reaches. An H200 reads at 0.95 of its own, and
products with one vector at 0.80."""
CARD_READS = 0.85
"""Of a GPU's read rate that is measured here, what products with one vector reach."""
ZERO_COPY_SHARE = 0.6
"""Of the rate at which a GPU is measured to read host memory. Scattered rows reach 0.9; too few of them
cost little, too many make a CPU wait that is faster than it was estimated."""
CPU_SHARE = 0.8
"""Of the read rate that is measured here, what decoding reaches: 0.77 to 0.81."""
_MEASURE_BYTES = 1 << 30  # more than most last-level caches
_DEFAULT_CARD = "RTX 4090"
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class Card:
    """A graphics card as its maker describes it."""

    name: str
    gib: float
    """Memory."""
    gb_s: float
    """Of its memory, 10^9 bytes per second."""
    pcie_gb_s: float
    """Of its connection, one way, in a slot that has all that it can use."""


_X8_4, _X16_3, _X16_4, _X8_5, _X16_5 = 15.8, 15.8, 31.5, 31.5, 63.0
CARDS = tuple(
    Card(*row)
    for row in (
        ("RTX 2060", 6, 336, _X16_3),
        ("RTX 2070", 8, 448, _X16_3),
        ("RTX 2080", 8, 448, _X16_3),
        ("RTX 2080 Ti", 11, 616, _X16_3),
        ("RTX 3060", 12, 360, _X16_4),
        ("RTX 3060 Ti", 8, 448, _X16_4),
        ("RTX 3070", 8, 448, _X16_4),
        ("RTX 3070 Ti", 8, 608, _X16_4),
        ("RTX 3080", 10, 760, _X16_4),
        ("RTX 3080 Ti", 12, 912, _X16_4),
        ("RTX 3090", 24, 936, _X16_4),
        ("RTX 3090 Ti", 24, 1008, _X16_4),
        ("RTX 4060", 8, 272, _X8_4),
        ("RTX 4060 Ti", 16, 288, _X8_4),
        ("RTX 4070", 12, 504, _X16_4),
        ("RTX 4070 SUPER", 12, 504, _X16_4),
        ("RTX 4070 Ti", 12, 504, _X16_4),
        ("RTX 4070 Ti SUPER", 16, 672, _X16_4),
        ("RTX 4080", 16, 717, _X16_4),
        ("RTX 4080 SUPER", 16, 736, _X16_4),
        ("RTX 4090", 24, 1008, _X16_4),
        ("RTX 5060 Ti", 16, 448, _X8_5),
        ("RTX 5070", 12, 672, _X16_5),
        ("RTX 5070 Ti", 16, 896, _X16_5),
        ("RTX 5080", 16, 960, _X16_5),
        ("RTX 5090", 32, 1792, _X16_5),
        ("RTX A6000", 48, 768, _X16_4),
        ("RTX 6000 Ada", 48, 960, _X16_4),
        ("T4", 16, 300, _X16_3),
        ("L4", 24, 300, _X16_4),
        ("A10", 24, 600, _X16_4),
        ("L40S", 48, 864, _X16_4),
        ("V100", 16, 900, _X16_3),
        ("A100", 80, 2039, _X16_4),
        ("H100", 80, 3350, _X16_5),
        ("H200", 141, 4800, _X16_5),
    )
)


# Cards that have the same number with and without these are different ones.
_VARIANTS = {"ti", "super", "laptop", "mobile", "d"}


def _words(name: str) -> list[str]:
    """ "NVIDIA GeForce RTX4070Ti" -> ["nvidia", "geforce", "rtx", "4070", "ti"]"""
    spaced = re.sub(r"(?<=\d{4})(?=[a-z])|(?<=rtx)(?=\d)", " ", name.lower())
    return [word for word in re.split(r"[\s_-]+", spaced) if word]


def find_card(name: str) -> Card:
    """The card of that name: "4090", "RTX 3060 12GB", "NVIDIA H100 80GB HBM3"...

    Raises ArgumentError for one that is not in the table, naming those that are.
    """
    wanted = _words(name)
    best, best_score = None, 0
    for card in CARDS:
        own = _words(card.name)
        model = [w for w in own if w != "rtx"]
        fits = all(word in wanted for word in model) and _VARIANTS.intersection(wanted) <= set(own)
        if fits and len(model) > best_score:
            best, best_score = card, len(model)
    if best is None:
        known = ", ".join(card.name for card in CARDS)
        raise ArgumentError(f"no card is called {name!r} here; known are {known}; or give --gpu-gbps")
    return best


def _given(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} is {value:g}, it must be a number above 0")
    return value * 1e9


def find_rates(
    *,
    gpu: str = "",
    gpu_gbps: float | None = None,
    cpu_gbps: float | None = None,
    pcie_gbps: float | None = None,
    handover_us: float | None = None,
    zero_copy_gbps: float | None = None,
) -> Rates:
    """Given rates as they are (10^9 bytes per second); for the others the best source.

    The CPU's read rate is measured (a second or two). The GPU's is published: of the card that `gpu` names,
    else of the first device that the driver shows, else of an RTX 4090.

    Raises ArgumentError (a card that is not known, a rate that is no positive number).
    """
    words: dict[str, str] = {}
    values: dict[str, Any] = {}
    if cpu_gbps is not None:
        values["cpu_bytes_per_s"], words["cpu"] = (
            _given("--cpu-gbps", cpu_gbps),
            f"{cpu_gbps:g} GB/s as given",
        )
    else:
        values["cpu_bytes_per_s"], words["cpu"] = measure_cpu()
    card_gb_s, card_pcie, source = _card_rates(gpu)
    if gpu_gbps is not None:
        values["gpu_bytes_per_s"], words["gpu"] = (
            _given("--gpu-gbps", gpu_gbps),
            f"{gpu_gbps:g} GB/s as given",
        )
    else:
        values["gpu_bytes_per_s"] = card_gb_s * 1e9 * CARD_SHARE
        words["gpu"] = f"{source}: {card_gb_s:,.0f} GB/s published, times {CARD_SHARE}"
    if pcie_gbps is not None:
        values["pcie_bytes_per_s"] = _given("--pcie-gbps", pcie_gbps)
        words["pcie"] = f"{pcie_gbps:g} GB/s as given"
    else:
        values["pcie_bytes_per_s"] = card_pcie * 1e9 * CARD_SHARE
        words["pcie"] = f"{card_pcie:.3g} GB/s published, times {CARD_SHARE}"
    if zero_copy_gbps:
        values["zero_copy_bytes_per_s"] = _given("--zero-copy-gbps", zero_copy_gbps)
        words["pcie"] += f", {zero_copy_gbps:g} GB/s by zero-copy as given"
    if handover_us is not None:
        values["handover_us"] = handover_us
    return Rates(**values | words)


HOST_RATES = Rates(
    gpu_bytes_per_s=4e12,
    cpu_bytes_per_s=1e10,
    handover_us=0,
    layer_us=0,
    ffn_us=0,
    gpu="stand-in, for tests",
    cpu="assumed",
    pcie="assumed",
)
"""Of the device "host", which is not made for speed: whatever fits is worth placing there."""


def device_rates(facts: Sequence[DeviceFacts], *, zero_copy: bool = False) -> Rates:
    """Of GPUs that work together, as they were measured when they were opened, the slowest's; what could not
    be measured is taken from the driver.

    zero_copy: neurons may be read where they lie in host memory, if that can be mapped.
    """
    published = find_rates(cpu_gbps=1)
    values: dict[str, Any] = {}
    words: dict[str, str] = {"gpu": published.gpu, "pcie": published.pcie}
    read, copied, near = (
        min(getattr(f, name) for f in facts)
        for name in ("read_bytes_per_s", "copy_bytes_per_s", "zero_copy_bytes_per_s")
    )
    if read:
        values["gpu_bytes_per_s"] = read * CARD_READS
        words["gpu"] = f"{facts[0].name}: {read / 1e9:,.0f} GB/s measured here, times {CARD_READS}"
    else:
        values["gpu_bytes_per_s"] = published.gpu_bytes_per_s
    values["pcie_bytes_per_s"] = copied or published.pcie_bytes_per_s
    if copied:
        words["pcie"] = f"{copied / 1e9:.1f} GB/s measured here"
    refused = next((f.no_mapping for f in facts if not f.can_map), None)
    if refused is not None:
        words["pcie"] += (
            f"; host memory cannot be mapped ({refused}), so that prompts' cold neurons come through a buffer"
        )
    elif zero_copy and near:
        values["zero_copy_bytes_per_s"] = near * ZERO_COPY_SHARE
        words["pcie"] += f", {near / 1e9:.1f} GB/s by zero-copy, times {ZERO_COPY_SHARE}"
    values["cpu_bytes_per_s"], words["cpu"] = measure_cpu()
    return Rates(**values | words)


@lru_cache(maxsize=1)
def measure_cpu() -> tuple[float, str]:
    """Bytes per second at which decoding may read here, and in words where that is from; measured once in a
    process."""
    threads = machine.cores()
    rate = machine.read_rate(threads, machine.sample_bytes(_MEASURE_BYTES), 3)
    return rate * CPU_SHARE, f"{rate / 1e9:.1f} GB/s measured here on {threads} threads, times {CPU_SHARE}"


def _card_rates(name: str) -> tuple[float, float, str]:
    """Published GB/s of memory and of PCIe, and whose they are."""
    if not name:
        present = machine.gpus().gpus
        if present and present[0].memory_bytes_per_s > 0:
            gpu = present[0]
            lane = _LANE_GB_S.get(gpu.pcie_generation, 0.0)
            return gpu.memory_bytes_per_s / 1e9, lane * gpu.pcie_lanes or _X16_4, f"{gpu.name}, by its driver"
        card = find_card(_DEFAULT_CARD)
        return card.gb_s, card.pcie_gb_s, f"{card.name} assumed, since no GPU is here and none was named"
    card = find_card(name)
    return card.gb_s, card.pcie_gb_s, card.name
