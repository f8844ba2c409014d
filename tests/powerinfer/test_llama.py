"""Llama without text: arguments, context, sampling, saved states. Generation is in test_generation.py."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    ClosedError,
    ContextError,
    FileError,
    FormatError,
    Llama,
    LogitsProcessorList,
    UnsupportedError,
)
from tests import models, reference
from tests.powerinfer.greedy import PROMPT, greedy

OpenLlama = Callable[..., Llama]

# -- construction


def test_defaults(llama: OpenLlama) -> None:
    llm = llama(n_threads=None)
    assert llm.n_ctx() == 256 and llm.n_vocab() == 320 and llm.n_embd() == 64
    assert (llm.token_bos(), llm.token_eos(), llm.token_nl()) == (1, 2, 13)
    assert llm.n_tokens == 0 and llm.input_ids.size == 0
    info = llm.info()
    assert info.session is not None and info.model is not None
    assert info.session.n_batch == 512 and info.session.n_threads >= 1
    assert info.notes == () and info.isa and info.build
    assert (info.n_ff, info.sparsity) == (192, "exact")
    assert "llama, 2 layers, n_ctx=256" in repr(llm)
    line = llm.describe()
    assert line.startswith("llama-relu: llama, 0 M parameters,") and "exact; context 256" in line


def test_arguments_that_do_not_exist(relu_path: Path) -> None:
    with pytest.raises(TypeError, match="'n_contexts'"):
        Llama(relu_path, n_contexts=5)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_base": "x"},
        {"rope_freq_base": 5.0},
        {"kv_overrides": {"a": 1}},
    ],
)
def test_arguments_of_later_versions_are_named(relu_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        Llama(relu_path, **options)


def test_arguments_that_ask_for_nothing_pass(llama: OpenLlama) -> None:
    llama(
        embedding=False,
        use_mmap=True,
        lora_path=None,
        kv_overrides={},
        flash_attn=False,
        offload_kqv=True,
        n_gpu_layers=-1,
        vram_budget=0,
        activation=None,
    )


def test_a_rope_that_is_the_files_own(llama: OpenLlama, tmp_path: Path) -> None:
    """Programs that were written for one model often name the base that it has anyway."""
    llama(rope_freq_base=10000, rope_freq_scale=1.0)
    for name, base, scale in (("llama-linear", 10000.0, 0.25), ("llama-llama3", 500000.0, 1.0)):
        path = models.write_dense(tmp_path / f"{name}.gguf", models.SPECS[name])
        with Llama(path, n_threads=1, verbose=False, rope_freq_base=base, rope_freq_scale=scale):
            pass
        for wrong in ({"rope_freq_base": base * 2}, {"rope_freq_scale": scale / 2}):
            with pytest.raises(UnsupportedError, match=f"{next(iter(wrong))}=.* the file's .* is used"):
                Llama(path, verbose=False, **wrong)
    with pytest.raises(ArgumentError, match="rope_freq_base"):
        llama(rope_freq_base="10000")
    spec = models.SPECS["llama-relu"]
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.freq_base"):
        meta = {**models.metadata(spec), f"llama.{key}": "x"}
        path = models.write(tmp_path / "text.gguf", meta, models.file_tensors(spec, models.draw(spec)))
        for options in ({}, {"rope_freq_scale": 1.0}, {"rope_freq_base": 10000.0}):
            with pytest.raises(FormatError, match=f"'llama.{key}' has"):
                Llama(path, verbose=False, **options)  # type: ignore[arg-type]


def test_threads_for_prompts_that_are_the_others(llama: OpenLlama, recwarn: pytest.WarningsRecorder) -> None:
    llama(n_threads=1, n_threads_batch=1)
    assert not recwarn.list


def test_gpu_layers_warn(llama: OpenLlama) -> None:
    with pytest.warns(UserWarning, match="n_gpu_layers=20"):
        llama(n_gpu_layers=20)


def test_bad_values(llama: OpenLlama, relu_path: Path) -> None:
    for options in (
        {"n_ctx": -5},
        {"n_batch": 0},
        {"type_k": "q2"},
        {"sparsity": "half"},
        {"activation": "tanh"},
    ):
        with pytest.raises(ArgumentError):
            llama(**options)
    with pytest.raises(ValueError, match="nosuch"):
        llama(chat_format="nosuch")
    with pytest.raises(FileError):
        Llama(relu_path.with_name("nothing.gguf"))


def test_activation_override(llama: OpenLlama, bpe_path: Path) -> None:
    """A file that does not say that it is a ReLU model can be told so."""
    dense = llama(bpe_path).info()
    told = llama(bpe_path, activation="relu").info()
    assert dense.session is not None and dense.session.sparsity == "dense"
    assert told.session is not None and told.session.sparsity == "exact"


def test_sparsity_and_threshold(llama: OpenLlama, sparse_path: Path) -> None:
    llm = llama(sparse_path, threshold=1e30)
    llm.eval(PROMPT)
    assert [step.n_predicted for step in llm.last_step] == [0, 0]
    llm.set_threshold(-1e30)
    llm.eval([5])
    assert [step.n_predicted for step in llm.last_step] == [192, 192]
    llm.set_sparsity("dense")
    info = llm.info()
    assert info.session is not None and info.session.sparsity == "dense"
    assert llama(sparse_path, sparsity="exact").info().session.sparsity == "exact"  # type: ignore[union-attr]


def test_quantised_down_is_noted(tmp_path: Path, llama: OpenLlama) -> None:
    from gguf import GGMLQuantizationType

    path = models.write_dense(tmp_path / "q.gguf", models.SPECS["llama-relu"], kind=GGMLQuantizationType.Q8_0)
    notes = llama(path).info().notes
    assert len(notes) == 1 and "ffn_down" in notes[0]


def test_vocab_only(relu_path: Path, tmp_path: Path) -> None:
    llm = Llama(relu_path, vocab_only=True, verbose=False)
    assert llm.tokenize(b"the") and llm.n_vocab() == 320 and llm.n_embd() == 64
    assert llm.info().model is None and llm.info().sparsity == "none" and llm.info().n_ff == 0
    assert "320 tokens" in llm.describe()
    assert "vocab_only" in repr(llm)
    for call in (lambda: llm.eval([1]), lambda: llm("x"), lambda: llm.n_ctx(), lambda: llm.scores, llm.reset):
        with pytest.raises(UnsupportedError, match="vocab_only"):
            call()
    meta = {**models.metadata(models.SPECS["llama-relu"]), "general.architecture": "nobody-knows-it"}
    odd = models.write(tmp_path / "odd.gguf", meta, {"t": np.zeros((1, 32), np.float32)})
    assert Llama(odd, vocab_only=True, verbose=False).tokenize(b"the") == llm.tokenize(b"the")
    with pytest.raises(UnsupportedError, match="nobody-knows-it"):
        Llama(odd, verbose=False)


def test_a_file_without_tokenizer(tmp_path: Path, llama: OpenLlama) -> None:
    spec = models.SPECS["llama-relu"]
    meta = {key: value for key, value in models.metadata(spec).items() if not key.startswith("tokenizer.")}
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    llm = llama(path)
    assert greedy(llm, PROMPT, 8) == greedy(llama(), PROMPT, 8)
    for call in (lambda: llm.tokenize(b"x"), lambda: llm("x"), lambda: llm.token_eos()):
        with pytest.raises(FormatError, match="no tokenizer"):
            call()
    with pytest.raises(FormatError, match="no tokenizer"):
        Llama(path, vocab_only=True)


def test_metadata_is_text(llama: OpenLlama) -> None:
    metadata = llama().metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == "2"
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == "1e-05"
    assert metadata["tokenizer.ggml.tokens"].startswith("[<unk>, <s>, </s>,")
    assert all(isinstance(value, str) and len(value) < 200 for value in metadata.values())


def test_nothing_is_printed(relu_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for verbose in (True, False):
        with Llama(relu_path, verbose=verbose, n_threads=1) as llm:
            llm("the", max_tokens=4)
            assert capfd.readouterr() == ("", "")
            llm.create_chat_completion([{"role": "user", "content": "the"}], max_tokens=4)
            llm.create_chat_completion([{"role": "user", "content": "the"}], max_tokens=4)
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == int(verbose)
        if verbose:
            assert err.startswith("powerinfer: ") and "chat" in err


def test_close_ends_what_is_under_way(llama: OpenLlama) -> None:
    llm = llama()
    reached, go = threading.Event(), threading.Event()
    calls: list[int] = []
    ended: list[BaseException] = []

    def wait(ids: Any, logits: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            reached.set()
            assert go.wait(30)
        logits[2] = -np.inf
        return logits

    def answer() -> None:
        try:
            llm.create_completion("the", temperature=0, logits_processor=LogitsProcessorList([wait]))
        except BaseException as error:
            ended.append(error)

    engine = llm._ctx.engine
    threads = [threading.Thread(target=answer), threading.Thread(target=llm.close)]
    threads[0].start()
    assert reached.wait(30)
    threads[1].start()
    for _ in range(3000):
        if engine.is_closing:
            break
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join(30)
    assert isinstance(ended[0], ClosedError) and len(calls) == 3
    with pytest.raises(ClosedError):
        llm("the")


@pytest.mark.parametrize("options", [{"n": 10**9}, {"best_of": 10**9}, {"n": 0}])
def test_how_many_answers(llama: OpenLlama, options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="it must be at"):
        llama()("the", **options)


def test_close(llama: OpenLlama) -> None:
    with llama() as llm:
        stream = llm.generate(PROMPT)
        next(stream)
    llm.close()
    assert "closed" in repr(llm)
    calls = [
        lambda: llm.eval([1]),
        lambda: llm("x"),
        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]),
        lambda: llm.generate([1]),
        lambda: next(stream),
        lambda: llm.sample(),
        lambda: llm.n_ctx(),
        lambda: llm.n_tokens,
        lambda: llm.scores,
        lambda: llm.save_state(),
        lambda: llm.last_step,
        lambda: llm.info(),
        lambda: llm.reset(),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


# -- tokens


def test_tokenize_and_detokenize(llama: OpenLlama) -> None:
    llm = llama()
    ids = llm.tokenize(b"the tree")
    assert ids[0] == 1 and llm.tokenize("the tree") == ids
    assert llm.tokenize(b"the tree", add_bos=False) == ids[1:]
    assert llm.detokenize(ids) == b"the tree"
    assert llm.detokenize(ids[3:], prev_tokens=ids[:3]) == b"the tree"[len(llm.detokenize(ids[:3])) :]
    assert llm.tokenize(b"</s>", add_bos=False, special=True) == [2]
    assert 2 not in llm.tokenize(b"</s>", add_bos=False)
    assert llm.detokenize([2]) == b"" and llm.detokenize([2], special=True) == b"</s>"
    for bad in (-1, 320):
        with pytest.raises(ArgumentError, match=str(bad)):
            llm.detokenize([bad])


# -- context


@pytest.mark.parametrize("logits_all", [False, True])
def test_going_back_to_the_first_tokens(llama: OpenLlama, logits_all: bool) -> None:
    llm, plain = llama(logits_all=logits_all), llama(logits_all=logits_all)
    for one in (llm, plain):
        one.eval(PROMPT[:4])
    at_4 = plain.scores[-1].copy()
    llm.eval(PROMPT[4:])
    for wrong in (-1, 8, 1.0, True, None):
        with pytest.raises(ArgumentError):
            llm.n_tokens = wrong  # type: ignore[assignment]
    assert llm.n_tokens == 7
    llm.n_tokens = 4
    assert llm.n_tokens == 4 and llm.input_ids.tolist() == PROMPT[:4]
    if logits_all:
        assert np.array_equal(llm.scores[-1], at_4) and llm.sample(temp=0) == int(at_4.argmax())
    else:  # they were not kept
        with pytest.raises(ContextError, match="no logits"):
            llm.sample()
    for one in (llm, plain):
        one.eval([9, 8])
    assert np.array_equal(llm.scores, plain.scores)
    llm.n_tokens = 0
    llm.eval(PROMPT[:4])
    assert np.array_equal(llm.scores[-1], at_4)


def test_going_back_with_layers_that_have_states(llama: OpenLlama, tmp_path: Path) -> None:
    llm = llama(models.dense_file(tmp_path, "lfm2"))
    llm.eval(PROMPT[:5])
    llm.eval(PROMPT[5:])
    with pytest.raises(UnsupportedError, match="cannot go back to 3 tokens"):
        llm.n_tokens = 3
    assert llm.n_tokens == 7
    llm.n_tokens = 0
    assert llm.n_tokens == 0


def test_eval_and_scores(llama: OpenLlama) -> None:
    every, last = llama(logits_all=True), llama()
    every.eval(PROMPT[:3])
    every.eval(PROMPT[3:])
    for token in PROMPT:
        last.eval([token])
        assert last.scores.shape == (last.n_tokens, 320)
        # One at a time or several at once may round a prompt differently, not more.
        assert np.allclose(last.scores[-1], every.scores[last.n_tokens - 1], rtol=0, atol=0.05)
    assert every.scores.shape == (7, 320) and every.scores.dtype == np.float32
    assert every.input_ids.tolist() == last.input_ids.tolist() == PROMPT
    assert not np.array_equal(every.scores[0], every.scores[1])
    every.reset()
    assert every.n_tokens == 0 and every.scores.shape == (0, 320) and last.scores.shape == (7, 320)


def test_scores_keep_their_rows_when_a_beginning_is_reused(llama: OpenLlama) -> None:
    llm = llama(logits_all=True)
    next(llm.generate(PROMPT))
    rows = llm.scores.copy()
    next(llm.generate([*PROMPT[:4], 99, 98]))
    assert llm.scores.shape == (6, 320)
    assert np.array_equal(llm.scores[:4], rows[:4]) and not np.array_equal(llm.scores[4:6], rows[4:6])


def test_a_long_prompt_in_chunks(llama: OpenLlama) -> None:
    prompt = [1 + i % 300 for i in range(100)]
    calls: list[tuple[int, int]] = []
    llm = llama(n_batch=16, prompt_progress=lambda done, total: calls.append((done, total)))
    llm.eval(prompt)
    assert calls == [(16, 100), (32, 100), (48, 100), (64, 100), (80, 100), (99, 100), (100, 100)]
    whole = llama()
    whole.eval(prompt)
    assert np.allclose(llm.scores[-1], whole.scores[-1], rtol=0, atol=0.05)


@pytest.mark.parametrize("tokens", [[320], [-1], [1, 2, 2**31]])
def test_bad_tokens(llama: OpenLlama, tokens: list[int]) -> None:
    llm = llama(n_batch=1)
    for call in (
        lambda: llm.eval([5, *tokens]),
        lambda: llm.generate([5, *tokens]),
        lambda: llm([5, *tokens]),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert llm.n_tokens == 0


def test_overflow_is_an_error_before_anything_is_computed(llama: OpenLlama) -> None:
    llm = llama(n_ctx=20, n_batch=4)
    llm.eval(PROMPT)
    for call in (lambda: llm.eval([5] * 14), lambda: llm([5] * 21), lambda: llm.generate([5] * 21)):
        with pytest.raises(ContextError, match="20"):
            call()
    assert llm.input_ids.tolist() == PROMPT
    llm.eval([5] * 13)
    assert llm.n_tokens == 20
    tokens: list[int] = []
    with pytest.raises(ContextError, match="n_ctx is 20"):
        tokens.extend(llm.generate(PROMPT))
    assert len(tokens) == 14  # positions 7..19, and one beyond that is never computed


def test_context_shift(llama: OpenLlama) -> None:
    llm = llama(n_ctx=20, context_shift=True)
    tokens = greedy(llm, PROMPT, 60)
    assert len(tokens) == 60 and llm.n_tokens <= 20
    assert llm.input_ids[0] == 1  # BOS stays
    # What is held are the BOS token and the latest, without the last one, which is not computed yet.
    held = llm.input_ids.tolist()
    assert held[1:] == tokens[:-1][-(len(held) - 1) :]
    # One step by hand: 20 held, the BOS and the later half of 19 stay.
    llm.reset()
    llm.eval([1, *range(10, 29)])
    llm.eval([5])
    assert llm.input_ids.tolist() == [1, *range(20, 29), 5]
    with pytest.raises(ContextError):
        llm.eval([5] * 20)
    kept = llama(n_ctx=20, context_shift=True, n_keep=4)
    kept.eval([1, 2, 3, *range(10, 27)])
    kept.eval([5] * 12)
    assert kept.input_ids.tolist() == [1, 2, 3, 10, *range(23, 27), *[5] * 12]


def test_context_shift_keeps_scores_with_their_tokens(llama: OpenLlama) -> None:
    llm = llama(n_ctx=20, context_shift=True, logits_all=True)
    llm.eval([1, *range(10, 29)])
    rows = llm.scores.copy()
    llm.eval([5])
    assert llm.scores.shape == (11, 320)
    assert np.array_equal(llm.scores[1:10], rows[11:20])


def test_batches_of_a_mixture_are_longer(llama: OpenLlama, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["qwen3moe"])
    for options, want in (({"n_ctx": 4096}, 2048), ({"n_ctx": 600}, 600), ({"n_ctx": 64}, 512)):
        assert llama(path, **options).session.info.n_batch == want
    assert llama(path, n_ctx=4096, n_batch=64).session.info.n_batch == 64


def test_learned_positions_are_computed_anew(llama: OpenLlama, opt_path: Path) -> None:
    """They cannot be shifted."""
    llm = llama(opt_path, n_ctx=10, context_shift=True)
    llm.eval(list(range(5, 15)))
    llm.eval([15])
    held = llm.input_ids.tolist()
    assert 1 < len(held) <= 10 and held[-5:] == [11, 12, 13, 14, 15]
    other = llama(opt_path, n_ctx=10)
    other.eval(held)
    assert np.allclose(llm.scores[-1], other.scores[-1], atol=1e-4)


# -- sampling


def test_sample(llama: OpenLlama) -> None:
    llm = llama()
    with pytest.raises(ContextError, match="evaluate"):
        llm.sample()
    llm.eval(PROMPT)
    best = int(np.argmax(llm.scores[-1]))
    assert llm.sample(temp=0) == llm.sample(temperature=0) == best
    assert llm.sample(temp=0, logit_bias={best: -np.inf}) == int(np.argsort(-llm.scores[-1])[1])
    assert llm.n_tokens == 7  # not evaluated by itself
    assert llm.sample(temp=0, idx=6) == best == llm.sample(temp=0, idx=-1)
    with pytest.raises(ArgumentError, match="logits_all"):
        llm.sample(idx=2)
    with pytest.raises(TypeError, match="'tempo'"):
        llm.sample(tempo=1)
    with pytest.raises(ArgumentError, match="top_p"):
        llm.sample(top_p=-1)


def test_sample_at_another_token(llama: OpenLlama) -> None:
    llm = llama(logits_all=True)
    llm.eval(PROMPT)
    for i in range(7):
        assert llm.sample(temp=0, idx=i) == int(np.argmax(llm.scores[i]))
    for idx in (7, -8):
        with pytest.raises(ArgumentError, match=str(idx)):
            llm.sample(idx=idx)


def test_sample_looks_at_the_context_for_penalties(llama: OpenLlama) -> None:
    llm = llama(last_n_tokens_size=3)
    llm.eval([1, 50, 60, 70])
    logits = llm.scores[-1].astype(np.float64)
    logits[[50, 60, 70]] -= 1000.0
    assert llm.sample(temp=0, presence_penalty=1000.0) == int(np.argmax(logits))
    flat = {token: -np.inf for token in range(320) if token not in (1, 50)}
    assert {llm.sample(temp=1e6, presence_penalty=1000.0, logit_bias=flat) for _ in range(20)} >= {1}


def test_seeds(llama: OpenLlama) -> None:
    def draws(llm: Llama) -> list[int]:
        llm.reset()
        llm.eval(PROMPT)
        return [llm.sample(temp=50.0, top_k=0, min_p=0, top_p=1) for _ in range(12)]

    llm = llama(seed=5)
    first = draws(llm)
    assert len(set(first)) > 3
    assert draws(llm) != first
    assert draws(llama(seed=5)) == first
    llm.set_seed(5)
    assert draws(llm) == first
    for random_seed in (None, -1, 0xFFFFFFFF):
        assert draws(llama(seed=random_seed)) != draws(llama(seed=random_seed))


def test_mirostat_goes_on_between_samples(llama: OpenLlama) -> None:
    llm = llama()
    llm.eval(PROMPT)
    options = {"mirostat_mode": 2, "mirostat_tau": 0.01, "mirostat_eta": 1.0}
    drawn = [llm.sample(temp=5.0, **options) for _ in range(40)]
    # The bound falls by every surprise above tau, until only the likeliest token is below it.
    assert drawn.count(int(np.argmax(llm.scores[-1]))) > 10


# -- states


def test_states(llama: OpenLlama) -> None:
    llm = llama(seed=3)
    llm.eval(PROMPT)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    assert state.n_tokens == 7 and state.n_bytes > 7 * 4
    scores = llm.scores[-1].copy()

    def go_on(llm: Llama) -> list[int]:
        tokens = []
        for _ in range(8):
            tokens.append(llm.sample(temp=2.0))
            llm.eval(tokens[-1:])
        return tokens

    expected = go_on(llm)
    other = llama(seed=99)
    other.eval([5, 6])
    for target in (llm, other):
        target.load_state(state)
        assert target.input_ids.tolist() == PROMPT
        assert np.array_equal(target.scores[-1], scores)
        assert go_on(target) == expected
    empty = llama().save_state()
    llm.load_state(empty)
    assert llm.n_tokens == 0
    with pytest.raises(ContextError, match="evaluate"):
        llm.sample()


def test_states_of_another_kind_change_nothing(llama: OpenLlama, bpe_path: Path) -> None:
    llm = llama()
    llm.eval([1, 2, 3])
    for other in (llama(type_k="f32"), llama(bpe_path), llama(logits_all=True)):
        other.eval(PROMPT)
        with pytest.raises(FormatError):
            llm.load_state(other.save_state())
        assert llm.input_ids.tolist() == [1, 2, 3] and llm.sample(temp=0) >= 0
    with pytest.raises(ContextError):
        source = llama()
        source.eval(PROMPT)
        llama(n_ctx=4).load_state(source.save_state())


def test_states_with_all_logits(llama: OpenLlama) -> None:
    llm, other = llama(logits_all=True), llama(logits_all=True)
    llm.eval(PROMPT)
    other.load_state(llm.save_state())
    assert np.array_equal(other.scores, llm.scores) and other.scores.shape == (7, 320)


# -- the whole


def test_demo() -> None:
    with Llama.demo(verbose=False, n_threads=1) as llm:
        assert llm.model_path.endswith("demo.gguf")
        text = llm("Once upon a time", max_tokens=8)["choices"][0]["text"]
    assert text.strip()


def test_embeddings_are_the_last_hidden_states(llama: OpenLlama, relu_path: Path) -> None:
    llm = llama(relu_path, embedding=True, n_batch=4)
    text = "some words to embed"
    ids = llm.tokenize(text.encode(), special=True)
    vectors = np.array(llm.embed(text))
    assert vectors.shape == (len(ids), llm.n_embd())
    assert llm.n_tokens == 0
    # The output head, read from the file, turns a hidden state into the logits of the same token.
    head = reference.load(relu_path).tensors["output.weight"]
    expected = reference.forward(reference.load(relu_path), ids)
    assert reference.relative_error(vectors @ head.T, expected) < 1e-2
    two = llm.embed([text, "x"], normalize=True)
    assert np.allclose(np.linalg.norm(np.array(two[0]), axis=1), 1, atol=1e-5)
    with pytest.raises(ArgumentError, match="embedding=True"):
        llama(relu_path).embed(text)
