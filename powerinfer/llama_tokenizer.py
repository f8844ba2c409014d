"""Tokenizers under the module name that they have in llama-cpp-python."""

from .compat.llama_tokenizer import BaseLlamaTokenizer, LlamaHFTokenizer, LlamaTokenizer

__all__ = ["BaseLlamaTokenizer", "LlamaHFTokenizer", "LlamaTokenizer"]
