"""Parts of prompts whose layers a device computes a few at a time, in front of rounds of others: all have the
answers that they have without that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, ContextError, DeviceError, UnsupportedError
from powerinfer._engine import _native
from powerinfer._engine.arrays import Ids
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session, Sparsity
from tests import models
from tests.native.faults import Faults, with_faults, with_the_library
from tests.native.hybrid import Arrays, write
from tests.native.test_hybrid_mixed import opened, tokens

N, READER = 3, 10  # generations; who reads


class Rounds:
    """Of sequences 0..N-1."""

    def __init__(self, s: Session, layers: int, most: int = 8, ends: tuple[int, ...] = ()) -> None:
        ffi = _native.ffi
        self._samplers = [Sampler(Sampling(temperature=0), s.model.info.n_vocab) for _ in range(N)]
        self.chosen: Ids = np.empty((most, N), np.int32)
        self._arrays = [ffi.new("int32_t[]", values) for values in ([3, 4, 5], [*range(N)], [*ends])]
        self._handles = ffi.new("pi_sampler *[]", [sampler.handle for sampler in self._samplers])
        self.native: Any = ffi.new(
            "pi_rounds *",
            {
                "n": N,
                "most": most,
                "token": self._arrays[0],
                "seq": self._arrays[1],
                "end": self._arrays[2],
                "n_end": len(ends),
                "sampler": self._handles,
                "chosen": ffi.from_buffer("int32_t[]", self.chosen),
                "until_ns": 2**62,
                "part_layers": layers,
            },
        )

    def run(self, s: Session) -> Rounds:
        try:
            s.run_rounds(self.native, N)
        finally:
            self.chosen = self.chosen[: self.native.state >> 1]
        return self


class Case:
    """Three that generate, and one that has 20 tokens of a prompt and reads 50 more."""

    def __init__(self, s: Session) -> None:
        rng = np.random.default_rng(1)
        self.s = s
        self.history = {q: tokens(rng, 5 + q) for q in range(N)} | {READER: tokens(rng, 20)}
        self.ids = tokens(rng, 50)

    def begin(self, *, reads: bool = True) -> None:
        for q, ids in self.history.items():
            self.s.drop(q)
            self.s.feed(ids, seq=q, want_logits=False)
        if reads:
            self.s.begin_part(self.ids, seq=[READER] * len(self.ids))

    def ends(self, n_rounds: int) -> Arrays:
        """What follows the prompt and each generation behind so many rounds."""
        assert [self.s.length(q) for q in range(N)] == [5 + q + n_rounds for q in range(N)]
        assert self.s.length(READER) == 70
        found: Arrays = []
        for q in (*range(N), READER):
            self.s.feed([7], seq=q)
            found.append(self.s.logits(0).copy())
        return found

    def wanted(self, n_rounds: int) -> tuple[Ids, Arrays]:
        """The same where the prompt is read at once."""
        self.begin(reads=False)
        self.s.feed(self.ids, seq=READER, want_logits=False)
        chosen = Rounds(self.s, 0, n_rounds).run(self.s).chosen
        return chosen, self.ends(n_rounds)


def same(got: Arrays, want: Arrays) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [
        *((name, "dense") for name in ("llama-relu-gqa", "gemma2", "falcon-40b", "opt", "deepseek2-dense")),
        ("llama-relu-gqa", "exact"),
        ("llama-relu-gqa", "predicted"),
    ],
)
def test_as_at_once(name: str, sparsity: Sparsity, tmp_path: Path) -> None:
    """However many layers each round has."""
    with (
        Model(write(tmp_path, models.SPECS[name], sparsity, Kind.F32)) as model,
        opened(model, sparsity=sparsity) as s,
    ):
        case, n_layer = Case(s), model.info.n_layer
        assert s.info.n_part > 50
        for layers in range(1, n_layer + 2):
            n = -(-n_layer // layers)
            case.begin()
            made = Rounds(s, layers).run(s)
            assert len(made.chosen) == n and made.native.part_left == 0
            got = case.ends(n)
            chosen, want = case.wanted(n)
            assert np.array_equal(made.chosen, chosen) and same(got, want)


def feed_by_c(s: Session) -> None:
    """Python feeds by pi_session_feed_choose. The inputs of few tokens would stand in front of a part's."""
    n = 80
    ids, owners = _native.ffi.new("int32_t[]", [9] * n), _native.ffi.new("int32_t[]", [4] * n)
    batch = _native.ffi.new("pi_batch *", {"n_tokens": n, "token": ids, "seq": owners})
    assert _native.lib.pi_session_feed(s.handle, batch) == 0


NEXT: dict[str, Callable[[Session], object]] = {
    "the end": lambda s: s.end_part(),
    "rounds without layers": lambda s: None,
    "a feed": lambda s: s.feed([9], seq=4),
    "a feed by C": feed_by_c,
    "a copy of who reads": lambda s: s.copy(5, READER),
    "a cut of another": lambda s: s.drop(6),
    "nothing": lambda s: None,
}


@pytest.mark.parametrize("act", NEXT)
@pytest.mark.parametrize("n_rounds", [0, 1])
def test_who_does_something_else_has_it_computed(act: str, n_rounds: int, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        case = Case(s)
        case.begin()
        if n_rounds:
            made = Rounds(s, 1, 1).run(s)
            assert made.native.part_left == model.info.n_layer - 1
        NEXT[act](s)
        if act == "rounds without layers":
            made, n_rounds = Rounds(s, 0, 2).run(s), n_rounds + 2
            assert len(made.chosen) == 2 and made.native.part_left == 0
        if act == "a copy of who reads":
            assert s.length(5) == 70
            s.feed([7], seq=5)
            assert np.array_equal(s.logits(0), case.wanted(1)[1][-1])
            return
        if act == "rounds without layers":  # which begin with the tokens that the first one had
            assert s.length(READER) == 70
            return
        got = case.ends(n_rounds)
        assert same(got[-1:], case.wanted(1)[1][-1:])


def is_under_way(s: Session) -> bool:
    try:
        s.begin_part([3], seq=[11])
    except ArgumentError as error:
        assert "is under way" in str(error)
        return True
    s.end_part()
    s.drop(11)
    return False


@pytest.mark.parametrize(
    ("act", "stays"),
    [
        (lambda s: s.feed([9], seq=4), True),
        (lambda s: s.feed([9] * 64, seq=4), True),
        (lambda s: s.feed([9] * 65, seq=4), False),
        (lambda s: s.feed([9, 9], seq=[4, READER]), False),
        (feed_by_c, False),
        (lambda s: s.drop(1), True),
        (lambda s: s.drop(READER), False),
        (lambda s: s.copy(5, 2), True),
        (lambda s: s.copy(READER, 2), False),
        (lambda s: s.copy(5, READER), False),
        (lambda s: s.save(seq=2), False),
    ],
)
def test_what_may_stand_between_its_layers(
    act: Callable[[Session], object], stays: bool, tmp_path: Path
) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        case = Case(s)
        case.begin()
        Rounds(s, 1, 1).run(s)
        act(s)
        assert is_under_way(s) == stays


def test_rounds_that_cannot_begin_leave_it_as_it_is(tmp_path: Path) -> None:
    """The layers that they asked for are not the next step's."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        case = Case(s)
        case.begin()
        s.feed(tokens(np.random.default_rng(2), 60), seq=0), s.feed([3] * 63, seq=0)
        assert s.length(0) == s.info.n_ctx
        with pytest.raises(ContextError):
            Rounds(s, 1, 1).run(s)
        s.feed([9], seq=4)
        s.cut(5, seq=0)
        made = Rounds(s, 1, 1).run(s)
        assert made.native.part_left == model.info.n_layer - 1


def test_a_copy_of_what_stands_before_it(tmp_path: Path) -> None:
    """Of whole blocks: no block is written that two sequences hold."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        rng = np.random.default_rng(1)
        s.feed(tokens(rng, 70), seq=READER)
        ids = tokens(rng, 40)
        for n in (64, 65):
            s.cut(70, seq=READER)
            s.begin_part(ids, seq=[READER] * len(ids))
            s.copy(5, READER, n)
            assert is_under_way(s) == (n == 64)
            s.end_part()
            s.feed([7], seq=5)
            got = s.logits(0).copy()
            s.copy(6, READER, n)
            s.feed([7], seq=6)
            assert np.array_equal(got, s.logits(0))


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [("llama-relu-gqa", "dense"), ("gemma2", "dense"), ("llama-relu-gqa", "predicted")],
)
def test_a_step_between_its_layers(name: str, sparsity: Sparsity, tmp_path: Path) -> None:
    """Of others' next tokens and a prompt of one more: all have the answers that they have without a part."""
    with (
        Model(write(tmp_path, models.SPECS[name], sparsity, Kind.F32)) as model,
        opened(model, sparsity=sparsity) as s,
    ):
        case, new = Case(s), tokens(np.random.default_rng(2), 64 - N)

        def step() -> Arrays:
            s.drop(4)
            kinds = [0] * (len(new) - 1) + [1] * (N + 1)
            s.feed([*new, 7, 8, 9], seq=[4] * len(new) + [*range(N)], want_logits=kinds)
            return [s.logits(i).copy() for i in range(N + 1)]

        case.begin(reads=False)
        s.feed(case.ids, seq=READER, want_logits=False)
        want = step()
        want += case.ends(1)
        for n_before in range(model.info.n_layer):
            case.begin()
            if n_before:  # rounds compute tokens, too: the others begin anew
                Rounds(s, n_before, 1).run(s)
                for q in range(N):
                    s.cut(5 + q, seq=q)
            got = step()
            made = Rounds(s, model.info.n_layer).run(s)
            assert len(made.chosen) == 1 and made.native.part_left == 0
            for q in range(N):
                s.cut(6 + q, seq=q)
            assert same(got + case.ends(1), want)


@pytest.mark.parametrize("act", ["the end", "a cut of another"])
def test_logits_that_stay_on_the_device(act: str, tmp_path: Path) -> None:
    """They are made where layers work, and who asks for them behind a part's rest has them."""
    spec = replace(models.SPECS["llama-relu-gqa"], n_vocab=30000)
    with Model(models.write_dense(tmp_path / "m.gguf", spec)) as model, opened(model) as s:

        def row(i: int) -> Any:
            pointer = _native.lib.pi_session_logits(s.handle, i)
            return np.frombuffer(_native.ffi.buffer(pointer, 4 * spec.n_vocab), np.float32).copy()

        case = Case(s)
        case.begin(reads=False)
        Rounds(s, 0, 1).run(s)
        want = [row(i) for i in range(N)]
        case.begin()
        Rounds(s, 1, 1).run(s)
        NEXT[act](s)
        assert same([row(i) for i in range(N)], want)


def test_rounds_end_and_others_go_on_with_it(tmp_path: Path) -> None:
    """Where somebody is over, and at a limit; who asks hears how many layers are left."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        case = Case(s)
        first = case.wanted(1)[0][0]
        case.begin()
        made = Rounds(s, 1, ends=(int(first[1]),)).run(s)
        assert len(made.chosen) == 1 and made.native.part_left == model.info.n_layer - 1
        made = Rounds(s, 1, 1).run(s)
        assert made.native.part_left == model.info.n_layer - 2
        made = Rounds(s, model.info.n_layer).run(s)
        assert len(made.chosen) == 1 and made.native.part_left == 0
        case.ends(3)


def test_what_cannot_be_a_part(tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s, Session(model, n_ctx=128) as alone:
        case = Case(s)
        case.begin()
        with pytest.raises(ArgumentError, match="another part of 50 tokens is under way"):
            s.begin_part([3], seq=[0])
        s.end_part()
        before = [s.length(q) for q in range(12)]
        with pytest.raises(ArgumentError, match="are the most"):
            s.begin_part([3] * (s.info.n_part + 1), seq=[11] * (s.info.n_part + 1))
        with pytest.raises(ArgumentError, match="out of range"):
            s.begin_part([3, 99999], seq=[11, 11])
        assert [s.length(q) for q in range(12)] == before
        assert alone.info.n_part == 0
        with pytest.raises(UnsupportedError, match="layer by layer"):
            alone.begin_part([3], seq=[0])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama-relu-gqa", {"share": 0.5}),  # the CPU has a part of it
        ("llama-relu-gqa", {"keep_hidden": True}),
        ("llama-relu-gqa", {"count_neurons": True}),
        ("llama-relu-gqa", {"timeline": True}),
        ("qwen3moe", {}),  # its experts' uses are counted
        ("lfm2", {}),
    ],
)
def test_who_has_no_parts(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Steps note what parts would not."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as model, opened(model, **more) as s:
        assert s.info.n_part == 0
        with pytest.raises(UnsupportedError, match="layer by layer"):
            s.begin_part([3], seq=[0])


@with_faults
@pytest.mark.parametrize("fails", ["launch", "die"])
def test_a_part_that_fails_leaves_its_sequence_as_it_was(fails: str, tmp_path: Path, faults: Faults) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Model(path) as model, opened(model) as s:
        case = Case(s)
        case.begin()
        Rounds(s, 1, 1).run(s)
        setattr(faults, fails, 1)
        with pytest.raises(DeviceError):
            Rounds(s, 1, 1).run(s)
        assert s.length(READER) == 20
        case.begin()
        assert len(Rounds(s, 2).run(s).chosen) == 2
        got = case.ends(2)
        assert same(got, case.wanted(2)[1])


test_what_fails = with_the_library(__file__)
