"""gemma3's sliding windows: layers that see the last positions only, with RoPE of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import models, reference, rounding

WINDOW = 70
BASE, BASE_WINDOW, FACTOR = 100000.0, 500.0, 4.0
# Six layers are a whole period: five with a window, then one without. Activations are tested elsewhere.
SPEC = models.Spec(
    "windows",
    "qwen3",
    n_layer=6,
    n_embd=64,
    n_head=4,
    n_head_kv=2,
    head_dim=32,
    n_ff=64,
    n_vocab=301,
    tied=True,
)
N = 700
TOLERANCE = 1e-2 if rounding.BF16 else 3e-3


def tokens() -> list[int]:
    return [int(t) for t in np.arange(7, 7 + N) * 53 % SPEC.n_vocab]


def write(path: Any, window: int = WINDOW) -> Any:
    tensors = models.file_tensors(SPEC, models.draw(SPEC))
    for i in range(SPEC.n_layer):
        for name in ("post_attention_norm", "post_ffw_norm"):
            weight = 1 + 0.2 * models.normal(f"windows/{i}/{name}", SPEC.n_embd)
            tensors[f"blk.{i}.{name}.weight"] = weight.astype(np.float32)
    meta = {key.replace("qwen3.", "gemma3."): value for key, value in models.metadata(SPEC).items()}
    meta |= {
        "general.architecture": "gemma3",
        "gemma3.context_length": N,
        "gemma3.attention.sliding_window": window,
        "gemma3.rope.freq_base": BASE,
        "gemma3.rope.freq_base_swa": BASE_WINDOW,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": FACTOR,
        "powerinfer.hidden_act": "silu",
    }
    return models.write(path, meta, tensors)


def forward(model: reference.Model, ids: list[int]) -> Any:
    """Logits of every position in float64, with no window handled but by a mask."""
    n, d = len(ids), SPEC.d_head
    seen = np.tri(n, dtype=bool)
    near = seen & ~np.tri(n, k=-WINDOW, dtype=bool)

    def norm(x: Any, name: str) -> Any:
        return reference.rms_norm(x, model[f"{name}.weight"], 1e-5)

    def rotated(x: Any, base: float, factor: float) -> Any:
        angle = np.arange(n)[:, None, None] * base ** (-np.arange(0, d, 2) / d) / factor
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
        )

    x = model["token_embd.weight"][ids] * math.sqrt(SPEC.n_embd)
    for i in range(SPEC.n_layer):
        p, full = f"blk.{i}.", i == 5
        rope = (BASE, FACTOR) if full else (BASE_WINDOW, 1.0)
        h = norm(x, p + "attn_norm")
        q, k, v = (
            reference.heads(h @ model[f"{p}attn_{name}.weight"].T, n_head)
            for name, n_head in (("q", SPEC.n_head), ("k", SPEC.n_head_kv), ("v", SPEC.n_head_kv))
        )
        q = rotated(norm(q, p + "attn_q_norm"), *rope)
        k = rotated(norm(k, p + "attn_k_norm"), *rope)
        k, v = (np.repeat(part, SPEC.n_head // SPEC.n_head_kv, axis=1) for part in (k, v))
        scores = np.where(
            seen if full else near, np.einsum("ihd,jhd->hij", q, k, optimize=True) / math.sqrt(d), -np.inf
        )
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attention = (
            np.einsum("hij,jhd->ihd", weights, v, optimize=True).reshape(n, -1)
            @ model[p + "attn_output.weight"].T
        )
        x = x + norm(attention, p + "post_attention_norm")
        h = norm(x, p + "ffn_norm")
        hidden = reference.silu(h @ model[p + "ffn_gate.weight"].T) * (h @ model[p + "ffn_up.weight"].T)
        x = x + norm(hidden @ model[p + "ffn_down.weight"].T, p + "post_ffw_norm")
    return norm(x, "output_norm") @ model["token_embd.weight"].T


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Any]]:
    path = write(tmp_path_factory.mktemp("m") / "m.gguf")
    with Model(path) as model:
        yield model, forward(reference.load(path), tokens())


@pytest.mark.parametrize(("n_batch", "n_threads"), [(64, 1), (512, 3)])
def test_a_prompt_longer_than_the_window(case: tuple[Model, Any], n_batch: int, n_threads: int) -> None:
    model, expected = case
    with Session(model, n_ctx=N, n_threads=n_threads, n_batch=n_batch) as session:
        for at in range(0, N, n_batch):
            part = tokens()[at : at + n_batch]
            session.feed(part, want_logits=True)
            for i in range(len(part)):
                assert reference.relative_error(session.logits(i), expected[at + i]) < TOLERANCE, at + i


@pytest.mark.parametrize("n_threads", [1, 3])
def test_generated_tokens(case: tuple[Model, Any], n_threads: int) -> None:
    """Where the window, blocks of 64 and spans begin and end."""
    model, expected = case
    ids = tokens()
    with Session(model, n_ctx=N, n_threads=n_threads) as session:
        for n in (
            1,
            2,
            64,
            65,
            69,
            70,
            71,
            72,
            127,
            128,
            129,
            133,
            134,
            135,
            511,
            512,
            513,
            581,
            582,
            583,
            700,
        ):
            held = session.length()
            if n - 1 > held:
                session.feed(ids[held : n - 1])
            session.feed([ids[n - 1]])
            assert reference.relative_error(session.logits(), expected[n - 1]) < TOLERANCE, n


@pytest.mark.parametrize("n_threads", [1, 3])
def test_together_as_alone(case: tuple[Model, Any], n_threads: int) -> None:
    """Sequences that decode in one step get the bits that they get by themselves."""
    model, _ = case
    ids, lengths = tokens(), (40, 697, 300)
    alone = []
    for n in lengths:
        with Session(model, n_ctx=N, n_threads=n_threads) as session:
            session.feed(ids[: n - 1])
            session.feed([ids[n - 1]])
            alone.append(session.logits().tobytes())
    with Session(model, n_ctx=N, n_pool=3 * 704, n_seq=3, n_threads=n_threads) as session:
        for seq, n in enumerate(lengths):
            session.feed(ids[: n - 1], seq=[seq] * (n - 1))
        session.feed([ids[n - 1] for n in lengths], seq=[0, 1, 2], want_logits=True)
        assert [session.logits(i).tobytes() for i in range(3)] == alone


def test_prompts_together_as_alone(case: tuple[Model, Any]) -> None:
    """Two prompts of one step, whose runs begin at different positions of the window."""
    model, _ = case
    ids, cuts = tokens(), ((0, 200), (300, 520))
    alone = []
    for held, n in cuts:
        with Session(model, n_ctx=N, n_threads=2) as session:
            if held:
                session.feed(ids[:held])
            session.feed(ids[held:n], want_logits=True)
            alone.append(session.logits(n - held - 1).tobytes())
    with Session(model, n_ctx=N, n_pool=2 * 704, n_seq=2, n_threads=2) as session:
        session.feed(ids[:300], seq=[1] * 300)
        fed = [(t, seq) for seq, (held, n) in enumerate(cuts) for t in ids[held:n]]
        session.feed([t for t, _ in fed], seq=[seq for _, seq in fed], want_logits=True)
        assert [session.logits(i).tobytes() for i in (199, 419)] == alone


def test_bytes_of_a_window(case: tuple[Model, Any]) -> None:
    """A layer with a window reads the blocks that the window touches, the others all positions."""
    model, _ = case
    of_a_position = 2 * 2 * SPEC.n_head_kv * SPEC.d_head  # F16
    with Session(model, n_ctx=N, n_threads=2, n_batch=512) as session:
        session.feed(tokens()[:640])
        session.feed([5])
        step = session.last_step
    near, full = (step[i].bytes - step[i].ffn_bytes for i in (0, 5))
    # Positions 571 to 640 are seen; their first block begins at 512.
    assert full - near == (641 - 129) * of_a_position


SIZES: dict[str, Any] = {"n_ctx": N, "n_pool": 704, "n_batch": 512, "sparsity": "dense"}


BUDGET = engine.Settings(
    budget_bytes=1 << 34,
    n_ctx=N,
    n_pool=704,
    n_batch=512,
    sparsity="dense",
    overhead_bytes=0,
    group=1,
)


def on_device(model: Model, split: str) -> Any:
    """A plan with all of the model on a device, a part or none of each feed-forward, or every other layer."""
    layers = [split != "layers" or i % 2 == 0 for i in range(SPEC.n_layer)]
    hot = {"all": np.arange(SPEC.n_ff), "part": np.arange(5, SPEC.n_ff, 3)}.get(split, np.arange(0))
    return engine.native_plan(
        model,
        BUDGET,
        engine.Rates(zero_copy_bytes_per_s=1e10),
        on_device=layers,
        hot=[hot.astype(np.int32) if on else np.arange(0, dtype=np.int32) for on in layers],
        pcie=[np.arange(0, dtype=np.int32)] * SPEC.n_layer,
        head_on_device=split != "layers",
    )


def check_on_device(model: Model, expected: Any, device: str, split: str) -> None:
    """Prompts longer than the window, and tokens where it, blocks and spans begin and end."""
    ids = tokens()
    with Session(model, plan=on_device(model, split), device=device, n_threads=2, **SIZES) as session:
        for n in (1, 2, 65, 69, 70, 71, 127, 129, 134, 135, 512, 582, 700):
            held = session.length()
            if n - 1 > held:
                session.feed(ids[held : n - 1], want_logits=True)
                for i in range(n - 1 - held):
                    assert reference.relative_error(session.logits(i), expected[held + i]) < TOLERANCE, (
                        held + i
                    )
            session.feed([ids[n - 1]])
            assert reference.relative_error(session.logits(), expected[n - 1]) < TOLERANCE, n
        session.drop()
        for at in (0, 512):
            session.feed(ids[at : at + 512])
            end = min(at + 512, N)
            assert reference.relative_error(session.logits(), expected[end - 1]) < TOLERANCE, end


@pytest.mark.parametrize("split", ["all", "part", "none", "layers"])
def test_on_a_device(case: tuple[Model, Any], split: str) -> None:
    model, expected = case
    check_on_device(model, expected, "host", split)


def test_a_window_that_a_device_cannot_have(tmp_path: Path) -> None:
    """Up to eight tokens are computed together there, and must see each other. A plan says so, not a step."""
    with Model(write(tmp_path / "8.gguf", 8)) as model:
        engine.compute(model, BUDGET, engine.Rates())
        with Session(model, plan=on_device(model, "all"), device="host", **SIZES) as session:
            session.feed(tokens()[:20])
    with Model(write(tmp_path / "7.gguf", 7)) as model:
        for plan in (
            lambda: on_device(model, "layers"),
            lambda: engine.compute(model, BUDGET, engine.Rates()),
            lambda: engine.compute(
                model, replace(BUDGET, budget_bytes=0, more_budgets=(1 << 34,)), engine.Rates()
            ),
        ):
            with pytest.raises(
                UnsupportedError, match=r"layer 0 sees the last 7 positions.* of 8 or more; the CPU"
            ):
                plan()
        assert not engine.compute(model, replace(BUDGET, budget_bytes=0), engine.Rates()).uses_device
        with Session(model, **SIZES) as session:
            session.feed(tokens()[:20])
