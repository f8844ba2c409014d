"""The table of families: each is a row, which says how its checkpoints become files."""

from __future__ import annotations

from .dense import DENSE
from .family import Family as Family
from .mixtures import MIXTURES
from .recurrent import RECURRENT
from .windows import WINDOWS

FAMILIES = (*DENSE, *WINDOWS, *MIXTURES, *RECURRENT)
