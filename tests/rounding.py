"""How the set of this process rounds what it multiplies many tokens with, which tolerances must know."""

from __future__ import annotations

from powerinfer._engine import _native

BF16 = _native.isa() in ("amx", "avx512_bf16")
