"""docs/models.md is what its script writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts/models_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run scripts/models_table.py"
    assert list(script.MODELS) and set(script.MODELS) == set(script.architectures())
