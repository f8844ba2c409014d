"""Files of mixtures that are no valid ones: each is refused by a sentence with the fact. Routers that give no
numbers end in no crash. Split files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import FormatError, PowerInferError, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer.cli import main
from tests import models, reference
from tests.native.test_hybrid_mixtures import opened, place
from tests.native.test_mixtures import N_LAYER, SPEC, TOKENS, write

N, N_FF, N_EMBD = SPEC.n_expert, SPEC.n_ff_expert, SPEC.n_embd
F32 = np.float32

KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3moe", {"expert_count": 0}, "expert_count"),
    ("qwen3moe", {"expert_count": None}, "expert_count"),
    ("qwen3moe", {"expert_count": 4097}, "expert_count"),
    ("qwen3moe", {"expert_count": 2**32 - 1}, "expert_count"),
    ("qwen3moe", {"expert_count": "eight"}, "expert_count"),
    ("qwen3moe", {"expert_count": 8.5}, "expert_count"),
    ("qwen3moe", {"expert_count": N + 1}, "ffn_gate_inp"),
    ("qwen3moe", {"expert_count": N - 1}, "ffn_gate_inp"),
    ("qwen3moe", {"expert_used_count": 0}, "expert_used_count"),
    ("qwen3moe", {"expert_used_count": None}, "expert_used_count"),
    ("qwen3moe", {"expert_used_count": N + 1}, "expert_used_count"),
    ("qwen3moe", {"expert_used_count": 2**32 - 1}, "expert_used_count"),
    ("qwen3moe", {"expert_feed_forward_length": 0}, "expert_feed_forward_length"),
    ("qwen3moe", {"expert_feed_forward_length": N_FF + 1}, "ffn_gate_exps"),
    ("qwen3moe", {"expert_feed_forward_length": 2**31 - 1}, "expert_feed_forward_length"),
    ("qwen3moe", {"expert_feed_forward_length": 2**32 - 1}, "expert_feed_forward_length"),
    ("qwen3moe", {"expert_group_count": 2**32 - 1}, "expert_group_count"),
    ("groups", {"expert_group_used_count": 5}, "expert_group_used_count"),
    ("qwen3moe", {"expert_weights_scale": float("inf")}, "expert_weights_scale"),
    ("qwen3moe", {"expert_weights_norm": "yes"}, "expert_weights_norm"),
    ("qwen3moe", {"expert_gating_func": 256}, "expert_gating_func"),
]


def plain(name: str) -> str:
    """The variant of that name; qwen3moe is one with head norms and nothing else."""
    return "weights as they are" if name == "qwen3moe" else name


@pytest.mark.parametrize(("name", "change", "words"), KEYS)
def test_bad_keys(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", plain(name), change)
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass
    assert main(["info", str(path)]) == 0  # which says why, and does not fail


GATE, ROUTER = "blk.1.ffn_gate_exps.weight", "blk.1.ffn_gate_inp.weight"
DOWN, SHARED = "blk.2.ffn_down_exps.weight", "blk.1.ffn_gate_shexp.weight"
TENSORS: list[tuple[str, str, Any, str]] = [
    *(("qwen3moe", f"blk.3.ffn_{stem}.weight", None, rf"blk\.3\.ffn_{stem}") for stem in
      ("gate_inp", "gate_exps", "up_exps", "down_exps")),
    ("qwen3moe", ROUTER, np.zeros((N + 1, N_EMBD), F32), "ffn_gate_inp"),
    ("qwen3moe", ROUTER, np.zeros((N_EMBD, N), F32), "ffn_gate_inp"),
    ("qwen3moe", ROUTER, np.zeros(N * N_EMBD, F32), "ffn_gate_inp"),
    ("qwen3moe", GATE, np.zeros((N - 1, N_FF, N_EMBD), F32), "ffn_gate_exps"),
    ("qwen3moe", GATE, np.zeros((N, N_EMBD, N_FF), F32), "ffn_gate_exps"),
    ("qwen3moe", GATE, np.zeros((N * N_FF, N_EMBD), F32), "ffn_gate_exps"),
    ("qwen3moe", GATE, np.zeros((1, N, N_FF, N_EMBD), F32), "ffn_gate_exps"),
    ("qwen3moe", DOWN, np.zeros((N, N_FF, N_EMBD), F32), "ffn_down_exps"),
    ("qwen3moe", "blk.1.ffn_down_t_exps.weight", np.zeros((N, N_FF, N_EMBD), F32), "ffn_down"),
    ("qwen3moe", f"blk.{N_LAYER}.ffn_gate_inp.weight", np.zeros((N, N_EMBD), F32), "ffn_gate_inp"),
    ("qwen3moe", "blk.1.ffn_gate.weight", np.zeros((N_FF, N_EMBD), F32), r"blk\.1\.ffn_gate"),
    ("qwen2moe", SHARED, None, "ffn_gate_shexp"),
    ("qwen2moe", SHARED, np.zeros((N_FF + 3, N_EMBD), F32), "ffn_gate_shexp"),
    ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", np.zeros(N_EMBD + 1, F32), "ffn_gate_inp_shexp"),
    ("groups", "blk.1.exp_probs_b.bias", np.zeros(N + 1, F32), "exp_probs_b"),
    ("groups", "blk.1.exp_probs_b.bias", np.full(N, np.nan, F32), "exp_probs_b.bias is not finite"),
    ("groups", "blk.1.exp_probs_b.bias", np.full(N, -np.inf, F32), "exp_probs_b.bias is not finite"),
]  # fmt: skip


def changed(path: Path, tensors: dict[str, Any]) -> Path:
    """The file with other tensors; None: without one."""
    file = reference.load(path)
    values = {name: value.astype(F32) for name, value in file.tensors.items()} | tensors
    kept = {name: value for name, value in values.items() if value is not None}
    return models.write(path.with_suffix(".changed"), file.meta, kept)


@pytest.mark.parametrize(("name", "tensor", "value", "words"), TENSORS)
def test_bad_tensors(name: str, tensor: str, value: Any, words: str, tmp_path: Path) -> None:
    path = changed(write(tmp_path / "m.gguf", plain(name)), {tensor: value})
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["mixtral", "groups", "smallthinker", "gpt-oss"])
def test_a_router_that_gives_no_numbers_crashes_nothing(name: str, value: float, tmp_path: Path) -> None:
    """On either side; every token still has so many of the experts, on the CPU different ones."""
    path = write(tmp_path / "m.gguf", name)
    tensors: dict[str, Any] = {ROUTER: np.full((N, N_EMBD), value, F32)}
    tensors[ROUTER][1::2] = 1  # some of its rows are sound
    path = changed(path, tensors)
    with Model(path) as m:
        sessions = [Session(m, n_threads=2, n_ctx=128)]
        if name != "gpt-oss":
            sessions.append(opened(m, place(m, "some", 64)))
        for s in sessions:
            with s:
                try:
                    s.feed(TOKENS[:40], want_logits=True)
                    s.feed(TOKENS[:1])
                    s.feed(TOKENS[:5], want_logits=True)
                except PowerInferError:
                    continue
                uses = np.stack([layer.uses for layer in s.experts()])
                assert (uses.sum(axis=1) <= 46 * 3).all()
                assert s is not sessions[0] or (uses <= 46).all()


@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe"])
@pytest.mark.parametrize("command", ["svd", "sign", "check", "calibrate"])
def test_predictors_of_experts_are_refused(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "m.gguf", name)
    (tmp_path / "t.txt").write_text("a b " * 50)
    words = ["predictor", command, str(path), "--text", str(tmp_path / "t.txt")]
    assert main(words + ([] if command == "check" else ["-o", str(tmp_path / "x.gguf")])) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "8 experts" in error
    assert not (tmp_path / "x.gguf").exists()


def test_a_split_mixture_opens_as_one(tmp_path: Path) -> None:
    """Experts of one layer in several files; the same bits."""
    file = reference.load(write(tmp_path / "m.gguf", "qwen2moe"))
    values = {name: value.astype(F32) for name, value in file.tensors.items()}
    whole = models.write(tmp_path / "whole.gguf", file.meta, values)
    models.write(tmp_path / "parts.gguf", file.meta, values, split=7)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == -(-len(values) // 7)
    logits = []
    for path in (whole, parts[0]):
        with Model(path) as m, Session(m, n_threads=2) as s, opened(m, place(m, "some", 64)) as hybrid:
            assert m.info.n_expert == N
            for one in (s, hybrid):
                one.feed(TOKENS)
                one.feed(TOKENS[:1])
                logits.append(one.logits().copy())
    assert np.array_equal(logits[0], logits[2]) and np.array_equal(logits[1], logits[3])
    parts[-1].unlink()
    with pytest.raises(PowerInferError, match=parts[-1].name), Model(parts[0]):
        pass
