"""The model that a config.json describes: of a family that is a row of the table, or one of hyper.py's."""

from __future__ import annotations

from dataclasses import replace

from ....errors import FormatError, UnsupportedError
from .. import hyper as old
from ..hyper import MAX_DIM, Experts, Hyper
from ..json_file import Settings
from ..rope import MAX_CTX, read_rope
from . import FAMILIES
from .family import Family

ACTS = ("hidden_activation", "mlp_hidden_act", "activation_function", "hidden_act")
"""Where config.json has the activation."""
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def read_hyper(config: Settings, *, hidden_act: str = "") -> Hyper:
    """The model that config.json describes.

    hidden_act: replaces the activation that it names. Raises FormatError for values that cannot be,
    UnsupportedError for a model that the engine does not run.
    """
    config = _language(config)
    family = _family_of(config)
    if "quantization_config" in config:
        given = config.object("quantization_config")
        method = given.values.get("quant_method", "?")
        is_online = given.values.get("quantization_mode", given.values.get("linear_class")) in (
            "online",
            "autobitlinear",
        )
        name = family if isinstance(family, str) else family.arch
        if (name, method) != ("gpt-oss", "mxfp4") and not (name == method == "bitnet" and is_online):
            raise UnsupportedError(
                f"{config.where}: the weights are quantised already ({method!s:.40}); "
                "convert the model that they were made from"
            )
    if hidden_act:
        names = ["hidden_act", "activation", "activation_function"]
        names += [name for name in ACTS if name in config]
        config = Settings({**config.values, **dict.fromkeys(names, hidden_act)}, config.where)
    hyper = old.read_family(config, family) if isinstance(family, str) else _read(config, family)
    if hyper.rope is not None and hyper.d_head % 2:
        raise FormatError(f"{config.where}: heads of {hyper.d_head} values cannot be rotated in pairs")
    if hyper.act == "drelu":
        if not hyper.is_gated:
            raise FormatError(f"{config.where}: drelu needs a gate, and {hyper.family} has none")
        if hyper.arch == "llama" and hyper.experts is None:
            # The name by which a file says this of itself, to the original as well.
            hyper = replace(hyper, arch="bamboo")
    return hyper


def _language(config: Settings) -> Settings:
    """Of a model that sees or hears, what it says of its language model, as if it said that alone."""
    if "text_config" not in config:
        return config
    inner = {k: v for k, v in config.object("text_config").values.items() if v is not None}
    inner.pop("architectures", None)
    return Settings({**config.values, **inner}, config.where)


def _family_of(config: Settings) -> str | Family:
    architectures = config.values.get("architectures") or []
    names = [config.text("model_type")]
    if isinstance(architectures, list):
        # The class wins: a model type may be inherited from the model that was changed.
        names = [name for name in architectures if isinstance(name, str)][:1] + names
    for name in names:
        for family, known in old.FAMILIES.items():
            if name in known:
                return family
        for row in FAMILIES:
            if name in row.names:
                return row
    shown = ", ".join(repr(name)[:60] for name in names if name) or "none"
    all_known = ", ".join([*old.FAMILIES, *sorted({row.names[0] for row in FAMILIES})])
    raise UnsupportedError(f"{config.where}: the architecture is {shown}; {all_known} can be converted")


def _read(c: Settings, row: Family) -> Hyper:
    """A row's model."""
    c = Settings({**row.defaults, **c.values}, c.where)
    for name, values in row.only.items():
        if name in c and c.values[name] not in values:
            raise UnsupportedError(
                f"{c.where}: {name} is {c.values[name]!r:.60}, the engine runs {values[0]!r} only"
            )
    arch = row.arch if isinstance(row.arch, str) else row.arch(c)
    n_embd = c.integer("hidden_size", "n_embd", low=1, high=MAX_DIM)
    n_head = c.integer("num_attention_heads", "n_head", low=1, high=old.MAX_HEADS)
    act, threshold = _activation(c, row)
    h = Hyper(
        family=arch,
        arch=arch,
        n_layer=1,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=old.kv_heads(c, n_head, "num_key_value_heads"),
        d_head=c.integer("head_dim", default=0, low=2, high=old.MAX_HEADS)
        or old.divide(c, "hidden_size", n_embd, n_head),
        n_ff=1,
        n_vocab=c.integer("vocab_size", low=1, high=old.MAX_VOCAB),
        n_ctx=c.integer("max_position_embeddings", "n_positions", "n_ctx", low=1, high=MAX_CTX),
        act=act,
        act_threshold=threshold,
        norm_eps=c.number(*_EPS, default=1e-5, low=0),
        tied=old.tied(c) if "tie_word_embeddings" in c else row.tied or None,
        row=row,
        config=c,
    )
    n_layer = (
        row.n_layer(c, h)
        if row.n_layer
        else c.integer("num_hidden_layers", "n_layer", low=1, high=old.MAX_LAYERS)
    )
    h = replace(h, n_layer=n_layer)
    h = replace(h, n_ff=row.n_ff(c, h) if row.n_ff else c.integer("intermediate_size", low=1, high=MAX_DIM))
    if row.rope is not None:
        rope = read_rope(c, h.n_ctx, row.rope, d_head=h.d_head)
        d_rot = int(h.d_head * rope.share) if row.rope.share else 0
        if row.rope.share and (d_rot < 2 or d_rot % 2):
            raise FormatError(f"{c.where}: {d_rot} of a head's {h.d_head} values cannot be rotated in pairs")
        h = replace(h, rope=rope, d_rot=d_rot)
    if row.check is not None:
        row.check(c, h)
    keys = {name: value for name, of in row.keys.items() if (value := of(c, h)) is not None}
    experts = None
    if "expert_count" in keys:
        n, used = keys["expert_count"], keys["expert_used_count"]
        if not 1 <= used <= n <= old.MAX_EXPERTS:
            raise FormatError(f"{c.where}: a token cannot use {used} of {n} experts")
        experts = Experts(n=n, n_used=used, n_ff=keys.get("expert_feed_forward_length", h.n_ff))
    has_window = "sliding_attention" in (c.texts("layer_types") or ["sliding_attention"])
    notes = (
        ()
        if "attention.sliding_window" in row.keys or not has_window
        else old.window_notes(c, h.n_ctx, default=True)
    )
    return replace(h, keys=keys, experts=experts, notes=notes)


def _activation(c: Settings, row: Family) -> tuple[str, float]:
    name = next((name for name in ACTS if name in c), "")
    if not name:
        return row.act, 0.0
    if (act := row.acts.get(c.text(name).lower())) is not None:
        return act, 0.0
    return old.activation(c, name, default=row.act)
