"""The C interface called wrongly: an ARGUMENT error with a sentence, never a crash, and nothing changed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine import _native
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native.test_bad_models import good

ffi, lib = _native.ffi, _native.lib
NULL = ffi.NULL
ARGUMENT, CONTEXT = 3, 6


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = good(predictor=True).write(tmp_path_factory.mktemp("m") / "m.gguf")
    with Model(path) as model, Session(model, n_ctx=32, n_seq=2, n_threads=2) as s:
        s.feed([1, 2, 3])
        yield s


def refused(status: Any, says: str, expected: int = ARGUMENT) -> None:
    assert status == expected
    assert says in _native.message()


def test_keys_are_found(session: Session) -> None:
    file = session.model.file
    for i, key in enumerate(file.metadata):
        assert lib.pi_file_find_meta(file.handle, key.encode()) == i
    for handle, key in ((file.handle, b"no.such.key"), (file.handle, NULL), (NULL, b"general.architecture")):
        assert lib.pi_file_find_meta(handle, key) == -1


def test_null_handles_and_outputs(session: Session) -> None:
    s, model, file = session.handle, session.model.handle, session.model.file.handle
    some = ffi.new("char[64]")
    refused(lib.pi_file_open(b"x", NULL), "out is NULL")
    refused(lib.pi_file_open(NULL, ffi.new("pi_file **")), "path is empty")
    for index in (-1, 0, 10**6):
        refused(lib.pi_file_meta(file, index, NULL), "NULL")
        refused(lib.pi_file_tensor(NULL, index, ffi.new("pi_tensor *")), "NULL")
        refused(lib.pi_file_dequantize(file, index, 0, 32, NULL), "NULL")
    refused(lib.pi_model_open(NULL, NULL, ffi.new("pi_model **")), "NULL")
    refused(lib.pi_model_load(NULL, NULL, NULL), "NULL")
    refused(lib.pi_session_open(model, NULL, NULL), "NULL")
    refused(lib.pi_session_feed(s, NULL), "at least one token")
    refused(lib.pi_session_feed(NULL, ffi.new("pi_batch *")), "at least one token")
    sampler, token = ffi.cast("pi_sampler *", some), ffi.new("int32_t *")
    for args in ((NULL, sampler, token), (s, NULL, token), (s, sampler, NULL)):
        refused(lib.pi_session_next(args[0], 0, 3, 1, *args[1:]), "NULL")
    refused(lib.pi_session_feed_choose(s, NULL, 0, NULL, NULL, NULL), "at least one token")
    one = ffi.new("pi_batch *", {"n_tokens": 1, "token": token})
    refused(lib.pi_session_feed_choose(s, one, 1, NULL, NULL, NULL), "choices")
    refused(lib.pi_session_feed_choose(s, one, 1, token, ffi.new("pi_sampler *[1]"), token), "NULL")
    refused(lib.pi_session_rounds(s, NULL), "missing")
    rounds = ffi.new("pi_rounds *", {"n": 1, "most": 1, "seq": token, "token": token, "chosen": token})
    refused(lib.pi_session_rounds(s, rounds), "missing")
    assert lib.pi_rounds_wait(rounds, 0) == 0  # no more come
    rounds = ffi.new("pi_rounds *", rounds[0])
    none = ffi.new("pi_sampler *[2]")
    rounds.sampler, rounds.state = none, 0
    refused(lib.pi_session_rounds(s, rounds), "NULL")
    assert lib.pi_rounds_wait(rounds, 0) == 0
    twice = ffi.new("int32_t[2]")
    rounds.n, rounds.seq, rounds.state = 2, twice, 0
    refused(lib.pi_session_rounds(s, rounds), "sequence 0 is there twice")
    assert lib.pi_rounds_wait(rounds, 0) == 0
    refused(lib.pi_session_last_step(s, 0, NULL), "NULL")
    refused(lib.pi_session_last_total(NULL, NULL, NULL), "NULL")
    refused(lib.pi_session_set_sparsity(NULL, 0), "NULL")
    refused(lib.pi_session_set_threshold(NULL, 0.0), "NULL")
    refused(lib.pi_seq_state_save(s, 0, NULL, 64), "out is NULL")
    refused(lib.pi_seq_state_load(s, 0, NULL, 64), "in is NULL")
    refused(lib.pi_seq_state_save(NULL, 0, some, 64), "NULL")
    refused(lib.pi_cpu_read_rate(1, 1 << 20, 1, NULL), "NULL")
    probe = ffi.new("pi_read_probe **")
    refused(lib.pi_read_probe_open(NULL, 1 << 20, 1, probe), "NULL")
    refused(lib.pi_read_probe_open(s, 1 << 19, 1, probe), "1 slices of 524288 bytes")
    refused(lib.pi_read_probe_open(s, 1 << 20, 0, probe), "0 slices")
    refused(lib.pi_read_probe_open(s, 1 << 61, 1 << 30, probe), "bytes to read", 4)
    refused(lib.pi_read_probe_next(NULL, ffi.new("double *")), "NULL")
    for close in (
        lib.pi_file_close,
        lib.pi_model_close,
        lib.pi_session_close,
        lib.pi_sampler_free,
        lib.pi_read_probe_close,
    ):
        close(NULL)


@pytest.mark.parametrize("seq", [-1, 2, 2**31 - 1, -(2**31)])
def test_sequences_out_of_range(session: Session, seq: int) -> None:
    s = session.handle
    says = f"sequence {seq} is out of range"
    refused(lib.pi_seq_cut(s, seq, 0), says)
    refused(lib.pi_seq_drop(s, seq), says)
    refused(lib.pi_seq_copy(s, 0, seq, 1), says)
    refused(lib.pi_seq_copy(s, seq, 0, 1), says)
    refused(lib.pi_seq_shift(s, seq, 0, 1), says)
    refused(lib.pi_seq_state_load(s, seq, b"x", 1), says)
    assert lib.pi_seq_length(s, seq) == -1
    assert lib.pi_seq_state_bytes(s, seq) == 0
    assert session.length() == 3


def test_numbers_out_of_range(session: Session) -> None:
    s = session.handle
    low, high = -(2**31), 2**31 - 1
    for n in (low, -1, 4, high):
        refused(lib.pi_seq_cut(s, 0, n), f"cannot keep {n}")
        refused(lib.pi_seq_copy(s, 1, 0, n), f"cannot copy {n}")
        refused(lib.pi_seq_shift(s, 0, n, 1), f"cannot keep {n}")
        refused(lib.pi_seq_shift(s, 0, 0, n), f"drop {n}")
    refused(lib.pi_seq_shift(s, 0, high, high), "cannot keep")
    refused(lib.pi_seq_shift(s, 0, 0, 0), "drop 0")
    for index in (low, -1, 1, high):
        assert lib.pi_session_logits(s, index) == NULL
        assert lib.pi_session_hidden(s, index) == NULL
        refused(lib.pi_session_last_step(s, index, ffi.new("pi_layer_step *")), f"layer {index}")
    refused(lib.pi_session_set_sparsity(s, 9), "sparsity 9")
    refused(lib.pi_session_set_threshold(s, float("nan")), "not a number")
    refused(lib.pi_seq_state_save(s, 0, ffi.new("char[8]"), 8), "the buffer has 8")
    token = ffi.new("int32_t[]", [1, 2])
    for n in (0, -1, low):
        refused(
            lib.pi_session_feed(s, ffi.new("pi_batch *", {"n_tokens": n, "token": token})), "at least one"
        )
    for kind in (3, 255):
        batch = {"n_tokens": 2, "token": token, "kind": (kinds := ffi.new("uint8_t[]", [1, kind]))}
        refused(lib.pi_session_feed(s, ffi.new("pi_batch *", batch)), f"kind is {kind} at index 1")
        assert kinds[1] == kind
    assert session.length() == 3


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n_ctx", (-1, 2**31 - 1)),
        ("n_pool", (-1, 31, 2**31 - 1)),
        ("n_seq", (-1, 0, 2**31 - 1)),
        ("n_batch", (-1, 0, 2**31 - 1)),
        ("n_threads", (-1, 2**31 - 1)),
        ("type_k", (-1, 2, 64)),
        ("type_v", (12,)),
        ("sparsity", (-1, 4)),
    ],
)
def test_options_out_of_range(session: Session, field: str, values: tuple[int, ...]) -> None:
    for value in values:
        options = ffi.new("pi_session_options *", lib.pi_session_defaults())
        options.n_ctx = 32
        setattr(options, field, value)
        out = ffi.new("pi_session **")
        refused(lib.pi_session_open(session.model.handle, options, out), str(value))
        assert out[0] == NULL


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
def test_extreme_thresholds(session: Session, n: int) -> None:
    """All neurons, and none: the list is full or empty, for the row operator and for matrix products."""
    for threshold, predicted in ((-float("inf"), 96), (-1e30, 96), (1e30, 0), (float("inf"), 0)):
        session.set_threshold(threshold)
        session.cut(0)
        session.feed(list(range(n)), want_logits=True)
        step = session.last_step[0]
        assert (step.n_sparse, step.n_predicted) == (n, n * predicted)
        assert step.n_active <= step.n_predicted
        assert np.isfinite(session.logits()).all()


CALL_ALL = """
from powerinfer._engine import _native

ffi, lib = _native.ffi, _native.lib
zero = {"pointer": ffi.NULL, "primitive": 0, "enum": 0}
for name in sorted(dir(lib)):
    kind = ffi.typeof(getattr(lib, name)) if name.startswith("pi_") else None
    if kind is None or kind.kind != "function" or not any(a.kind == "pointer" for a in kind.args):
        continue
    print(name, end=" ", flush=True)
    result = getattr(lib, name)(*(zero[a.kind] for a in kind.args))
    print(result if kind.result.cname in ("pi_status", "enum pi_status") else "-", flush=True)
"""


def test_every_function_takes_null() -> None:
    """All pointers NULL, in a process of its own: no crash, and an ARGUMENT error where there is a status."""
    done = subprocess.run([sys.executable, "-c", CALL_ALL], capture_output=True, text=True, timeout=120)
    answers = dict(line.split() for line in done.stdout.splitlines() if " " in line.strip())
    assert done.returncode == 0, done.stdout.splitlines()[-1]
    wrong = {name: answer for name, answer in answers.items() if answer not in ("-", str(ARGUMENT))}
    assert not wrong and len(answers) > 50


ONE_NULL = """
import sys
from powerinfer._engine import _native
from powerinfer._engine.model import Model
from powerinfer._engine.session import Session

ffi, lib = _native.ffi, _native.lib
model = Model(sys.argv[1])
session = Session(model, n_ctx=32, n_seq=2, n_threads=1, count_neurons=True)
session.feed([1, 2, 3])
kept = []


def handle(kind, create, *args):
    out = ffi.new(kind + " **")
    _native.check(create(*args, out))
    return out[0]


def struct(kind, value):
    kept.append(ffi.new(kind + " *", value))
    return kept[-1]


sampling, plan_options = lib.pi_sampling_defaults(), lib.pi_plan_defaults()
plan_options.n_ctx, plan_options.budget_bytes = 32, 1 << 30
good = {
    "pi_model *": model.handle,
    "pi_session *": session.handle,
    "pi_file *": handle("pi_file", lib.pi_file_open, sys.argv[1].encode()),
    "pi_sampling *": struct("pi_sampling", sampling),
    "pi_model_options *": struct("pi_model_options", lib.pi_model_defaults()),
    "pi_session_options *": struct("pi_session_options", lib.pi_session_defaults()),
    "pi_plan_options *": struct("pi_plan_options", plan_options),
    "char *": ffi.new("char[]", b"x"),
}
good["pi_sampler *"] = handle(
    "pi_sampler", lib.pi_sampler_new, good["pi_sampling *"], 300, 0, ffi.NULL, ffi.NULL
)
good["pi_plan *"] = handle("pi_plan", lib.pi_plan_new, model.handle, good["pi_plan_options *"])
good["pi_read_probe *"] = handle("pi_read_probe", lib.pi_read_probe_open, session.handle, 1 << 20, 1)


def fine(kind, number):
    if kind.kind != "pointer":
        return number
    if kind.cname in good:
        return good[kind.cname]
    kept.append(ffi.new("char[]", 1 << 16))
    return ffi.cast(kind, kept[-1])


for name in sorted(dir(lib)):
    kind = ffi.typeof(getattr(lib, name)) if name.startswith("pi_") else None
    if kind is None or kind.kind != "function" or name.endswith(("_close", "_free")):
        continue
    for i, missing in enumerate(kind.args):
        if missing.kind != "pointer":
            continue
        for number in (0, 1):  # an index must be in range, a size not 0
            print(name, i, end=" ", flush=True)
            args = [ffi.NULL if k == i else fine(one, number) for k, one in enumerate(kind.args)]
            result = getattr(lib, name)(*args)
            print(result if kind.result.cname in ("pi_status", "enum pi_status") else "-", flush=True)
"""

# Where no pointer means something: defaults, or nothing is asked for.
MAY_BE_NULL = {
    ("pi_device_examine", "2"),
    ("pi_gpu_probe", "2"),  # of no GPUs
    ("pi_model_load", "1"),
    ("pi_model_load", "2"),
    ("pi_model_open", "1"),
    ("pi_plan_new", "1"),
    ("pi_session_counts", "3"),
    ("pi_session_last_total", "1"),
    ("pi_session_last_total", "2"),
    ("pi_session_open", "1"),
    ("pi_session_set_tap", "2"),
}


def test_every_pointer_of_every_function_may_be_null(tmp_path: Path) -> None:
    """One of them NULL, the others good, in a process of its own: no crash; an ARGUMENT error unless NULL
    means something there."""
    path = good(predictor=True).write(tmp_path / "m.gguf")
    words = [sys.executable, "-c", ONE_NULL, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr)
    answers = [((name, i), answer) for name, i, answer in map(str.split, lines)]
    wrong = {at for at, answer in answers if answer not in ("-", str(ARGUMENT))}
    assert wrong == MAY_BE_NULL and len(answers) > 120


def test_a_probe_outlives_the_handle_of_its_session(tmp_path: Path) -> None:
    path = good().write(tmp_path / "m.gguf")
    with Model(path) as model:
        out, probe = ffi.new("pi_session **"), ffi.new("pi_read_probe **")
        options = lib.pi_session_defaults()
        options.n_ctx, options.n_threads = 32, 2
        _native.check(lib.pi_session_open(model.handle, ffi.new("pi_session_options *", options), out))
        _native.check(lib.pi_read_probe_open(out[0], 1 << 20, 2, probe))
        lib.pi_session_close(out[0])
    rate = ffi.new("double *")
    for _ in range(3):
        _native.check(lib.pi_read_probe_next(probe[0], rate))
        assert rate[0] > 0
    lib.pi_read_probe_close(probe[0])


def test_next_chooses_from_its_own_logits(tmp_path: Path) -> None:
    """Another thread's feeds, of more and more rows, may not replace or free them before the choice.
    To sort so many tokens takes longer than such a feed, so that one falls between if it can."""
    spec = replace(models.SPECS["llama-mha"], name="wordy", n_vocab=30000, n_layer=1)
    with Model(models.write_dense(tmp_path / "wordy.gguf", spec)) as model:
        own = Session(model, n_ctx=32, n_pool=128, n_seq=2, n_threads=1)
        s, n = own.handle, 40
        options = lib.pi_sampling_defaults()
        options.temperature, options.top_k, options.top_p = 1, 0, 0.9
        sampler, chosen = ffi.new("pi_sampler **"), ffi.new("int32_t *")
        wanted = ffi.new("pi_sampling *", options)
        _native.check(lib.pi_sampler_new(wanted, spec.n_vocab, 0, NULL, NULL, sampler))

        def run() -> list[int]:
            found = []
            for i in range(n):
                lib.pi_sampler_reset(sampler[0], i)
                _native.check(lib.pi_seq_drop(s, 0))
                _native.check(lib.pi_session_next(s, 0, 0, i % 16 + 1, sampler[0], chosen))
                found.append(chosen[0])
            return found

        want, over = run(), threading.Event()

        def disturb() -> None:
            token = ffi.new("int32_t[30]", [17] * 30)
            seq, kind = ffi.new("int32_t[30]", [1] * 30), ffi.new("uint8_t[30]", [2] * 30)
            i = 0
            while not over.is_set():
                lib.pi_seq_drop(s, 1)
                lib.pi_session_feed(s, ffi.new("pi_batch *", (i % 4 + 1, token, NULL, seq, kind)))
                i += 1

        other = threading.Thread(target=disturb)
        other.start()
        try:
            assert run() == want
        finally:
            over.set()
            other.join()
            lib.pi_sampler_free(sampler[0])
            own.close()
