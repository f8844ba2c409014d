"""Valid GGUF files that are no valid models: each is refused when opened, by a sentence with the fact."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, PowerInferError, UnsupportedError
from powerinfer._engine.session import Model
from tests import checkpoints, models
from tests.core import gguf_bytes as g

F16, Q8_0, Q8_1, Q8_K, I32, I64 = 1, 8, 9, 15, 26, 27  # ggml's numbers


@dataclass
class Draft:
    """A file to be: keys as (type, value) and tensors, both free to be spoiled."""

    meta: dict[str, tuple[int, Any]]
    tensors: dict[str, g.Tensor]
    magic: bytes = b"GGUF"

    def write(self, path: Path) -> Path:
        pairs = [
            g.array(key, kind, value) if isinstance(value, list) else g.pair(key, kind, value)
            for key, (kind, value) in self.meta.items()
        ]
        path.write_bytes(g.gguf(pairs, list(self.tensors.values()), magic=self.magic))
        return path


@functools.cache
def parts(spec: models.Spec) -> tuple[dict[str, Any], models.Tensors]:
    tensors = models.file_tensors(spec, models.draw(spec))
    if spec.predictor:
        tensors = models.sparse_tensors(tensors, models.draw_predictor(spec))
    return {key: v for key, v in models.metadata(spec).items() if not key.startswith("tokenizer.")}, tensors


def shape(family: str, n_layer: int) -> models.Spec:
    act = {"opt": "relu", "falcon": "gelu"}.get(family, "silu")
    tied = family == "opt"
    return models.Spec(
        "bad", family, n_layer=n_layer, n_embd=64, n_ff=96, n_vocab=270, n_ctx=32, act=act, tied=tied
    )


def good(
    family: str = "llama", n_layer: int = 1, *, predictor: bool = False, spec: models.Spec | None = None
) -> Draft:
    """A valid file; with a predictor, a PowerInfer file."""
    spec = spec or shape(family, n_layer)
    if predictor:
        spec = replace(spec, act="relu", predictor=(16,) * n_layer)
    meta, tensors = parts(spec)
    kinds = {int: g.U32, float: g.F32, str: g.STRING}
    return Draft(
        {key: (kinds[type(value)], value) for key, value in meta.items()},
        {
            name: g.Tensor(name=name, dims=x.shape[::-1], data=x.tobytes(), kind=int(x.dtype == np.float16))
            for name, x in tensors.items()
        },
        b"PWRI" if predictor else b"GGUF",
    )


Edit = Callable[[Draft], None]


def key(name: str, kind: int, value: Any) -> Edit:
    return lambda d: d.meta.update({name: (kind, value)})


def no_key(name: str) -> Edit:
    def edit(d: Draft) -> None:
        del d.meta[name]

    return edit


def tensor(name: str, *dims: int, kind: int = F16, n_bytes: int | None = None) -> Edit:
    """Puts a tensor of zeros in; n_bytes where a value does not take two bytes."""
    n = n_bytes if n_bytes is not None else int(np.prod(dims)) * 2

    def edit(d: Draft) -> None:
        d.tensors[name] = g.Tensor(name=name, dims=dims, data=bytes(n), kind=kind)

    return edit


def floats(name: str, *values: float) -> Edit:
    def edit(d: Draft) -> None:
        d.tensors[name] = g.Tensor(
            name=name, dims=(len(values),), data=struct.pack(f"<{len(values)}f", *values)
        )

    return edit


def no_tensor(name: str) -> Edit:
    def edit(d: Draft) -> None:
        del d.tensors[name]

    return edit


def both(*edits: Edit) -> Edit:
    def edit(d: Draft) -> None:
        for one in edits:
            one(d)

    return edit


@dataclass(frozen=True)
class Case:
    name: str
    edit: Edit
    error: type[PowerInferError]
    says: str
    base: Callable[[], Draft] = good


NAN, INF = float("nan"), float("inf")
A = "llama."
ROPE = A + "rope."
EACH = "powerinfer.sparse_thresholds"
PREDICTOR = "powerinfer.predictor"
falcon = functools.partial(good, "falcon")
opt = functools.partial(good, "opt")
sparse = functools.partial(good, predictor=True)


def bad_keys() -> list[Case]:
    cases = [
        Case("no architecture", no_key("general.architecture"), FormatError, "general.architecture"),
        Case("architecture is a number", key("general.architecture", g.U32, 1), FormatError, "not a string"),
        Case(
            "architecture is empty",
            key("general.architecture", g.STRING, ""),
            UnsupportedError,
            'architecture ""',
        ),
        Case(
            "architecture is mamba", key("general.architecture", g.STRING, "mamba"), UnsupportedError, "mamba"
        ),
        Case(
            "zero byte", key("general.architecture", g.STRING, b"llama\0"), UnsupportedError, "not supported"
        ),
        Case(
            "other prefix", key("general.architecture", g.STRING, "qwen2"), FormatError, "qwen2.block_count"
        ),
        Case("long name", key("general.architecture", g.STRING, "a" * 5000), UnsupportedError, "aaaa"),
        Case("experts", key(A + "expert_count", g.U32, 8), FormatError, "expert_used_count"),
        Case("heads do not divide", key(A + "attention.head_count", g.U32, 7), FormatError, "7 heads"),
        Case("kv heads do not divide", key(A + "attention.head_count_kv", g.U32, 3), FormatError, "evenly"),
        Case("more kv heads", key(A + "attention.head_count_kv", g.U32, 8), FormatError, "head_count_kv"),
        Case("no kv heads", key(A + "attention.head_count_kv", g.U32, 0), FormatError, "head_count_kv"),
        Case("kv heads per layer", key(A + "attention.head_count_kv", g.U32, [4]), FormatError, "array"),
        Case("other value length", key(A + "attention.value_length", g.U32, 8), UnsupportedError, "differ"),
        Case("key length 0", key(A + "attention.key_length", g.U32, 0), FormatError, "key_length"),
        Case("key length 5000", key(A + "attention.key_length", g.U32, 5000), FormatError, "key_length"),
        Case(
            "wide heads",
            both(key(A + "attention.head_count", g.U32, 4096), key(A + "attention.key_length", g.U32, 4096)),
            FormatError,
            "4096 heads of 4096",
        ),
        Case("odd rotation", key(ROPE + "dimension_count", g.U32, 15), FormatError, "must be even"),
        Case("no rotation", key(ROPE + "dimension_count", g.U32, 0), FormatError, "dimension_count"),
        Case("wide rotation", key(ROPE + "dimension_count", g.U32, 18), FormatError, "dimension_count"),
        Case("negative rotation", key(ROPE + "dimension_count", g.I32, -2), FormatError, "-2"),
        Case(
            "scaling longrope", key(ROPE + "scaling.type", g.STRING, "longrope"), UnsupportedError, "longrope"
        ),
        Case("scaling 7", key(ROPE + "scaling.type", g.U32, 7), FormatError, "scaling.type"),
        Case("act relu6", key("powerinfer.hidden_act", g.STRING, "relu6"), UnsupportedError, "relu6"),
        Case("act 1", key("powerinfer.hidden_act", g.U32, 1), FormatError, "hidden_act"),
        Case(
            "silu with a threshold",
            key("powerinfer.hidden_act_threshold", g.F32, 0.01),
            UnsupportedError,
            "only relu",
        ),
        Case(
            "threshold text",
            key("powerinfer.sparse_threshold", g.STRING, "0"),
            FormatError,
            "sparse_threshold",
        ),
        Case(
            "threshold nan", key("powerinfer.sparse_threshold", g.F32, NAN), FormatError, "sparse_threshold"
        ),
        Case("two thresholds", key(EACH, g.F32, [0.0, 1.0]), FormatError, "array of 1 f32", sparse),
        Case("whole thresholds", key(EACH, g.U32, [1]), FormatError, "array of 1 f32", sparse),
        Case("one threshold", key(EACH, g.F32, 0.5), FormatError, "array of 1 f32", sparse),
        Case("no number of a layer", key(EACH, g.F32, [NAN]), FormatError, EACH + "[0]", sparse),
        Case("predictor oracle", key(PREDICTOR, g.STRING, "oracle"), UnsupportedError, "oracle", sparse),
        Case("predictor 1", key(PREDICTOR, g.U32, 1), FormatError, PREDICTOR, sparse),
        Case("predictor mlp", key(PREDICTOR, g.STRING, "mlp"), FormatError, "no fc1"),
        Case("signs of silu", key(PREDICTOR, g.STRING, "sign"), FormatError, "needs a ReLU model"),
        Case(
            "ungated drelu",
            key("powerinfer.hidden_act", g.STRING, "drelu"),
            FormatError,
            "needs a gate",
            falcon,
        ),
        Case(
            "yarn without a ramp",
            both(
                key(ROPE + "scaling.type", g.STRING, "yarn"), key(ROPE + "scaling.yarn_beta_fast", g.F32, 0.0)
            ),
            FormatError,
            "beta_fast 0",
        ),
        Case(
            "yarn nan",
            both(key(ROPE + "scaling.type", g.STRING, "yarn"), key(ROPE + "scaling.attn_factor", g.F32, NAN)),
            FormatError,
            "attn_factor nan",
        ),
        Case(
            "yarn context 0",
            key(ROPE + "scaling.original_context_length", g.U32, 0),
            FormatError,
            "original_context",
        ),
    ]
    needed = (
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "context_length",
    )
    for name in needed:
        cases += [
            Case(f"no {name}", no_key(A + name), FormatError, A + name),
            Case(f"{name} is text", key(A + name, g.STRING, "64"), FormatError, "not an integer"),
            Case(f"{name} is a float", key(A + name, g.F32, 64.0), FormatError, "not an integer"),
            Case(f"{name} is 0", key(A + name, g.U32, 0), FormatError, A + name),
            Case(f"{name} is negative", key(A + name, g.I64, -1), FormatError, "is -1"),
            Case(f"{name} is 2^32-1", key(A + name, g.U32, 2**32 - 1), FormatError, "4294967295"),
            Case(f"{name} is 2^64-1", key(A + name, g.U64, 2**64 - 1), FormatError, "above"),
        ]
    eps = "attention.layer_norm_rms_epsilon"
    numbers = {
        eps: (NAN, INF, -1e-5),
        "rope.freq_base": (NAN, INF, 0.0, 1.0, -1e4),
        "rope.scaling.factor": (NAN, INF, 0.5, -1.0),
    }
    for name, values in numbers.items():
        cases.append(Case(f"{name} is text", key(A + name, g.STRING, "1"), FormatError, "not a float"))
        for value in values:
            cases.append(
                Case(f"{name} is {value}", key(A + name, g.F32, value), FormatError, f" is {value:g}")
            )
    for value in (NAN, INF, -0.5):
        edit = both(
            key("powerinfer.hidden_act", g.STRING, "relu"),
            key("powerinfer.hidden_act_threshold", g.F32, value),
        )
        cases.append(Case(f"act threshold {value}", edit, FormatError, f"threshold is {value:g}"))
    cases.append(Case("no epsilon", no_key(A + eps), FormatError, eps))
    return cases


def bad_tensors() -> list[Case]:
    embd, down, down_t = "token_embd.weight", "blk.0.ffn_down.weight", "blk.0.ffn_down_t.weight"
    freqs = "rope_freqs.weight"
    cases = [
        Case("few layers", key(A + "block_count", g.U32, 2), FormatError, "blk.1.attn_norm.weight"),
        Case(
            "a layer too many",
            key(A + "block_count", g.U32, 1),
            UnsupportedError,
            "blk.1.",
            lambda: good(n_layer=2),
        ),
        Case("no down", no_tensor(down), FormatError, "neither tensor blk.0.ffn_down_t.weight nor"),
        Case("vocabulary of output", tensor("output.weight", 64, 271), FormatError, "output.weight"),
        Case("vast vocabulary", tensor(embd, 1, 2**24 + 1, n_bytes=2**25 + 2), FormatError, "16777217 rows"),
        Case(
            "integer embeddings",
            tensor(embd, 64, 270, kind=I32, n_bytes=64 * 270 * 4),
            UnsupportedError,
            "I32",
        ),
        Case(
            "unknown weights",
            tensor("blk.0.attn_q_norm.weight", 16),
            UnsupportedError,
            "blk.0.attn_q_norm.weight",
        ),
        Case("gate bias", tensor("blk.0.ffn_gate.bias", 96), UnsupportedError, "blk.0.ffn_gate.bias"),
        Case("two kinds of down", tensor(down_t, 64, 96), UnsupportedError, down),
        Case("rope_freqs short", floats(freqs, *[1.0] * 7), FormatError, "7 values"),
        Case("rope_freqs long", floats(freqs, *[1.0] * 16), FormatError, "16 values"),
        Case("rope_freqs of pairs", tensor(freqs, 8, 1), FormatError, freqs),
        Case("rope_freqs I32", tensor(freqs, 8, kind=I32, n_bytes=32), FormatError, "I32"),
        Case("rope_freqs zero", floats(freqs, *[1.0] * 7, 0.0), FormatError, "[7] is 0"),
        Case("rope_freqs negative", floats(freqs, *[1.0] * 7, -2.0), FormatError, "[7] is -2"),
        Case("rope_freqs nan", floats(freqs, NAN, *[1.0] * 7), FormatError, "[0] is nan"),
        Case("rope_freqs inf", floats(freqs, INF, *[1.0] * 7), FormatError, "[0] is inf"),
        Case("rope_freqs tiny", floats(freqs, 1e-45, *[1.0] * 7), FormatError, "[0] is 1.4"),
        Case(
            "blocks too wide",
            both(
                key(ROPE + "dimension_count", g.U32, 64),
                key(A + "attention.head_count", g.U32, 1),
                key(A + "attention.head_count_kv", g.U32, 1),
                tensor(freqs, 32, kind=Q8_0, n_bytes=34),
            ),
            FormatError,
            "Q8_0",
        ),
        # Predictors.
        Case("PWRI without fc1", no_tensor("blk.0.fc1.weight"), FormatError, "blk.0.fc1.weight", sparse),
        Case("PWRI without fc2", no_tensor("blk.0.fc2.weight"), FormatError, "blk.0.fc2.weight", sparse),
        Case("fc1 of other width", tensor("blk.0.fc1.weight", 63, 16), FormatError, "fc1", sparse),
        Case("fc2 of other rank", tensor("blk.0.fc2.weight", 17, 96), FormatError, "fc2", sparse),
        Case("fc2 of other n_ff", tensor("blk.0.fc2.weight", 16, 97), FormatError, "fc2", sparse),
        Case("fc1 vector", tensor("blk.0.fc1.weight", 64), FormatError, "fc1", sparse),
        Case(
            "fc2 integers",
            tensor("blk.0.fc2.weight", 16, 96, kind=I64, n_bytes=16 * 96 * 8),
            UnsupportedError,
            "I64",
            sparse,
        ),
        Case("fc2 alone", tensor("blk.0.fc2.weight", 16, 96), UnsupportedError, "fc2"),
        Case(
            "predictor in one layer",
            both(tensor("blk.1.fc1.weight", 64, 16), tensor("blk.1.fc2.weight", 16, 96)),
            FormatError,
            "1 of 2 layers have a predictor",
            lambda: good(n_layer=2),
        ),
        Case("down_t not transposed", tensor(down_t, 96, 64), FormatError, "ffn_down_t", sparse),
        # What the other architectures have.
        Case(
            "fused rows",
            tensor("blk.0.attn_qkv.weight", 64, 191),
            FormatError,
            "{64, 191}, expected {64, 192}",
            falcon,
        ),
        Case(
            "second norm without bias",
            tensor("blk.0.attn_norm_2.weight", 64),
            FormatError,
            "attn_norm_2.bias",
            falcon,
        ),
        Case("no norm bias", no_tensor("output_norm.bias"), FormatError, "output_norm.bias", falcon),
        Case("no positions", no_tensor("position_embd.weight"), FormatError, "position_embd", opt),
        Case("two positions", tensor("position_embd.weight", 64, 2), FormatError, "at least 3", opt),
        Case("narrow positions", tensor("position_embd.weight", 32, 34), FormatError, "position_embd", opt),
        Case("no up bias", no_tensor("blk.0.ffn_up.bias"), FormatError, "ffn_up.bias", opt),
        Case("no down bias", no_tensor("blk.0.ffn_down.bias"), FormatError, "ffn_down.bias", opt),
        Case("no output bias", no_tensor("blk.0.attn_output.bias"), FormatError, "attn_output.bias", opt),
        Case("no q bias", no_tensor("blk.0.attn_q.bias"), FormatError, "attn_q.bias", lambda: good("qwen2")),
        Case(
            "no q norm",
            no_tensor("blk.0.attn_q_norm.weight"),
            FormatError,
            "attn_q_norm",
            lambda: good("qwen3"),
        ),
        Case(
            "k norm of all heads",
            tensor("blk.0.attn_k_norm.weight", 64),
            FormatError,
            "attn_k_norm",
            lambda: good("qwen3"),
        ),
    ]
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in [embd, *(f"blk.0.{part}.weight" for part in matrices)]:
        cols, rows = good().tensors[name].dims
        cases += [
            Case(f"no {name}", no_tensor(name), FormatError, name),
            Case(f"{name} of one column more", tensor(name, cols + 1, rows), FormatError, name),
            Case(f"{name} is a vector", tensor(name, cols * rows), FormatError, name),
            Case(f"{name} in three dimensions", tensor(name, cols, rows, 1), FormatError, "3 dimensions"),
            Case(
                f"{name} Q8_1",
                tensor(name, cols, rows, kind=Q8_1, n_bytes=cols * rows // 32 * 36),
                UnsupportedError,
                "Q8_1",
            ),
        ]
    for part in matrices:
        cols, rows = good().tensors[f"blk.0.{part}.weight"].dims
        cases.append(
            Case(f"{part} of one row more", tensor(f"blk.0.{part}.weight", cols, rows + 1), FormatError, part)
        )
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        cases += [
            Case(f"no {name}", no_tensor(name), FormatError, name),
            Case(f"{name} too short", floats(name, *[1.0] * 63), FormatError, name),
            Case(f"{name} too long", floats(name, *[1.0] * 65), FormatError, name),
            Case(f"{name} as a matrix", tensor(name, 64, 1), FormatError, name),
            Case(f"{name} Q8_K", tensor(name, 256, kind=Q8_K, n_bytes=292), FormatError, name),
            Case(f"{name} I32", tensor(name, 64, kind=I32, n_bytes=256), UnsupportedError, "I32"),
        ]
    return cases


CASES = bad_keys() + bad_tensors()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    draft = case.base()
    case.edit(draft)
    with pytest.raises(PowerInferError) as raised:
        Model(draft.write(tmp_path / "m.gguf"))
    assert type(raised.value) is case.error
    assert case.says in str(raised.value)


@pytest.mark.parametrize("base", [good, falcon, opt, sparse, lambda: good("qwen2"), lambda: good("qwen3", 2)])
def test_the_drafts_themselves_are_good(base: Callable[[], Draft], tmp_path: Path) -> None:
    with Model(base().write(tmp_path / "m.gguf")) as model:
        assert model.info.n_embd == 64


def test_an_unknown_architecture_is_told_all_that_are_known(tmp_path: Path) -> None:
    draft = good()
    draft.meta["general.architecture"] = (g.STRING, "mamba" * 100)
    with pytest.raises(UnsupportedError) as caught:
        Model(draft.write(tmp_path / "m.gguf"))
    known = str(caught.value).partition("(")[2]
    assert known.endswith(" are)")
    specs = {spec.arch for spec in models.SPECS.values()} | {case.arch for case in checkpoints.CASES.values()}
    assert {*specs, "internlm2", "smallthinker"} == {*known.removesuffix(" are)").split(", ")}


def test_an_activation_that_the_model_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="needs a gate"):
        Model(falcon().write(tmp_path / "m.gguf"), activation="drelu")


@pytest.mark.parametrize(
    ("base", "predictor", "says"),
    [(good, "mlp", "no fc1"), (good, "sign", "needs a ReLU"), (sparse, "x", "'x'")],
)
def test_a_predictor_that_the_model_cannot_have(
    base: Callable[[], Draft], predictor: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=says):
        Model(base().write(tmp_path / "m.gguf"), predictor=predictor)


def test_the_predictor_and_its_thresholds_are_chosen_as_the_file_and_the_caller_say(tmp_path: Path) -> None:
    draft = good("llama", 2, predictor=True)
    draft.meta["powerinfer.sparse_threshold"] = (g.F32, -0.5)
    path = draft.write(tmp_path / "m.gguf")
    with Model(path) as model:
        assert (model.info.predictor, model.thresholds) == ("mlp", [-0.5, -0.5])
    draft.meta[EACH] = (g.F32, [0.25, 0.125])
    draft.meta[PREDICTOR] = (g.STRING, "sign")
    draft.write(path)
    with Model(path) as model:
        assert (model.info.predictor, model.thresholds) == ("sign", [0.25, 0.125])
        assert model.info.sparse_threshold == 0.125
        assert model.info.n_sign_bytes == 2 * model.info.n_ff * 8  # 64 columns: a word for each neuron
    with Model(path, predictor="mlp") as model:
        assert (model.info.predictor, model.info.n_sign_bytes) == ("mlp", 0)
    with Model(path, predictor="none") as model:
        assert not model.info.has_predictor
