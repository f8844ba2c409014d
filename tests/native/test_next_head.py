"""The head that guesses at a further token (NextN, MTP) as a model, and what it reads of the one before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from tests import models, next_head, reference, rounding
from tests.native.test_hybrid_mixtures import place
from tests.native.test_logits import tolerance

IDS = [int(t) for t in np.random.default_rng(4).integers(3, 291, 45)]


def hidden_of(session: Session, ids: list[int]) -> Any:
    session.feed(ids)
    return session.all_hidden(len(ids))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", next_head.NAMES)
def test_its_logits(name: str, tmp_path: Path) -> None:
    """Of a prompt by matrix products and of tokens one by one, beside hidden states that the model leaves."""
    path = next_head.write(tmp_path / "m.gguf", name, own_output=name == "deepseek2-v3")
    model = reference.load(path)
    tokens = np.array(IDS)
    with (
        Model(path) as m,
        Model(path, next_head=True) as h,
        Session(m, n_threads=2, keep_hidden=True) as s,
        Session(h, n_threads=2) as head,
    ):
        assert m.info.n_next == 1 and m.info.n_layer == models.SPECS[name].n_layer
        assert h.info.n_layer == 1 and h.info.n_recurrent == 0
        hidden = hidden_of(s, IDS)
        want = next_head.last_hidden(model, tokens)
        assert reference.relative_error(hidden, want) < tolerance(len(IDS), models.SPECS[name].depth)
        n = len(IDS) - 1
        truth = next_head.logits(model, hidden[:n].astype(np.float64), tokens[1:])
        head.feed(IDS[1:], hidden=hidden[:n], want_logits=[TokenKind.SCORED] * n)
        prompt = np.stack([head.logits(i) for i in range(n)])
        # An expert at the border may be another one where prompts are rounded to bf16.
        wrong = [reference.relative_error(a, b) > tolerance(n) for a, b in zip(prompt, truth, strict=True)]
        assert sum(wrong) <= rounding.BF16
        head.drop()
        alone = []
        for i in range(n):
            head.feed(IDS[i + 1 : i + 2], hidden=hidden[i : i + 1])
            alone.append(head.logits().copy())
        assert reference.relative_error(np.stack(alone), truth) < tolerance(1)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_hidden_states_are_kept_of_all_tokens(name: str, tmp_path: Path) -> None:
    """However a feed is cut, of each sequence, with the bits that those have whose logits are wanted; and the
    logits stay what they are."""
    path = next_head.write(tmp_path / "m.gguf", name)
    with (
        Model(path) as m,
        Session(m, n_seq=2, n_threads=2, n_batch=16, keep_hidden=True) as s,
        Session(m, n_seq=2, n_threads=2, n_batch=16) as plain,
    ):
        for ids, kinds, seq in (
            (IDS, None, 0),
            (IDS, [TokenKind.SCORED] * len(IDS), 1),
            (IDS[:6], [TokenKind.GENERATED] * 6, [0, 1, 0, 1, 1, 0]),
        ):
            for one in (s, plain):
                one.feed(ids, want_logits=kinds, seq=seq)
            kept = s.all_hidden(len(ids))
            wanted = [len(ids) - 1] if kinds is None else range(len(ids))
            for row, i in enumerate(wanted):
                assert np.array_equal(s.hidden(row), kept[i])
                assert np.array_equal(s.logits(row), plain.logits(row))
            if seq == 0:
                first = kept
            elif seq == 1:  # a prompt's last token is computed as generated ones are
                assert np.array_equal(kept[:-1], first[:-1])
        with pytest.raises(ArgumentError, match="are not there"):
            s.all_hidden(5)
        with pytest.raises(ArgumentError, match="are not there"):
            plain.all_hidden(6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", ["all", "some", "none", "mixed"])
def test_beside_a_device(split: str, tmp_path: Path) -> None:
    """The hidden states of a prompt and of decoded tokens come back from it; the head may lie on it, too."""
    path = next_head.write(tmp_path / "m.gguf", "glm4moe")
    shape: dict[str, Any] = {"n_ctx": 128, "n_pool": 128, "n_seq": 4, "n_batch": 64, "sparsity": "dense"}
    shape |= {"n_threads": 2, "type_k": "f32", "type_v": "f32"}
    with (
        Model(path) as m,
        Model(path, next_head=True) as h,
        Session(m, keep_hidden=True, **shape) as cpu,
        Session(h, **shape) as head,
    ):
        with Session(m, keep_hidden=True, plan=place(m, split, 64), device="host", **shape) as s:
            for ids in (IDS, IDS[:1], IDS[:4]):
                for one in (cpu, s):
                    one.feed(ids)
                hidden = cpu.all_hidden(len(ids))
                assert reference.relative_error(s.all_hidden(len(ids)), hidden) < tolerance(len(ids))
                assert np.array_equal(s.hidden(), s.all_hidden(len(ids))[-1])
        with Session(h, plan=place(h, split, 64), device="host", **shape) as other:
            for ids in (IDS[:4], IDS[:1], IDS[:20]):
                given = np.resize(hidden, (len(ids), m.info.n_embd))
                for one in (head, other):
                    one.feed(ids, hidden=given)
                assert reference.relative_error(other.logits(), head.logits()) < tolerance(len(ids))


def test_without_drafting_it_takes_nothing(tmp_path: Path) -> None:
    """Neither memory, nor of plans; and the answers have the same bits."""
    spec = models.SPECS["glm4moe"]
    path, plain = next_head.write(tmp_path / "m.gguf", spec), models.write_dense(tmp_path / "p.gguf", spec)
    with Model(path) as a, Model(plain) as b:
        assert (a.info.n_next, b.info.n_next) == (1, 0)
        for name in ("n_layer", "n_weight_bytes", "n_parameters", "n_placed"):
            assert getattr(a.info, name) == getattr(b.info, name)
        with Session(a, n_threads=1) as sa, Session(b, n_threads=1) as sb:
            assert sa.info == sb.info
            sa.feed(IDS)
            sb.feed(IDS)
            assert np.array_equal(sa.logits(), sb.logits())


def test_bad_heads(tmp_path: Path) -> None:
    spec = models.SPECS["glm4moe"]
    meta, tensors = next_head.with_head(spec)
    with pytest.raises(UnsupportedError, match="no layer that guesses at further tokens"):
        Model(models.write_dense(tmp_path / "p.gguf", spec), next_head=True)
    for name, words in (
        ("nextn.eh_proj", r"layer 3 .* has no tensor blk\.3\.nextn\.eh_proj"),
        ("nextn.hnorm", r"no tensor blk\.3\.nextn\.hnorm"),
        ("attn_q", r"no tensor blk\.3\.attn_q"),
    ):
        rest = {key: value for key, value in tensors.items() if key != f"blk.3.{name}.weight"}
        path = models.write(tmp_path / "n.gguf", meta, rest)
        with Model(path) as m:  # which needs none of it
            assert m.info.n_next == 1
        with pytest.raises((UnsupportedError, FormatError), match=words):
            Model(path, next_head=True)
    more = tensors | {"blk.3.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(UnsupportedError, match=r"blk\.3\.attn_sinks"):
        Model(models.write(tmp_path / "n.gguf", meta, more), next_head=True)
    path = models.write(tmp_path / "m.gguf", meta, tensors)
    with Model(path) as m, Model(path, next_head=True) as h, Session(m) as s, Session(h) as head:
        with pytest.raises(ArgumentError, match="none are given"):
            head.feed([5])
        with pytest.raises(ArgumentError, match="reads none"):
            s.feed([5], hidden=np.zeros((1, 64), np.float32))
        with pytest.raises(ArgumentError, match="shape"):
            head.feed([5], hidden=np.zeros((2, 64), np.float32))


@pytest.mark.parametrize("name", ["deepseek2-v3", "glm4moe"])
def test_transformers_says_the_same(name: str, tmp_path: Path) -> None:
    """By its MTP layer, of which scripts/golden_next.py wrote the logits."""
    meta, tensors = next_head.with_head(models.SPECS[name])
    with np.load(models.GOLDEN / f"next-{name}.npz", allow_pickle=False) as golden:
        prompt, hidden, expected = golden["prompt"], golden["hidden"], golden["logits"]
        assert int(golden["checksum"]) == models.checksum(tensors)
    path = models.write(tmp_path / "m.gguf", meta, tensors)
    depth = models.SPECS[name].depth
    with Model(path) as m, Model(path, next_head=True) as h, Session(h, n_threads=2) as head:
        with Session(m, n_threads=2, keep_hidden=True) as s:
            s.feed(prompt)
            assert reference.relative_error(s.all_hidden(len(prompt))[:-1], hidden) < tolerance(40, depth)
        for i in range(len(hidden)):
            head.feed(prompt[i + 1 : i + 2], hidden=hidden[i : i + 1])
            row = i - len(hidden) + len(expected)
            if row >= 0:
                assert reference.relative_error(head.logits(), expected[row]) < tolerance(1)


def test_sessions_that_share_threads(tmp_path: Path) -> None:
    """One beside another takes turns with it, whoever calls, and goes on when the other one is closed."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-mha"])
    with Model(path) as m:
        first = Session(m, n_threads=2)
        second = Session(m, n_threads=1, beside=first)
        assert second.info.n_threads == 2
        with pytest.raises(ArgumentError, match="beside another"):
            Session(m, beside=second)
        alone = [answers(first), answers(second)]
        assert alone[0] == alone[1]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(answers, (first, second))) == alone
        first.close()
        assert answers(second) == alone[0]
        second.close()


def answers(session: Session) -> list[bytes]:
    session.drop()
    rows = []
    for token in IDS[:20]:
        session.feed([token])
        rows.append(session.logits().tobytes())
    return rows
