"""Each family that is a row of the table: what transformers saves becomes a file with its logits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model, Session
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.convert.conversion import convert
from powerinfer.models.convert.families import FAMILIES
from powerinfer.models.convert.families.reading import read_hyper
from powerinfer.models.convert.json_file import Settings
from powerinfer.models.convert.keys import model_keys
from tests import checkpoints, models, reference
from tests.convert import folders, gguf_raw, published

# One of each family.
FIRST = {published.configs()[name]["model_type"]: name for name in reversed(published.NAMES)}
OTHERS = [name for name in published.NAMES if name not in FIRST.values()]
# Rounding of float32 sums; the weights are the golden's, K and V are floats, tokens are fed one by one.
TOLERANCE = 1e-4


def logits(path: Path, tokens: Any, n_ctx: int = 0) -> Any:
    options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_batch": 1, "n_threads": 1}
    with Session(Model(path), n_ctx=n_ctx, **options) as session:
        session.feed(tokens, want_logits=True)
        return np.stack([session.logits(i).copy() for i in range(len(tokens))])


def golden_of(name: str) -> Any:
    return models.golden(name) if name in published.SPECS else checkpoints.golden(name)


def check_logits(name: str, tmp_path: Path) -> None:
    golden = golden_of(name)
    folder = published.write_folder(tmp_path / "hf", name)
    done = convert(folder, tmp_path / "out.gguf", type="F16")
    assert done.fallbacks == () and done.left_out == ()
    # In longer contexts phi3 has other factors, which transformers takes for longer texts.
    n_ctx = 64 if name in ("phi3", "phi3-window") else 0
    last = golden.prompt[: 64 if n_ctx else None]
    rows = logits(tmp_path / "out.gguf", last, n_ctx)
    assert reference.relative_error(rows, golden.logits[: len(last)]) < TOLERANCE


@pytest.mark.parametrize("name", FIRST.values())
def test_a_family(name: str, tmp_path: Path) -> None:
    check_logits(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_others(name: str, tmp_path: Path) -> None:
    check_logits(name, tmp_path)


def test_all_rows_are_tested() -> None:
    """All but InternLM 2, which transformers does not have, and which is tested below."""
    assert [row.names[0] for row in FAMILIES if not set(FIRST) & set(row.names)] == ["internlm2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", published.SPECS)
def test_tensors_are_those_of_files(name: str, tmp_path: Path) -> None:
    """By names and values, as tests/models.py has them."""
    spec = models.SPECS[name]
    convert(published.write_folder(tmp_path / "hf", name), tmp_path / "out.gguf", type="F16")
    actual = reference.load(tmp_path / "out.gguf")
    expected = models.file_tensors(spec, models.draw(spec))
    assert set(actual.tensors) == set(expected)
    for tensor, value in expected.items():
        np.testing.assert_allclose(actual[tensor], np.asarray(value, np.float64), rtol=1e-6, atol=1e-7)


def config_of(name: str, **values: Any) -> Settings:
    return Settings(published.configs()[name] | values, "config.json")


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("granite", {"attention_bias": True}, "attention_bias is True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, "no_rope_layers"),
        ("cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "the last of each 4"),
        ("gemma3", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("afmoe", {"mup_enabled": False}, "mup_enabled"),
        ("gemma3n", {"intermediate_size": [160, 96, 160, 160, 160]}, "different intermediate_size"),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale"),
        ("ernie4_5-moe", {"moe_layer_interval": 2}, "layers without experts"),
        ("llama4", {"use_qk_norm": False}, "use_qk_norm"),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1]}, "each fourth"),
        ("qwen3next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3next", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("falcon-h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ("falcon-h1", {"tie_word_embeddings": True, "lm_head_multiplier": 2.0}, "multipliers differ"),
        ("granitehybrid", {"position_embedding_type": "alibi"}, "alibi"),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe", "attention"]}, "no file says"),
        ("nemotron_h", {"hybrid_override_pattern": "MX", "layers_block_type": None}, "not known"),
        ("deepseek2-v3", {"topk_method": "other"}, "topk_method"),
        ("deepseek2-v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek2-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek2-v3", {"rope_interleave": False}, "rope_interleave"),
        ("llama4", {"no_rope_layer_interval": 2}, "no_rope_layer_interval"),
        ("granitehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("nemotron_h", {"time_step_limit": [0.001, float("inf")]}, "time_step_limit"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "phi3 has longrope"),
        ("granite", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("granite", {"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        ("granite", {"quantization_config": {"quant_method": "bitnet"}}, "quantised already"),
        ("starcoder2", {"hidden_act": "quick_gelu"}, "quick_gelu"),
        ("mistral3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5}}, "mscale"),
    ],
)
def test_what_is_not_run(name: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        read_hyper(config_of(name, **values))


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("granite", {"logits_scaling": None}, "no logits_scaling"),
        ("gemma2", {"sliding_window": 0}, "sliding_window"),
        ("lfm2", {"layer_types": ["conv"]}, "a list of 4 names"),
        ("lfm2moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ("glm4", {"partial_rotary_factor": 1.5, "rope_parameters": {"rope_theta": 1e4}}, "a share in 0..1"),
        ("qwen35", {"linear_num_value_heads": 5}, "cannot share"),
        ("qwen35", {"rope_parameters": {"mrope_section": "x"}}, "mrope_section"),
        ("gemma3", {"layer_types": 1}, "layer_types is 1, must be a list of texts"),
        ("llama4", {"layer_types": [None]}, "a list of texts"),
        ("smollm3", {"layer_types": True}, "a list of texts"),
        ("gemma4", {"layer_types": ["sliding_attention"] * 6}, "some layers have full_attention"),
        ("gemma3n", {"activation_sparsity_pattern": [0.95, 1.0, 0, 0, 0]}, "a list of 5 numbers from 0"),
        ("gemma3n", {"activation_sparsity_pattern": [0.95]}, "a list of 5 numbers from 0"),
        ("gemma3n", {"intermediate_size": [160.0] * 5}, "a whole number, or a list"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs"),
        ("hunyuan-moe", {"moe_topk": [2, 3]}, "moe_topk"),
    ],
)
def test_values_that_cannot_be(name: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        read_hyper(config_of(name, **values))


# Values that change no key of a file: of training and of programs; those that tensors tell; those that only
# fill in what the same config says elsewhere.
_SAY_NOTHING = r"""
    .*dropout|.*_pdrop|initializer_range|use_cache|output_router_logits|router_(aux_loss_coef|jitter_noise)
    |pretraining_tp|rescale_prenorm_residual|residual_in_fp32|reorder_and_upcast_attn|summary_.*|is_decoder
    |add_cross_attention|num_logits_to_keep|(mamba_)?chunk_size|use_mamba_kernels|moe_shared_expert_overlap
    |moe_norm_min|time_step_(floor|min|max)|(bos|eos|eod|sep|pad)_token_id|vocab_size(_per_layer_input)?
    |attention_bias|use_(qkv_|conv_|expert_)?bias|mamba_conv_bias|attention_k_eq_v|.*_multiplier
    |use_double_wide_mlp|num_nextn_predict_layers|max_window_layers
    |_?sliding_window(_pattern)?|original_max_position_embeddings|(mamba_)?expand|mamba_d_ssm|qk_head_dim
    |block_(ffn_dim_multiplier|multiple_of)|mamba_norm_before_gate|altup_coef_clip|laurel_rank
"""


def meaning(config: dict[str, Any]) -> str:
    try:
        h = read_hyper(Settings(config, "config.json"))
    except (FormatError, UnsupportedError) as error:
        return str(error)
    keys = dict(model_keys(h, name="", type="F16", powerinfer=False, predictors=None))
    return f"{sorted(keys.items())} {h.tied} {h.act} {h.notes}"


def test_no_value_is_ignored() -> None:
    """Another value gives another key or an error, whatever it says about computing."""
    nothing = re.compile(_SAY_NOTHING, re.VERBOSE)
    for name in published.NAMES:
        config = published.configs()[name]
        if name in ("nemotron_h", "deepseek2-dense"):  # which have no experts, and say how many
            continue
        before = meaning(config)
        for key, value in config.items():
            others = (
                [not value]
                if isinstance(value, bool)
                else [1, 2, value + 1, value * 1.5, 2 * value]
                if isinstance(value, (int, float))
                else []
            )
            if others and not nothing.fullmatch(key):
                assert any(meaning(config | {key: other}) != before for other in others), (name, key)


def test_what_a_config_leaves_out() -> None:
    """It means what transformers means. Of Gemma 3 those that see say little."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    published_4b = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    h = read_hyper(Settings(published_4b, "config.json"))
    assert (h.n_head, h.n_head_kv, h.d_head, h.n_vocab, h.n_ctx) == (8, 4, 256, 262208, 131072)
    assert h.norm_eps == 1e-6 and h.rope is not None and (h.rope.base, h.rope.factor) == (1e6, 8)
    for name, eps, base in (("granite", 1e-6, 1e4), ("minimax-m2", 1e-6, 5e6), ("llama4", 1e-5, 5e5)):
        config = published.configs()[name] | {"rope_parameters": None}
        del config["rms_norm_eps"]
        h = read_hyper(Settings(config, "config.json"))
        assert h.norm_eps == eps and h.rope is not None and h.rope.base == base
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": 20.0}
    keys = read_hyper(config_of("gemma2", **caps)).keys
    assert [keys[name] for name in caps] == [0, 20]
    without = {name: value for name, value in published.configs()["gemma2"].items() if name not in caps}
    keys = read_hyper(Settings(without, "config.json")).keys
    assert [keys[name] for name in caps] == [50, 30]
    config = {name: value for name, value in published.configs()["afmoe"].items() if name != "mup_enabled"}
    with pytest.raises(UnsupportedError, match="mup_enabled is False"):
        read_hyper(Settings(config, "config.json"))


def refused(folder: Path, out: Path, says: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=says):
        convert(folder, out)
    assert not out.exists()


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """The engine opens the file's outline before a weight is written."""

    def without(which: str) -> Any:
        return lambda w: {name: value for name, value in w.items() if which not in name}

    def cut(which: str) -> Any:
        return lambda w: {name: value[:-1] if which in name else value for name, value in w.items()}

    def with_two(which: str) -> Any:
        return lambda w: {name: np.repeat(value, 2) if which in name else value for name, value in w.items()}

    def changed(which: str, how: Any) -> Any:
        return lambda w: {name: how(value) if which in name else value for name, value in w.items()}

    def twice(which: str) -> Any:
        return changed(which, lambda value: np.concatenate([value, value]))

    def scalar(which: str) -> Any:
        return changed(which, lambda _: np.float32(1))

    def none_of(which: str) -> Any:
        return changed(which, lambda value: value[:0])

    def one_expert_more(w: dict[str, Any]) -> dict[str, Any]:
        return w | {name.replace("experts.3", "experts.8"): w[name] for name in w if "experts.3." in name}

    out = tmp_path / "out.gguf"
    for i, (name, change, says) in enumerate(
        [
            ("granite", without("layers.1.self_attn.v_proj"), r"would not open .*blk\.1\.attn_v\.weight"),
            ("granite", cut("layers.1.mlp.up_proj"), r"would not open .*blk\.1\.ffn_up\.weight"),
            ("gptneox", cut("query_key_value.weight"), "has 191 rows, by config.json it must have 192"),
            ("arcee", twice("layers.1.self_attn.k_proj"), "has 64 rows, by config.json it must have 32"),
            ("qwen35", twice("layers.1.linear_attn.A_log"), "rows, by config.json it must have"),
            ("granite", scalar("layers.1.self_attn.q_proj.weight"), r"has the shape \[\]"),
            ("llama4", none_of("experts.down_proj"), r"has the shape \[0, "),
            (
                "granite",
                lambda w: w | {"model.layers.0.other.weight": w["model.norm.weight"]},
                "other.weight",
            ),
            ("granite", lambda w: w | {"model.norm.bias": w["model.norm.weight"]}, r"output_norm\.bias"),
            ("lfm2moe", without("experts.3.w1"), "expert 3 is missing"),
            ("lfm2moe", one_expert_more, "there are 9 experts, not 8"),
            ("lfm2moe", cut("experts.3.w1"), "experts that become"),
            ("granite", without("embed_tokens"), "no tensor of embeddings"),
            ("deepseek2-v2", cut("kv_b_proj"), "kv_b_proj"),
            ("granite", without("lm_head"), "no tensor lm_head"),
            (
                "gptneox",
                lambda w: w | {"lm_head.weight": w["embed_out.weight"]},
                r"two tensors become output\.weight",
            ),
            (
                "apertus",
                without("layers.1.mlp.act_fn.alpha_n"),
                "layer 1 has no finite number for xielu.alpha_n",
            ),
            ("apertus", without("layers.0.mlp.act_fn.beta"), "layer 0 has no finite number for xielu.beta"),
            ("apertus", with_two("layers.1.mlp.act_fn.alpha_p"), "not one number"),
        ]
    ):
        refused(published.write_folder(tmp_path / str(i), name, change=change), out, says)


def keys_of(path: Path) -> dict[str, Any]:
    return {name: value for name, (_, value) in gguf_raw.read(path).keys.items()}


def test_activations_other_than_the_usual_are_said(tmp_path: Path) -> None:
    """Microsoft's BitNet has squared ReLUs, and its weights are rounded when it computes."""
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    folder = published.write_folder(tmp_path / "hf", "bitnet", hidden_act="relu2", quantization_config=online)
    assert convert(folder, tmp_path / "out.gguf", type="F32").hyper.is_relu
    assert keys_of(tmp_path / "out.gguf")["powerinfer.hidden_act"] == b"relu2"
    tensors, drawn = reference.load(tmp_path / "out.gguf"), published.weights("bitnet")
    weight = drawn["model.layers.1.mlp.up_proj.weight"].astype(np.float64)
    scale = np.abs(weight).mean()
    expected = np.clip(np.rint(weight / scale), -1, 1) * scale
    np.testing.assert_allclose(tensors["blk.1.ffn_up.weight"], expected, rtol=1e-5)
    np.testing.assert_array_equal(tensors["token_embd.weight"], drawn["model.embed_tokens.weight"])


def test_llama3_where_a_part_of_heads_is_rotated(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "partial_rotary_factor": 0.25}
    rope |= {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    convert(published.write_folder(tmp_path / "hf", "gptneox", rope_parameters=rope), tmp_path / "out.gguf")
    expected = [1, 8]  # the two pairs' wavelengths are 6 and 628
    tensors = reference.load(tmp_path / "out.gguf")
    np.testing.assert_allclose(tensors["rope_freqs.weight"], expected, rtol=1e-6)


def test_a_length_that_yarn_is_given() -> None:
    """The file has the factor of what follows from the stretching."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 1.5}
    hyper = read_hyper(config_of("granite", rope_parameters=rope))
    keys = dict(model_keys(hyper, name="", type="F16", powerinfer=False, predictors=None))
    expected = 1.5 / (1 + 0.1 * math.log(4))
    assert keys["granite.rope.scaling.attn_factor"] == pytest.approx(expected)


def test_windows_that_a_file_does_not_have() -> None:
    """A model whose layers have windows that its architecture here lacks says so."""
    kinds = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}
    assert "looks back at most 64" in read_hyper(config_of("dots1", **kinds)).notes[0]
    assert read_hyper(config_of("dots1")).notes == ()


def test_gelus_by_all_names() -> None:
    for act, known in (("gelu_fast", "gelu_tanh"), ("gelu_new", "gelu_tanh"), ("gelu", "gelu")):
        assert read_hyper(config_of("gptneox", hidden_act=act)).act == known
    # Gemma's first configs say gelu, and its code computes with the other.
    assert read_hyper(config_of("gemma", hidden_act="gelu")).act == "gelu_tanh"


def test_multipliers_go_into_weights(tmp_path: Path) -> None:
    """Falcon-H1's: the answer is that of a checkpoint whose weights are multiplied."""
    single = {
        "embedding_multiplier": ("embed_tokens", 2.0),
        "lm_head_multiplier": ("lm_head", 0.5),
        "attention_out_multiplier": ("o_proj", 0.75),
        "ssm_out_multiplier": ("mamba.out_proj", 1.25),
        "key_multiplier": ("k_proj", 0.25),
    }
    values: dict[str, Any] = {name: value for name, (_, value) in single.items()}
    values |= {"attention_in_multiplier": 1.5, "ssm_in_multiplier": 0.5, "mlp_multipliers": [0.8, 1.2]}
    values["ssm_multipliers"] = [0.5, 0.6, 0.7, 0.8, 0.9]
    of_rows = np.repeat([0.5, 0.6, 0.7, 0.8, 0.9], [80, 80, 48, 48, 4])[:, None] * 0.5

    def multiplied(w: dict[str, Any]) -> dict[str, Any]:
        out = {name: value.astype(np.float32) for name, value in w.items()}
        for name in out:
            for part, factor in [
                *single.values(),
                *((f"{x}_proj.weight", 1.5) for x in "qkv"),
                ("mamba.in_proj", of_rows),
                ("mlp.gate_proj", 0.8),
                ("feed_forward.gate_proj", 0.8),
                ("feed_forward.down_proj", 1.2),
            ]:
                if part in name:
                    out[name] = (out[name] * factor).astype(np.float32)
        return out

    convert(published.write_folder(tmp_path / "a", "falcon-h1", **values), tmp_path / "a.gguf", type="F32")
    folder = published.write_folder(tmp_path / "b", "falcon-h1", change=multiplied)
    convert(folder, tmp_path / "b.gguf", type="F32")
    a, b = reference.load(tmp_path / "a.gguf"), reference.load(tmp_path / "b.gguf")
    for name in b.tensors:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, err_msg=name)


def test_a_model_that_sees(tmp_path: Path) -> None:
    """Its language model alone is converted, whatever its tensors are called."""
    golden = models.golden("gemma3")
    whole = published.configs()["gemma3"]
    text = {
        name: value for name, value in whole.items() if name not in ("architectures", "tie_word_embeddings")
    }
    for i, prefix in enumerate(("language_model.model.", "model.language_model.")):

        def renamed(w: dict[str, Any], prefix: str = prefix) -> dict[str, Any]:
            out = {name.replace("model.", prefix, 1): value for name, value in w.items()}
            if prefix.startswith("language"):
                out["language_model.lm_head.weight"] = out.pop("lm_head.weight")
            return out | {"model.vision_tower.x.weight": np.ones((2, 2), np.float32)}

        folder = published.write_folder(tmp_path / str(i), "gemma3", change=renamed)
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {"hidden_size": 3},
        }
        folders.write_json(folder / "config.json", config)
        done = convert(folder, tmp_path / "out.gguf")
        assert done.left_out == ("model.vision_tower.x.weight",) and "left out" in done.notes[0]
        rows = logits(tmp_path / "out.gguf", golden.prompt[:20])
        assert reference.relative_error(rows, golden.logits[:20]) < TOLERANCE


def test_a_gemma3n_that_sees_and_hears(tmp_path: Path) -> None:
    """It has more tokens than embeddings per layer; those without have the first one's."""
    golden, per_layer = checkpoints.golden("gemma3n"), "model.embed_tokens_per_layer.weight"
    text = {k: v for k, v in published.configs()["gemma3n"].items() if k != "architectures"}
    ids = golden.prompt[:20]
    n, left_out = int(ids.max()) + 1, ("model.audio_tower.x.weight", "model.embed_vision.x.weight")

    def renamed(w: dict[str, Any]) -> dict[str, Any]:
        w = w | {per_layer: w[per_layer][:n]}
        out = {name.replace("model.", "model.language_model.", 1): value for name, value in w.items()}
        return out | {name: np.ones((2, 2), np.float32) for name in left_out}

    folder = published.write_folder(tmp_path / "hf", "gemma3n", change=renamed)
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    text |= {"vocab_size_per_layer_input": n}
    folders.write_json(folder / "config.json", config | {"text_config": text, "tie_word_embeddings": False})
    done = convert(folder, tmp_path / "out.gguf")
    assert sorted(done.left_out) == sorted(left_out)
    rows = logits(tmp_path / "out.gguf", ids)
    assert reference.relative_error(rows, golden.logits[:20]) < TOLERANCE
    table = reference.load(tmp_path / "out.gguf")["per_layer_token_embd.weight"]
    assert len(table) == text["vocab_size"] > n
    np.testing.assert_array_equal(table[n:], np.broadcast_to(table[:1], table[n:].shape))


def test_projections_of_streams_that_are_missing(tmp_path: Path) -> None:
    def without(w: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in w.items() if name != "model.altup_projections.1.weight"}

    folder = published.write_folder(tmp_path / "hf", "gemma3n", change=without)
    refused(folder, tmp_path / "out.gguf", "what becomes altup_proj.weight, projection 1 is missing")


def test_gpt2_without_a_prefix(tmp_path: Path) -> None:
    golden = checkpoints.golden("gpt2")

    def renamed(w: dict[str, Any]) -> dict[str, Any]:
        out = {name.removeprefix("transformer."): value for name, value in w.items()}
        return out | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}  # a mask

    convert(published.write_folder(tmp_path / "hf", "gpt2", change=renamed), tmp_path / "out.gguf")
    rows = logits(tmp_path / "out.gguf", golden.prompt[:20])
    assert reference.relative_error(rows, golden.logits[:20]) < TOLERANCE


def test_internlm2(tmp_path: Path) -> None:
    """A llama whose q, k and v are one matrix: of each key/value head, its q heads, k and v."""
    golden = models.golden("mistral")
    spec = golden.spec
    n_share = spec.n_head // spec.n_head_kv
    names = {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo"}
    names |= {"embed_tokens": "tok_embeddings", "lm_head": "output"}
    tensors = {}
    for name, value in models.draw(spec).items():
        if "q_proj" in name:
            q, k, v = (
                models.draw(spec)[name.replace("q_proj", f"{x}_proj")].reshape(
                    spec.n_head_kv, -1, spec.d_head, spec.n_embd
                )
                for x in "qkv"
            )
            assert q.shape[1] == n_share
            fused = np.concatenate([q, k, v], axis=1).reshape(-1, spec.n_embd)
            tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            tensors[name] = value
    folder = folders.write_folder(tmp_path / "hf", spec, weights=tensors)
    config = folders.config(spec) | {
        "head_dim": spec.d_head,
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    folders.write_json(folder / "config.json", config)
    convert(folder, tmp_path / "out.gguf")
    rows = logits(tmp_path / "out.gguf", golden.prompt)
    assert reference.relative_error(rows, golden.logits) < TOLERANCE


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen publishes its 3.5."""

    def fused(w: dict[str, Any]) -> dict[str, Any]:
        out = {name: value for name, value in w.items() if ".experts." not in name}
        for i in range(4):
            each = [f"model.layers.{i}.mlp.experts.{e}." for e in range(8)]
            gate, up, down = (
                np.stack([w[f"{e}{x}_proj.weight"] for e in each]) for x in ("gate", "up", "down")
            )
            out[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            out[f"model.layers.{i}.mlp.experts.down_proj"] = down
        return out

    convert(published.write_folder(tmp_path / "a", "qwen35moe"), tmp_path / "a.gguf")
    convert(published.write_folder(tmp_path / "b", "qwen35moe", change=fused), tmp_path / "b.gguf")
    a, b = reference.load(tmp_path / "a.gguf"), reference.load(tmp_path / "b.gguf")
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        np.testing.assert_array_equal(a[name], b[name])


def test_granite_without_experts(tmp_path: Path) -> None:
    """The shared feed-forward is the only one."""
    kept = ("block_sparse_moe",)
    folder = published.write_folder(
        tmp_path / "hf",
        "granitehybrid",
        change=lambda w: {name: value for name, value in w.items() if not any(k in name for k in kept)},
        num_local_experts=0,
        num_experts_per_tok=0,
    )
    assert convert(folder, tmp_path / "out.gguf").hyper.n_ff == 64
    w = published.weights("granitehybrid")["model.layers.1.shared_mlp.input_linear.weight"]
    tensors = reference.load(tmp_path / "out.gguf")
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], w[64:])
    assert "blk.1.ffn_gate_inp.weight" not in tensors.tensors


def test_what_configs_of_other_times_say() -> None:
    """The same model by the names of older transformers."""
    gemma = {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": None}
    gemma |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6}
    rope = read_hyper(config_of("gemma3", **gemma)).rope
    assert rope is not None and (rope.base, rope.factor, rope.window_base) == (1e6, 8.0, 1e4)
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M-*-M"}
    assert read_hyper(config_of("nemotron_h", **pattern)).arch == "nemotron_h"
    phi = {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    phi["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = read_hyper(config_of("phi3", **phi)).rope
    assert rope is not None and rope.long == (2.0,) * 4
    assert rope.magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    lfm = {"block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_multiple_of": 256}
    assert read_hyper(config_of("lfm2", **lfm)).n_ff == 8192
    hunyuan = {"rope_parameters": {"type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4, "factor": 1.0}}
    rope = read_hyper(config_of("hunyuan-dense", **hunyuan)).rope
    assert rope is not None and rope.base == pytest.approx(1e4 * 1000 ** (16 / 14))
    gemma4 = {"per_layer_config": None, "global_head_dim": 64, "num_global_key_value_heads": 1}
    keys = read_hyper(config_of("gemma4-large", **gemma4)).keys
    assert keys["attention.key_length"] == 64
    assert keys["attention.head_count_kv"].tolist() == [2, 2, 1, 2, 2, 1]


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    spec = replace(models.SPECS["llama-mha"], n_vocab=293)
    folder = published.write_folder(tmp_path / "hf", "granite")
    (folder / "tokenizer.json").unlink()
    folders.write_tokenizer(folder, spec)
    convert(folder, tmp_path / "out.gguf")
    assert keys_of(tmp_path / "out.gguf")["tokenizer.ggml.model"] == b"llama"
