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
    from .async_llama import AsyncLlama
    from .errors import (
        ArgumentError,
        BusyError,
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
    from .grammar import LlamaGrammar
    from .llama import Llama
    from .llama_cache import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache
    from .llama_speculative import LlamaDraftModel
    from .llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer
    from .report import LlamaState
    from .sampling import (
        LogitsProcessor,
        LogitsProcessorList,
        MinTokensLogitsProcessor,
        StoppingCriteria,
        StoppingCriteriaList,
    )

__all__ = [
    "ArgumentError",
    "AsyncLlama",
    "BaseLlamaCache",
    "BaseLlamaTokenizer",
    "BusyError",
    "ClosedError",
    "ContextError",
    "DeviceError",
    "FileError",
    "FormatError",
    "LibraryError",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "ModelFile",
    "OutOfMemoryError",
    "PowerInferError",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "UnsupportedError",
    "__version__",
]

_HOME = {
    "AsyncLlama": "async_llama",
    "BaseLlamaCache": "llama_cache",
    "BaseLlamaTokenizer": "llama_tokenizer",
    "Llama": "llama",
    "LlamaCache": "llama_cache",
    "LlamaDiskCache": "llama_cache",
    "LlamaDraftModel": "llama_speculative",
    "LlamaGrammar": "grammar",
    "LlamaRAMCache": "llama_cache",
    "LlamaState": "report",
    "LlamaTokenizer": "llama_tokenizer",
    "LogitsProcessor": "sampling",
    "LogitsProcessorList": "sampling",
    "MinTokensLogitsProcessor": "sampling",
    "ModelFile": "file",
    "StoppingCriteria": "sampling",
    "StoppingCriteriaList": "sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("._native", __name__).version
    elif name in __all__:
        value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    elif name.startswith(("LLAMA_", "GGML_")):  # llama.cpp's numbers, as arguments take them
        value = import_module(".compat", __name__).number(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
