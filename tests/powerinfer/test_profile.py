"""Counting neurons over a text against the reference's traces; what the command writes and shows."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer._engine.counts import Counts
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.cli import main
from powerinfer.errors import ArgumentError, FileError, FormatError, UnsupportedError
from powerinfer.models import profile as module
from powerinfer.models import writer
from powerinfer.models.corpus import Corpus, read_corpus
from powerinfer.models.profile import plot, profile
from powerinfer.models.rewrite import rewrite
from powerinfer.models.statistics import read_activation_dir, read_counts, summarise_all
from tests import models, reference
from tests.native import test_mixtures

Array = Any
Captured = pytest.CaptureFixture[str]

RELU = ("llama-relu-gqa", "bamboo", "opt", "falcon-7b", "falcon-40b", "arcee", "nemotron")
BOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def text_of(name: str, n: int) -> Array:
    return np.random.default_rng(n).integers(3, models.SPECS[name].n_vocab, n, dtype=np.int32)


def expected(path: Path, tokens: Array, bos: int | None, n_ctx: int) -> tuple[Array, Array]:
    """Counts [n_layer, n_ff] by the reference, and of how many of them rounding may decide."""
    model = reference.load(path)
    head = [] if bos is None else [bos]
    n_layer, n_ff = int(model.key("block_count")), model["blk.0.ffn_up.weight"].shape[0]
    counts, doubtful = np.zeros((n_layer, n_ff), np.int64), np.zeros((n_layer, n_ff), np.int64)
    for at in range(0, len(tokens), n_ctx - len(head)):
        trace = reference.Trace()
        window = [*head, *tokens[at : at + n_ctx - len(head)]]
        reference.forward(model, window, trace=trace)
        for i, layer in enumerate(trace.layers):
            counts[i] += layer.active[len(head) :].sum(axis=0)
            doubtful[i] += near_zero(model, i, layer.ffn_input[len(head) :]).sum(axis=0)
    return counts, doubtful


def near_zero(model: reference.Model, layer: int, x: Array) -> Array:
    """Where what decides whether a neuron fires (gate, up of dReLU and of plain ones) is so near to 0 that
    the rounding of inputs, to bf16 at worst, may move it across."""
    near = np.zeros((len(x), model[f"blk.{layer}.ffn_up.weight"].shape[0]), bool)
    for part in ("gate", "up"):
        w, bias = model.get(f"blk.{layer}.ffn_{part}.weight"), model.get(f"blk.{layer}.ffn_{part}.bias")
        if w is not None and not (part == "up" and model.arch == "llama"):
            y = x @ w.T + (0 if bias is None else bias)
            near |= np.abs(y) < 0.03 * np.sqrt(np.mean(y**2))
    return near


@pytest.mark.parametrize(("n_batch", "bos"), [(512, BOS), (5, None)])
@pytest.mark.parametrize("name", RELU)
def test_counts_are_those_of_the_reference(name: str, n_batch: int, bos: int | None, folder: Path) -> None:
    """Windows of 16, the last one short; the BOS of each is not counted."""
    path, tokens = models.dense_file(folder, name), text_of(name, 75)
    counts, doubtful = expected(path, tokens, bos, 16)
    with Model(path) as model:
        found = profile(model, Corpus(tokens=tokens, bos=bos), n_ctx=16, n_batch=n_batch, n_threads=2)
    assert (found.n_tokens, found.counts.shape) == (75, counts.shape)
    assert found.counts.dtype == np.uint64
    assert np.all(np.abs(found.counts.astype(np.int64) - counts) <= doubtful)
    assert doubtful.sum() < 0.25 * counts.sum()
    assert found.counts.sum() == pytest.approx(counts.sum(), rel=5e-3)


def test_a_sparse_file_is_counted_without_its_predictor(folder: Path) -> None:
    """All neurons are computed: what a predictor lets through would say what it let through."""
    spec, tokens = models.SPECS["llama-relu-gqa"], text_of("llama-relu-gqa", 40)
    path = models.write_sparse(folder / "sparse.gguf", spec, models.draw_predictor(spec), 0.5)
    found = []
    for one in (path, models.dense_file(folder, "llama-relu-gqa")):
        with Model(one) as model:
            found.append(profile(model, Corpus(tokens=tokens, bos=None), n_ctx=40, n_threads=1))
    np.testing.assert_array_equal(found[0].counts, found[1].counts)


def test_fatrelu_counts_what_exceeds_the_threshold(folder: Path) -> None:
    spec, tokens = models.SPECS["llama-relu-gqa"], text_of("llama-relu-gqa", 40)
    meta = models.metadata(spec) | {"powerinfer.hidden_act_threshold": 0.5}
    path = models.write(folder / "fat.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    trace = reference.Trace()
    reference.forward(reference.load(path), tokens, trace=trace)
    with Model(path) as model:
        found = profile(model, Corpus(tokens=tokens, bos=None), n_ctx=40)
    active = sum(int(layer.active.sum()) for layer in trace.layers)
    assert int(found.counts.sum()) == pytest.approx(active, rel=0.01)
    assert summarise_all(found).active < 0.4


def test_the_first_tokens_of_a_text(folder: Path) -> None:
    path, tokens = models.dense_file(folder, "llama-relu-gqa"), text_of("llama-relu-gqa", 60)
    steps: list[tuple[int, int]] = []
    with Model(path) as model:
        part = profile(
            model,
            Corpus(tokens=tokens, bos=BOS),
            n_ctx=16,
            n_tokens=40,
            n_batch=10,
            progress=lambda done, total: steps.append((done, total)),
        )
        whole = profile(model, Corpus(tokens=tokens[:40], bos=BOS), n_ctx=16, n_batch=10)
        more = profile(model, Corpus(tokens=tokens, bos=BOS), n_tokens=1000)
    np.testing.assert_array_equal(part.counts, whole.counts)
    assert steps == [(n, 40) for n in (9, 15, 24, 30, 39, 40)]
    assert more.n_tokens == 60


def test_wide_models_are_counted_in_smaller_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokens = models.dense_file(folder, "llama-relu-gqa"), text_of("llama-relu-gqa", 40)
    spec = models.SPECS["llama-relu-gqa"]
    feeds: list[int] = []
    feed = Session.feed

    def spy(self: Session, ids: Any, **options: Any) -> None:
        feeds.append(len(ids))
        feed(self, ids, **options)

    monkeypatch.setattr(Session, "feed", spy)
    found = []
    for limit in (12 * 4 * spec.n_layer * spec.n_ff, 1, 1 << 30):
        monkeypatch.setattr(module, "MAX_TAP_BYTES", limit)
        with Model(path) as model:
            found.append(profile(model, Corpus(tokens=tokens, bos=BOS), n_ctx=41))
    assert feeds == [12, 12, 12, 5] + [1] * 41 + [41]
    # Batches of different sizes round differently, to bf16 at worst (1/256): which may move so many gates
    # across 0, at the density that a normal distribution has there.
    first = found[0].counts.astype(np.int64)
    for other in found[1:]:
        differences = np.abs(other.counts.astype(np.int64) - first).sum()
        assert differences < 0.4 * 2 / 256 * 40 * spec.n_layer * spec.n_ff


@pytest.mark.parametrize("name", ["qwen3", "falcon-gelu"])
def test_models_that_are_never_silent(name: str, folder: Path) -> None:
    path = models.dense_file(folder, name)
    with (
        Model(path) as model,
        pytest.raises(UnsupportedError, match=f"{models.SPECS[name].act}: every neuron fires.*ReLU"),
    ):
        profile(model, Corpus(tokens=text_of(name, 40), bos=None))


def test_arguments_that_cannot_be(folder: Path) -> None:
    with Model(models.dense_file(folder, "llama-relu-gqa")) as model:
        corpus = Corpus(tokens=text_of("llama-relu-gqa", 40), bos=BOS)
        for options, says in (
            (dict(n_ctx=1), "no room for text"),
            (dict(n_ctx=-3), "no room for text"),
            (dict(n_tokens=-1), "cannot be negative"),
            (dict(n_batch=0), "at least 1"),
        ):
            with pytest.raises(ArgumentError, match=says):
                profile(model, corpus, **options)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="empty"):
            profile(model, Corpus(tokens=np.zeros(0, np.int32), bos=BOS))
        with pytest.raises(ArgumentError):
            profile(model, Corpus(tokens=np.array([5, 99999], np.int32), bos=BOS))


@pytest.mark.parametrize("tensor", ["blk.0.ffn_up.weight", "output_norm.weight", "blk.2.attn_norm.weight"])
def test_a_broken_model_says_so(tensor: str, folder: Path) -> None:
    spec = models.SPECS["llama-relu-gqa"]
    tensors = dict(models.file_tensors(spec, models.draw(spec)))
    tensors[tensor] = np.full_like(tensors[tensor], np.nan)
    path = models.write(folder / "nan.gguf", models.metadata(spec), tensors)
    with Model(path) as model, pytest.raises(FormatError, match="not finite"):
        profile(model, Corpus(tokens=text_of("llama-relu-gqa", 40), bos=BOS))


def test_a_single_broken_weight_of_the_last_layer(folder: Path) -> None:
    """What it does to one token reaches no other token, yet it would be counted."""
    spec, tokens = models.SPECS["llama-relu-gqa"], text_of("llama-relu-gqa", 40)
    tensors = dict(models.file_tensors(spec, models.draw(spec)))
    sound = models.write(folder / "sound.gguf", models.metadata(spec), tensors)
    with Model(sound) as model, Session(model) as session, session.tap([2], norm=True) as tap:
        session.feed(tokens)
        x = tap.norm[2].copy()
    gate = tensors["blk.2.ffn_gate.weight"] = tensors["blk.2.ffn_gate.weight"].copy()
    gate[7, np.flatnonzero((x[0] > 0) & (x[-1] < 0))[0]] = np.inf  # the last token's gate is closed
    broken = models.write(folder / "one.gguf", models.metadata(spec), tensors)
    with Model(broken) as model, pytest.raises(FormatError, match="not finite"):
        profile(model, Corpus(tokens=tokens, bos=None), n_ctx=40)


# ---- the command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("it was the best of times it was the worst of times " * 4)
    return path


def run(*words: object) -> int:
    return main(["profile", *map(str, words)])


def test_counts_go_into_a_new_file_and_nothing_else_changes(
    sparse_path: Path, text: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out.gguf"
    assert run(sparse_path, "--text", text, "-c", 32, "-o", out, "-t", 1) == 0
    assert capsys.readouterr().err == ""
    with ModelFile(sparse_path) as before, ModelFile(out) as after:
        assert after.info.is_powerinfer
        assert after.tensors == before.tensors
        for tensor in before.tensors:
            np.testing.assert_array_equal(after.raw(tensor.name), before.raw(tensor.name))
        old, new = dict(before.raw_metadata()), dict(after.raw_metadata())
        assert {key: new[key] for key in old} == old
        assert set(new) - set(old) == {"powerinfer.neuron.counts", "powerinfer.neuron.tokens"}
        counts = read_counts(after)
        with Model(before, predictor="none") as model:
            found = profile(model, read_corpus(before, [text]), n_ctx=32, n_threads=1)
    assert counts is not None and counts.n_tokens == found.n_tokens
    np.testing.assert_array_equal(counts.counts, found.counts)


def test_in_place_replaces_older_counts(relu_path: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(relu_path.read_bytes())
    for n in (50, 20):
        assert run(path, "--text", text, "--tokens", n, "--in-place", "-t", 1) == 0
        with ModelFile(path) as file:
            counts = read_counts(file)
            assert counts is not None and counts.n_tokens == n
            assert sum(key.startswith("powerinfer.neuron") for key in file.metadata) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "text.txt"]


def test_the_originals_folder_there_and_back(
    relu_path: Path, text: Path, tmp_path: Path, capsys: Captured
) -> None:
    act, out = tmp_path / "act", tmp_path / "out.gguf"
    assert run(relu_path, "--text", text, "--activation-dir", act, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    words = (relu_path, "--read-activation", act, "--tokens", first["n_tokens"])
    assert run(*words, "-o", out, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first
    with ModelFile(out) as file:
        counts = read_counts(file)
    assert counts is not None and counts.n_tokens == first["n_tokens"]
    np.testing.assert_array_equal(counts.counts, read_activation_dir(act, n_tokens=first["n_tokens"]).counts)
    # It is there now, so it is not written over.
    assert run(relu_path, "--text", text, "--activation-dir", act) == 1
    assert "exists already" in capsys.readouterr().err


def test_the_table_says_what_the_counts_say(relu_path: Path, text: Path, capsys: Captured) -> None:
    assert run(relu_path, "--text", text) == 0
    out = capsys.readouterr().out
    assert run(relu_path, "--text", text, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    head, blank, names, *rows = out.splitlines()
    assert blank == "" and names.split() == ["layer", "active", "80", "%", "by", "90", "%", "by", "never"]
    assert head.startswith(f"over {told['n_tokens']} tokens: ")
    expected_rows = [*enumerate(told["layers"]), ("all", told["all"])]
    for row, (name, layer) in zip(rows, expected_rows, strict=True):
        found = re.fullmatch(r" *(\w+) +([\d.]+) % +([\d.]+) % +([\d.]+) % +([\d.]+) %", row)
        assert found is not None and found[1] == str(name)
        shares = [layer[key] for key in ("active", "carry_80", "carry_90", "never")]
        assert [float(x) for x in found.groups()[1:]] == pytest.approx([100 * x for x in shares], abs=0.051)
    assert (told["n_layer"], told["n_ff"]) == (2, 192)


def test_info_shows_what_was_counted(relu_path: Path, text: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(relu_path, "--text", text, "-o", tmp_path / "out.gguf") == 0
    assert main(["info", str(tmp_path / "out.gguf")]) == 0
    assert re.search(r"statistics +over \d+ tokens: [\d.]+% active", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["p.png", "p.svg", "p.PDF"])
def test_a_picture(name: str, relu_path: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert run(relu_path, "--text", text, "--plot", path) == 0
    begin = {"p.png": b"\x89PNG", "p.svg": b"<?xml", "p.PDF": b"%PDF"}[name]
    assert path.read_bytes().startswith(begin)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "counts", [np.zeros((2, 5)), np.array([[3, 0, 1]]), np.full((1, 1), 3), np.full((4, 2000), 2)]
)
def test_pictures_of_odd_counts(counts: Array, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(Counts(counts=counts.astype(np.uint64), n_tokens=3), tmp_path / "p.svg", title="$x_ % <b>")
    drawn = (tmp_path / "p.svg").read_text()
    assert "neurons, the hottest first" in drawn


def test_a_picture_without_matplotlib(
    relu_path: Path, text: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the model runs, not after."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Session, "feed", None)
    assert run(relu_path, "--text", text, "--plot", tmp_path / "p.png") == 1
    assert "powerinfer[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "NEW/none/out.gguf"], "No such file or directory"),
        (["-o", "NEW"], "not a file that can be replaced"),
        (["-o", "NEW/out/"], "name of a folder"),
        (["--plot", "NEW/p.gif"], "ends in .pdf, .png, .svg"),
        (["--plot", "NEW/none/p.png"], "No such file or directory"),
        (["--activation-dir", "NEW/text.txt"], "exists already"),
        (["--activation-dir", "NEW/none/act"], "cannot be made"),
        (["--tokens", "-1"], "--tokens is -1"),
        (["-c", "1"], "no room for text"),
        (["-b", "0"], "at least 1"),
    ],
)
def test_errors_come_before_the_run(
    words: list[str],
    says: str,
    relu_path: Path,
    text: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Session, "feed", None)
    assert run(relu_path, "--text", text, *(word.replace("NEW", str(tmp_path)) for word in words)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_model_that_cannot_be_replaced_is_seen_before_the_run(
    relu_path: Path, text: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "feed", None)
    (tmp_path / "m.gguf").write_bytes(relu_path.read_bytes())
    split = gguf.GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=1)
    for name in "ab":
        split.add_tensor(name, np.zeros(4, np.float32))
    split.write_header_to_file()
    split.write_kv_data_to_file()
    split.write_tensors_to_file()
    split.close()
    part = tmp_path / "split-00001-of-00002.gguf"
    before = sorted(tmp_path.iterdir())
    assert run(part, "--text", text, "--in-place") == 1
    assert "part of the split model" in capsys.readouterr().err
    free = writer.shutil._ntuple_diskusage(9, 9, 1000)
    for patch, says in (
        ((os, "access", lambda path, mode: False), "protected against writing"),
        ((writer.shutil, "disk_usage", lambda path: free), "the disk has only"),
    ):
        with monkeypatch.context() as context:
            context.setattr(*patch)
            assert run(tmp_path / "m.gguf", "--text", text, "--in-place") == 1
        assert says in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_models_and_folders_that_cannot_be_profiled(
    bpe_path: Path, relu_path: Path, text: Path, tmp_path: Path, capsys: Captured
) -> None:
    for words, says in (
        ((bpe_path, "--text", text), "silu: every neuron fires"),
        ((relu_path, "--text", tmp_path / "no.txt"), "no.txt"),
        ((relu_path, "--read-activation", tmp_path), "holds no activation_0.pt"),
        ((tmp_path / "no.gguf", "--text", text), "no.gguf"),
    ):
        assert run(*words) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err


def test_an_activation_that_the_file_does_not_name(bpe_path: Path, text: Path, capsys: Captured) -> None:
    assert run(bpe_path, "--text", text, "--activation", "relu", "--json") == 0
    assert 0.3 < json.loads(capsys.readouterr().out)["all"]["active"] < 0.7


@pytest.mark.parametrize(
    "words",
    [
        ["x.gguf"],
        ["x.gguf", "--text", "a", "--read-activation", "b"],
        ["x.gguf", "--text", "a", "-o", "b", "--in-place"],
        ["x.gguf", "--text", "a", "--activation", "silu"],
    ],
)
def test_wrong_usage(words: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        run(*words)
    assert end.value.code == 2
    assert "usage: powerinfer" in capsys.readouterr().err


def test_ctrl_c_writes_nothing_and_says_how_far_it_came(
    relu_path: Path, text: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, fed = Session.feed, []

    def interrupted(self: Session, ids: Any, **options: Any) -> None:
        feed(self, ids, **options)
        fed.append(len(ids))
        if len(fed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "feed", interrupted)
    words = (
        relu_path,
        "--text",
        text,
        "-c",
        16,
        "-o",
        tmp_path / "o.gguf",
        "--activation-dir",
        tmp_path / "a",
    )
    assert run(*words) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "powerinfer: stopped after 30 tokens were counted; nothing was written\n"
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_counts_that_cannot_be_kept_are_shown(
    relu_path: Path, text: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that filled up while neurons were counted for hours."""
    assert run(relu_path, "--text", text) == 0
    expected = capsys.readouterr().out

    def full(*_: object, **__: object) -> None:
        raise FileError("the disk is full")

    monkeypatch.setattr("powerinfer.cli.profile.rewrite", full)
    assert run(relu_path, "--text", text, "-o", tmp_path / "out.gguf") == 1
    captured = capsys.readouterr()
    assert captured.out == expected and captured.err == "powerinfer: the disk is full\n"


def test_the_original_reader_sees_an_ordinary_file(relu_path: Path, text: Path, tmp_path: Path) -> None:
    """The counts are keys; an independent reader finds the same tensors and the same logits."""
    out = tmp_path / "out.gguf"
    assert run(relu_path, "--text", text, "-o", out) == 0
    before, after = reference.load(relu_path), reference.load(out)
    assert before.tensors.keys() == after.tensors.keys()
    tokens = [1, 5, 9]
    np.testing.assert_array_equal(reference.forward(before, tokens), reference.forward(after, tokens))
    assert len(after.meta["powerinfer.neuron.counts"]) == 2 * 192


def test_the_demo(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "t.txt").write_text("The sun is a star. Rain falls from clouds. " * 10)
    assert run("demo", "--text", tmp_path / "t.txt", "--json", "-t", 2) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["all"]["active"] < 0.2


# ---- mixtures of experts


def uses(path: Path, tokens: Array, n_ctx: int) -> tuple[Array, Array]:
    """How often the reference chooses each expert, with BOS before each window, and in how many tokens of
    each layer rounding may decide: where the last that is chosen is hardly better than the next."""
    model = reference.load(path)
    n_used = int(model.key("expert_used_count"))
    found: Array = 0
    doubtful: Array = 0
    for at in range(0, len(tokens), n_ctx - 1):
        trace = reference.Trace()
        reference.forward(model, [BOS, *tokens[at : at + n_ctx - 1]], trace=trace)
        routers = np.stack(trace.routers)[:, 1:]
        best = np.argsort(-routers, axis=-1)
        found = found + np.stack([np.bincount(b[:, :n_used].ravel(), minlength=b.shape[1]) for b in best])
        ranked = np.take_along_axis(routers, best, axis=-1)
        margin = ranked[..., n_used - 1] - ranked[..., n_used]
        doubtful = doubtful + (margin < 0.02 * routers.std()).sum(axis=1)
    return found, doubtful


@pytest.mark.parametrize("n_batch", [512, 5])
@pytest.mark.parametrize("name", ["mixtral", "smallthinker"])
def test_uses_of_experts_are_those_of_the_reference(name: str, n_batch: int, tmp_path: Path) -> None:
    """In all layers, the last one too; BOS is not counted."""
    path = test_mixtures.write(tmp_path / "m.gguf", name)
    tokens = np.array(test_mixtures.TOKENS, np.int32)
    expected_uses, doubtful = uses(path, tokens, 33)
    with Model(path) as model:
        counts = profile(model, Corpus(tokens=tokens, bos=BOS), n_ctx=33, n_batch=n_batch, n_threads=2)
    assert counts.unit == "experts" and counts.n_tokens == len(tokens)
    assert (counts.counts.sum(axis=1) == len(tokens) * test_mixtures.SPEC.n_used).all()
    moved = np.abs(counts.counts.astype(np.int64) - expected_uses).sum(axis=1)
    assert (moved <= 2 * doubtful).all() and doubtful.sum() < 0.1 * len(tokens) * len(doubtful)


def test_layers_that_guess_at_further_tokens_have_no_counts(tmp_path: Path) -> None:
    """What is written of a model whose last layer is not computed is read again."""
    keys = {"block_count": test_mixtures.N_LAYER + 1, "nextn_predict_layers": 1}
    path, out = test_mixtures.write(tmp_path / "m.gguf", "glm4moe", keys), tmp_path / "out.gguf"
    with Model(path) as model:
        counts = profile(model, Corpus(tokens=np.arange(20, dtype=np.int32), bos=None), n_threads=1)
        assert counts.n_layer == test_mixtures.N_LAYER
        rewrite(model.file, out, keys=counts.keys)
    with Model(out) as model:
        again = read_counts(model.file)
    assert again is not None and np.array_equal(again.counts, counts.counts)


def test_the_command_counts_experts(tmp_path: Path, capsys: Captured) -> None:
    path, out = test_mixtures.write(tmp_path / "m.gguf", "qwen2moe"), tmp_path / "out.gguf"
    text = tmp_path / "t.txt"
    text.write_text("ab cd " * 60)
    words = ["profile", str(path), "--text", str(text), "-o", str(out), "-t", "1", "--tokens", "90"]
    assert main([*words, "--activation-dir", str(tmp_path / "act")]) == 0
    assert "quarter of the experts" in capsys.readouterr().out
    with ModelFile(out) as file:
        counts = read_counts(file)
        assert file.metadata["powerinfer.expert.tokens"] == 90
    assert counts is not None and counts.unit == "experts"
    n_expert, n_used = test_mixtures.SPEC.n_expert, test_mixtures.SPEC.n_used
    assert counts.counts.shape == (test_mixtures.N_LAYER, n_expert)
    assert (counts.counts.sum(axis=1) == 90 * n_used).all()
    assert main(["info", str(out)]) == 0
    assert "10, 25 and 50 % of the experts" in capsys.readouterr().out
    words = ["profile", str(path), "--read-activation", str(tmp_path / "act"), "--tokens", "90", "--json"]
    assert main(words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["n_expert"] == n_expert and table["all"]["used"] == pytest.approx(n_used / n_expert)
    best = np.sort(counts.counts, axis=1)[:, ::-1][:, : n_expert // 2].sum(axis=1)
    assert table["all"]["carried_50"] == pytest.approx((best / (90 * n_used)).mean())


def test_a_picture_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = Counts(counts=np.array([[5, 1, 0, 2], [1, 1, 3, 3]], np.uint64), n_tokens=8, unit="experts")
    plot(counts, tmp_path / "p.svg", title="m")
    assert (tmp_path / "p.svg").stat().st_size > 1000
