"""What a budget of GPU memory holds of a model, and the speed to expect."""

from __future__ import annotations

from .engine import DevicePlan, Expectation, LayerPlan, Measured, PlanBytes, Rates, Settings
from .gpuidx import Split, read_gpuidx, split_path, write_gpuidx
from .plan import (
    Identity,
    Plan,
    as_table,
    budget_settings,
    export_gpuidx,
    identify,
    import_gpuidx,
    make_plan,
)
from .rates import CARDS, Card, find_card, find_rates
from .sources import Statistics, find_statistics, given, heuristic, unknown_experts
from .store import from_json, load_plan

__all__ = [
    "CARDS",
    "Card",
    "DevicePlan",
    "Expectation",
    "Identity",
    "LayerPlan",
    "Measured",
    "Plan",
    "PlanBytes",
    "Rates",
    "Settings",
    "Split",
    "Statistics",
    "as_table",
    "budget_settings",
    "export_gpuidx",
    "find_card",
    "find_rates",
    "find_statistics",
    "from_json",
    "given",
    "heuristic",
    "identify",
    "import_gpuidx",
    "load_plan",
    "make_plan",
    "read_gpuidx",
    "split_path",
    "unknown_experts",
    "write_gpuidx",
]
