"""The small models that tests run: the shape of each, one of every architecture and variant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotation: base frequency and, when `kind` is not empty, how it is stretched beyond `n_ctx_orig`."""

    base: float = 10000.0
    kind: str = ""  # "", "linear", "yarn" or "llama3"
    factor: float = 1.0
    n_ctx_orig: int = 0
    low: float = 1.0  # llama3: wavelengths above n_ctx_orig / low are divided by factor
    high: float = 4.0  # llama3: wavelengths below n_ctx_orig / high are left alone


@dataclass(frozen=True)
class Spec:
    """Shape of one small model. `predictor` holds one rank per layer; empty means there is no sparse twin."""

    name: str
    # llama mistral mixtral bamboo falcon opt qwen2 qwen3 qwen2moe qwen3moe olmoe gpt-oss glm4moe olmo2
    # llama4 cohere2 gemma gemma2 gemma3 gemma4 arcee nemotron deepseek2
    family: str
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 4
    head_dim: int = 0  # 0: n_embd / n_head
    n_ff: int = 192
    n_vocab: int = 320
    n_ctx: int = 256
    d_rot: int = 0  # values of a head that are rotated; 0: all
    act: str = "silu"  # silu, gelu (the exact one), gelu_tanh, relu, drelu, relu2, clamped
    tied: bool = False
    two_norms: bool = False  # Falcon 40B: separate norms before attention and FFN
    rope: Rope = Rope()
    predictor: tuple[int, ...] = ()
    n_expert: int = 0  # 0: each layer has one feed-forward
    n_used: int = 0  # experts of a token
    n_ff_expert: int = 0  # mixtral and olmoe: n_ff
    n_ff_shared: int = 0  # of an expert that all tokens use
    n_dense: int = 0  # layers at the beginning without experts
    window: int = 0  # positions that layers with a window see; which ones have one is the family's
    logit_scale: float = 1.0
    expert_step: int = 1  # every so manieth layer has experts
    head_full: int = 0  # gemma4: size of heads in each third layer, which has no window
    n_head_kv_full: int = 0  # and its key/value heads; not 0: V is what K is made of there
    n_shared: int = 0  # the last layers read K and V of earlier ones, and have twice as many neurons
    n_embd_layer: int = 0  # of a token's embedding for each layer
    q_rank: int = 0  # deepseek2: of the low-rank q; 0: it is direct
    kv_rank: int = 0  # values of the latent that K and V are made of; 0: there is none
    d_value: int = 0  # of a head's value, where that is not d_head
    n_group: int = 1  # groups of experts, of which a token uses half
    soft_cap: float = 0.0  # of scores; that of logits is twice as much
    window_base: float = 10000.0  # base frequency of those layers' rotation
    layers: str = ""  # with recurrent layers: of each r, a (attention), b (both), or f (neither)
    n_conv: int = 4  # tokens that their convolutions see
    n_state: int = 0  # values of a head's k, of so many groups of heads; and of its v
    n_ssm_group: int = 0
    n_ssm_head: int = 0
    d_ssm: int = 0
    n_prompt: int = 40

    @property
    def arch(self) -> str:
        """`general.architecture` of its files."""
        return "llama" if self.family in ("mistral", "mixtral") else self.family

    @property
    def depth(self) -> int:
        """Layers, by how their roundings add up: a recurrent one multiplies three rounded vectors."""
        return 3 * self.n_layer if self.layers else self.n_layer

    @property
    def d_head(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def is_gemma(self) -> bool:
        return self.family in ("gemma", "gemma2", "gemma3", "gemma4")

    def is_full(self, layer: int) -> bool:
        """Of gemma4: whether a layer sees all positions."""
        return layer % 3 == 2

    def heads(self, layer: int) -> tuple[int, int]:
        """Size of a layer's heads, and the number of those of K and V."""
        if self.head_full and self.is_full(layer):
            return self.head_full, self.n_head_kv_full or self.n_head_kv
        return self.d_head, self.n_head_kv

    def borrows(self, layer: int) -> bool:
        """Whether a layer reads K and V of an earlier one."""
        return layer >= self.n_layer - self.n_shared

    @property
    def relu(self) -> bool:
        """Whether a neuron with a non-positive gate adds exactly nothing."""
        return self.act in ("relu", "drelu", "relu2")


SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("llama-mha", "llama"),
        Spec(
            "llama-llama3",
            "llama",
            n_layer=3,
            n_embd=96,
            n_head=6,
            n_head_kv=2,
            n_ff=224,
            n_vocab=291,
            rope=Rope(500000.0, "llama3", 8.0, 64),
        ),
        Spec(
            "llama-linear",
            "llama",
            n_head_kv=2,
            tied=True,
            n_prompt=150,
            rope=Rope(10000.0, "linear", 4.0, 64),
        ),
        Spec("llama-yarn", "llama", n_head=2, n_head_kv=1, rope=Rope(10000.0, "yarn", 4.0, 64)),
        Spec("mistral", "mistral", n_head_kv=2, head_dim=24, n_ff=224, rope=Rope(1000000.0)),
        Spec("llama-relu", "llama", act="relu", predictor=(32, 32)),
        Spec(
            "llama-relu-gqa",
            "llama",
            n_layer=3,
            n_embd=96,
            n_head=6,
            n_head_kv=2,
            n_ff=320,
            n_vocab=291,
            act="relu",
            predictor=(32, 48, 40),
        ),
        Spec("bamboo", "bamboo", n_head_kv=2, n_ff=256, act="drelu", predictor=(32, 32)),
        Spec("falcon-7b", "falcon", n_head_kv=1, n_ff=256, act="relu", predictor=(32, 32)),
        Spec(
            "falcon-40b",
            "falcon",
            n_embd=96,
            n_head=6,
            n_head_kv=2,
            n_ff=384,
            n_vocab=301,
            act="relu",
            two_norms=True,
            predictor=(48, 32),
        ),
        Spec("falcon-gelu", "falcon", n_head_kv=1, n_ff=256, act="gelu"),
        Spec("opt", "opt", n_ff=256, n_vocab=301, act="relu", tied=True, predictor=(32, 32)),
        Spec("arcee", "arcee", n_head_kv=2, n_ff=256, act="relu2", predictor=(32, 32)),
        Spec("nemotron", "nemotron", n_head_kv=2, head_dim=32, d_rot=16, n_ff=256, n_vocab=301, act="relu2"),
        Spec("qwen2", "qwen2", n_head_kv=2, tied=True, rope=Rope(1000000.0)),
        Spec("qwen2-yarn", "qwen2", n_head_kv=2, head_dim=0, n_ff=224, rope=Rope(1000000.0, "yarn", 4.0, 64)),
        Spec("qwen3", "qwen3", n_head_kv=2, head_dim=32, n_vocab=301, rope=Rope(1000000.0)),
        Spec(
            "qwen3moe",
            "qwen3moe",
            n_head_kv=2,
            head_dim=32,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            rope=Rope(1000000.0),
        ),
        Spec(
            "mixtral",
            "mixtral",
            n_head_kv=2,
            n_ff=96,
            n_expert=8,
            n_used=2,
            n_ff_expert=96,
            rope=Rope(1000000.0),
        ),
        Spec(
            "qwen2moe",
            "qwen2moe",
            n_vocab=301,
            n_expert=8,
            n_used=4,
            n_ff_expert=64,
            n_ff_shared=160,
            rope=Rope(1000000.0),
        ),
        Spec("olmoe", "olmoe", n_head_kv=2, n_ff=64, n_vocab=301, n_expert=8, n_used=4, n_ff_expert=64),
        # Two periods of layers, and more than two windows. The original's YaRN has no whole pairs as borders.
        Spec(
            "gpt-oss",
            "gpt-oss",
            n_layer=4,
            n_head_kv=2,
            head_dim=32,
            n_ff=96,
            n_vocab=301,
            act="clamped",
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            window=24,
            n_prompt=60,
            rope=Rope(150000.0, "yarn", 4.0, 64),
        ),
        Spec(
            "glm4moe",
            "glm4moe",
            n_layer=3,
            n_head_kv=2,
            head_dim=32,
            d_rot=16,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_ff_shared=96,
            n_dense=1,
            rope=Rope(1000000.0),
        ),
        # A whole period of layers and a prompt of more than two windows. Published ones are tied; a small
        # model whose head is its embedding repeats its input.
        Spec(
            "gemma3",
            "gemma3",
            n_layer=6,
            n_embd=96,
            n_head_kv=2,
            head_dim=32,
            n_ff=128,
            n_vocab=301,
            act="gelu_tanh",
            window=24,
            window_base=500.0,
            n_prompt=60,
            rope=Rope(100000.0, "linear", 4.0, 64),
        ),
        Spec("olmo2", "olmo2", n_head_kv=2, n_ff=192, n_vocab=301, rope=Rope(500000.0)),
        Spec(
            "olmo3",
            "olmo2",
            n_layer=4,
            n_embd=96,
            n_head_kv=2,
            n_ff=192,
            n_vocab=301,
            window=24,
            window_base=5000.0,
            n_prompt=60,
            rope=Rope(5000.0, "yarn", 4.0, 64),
        ),
        Spec(
            "cohere2",
            "cohere2",
            n_layer=4,
            n_embd=96,
            n_head_kv=2,
            n_ff=192,
            n_vocab=301,
            window=24,
            logit_scale=0.5,
            n_prompt=60,
            rope=Rope(50000.0),
        ),
        Spec("gemma", "gemma", n_layer=3, n_head_kv=1, head_dim=32, n_ff=192, n_vocab=301, act="gelu_tanh"),
        # Scores are about 1, logits about 2 and up to 8: both caps bend them.
        Spec(
            "gemma2",
            "gemma2",
            n_layer=4,
            n_embd=96,
            n_head_kv=2,
            head_dim=32,
            n_ff=128,
            n_vocab=301,
            act="gelu_tanh",
            window=24,
            soft_cap=5.0,
            n_prompt=60,
        ),
        # Four layers: with chunks and rotation, and one that has neither; experts in every second.
        Spec(
            "llama4",
            "llama4",
            n_layer=4,
            n_head_kv=2,
            n_ff=128,
            n_vocab=301,
            n_expert=8,
            n_used=1,
            n_ff_expert=96,
            n_ff_shared=96,
            expert_step=2,
            window=24,
            n_prompt=60,
            rope=Rope(500000.0),
        ),
        # Small ones have embeddings per layer, and layers that read what others hold; large ones neither.
        Spec(
            "gemma4",
            "gemma4",
            n_layer=6,
            n_embd=96,
            n_head_kv=2,
            head_dim=32,
            head_full=64,
            n_ff=128,
            n_vocab=301,
            act="gelu_tanh",
            window=24,
            window_base=500.0,
            n_shared=2,
            n_embd_layer=32,
            n_prompt=60,
            rope=Rope(100000.0),
        ),
        Spec(
            "gemma4-large",
            "gemma4",
            n_layer=6,
            n_embd=96,
            n_head_kv=2,
            head_dim=32,
            head_full=64,
            n_head_kv_full=1,
            n_ff=128,
            n_vocab=301,
            act="gelu_tanh",
            window=24,
            window_base=500.0,
            n_prompt=60,
            rope=Rope(100000.0),
        ),
        # Sizes that are no multiples of what kernels take at a time.
        Spec(
            "lfm2",
            "lfm2",
            n_layer=4,
            n_embd=72,
            n_head=6,
            n_head_kv=2,
            n_ff=120,
            n_vocab=301,
            layers="rrar",
            n_conv=3,
            n_prompt=60,
            rope=Rope(1000000.0),
        ),
        Spec(
            "lfm2moe",
            "lfm2moe",
            n_layer=3,
            n_head_kv=2,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_dense=1,
            layers="rar",
            n_conv=3,
            rope=Rope(1000000.0),
        ),
        # Two v heads of 24 to each q and k head of 20.
        Spec(
            "qwen3next",
            "qwen3next",
            n_layer=4,
            n_head_kv=2,
            head_dim=32,
            d_rot=8,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_ff_shared=64,
            layers="rrra",
            n_state=20,
            n_ssm_group=2,
            n_ssm_head=4,
            d_ssm=24,
            n_prompt=80,
            rope=Rope(1000000.0),
        ),
        Spec(
            "qwen35",
            "qwen35",
            n_layer=4,
            n_head_kv=2,
            head_dim=32,
            d_rot=8,
            n_vocab=301,
            layers="rrra",
            n_state=32,
            n_ssm_group=2,
            n_ssm_head=6,
            d_ssm=32,
            n_prompt=80,
            rope=Rope(1000000.0),
        ),
        Spec(
            "qwen35moe",
            "qwen35moe",
            n_layer=4,
            n_head_kv=2,
            head_dim=32,
            d_rot=8,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_ff_shared=64,
            layers="rrra",
            n_state=16,
            n_ssm_group=2,
            n_ssm_head=4,
            d_ssm=40,
            rope=Rope(1000000.0),
        ),
        Spec(
            "falcon-h1",
            "falcon-h1",
            n_head_kv=2,
            head_dim=24,
            n_vocab=301,
            layers="bb",
            n_state=24,
            n_ssm_group=2,
            n_ssm_head=4,
            d_ssm=20,
            n_prompt=80,
            rope=Rope(1000000.0),
        ),
        Spec(
            "granitehybrid",
            "granitehybrid",
            n_layer=3,
            n_head_kv=2,
            n_ff=96,
            n_vocab=301,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_ff_shared=64,
            layers="rar",
            n_state=24,
            n_ssm_group=1,
            n_ssm_head=4,
            d_ssm=32,
        ),
        # Layers of one block.
        Spec(
            "nemotron_h",
            "nemotron_h",
            n_layer=5,
            n_head_kv=2,
            head_dim=24,
            n_ff=136,
            n_vocab=301,
            act="relu2",
            layers="rfafr",
            n_state=24,
            n_ssm_group=2,
            n_ssm_head=4,
            d_ssm=40,
            n_prompt=80,
        ),
        Spec(
            "nemotron_h_moe",
            "nemotron_h_moe",
            n_layer=4,
            n_head_kv=2,
            n_ff=96,
            n_vocab=301,
            act="relu2",
            n_expert=8,
            n_used=3,
            n_ff_expert=88,
            n_ff_shared=104,
            layers="rfaf",
            n_state=16,
            n_ssm_group=2,
            n_ssm_head=4,
            d_ssm=32,
        ),
        # A direct q and softmaxes, as V2 Lite has them, with the groups of V2.
        Spec(
            "deepseek2-v2",
            "deepseek2",
            n_layer=3,
            head_dim=40,
            d_rot=16,
            n_vocab=301,
            kv_rank=32,
            d_value=20,
            n_expert=8,
            n_used=3,
            n_ff_expert=64,
            n_ff_shared=128,
            n_dense=1,
            n_group=4,
        ),
        Spec(
            "deepseek2-v3",
            "deepseek2",
            n_layer=3,
            n_head=6,
            head_dim=48,
            d_rot=16,
            n_vocab=301,
            q_rank=56,
            kv_rank=48,
            d_value=32,
            n_expert=8,
            n_used=3,
            n_ff_expert=96,
            n_ff_shared=96,
            n_dense=1,
            n_group=2,
            rope=Rope(10000.0, "yarn", 4.0, 64),
        ),
        Spec(
            "deepseek2-dense",
            "deepseek2",
            head_dim=48,
            d_rot=16,
            n_vocab=301,
            q_rank=56,
            kv_rank=48,
            d_value=32,
            rope=Rope(10000.0, "yarn", 4.0, 64),
        ),
    )
}

CONVERTED = sorted(
    name
    for name, spec in SPECS.items()
    if not spec.is_gemma
    and spec.family not in ("cohere2", "olmo2", "llama4", "arcee", "nemotron", "deepseek2")
    and not spec.layers
)
"""Those whose checkpoints tests/convert/folders.py writes; of the others tests/convert/published.py does."""
