"""Tokens of prompts and of sequences that generate, in one feed: on a device they are one program where that
loads nothing, with the answers that they have apart."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer._engine import _native
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session, Sparsity, TokenKind
from powerinfer.models.plan import Settings, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests import models
from tests.core import capi
from tests.native.hybrid import Arrays, beyond_rounding, write

N_SEQ = 20
PROMPT, GENERATED = TokenKind.PROMPT, TokenKind.GENERATED


def opened(
    model: Model,
    share: float = 1.0,
    sparsity: Sparsity = "dense",
    device: str = "host",
    n_seq: int = N_SEQ,
    **more: Any,
) -> Session:
    """With a share of what a device could hold on one."""
    overhead = 0 if device == "host" else 1 << 30
    sizes: dict[str, Any] = {"n_ctx": 128, "n_pool": 128 * n_seq, "n_seq": n_seq, "n_batch": max(n_seq, 256)}
    asked = Settings(**sizes, sparsity=sparsity, overhead_bytes=overhead, group=1)
    whole = make_plan(model, vram_budget=2, settings=asked, rates=HOST_RATES)
    n_bytes = whole.min_bytes + share * (whole.full_bytes - whole.min_bytes)
    plan = make_plan(model, vram_budget=n_bytes / 2**30, settings=asked, rates=HOST_RATES)
    sizes |= {"sparsity": sparsity, "device": device, "n_threads": 2}
    return Session(model, plan=plan.native(model), **sizes, **more)


def tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(3, 290, n)]


def feed(s: Session, ids: list[int], seqs: list[int], kinds: list[TokenKind]) -> Arrays:
    s.feed(ids, seq=seqs, want_logits=kinds)
    return [s.logits(i).copy() for i in range(s.n_logits)]


def both_ways(
    s: Session, prompts: dict[int, int], ends: list[int], n_next: int
) -> tuple[Arrays, Arrays, int]:
    """Sequences read prompts of so many tokens, of which those of `ends` end here, and 0..n_next-1 generate:
    in one feed, then each in one of its own from the same states. And of how many tokens the feed's last
    program was."""
    rng = np.random.default_rng(7)
    history = {q: tokens(rng, 5 + 3 * q) for q in range(n_next)} | {q: tokens(rng, 20) for q in prompts}
    parts = {q: tokens(rng, n) for q, n in prompts.items()}
    following = {q: tokens(rng, 1)[0] for q in [*range(n_next), *ends]}

    def begin(n_less: int = 0) -> None:
        for q, ids in history.items():
            s.drop(q)
            s.feed(ids[n_less:], seq=q, want_logits=False)

    fed = [(t, q, PROMPT) for q, part in parts.items() for t in part]
    fed += [(t, q, GENERATED) for q, t in following.items()]
    for n_less in (2, 3, 0):  # the second time it is recorded, the third that is run, at other positions
        begin(n_less)
        got = feed(s, [t for t, _, _ in fed], [q for _, q, _ in fed], [kind for _, _, kind in fed])
    n = s.last_step[0].n_tokens
    begin()
    for q, ids in parts.items():
        feed(s, ids, [q] * len(ids), [PROMPT] * len(ids))
    return got, [feed(s, [t], [q], [GENERATED])[0] for q, t in following.items()], n


CASES: list[tuple[dict[int, int], list[int], int]] = [
    ({10: 30}, [], 5),
    ({10: 48}, [10], 8),
    ({10: 17, 11: 16, 12: 20}, [10, 12], 3),
    ({10: 3}, [], 3),
    ({10: 61}, [10], 2),
    ({10: 40}, [], 1),
    (dict.fromkeys(range(9, 18), 4), list(range(9, 18)), 7),
]
LONG: list[tuple[dict[int, int], list[int], int]] = [
    ({10: 100}, [10], 9),
    ({10: 53, 11: 5, 12: 3}, [11, 12], 9),
    (dict.fromkeys(range(10, 20), 5), list(range(10, 20)), 10),
    ({10: 100, 11: 53, 12: 20}, [11], 9),
]


@pytest.mark.parametrize(("prompts", "ends", "n_next"), CASES)
@pytest.mark.parametrize("name", ["llama-relu-gqa", "gemma2", "qwen3moe", "deepseek2-v3", "qwen35"])
def test_as_apart(
    name: str,
    prompts: dict[int, int],
    ends: list[int],
    n_next: int,
    tmp_path: Path,
) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as model, opened(model) as s:
        got, want, n = both_ways(s, prompts, ends, n_next)
        assert beyond_rounding(want, got, model.info.n_layer) < 1
        is_one = not (model.info.n_recurrent and ends)  # a checkpoint is made where a prompt ends
        assert n == (sum(prompts.values()) + len(ends) + n_next if is_one else n_next + len(ends))


@pytest.mark.parametrize(("prompts", "ends", "n_next"), LONG)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0])
def test_more_than_64_as_apart(
    kind: Kind, prompts: dict[int, int], ends: list[int], n_next: int, tmp_path: Path
) -> None:
    """One program where products of so many tokens are faster together."""
    with Model(write(tmp_path, models.SPECS["llama-relu-gqa"], "dense", kind)) as model, opened(model) as s:
        assert s.info.n_mixed == {Kind.F32: 64, Kind.F16: 256, Kind.Q4_0: 240}[kind]
        got, want, n = both_ways(s, prompts, ends, n_next)
        assert beyond_rounding(want, got, model.info.n_layer, int8=kind == Kind.Q4_0) < 1
        n_front = 0 if kind == Kind.F32 else sum(prompts.values())
        assert n == n_front + len(ends) + n_next


@pytest.mark.parametrize(
    ("name", "kind", "n_seq", "n_last"),
    [
        ("llama-relu-gqa", Kind.Q4_0, 240, 240),
        ("llama-relu-gqa", Kind.Q4_0, 241, 113),
        ("llama-relu-gqa", Kind.Q4_0, 520, 168),
        ("llama-relu-gqa", Kind.F16, 256, 256),
        ("llama-relu-gqa", Kind.F16, 321, 153),
        ("llama-relu-gqa", Kind.F32, 257, 257),
        ("by neuron", Kind.F16, 256, 256),
        ("by neuron", Kind.Q4_0, 240, 240),
        ("by neuron", Kind.Q4_0, 259, 123),
        ("qwen3moe", Kind.Q4_0, 192, 192),
        ("qwen3moe", Kind.Q4_0, 225, 33),
        ("qwen3moe", Kind.F16, 193, 1),
        ("qwen3moe", Kind.F32, 65, 1),
        ("llama4", Kind.Q4_0, 65, 1),
        ("deepseek2-v3", Kind.Q4_0, 65, 1),
    ],
)
def test_more_sequences_than_a_program_takes(
    name: str, kind: Kind, n_seq: int, n_last: int, tmp_path: Path
) -> None:
    """Next tokens of more than 240 sequences, of F16 256, are several programs of about as many, where
    products of so many have kernels of their own; of more than 192 of mixtures all but the last of as
    many, or of 64 where products or experts want no more."""
    rng = np.random.default_rng(3)
    history, nexts = [tokens(rng, 2 + q % 5) for q in range(n_seq)], tokens(rng, n_seq)
    if name == "by neuron":
        spec = models.SPECS["llama-relu"]
        file = models.write_sparse(tmp_path / "m.gguf", spec, models.draw_predictor(spec), kind=kind)
    else:
        file = write(tmp_path, models.SPECS[name], "dense", kind)
    with Model(file) as model, opened(model, n_seq=n_seq) as s:

        def begin() -> None:
            for q, ids in enumerate(history):
                s.drop(q)
                s.feed(ids, seq=q, want_logits=False)

        begin()
        got = feed(s, nexts, list(range(n_seq)), [GENERATED] * n_seq)
        assert s.last_step[0].n_tokens == n_last
        begin()
        want = [feed(s, [t], [q], [GENERATED])[0] for q, t in enumerate(nexts)]
        assert beyond_rounding(want, got, model.info.n_layer, int8=kind == Kind.Q4_0) < 1


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "falcon-h1"])
def test_others_go_on_from_states_that_were_kept(name: str, tmp_path: Path) -> None:
    """Where a prompt's part ended beside others' next tokens there is a checkpoint, from which another prompt
    goes on when the first has long gone further."""
    rng = np.random.default_rng(5)
    shared, own, other, n_next = tokens(rng, 30), tokens(rng, 25), tokens(rng, 20), 3
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as m, opened(m) as s:
        for q in range(n_next):
            s.feed(tokens(rng, 17), seq=q, want_logits=False)
        nexts = list(range(n_next))
        for part in (shared, own):
            kinds = [PROMPT] * len(part) + [GENERATED] * n_next
            feed(s, part + [7] * n_next, [10] * len(part) + nexts, kinds)
            assert s.last_step[0].n_tokens == len(part) + n_next
        assert s.reachable(len(shared) + 3, seq=10) == len(shared)
        s.copy(11, 10, len(shared))
        kinds = [PROMPT] * len(other) + [GENERATED] * n_next
        feed(s, other + [8] * n_next, [11] * len(other) + nexts, kinds)
        got = [feed(s, [9], [q], [GENERATED])[0] for q in (10, 11)]
        want = []
        for ids in (shared + own, shared + other):
            s.drop(12)
            s.feed(ids, seq=12, want_logits=False)
            want += feed(s, [9], [12], [GENERATED])
        assert beyond_rounding(want, got, m.info.n_layer) < 1


def test_programs_that_are_kept() -> None:
    """By the C program program_keys_check."""
    done = subprocess.run(
        capi.program("program_keys_check"), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def last_program(s: Session) -> int:
    """Of a feed of 20 tokens of a prompt and the next ones of three sequences, those of the last program."""
    feed(s, [5, 6, 7], [0, 1, 2], [GENERATED] * 3)
    feed(s, [9] * 20 + [5, 6, 7], [3] * 20 + [0, 1, 2], [PROMPT] * 20 + [GENERATED] * 3)
    return s.last_step[0].n_tokens


def test_where_something_is_loaded_they_are_apart(tmp_path: Path) -> None:
    """And where prompts have other neurons than what is generated, or the tokens are too many for products of
    weights as they are."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu"], kind=Kind.F32)
    with Model(path) as model:
        with opened(model) as s:
            assert last_program(s) == 23 and s.info.n_mixed == 64
            feed(s, [9] * 62 + [5, 6, 7], [3] * 62 + [0, 1, 2], [PROMPT] * 62 + [GENERATED] * 3)
            assert s.last_step[0].n_tokens == 3
            feed(s, [9] * 10 + [5, 6, 7, 8], [3] * 10 + [0, 1, 2, 2], [PROMPT] * 10 + [GENERATED] * 4)
            assert s.last_step[0].n_tokens == 4
        with opened(model, 0.5) as s:
            assert last_program(s) == 3 and s.info.n_mixed == 0
        with Session(model, n_ctx=128, n_seq=4) as s:
            assert s.info.n_mixed == 0
    spec = models.SPECS["bamboo"]
    path = models.write_sparse(tmp_path / "p.gguf", spec, models.draw_predictor(spec))
    with Model(path) as model:
        for mask_prompts in (False, True):
            with opened(model, sparsity="predicted", mask_prompts=mask_prompts) as s:
                assert last_program(s) == (23 if mask_prompts else 3)
                assert s.info.n_mixed == (256 if mask_prompts else 0)


@pytest.mark.parametrize("n", [60, 220, 280])
def test_rows_of_several_programs_stay_where_they_are(n: int, tmp_path: Path) -> None:
    """Those of all sequences, though 128 MiB have 223: nobody copies them."""
    spec = replace(models.SPECS["llama-relu-gqa"], n_vocab=150000, n_layer=1)
    path = models.write_dense(tmp_path / "m.gguf", spec, kind=Kind.Q8_0)
    with Model(path) as model, opened(model, n_seq=280) as s:
        rng = np.random.default_rng(1)

        def address() -> int:
            return int(_native.ffi.cast("uintptr_t", _native.lib.pi_session_logits(s.handle, 0)))

        s.feed(tokens(rng, 4), seq=[*range(4)], want_logits=True)
        where = address()
        ids = tokens(rng, n)
        s.feed(ids, seq=[*range(n)], want_logits=True)
        assert s.n_logits == n and (s.last_step[0].n_tokens < n) == (n > s.info.n_mixed)
        assert address() == where
        last = s.logits(n - 1).copy()
        s.drop(n - 1)
        s.feed([ids[-1]], seq=n - 1)
        assert np.argmax(last) == np.argmax(s.logits(0))


@pytest.mark.parametrize("top_k", [1, 40, 0])
def test_choices_of_several_programs(top_k: int, tmp_path: Path) -> None:
    """By the largest logits of each, where these do, and by rows: they are the same, and rows are there."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"], kind=Kind.Q8_0)
    with Model(path) as model, opened(model, n_seq=280) as s:
        rng, n_vocab = np.random.default_rng(1), model.info.n_vocab
        for n in (280, s.info.n_mixed + 1, 270, 280):
            own, other = (
                [Sampler(Sampling(top_k=top_k, seed=i), n_vocab) for i in range(n)] for _ in range(2)
            )
            ids, rows = tokens(rng, n), [*range(n)]
            chosen = s.feed(ids, seq=rows, want_logits=[GENERATED] * n, rows=rows, samplers=own)
            assert s.last_step[0].n_tokens < n
            assert chosen == [sampler.sample(s.logits(i)) for i, sampler in enumerate(other)]
            assert len({*chosen}) > 10
