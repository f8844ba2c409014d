"""Models and sessions as Python objects: arguments, views, lifetimes, threads. Numbers: see tests/native."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    ClosedError,
    ContextError,
    FileError,
    FormatError,
    ModelFile,
    UnsupportedError,
)
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session

PROMPT = [1, 17, 260, 43, 291, 300, 8]


@pytest.fixture
def model(relu_path: Path) -> Model:
    return Model(relu_path)


def session(model: Model, **options: object) -> Session:
    return Session(model, **{"n_threads": 1, "n_ctx": 128, **options})  # type: ignore[arg-type]


def test_model_info(model: Model, sparse_path: Path) -> None:
    info = model.info
    assert (info.architecture, info.n_layer, info.n_embd, info.n_vocab) == ("llama", 2, 64, 320)
    assert (info.activation, info.is_gated, info.has_predictor) == ("relu", True, False)
    assert Model(sparse_path).info.has_predictor
    assert Model(model.file, activation="silu").info.activation == "silu"


def test_loading_reports_progress(relu_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    Model(relu_path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_loading_ends_with_an_exception_of_the_callback(relu_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(relu_path, progress=stop)


def test_a_model_that_was_only_looked_at(relu_path: Path) -> None:
    model = Model(relu_path, load=False)
    assert model.info.n_layer == 2
    with pytest.raises(ArgumentError, match="not loaded"):
        session(model)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_ctx": -1}, "n_ctx"),
        ({"n_ctx": 2**31}, "n_ctx"),
        ({"n_batch": 0}, "n_batch"),
        ({"n_seq": 0}, "n_seq"),
        ({"n_threads": -1}, "n_threads"),
        ({"type_k": "q3_k"}, "type_k is 'q3_k'"),
        ({"type_v": 7}, "type_v is 7"),
        ({"sparsity": "some"}, "sparsity is 'some'"),
        ({"sparsity": "predicted"}, "predict"),
    ],
)
def test_bad_options_are_named(model: Model, options: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        session(model, **options)


def test_session_info(model: Model) -> None:
    info = session(model, n_ctx=100, n_batch=32, n_seq=3, n_pool=256, type_k="F32", type_v=0).info
    assert (info.n_ctx, info.n_batch, info.n_seq, info.n_threads, info.sparsity) == (100, 32, 3, 1, "exact")
    assert info.n_blocks == info.n_blocks_free == 4
    assert session(model, n_ctx=0).info.n_ctx == 256


def test_logits_of_the_tokens_that_want_them(model: Model) -> None:
    s = session(model)
    s.feed(PROMPT, want_logits=True)
    rows = np.stack([s.logits(i).copy() for i in range(s.n_logits)])
    assert rows.shape == (len(PROMPT), 320) and rows.dtype == np.float32
    for choice in ([0, 1, 0, 0, 1, 0, 1], np.array([False] * 6 + [True]), None, False):
        s.drop()
        s.feed(PROMPT, want_logits=choice)
        wanted = [6] if choice is None else [] if choice is False else list(np.flatnonzero(choice))
        assert s.n_logits == len(wanted)
        for i, place in enumerate(wanted):
            # How tokens are grouped may change the rounding of a prompt, not more.
            assert np.allclose(s.logits(i), rows[place], rtol=0, atol=1e-2 * np.abs(rows).max())
    with pytest.raises(ArgumentError, match="index 0"):
        s.logits(0)


def test_logits_are_writable_and_stay(model: Model) -> None:
    s = session(model)
    s.feed(PROMPT)
    view = s.logits()
    first = view.copy()
    assert s.logits() is view or np.shares_memory(s.logits(), view)
    view[5] = -np.inf
    assert s.logits(-1)[5] == -np.inf
    s.feed([4])
    assert np.isfinite(s.logits()).all() and not np.array_equal(s.logits(), first)
    # More rows than ever before: memory that was handed out must stay valid.
    s.feed(PROMPT * 8, want_logits=True)
    s.logits(0)
    assert view.shape == (320,)
    view[:] = 0.0
    s.close()
    del s
    gc.collect()
    view[:] = 1.0


def test_a_sampler_draws_from_logits_that_were_not_copied(model: Model) -> None:
    greedy = Sampler(Sampling(temperature=0), model.info.n_vocab)
    with Session(model) as s:
        s.feed([1, 5, 7], want_logits=True)
        drawn = [s.draw(greedy, i) for i in range(3)]
        assert s.draw(greedy) == drawn[2]
        assert drawn == [int(s.logits(i).argmax()) for i in range(3)]
        s.logits(1)[drawn[1]] = -np.inf  # what its owner has changed counts
        assert s.draw(greedy, 1) != drawn[1]
        with pytest.raises(ArgumentError):
            s.draw(greedy, 3)
        with pytest.raises(ArgumentError):
            s.draw(Sampler(Sampling(), model.info.n_vocab + 1))


def test_next_is_feed_draw_and_accept(model: Model) -> None:
    options = Sampling(seed=3, temperature=2.0, top_k=0, repeat_penalty=1.5)
    one, other = (Sampler(options, model.info.n_vocab) for _ in range(2))
    with session(model, n_seq=2) as s, session(model) as expected:
        s.feed(PROMPT, seq=1)
        expected.feed(PROMPT)
        token = want = PROMPT[0]
        for pos in range(len(PROMPT), 60):
            token = s.next(token, pos, one, seq=1)
            expected.feed([want])
            want = expected.draw(other)
            other.accept(want)
            assert token == want
        assert (s.length(0), s.length(1), s.n_logits) == (0, 60, 1)
        assert np.array_equal(s.logits(), expected.logits())


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_feed_with_choices_is_feed_draw_and_accept(model: Model, n_threads: int) -> None:
    """Of 9 sequences, more than the team lets one of its threads choose for: some drawn, some greedy, one
    that cannot choose, and one without a sampler."""
    n, n_vocab = 9, model.info.n_vocab
    kinds = [Sampling(seed=i, temperature=i % 3, top_k=0, repeat_penalty=1.5) for i in range(n - 1)]
    some, same = ([Sampler(options, n_vocab) for options in kinds] for _ in range(2))
    some[4] = Sampler(Sampling(), n_vocab, logit_bias=dict.fromkeys(range(n_vocab), -np.inf))
    sizes = {"n_seq": n, "n_pool": n * 64}
    with session(model, n_threads=n_threads, **sizes) as s, session(model, **sizes) as expected:
        ids, seq = PROMPT + [3] * (n - 1), [0] * len(PROMPT) + list(range(1, n))
        want_logits = [0] * (len(PROMPT) - 1) + [1] * n
        for _ in range(20):
            drawn = s.feed(ids, seq=seq, want_logits=want_logits, rows=list(range(n - 1)), samplers=some)
            expected.feed(ids, seq=seq, want_logits=want_logits)
            for row, sampler in enumerate(same):
                if row != 4:
                    assert drawn[row] == expected.draw(sampler, row)
                    sampler.accept(drawn[row])
            assert drawn[4] == -1 and s.n_logits == n
            with pytest.raises(ArgumentError, match="excluded"):
                s.draw(some[4], 4)
            ids, seq, want_logits = [*drawn[:4], 5, *drawn[5:], 6], list(range(n)), [1] * n
        lengths = [s.length(i) for i in range(n)]
        few = Sampler(Sampling(), n_vocab + 1)
        for rows, samplers in (([0], [few]), ([1], some[:1]), ([-1], some[:1])):
            with pytest.raises(ArgumentError, match=r"vocabulary|row"):
                s.feed([1], rows=rows, samplers=samplers)
        some[0].close()
        with pytest.raises(ClosedError):
            s.feed([1], rows=[0], samplers=some[:1])
        assert [s.length(i) for i in range(n)] == lengths


def test_what_next_leaves_when_it_fails(model: Model) -> None:
    n_vocab = model.info.n_vocab
    greedy = Sampler(Sampling(temperature=0), n_vocab)
    nothing = Sampler(Sampling(), n_vocab, logit_bias=dict.fromkeys(range(n_vocab), -np.inf))
    s = session(model)
    s.feed(PROMPT, want_logits=True)
    kept = [s.logits(i).copy() for i in range(7)]
    for token, pos, words in ((5, 6, "position 6"), (n_vocab, 7, "token 320"), (-1, 7, "token -1")):
        with pytest.raises(ArgumentError, match=words):
            s.next(token, pos, greedy)
    with pytest.raises(ArgumentError, match="must be 321"):  # the engine's memory ends before that
        s.next(5, 7, Sampler(Sampling(), n_vocab + 1))
    for bad in ((2**31, 7, 0), (5, 2**31, 0), (5, 7, -(2**31) - 1)):
        with pytest.raises(ArgumentError, match="32 bits"):
            s.next(bad[0], bad[1], greedy, seq=bad[2])
    assert (s.length(), s.n_logits) == (7, 7)
    assert all(np.array_equal(s.logits(i), kept[i]) for i in range(7))
    with pytest.raises(ArgumentError, match="excluded"):
        s.next(5, 7, nothing)
    expected = session(model)
    expected.feed(PROMPT)
    expected.feed([5])
    assert (s.length(), s.n_logits) == (8, 1)
    assert np.array_equal(s.logits(), expected.logits())  # not what was copied of the feed before
    s.close()
    with pytest.raises(ClosedError):
        s.next(5, 8, greedy)


def test_indices_of_logits(model: Model) -> None:
    s = session(model)
    with pytest.raises(ArgumentError):
        s.logits()
    s.feed(PROMPT, want_logits=True)
    assert np.array_equal(s.logits(-1), s.logits(6)) and np.array_equal(s.logits(-7), s.logits(0))
    for index in (7, -8):
        with pytest.raises(ArgumentError, match=f"index {index}"):
            s.logits(index)
    assert s.hidden(6).shape == (64,) and np.isfinite(s.hidden(6)).all()


@pytest.mark.parametrize(
    "tokens, words",
    [
        ([1, 320], "320"),
        ([-1], "-1"),
        ([2**31], "32-bit"),
        ([1.5], "integers"),
        ([[1, 2]], "integers"),
        ([], "at least one"),
    ],
)
def test_bad_tokens_change_nothing(model: Model, tokens: list[int], words: str) -> None:
    s = session(model)
    s.feed([1, 5])
    logits = s.logits().copy()
    with pytest.raises(ArgumentError, match=words):
        s.feed(tokens)
    assert s.length() == 2
    assert np.array_equal(s.logits(), logits)


def test_bad_positions_and_sequences(model: Model) -> None:
    s = session(model, n_seq=2)
    s.feed([1, 5], pos=[0, 1])
    for options, words in (
        ({"pos": [3]}, "position 3"),
        ({"pos": [2, 3]}, "2 entries"),
        ({"seq": 2}, "sequence 2"),
        ({"seq": [0, 1]}, "2 entries"),
        ({"seq": 2**40}, "seq"),
    ):
        with pytest.raises(ArgumentError, match=words):
            s.feed([7], **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="out of range"):
        s.length(2)
    assert s.length() == 2


def test_overflow_changes_nothing(model: Model) -> None:
    s = session(model, n_ctx=10)
    s.feed(PROMPT)
    with pytest.raises(ContextError, match="n_ctx is 10"):
        s.feed([1, 2, 3, 4])
    assert s.length() == 7
    s.feed([1, 2, 3])


def test_sequences(model: Model) -> None:
    s = session(model, n_seq=3, n_pool=256)
    tokens, seqs = [1, 1, 9, 9, 30, 30], [0, 1, 0, 1, 0, 1]
    s.feed(tokens, seq=seqs, want_logits=[0, 0, 0, 0, 1, 1])
    assert (s.length(0), s.length(1), s.length(2)) == (3, 3, 0)
    assert np.array_equal(s.logits(0), s.logits(1))
    s.copy(2, 0, 2)
    assert s.length(2) == 2
    s.copy(2, 0)
    assert s.length(2) == 3
    s.cut(1, seq=1)
    s.drop(0)
    assert [s.length(i) for i in range(3)] == [0, 1, 3]
    s.shift(1, 1, seq=2)
    assert s.length(2) == 2
    with pytest.raises(ArgumentError):
        s.cut(5, seq=1)


def test_a_state_comes_back_to_the_bit(model: Model) -> None:
    s = session(model, n_seq=2)
    s.feed(PROMPT, seq=1)
    state = s.save(seq=1)
    s.feed([77], seq=1)
    expected = s.logits().copy()
    other = session(model)
    other.load(state)
    assert other.length() == len(PROMPT)
    other.feed([77])
    assert np.array_equal(other.logits(), expected)


def test_bad_states_change_nothing(model: Model, sparse_path: Path) -> None:
    s = session(model)
    s.feed(PROMPT)
    state = s.save()
    for broken in (b"", b"x" * 100, state[:-1], state + b"x", b"X" + state[1:]):
        with pytest.raises(FormatError):
            s.load(broken)
    assert s.length() == len(PROMPT)
    with pytest.raises(FormatError):
        session(model, type_k="f32").load(state)
    with pytest.raises(ContextError):
        session(model, n_ctx=3).load(state)


def test_sparsity_and_last_step(sparse_path: Path) -> None:
    model = Model(sparse_path)
    s = session(model)
    n_ff = model.info.n_ff
    assert s.info.sparsity == "predicted"
    s.feed(PROMPT)
    s.feed([5])
    predicted = s.last_step
    assert [step.n_tokens for step in predicted] == [1, 1] and [step.n_sparse for step in predicted] == [1, 1]
    assert all(0 < step.n_predicted < n_ff and step.n_active <= step.n_predicted for step in predicted)
    s.set_threshold(1e30)
    s.feed([5])
    assert [step.n_predicted for step in s.last_step] == [0, 0]
    with pytest.raises(ArgumentError):
        s.set_threshold(float("nan"))
    s.set_sparsity("exact")
    s.feed([5])
    assert [step.n_predicted for step in s.last_step] == [n_ff, n_ff]
    assert s.info.sparsity == "exact"
    total = s.last_total
    assert total.bytes > sum(step.bytes for step in s.last_step) and total.us > 0
    with pytest.raises(ArgumentError):
        s.set_sparsity("none")  # type: ignore[arg-type]


def test_learned_positions_cannot_shift(opt_path: Path) -> None:
    s = session(Model(opt_path))
    s.feed([2, 5, 6, 7])
    with pytest.raises(UnsupportedError, match="opt"):
        s.shift(1, 1)
    assert s.length() == 4


def test_handles_may_be_closed_in_any_order(relu_path: Path) -> None:
    file = ModelFile(relu_path)
    model = Model(file)
    s = session(model)
    file.close()
    model.close()
    gc.collect()
    s.feed(PROMPT)
    assert np.isfinite(s.logits()).all()
    with pytest.raises(ClosedError):
        session(model)
    with pytest.raises(ClosedError):
        Model(file)
    s.close()
    s.close()


def test_a_closed_session_refuses_everything(model: Model) -> None:
    s = session(model)
    s.feed(PROMPT)
    s.close()
    calls = [
        lambda: s.feed([1]),
        lambda: s.logits(),
        lambda: s.hidden(),
        lambda: s.length(),
        lambda: s.cut(0),
        lambda: s.copy(0, 0),
        lambda: s.drop(),
        lambda: s.shift(0, 1),
        lambda: s.save(),
        lambda: s.load(b""),
        lambda: s.set_sparsity("dense"),
        lambda: s.set_threshold(0.0),
        lambda: s.last_step,
        lambda: s.last_total,
        lambda: s.info,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="session is closed"):
            call()


def test_context_managers(relu_path: Path) -> None:
    with ModelFile(relu_path) as file, Model(file) as model, session(model) as s:
        s.feed(PROMPT)
    for part in (s, model, file):
        with pytest.raises(ClosedError):
            part.handle  # noqa: B018


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        Model(tmp_path / "nothing.gguf")


def test_threads(model: Model) -> None:
    """Sessions of one model side by side, and one session from several threads."""
    expected = session(model)
    expected.feed(PROMPT)
    logits = expected.logits().copy()
    shared = session(model, n_seq=4, n_pool=512)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            own = session(model)
            for _ in range(20):
                own.drop()
                own.feed(PROMPT)
                assert np.array_equal(own.logits(), logits)
                shared.drop(number)
                shared.feed(PROMPT, seq=number)
                assert shared.length(number) == len(PROMPT)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def feed_until_closed(s: Session, began: threading.Event, outcome: list[BaseException]) -> None:
    try:
        while True:
            s.drop()
            s.feed(PROMPT)
            began.set()
    except BaseException as error:
        outcome.append(error)


def test_closing_while_another_thread_computes(model: Model) -> None:
    for _ in range(10):
        s = session(model)
        began = threading.Event()
        outcome: list[BaseException] = []

        thread = threading.Thread(target=feed_until_closed, args=(s, began, outcome))
        thread.start()
        began.wait()
        s.close()
        thread.join()
        assert [type(error) for error in outcome] == [ClosedError]
