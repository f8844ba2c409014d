"""Official clients against a running server: what their users do first. `make slow` runs these."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import running_server

pytestmark = pytest.mark.slow

QUESTION = "What is 2 plus 3?"
ANSWER = "2 plus 3 is 5."
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": SCHEMA}}
NODE = Path(__file__).resolve().parents[2] / "build" / "clients"
"""Where `make slow` has npm put its packages."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    with running_server("-np", "4", "--api-key", "secret", "--temperature", "0") as address:
        yield address


def pair() -> Any:
    class Pair(pytest.importorskip("pydantic").BaseModel):  # type: ignore[misc]
        a: int
        b: int

    return Pair


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first
        b: the second
    """
    return a + b


def test_openai(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    chat: dict[str, Any] = {"model": "demo", "messages": ASKED}
    with client.chat.completions.stream(**chat) as stream:
        assert len(list(stream)) > 5
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    parsed = client.chat.completions.parse(**chat, response_format=pair(), max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed.a, int)
    with client.chat.completions.stream(
        **chat, tools=[TOOL], tool_choice="required", max_tokens=200
    ) as stream:
        list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "add" and '"a"' in call.function.arguments
    assert len(client.embeddings.create(model="demo", input=["a", "b"]).data[1].embedding) == 384
    assert [model.id for model in client.models.list()] == ["demo"]

    assert client.responses.create(model="demo", input=QUESTION).output_text == ANSWER
    with client.responses.stream(
        model="demo", input=QUESTION, text_format=pair(), max_output_tokens=200
    ) as stream:
        list(stream)
        assert isinstance(stream.get_final_response().output_parsed.b, int)
    kept = client.responses.create(model="demo", input=QUESTION, store=True)
    more = client.responses.create(model="demo", input="And 1 plus 1?", previous_response_id=kept.id)
    assert more.output_text and client.responses.retrieve(kept.id).output_text == ANSWER
    client.responses.delete(kept.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(kept.id)
    with pytest.raises(openai.UnprocessableEntityError, match="at least 1 item"):
        client.chat.completions.create(model="demo", messages=[])


def test_openai_agents(url: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret")
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            agent = agents.Agent(name="A", model=kind(model="demo", openai_client=client))
            assert (await agents.Runner.run(agent, QUESTION)).final_output == ANSWER
            stream = agents.Runner.run_streamed(agent, QUESTION)
            assert [event async for event in stream.stream_events()] and stream.final_output == ANSWER

    asyncio.run(main())


def test_anthropic(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": ASKED}
    assert client.messages.create(**asked).content[0].text == ANSWER
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
    tools = [{"name": "add", "description": "Adds", "input_schema": SCHEMA}]
    with client.messages.stream(**asked, tools=tools, tool_choice={"type": "tool", "name": "add"}) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and isinstance(message.content[0].input["a"], int)
    assert client.messages.count_tokens(model="demo", messages=ASKED).input_tokens > 5
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(anthropic.BadRequestError, match="at least 1 item"):
        client.messages.create(model="demo", max_tokens=5, messages=[])


def test_ollama(url: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=url, headers={"Authorization": "Bearer secret"})
    assert client.chat("demo", messages=ASKED).message.content == ANSWER
    parts = client.chat("demo", messages=ASKED, stream=True)
    assert "".join(part.message.content for part in parts) == ANSWER
    said = client.chat(
        "demo", messages=ASKED, format=pair().model_json_schema(), options={"num_predict": 200}
    )
    assert isinstance(pair().model_validate_json(said.message.content).a, int)
    assert client.chat("demo", messages=ASKED, tools=[add]).message.content is not None
    assert client.generate("demo", prompt="Once", options={"num_predict": 8}).response
    assert len(client.embed("demo", ["a", "b"]).embeddings) == 2
    assert len(client.embeddings("demo", "a").embedding) == 384
    assert client.list().models[0].model == "demo" and client.show("demo").details.family == "llama"
    assert client.ps().models[0].model == "demo"
    with pytest.raises(ollama.ResponseError, match="role"):
        client.chat("demo", messages=[{"role": "wrong", "content": ""}])


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    tools = pytest.importorskip("langchain_core.tools")
    at: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "secret", "model": "demo"}
    llm = langchain.ChatOpenAI(**at, max_tokens=200)
    assert llm.invoke(QUESTION).content == ANSWER
    assert "".join(part.content for part in llm.stream(QUESTION)) == ANSWER
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(pair(), method=method).invoke(QUESTION).a, int)
    bound = llm.bind_tools([tools.tool(add)], tool_choice="any")
    message = bound.invoke(QUESTION)
    assert message.tool_calls[0]["name"] == "add"
    result = tools.tool(add).invoke(message.tool_calls[0])
    assert llm.bind_tools([tools.tool(add)], tool_choice="none").invoke([QUESTION, message, result]).content
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None and whole.tool_calls[0]["name"] == "add"
    responses = langchain.ChatOpenAI(**at, use_responses_api=True)
    assert responses.invoke(QUESTION).text.startswith(ANSWER)
    vectors = langchain.OpenAIEmbeddings(**at, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents([f"text {i}" for i in range(50)])) == 50


def test_llama_index(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    embeddings = pytest.importorskip("llama_index.embeddings.openai_like")
    core = pytest.importorskip("llama_index.core")
    at: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "secret"}
    flags = {"is_chat_model": True, "is_function_calling_model": True}
    llm = like.OpenAILike(model="demo", **at, **flags, context_window=2048, max_tokens=200)
    assert llm.complete(QUESTION).text == ANSWER
    message = core.llms.ChatMessage(role="user", content=QUESTION)
    assert "".join(part.delta or "" for part in llm.stream_chat([message])) == ANSWER
    made = llm.structured_predict(pair(), core.PromptTemplate(QUESTION))
    assert isinstance(made.a, int)
    documents = [core.Document(text="A cat has four legs."), core.Document(text="A bird has two legs.")]
    vectors = embeddings.OpenAILikeEmbedding(model_name="demo", **at)
    index = core.VectorStoreIndex.from_documents(documents, embed_model=vectors)
    assert index.as_query_engine(llm=llm).query("A cat?").response


SCRIPT = """
import OpenAI from "openai";
const [url, question, answer] = process.argv.slice(2);
const equal = (a, b) => { if (a !== b) throw new Error(`${a} is not ${b}`); };
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "secret", maxRetries: 0 });
const asked = { model: "demo", messages: [{ role: "user", content: question }] };
equal((await client.chat.completions.create(asked)).choices[0].message.content, answer);
let text = "";
for await (const part of await client.chat.completions.create({ ...asked, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
equal(text, answer);
for await (const part of await client.chat.completions.create({ ...asked, stream: true })) break;
const given = [];
const parameters = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
const add = { name: "add", parameters, parse: JSON.parse, function: (x) => { given.push(x.a); return "5"; } };
const run = client.chat.completions.runTools({
  ...asked, max_tokens: 200, tools: [{ type: "function", function: add }],
  tool_choice: { type: "function", function: { name: "add" } },
});
await run.done();
equal(given.length, 1);
equal((await client.responses.create({ model: "demo", input: question })).output_text, answer);
const stream = client.responses.stream({ model: "demo", input: question });
equal((await stream.finalResponse()).output_text, answer);
equal((await client.embeddings.create({ model: "demo", input: ["a", "b"] })).data[1].embedding.length, 384);
try {
  await client.chat.completions.create({ model: "demo", messages: [] });
  throw new Error("no error");
} catch (error) {
  equal(error.status, 422);
}
console.log("done");
"""


def test_openai_for_node(url: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip("node, or its package openai in build/clients, is not there")
    (NODE / "script.mjs").write_text(SCRIPT)
    command = [node, "script.mjs", url, QUESTION, ANSWER]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
