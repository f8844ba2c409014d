"""PowerInfer: large language models on ordinary machines, computing only the neurons that matter.

    from powerinfer import Llama

    with Llama.demo() as llm:
        print(llm("Once upon a time", max_tokens=40)["choices"][0]["text"])

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import version as __version__
    from .errors import (
        ArgumentError,
        ClosedError,
        ContextError,
        DeviceError,
        FileError,
        FormatError,
        LibraryError,
        OutOfMemoryError,
        PowerInferError,
        UnsupportedError,
    )
    from .file import ModelFile
    from .llama import Llama
    from .report import LlamaState
    from .sampling import LogitsProcessorList, StoppingCriteriaList

__all__ = [
    "ArgumentError",
    "ClosedError",
    "ContextError",
    "DeviceError",
    "FileError",
    "FormatError",
    "LibraryError",
    "Llama",
    "LlamaState",
    "LogitsProcessorList",
    "ModelFile",
    "OutOfMemoryError",
    "PowerInferError",
    "StoppingCriteriaList",
    "UnsupportedError",
    "__version__",
]

_HOME = {
    "Llama": "llama",
    "LlamaState": "report",
    "LogitsProcessorList": "sampling",
    "ModelFile": "file",
    "StoppingCriteriaList": "sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("._native", __name__).version
    elif name in __all__:
        value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
