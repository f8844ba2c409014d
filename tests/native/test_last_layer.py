"""Behind the last layer only tokens whose logits are wanted are computed, to the bits of computing all. A tap
makes a session compute all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer._engine.session import Model, Session, TokenKind
from tests import models

SPEC = replace(models.SPECS["llama-relu"], n_embd=256, n_head=8, n_ff=512, n_ctx=512)
CASES = [
    (SPEC, Kind.Q8_0, "exact", "mlp"),
    (SPEC, Kind.Q4_0, "dense", "mlp"),
    (SPEC, Kind.Q4_0, "predicted", "mlp"),
    (SPEC, None, "predicted", "sign"),
    (replace(SPEC, n_head_kv=2), None, "dense", "mlp"),
    (replace(models.SPECS["falcon-7b"], n_ctx=512), None, "predicted", "mlp"),
    (replace(models.SPECS["falcon-7b"], n_ctx=512), None, "exact", "mlp"),
    (replace(models.SPECS["opt"], n_ctx=512), Kind.Q8_0, "predicted", "mlp"),
    (replace(models.SPECS["opt"], n_ctx=512), None, "exact", "mlp"),
]
Ids = npt.NDArray[np.int32]


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0].arch}-{c[1] and c[1].name}-{c[2]}-{c[3]}")
def case(request: Any, tmp_path: Path) -> Iterator[tuple[Model, dict[str, Any]]]:
    spec, kind, sparsity, predictor = request.param
    path = models.write_sparse(tmp_path / "m.gguf", spec, models.draw_predictor(spec), kind=kind)
    with Model(path, predictor=predictor) as model:
        yield model, {"n_ctx": 512, "n_batch": 128, "n_threads": 3, "n_seq": 4, "sparsity": sparsity}


def prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(3, 290, n).astype(np.int32)


def logits(s: Session, n: int) -> npt.NDArray[np.float32]:
    return np.stack([s.logits(i).copy() for i in range(n)]) if n else np.zeros((0, 0), np.float32)


def same(model: Model, options: dict[str, Any], feeds: Sequence[tuple[Ids, Any, Any]]) -> None:
    """Feeds (tokens, sequence, wants) have the same logits and hidden states with a tap and without."""
    with Session(model, **options) as s, Session(model, **options) as tapped:
        for ids, seq, wants in feeds:
            n = sum(map(bool, wants)) if isinstance(wants, list) else int(wants is None)
            s.feed(ids, seq=seq, want_logits=wants)
            with tapped.tap([0], input=True):
                tapped.feed(ids, seq=seq, want_logits=wants)
            assert np.array_equal(logits(s, n), logits(tapped, n))
            assert all(np.array_equal(s.hidden(i), tapped.hidden(i)) for i in range(n))
        for seq in range(4):
            if s.length(seq):
                assert s.save(seq=seq) == tapped.save(seq=seq)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 2, 9, 16, 17, 40, 65, 128])
def test_a_prompt(case: tuple[Model, dict[str, Any]], n: int) -> None:
    same(*case, [(prompt(n), 0, None), (prompt(1, 1), 0, None), (prompt(24, 2), 0, None)])


def test_masked_prompts(case: tuple[Model, dict[str, Any]]) -> None:
    model, options = case
    same(model, options | {"mask_prompts": True}, [(prompt(40), 0, None), (prompt(40, 1), 0, False)])


def test_a_prompt_in_parts(case: tuple[Model, dict[str, Any]]) -> None:
    same(
        *case,
        [
            (prompt(64), 0, False),
            (prompt(40, 1), 0, False),
            (prompt(3, 2), 0, False),
            (prompt(1, 3), 0, None),
        ],
    )


def test_wants_anywhere(case: tuple[Model, dict[str, Any]]) -> None:
    rng = np.random.default_rng(3)
    feeds = [
        (prompt(60), 0, [int(kind) * int(x) for x in rng.random(60) < density])
        for density in (0.03, 0.3)
        for kind in (TokenKind.GENERATED, TokenKind.SCORED)
    ]
    same(*case, feeds)


def test_sequences_together(case: tuple[Model, dict[str, Any]]) -> None:
    n = (40, 17, 3, 30)
    seq = [i for i, m in enumerate(n) for _ in range(m)]
    wants = [int(TokenKind.GENERATED) * (j == m - 1 and i != 1) for i, m in enumerate(n) for j in range(m)]
    one_each = [0, 1, 2, 3]
    same(
        *case,
        [
            (prompt(sum(n)), seq, wants),
            (prompt(4, 1), one_each, [0, 0, int(TokenKind.GENERATED), 0]),
            (prompt(sum(n), 2), seq, wants),
            (prompt(4, 3), one_each, [int(TokenKind.GENERATED)] * 4),
        ],
    )


def test_what_is_saved(case: tuple[Model, dict[str, Any]]) -> None:
    """last_step says it; neurons are counted over all tokens if they are."""
    model, options = case
    with Session(model, **options) as s:
        s.feed(prompt(40))
        *others, last = s.last_step
        assert {step.n_tokens for step in others} == {40}
        assert last.n_tokens == 1
        s.drop()
        s.feed(prompt(40), want_logits=False)
        unread = s.last_step[-1]
        assert (unread.n_tokens, unread.ffn_bytes) == (0, 0)
        assert 0 < unread.bytes < last.bytes
        s.drop()
        s.feed(prompt(40), want_logits=True)
        assert s.last_step[-1].n_tokens == 40
    with Session(model, **options, count_neurons=True) as s:
        s.feed(prompt(40))
        assert s.last_step[-1].n_tokens == 40
