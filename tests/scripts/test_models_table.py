"""docs/models.md is what its script writes, and the README names the same architectures."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts/models_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_is_up_to_date(script: Any) -> None:
    assert script.PAGE.read_text() == script.page(), "run scripts/models_table.py"


def test_all_architectures_are_named(script: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    models = readme[readme.index("\n## Models\n") : readme.index("\n## Extras\n")]
    table = set(script.architectures())
    assert table
    assert set(script.MODELS) == table
    assert table - set(re.findall(r"[a-z][\w-]*", models)) == set()
    assert table == set(re.findall(r"^\| ([a-z][\w-]*) \|", script.PAGE.read_text(), re.MULTILINE)) - {
        "architecture"
    }
