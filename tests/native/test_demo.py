"""The model that ships: the engine against PyTorch on the same quantised weights, the card, its manners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from powerinfer import Llama
from powerinfer.file import ModelFile, find_model
from powerinfer.session import Model, Session
from tests import reference

GOLDEN = Path(__file__).parents[1] / "golden" / "demo.npz"
# Activations of quantised products are rounded to 8 bits per 32 values: 0.2 % rms each, eight layers deep.
TOLERANCE = 3e-2


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(find_model("demo")) as m:
        yield m


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_logits_are_those_of_pytorch(model: Model, mode: str, case: int) -> None:
    golden = np.load(GOLDEN)
    with Session(model, n_ctx=256, sparsity=mode, n_threads=2) as s:
        s.feed(golden[f"ids_{case}"])
        assert reference.relative_error(s.logits(), golden[f"logits_{case}"]) < TOLERANCE
        for token in golden[f"greedy_{case}"]:
            logits = s.logits()
            # Where two words are as good, rounding decides: PyTorch's choice must be as good as ours.
            assert logits.max() - logits[token] <= TOLERANCE * np.sqrt(np.mean(logits**2))
            s.feed([token])


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
