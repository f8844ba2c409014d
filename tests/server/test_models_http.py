"""Several models, and adapters, as clients see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama, Llama
from powerinfer._engine.file import ModelFile
from powerinfer.server.models import Adapter, Group, Models, ServedModel
from tests import models, reference
from tests.server.conftest import serving

HI = [{"role": "user", "content": "Hi"}]
PROMPT = [1, 17, 260, 43, 291, 300, 8, 5, 90, 11, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55]
pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_threads": 1, "verbose": False}


def opener(path: Path | str) -> Callable[..., AsyncLlama]:
    def open_model(adapters: Any, progress: Any) -> AsyncLlama:
        paths, scales = [path for path, _ in adapters], [scale for _, scale in adapters]
        more = {"lora_path": paths, "lora_scale": scales} if paths else {}
        return AsyncLlama(path, n_parallel=2, progress=progress, **OPTIONS, **more)

    return open_model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two for the model relu: of other matrices, and of one that both have."""
    spec = models.SPECS["llama-relu"]
    shapes = {name: value.shape for name, value in models.file_tensors(spec, models.draw(spec)).items()}
    folder, paths = tmp_path_factory.mktemp("adapters"), []
    for i, names in enumerate((["attn_q", "attn_v"], ["attn_output", "attn_v"])):
        random, pairs = np.random.default_rng(i), {}
        for base in (f"blk.{layer}.{name}.weight" for layer in range(spec.n_layer) for name in names):
            rows, cols = shapes[base]
            pairs[base + ".lora_a"] = random.normal(0, cols**-0.5, (4 + i, cols)).astype(np.float32)
            pairs[base + ".lora_b"] = random.normal(0, 0.5, (rows, 4 + i)).astype(np.float32)
        meta = {"general.architecture": spec.arch, "general.type": "adapter", "adapter.type": "lora"}
        paths.append(models.write(folder / f"{i}.gguf", meta, pairs))
    return paths


@pytest.fixture
def several(relu_path: Path, adapters: list[Path]) -> Iterator[Models]:
    own = tuple(Adapter(name, str(path)) for name, path in zip(("poet", "cook"), adapters, strict=True))
    group = Group()
    made = Models(
        [
            ServedModel(("relu",), ModelFile(relu_path), opener(relu_path), own),
            ServedModel(("tiny", "demo"), ModelFile("demo"), opener("demo"), (), group),
            ServedModel(("broken",), ModelFile("demo"), opener("/nothing"), (), group),
        ],
        idle_s=60,
    )
    yield made
    made.close()


@pytest.fixture
def http(several: Models) -> Iterator[Any]:
    with serving(several) as address, httpx.Client(base_url=address, timeout=120) as client:  # type: ignore[arg-type]
        yield client


def test_all_protocols_pick_the_model(http: Any, several: Models) -> None:
    def states() -> dict[str, str]:
        return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}

    assert set(states()) == {"relu", "relu:poet", "relu:cook", "tiny", "demo", "broken"}
    assert set(states().values()) == {"unloaded"}
    assert http.get("/health").json()["models"] == {"unloaded": 3}
    assert http.get("/props").status_code == 503
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}),
        ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 1}}),
        ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}}),
        ("/api/embed", {"input": "Hi"}),
        ("/completion", {"prompt": "Hi", "n_predict": 1}),
    ]
    for path, body in bodies:
        assert http.post(path, json=body | {"model": "demo"}).json()["model"] == "tiny", path
        answer = http.post(path, json=body | {"model": "other"})
        assert answer.status_code == 404 and "'broken', 'relu:poet'" in answer.text, path
    with http.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": HI, "model": "tiny", "max_tokens": 2, "stream": True},
    ) as parts:
        assert parts.read().endswith(b"data: [DONE]\n\n")
    assert states() == dict.fromkeys(states(), "unloaded") | {"tiny": "loaded", "demo": "loaded"}
    assert several.all[1].n_loads == 1
    assert http.post("/tokenize", json={"content": "Hi", "model": "tiny"}).json()["tokens"]
    assert [one["name"] for one in http.get("/api/ps").json()["models"]] == ["tiny"]
    assert {one["name"] for one in http.get("/api/tags").json()["models"]} == set(states())
    assert http.get("/props").json()["model_alias"] == "tiny"
    assert http.get("/v1/engine", params={"model": "tiny"}).json()["model"] == "tiny"
    text = http.get("/metrics").text
    assert 'powerinfer_model_loaded{model="tiny"} 1' in text and 'model_loaded{model="relu"} 0' in text
    assert 'powerinfer_running{model="tiny"} 0' in text
    assert 'powerinfer_queue_seconds_bucket{model="tiny",le="+Inf"}' in text
    broken = http.post("/v1/completions", json={"prompt": "Hi", "model": "broken"})
    assert broken.status_code == 500 and broken.json()["error"]["code"] == "model_load_failed"
    assert "/nothing" in broken.json()["error"]["message"]
    entry = http.get("/v1/models/broken").json()
    assert entry["state"] == "failed" and "/nothing" in entry["error"]
    assert several.all[1].opened is None  # it was in the way
    answer = http.post("/api/generate", json={"model": "demo", "keep_alive": 0})  # loads
    assert answer.json()["done_reason"] == "load" and "x-ignored-fields" not in answer.headers
    for _ in range(1000):
        if states()["tiny"] == "unloaded":
            break
    assert states()["tiny"] == "unloaded" and several.all[1].n_users == 0


def test_requests_with_adapters(http: Any, relu_path: Path, adapters: list[Path]) -> None:
    """At the same time, each as if it were alone; and no prompt of one is taken for another's."""

    def alone(paths: list[Path], scales: list[float]) -> str:
        more = {"lora_path": paths, "lora_scale": scales} if paths else {}
        with Llama(str(relu_path), **OPTIONS, **more) as llm:
            return str(llm.create_completion(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"])

    def ask(**fields: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": "relu"} | fields
        answer: dict[str, Any] = http.post("/v1/completions", json=body).json()
        return answer

    poet, cook = adapters
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({}, "relu", alone([], [])),
        ({"model": "relu:poet"}, "relu:poet", alone([poet], [1.0])),
        ({"lora": [{"id": 1, "scale": 0.5}]}, "relu:cook@0.5", alone([cook], [0.5])),
        ({"lora": [{"id": 0}, {"id": 1}]}, "relu:poet+cook", alone([poet, cook], [1.0, 1.0])),
        ({"model": "relu:poet", "lora": []}, "relu", alone([], [])),
    ]
    assert len({text for _, _, text in asked}) == 4
    with ThreadPoolExecutor(5) as threads:
        for answer, (_, name, text) in zip(threads.map(lambda a: ask(**a[0]), asked), asked, strict=True):
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
    held = [ask(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"] for fields, *_ in asked]
    assert all(n >= 16 for n in held)
    assert ask(model="relu:cook")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(lora=[{"id": 2}])["error"]["param"] == "lora"
    assert http.get("/v1/models/relu:poet").json()["parent"] == "relu"

    own = {"params": {"model": "relu"}}
    told = http.get("/lora-adapters", **own).json()
    assert [(one["id"], one["name"], one["scale"]) for one in told] == [(0, "poet", 0), (1, "cook", 0)]
    set_to = http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}], **own)
    assert set_to.json() == {"success": True}
    assert ask()["choices"][0]["text"] == asked[1][2]
    assert [one["scale"] for one in http.get("/lora-adapters", **own).json()] == [1.0, 0]
    native = http.post("/completion", json={"prompt": PROMPT, "n_predict": 3, "model": "relu", "lora": []})
    assert native.json()["model"] == "relu"
    wrong = http.post("/lora-adapters", json=[{"id": 7}], **own)
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == 400


# -- rerankers

TEMPLATE = "<q>{query}</q><d>{document}"


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose classifier is two rows of its output matrix, as in Qwen3-Reranker; a tenth of them."""
    spec = models.SPECS["qwen3"]
    tensors = dict(models.file_tensors(spec, models.draw(spec)))
    tensors["cls.output.weight"] = tensors["output.weight"][[7, 9]] / 10
    meta = models.metadata(spec) | {
        "qwen3.pooling_type": 4,
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,  # not of these texts
        "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_template.rerank": TEMPLATE,
    }
    return models.write(tmp_path_factory.mktemp("rank") / "ranker.gguf", meta, tensors)


def share(path: Path, ids: list[int]) -> float:
    """Of token 7 against token 9, by the reference."""
    logits = reference.forward(reference.load(path), ids)[-1]
    two = np.exp(logits[[7, 9]] / 10)
    return float(two[0] / two.sum())


def test_scores_of_a_reranker(ranker: Path, relu_path: Path) -> None:
    documents = ["a cat", "{query}", "no", "the sun {document} sets"]
    with Llama(str(ranker), **OPTIONS) as llm:
        expected = [
            share(ranker, llm.tokenize(f"<q>who? {{document}}</q><d>{text}", False, True))
            for text in documents
        ]
        found = llm.rank("who? {document}", documents)
        assert llm.rank("who?", []) == []
    assert len({round(x, 3) for x in expected}) == 4
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    with Llama(str(relu_path), **OPTIONS) as llm, pytest.raises(NotImplementedError, match="is no reranker"):
        llm.rank("a", ["b"])


def test_rerank_and_score(ranker: Path, url: str) -> None:
    with Llama(str(ranker), **OPTIONS) as llm:
        expected = llm.rank("who?", ["a cat", "no", "sun"])
    order = sorted(range(3), key=lambda i: -expected[i])
    llm = AsyncLlama(str(ranker), n_parallel=2, **OPTIONS)
    with serving(llm, names=("r",)) as address, httpx.Client(base_url=address, timeout=120) as http:
        body = {"query": "who?", "documents": ["a cat", {"text": "no"}, "sun"], "model": "r"}
        for path in ("/v1/rerank", "/rerank", "/reranking", "/v2/rerank"):
            answer = http.post(path, json=body).json()
            assert [each["index"] for each in answer["results"]] == order
            np.testing.assert_allclose(
                [each["relevance_score"] for each in answer["results"]],
                [expected[i] for i in order],
                rtol=1e-5,
            )
        assert answer["usage"]["prompt_tokens"] > 30 and answer["model"] == "r"
        first = http.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": True}).json()["results"]
        assert len(first) == 1 and first[0]["document"] == {"text": ["a cat", "no", "sun"][order[0]]}
        many = http.post("/score", json={"text_1": "who?", "text_2": ["a cat", "no", "sun"]}).json()["data"]
        np.testing.assert_allclose([each["score"] for each in many], expected, rtol=1e-5)
        one = http.post("/score", json={"text_1": ["who?"], "text_2": "no"}).json()["data"]
        assert one[0]["score"] == pytest.approx(expected[1], rel=1e-5)
        assert http.post("/score", json={"text_1": ["a", "b"], "text_2": "no"}).status_code == 400
        assert http.post("/v1/rerank", json=body | {"documents": []}).status_code == 422
        long = http.post("/v1/rerank", json=body | {"documents": ["a " * 200]})
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        # It is a model like others, too.
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    llm.close()
    other = httpx.post(f"{url}/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert other.status_code == 400 and "is no reranker" in other.json()["error"]["message"]
