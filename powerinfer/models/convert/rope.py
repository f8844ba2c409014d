"""How a checkpoint's config.json describes the rotation of q and k."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...errors import FormatError, UnsupportedError
from .json_file import Settings

MAX_CTX = (1 << 31) // 64 - 1


@dataclass(frozen=True, kw_only=True)
class RopeForm:
    """What a family's engine can do with the rotation, beyond what all can."""

    share: float = 0.0
    """Of a head that is rotated where the config does not say; 0: heads are rotated whole."""
    exact: bool = False
    """YaRN: the pairs between which it goes over evenly are not rounded to whole ones (gpt-oss)."""
    log_scale: float = 0.0
    """YaRN's mscale_all_dim times this is `yarn_log_multiplier`; 0: mscale is not known."""
    by_length: bool = False
    """longrope: factors for contexts as in training, and for longer ones."""
    window_base: float | None = None
    """Layers with a window have a base of their own; this where none is named, 0: that of the others."""
    proportional: bool = False
    """Of a head's pairs only the first turn (Gemma 4)."""
    dynamic: bool = False
    """Scaling by the length of the text: by `alpha` from the start (HunYuan), else beyond the context."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of q and k: the base, and how it is stretched beyond the context that it was trained with."""

    base: float = 10000.0
    has_base: bool = False
    """config.json names the base."""
    kind: str = ""
    """"", "linear", "yarn", "llama3", "longrope" or "proportional"."""
    factor: float = 1.0
    n_ctx_orig: int = 0
    magnitude: float = 0.0
    """YaRN: what cos and sin are multiplied by; 0: what follows from the factor."""
    log_multiplier: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low: float = 1.0
    exact: bool = False
    """YaRN: see RopeForm."""
    high: float = 4.0
    """Llama 3: wavelengths above n_ctx_orig / low are stretched, those below n_ctx_orig / high are not."""
    share: float = 1.0
    """Of a head that is rotated."""
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    """longrope: what the frequencies are divided by."""
    window_base: float = 0.0
    """Of layers with a window; 0: they have none of their own."""


WHOLE = RopeForm()


def read_rope(config: Settings, n_ctx: int, form: RopeForm = WHOLE, *, d_head: int = 0) -> Rope:
    """d_head: of a head, which factors and `alpha` need."""
    name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    scaling, window = config.object(name), Settings({}, config.where)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        if form.window_base is None:
            raise UnsupportedError(f"{scaling.where} differs between layers, which the engine does not run")
        scaling, window = scaling.object("full_attention"), scaling.object("sliding_attention")
    rope = Rope()
    named = _base_of(scaling, config)
    if named:
        rope = Rope(base=named, has_base=True)
    if form.window_base is not None:
        if window.text("rope_type", "type", default="default") != "default":
            raise UnsupportedError(f"{window.where}: layers with a window have a scaling of their own")
        base = window.number("rope_theta", default=config.number("rope_local_base_freq", default=0.0))
        rope = replace(rope, window_base=base or form.window_base or rope.base)
    if form.share:
        rope = replace(rope, share=_share(scaling, config, form.share, d_head))
    elif not form.proportional:
        for settings in (config, scaling):
            if settings.number("partial_rotary_factor", default=1.0) != 1:
                raise UnsupportedError(f"{settings.where}: partial_rotary_factor is not 1")
    kind = scaling.text("rope_type", "type", default="default")
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind == "default":
        return rope
    if kind == "dynamic" and form.dynamic:
        alpha = scaling.number("alpha", default=0.0, low=0)
        return replace(rope, base=rope.base * alpha ** (d_head / (d_head - 2))) if alpha else rope
    known = (
        ["linear", "yarn", "llama3"] + ["longrope"] * form.by_length + ["proportional"] * form.proportional
    )
    if kind not in known:
        raise UnsupportedError(
            f"{scaling.where}: the kind of scaling is {kind!r:.60}; {', '.join(known)} are known"
        )
    if kind == "proportional":
        return replace(rope, kind=kind, share=scaling.number("partial_rotary_factor", default=1.0, low=0))
    if kind == "longrope":
        return _longrope(rope, scaling, config, n_ctx, d_head)
    rope = replace(
        rope,
        kind=kind,
        factor=scaling.number("factor", low=1),
        n_ctx_orig=scaling.integer("original_max_position_embeddings", default=n_ctx, low=1, high=MAX_CTX),
    )
    return (
        _yarn(rope, scaling, form) if kind == "yarn" else _llama3(rope, scaling) if kind == "llama3" else rope
    )


def _base_of(*where: Settings) -> float:
    """The base, of the first that has one; 0 if none has."""
    for settings in where:
        for name in ("rope_theta", "rotary_emb_base"):
            if name in settings:
                base = settings.number(name)
                if not base > 1:
                    raise settings.wrong(name, "more than 1")
                return base
    return 0.0


def _share(scaling: Settings, config: Settings, default: float, d_head: int) -> float:
    """Of a head that is rotated."""
    if "rotary_dim" in config and d_head:
        return config.integer("rotary_dim", low=2, high=d_head) / d_head
    for settings in (scaling, config):
        for name in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
            if name in settings:
                share = settings.number(name, low=0)
                if not 0 < share <= 1:
                    raise settings.wrong(name, "a share in 0..1")
                return share
    return default


def _yarn(rope: Rope, scaling: Settings, form: RopeForm) -> Rope:
    if scaling.flag("truncate", not form.exact) is form.exact:
        raise UnsupportedError(f"{scaling.where}: this truncate is not known")
    both = [scaling.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if any(both) and not form.log_scale:
        raise UnsupportedError(f"{scaling.where}: mscale is not known")
    if form.log_scale and (both[0] != both[1] or (form.log_scale == 1 and both[0] not in (0, 1))):
        raise UnsupportedError(f"{scaling.where}: mscale and mscale_all_dim differ, or are not 1")
    if form.log_scale and form.log_scale != 1 and not both[0]:
        raise UnsupportedError(
            f"{scaling.where}: mscale is missing, without which the engine has other scores"
        )
    return replace(
        rope,
        exact=form.exact,
        log_multiplier=form.log_scale * both[1],
        magnitude=scaling.number("attention_factor", default=0.0, low=0),
        beta_fast=scaling.number("beta_fast", default=32.0, low=1e-3),
        beta_slow=scaling.number("beta_slow", default=1.0, low=1e-3),
    )


def _llama3(rope: Rope, scaling: Settings) -> Rope:
    rope = replace(
        rope,
        low=scaling.number("low_freq_factor", default=1.0, low=1e-3),
        high=scaling.number("high_freq_factor", default=4.0, low=1e-3),
    )
    if not rope.high > rope.low:
        raise scaling.wrong("high_freq_factor", f"more than low_freq_factor, {rope.low:g}")
    return rope


def _longrope(rope: Rope, scaling: Settings, config: Settings, n_ctx: int, d_head: int) -> Rope:
    place = scaling if "original_max_position_embeddings" in scaling else config
    n_orig = place.integer("original_max_position_embeddings", low=2, high=MAX_CTX)
    n_pairs = int(d_head * rope.share) // 2
    short, long = scaling.numbers("short_factor", n_pairs), scaling.numbers("long_factor", n_pairs)
    if not short or not long:
        raise FormatError(f"{scaling.where} has no short_factor or no long_factor")
    stretched = n_ctx / n_orig
    usual = math.sqrt(1 + math.log(stretched) / math.log(n_orig)) if stretched > 1 else 1.0
    magnitude = scaling.number("attention_factor", default=0.0, low=0) or usual
    return replace(rope, kind="longrope", n_ctx_orig=n_orig, short=short, long=long, magnitude=magnitude)


def llama3_divisors(rope: Rope, d_rot: int) -> list[float]:
    """What Llama 3 divides the frequency of each pair by: 1 for short wavelengths, the factor for long ones,
    and between them so that the frequency goes over evenly."""
    out = []
    for i in range(d_rot // 2):
        wavelength = 2 * math.pi * rope.base ** (2 * i / d_rot)
        if wavelength < rope.n_ctx_orig / rope.high:
            out.append(1.0)
        elif wavelength > rope.n_ctx_orig / rope.low:
            out.append(rope.factor)
        else:
            share = (rope.n_ctx_orig / wavelength - rope.low) / (rope.high - rope.low)
            out.append(1 / ((1 - share) / rope.factor + share))
    return out
