"""What config.json says about a model, in one form for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..._engine.activations import ACTIVATIONS, SILENT
from ...errors import FormatError, UnsupportedError
from .json_file import Settings
from .rope import MAX_CTX as _MAX_CTX
from .rope import Rope, RopeForm, read_rope

# The largest that the engine takes.
MAX_DIM = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_VOCAB = 1 << 24
MAX_EXPERTS = 4096

_ACT_NAMES = {
    "relu": "relu",
    "drelu": "drelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture: of `n` feed-forwards a token goes through `n_used`."""

    n: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    """Of an expert that all tokens use; 0: there is none."""
    is_normed: bool = True
    """The weights of a token's experts are made to sum to 1."""
    is_sigmoid: bool = False
    """A router's products become weights by the sigmoid; else by the softmax."""
    scale: float = 1.0
    """Of the weights."""
    n_dense: int = 0
    """Layers at the beginning that have no experts."""
    has_predictors: bool = False
    """The checkpoint may have one for each expert, which is left out."""


class Row(Protocol):
    """What is asked here of a row of the table of families (families/family.py)."""

    @property
    def is_gated(self) -> bool: ...

    @property
    def act(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The shape of a model. Sizes as the engine names them."""

    family: str
    """How its layers are built: "llama" (also mistral, mixtral, bamboo), "qwen2", "qwen3", "qwen2moe",
    "qwen3moe", "olmoe", "smallthinker", "glm4moe", "gpt-oss", "falcon" or "opt"."""
    arch: str
    """`general.architecture` of its file."""
    n_layer: int
    n_next: int = 0
    """Layers behind these that guess at further tokens (NextN, MTP), which tensors say and not the config.
    The engine uses the first."""
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    d_rot: int = 0
    """Values of a head that are rotated; 0: all."""
    n_ff: int
    n_vocab: int
    n_ctx: int
    act: str
    """One of ACTIVATIONS, or "clamped", which gpt-oss has."""
    act_threshold: float = 0.0
    norm_eps: float
    rope: Rope | None = None
    tied: bool | None = None
    """Whether the output head is the embedding; None: the config does not say."""
    two_norms: bool = False
    """Falcon: separate norms before attention and FFN."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output product."""
    experts: Experts | None = None
    window: int = 0
    """Positions that some layers see; 0: no layer has a window. SmallThinker: three layers of four, while the
    fourth does not rotate; gpt-oss: every other layer, beginning with the first."""
    head_norms: bool = False
    """GLM: of q and k, where the model has them."""
    notes: tuple[str, ...] = field(default=())
    """Sentences for the user."""
    row: Row | None = None
    """Of the table of families; None: the family is one of FAMILIES below."""
    config: Settings = field(default_factory=lambda: Settings({}, ""))
    """What a row's values are read of."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the file, as a row says them, without the architecture in front."""

    def window_of(self, layer: int) -> int:
        """Positions that a token sees in that layer; 0: all."""
        return self.window if layer % (2 if self.family == "gpt-oss" else 4) != self._full else 0

    @property
    def _full(self) -> int:
        """Which layer of a period has no window."""
        return 1 if self.family == "gpt-oss" else 0

    def experts_of(self, layer: int) -> Experts | None:
        return self.experts if self.experts is not None and layer >= self.experts.n_dense else None

    @property
    def is_gated(self) -> bool:
        if self.row is not None:
            return self.row.is_gated
        return self.family not in ("falcon", "opt")

    @property
    def is_relu(self) -> bool:
        """Whether neurons can be silent."""
        return self.act in SILENT

    @property
    def q_width(self) -> int:
        return self.n_head * self.d_head

    @property
    def kv_width(self) -> int:
        return self.n_head_kv * self.d_head

    def default_act(self, *, powerinfer: bool) -> str:
        """The activation of a file of this architecture that names none."""
        if self.row is not None:
            return "relu" if powerinfer and self.row.act != "relu2" else self.row.act
        if self.arch in ("bamboo", "gpt-oss"):
            return "drelu" if self.arch == "bamboo" else "clamped"
        if powerinfer or self.arch in ("opt", "smallthinker"):
            return "relu"
        return "gelu" if self.arch == "falcon" else "silu"


def read_family(config: Settings, family: str) -> Hyper:
    """The model of one of FAMILIES. Raises as families/reading.py says."""
    return _READERS[family](config, family)


FAMILIES = {
    "llama": ("llama", "sparsellama", "LlamaForCausalLM", "LLaMAForCausalLM", "SparseLlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "turbosparse": ("turbosparsemixtral", "TurboSparseMixtralForCausalLM"),
    "bamboo": ("bamboo", "BambooForCausalLM"),
    "falcon": ("falcon", "RefinedWeb", "RefinedWebModel", "FalconForCausalLM", "RWForCausalLM"),
    "opt": ("opt", "OPTForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "smallthinker": ("smallthinker", "SmallThinkerForCausalLM", "SmallthinkerForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}


def activation(config: Settings, *names: str, default: str) -> tuple[str, float]:
    """The activation and its threshold."""
    given = {config.text(name).lower() for name in names if name in config}
    if len(given) > 1:
        both = " and ".join(f"{name} {config.values[name]!r}" for name in names)
        raise FormatError(
            f"{config.where} has {both}; --hidden-act says which one the model was trained with"
        )
    act = given.pop() if given else default
    if act == "fatrelu":
        return "relu", config.number("hidden_act_param", "hidden_act_threshold", low=0)
    if act not in _ACT_NAMES:
        raise UnsupportedError(
            f"{config.where}: the activation is {act!r:.60}; {', '.join(ACTIVATIONS)} and fatrelu are known"
        )
    return _ACT_NAMES[act], 0.0


def tied(config: Settings) -> bool | None:
    return config.flag("tie_word_embeddings", False) if "tie_word_embeddings" in config else None


def _read_llama(config: Settings, family: str) -> Hyper:
    n_embd = config.integer("hidden_size", low=1, high=MAX_DIM)
    n_head = config.integer("num_attention_heads", low=1, high=MAX_HEADS)
    n_ctx = config.integer("max_position_embeddings", "max_sequence_length", low=1, high=_MAX_CTX)
    d_head = config.integer("head_dim", default=0, low=2, high=MAX_HEADS)
    if not d_head:
        d_head = 128 if family in ("qwen3", "qwen3moe") else divide(config, "hidden_size", n_embd, n_head)
    relu = family in ("bamboo", "turbosparse", "smallthinker")
    act, threshold = activation(config, "hidden_act", default="relu" if relu else "silu")
    if family in ("bamboo", "turbosparse"):
        if act not in ("relu", "drelu"):
            raise config.wrong("hidden_act", f"relu or dReLU for a {family} model")
        act = "drelu"
    if act == "drelu" and threshold:
        raise config.wrong("hidden_act", "fatrelu only where it is applied to the gate alone")
    if config.flag("mlp_bias", False):
        raise UnsupportedError(f"{config.where}: mlp_bias is set; the engine's FFN has no place for a bias")
    bias = config.flag("attention_bias", False)
    return Hyper(
        family=family if family in OWN_LAYERS else "llama",
        arch=family if family in OWN_LAYERS or family == "bamboo" else "llama",
        n_layer=config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=kv_heads(config, n_head, "num_key_value_heads"),
        d_head=d_head,
        n_ff=config.integer(*_FF_NAMES.get(family, ("intermediate_size",)), low=1, high=MAX_DIM),
        n_vocab=config.integer("vocab_size", low=1, high=MAX_VOCAB),
        n_ctx=n_ctx,
        act=act,
        act_threshold=threshold,
        norm_eps=config.number("rms_norm_eps", default=1e-5 if family in _EPS_1E5 else 1e-6, low=0),
        rope=read_rope(config, n_ctx, _ROPE_FORMS.get(family, RopeForm())),
        tied=tied(config),
        qkv_bias=config.flag("qkv_bias", True) if family == "qwen2moe" else bias or family == "qwen2",
        output_bias=bias and not family.startswith("qwen2") and family != "glm4moe",
        experts=_read_experts(config, family),
        window=_read_layout(config) if family == "smallthinker" else 0,
        notes=()
        if family in ("smallthinker", "gpt-oss")
        else window_notes(config, n_ctx, default=not family.startswith("qwen")),
    )


OWN_LAYERS = ("qwen2", "qwen3", "qwen2moe", "qwen3moe", "olmoe", "smallthinker", "glm4moe", "gpt-oss")
_FF_NAMES = {"smallthinker": ("moe_ffn_hidden_size",)}
_ROPE_FORMS = {"glm4moe": RopeForm(share=0.5), "gpt-oss": RopeForm(exact=True)}
_EPS_1E5 = ("mixtral", "turbosparse", "olmoe", "glm4moe", "gpt-oss")


def _read_gpt_oss(config: Settings, family: str) -> Hyper:
    hyper = _read_llama(
        Settings({"attention_bias": True, "head_dim": 64, **config.values}, config.where), family
    )
    for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.number(name, default=value) != value:
            raise UnsupportedError(f"{config.where}: {name} is not {value:g}, which the engine computes with")
    layers = ["full_attention" if i % 2 else "sliding_attention" for i in range(hyper.n_layer)]
    if config.values.get("layer_types") not in (None, layers):
        raise UnsupportedError(f"{config.where}: layer_types must take turns, sliding_attention first")
    if not hyper.qkv_bias:
        raise UnsupportedError(f"{config.where}: attention_bias is false, which the engine does not run")
    if hyper.act != "silu":
        raise UnsupportedError(
            f"{config.where}: the activation is {hyper.act}; gpt-oss has its own, which configs call silu"
        )
    return replace(hyper, act="clamped", window=config.integer("sliding_window", low=1, high=_MAX_CTX))


def _read_glm(config: Settings, family: str) -> Hyper:
    hyper = _read_llama(config, family)
    assert hyper.rope is not None
    d_rot = int(hyper.d_head * hyper.rope.share)
    if not 2 <= d_rot <= hyper.d_head or d_rot % 2:
        raise FormatError(
            f"{config.where}: {d_rot} of a head's {hyper.d_head} values cannot be rotated in pairs"
        )
    return replace(hyper, d_rot=d_rot, head_norms=config.flag("use_qk_norm", False))


# Where configs have the number of experts, how many a token uses, and their width, if not intermediate_size.
_EXPERT_NAMES = {
    "mixtral": ("num_local_experts", "num_experts_per_tok", ""),
    "turbosparse": ("num_local_experts", "num_experts_per_tok", ""),
    "qwen2moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen3moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "olmoe": ("num_experts", "num_experts_per_tok", ""),
    "smallthinker": ("moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size"),
    "glm4moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "gpt-oss": ("num_local_experts", "num_experts_per_tok", ""),
}
_COUNT_NAMES = ("num_experts", "num_local_experts")


def _read_experts(config: Settings, family: str) -> Experts | None:
    if family not in _EXPERT_NAMES:
        return None
    if config.integer("decoder_sparse_step", default=1, low=0, high=MAX_LAYERS) != 1:
        raise UnsupportedError(f"{config.where}: decoder_sparse_step is not 1, which the engine does not run")
    for name in ("mlp_only_layers", "moe_enable_secondary_experts", "moe_shared_primary_experts", "clip_qkv"):
        if config.values.get(name):
            raise UnsupportedError(f"{config.where}: {name} is set, which the engine does not run")
    layout = config.values.get("moe_layer_layout") or []
    if not isinstance(layout, list):
        raise config.wrong("moe_layer_layout", "a list of 0 and 1")
    if 0 in layout:
        raise UnsupportedError(f"{config.where}: moe_layer_layout has layers without experts")
    if config.flag("moe_enable_early_router", True) is False:
        raise UnsupportedError(f"{config.where}: moe_enable_early_router is false")
    count, used, width = _EXPERT_NAMES[family]
    # transformers 5.24 writes qwen3_moe's num_experts as num_local_experts; older ones read either name.
    n = config.integer(count, *_COUNT_NAMES, low=1, high=MAX_EXPERTS)
    shared = 0
    if family == "qwen2moe":
        shared = config.integer("shared_expert_intermediate_size", low=1, high=MAX_DIM)
    n_dense, scale = 0, 1.0
    if family == "glm4moe":
        n_layer = config.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
        n_dense = config.integer("first_k_dense_replace", default=1, low=0, high=n_layer - 1)
        n_shared = config.integer("n_shared_experts", default=1, low=0, high=MAX_EXPERTS)
        shared = n_shared * config.integer(width, low=1, high=MAX_DIM)
        scale = config.number("routed_scaling_factor", default=1.0)
        if config.integer("n_group", default=1, low=1, high=MAX_EXPERTS) != 1:
            raise UnsupportedError(f"{config.where}: n_group is not 1; groups of experts are not converted")
    always_normed = family in ("mixtral", "turbosparse", "smallthinker", "gpt-oss")
    return Experts(
        scale=scale,
        n_dense=n_dense,
        n=n,
        n_used=config.integer(used, low=1, high=n),
        n_ff=config.integer(width or "intermediate_size", low=1, high=MAX_DIM),
        n_ff_shared=shared,
        is_normed=always_normed or config.flag("norm_topk_prob", family == "glm4moe"),
        is_sigmoid=family == "glm4moe"
        or (family == "smallthinker" and not config.flag("moe_primary_router_apply_softmax", False)),
        has_predictors=family == "turbosparse",
    )


def _read_layout(config: Settings) -> int:
    """SmallThinker's window. Its layers are all alike, with rotation and no window, or the first of each four
    has neither: that is what the engine knows."""
    n_layer = config.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    layouts = {}
    for name, default in (("rope_layout", 1), ("sliding_window_layout", 0)):
        values = config.values.get(name)
        values = [default] * n_layer if values is None else values
        if not isinstance(values, list) or any(value not in (0, 1) for value in values):
            raise config.wrong(name, "a list of 0 and 1")
        layouts[name] = values
    rope, window = layouts.values()
    if rope == [1] * n_layer and window == [0] * n_layer:
        return 0
    if not rope == window == [int(i % 4 != 0) for i in range(n_layer)]:
        raise UnsupportedError(
            f"{config.where}: rope_layout and sliding_window_layout must name all layers but each fourth, "
            "beginning with the first; others are not known"
        )
    return config.integer("sliding_window_size", low=1, high=_MAX_CTX)


def _read_falcon(config: Settings, _family: str) -> Hyper:
    for name, expected in (("alibi", False), ("bias", False), ("parallel_attn", True)):
        if config.flag(name, expected) is not expected:
            raise UnsupportedError(f"{config.where}: {name} is {not expected}, which the engine does not run")
    n_embd = config.integer("hidden_size", "n_embed", low=1, high=MAX_DIM)
    n_head = config.integer("num_attention_heads", "n_head", low=1, high=MAX_HEADS)
    new = config.flag("new_decoder_architecture", "n_head_kv" in config)
    n_head_kv = n_head
    if new:
        n_head_kv = kv_heads(config, n_head, "num_kv_heads", "n_head_kv")
    elif config.flag("multi_query", True):
        n_head_kv = 1
    act, threshold = activation(config, "activation", "hidden_act", default="gelu")
    n_ctx = config.integer("max_position_embeddings", default=2048, low=1, high=_MAX_CTX)
    return Hyper(
        family="falcon",
        arch="falcon",
        n_layer=config.integer("num_hidden_layers", "n_layer", low=1, high=MAX_LAYERS),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_head=divide(config, "hidden_size", n_embd, n_head),
        n_ff=config.integer("ffn_hidden_size", default=4 * n_embd, low=1, high=MAX_DIM),
        n_vocab=config.integer("vocab_size", low=1, high=MAX_VOCAB),
        n_ctx=n_ctx,
        act=act,
        act_threshold=threshold,
        norm_eps=config.number("layer_norm_epsilon", default=1e-5, low=0),
        rope=read_rope(config, n_ctx),
        tied=tied(config),
        two_norms=new and config.integer("num_ln_in_parallel_attn", default=2, low=1, high=2) == 2,
    )


def _read_opt(config: Settings, _family: str) -> Hyper:
    expected = {"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True}
    for name, value in {**expected, "_remove_final_layer_norm": False}.items():
        if config.flag(name, value) is not value:
            raise UnsupportedError(f"{config.where}: {name} is {not value}, which the engine does not run")
    n_embd = config.integer("hidden_size", low=1, high=MAX_DIM)
    if config.integer("word_embed_proj_dim", default=n_embd, low=1, high=MAX_DIM) != n_embd:
        raise UnsupportedError(
            f"{config.where}: word_embed_proj_dim is not hidden_size, which the engine does not run"
        )
    n_head = config.integer("num_attention_heads", low=1, high=MAX_HEADS)
    act, threshold = activation(config, "activation_function", default="relu")
    return Hyper(
        family="opt",
        arch="opt",
        n_layer=config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head,
        d_head=divide(config, "hidden_size", n_embd, n_head),
        n_ff=config.integer("ffn_dim", low=1, high=MAX_DIM),
        n_vocab=config.integer("vocab_size", low=1, high=MAX_VOCAB),
        n_ctx=config.integer("max_position_embeddings", default=2048, low=1, high=_MAX_CTX - 2),
        act=act,
        act_threshold=threshold,
        norm_eps=1e-5,
        tied=tied(config),
        qkv_bias=True,
        output_bias=True,
    )


_READERS: dict[str, Callable[[Settings, str], Hyper]] = {
    "llama": _read_llama,
    "mistral": _read_llama,
    "bamboo": _read_llama,
    "qwen2": _read_llama,
    "qwen3": _read_llama,
    "mixtral": _read_llama,
    "turbosparse": _read_llama,
    "qwen2moe": _read_llama,
    "qwen3moe": _read_llama,
    "olmoe": _read_llama,
    "smallthinker": _read_llama,
    "glm4moe": _read_glm,
    "gpt-oss": _read_gpt_oss,
    "falcon": _read_falcon,
    "opt": _read_opt,
}


def divide(config: Settings, name: str, total: int, parts: int) -> int:
    if total % parts:
        raise FormatError(f"{config.where}: {name} {total} does not divide into {parts} heads")
    return total // parts


def kv_heads(config: Settings, n_head: int, *names: str) -> int:
    n = config.integer(*names, default=n_head, low=1, high=n_head)
    if n_head % n:
        raise FormatError(f"{config.where}: {n_head} heads cannot share {n} key/value heads evenly")
    return n


def window_notes(config: Settings, n_ctx: int, *, default: bool) -> tuple[str, ...]:
    window = config.integer("sliding_window", default=0, low=0, high=1 << 40)
    if not window or window >= n_ctx or not config.flag("use_sliding_window", default):
        return ()
    return (
        f"the model looks back at most {window} positions, the engine at all: "
        f"beyond {window} tokens the answers differ",
    )
