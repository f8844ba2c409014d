"""Random models of published shapes: they load, run in every mode, and are as sparse as was asked."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.formats import quantize
from powerinfer._engine.session import Model, Session, Sparsity
from powerinfer.models.statistics import read_counts
from scripts import make_dense, make_mixture, make_model
from tests import reference

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "scripts" / "make_model.py")]
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What the program says of words that it refuses; it writes nothing then."""

    def say(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["make_model.py", *words, "-o", str(tmp_path / "m.gguf")])
        try:
            status: object = make_model.main()
        except SystemExit as end:  # argparse's
            status = end.code
        assert status in (1, 2) and not list(tmp_path.iterdir())
        return capsys.readouterr().err

    return say


MODES: tuple[Sparsity, ...] = ("dense", "exact", "predicted")
TINY = ("tiny-llama", "tiny-bamboo", "tiny-falcon", "tiny-opt", "tiny-arcee", "tiny-nemotron")
ACTIVE = 0.1
N = 24  # tokens that are decoded


def pair(folder: Path, shape: str, mixture: str, **how: object) -> tuple[Path, Path]:
    """The same model as a plain and as a PowerInfer file."""
    paths = {"gguf": folder / "model.gguf", "powerinfer": folder / "model.powerinfer.gguf"}
    options = {"rank": 129, "active": ACTIVE, **how}
    make_model.write(paths, make_model.SHAPES[shape], shape, mixture, **options)
    return paths["gguf"], paths["powerinfer"]


def decode(model: Model, mode: Sparsity, n: int = N) -> tuple[list[int], dict[str, float]]:
    """n greedy tokens, and the shares of neurons that were predicted, computed and active."""
    tokens, counts = [], dict.fromkeys(("n_predicted", "n_computed", "n_active"), 0)
    pairs = 0
    with Session(model, n_ctx=128, n_threads=1, sparsity=mode) as session:
        session.feed([1, 5, 9, 300])
        for _ in range(n):
            tokens.append(int(session.logits().argmax()))
            session.feed(tokens[-1:])
            for step in session.last_step:
                pairs += step.n_sparse * model.info.n_ff
                for name in counts:
                    counts[name] += getattr(step, name)
    return tokens, {name: count / pairs for name, count in counts.items()}


@pytest.mark.parametrize("shape", TINY)
def test_a_sparse_model_runs_in_every_mode(shape: str, tmp_path: Path) -> None:
    plain_path, path = pair(tmp_path, shape, "F32")
    assert path.read_bytes()[:4] == b"PWRI" and plain_path.read_bytes()[:4] == b"GGUF"
    with Model(path) as model, Model(plain_path) as plain:
        assert model.info.architecture == shape.removeprefix("tiny-")
        assert model.info.has_predictor and model.info.can_skip_down
        assert not plain.info.has_predictor
        assert plain.info.activation == model.info.activation
        results = {mode: decode(model, mode) for mode in MODES}
        # Without a predictor: the same weights, products in another order.
        plain_tokens, plain_shares = decode(plain, "exact")
    dense_tokens, dense = results["dense"]
    assert make_model.END not in dense_tokens
    # 2 layers x 24 tokens x 1024 neurons; tokens differ much more than so many coin flips would.
    assert ACTIVE * 0.6 < dense["n_active"] < ACTIVE * 1.6
    for mode in ("exact", "predicted"):
        tokens, shares = results[mode]
        assert tokens == dense_tokens, mode
        # Rounding may turn single neurons whose gate is next to zero.
        assert shares["n_active"] == pytest.approx(dense["n_active"], rel=0.01), mode
    assert plain_tokens == dense_tokens
    assert plain_shares["n_active"] == pytest.approx(dense["n_active"], rel=0.01)
    assert results["predicted"][1]["n_predicted"] == pytest.approx(dense["n_active"], rel=0.01)
    assert results["exact"][1]["n_predicted"] == 1
    assert dense["n_computed"] == 1
    for mode in ("exact", "predicted"):
        assert results[mode][1]["n_computed"] == pytest.approx(dense["n_active"], rel=0.01)


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize(("mixture", "predictor"), [("Q4_0", ""), ("Q8_0", "F16"), ("Q4_0", "Q8_0")])
def test_predictors_stay_exact_when_quantised(
    shape: str, mixture: str, predictor: str, tmp_path: Path
) -> None:
    """What is planted are multiples of a step, so that four bits hold them. Activations are rounded to 127
    steps, by the gate's format and the predictor's: neurons within about 1 % of their threshold may turn."""
    plain_path, path = pair(tmp_path, shape, mixture, predictor_type=predictor)
    with ModelFile(path) as file:
        types = {t.name.removeprefix("blk.0."): t.type for t in file.tensors}
        assert types["ffn_up.weight"] == mixture and types["fc1.weight"] == (predictor or mixture)
    with Model(path) as model, Model(plain_path) as plain:
        exact, predicted = decode(model, "exact")[1], decode(model, "predicted")[1]
        assert ACTIVE * 0.6 < exact["n_active"] < ACTIVE * 1.6
        assert decode(plain, "exact")[1]["n_active"] == pytest.approx(exact["n_active"], rel=0.1)
    assert predicted["n_active"] == pytest.approx(exact["n_active"], rel=0.04)
    assert predicted["n_predicted"] == pytest.approx(exact["n_active"], rel=0.04)


def test_patterns_survive_four_bits() -> None:
    """The rows of every layer's first matrix have the same values after quantising as a few bits of rounding
    of the step allow, and sum to zero; a threshold's block holds nothing else."""
    b, constant = make_model.patterns(np.random.default_rng(3), 40, 1024)
    rows = b - np.linspace(-0.3, 0.6, 40, dtype=np.float32)[:, None] * constant
    raw = quantize(rows, "Q4_0").reshape(40, -1, 18)
    step = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float32)
    nibbles = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], axis=2).astype(np.float32) - 8
    np.testing.assert_allclose((nibbles * step).reshape(rows.shape), rows, rtol=2**-11, atol=1e-7)
    assert np.abs(rows.sum(axis=1)).max() < 1e-5
    np.testing.assert_allclose((b * b).sum(axis=1), 1, rtol=1e-5)
    assert not b[:, : make_model.BLOCK].any() and not (b[:, constant != 0]).any()


def test_the_asked_share_is_what_thresholds_mean() -> None:
    rng = np.random.default_rng(3)
    for active in (0.02, 0.1, 0.4):
        shares = make_model.firing(rng, 4096, active)
        assert shares.mean() == pytest.approx(active, rel=1e-3)
        hottest = np.sort(shares)[::-1][: len(shares) // 4].sum() / shares.sum()
        assert hottest > (0.75 if active < 0.2 else 0.5)  # a power law
        t = make_model.thresholds(shares)
        sample = rng.standard_normal((256, 1), dtype=np.float32)
        assert (sample > t).mean() == pytest.approx(active, rel=0.25)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-opt"])
def test_counts_are_those_of_the_planted_law(shape: str, tmp_path: Path) -> None:
    path = pair(tmp_path, shape, "F32")[1]
    with ModelFile(path) as file:
        counts = read_counts(file)
    assert counts is not None and counts.counts.shape == (2, 1024)
    expected = counts.counts / counts.n_tokens
    assert expected.mean() == pytest.approx(ACTIVE, rel=1e-3)
    with Model(path) as model:
        session = Session(model, n_ctx=512, n_batch=512, n_threads=1, sparsity="dense")
        with session, session.tap(hidden=True) as tap:
            session.feed(np.random.default_rng(5).integers(3, 512, 512))
            for layer in range(2):
                fired = (tap.hidden[layer] != 0).mean(axis=0)
                # 512 tokens, which share a vocabulary of 512: four standard deviations of a mean of 256.
                error = np.abs(fired - expected[layer])
                assert (
                    error < 4 * np.sqrt(expected[layer] * (1 - expected[layer]) / 256) + 0.02
                ).mean() > 0.99
                hot = np.argsort(expected[layer])[-100:]
                assert fired[hot].mean() == pytest.approx(expected[layer][hot].mean(), rel=0.1)


def test_counts_may_say_another_share(tmp_path: Path) -> None:
    """Statistics that a predictor does not keep to: the same weights, the same order, another mean."""
    s = make_model.SHAPES["tiny-llama"]
    paths = [tmp_path / "true.gguf", tmp_path / "other.gguf"]
    for path, counted in zip(paths, (0.0, 0.1), strict=True):
        make_model.write({"powerinfer": path}, s, "t", "F16", rank=64, active=0.18, counted=counted)
    with ModelFile(paths[0]) as true, ModelFile(paths[1]) as other:
        said = [read_counts(file) for file in (true, other)]
        assert all((true.raw(t.name) == other.raw(t.name)).all() for t in true.tensors)
    assert said[0] is not None and said[1] is not None
    means = [counts.counts.mean() / counts.n_tokens for counts in said]  # type: ignore[union-attr]
    assert means == [pytest.approx(0.18, rel=1e-3), pytest.approx(0.1, rel=1e-3)]
    order = np.lexsort((said[1].counts[0], said[0].counts[0]))
    assert (np.diff(said[1].counts[0][order].astype(np.int64)) >= 0).all()


def test_deep_layers_are_as_sparse_as_the_first(tmp_path: Path) -> None:
    shape = replace(make_model.SHAPES["tiny-llama"], n_layer=60)
    make_model.write({"powerinfer": tmp_path / "m.gguf"}, shape, "deep", "F16", rank=129, active=ACTIVE)
    with Model(tmp_path / "m.gguf") as model, Session(model, n_ctx=128, n_threads=1) as session:
        session.feed([1, 5, 9, 300])
        of_layer = np.zeros(60)
        for token in np.random.default_rng(1).integers(3, 512, N):
            session.feed([int(token)])
            of_layer += [step.n_active / 1024 / N for step in session.last_step]
    assert of_layer[-10:].mean() == pytest.approx(of_layer[:10].mean(), rel=0.1)


def test_both_forms_of_the_program(tmp_path: Path) -> None:
    words = ["tiny-bamboo", "--layers", "1", "--type", "q4_k", "--format", "both", "--rank", "256"]
    subprocess.run([*PROGRAM, *words, "-o", str(tmp_path / "m.gguf")], check=True)
    names = {"m.gguf", "m.powerinfer.gguf"}
    assert {path.name for path in tmp_path.iterdir()} == names
    with ModelFile(tmp_path / "m.gguf") as plain, ModelFile(tmp_path / "m.powerinfer.gguf") as sparse:
        assert plain.metadata["general.architecture"] == "llama"  # which llama.cpp knows
        assert plain.metadata["general.file_type"] == 15
        types = {t.name: t.type for t in plain.tensors}
        assert (types["output.weight"], types["blk.0.ffn_gate.weight"]) == ("Q6_K", "Q4_K")
        of_both = {t.name for t in plain.tensors} & {t.name for t in sparse.tensors}
        assert len(of_both) == len(plain.tensors) - 1
        for name in of_both:
            assert (plain.raw(name) == sparse.raw(name)).all(), name
    with Model(tmp_path / "m.gguf") as model:
        assert model.info.activation == "drelu"


def test_the_program_writes_a_dense_file(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    program = [*PROGRAM, "tiny-llama", "--layers", "1", "--type", "Q8_0", "--pure"]
    subprocess.run([*program, "-o", str(path)], check=True)
    with Model(path) as model:
        info = model.info
        assert (info.n_layer, info.activation, info.has_predictor) == (1, "relu", False)
        assert not info.can_skip_down  # quantised, and not transposed
        assert decode(model, "exact", 8)[0] == decode(model, "dense", 8)[0]
    with ModelFile(path) as file:
        assert {t.type for t in file.tensors} == {"Q8_0", "F32"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--type", "Q9"], "Q9"),
        (["--layers", "3"], "1 to 2"),
        (["--active", "1.5"], "0.9"),
        (["--counted", "-1"], "0.9"),
        (["--rank", "2"], "1024 neurons"),
    ],
)
def test_what_the_program_refuses(words: list[str], said: str, refused: Refused) -> None:
    assert said in refused("tiny-llama", *words)


def test_published_shapes_divide_into_blocks() -> None:
    for name, s in make_model.SHAPES.items():
        assert s.head_dim or s.n_embd % s.n_head == 0, name
        assert s.n_head % s.n_head_kv == s.n_ff % 256 == s.n_embd % 64 == 0, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "rho"),
    [(name, rho) for name in ("tiny-mixtral", "tiny-qwen3moe", "tiny-smallthinker") for rho in (0, 0.8)]
    + [("tiny-gpt-oss", 0)],
)
def test_routers_have_the_skew_and_the_locality_that_were_asked_for(
    shape: str, rho: float, tmp_path: Path
) -> None:
    """Their products in float64, against the law: what is left without the biases has mean 0, variance 1, and
    from token to token the correlation rho. A layer's experts are 8 independent directions or more."""
    s, law, n, begin = make_mixture.SHAPES[shape], make_mixture.Law(1.0, rho), 400, 30
    mixture = "MXFP4_MOE" if shape == "tiny-gpt-oss" else "Q4_0"
    make_mixture.write(tmp_path / "m.gguf", s, shape, mixture, law)
    trace = reference.Trace()
    tokens = np.random.default_rng(3).permutation(512)[:n]
    reference.forward(reference.load(tmp_path / "m.gguf"), tokens, trace=trace)
    biases = law.biases(s, np.random.SeedSequence(1).spawn(6)[2])
    # An AR(1) process of n tokens says as much as so many independent ones.
    told = (n - begin) * (1 - rho) / (1 + rho) * 8
    for layer, products in enumerate(trace.routers):
        z = products[begin:] - biases[layer]
        follows = rho if s.has_state(layer) else 0
        assert abs(z.mean()) < 4 / told**0.5 + 0.05
        assert z.var() == pytest.approx(1, abs=4 * (2 / told) ** 0.5 + 0.05)
        assert (z[1:] * z[:-1]).mean() / z.var() == pytest.approx(follows, abs=4 / told**0.5 + 0.02)
        assert np.corrcoef(products[begin:].mean(axis=0), biases[layer])[0, 1] > (0.7 if rho else 0.98)
    with ModelFile(tmp_path / "m.gguf") as file:
        counts = np.reshape(file.metadata["powerinfer.expert.counts"], (s.n_layer, s.n_expert))
        kinds = {t.type for t in file.tensors if t.name.endswith("_exps.weight")}
        assert kinds == {mixture.partition("_MOE")[0]}
        assert (counts.sum(axis=1) == file.metadata["powerinfer.expert.tokens"] * s.n_used).all()
    for layer in range(s.n_layer):
        assert np.corrcoef(counts[layer], np.exp(biases[layer]))[0, 1] > 0.8


@pytest.mark.parametrize("shape", ["tiny-qwen35moe", "tiny-qwen3next"])
def test_mixtures_with_delta_nets_load(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_mixture.write(path, make_mixture.SHAPES[shape], shape, "Q4_0", make_mixture.Law())
    with Model(path) as model, Session(model, n_ctx=32, n_threads=1) as session:
        assert model.info.n_recurrent == 3
        session.feed([5, 6, 7])
        assert 0.5 < session.logits().std() < 2


def test_a_mixture_loads_and_is_as_sparse_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = [
        "tiny-smallthinker",
        "--layers",
        "4",
        "--type",
        "Q8_0",
        "--active",
        "0.3",
        "--statistics",
        "none",
    ]
    subprocess.run([*PROGRAM, *words, "-o", str(path)], check=True)
    with Model(path) as model, Session(model, n_ctx=256, n_threads=1) as session:
        assert (model.info.n_layer, model.info.n_expert, model.info.n_expert_used) == (4, 16, 4)
        shares = []
        for token in np.random.default_rng(5).integers(3, 512, 40):
            session.feed([int(token)])
            shares += [step.n_active / model.info.n_neurons for step in session.last_step]
    assert np.mean(shares) == pytest.approx(0.3, rel=0.2)
    with ModelFile(path) as file:
        assert not [key for key in file.metadata if key.startswith("powerinfer.expert")]
        assert {t.type for t in file.tensors if "gate_inp" in t.name} == {"F32"}
        down = file.dequantize("blk.1.ffn_down_exps.weight")
        assert not down[:, 0].any() and len(np.unique(down[:, 1, 0])) == make_mixture.N_DRAWN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rho", "1"], "0.99"),
        (["--skew", "-1"], "and 10"),
        (["--format", "both"], "silent"),
        (["--layers", "9"], "1 to 2"),
    ],
)
def test_what_the_program_refuses_of_mixtures(words: list[str], said: str, refused: Refused) -> None:
    assert said in refused("tiny-mixtral", *words)


def test_both_forms_of_a_relu_mixture_give_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = ["tiny-smallthinker", "--layers", "4", "--type", "F32", "--format", "both"]
    subprocess.run([*PROGRAM, *words, "-o", str(path)], check=True)
    with Model(path) as plain, Model(tmp_path / "m.powerinfer.gguf") as turned:
        assert turned.info.can_skip_down and not plain.info.can_skip_down
        logits = []
        for model in (plain, turned):
            with Session(model, n_ctx=64, n_threads=1) as session:
                for token in (5, 9, 300, 77):
                    session.feed([token])
                logits.append(session.logits().copy())
    assert reference.relative_error(*logits) < 1e-5


@pytest.mark.parametrize("shape", [name for name in make_mixture.SHAPES if name.startswith("tiny")])
def test_the_engine_counts_what_was_planted(shape: str, tmp_path: Path) -> None:
    s, law = make_mixture.SHAPES[shape], make_mixture.Law(1.0)
    make_mixture.write(tmp_path / "m.gguf", s, shape, "Q8_0", law)
    said = make_mixture.check(tmp_path / "m.gguf", s, law, 1500)
    pairs = re.findall(r"experts: ([\d.]+)% \(([\d.]+)%\)", said)
    assert len(pairs) == 3
    for found, planted in pairs:  # 512 tokens of a vocabulary, and n_used experts of each
        assert float(found) == pytest.approx(float(planted), abs=6)


@pytest.mark.parametrize("shape", [name for name in make_dense.SHAPES if name.startswith("tiny-")])
def test_a_model_with_nothing_planted(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_dense.write(path, make_dense.SHAPES[shape], shape, "Q4_0")
    with Model(path) as model, Session(model, n_ctx=64, n_threads=1) as session:
        assert model.info.architecture == make_dense.SHAPES[shape].arch
        session.feed([1, 5, 9, 300])
        tokens = []
        for _ in range(8):
            assert np.isfinite(session.logits()).all()
            tokens.append(int(session.logits().argmax()))
            session.feed(tokens[-1:])
    assert make_model.END not in tokens
