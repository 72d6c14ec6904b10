"""A proxy that only forwards bytes, to measure the least that any proxy costs.

python -m benchmarks.bare_proxy UPSTREAM_URL PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.chat import REQUEST_TIMEOUT_S

CHAT_PATH = "/v1/chat/completions"


def app(upstream_url: str) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream_url, timeout=REQUEST_TIMEOUT_S)

    async def chat(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        asked = client.build_request("POST", CHAT_PATH, content=await request.body(), headers=headers)
        answer = await client.send(asked, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer.aiter_raw():
                yield part
            await answer.aclose()

        return StreamingResponse(parts(), answer.status_code, media_type="text/event-stream")

    async def health(_request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route(CHAT_PATH, chat, methods=["POST"]), Route("/health", health)])


def main() -> None:
    upstream_url, port = sys.argv[1:]
    uvicorn.run(app(upstream_url), port=int(port), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
