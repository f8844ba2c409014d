"""PowerInfer: large language models on ordinary machines, computing only the neurons that matter.

    from powerinfer import Llama

    with Llama.demo() as llm:
        print(llm("Once upon a time", max_tokens=40)["choices"][0]["text"])

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._engine._native import version as __version__
    from ._engine.file import ModelFile
    from ._engine.report import LlamaState
    from ._engine.sampling import (
        LogitsProcessor,
        LogitsProcessorList,
        MinTokensLogitsProcessor,
        StoppingCriteria,
        StoppingCriteriaList,
    )
    from ._text.grammar import LlamaGrammar
    from .async_llama import AsyncLlama
    from .compat.arguments import llama_log_set
    from .compat.llama_cache import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache
    from .compat.llama_speculative import LlamaDraftModel
    from .compat.llama_tokenizer import BaseLlamaTokenizer, LlamaHFTokenizer, LlamaTokenizer
    from .errors import (
        ArgumentError,
        ArgumentTypeError,
        BusyError,
        ClosedError,
        ContextError,
        DeadlineError,
        DeviceError,
        FileError,
        FormatError,
        LibraryError,
        OutOfMemoryError,
        PowerInferError,
        UnsupportedError,
    )
    from .llama import Llama

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AsyncLlama",
    "BaseLlamaCache",
    "BaseLlamaTokenizer",
    "BusyError",
    "ClosedError",
    "ContextError",
    "DeadlineError",
    "DeviceError",
    "FileError",
    "FormatError",
    "LibraryError",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaHFTokenizer",
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
    "llama_log_set",
]

_HOME = {
    "AsyncLlama": "async_llama",
    "BaseLlamaCache": "compat.llama_cache",
    "BaseLlamaTokenizer": "compat.llama_tokenizer",
    "Llama": "llama",
    "LlamaCache": "compat.llama_cache",
    "LlamaDiskCache": "compat.llama_cache",
    "LlamaDraftModel": "compat.llama_speculative",
    "LlamaGrammar": "_text.grammar",
    "LlamaRAMCache": "compat.llama_cache",
    "LlamaState": "_engine.report",
    "LlamaTokenizer": "compat.llama_tokenizer",
    "LlamaHFTokenizer": "compat.llama_tokenizer",
    "LogitsProcessor": "_engine.sampling",
    "LogitsProcessorList": "_engine.sampling",
    "MinTokensLogitsProcessor": "_engine.sampling",
    "ModelFile": "_engine.file",
    "StoppingCriteria": "_engine.sampling",
    "StoppingCriteriaList": "_engine.sampling",
    "llama_log_set": "compat.arguments",
}


_TYPES = ("ChatCompletion", "Completion", "CreateC", "CreateEmbedding", "Embedding")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("._engine._native", __name__).version
    elif name in __all__:
        value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    elif name.startswith(("LLAMA_", "GGML_")):  # llama.cpp's numbers, as arguments take them
        value = import_module(".compat.arguments", __name__).number(name)
    elif name.startswith(_TYPES):  # which llama_cpp has here too
        value = getattr(import_module(".llama_types", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
