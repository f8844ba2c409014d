"""A plugin for the program `llm`, found through an entry point: `llm -m powerinfer/demo "Tell me a story"`.

    llm powerinfer add bamboo-7b.gguf --vram-budget 8      then: llm -m powerinfer/bamboo-7b
    llm powerinfer list
    llm powerinfer remove bamboo-7b

Models that were added stand in powerinfer-models.json in llm's own folder. One model is open at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import llm
from llm.models import EmbeddingModel
from llm.parts import TextPart, ToolCallPart, ToolResultPart
from pydantic import Field

from ..errors import PowerInferError
from ..llama import Llama

DEMO = "demo"
_opened: tuple[str, Llama] | None = None


def _list_path() -> Path:
    folder: str = llm.user_dir()  # type: ignore[no-untyped-call, unused-ignore]
    return Path(folder) / "powerinfer-models.json"


def read_models() -> dict[str, dict[str, Any]]:
    """Name -> {"path", and arguments of Llama}; the demo model is always there."""
    models: dict[str, dict[str, Any]] = {DEMO: {"path": DEMO}}
    try:
        stored = json.loads(_list_path().read_text("utf-8"))
    except FileNotFoundError:
        return models
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot read {_list_path()}: {error}") from None
    if not isinstance(stored, dict) or not all(
        isinstance(item, dict) and "path" in item for item in stored.values()
    ):
        raise click.ClickException(f"{_list_path()} is not a list of models")
    return models | stored


def _write_models(models: dict[str, dict[str, Any]]) -> None:
    path = _list_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {name: item for name, item in models.items() if name != DEMO}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(stored, indent=2) + "\n", "utf-8")
    os.replace(new, path)


def _open(path: str, options: dict[str, Any]) -> Llama:
    """The model, opened now unless it is open already; the one that was open is closed."""
    global _opened
    key = json.dumps([path, options], sort_keys=True)
    if _opened is None or _opened[0] != key:
        if _opened is not None:
            _opened[1].close()
            _opened = None
        try:
            _opened = key, Llama(path, verbose=False, **options)
        except (PowerInferError, TypeError) as error:
            raise llm.ModelError(str(error)) from None
    return _opened[1]


def messages_of(prompt: llm.Prompt) -> list[dict[str, Any]]:
    """A prompt with what was said before it, as create_chat_completion() takes it."""
    messages: list[dict[str, Any]] = []
    system = None
    for message in prompt.messages:
        text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
        calls = [_call(part) for part in message.parts if isinstance(part, ToolCallPart)]
        results = [part for part in message.parts if isinstance(part, ToolResultPart)]
        if message.role == "system":
            if text and text != system:  # it is repeated with each prompt of a conversation
                messages.append({"role": "system", "content": text})
            system = text
        elif text or calls:
            messages.append(
                {"role": message.role, "content": text} | ({"tool_calls": calls} if calls else {})
            )
        messages += [
            {"role": "tool", "tool_call_id": part.tool_call_id, "content": part.output} for part in results
        ]
    return messages


def _call(part: ToolCallPart) -> dict[str, Any]:
    function = {"name": part.name, "arguments": json.dumps(part.arguments)}
    return {"id": part.tool_call_id, "type": "function", "function": function}


class Options(llm.Options):  # type: ignore[misc, unused-ignore]
    """What `llm -o NAME VALUE` may set."""

    temperature: float | None = Field(None, ge=0, description="0: always the likeliest token")
    top_p: float | None = Field(None, ge=0, le=1, description="1: off")
    top_k: int | None = Field(None, ge=0, description="0: off")
    min_p: float | None = Field(None, ge=0, le=1, description="0: off")
    repeat_penalty: float | None = Field(None, gt=0, description="1: off")
    max_tokens: int | None = Field(None, gt=0, description="Most tokens of an answer")
    seed: int | None = Field(None, ge=0, lt=2**32, description="Makes the answer repeatable")


class PowerInferModel(llm.Model):  # type: ignore[misc, unused-ignore]
    """A GGUF file as a model of llm."""

    can_stream = True
    supports_schema = True
    supports_tools = True

    class Options(Options):
        pass

    def __init__(self, name: str, path: str, options: dict[str, Any]) -> None:
        self.model_id = f"powerinfer/{name}"
        self.path = path
        self.load_options = options

    def __str__(self) -> str:
        return f"PowerInfer: {self.model_id}"

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str]:
        """Yields the answer's text."""
        options: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
        if prompt.schema:
            shape = {"name": "output", "schema": prompt.schema}
            options["response_format"] = {"type": "json_schema", "json_schema": shape}
        if prompt.tools:
            options["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                }
                for tool in prompt.tools
            ]
        model = _open(self.path, self.load_options)
        try:
            # Calls of tools are wanted whole.
            if stream and not prompt.tools:
                yield from self._stream(model, messages_of(prompt), options, response)
                return
            answer = model.create_chat_completion(messages_of(prompt), stream=False, **options)
        except (PowerInferError, ImportError) as error:
            raise llm.ModelError(str(error)) from None
        message: dict[str, Any] = dict(answer["choices"][0]["message"])
        for call in message.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:  # not whole
                said = f"the call of {call['function']['name']} was cut off: max_tokens is too small for it"
                raise llm.ModelError(said) from None
            response.add_tool_call(
                llm.ToolCall(name=call["function"]["name"], arguments=arguments, tool_call_id=call["id"])
            )
        usage = answer["usage"]
        response.set_usage(input=usage["prompt_tokens"], output=usage["completion_tokens"])
        yield message.get("content") or ""

    def _stream(
        self, model: Llama, messages: list[dict[str, Any]], options: dict[str, Any], response: llm.Response
    ) -> Iterator[str]:
        for chunk in model.create_chat_completion(messages, stream=True, **options):
            text = chunk["choices"][0]["delta"].get("content")
            if text:
                yield text
        timings = model.timings
        response.set_usage(input=timings.n_prompt, output=timings.n_generated)


class PowerInferEmbedding(EmbeddingModel):  # type: ignore[misc, unused-ignore]
    """The same file, for vectors of texts, of length 1: the last hidden states as it says, or their mean."""

    def __init__(self, name: str, path: str, options: dict[str, Any]) -> None:
        self.model_id = f"powerinfer/{name}"
        self.path = path
        self.load_options = {**options, "embedding": True}

    def embed_batch(self, items: Any, *, key: str | None = None) -> Iterator[list[float]]:
        """A vector [n_embd] for each text."""
        for text in items:
            model = _open(self.path, self.load_options)
            yield model.embed(text, normalize=True, pooling=model.pooling_type() or "mean")


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    for name, item in read_models().items():
        options = {key: value for key, value in item.items() if key != "path"}
        register(PowerInferModel(name, item["path"], options))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    for name, item in read_models().items():
        options = {key: value for key, value in item.items() if key != "path"}
        register(PowerInferEmbedding(name, item["path"], options))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    @cli.group(name="powerinfer")
    def group() -> None:
        "Models that PowerInfer computes"

    @group.command(name="add")
    @click.argument("file", type=click.Path(exists=True, dir_okay=False))
    @click.option("--name", help="What to call it; default: the file's name")
    @click.option("--n-ctx", type=click.IntRange(min=1), help="Context size in tokens")
    @click.option("--n-threads", type=click.IntRange(min=1), help="Default: physical cores")
    @click.option("--vram-budget", type=click.FloatRange(min=0), help="GiB of GPU memory")
    @click.option("--sparsity", type=click.Choice(["auto", "predicted", "exact", "dense"]))
    def add(file: str, name: str | None, **options: Any) -> None:
        """Make a GGUF file known as powerinfer/NAME

        Example: llm powerinfer add bamboo-7b.gguf --vram-budget 8
        """
        name = name or Path(file).name.removesuffix(".gguf")
        if name == DEMO:
            raise click.ClickException('"demo" is the model that comes with the package: give another --name')
        try:
            Llama(file, vocab_only=True, verbose=False).close()
        except PowerInferError as error:
            raise click.ClickException(str(error)) from None
        given = {key: value for key, value in options.items() if value is not None}
        _write_models(read_models() | {name: {"path": os.path.abspath(file), **given}})
        click.echo(f"powerinfer/{name}")

    @group.command(name="list")
    def show() -> None:
        "List the models and their files"
        for name, item in read_models().items():
            options = " ".join(f"{key}={value}" for key, value in item.items() if key != "path")
            click.echo(f"powerinfer/{name}  {item['path']}" + (f"  {options}" if options else ""))

    @group.command(name="remove")
    @click.argument("name")
    def remove(name: str) -> None:
        "Forget a model; its file stays"
        models = read_models()
        name = name.removeprefix("powerinfer/")
        if name == DEMO or name not in models:
            raise click.ClickException(f"{name} was not added")
        del models[name]
        _write_models(models)
