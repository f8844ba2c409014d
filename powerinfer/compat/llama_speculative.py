"""Guessing the next tokens, so that one step can check several: `Llama(draft_model=...)`.

    llm = Llama("model.gguf", draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10))

A guess that is wrong costs time and changes nothing else: each token is chosen from the model's own logits,
and a step takes only as many tokens as the machine's kernels compute just as they compute one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

Ids = npt.NDArray[np.int32]


class LlamaDraftModel(ABC):
    """Base of what `Llama(draft_model=...)` takes: guesses tokens that the model then checks together."""

    @abstractmethod
    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> npt.ArrayLike:
        """Token ids that may follow input_ids; none is a valid answer. Called before each step."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Guesses that text repeats: looks for the last tokens earlier on, and takes what followed there.

    It pays where answers quote their prompt: summaries, edits of code, questions about a document.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        """
        max_ngram_size: how many of the last tokens are looked for; fewer where so many are not found.
        num_pred_tokens: most tokens guessed. On a CPU a wrong guess costs more than on a GPU: try 2
            there.
        """
        if max_ngram_size < 1 or num_pred_tokens < 1:
            raise ArgumentError("max_ngram_size and num_pred_tokens must be at least 1")
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        ids = np.asarray(input_ids)
        for n in range(min(self.max_ngram_size, ids.size - 1), 0, -1):
            # Where the last n ids also stand with at least one id behind them.
            places = np.flatnonzero(ids[: ids.size - n] == ids[-n])
            for i in range(1, n):
                places = places[ids[places + i] == ids[i - n]]
            if places.size:
                begin = int(places[0]) + n
                return ids[begin : begin + self.num_pred_tokens]
        return ids[:0]
