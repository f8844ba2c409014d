"""Mixtures by a team: te_op_experts and te_op_experts_gemm, against products of one token and one expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import EPS, TABLES, Floats, ffi, fp, lib
from tests.cpu.team import Team

RELU, DRELU, SILU, GELU, GELU_TANH, CLAMPED, RELU2 = range(7)
BY_ROWS, BY_GEMM = 1, 2
BEST = list(TABLES)[-1]
SLICE = 288  # TE_SLICE_TOKENS


@dataclass(frozen=True)
class Mixture:
    """Experts that all members have at hand; `routes` says which a token goes through, and in which order."""

    routes: tuple[tuple[int, ...], ...]
    types: tuple[str, str, str] = ("F32", "F32", "F32")  # gate, up, down
    n_expert: int = 6
    n_ff: int = 96
    cols: int = 160
    act: int = SILU
    threshold: float = 0.0
    by_neuron: bool = False
    biases: bool = False
    add: bool = False
    keep: list[Any] = field(default_factory=list, compare=False)

    def matrix(self, which: int, e: int) -> tuple[Any, Any]:
        """Matrix 0 gate, 1 up, 2 down of an expert: its te_mat, and its values."""
        down = which == 2
        rows, cols = (self.cols, self.n_ff) if down and not self.by_neuron else (self.n_ff, self.cols)
        data, values = cpu.random_rows(self.types[which], rows, cols, 10 * e + which)
        self.keep.append(cpu.Guarded(data))
        return cpu.matrix(self.types[which], self.keep[-1].pointer, rows, cols)[0], values

    def bias(self, which: int, e: int) -> Floats | None:
        if not self.biases:
            return None
        rng = np.random.default_rng(1000 + 10 * e + which)
        return rng.standard_normal(self.cols if which == 2 else self.n_ff).astype(np.float32)

    def inputs(self) -> tuple[Floats, Floats, list[Floats]]:
        """x, y before, and the weights of each token's routes; a token's do not depend on the others."""
        n = len(self.routes)
        x, y = np.empty((n, self.cols), np.float32), np.empty((n, self.cols), np.float32)
        weights = []
        for t, own in enumerate(self.routes):
            rng = np.random.default_rng([77, *own])
            x[t], y[t] = rng.standard_normal((2, self.cols))
            weights.append(rng.uniform(0.1, 1, len(own)).astype(np.float32))
        return x, y, weights


def pointer(values: Floats | None) -> Any:
    return ffi.NULL if values is None else fp(values)


def run(
    team: Team, m: Mixture, way: int = BY_ROWS, *, skip: bool = False, all_members: bool = True
) -> tuple[Floats, dict[str, int]]:
    """y of all tokens, and the counts of all members."""
    x, y, weights = m.inputs()
    pairs = [(e, t, r) for t, own in enumerate(m.routes) for r, e in enumerate(own)]
    order = sorted(range(len(pairs)), key=lambda i: pairs[i][:2])
    place = np.empty(len(pairs), np.int32)
    place[order] = np.arange(len(pairs))
    token = np.array([pairs[i][1] for i in order], np.int32)
    weight = np.array([weights[pairs[i][1]][pairs[i][2]] for i in order], np.float32)
    chosen = sorted({e for e, _, _ in pairs})
    experts = ffi.new("te_expert[]", max(len(chosen), 1))
    keep = []
    for one, e in zip(experts, chosen, strict=False):
        for which, name in enumerate(("gate", "up", "down_t" if m.by_neuron else "down")):
            setattr(one, name, m.matrix(which, e)[0])
        for which, name in enumerate(("gate_b", "up_b", "down_b")):
            keep.append(m.bias(which, e))
            setattr(one, name, pointer(keep[-1]))
        places = [p for p, i in enumerate(order) if pairs[i][0] == e]
        one.first, one.n = places[0], len(places)
    n = max(len(pairs), 1)
    hidden, gate = (np.full((n, m.n_ff), np.nan, np.float32) for _ in range(2))
    out = np.full((n, m.cols), np.nan, np.float32)
    c = ffi.new("te_mixture *")
    c.expert, c.n_experts, c.act, c.threshold, c.skip = experts, len(chosen), m.act, m.threshold, skip
    c.n_tok, c.n_routes, c.cols = len(m.routes), len(pairs), m.cols
    c.place, c.token = (ffi.cast("int32_t *", a.ctypes.data) for a in (place, token))
    c.weight, c.x, c.ldx, c.y, c.ldy, c.add = fp(weight), fp(x), m.cols, fp(y), m.cols, m.add
    c.gate, c.hidden, c.out = fp(gate), fp(hidden), fp(out)
    counts = ffi.new("te_ffn_counts[]", team.n_threads)
    first = [m.matrix(which, 0)[0] for which in range(2)]

    def body(t: Any, ws: Any) -> None:
        if way == BY_ROWS:
            mats = [ffi.new("te_mat *", mat) for mat in first]
            lib.te_op_experts_pack(t, ws, mats[0], mats[1], fp(x), m.cols, len(m.routes))
            lib.te_barrier(t)
            lib.te_op_experts(t, ws, c, counts + t.ith)
        else:
            lib.te_op_experts_gemm(t, ws, c, counts + t.ith)

    (team.run if all_members else team.run_without_last)(body)
    m.keep.clear()
    fields = ("listed", "computed", "fired", "rows", "bytes")
    return y, {f: sum(getattr(counts[i], f) for i in range(team.n_threads)) for f in fields}


def one_by_one(team: Team, table: Any, m: Mixture, way: int) -> Floats:
    """The same from te_op_linear for each route by itself, in floats and in the order of the routes."""
    x, y, weights = m.inputs()

    def product(which: int, e: int, v: Floats) -> Floats:
        mat, _ = m.matrix(which, e)
        result = np.empty(mat.n_rows, np.float32)
        one = ffi.new("te_linear *")
        bias = m.bias(which, e)
        one.w, one.y, one.ldy, one.way, one.bias = mat, fp(result), len(result), way, pointer(bias)
        team.run(lambda t, ws: lib.te_op_linear(t, ws, one, 1, fp(v), len(v), 1))
        m.keep.clear()
        return result

    for t, own in enumerate(m.routes):
        total = np.zeros(m.cols, np.float32)
        for e, weight in zip(own, weights[t], strict=True):
            g, u = product(0, e, x[t]), product(1, e, x[t])
            table.glu(m.act, m.threshold, fp(g), fp(u), m.n_ff, fp(u))
            total += weight * product(2, e, u)
        y[t] = y[t] + total if m.add else total
    return y


def team_of(table: Any, n_threads: int, m: Mixture) -> Team:
    most = max(m.cols, m.n_ff)
    n_tok = max(len(m.routes), 1)
    return Team(table, n_threads, max_tok=n_tok, max_cols=most, max_rows=m.n_ff, mixture=True)


FEW = ((0, 3), (3, 1), (), (5, 3), (3, 0), (4,))
FORMATS = [
    ("F16",) * 3,
    ("Q4_0",) * 3,
    ("Q8_0", "Q8_0", "F32"),
    ("Q4_0", "Q8_0", "Q5_1"),
    ("Q4_K", "Q4_K", "Q6_K"),
]


@pytest.mark.parametrize("way", [BY_ROWS, BY_GEMM], ids=["rows", "gemm"])
@pytest.mark.parametrize("types", FORMATS, ids=["-".join(types) for types in FORMATS])
@pytest.mark.parametrize("name", TABLES)
def test_bits_are_those_of_each_route_by_itself(name: str, types: tuple[str, str, str], way: int) -> None:
    wide = {"cols": 512, "n_ff": 256} if types[0] == "Q4_K" else {}
    for biases, n_threads in ((False, 1), (True, 2), (False, 3)):
        m = Mixture(FEW, types, biases=biases, add=biases, **wide)
        with team_of(TABLES[name], n_threads, m) as team:
            y, counts = run(team, m, way)
            assert np.array_equal(y, one_by_one(team, TABLES[name], m, way))
        n_routes = sum(map(len, FEW))
        assert counts["listed"] == counts["computed"] == n_routes * m.n_ff
        each = [cpu.row_bytes(kind, n) for kind, n in zip(types, (m.cols, m.cols, m.n_ff), strict=True)]
        assert counts["bytes"] == 5 * (
            (each[0] + each[1]) * m.n_ff + each[2] * m.cols
        )  # expert 2 is not read
        assert counts["rows"] == 5 * 3 * m.n_ff


@pytest.mark.parametrize("act", [RELU, DRELU])
@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_silent_neurons_are_left_out_without_a_change(kind: str, by_neuron: bool, act: int) -> None:
    m = Mixture(FEW, (kind,) * 3, act=act, by_neuron=by_neuron, biases=True)
    with team_of(TABLES[BEST], 2, m) as team:
        exact, less = run(team, m, skip=True)
        dense, all_of_it = run(team, m)
        _, prompt = run(team, m, BY_GEMM, skip=True)
    assert np.array_equal(exact, dense)
    assert 0.3 < less["computed"] / less["listed"] < 0.7
    assert 0.95 < prompt["computed"] / less["computed"] < 1.05 and prompt["bytes"] == all_of_it["bytes"]
    assert less["fired"] == all_of_it["fired"] and all_of_it["computed"] == all_of_it["listed"]
    assert less["bytes"] < (0.8 if by_neuron else 0.95) * all_of_it["bytes"]


def test_down_by_neuron_is_the_same_sum() -> None:
    """Against doubles: F32 rounds only sums and products."""
    m = Mixture(FEW, act=RELU, threshold=0.25, by_neuron=True, biases=True, add=True)
    with team_of(TABLES[BEST], 3, m) as team:
        y, _ = run(team, m, skip=True)
    x, before, weights = m.inputs()
    for t, own in enumerate(m.routes):
        expected, error = before[t].astype(np.float64), np.abs(before[t]) * EPS
        for e, weight in zip(own, weights[t], strict=True):
            gate, up, down = (m.matrix(which, e)[1] for which in range(3))
            biases = [np.asarray(m.bias(which, e), np.float64) for which in range(3)]
            g, u = gate @ x[t] + biases[0], up @ x[t] + biases[1]
            assert np.all(np.abs(g - m.threshold) > 1e-4)  # no rounding opens or closes one
            h = np.where(g > m.threshold, g, 0) * u
            size = 8 * EPS * np.sqrt(m.cols) * np.abs(x[t])
            h_error = np.abs(u) * (np.abs(gate) @ size) + np.abs(g) * (np.abs(up) @ size)
            expected += weight * (h @ down + biases[2])
            error = error + weight * (
                h_error @ np.abs(down) + 8 * EPS * np.sqrt(m.n_ff) * (np.abs(h) @ np.abs(down))
            )
        assert np.all(np.abs(y[t] - expected) <= error + 8 * EPS * np.abs(expected))


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("act", [RELU, SILU])
@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_a_token_s_bits_do_not_depend_on_others(kind: str, act: int, by_neuron: bool) -> None:
    """32 tokens, of which many share experts, also by fewer members, and some of them alone."""
    rng = np.random.default_rng(4)
    routes = tuple(tuple(rng.permutation(6)[:3].tolist()) for _ in range(32))
    m = Mixture(routes, (kind,) * 3, act=act, by_neuron=by_neuron)
    with team_of(TABLES[BEST], 3, m) as team:
        y, _ = run(team, m, skip=act == RELU)
        fewer, _ = run(team, m, skip=act == RELU, all_members=False)
        assert np.array_equal(fewer, y)
        for t in range(0, 32, 5):
            alone, _ = run(
                team, Mixture((routes[t],), (kind,) * 3, act=act, by_neuron=by_neuron), skip=act == RELU
            )
            assert np.array_equal(alone[0], y[t])


@pytest.mark.parametrize("act", [RELU, SILU])
@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_one_token_of_experts_in_many_parts(kind: str, act: int) -> None:
    """Down by neuron, a part to each expert: one token has the bits of two, whose rows are grouped."""
    route = (0, 5, 3)
    for n_threads in (1, 2, 5):
        shape: dict[str, Any] = {"n_ff": 301, "cols": 1536, "act": act, "by_neuron": True, "biases": True}
        one, two = Mixture((route,), (kind,) * 3, **shape), Mixture((route,) * 2, (kind,) * 3, **shape)
        with team_of(TABLES[BEST], n_threads, two) as team:
            alone, counts = run(team, one, skip=act == RELU)
            pair, of_two = run(team, two, skip=act == RELU)
            fewer, _ = run(team, one, skip=act == RELU, all_members=n_threads == 1)
        assert np.array_equal(alone[0], pair[0]) and np.array_equal(pair[0], pair[1])
        assert np.array_equal(fewer, alone)
        assert counts["rows"] == of_two["rows"] and 2 * counts["fired"] == of_two["fired"]


def spans(team: Team, call: Callable[[Any], None]) -> list[list[tuple[int, int]]]:
    """What each member would fetch: addresses and bytes."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(team.n_threads)]

    def body(t: Any, _: Any) -> None:
        call(t)
        some = t.ahead.span[0 : t.ahead.n]
        found[t.ith] = [(int(ffi.cast("uintptr_t", s.first)), s.n_bytes) for s in some]

    team.run(body)
    return found


def test_what_is_fetched_ahead_is_what_a_member_reads_first() -> None:
    m = Mixture(((0, 3),), ("F16",) * 3, by_neuron=True, n_ff=100)
    mats = [m.matrix(0, e)[0] for e in (0, 3)]
    starts = [int(ffi.cast("uintptr_t", mat.w)) for mat in mats]
    stride = mats[0].stride
    gates = ffi.new("te_mat[]", mats)
    lists = ffi.new("te_mat *[]", [gates, gates + 1])
    with team_of(TABLES[BEST], 3, m) as team:
        experts = spans(team, lambda t: lib.te_op_experts_ahead(t, gates, 2, 1 << 20))
        little = spans(team, lambda t: lib.te_op_experts_ahead(t, gates, 2, 35 * stride))
        linear = spans(team, lambda t: lib.te_op_linear_ahead(t, lists, 2, 1 << 20))
        some = spans(team, lambda t: lib.te_op_linear_ahead(t, lists, 2, 100))
    # Of each expert a third of its neurons.
    bounds = [0, 33, 66, 100]
    for i, (own, less) in enumerate(zip(experts, little, strict=True)):
        n = bounds[i + 1] - bounds[i]
        assert own == [(start + bounds[i] * stride, n * stride) for start in starts]
        assert less == [own[0], (own[1][0], (35 - n) * stride)]
    # Of the sequence of both matrices' rows a third, in units of four: the second has some of both.
    assert linear == [
        [(starts[0], 64 * stride)],
        [(starts[0] + 64 * stride, 36 * stride), (starts[1], 32 * stride)],
        [(starts[1] + 32 * stride, 68 * stride)],
    ]
    assert some == [[(own[0][0], 100)] for own in linear]
    m.keep.clear()


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("name", TABLES)
def test_prompts_are_cut_anyhow(name: str, kind: str, by_neuron: bool) -> None:
    """Slices of tokens by one member, or products shared by all: the number of members decides."""
    rng = np.random.default_rng(5)
    routes = tuple(tuple({0, int(rng.integers(1, 6))}) for _ in range(SLICE + 40))
    outputs = []
    for n_threads in (1, 2, 4):
        m = Mixture(routes, (kind,) * 3, biases=True, by_neuron=by_neuron)
        with team_of(TABLES[name], n_threads, m) as team:
            outputs.append(run(team, m, BY_GEMM)[0])
            if n_threads == 1:
                some = Mixture(routes[:3], (kind,) * 3, biases=True, by_neuron=by_neuron)
                assert np.array_equal(run(team, some, BY_GEMM)[0], outputs[0][:3])
            else:
                assert np.array_equal(run(team, m, BY_GEMM, all_members=False)[0], outputs[0])
            if n_threads == 1:
                rows, _ = run(team, some)
                error = np.abs(rows - outputs[0][:3]).max() / np.abs(rows).max()
                # Inputs rounded to bf16, or hidden values to 8 bits, in one of the two ways.
                assert error < (1e-5 if kind == "F32" and "bf16" not in name and name != "amx" else 2e-2)
    assert all(np.array_equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize("act", [RELU, DRELU, SILU, GELU, GELU_TANH, CLAMPED, RELU2])
@pytest.mark.parametrize("name", TABLES)
def test_prompts_with_every_activation(name: str, act: int) -> None:
    """Hidden values may come as down's products read them: the bits are those of one after the other."""
    m = Mixture(FEW, ("F16",) * 3, n_ff=80, act=act, threshold=0.3 if act == RELU else 0.0, biases=True)
    with team_of(TABLES[name], 1, m) as team:
        y, counts = run(team, m, BY_GEMM, skip=True)
        assert np.array_equal(y, one_by_one(team, TABLES[name], m, BY_GEMM))
    with team_of(TABLES[name], 3, m) as team:  # all members share each product
        shared, same = run(team, m, BY_GEMM, skip=True)
    assert np.array_equal(shared, y)
    assert counts == same
    n = counts["listed"]
    if act in (RELU, DRELU, RELU2):
        assert 0 < counts["fired"] <= counts["computed"] < n
    else:
        assert 0 < counts["fired"] <= counts["computed"] == n


@pytest.mark.parametrize("way", [BY_ROWS, BY_GEMM])
def test_no_routes_at_all(way: int) -> None:
    for add in (False, True):
        m = Mixture(((), ()), add=add)
        with team_of(TABLES[BEST], 2, m) as team:
            y, counts = run(team, m, way)
        assert np.array_equal(y, m.inputs()[1] if add else np.zeros_like(y))
        assert not any(counts.values())
