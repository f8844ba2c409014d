"""Logits, greedy tokens and counts of the engine: every architecture, mode and instruction set.

Held to the goldens that transformers computed and, where no golden can exist, to the float64 reference. This
file runs on the instruction set that POWERINFER_ISA names or the best one. `make slow` runs the whole file
again on each of the others, in a process of its own, because the choice is made once per process.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer import Llama
from powerinfer._engine.session import LayerStep, Model, Session
from tests import models, other_isa, reference, rounding

ISAS = ("scalar", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot")
DENSE = sorted(models.SPECS)
SPARSE = sorted(name for name, spec in models.SPECS.items() if spec.predictor)
GATED = sorted(name for name in SPARSE if models.SPECS[name].family in ("llama", "bamboo"))
N_THREADS = 2

# Relative error of F16 weights and an F16 KV cache; AMX rounds a prompt's activations to bf16.
TOLERANCE = 2e-3
AMX_TOLERANCE = 1e-2
ALL_PASS = -1e30


def tolerance(n_together: int, n_layer: int = 3) -> float:
    """Allowed relative error of logits when n tokens are computed together. Roundings of activations add up
    as the root of the layers, of which most of these models have two or three."""
    depth = math.sqrt(max(n_layer, 3) / 3)
    return AMX_TOLERANCE * depth if rounding.BF16 and n_together > 1 else TOLERANCE


@dataclass
class Files:
    """Model files of one test run, written when first asked for."""

    folder: Path

    def golden(self, name: str, kind: str) -> tuple[models.Golden, Path]:
        """A golden and its model's file; kind "pass": the dense golden, on a file that predicts all."""
        golden = models.golden(name, "dense" if kind == "pass" else kind)
        path = self.folder / f"{name}-{kind}.gguf"
        if not path.exists():
            if kind == "pass":
                models.write_sparse(path, golden.spec, models.draw_predictor(golden.spec), ALL_PASS)
            elif golden.predictor:
                models.write_sparse(path, golden.spec, golden.predictor, golden.threshold)
            else:
                models.write_dense(path, golden.spec)
        return golden, path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("models"))


def cases() -> list[tuple[str, str, str]]:
    """(name, kind of golden, sparsity) of everything that must give a golden's answer."""
    out = []
    for name, spec in models.SPECS.items():
        exact = ["dense", "exact"] if spec.relu else ["dense"]
        out += [(name, "dense", mode) for mode in [*exact, "auto"]]
        if spec.predictor:
            out += [(name, "pass", mode) for mode in ("dense", "exact", "predicted")]
            out += [(name, "predicted", "predicted"), (name, "decode", "predicted")]
    return out


def open_session(path: Path, sparsity: Any, n_threads: int = N_THREADS, **options: Any) -> Session:
    return Session(Model(path), sparsity=sparsity, n_threads=n_threads, **options)


def feed_all(session: Session, tokens: Any, chunk: int) -> Any:
    """Logits [n, n_vocab] of all tokens, fed so many at a time."""
    rows = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        session.feed(part, want_logits=True)
        rows += [session.logits(i).copy() for i in range(len(part))]
    return np.stack(rows)


def continue_greedily(session: Session, n: int) -> tuple[list[int], Any]:
    """n tokens from the present logits on, and the logits they were chosen from."""
    tokens, rows = [], []
    for _ in range(n):
        rows.append(session.logits().copy())
        tokens.append(int(rows[-1].argmax()))
        session.feed(tokens[-1:])
    return tokens, np.stack(rows)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("name", "kind", "sparsity"), [case for case in cases() if case[1] != "decode"])
def test_prompt_logits(name: str, kind: str, sparsity: str, chunk: int, files: Files) -> None:
    golden, path = files.golden(name, kind)
    # Token by token, what takes most of the time with two threads is that they wait for each other.
    with open_session(path, sparsity, 1 if chunk == 1 else N_THREADS) as session:
        rows = feed_all(session, golden.prompt, chunk)
    assert reference.relative_error(rows, golden.logits) < tolerance(chunk, golden.spec.depth)


@pytest.mark.parametrize(("name", "kind", "sparsity"), cases())
def test_greedy_tokens(name: str, kind: str, sparsity: str, files: Files) -> None:
    golden, path = files.golden(name, kind)
    with open_session(path, sparsity, N_THREADS if sparsity in ("exact", "predicted") else 1) as session:
        # Tokens that want no logits are computed with all neurons: that is what sets "decode" apart.
        session.feed(golden.prompt, want_logits=True if kind == "predicted" else None)
        if kind == "predicted":
            first = session.logits(-1).copy()
            session.feed([int(first.argmax())])
            tokens, _ = continue_greedily(session, len(golden.greedy) - 1)
            tokens = [int(first.argmax()), *tokens]
        else:
            tokens, rows = continue_greedily(session, len(golden.greedy))
            if kind == "decode":
                assert reference.relative_error(rows, golden.logits) < tolerance(2, golden.spec.depth)
    assert tokens == golden.greedy.tolist()


@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-7b", "opt", "qwen3"])
def test_exact_and_dense_choose_the_same_neurons(name: str, files: Files) -> None:
    """Not only near: a silent neuron adds exactly nothing, so what remains is the order of a sum."""
    golden, path = files.golden(name, "dense")
    modes = ("dense", "exact") if golden.spec.relu else ("dense", "auto")
    rows = []
    for mode in modes:
        with open_session(path, mode) as session:
            rows.append(feed_all(session, golden.prompt, 1))
    # Sums of n_ff float32 terms in another order, through a few layers and the F16 rounding of K and V.
    assert reference.relative_error(rows[1], rows[0]) < 5e-4


@pytest.mark.parametrize(("type_kv", "limit"), [("f32", 1e-4), ("f16", TOLERANCE), ("q8_0", 3e-2)])
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3"])
def test_kv_types(name: str, type_kv: str, limit: float, files: Files) -> None:
    """One token at a time nothing but the KV cache is rounded."""
    golden, path = files.golden(name, "dense")
    with open_session(path, "auto", type_k=type_kv, type_v=type_kv) as session:
        rows = feed_all(session, golden.prompt, 1)
    assert reference.relative_error(rows, golden.logits) < limit


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("name", ["llama-relu-gqa", "falcon-40b", "opt", "qwen3", "gpt-oss"])
def test_quantised_weights(name: str, kind: str, files: Files) -> None:
    """Against the reference on the same dequantised weights: what differs is how activations are rounded."""
    golden, _ = files.golden(name, "dense")
    stored = GGMLQuantizationType[kind]
    path = files.folder / f"{name}-{kind}.gguf"
    if not path.exists():
        models.write_dense(path, golden.spec, kind=stored)
    expected = reference.forward(reference.load(path), golden.prompt)
    # Integer dot products take activations as 8-bit blocks: 1/254 of the largest of 32, 0.4 % a product.
    limit = {"F32": TOLERANCE, "BF16": AMX_TOLERANCE}.get(kind, 3e-2)
    for chunk in (1, 1000):
        with open_session(path, "auto") as session:
            rows = feed_all(session, golden.prompt, chunk)
        assert reference.relative_error(rows, expected) < max(limit, tolerance(chunk)), f"chunk {chunk}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", SPARSE)
def test_quantised_sparse_files(name: str, kind: str, files: Files) -> None:
    """A quantised PowerInfer file, all neurons let through, in every mode."""
    spec = models.SPECS[name]
    path = files.folder / f"{name}-pass-{kind}.gguf"
    if not path.exists():
        predictor = models.draw_predictor(spec)
        models.write_sparse(path, spec, predictor, ALL_PASS, kind=GGMLQuantizationType[kind])
    prompt = models.golden(name).prompt
    expected = reference.forward(reference.load(path), prompt)
    for mode in ("dense", "exact", "predicted"):
        for chunk in (1, 1000):
            with open_session(path, mode) as session:
                rows = feed_all(session, prompt, chunk)
            assert reference.relative_error(rows, expected) < 3e-2, f"{mode}, chunk {chunk}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "dense") for name in DENSE]
    + [(name, kind) for name in SPARSE for kind in ("predicted", "decode")],
)
def test_through_the_python_object(name: str, kind: str, files: Files) -> None:
    """Scores and greedy generation of Llama, which with logits_all wants logits of every prompt token."""
    golden, path = files.golden(name, kind)
    with Llama(path, n_ctx=256, n_threads=1, logits_all=kind != "decode", verbose=False) as llm:
        steps = llm.generate(golden.prompt.tolist(), temp=0.0, repeat_penalty=1.0)
        assert list(itertools.islice(steps, len(golden.greedy))) == golden.greedy.tolist()
        if kind != "decode":
            n = len(golden.prompt)
            assert reference.relative_error(llm.scores[:n], golden.logits) < tolerance(n, golden.spec.depth)


# ---- what is counted, and what is not read -----------------------------------------------------------------


def steps_of(session: Session, tokens: Any) -> list[list[LayerStep]]:
    """The counts of each token, fed one at a time: [token][layer]."""
    out = []
    for token in tokens:
        session.feed([int(token)])
        out.append(session.last_step)
    return out


@pytest.mark.parametrize("name", SPARSE)
def test_counts_are_those_of_the_reference(name: str, files: Files) -> None:
    golden, path = files.golden(name, "predicted")
    trace = reference.Trace()
    reference.forward(reference.load(path), golden.prompt, predicted=True, trace=trace)
    with open_session(path, "predicted") as session:
        steps = steps_of(session, golden.prompt)
    n_computed = n_active = n_gated_reference = n_active_reference = 0
    for layer, told in enumerate(trace.layers):
        # The golden's scores stay clear of the threshold, so the masks must agree neuron for neuron.
        assert [step[layer].n_predicted for step in steps] == told.predicted.sum(axis=1).tolist()
        for step in steps:
            one = step[layer]
            assert (one.n_tokens, one.n_sparse) == (1, 1)
            assert one.n_active <= one.n_computed <= one.n_predicted
        n_computed += sum(step[layer].n_computed for step in steps)
        n_active += sum(step[layer].n_active for step in steps)
        n_gated_reference += int(told.gated.sum())
        n_active_reference += int(told.active.sum())
    # A gate may lie so near to 0 that rounding decides its sign.
    assert n_computed == pytest.approx(n_gated_reference, rel=0.01)
    assert n_active == pytest.approx(n_active_reference, rel=0.01)


@pytest.mark.parametrize("name", SPARSE)
def test_rows_and_bytes_read(name: str, files: Files) -> None:
    """A token reads all listed gates, up where the gate fires, down where the product is not 0; F16 rows."""
    golden, path = files.golden(name, "predicted")
    spec = golden.spec
    row_bytes = 2 * spec.n_embd
    for mode in ("predicted", "exact", "dense"):
        with open_session(path, mode) as session:
            steps = steps_of(session, golden.prompt[:8])
        for step in steps:
            for layer, one in enumerate(step):
                listed = one.n_predicted if mode == "predicted" else spec.n_ff
                up = one.n_computed if name in GATED else 0  # ungated, the up row comes first
                expected = listed + up + (spec.n_ff if mode == "dense" else one.n_active)
                assert one.n_rows == expected, mode
                predictor = (
                    2 * spec.predictor[layer] * (spec.n_embd + spec.n_ff) if mode == "predicted" else 0
                )
                assert one.ffn_bytes == expected * row_bytes + predictor, mode
                if mode != "predicted":
                    assert one.n_predicted == spec.n_ff


@pytest.mark.parametrize("name", GATED)
def test_an_exact_predictor_gives_the_dense_tokens(name: str, files: Files) -> None:
    golden, _ = files.golden(name, "dense")
    path = files.folder / f"{name}-exact-predictor.gguf"
    models.write_sparse(path, golden.spec, models.exact_predictor(golden.spec, models.draw(golden.spec)))
    with open_session(path, "predicted") as session:
        session.feed(golden.prompt)
        tokens, _ = continue_greedily(session, len(golden.greedy))
        step = session.last_step
    assert tokens == golden.greedy.tolist()
    for one in step:
        assert 0 < one.n_predicted < golden.spec.n_ff
        assert one.n_rows == one.n_predicted + one.n_computed + one.n_active


def poisoned(path: Path, spec: models.Spec, predictor: Any, threshold: float, rows: list[Any]) -> Path:
    """The sparse file with NaN in every FFN row of the given neurons, per layer."""
    tensors = models.sparse_tensors(models.file_tensors(spec, models.draw(spec)), predictor)
    for layer, neurons in enumerate(rows):
        for part in ("gate", "up", "down_t"):
            name = f"blk.{layer}.ffn_{part}.weight"
            if name in tensors:
                tensors[name] = tensors[name].copy()
                tensors[name][neurons] = np.nan
    meta = models.metadata(spec) | {"powerinfer.sparse_threshold": threshold}
    return models.write(path, meta, tensors, magic=b"PWRI")


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("name", GATED)
def test_rows_that_no_token_needs_are_not_read(name: str, chunk: int, files: Files, tmp_path: Path) -> None:
    """With an exact predictor, NaN in the rows that no token of a short text predicts changes no bit."""
    spec = models.SPECS[name]
    predictor = models.exact_predictor(spec, models.draw(spec))
    tokens = models.golden(name).prompt[:4]
    clean = models.write_sparse(tmp_path / "clean.gguf", spec, predictor, 0.0)
    trace = reference.Trace()
    reference.forward(reference.load(clean), tokens, predicted=True, trace=trace)
    unused = []
    for layer in trace.layers:
        assert layer.scores is not None
        # Not predicted by any token, and not by a hair.
        unused.append(np.flatnonzero((layer.scores < -1e-2).all(axis=0)))
        assert len(unused[-1]) > 0
    bad = poisoned(tmp_path / "poisoned.gguf", spec, predictor, 0.0, unused)
    rows = []
    for path in (clean, bad):
        with open_session(path, "predicted") as session:
            rows.append(feed_all(session, tokens, chunk))
    assert np.isfinite(rows[1]).all()
    np.testing.assert_array_equal(rows[1], rows[0])


@pytest.mark.parametrize("name", SPARSE)
def test_rows_of_neurons_that_are_never_predicted(name: str, tmp_path: Path) -> None:
    """Neurons whose fc2 row is 0 stay below a positive threshold: 64 greedy tokens never touch them."""
    golden = models.golden(name, "predicted")
    spec, threshold = golden.spec, golden.threshold
    assert threshold > 0
    never = [np.arange(layer, spec.n_ff, 3) for layer in range(spec.n_layer)]
    predictor = []
    for (fc1, fc2), neurons in zip(golden.predictor, never, strict=True):
        fc2 = fc2.copy()
        fc2[neurons] = 0
        predictor.append((fc1, fc2))
    answers = []
    for label, rows in (("clean", []), ("poisoned", never)):
        path = poisoned(tmp_path / f"{label}.gguf", spec, predictor, threshold, rows)
        with open_session(path, "predicted") as session:
            feed_all(session, golden.prompt[:8], 1)
            answers.append(continue_greedily(session, 64))
    assert answers[0][0] == answers[1][0]
    np.testing.assert_array_equal(answers[1][1], answers[0][1])


def test_the_threshold_is_inclusive(tmp_path: Path) -> None:
    """A score equal to the threshold predicts: with fc2 = 0 every score is 0, like the default threshold."""
    spec = models.SPECS["llama-relu"]
    predictor = [(fc1, np.zeros_like(fc2)) for fc1, fc2 in models.draw_predictor(spec)]
    golden = models.golden("llama-relu")
    path = models.write_sparse(tmp_path / "zero.gguf", spec, predictor)
    with open_session(path, "predicted") as session:
        rows = feed_all(session, golden.prompt, 1)
        assert all(one.n_predicted == spec.n_ff for one in session.last_step)
        assert reference.relative_error(rows, golden.logits) < TOLERANCE
        session.set_threshold(1e-6)
        session.feed([1])
        assert all((one.n_predicted, one.n_rows) == (0, 0) for one in session.last_step)


@pytest.mark.parametrize("name", SPARSE)
def test_no_neuron_predicted(name: str, tmp_path: Path) -> None:
    """With an empty list the FFN is nothing, or its down bias, as OPT has one."""
    golden = models.golden(name)
    path = models.write_sparse(tmp_path / "none.gguf", golden.spec, models.draw_predictor(golden.spec), 1e30)
    expected = reference.forward(reference.load(path), golden.prompt, predicted=True)
    for chunk in (1, 1000):
        with open_session(path, "predicted") as session:
            rows = feed_all(session, golden.prompt, chunk)
            assert all(one.n_predicted == one.n_active == 0 for one in session.last_step)
        assert reference.relative_error(rows, expected) < tolerance(chunk)


# ---- what a file says about its activation -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-relu", "bamboo", "opt", "falcon-7b"])
def test_files_without_a_key_mean_their_architecture(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    meta = models.metadata(spec)
    del meta["powerinfer.hidden_act"]
    path = models.write(tmp_path / "plain.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    model = reference.load(path)
    prompt = models.golden(name).prompt
    expected = reference.forward(model, prompt)
    assert Model(path).info.activation == reference.default_activation(model)
    with open_session(path, "dense") as session:
        assert reference.relative_error(feed_all(session, prompt, 1), expected) < TOLERANCE


def test_a_relu_file_can_be_named_by_the_caller(tmp_path: Path) -> None:
    golden = models.golden("llama-relu")
    meta = models.metadata(golden.spec)
    del meta["powerinfer.hidden_act"]
    path = models.write(
        tmp_path / "plain.gguf", meta, models.file_tensors(golden.spec, models.draw(golden.spec))
    )
    with Session(Model(path, activation="relu"), sparsity="exact", n_threads=N_THREADS) as session:
        rows = feed_all(session, golden.prompt, 1000)
    assert reference.relative_error(rows, golden.logits) < tolerance(1000, golden.spec.depth)


@pytest.mark.parametrize("sparsity", ["exact", "dense"])
def test_fatrelu(sparsity: Any, tmp_path: Path) -> None:
    """relu with a threshold; it changes the answer by much more than rounding a gate across it can."""
    golden = models.golden("llama-relu-gqa")
    meta = models.metadata(golden.spec) | {"powerinfer.hidden_act_threshold": 0.5}
    path = models.write(
        tmp_path / "fat.gguf", meta, models.file_tensors(golden.spec, models.draw(golden.spec))
    )
    trace = reference.Trace()
    expected = reference.forward(reference.load(path), golden.prompt, trace=trace)
    assert reference.relative_error(golden.logits, expected) > 0.2
    for chunk in (1, 1000):
        with open_session(path, sparsity) as session:
            rows = feed_all(session, golden.prompt, chunk)
        assert reference.relative_error(rows, expected) < 10 * tolerance(chunk)
    with open_session(path, sparsity) as session:
        steps = steps_of(session, golden.prompt)
        session.drop()
        session.feed(golden.prompt, want_logits=True)
        together = session.last_step
    for layer, told in enumerate(trace.layers):
        assert sum(step[layer].n_active for step in steps) == pytest.approx(int(told.active.sum()), rel=0.02)
        # What the row-sparse operator reads and what matrix products count as read.
        passed = int(told.gated.sum()) if sparsity == "exact" else told.gated.size
        for n_computed in (sum(step[layer].n_computed for step in steps), together[layer].n_computed):
            assert n_computed == pytest.approx(passed, rel=0.02)


# ---- attention ---------------------------------------------------------------------------------------------

# Head sizes that fill no block of any format, and query heads per KV head: 1, 4, and all 71.
HEADS = {
    spec.name: spec
    for spec in (
        models.Spec("heads-24", "mistral", n_layer=1, n_embd=48, n_head_kv=2, head_dim=24, n_ff=64),
        models.Spec("heads-80", "opt", n_layer=1, n_embd=160, n_head=2, n_ff=64, act="relu"),
        models.Spec("heads-256", "llama", n_layer=1, n_head=8, n_head_kv=2, head_dim=256, n_ff=64),
        models.Spec("heads-71", "falcon", n_layer=1, n_embd=568, n_head=71, n_head_kv=1, n_ff=64, act="gelu"),
    )
}


@pytest.mark.parametrize(("name", "type_kv"), [*((name, "f16") for name in HEADS), ("heads-256", "q8_0")])
def test_attention_across_the_borders_of_blocks(name: str, type_kv: Any, tmp_path: Path) -> None:
    """Tiles of queries begin and end anywhere in a block of 64 positions, in contexts that end there too."""
    spec = HEADS[name]
    path = models.write_dense(tmp_path / "m.gguf", spec)
    tokens = np.arange(5, 135) * 31 % spec.n_vocab
    expected = reference.forward(reference.load(path), tokens)
    for cuts in ([63], [64, 65], [65, 129], [1, 63, 128]):
        for n in (cuts[-1] + 1, 130):
            with open_session(path, "auto", n_ctx=n, type_k=type_kv, type_v=type_kv) as session:
                parts = (part for part in np.split(tokens[:n], cuts) if part.size)
                rows = [feed_all(session, part, 1000) for part in parts]
            error = reference.relative_error(np.concatenate(rows), expected[:n])
            assert error < tolerance(n) + (0 if type_kv == "f16" else 1e-2)


# ---- the other instruction sets ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif("POWERINFER_ISA" in os.environ, reason="one instruction set was asked for")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    other_isa.run(isa, __file__)
