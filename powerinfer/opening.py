"""Opening the session that a Llama computes with, after a plan where there is one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError
from .facts import KV_TYPE, SPARSITY, name_of, number_of
from .session import Model, Session

if TYPE_CHECKING:
    from .plan import Plan

_N_BATCH = 512  # what Llama is called with where nothing is said


def refuse_device(gib: float) -> None:
    """Raises UnsupportedError if memory of a GPU is asked for."""
    if gib:
        raise UnsupportedError(f"vram_budget={gib!r}: this build has no CUDA backend yet (0 or None: CPU)")


def open_session(
    model: Model, *, plan: Plan | str | os.PathLike[str] | None, vram_budget: float | None, **options: Any
) -> Session:
    """A session with these options of Session. With a plan its own are taken where the options say nothing.

    plan: a Plan, or the path of one. Raises FileError, FormatError, ArgumentError (a plan for another model,
    or for other options than those given), UnsupportedError (a plan that uses a GPU, in this version), and
    what Session raises.
    """
    if plan is not None:
        options |= _planned(model, plan, vram_budget, options)
    else:
        refuse_device(vram_budget or 0)
        for name in ("type_k", "type_v"):
            options[name] = "f16" if options[name] is None else options[name]
    return Session(model, **options)


def _planned(
    model: Model, plan: Plan | str | os.PathLike[str], vram_budget: float | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options that the plan settles."""
    from .plan import load_plan

    asked: dict[str, Any] = {"n_ctx": options["n_ctx"], "vram_budget": vram_budget}
    asked["sparsity"] = name_of(SPARSITY, number_of("sparsity", SPARSITY, options["sparsity"]))
    if options["n_batch"] != _N_BATCH:
        asked["n_batch"] = options["n_batch"]
    for name in ("type_k", "type_v"):
        if options[name] is not None:
            asked[name] = name_of(KV_TYPE, number_of(name, KV_TYPE, options[name]))
    found = load_plan(plan, model, **asked)
    if found.uses_device:
        raise UnsupportedError(
            f"the plan puts {found.bytes.total / (1 << 30):.2f} GiB on a GPU, and this version computes on "
            "the CPU: it can follow plans for a budget of 0"
        )
    names = ("n_ctx", "n_batch", "type_k", "type_v", "sparsity")
    return {name: getattr(found.settings, name) for name in names}
