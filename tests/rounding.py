"""How the set of this process rounds what it multiplies many tokens with, which tolerances must know."""

from __future__ import annotations

from powerinfer._engine import _native

BF16 = _native.isa() in ("amx", "avx512_bf16")
# Q8_0 in 8-bit integers, as its rows always are; other sets leave activations floats, or make them bf16.
INT8_Q8_0 = _native.isa() == "avx512"
