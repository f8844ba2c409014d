"""How well documents answer a query: models that carry a classifier (rerankers).

The classifier is one matrix, `cls.output.weight` [labels, n_embd], for the final hidden state of the text's
last token. The text is made by the file's `tokenizer.chat_template.rerank`, with {query} and {document} in
it. As in llama.cpp a score is that of the first label: of Qwen3 its share after a softmax over all ("yes" and
"no"), of others the number itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, UnsupportedError
from .arrays import Ids, as_int32
from .file import ModelFile

_WEIGHT = "cls.output.weight"
_TEMPLATE = "tokenizer.chat_template.rerank"
_SHARES = ("qwen3",)
"""Architectures whose labels exclude each other."""


class Classifier:
    """Of one model."""

    def __init__(self, file: ModelFile) -> None:
        """Raises UnsupportedError if the model has none, FormatError."""
        if not any(tensor.name == _WEIGHT for tensor in file.tensors):
            raise UnsupportedError(
                f"{file.path.name} is no reranker: it has no classifier ({_WEIGHT}) to score texts with"
            )
        template = file.metadata.get(_TEMPLATE)
        if not isinstance(template, str):
            raise UnsupportedError(f"{file.path.name} has a classifier, but no {_TEMPLATE} for its texts")
        self._parts = re.split(r"(\{query\}|\{document\})", template)
        if not {"{query}", "{document}"} <= set(self._parts):
            raise FormatError(f"{_TEMPLATE} has no place for {{query}} and {{document}}")
        self._weights: npt.NDArray[np.float64] = file.dequantize(_WEIGHT).astype(np.float64)
        architecture = file.metadata.get("general.architecture")
        self._is_share = architecture in _SHARES and len(self._weights) > 1

    def text(self, query: str, document: str) -> str:
        """What the model reads. Braces of a query or a document mean nothing."""
        words = {"{query}": query, "{document}": document}
        return "".join(words.get(part, part) for part in self._parts)

    def ids(
        self, pairs: Iterable[tuple[str, str]], tokenize: Callable[[str, bool, bool], list[int]]
    ) -> list[Ids]:
        """Token ids of (query, document) pairs."""
        return [as_int32("tokens", tokenize(self.text(*pair), False, True)) for pair in pairs]

    def scores(self, states: Sequence[npt.ArrayLike]) -> list[float]:
        """Of the final hidden states of texts' last tokens."""
        logits = np.asarray(states, np.float64) @ self._weights.T
        if not self._is_share:
            return [float(row[0]) for row in logits]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        return [float(row[0] / row.sum()) for row in shares]
