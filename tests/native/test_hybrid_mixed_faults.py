"""Prompts and sequences' next tokens in one program of a device that fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from powerinfer import DeviceError
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native.faults import Faults, with_faults, with_the_library
from tests.native.hybrid import Arrays
from tests.native.test_hybrid_mixed import GENERATED, PROMPT, feed, opened, tokens

N_PART, N_BEFORE = 24, 20
PROMPTS, NEXT = (10, 11), (0, 1, 2)


test_with_the_test_library = with_the_library(__file__)


def begin(s: Session) -> None:
    rng = np.random.default_rng(3)
    for q in (*PROMPTS, *NEXT):
        s.drop(q)
        s.feed(tokens(rng, N_BEFORE + q), seq=q, want_logits=False)


def mixed(s: Session) -> Arrays:
    """Parts of two prompts, and the next tokens of three sequences."""
    rng = np.random.default_rng(4)
    fed = [(t, q, PROMPT) for q in PROMPTS for t in tokens(rng, N_PART)]
    fed += [(tokens(rng, 1)[0], q, GENERATED) for q in NEXT]
    return feed(s, [t for t, _, _ in fed], [q for _, q, _ in fed], [kind for _, _, kind in fed])


def following(s: Session) -> Arrays:
    return [feed(s, [7], [q], [GENERATED])[0] for q in (*PROMPTS, *NEXT)]


@with_faults
@pytest.mark.parametrize("kind", ["launch", "die", "vanish"])
@pytest.mark.parametrize("name", ["llama-relu-gqa", "gemma2", "qwen35"])
def test_a_mixed_program_that_fails(name: str, kind: str, tmp_path: Path, faults: Faults) -> None:
    """Every sequence is as before: it goes on with the bits that it has without the failure."""
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as m, opened(m) as s:
        begin(s)
        want = mixed(s)
        assert s.last_step[0].n_tokens == len(PROMPTS) * N_PART + len(NEXT)
        want += following(s)
        for n in (1, 2, 5, 9, 14, 20):
            begin(s)
            setattr(faults, kind, 1 if kind == "launch" else n)
            with pytest.raises(DeviceError, match="asked for"):
                mixed(s)
            setattr(faults, kind, 0)
            lengths = {q: s.length(q) for q in (*PROMPTS, *NEXT)}
            assert lengths == {q: N_BEFORE + q for q in (*PROMPTS, *NEXT)} and s.n_logits == 0
            got = mixed(s) + following(s)
            assert all(map(np.array_equal, got, want)), n
