"""LlamaGrammar under the module name that it has in llama-cpp-python."""

from .grammar import LlamaGrammar

__all__ = ["LlamaGrammar"]
