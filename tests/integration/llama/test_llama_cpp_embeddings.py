"""Embeddings and reranking of GGUF models, beside conversations that they do not touch."""

from __future__ import annotations

import base64
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from parkd.errors import ModelError
from tests.integration.api.api_harness import running, until
from tests.integration.llama.llama_cpp_kit import loaded, opening, turn_after
from tests.integration.llama.test_llama_cpp_bits import whole_state

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install parkd[llama-cpp])")
pytestmark = pytest.mark.anyio

TEXTS = ["The sea is deep.", "A mountain of snow and of stone"]


def of_each_token(engine: Any, ids: list[int]) -> np.ndarray:
    """`[tokens, dimensions]`, by the library without pooling."""
    import llama_cpp.llama_cpp as low

    context = engine.model.open_context(64, low.LLAMA_POOLING_TYPE_NONE)
    batch = low.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert low.llama_decode(context.pointer, batch) == 0
    size = low.llama_model_n_embd(engine.model.pointer)
    rows = [
        np.ctypeslib.as_array(low.llama_get_embeddings_ith(context.pointer, place), (size,)).copy()
        for place in range(len(ids))
    ]
    low.llama_batch_free(batch)
    context.close()
    return np.array(rows)


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_a_vector_is_what_the_model_leaves_of_the_tokens_pooled(pooling: str, tmp_path: Path) -> None:
    with loaded("tiny-dense", tmp_path, embeddings=True, pooling=pooling) as engine:
        ids = [engine.tokenizer.encode(text) for text in TEXTS]
        rows = [of_each_token(engine, each) for each in ids]
        raw = [each.mean(axis=0) if pooling == "mean" else each[-1] for each in rows]
        async with running(engine) as server:
            first = await server.chat(opening("a"))
            await server.settled()
            state = whole_state(engine)

            async def post(path: str, **body: Any) -> Any:
                response = await server.client.post(path, json=body)
                assert response.status_code == 200, response.text
                return response.json()

            found = await post("/v1/embeddings", input=TEXTS)
            same = await post("/embeddings", input=ids[0], encoding_format="base64")
            native = await post("/embedding", content=TEXTS[1], embd_normalize=-1)
            largest = await post("/embedding", content=TEXTS, embd_normalize=0)
            assert np.array_equal(whole_state(engine), state)
            goes_on = await server.chat(turn_after(opening("a"), first.text))
        assert goes_on.cache == "live"
    assert found["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert [each["index"] for each in found["data"]] == [0, 1]
    for each, expected in zip(found["data"], raw, strict=True):
        assert np.allclose(each["embedding"], expected / np.sqrt((expected**2).sum()), atol=1e-5)
    decoded = np.frombuffer(base64.b64decode(same["data"][0]["embedding"]), dtype="<f4")
    assert np.array_equal(decoded, np.array(found["data"][0]["embedding"], dtype=np.float32))
    assert np.allclose(native[0]["embedding"], [raw[1]], atol=1e-4)
    for each, expected in zip(largest, raw, strict=True):
        assert np.allclose(each["embedding"], [expected / np.abs(expected).max()], atol=1e-5)


async def test_documents_are_ranked_by_the_models_head(tmp_path: Path) -> None:
    import gguf

    query, documents = "What is deep?", [*TEXTS, "x"]
    with loaded("tiny-reranker", tmp_path, embeddings=True, pooling="rank") as engine:
        [head] = [
            tensor.data for tensor in gguf.GGUFReader(engine.model.file).tensors if tensor.name == "cls.output.weight"
        ]
        expected = []
        for text in documents:
            logits = head @ of_each_token(engine, engine.embedder.pair(query, text))[-1]
            shares = np.exp(logits - logits.max())
            expected.append(float(shares[0] / shares.sum()))
        async with running(engine) as server:
            asked = {"query": query, "documents": documents}
            found = (await server.client.post("/v1/rerank", json=asked)).json()
            best = (await server.client.post("/rerank", json={**asked, "top_n": 1})).json()
            refused = await server.client.post("/v1/embeddings", json={"input": "x"})
    order = sorted(range(3), key=lambda place: -expected[place])
    assert [each["index"] for each in found["results"]] == order
    assert np.allclose([each["relevance_score"] for each in found["results"]], sorted(expected)[::-1], atol=1e-5)
    assert best["results"] == found["results"][:1]
    assert refused.status_code == 404


async def test_what_cannot_be_embedded_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with loaded("tiny-dense", tmp_path) as engine:
        async with running(engine) as server:
            for path, body, flag in (
                ("/v1/embeddings", {"input": "x"}, "--embeddings"),
                ("/embedding", {"content": "x"}, "--embeddings"),
                ("/v1/rerank", {"query": "x", "documents": ["y"]}, "--reranking"),
            ):
                refused = await server.client.post(path, json=body)
                assert (refused.status_code, flag in refused.text) == (404, True), path
    with loaded("tiny-dense", tmp_path, embeddings=True, pooling="mean") as engine:
        async with running(engine) as server:
            for wrong in (
                {},
                {"input": ""},
                {"input": []},
                {"input": [1, "x"]},
                {"input": [True]},
                {"input": [10**6]},
                {"input": "x" * 3000},
                {"input": ["x"] * 2049},
                {"input": "x", "dimensions": 8},
                {"input": "x", "encoding_format": "int8"},
            ):
                refused = await server.client.post("/v1/embeddings", json=wrong)
                assert refused.status_code == 400, wrong
                assert refused.json()["error"]["message"]
            refused = await server.client.post("/v1/rerank", json={"query": "x", "documents": ["y"]})
            assert refused.status_code == 404


async def test_what_a_client_that_has_left_asked_for_is_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded("tiny-dense", tmp_path, embeddings=True, pooling="mean") as engine:
        computed, whole, goes_on = [], engine.embedder.embed, threading.Event()

        def slow(ids: list[int]) -> Any:
            computed.append(len(ids))
            goes_on.wait(10)
            return whole(ids)

        monkeypatch.setattr(engine.embedder, "embed", slow)
        async with running(engine) as server:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(server.client.post, "/v1/embeddings", json={"input": TEXTS}))
                await until(lambda: computed)
                tasks.cancel_scope.cancel()
            await anyio.sleep(0.1)  # the server notices
            goes_on.set()
            assert (await server.client.post("/v1/embeddings", json={"input": "abc"})).status_code == 200
        assert computed == [len(TEXTS[0]), 3]


def test_a_model_that_only_embeds_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives such a model no memory."""
    import llama_cpp.llama_cpp as low

    monkeypatch.setattr(low, "llama_get_memory", lambda _context: None)
    with pytest.raises(ModelError, match="tiny-dense keeps no state"), loaded("tiny-dense", tmp_path):
        pass


def test_a_model_that_does_not_say_how_it_pools_needs_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--pooling"), loaded("tiny-dense", tmp_path, embeddings=True):
        pass
