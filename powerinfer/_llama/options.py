"""The keyword arguments that methods share, by name and type, for editors, help() and type checkers.

def generate(self, tokens, **options: Unpack[GenerateOptions]): ...
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from .._engine.devices import Budget, Names
    from .._engine.request import Draft
    from .._engine.sampling import Criteria, Processors
    from .._engine.types import Activation, Predictor, Progress, Sparsity
    from .._text.grammar import LlamaGrammar
    from .loader import ContextSize

F = TypeVar("F", bound=Callable[..., Any])
StrPath = str | os.PathLike[str]


class SamplingOptions(TypedDict, total=False):
    """How a token is chosen; `Sampling` says what each means."""

    temperature: float
    temp: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Iterable[str]
    tfs_z: float


RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (-2, math.inf),  # llama.cpp has -1 and -2 for an answer without a limit
    "temperature": (0, 1000),
    "top_k": (-1, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 1000),
    "presence_penalty": (-1000, 1000),
    "frequency_penalty": (-1000, 1000),
    "penalty_last_n": (-1, math.inf),
    "typical_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat_mode": (0, 2),
}
"""Of those that the command line and the chat take."""


def in_range(least: float, most: float) -> str:
    """What a message says that a value must be."""
    return f"at least {least}" if most == math.inf else f"between {least} and {most}"


class GenerationOptions(SamplingOptions, total=False):
    """What the create_ methods take besides their own arguments."""

    seed: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    logits_processor: Processors
    stopping_criteria: Criteria
    stop_token_ids: Iterable[int] | None
    min_tokens: int | None
    ignore_eos: bool | None
    prompt_only: bool | None
    return_token_ids: bool | None


class _AnswerOptions(GenerationOptions, total=False):
    stop: str | Sequence[str] | None
    model: str | None
    grammar: LlamaGrammar | str | None
    n: int | None
    response_format: Mapping[str, Any] | None
    prompt_logprobs: int | None


class CompletionOptions(_AnswerOptions, total=False):
    """Of create_completion()."""

    echo: bool
    logprobs: int | None
    best_of: int | None


class ChatOptions(_AnswerOptions, total=False):
    """Of create_chat_completion()."""

    functions: Sequence[Mapping[str, Any]] | None
    function_call: str | Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    max_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    add_generation_prompt: bool


class AsyncCompletionOptions(CompletionOptions, total=False):
    """Of AsyncLlama.create_completion()."""

    suffix: str | None
    max_tokens: int | None
    timeout_s: float | None


class AsyncChatOptions(ChatOptions, total=False):
    """Of AsyncLlama.create_chat_completion()."""

    timeout_s: float | None


class OtherLlamaOptions(TypedDict, total=False):
    """Arguments of llama_cpp.Llama that warn, having no effect, or raise where they ask for something."""

    rpc_servers: str | None
    kv_overrides: Mapping[str, Any] | None
    rope_scaling_type: int | None
    attention_type: int | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    lora_base: str | None
    tokenizer: Any
    n_threads_batch: int | None
    split_mode: int
    main_gpu: int
    tensor_split: Sequence[float] | None
    offload_kqv: bool
    flash_attn: bool | None
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool | None
    numa: bool | int | None


class AsyncLlamaOptions(OtherLlamaOptions, total=False):
    """Of Llama(), but those of a single context."""

    n_gpu_layers: int | None
    n_batch: int | None
    n_ubatch: int | None
    n_threads: int | None
    seed: int | None
    pooling_type: int | str | None
    chat_format: str | None
    chat_handler: Callable[..., Any] | None
    draft_model: Draft | StrPath | None
    n_draft: int | None
    lora_path: StrPath | Sequence[StrPath] | None
    lora_scale: float | Sequence[float]
    spm_infill: bool
    verbose: bool
    use_mmap: bool
    use_mlock: bool
    type_k: str | int | None
    type_v: str | int | None
    last_n_tokens_size: int
    vram_budget: Budget
    devices: Names
    plan: Any
    sparsity: Sparsity
    threshold: float | None
    activation: Activation | None
    predictor: Predictor
    predictor_type: str | None
    online_statistics: bool
    expert_cache: Literal["live", "frozen"]
    context_shift: bool
    n_keep: int | None
    progress: Progress | None
    prompt_progress: Progress | None


class LlamaOptions(AsyncLlamaOptions, total=False):
    """Of Llama(), but the model's path."""

    n_ctx: ContextSize
    n_seq: int
    n_pool: int | None
    logits_all: bool
    vocab_only: bool
    embedding: bool


class _Unset:
    """The default of an option that is left out."""

    def __repr__(self) -> str:
        return "..."


class _Annotation(str):
    """One that help() shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shown(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def spelled(options: type) -> Callable[[F], F]:
    """A function's signature with these options in the place of its **options, for help() and completion."""

    def spell(function: F) -> F:
        own = inspect.signature(function)
        kept = [
            p.replace(annotation=_shown(p.annotation))
            for p in own.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_Unset(),
                annotation=_shown(getattr(kind, "__forward_arg__", kind)),
            )
            for name, kind in options.__annotations__.items()
            if name not in own.parameters
        ]
        whole = own.replace(parameters=[*kept, *more], return_annotation=_shown(own.return_annotation))
        function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return spell
