"""LlamaGrammar under the module name that it has in llama-cpp-python."""

from ._text.grammar import LlamaGrammar

__all__ = ["LlamaGrammar"]
