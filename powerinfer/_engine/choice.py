"""How one generation chooses its tokens: everything that stands between logits and a token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import Ids, Logits
from .sampling import LogitsProcessorList, Sampler, StoppingCriteriaList

if TYPE_CHECKING:
    from .._text.grammar import Constraint
    from .._text.grammars import RemoteConstraint


@dataclass(eq=False, kw_only=True)
class Choice:
    """The hooks of one generation, in the order in which they run."""

    watch: Callable[[npt.NDArray[Any], int], None] | None = None
    """Called as watch(row, token) for each token, row being log_softmax of the model's own logits."""
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    constraint: Constraint | RemoteConstraint | None = None
    """The grammar's; when it is complete that token is the last."""
    sampler: Sampler
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    ends: Collection[int] = ()
    """Tokens after which nothing follows."""

    def begin(self, prompt: Ids) -> None:
        """Shows the prompt to what looks back at it."""
        options = self.sampler.options
        if options.penalises:
            n = options.lookback
            self.sampler.accept(*(prompt if n < 0 else prompt[max(0, prompt.size - n) :]).tolist())

    @property
    def is_plain(self) -> bool:
        """Nobody but the sampler looks at logits."""
        return self.watch is None and self.constraint is None and not self.processors and not self.criteria

    @property
    def is_ready(self) -> bool:
        """Whether token() does not wait for a grammar."""
        return self.constraint is None or self.constraint.is_ready

    def close(self) -> None:
        """Frees what its hooks hold."""
        self.sampler.close()
        if self.constraint is not None:
            self.constraint.close()

    def accept(self, token: int) -> None:
        """Tells the sampler which token was chosen, if it wants to know."""
        if self.sampler.options.penalises:
            self.sampler.accept(token)

    def token(self, ids: Ids, logits: Logits) -> int:
        """The token that follows ids; logits may be changed."""
        row = None
        if self.watch is not None:
            from .._text.logprobs import log_softmax

            row = log_softmax(logits)
        if self.processors:
            logits = self.processors(ids.copy(), logits)
        if self.constraint is not None:
            self.constraint.mask(logits)
        token = self.sampler.sample(logits)
        self.accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.watch is not None and row is not None:
            self.watch(row, token)
        return token

    def is_last(self, token: int) -> bool:
        """Whether nothing follows the token that was just chosen."""
        return token in self.ends or (self.constraint is not None and self.constraint.is_complete)

    def stops(self, ids: Ids, logits: Logits) -> bool:
        """Whether a criterion ends the generation with the last of ids. Asked once after each token that does
        not end it anyway."""
        return bool(self.criteria) and self.criteria(np.array(ids, np.int32), logits)
