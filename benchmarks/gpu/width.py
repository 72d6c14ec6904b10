"""Tokens a second over HTTP with several turns under way at once, against one seat; answers must equal those alone.

    python -m benchmarks.gpu.width [--model random:qwen3-8b] [--device cuda:0] [--widths 1,2,4,8] [--out FILE]

A server with one seat, then one with as many as the widest. So many clients at once send a prompt each, whose state
nobody shares, and stream the answer. Before that, each prompt is answered alone. Prints JSON: tokens of all answers by
the seconds from the first token of any to the last of all, and the mean seconds to a first token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.lane import load
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.lane.answer import Answer, AnswerLoop
from tests.integration.api.api_harness import MIB, Messages, Running, body_of, running

CONTEXT_TOKENS = 4096
BUDGET_MIB = 2048
PROMPT_REPEATS = 60


@dataclass(frozen=True)
class Streamed:
    token_ids: tuple[int, ...]
    sent_s: float
    first_s: float
    last_s: float

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@contextmanager
def noting() -> Iterator[dict[str, Answer]]:
    """Notes the answers by the salts of their requests: most tokens of a random model write nothing that is sent."""
    noted: dict[str, Answer] = {}
    whole = AnswerLoop.__post_init__

    def begun(loop: AnswerLoop) -> None:
        whole(loop)
        noted[str(loop.request.cache.salt)] = loop.answer

    AnswerLoop.__post_init__ = begun  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        AnswerLoop.__post_init__ = whole  # type: ignore[method-assign]


def prompt(number: int) -> Messages:
    return [{"role": "user", "content": f"Client {number} asks for something of its own. " * PROMPT_REPEATS}]


async def ask(server: Running, noted: dict[str, Answer], number: int, tokens: int, salt: str) -> Streamed:
    ends = {str(token): -100 for token in server.engine.info.end_token_ids}
    body = body_of(prompt(number), tokens, stream=True, logit_bias=ends)
    sent_s = time.monotonic()
    async with server.client.stream("POST", "/v1/chat/completions", json={**body, "cache_salt": salt}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines()]
    assert lines[-2:][0] == "data: [DONE]", lines[-3:]
    answer = noted[salt]
    assert answer.first_token_at_s is not None
    assert answer.output_tokens == tokens
    return Streamed(tuple(answer.token_ids[:tokens]), sent_s, answer.first_token_at_s, time.monotonic())


async def measured(engine: TorchEngine, widths: list[int], tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"seats": len(engine.seats), "at_once": {}}
    with noting() as noted:
        async with running(engine, answer_bytes=0, budget_bytes=BUDGET_MIB * MIB) as server:  # type: ignore[arg-type]
            found["prompt_tokens"] = len(server.prompt_tokens(prompt(0)))
            await ask(server, noted, 99, 8, "first")
            alone = [await ask(server, noted, number, tokens, f"alone {number}") for number in range(max(widths))]
            found["alone_tokens_per_s"] = sum(each.tokens for each in alone) / sum(e.last_s - e.first_s for e in alone)
            found["alone_first_s"] = sum(each.first_s - each.sent_s for each in alone) / len(alone)
            for width in widths:
                got = await asyncio.gather(*(ask(server, noted, n, tokens, f"{width} {n}") for n in range(width)))
                took_s = max(each.last_s for each in got) - min(each.first_s for each in got)
                found["at_once"][width] = {
                    "tokens_per_s": sum(each.tokens for each in got) / took_s,
                    "first_s": sum(each.first_s - each.sent_s for each in got) / width,
                    "seconds": max(each.last_s for each in got) - min(each.sent_s for each in got),
                    "equal_to_alone": [each.token_ids == one.token_ids for each, one in zip(got, alone, strict=False)],
                }
                print(json.dumps(found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    widths = [int(each) for each in given.widths.split(",")]
    is_card = given.device.startswith("cuda")
    document: dict[str, Any] = {
        "model": given.model,
        "device": torch.cuda.get_device_name() if is_card else "cpu",
        "torch": torch.__version__,
        "tokens": given.tokens,
        "servers": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for seats, asked in ((max(widths), widths), (1, [1, 2])):
            began_s = time.perf_counter()
            engine = load(given.model, (given.device,), Path(folder), context_tokens=CONTEXT_TOKENS, seats=seats)
            loaded_s = time.perf_counter() - began_s
            found = asyncio.run(measured(engine, asked, given.tokens))
            document["servers"].append({"loaded_s": loaded_s, **found})
            if given.out is not None:
                given.out.write_text(json.dumps(document, indent=1))
            engine.close()
            del engine
            gc.collect()
            if is_card:
                torch.cuda.empty_cache()
    print(json.dumps(document, indent=1))
    return 0 if all(all(each["equal_to_alone"]) for s in document["servers"] for each in s["at_once"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
