"""Choices by the largest logits, which a device finds, are those by rows. Who asks for a row has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powerinfer import DeviceError
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from tests import models
from tests.native import hybrid, largest
from tests.native.faults import LIBRARY, Faults, with_faults, with_the_library

test_with_the_test_library = with_the_library(__file__)

FEW = {
    "usual": Sampling(temperature=1.0),
    "greedy": Sampling(temperature=0.0, top_k=0),
    "one": Sampling(top_k=1),
    "many": Sampling(temperature=1.5, top_k=128, top_p=1.0, min_p=0.0),
    "typical": Sampling(top_k=20, typical_p=0.7, dynatemp_range=0.5),
    "xtc": Sampling(top_k=30, xtc_probability=0.5, xtc_threshold=0.05),
}
"""What a few of the largest logits decide."""
ALL: dict[str, tuple[Sampling, dict[int, float]]] = {
    "bias": (Sampling(), {7: 30.0}),
    "repeated": (Sampling(temperature=0.0, repeat_penalty=1.5), {}),
    "present": (Sampling(presence_penalty=2.0), {}),
    "dry": (Sampling(dry_multiplier=0.8), {}),
    "mirostat": (Sampling(mirostat_mode=2), {}),
    "mirostat 1": (Sampling(mirostat_mode=1), {}),
    "sigma": (Sampling(top_n_sigma=1.0), {}),
    "whole": (Sampling(top_k=0), {}),
    "too many": (Sampling(top_k=129), {}),
}
"""What asks for whole rows."""


@pytest.mark.parametrize("n_cols", [7, 700, 32000])
@pytest.mark.parametrize("n", [1, 40, 128])
def test_what_the_stand_in_finds(n_cols: int, n: int) -> None:
    largest.check(LIBRARY, "pi_device_host", n_cols, n)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(hybrid.write(tmp_path_factory.mktemp("m"), models.SPECS["llama-relu-gqa"], "dense")) as m:
        yield m


def opened(model: Model, split: str = "all") -> Session:
    plan = hybrid.place(model, split, "dense")
    return Session(model, plan=plan, device="host", **hybrid.options("dense"))


def pair(model: Model, options: Sampling, seed: int, bias: dict[int, float] | None = None) -> list[Sampler]:
    found = [Sampler(options, model.info.n_vocab, logit_bias=bias) for _ in range(2)]
    for sampler in found:
        sampler.reset(seed)
    return found


def step(s: Session, seed: int, own: list[Sampler], n: int | None = None) -> list[int]:
    """Of the first len(own) sequences, or of n."""
    n = n or len(own)
    tokens = np.random.default_rng(seed).integers(0, s.model.info.n_vocab, n)
    generated = [TokenKind.GENERATED] * n
    return s.feed(
        tokens.tolist(), seq=[*range(n)], want_logits=generated, rows=[*range(len(own))], samplers=own
    )


@pytest.mark.parametrize("split", ["all", "some", "mixed"])
def test_choices_are_those_by_rows(model: Model, split: str) -> None:
    with opened(model, split) as s:
        pairs = [pair(model, o, i) for i, o in enumerate(list(FEW.values())[:4])]
        others = [pair(model, o, i) for i, o in enumerate(list(FEW.values())[2:])]
        for k in range(9):
            for two in (pairs, others):
                got = step(s, k, [a for a, _ in two])
                assert got == [b.sample(s.logits(i)) for i, (_, b) in enumerate(two)]


def test_a_vocabulary_that_wants_more_room(tmp_path: Path) -> None:
    """Logits of all sequences have room on the device, though its other buffers are small."""
    spec = replace(models.SPECS["llama-relu-gqa"], n_vocab=3000)
    with Model(hybrid.write(tmp_path, spec, "dense")) as m:
        plan = hybrid.place(m, "all", "dense", 8)
        with Session(m, plan=plan, device="host", **hybrid.options("dense", 8)) as s:
            pairs = [pair(m, o, i) for i, o in enumerate(list(FEW.values())[:4])]
            for k in range(3):
                got = step(s, k, [a for a, _ in pairs])
                assert got == [b.sample(s.logits(i)) for i, (_, b) in enumerate(pairs)]


@pytest.mark.parametrize("name", ALL)
def test_one_that_asks_for_rows(model: Model, name: str) -> None:
    options, bias = ALL[name]
    with opened(model) as s:
        pairs = [pair(model, options, 1, bias), pair(model, FEW["usual"], 2), pair(model, FEW["greedy"], 3)]
        for k in range(12):
            got = step(s, k, [a for a, _ in pairs])
            for i, (_, b) in enumerate(pairs):
                assert got[i] == b.sample(s.logits(i))
                b.accept(got[i])


@with_faults
def test_rows_stay_where_nobody_asks_for_them(model: Model, faults: Faults) -> None:
    def is_there(s: Session) -> bool:
        faults.transfer = 1
        try:
            s.logits(1)
        except DeviceError as error:
            assert "asked for: copy" in str(error)
            return False
        finally:
            faults.transfer = 0
        return True

    def few(n: int = 3) -> list[Sampler]:
        return [Sampler(FEW["usual"], model.info.n_vocab) for _ in range(n)]

    with opened(model) as s:
        step(s, 1, few())
        assert not is_there(s)
        with pytest.raises(DeviceError, match="asked for: copy"):
            faults.transfer = 1
            s.draw(few(1)[0], 2)
        got = [s.logits(i).copy() for i in range(3)]  # the device works on
        assert is_there(s)
        s.cut(0, seq=0), s.cut(0, seq=1), s.cut(0, seq=2)
        step(s, 1, [], n=3)
        assert is_there(s) and np.array_equal(got, [s.logits(i) for i in range(3)])
        step(s, 2, few(2), n=3)  # somebody else may look at the third row
        assert is_there(s)
        for options, bias in ALL.values():
            step(s, 3, [*few(2), Sampler(options, model.info.n_vocab, logit_bias=bias)])
            assert is_there(s)
        step(s, 1, few())
        ids = [5 + i % 40 for i in range(70)]  # more than n_batch: rows of two chunks are put together
        for seq in range(3):
            s.drop(seq)
        s.feed(ids, want_logits=True)
        assert is_there(s)
    with opened(model, "mixed") as s:  # the CPU makes logits
        step(s, 1, few())
        assert is_there(s)
