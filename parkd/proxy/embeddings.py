"""Embeddings and reranking, where the engine has them (`--embeddings`, `--reranking`): `/v1/embeddings` as OpenAI has
it, `/embedding` and `/v1/rerank` as llama-server does.

A text is computed beside the lane, on a worker thread, and leaves nothing: no state is read, kept or parked.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from parkd.engine_adapter.base import Embedder
from parkd.errors import InvalidRequest, NotFound
from parkd.proxy.dialects import fields
from parkd.proxy.guard import Handler
from parkd.proxy.leaving import while_connected
from parkd.proxy.proxy import Proxy
from parkd.proxy.requests import id_headers
from parkd.types import StillWanted

MOST_TEXTS = 2048
"""Most texts of one request, as OpenAI has it."""
EUCLIDEAN = 2
MOST_NORM = 64
Vector = npt.NDArray[np.float32]


def normalised(vector: Vector, kind: int) -> Vector:
    """llama-server's `embd_normalize`: -1 as it is, 0 by the largest number, else by the norm of that order."""
    if kind < 0:
        return vector
    size = np.abs(vector).max() if kind == 0 else np.linalg.norm(vector.astype(np.float64), kind)
    return (vector / size).astype(np.float32) if size > 0 else vector


class EmbeddingEndpoints:
    """Handlers over one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._engine = proxy.services.engine

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        return [
            *(("POST", path, self.openai) for path in ("/v1/embeddings", "/embeddings")),
            ("POST", "/embedding", self.llama_server),
            *(("POST", path, self.rerank) for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")),
        ]

    async def openai(self, request: Request, request_id: str) -> ASGIApp:
        embedder = self._embedder(ranks=False)
        body, owner = await self._asked(request)
        if body.get("dimensions") is not None:
            raise InvalidRequest("`dimensions` is not supported: vectors have the model's length.", param="dimensions")
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise InvalidRequest("`encoding_format` must be float or base64.", param="encoding_format")
        prompts = await self._tokens(embedder, body.get("input"), "input", owner)
        vectors = [normalised(each, EUCLIDEAN) for each in await self._computed(embedder, prompts, owner, request)]
        shown: list[Any] = [each.tolist() for each in vectors]
        if form == "base64":
            shown = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        data = [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(shown)]
        return self._answer({"object": "list", "data": data, **self._common(body, prompts)}, request_id)

    async def llama_server(self, request: Request, request_id: str) -> ASGIApp:
        """Its own form: a vector for each text, in a list, since there it may be one for each token."""
        embedder = self._embedder(ranks=False)
        body, owner = await self._asked(request)
        kind = fields.whole(body, "embd_normalize", -1, MOST_NORM)
        prompts = await self._tokens(embedder, body.get("content", body.get("input")), "content", owner)
        vectors = await self._computed(embedder, prompts, owner, request)
        shown = [normalised(each, EUCLIDEAN if kind is None else kind).tolist() for each in vectors]
        return self._answer([{"index": place, "embedding": [each]} for place, each in enumerate(shown)], request_id)

    async def rerank(self, request: Request, request_id: str) -> ASGIApp:
        embedder = self._embedder(ranks=True)
        body, owner = await self._asked(request)
        query, documents = fields.text(body, "query"), body.get("documents", body.get("texts"))
        if not query:
            raise InvalidRequest("`query` must be a text.", param="query")
        if not isinstance(documents, list) or not documents or not all(isinstance(text, str) for text in documents):
            raise InvalidRequest("`documents` must be a list of texts.", param="documents")
        most = fields.whole(body, "top_n", 1, fields.MAX_TOKENS) or len(documents)
        _check_count(documents, "documents")
        prompts = [await self._run(owner, partial(embedder.pair, query, text)) for text in documents]
        scores = [float(each[0]) for each in await self._computed(embedder, prompts, owner, request)]
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[:most]
        results = [{"index": place, "relevance_score": scores[place]} for place in best]
        return self._answer({"object": "list", "results": results, **self._common(body, prompts)}, request_id)

    def _embedder(self, *, ranks: bool) -> Embedder:
        embedder = self._engine.embedder
        if embedder is None or embedder.ranks != ranks:
            flag, what = ("--reranking", "rank documents") if ranks else ("--embeddings", "embed")
            raise NotFound(
                f"This server does not {what}. Start it with {flag}, for a GGUF model that is made for it, or run "
                f"another one beside it for that."
            )
        return embedder

    async def _asked(self, request: Request) -> tuple[Mapping[str, Any], str]:
        owner = self._proxy.caller_of(request).owner
        with self._proxy.bodies.charge(owner) as charge:
            return await self._proxy.body_of(request, charge), owner

    async def _tokens(self, embedder: Embedder, given: Any, name: str, owner: str) -> list[Sequence[int]]:
        """A text, a list of token ids, or a list of either. Raises InvalidRequest."""
        is_one = isinstance(given, str) or _is_ids(given)
        items = [given] if is_one else given
        if not isinstance(items, list) or not items:
            raise InvalidRequest(f"`{name}` must be a text, or a list of texts.", param=name)
        _check_count(items, name)
        known, found = range(self._engine.info.vocab_size), []
        for item in items:
            if isinstance(item, str):
                found.append(await self._run(owner, partial(embedder.tokens, item)))
            elif _is_ids(item) and all(token in known for token in item):
                found.append(item)
            else:
                raise InvalidRequest(f"`{name}` must be a text, or a list of texts or of token ids.", param=name)
        return found

    async def _computed(
        self, embedder: Embedder, prompts: Sequence[Sequence[int]], owner: str, request: Request
    ) -> list[Vector]:
        """Raises InvalidRequest before anything is computed if one is empty or too long, and Cancelled once the client
        has left."""
        for place, ids in enumerate(prompts):
            if not 0 < len(ids) <= embedder.most_tokens:
                raise InvalidRequest(
                    f"Text {place} has {len(ids)} tokens, and from 1 to {embedder.most_tokens} are taken. A larger "
                    f"--batch-size takes longer ones.",
                    param="input",
                )

        async def one_by_one(_still_wanted: StillWanted) -> list[Vector]:
            return [await self._run(owner, partial(embedder.embed, ids)) for ids in prompts]

        return await while_connected(request, one_by_one)

    def _common(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        tokens = sum(map(len, prompts))
        model = fields.text(body, "model") or self._proxy.config.alias or self._engine.info.model_name
        return {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    async def _run(self, owner: str, work: Callable[[], Any]) -> Any:
        return await self._proxy.prompts.run(owner, work)

    def _answer(self, document: object, request_id: str) -> JSONResponse:
        return JSONResponse(document, headers=id_headers(request_id))


def _check_count(items: Sequence[Any], name: str) -> None:
    if len(items) > MOST_TEXTS:
        raise InvalidRequest(f"`{name}` takes at most {MOST_TEXTS} texts.", param=name)


def _is_ids(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in given)
    )
