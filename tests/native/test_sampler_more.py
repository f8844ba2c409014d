"""Top-n-sigma, XTC, dynamic temperature, mirostat 1 and DRY against their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.sampling import Sampler
from tests.native.test_sampler import FLAT, OFF, draws, random_logits, softmax, uniform


@pytest.mark.parametrize("n", [1, 2, 33, 700])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.7}, {"typical_p": 0.8}, {"min_p": 0.2}])
def test_top_n_sigma(n: int, sigma: float, more: dict[str, Any]) -> None:
    logits = random_logits(n)
    if n > 2:
        logits[3] = -np.inf
    x = logits[np.isfinite(logits)].astype(np.float64)
    kept = np.where(logits >= x.max() - sigma * x.std(), logits, -np.inf).astype(np.float32)
    o = replace(OFF, top_n_sigma=sigma, temperature=0.9, seed=3, **more)
    assert draws(o, logits, 200).tolist() == draws(replace(o, top_n_sigma=0.0), kept, 200).tolist()


@pytest.mark.parametrize("top_k", [0, 12])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3])
def test_xtc(top_k: int, threshold: float) -> None:
    logits = random_logits(60)
    logits[7] = logits[8]
    order = np.lexsort((np.arange(60), -logits))[: top_k or 60]
    above = int((softmax(logits[order].astype(np.float64)) >= threshold).sum())
    left = order[max(above - 1, 0) :]
    o = replace(OFF, top_k=top_k, xtc_threshold=threshold, temperature=FLAT, seed=1)
    assert set(draws(replace(o, xtc_probability=1.0), logits, 2000)) == set(left)
    numbers, seen = uniform(1), draws(replace(o, xtc_probability=0.4), logits, 500)
    for token in seen:
        excludes = next(numbers) < 0.4
        next(numbers)
        assert token in (left if excludes else order)
    assert set(draws(replace(o, xtc_probability=1.0, xtc_threshold=0.6), logits, 2000)) == set(order)


@pytest.mark.parametrize("top_k", [0, 9])
@pytest.mark.parametrize(("spread", "exponent"), [(0.5, 1.0), (2.0, 1.0), (0.7, 2.5)])
def test_dynamic_temperature(top_k: int, spread: float, exponent: float) -> None:
    for scale in (0.1, 2.0, 8.0):
        logits = random_logits(50, scale)
        logits[5] = -np.inf
        kept = np.sort(logits[np.isfinite(logits)].astype(np.float64))[::-1][: top_k or 50]
        p = softmax(kept)
        share = -(p * np.log(p)).sum() / math.log(p.size)
        low, high = max(0.8 - spread, 0.0), 0.8 + spread
        temperature = low + (high - low) * share**exponent
        o = replace(OFF, top_k=top_k, temperature=0.8, seed=5)
        got = draws(replace(o, dynatemp_range=spread, dynatemp_exponent=exponent), logits, 300)
        same = got == draws(replace(o, temperature=temperature), logits, 300)
        assert same.mean() > 0.99  # a draw at the border of two tokens may go either way


@pytest.mark.parametrize(("tau", "eta", "temperature"), [(2.0, 0.1, 1.0), (5.0, 0.3, 0.8), (3.0, 0.0, 2.0)])
def test_mirostat_1(tau: float, eta: float, temperature: float) -> None:
    rng = np.random.default_rng(1)
    o = replace(OFF, mirostat_mode=1, mirostat_tau=tau, mirostat_eta=eta, temperature=temperature, seed=13)
    sampler, numbers, mu, n_off = Sampler(o, 400), uniform(13), 2 * tau, 0
    for _ in range(200):
        logits = rng.normal(0, 2, 400).astype(np.float32)
        order = np.lexsort((np.arange(400), -logits))
        p = softmax(logits[order].astype(np.float64) / temperature)
        i = np.arange(99)
        t, b = np.log((i + 2) / (i + 1)), np.log(p[i] / p[i + 1])
        s = (t * b).sum() / (t * t).sum()
        e = s - 1
        k = max(min(int(((e * 2**mu) / (1 - 400.0**-e)) ** (1 / s)), 400), 1)
        token, u = sampler.sample(logits), next(numbers)
        place = int(np.flatnonzero(order == token)[0])
        q = p[:k] / p[:k].sum()
        above = np.cumsum(q)
        inside = place < k and above[place] - q[place] - 1e-4 <= u <= above[place] + 1e-4
        n_off += not inside  # where k is almost the next number
        mu -= eta * (-math.log2(q[min(place, k - 1)]) - tau)
    assert n_off <= 2


def dry_penalty(h: list[int], o: Any, breakers: set[int], n_vocab: int) -> Any:
    """By comparing the end with every place before it, backwards."""
    penalty = np.zeros(n_vocab)
    if o.dry_penalty_last_n >= 0:
        h = h[len(h) - min(o.dry_penalty_last_n, len(h)) :]
    n = len(h)
    limit = next((i for i in range(n) if h[n - 1 - i] in breakers), n)
    for j in range(1, n):
        longest = 0
        while longest < min(limit, j) and h[j - 1 - longest] == h[n - 1 - longest]:
            longest += 1
        if longest >= o.dry_allowed_length and h[j] not in breakers:
            found = o.dry_multiplier * o.dry_base ** (longest - o.dry_allowed_length)
            penalty[h[j]] = max(penalty[h[j]], found)
    return penalty


@pytest.mark.parametrize("last_n", [-1, 0, 1, 7, 40])
@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.5, "penalty_last_n": 5}])
def test_dry(last_n: int, allowed: int, more: dict[str, Any]) -> None:
    rng = np.random.default_rng(last_n + allowed)
    o = replace(OFF, dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    o = replace(o, temperature=1.0, seed=2, **more)
    sampler = Sampler(o, 6, breakers=[5])
    plain = Sampler(replace(o, dry_multiplier=0.0), 6)
    history: list[int] = []
    n_different = 0
    for step in range(300):
        logits = rng.normal(0, 1, 6).astype(np.float32)
        expected = (logits - dry_penalty(history, o, {5}, 6)).astype(np.float32)
        n_different += bool((expected != logits).any())
        assert sampler.sample(logits) == plain.sample(expected), step
        token = int(rng.choice(6, p=[0.3, 0.3, 0.2, 0.1, 0.07, 0.03]))
        history.append(token)
        sampler.accept(token)
        plain.accept(token)
    assert bool(n_different) == (last_n == -1 or last_n > allowed)
    sampler.reset(2)
    assert sampler.sample(random_logits(6)) == Sampler(o, 6).sample(random_logits(6))
