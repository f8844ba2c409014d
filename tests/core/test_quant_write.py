"""Writing the formats that search for the least error, against ggml's own quantisers.

GGML holds what ggml's reference functions (quantize_row_*_ref, and quantize_iq4_nl without an importance
matrix) of llama-cpp-python 0.3.36 leave of the weights that `draw` makes, as the root mean square of the
error over that of the weights: plain, and weighted with what ggml itself minimises (`importance`). What our
bytes mean is read by the gguf package.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tests.core import capi

Floats = npt.NDArray[np.float32]

KINDS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL)
DRAWN = (
    "normal",
    "student",
    "heavy",
    "uniform",
    "sparse",
    "positive",
    "shifted",
    "constant",
    "mixed",
    "small",
)
TRAINED = ("embedding", "query", "up", "down")

GGML: dict[tuple[str, str], tuple[float, float]] = {
    ("Q2_K", "normal"): (0.29671, 0.1924),
    ("Q2_K", "student"): (0.36643, 0.15325),
    ("Q2_K", "heavy"): (0.30211, 0.037188),
    ("Q2_K", "uniform"): (0.23145, 0.17291),
    ("Q2_K", "sparse"): (0.4451, 0.06042),
    ("Q2_K", "positive"): (0.18741, 0.12772),
    ("Q2_K", "shifted"): (0.1326, 0.11697),
    ("Q2_K", "constant"): (0.00022157, 0.00022916),
    ("Q2_K", "mixed"): (0.28238, 0.17312),
    ("Q2_K", "small"): (0.29685, 0.19318),
    ("Q2_K", "embedding"): (0.30384, 0.18808),
    ("Q2_K", "query"): (0.29663, 0.18701),
    ("Q2_K", "up"): (0.30072, 0.19068),
    ("Q2_K", "down"): (0.30197, 0.19158),
    ("Q3_K", "normal"): (0.14977, 0.08146),
    ("Q3_K", "student"): (0.19009, 0.041126),
    ("Q3_K", "heavy"): (0.1239, 0.004771),
    ("Q3_K", "uniform"): (0.12521, 0.097365),
    ("Q3_K", "sparse"): (0.074124, 0.036783),
    ("Q3_K", "positive"): (0.14429, 0.074763),
    ("Q3_K", "shifted"): (0.10734, 0.082217),
    ("Q3_K", "constant"): (0.00022979, 0.00019259),
    ("Q3_K", "mixed"): (0.15652, 0.08437),
    ("Q3_K", "small"): (0.15093, 0.083825),
    ("Q3_K", "embedding"): (0.15726, 0.078873),
    ("Q3_K", "query"): (0.16559, 0.089493),
    ("Q3_K", "up"): (0.16096, 0.086608),
    ("Q3_K", "down"): (0.15055, 0.082506),
    ("Q4_K", "normal"): (0.071744, 0.058877),
    ("Q4_K", "student"): (0.092454, 0.061154),
    ("Q4_K", "heavy"): (0.078137, 0.025095),
    ("Q4_K", "uniform"): (0.054777, 0.048653),
    ("Q4_K", "sparse"): (0.050332, 0.02924),
    ("Q4_K", "positive"): (0.042125, 0.03453),
    ("Q4_K", "shifted"): (0.029689, 0.027844),
    ("Q4_K", "constant"): (0.00052416, 0.00034009),
    ("Q4_K", "mixed"): (0.081658, 0.056646),
    ("Q4_K", "small"): (0.073879, 0.061264),
    ("Q4_K", "embedding"): (0.072974, 0.058497),
    ("Q4_K", "query"): (0.042552, 0.034257),
    ("Q4_K", "up"): (0.042994, 0.035084),
    ("Q4_K", "down"): (0.066833, 0.05641),
    ("Q5_K", "normal"): (0.03627, 0.029931),
    ("Q5_K", "student"): (0.046709, 0.031207),
    ("Q5_K", "heavy"): (0.0465, 0.016739),
    ("Q5_K", "uniform"): (0.027472, 0.024455),
    ("Q5_K", "sparse"): (0.036984, 0.019347),
    ("Q5_K", "positive"): (0.020664, 0.017172),
    ("Q5_K", "shifted"): (0.014823, 0.013944),
    ("Q5_K", "constant"): (0.0010675, 0.00074632),
    ("Q5_K", "mixed"): (0.04451, 0.02823),
    ("Q5_K", "small"): (0.042506, 0.037568),
    ("Q5_K", "embedding"): (0.037507, 0.030479),
    ("Q5_K", "query"): (0.029868, 0.024689),
    ("Q5_K", "up"): (0.030822, 0.025291),
    ("Q5_K", "down"): (0.034755, 0.029158),
    ("Q6_K", "normal"): (0.017818, 0.0088508),
    ("Q6_K", "student"): (0.024432, 0.004944),
    ("Q6_K", "heavy"): (0.026702, 0.00082595),
    ("Q6_K", "uniform"): (0.01328, 0.0089792),
    ("Q6_K", "sparse"): (0.0084731, 0.0041746),
    ("Q6_K", "positive"): (0.017574, 0.0088334),
    ("Q6_K", "shifted"): (0.012699, 0.0097151),
    ("Q6_K", "constant"): (0.0028302, 0.0014244),
    ("Q6_K", "mixed"): (0.017187, 0.0089158),
    ("Q6_K", "small"): (0.059661, 0.073436),
    ("Q6_K", "embedding"): (0.01838, 0.0085739),
    ("Q6_K", "query"): (0.010266, 0.0052707),
    ("Q6_K", "up"): (0.010326, 0.0052592),
    ("Q6_K", "down"): (0.016238, 0.0087925),
    ("IQ4_NL", "normal"): (0.076217, 0.050207),
    ("IQ4_NL", "student"): (0.097908, 0.026122),
    ("IQ4_NL", "heavy"): (0.089906, 0.0030042),
    ("IQ4_NL", "uniform"): (0.063723, 0.054429),
    ("IQ4_NL", "sparse"): (0.054899, 0.026443),
    ("IQ4_NL", "positive"): (0.074538, 0.048),
    ("IQ4_NL", "shifted"): (0.062411, 0.054172),
    ("IQ4_NL", "constant"): (0.00022925, 0.0002109),
    ("IQ4_NL", "mixed"): (0.078966, 0.042041),
    ("IQ4_NL", "small"): (0.076113, 0.051025),
    ("IQ4_NL", "embedding"): (0.077518, 0.049068),
    ("IQ4_NL", "query"): (0.077183, 0.048703),
    ("IQ4_NL", "up"): (0.076121, 0.050738),
    ("IQ4_NL", "down"): (0.072368, 0.050978),
}


def draw(name: str) -> Floats:
    """16384 weights of a kind: drawn from raw random words, or 4096 that were trained (the demo model's)."""
    if name in TRAINED:
        with np.load(Path(__file__).parents[1] / "golden" / "weights.npz") as file:
            return file[name].astype(np.float32)
    n = 16384
    words = np.random.PCG64(DRAWN.index(name)).random_raw(8 * n)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5).reshape(8, n) / 2.0**52
    normal = np.sqrt(-2 * np.log(uniform[:4])) * np.cos(2 * np.pi * uniform[4:])
    student = normal[0] / np.sqrt((normal[1:] ** 2).mean(axis=0))
    weights = {
        "normal": normal[0] * 0.02,
        "student": student * 0.02,  # of 3 degrees of freedom
        "heavy": np.cbrt(student**5) * 0.02,  # of infinite variance
        "uniform": (uniform[0] - 0.5) * 0.1,
        "sparse": np.where(uniform[7] < 0.9, 0, normal[0]) * 0.02,
        "positive": np.abs(normal[0]) * 0.02,
        "shifted": normal[0] * 0.02 + 0.05,
        "constant": np.repeat(normal[0, :64], 256) * 0.02,
        "mixed": normal[0] * np.exp(np.repeat(normal[1, : n // 16], 16)) * 0.02,
        "small": normal[0] * 2e-4,  # the scales have few bits: halves below 2^-14
    }
    return weights[name].astype(np.float32)


def quantize(kind: Kind, weights: Floats) -> npt.NDArray[np.uint8]:
    """Our bytes [blocks, bytes of a block]; what stands around them must not change."""
    ffi, lib = capi.load()
    n_bytes = lib.te_row_bytes(kind, weights.size)
    out = np.full(n_bytes + 32, 0xA5, np.uint8)
    source = np.ascontiguousarray(weights.ravel(), np.float32)
    lib.te_quantize_row(
        kind, ffi.from_buffer("float[]", source), ffi.from_buffer("uint8_t[]", out) + 16, source.size
    )
    assert (out[:16] == 0xA5).all() and (out[n_bytes + 16 :] == 0xA5).all()
    return out[16 : n_bytes + 16].reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])


def written(kind: Kind, weights: Floats) -> Floats:
    """Weights as a reader of our bytes finds them."""
    back: Floats = quants.dequantize(quantize(kind, weights), kind).reshape(weights.shape)
    return back


def importance(kind: Kind, weights: Floats) -> npt.NDArray[np.float64]:
    """What ggml weighs squares of errors with, when it has no importance matrix."""
    w = np.abs(weights.astype(np.float64))
    if kind in (Kind.Q4_K, Kind.Q5_K):
        unit = w.reshape(-1, 32)
        return (np.sqrt((unit**2).mean(axis=1, keepdims=True)) + unit).ravel()
    return w if kind == Kind.Q2_K else w**2


def errors(kind: Kind, weights: Floats, back: Floats) -> tuple[float, float]:
    """Plain and weighted."""
    w, p = weights.astype(np.float64), importance(kind, weights)
    square = (w - back) ** 2
    return float(np.sqrt(square.sum() / (w**2).sum())), float(np.sqrt((p * square).sum() / (p * w**2).sum()))


@pytest.mark.parametrize("name", DRAWN + TRAINED)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_error_is_not_above_ggmls(kind: Kind, name: str) -> None:
    weights = draw(name)
    plain, weighted = errors(kind, weights, written(kind, weights))
    ggml_plain, ggml_weighted = GGML[kind.name, name]
    assert plain <= ggml_plain
    # ggml gives zeros in Q2_K no weight at all, and restores them worse for it.
    if (kind, name) != (Kind.Q2_K, "sparse"):
        assert weighted <= ggml_weighted


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_more_bits_less_error(kind: Kind) -> None:
    """A limit that needs no reference: steps of size s leave errors of s/sqrt(12), and s need not be more
    than the range of a unit of 32 normal weights, hardly ever 6.5 deviations, over the number of steps."""
    weights = draw("normal")
    n_steps = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63, "IQ4_NL": 15}[kind.name]
    assert errors(kind, weights, written(kind, weights))[0] < 6.5 / n_steps / 12**0.5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_zeros_and_signs(kind: Kind) -> None:
    zeros = np.zeros(512, np.float32)
    assert (written(kind, zeros) == 0).all() and (written(kind, -zeros) == 0).all()
    block = draw("normal")[:256]
    both = written(kind, np.concatenate([block, 0 * block, block]))
    assert (both[:256] == both[512:]).all() and (both[256:512] == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_weight_has_the_nearest_code(kind: Kind) -> None:
    """No other value that occurs in its unit is nearer to a weight: scales given, codes are the best."""
    unit = 32 if kind in (Kind.Q4_K, Kind.Q5_K, Kind.IQ4_NL) else 16
    weights = draw("student").reshape(-1, unit)
    back = written(kind, weights)
    nearest = np.abs(weights[:, :, None] - back[:, None, :]).min(axis=2)
    error = np.abs(weights - back)
    assert (error <= nearest + 1e-6 * np.abs(back).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_floats(kind: Kind) -> None:
    """Infinities, NaNs, denormals, huge numbers: something is written, and a block beside is not touched."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2**32, (64, 256), dtype=np.uint32)
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0], np.uint32
    )
    bits[32:] = special[rng.integers(0, special.size, (32, 256))]
    weights = bits.view(np.float32)
    block = draw("normal")[:256]
    raw = quantize(kind, np.concatenate([block, weights.ravel(), block]))
    n = len(raw) // 66
    assert (raw[:n] == quantize(kind, block)).all() and (raw[-n:] == raw[:n]).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_power_of_two_changes_only_the_scales(kind: Kind) -> None:
    """Where scales are normal halves (Q6_K divides a weight by 32 * 128 for its scale), w * 2^k is written as
    w is: all sums scale exactly."""
    weights = draw("student")[:4096] * np.float32(50)
    weights[::256] = 4
    assert (written(kind, weights * np.float32(64)) == written(kind, weights) * np.float32(64)).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_largest_halves(kind: Kind) -> None:
    weights = draw("uniform")[:1024]
    weights *= np.float32(65504) / np.abs(weights).max()
    back = written(kind, weights)
    assert np.isfinite(back).all() and errors(kind, weights, back)[0] < 0.25
