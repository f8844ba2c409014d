"""Measures prompts and decoding: what `powerinfer bench` prints.

A decode step costs the bytes that it must read, so the figure to compare between machines and days is the
share of the measured read rate that is reached, not tokens per second. The engine counts the bytes of every
step itself; the read rate is measured between tokens, by the session's own threads.
"""

from .case import Case, cases, numbers
from .measure import DIGEST_TOKENS, Result, logits_digest, measure
from .setup import commit, describe, expert_bytes, file_digest, resident_pages

__all__ = [
    "DIGEST_TOKENS",
    "Case",
    "Result",
    "cases",
    "commit",
    "describe",
    "expert_bytes",
    "file_digest",
    "logits_digest",
    "measure",
    "numbers",
    "resident_pages",
]
