"""What a tapped session shows of its feed-forward layers, and which neurons thresholds let through.

Held to the float64 reference's traces; and, where a hair's breadth would decide, to numpy on the very values
that another tap shows: those are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer._engine.session import Model, Session, Tap
from powerinfer.errors import ArgumentError
from tests import models, reference, rounding

SPARSE = sorted(name for name, spec in models.SPECS.items() if spec.predictor)
OTHERS = ("llama-mha", "qwen2", "qwen3", "mistral", "falcon-gelu", "llama-llama3")
N_THREADS = 2
# Relative error of F16 weights and an F16 KV cache; AMX rounds activations to bf16.
TOLERANCE = 2e-3
AMX_TOLERANCE = 1e-2
KINDS = ("input", "norm", "hidden", "score")

Array = Any


def tolerance() -> float:
    """A tapped layer is computed by matrix products, whatever the number of tokens."""
    return AMX_TOLERANCE if rounding.BF16 else TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(folder: Path, name: str, kind: str = "dense") -> tuple[models.Golden, Path]:
    """A golden and its file; the predicted kind has a predictor whose scores stay clear of the threshold."""
    golden = models.golden(name, kind)
    path = folder / f"{name}-{kind}.gguf"
    return golden, path if path.exists() else golden.write(folder).rename(path)


def clear_model(folder: Path, name: str) -> tuple[models.Spec, Path]:
    """A file whose predictor is sure: an fc2 row is all positive or all negative, so no score is near 0."""
    spec = models.SPECS[name]
    path = folder / f"{name}-clear.gguf"
    if not path.exists():
        sign = np.where(np.random.default_rng(3).random(spec.n_ff) < 0.5, -1, 1).astype(np.float16)
        predictor = [(fc1, np.abs(fc2) * sign[:, None]) for fc1, fc2 in models.draw_predictor(spec)]
        models.write_sparse(path, spec, predictor)
    return spec, path


def copied(tap: Tap) -> dict[str, dict[int, Array]]:
    return {kind: {layer: rows.copy() for layer, rows in getattr(tap, kind).items()} for kind in KINDS}


def tapped(
    session: Session, tokens: Array, chunk: int, want: Any = True, **which: Any
) -> dict[str, list[Array]]:
    """The tapped rows of all tokens, fed so many at a time: [kind][layer] -> [n_tokens, ...]."""
    parts = []
    with session.tap(**which) as tap:
        for at in range(0, len(tokens), chunk):
            wanted = want if isinstance(want, bool) else want[at : at + chunk]
            session.feed(tokens[at : at + chunk], want_logits=wanted)
            parts.append(copied(tap))
    layers = sorted(next(iter(rows for rows in parts[0].values() if rows)))
    return {
        kind: [np.concatenate([part[kind][layer] for part in parts]) for layer in layers]
        for kind in KINDS
        if parts[0][kind]
    }


def reference_scores(model: reference.Model, layer: int, x: Array) -> Array:
    hidden = np.maximum(x @ model[f"blk.{layer}.fc1.weight"].T, 0)
    return hidden @ model[f"blk.{layer}.fc2.weight"].T


def assert_close(rows: dict[str, list[Array]], trace: reference.Trace, model: reference.Model) -> None:
    """All that was tapped is what the trace has."""
    for layer, told in enumerate(trace.layers):
        expected = {"input": told.predictor_input, "norm": told.ffn_input, "hidden": told.hidden}
        if "score" in rows:
            expected["score"] = reference_scores(model, layer, told.predictor_input)
        for kind in rows:
            error = reference.relative_error(rows[kind][layer], expected[kind])
            assert error < tolerance(), f"{kind} of layer {layer}"


# ---- values


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("name", SPARSE)
def test_taps_are_those_of_the_reference(name: str, mode: Any, chunk: int, folder: Path) -> None:
    golden, path = model_of(folder, name, "predicted")
    model, trace = reference.load(path), reference.Trace()
    reference.forward(model, golden.prompt, predicted=mode == "predicted", trace=trace)
    with Session(Model(path), sparsity=mode, n_threads=N_THREADS, mask_prompts=True) as session:
        rows = tapped(
            session, golden.prompt, chunk, want=False, input=True, norm=True, hidden=True, score=True
        )
    assert_close(rows, trace, model)
    if mode == "predicted":
        for hidden, told in zip(rows["hidden"], trace.layers, strict=True):
            assert 0.1 < np.mean(told.predicted) < 0.8
            assert not hidden[~told.predicted].any()


@pytest.mark.parametrize("name", OTHERS)
def test_taps_of_models_that_are_never_silent(name: str, folder: Path) -> None:
    golden, path = model_of(folder, name)
    model, trace = reference.load(path), reference.Trace()
    reference.forward(model, golden.prompt, trace=trace)
    with Session(Model(path), n_threads=N_THREADS) as session:
        rows = tapped(session, golden.prompt, 1000, input=True, norm=True, hidden=True)
    assert_close(rows, trace, model)


@pytest.mark.parametrize("mask_prompts", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_tokens_that_want_logits_among_others(name: str, mask_prompts: bool, folder: Path) -> None:
    """Without mask_prompts, tokens that want no logits use all neurons, and are computed before the others of
    their chunk: the rows must come back in the order of the feed."""
    _, path = clear_model(folder, name)
    prompt = models.golden(name).prompt
    wanted = np.random.default_rng(1).random(len(prompt)) < 0.5
    model, trace = reference.load(path), reference.Trace()
    dense = np.zeros_like(wanted) if mask_prompts else ~wanted
    logits = reference.forward(model, prompt, predicted=True, n_dense=dense, trace=trace)
    for chunk in (5, 1000):
        with Session(
            Model(path), sparsity="predicted", n_threads=N_THREADS, mask_prompts=mask_prompts
        ) as session:
            rows = tapped(session, prompt, chunk, want=wanted, input=True, norm=True, hidden=True, score=True)
            assert_close(rows, trace, model)
            for hidden, told in zip(rows["hidden"], trace.layers, strict=True):
                assert not hidden[~told.predicted].any()
                assert told.predicted[dense].all()
            last = np.flatnonzero(wanted)[-1]
            if chunk == 1000:
                assert reference.relative_error(session.logits(-1), logits[last]) < tolerance()


@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-7b", "opt"])
@pytest.mark.parametrize("mask_prompts", [False, True])
def test_several_sequences_in_one_feed(name: str, mask_prompts: bool, folder: Path) -> None:
    """Rows of a feed belong to its tokens, whatever their sequence."""
    _, path = clear_model(folder, name)
    prompt = models.golden(name).prompt
    texts = [prompt[:20], prompt[20:38], prompt[7:20]]
    rng = np.random.default_rng(2)
    owner = rng.permutation(np.repeat(np.arange(3), [len(text) for text in texts]))
    tokens = np.empty(len(owner), np.int64)
    wanted = rng.random(len(owner)) < 0.5
    for seq, text in enumerate(texts):
        tokens[owner == seq] = text
    with (
        Session(
            Model(path),
            sparsity="predicted",
            n_threads=N_THREADS,
            n_seq=3,
            n_pool=256,
            n_batch=len(owner),
            mask_prompts=mask_prompts,
        ) as session,
        session.tap(input=True, norm=True, hidden=True, score=True) as tap,
    ):
        session.feed(tokens.tolist(), seq=owner.tolist(), want_logits=wanted.tolist())
        rows = copied(tap)
    model = reference.load(path)
    for seq, text in enumerate(texts):
        trace = reference.Trace()
        mine = owner == seq
        dense = np.zeros(len(text), bool) if mask_prompts else ~wanted[mine]
        reference.forward(model, text, predicted=True, n_dense=dense, trace=trace)
        part = {kind: [rows[kind][layer][mine] for layer in sorted(rows[kind])] for kind in KINDS}
        assert_close(part, trace, model)


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_a_tap_changes_no_answer(mode: Any, folder: Path) -> None:
    """A tapped layer is computed by matrix products, whose sums have another order."""
    golden, path = model_of(folder, "llama-relu-gqa")
    answers = []
    for on in (False, True):
        with Session(Model(path), sparsity=mode, n_threads=N_THREADS, type_k="f32", type_v="f32") as session:
            logits = []
            with session.tap([1] if on else [], hidden=True):
                for token in golden.prompt[:8]:
                    session.feed([int(token)])
                    logits.append(session.logits().copy())
            answers.append(np.stack(logits))
    # F32 sums of n_embd and n_ff terms: the worst case of the longer one, and a margin for the layers after.
    assert reference.relative_error(answers[1], answers[0]) < (AMX_TOLERANCE if rounding.BF16 else 2e-4)


# ---- how a tap is used


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    _, path = model_of(folder, "llama-relu-gqa", "predicted")
    with Session(Model(path), n_threads=1, n_batch=8) as one:
        yield one


def test_only_what_was_asked_for_is_there(session: Session) -> None:
    info = session.model.info
    with session.tap([2, 0], norm=True) as tap:
        assert tap.norm == tap.input == tap.hidden == tap.score == {}
        session.feed([1, 2, 3])
        assert sorted(tap.norm) == [0, 2] and tap.input == tap.hidden == tap.score == {}
        assert all(rows.shape == (3, info.n_embd) for rows in tap.norm.values())
        assert all(rows.dtype == np.float32 for rows in tap.norm.values())
        first = tap.norm[0].copy()
        session.feed([4])
        assert tap.norm[0].shape == (1, info.n_embd)
        assert not np.array_equal(tap.norm[0][0], first[0])
    after = tap.norm[0].copy()
    session.feed([5])
    np.testing.assert_array_equal(tap.norm[0], after)  # the block is over: nothing is written any more


def test_a_tapped_feed_has_at_most_n_batch_tokens(session: Session) -> None:
    with session.tap(hidden=True) as tap:
        session.feed(list(range(8)))
        rows = tap.hidden[0].copy()
        with pytest.raises(ArgumentError, match="9 tokens is longer than n_batch, which is 8"):
            session.feed(list(range(9)))
        assert session.length() == 8
        np.testing.assert_array_equal(tap.hidden[0], rows)
    session.feed(list(range(9)))
    assert session.length() == 17


@pytest.mark.parametrize("layer", [3, -1, 1 << 40])
def test_a_layer_out_of_range(session: Session, layer: int) -> None:
    with pytest.raises(ArgumentError), session.tap([0, layer], hidden=True):
        pass
    session.feed(list(range(20)))  # nothing of it is left
    with session.tap(hidden=True) as tap:
        session.feed([1])
        assert len(tap.hidden) == 3


def test_one_tap_at_a_time(session: Session) -> None:
    with session.tap([0], hidden=True) as tap:
        with pytest.raises(ArgumentError, match="tapped already"), session.tap([1], norm=True):
            pass
        session.feed([1])
        assert tap.hidden[0].shape == (1, session.model.info.n_ff)


def test_an_error_within_ends_the_tap(session: Session) -> None:
    with pytest.raises(KeyError), session.tap(hidden=True):
        raise KeyError
    session.feed(list(range(20)))


def test_scores_need_a_predictor(folder: Path) -> None:
    _, path = model_of(folder, "llama-relu-gqa")
    with Session(Model(path), n_threads=1) as session:
        with pytest.raises(ArgumentError, match="no predictor"), session.tap(score=True):
            pass
        session.feed([1])


# ---- thresholds


@pytest.mark.parametrize("source", ["file", "session", "one"])
@pytest.mark.parametrize("name", SPARSE)
def test_thresholds_let_through_exactly_what_numpy_says(name: str, source: str, folder: Path) -> None:
    golden, path = model_of(folder, name, "predicted")
    n_layer = golden.spec.n_layer
    thresholds = [0.7, -0.4, 0.0][:n_layer]
    if source == "one":
        thresholds = [0.3] * n_layer
    if source == "file":
        meta = models.metadata(golden.spec) | {"powerinfer.sparse_threshold": 99.0}
        meta["powerinfer.sparse_thresholds"] = thresholds
        tensors = models.sparse_tensors(
            models.file_tensors(golden.spec, models.draw(golden.spec)), golden.predictor
        )
        path = models.write(folder / f"{name}-each.gguf", meta, tensors, magic=b"PWRI")
    with Session(Model(path), sparsity="predicted", n_threads=N_THREADS, mask_prompts=True) as session:
        if source == "session":
            session.set_thresholds(thresholds)
        elif source == "one":
            session.set_threshold(thresholds[0])
        assert session.info.sparse_threshold == np.float32(min(thresholds))
        rows = tapped(session, golden.prompt[:24], 1000, norm=True, hidden=True, score=True)
        steps = session.last_step
    model = reference.load(path)
    for layer, threshold in enumerate(np.asarray(thresholds, np.float32)):
        masked = rows["score"][layer] >= threshold
        assert 0.05 < masked.mean() < 0.95
        assert steps[layer].n_predicted == masked.sum()
        hidden, full = rows["hidden"][layer], unmasked(model, layer, rows["norm"][layer])
        assert not hidden[~masked].any()
        assert reference.relative_error(hidden, np.where(masked, full, 0.0)) < tolerance()
        # Who is not masked and clearly fires does so.
        clear = masked & (np.abs(full) > 0.05 * np.abs(full).max())
        assert clear.sum() > 20 and hidden[clear].all()


def unmasked(model: reference.Model, layer: int, x: Array) -> Array:
    """act(gate) * up in float64."""
    p = f"blk.{layer}."
    how = reference.Ffn(reference.default_activation(model), 0.0, None, np.zeros(len(x), bool))
    trace = reference.Trace()
    reference.ffn(model, layer, x.astype(np.float64), x, how, trace)
    assert model.get(p + "ffn_up.weight") is not None
    return trace.layers[0].hidden


def test_thresholds_of_the_wrong_number_or_none(session: Session) -> None:
    for wrong in ([0.0, 0.0], [0.0] * 4, [], [[0.0] * 3]):
        with pytest.raises(ArgumentError, match="3 thresholds"):
            session.set_thresholds(wrong)  # type: ignore[arg-type]
    session.set_thresholds([1.0, 2.0, 3.0])
    with pytest.raises(ArgumentError, match="layer 1"):
        session.set_thresholds([0.0, float("nan"), 0.0])
    assert session.info.sparse_threshold == 1.0
    session.set_thresholds([float("inf"), float("-inf"), 0.5])
    session.feed([1, 2], want_logits=True)
    predicted = [step.n_predicted for step in session.last_step]
    assert predicted[:2] == [0, 2 * session.model.info.n_ff]


# ---- the sign predictor


def numpy_signs(x: Array) -> Array:
    """A zero, and a negative zero, count as positive."""
    return np.where(x < 0, -1.0, 1.0)


def write_signed(folder: Path, name: str, kind: str | None) -> Path:
    """A model with zeros of both signs in gate (up), and channels whose input to the FFN is 0."""
    spec = models.SPECS[name]
    path = folder / f"{name}-sign-{kind}.gguf"
    tensors = {key: value.copy() for key, value in models.file_tensors(spec, models.draw(spec)).items()}
    for i in range(spec.n_layer):
        rows = tensors.get(f"blk.{i}.ffn_gate.weight", tensors[f"blk.{i}.ffn_up.weight"])
        rows[::7, ::5] = 0.0
        rows[::3, 1::9] = -0.0
        norm = f"blk.{i}.ffn_norm" if f"blk.{i}.ffn_norm.weight" in tensors else f"blk.{i}.attn_norm"
        for part in ("weight", "bias"):
            if f"{norm}.{part}" in tensors:
                tensors[f"{norm}.{part}"][::11] = 0.0
    meta = models.metadata(spec) | {"powerinfer.predictor": "sign", "powerinfer.sparse_threshold": 0.05}
    stored = None if kind is None else GGMLQuantizationType[kind]
    return models.write(path, meta, tensors, kind=stored)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", SPARSE)
def test_sign_scores_are_numpys(name: str, kind: str | None, folder: Path) -> None:
    """To the last bit, on the normed input that the tap shows: sums of signs are integers."""
    path = write_signed(folder, name, kind)
    golden, model = models.golden(name), reference.load(path)
    for chunk in (1, 1000):
        with Session(Model(path), n_threads=N_THREADS, mask_prompts=True) as session:
            assert session.model.info.predictor == "sign" and session.info.sparsity == "predicted"
            rows = tapped(session, golden.prompt, chunk, norm=True, hidden=True, score=True)
            steps = session.last_step
        for layer in range(golden.spec.n_layer):
            p = f"blk.{layer}."
            deciding = model.get(p + "ffn_gate.weight")
            deciding = model[p + "ffn_up.weight"] if deciding is None else deciding
            x = rows["norm"][layer]
            assert np.any(x == 0)
            sums = numpy_signs(x) @ numpy_signs(deciding).T
            expected = sums.astype(np.float32) / np.float32(golden.spec.n_embd)
            np.testing.assert_array_equal(rows["score"][layer], expected)
            masked = expected >= np.float32(0.05)
            assert 0.05 < masked.mean() < 0.95
            assert not rows["hidden"][layer][~masked].any()
            if chunk == 1000:
                assert steps[layer].n_predicted == masked.sum()


@pytest.mark.parametrize("name", SPARSE)
def test_signs_instead_of_the_files_predictor(name: str, folder: Path) -> None:
    """A caller may ask for signs where the file has fc1 and fc2; a threshold of -1 lets all through."""
    golden, path = model_of(folder, name, "predicted")
    expected = reference.forward(reference.load(path), golden.prompt)
    with Session(
        Model(path, predictor="sign"), sparsity="predicted", n_threads=N_THREADS, mask_prompts=True
    ) as session:
        session.set_threshold(-1.0)
        for chunk in (1, 1000):
            session.drop()
            logits = []
            for at in range(0, len(golden.prompt), chunk):
                session.feed(golden.prompt[at : at + chunk], want_logits=True)
                logits += [session.logits(i).copy() for i in range(session.n_logits)]
            assert reference.relative_error(logits, expected) < tolerance()


def test_the_row_sparse_operator_masks_by_signs_too(folder: Path) -> None:
    """Untapped tokens that come one at a time are computed by it; tapped ones were checked above."""
    golden = models.golden("llama-relu-gqa")
    path = write_signed(folder, "llama-relu-gqa", None)
    answers, predicted = [], []
    for on in (False, True):
        with (
            Session(Model(path), n_threads=N_THREADS, type_k="f32", type_v="f32") as session,
            session.tap([0, 1, 2] if on else [], hidden=True),
        ):
            for token in golden.prompt[:16]:
                session.feed([int(token)])
                answers.append(session.logits().copy())
                predicted.append([step.n_predicted for step in session.last_step])
    assert predicted[:16] == predicted[16:]
    dense = reference.forward(reference.load(path), golden.prompt[:16])
    assert reference.relative_error(answers[:16], dense) > 0.1
    assert reference.relative_error(answers[:16], answers[16:]) < 1e-4


@pytest.mark.parametrize("name", ["arcee", "nemotron"])
def test_squared_relu_masked_by_signs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come one at a time, untapped, are answered as by numpy with its own mask."""

    def masked_ffn(model: reference.Model, layer: int, x: Array, *_: Any) -> Array:
        up, down = (model[f"blk.{layer}.ffn_{part}.weight"] for part in ("up", "down"))
        score = numpy_signs(x) @ numpy_signs(up).T / x.shape[1]
        return np.where(score >= 0.05, np.maximum(x @ up.T, 0) ** 2, 0) @ down.T

    ids, path = models.golden(name).prompt[:16], write_signed(folder, name, None)
    with Session(Model(path), n_threads=N_THREADS, type_k="f32", type_v="f32") as session:
        answers = []
        for token in ids:
            session.feed([int(token)])
            answers.append(session.logits().copy())
        n_ff = models.SPECS[name].n_ff
        assert all(0 < step.n_computed < step.n_predicted < n_ff for step in session.last_step)
    everything = reference.forward(reference.load(path), ids)
    monkeypatch.setattr(reference, "ffn", masked_ffn)
    expected = reference.forward(reference.load(path), ids)
    assert reference.relative_error(answers, expected) < 1e-4
    assert reference.relative_error(answers, everything) > 0.1


def test_every_row_of_a_feed_that_is_cut(folder: Path) -> None:
    """More tokens decode than one chunk takes: each has its own row all the same."""
    _, path = model_of(folder, "llama-mha")
    n = 40
    with Model(path) as model, Session(model, n_ctx=64, n_pool=64 * n, n_seq=n, n_threads=N_THREADS) as s:
        ids = [3 + i for i in range(n)]
        with s.tap(input=True) as tap:
            s.feed(ids, seq=list(range(n)), want_logits=True)
            together = tap.input[1].copy()
            for i in range(n):
                s.drop(i)
                s.feed([ids[i]], seq=i)
                np.testing.assert_allclose(together[i], tap.input[1][0], atol=AMX_TOLERANCE)
    assert len(np.unique(together, axis=0)) == n
