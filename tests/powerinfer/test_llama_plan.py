"""Llama with budgets, devices and plans: what they settle, what is computed, and what is refused. The device
is the stand-in "host", which obeys budgets in ordinary memory."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerinfer import ArgumentError, ClosedError, DeviceError, FormatError, Llama, OutOfMemoryError
from powerinfer._engine import devices, machine
from powerinfer._engine.machine import Gpu, GpuDriver
from powerinfer._engine.session import Model, Session
from powerinfer._llama import loader
from powerinfer._llama.loader import Loader
from powerinfer.models.plan import Rates, Settings, make_plan
from powerinfer.models.plan.rates import HOST_RATES

TOKENS = [3, 4, 5, 6, 7]
GIB = 1 << 30


def budget_of(path: Path, share: float, **settings: Any) -> float:
    """GiB that hold a part of what a whole model takes."""
    rates = settings.pop("rates", HOST_RATES)
    plan = make_plan(
        path, vram_budget=0, rates=rates, settings=Settings(overhead_bytes=0, group=1), **settings
    )
    return (plan.min_bytes + share * (plan.full_bytes - plan.min_bytes)) / 2**30


def logits(path: Path, **options: Any) -> Any:
    with Llama(path, verbose=False, n_batch=16, **options) as llm:
        llm.eval(TOKENS)
        llm.eval([8])
        return llm.scores[-1].copy(), llm.plan


# ---- plans that are given


def test_a_plan_settles_what_is_not_said(relu_path: Path, bpe_path: Path, tmp_path: Path) -> None:
    plan = make_plan(relu_path, vram_budget=0, n_ctx=96, n_batch=32, type_k="f32")
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        with Llama(relu_path, plan=given, verbose=False) as llm:
            info = llm.session.info
            assert (info.n_ctx, info.n_batch, llm.n_ctx()) == (96, 32, 96)
    with Llama(relu_path, plan=plan, n_ctx=96, type_k="f32", vram_budget=0, verbose=False) as llm:
        assert llm.n_ctx() == 96
    cases: list[dict[str, Any]] = [
        {"n_ctx": 64},
        {"type_k": "f16"},
        {"n_batch": 64},
        {"n_seq": 3},
        {"sparsity": "dense"},
        {"vram_budget": 1},
        {"vram_budget": [0, 1]},
    ]
    for wrong in cases:
        with pytest.raises(ArgumentError, match="make it anew"):
            Llama(relu_path, plan=plan, verbose=False, **wrong)
    with pytest.raises(ArgumentError, match="another model"):
        Llama(bpe_path, plan=plan, verbose=False)


def test_a_plan_that_uses_a_device_is_followed(relu_path: Path, tmp_path: Path) -> None:
    gib = budget_of(relu_path, 0.5, n_batch=16)
    plan = make_plan(
        relu_path, vram_budget=gib, rates=HOST_RATES, settings=Settings(overhead_bytes=0, n_batch=16, group=1)
    )
    assert plan.uses_device
    plan.save(tmp_path / "p.json")
    want, _ = logits(relu_path, vram_budget=0)
    got, used = logits(relu_path, plan=tmp_path / "p.json", devices=["host"])
    assert abs(got - want).max() < 2e-3
    assert used is not None and used.to_json() == plan.to_json()
    with pytest.raises(DeviceError, match="no GPU can be used"):  # this machine has none
        Llama(relu_path, plan=plan, verbose=False)


# ---- budgets


def test_a_budget_makes_a_plan(relu_path: Path) -> None:
    want, none = logits(relu_path, vram_budget=0)
    assert none is None
    for share in (0.0, 0.3, 0.7, 1.0):
        gib = budget_of(relu_path, share, n_batch=16)
        got, plan = logits(relu_path, vram_budget=gib, devices="host")
        assert abs(got - want).max() < 2e-3
        assert plan is not None and plan.uses_device and plan.bytes.total <= gib * 2**30
        assert plan.statistics_source == plan.statistics and "fire" in plan.statistics
    assert plan.n_hot == plan.model.n_layer * plan.model.n_ff


def test_two_devices(relu_path: Path) -> None:
    want, _ = logits(relu_path, vram_budget=0)
    gib = budget_of(relu_path, 0.6, n_batch=16)
    got, plan = logits(relu_path, vram_budget=[gib, gib], devices=["host", "host"])
    assert {y.device for y in plan.layers} == {0, 1}
    assert abs(got - want).max() < 2e-3
    same, again = logits(relu_path, vram_budget=gib, devices=["host:0", "host:1"])  # one number is for each
    assert again.to_json() == plan.to_json() and (same == got).all()


def test_a_budget_that_is_too_small_says_what_fits(relu_path: Path) -> None:
    least = budget_of(relu_path, 0, n_batch=8)
    with pytest.raises(ArgumentError, match=r"too small.* are needed .*; n_ctx=\d+ with n_batch=8 would fit"):
        Llama(relu_path, vram_budget=least * 1.05, devices="host", verbose=False)
    with pytest.raises(ArgumentError, match="too small") as error:
        Llama(relu_path, vram_budget=1e-6, devices="host", verbose=False)
    assert "would fit" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vram_budget": -1}, "vram_budget is -1 GiB"),
        ({"vram_budget": float("nan")}, "vram_budget is nan"),
        ({"vram_budget": "8"}, "vram_budget is '8'"),
        ({"vram_budget": [8, None]}, "vram_budget is None"),
        ({"vram_budget": True}, "vram_budget is True"),
        ({"vram_budget": [1, 2], "devices": ["host"]}, "2 numbers, there are 1 devices"),
        ({"vram_budget": 1, "devices": ["host", "cuda:0"]}, "several kinds"),
        ({"vram_budget": 1, "devices": ["host:0", "host:0"]}, "twice"),
        ({"vram_budget": 1, "devices": "none"}, "vram_budget=0"),
        ({"vram_budget": 1, "devices": []}, "empty"),
        ({"vram_budget": 1, "devices": [1.5]}, "names or numbers"),
        ({"devices": "host"}, "needs a vram_budget"),
        ({"vram_budget": []}, "vram_budget is an empty list"),
        ({"vram_budget": b"1"}, "vram_budget is b'1'"),
        ({"vram_budget": 10**400}, "vram_budget is 4.6.*e.18 GiB"),
        ({"vram_budget": -(10**400)}, "vram_budget is -4.6.*e.18 GiB"),
        ({"devices": []}, "devices is an empty list; vram_budget=0"),
        ({"devices": 1.5}, "names or numbers"),
        ({"n_ctx": "AUTO", "vram_budget": 0}, "n_ctx is 'AUTO', it must be a number or \"auto\""),
    ],
)
def test_budgets_and_devices_that_cannot_be(relu_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Llama(relu_path, verbose=False, **options)


def test_layers_of_llama_cpp(relu_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    gib = budget_of(relu_path, 1, n_batch=16)
    for layers, device in ((0, None), (-1, None), (-1, "host")):
        options: dict[str, Any] = {} if device is None else {"devices": device, "vram_budget": gib}
        with Llama(relu_path, n_gpu_layers=layers, n_batch=16, verbose=False, **options) as llm:
            assert (llm.plan is not None) == (device is not None)
    assert not recwarn.list
    for wrong in (1.5, True, "all"):
        with pytest.raises(ArgumentError, match="n_gpu_layers is"):
            Llama(relu_path, n_gpu_layers=wrong, verbose=False)  # type: ignore[arg-type]


def test_layers_are_a_budget(relu_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of N layers the budget grows with N up to all of the model; one that is given counts instead."""
    options: dict[str, Any] = {"devices": "host", "n_batch": 16}
    budgets = []
    for n in (1, 2, 99):
        with Llama(relu_path, n_gpu_layers=n, **options) as llm:
            assert llm.plan is not None
            budgets.append(llm.plan.budget_bytes)
        told = capfd.readouterr().err
        assert told.count(f"n_gpu_layers={n}: a budget of ") == 1
    assert budgets == sorted(budgets) and budgets[0] < budgets[2]
    with Llama(relu_path, n_gpu_layers=99, **options) as llm:
        assert llm.plan is not None and all(layer.on_device for layer in llm.plan.layers)
        assert llm.plan.hot_share == 1
    gib = budget_of(relu_path, 0.5, n_batch=16)
    with Llama(relu_path, n_gpu_layers=1, vram_budget=gib, **options) as llm:
        assert llm.plan is not None and llm.plan.budget_bytes == int(gib * GIB)
        assert llm.plan.budget_bytes not in budgets


def test_more_layers_than_fit(
    relu_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gib = budget_of(relu_path, 0.5, n_batch=16)
    monkeypatch.setattr(devices, "_ANY_BYTES", int(gib * GIB))
    with Llama(relu_path, n_gpu_layers=99, devices="host", n_batch=16) as llm:
        assert llm.plan is not None and llm.plan.budget_bytes == int(gib * GIB)
    assert "are free, and what fits there is taken" in capfd.readouterr().err


def test_a_context_that_memory_does_not_hold(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"n_ctx=1000 is more than the 256 tokens"):
        Llama(relu_path, n_ctx=1000, verbose=False).close()
    monkeypatch.setattr(loader, "available_bytes", lambda: 1 << 20)
    message = r'K/V for n_ctx=16000000 takes \d+\.\d GiB, and 0\.0 are free; n_ctx="auto" would take 256'
    with pytest.raises(OutOfMemoryError, match=message):
        Llama(relu_path, n_ctx=16_000_000, verbose=False)
    with pytest.raises(OutOfMemoryError, match=r"n_ctx=64 and 16,000,000 tokens of all conversations"):
        Llama(relu_path, n_ctx=64, n_pool=16_000_000, verbose=False)


def test_a_model_is_freed_whose_context_memory_does_not_hold(
    relu_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Model] = []
    original = Loader.open

    def open_and_note(self: Loader, *bar: Any) -> Session:
        opened.append(self.model)
        return original(self, *bar)

    monkeypatch.setattr(Loader, "open", open_and_note)
    monkeypatch.setattr(loader, "available_bytes", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match="n_ctx=16000000") as said:
        Llama(relu_path, n_ctx=16_000_000, verbose=False)
    with pytest.raises(ClosedError):
        _ = opened[0].handle
    assert said.traceback  # which holds the Llama


@pytest.mark.skipif((machine.available_bytes() or 1 << 50) > 50 * GIB, reason="there is memory for it")
def test_the_engine_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.Loader, "_check_context", lambda self: None)
    with pytest.raises(OutOfMemoryError, match=r"K/V takes \d+\.\d+ GiB and a batch .*this process can have"):
        Llama.demo(n_ctx=16_000_000, verbose=False)


def test_the_plan_is_told(relu_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gib = budget_of(relu_path, 1, n_batch=16)
    Llama(relu_path, vram_budget=gib, devices="host", n_batch=16).close()
    out, err = capfd.readouterr()
    assert out == "" and "powerinfer: plan: " in err and "statistics: " in err and "\033" not in err
    Llama(relu_path, vram_budget=gib, devices="host", n_batch=16, verbose=False).close()
    assert capfd.readouterr() == ("", "")


# ---- GPUs that are there, as the driver would describe them

CARD = Gpu(
    name="Card",
    capability_major=9,
    capability_minor=0,
    n_sm=10,
    memory_bytes=16 << 30,
    free_bytes=12 << 30,
    memory_bytes_per_s=1e12,
    pcie_generation=4,
    pcie_lanes=16,
)


def driver(*gpus: Gpu, problem: str = "") -> GpuDriver:
    return GpuDriver(is_present=True, cuda_version=13000, version="580", problem=problem, gpus=gpus)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    devices.facts_of.cache_clear()
    monkeypatch.setattr(devices, "_warned", set())
    monkeypatch.setattr(machine, "gpus", lambda: driver(CARD, replace(CARD, free_bytes=1 << 20)))
    return monkeypatch


def fact(**more: Any) -> machine.DeviceFacts:
    values: dict[str, Any] = {
        "name": "Card",
        "memory_bytes": 16 << 30,
        "free_bytes": 11 << 30,
        "context_bytes": 1 << 29,
        "can_map": True,
        "no_mapping": "",
        "read_bytes_per_s": 1e12,
        "copy_bytes_per_s": 2e10,
        "zero_copy_bytes_per_s": 1.5e10,
    }
    return machine.DeviceFacts(**(values | more))


WHY = ".*(no CUDA backend|no NVIDIA driver was found)"  # as the package was built


def test_a_gpu_that_cannot_be_used_warns_once(relu_path: Path, cards: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=f"there is a GPU, but it is not used: {WHY}"):
        Llama(relu_path, verbose=False).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Llama(relu_path, verbose=False).close()
    with pytest.raises(DeviceError, match=f"no GPU can be used as asked: {WHY}.*vram_budget=0"):
        Llama(relu_path, vram_budget=8, verbose=False)


def test_no_gpu_is_silent(relu_path: Path, cards: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for problem in ("", "the driver has no device"):
            cards.setattr(machine, "gpus", lambda problem=problem: driver(problem=problem))
            with Llama(relu_path, verbose=False) as llm:
                assert llm.plan is None


def test_what_is_free_is_the_budget(cards: pytest.MonkeyPatch) -> None:
    cards.setattr(devices, "facts_of", lambda kind, index: fact())
    one = devices.choose_devices(None, ["cuda:0"])
    assert one is not None and one.names == ["cuda:0"] and not one.automatic
    assert one.budgets == ((12 << 30) - (256 << 20) - (512 << 20),)
    both = devices.choose_devices(None, None)
    assert both is not None and both.automatic and both.indices == (0, 1) and both.budgets[1] == 0
    assert devices.choose_devices([0, 0], None) is None and devices.choose_devices(0, [1]) is None
    with pytest.raises(ArgumentError, match=r"13.00 GiB.*cuda:0 \(Card\) 12.00 of 16.00 GiB are free"):
        devices.choose_devices(13, None)
    with pytest.raises(DeviceError, match="no cuda:2, the driver shows 2"):
        devices.choose_devices(1, [2])


def test_a_gpu_that_is_full(cards: pytest.MonkeyPatch) -> None:
    """Asked for, it is an error; else a warning, and the CPU."""
    cards.setattr(devices, "facts_of", lambda kind, index: fact())
    cards.setattr(machine, "gpus", lambda: driver(replace(CARD, free_bytes=700 << 20)))
    with pytest.raises(DeviceError, match=r"as asked: no more than 0.68 GiB .* are free.*vram_budget=0"):
        devices.choose_devices(None, "cuda")
    with pytest.warns(UserWarning, match=r"is not used: no more than 0.68 GiB"):
        assert devices.choose_devices(None, None) is None


def test_one_gpu_that_cannot_be_used_leaves_the_others(cards: pytest.MonkeyPatch) -> None:
    def facts(kind: str, index: int) -> machine.DeviceFacts:
        if index == 0:
            raise DeviceError("compute capability 3.5 is too old")
        return fact()

    cards.setattr(devices, "facts_of", facts)
    cards.setattr(machine, "gpus", lambda: driver(CARD, CARD, CARD))
    with pytest.warns(UserWarning, match=r"^cuda:0 \(Card\) is not used: .*too old"):
        found = devices.choose_devices(None, None)
    assert found is not None and found.indices == (1, 2) and len(found.budgets) == 2
    with pytest.raises(DeviceError, match="too old"):
        devices.choose_devices(1, [0])


def loader_of(model: Model, budgets: list[float], **options: Any) -> Loader:
    """Of stand-ins that nobody asked for."""
    found = devices.Devices(
        kind="host",
        indices=tuple(range(len(budgets))),
        budgets=tuple(int(gib * devices.GIB) for gib in budgets),
        automatic=True,
    )
    values: dict[str, Any] = {"n_ctx": 0, "n_batch": 16, "sparsity": "auto", "type_k": None, "type_v": None}
    return Loader(model, devices=found, **(values | options))


def test_a_small_gpu_is_not_in_the_way_of_a_large_one(relu_path: Path) -> None:
    enough = budget_of(relu_path, 1, n_batch=16)
    with Model(relu_path) as model:
        loader = loader_of(model, [1e-4, enough])
        with loader.open() as session:
            assert session.info.n_device_bytes > 0
        assert loader.devices is not None and loader.devices.indices == (1,)
        assert loader.plan is not None and loader.plan.uses_device


def test_a_gpu_that_is_too_small_for_anything(relu_path: Path, cards: pytest.MonkeyPatch) -> None:
    """The CPU computes, with the context that its own memory holds."""
    with Model(relu_path) as model:
        loader = loader_of(model, [1e-4, 1e-4], n_ctx="auto")
        with pytest.warns(UserWarning, match="is not used: a budget of .* is too small"), loader.open() as s:
            assert s.info.n_device_bytes == 0 and s.info.n_ctx == model.info.n_ctx_train
        assert loader.plan is None and loader.devices is None


def test_statistics_of_another_model(relu_path: Path, tmp_path: Path, cards: pytest.MonkeyPatch) -> None:
    """A plan that is asked for is refused; a model that needs none opens."""
    path = tmp_path / "m.gguf"
    path.write_bytes(relu_path.read_bytes())
    (tmp_path / "activation").mkdir()
    (tmp_path / "activation" / "activation_0.pt").write_bytes(b"no")
    enough = budget_of(relu_path, 1, n_batch=16)
    with pytest.raises(FormatError, match="activation"):
        Llama(path, vram_budget=enough, devices="host", verbose=False)
    with Model(path) as model:
        loader = loader_of(model, [enough])
        with pytest.warns(UserWarning, match="is not used: .*activation"):
            loader.open().close()
        assert loader.plan is None


def test_neurons_that_would_be_read_in_place(relu_path: Path) -> None:
    rates = replace(HOST_RATES, zero_copy_bytes_per_s=1e10)
    gib = budget_of(relu_path, 0.6, n_batch=16, rates=rates)
    settings = Settings(overhead_bytes=0, group=1, n_batch=16)
    plan = make_plan(relu_path, vram_budget=gib, rates=rates, settings=settings)
    assert any(len(layer.pcie) for layer in plan.layers)
    with Llama(relu_path, plan=plan, devices="host", n_batch=16, verbose=False) as llm:
        assert llm.info().session.n_zero_copy == sum(len(layer.pcie) for layer in plan.layers)


def test_rates_that_were_measured(cards: pytest.MonkeyPatch) -> None:
    from powerinfer.models.plan import rates

    cards.setattr(rates, "measure_cpu", lambda: (3e10, "given"))
    found = rates.device_rates([fact(), fact(read_bytes_per_s=5e11)])
    assert found.gpu_bytes_per_s == 5e11 * rates.CARD_READS and found.pcie_bytes_per_s == 2e10
    assert found.zero_copy_bytes_per_s == 0
    near = rates.device_rates([fact()], zero_copy=True)
    assert near.zero_copy_bytes_per_s == 1.5e10 * rates.ZERO_COPY_SHARE and "by zero-copy" in near.pcie
    refused = rates.device_rates([fact(can_map=False, no_mapping="limits of WSL")], zero_copy=True)
    assert refused.zero_copy_bytes_per_s == 0 and "cannot be mapped (limits of WSL)" in refused.pcie
    unknown = rates.device_rates([fact(read_bytes_per_s=0.0, copy_bytes_per_s=0.0)])
    assert unknown.gpu_bytes_per_s == 1e12 * rates.CARD_SHARE
    assert isinstance(unknown, Rates)


# ---- context and memory


def test_the_context_that_memory_holds(relu_path: Path) -> None:
    with Llama(relu_path, n_ctx="auto", verbose=False) as llm:
        assert llm.n_ctx() == llm.info().model.n_ctx_train  # type: ignore[union-attr]
        model = llm.session.model
        i = model.info
        position = i.n_layer * i.n_head_kv * 2 * 2 * i.n_embd_head
        long = replace(i, n_ctx_train=10_000)
        model.info = long
        for room, n_ctx in (
            (10_048 * position * 4, 10_000),  # whole blocks of 64
            (10_048 * position * 4 - 4, 5000),
            (1280 * position * 4, 1250),
            (1, 512),
        ):
            assert loader.auto_context(model, room, Settings()) == n_ctx
        assert loader.auto_context(model, 5056 * position * 8, Settings(type_k="f32", type_v="f32")) == 5000
        model.info = i


def test_a_file_larger_than_memory_warns(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_bytes", lambda: 256_000)
    with pytest.warns(UserWarning, match=r"0\.0 GiB of the weights of .* stay in RAM, and 0\.0 GiB are free"):
        Llama(relu_path, verbose=False).close()


# ---- progress while weights are brought over


def test_progress_of_a_session(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = budget_of(relu_path, 0.5, n_batch=16)
    settings = Settings(overhead_bytes=0, n_batch=16, group=1)
    plan = make_plan(relu_path, vram_budget=gib, rates=HOST_RATES, settings=settings)
    seen: list[tuple[int, int]] = []
    with Model(relu_path) as model:
        native = plan.native(model)
        options: dict[str, Any] = {"plan": native, "device": "host", "n_batch": 16}
        Session(model, progress=lambda *at: seen.append(at), **options).close()
        assert len(seen) > model.info.n_layer and seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0 and len({total for _, total in seen}) == 1

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Session(model, progress=interrupt, **options)

        def before_its_first_line(*_: object) -> int:  # where a signal that came meanwhile is seen
            raise KeyboardInterrupt

        monkeypatch.setattr("powerinfer._engine.session_open.Reporter._call", before_its_first_line)
        with pytest.raises(KeyboardInterrupt):
            Session(model, progress=interrupt, **options)
        Session(model, **options).close()
