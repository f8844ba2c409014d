"""Packages that only some need: those of powerinfer[NAME]."""

from __future__ import annotations

EXTRAS = {
    "cuda": ("nvidia-cublas",),
    "grammar": ("llguidance",),
    "hub": ("huggingface_hub",),
    "llm": ("llm",),
    "plot": ("matplotlib",),
    "ray": ("ray[data,serve]",),
    "server": ("fastapi", "pydantic", "uvicorn"),
    "train": ("torch",),
}


def how(extra: str, missing: tuple[str, ...] = ()) -> str:
    """What to type to have them: packages by their own names, which need no index that has powerinfer.
    missing: only these."""
    names = " ".join(missing or EXTRAS[extra])
    quoted = f"'{names}'" if "[" in names else names
    return f"pip install {quoted} (the extra powerinfer[{extra}])"
