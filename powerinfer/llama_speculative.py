"""Draft models under the module name that they have in llama-cpp-python."""

from .compat.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

__all__ = ["LlamaDraftModel", "LlamaPromptLookupDecoding"]
