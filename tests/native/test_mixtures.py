"""Mixtures of experts of other architectures than qwen3moe, against the float64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer import FormatError, Llama, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer.cli import main
from powerinfer.models import plan as plans
from powerinfer.models.plan.rates import HOST_RATES
from tests import models, reference, rounding
from tests.native.test_experts import same_bits_alone

SPEC = models.SPECS["qwen3moe"]
N_LAYER, N_SHARED = 5, 80  # more than a period of SmallThinker's layers
TOKENS = (np.arange(3, 73) * 17 % SPEC.n_vocab).tolist()
WINDOW = 20

# What a file has beside what all have; "bias": of the choice, "shared": an expert of all tokens.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mixtral": ("llama", {"expert_feed_forward_length": None}, ()),
    "qwen2moe": ("qwen2moe", {}, ("shared", "shared router", "qkv bias")),
    "olmoe": ("olmoe", {"expert_feed_forward_length": None}, ("wide norms",)),
    "smallthinker": (
        "smallthinker",
        {"expert_gating_func": 2, "attention.sliding_window": WINDOW},
        (),
    ),
    "smallthinker without windows": ("smallthinker", {"expert_gating_func": 1}, ()),
    "sigmoids, a bias and a scale": (
        "qwen3moe",
        {"expert_gating_func": 2, "expert_weights_scale": 2.5},
        ("bias", "shared", "head norms"),
    ),
    "groups": (
        "qwen3moe",
        {"expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2},
        ("bias", "head norms"),
    ),
    "glm4moe": (
        "glm4moe",
        {"leading_dense_block_count": 2, "expert_weights_scale": 2.5, "rope.dimension_count": 16},
        ("bias", "shared", "qkv bias", "post norm", "dense first"),
    ),
    "gpt-oss": (
        "gpt-oss",
        {"attention.sliding_window": WINDOW},
        ("qkv bias", "output bias", "post norm", "sinks", "expert bias"),
    ),
    "weights as they are": ("qwen3moe", {"expert_weights_norm": False}, ("head norms",)),
}


def draw(label: str, *shape: int) -> Any:
    values = models.normal(f"mixtures/{label}", *shape)
    if len(shape) == 1:
        return values.astype(np.float32)
    return (values / shape[-1] ** 0.5).astype(np.float16)


def write(
    path: Path, name: str, change: dict[str, Any] | None = None, more: dict[str, Any] | None = None
) -> Path:
    """A small file of that variant, with keys of its architecture changed (None: without), and more keys."""
    arch, keys, parts = VARIANTS[name]
    s = SPEC
    q, kv, d = s.n_head * s.d_head, s.n_head_kv * s.d_head, s.n_embd
    meta = {key.replace("qwen3moe.", f"{arch}."): value for key, value in models.metadata(s).items()}
    meta |= {"general.architecture": arch, f"{arch}.block_count": N_LAYER}
    meta[f"{arch}.feed_forward_length"] = s.n_ff_expert
    for key, value in (keys | (change or {})).items():
        meta[key if key.startswith("powerinfer.") else f"{arch}.{key}"] = value
    meta |= more or {}
    tensors: models.Tensors = {
        "token_embd.weight": (models.normal("mixtures/embd", s.n_vocab, d)).astype(np.float16),
        "output.weight": 2 * draw("output", s.n_vocab, d),
        "output_norm.weight": 1 + draw("output_norm", d) / 4,
    }
    for i in range(N_LAYER):
        for stem, rows, cols in (("q", q, d), ("k", kv, d), ("v", kv, d), ("output", d, q)):
            tensors[f"blk.{i}.attn_{stem}.weight"] = draw(f"{i}/{stem}", rows, cols)
        for stem in ("attn_norm", "post_attention_norm" if "post norm" in parts else "ffn_norm"):
            tensors[f"blk.{i}.{stem}.weight"] = 1 + draw(f"{i}/{stem}", d) / 4
        for stem, n in (("q", q), ("k", kv), ("v", kv)) if "qkv bias" in parts else ():
            tensors[f"blk.{i}.attn_{stem}.bias"] = draw(f"{i}/{stem}/bias", n) / 4
        if "dense first" in parts and i < 2:
            for stem, rows, cols in (
                ("gate", s.n_ff_expert, d),
                ("up", s.n_ff_expert, d),
                ("down", d, s.n_ff_expert),
            ):
                tensors[f"blk.{i}.ffn_{stem}.weight"] = draw(f"{i}/{stem}/dense", rows, cols)
            continue
        # As floats, and large: the context decides, and no rounding changes a choice.
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = draw(f"{i}/router", s.n_expert, d).astype(np.float32)
        for stem, rows, cols in (
            ("gate", s.n_ff_expert, d),
            ("up", s.n_ff_expert, d),
            ("down", d, s.n_ff_expert),
        ):
            one = [draw(f"{i}/{stem}/{e}", rows, cols) for e in range(s.n_expert)]
            tensors[f"blk.{i}.ffn_{stem}_exps.weight"] = np.stack(one) * np.float16(
                2 if stem == "down" else 1
            )
        if "shared" in parts:
            for stem, rows, cols in (("gate", N_SHARED, d), ("up", N_SHARED, d), ("down", d, N_SHARED)):
                tensors[f"blk.{i}.ffn_{stem}_shexp.weight"] = draw(f"{i}/{stem}/shared", rows, cols)
        if "shared router" in parts:
            tensors[f"blk.{i}.ffn_gate_inp_shexp.weight"] = draw(f"{i}/shared router", d) / 8
        if "bias" in parts:
            tensors[f"blk.{i}.exp_probs_b.bias"] = draw(f"{i}/bias", s.n_expert) / 4
        if "expert bias" in parts:
            tensors[f"blk.{i}.ffn_gate_inp.bias"] = draw(f"{i}/router bias", s.n_expert)
            for stem, n in (("gate", s.n_ff_expert), ("up", s.n_ff_expert), ("down", d)):
                bias = models.normal(f"mixtures/{i}/{stem}/bias", s.n_expert, n) / 2
                tensors[f"blk.{i}.ffn_{stem}_exps.bias"] = bias.astype(np.float32)
        if "output bias" in parts:
            tensors[f"blk.{i}.attn_output.bias"] = draw(f"{i}/output bias", d) / 2
        if "sinks" in parts:
            tensors[f"blk.{i}.attn_sinks.weight"] = draw(f"{i}/sinks", s.n_head)
        if "wide norms" in parts:
            tensors[f"blk.{i}.attn_q_norm.weight"] = 1 + draw(f"{i}/q norm", q) / 4
            tensors[f"blk.{i}.attn_k_norm.weight"] = 1 + draw(f"{i}/k norm", kv) / 4
        elif "head norms" in parts:
            tensors[f"blk.{i}.attn_q_norm.weight"] = 1 + draw(f"{i}/q norm", s.d_head) / 4
            tensors[f"blk.{i}.attn_k_norm.weight"] = 1 + draw(f"{i}/k norm", s.d_head) / 4
    return models.write(path, {key: value for key, value in meta.items() if value is not None}, tensors)


@pytest.mark.parametrize("name", VARIANTS)
def test_any_mixture_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    """Decoded tokens to sums of floats; prompts to what their kernels round, which changes no choice."""
    path = write(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m, Session(m, n_threads=2, type_k="f32", type_v="f32") as s:
        rows = []
        for token in TOKENS:
            s.feed([token])
            rows.append(s.logits().copy())
        assert reference.relative_error(np.stack(rows), expected) < 1e-5
        s.drop()
        s.feed(TOKENS)
        if not rounding.BF16:  # rounded inputs of a prompt choose other experts where two are as good
            assert reference.relative_error(s.logits(), expected[-1]) < 2e-3
        s.feed(TOKENS[:1])
        assert np.isfinite(s.logits()).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_bits_stay_together_and_however_a_prompt_is_cut(name: str, tmp_path: Path) -> None:
    with (
        Model(write(tmp_path / "m.gguf", name)) as m,
        Session(m, n_threads=2, n_seq=3, n_batch=16) as s,
        Session(m, n_threads=3) as alone,
    ):
        assert same_bits_alone(s, alone)


def by_neuron(path: Path, to: Path, kind: GGMLQuantizationType | None = None) -> Path:
    """The same model with down stored by neuron."""
    file = reference.load(path)
    tensors = {
        name.replace("down_exps", "down_t_exps"): np.ascontiguousarray(value.swapaxes(1, 2))
        if name.endswith("ffn_down_exps.weight")
        else value
        for name, value in file.tensors.items()
    }
    return models.write(to, file.meta, {k: v.astype(np.float32) for k, v in tensors.items()}, kind=kind)


@pytest.mark.parametrize("stored", ["by output", "by neuron"])
@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe"])
def test_silent_neurons_are_not_read(name: str, stored: str, tmp_path: Path) -> None:
    """A mixture of ReLU experts: the reference's answer, the same bits in both modes, alone and together."""
    path = write(tmp_path / "m.gguf", name, {"powerinfer.hidden_act": "relu"})
    expected = reference.forward(reference.load(path), TOKENS)
    if stored == "by neuron":
        path = by_neuron(path, tmp_path / "t.gguf")
    with (
        Model(path) as m,
        Session(m, n_threads=2, n_seq=3, n_batch=16, sparsity="exact", type_k="f32", type_v="f32") as s,
        Session(m, n_threads=2, sparsity="dense", type_k="f32", type_v="f32") as dense,
    ):
        assert m.info.can_skip_down == (stored == "by neuron")
        assert same_bits_alone(s, dense)
        s.drop()
        dense.drop()
        read = {"exact": 0, "dense": 0}
        rows = []
        for token in TOKENS:
            for session in (s, dense):
                session.feed([token])
                read[session.info.sparsity] += sum(step.ffn_bytes for step in session.last_step)
            rows.append(s.logits().copy())
            assert np.array_equal(s.logits(), dense.logits())
        assert reference.relative_error(np.stack(rows), expected) < 1e-5
        # About half of the neurons are silent.
        assert 0.5 < read["exact"] / read["dense"] < (0.75 if stored == "by neuron" else 0.9)
        step = s.last_step[0]
        assert step.n_computed < step.n_predicted == m.info.n_neurons
        shared = N_SHARED if name == "qwen2moe" else 0  # whose neurons are all computed
        assert step.n_active <= step.n_computed <= step.n_active + shared


@pytest.mark.parametrize("type", ["COPY", "Q8_0", "Q4_K"])
def test_quantize_stores_down_by_neuron(
    type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plain, turned = (tmp_path / f"{name}.gguf" for name in ("m", "plain", "turned"))
    write(source, "smallthinker")
    assert main(["quantize", str(source), str(plain), type]) == 0
    assert main(["quantize", str(source), str(turned), type, "--down-by-neuron"]) == 0
    before, one, other = (reference.load(path).tensors for path in (source, plain, turned))
    assert {name.replace("_down_t_", "_down_") for name in other} == set(one)
    for name, value in other.items():
        if "_down_t_" not in name:
            assert np.array_equal(value, one[name])
            continue
        down = before[name.replace("_down_t_", "_down_")].swapaxes(1, 2)
        assert value.shape == down.shape
        # Half a step of Q8_0, a 127th of a block's largest, and its scale is a half; a step of Q5_0, which
        # Q4_K falls back to: -16 to 15 of a 16th.
        error = {"COPY": 0.0, "Q8_0": 0.5 / 127 + 2**-11, "Q4_K": 1 / 16}[type]
        assert np.abs(value - down).max() <= error * np.abs(down).max()
    assert main(["quantize", str(plain), str(tmp_path / "again.gguf"), "COPY", "--down-by-neuron"]) == (
        0 if type == "COPY" else 1
    )
    with Model(turned) as m, Session(m, n_threads=1) as s:
        assert m.info.can_skip_down
        s.feed(TOKENS[:20])
        assert np.isfinite(s.logits()).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_bits_stay_together_in_blocks(kind: str, tmp_path: Path) -> None:
    path = by_neuron(
        write(tmp_path / "m.gguf", "smallthinker"), tmp_path / "t.gguf", GGMLQuantizationType[kind]
    )
    with (
        Model(path) as m,
        Session(m, n_threads=2, n_seq=3) as s,
        Session(m, n_threads=2, sparsity="dense") as alone,
    ):
        assert same_bits_alone(s, alone)


def test_more_sequences_than_a_pass_has_tokens(tmp_path: Path) -> None:
    n = 70
    with (
        Model(write(tmp_path / "m.gguf", "smallthinker")) as m,
        Session(m, n_threads=2, n_seq=n, n_batch=80, n_pool=64 * n) as s,
        Session(m, n_threads=2) as alone,
    ):
        for token in TOKENS[:2]:
            s.feed([token + i for i in range(n)], seq=list(range(n)), want_logits=True)
        for i in (0, 31, 32, 63, 64, 69):
            alone.drop()
            for token in TOKENS[:2]:
                alone.feed([token + i])
            assert np.array_equal(s.logits(i), alone.logits())


def test_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """Where down is stored by output no sum is cut, however members share the work."""
    with Model(write(tmp_path / "m.gguf", "qwen2moe")) as m:
        seen = set()
        for n_threads in (1, 2, 3, 4):
            with Session(m, n_threads=n_threads) as s:
                s.feed(TOKENS)
                prompt = s.logits().tobytes()
                s.feed(TOKENS[:1])
                seen.add((prompt, s.logits().tobytes()))
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"expert_gating_func": 3}, UnsupportedError, "expert_gating_func is 3"),
        ({"expert_group_count": 3}, FormatError, "in 3 groups"),
        ({"expert_group_count": 9}, FormatError, "expert_group_count"),
        ({"expert_group_count": 8, "expert_group_used_count": 2}, FormatError, "cannot give a token 3"),
        ({"expert_weights_scale": float("nan")}, FormatError, "expert_weights_scale"),
        ({"expert_feed_forward_length": 64}, FormatError, "ffn_gate_exps"),
    ],
)
def test_bad_routers_are_refused(
    change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words), Model(write(tmp_path / "m.gguf", "groups", change)):
        pass


U32, U64 = np.uint32, np.uint64
N_COUNTS = N_LAYER * SPEC.n_expert
COUNTS, COUNTED = "powerinfer.expert.counts", "powerinfer.expert.tokens"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({COUNTS: np.zeros(N_COUNTS - 1, U32), COUNTED: U64(9)}, f"array of {N_COUNTS} u32"),
        ({COUNTS: np.zeros(N_COUNTS + 8, U32), COUNTED: U64(9)}, f"array of {N_COUNTS} u32"),
        ({COUNTS: np.zeros(N_COUNTS, np.float32), COUNTED: U64(9)}, "u32"),
        ({COUNTS: 7, COUNTED: U64(9)}, "u32"),
        ({COUNTS: np.zeros(N_COUNTS, U32)}, f"without {COUNTED}"),
        ({COUNTED: U64(9)}, f"without {COUNTS}"),
        ({COUNTS: np.zeros(N_COUNTS, U32), COUNTED: U64(0)}, COUNTED),
        ({COUNTS: np.zeros(N_COUNTS, U32), COUNTED: U64(1 << 41)}, COUNTED),
        (
            {COUNTS: np.eye(1, N_COUNTS, 11, dtype=U32)[0] * U32(10), COUNTED: U64(9)},
            "expert 3 of layer 1 was used 10 times in 9 tokens",
        ),
    ],
)
def test_bad_statistics_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "mixtral", more=change)
    with pytest.raises(FormatError, match=words), Model(path):
        pass


def test_statistics_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    spec = models.SPECS["qwen2"]
    meta = models.metadata(spec) | {COUNTS: np.zeros(8, U32), COUNTED: U64(9)}
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    with pytest.raises(FormatError, match="no experts"), Model(path):
        pass


def stored_otherwise(path: Path, how: str) -> Path:
    """The file with its experts in tensors of their own, as of the first converters, or gate and up fused."""
    file = reference.load(path)
    tensors: models.Tensors = {}
    for name, value in file.tensors.items():
        value = value.astype(np.float32)
        stem, _, rest = name.partition("_exps.")
        if how == "separate" and rest:
            tensors |= {f"{stem}.{e}.{rest}": one for e, one in enumerate(value)}
        elif how == "fused" and stem.endswith("ffn_gate") and rest:
            up = file.tensors[name.replace("gate", "up")].astype(np.float32)
            tensors[name.replace("gate", "gate_up")] = np.concatenate([value, up], axis=1)
        elif how != "fused" or not (stem.endswith("ffn_up") and rest):
            tensors[name] = value
    return models.write(path.with_suffix(f".{how}"), file.meta, tensors)


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("how", ["separate", "fused"])
def test_experts_stored_otherwise_give_the_same_bits(how: str, use_mmap: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "mixtral")
    logits = []
    for one in (stored_otherwise(path, "same"), stored_otherwise(path, how)):
        with Model(one, use_mmap=use_mmap) as m, Session(m, n_threads=2) as s:
            s.feed(TOKENS)
            s.feed(TOKENS[:1])
            logits.append(s.logits().copy())
            assert (m.info.n_copied_bytes > 0) == (not use_mmap or "same" not in one.suffix)
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("how", "name", "value", "words"),
    [
        ("separate", "blk.1.ffn_up.3.weight", None, r"no tensor blk\.1\.ffn_up\.3\.weight"),
        ("separate", "blk.1.ffn_up.3.weight", np.zeros((96, 32), np.float32), r"blk\.1\.ffn_up\.3\.weight"),
        ("separate", "blk.1.ffn_up.3.weight", np.zeros((96, 64), np.float16), "is F16, that of expert 0 F32"),
        ("separate", "blk.1.ffn_up.8.weight", np.zeros((96, 64), np.float32), r"a tensor blk\.1\.ffn_up\.8"),
        (
            "fused",
            "blk.1.ffn_gate_up_exps.weight",
            np.zeros((8, 96, 64), np.float32),
            "expected {64, 192, 8}",
        ),
        (
            "fused",
            "blk.1.ffn_up_exps.weight",
            np.zeros((8, 96, 64), np.float32),
            r"a tensor blk\.1\.ffn_up_exps",
        ),
    ],
)
def test_experts_stored_badly_are_refused(
    how: str, name: str, value: Any, words: str, tmp_path: Path
) -> None:
    file = reference.load(stored_otherwise(write(tmp_path / "m.gguf", "mixtral"), how))
    tensors = {key: one.astype(np.float32) for key, one in file.tensors.items()} | {name: value}
    kept = {key: one for key, one in tensors.items() if one is not None}
    path = models.write(tmp_path / "n.gguf", file.meta, kept)
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass


def test_layers_that_guess_at_further_tokens_are_not_used(tmp_path: Path) -> None:
    """Published files of GLM 4.5 end with one, which block_count counts; tensors of any other are refused."""
    path = write(tmp_path / "m.gguf", "glm4moe")
    file = reference.load(path)
    keys = file.meta | {"glm4moe.block_count": N_LAYER + 1, "glm4moe.nextn_predict_layers": 1}
    more = {f"blk.{N_LAYER}.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    more |= {f"blk.{N_LAYER}.attn_norm.weight": np.zeros(64, np.float32)}
    values = {name: value.astype(np.float32) for name, value in file.tensors.items()}
    other = models.write(tmp_path / "n.gguf", keys, values | more)
    # In floats, too, so that the answers have the same bits.
    path = models.write(tmp_path / "m.gguf", file.meta, values)
    logits = []
    for one in (path, other):
        with Model(one) as m, Session(m, n_threads=2) as s:
            assert m.info.n_layer == N_LAYER
            s.feed(TOKENS)
            logits.append(s.logits().copy())
    assert np.array_equal(logits[0], logits[1])
    more = {f"blk.{N_LAYER + 1}.attn_norm.weight": np.zeros(64, np.float32)}
    with (
        pytest.raises(UnsupportedError, match=rf"blk\.{N_LAYER + 1}\.attn_norm"),
        Model(models.write(tmp_path / "n.gguf", keys, values | more)),
    ):
        pass
    keys["glm4moe.nextn_predict_layers"] = N_LAYER + 1
    with (
        pytest.raises(FormatError, match="nextn_predict_layers"),
        Model(models.write(tmp_path / "n.gguf", keys, values)),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "tensors", "words"),
    [
        ({"leading_dense_block_count": N_LAYER}, {}, "leading_dense_block_count"),
        ({"leading_dense_block_count": 1}, {}, r"no tensor blk\.1\.ffn_gate_inp"),
        ({}, {"blk.1.attn_k_norm.weight": np.ones(32, np.float32)}, r"without blk\.1\.attn_q_norm"),
        ({}, {"blk.1.attn_q_norm.weight": np.ones(32, np.float32)}, r"no tensor blk\.1\.attn_k_norm"),
    ],
)
def test_bad_files_of_glm_are_refused_by_name(
    change: dict[str, Any], tensors: models.Tensors, words: str, tmp_path: Path
) -> None:
    file = reference.load(write(tmp_path / "m.gguf", "glm4moe", change))
    values = {name: value.astype(np.float32) for name, value in (file.tensors | tensors).items()}
    with pytest.raises(FormatError, match=words), Model(models.write(tmp_path / "m.gguf", file.meta, values)):
        pass


def test_uses_are_counted_where_there_are_experts(tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["glm4moe"])
    with Model(path) as m, Session(m, n_threads=2, count_neurons=True) as s:
        s.feed(TOKENS, want_logits=True)
        counts = s.neuron_counts().counts
    assert counts.shape == (3, 8)
    assert counts.sum(axis=1).tolist() == [0, 3 * len(TOKENS), 3 * len(TOKENS)]


def test_neurons_of_layers_without_experts_are_not_counted_as_uses(tmp_path: Path) -> None:
    """Whatever kernels compute them: here those that leave silent neurons out."""
    path = write(tmp_path / "m.gguf", "glm4moe", {"powerinfer.hidden_act": "relu"})
    with Model(path) as m, Session(m, n_threads=2, count_neurons=True, sparsity="exact") as s:
        for token in TOKENS:
            s.feed([token])
        counts = s.neuron_counts().counts
    assert counts.sum(axis=1).tolist() == [0, 0] + [3 * len(TOKENS)] * 3


OSS = "gpt-oss."
BAD_OSS: list[tuple[dict[str, Any], models.Tensors, str]] = [
    ({}, {"blk.1.attn_sinks.weight": np.zeros(3, np.float32)}, "attn_sinks"),
    ({}, {"blk.1.ffn_up_exps.bias": np.zeros((8, 95), np.float32)}, "ffn_up_exps.bias"),
    ({}, {"blk.1.ffn_up_exps.bias": np.zeros((7, 96), np.float32)}, "ffn_up_exps.bias"),
    ({}, {"blk.1.ffn_down_exps.bias": np.zeros(8 * 64, np.float32)}, "ffn_down_exps.bias"),
    ({}, {"blk.1.ffn_gate_inp.bias": np.zeros(9, np.float32)}, "ffn_gate_inp.bias"),
    ({}, {"blk.1.ffn_norm.weight": np.zeros(64, np.float32)}, "blk.1.ffn_norm"),
    ({OSS + "attention.sliding_window": 0}, {}, "sliding_window"),
    ({OSS + "expert_gating_func": 4}, {}, "expert_gating_func is 4"),
    ({OSS + "expert_count": 2**31}, {}, "expert_count"),
]


@pytest.mark.parametrize(("meta", "tensors", "words"), BAD_OSS)
def test_bad_files_of_gpt_oss_are_refused_by_name(
    meta: dict[str, Any], tensors: models.Tensors, words: str, tmp_path: Path
) -> None:
    spec = models.SPECS["gpt-oss"]
    values = models.file_tensors(spec, models.draw(spec)) | tensors
    path = models.write(tmp_path / "m.gguf", models.metadata(spec) | meta, values)
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass


def test_experts_that_are_ruled_out_are_chosen_where_there_are_no_others(tmp_path: Path) -> None:
    """A router may say minus infinity of all; it then ranks them in their order, as of equal ones."""
    spec = models.SPECS["gpt-oss"]
    answers: list[Any] = []
    for value in (-np.inf, -1e30):  # beside which the products are nothing
        values = models.file_tensors(spec, models.draw(spec))
        for i in range(spec.n_layer):
            values[f"blk.{i}.ffn_gate_inp.bias"] = np.full(spec.n_expert, value, np.float32)
        path = models.write(tmp_path / "m.gguf", models.metadata(spec), values)
        with Model(path) as m:
            plan = plans.make_plan(m, vram_budget=16, n_batch=64, rates=HOST_RATES)
            assert plan.n_hot == spec.n_expert * spec.n_layer
            for more in ({}, {"plan": plan.native(m), "device": "host", "n_batch": 64}):
                with Session(m, n_threads=2, n_ctx=plan.settings.n_ctx, **more) as s:
                    s.feed(TOKENS)
                    answers.append(s.logits().copy())
    assert np.isfinite(answers).all()
    assert np.array_equal(answers[0], answers[2]) and np.array_equal(answers[1], answers[3])
    assert reference.relative_error(answers[1], answers[0]) < (3e-2 if rounding.BF16 else 2e-3)


def test_ranks_below_all_floats_still_name_experts(tmp_path: Path) -> None:
    """Biases of a router and of the choice that together are no float any more."""
    file = reference.load(write(tmp_path / "m.gguf", "gpt-oss"))
    tensors = {name: value.astype(np.float32) for name, value in file.tensors.items()}
    for i in range(N_LAYER):
        for stem in ("ffn_gate_inp", "exp_probs_b"):
            tensors[f"blk.{i}.{stem}.bias"] = np.full(SPEC.n_expert, -3e38, np.float32)
    path = models.write(tmp_path / "n.gguf", file.meta, tensors)
    with Model(path) as m, Session(m, n_threads=2, count_neurons=True) as s:
        s.feed(TOKENS)
        counts = s.neuron_counts().counts
    assert (counts[:, : SPEC.n_used] == len(TOKENS)).all() and not counts[:, SPEC.n_used :].any()


@pytest.mark.parametrize("name", ["sinks", "q", "ffn_down_exps", "ffn_gate_inp"])
def test_a_tensor_of_gpt_oss_that_is_missing(name: str, tmp_path: Path) -> None:
    spec = models.SPECS["gpt-oss"]
    values = models.file_tensors(spec, models.draw(spec))
    del values[f"blk.3.{'attn_' * (len(name) < 6)}{name}.{'weight' if name == 'sinks' else 'bias'}"]
    path = models.write(tmp_path / "m.gguf", models.metadata(spec), values)
    with pytest.raises(FormatError, match=rf"no tensor blk\.3\.\w*{name}"), Model(path):
        pass


def test_experts_of_other_architectures_are_refused(tmp_path: Path) -> None:
    spec = models.SPECS["qwen2"]
    meta = models.metadata(spec) | {"qwen2.expert_count": 8}
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    with pytest.raises(UnsupportedError, match="8 experts"), Model(path):
        pass


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "as it is") for name in ("qwen2moe", "glm4moe", "gpt-oss", "groups")]
    + [(name, how) for name in ("qwen2moe", "groups") for how in ("separate", "fused")],
)
def test_info_of_a_mixture(name: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures beside the bytes that the engine reads for a token."""
    path = write(tmp_path / "m.gguf", name)
    if how != "as it is":
        path = stored_otherwise(path, how)
    assert main(["info", str(path), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    found = out["experts"]
    assert (found["n_layers"], found["n_neurons"]) == (3 if name == "glm4moe" else N_LAYER, SPEC.n_ff_expert)
    assert found["shared"] == (name in ("qwen2moe", "glm4moe", "groups") and "shared" in VARIANTS[name][2])
    size = 3 * SPEC.n_ff_expert * SPEC.n_embd
    biases = (2 * SPEC.n_ff_expert + SPEC.n_embd) * (name == "gpt-oss")
    inactive = (SPEC.n_expert - 3) * found["n_layers"] * (size + biases)
    assert found["n_active_parameters"] == out["model"]["n_parameters"] - inactive
    assert found["expert_bytes"] == size * (2 if how == "as it is" else 4) + 4 * biases
    assert found["token_expert_bytes"] == 3 * found["n_layers"] * found["expert_bytes"]
    with Model(path) as m, Session(m, n_threads=1) as s:
        s.feed(TOKENS[:1])
        assert s.last_total.bytes == pytest.approx(found["token_bytes"], rel=0.03)  # but for K, V and vectors
        gating = {"glm4moe": "sigmoid", "groups": "sigmoid", "gpt-oss": "softmax over the chosen"}
        assert m.info.expert_gating == gating.get(name, "softmax")
        try:
            plans.make_plan(m, vram_budget=1, rates=plans.Rates())
            assert out["devices_refuse"] is None
        except UnsupportedError as error:
            assert out["devices_refuse"] == str(error)
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"router         {m.info.expert_gating}" in text and "a token reads" in text
    assert ("2 of 4 groups" in text) == (name == "groups")


def test_what_a_mixture_says_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its experts, no mode that it does not have, and shares of the neurons that a token goes through."""
    path = write(tmp_path / "m.gguf", "smallthinker")
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        "8, of which a token uses 3" in text
        and "exact by default; silent neurons' up rows are skipped" in text
    )
    with Llama(path, n_threads=1, verbose=False) as llm:
        assert any("ffn_down of experts is not stored transposed" in note for note in llm.info().notes)
    assert main(["bench", str(path), "-p", "0", "-n", "4", "-r", "1", "-t", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert 0.3 < result["computed"] == result["active"] < 0.7
    with Model(write(tmp_path / "q.gguf", "qwen2moe")) as m:
        assert m.info.n_neurons == 3 * SPEC.n_ff_expert + N_SHARED
