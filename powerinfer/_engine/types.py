"""What models and sessions are asked with and answer: names of modes, sizes, counts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

Sparsity = Literal["auto", "predicted", "exact", "dense"]
Activation = Literal["auto", "relu", "drelu", "relu2", "silu", "gelu", "gelu_tanh"]
Predictor = Literal["auto", "none", "mlp", "sign"]
Progress = Callable[[int, int], None]

SPARSITY = {"auto": 0, "predicted": 1, "exact": 2, "dense": 3}
ACTIVATION = {
    "auto": -1,
    "relu": 0,
    "drelu": 1,
    "silu": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "clamped": 5,
    "relu2": 6,
    "xielu": 7,
}
PREDICTOR = {"auto": -1, "none": 0, "mlp": 1, "sign": 2}
GATING = {"none": 0, "softmax": 1, "sigmoid": 2, "softmax over the chosen": 3}
KV_TYPE = {"f32": 0, "f16": 1, "q8_0": 8}
DEVICE = {"none": 0, "host": 1, "cuda": 2}
MOMENTS = (
    *("qkv", "attention", "output", "predict", "marks", "hot", "merge"),  # on the device, these have ended
    *("input", "list", "answer"),  # on the CPU: it has the input, the list of marked neurons, sent their sum
)
"""Moments of a layer (Session.last_timeline)."""


N_BATCH = 512
"""Prompt tokens that are computed together, where nothing is said."""


class TokenKind(IntEnum):
    """What a token is that is fed (pi_token_kind)."""

    PROMPT = 0
    """One of a prompt, without logits."""
    GENERATED = 1
    """One that was generated or ends a prompt, with logits to choose what follows."""
    SCORED = 2
    """One of a prompt, with logits."""


def number_of(what: str, names: dict[str, int], value: str | int) -> int:
    """The engine's number of a name; ggml's numbers are accepted too."""
    number = (
        names.get(value.lower()) if isinstance(value, str) else value if value in names.values() else None
    )
    if number is None:
        raise ArgumentError(f"{what} is {value!r}, it must be one of {', '.join(map(repr, names))}")
    return number


def devices_of(device: str | Sequence[str]) -> tuple[int, list[int]]:
    """The engine's kind, and the indices of the devices that were named; none: those that come first.

    "cuda", "cuda:1" or a list of such names, which are of one kind; a name without a number is the first
    device that the list does not name.
    """
    names = [device] if isinstance(device, str) else list(device)
    if not names:
        raise ArgumentError('device is an empty list; "none" stands for the CPU alone')
    kinds, numbers = set(), []
    for name in names:
        kind, colon, number = name.partition(":")
        kinds.add(kind.lower())
        if colon and not (number.isascii() and number.isdigit() and len(number) < 6):
            raise ArgumentError(
                f'device is {name!r}, after the colon comes the number of a device, as in "cuda:1"'
            )
        numbers.append(int(number) if colon else -1)
    free = iter(sorted(set(range(len(names))) - set(numbers)))
    indices = [next(free) if number < 0 else number for number in numbers]
    if len(kinds) > 1:
        raise ArgumentError(f"devices of several kinds ({', '.join(sorted(kinds))}) cannot work together")
    if len(set(indices)) < len(indices):
        raise ArgumentError(f"a device is named twice: {', '.join(names)}")
    kind_number = number_of("device", DEVICE, kinds.pop())
    return kind_number, [] if isinstance(device, str) and ":" not in device else indices


def name_of(names: dict[str, int], number: int) -> str:
    """The name of the engine's number, or the number as text."""
    return next((name for name, value in names.items() if value == number), str(number))


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Shape and kind of a model."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    activation: str
    """Of the feed-forward: "relu", "drelu", "relu2", "silu", "gelu", "gelu_tanh", gpt-oss's "clamped" or
    Apertus's "xielu"."""
    activation_threshold: float
    """A gate at or below it counts as silent (FATReLU); 0 for plain ReLU."""
    is_gated: bool
    """The feed-forward has a gate matrix."""
    n_expert: int
    """Of a mixture of experts; 0: it is none."""
    n_expert_used: int
    """By one token."""
    n_layer_dense: int
    """Of a mixture: so many layers at the beginning have no experts."""
    expert_gating: str
    """How a mixture's routers weigh experts: "softmax", "sigmoid" or "softmax over the chosen"; "none"."""
    n_neurons: int
    """Of a layer that a token goes through: n_ff, or those of its experts together."""
    n_placed: int
    """That plans place of a layer: n_ff neurons, or n_expert experts of a mixture, whose layers without
    experts are placed as a whole."""
    predictor: str
    """Of active neurons: "none", "mlp" (fc1 and fc2 of the file) or "sign" (the signs of the weights)."""
    sparse_threshold: float
    """A neuron is predicted when its score is at least this; the lowest of all layers."""
    can_skip_down: bool
    """Rows of ffn_down that belong to silent neurons are not read."""
    n_layer_down_transposed: int
    """Layers whose ffn_down was transposed while loading."""
    n_weight_bytes: int
    n_transposed_bytes: int
    n_copied_bytes: int
    """Memory that copies of matrices take, once loaded: transposed ones, all with use_mmap=False, a predictor
    of another type."""
    n_sign_bytes: int
    """Memory that the sign predictor takes, once loaded."""
    n_parameters: int
    n_next: int
    """Layers of the file behind the others, which guess at further tokens (NextN, MTP)."""
    n_recurrent: int
    """Layers that know earlier tokens by a state alone, of which every sequence has one."""
    n_state_bytes: int
    """Of a sequence's."""
    rope: str
    """For example "norm, base 10000, linear x4"; "none"."""

    @property
    def has_predictor(self) -> bool:
        return self.predictor != "none"


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """Sizes and mode of a session."""

    n_ctx: int
    n_pool: int
    n_seq: int
    n_batch: int
    n_threads: int
    sparsity: str
    """Mode in use: "predicted", "exact" or "dense"."""
    sparse_threshold: float
    n_kv_bytes: int
    """In host memory."""
    n_work_bytes: int
    n_device_bytes: int
    """Of all devices: weights, K and V, buffers."""
    n_zero_copy: int
    """Neurons of all layers whose weights devices read in host memory."""
    n_unmapped_bytes: int
    """Of weights in host memory, which a device's driver refused to register: prompts copy them through a
    small buffer, which is slower."""
    n_blocks: int
    n_blocks_free: int
    """Blocks hold 64 positions; of layers that see all of them."""
    n_window: int
    """Positions of a sequence that layers with a window hold, some more at times; 0: all layers hold all. A
    sequence is cut back, or its beginning shared, no further than they reach."""
    n_mixed: int
    """Tokens of prompts, and next ones of other sequences, that devices compute in one program, at most; 0:
    none, because devices have not all of the model."""
    n_part: int
    """Tokens of a part of prompts whose layers can be computed a few at a time between others' steps, at
    most; 0: there is none, because one device must have all of the model for that."""


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """What the last chunk did in one layer. Counts are sums over the tokens that were computed sparsely."""

    n_tokens: int
    """Tokens of the chunk; on the CPU, in the last layer, from the first one on whose logits are wanted."""
    n_sparse: int
    """Of those, computed by the row-sparse operator."""
    n_predicted: int
    """(neuron, token) pairs that were to be looked at; all of them in exact and dense mode."""
    n_computed: int
    """Pairs whose up row (down row, where there is no gate) was used."""
    n_active: int
    """Pairs with a product that is not zero."""
    n_active_device: int
    """Of those, whose neuron lies on a device."""
    n_rows: int
    """Weight rows that the feed-forward read."""
    ffn_bytes: int
    """Bytes of weights that the feed-forward read, its predictor included."""
    bytes: int
    """Bytes that the layer read: weights, K and V."""
    ffn_us: float
    """Of a layer on a device: the CPU's part; 0 if it has none."""
    layer_us: float
    """Of a layer on a device: since the CPU's last hand-over."""
    n_foreseen: int
    """In predicted mode (neuron, token) pairs, of a mixture (token, expert) pairs of the CPU's share that a
    device had named early, mostly by a guess a layer ahead, so that their rows were fetched."""
    n_routes: int
    """Of a mixture: (token, expert) pairs of the chunk, all that were chosen."""
    n_routes_device: int
    """Of those, whose expert had a place on a device."""
    n_routes_streamed: int
    """Of a prompt's, whose expert was brought to the device for this chunk."""
    n_zero_copy: int
    """Of a mixture: uses of an expert that the device read in host memory."""
    n_copies: int
    """Experts that began to move to a place after it."""
    copied_bytes: int

    @property
    def n_routes_cpu(self) -> int:
        """Of a mixture: (token, expert) pairs that the CPU computed."""
        return self.n_routes - self.n_routes_device - self.n_routes_streamed - self.n_zero_copy

    @property
    def hit_rate(self) -> float:
        """Share of the active neurons that lie on a device, of a mixture that of the chosen experts; 0 where
        there was none."""
        if self.n_routes:
            return self.n_routes_device / self.n_routes
        return self.n_active_device / self.n_active if self.n_active else 0.0


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """Where the experts of one layer are, and how often they were used and found there since the session was
    opened."""

    resident: npt.NDArray[np.bool_]
    """[n_expert] Those that are on the device."""
    uses: npt.NDArray[np.uint64]
    """[n_expert] How many tokens used each."""
    n_places: int
    """Experts that the device has room for."""
    n_routes: int
    """Uses of an expert by a token."""
    n_resident: int
    """Of those, whose expert was on the device."""
    n_streamed: int
    """Of a prompt's, whose expert was brought there for its chunk."""
    n_zero_copy: int
    """Of the others, whose expert the device read in host memory, while the CPU computed the rest."""
    n_copies: int
    """Experts that moved to the device."""
    copied_bytes: int

    @property
    def n_cpu(self) -> int:
        """Uses that the CPU computed."""
        return self.n_routes - self.n_resident - self.n_streamed - self.n_zero_copy

    @property
    def hit_rate(self) -> float:
        """Share of the uses whose expert was on the device; 0 where there was none."""
        return self.n_resident / self.n_routes if self.n_routes else 0.0


@dataclass(frozen=True, kw_only=True)
class StepTotal:
    """The last feed as a whole, embedding and output head included."""

    bytes: int
    us: float


class Tap:
    """What tapped layers read and made in the last feed; dictionaries from the layer to float32 arrays.

    The arrays are the same memory for every feed: copy what is to stay.
    """

    def __init__(self) -> None:
        self.input: dict[int, npt.NDArray[np.float32]] = {}
        """[n_tokens, n_embd] what an MLP predictor reads: the residual before ffn_norm; Falcon: the block's
        input."""
        self.norm: dict[int, npt.NDArray[np.float32]] = {}
        """[n_tokens, n_embd] the normed input of gate and up, which a sign predictor reads."""
        self.hidden: dict[int, npt.NDArray[np.float32]] = {}
        """[n_tokens, n_ff] act(gate) * up, after the mask in predicted mode; 0 where a neuron is silent."""
        self.score: dict[int, npt.NDArray[np.float32]] = {}
        """[n_tokens, n_ff] of the predictor, in any mode."""

    def show(self, arrays: dict[str, dict[int, npt.NDArray[np.float32]]], n: int) -> None:
        for name, of_layer in arrays.items():
            setattr(self, name, {layer: array[:n] for layer, array in of_layer.items()})
