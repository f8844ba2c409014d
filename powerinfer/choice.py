"""How one generation chooses its tokens: everything that stands between logits and a token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .context import Context, Ids, Logits
from .sampling import LogitsProcessorList, Sampler, StoppingCriteriaList

if TYPE_CHECKING:
    from .grammar import Constraint


def all_allowed(logits: Logits) -> Logits:
    return logits


@dataclass(eq=False, kw_only=True)
class Choice:
    """The hooks of one generation, in the order in which they run."""

    watch: Callable[[npt.NDArray[Any], int], None] | None = None
    """Called as watch(row, token) for each token, row being log_softmax of the model's own logits."""
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    allow: Callable[[Logits], Logits] = all_allowed
    """Takes tokens that cannot be out of the logits."""
    constraint: Constraint | None = None
    """The grammar's; when it is complete that token is the last."""
    sampler: Sampler
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    ends: Collection[int] = ()
    """Tokens after which nothing follows."""

    def begin(self, prompt: Ids) -> None:
        """Shows the prompt to what looks back at it."""
        options = self.sampler.options
        if options.penalises:
            n = options.penalty_last_n
            self.sampler.accept(*(prompt if n < 0 else prompt[max(0, prompt.size - n) :]).tolist())

    @property
    def is_plain(self) -> bool:
        """Nobody but the sampler looks at logits."""
        hooked = self.processors or self.criteria or self.allow is not all_allowed
        return self.watch is None and self.constraint is None and not hooked

    def token_after(self, context: Context) -> int:
        """The token that follows what the context holds, where the choice is plain."""
        token = context.draw(self.sampler)
        self.sampler.accept(token)
        return token

    def token(self, ids: Ids, logits: Logits) -> int:
        """The token that follows ids; logits may be changed."""
        row = None
        if self.watch is not None:
            from .logprobs import log_softmax

            row = log_softmax(logits)
        if self.processors:
            logits = self.processors(ids.copy(), logits)
        logits = self.allow(logits)
        if self.constraint is not None:
            self.constraint.mask(logits)
        token = self.sampler.sample(logits)
        self.sampler.accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.watch is not None and row is not None:
            self.watch(row, token)
        return token

    def is_over(self, ids: Ids, logits: Logits | None) -> bool:
        """Whether the last of ids ends the generation, which is asked once after each token.

        logits: None where the choice is plain."""
        if int(ids[-1]) in self.ends or (self.constraint is not None and self.constraint.is_complete):
            return True
        return logits is not None and bool(self.criteria) and self.criteria(np.array(ids, np.int32), logits)
