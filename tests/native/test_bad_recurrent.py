"""Bad files of models with recurrent layers: each is refused by a sentence with the fact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import FormatError, PowerInferError, UnsupportedError
from powerinfer._engine.session import Model, Session
from tests import models

TOP = 2**32 - 1

KEYS: list[tuple[str, str, Any, str]] = [
    ("lfm2", "shortconv.l_cache", None, "l_cache"),
    ("lfm2", "shortconv.l_cache", 1, "1 tokens is not supported"),
    ("lfm2", "shortconv.l_cache", 9, "9 tokens is not supported"),
    ("lfm2", "shortconv.l_cache", 4, "shortconv.conv"),
    ("lfm2", "shortconv.l_cache", TOP, "l_cache"),
    ("lfm2", "attention.head_count_kv", None, "head_count_kv"),
    ("lfm2", "attention.head_count_kv", 2, "attn_q"),
    ("lfm2", "attention.head_count_kv", [0, 0, 0, 0], "no layer"),
    ("lfm2", "attention.head_count_kv", [0, 0, 2], "one for each layer"),
    ("lfm2", "attention.head_count_kv", [0, 0, 2, 0, 0], "one for each layer"),
    ("lfm2", "attention.head_count_kv", [0, 0, -2, 0], "head_count_kv"),
    ("lfm2", "attention.head_count_kv", [0, 2, 3, 0], "in one layer"),
    ("lfm2", "attention.head_count_kv", [0, 0, 4, 0], "4 key/value heads"),
    ("lfm2", "attention.head_count_kv", [0.0, 0.0, 2.0, 0.0], "one for each layer"),
    ("lfm2", "attention.head_count_kv", [0, 2, 2, 0], "attn_q"),
    ("lfm2", "feed_forward_length", 0, "feed_forward_length"),
    ("lfm2", "feed_forward_length", [120, 120, 0, 120], "no feed-forward"),
    ("qwen35", "ssm.conv_kernel", None, "ssm.conv_kernel"),
    ("qwen35", "ssm.conv_kernel", 3, "ssm_conv1d"),
    ("qwen35", "ssm.state_size", 0, "ssm.state_size"),
    ("qwen35", "ssm.state_size", TOP, "ssm.state_size"),
    ("qwen35", "ssm.state_size", 1 << 20, "ssm_conv1d"),
    ("qwen35", "ssm.group_count", 0, "ssm.group_count"),
    ("qwen35", "ssm.group_count", 4, "do not share evenly"),
    ("qwen35", "ssm.time_step_rank", 5, "do not share evenly"),
    ("qwen35", "ssm.time_step_rank", TOP, "ssm.time_step_rank"),
    ("qwen35", "ssm.inner_size", 191, "do not share evenly"),
    ("qwen35", "ssm.inner_size", 1 << 20, "do not share evenly|ssm_conv1d"),
    ("qwen35", "attention.recurrent_layers", [True] * 3, "one for each layer"),
    ("qwen35", "attention.recurrent_layers", [False] * 4, "attn_q"),
    ("qwen35", "attention.recurrent_layers", [True] * 4, "ssm_conv1d"),
    ("falcon-h1", "attention.head_count_kv", [2, 0], "no heads"),
    ("falcon-h1", "ssm.group_count", TOP, "ssm.group_count"),
]


def write(path: Path, name: str, meta: dict[str, Any], **tensors: Any) -> Path:
    spec = models.SPECS[name]
    keys = models.metadata(spec) | {f"{spec.arch}.{key}": value for key, value in meta.items()}
    out = dict(models.file_tensors(spec, models.draw(spec)))
    for tensor, value in tensors.items():
        if value is None:
            del out[tensor]
        else:
            out[tensor] = value
    return models.write(path, {key: value for key, value in keys.items() if value is not None}, out)


@pytest.mark.parametrize(("name", "key", "value", "words"), KEYS)
def test_bad_keys(name: str, key: str, value: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", name, {key: value})
    with pytest.raises((FormatError, UnsupportedError), match=words), Model(path):
        pass


@pytest.mark.parametrize("name", sorted(name for name, spec in models.SPECS.items() if spec.layers))
def test_bad_tensors(name: str, tmp_path: Path) -> None:
    """Each of a recurrent layer's tensors is missed, and checked for its shape."""
    spec = models.SPECS[name]
    tensors = models.file_tensors(spec, models.draw(spec))
    words = (".ssm_", ".shortconv.", ".attn_qkv", ".attn_gate", "embd_norm")
    mine = [t for t in tensors if (t.startswith("blk.0.") and any(w in t for w in words)) or words[-1] in t]
    assert len(mine) >= 3
    for tensor in mine:
        value = tensors[tensor]
        for other in (None, value[:-1], value[..., None].swapaxes(0, -1) if value.ndim > 1 else value[:1]):
            path = write(tmp_path / "m.gguf", name, {}, **{tensor: other})
            with (
                pytest.raises((FormatError, UnsupportedError), match=tensor.replace(".", r"\.")),
                Model(path),
            ):
                pass


def test_a_period_says_which_layers_attend(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen35", {"attention.recurrent_layers": None})
    with Model(path) as model:
        assert model.info.n_recurrent == 3
    bad = {"attention.recurrent_layers": None, "full_attention_interval": None}
    with pytest.raises(FormatError, match="neither"), Model(write(tmp_path / "n.gguf", "qwen35", bad)):
        pass


def test_layers_for_guesses_are_left_out(tmp_path: Path) -> None:
    """One behind the others, which block_count counts (and lists do, too)."""
    spec = models.SPECS["qwen35"]
    recurrent = [kind == "r" for kind in spec.layers]
    path = write(
        tmp_path / "m.gguf",
        "qwen35",
        {
            "block_count": spec.n_layer + 1,
            "nextn_predict_layers": 1,
            "attention.recurrent_layers": [*recurrent, False],
        },
        **{"blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float16)},
    )
    with (
        Model(path) as model,
        Session(model, n_threads=1) as s,
        Model(write(tmp_path / "n.gguf", "qwen35", {})) as n,
    ):
        assert (model.info.n_layer, model.info.n_recurrent) == (4, 3)
        s.feed([5, 6, 7])
        with Session(n, n_threads=1) as other:
            other.feed([5, 6, 7])
            assert s.logits().tobytes() == other.logits().tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    """They end in no crash."""
    tensors = models.file_tensors(models.SPECS["qwen35"], models.draw(models.SPECS["qwen35"]))
    a = tensors["blk.0.ssm_a"].copy()
    a[0] = value
    path = write(tmp_path / "m.gguf", "qwen35", {}, **{"blk.0.ssm_a": a})
    with Model(path) as model, Session(model, n_threads=2) as s:
        s.feed(list(range(3, 40)))
        s.feed([4])


def test_a_state_of_no_size_is_refused(tmp_path: Path) -> None:
    """Heads whose state alone would have more values than are counted with."""
    keys = {
        "ssm.state_size": 1 << 19,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 1,
        "ssm.inner_size": 1 << 19,
    }
    with pytest.raises(PowerInferError):
        Model(write(tmp_path / "m.gguf", "qwen35", keys))
