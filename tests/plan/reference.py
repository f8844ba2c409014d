"""The plan's arithmetic a second time, from a file's tensors and keys alone, and the best plan by an exact
solver.

Sizes and times follow the description at the top of native/plan/plan.h and share no code with the engine.
The best plan is a mixed integer program: for each layer one of "on the CPU" or "on the device with k groups",
for the output matrix one of two places, within the budget. scipy's HiGHS solves it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from powerinfer._engine.file import ModelFile, TensorInfo

Floats = NDArray[np.float64]
FLOATS = ("F32", "F16", "BF16")
KV = {"f32": (4, 1), "f16": (2, 1), "q8_0": (34, 32)}  # bytes of so many values


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def row_bytes(type_name: str, n: int) -> int:
    per, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    assert n % per == 0
    return n // per * size


def matrix(type_name: str, rows: int, cols: int) -> int:
    """Bytes on the device."""
    return up(rows * up(row_bytes(type_name, cols), 16), 256) if rows else 0


def vector(n: int) -> int:
    return up(4 * n, 256)


@dataclass
class Asked:
    """What the plan is to be made for; everything spelled out."""

    n_ctx: int
    n_batch: int
    n_seq: int
    n_pool: int
    type_k: str
    type_v: str
    mode: str
    group: int
    overhead: int
    gpu: float
    cpu: float
    handover: float
    layer_us: float
    ffn_us: float
    share: float
    overshoot: float
    counts: NDArray[Any] | None = None
    n_tokens: int = 0
    predictor: str = "mlp"


@dataclass
class Layer:
    kv: int = 0
    attention: int = 0
    norms: int = 0
    predictor: int = 0
    read: float = 0.0  # attention, predictor, K and V: bytes per token
    predict: float = 0.0  # of these the predictor
    block: int = 1
    down_by_output: bool = False
    types: dict[str, str] = field(default_factory=dict)
    biased: bool = False


class Reference:
    """Sizes and times of every placement of one file's model."""

    def __init__(self, file: ModelFile, asked: Asked) -> None:
        self.asked = asked
        self.file_bytes = file.path.stat().st_size
        self.tensors = {tensor.name: tensor for tensor in file.tensors}
        meta = file.metadata
        self.arch = str(meta["general.architecture"])

        def key(name: str, default: int | None = None) -> int:
            value = meta.get(f"{self.arch}.{name}", default)
            assert value is not None
            return int(value)

        self.n_layer = key("block_count")
        self.n_embd = key("embedding_length")
        self.n_ff = key("feed_forward_length")
        self.n_head = key("attention.head_count")
        self.n_head_kv = key("attention.head_count_kv", self.n_head)
        self.head = key("attention.key_length", self.n_embd // self.n_head)
        self.n_vocab = self.tensors["token_embd.weight"].shape[0]
        self.n_rot = 0 if self.arch == "opt" else self.head
        act = meta.get("powerinfer.hidden_act")
        if act is None:
            act = "relu" if file.info.is_powerinfer or self.arch == "opt" else "silu"
        self.relu = act in ("relu", "drelu") or self.arch == "bamboo"
        self.layers = [self._layer(i) for i in range(self.n_layer)]
        out = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        self.head_bytes = matrix(out.type, *out.shape)
        self.head_norm = sum(
            vector(self.n_embd) for kind in ("weight", "bias") if f"output_norm.{kind}" in self.tensors
        )
        self.head_read = self._file_bytes(out)

    @staticmethod
    def _file_bytes(tensor: TensorInfo) -> int:
        return row_bytes(tensor.type, tensor.shape[1]) * tensor.shape[0]

    def _layer(self, i: int) -> Layer:
        a, y = self.asked, Layer()
        q, kv = self.n_head * self.head, self.n_head_kv * self.head
        for name, tensor in self.tensors.items():
            if not name.startswith(f"blk.{i}."):
                continue
            stem, kind = name[len(f"blk.{i}.") :].rsplit(".", 1)
            if stem == "attn_qkv":
                y.attention += sum(matrix(tensor.type, n, self.n_embd) for n in (q, kv, kv))
                y.read += self._file_bytes(tensor)
            elif stem in ("attn_q", "attn_k", "attn_v", "attn_output"):
                if kind == "weight":
                    y.attention += matrix(tensor.type, *tensor.shape)
                    y.read += self._file_bytes(tensor)
                else:
                    y.attention += vector(*tensor.shape)
            elif "norm" in stem or (stem in ("ffn_down", "ffn_down_t") and kind == "bias"):
                y.norms += vector(*tensor.shape)
            elif stem == "ffn_up" and kind == "bias":
                y.biased = True
            elif stem in ("fc1", "fc2"):
                if a.mode == "predicted" and a.predictor == "mlp":
                    y.predictor += matrix(tensor.type, *tensor.shape)
                    y.predict += self._file_bytes(tensor)
            elif stem in ("ffn_gate", "ffn_up", "ffn_down_t"):
                y.types[stem.replace("_t", "")] = tensor.type
            else:
                assert stem == "ffn_down", name
                y.types["ffn_down"] = tensor.type
                # Loading transposes floats of ReLU models; the others keep a row for each output.
                if not (self.relu and tensor.type in FLOATS):
                    y.down_by_output = True
                    y.block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]][0]
        if y.predictor:
            y.predictor += 256  # the second matrix lies there in two parts
        if a.mode == "predicted" and a.predictor == "sign":
            words = up(self.n_embd, 64) // 64
            y.predictor = up(self.n_ff * up(8 * words, 16), 256) + 256
            y.predict += self.n_ff * 8 * words
        position = 0.0
        for kind in (a.type_k, a.type_v):
            size, per = KV[kind]
            assert self.head % per == 0
            row = self.head // per * size
            y.kv += up(up(a.n_pool, 64) * self.n_head_kv * row, 256)
            position += self.n_head_kv * row
        y.read += a.n_ctx / 2 * position + y.predict
        return y

    # ---- bytes

    def fixed(self, i: int) -> int:
        y = self.layers[i]
        return y.kv + y.attention + y.norms + y.predictor

    def ffn(self, i: int, n_hot: int) -> int:
        y = self.layers[i]
        lists = up(4 * self.n_ff, 256)  # ids
        if y.down_by_output:
            lists += up(4 * (self.n_ff // y.block), 256)
        if y.biased:
            lists += vector(self.n_ff) + 256
        if n_hot == 0:
            return lists
        n = lists + matrix(y.types["ffn_up"], n_hot, self.n_embd)
        if "ffn_gate" in y.types:
            n += matrix(y.types["ffn_gate"], n_hot, self.n_embd)
        if y.down_by_output:
            n += matrix(y.types["ffn_down"], self.n_embd, n_hot)
        else:
            n += matrix(y.types["ffn_down"], n_hot, self.n_embd)
        return n

    @property
    def scratch(self) -> int:
        a = self.asked
        tokens, few = a.n_batch, min(a.n_batch, 8)
        tiled = up(tokens, 32) if tokens > few else tokens  # of inputs in F16
        q, kv = self.n_head * self.head, self.n_head_kv * self.head
        mlp = any(name.endswith("fc1.weight") for name in self.tensors) and a.predictor == "mlp"
        sign = 2 * (up(self.n_embd, 64) // 64) if a.predictor == "sign" else 0
        rank = max((t.shape[0] for n, t in self.tensors.items() if n.endswith("fc1.weight")), default=0)
        row = next((n for n in (64, 128) if n >= self.head), 256) // 2  # a prompt's q in F16
        prompts = max(min(tokens, 256) * row + min(tokens, 64) * 8 * (self.head + 4), tokens * row)
        prompts *= tokens > few
        parts = [
            tokens * n for n in (self.n_embd, self.n_embd, self.n_embd, q, q, kv, kv, rank if mlp else 0)
        ]
        parts += [
            tokens * (up(a.n_ctx, 64) // 64 + self.n_rot + 2) + 80,
            3 * self.n_layer + 16,
            self.n_layer,
            1,
            max(self.hidden * self.n_first, few * self.n_ff),
            (self.hidden + tiled * (max(q, self.n_embd) + 512) + (tiled - tokens) * self.n_ff) // 2 + 16,
            min(tiled, 256) * (self.n_embd + 256) // 2 + 513 if tokens > few else 0,
            tokens * (self.n_ff // 32 + 1 + sign) if a.mode == "predicted" else 0,
            max(384, few * (192 if few > 1 and self.n_embd >= 4096 else 384)) * self.n_embd,
            self.n_head * max((3 if tokens > few else 2) * few * (self.head + 2) * 32 + tokens, prompts),
            12 * (max(q, self.n_embd, self.n_ff) + self.n_embd + 512) if few > 1 else 0,
        ]
        place = sum(up(4 * part, 256) for part in parts[1:7])
        vocab = self.tensors["token_embd.weight"].shape[0]
        rows = 4 * vocab * min(a.n_seq, tokens, max((32 << 20) // vocab, 1))  # logits of next tokens
        parts.append(max(rows - place, 0) // 4)
        tables = (self.file_bytes + self.moved) // 512  # of pages that a GPU may read
        recorded = max(0, min(a.n_seq, tokens, 64) - 8) * self.n_layer * (56 << 10)
        return (
            up(tables, 256) + up(self._converted, 256) + sum(up(4 * part, 256) for part in parts) + recorded
        )

    @property
    def _converted(self) -> int:
        """The largest matrix that a prompt's products want in F16, or 64 MiB."""
        if self.asked.n_batch <= 8:
            return 0
        stems = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_down_t")
        largest = 0
        for name, tensor in self.tensors.items():
            parts = name.split(".")
            used = len(parts) == 4 and parts[2] in (*stems, "attn_qkv")
            if name in ("output.weight", "token_embd.weight"):
                used = name == "output.weight" or "output.weight" not in self.tensors
            if used and tensor.type != "F16" and parts[-1] == "weight":
                rows = self.n_head * self.head if "attn_qkv" in name else tensor.shape[0]
                largest = max(largest, 2 * rows * tensor.shape[1])
        return min(largest, 64 << 20)

    @property
    def n_first(self) -> int:
        """Matrices in front of the activation."""
        return 2 if "ffn_gate" in self.layers[0].types else 1

    @property
    def moved(self) -> int:
        """Bytes of down matrices that loading transposes."""
        found = [t for n, t in self.tensors.items() if n.endswith("ffn_down.weight")]
        return sum(self._file_bytes(t) for t in found if self.relu and t.type in FLOATS)

    @property
    def hidden(self) -> int:
        """Values of gate or up that at most n_batch tokens make at once: 64 MiB of floats, of whole 256
        neurons, at most 16384; all where down is stored by output."""
        n = self.asked.n_batch
        if any(y.down_by_output for y in self.layers):
            return n * self.n_ff
        largest = max(n * min(256, self.n_ff), (64 << 20) // 4 // self.n_first)
        return min(n * min(self.n_ff, 16384), largest)

    @property
    def staging(self) -> int:
        if self.asked.n_batch <= 8:
            return 0
        return 2 * min(32 << 20, max(self.ffn(i, self.n_ff) for i in range(self.n_layer)))

    # ---- times

    def active(self, i: int) -> Floats:
        """How often each neuron is computed."""
        a = self.asked
        if a.mode == "dense":
            return np.ones(self.n_ff)
        if a.counts is None:
            f = np.full(self.n_ff, a.share)
        else:
            f = np.minimum(1.0, (a.counts[i].astype(np.float64) + 0.5) / (a.n_tokens + 1))
        return np.minimum(1.0, f * a.overshoot) if a.mode == "predicted" else f

    def ffn_read(self, i: int, p: Floats) -> float:
        """Bytes that neurons, computed that often each, make either side read per token."""
        y, a, d = self.layers[i], self.asked, self.n_embd
        rows = {name: row_bytes(kind, d) for name, kind in y.types.items() if name != "ffn_down"}
        always = 0.0
        if y.down_by_output:
            down = 0.0
            always = d * row_bytes(y.types["ffn_down"], self.n_ff) / self.n_ff
        else:
            down = row_bytes(y.types["ffn_down"], d)
        n, active = len(p), float(p.sum())
        if a.mode == "dense":
            return n * (always + sum(rows.values()) + down)
        if a.mode == "predicted":
            return n * always + active * (sum(rows.values()) + down)
        first = rows.get("ffn_gate", rows["ffn_up"])
        return n * (always + first) + active * (sum(rows.values()) - first + down)

    def layer_us(self, i: int, on_device: bool, hot: NDArray[Any], handover: bool = True) -> float:
        """hot: bool [n_ff]."""
        a, p = self.asked, self.active(i)
        y = self.layers[i]
        gpu, cpu = a.gpu / 1e6, a.cpu / 1e6
        # Falcon's feed-forward does not wait for attention, which a device then computes beside the CPU.
        beside = y.read - y.predict if on_device and self.arch == "falcon" else 0.0
        time = a.layer_us + (y.read - beside) / gpu if on_device else y.read / cpu
        on_gpu = beside / gpu + (a.ffn_us + self.ffn_read(i, p[hot]) / gpu if hot.any() else 0.0)
        on_cpu = 0.0
        if not hot.all():
            on_cpu = self.ffn_read(i, p[~hot]) / cpu + (a.handover if handover else 0.0)
        return time + max(on_gpu, on_cpu)

    def head_us(self, on_device: bool, handover: bool = True) -> float:
        rate = (self.asked.gpu if on_device else self.asked.cpu) / 1e6
        return self.head_read / rate + (self.asked.handover if handover and not on_device else 0.0)

    # ---- the best plan

    def group(self, i: int) -> int:
        return min(self.n_ff, up(self.asked.group, self.layers[i].block))

    def hottest_first(self, i: int) -> NDArray[Any]:
        """Ids, the blocks that must stay together by their sums."""
        block = self.layers[i].block
        if self.asked.counts is None or self.asked.mode == "dense":
            return np.arange(self.n_ff)
        sums = self.asked.counts[i].astype(np.int64).reshape(-1, block).sum(axis=1)
        order = np.argsort(-sums, kind="stable")
        return (order[:, None] * block + np.arange(block)).reshape(-1)

    def options(self, i: int) -> tuple[list[int], list[float]]:
        """(bytes, us): on the CPU, then on the device with 0, 1, 2 ... groups."""
        hot, order = np.zeros(self.n_ff, bool), self.hottest_first(i)
        n_bytes, us = [0], [self.layer_us(i, False, hot, handover=False)]
        for k in range(math.ceil(self.n_ff / self.group(i)) + 1):
            n_hot = min(self.n_ff, k * self.group(i))
            hot[order[:n_hot]] = True
            n_bytes.append(self.fixed(i) + self.ffn(i, n_hot))
            us.append(self.layer_us(i, True, hot))
        return n_bytes, us

    def best(self, budget: int) -> float:
        """Least us per token within a budget."""
        return self.best_of([(range(self.n_layer + 1), budget)])

    def best_of_two(self, budgets: tuple[int, int]) -> float:
        """The same of two devices, the first of which has the first layers, but for the way between them."""
        n = self.n_layer + 1
        return min(
            self.best_of([(range(cut), budgets[0]), (range(cut, n), budgets[1])]) for cut in range(n + 1)
        )

    def best_of(self, devices: list[tuple[range, int]]) -> float:
        """Of devices with these layers (the head counts as the last) and budgets."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_matrix

        a, items = self.asked, [self.options(i) for i in range(self.n_layer)]
        items.append(
            ([0, self.head_bytes + self.head_norm], [self.head_us(False, handover=False), self.head_us(True)])
        )
        n = sum(len(us) for _, us in items)
        # After the options: a device is used, everything is on devices, for each item that it needs a
        # hand-over because it is on the CPU while a device is used, and for each device that it is used.
        used, full, waits = n, n + 1, n + 2
        own = waits + len(items)
        cost = np.zeros(own + len(devices))
        cost[waits:own] = a.handover
        rows: list[tuple[dict[int, float], float, float]] = []
        taken: list[dict[int, float]] = [{} for _ in devices]
        at = 0
        for k, (n_bytes, us) in enumerate(items):
            cost[at : at + len(us)] = us
            rows.append(({at + o: 1.0 for o in range(len(us))}, 1, 1))
            for d, (mine, _) in enumerate(devices):
                if k in mine:
                    taken[d].update({at + o: float(b) for o, b in enumerate(n_bytes)})
                    rows.append(({own + d: 1.0, at: 1.0}, 1, 2))
            rows.append(({used: 1.0, at: 1.0}, 1, 2))  # an item on the device uses it
            rows.append(({waits + k: 1.0, used: -1.0, at: -1.0}, -1, np.inf))
            rows.append(({full: 1.0, at + len(us) - 1: -1.0}, -np.inf, 0))
            at += len(us)
        rows.append(({full: 1.0, used: -1.0}, -np.inf, 0))
        for d, (_, budget) in enumerate(devices):
            taken[d][own + d] = float(a.overhead + self.scratch + self.staging)
            if len(devices) == 1:
                taken[d][full] = -float(self.staging)
            scale = float(max(budget, 1))
            rows.append(({i: b / scale for i, b in taken[d].items()}, -np.inf, budget / scale))
        table = lil_matrix((len(rows), len(cost)))
        for r, (coefficients, _, _) in enumerate(rows):
            for i, value in coefficients.items():
                table[r, i] = value
        answer = milp(
            cost,
            constraints=LinearConstraint(table.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
            integrality=np.ones(len(cost)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-6, "time_limit": 120},
        )
        assert answer.success, answer.message
        return float(answer.fun)
