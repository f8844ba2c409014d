"""From the fields of a request to arguments of AsyncLlama."""

from __future__ import annotations

from typing import Any

from .lenient import ignore
from .problems import Problem
from .schemas import ChatRequest, CompletionRequest, Generate
from .settings import Settings

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "repeat_penalty", "penalty_last_n"),
    *("presence_penalty", "frequency_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
)
_SHARED = (
    *("n", "stop", "seed", "logit_bias", "grammar", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("prompt_logprobs", "return_token_ids"),
)
CONTINUING = ("continue_final_message", "add_generation_prompt")
_CHAT = (
    *("logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
    *CONTINUING,
)
_COMPLETION = ("logprobs", "echo", "suffix", "best_of")


def invalid(message: str, param: str) -> Problem:
    return Problem(400, message, param=param, code="invalid_value")


def arguments_of(body: Generate, settings: Settings) -> dict[str, Any]:
    """Those that were not given are left out."""
    if settings.strict and body.store:
        raise invalid("nothing is stored here", "store")
    if body.store:
        ignore("store")
    options = dict(settings.defaults)
    more = _CHAT if isinstance(body, ChatRequest) else _COMPLETION
    names = (*_SAMPLING, *_SHARED, *more)
    options |= {name: value for name in names if (value := getattr(body, name)) is not None}
    _other_names(body, options)
    form = _form(body)
    if form is not None:
        options["response_format"] = form
    if body.stop is not None:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stop) > 64:
            raise invalid("stop takes at most 64 strings", "stop")
    if isinstance(body, ChatRequest):
        variables = _variables(body)
        if variables:
            options["chat_template_kwargs"] = variables
    _limit(body, settings, options)
    options["timeout_s"] = settings.timeout_s
    return options


def _limit(body: Generate, settings: Settings, options: dict[str, Any]) -> None:
    asked, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        if asked is not None and asked != body.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ", "max_tokens")
        asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None and body.n_predict is not None:
        asked, name = max(body.n_predict, -1), "n_predict"
    most = settings.max_tokens
    if asked is not None and most is not None and asked > most:
        raise invalid(f"{name} is {asked}, this server gives at most {most}", name)
    if asked == 0:
        options["prompt_only"] = True
    limit = options.pop("max_tokens", None) if asked is None else asked if asked > 0 else None
    options["max_tokens"] = most if limit is None else limit


def _other_names(body: Generate, options: dict[str, Any]) -> None:
    """What llama-server and vLLM call otherwise."""
    if body.repetition_penalty is not None and body.repeat_penalty is None:
        options["repeat_penalty"] = body.repetition_penalty
        if body.penalty_last_n is None and body.repeat_last_n is None:
            options["penalty_last_n"] = -1  # the prompt and all of the answer, as elsewhere
    if body.repeat_last_n is not None and body.penalty_last_n is None:
        options["penalty_last_n"] = body.repeat_last_n


def _form(body: Generate) -> dict[str, Any] | None:
    """The one form that the answer shall have, as a response_format."""
    found: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format != {"type": "text"}:
        found["response_format"] = body.response_format
    given: dict[str, Any] = {
        "json_schema": body.json_schema,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if body.structured_outputs is not None:
        out = body.structured_outputs
        names = {"json": out.json_, "regex": out.regex, "choice": out.choice, "grammar": out.grammar}
        given |= {f"structured_outputs.{name}": value for name, value in names.items()}
        if out.json_object:
            found["structured_outputs.json_object"] = {"type": "json_object"}
    for name, value in given.items():
        if value is None:
            continue
        kind = name.replace("guided_", "").rpartition(".")[2]
        if kind in ("json", "json_schema"):
            found[name] = {"type": "json_schema", "json_schema": {"schema": value}}
        else:
            found[name] = {"type": kind, kind: value}
    if len(found) + (body.grammar is not None) > 1:
        names_given = [*(["grammar"] if body.grammar is not None else []), *found]
        raise invalid(
            f"an answer has one form: {' and '.join(names_given)} cannot hold together", names_given[1]
        )
    return next(iter(found.values()), None)


def _variables(body: ChatRequest) -> dict[str, Any]:
    """For the chat template."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables["enable_thinking"] = False
    return variables | (body.chat_template_kwargs or {})


def is_of_texts(body: CompletionRequest) -> bool:
    """Whether it has several prompts."""
    return isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
