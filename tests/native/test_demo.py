"""The model that ships: the engine against transformers on the same quantised weights, what its predictors
cost and gain on held-out text, the card, its manners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from powerinfer import Llama
from powerinfer._engine.file import ModelFile, find_model
from powerinfer._engine.session import Model, Session
from powerinfer.models.corpus import encode_corpus
from powerinfer.models.perplexity import compare
from tests import reference

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "demo.npz"
# Activations of quantised products are rounded to 8 bits per 32 values: 0.2 % rms each, eight layers deep.
TOLERANCE = 3e-2


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(find_model("demo")) as m:
        yield m


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_logits_are_those_of_transformers(model: Model, mode: str, case: int) -> None:
    golden = np.load(GOLDEN)
    with Session(model, n_ctx=256, sparsity=mode, n_threads=2) as s:
        s.feed(golden[f"ids_{case}"])
        assert reference.relative_error(s.logits(), golden[f"logits_{case}"]) < TOLERANCE
        for token in golden[f"greedy_{case}"]:
            logits = s.logits()
            # Where two words are as good, rounding decides: the reference's choice must be as good as ours.
            assert logits.max() - logits[token] <= TOLERANCE * np.sqrt(np.mean(logits**2))
            s.feed([token])


def test_predicted_mode_costs_little_and_gains_much(model: Model) -> None:
    """On a text of the generator that the model was trained with, which it was not trained on."""
    text = (ROOT / "tests" / "golden" / "demo-held-out.txt").read_bytes()
    corpus = encode_corpus(model.file, text, special=True)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                Session(model, n_ctx=512, n_batch=512, n_threads=2, sparsity=mode, mask_prompts=True)
            )
            for mode in ("dense", "exact", "predicted")
        ]
        dense, exact, predicted = compare(sessions, corpus.with_bos, n_ctx=512, bos=corpus.bos)
    assert exact.comparison is not None and predicted.comparison is not None
    assert dense.n_tokens > 2000
    assert 1.3 < dense.value < 2.0
    assert exact.comparison.ratio == pytest.approx(1, abs=1e-4)
    assert predicted.comparison.ratio == pytest.approx(1, abs=0.01)
    # Of 3 rows a neuron, dense mode needs all. Exact mode asks every gate.
    assert dense.ffn_rows == 1 and exact.ffn_rows > 1 / 3
    assert predicted.ffn_rows < 0.2


def test_the_card_is_that_of_the_file(model: Model) -> None:
    card = (ROOT / "powerinfer" / "demo" / "README.md").read_text(encoding="utf-8")
    ranks = [t.shape[0] for t in model.file.tensors if t.name.endswith("fc1.weight")]
    assert f"of rank {', '.join(map(str, ranks))} |" in card
    assert f"{model.file.info.n_bytes / 2**20:.1f} MiB |" in card
    assert f"over {model.file.metadata['powerinfer.neuron.tokens']:,} tokens" in card
    assert f"n_embd {model.info.n_embd}, n_ff {model.info.n_ff} |" in card


def test_the_file_is_what_the_package_promises() -> None:
    with ModelFile(find_model("demo")) as file:
        assert file.info.is_powerinfer
        assert file.info.n_bytes <= 16 * 2**20
        meta = file.metadata
        assert "tokenizer.chat_template" in meta
        counts = meta["powerinfer.neuron.counts"]
        n = meta["llama.block_count"] * meta["llama.feed_forward_length"]
        assert len(counts) == n
        assert counts.max() <= meta["powerinfer.neuron.tokens"]
        assert counts.sum() / (n * meta["powerinfer.neuron.tokens"]) < 0.1
        assert meta["powerinfer.predictor"] == "mlp"
        thresholds = meta["powerinfer.sparse_thresholds"]
        assert len(thresholds) == meta["llama.block_count"]
        assert min(thresholds) == meta["powerinfer.sparse_threshold"]


def test_it_is_sparse_and_sensible() -> None:
    with Llama.demo(n_threads=2, n_ctx=512, seed=1, verbose=False) as llm:
        shares = []
        messages = [{"role": "user", "content": "What are hot neurons?"}]
        text = ""
        for chunk in llm.create_chat_completion(messages, stream=True, temperature=0, max_tokens=80):
            text += chunk["choices"][0]["delta"].get("content") or ""
            shares += [s.n_active / (s.n_sparse * 1536) for s in llm.last_step if s.n_sparse]
        assert "neuron" in text and "PowerInfer" in text
        assert np.mean(shares) < 0.1
        told = llm.create_chat_completion(
            [
                {"role": "user", "content": "My name is Ada."},
                {"role": "assistant", "content": "Nice to meet you, Ada."},
                {"role": "user", "content": "What is my name?"},
            ],
            temperature=0,
            max_tokens=40,
        )
        assert "Ada" in (told["choices"][0]["message"]["content"] or "")
        assert told["choices"][0]["finish_reason"] == "stop"
