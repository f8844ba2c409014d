"""Choosing tokens: options, the native sampler, and the hooks that run between a step and the choice.

sampler = Sampler(Sampling(temperature=0.7, seed=1), n_vocab=32000)
token = sampler.sample(logits)
sampler.accept(token)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError, ClosedError, UnsupportedError
from . import _native
from .checks import real

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

# (input ids so far, logits [n_vocab]) -> logits [n_vocab], or None if they were changed in place.
LogitsProcessor = Callable[[Ids, Logits], npt.ArrayLike | None]
# (input ids so far, logits [n_vocab]) -> whether to stop.
StoppingCriterion = Callable[[Ids, Logits], bool]
StoppingCriteria = StoppingCriterion  # llama-cpp-python's name
# What functions take: one, several, or none.
Processors = LogitsProcessor | Sequence[LogitsProcessor] | None
Criteria = StoppingCriterion | Sequence[StoppingCriterion] | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits.

    Order: logit bias, penalties, DRY, then greedy (temperature <= 0), or mirostat (after the temperature), or
    top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, and a draw. Values out of range raise
    ArgumentError when a sampler is made.
    """

    temperature: float = 0.8
    """At or below 0 the likeliest token is taken."""
    top_k: int = 40
    """Keep so many of the likeliest tokens; 0 or less: all."""
    top_p: float = 0.95
    """Keep the likeliest tokens that together have this probability; 1 or more: all."""
    min_p: float = 0.05
    """Keep tokens at least this share as likely as the likeliest; 0 or less: all."""
    typical_p: float = 1.0
    """Keep the tokens nearest to the mean surprise that together have this probability; 1 or more: all."""
    repeat_penalty: float = 1.0
    """Divides positive logits of tokens seen lately, multiplies negative ones; 1: off."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once for each time that the token was seen lately."""
    presence_penalty: float = 0.0
    """Subtracted from a logit if the token was seen lately."""
    penalty_last_n: int = 64
    """How many tokens "lately" is; 0: none, -1: all."""
    mirostat_mode: int = 0
    """0: off; 1: mirostat, 2: mirostat 2.0, which steer the surprise towards tau."""
    mirostat_tau: float = 5.0
    """Target surprise in bits."""
    mirostat_eta: float = 0.1
    """Learning rate of the surprise bound."""
    top_n_sigma: float = 0.0
    """Keep tokens whose logit is within so many standard deviations of the largest; 0 or less: all."""
    xtc_probability: float = 0.0
    """How often XTC excludes all but the least likely of the tokens that have `xtc_threshold`; 0: never."""
    xtc_threshold: float = 0.1
    """A probability; above 0.5 there cannot be two tokens that have it."""
    dynatemp_range: float = 0.0
    """The temperature goes so far down where the model is sure and up where it is not; 0: it stays."""
    dynatemp_exponent: float = 1.0
    """Of the share of the greatest entropy that the tokens left have."""
    dry_multiplier: float = 0.0
    """DRY: tokens lose this times dry_base ** (length - dry_allowed_length) where they would make a sequence
    of that length come again; 0: off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Sequences shorter than this may come again."""
    dry_penalty_last_n: int = -1
    """How far back DRY looks; 0: nowhere, -1: at all tokens."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Sequences end at tokens whose text has one of these."""
    seed: int = 0
    """64 bits. The same seed, options and logits give the same tokens."""

    @property
    def lookback(self) -> int:
        """How many of the tokens seen lately matter; -1: all."""
        of_tokens = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
        n = self.penalty_last_n if of_tokens else 0
        n_dry = self.dry_penalty_last_n if self.dry_multiplier > 0 else 0
        return -1 if n < 0 or n_dry < 0 else max(n, n_dry)

    @property
    def penalises(self) -> bool:
        """Whether any do."""
        return self.lookback != 0


class Sampler:
    """Chooses tokens in native code. A second thread's call waits for the first."""

    def __init__(
        self,
        options: Sampling,
        n_vocab: int,
        *,
        logit_bias: Mapping[int, float] | None = None,
        breakers: Iterable[int] = (),
    ) -> None:
        """`logit_bias` is added to the logits; -inf excludes a token. breakers: the tokens that
        dry_sequence_breakers means.

        Raises ArgumentError for values out of range.
        """
        self.options = options
        self.n_vocab = _native.fit("n_vocab", n_vocab)
        ffi = _native.ffi
        ends = ffi.new("int32_t[]", [_native.fit("a token of breakers", token) for token in breakers])
        native = ffi.new(
            "pi_sampling *",
            {
                "temperature": real("temperature", options.temperature),
                "top_k": _native.fit("top_k", options.top_k),
                "top_p": real("top_p", options.top_p),
                "min_p": real("min_p", options.min_p),
                "typical_p": real("typical_p", options.typical_p),
                "repeat_penalty": real("repeat_penalty", options.repeat_penalty),
                "frequency_penalty": real("frequency_penalty", options.frequency_penalty),
                "presence_penalty": real("presence_penalty", options.presence_penalty),
                "penalty_last_n": _native.fit("penalty_last_n", options.penalty_last_n),
                "mirostat": _native.fit("mirostat_mode", options.mirostat_mode),
                "mirostat_tau": real("mirostat_tau", options.mirostat_tau),
                "mirostat_eta": real("mirostat_eta", options.mirostat_eta),
                "seed": _native.fit("seed", options.seed, 64, signed=False),
                "top_n_sigma": real("top_n_sigma", options.top_n_sigma),
                "xtc_probability": real("xtc_probability", options.xtc_probability),
                "xtc_threshold": real("xtc_threshold", options.xtc_threshold),
                "dynatemp_range": real("dynatemp_range", options.dynatemp_range),
                "dynatemp_exponent": real("dynatemp_exponent", options.dynatemp_exponent),
                "dry_multiplier": real("dry_multiplier", options.dry_multiplier),
                "dry_base": real("dry_base", options.dry_base),
                "dry_allowed_length": _native.fit("dry_allowed_length", options.dry_allowed_length),
                "dry_penalty_last_n": _native.fit("dry_penalty_last_n", options.dry_penalty_last_n),
                "dry_breakers": ends,
                "n_dry_breakers": len(ends),
            },
        )
        self.logit_bias = bias = dict(logit_bias or {})
        tokens = ffi.new("int32_t[]", [_native.fit("a token of logit_bias", token) for token in bias])
        values = ffi.new("float[]", [float(value) for value in bias.values()])
        out = ffi.new("pi_sampler **")
        _native.check(_native.quick("pi_sampler_new", native, self.n_vocab, len(bias), tokens, values, out))
        # Six words of four or eight bytes for each token of the vocabulary.
        self._handle: Any = ffi.gc(out[0], _free, 32 * self.n_vocab)
        self._token = ffi.new("int32_t *")
        self._lock = threading.Lock()

    @property
    def handle(self) -> Any:
        """The native sampler. Raises ClosedError after close()."""
        if self._handle is None:
            raise ClosedError("the sampler is closed")
        return self._handle

    def sample(self, logits: Logits) -> int:
        """Chooses from float32 logits [n_vocab], which stay as they are.

        Raises ArgumentError for another shape or type, a NaN or +inf, or when every logit is -inf.
        """
        if logits.dtype != np.float32 or logits.shape != (self.n_vocab,):
            raise ArgumentError(
                f"logits are {logits.dtype} {logits.shape}, they must be float32 ({self.n_vocab},)"
            )
        floats = _native.ffi.from_buffer("float[]", np.ascontiguousarray(logits))
        return self.sample_native(floats, self.n_vocab)

    def sample_native(self, logits: Any, n_vocab: int) -> int:
        """The same, from n_vocab of the engine's own floats."""
        handle = self.handle
        if n_vocab != self.n_vocab:
            raise ArgumentError(f"there are {n_vocab} logits, they must be {self.n_vocab}")
        with self._lock:
            _native.check(_native.lib.pi_sampler_sample(handle, logits, self._token))
            return int(self._token[0])

    def next_native(self, session: Any, seq: int, pos: int, token: int) -> tuple[int, int]:
        """Feeds a token to the engine's session and chooses what follows: the status, and the chosen token.
        On an error that is the token that was fed, or -1."""
        handle = self.handle
        with self._lock:
            try:
                status = _native.lib.pi_session_next(session, seq, pos, token, handle, self._token)
            except OverflowError:
                raise ArgumentError(f"seq {seq}, pos {pos} or token {token} has more than 32 bits") from None
            return status, self._token[0]

    def accept(self, *tokens: int) -> None:
        """Tells the sampler that these tokens were appended; penalties look at them."""
        handle = self.handle
        with self._lock:
            for token in tokens:
                _native.check(_native.lib.pi_sampler_accept(handle, _native.fit("token", token)))

    def reset(self, seed: int) -> None:
        """Forgets accepted tokens and restarts the random sequence."""
        handle = self.handle
        with self._lock:
            _native.quick(
                "pi_sampler_reset", handle, _native.U64(_native.fit("seed", seed, 64, signed=False))
            )

    def close(self) -> None:
        """Frees the sampler; later calls raise ClosedError."""
        self._handle = None  # freed with the last reference: a call in another thread may still hold one


def _free(handle: Any) -> None:
    _native.quick_void("pi_sampler_free", handle)


class MinTokensLogitsProcessor:
    """Lets an answer end only after so many tokens."""

    def __init__(self, min_tokens: int, token_eos: int | Sequence[int]) -> None:
        """token_eos: the token that ends an answer, or several."""
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self._n_prompt: int | None = None

    def __call__(self, input_ids: Ids, scores: Logits) -> Logits:
        if self._n_prompt is None:
            self._n_prompt = len(input_ids)
        if len(input_ids) - self._n_prompt < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors that run one after the other between a step and the choice of a token.

    Each is called with the ids so far (int32) and the logits (float32 [n_vocab], writable) and returns
    the logits to go on with, or None if it changed them in place.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        super().__init__(processors)

    @classmethod
    def of(cls, processors: Processors) -> LogitsProcessorList:
        """A list of what a caller gave."""
        if isinstance(processors, LogitsProcessorList):
            return processors
        return cls(processors if isinstance(processors, Sequence) else [processors] if processors else ())

    def __call__(self, input_ids: Ids, scores: Logits) -> Logits:
        for processor in self:
            result = processor(input_ids, scores)
            if result is not None and result is not scores:
                changed = np.asarray(result, dtype=np.float32)
                if changed.shape != scores.shape:
                    raise ArgumentError(
                        f"a logits processor returned shape {changed.shape}, not {scores.shape}"
                    )
                scores = changed
        return scores


class StoppingCriteriaList(list[StoppingCriterion]):
    """Criteria that are asked after each token; generation stops when one says so."""

    def __init__(self, criteria: Iterable[StoppingCriterion] = ()) -> None:
        super().__init__(criteria)

    @classmethod
    def of(cls, criteria: Criteria) -> StoppingCriteriaList:
        """A list of what a caller gave."""
        if isinstance(criteria, StoppingCriteriaList):
            return criteria
        return cls(criteria if isinstance(criteria, Sequence) else [criteria] if criteria else ())

    def __call__(self, input_ids: Ids, logits: Logits) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


SAMPLING_NAMES = frozenset(field.name for field in fields(Sampling)) - {"seed"}


def sampling_of(
    where: str, given: Mapping[str, Any], penalty_last_n: int, penalize_nl: bool = True
) -> Sampling:
    """Options from keyword arguments; `temp` is `temperature`. Raises TypeError for other names."""
    given = dict(given)
    if given.pop("tfs_z", 1.0) != 1.0:
        raise UnsupportedError("tfs_z is not supported: tail-free sampling has gone from llama.cpp too")
    if not penalize_nl:
        raise UnsupportedError("penalize_nl=False is not supported: line breaks are penalised like others")
    values = {"penalty_last_n": penalty_last_n, **given}
    if "temp" in values:
        values["temperature"] = values.pop("temp")
    for name in values:
        if name not in SAMPLING_NAMES:
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}")
    if "dry_sequence_breakers" in values:
        texts = values["dry_sequence_breakers"]
        breakers = tuple(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else (None,)
        if not all(isinstance(text, str) and text for text in breakers):
            raise ArgumentTypeError("dry_sequence_breakers is no list of texts that are not empty")
        values["dry_sequence_breakers"] = breakers
    return Sampling(**values)


def last(ids: Ids, n: int) -> list[int]:
    """The last n ids; all for -1."""
    result: list[int] = (ids if n < 0 else ids[max(0, ids.size - n) :]).tolist()
    return result
