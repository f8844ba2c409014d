"""From text to more of it: the methods of Llama that complete and answer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from .._engine import chat_options, checks
from .._engine.sampling import (
    SAMPLING_NAMES,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    Sampling,
    sampling_of,
)
from ..compat.arguments import LATER_GENERATING, refuse
from ..errors import ArgumentError, ArgumentTypeError
from ..types import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from .generating import Generating, nth_seed
from .options import ChatOptions, CompletionOptions, GenerationOptions, spelled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._engine.arrays import Ids, Logits
    from .._text.answer import Answer, AnswerParser, Echo
    from .._text.chat_format import ChatFormat
    from .._text.grammar import LlamaGrammar
    from .._text.logprobs import Row, TokenLogprob
    from .._text.tool_calls import Tool, ToolCallParser

_HOOKS = ("seed", "logit_bias", "logits_processor", "stopping_criteria")
_LENGTH = ("stop_token_ids", "min_tokens", "ignore_eos", "prompt_only", "return_token_ids")
CHAT_TEMPERATURE = 0.2  # what llama-cpp-python answers with; it completes with 0.8

MAX_ANSWERS = 1024
"""To one prompt in one call."""

ChatHandler = Callable[..., Any]


@dataclass
class _Request:
    """What an answer shall be, whether to a text or to a conversation."""

    sampling: Sampling
    hooks: dict[str, Any]
    max_tokens: int | None
    stop: list[str]
    grammar: LlamaGrammar | str | None
    n_top: int | None
    """Likely tokens to tell with each token; None: no logprobs."""
    n: int = 1
    """How many answers."""
    special: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_only: bool = False
    """The prompt is computed and nothing after it."""
    return_token_ids: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def watch(self, row: Row, token: int) -> None:
        """Notes what the answer's logprobs say about a token."""
        from .._text.logprobs import token_logprob

        self.logprobs.append(token_logprob(row, token, self.n_top or 0))

    def each(self) -> list[_Request]:
        """One for each answer."""
        seed = self.hooks.get("seed")
        return [
            replace(self, n=1, logprobs=[], hooks={**self.hooks, "seed": nth_seed(seed, i)})
            for i in range(self.n)
        ]


class Completions(Generating):
    """What stands first is the part of Llama that these methods need."""

    model_path: str
    chat_handler: ChatHandler | None
    spm_infill: bool

    @property
    @abstractmethod
    def _format(self) -> ChatFormat: ...

    @abstractmethod
    def n_ctx(self) -> int: ...

    @property
    @abstractmethod
    def _shifts(self) -> bool:
        """Whether a full context forgets its older half."""

    @abstractmethod
    def _score(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        """Calls seen(i, logits) for each of ids."""

    # -- text

    @overload
    def create_completion(
        self,
        prompt: str | bytes | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    def create_completion(
        self,
        prompt: str | bytes | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[CompletionOptions],
    ) -> Iterator[CompletionChunk]: ...

    @overload
    def create_completion(
        self,
        prompt: str | bytes | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = None,
        *,
        stream: bool,
        **options: Unpack[CompletionOptions],
    ) -> Completion | Iterator[CompletionChunk]: ...

    @spelled(GenerationOptions)
    def create_completion(
        self,
        prompt: str | bytes | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        echo: bool = False,
        stream: bool = False,
        model: str | None = None,
        grammar: LlamaGrammar | str | None = None,
        logprobs: int | None = None,
        n: int | None = None,
        best_of: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        prompt_logprobs: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion | Iterator[CompletionChunk]:
        """Continues a prompt.

        prompt: text (control tokens in it count as such), or token ids.
        suffix: text after the answer, for models that were trained to fill a gap.
        max_tokens: most tokens of the answer. None, 0 or less: until an end token or a full context.
        stop: strings that end the answer. They are not part of it.
        echo: begin the text with the prompt.
        stream: return an iterator of parts instead of the whole.
        model: the name that the result carries. None: the path of the file.
        grammar: a form that the text must have: a LlamaGrammar, or GBNF as text.
        logprobs: report the log probability of each token, and those of this many likeliest tokens in its
            place; with echo also those of the prompt.
        n: number of answers, made one after the other. The first uses `seed`, the next ones seed + 1 and
            so on.
        best_of: make so many answers, and return the n with the highest mean log probability. Not with
            stream.
        response_format: a form that the text must have, as in create_chat_completion().
        prompt_logprobs: add to the first choice, as "prompt_logprobs", what each token of the prompt and this
            many likeliest ones in its place had: {token id: {"logprob", "rank", "decoded_token"}}, None for
            the first token. Not with stream.

        Sampling, with defaults: temperature=0.8 (0: the likeliest token), top_k=40 (0: off), top_p=0.95
        (1: off), min_p=0.05 (0: off), typical_p=1.0 (1: off), repeat_penalty=1.0 (1: off),
        frequency_penalty=0.0, presence_penalty=0.0, penalty_last_n=last_n_tokens_size (-1: all tokens),
        mirostat_mode=0 (1 or 2: on), mirostat_tau=5.0, mirostat_eta=0.1, and those of llama.cpp that are off
        by default: top_n_sigma, xtc_probability and xtc_threshold, dynatemp_range and dynatemp_exponent,
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n and dry_sequence_breakers.

        Further options: seed (None: the next number of the object's own), logit_bias ({token id: number
        that is added}), logits_processor and stopping_criteria as in generate(); stop_token_ids (tokens that
        end the answer and are not part of it), min_tokens (before which no such token and no end token is
        chosen), ignore_eos (no end token is ever chosen), prompt_only (compute the prompt and nothing more),
        return_token_ids (choices have the answer's "token_ids", without the token that ended it).

        Returns a dict in OpenAI's shape: the text is result["choices"][0]["text"], token counts are in
        result["usage"]. With stream the parts have the same shape, and each has its piece of the text.

        Raises ContextError if the prompt is longer than n_ctx; nothing was computed then. ArgumentError for
        a value out of range, TypeError for an unknown option, UnsupportedError for a grammar without
        llguidance.

            llm("The capital of France is", max_tokens=8, temperature=0)["choices"][0]["text"]
        """
        from .._text.answer import Echo, best, completion, completion_chunks, numbered, together

        where = "create_completion()"
        n = check_count("n", n)
        n_made = n if best_of is None else check_best_of(best_of, n, stream)
        n_top = 0 if n_made > n and logprobs is None else logprobs
        grammar = chat_options.one_grammar(grammar, response_format)
        request = self._request(where, options, max_tokens, stop, grammar, n_top)
        request.n = n_made
        check_prompt_logprobs(prompt_logprobs, stream)
        ids = self._prompt_ids(prompt, suffix)
        self._checked(ids)
        data = prompt if isinstance(prompt, (str, bytes)) else self.tokenizer.decode(ids)
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        name = self.model_path if model is None else model
        begin = Echo(text if echo else "", len(text))
        with self._lock:
            answers = [self._answer(ids, each) for each in request.each()]
            if echo and logprobs is not None:
                self._rate_prompt(ids, logprobs, begin)
            if not stream:
                results = [completion(answer, name, begin) for answer in answers]
                tell = logprobs is not None
                if n_made == n:
                    whole: Completion = together(results)
                else:
                    whole = best(results, n, echo=echo and tell, tell=tell)
                if prompt_logprobs is not None:
                    rated: Any = whole["choices"][0]
                    rated["prompt_logprobs"] = self._prompt_logprobs(ids, prompt_logprobs)
                return whole
        return numbered([completion_chunks(answer, name, begin) for answer in answers])

    __call__ = create_completion

    # -- chat

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[ChatCompletionChunk]: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]: ...

    @spelled(GenerationOptions)
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        model: str | None = None,
        grammar: LlamaGrammar | str | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        n: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        prompt_logprobs: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]:
        """Answers a conversation.

        messages: dicts with "role" ("system", "user", "assistant", "tool") and "content".
        tools: functions that the answer may call, in OpenAI's shape; calls come as `tool_calls`.
        tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}; the last
            two need llguidance.
        parallel_tool_calls: False: one call at most.
        functions, function_call: the same in the older shape.
        response_format: {"type": "json_object"} (with "schema" if wanted), {"type": "json_schema", ...},
            {"type": "regex", "regex": ...}, {"type": "choice", "choice": [texts]} or
            {"type": "grammar", "grammar": GBNF}; needs llguidance.
        chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.
        continue_final_message: the answer goes on with the last message, which is the assistant's, instead of
            following it. add_generation_prompt: False leaves out the beginning of an answer.
        prompt_logprobs: as in create_completion(); they stand beside "choices".
        logprobs: report the log probability of each token; top_logprobs: and of how many of the likeliest
            in its place.

        The other options are those of create_completion(); here temperature is 0.2 by default.

        What a model says between <think> and </think> (or its family's marks) before its answer, or gpt-oss
        in its channel "analysis", is the message's `reasoning_content`; it says nothing where a grammar or a
        demanded call holds the answer.

        The conversation becomes a prompt by the object's chat_format, else by the file's template, else by
        the usual format of its architecture (with a notice). A chat_handler answers instead of all this.

        Returns a dict in OpenAI's shape: the answer is result["choices"][0]["message"]. With stream an
        iterator of parts, whose pieces of text are part["choices"][0]["delta"].get("content").

        Raises what create_completion() raises, and ArgumentError for a conversation that the chat template
        refuses.

            messages = [{"role": "user", "content": "Hello"}]
            llm.create_chat_completion(messages)["choices"][0]["message"]["content"]
        """
        given: dict[str, Any] = {**options}
        if self.chat_handler is not None and chat_options.other_format_of(self) is None:
            given |= dict(functions=functions, function_call=function_call, tools=tools)
            given |= dict(tool_choice=tool_choice, response_format=response_format, max_tokens=max_tokens)
            given |= dict(stop=[] if stop is None else stop, stream=stream, model=model, grammar=grammar)
            given |= dict(logprobs=logprobs, top_logprobs=top_logprobs)
            more: dict[str, Any] = {"parallel_tool_calls": parallel_tool_calls, "n": n}
            more |= {"chat_template_kwargs": chat_template_kwargs, "prompt_logprobs": prompt_logprobs}
            more |= {"continue_final_message": continue_final_message or None}
            more |= {"add_generation_prompt": None if add_generation_prompt else False}
            given |= {key: value for key, value in more.items() if value is not None}
            handled: ChatCompletion = self.chat_handler(llama=self, messages=messages, **given)
            return handled
        from .._text.answer import chat_completion, chat_completion_chunks, numbered, together
        from .._text.channels import ChannelParser, has_channels
        from .._text.reasoning import ReasoningParser, has_begun, special, thinks

        legacy = functions is not None
        grammar = chat_options.one_grammar(grammar, response_format)
        n_top = chat_options.chat_n_top(logprobs, top_logprobs)
        if "temp" not in given:
            given.setdefault("temperature", CHAT_TEMPERATURE)
        where = "create_chat_completion()"
        request = self._request(where, given, max_tokens, stop, grammar, n_top)
        request.n = check_count("n", n)
        check_prompt_logprobs(prompt_logprobs, stream)
        left, demanded = chat_options.tools(tools, tool_choice, functions, function_call)
        one = parallel_tool_calls is False
        how = chat_options.how(chat_template_kwargs, continue_final_message, add_generation_prompt)
        ids, template, calls = self._chat_ids(
            messages, left, demanded, one, request, how, in_parts=stream and not legacy
        )
        # A grammar holds an answer from its first token on: there is no room for thoughts.
        marks = thinks(template) if request.grammar is None else None
        begun = marks is not None and has_begun(ids, self.tokenizer, marks)
        if marks is not None:
            request.special |= special(self.tokenizer, marks)
        channels = has_channels(template)

        def parser() -> AnswerParser | None:
            found = ChannelParser(calls()) if channels else calls()
            return found if marks is None else ReasoningParser(found, begun=begun, marks=marks)

        name = self.model_path if model is None else model
        with self._lock:
            answers = [self._answer(ids, each) for each in request.each()]
            if not stream:
                whole = [chat_completion(answer, name, parser(), legacy) for answer in answers]
                result: Any = together(whole)
                if prompt_logprobs is not None:
                    result["prompt_logprobs"] = self._prompt_logprobs(ids, prompt_logprobs)
                return result  # type: ignore[no-any-return]
        return numbered([chat_completion_chunks(answer, name, parser(), legacy) for answer in answers])

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt that create_chat_completion() makes of a conversation, as token ids.

        The arguments are those of create_chat_completion(). Raises ArgumentError.
        """
        request = self._request("chat_tokens()", {}, None, None, None, None)
        left, _ = chat_options.tools(tools, tool_choice, None, None)
        how = chat_options.how(chat_template_kwargs, continue_final_message, add_generation_prompt)
        return self._chat_ids(messages, left, False, False, request, how)[0]

    def create_chat_completion_openai_v1(self, *args: Any, **options: Any) -> Any:
        """create_chat_completion() with the results as objects of the `openai` package, which must be
        installed: ChatCompletion, or an iterator of ChatCompletionChunk."""
        try:
            types: Any = import_module("openai.types.chat")
        except ImportError:
            raise ImportError("create_chat_completion_openai_v1() needs openai: pip install openai") from None
        result = self.create_chat_completion(*args, **options)
        if options.get("stream"):
            return (types.ChatCompletionChunk(**chunk) for chunk in result)
        return types.ChatCompletion(**result)

    # -- parts

    def _chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Tool],
        demanded: bool,
        one: bool,
        request: _Request,
        how: Mapping[str, Any],
        *,
        in_parts: bool = False,
    ) -> tuple[list[int], str, Callable[[], ToolCallParser | None]]:
        """The prompt of a conversation, the template that wrote it, and what makes that which finds the calls
        in an answer. how: for ChatFormat.encode. in_parts: tell arguments of calls as they come."""
        chat_format, tokenizer = chat_options.other_format_of(self) or self._format, self.tokenizer
        how = {**how, "stops": request.stop}
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise ArgumentTypeError(
                f"messages is {type(messages).__name__}, it must be a list of dicts with 'role' and 'content'"
            )
        if not tools and not any(chat_options.is_about_tools(message) for message in messages):
            return chat_format.encode(messages, tokenizer, **how), chat_format.template, lambda: None
        from .._text.tool_calls import ToolFormat
        from .._text.tool_stream import ToolCallStream, WholeAnswerParser

        chat_format = chat_format.for_tools()
        form = ToolFormat.of(chat_format.template)
        prepared, listed = form.prepare(messages, tools)
        ids = chat_format.encode(prepared, tokenizer, tools=listed, **how)
        if not tools:
            return ids, chat_format.template, lambda: None
        request.special = form.special(tokenizer)
        if demanded:
            if request.grammar is not None:
                raise ArgumentError(
                    "tool_choice demands a call: a grammar or response_format cannot hold too"
                )
            request.grammar = form.grammar(tools, tokenizer, one=one or len(tools) == 1)
        kind = ToolCallStream if in_parts else WholeAnswerParser
        return ids, chat_format.template, lambda: kind(form, tools, one=one)

    def _prompt_ids(self, prompt: str | bytes | Sequence[int], suffix: str | None) -> list[int]:
        if suffix is not None:
            from .._text.infill import infill_ids

            prompt, suffix = checks.prompt(prompt), str(checks.text("suffix", suffix))

            return infill_ids(self.tokenizer, prompt, suffix, suffix_first=self.spm_infill)
        prompt = checks.prompt(prompt)
        if isinstance(prompt, (str, bytes)):
            return self.tokenizer.encode(prompt, add_bos=True, special=True)
        return list(prompt)

    def _request(
        self,
        where: str,
        options: Mapping[str, Any],
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        grammar: LlamaGrammar | str | None,
        n_top: int | None,
    ) -> _Request:
        """Of options those of Sampling and of _generation. Raises for others that ask for anything."""
        from .._text.logprobs import check_n_top

        max_tokens = checks.optional_whole("max_tokens", max_tokens)
        checks.optional_whole("seed", options.get("seed"))
        checks.optional_whole("min_tokens", options.get("min_tokens"))
        checks.hooks("logits_processor", options.get("logits_processor"))
        checks.hooks("stopping_criteria", options.get("stopping_criteria"))
        chosen = {name: value for name, value in options.items() if name in SAMPLING_NAMES or name == "temp"}
        hooks = {name: value for name, value in options.items() if name in _HOOKS}
        length = {name: value for name, value in options.items() if name in _LENGTH and value is not None}
        known = (*chosen, *hooks, *_LENGTH)
        refuse(where, {n: v for n, v in options.items() if n not in known}, LATER_GENERATING)
        if "stop_token_ids" in length:
            length["stop_token_ids"] = frozenset(self._checked(list(length["stop_token_ids"])).tolist())
        sampling = sampling_of(where, chosen, self.last_n_tokens_size)
        if n_top is not None:
            n_top = check_n_top("logprobs", n_top)
        return _Request(sampling, hooks, max_tokens, checks.stops(stop), grammar, n_top, **length)

    def _answer(self, ids: list[int], request: _Request) -> Answer:
        from .._text.answer import Answer

        prompt = self._checked(ids)
        rated = request.n_top is not None
        watch = request.watch if rated else None
        hooks = {**request.hooks, "constraint": self._constraint(request.grammar), "watch": watch}
        eog, ends = self.tokenizer.eog, request.stop_token_ids
        if request.ignore_eos:
            hooks["logit_bias"] = {**(hooks.get("logit_bias") or {}), **dict.fromkeys(eog, -math.inf)}
        if request.min_tokens > 0:
            first = MinTokensLogitsProcessor(request.min_tokens, sorted(eog | ends))
            hooks["logits_processor"] = [*LogitsProcessorList.of(hooks.get("logits_processor")), first]
        hooks["ends"] = ends
        tokens = iter(self._generation(prompt, request.sampling, **hooks))
        # The last token of an answer is never computed itself, so it may stand one beyond the end.
        limit = room = self.n_ctx() if self._shifts else self.n_ctx() - prompt.size + 1
        if request.max_tokens is not None and request.max_tokens > 0:
            limit = request.max_tokens if self._shifts else min(room, request.max_tokens)
        if request.prompt_only:
            limit = 0
        logprobs = request.logprobs if rated else None
        return Answer(
            tokens,
            self.tokenizer,
            prompt=ids,
            stop=request.stop,
            limit=limit,
            logprobs=logprobs,
            special=request.special,
            ends=ends,
            tells_ids=request.return_token_ids,
        )

    def _prompt_logprobs(self, ids: list[int], n_top: int) -> list[dict[str, Any] | None]:
        """Computes the prompt once more; what each token had, in the shape that vLLM gives it."""
        from .._text.logprobs import log_softmax, prompt_logprob

        found: list[dict[str, Any] | None] = [None]

        def seen(i: int, logits: Any) -> None:
            if i + 1 < len(ids):
                found.append(prompt_logprob(log_softmax(logits), ids[i + 1], n_top, self.tokenizer))

        self._score(self._checked(ids), seen)
        return found

    def _rate_prompt(self, ids: list[int], n_top: int, echo: Echo) -> None:
        """Computes the prompt once more with the logits of all its tokens."""
        from .._text.logprobs import TokenLogprob, log_softmax, token_logprob
        from .._text.text import TextStream

        def seen(i: int, logits: Any) -> None:
            if i + 1 < len(ids):
                echo.logprobs.append(token_logprob(log_softmax(logits), ids[i + 1], n_top))

        echo.logprobs.append(TokenLogprob(ids[0], None, ()))
        self._score(self._checked(ids), seen)
        stream = TextStream(self.tokenizer, prompt=ids[:1])
        echo.offsets.append(0)
        for token in ids[1:]:
            echo.offsets.append(stream.position)
            stream.push(token)


def check_count(name: str, value: int | None) -> int:
    """How many answers; None: one. Raises ArgumentError."""
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}, it must be at least 1")
    if value > MAX_ANSWERS:
        raise ArgumentError(f"{name} is {value}, it must be at most {MAX_ANSWERS}")
    return value


def check_best_of(best_of: int, n: int, stream: bool) -> int:
    """How many answers are made so that n can be chosen. Raises ArgumentError."""
    if check_count("best_of", best_of) < n:
        raise ArgumentError(f"best_of is {best_of}, it must be at least n, {n}")
    if stream and best_of > n:
        raise ArgumentError("best_of cannot be streamed: the best answers are known at the end")
    return best_of


def check_prompt_logprobs(n_top: int | None, stream: bool) -> None:
    """Raises ArgumentError."""
    if n_top is None:
        return
    from .._text.logprobs import check_n_top

    check_n_top("prompt_logprobs", n_top)
    if stream:
        raise ArgumentError("prompt_logprobs cannot be streamed")
