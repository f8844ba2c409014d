"""The scripts that make the demo model: text, tokens, the Hugging Face folder, and what becomes of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer._engine.file import ModelFile, find_model
from powerinfer._text.chat_template import render_template
from powerinfer._text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What train_demo.py writes, of a miniature model."""
    pytest.importorskip("torch")
    pytest.importorskip("sentencepiece")
    out = tmp_path_factory.mktemp("demo") / "tiny-demo"
    words = [str(SCRIPTS / "train_demo.py"), "--tiny", "--steps", "3", "--device", "cpu", "--out", str(out)]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    from powerinfer.models.convert.conversion import convert

    path = folder.parent / "dense.gguf"
    convert(folder, path, type="F16")
    return path


def rendered(messages: list[tuple[str, str]]) -> str:
    """By the template of the demo's file."""
    with ModelFile(find_model("demo")) as file:
        template = file.metadata["tokenizer.chat_template"]
    said = [{"role": role, "content": text} for role, text in messages]
    return render_template("demo", template, messages=said, add_generation_prompt=False)


def test_text_files_are_what_the_chat_template_makes(tmp_path: Path) -> None:
    from demo_corpus import write_text
    from demo_tokenizer import CHAT_TEMPLATE, render

    messages = [("system", "Be kind."), ("user", "Hi, 12 apples?"), ("assistant", "Yes.\nGrüße")]
    with ModelFile(find_model("demo")) as file:
        assert file.metadata["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert render(messages) == "<s>" + rendered(messages)
    assert render([("plain", "A story.")]) == "<s>A story.<|im_end|>"

    texts = []
    for name, seed, held_out in (("a", 1, False), ("b", 1, False), ("c", 1, True), ("d", 2, False)):
        write_text(tmp_path / name, seed=seed, n_bytes=20_000, held_out=held_out)
        texts.append((tmp_path / name).read_bytes())
        assert 20_000 <= len(texts[-1]) < 30_000
        assert texts[-1].startswith(b"<s>") and texts[-1].rstrip().endswith(b"<|im_end|>")
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_what_is_held_out_is_not_in_the_training_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import demo_text

    original: Any = demo_text._of_part
    keys: set[str] = set()

    def noted(*args: Any, **options: Any) -> Any:
        system, parts = original(*args, **options)
        (_, asked), (_, answer) = parts[0][:2]
        if len(asked) >= demo_text.SHORT:
            keys.add(f"{asked}|{answer}")
        return system, parts

    monkeypatch.setattr(demo_text, "_of_part", noted)
    found = []
    for held_out in (False, True):
        keys.clear()
        rng = Random(1)
        for _ in range(300):
            demo_text.document(rng, held_out=held_out)
        found.append(set(keys))
        assert len(found[-1]) > 200
    assert not found[0] & found[1]


def test_templates_leave_no_mark() -> None:
    """Every exchange of every group can be drawn, and nothing of the template language is in what it says."""
    import demo_text

    rng = Random(1)
    for name, group in demo_text.talks().items():
        for _ in range(8 * len(group.exchanges)):
            system, parts = demo_text.exchange(rng, name)
            for _, text in [("system", system), *(message for part in parts for message in part)]:
                assert not set(text) & set("[]{}|"), (name, text)
                assert text == text.strip() and "  " not in text, (name, text)


def test_sums_of_the_templates_are_right() -> None:
    import demo_text

    rng = Random(1)
    n_seen = 0
    for _ in range(400):
        _, parts = demo_text.exchange(rng, "sums")
        for role, text in parts[0]:
            for a, sign, b, result in re.findall(
                r"(?<!, and )\b(\d+) (plus|minus|times) (\d+) is (\d+)", text
            ):
                assert role == "assistant"
                a, b = int(a), int(b)
                assert {"plus": a + b, "minus": a - b, "times": a * b}[sign] == int(result), text
                n_seen += 1
    assert n_seen > 100


def test_the_folder_is_a_llama_with_relu(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["hidden_act"]) == (["LlamaForCausalLM"], "relu")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == 2 * json.loads((folder / "training.json").read_text())["n_parameters"]
    )
    assert {p.name for p in folder.glob("*.safetensors")} == set(index["weight_map"].values())


def test_shards_hold_every_tensor_and_no_more_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import demo_folder
    from demo_model import DemoModel, Shape

    from powerinfer.models.convert.checkpoint import Checkpoint

    monkeypatch.setattr(demo_folder, "SHARD_BYTES", 100_000)
    model = DemoModel(Shape(n_vocab=96, n_embd=64, n_layer=3, n_head=2, n_head_kv=1, n_ff=96, n_ctx=64))
    weights = {name: value.half().numpy() for name, value in model.hf_weights().items()}
    demo_folder.write_folder(tmp_path, model.shape, b"", weights)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 110_000 for path in shards)
    assert set(Checkpoint(tmp_path)) == weights.keys()


def test_tokens_of_the_training_are_those_of_the_file(folder: Path, converted: Path) -> None:
    import demo_tokenizer

    ours = demo_tokenizer.Tokenizer((folder / "tokenizer.model").read_bytes())
    talks = [
        [("system", "Be kind."), ("user", "hello there,  12 + 5?"), ("assistant", "17.\nGrüße, 你好!")],
        [("plain", "Once upon a time, a fox lived in a lighthouse.")],
        [("user", ""), ("assistant", " a leading blank")],
    ]
    with ModelFile(converted) as file:
        theirs = Tokenizer.from_metadata(file.metadata)
    for messages in talks:
        text = demo_tokenizer.render(messages)
        assert ours.conversation(messages)[0] == theirs.encode(text, add_bos=False, special=True)
    assert theirs.bos == demo_tokenizer.BOS and theirs.eos == demo_tokenizer.IM_END


def test_the_training_rounds_as_q4_0_does() -> None:
    torch = pytest.importorskip("torch")
    from demo_model import fake_q4_0

    weights = np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32)
    weights[3] = 0
    kind = gguf.GGMLQuantizationType.Q4_0
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
    moved = fake_q4_0(torch.from_numpy(weights), 1.0).numpy()
    # w + (rounded - w) in float32: off by a rounding of the sum.
    np.testing.assert_allclose(moved, rounded, rtol=0, atol=2.0**-23 * np.abs(weights).max())


def test_q4_0_of_the_folder_is_what_the_training_rounded_to(converted: Path) -> None:
    """The weights of the folder lie within the rounding of F16 of values that Q4_0 holds."""
    with ModelFile(converted) as file:
        n_seen = 0
        for tensor in file.tensors:
            if len(tensor.shape) < 2 or tensor.name.startswith(("token_embd", "output")):
                continue
            weights = file.dequantize(tensor.name)
            if "ffn_down" in tensor.name:  # by neurons, as a PowerInfer file has it
                weights = np.ascontiguousarray(weights.T)
            blocks = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_0)
            rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
            assert np.all(np.abs(rounded - weights) <= 2.0**-11 * np.abs(rounded))
            n_seen += 1
    assert n_seen == 2 * 7


def test_the_card_says_what_was_measured() -> None:
    from demo_card import card

    layer = {"rank": 32, "point": {"active": 0.04, "computed": 0.09, "recall": 0.93, "mass": 0.99}}
    results: list[dict[str, Any]] = [
        {"sparsity": "dense", "value": 1.5, "error": 0.01, "n_tokens": 4321, "comparison": None},
        {
            "sparsity": "predicted",
            "value": 1.51,
            "error": 0.01,
            "n_tokens": 4321,
            "comparison": {"ratio": 1.0067, "ratio_error": 0.0005, "same_top": 0.987},
        },
    ]
    text = card(
        config={
            "num_hidden_layers": 2,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "vocab_size": 4096,
        },
        training={
            "n_parameters": 20_400_000,
            "n_text_tokens": 2e8,
            "n_seen_tokens": 5e8,
            "perplexity": 1.2832,
            "seed": 7,
        },
        profile={"n_tokens": 200_000, "all": {"carry_80": 0.4, "never": 0.03}},
        check={"layers": [layer, layer], "rows": 0.051, "bytes": 0.16},
        perplexity={"results": results, "n_ctx": 512},
        n_file_bytes=14 << 20,
    )
    for part in ("20.4 million", "14.0 MiB", "of rank 32, 32", "1.5100 ± 0.0100", "1.00670", "98.70 %"):
        assert part in text
    for part in ("5.1 %", "16.0 %", "9.0 %", "93.0 %", "4,321 tokens", "1.283", "--seed 7"):
        assert part in text


def test_the_shell_script_is_well_formed() -> None:
    subprocess.run(["sh", "-n", str(SCRIPTS / "make_demo.sh")], check=True)
