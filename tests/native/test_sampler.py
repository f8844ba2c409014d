"""The native sampler against a float64 numpy reference.

The reference follows the definitions (softmax, sort, cumulate) and shares no code with the sampler. What
is compared: the set of tokens that can come out (a huge temperature makes all that the filters left
    equally likely, so enough draws
show each of them), how often each comes (chi-square), and, where a set is too large for that, that a
draw lies where the documented random sequence puts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer.errors import ArgumentError, ClosedError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

OFF = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
FLAT = 1e30  # a temperature at which all tokens that are left are equally likely


def uniform(seed: int) -> Iterator[float]:
    """The documented random sequence: SplitMix64, its upper 53 bits as a number in [0, 1)."""
    state, mask = seed, (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield ((z ^ (z >> 31)) >> 11) * 2.0**-53


def softmax(logits: F64) -> F64:
    shifted = np.exp(logits - logits.max())
    result: F64 = shifted / shifted.sum()
    return result


def adjusted(logits: npt.ArrayLike, o: Sampling, history: list[int], bias: dict[int, float]) -> F64:
    """Logits after bias and penalties."""
    values = np.array(logits, np.float64)
    for token, add in bias.items():
        values[token] += add
    window = (
        history if o.penalty_last_n < 0 else history[len(history) - min(o.penalty_last_n, len(history)) :]
    )
    for token in set(window):
        value = values[token]
        value = value / o.repeat_penalty if value > 0 else value * o.repeat_penalty
        values[token] = value - window.count(token) * o.frequency_penalty - o.presence_penalty
    return values


def survivors(values: F64, o: Sampling) -> tuple[I64, F64]:
    """Tokens that the filters leave, in falling order of logit, and their logits."""
    tokens = np.lexsort((np.arange(values.size), -values))
    tokens = tokens[np.isfinite(values[tokens])]
    if o.top_k > 0:
        tokens = tokens[: o.top_k]
    if o.typical_p < 1:
        p = softmax(values[tokens])
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(p * np.log(p))
            order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
        over = np.flatnonzero(np.cumsum(p[order]) > o.typical_p)
        kept = order[: over[0] + 1] if over.size else order
        tokens = tokens[np.sort(kept)]
    if o.top_p < 1:
        reached = np.flatnonzero(np.cumsum(softmax(values[tokens])) >= o.top_p)
        tokens = tokens[: reached[0] + 1] if reached.size else tokens
    if o.min_p > 0:
        p = softmax(values[tokens])
        tokens = tokens[p >= o.min_p * p.max()]
    return tokens, values[tokens]


def draws(o: Sampling, logits: npt.NDArray[np.float32], n: int, **kwargs: dict[int, float]) -> I64:
    sampler = Sampler(o, logits.size, **kwargs)  # type: ignore[arg-type]
    return np.array([sampler.sample(logits) for _ in range(n)])


def random_logits(n: int, scale: float = 2.0, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, scale, n).astype(np.float32)


FILTERS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=1000),
    dict(top_p=0.0),
    dict(top_p=0.3),
    dict(top_p=0.9),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(typical_p=0.2),
    dict(typical_p=0.9),
    dict(typical_p=0.0),
    dict(top_k=40, top_p=0.95, min_p=0.05),
    dict(top_k=20, typical_p=0.8, top_p=0.9, min_p=0.02),
    dict(top_p=0.8, min_p=0.2),
    dict(typical_p=0.7, min_p=0.1),
]


def named(options: dict[str, float]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "none"


@pytest.mark.parametrize("n_vocab", [1, 2, 31, 33, 100, 700])
@pytest.mark.parametrize("options", FILTERS, ids=named)
def test_survivors(options: dict[str, float], n_vocab: int) -> None:
    logits = random_logits(n_vocab, seed=n_vocab)
    o = replace(OFF, **options, seed=11)  # type: ignore[arg-type]
    expected, _ = survivors(logits.astype(np.float64), o)
    # A token is missed by n draws from m equally likely ones with probability e^(-n/m).
    seen = np.unique(draws(replace(o, temperature=FLAT), logits, 20 * expected.size + 20))
    assert sorted(expected) == list(seen)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("options", FILTERS, ids=named)
def test_probabilities(options: dict[str, float], temperature: float) -> None:
    logits = random_logits(90, 1.5, seed=5)
    o = replace(OFF, **options, temperature=temperature, seed=3)  # type: ignore[arg-type]
    tokens, values = survivors(logits.astype(np.float64), o)
    p = softmax(values / temperature)
    n = 20_000
    counts = np.bincount(draws(o, logits, n), minlength=logits.size)
    assert counts.sum() == counts[tokens].sum()
    # Chi-square wants at least 5 expected per class: the rare ones are one class together.
    rare = p * n < 5
    observed = np.append(counts[tokens][~rare], counts[tokens][rare].sum())
    expected = np.append(p[~rare], p[rare].sum()) * n
    chi2 = float((((observed - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())
    freedom = max(1, observed.size - 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(top_k=40),
        dict(top_k=300),
        dict(top_k=3000),
        dict(top_k=19_999),
        dict(top_p=0.9),
        dict(top_p=0.999),
        dict(min_p=0.01),
        dict(typical_p=0.9),
        dict(top_k=5000, top_p=0.99, min_p=0.001),
    ],
    ids=named,
)
@pytest.mark.parametrize("n_vocab", [20_000, 40_000])
def test_draw_from_a_large_vocabulary(options: dict[str, float], scale: float, n_vocab: int) -> None:
    """The k-th draw is where the k-th random number falls in the cumulated probabilities."""
    logits = random_logits(n_vocab, scale, seed=8)
    o = replace(OFF, **options, temperature=1.3, seed=77)  # type: ignore[arg-type]
    tokens, values = survivors(logits.astype(np.float64), o)
    if not set(options) - {"min_p"}:  # nothing sorted them: they are walked in the order of the vocabulary
        order = np.argsort(tokens)
        tokens, values = tokens[order], values[order]
    p = softmax(values / 1.3)
    above = np.cumsum(p)
    place = {int(token): i for i, token in enumerate(tokens)}
    for token, u in zip(draws(o, logits, 60), uniform(77), strict=False):
        i = place[int(token)]
        # The weights are float32 with 2e-7 each, and a filter's edge may lie one token off: both far
        # under 1e-4.
        assert above[i] - p[i] - 1e-4 <= u <= above[i] + 1e-4


def test_few_tokens_of_a_large_vocabulary() -> None:
    """Fewer are left than the filters would keep."""
    logits = np.full(40_000, -np.inf, np.float32)
    logits[[5, 70, 71, 20_000, 39_999]] = [-3.0, 0.0, 3e38, -3e38, -0.0]
    for options in ({"top_k": 3000}, {"top_k": 300}, {"top_k": 30_000}, {"top_k": 0}):
        seen = draws(replace(OFF, **options, temperature=FLAT), logits, 100)  # type: ignore[arg-type]
        assert set(seen) == {71}
        without = draws(
            replace(OFF, **options, temperature=FLAT),  # type: ignore[arg-type]
            logits,
            100,
            logit_bias={71: -math.inf, 20_000: -math.inf},
        )
        assert set(without) == {5, 70, 39_999}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [1, 2, 39, 40, 313])
@pytest.mark.parametrize("order", ["rising", "falling", "ties", "blocks", "shuffled"])
def test_the_k_largest_in_any_order(order: str, k: int) -> None:
    """Of 40,011 tokens, the last of which fill no block of 32."""
    n = 40_011
    logits = np.linspace(-4, 4, n).astype(np.float32)
    if order == "falling":
        logits = logits[::-1].copy()
    if order == "ties":  # of equal ones the first
        logits = np.round(logits[::-1] * 4).astype(np.float32) % 3
    if order == "blocks":  # the largest stand together in one block, and in the last one
        logits[64:96] += 20
        logits[-11:] += 30
    if order == "shuffled":
        np.random.default_rng(k).shuffle(logits)
    expected = np.lexsort((np.arange(n), -logits))[:k]
    seen = draws(replace(OFF, top_k=k, temperature=FLAT, seed=3), logits, 16 * k + 20)
    assert set(seen) == set(expected)


@pytest.mark.parametrize("n_changed", [3, 90, 2000])
def test_few_and_many_changed_tokens_of_a_large_vocabulary(n_changed: int) -> None:
    """Bias and penalties lower the likeliest, which are among those that a filter looks at first."""
    n = 20_011
    rng = np.random.default_rng(n_changed)
    logits = random_logits(n, 3.0, seed=1)
    best = np.argsort(-logits)[:n_changed].tolist()
    bias = {int(token): float(rng.normal(0, 4)) for token in best[::2]} | {n - 1: 3.0}
    o = replace(OFF, repeat_penalty=1.7, presence_penalty=1.0, penalty_last_n=-1)
    values = adjusted(logits, o, best, bias)
    greedy = Sampler(replace(o, temperature=0.0), n, logit_bias=bias)
    greedy.accept(*best)
    for _ in range(2):  # and the caller's logits are as they were
        assert greedy.sample(logits) == int(np.argmax(values))
    assert np.array_equal(logits, random_logits(n, 3.0, seed=1))
    flat = Sampler(replace(o, top_k=30, temperature=FLAT), n, logit_bias=bias)
    flat.accept(*best)
    assert {flat.sample(logits) for _ in range(700)} == set(np.argsort(-values)[:30])


def test_whole_vocabulary_of_256k() -> None:
    logits = random_logits(256_000, 3.0, seed=4)
    o = Sampling(seed=1, temperature=FLAT)
    expected, _ = survivors(logits.astype(np.float64), o)
    assert sorted(expected) == list(np.unique(draws(o, logits, 40 * expected.size)))
    assert Sampler(replace(o, temperature=0.0), logits.size).sample(logits) == int(np.argmax(logits))


def test_random_sequence_is_splitmix64() -> None:
    """Published first outputs for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [int(u * 2**53) for u, _ in zip(uniform(1234567), published, strict=False)] == [
        n >> 11 for n in published
    ]
    n = 4096
    flat = np.zeros(n, np.float32)
    drawn = draws(replace(OFF, seed=1234567), flat, 4)
    assert list(drawn) == [int((k >> 11) * 2.0**-53 * n) for k in published]


def test_ties_go_to_the_lower_token() -> None:
    logits = np.zeros(5000, np.float32)
    logits[[70, 4000, 99]] = [3.0, 3.0, 3.0]
    assert Sampler(replace(OFF, temperature=0.0), 5000).sample(logits) == 70
    assert set(draws(replace(OFF, top_k=2, temperature=FLAT), logits, 60)) == {70, 99}
    logits[70] = 0.0
    logits[1] = -0.0
    assert set(draws(replace(OFF, top_k=4, temperature=FLAT), logits, 200)) == {99, 4000, 0, 1}


def test_seed_decides() -> None:
    logits = random_logits(300, 0.5)
    first = draws(replace(OFF, seed=5), logits, 50)
    assert list(first) == list(draws(replace(OFF, seed=5), logits, 50))
    assert list(first) != list(draws(replace(OFF, seed=6), logits, 50))
    sampler = Sampler(replace(OFF, seed=9), 300)
    sampler.sample(logits)
    sampler.reset(5)
    assert list(first) == [sampler.sample(logits) for _ in range(50)]
    assert len(set(draws(replace(OFF, seed=2**64 - 1), logits, 50))) > 10


PENALTIES = [
    dict(repeat_penalty=1.3),
    dict(repeat_penalty=0.7),
    dict(frequency_penalty=0.8),
    dict(frequency_penalty=-0.5),
    dict(presence_penalty=1.1),
    dict(repeat_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.4),
]


@pytest.mark.parametrize("last_n", [0, 1, 5, 64, 200, -1])
@pytest.mark.parametrize("options", PENALTIES, ids=named)
def test_penalties(options: dict[str, float], last_n: int) -> None:
    rng = np.random.default_rng(2)
    n_vocab = 60
    logits = random_logits(n_vocab, seed=6)
    o = replace(OFF, **options, penalty_last_n=last_n, seed=21)  # type: ignore[arg-type]
    bias = {3: 2.5, 4: -1.0, 59: 0.5}
    sampler = Sampler(o, n_vocab, logit_bias=bias)
    history: list[int] = []
    numbers = uniform(21)
    for step in range(300):
        values = adjusted(logits, o, history, bias)
        above = np.cumsum(softmax(values))
        token = sampler.sample(logits)
        u = next(numbers)
        assert (above[token - 1] if token else 0.0) - 1e-5 <= u <= above[token] + 1e-5, step
        appended = int(rng.integers(n_vocab)) if step % 3 else token
        sampler.accept(appended)
        history.append(appended)
    sampler.reset(21)
    fresh = Sampler(o, n_vocab, logit_bias=bias)
    for _ in range(100):
        token = sampler.sample(logits)
        assert token == fresh.sample(logits)
        sampler.accept(token)
        fresh.accept(token)


def test_logit_bias() -> None:
    logits = random_logits(50)
    best = int(np.argmax(logits))
    greedy = replace(OFF, temperature=0.0)
    assert Sampler(greedy, 50, logit_bias={best: -math.inf}).sample(logits) == int(np.argsort(-logits)[1])
    assert Sampler(greedy, 50, logit_bias={17: 100.0}).sample(logits) == 17
    assert Sampler(greedy, 50, logit_bias={17: 3e38}).sample(np.full(50, 3e38, np.float32)) == 17
    assert best not in draws(replace(OFF, temperature=FLAT), logits, 600, logit_bias={best: -math.inf})


def test_excluded_tokens_never_come() -> None:
    logits = random_logits(200)
    logits[::2] = -np.inf
    for options in FILTERS:
        o = replace(OFF, **options, temperature=FLAT)  # type: ignore[arg-type]
        assert all(token % 2 for token in draws(o, logits, 300))
    penalised = replace(OFF, presence_penalty=-5.0, repeat_penalty=0.5, temperature=FLAT)
    sampler = Sampler(penalised, 200)
    sampler.accept(0, 2, 4)
    assert all(sampler.sample(logits) % 2 for _ in range(300))
    logits[:] = -np.inf
    logits[123] = -1e30
    for options in FILTERS:
        assert set(draws(replace(OFF, **options), logits, 5)) == {123}  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-3, 1e38])
def test_extreme_temperature(temperature: float) -> None:
    logits = random_logits(64)
    seen = set(draws(replace(OFF, temperature=temperature), logits, 1500))
    assert seen == ({int(np.argmax(logits))} if temperature < 1 else set(range(64)))


@pytest.mark.parametrize(
    "tau, eta, temperature", [(2.0, 0.1, 1.0), (5.0, 0.3, 0.8), (0.0, 1.0, 1.0), (3.0, 0.0, 2.0)]
)
def test_mirostat(tau: float, eta: float, temperature: float) -> None:
    rng = np.random.default_rng(1)
    o = replace(OFF, mirostat_mode=2, mirostat_tau=tau, mirostat_eta=eta, temperature=temperature, seed=13)
    sampler, numbers, mu = Sampler(o, 400), uniform(13), 2 * tau
    for _ in range(200):
        logits = rng.normal(0, 2, 400).astype(np.float32)
        p = softmax(logits.astype(np.float64) / temperature)
        surprise = -np.log2(p)
        kept = surprise <= mu
        token = sampler.sample(logits)
        if kept.any():
            p = np.where(kept, p, 0.0)
            p /= p.sum()
            above = np.cumsum(p)
            u = next(numbers)
            # mu wanders with the float32 error of each step; a token at its edge may be in or out.
            assert above[token] - p[token] - 1e-3 <= u <= above[token] + 1e-3
        else:
            assert token == int(np.argmax(p))
            p = (np.arange(400) == token).astype(np.float64)
        mu -= eta * (-math.log2(p[token]) - tau)


def test_mirostat_reaches_its_target() -> None:
    logits = random_logits(2000, 1.0, seed=3)
    p = softmax(logits.astype(np.float64))
    tokens = draws(replace(OFF, mirostat_mode=2, mirostat_tau=4.0, mirostat_eta=0.1, seed=2), logits, 2000)
    assert p[tokens].min() < p.max()
    # The surprise within what mirostat kept averages to tau, within a noise of about 2 bits / sqrt(1000).
    kept_bits = math.log2(1.0 / p[np.unique(tokens[1000:])].sum())
    mean = float(-np.log2(p[tokens[1000:]]).mean()) - kept_bits
    assert abs(mean - 4.0) < 0.5


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "options",
    [
        *({name: NAN} for name in ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty")),
        *({name: NAN} for name in ("frequency_penalty", "presence_penalty", "mirostat_tau", "mirostat_eta")),
        *(
            {name: INF}
            for name in ("temperature", "min_p", "repeat_penalty", "frequency_penalty", "mirostat_tau")
        ),
        dict(top_p=-0.1),
        dict(typical_p=-1.0),
        dict(min_p=1.5),
        dict(repeat_penalty=0.0),
        dict(repeat_penalty=-1.0),
        dict(mirostat_tau=-1.0),
        dict(mirostat_eta=-0.1),
        dict(penalty_last_n=-2),
        dict(mirostat_mode=3),
        dict(mirostat_mode=-1),
        dict(top_k=2**31),
        dict(seed=-1),
        dict(seed=2**64),
    ],
    ids=named,
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    name = next(iter(options))
    with pytest.raises(ArgumentError, match=name.removesuffix("_mode")):
        Sampler(replace(OFF, **options), 10)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    for n_vocab in (0, -5):
        with pytest.raises(ArgumentError, match="n_vocab"):
            Sampler(OFF, n_vocab)
    for bias in ({10: 1.0}, {-1: 1.0}, {2: NAN}, {2: INF}):
        with pytest.raises(ArgumentError, match="bias"):
            Sampler(OFF, 10, logit_bias=bias)
    sampler = Sampler(replace(OFF, presence_penalty=1.0), 10)
    for token in (-1, 10, 2**31 - 1):
        with pytest.raises(ArgumentError, match=str(token)):
            sampler.accept(token)
    with pytest.raises(ArgumentError, match="float64"):
        sampler.sample(np.zeros(10))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="9"):
        sampler.sample(np.zeros(9, np.float32))
    sampler.close()
    sampler.close()
    with pytest.raises(ClosedError):
        sampler.sample(np.zeros(10, np.float32))


@pytest.mark.parametrize("bad, at", [(NAN, 0), (NAN, 36), (INF, 7)])
def test_bad_logits_change_nothing(bad: float, at: int) -> None:
    logits = random_logits(37)
    broken = logits.copy()
    broken[at] = bad
    o = replace(OFF, seed=4)
    sampler = Sampler(o, 37)
    drawn = []
    for _ in range(20):
        with pytest.raises(ArgumentError, match=f"token {at} is"):
            sampler.sample(broken)
        with pytest.raises(ArgumentError, match="all 37"):
            sampler.sample(np.full(37, -np.inf, np.float32))
        drawn.append(sampler.sample(logits))
    assert drawn == list(draws(o, logits, 20))


def test_logits_stay_as_they_are() -> None:
    logits = random_logits(100)
    before = logits.copy()
    sampler = Sampler(replace(Sampling(), repeat_penalty=2.0, presence_penalty=1.0), 100, logit_bias={1: 5.0})
    sampler.accept(1, 2, 3)
    sampler.sample(logits)
    assert np.array_equal(before, logits)


@settings(max_examples=150)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, max_value=2.0**127), min_size=1, max_size=80),
    top_k=st.integers(-3, 100),
    top_p=st.floats(0, 1.1),
    min_p=st.floats(-0.1, 1),
    typical_p=st.floats(0, 1.1),
    temperature=st.floats(-1, 1e6),
    mirostat=st.sampled_from([0, 1, 2]),
    penalty=st.floats(0.01, 100),
)
def test_any_finite_logits_give_a_possible_token(
    values: list[float],
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    temperature: float,
    mirostat: int,
    penalty: float,
) -> None:
    logits = np.array(values, np.float32)
    o = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        mirostat_mode=mirostat,
        repeat_penalty=penalty,
    )
    sampler = Sampler(o, logits.size)
    sampler.accept(0)
    if not np.isfinite(logits).any():
        with pytest.raises(ArgumentError, match="-inf"):
            sampler.sample(logits)
        return
    for _ in range(5):
        assert np.isfinite(logits[sampler.sample(logits)])
