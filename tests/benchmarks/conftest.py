"""Benchmarks are collected only where they are asked for by name: `pytest tests/benchmarks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True leaves a path out; None leaves it to others."""
    asked = (Path(str(argument).partition("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in asked) else True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The rates, which the table of times does not show."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]:48} {value:8.2f} {name}")
