"""Architectures whose small checkpoints transformers has computed (tests/checkpoints.py): logits, greedy
tokens, and what sessions do with them."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, Llama, UnsupportedError
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from powerinfer.models.quantize import choose_types, quantize_model
from tests import checkpoints, models, reference, rounding
from tests.native.test_logits import continue_greedily, feed_all

CPU_ALONE = ("bitnet",)
"""Devices refuse them: norms inside blocks."""
CANNOT_SHIFT = ("gpt2", "hunyuan-dense", "hunyuan-moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else checkpoints.write(path, name)


def n_ctx(name: str) -> int:
    """transformers takes the factors for long contexts once there are more than 64 tokens, the engine in
    contexts of more than 64."""
    return 64 if name in ("phi3", "phi3-window") else 256


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 1000])
@pytest.mark.parametrize("name", checkpoints.CASES)
def test_prompt_logits(name: str, chunk: int, folder: Path) -> None:
    golden = checkpoints.golden(name)
    with Session(Model(file(folder, name)), n_ctx=n_ctx(name), n_threads=2) as session:
        rows = feed_all(session, golden.prompt, chunk)
    assert reference.relative_error(rows, golden.logits) < (2e-2 if rounding.BF16 and chunk > 1 else 2e-3)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_greedy_tokens(name: str, folder: Path) -> None:
    golden = checkpoints.golden(name)
    n = 24 if n_ctx(name) == 64 else 64
    with Session(Model(file(folder, name)), n_ctx=n_ctx(name), n_threads=2) as session:
        session.feed(golden.prompt)
        tokens, _ = continue_greedily(session, n)
    assert tokens == golden.greedy[:n].tolist()


def on_device(path: Path, share: float, n_ctx: int, device: str = "host", **options: Any) -> Session:
    """A session with a share of what a device could hold on one."""
    overhead = 0 if device == "host" else 1 << 30
    settings = Settings(n_ctx=n_ctx, n_batch=64, overhead_bytes=overhead, group=1)
    model = Model(path)
    whole = make_plan(model, vram_budget=2, settings=settings, rates=HOST_RATES)
    n_bytes = whole.min_bytes + share * (whole.full_bytes - whole.min_bytes)
    plan = make_plan(model, vram_budget=n_bytes / 2**30, settings=settings, rates=HOST_RATES)
    assert plan.uses_device
    return Session(
        model, plan=plan.native(model), device=device, n_ctx=n_ctx, n_batch=64, n_threads=2, **options
    )


def last_rows(session: Session, golden: checkpoints.Golden) -> np.ndarray:
    """The logits of a prompt without its last three tokens, and of those one by one: [4, n_vocab]."""
    session.feed(golden.prompt[:-3])
    rows = [session.logits().copy()]
    for token in golden.prompt[-3:]:
        session.feed([token])
        rows.append(session.logits().copy())
    return np.stack(rows)


@pytest.mark.parametrize("share", [0.3, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("name", [name for name in checkpoints.CASES if name not in CPU_ALONE])
def test_on_a_device(name: str, share: float, folder: Path) -> None:
    golden = checkpoints.golden(name)
    with on_device(file(folder, name), share, n_ctx(name)) as session:
        rows = last_rows(session, golden)
    assert reference.relative_error(rows, golden.logits[-4:]) < 1e-2


def drive_streams(path: Path, device: str) -> None:
    """gemma3n: the CPU computes what stands around feed-forwards, so each layer's x goes there and back. Two
    sequences, prompts cut at odd places, a saved state; the same bits each time, and no more memory than the
    plan says."""
    golden = checkpoints.golden("gemma3n")
    close = 2e-2 if device != "host" or rounding.BF16 else 2e-3
    runs = []
    for _ in range(2):
        with on_device(path, 0.6, 256, device, n_pool=512, n_seq=2) as session:
            for at in range(0, len(golden.prompt), 13):
                session.feed(golden.prompt[at : at + 13])
                last = min(at + 13, len(golden.prompt)) - 1
                assert reference.relative_error(session.logits(), golden.logits[last]) < close
            session.feed(golden.prompt[:20], seq=1)
            state = session.save(seq=1)
            session.feed(golden.prompt[20:24], seq=1, want_logits=True)
            rows = [session.logits(j).copy() for j in range(4)]
            session.load(state, seq=0)
            session.feed(golden.prompt[20:24], seq=0, want_logits=True)
            assert all((session.logits(j) == rows[j]).all() for j in range(4))
            assert reference.relative_error(rows[3], golden.logits[23]) < close
            runs.append(np.stack(rows))
            steps = session.last_step
            assert any(step.n_active_device for step in steps)
            assert any(step.n_active and not step.n_active_device for step in steps)
    assert (runs[0] == runs[1]).all()


def test_streams_on_a_device(folder: Path) -> None:
    drive_streams(file(folder, "gemma3n"), "host")


def test_neurons_that_fire_are_counted_on_a_device(folder: Path) -> None:
    counts = []
    for share in (None, 1.0):
        path, options = file(folder, "gemma3n"), {"count_neurons": True}
        if share is None:
            session = Session(Model(path), n_ctx=256, n_threads=2, **options)  # type: ignore[arg-type]
        else:
            session = on_device(path, share, 256, **options)
        with session:
            for token in checkpoints.golden("gemma3n").prompt[:20]:
                session.feed([token])
            counts.append(session.neuron_counts().counts)
    assert np.abs(counts[0].astype(int) - counts[1].astype(int)).max() <= 1
    assert 0 < counts[0][0].sum() < 0.2 * 20 * 160


@pytest.mark.parametrize("name", CPU_ALONE)
def test_what_devices_refuse(name: str, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"the CPU (does|computes)"):
        make_plan(file(folder, name), vram_budget=1, settings=Settings(n_ctx=256), rates=HOST_RATES)


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_shifts(name: str, folder: Path) -> None:
    """A shift, or its refusal by name."""
    prompt = checkpoints.golden(name).prompt[:40]
    with Session(Model(file(folder, name)), n_ctx=64, n_threads=2) as session:
        session.feed(prompt)
        if name in CANNOT_SHIFT:
            with pytest.raises(UnsupportedError, match="cannot shift its context"):
                session.shift(8, 8)
            return
        session.shift(8, 8)
        assert session.length() == 32


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_states_and_sequences(name: str, folder: Path) -> None:
    golden = checkpoints.golden(name)
    with Session(Model(file(folder, name)), n_ctx=n_ctx(name), n_pool=512, n_threads=2, n_seq=2) as session:
        session.feed(golden.prompt[:24])
        state = session.save()
        session.feed(golden.prompt[24:30])
        alone = session.logits().copy()
        session.load(state)
        session.feed(golden.prompt[:16], seq=1)
        session.feed(
            np.concatenate([golden.prompt[24:30], golden.prompt[16:20]]),
            seq=[0] * 6 + [1] * 4,
            want_logits=[False] * 5 + [True] + [False] * 4,
        )
        assert (session.logits() == alone).all()


def test_internlm2_is_llama(tmp_path: Path) -> None:
    """Its files have llama's tensors and llama's RoPE; transformers has no class of it."""
    golden = models.golden("llama-mha", "dense")
    models.write_dense(tmp_path / "llama.gguf", golden.spec)
    old = gguf.GGUFReader(tmp_path / "llama.gguf")
    new = gguf.GGUFWriter(tmp_path / "internlm2.gguf", "internlm2")
    for name, field in old.fields.items():
        if name.startswith("llama."):
            value = field.contents()
            (new.add_float32 if isinstance(value, float) else new.add_uint32)(f"internlm2.{name[6:]}", value)
    for tensor in old.tensors:
        new.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    new.write_header_to_file()
    new.write_kv_data_to_file()
    new.write_tensors_to_file()
    new.close()
    with Session(Model(tmp_path / "internlm2.gguf"), n_threads=2) as session:
        rows = feed_all(session, golden.prompt, 7)
    assert reference.relative_error(rows, golden.logits) < (2e-2 if rounding.BF16 else 2e-3)


def test_adapters_of_fused_matrices(folder: Path) -> None:
    """phi3: what an adapter of q, k and v, and one of gate and up, add is as if the matrices had it."""
    rng = np.random.default_rng(2)
    tensors = checkpoints.file_tensors("phi3")
    changed: dict[str, Any] = {}
    with Model(file(folder, "phi3")) as model:
        for name in ("blk.0.attn_qkv.weight", "blk.1.ffn_up.weight"):
            rows, cols = tensors[name].shape
            a = rng.normal(size=(4, cols)).astype(np.float32) / cols**0.5
            b = rng.normal(size=(rows, 4)).astype(np.float32)
            model.add_adapter(name, a, b, scale=0.5)
            changed[name] = tensors[name].astype(np.float32) + 0.5 * b @ a
        with pytest.raises(ArgumentError, match=r"does not fit blk\.1\.ffn_gate\.weight"):
            model.add_adapter("blk.1.ffn_gate.weight", a, b[: rows // 2])
        with Session(model, n_ctx=64, n_threads=2) as session:
            got = feed_all(session, checkpoints.golden("phi3").prompt, 1)
    other = checkpoints.write(folder / "phi3-changed.gguf", "phi3", **changed)
    with Session(Model(other), n_ctx=64, n_threads=2) as session:
        want = feed_all(session, checkpoints.golden("phi3").prompt, 1)
    assert reference.relative_error(got, want) < 2e-3
    assert reference.relative_error(got, checkpoints.golden("phi3").logits) > 0.05


def test_what_gates_cut_is_not_read(folder: Path) -> None:
    """gemma3n's first two layers: of about one neuron in twenty up and down are read, in exact mode."""
    golden, n_ff = checkpoints.golden("gemma3n"), 160
    steps = []
    for sparsity in ("auto", "exact", "dense"):
        with Session(Model(file(folder, "gemma3n")), n_ctx=256, n_threads=2, sparsity=sparsity) as session:
            session.feed(golden.prompt[:-1])
            session.feed(golden.prompt[-1:])
            assert reference.relative_error(session.logits(), golden.logits[-1]) < 2e-2
            steps.append(session.last_step)
    auto, exact, dense = steps
    for layer in range(5):
        active = exact[layer].n_active
        assert auto[layer].n_active == dense[layer].n_active == active
        assert auto[layer].n_rows == exact[layer].n_rows
        assert dense[layer].n_rows == 3 * n_ff
        if layer < 2:  # gates twice
            assert 0 < active < 0.15 * n_ff and exact[layer].n_rows == n_ff + 3 * active
        else:
            assert active == n_ff and exact[layer].n_rows == 3 * n_ff


def test_quantised_downs_are_skipped_where_rows_are_neurons(folder: Path) -> None:
    quantised = folder / "gemma3n-q8_0.gguf"
    with ModelFile(file(folder, "gemma3n")) as source:
        quantize_model(source, quantised, "Q8_0", choose_types(source, "Q8_0", down_by_neuron=True))
    logits = []
    for sparsity in ("exact", "dense"):
        with Session(Model(quantised), n_ctx=256, n_threads=2, sparsity=sparsity) as session:
            session.feed(checkpoints.golden("gemma3n").prompt[:5])
            session.feed(checkpoints.golden("gemma3n").prompt[5:6])
            logits.append(session.logits().copy())
            step = session.last_step[0]
            assert step.n_rows == (160 + 3 * step.n_active if sparsity == "exact" else 3 * 160)
    assert reference.relative_error(logits[0], logits[1]) < 2e-3


@pytest.mark.parametrize(
    ("name", "key", "value", "what"),
    [
        ("apertus", "xielu.alpha_n", None, "no key apertus.xielu.alpha_n"),
        ("apertus", "xielu.beta", [0.5] * 3, "array of 2 f32"),
        ("apertus", "xielu.eps", float("inf"), "xielu of layer 0 is not finite"),
        ("gemma3n", "altup.active_idx", 1, "active_idx is 1"),
        ("gemma3n", "altup.num_inputs", 3, "altup_proj.weight has 3 dimensions"),
        ("gemma3n", "altup.num_inputs", 9, "num_inputs' is 9; 2 to 8 are possible"),
        ("gemma3n", "activation_sparsity_scale", [float("nan")] * 5, "of layer 0 is not a number"),
    ],
)
def test_bad_keys(name: str, key: str, value: Any, what: str, tmp_path: Path, monkeypatch: Any) -> None:
    keys = checkpoints.file_keys(name) | {key: value}
    monkeypatch.setattr(checkpoints, "file_keys", lambda _: {k: v for k, v in keys.items() if v is not None})
    with pytest.raises(FormatError if "active_idx" not in key else UnsupportedError, match=re.escape(what)):
        Model(checkpoints.write(tmp_path / "bad.gguf", name))


def test_a_branch_that_is_too_wide(tmp_path: Path) -> None:
    wide = {"blk.1.laurel_l.weight": (161, 64), "blk.1.laurel_r.weight": (64, 161)}
    tensors: dict[str, Any] = {name: np.zeros(shape, np.float16) for name, shape in wide.items()}
    with pytest.raises(FormatError, match="161 rows, more than 160 neurons"):
        Model(checkpoints.write(tmp_path / "bad.gguf", "gemma3n", **tensors))


@pytest.mark.parametrize("name", [*CANNOT_SHIFT, "granite"])
def test_a_full_context_goes_on(name: str, folder: Path) -> None:
    """Where a session cannot shift, what stays is computed anew."""
    prompt = [int(t) for t in checkpoints.golden(name).prompt]
    options: dict[str, Any] = {"n_threads": 2, "verbose": False}
    with Llama(file(folder, name), n_ctx=64, context_shift=True, n_keep=4, **options) as llm:
        tokens = list(islice(llm.generate(prompt, temp=0.0), 60))
        held = llm.input_ids.tolist()
        assert len(tokens) == 60 and held[4:] == (prompt + tokens[:-1])[-(len(held) - 4) :]
        last = llm.scores[-1].copy()
    if name in CANNOT_SHIFT:  # shifted K and V remember what was dropped
        with Llama(file(folder, name), n_ctx=64, **options) as other:
            other.eval(held)
            assert reference.relative_error(last, other.scores[-1]) < (2e-2 if rounding.BF16 else 2e-3)
