"""Several models in one server: who is open when, who waits, and that nobody is closed while it is used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")

from powerinfer.errors import ClosedError, DeadlineError
from powerinfer.server.models import Adapter, Group, Models, ServedModel
from powerinfer.server.problems import Problem
from powerinfer.server.settings import duration


class House:
    """Models that are opened and closed, and what happened."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.fails: set[str] = set()

    def model(self, name: str, group: Group | None = None, adapters: tuple[Adapter, ...] = ()) -> ServedModel:
        def open_model(given: Any, progress: Callable[[int, int], None]) -> Any:
            own = name + "".join(f"+{path}*{scale:g}" for path, scale in given)
            assert self.may_open.wait(10)
            progress(0, 1)
            if name in self.fails:
                raise OSError("the disk is gone")
            self.log.append(f"open {own}")
            llama = SimpleNamespace(
                info=lambda: own,
                tokenizer=SimpleNamespace(n_vocab=1, piece=lambda *_: b"ab"),
                n_ctx=lambda: 8,
            )
            return SimpleNamespace(
                llama=llama, close=lambda: self.log.append(f"close {own}"), begin_close=lambda grace_s: None
            )

        file: Any = SimpleNamespace(metadata={})
        return ServedModel((name,), file, open_model, adapters, group)


@pytest.fixture
def house() -> House:
    return House()


def run(work: Awaitable[Any]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(main())


async def soon(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.001)


def test_one_at_a_time_in_the_order_of_their_requests(house: House) -> None:
    group = Group()
    a, b, c = (house.model(name, group) for name in "abc")
    models = Models([a, b, c])

    async def main() -> None:
        assert await models.take(None) is a
        assert await models.take("a") is a
        waits_b = asyncio.ensure_future(models.take("b"))
        await soon(lambda: a.is_leaving)
        waits_c = asyncio.ensure_future(models.take("c"))
        again = asyncio.ensure_future(models.take("a"))  # comes later: it must not keep the others waiting
        await asyncio.sleep(0.01)
        models.release(a)
        await asyncio.sleep(0.01)
        assert house.log == ["open a"] and not waits_b.done()  # one user is left
        models.release(a)
        assert await waits_b is b
        assert house.log == ["open a", "close a", "open b"]
        await asyncio.sleep(0.01)
        assert (b.state, c.state, a.n_users) == ("loaded", "waiting", 1)
        models.release(b)
        assert await waits_c is c
        models.release(c)
        assert await again is a
        assert house.log[3:] == ["close b", "open c", "close c", "open a"]

    run(main())


def test_those_that_share_nothing_stay(house: House) -> None:
    models = Models([house.model("a"), house.model("b")])

    async def main() -> None:
        for name in "abab":
            models.release(await models.take(name))

    run(main())
    assert house.log == ["open a", "open b"]
    models.close()
    assert house.log[2:] == ["close a", "close b"]


def test_many_wait_for_one_load_and_may_leave(house: House) -> None:
    a = house.model("a")
    models = Models([a])
    house.may_open.clear()

    async def main() -> None:
        waiting = [asyncio.ensure_future(models.take("a")) for _ in range(3)]
        await soon(lambda: a.state == "loading")
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert a.n_users == 2
        house.may_open.set()
        assert await asyncio.gather(*waiting[1:]) == [a, a]

    run(main())
    assert house.log == ["open a"] and a.n_loads == 1


def test_who_leaves_gives_the_place_up(house: House) -> None:
    group = Group()
    a, b = house.model("a", group), house.model("b", group)
    models = Models([a, b])

    async def main() -> None:
        await models.take("a")
        waits = asyncio.ensure_future(models.take("b"))
        await soon(lambda: a.is_leaving)
        waits.cancel()
        await soon(lambda: not a.is_leaving)
        assert await models.take("a") is a
        await soon(lambda: b.loading is None)
        assert b.state == "unloaded" and b.n_users == 0

    run(main())
    assert house.log == ["open a"]


def test_a_load_that_fails(house: House) -> None:
    a, b = house.model("a"), house.model("b")
    models = Models([a, b], timeout_s=5)
    house.fails.add("b")

    async def main() -> None:
        said = await asyncio.gather(*(models.take("b") for _ in range(2)), return_exceptions=True)
        assert [getattr(error, "code", error) for error in said] == ["model_load_failed"] * 2
        assert "could not be loaded: the disk is gone" in str(said[0])
        assert (b.state, b.error, b.n_users) == ("failed", "the disk is gone", 0)
        assert await models.take("a") is a
        house.fails.clear()
        assert await models.take("b") is b and b.error is None

    run(main())


def test_a_load_that_takes_too_long(house: House) -> None:
    models = Models([house.model("a")], timeout_s=0.05)
    house.may_open.clear()

    async def main() -> None:
        with pytest.raises(DeadlineError, match="was not loaded yet"):
            await models.take("a")
        house.may_open.set()
        await soon(lambda: models.first.opened is not None)

    run(main())
    assert models.first.n_users == 0


def test_idle_ones_are_closed(house: House) -> None:
    a = house.model("a")
    models = Models([a], idle_s=0.02)

    async def main() -> None:
        await models.take("a")
        await asyncio.sleep(0.06)
        assert a.opened is not None  # in use
        models.release(a)
        await models.take("a")
        await asyncio.sleep(0.06)
        assert a.opened is not None
        models.release(a)
        await soon(lambda: a.state == "unloaded")
        a.keep_s = 0
        models.release(await models.take("a"))
        await soon(lambda: a.state == "unloaded")
        a.keep_s = 1e9
        assert models.kept_s(a) == 0.02

    run(main())
    assert house.log == ["open a", "close a"] * 2


def test_the_end(house: House) -> None:
    a, b = house.model("a"), house.model("b")
    models = Models([a, b])
    house.may_open.clear()

    async def main() -> None:
        waits = asyncio.ensure_future(models.take("b"))
        await soon(lambda: b.state == "loading")
        models.begin_close(grace_s=0)
        house.may_open.set()
        with pytest.raises(ClosedError):
            await waits
        with pytest.raises(ClosedError):
            await models.take("a")

    run(main())
    assert house.log == []


def test_names(house: House) -> None:
    poet = (Adapter("poet", "p", 0.5),)
    one = Models([house.model("a")])
    assert one.find("x") is one.first and one.find(None) is one.first and one.find("a:latest") is one.first
    for models, name in (
        (Models([house.model("a")], strict=True), "x"),
        (Models([house.model("a"), house.model("b")]), "x"),
        (Models([house.model("a", adapters=poet)]), "a:pot"),
    ):
        with pytest.raises(Problem, match="there is 'a'") as caught:
            models.find(name)
        assert caught.value.status == 404
    with pytest.raises(ValueError, match="two models are called 'a'"):
        Models([house.model("a"), house.model("a")])


def test_adapters_are_models_of_their_own(house: House) -> None:
    model = house.model("a", adapters=(Adapter("poet", "p", 0.5), Adapter("cook", "c")))
    models = Models([model])
    assert models.names == ["a", "a:poet", "poet", "a:cook", "cook"]
    assert models.find("poet") is models.find("a:poet") is models.find("a", [(0, 0.5)])
    assert models.find("poet").name == "a:poet"
    assert models.find("poet", []) is model and models.find("a", [(1, 0.0)]) is model
    both = models.find("a", [(1, 2.0), (0, 0.5)])
    assert both.name == "a:poet+cook@2" and both is models.find("poet", [(0, 0.5), (1, 2.0)])
    for lora in ([(2, 1.0)], [(0, 1.0), (0, 1.0)]):
        with pytest.raises(Problem) as caught:
            models.find("a", lora)
        assert caught.value.status == 400
    model.default = models.strengths(model, [(0, 0.5)])
    assert models.find("a") is models.find("poet") and models.find("cook").name == "a:cook"

    async def main() -> None:
        await models.take("cook")
        for scale in range(1, 8):
            models.release(await models.take("a", [(1, scale / 10)]))

    run(main())
    opened = [one.name for one in models.opened]
    assert len(opened) == 4 and "a:cook" in opened  # which is in use
    assert house.log[0] == "open a+c*1" and "open a+c*0.1" in house.log


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("10m", 600), ("1h30m", 5400), ("1.5s", 1.5), ("-1", -1), ("250ms", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "10x", "--1"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        duration(text)
