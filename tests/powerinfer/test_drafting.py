"""Drafts by a head of the model's file (NextN, MTP) and by a small model: they change nothing but the number
of steps."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama, UnsupportedError
from powerinfer._engine.batch import joined
from powerinfer._engine.devices import Devices
from powerinfer._engine.drafting import Drafter
from powerinfer._engine.prefix_cache import Sequence
from powerinfer._engine.request import Request, Stream
from powerinfer._engine.session import Model, Session
from powerinfer._engine.speculation import free_guesses, take_guesses
from powerinfer._llama.draft_model import DraftModel
from powerinfer.async_llama import AsyncLlama
from powerinfer.cli import main
from tests import models, next_head, reference

PROMPT = [int(t) for t in np.random.default_rng(2).integers(3, 291, 40)]
OTHER = [int(t) for t in np.random.default_rng(3).integers(3, 291, 30)]


def opened(path: Path, draft: Any = None, **options: Any) -> Llama:
    shape: dict[str, Any] = {"n_ctx": 128, "n_threads": 1, "seed": 1, "verbose": False, "vram_budget": 0}
    return Llama(path, **shape | {"draft_model": draft} | options)


def answer(llm: Llama, n: int = 40, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return list(islice(llm.generate(prompt, **{"temp": 0.0} | options), n))


def steps(llm: Llama) -> int:
    return llm._ctx.engine.totals["steps"]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that is right of seven in ten tokens."""
    return next_head.write_planted(tmp_path_factory.mktemp("m") / "m.gguf", "glm4moe", 0.7)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent layers."""
    return next_head.write_planted(tmp_path_factory.mktemp("m") / "m.gguf", "qwen35", 0.7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", next_head.NAMES)
def test_a_head_that_is_right(name: str, tmp_path: Path) -> None:
    path = next_head.write_planted(tmp_path / "m.gguf", name)
    plain, llm = opened(path), opened(path, "mtp", n_draft=3)
    assert answer(llm) == answer(plain)
    n_drafted, n_right = llm.drafted
    assert n_drafted == n_right >= 28 and steps(llm) <= 12 < steps(plain)


@pytest.mark.parametrize("name", ["deepseek2-v3", "qwen35"])
def test_a_head_that_knows_nothing(name: str, tmp_path: Path) -> None:
    """Random weights, of a model whose answer follows from all that stands before."""
    spec = models.SPECS[name]
    meta, tensors = next_head.with_head(spec)
    path = models.write(tmp_path / "m.gguf", meta | models.tokenizer(spec), tensors)
    plain, llm = opened(path), opened(path, "mtp", n_draft=4)
    for options in ({"temp": 0.0}, {"temp": 1.0, "top_k": 0, "seed": 5}):
        assert answer(llm, **options) == answer(plain, **options)
    n_drafted, n_right = llm.drafted
    assert n_drafted > 60 and n_right < n_drafted / 4


@pytest.mark.parametrize("options", [{"temp": 0.0}, {"temp": 0.8, "seed": 4}], ids=["greedy", "drawn"])
def test_a_head_that_is_right_at_times(glm: Path, qwen: Path, options: dict[str, Any]) -> None:
    for path in (glm, qwen):
        plain, llm = opened(path), opened(path, "mtp")
        assert answer(llm, **options) == answer(plain, **options)
        n_drafted, n_right = llm.drafted
        assert 0.2 < n_right / n_drafted < 0.95
        # It goes on where it was: a longer prompt, another one, and the first again.
        for prompt in (PROMPT + answer(plain, 9) + [7, 8], OTHER, PROMPT):
            assert answer(llm, 12, prompt, **options) == answer(plain, 12, prompt, **options)
        assert llm.drafted[1] > n_right


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_what_a_head_guesses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float64 says of all that was there before, also behind a wrong guess and after another prompt."""
    spec = models.SPECS[name]
    meta, tensors = next_head.with_head(spec)
    path = models.write(tmp_path / "m.gguf", meta | models.tokenizer(spec), tensors)
    seen: list[tuple[Any, int]] = []
    guess = Drafter.guess

    def noting(self: Drafter, wanted: Any) -> Any:
        found = guess(self, wanted)
        if found[0].size:  # none where the model has not computed tokens that were sent
            seen.append((wanted[0][1].copy(), int(found[0][0])))
        return found

    monkeypatch.setattr(Drafter, "guess", noting)
    llm = opened(path, "mtp", n_draft=2, n_batch=32)
    for prompt in (PROMPT, OTHER, PROMPT + OTHER[:9]):
        answer(llm, 4, prompt)
    stream = llm.generate(OTHER + PROMPT[:5], temp=0.0)
    for sent in (None, None, [9, 8, 7, 6], None, None):
        stream.send(sent)  # type: ignore[attr-defined]
    stream.close()  # type: ignore[attr-defined]
    model = reference.load(path)
    for known, token in seen[2::2]:
        hidden = next_head.last_hidden(model, known)[:-1]
        row = next_head.logits(model, hidden, known[1:])[-1]
        assert row[token] > row.max() - 0.1 * row.std()  # by rounding another one may be ahead
    assert len(seen) >= 9 and llm.drafted[1] < llm.drafted[0]


@pytest.mark.parametrize("name", ["glm4moe", "llama-mha"])
def test_guesses_of_several_sequences(name: str, tmp_path: Path) -> None:
    """Each is what it is alone, however they are read: side by side, in parts, or copied from each other."""
    spec, is_head = models.SPECS[name], name in next_head.NAMES
    path = (
        next_head.write(tmp_path / "m.gguf", spec)
        if is_head
        else models.write_dense(tmp_path / "m.gguf", spec)
    )
    texts = [np.array(ids, np.int32) for ids in (PROMPT, OTHER, [*PROMPT, 9, 4, 7])]
    with (
        Model(path) as m,
        Model(path, next_head=is_head) as h,
        Session(m, n_threads=1, keep_hidden=True) as s,
    ):
        hidden = []
        for ids in texts:
            s.drop()
            s.feed(ids, want_logits=False)
            hidden.append(s.all_hidden(ids.size)[:-1])
        alone = []
        for ids, states in zip(texts, hidden, strict=True):
            with Session(h, n_threads=1) as own:
                drafter = Drafter(own, 4, is_head=is_head)
                if is_head:
                    drafter.saw(0, ids[:-1], 0, states, ids.size - 1)
                alone.append(drafter.guess([(0, ids, 4)])[0].tolist())
        with Session(h, n_threads=1, n_seq=3, n_pool=1024) as own:
            drafter = Drafter(own, 4, is_head=is_head)
            for i in (0, 1, 2) if is_head else ():
                for first, end in ((0, 20), (20, 29), (29, texts[i].size - 1)):
                    drafter.saw(i, texts[i][:end], first, hidden[i][first:end], end)
            wanted = [(1, texts[1], 4), (0, texts[0], 2), (2, texts[2], 3)]
            found = [ids.tolist() for ids in drafter.guess(wanted)]
            assert found == [alone[1], alone[0][:2], alone[2][:3]]
            # The same again where sequence 1 becomes what sequence 0 is.
            if is_head:
                drafter.saw(1, texts[2][:-1], 39, hidden[2][39:], texts[2].size - 1)
            assert drafter.guess([(1, texts[2], 4)])[0].tolist() == alone[2]


def test_other_uses_of_the_context(glm: Path, qwen: Path) -> None:
    """Tokens that are sent, streams that are left, states that are loaded, and a context that is full."""
    for path in (glm, qwen):
        plain, llm = opened(path, n_ctx=64), opened(path, "mtp", n_ctx=64)
        for one in (plain, llm):
            one.reset()
        taken = []
        for one in (plain, llm):
            stream = one.generate(PROMPT[:20], temp=0.0)
            given = [next(stream) for _ in range(5)]
            given.append(stream.send([9, 10, 11]))  # type: ignore[attr-defined]
            given += [next(stream) for _ in range(4)]
            stream.close()  # type: ignore[attr-defined]
            state = one.save_state()
            given += answer(one, 3, OTHER)
            one.load_state(state)
            given += list(islice(one.generate([*one.input_ids.tolist(), 12], temp=0.0, reset=True), 6))
            one.eval([5, 6])
            given.append(one.sample(temp=0.0))
            taken.append(given)
        assert taken[0] == taken[1]
        texts = [one(PROMPT, max_tokens=80, temperature=0.0)["choices"][0] for one in (plain, llm)]
        assert texts[0] == texts[1] and texts[0]["finish_reason"] == "length"  # the context is full
    plain, llm = (opened(glm, d, n_ctx=64, context_shift=True) for d in (None, "mtp"))
    assert answer(llm, 120) == answer(plain, 120)
    assert llm.drafted[1] > 60


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama-relu", "qwen35", "gemma3"])
def test_a_small_model(family: str, tmp_path: Path) -> None:
    """One that is the model itself is right, whether it can forget its guesses or not."""
    spec = models.SPECS[family]
    path = models.write(
        tmp_path / "m.gguf",
        models.metadata(spec) | models.tokenizer(spec),
        models.file_tensors(spec, models.draw(spec)),
    )
    plain, llm = opened(path), opened(path, path, n_draft=5)
    for prompt in (PROMPT, OTHER, [*PROMPT, 5]):
        assert answer(llm, 30, prompt) == answer(plain, 30, prompt)
    n_drafted, n_right = llm.drafted
    assert n_drafted * 0.9 < n_right > 60 and steps(llm) < 40  # some are as good as equally likely
    for options in ({"temp": 1.0, "top_k": 0, "seed": 5},):  # where it is wrong
        assert answer(llm, 30, **options) == answer(plain, 30, **options)
    assert llm.drafted[1] < llm.drafted[0]


def test_several_sequences_at_once(glm: Path, qwen: Path) -> None:
    prompts = [PROMPT, [*PROMPT, 4, 5], OTHER, OTHER[:20] + PROMPT]
    how: dict[str, Any] = {"max_tokens": 25, "temperature": 0.0}

    async def ask(path: Path, draft: str) -> tuple[list[str], tuple[int, int]]:
        options: dict[str, Any] = {"n_threads": 1, "verbose": False, "vram_budget": 0, "n_draft": 2}
        options["prompt_part"] = 128  # nothing is guessed while a prompt is read
        async with AsyncLlama(path, n_parallel=3, n_ctx=128, draft_model=draft, **options) as llm:
            answers = await asyncio.gather(*(llm.create_completion(p, **how) for p in prompts))
            return [one["choices"][0]["text"] for one in answers], llm.llama.drafted

    for path, draft in ((glm, "mtp"), (qwen, "mtp"), (qwen, str(qwen))):
        texts, (n_drafted, n_right) = asyncio.run(ask(path, draft))
        plain = opened(path)
        assert texts == [plain(p, **how)["choices"][0]["text"] for p in prompts]
        assert n_right > 40 and (n_right < n_drafted) == (draft == "mtp")


def test_what_cannot_be(glm: Path, tmp_path: Path) -> None:
    plain = models.write_dense(tmp_path / "p.gguf", models.SPECS["qwen2"])
    with pytest.raises(UnsupportedError, match="no layer that guesses at further tokens"):
        opened(plain, "mtp")
    with pytest.raises(ArgumentError, match=r"cannot draft for m\.gguf: token"):
        opened(glm, plain)
    with pytest.raises(UnsupportedError, match="online_statistics"):
        opened(glm, "mtp", online_statistics=True)
    for n in (0, 16, True, 2.5):
        with pytest.raises(ArgumentError, match="n_draft"):
            opened(glm, "mtp", n_draft=n)
    llm = opened(plain)
    llm.draft_model = "mtp"
    with pytest.raises(ArgumentError, match="opened with"):
        answer(llm, 1)


def test_on_a_device(glm: Path, qwen: Path) -> None:
    """The model and its head lie on it."""
    for path in (glm, qwen):
        options: dict[str, Any] = {"devices": "host", "vram_budget": 0.25}
        plain, llm = opened(path), opened(path, "mtp", **options)
        assert llm.plan is not None and llm.plan.uses_device
        assert llm._drafter is not None and llm._drafter.session.info.n_device_bytes
        assert answer(llm) == answer(plain)
        n_drafted, n_right = llm.drafted
        assert 0.2 < n_right / n_drafted < 0.95


def test_on_the_command_line(glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = [str(glm), "--vram-budget", "0", "-t", "1"]
    words = ["run", *model, "--raw", "a b", "-n", "20", "--temp", "0", "-v"]
    assert main(words) == 0
    plain = capsys.readouterr()
    for draft in (["--mtp", "--draft-max", "2"], ["--draft-model", str(glm)]):
        assert main([*words, *draft]) == 0
        told = capsys.readouterr()
        assert told.out == plain.out and "guesses were right" in told.err
    assert "guesses" not in plain.err
    assert main(["info", str(glm)]) == 0
    assert "--mtp" in capsys.readouterr().out
    bench = ["bench", str(glm), "-p", "20", "-n", "12", "-r", "1", "-t", "1", "--json"]
    assert main([*bench, "--mtp", "--draft-max", "1,3", "--draft-right", "own,0,100"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["n_draft"], r["right"]) for r in found] == [
        (0, None), *((n, right) for n in (1, 3) for right in (None, 0.0, 1.0))
    ]  # fmt: skip
    assert [r["accepted"] for r in found if r["right"] is not None] == [0.0, 1.0] * 2
    assert [r["tokens_per_step"] for r in found if r["right"] == 1.0] == [2.0, 4.0]
    assert main([*bench, "--mtp", "--draft-right", "100", "--vram-budget", "0.25", "--devices", "host"]) == 0
    plain_run, told_run = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert plain_run["plan"] and told_run["accepted"] == 1.0
    for words, error in (
        (["run", *model, "x", "--mtp", "--draft-model", "y"], "one of them can guess"),
        (["run", *model, "x", "--draft-max", "-1"], "--draft-max must be 0 or more"),
        (["bench", str(glm), "--mtp", "-np", "2"], "-np is not measured with drafts"),
        (["bench", str(glm), "--mtp", "-p", "1,2"], "one value each"),
        (["bench", str(glm), "--mtp", "--draft-right", "101"], "must be in 0..100"),
        (["serve", str(glm), str(glm), "-a", "a", "-a", "b", "--draft-model", "y"], "several are served"),
    ):
        assert main(words) != 0
        assert error in capsys.readouterr().err


class Fixed(Drafter):
    """Says what it was told to say."""

    def __init__(self, *ids: int) -> None:
        self.n_draft, self.ids, self.wanted = 3, ids, list[int]()

    def guess(self, wanted: Any) -> list[Any]:
        self.wanted = [n for *_, n in wanted]
        return [np.array(self.ids[:n], np.int32) for n in self.wanted]


def running(n: int, draft: Any) -> list[Request]:
    """Requests of a prompt of four tokens and one more, which is not computed."""
    requests = []
    for number in range(n):
        stream = Stream(4, lambda _: None)
        one = Request(stream=stream, ids=np.zeros(32, np.int32), n=5, n_prompt=4, draft=draft)
        one.sequence = Sequence(number)
        one.sequence.n = 4
        requests.append(one)
    return requests


def test_several_share_the_room_for_guesses() -> None:
    """A step that is wider rounds otherwise."""
    draft = Fixed(7, 8, 9)
    requests = running(3, draft)
    assert take_guesses(requests, 7, 10) == []
    assert draft.wanted == [3, 2]
    assert [one.guess.tolist() for one in requests] == [[7, 8, 9], [7, 8], []]


@pytest.mark.parametrize("draft", [None, Fixed(7)], ids=["alone", "with a draft"])
def test_heads_are_shown_a_batch_in_the_order_of_its_parts(draft: Any) -> None:
    """Elsewhere tokens without logits come first."""
    generating, reading, last = running(3, draft)
    assert reading.sequence is not None
    reading.sequence.n = 1  # two tokens of its prompt are without logits
    batch = joined([(generating, 1), (reading, 4), (last, 1)])
    assert batch.owners == ([0, 1, 1, 1, 1, 2] if draft else [1, 1, 0, 1, 1, 2])
    assert batch.ends == [1, 3, 4]


def test_guesses_that_a_device_checks() -> None:
    """With the token before them they are as many as kernels for decoding take."""
    for n_batch, n in ((512, 7), (4, 3)):
        info = SimpleNamespace(n_device_bytes=1, n_batch=n_batch, n_ctx=128)
        session: Any = SimpleNamespace(info=info, model=SimpleNamespace(info=SimpleNamespace(n_vocab=9)))
        assert free_guesses(session) == n


def test_guesses_of_a_longer_vocabulary() -> None:
    """A draft's file may be padded to more tokens than the model has."""
    (request,) = running(1, Fixed(7, 10, 9))
    assert take_guesses([request], 7, 10) == [] and request.guess.tolist() == [7]


def test_guesses_leave_room_for_the_token_behind_them() -> None:
    (request,) = running(1, Fixed(7, 8, 9))
    request.n = request.ids.size - 2
    assert request.sequence is not None
    request.sequence.n = request.n - 1
    assert take_guesses([request], 7, 10) == [] and request.guess.tolist() == [7]


def test_a_draft_whose_pool_is_full(tmp_path: Path) -> None:
    """It forgets the sequences that nobody asks for, and guesses again the next time."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-mha"])
    ids = np.arange(3, 103, dtype=np.int32)
    with Model(path) as model, Session(model, n_ctx=128, n_pool=128, n_seq=2, n_threads=1) as session:
        drafter = Drafter(session, 2)
        assert [len(one) for one in drafter.guess([(0, ids, 2)])] == [2]
        assert [len(one) for one in drafter.guess([(1, ids[::-1].copy(), 2)])] == [0]
        assert session.length(0) == 0
        assert [len(one) for one in drafter.guess([(1, ids[::-1].copy(), 2)])] == [2]


def test_guesses_with_a_state_are_not_kept(qwen: Path) -> None:
    """They are made in a second sequence, which would fill the pool."""
    llm = opened(qwen, str(qwen))
    answer(llm, 12)
    draft = llm._drafter
    assert draft is not None and llm.drafted[0]
    session = draft.session
    assert [session.length(i) for i in range(session.info.n_seq // 2, session.info.n_seq)] == [0]


def test_the_memory_of_a_draft_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last device; a quarter at most, and no more than it needs."""
    draft = DraftModel.__new__(DraftModel)
    draft._model = SimpleNamespace(info=SimpleNamespace(n_ctx_train=64))  # type: ignore[assignment]
    asked = []

    def loader(devices: Devices, **_: Any) -> Any:
        asked.append(devices)
        return SimpleNamespace(needed_bytes=lambda: 100)

    monkeypatch.setattr(draft, "_loader", loader)
    left = draft.reserve(
        Devices(kind="host", indices=(0, 1), budgets=(1000, 800), automatic=False), n_ctx=0, n_seq=1, n_pool=0
    )
    assert (asked[0].indices, asked[0].budgets) == ((1,), (200,))
    assert left.budgets == (1000, 700) and draft._devices is not None
    assert (draft._devices.indices, draft._devices.budgets) == ((1,), (100,))
