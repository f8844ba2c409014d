"""Plans in Python: what is found and used, saving and checking, the original's split files."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FileError, FormatError, PowerInferError
from powerinfer._engine.session import Model
from powerinfer.models import plan as plans
from powerinfer.models.convert.torch_file import write_torch
from powerinfer.models.plan import Plan, Rates, Settings
from tests.plan.drafts import power_law, write_model

N_LAYER, N_FF = 4, 512
RATES = Rates(gpu_bytes_per_s=8e9, cpu_bytes_per_s=1e9, handover_us=5, layer_us=0, ffn_us=0)
SMALL = Settings(n_ctx=64, n_batch=16, overhead_bytes=0)


def counts(seed: int = 0) -> Any:
    return power_law(np.random.default_rng(seed), N_LAYER, N_FF, 1000)


def write(folder: Path, name: str = "m.gguf", **more: Any) -> Path:
    return write_model(folder / name, n_layer=N_LAYER, n_ff=N_FF, ranks=[32] * N_LAYER, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, counts=counts())


def some(model: Model | Path, share: float = 0.6, **more: Any) -> Plan:
    """A plan that has a part of the model on the device."""
    whole = plans.make_plan(model, vram_budget=1, settings=SMALL, rates=RATES, **more)
    n_bytes = whole.min_bytes + share * (whole.full_bytes - whole.min_bytes)
    return plans.make_plan(model, vram_budget=n_bytes / 2**30, settings=SMALL, rates=RATES, **more)


def test_a_plan_is_made_from_a_path_or_a_model(path: Path) -> None:
    with Model(path, load=False) as closed, Model(path) as loaded:
        texts = {some(model).to_json() for model in (path, closed, loaded)}
    assert len(texts) == 1
    plan = some(path)
    assert plan.uses_device and 0 < plan.hot_share < plan.carried < 1
    assert plan.bytes.total + plan.free_bytes == plan.budget_bytes
    assert plan.expected.bound_us <= plan.expected.total_us
    assert plan.expected.tokens_per_s == pytest.approx(1e6 / sum(y.us for y in plan.layers), rel=0.5)


def test_hot_neurons_are_the_hottest(path: Path) -> None:
    for i, layer in enumerate(some(path).layers):
        c = counts()[i].astype(np.int64)
        cold = np.setdiff1d(np.arange(N_FF), layer.hot)
        if len(layer.hot) and len(cold):
            assert c[layer.hot].min() >= c[cold].max()


def test_no_budget_is_the_cpu(path: Path) -> None:
    plan = plans.make_plan(path, vram_budget=0, rates=RATES)
    assert not plan.uses_device and plan.bytes.total == 0 and plan.n_hot == 0
    for bad in (-1, math.nan, math.inf, 1e30):
        with pytest.raises(ArgumentError, match=r"vram_budget is .*, it must be 0 to 1048576"):
            plans.make_plan(path, vram_budget=bad, rates=RATES)
    for little in (1e-6, 1e-12):  # less than a byte is not nothing
        with pytest.raises(ArgumentError, match="too small"):
            plans.make_plan(path, vram_budget=little, rates=RATES)


def test_a_longer_batch_is_chosen_where_it_costs_little(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.models.plan.engine.N_BATCH", 16)
    monkeypatch.setattr("powerinfer.models.plan.plan._LONGER_BATCHES", (64, 32))
    whole = plans.make_plan(path, vram_budget=1, settings=replace(SMALL, n_batch=64), rates=RATES)
    chosen = set()
    for share in np.linspace(0.02, 1.1, 25):
        gib = float(whole.min_bytes + share * (whole.full_bytes - whole.min_bytes)) / 2**30

        def made(n_batch: int, gib: float = gib) -> Plan:
            return plans.make_plan(
                path, vram_budget=gib, settings=replace(SMALL, n_batch=n_batch), rates=RATES
            )

        plan, base = made(0), made(16)
        cheap = [n for n in (64, 32) if made(n).expected.total_us <= 1.05 * base.expected.total_us]
        want = cheap[0] if cheap and base.expected.stream_bytes else 16
        assert plan.to_json() == made(want).to_json()
        chosen.add(plan.settings.n_batch)
    assert chosen == {16, 32}  # 64 would cost more than 5 % wherever anything streams
    assert plan.settings.n_batch == 16  # all is there, and nothing streams
    monkeypatch.setattr("powerinfer.models.plan.plan._LOST", 10)
    middle = float(whole.min_bytes + whole.full_bytes) / 2 / 2**30
    for n_ctx, want in ((64, 64), (40, 32), (20, 16)):  # never more than the context
        asked = replace(SMALL, n_ctx=n_ctx, n_batch=0)
        assert plans.make_plan(path, vram_budget=middle, settings=asked, rates=RATES).settings.n_batch == want


# ---- statistics


def test_statistics_in_their_order(tmp_path: Path) -> None:
    silent = write(tmp_path)
    with Model(silent, load=False) as model:
        assert plans.find_statistics(model).kind == "heuristic"
        hot = tuple(np.arange(i, 128 + i, dtype=np.int32) for i in range(N_LAYER))
        plans.write_gpuidx(plans.split_path(silent), plans.Split(hot=hot, vram_bytes=1), N_FF)
        split = plans.find_statistics(model)
        assert split.kind == "split" and split.counts is not None
        assert (split.counts[1][hot[1]] > split.counts[1][400]).all()
        shares = split.counts.astype(float) / split.n_tokens
        assert shares.mean() == pytest.approx(0.15, rel=1e-3)
        assert shares[2][hot[2]].sum() / shares[2].sum() == pytest.approx(0.8, rel=1e-3)

        folder = tmp_path / "activation"
        folder.mkdir()
        for i, layer in enumerate(counts(1)):
            write_torch(folder / f"activation_{i}.pt", layer.astype(np.int64))
        found = plans.find_statistics(model)
        assert found.kind == "folder" and found.counts is not None
        np.testing.assert_array_equal(found.counts, counts(1))
        (folder / "activation_2.pt").unlink()
        with pytest.raises(FormatError, match="activation_2"):
            plans.find_statistics(model)
    with Model(write(tmp_path, "with.gguf", counts=counts(2)), load=False) as model:
        found = plans.find_statistics(model)
        assert found.kind == "file" and found.n_tokens == 1000
        np.testing.assert_array_equal(found.counts, counts(2))


def test_large_counts_keep_their_proportion() -> None:
    big = np.array([[2**40 - 1, 2**39, 0]], np.uint64)
    found = plans.given(big, 2**40, "here")
    assert found.counts is not None and found.counts.dtype == np.uint32
    np.testing.assert_allclose(found.counts / found.n_tokens, [[1, 0.5, 0]], rtol=1e-8)


@pytest.mark.parametrize(
    ("numbers", "n_tokens"),
    [
        ([[1, -1]], 9),
        (np.array([[1, -1]]), 9),
        (np.array([[1.0, math.nan]]), 9),
        (np.array([[1.0, math.inf]]), 9),
        ([], 9),
        ([1, 2], 9),
        ([["a"]], 9),
        ([[1, 2]], 0),
        ([[1, 2]], -1),
    ],
)
def test_counts_that_cannot_be(numbers: Any, n_tokens: int) -> None:
    with pytest.raises(ArgumentError, match="counts"):
        plans.given(numbers, n_tokens, "here")


def test_dense_models_need_none(tmp_path: Path) -> None:
    path = write_model(tmp_path / "silu.gguf", n_layer=N_LAYER, n_ff=N_FF, type_of=lambda n: "Q8_0")
    plan = some(path)
    assert plan.statistics_kind == "dense" and plan.settings.sparsity == "dense" and plan.n_hot > 0
    assert plan.expected.active_hot + plan.expected.active_cold == N_LAYER * N_FF
    for layer in plan.layers:
        np.testing.assert_array_equal(layer.hot, np.arange(len(layer.hot)))


# ---- saving and checking


def test_saved_and_loaded(path: Path, tmp_path: Path) -> None:
    with Model(path, load=False) as model:
        plan = some(model)
        plan.save(tmp_path / "plan.json")
        again = plans.load_plan(tmp_path / "plan.json", model)
        assert again.to_json() == plan.to_json()
        for one, other in zip(again.layers, plan.layers, strict=True):
            np.testing.assert_array_equal(one.hot, other.hot)
        assert plans.load_plan(plan, model, n_ctx=64, vram_budget=None, sparsity="auto") is plan
    assert list(tmp_path.glob(".*partial*")) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"n_ctx": 65}, "n_ctx 64, not 65"),
        ({"vram_budget": 3}, "budget_bytes 0.0. GiB, not 3.00"),
        ({"n_batch": 8}, "n_batch 16, not 8"),
        ({"type_k": "q8_0"}, "type_k f16, not q8_0"),
        ({"sparsity": "exact"}, "sparsity predicted, not exact"),
    ],
)
def test_a_plan_for_something_else(path: Path, asked: dict[str, Any], says: str) -> None:
    with Model(path, load=False) as model, pytest.raises(ArgumentError, match=says):
        plans.load_plan(some(model), model, **asked)


def test_a_plan_for_another_model(path: Path, tmp_path: Path) -> None:
    plan = some(path)
    others = {
        "n_ff": write_model(tmp_path / "ff.gguf", n_layer=N_LAYER, n_ff=256, ranks=[32] * N_LAYER),
        "statistics": write(tmp_path, "counts.gguf", counts=counts(5)),
        "tensors": write(tmp_path, "types.gguf", counts=counts(), type_of=lambda n: "BF16"),
        "architecture": write_model(
            tmp_path / "f.gguf", "falcon", n_layer=N_LAYER, n_ff=N_FF, ranks=[32] * N_LAYER
        ),
        "predictor": path,
    }
    for says, other in others.items():
        predictor: Any = "sign" if says == "predictor" else "auto"
        with Model(other, load=False, predictor=predictor) as model, pytest.raises(ArgumentError, match=says):
            plan.check(model)


def test_a_plan_for_other_weights(path: Path, tmp_path: Path) -> None:
    """Two models of one shape, without statistics in their files."""
    plain = write(tmp_path, "plain.gguf")
    plan = some(plain)
    data = bytearray(plain.read_bytes())
    data[-(1 << 16) :] = bytes([1]) * (1 << 16)  # among the last tensors
    (tmp_path / "tuned.gguf").write_bytes(data)
    with Model(plain, load=False) as same:
        plan.check(same)
        with pytest.raises(ArgumentError, match="no setting 'n_contexts'"):
            plan.check(same, n_contexts=1)
    with (
        Model(tmp_path / "tuned.gguf", load=False) as tuned,
        pytest.raises(ArgumentError, match="differs in weights"),
    ):
        plan.check(tuned)


def test_a_plan_that_lies(path: Path) -> None:
    with Model(path, load=False) as model:
        table = json.loads(some(model).to_json())
        table["bytes"]["kv"] -= 256
        with pytest.raises(ArgumentError, match="kv takes"):
            plans.from_json(json.dumps(table)).check(model)
        table["bytes"]["kv"] += 256
        table["layers"][0]["hot"] = table["layers"][1]["hot"] = _all_hot()
        with pytest.raises(ArgumentError):
            plans.from_json(json.dumps(table)).check(model)


def _all_hot() -> str:
    import base64

    return base64.b64encode(b"\xff" * (N_FF // 8)).decode()


NONSENSE = [None, True, -1, 0, 1 << 70, 1e300, -1e-3, "", "x" * 100, "AAAA", [], {}, [[]], {"a": 1}]


def test_plans_of_nonsense(path: Path) -> None:
    """Every value replaced by every kind of wrong one: an error of this package, or a plan that holds."""
    with Model(path, load=False) as model:
        good = some(model).to_json()
        places = list(_places(json.loads(good)))
        rng = random.Random(1)
        for place in places:
            for value in rng.sample(NONSENSE, 5):
                table = json.loads(good)
                target = table
                for step in place[:-1]:
                    target = target[step]
                if target[place[-1]] == value:
                    continue
                target[place[-1]] = value
                try:
                    plans.from_json(json.dumps(table)).check(model)
                except PowerInferError:
                    continue
                # What is only told (times, words) may be any number or word.
                assert place[0] in (
                    "rates",
                    "expected",
                    "statistics",
                    "layers",
                    "min_bytes",
                    "full_bytes",
                    "settings",
                ), place
        for key in json.loads(good):
            table = json.loads(good)
            del table[key]
            with pytest.raises(FormatError):
                plans.from_json(json.dumps(table))


def _places(table: Any, at: tuple[Any, ...] = ()) -> Any:
    steps = table.items() if isinstance(table, dict) else enumerate(table)
    for step, value in steps:
        if isinstance(value, (dict, list)):
            yield from _places(value, (*at, step))
        yield (*at, step)


def test_a_plan_with_an_older_name_of_a_rate(path: Path) -> None:
    with Model(path) as model:
        text = some(model).to_json()
        older = text.replace("zero_copy_bytes_per_s", "in_place_bytes_per_s")
        assert older != text and plans.from_json(older).to_json() == text


@pytest.mark.parametrize("device", [1, 1 << 31, 1 << 61])
def test_devices_that_a_plan_does_not_have(path: Path, device: int) -> None:
    with Model(path, load=False) as model:
        good = json.loads(some(model).to_json())
    layer = next(layer for layer in good["layers"] if layer["on_device"])
    for place, key in ((layer, "device"), (good, "head_device")):
        if place[key] < 0:
            continue
        before, place[key] = place[key], device
        with pytest.raises(FormatError, match=f"is no plan: something lies on device {device} of 1"):
            plans.from_json(json.dumps(good))
        place[key] = before
    plans.from_json(json.dumps(good))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '{"format": "powerinfer.plan", "version": NaN}',
        "[" * 100_000,
        '"' + "x" * 100,
        "{}",
    ],
)
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(FormatError, match="is no plan"):
        plans.from_json(text, "it")


def test_files_that_are_no_plans(path: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    with Model(path, load=False) as model:
        for name, kind in (("binary", FormatError), ("missing", FileError), (".", FileError)):
            with pytest.raises(kind):
                plans.load_plan(tmp_path / name, model)
        with pytest.raises(FileError, match="is no file"):  # it has no end
            plans.load_plan("/dev/zero", model)


# ---- the original's split files


def parse_gpuidx(data: bytes) -> tuple[dict[str, Any], list[tuple[str, np.ndarray[Any, Any]]]]:
    """A reader of the original's layout that shares nothing with the one under test."""
    import io

    f = io.BytesIO(data)

    def number(code: str) -> Any:
        return struct.unpack("<" + code, f.read(struct.calcsize(code)))[0]

    def text() -> str:
        return f.read(number("Q")).decode()

    assert f.read(4) == b"PWRI" and number("I") == 3
    n_tensors, n_keys = number("Q"), number("Q")
    keys = {}
    for _ in range(n_keys):
        name, kind = text(), number("I")
        keys[name] = (kind, text() if kind == 8 else number({4: "I", 10: "Q"}[kind]))
    infos = []
    for _ in range(n_tensors):
        name, dims = text(), number("I")
        assert dims == 1
        infos.append((name, number("Q"), number("I"), number("Q")))
    start = -(-f.tell() // 32) * 32
    tensors = []
    for name, n, kind, offset in infos:
        assert kind == 26 and offset % 32 == 0
        f.seek(start + offset)
        tensors.append((name, np.frombuffer(f.read(4 * n), "<i4")))
    assert len(data) % 32 == 0
    return keys, tensors


def test_a_split_as_the_original_writes_it(path: Path, tmp_path: Path) -> None:
    with Model(path, load=False) as model:
        plan = some(model, 0.9)
        assert all(layer.on_device for layer in plan.layers)
        plans.export_gpuidx(plan, tmp_path / "s.gpuidx")
        keys, tensors = parse_gpuidx((tmp_path / "s.gpuidx").read_bytes())
        assert list(keys) == ["general.architecture", "generic.gpu_index.block_count", "split.vram_capacity"]
        assert keys["general.architecture"] == (8, "generic.gpu_index")
        assert keys["generic.gpu_index.block_count"] == (4, N_LAYER)
        assert keys["split.vram_capacity"] == (10, plan.bytes.ffn)
        assert [name for name, _ in tensors] == [
            f"blk.{i}.gpu_{kind}" for i in range(N_LAYER) for kind in ("idx", "bucket")
        ]
        for i, layer in enumerate(plan.layers):
            flags, bucket = tensors[2 * i][1], tensors[2 * i + 1][1]
            np.testing.assert_array_equal(bucket, layer.hot)
            np.testing.assert_array_equal(np.flatnonzero(flags), layer.hot)
            assert len(flags) == N_FF and set(np.unique(flags)) <= {0, 1}

        again = plans.import_gpuidx(tmp_path / "s.gpuidx", model, settings=SMALL, rates=RATES)
        assert again.budget_bytes == again.bytes.total == plan.bytes.total
        assert again.expected.total_us == pytest.approx(plan.expected.total_us)
        again.check(model)
        with pytest.raises(ArgumentError, match="the budget is"):
            plans.import_gpuidx(tmp_path / "s.gpuidx", model, vram_budget=1e-4, settings=SMALL, rates=RATES)
        cpu = plans.make_plan(model, vram_budget=0, rates=RATES)
        with pytest.raises(ArgumentError, match="layer 0 on the CPU"):
            plans.export_gpuidx(cpu, tmp_path / "no.gpuidx")
        assert not (tmp_path / "no.gpuidx").exists()


def test_a_split_with_layers_without_hot_neurons(tmp_path: Path) -> None:
    hot = (np.zeros(0, np.int32), np.array([3], np.int32), np.arange(64, dtype=np.int32))
    plans.write_gpuidx(tmp_path / "s", plans.Split(hot=hot, vram_bytes=2**40), 64)
    split = plans.read_gpuidx(tmp_path / "s", 3, 64)
    assert split.vram_bytes == 2**40
    for one, other in zip(split.hot, hot, strict=True):
        np.testing.assert_array_equal(one, other)
    for ids in ([64], [-1], [2, 2], [3, 2]):
        with pytest.raises(ArgumentError):
            plans.write_gpuidx(tmp_path / "t", plans.Split(hot=(np.array(ids, np.int32),), vram_bytes=0), 64)
    assert not (tmp_path / "t").exists()


def test_splits_that_are_none(tmp_path: Path) -> None:
    """Every byte changed and every length: an error, or a split that is one."""
    hot = (np.array([1, 5], np.int32), np.zeros(0, np.int32))
    plans.write_gpuidx(tmp_path / "s", plans.Split(hot=hot, vram_bytes=7), 8)
    good = (tmp_path / "s").read_bytes()
    bad = tmp_path / "bad"
    rng = random.Random(0)
    for i in range(len(good)):
        for value in (good[i] ^ 1 << rng.randrange(8), 0xFF):
            bad.write_bytes(good[:i] + bytes([value]) + good[i + 1 :])
            try:
                split = plans.read_gpuidx(bad, 2, 8)
            except FormatError:
                continue
            assert all(((ids >= 0) & (ids < 8)).all() and (np.diff(ids) > 0).all() for ids in split.hot)
    for n in range(len(good) - 64):
        bad.write_bytes(good[:n])
        with pytest.raises(FormatError):
            plans.read_gpuidx(bad, 2, 8)
    for shape in ((3, 8), (2, 9)):
        with pytest.raises(FormatError, match="the model has"):
            plans.read_gpuidx(tmp_path / "s", *shape)
    for name, kind in (("none", FileError), (".", FileError)):
        with pytest.raises(kind):
            plans.read_gpuidx(tmp_path / name, 2, 8)


# ---- rates


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("4090", "RTX 4090"),
        ("RTX 3060 12GB", "RTX 3060"),
        ("3060Ti", "RTX 3060 Ti"),
        ("rtx-4070-ti-super", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_cards_by_name(name: str, card: str) -> None:
    assert plans.find_card(name).name == card


@pytest.mark.parametrize("name", ["Voodoo 2", "RTX 4090 Laptop GPU", "RTX 2080 SUPER", "RTX 4090 D", ""])
def test_cards_that_are_others(name: str) -> None:
    """A laptop's 4090 has the number of the desktop's, and half its rate."""
    with pytest.raises(ArgumentError, match="no card is called"):
        plans.find_card(name)


def test_rates_as_given() -> None:
    rates = plans.find_rates(gpu="3090", cpu_gbps=30)
    assert rates.cpu_bytes_per_s == 30e9 and "as given" in rates.cpu
    assert rates.gpu_bytes_per_s == pytest.approx(936e9 * 0.85) and "published, times 0.85" in rates.gpu
    rates = plans.find_rates(gpu_gbps=500, cpu_gbps=1, pcie_gbps=2, handover_us=9)
    assert (rates.gpu_bytes_per_s, rates.pcie_bytes_per_s, rates.handover_us) == (500e9, 2e9, 9)
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="--gpu-gbps"):
            plans.find_rates(gpu_gbps=bad, cpu_gbps=1)


def test_the_cpu_is_measured() -> None:
    rates = plans.find_rates(gpu="4090")
    assert rates.cpu_bytes_per_s > 1e8 and "measured here" in rates.cpu


def test_faster_parts_make_faster_plans(path: Path) -> None:
    with Model(path, load=False) as model:
        slow = some(model)
        for name in ("gpu_bytes_per_s", "cpu_bytes_per_s"):
            fast = dataclasses.replace(RATES, **{name: 4 * getattr(RATES, name)})
            plan = plans.make_plan(model, vram_budget=slow.budget_bytes / 2**30, settings=SMALL, rates=fast)
            assert plan.expected.total_us < slow.expected.total_us


@pytest.mark.parametrize("n_vocab", [288, 8192])
def test_the_least_budget(tmp_path: Path, n_vocab: int) -> None:
    """It puts something on the device, the output matrix or a layer with its lists; a byte less does not."""
    path = write_model(tmp_path / "m.gguf", n_vocab=n_vocab)
    rates = Rates(gpu_bytes_per_s=1e12, cpu_bytes_per_s=1e9, handover_us=0, layer_us=0, ffn_us=0)
    settings = Settings(n_ctx=64, n_batch=8, overhead_bytes=0, group=1)
    least = plans.make_plan(path, vram_budget=0, settings=settings, rates=rates).min_bytes
    assert plans.make_plan(path, vram_budget=least / 2**30, settings=settings, rates=rates).uses_device
    with pytest.raises(ArgumentError, match="too small"):
        plans.make_plan(path, vram_budget=(least - 1) / 2**30, settings=settings, rates=rates)
