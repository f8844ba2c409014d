"""Which tensors a model has in its checkpoint, and what becomes of them in a file.

The file's names are llama.cpp's. Five things are more than a name: rows of q and k are reordered where the
engine rotates neighbouring pairs (llama), Falcon's fused projection is regrouped, the down projection of a
PowerInfer file is transposed, Llama 3's rotation factors become a tensor, and so do the matrices of a layer's
experts, stacked.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np

from ...errors import FormatError, UnsupportedError
from .checkpoint import Checkpoint
from .families.family import NEXT_LAYER, Family, pairs_of_halves
from .families.tensors import count_joins, find_tensors, next_layers
from .gpt_oss import Packed, expert_tensors
from .hyper import Experts, Hyper
from .rope import llama3_divisors
from .stored import Array, Stack, StoredTensor

FileTensor = StoredTensor | Stack | Packed

# Tensors that hold no weights: what they say is known without them.
_NO_WEIGHTS = re.compile(r"(.*\.)?(inv_freq|masked_bias|attn\.bias|attention\.bias)")

# Of TurboSparse-Mixtral, in each expert.
_PREDICTOR = re.compile(r"\.experts\.\d+\.predictor\.fc[12]\.weight$")

# OPT's table of positions begins with rows that no position uses.
OPT_UNUSED_POSITIONS = 2


@dataclass(frozen=True)
class _Part:
    """One tensor: `source` and `name` without .weight or .bias where `kinds` names those."""

    source: str
    name: str
    shape: tuple[int, ...]
    kinds: tuple[str, ...] = ("weight",)
    rows: Array | None = None
    n_stacked: int = 0
    """Experts: `source` has %d where the number of one stands."""
    is_row: bool = False
    """Published as a matrix of one row, written as a vector."""
    is_bare: bool = False
    """Published without .weight or .bias."""
    is_optional: bool = False


@dataclass(frozen=True)
class Layout:
    """The tensors of a file, in its order, and what of the checkpoint is not among them."""

    tensors: dict[str, FileTensor]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    keys: Mapping[str, Any]
    """Of the file, which weights of the checkpoint say."""


def count_next(checkpoint: Checkpoint, h: Hyper) -> int:
    """Layers behind the others that guess at further tokens."""
    if h.row is not None:
        return next_layers(checkpoint, h, cast(Family, h.row))
    return count_joins(checkpoint, "model.layers.", h.n_layer) if h.family == "glm4moe" else 0


def lay_out(checkpoint: Checkpoint, hyper: Hyper, *, powerinfer: bool, transpose_down: bool) -> Layout:
    """Names, shapes and order of a file's tensors; no weight is read.

    powerinfer: the set of tensors that the original's loader wants. transpose_down: store ffn_down as the
    rows of neurons, under the name that tells so. Raises FormatError for tensors that are missing, misshapen
    or not known, UnsupportedError.
    """
    out: dict[str, FileTensor]
    used: set[str] = set()
    notes: list[str] = []
    skipped: list[str] = []
    keys: dict[str, Any] = {}
    head_name = "lm_head.weight"
    if hyper.row is not None:
        found = find_tensors(checkpoint, hyper, cast(Family, hyper.row))
        out, used, skipped, notes = dict(found.tensors), found.used, found.skipped, found.notes
        keys = {f"{hyper.arch}.{name}": value for name, value in found.keys.items()}
        if transpose_down:
            out = dict(_by_neuron(name, tensor) for name, tensor in out.items())
        head = cast("StoredTensor | None", out.pop("output.weight", None))
        if not isinstance(out.get("token_embd.weight"), StoredTensor):
            raise FormatError(f"{checkpoint.folder} has no tensor of embeddings")
        head_name = head.name if head is not None else head_name
    else:
        out = _named(checkpoint, hyper, used, transpose_down)
        head = checkpoint.tensors.get(head_name)
    embedding = cast(StoredTensor, out["token_embd.weight"])
    is_tied = hyper.tied is not False
    if head is not None or hyper.tied is False:
        used.add(head_name)
        head = (
            head
            if hyper.row is not None and head is not None
            else checkpoint.weight(head_name, embedding.shape)
        )
        if not is_tied or not _equal(head, embedding):
            if hyper.tied:
                raise FormatError(
                    f"{checkpoint.folder}: {head_name} is not the embedding, though they are tied"
                )
            is_tied = False
            out["output.weight"] = head
    elif hyper.tied is None and hyper.is_gated:  # in the other families that is the rule
        notes.append(f"there is no {head_name}: the embedding is used")
    if powerinfer and hyper.arch != "opt":
        out.setdefault("output.weight", embedding)  # a loader of such files wants it
    elif powerinfer and not is_tied:
        raise UnsupportedError("a PowerInfer file of an OPT model has no place for an output head of its own")
    copies = _copies(out, hyper, embedding)
    used.difference_update(copies)
    skipped += copies
    if hyper.n_next:
        notes.append("the layer behind the others guesses at further tokens: with --mtp it drafts")
    if hyper.n_next > 1:
        notes.append(f"of {hyper.n_next} such layers the first drafts; --no-mtp leaves all out")
    out.update(_rope_tensors(hyper))
    left = [name for name in checkpoint if name not in used]
    notes += _check_left(checkpoint, hyper, left, skipped)
    if is_tied and head_name in used:
        left.append(head_name)
    if any(isinstance(tensor, Packed) for tensor in out.values()):
        notes.append("the experts stay in MXFP4, as they are published")
    return Layout(out, tuple(left), tuple(notes), keys)


def _rope_tensors(hyper: Hyper) -> dict[str, FileTensor]:
    """Factors of the frequencies, which a file has as tensors."""
    rope = hyper.rope
    if rope is None:
        return {}
    factors: dict[str, Any] = {}
    if rope.kind == "llama3":
        factors["rope_freqs.weight"] = llama3_divisors(rope, hyper.d_rot or hyper.d_head)
    if rope.kind == "longrope":
        factors = {"rope_factors_short.weight": rope.short, "rope_factors_long.weight": rope.long}
    return {name: StoredTensor(name, "F32", np.array(f, np.float32)) for name, f in factors.items()}


def _check_left(checkpoint: Checkpoint, hyper: Hyper, left: list[str], skipped: list[str]) -> list[str]:
    """Notes on tensors that no file has. Raises FormatError for one with weights that answers need. skipped:
    of those, what is known not to be needed."""
    known = set(skipped)
    unknown = [name for name in left if name not in known and not _NO_WEIGHTS.fullmatch(name)]
    notes = []
    if hyper.experts is not None and hyper.experts.has_predictors:
        predictors = [name for name in unknown if _PREDICTOR.search(name)]
        unknown = [name for name in unknown if not _PREDICTOR.search(name)]
        if predictors:
            notes.append(
                "the predictors of the experts are left out, since the engine has none for experts: all "
                "neurons of a token's experts count, also those that a predictor would have taken for silent"
            )
    if hyper.family == "glm4moe":
        unknown = [name for name in unknown if not name.startswith(f"model.layers.{hyper.n_layer}.")]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise FormatError(
            f"{checkpoint.folder} has a tensor {unknown[0]:.200}{more}, which a {hyper.family} model of "
            f"{hyper.n_layer} layers does not: the answers would be wrong without it"
        )
    return notes


def _named(
    checkpoint: Checkpoint, hyper: Hyper, used: set[str], transpose_down: bool
) -> dict[str, FileTensor]:
    """Everything but the head, of families that are not rows of the table."""
    out: dict[str, FileTensor] = {}

    def take(source: str, shape: tuple[int, ...]) -> StoredTensor:
        used.add(source)
        return checkpoint.weight(source, shape)

    prefix = _prefix(checkpoint, hyper)
    if hyper.family == "gpt-oss" and hyper.experts is not None:
        for i in range(hyper.n_layer):
            out.update(expert_tensors(checkpoint, hyper, hyper.experts, i, take, used))
    for part in _parts(hyper):
        if part.is_optional and f"{prefix}{part.source}.weight" not in checkpoint:
            continue
        made: dict[str, FileTensor] = {}
        if part.n_stacked:
            name = f"{part.name}.weight"
            sources = [f"{prefix}{part.source % e}.weight" for e in range(part.n_stacked)]
            made[name] = Stack(name, tuple(take(one, part.shape) for one in sources))
        else:
            for kind in part.kinds:
                shape = part.shape if kind == "weight" else part.shape[:1]
                tensor = take(prefix + part.source + ("" if part.is_bare else f".{kind}"), shape)
                if part.rows is not None:
                    tensor = replace(tensor, rows=part.rows)
                if part.is_row:
                    tensor = replace(tensor, view=tensor.view[0])
                made[f"{part.name}.{kind}"] = tensor
        out.update(_by_neuron(*one) if transpose_down else one for one in made.items())
    return out


def _by_neuron(name: str, tensor: FileTensor) -> tuple[str, FileTensor]:
    """A down projection as the rows of neurons, under the name that tells so; others as they are."""
    parts = name.split(".")
    if parts[-2] not in ("ffn_down", "ffn_down_exps") or isinstance(tensor, Packed):
        return name, tensor
    name = name.replace("ffn_down", "ffn_down_t")
    if isinstance(tensor, Stack):
        return name, Stack(name, tuple(replace(one, view=one.view.T) for one in tensor.parts))
    return name, replace(tensor, view=tensor.view.T)  # a bias stays what it is


def _copies(out: dict[str, FileTensor], h: Hyper, embedding: StoredTensor) -> list[str]:
    """Takes out of a file what a head for further tokens would have once more: it reads the model's."""
    found = []
    head = out.get("output.weight", embedding)
    models = {"embed_tokens": embedding, "shared_head_head": head}
    for i, (name, model) in product(range(h.n_layer, h.n_layer + h.n_next), models.items()):
        name = f"blk.{i}.nextn.{name}.weight"
        own = out.get(name)
        if isinstance(own, StoredTensor) and isinstance(model, StoredTensor) and _equal(own, model):
            found.append(out.pop(name).name)
    return found


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    step = a.rows_per_chunk()
    return all(
        np.array_equal(a.read(i, min(step, a.shape[0] - i)), b.read(i, min(step, a.shape[0] - i)))
        for i in range(0, a.shape[0], step)
    )


def parts_of(h: Hyper) -> Iterator[tuple[str, _Part]]:
    """The parts of such a family but experts and head, by the published names of their weights."""
    for part in _parts(h):
        if not part.n_stacked:
            yield f"{_prefix((), h)}{part.source}.weight", part


def _prefix(checkpoint: Container[str], hyper: Hyper) -> str:
    """What the names of the family begin with; OPT is published with two."""
    if hyper.family == "falcon":
        return "transformer."
    if hyper.family == "opt":
        return "decoder." if "decoder.embed_tokens.weight" in checkpoint else "model.decoder."
    return "model."


def fused_by_kind(n_head: int, n_head_kv: int, d_head: int) -> Array:
    """Rows of Falcon's fused projection (of each kv head: its q heads, k, v) as all q, all k, all v."""
    groups = np.arange((n_head + 2 * n_head_kv) * d_head).reshape(n_head_kv, -1, d_head)
    return np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])


def _parts(hyper: Hyper) -> Iterator[_Part]:
    """Everything but the output head, names without the prefix."""
    return {"falcon": _falcon, "opt": _opt}.get(hyper.family, _llama)(hyper)


def _llama(h: Hyper) -> Iterator[_Part]:
    q_rows = k_rows = None
    if h.family == "llama":
        q_rows, k_rows = pairs_of_halves(h.n_head, h.d_head), pairs_of_halves(h.n_head_kv, h.d_head)
    qkv = ("weight", "bias") if h.qkv_bias else ("weight",)
    yield _Part("embed_tokens", "token_embd", (h.n_vocab, h.n_embd))
    for i in range(h.n_layer + h.n_next):
        p, b = f"layers.{i}.", f"blk.{i}."
        if i >= h.n_layer:
            for name, new in NEXT_LAYER.items():
                shape = {"eh_proj": (h.n_embd, 2 * h.n_embd)}.get(name, (h.n_embd,))
                whole = name in ("embed_tokens", "shared_head.head")
                yield _Part(p + name, b + new, (h.n_vocab, h.n_embd) if whole else shape, is_optional=whole)
        attn = p + "self_attn."
        yield _Part(p + "input_layernorm", b + "attn_norm", (h.n_embd,))
        yield _Part(attn + "q_proj", b + "attn_q", (h.q_width, h.n_embd), qkv, q_rows)
        yield _Part(attn + "k_proj", b + "attn_k", (h.kv_width, h.n_embd), qkv, k_rows)
        yield _Part(attn + "v_proj", b + "attn_v", (h.kv_width, h.n_embd), qkv)
        out = ("weight", "bias") if h.output_bias else ("weight",)
        yield _Part(attn + "o_proj", b + "attn_output", (h.n_embd, h.q_width), out)
        if h.family == "gpt-oss":
            yield _Part(attn + "sinks", b + "attn_sinks", (h.n_head,), is_bare=True)
        if h.family in ("qwen3", "qwen3moe") or h.head_norms:
            yield _Part(attn + "q_norm", b + "attn_q_norm", (h.d_head,))
            yield _Part(attn + "k_norm", b + "attn_k_norm", (h.d_head,))
        elif h.family == "olmoe":
            yield _Part(attn + "q_norm", b + "attn_q_norm", (h.q_width,))
            yield _Part(attn + "k_norm", b + "attn_k_norm", (h.kv_width,))
        norm = "post_attention_norm" if h.family in ("glm4moe", "gpt-oss") else "ffn_norm"
        yield _Part(p + "post_attention_layernorm", b + norm, (h.n_embd,))
        experts = h.experts_of(i)
        if experts is not None:
            yield from _experts(h, experts, p, b)
            continue
        yield _Part(p + "mlp.gate_proj", b + "ffn_gate", (h.n_ff, h.n_embd))
        yield _Part(p + "mlp.up_proj", b + "ffn_up", (h.n_ff, h.n_embd))
        yield _Part(p + "mlp.down_proj", b + "ffn_down", (h.n_embd, h.n_ff))
    yield _Part("norm", "output_norm", (h.n_embd,))


@dataclass(frozen=True)
class ExpertNames:
    """Of a mixture's matrices in checkpoints, behind a layer's name."""

    router: str
    expert: str
    """With %d for its number."""
    gate: str
    up: str
    down: str


def expert_names(h: Hyper) -> ExpertNames:
    if h.family == "llama":
        return ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.%d.", "w1", "w3", "w2")
    if h.family == "smallthinker":
        moe = "block_sparse_moe."
        return ExpertNames(moe + "primary_router", moe + "experts.%d.", "gate", "up", "down")
    return ExpertNames("mlp.gate", "mlp.experts.%d.", "gate_proj", "up_proj", "down_proj")


def _experts(h: Hyper, experts: Experts, p: str, b: str) -> Iterator[_Part]:
    names, n, n_ff = expert_names(h), experts.n, experts.n_ff
    if h.family == "gpt-oss":
        yield _Part(p + "mlp.router", b + "ffn_gate_inp", (n, h.n_embd), ("weight", "bias"))
        return  # the rest is in gpt_oss.py
    one = p + names.expert
    yield _Part(p + names.router, b + "ffn_gate_inp", (n, h.n_embd))
    yield _Part(one + names.gate, b + "ffn_gate_exps", (n_ff, h.n_embd), n_stacked=n)
    yield _Part(one + names.up, b + "ffn_up_exps", (n_ff, h.n_embd), n_stacked=n)
    yield _Part(one + names.down, b + "ffn_down_exps", (h.n_embd, n_ff), n_stacked=n)
    if h.family == "glm4moe":
        source = p + names.router + ".e_score_correction_bias"
        yield _Part(source, b + "exp_probs_b", (n,), ("bias",), is_bare=True)
    if experts.n_ff_shared:
        wide = experts.n_ff_shared
        shared = p + ("mlp.shared_experts." if h.family == "glm4moe" else "mlp.shared_expert.")
        if h.family == "qwen2moe":
            yield _Part(p + "mlp.shared_expert_gate", b + "ffn_gate_inp_shexp", (1, h.n_embd), is_row=True)
        yield _Part(shared + "gate_proj", b + "ffn_gate_shexp", (wide, h.n_embd))
        yield _Part(shared + "up_proj", b + "ffn_up_shexp", (wide, h.n_embd))
        yield _Part(shared + "down_proj", b + "ffn_down_shexp", (h.n_embd, wide))


def _falcon(h: Hyper) -> Iterator[_Part]:
    both = ("weight", "bias")
    rows = fused_by_kind(h.n_head, h.n_head_kv, h.d_head)
    yield _Part("word_embeddings", "token_embd", (h.n_vocab, h.n_embd))
    for i in range(h.n_layer):
        p, b = f"h.{i}.", f"blk.{i}."
        if h.two_norms:
            # The one that a file of one norm has is the FFN's.
            yield _Part(p + "ln_mlp", b + "attn_norm", (h.n_embd,), both)
            yield _Part(p + "ln_attn", b + "attn_norm_2", (h.n_embd,), both)
        else:
            yield _Part(p + "input_layernorm", b + "attn_norm", (h.n_embd,), both)
        fused = (h.q_width + 2 * h.kv_width, h.n_embd)
        yield _Part(p + "self_attention.query_key_value", b + "attn_qkv", fused, rows=rows)
        yield _Part(p + "self_attention.dense", b + "attn_output", (h.n_embd, h.q_width))
        yield _Part(p + "mlp.dense_h_to_4h", b + "ffn_up", (h.n_ff, h.n_embd))
        yield _Part(p + "mlp.dense_4h_to_h", b + "ffn_down", (h.n_embd, h.n_ff))
    yield _Part("ln_f", "output_norm", (h.n_embd,), both)


def _opt(h: Hyper) -> Iterator[_Part]:
    both = ("weight", "bias")
    yield _Part("embed_tokens", "token_embd", (h.n_vocab, h.n_embd))
    yield _Part("embed_positions", "position_embd", (h.n_ctx + OPT_UNUSED_POSITIONS, h.n_embd))
    for i in range(h.n_layer):
        p, b = f"layers.{i}.", f"blk.{i}."
        square = (h.n_embd, h.n_embd)
        yield _Part(p + "self_attn_layer_norm", b + "attn_norm", (h.n_embd,), both)
        yield _Part(p + "self_attn.q_proj", b + "attn_q", square, both)
        yield _Part(p + "self_attn.k_proj", b + "attn_k", square, both)
        yield _Part(p + "self_attn.v_proj", b + "attn_v", square, both)
        yield _Part(p + "self_attn.out_proj", b + "attn_output", square, both)
        yield _Part(p + "final_layer_norm", b + "ffn_norm", (h.n_embd,), both)
        yield _Part(p + "fc1", b + "ffn_up", (h.n_ff, h.n_embd), both)
        yield _Part(p + "fc2", b + "ffn_down", (h.n_embd, h.n_ff), both)
    yield _Part("final_layer_norm", "output_norm", (h.n_embd,), both)
