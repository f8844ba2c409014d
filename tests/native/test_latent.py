"""Latent attention (deepseek2): files of several ages, what the cache holds, what sessions do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import ArgumentError, FormatError, PowerInferError, UnsupportedError
from powerinfer._engine.session import Model, Session
from tests import models, reference, rounding
from tests.native.hybrid import adapt, both, options, place
from tests.native.test_hybrid_mixtures import place as place_experts

SPEC = replace(models.SPECS["deepseek2-dense"], name="latent", n_head=2, n_ctx=512)
ROW = SPEC.kv_rank + SPEC.d_rot
N_NOPE = SPEC.d_head - SPEC.d_rot
IDS = [int(t) for t in np.random.default_rng(3).integers(3, 290, 150)]
LIMIT = 1e-2 if rounding.BF16 else 2e-3


def write(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    *,
    spec: models.Spec = SPEC,
    kind: Kind | None = None,
) -> Path:
    """The spec's file with keys and tensors set; None takes one out."""
    meta, all_tensors = models.metadata(spec), models.file_tensors(spec, models.draw(spec))
    meta |= {f"deepseek2.{key}": value for key, value in (keys or {}).items()}
    all_tensors |= tensors or {}
    return models.write(
        path,
        {key: value for key, value in meta.items() if value is not None},
        {name: value for name, value in all_tensors.items() if value is not None},
        kind=kind,
    )


def old_keys(spec: models.Spec = SPEC) -> dict[str, Any]:
    return {
        "attention.key_length": spec.d_head,
        "attention.value_length": spec.d_value,
        "attention.head_count_kv": spec.n_head,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def old_tensors(spec: models.Spec = SPEC) -> dict[str, Any]:
    """Keys and values of all heads in one matrix, as files had them before absorption."""
    out: dict[str, Any] = {}
    weights = models.draw(spec)
    for i in range(spec.n_layer):
        p = f"blk.{i}.attn_"
        out |= {f"{p}k_b.weight": None, f"{p}v_b.weight": None}
        out[f"{p}kv_b.weight"] = weights[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(write(tmp_path_factory.mktemp("m") / "m.gguf")) as m:
        yield m


def session(model: Model, **more: Any) -> Session:
    return Session(model, **{"n_ctx": 512, "n_threads": 2, "n_seq": 3, "n_pool": 1024} | more)


def logits(s: Session, ids: list[int]) -> np.ndarray[Any, Any]:
    s.feed(ids, want_logits=True)
    return np.stack([s.logits(i) for i in range(len(ids))])


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("kind", [None, Kind.Q8_0])
def test_files_from_before_absorption(use_mmap: bool, kind: Kind | None, tmp_path: Path) -> None:
    """Keys are turned and values put one behind the other while the model is opened and loaded."""
    spec = replace(SPEC, kv_rank=64, name="old")
    path = write(tmp_path / "m.gguf", old_keys(spec), old_tensors(spec), spec=spec, kind=kind)
    expected = reference.forward(reference.load(path), IDS[:60])
    with Model(path, use_mmap=use_mmap) as m, session(m) as s:
        assert s.info.n_kv_bytes == spec.n_layer * 1024 * (spec.kv_rank + spec.d_rot) * 2
        limit = LIMIT if kind is None else 3e-2  # of activations that are rounded to 8 bits
        assert reference.relative_error(logits(s, IDS[:60]), expected) < limit
        s.drop()
        rows = np.concatenate([logits(s, [t]) for t in IDS[:60]])
        assert reference.relative_error(rows, expected) < limit


@pytest.mark.parametrize(
    ("type_kv", "size", "limit"), [("f32", 4, 1e-4), ("f16", 2, LIMIT), ("q8_0", 34 / 32, 4e-2)]
)
def test_a_token_has_one_row(type_kv: Any, size: float, limit: float, tmp_path: Path) -> None:
    spec = replace(SPEC, kv_rank=64, d_rot=32, head_dim=64, name="wide-latent")
    path = write(tmp_path / "m.gguf", spec=spec)
    expected = reference.forward(reference.load(path), IDS[:90])
    with Model(path) as m, session(m, type_k=type_kv, type_v=type_kv) as s:
        assert s.info.n_kv_bytes == spec.n_layer * 1024 * 96 * size
        rows = np.concatenate([logits(s, [t]) for t in IDS[:90]])
        assert reference.relative_error(rows, expected) < limit


def test_norms_of_latents_have_an_epsilon_of_their_own(tmp_path: Path) -> None:
    """Of latents so small that it counts, whatever the file's is."""
    spec = models.SPECS["deepseek2-v3"]
    tensors = models.file_tensors(spec, models.draw(spec))
    small = {
        name: value * 1e-3
        for name, value in tensors.items()
        if name.endswith(("attn_q_a.weight", "attn_kv_a_mqa.weight"))
    }
    path = write(tmp_path / "m.gguf", tensors=small, spec=spec)
    expected = reference.forward(reference.load(path), IDS[:20])
    with Model(path) as m, session(m, type_k="f32", type_v="f32") as s:
        rows = np.concatenate([logits(s, [t]) for t in IDS[:20]])
        assert reference.relative_error(rows, expected) < LIMIT
        other = write(tmp_path / "o.gguf", {"attention.layer_norm_rms_epsilon": 1e-6}, small, spec=spec)
        with Model(other) as o, session(o, type_k="f32", type_v="f32") as t:
            rows = np.concatenate([logits(t, [token]) for token in IDS[:20]])
            assert reference.relative_error(rows, expected) < LIMIT  # the residual stream is large


def test_types_of_k_and_v_are_one(model: Model) -> None:
    with (
        pytest.raises(ArgumentError, match="both must be the same"),
        session(model, type_k="f16", type_v="f32"),
    ):
        pass
    with pytest.raises(ArgumentError, match="Q8_0 cannot hold"), session(model, type_k="q8_0", type_v="q8_0"):
        pass  # 48 values


def test_bits_do_not_depend_on_others(model: Model) -> None:
    alone = []
    for n_batch in (512, 40):
        with session(model, n_batch=n_batch) as s:
            s.feed(IDS[:100])
            alone.append([s.logits().tobytes()] + [logits(s, [t]).tobytes() for t in IDS[100:104]])
    assert alone[0] == alone[1]
    with session(model) as s:
        s.feed(IDS[50:120], seq=1)
        s.feed(
            IDS[:100] + IDS[:70], seq=[0] * 100 + [2] * 70, want_logits=[i in (99, 169) for i in range(170)]
        )
        rows = [s.logits(0).tobytes()]
        for t in IDS[100:104]:
            s.feed([7, t, 9], seq=[1, 0, 2], want_logits=True)
            rows.append(s.logits(1).tobytes())
    assert rows == alone[0]


def test_sequences_are_saved_copied_and_cut(model: Model) -> None:
    with session(model) as s:
        s.feed(IDS[:130])
        state = s.save()
        assert len(state) < SPEC.n_layer * 130 * ROW * 2 + 200
        expected = logits(s, IDS[130:133]).tobytes()
        s.load(state, seq=1)
        s.cut(130)
        s.copy(2, 0)
        for seq in (0, 1, 2):
            s.feed(IDS[130:133], seq=seq, want_logits=True)
            assert np.stack([s.logits(i) for i in range(3)]).tobytes() == expected
        with pytest.raises(PowerInferError):
            s.load(state[:-1])


@pytest.mark.parametrize("device", ["cpu", "host"])
def test_a_shift_turns_the_rotated_part_alone(device: str, tmp_path: Path) -> None:
    """In a model of one layer a latent does not depend on what is in front of it: what a shift leaves is what
    the tokens that stay would have made."""
    spec = replace(SPEC, n_layer=1, name="one-latent")
    with Model(write(tmp_path / "m.gguf", spec=spec)) as m:
        more: dict[str, Any] = {}
        if device == "host":
            more = {"plan": place(m, "all", "dense"), "device": "host"}
        f32: dict[str, Any] = options("dense") | {"type_k": "f16", "type_v": "f16"}
        with Session(m, **f32 | more) as s:
            s.feed(IDS[:100])
            s.shift(10, 25)
            shifted = logits(s, [5])
            s.drop()
            s.feed(IDS[:10] + IDS[35:100])
            fresh = logits(s, [5])
    assert reference.relative_error(shifted, fresh) < LIMIT


def test_layers_behind_the_others_are_left_out(tmp_path: Path) -> None:
    spec = models.SPECS["deepseek2-v3"]
    plain = write(tmp_path / "plain.gguf", spec=spec)
    path = write(
        tmp_path / "next.gguf",
        {"block_count": spec.n_layer + 1, "nextn_predict_layers": 1},
        {f"blk.{spec.n_layer}.nextn.eh_proj.weight": np.zeros((64, 128), np.float16)},
        spec=spec,
    )
    with Model(plain) as a, Model(path) as b, session(a) as sa, session(b) as sb:
        assert logits(sa, IDS[:20]).tobytes() == logits(sb, IDS[:20]).tobytes()


def test_a_router_with_a_bias_is_one_of_sigmoids(tmp_path: Path) -> None:
    """Where a file does not say it, as the first ones of GLM 4.7 Flash."""
    spec = models.SPECS["deepseek2-v3"]
    golden = models.golden("deepseek2-v3")
    with Model(write(tmp_path / "m.gguf", {"expert_gating_func": None}, spec=spec)) as m, session(m) as s:
        assert reference.relative_error(logits(s, list(golden.prompt)), golden.logits) < 2 * LIMIT


def test_groups_by_their_best_expert_are_the_cpu_s(tmp_path: Path) -> None:
    with (
        Model(write(tmp_path / "m.gguf", spec=models.SPECS["deepseek2-v2"])) as m,
        pytest.raises(UnsupportedError, match="groups of experts"),
    ):
        place_experts(m, "all", 64)


def test_adapters(tmp_path: Path) -> None:
    """Of a direct q and the output; others are refused by name."""
    spec = replace(SPEC, q_rank=0, name="direct", rope=models.Rope())
    path = write(tmp_path / "m.gguf", spec=spec)
    with Model(path) as m:
        added = adapt(m, 5, ("attn_q", "attn_output"))
        assert len(added) == 4
        file = reference.load(path)
        for name, matrix in added.items():
            file.tensors[name] = file[name] + matrix
        expected = reference.forward(file, IDS[:50])
        with session(m) as s:
            assert reference.relative_error(logits(s, IDS[:50]), expected) < LIMIT
        assert both(m, "all", "dense", 16, 2) < 1
        for name in ("attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_k"):
            with pytest.raises(PowerInferError, match=name):
                m.add_adapter(
                    f"blk.0.{name}.weight", np.zeros((4, 64), np.float32), np.zeros((64, 4), np.float32)
                )


ODD: list[tuple[dict[str, Any], str]] = [
    ({"attention.kv_lora_rank": None}, "kv_lora_rank"),
    ({"attention.kv_lora_rank": 0}, "kv_lora_rank"),
    ({"attention.kv_lora_rank": 2**32 - 1}, "kv_lora_rank"),
    ({"attention.kv_lora_rank": SPEC.kv_rank + 1}, "key length"),
    ({"rope.dimension_count": None}, "dimension_count"),
    ({"rope.dimension_count": SPEC.d_head}, "key length"),
    ({"attention.key_length": 2**31}, "key_length"),
    ({"attention.key_length": None}, "key length"),
    ({"attention.value_length": SPEC.kv_rank - 1}, "value length"),
    ({"attention.key_length_mla": SPEC.d_rot}, "are rotated"),
    ({"attention.key_length_mla": 2**31}, "key_length_mla"),
    ({"attention.key_length_mla": ROW + 1}, "longer than"),
    ({"attention.key_length_mla": None}, "only one"),
    ({"attention.value_length_mla": ROW + 1}, "longer than"),
    ({"attention.value_length_mla": SPEC.d_value + 1}, "attn_v_b"),
    ({"attention.q_lora_rank": SPEC.q_rank + 1}, "attn_q_a"),
    ({"attention.q_lora_rank": 2**31 - 1}, "q_lora_rank"),
    ({"attention.q_lora_rank": None}, "attn_q.weight"),
    ({"rope.scaling.yarn_log_multiplier": float("nan")}, "yarn_log_multiplier"),
    ({"rope.scaling.yarn_log_multiplier": 1e30}, "yarn_log_multiplier"),
    ({"attention.head_count": 4096}, "attn_q_b|more than"),
    ({"attention.head_count": 3, "attention.head_count_kv": 1}, "attn_q_b"),
]


@pytest.mark.parametrize(("keys", "words"), ODD)
def test_bad_keys(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", keys)
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass


BAD_TENSORS: list[tuple[str, Any, str]] = [
    ("attn_k_b", None, "no tensor blk.1.attn_k_b"),
    ("attn_k_b", np.zeros((SPEC.n_head, N_NOPE, SPEC.kv_rank + 1), np.float16), "attn_k_b"),
    ("attn_v_b", np.zeros((SPEC.n_head * SPEC.d_value, SPEC.kv_rank), np.float16), "attn_v_b"),
    ("attn_kv_a_mqa", np.zeros((ROW - 1, 64), np.float16), "attn_kv_a_mqa"),
    ("attn_kv_a_norm", np.zeros(ROW, np.float32), "attn_kv_a_norm"),
    (
        "attn_kv_b",
        np.zeros((SPEC.n_head * (N_NOPE + SPEC.d_value) + 1, SPEC.kv_rank), np.float16),
        "attn_kv_b",
    ),
    ("attn_output", np.zeros((64, SPEC.n_head * SPEC.d_head), np.float16), "attn_output"),
    ("attn_kv_b", np.zeros((SPEC.n_head * (N_NOPE + SPEC.d_value), SPEC.kv_rank), np.float16), "attn_k_b"),
]


@pytest.mark.parametrize(("name", "tensor", "words"), BAD_TENSORS)
def test_bad_tensors(name: str, tensor: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", None, {f"blk.1.{name}.weight": tensor})
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass
