"""Devices that fail in every way, at every place: each ends in an exception, the session stays what it was,
and the next step works."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, DeviceError, OutOfMemoryError
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session
from powerinfer._llama.loader import Loader
from powerinfer.models.plan import Settings, engine, make_plan
from tests import models
from tests.native import test_hybrid_recurrent as recurrent
from tests.native.faults import (
    Faults,
    every_allocation_fails,
    every_copy_fails,
    with_faults,
    with_the_library,
)
from tests.native.hybrid import (
    DEEP,
    IDS,
    apart,
    beyond_rounding,
    drive,
    options,
    place,
    settings,
    write,
)

test_with_the_test_library = with_the_library(__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(write(tmp_path_factory.mktemp("faults"), DEEP, "sparse")) as m:
        yield m


def feed_patiently(s: Session, ids: list[int]) -> None:
    """A feed of a session that waits so briefly that a busy machine may not answer in time."""
    for _ in range(100):
        with contextlib.suppress(DeviceError):
            s.feed(ids)
            return
    s.feed(ids)


BETWEEN, BEHIND, NOWHERE = [0, 0, -1, 1, 1, 1], [0, 0, 1, 1, -1, -1], [0, 0, 0, 1, 1, 1]  # -1: the CPU


def open_two(
    model: Model,
    sparsity: str = "exact",
    layers: list[int] = BETWEEN,
    split: str = "some",
    helps: bool = False,
    **more: Any,
) -> Session:
    """Two devices, and (but for split "all") cold neurons on both."""
    plan = place(model, split, sparsity, devices=layers, head=1, n_devices=2, helps=helps)
    return Session(model, plan=plan, device="host", **options(sparsity), **more)


@with_faults
def test_every_allocation_can_fail(model: Model, faults: Faults) -> None:
    every_allocation_fails(faults, lambda: open_two(model, "predicted", count_neurons=True))
    with open_two(model) as s:
        s.feed([3])


@with_faults
def test_every_copy_of_an_upload_can_fail(model: Model, faults: Faults) -> None:
    every_copy_fails(faults, lambda: open_two(model))


@with_faults
@pytest.mark.parametrize("n_tok", [1, 2])
def test_the_first_device_helps_where_one_token_is_all(model: Model, faults: Faults, n_tok: int) -> None:
    """The last one posts x (which can fail twice); the first takes it, multiplies, and posts logits."""
    n_operations = []
    for helps in (False, True):
        with open_two(model, "exact", NOWHERE, "all", helps) as s:
            s.feed(IDS[:7])
            faults.die = 10000
            s.feed(IDS[7 : 7 + n_tok], want_logits=True)
            n_operations.append(10000 - faults.die)
            faults.die = 0
    assert n_operations[1] - n_operations[0] == (5 if n_tok == 1 else 0)


@with_faults
@pytest.mark.parametrize("n_tok", [1, 40])
@pytest.mark.parametrize("name", ["die", "hang", "vanish"])
@pytest.mark.parametrize(
    "at", [(BETWEEN, "some"), (BEHIND, "some"), (NOWHERE, "all"), (NOWHERE, "all", True)]
)
def test_every_operation_can_fail(model: Model, faults: Faults, at: Any, name: str, n_tok: int) -> None:
    """A device that reports an error, never answers, or fails without saying so, at any point of its program,
    the last included. One that failed is found out, however long the wait for it may be."""
    with open_two(model, "exact", *at) as s:
        s.feed(IDS[:7])
        before = s.save()
        setattr(faults, name, 10000)
        s.feed(IDS[7 : 7 + n_tok])
        want, n_operations = s.logits().copy(), 10000 - getattr(faults, name)
        assert n_operations > 30
    with open_two(model, "exact", *at, wait_ms={"hang": 300, "vanish": 10**9}.get(name, 0)) as s:
        problem = {"vanish": "the device is lost"}.get(
            name, r"that was asked for|timed out waiting|did not (answer|end a step) within"
        )
        each = 1 if name == "die" else 3  # waiting for one that says nothing takes time
        for n in (1, 20, n_operations) if name == "hang" else range(1, n_operations + 1, each):
            s.load(before)
            setattr(faults, name, n)
            with pytest.raises(DeviceError, match=problem):
                s.feed(IDS[7 : 7 + n_tok])
            assert s.length() == 7
            if n % 4 == 1:  # the next step is as if nothing had been
                feed_patiently(s, IDS[7 : 7 + n_tok])
                assert np.array_equal(s.logits(), want)


@with_faults
def test_one_that_was_lost_in_the_end_is_there_again(model: Model, faults: Faults) -> None:
    """It is not taken for lost once more, however late it begins the next step: each third operation is later
    than who waits looks at the device, and at one of three tries that is a step's first one."""
    plan = place(model, "all", "exact")
    with Session(model, plan=plan, device="host", **options("exact")) as s:
        s.feed(IDS[:7])
        before = s.save()
        faults.vanish = 10000
        s.feed([IDS[7]])
        want, n_operations = s.logits().copy(), 10000 - faults.vanish
        assert n_operations % 3  # so that it is another one at each try
        for _ in range(3):
            s.load(before)
            faults.vanish, faults.late_us = n_operations, 0
            with pytest.raises(DeviceError, match="the device is lost"):
                s.feed([IDS[7]])
            faults.late_us = 60000
            s.feed([IDS[7]])
            assert np.array_equal(s.logits(), want)


@with_faults
@pytest.mark.parametrize("at", [BETWEEN, BEHIND])
@pytest.mark.parametrize("sparsity", ["predicted", "exact"])
def test_a_device_that_is_late_changes_no_bits(model: Model, faults: Faults, sparsity: str, at: Any) -> None:
    """Whoever of two devices and the CPU is ahead waits for the others, prompts and tokens alike."""
    got = []
    for late_us in (0, 400):
        faults.late_us = late_us
        with open_two(model, sparsity, at) as s:
            rows = []
            for ids in (IDS[:40], IDS[40:43], *([i] for i in IDS[43:47])):
                s.feed(ids)
                rows.append(s.logits().copy())
            got.append(rows)
    assert all(np.array_equal(a, b) for a, b in zip(*got, strict=True))


@with_faults
def test_a_step_that_failed_leaves_no_logits(model: Model, faults: Faults) -> None:
    with open_two(model) as s:
        sampler = Sampler(Sampling(temperature=0.0), model.info.n_vocab)
        for step in (lambda: s.feed([3]), lambda: s.next(3, 7, sampler)):
            s.feed(IDS[: 7 - s.length()] or [3])
            s.cut(7)
            assert s.n_logits == 1
            faults.die = 1
            with pytest.raises(DeviceError, match="that was asked for"):
                step()
            assert (s.length(), s.n_logits) == (7, 0)
            for look in (s.logits, s.hidden, lambda: s.draw(sampler)):
                with pytest.raises(ArgumentError, match="the logits of 0 tokens"):
                    look()


@with_faults
def test_a_step_that_failed_leaves_no_states_between_guesses(tmp_path: Path, faults: Faults) -> None:
    """Of a sequence whose tokens had not come to their turn, either: its places hold nothing."""
    generated = [recurrent.GENERATED]
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS["lfm2"])) as m:
        plan = recurrent.place(m, "all", 16)
        with recurrent.opened(m, plan, 16, n_guesses=recurrent.N_GUESSES) as s:
            for seq in (0, 1):
                s.feed(IDS[:20], seq=seq)
            faults.launch = 1
            with pytest.raises(DeviceError, match="launch"):
                s.feed([5] * 19, seq=[0] * 16 + [1] * 3, want_logits=generated * 19)
            recurrent.fed(s, [6, 7, 8], 1)
            assert [s.reachable(n, seq=1) for n in (23, 22, 21, 20)] == [23, 19, 19, 19]


@with_faults
def test_a_device_that_never_answers_is_named(model: Model, faults: Faults) -> None:
    with open_two(model, wait_ms=1000) as s:
        faults.hang = 10000
        s.feed([3])
        n = 10000 - faults.hang
        faults.hang = n // 2 + n // 6  # the first device has done its layers, the second begins with its own
        with pytest.raises(DeviceError, match=r"device 1 did not answer within 1 s"):
            s.feed([3])
        feed_patiently(s, [3])
    alone = place(model, "some", "exact")
    with Session(model, plan=alone, device="host", wait_ms=1000, **options("exact")) as s:
        faults.hang = 4
        with pytest.raises(DeviceError, match=r"device 0 did not answer within 1 s"):
            s.feed([3])


@with_faults
def test_a_device_that_cannot_start(model: Model, faults: Faults) -> None:
    """The first device waits for a CPU that never comes, because the second did not start."""
    with open_two(model) as s:
        s.feed(IDS[:3])
        want = s.logits().copy()
        for n in (1, 2):
            s.drop()
            faults.launch = n
            with pytest.raises(DeviceError, match="launch"):
                s.feed(IDS[:3])
            assert s.length() == 0
            s.feed(IDS[:3])
            assert np.array_equal(s.logits(), want)


@with_faults
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_prompts_stream_where_nothing_can_be_mapped(tmp_path: Path, faults: Faults, form: str) -> None:
    """Rows, or columns of a down stored by output, come over all the same: nothing is left to the CPU."""
    kind = None if form == "sparse" else Kind.Q8_0
    with Model(write(tmp_path, "llama-relu", form, kind)) as m:
        found = []
        for refused, pin in ((0, True), (1, True), (0, False)):
            faults.map = refused
            plan = place(m, "some", "exact")
            with Session(m, plan=plan, device="host", pin_weights=pin, **options("exact")) as s:
                s.feed(IDS[:40], want_logits=True)
                assert all(step.n_active_device == step.n_active > 0 for step in s.last_step)
                found.append([s.logits(i).copy() for i in range(40)])
        assert apart(found[0], found[1]) == 0 and apart(found[0], found[2]) == 0


@with_faults
@pytest.mark.parametrize("split", ["near", "weak", "only"])
def test_what_cannot_be_read_in_place_is_the_cpus(model: Model, faults: Faults, split: str) -> None:
    o = options("exact")
    answers, in_place = [], []
    for faults.map in (0, 1):
        with Session(model, plan=place(model, split, "exact"), device="host", **o) as s:
            answers.append(drive(s, IDS))
            in_place.append(s.info.n_zero_copy)
            assert (s.last_step[0].ffn_us > 0) == (split != "weak" or faults.map == 1)
    assert beyond_rounding(*answers, model.info.n_layer) < 1
    assert in_place[0] > model.info.n_layer and in_place[1] == 0


@with_faults
def test_one_piece_that_cannot_be_mapped_leaves_the_others(tmp_path: Path, faults: Faults) -> None:
    with Model(write(tmp_path, DEEP, "sparse"), use_mmap=False) as copied:
        answers, in_place, unmapped = [], [], []
        for faults.map_one, faults.map in ((0, 0), (2, 0), (0, 1)):
            plan = place(copied, "near", "exact")
            with Session(copied, plan=plan, device="host", **options("exact")) as s:
                answers.append(drive(s, IDS))
                in_place.append(s.info.n_zero_copy)
                unmapped.append(s.info.n_unmapped_bytes)
    assert unmapped[0] == 0 < unmapped[1] and unmapped[2] > 4 * unmapped[1]
    assert 0.7 * in_place[0] < in_place[1] < in_place[0] and in_place[2] == 0
    assert beyond_rounding(answers[0], answers[1], copied.info.n_layer) < 1


@with_faults
def test_prompts_that_will_be_slower_warn(tmp_path: Path, faults: Faults) -> None:
    """No neuron is read in host memory for single tokens, but those of prompts would be."""
    path = write(tmp_path, "llama-relu", "dense")
    asked = Settings(overhead_bytes=0, group=1, n_batch=16)
    rates = engine.Rates(zero_copy_bytes_per_s=0, handover_us=0, layer_us=0, ffn_us=0)
    whole = make_plan(path, vram_budget=1, rates=rates, settings=asked)
    gib = (whole.min_bytes + whole.full_bytes) / 2 / (1 << 30)
    plan = make_plan(path, vram_budget=gib, rates=rates, settings=asked)
    assert plan.uses_device and not any(len(layer.pcie) for layer in plan.layers)
    said: dict[str, Any] = {"n_ctx": 0, "n_batch": 16, "sparsity": "auto", "type_k": None, "type_v": None}
    faults.map = 1
    with (
        pytest.warns(UserWarning, match="cannot map .* long prompts"),
        Model(path) as model,
        Loader(model, devices=None, plan=plan, names=["host"], **said).open() as s,
    ):
        s.feed([3])


@with_faults
def test_a_plan_that_cannot_be_followed_warns(tmp_path: Path, faults: Faults) -> None:
    rates = engine.Rates(cpu_bytes_per_s=1e9, zero_copy_bytes_per_s=1e9, handover_us=0, layer_us=0, ffn_us=0)
    path = write(tmp_path, "llama-relu", "dense")
    asked = Settings(overhead_bytes=0, group=1, n_batch=16)
    whole = make_plan(path, vram_budget=1, rates=rates, settings=asked)
    said: dict[str, Any] = {"n_ctx": 0, "n_batch": 16, "sparsity": "auto", "type_k": None, "type_v": None}
    gib = (whole.min_bytes + whole.full_bytes) / 2 / (1 << 30)
    plan = make_plan(path, vram_budget=gib, rates=rates, settings=asked)
    n = sum(len(layer.pcie) for layer in plan.layers)
    assert n > 0
    faults.map = 1
    with (
        pytest.warns(UserWarning, match=rf"of {n} neurons .* cannot be mapped for {n} of them"),
        Model(path) as model,
        Loader(model, devices=None, plan=plan, names=["host"], **said).open() as s,
    ):
        s.feed([3])


@with_faults
def test_thresholds_that_cannot_be_sent_change_nothing(model: Model, faults: Faults) -> None:
    with open_two(model, "predicted") as s:
        s.feed([5])
        want = s.logits().copy()
        for n in (1, 2):
            faults.transfer = n
            with pytest.raises(DeviceError, match="copy"):
                s.set_threshold(1e30)
            s.drop()
            s.feed([5])
            assert np.array_equal(s.logits(), want)
            assert s.info.sparse_threshold == 0


@with_faults
def test_copies_of_k_and_v_can_fail(model: Model, faults: Faults) -> None:
    with open_two(model) as s:
        s.feed(IDS[:30])
        for n in (1, 5):
            faults.transfer = n
            with pytest.raises(DeviceError, match="K and V"):
                s.save()
            faults.transfer = n
            with pytest.raises(DeviceError, match="K and V"):
                s.shift(4, 5)
            assert s.length() == 4  # the part that was not touched
            s.cut(0)
            s.feed(IDS[:30])
        state = s.save()
        faults.transfer = 3
        with pytest.raises(DeviceError, match="K and V"):
            s.load(state, seq=1)
        assert (s.length(0), s.length(1)) == (30, 0)
        s.load(state, seq=1)
        s.feed([3], seq=[0])
        want = s.logits().copy()
        s.feed([3], seq=[1])
        assert np.array_equal(s.logits(), want)
        # A sequence that was to have its own copy of a block has none: nothing may be computed with it.
        s.copy(2, 0, 20)
        faults.transfer = 2
        for _ in range(2):
            with pytest.raises(DeviceError, match="opened anew"):
                s.feed([3], seq=[2])


def test_a_session_larger_than_its_plan_exceeds_the_budget(model: Model) -> None:
    full = engine.compute(model, settings("exact", 64), engine.Rates()).full_bytes
    plan = engine.native_plan(
        model,
        settings("exact", 64, [full]),
        engine.Rates(),
        on_device=[True] * 6,
        hot=[np.arange(model.info.n_ff, dtype=np.int32)] * 6,
        head_on_device=True,
    )
    with Session(model, plan=plan, device="host", **options("exact")) as s:
        s.feed([3])
    with pytest.raises(OutOfMemoryError, match="exceed the device's budget"):
        Session(model, plan=plan, device="host", **options("exact") | {"n_pool": 1 << 14})


def test_an_interrupt_ends_between_steps(model: Model) -> None:
    """Ctrl-C does not tear a step apart: it is raised when the step has ended."""
    with Session(model, **options("exact")) as alone, open_two(model) as s:
        fed = 0
        timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                s.feed([IDS[fed % 40]])
                fed += 1
                if s.length() == 100:
                    s.cut(0)
        timer.join()
        s.cut(0)
        assert beyond_rounding(drive(alone, IDS), drive(s, IDS), model.info.n_layer) < 1


def test_a_forked_process_has_no_devices(model: Model) -> None:
    with open_two(model) as s:
        s.feed([3])
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                s.feed([3])
            except DeviceError as error:
                ended = 0 if "forked" in str(error) else 2
            finally:
                s.close()
                os._exit(ended)
        assert os.waitpid(child, 0)[1] == 0
        s.feed([3])
