"""A1 -> B1 -> A2 compared with a run that was never interrupted, for models whose speed is not in question.

    python -m benchmarks.gpu.gate --model random:qwen3.5-27b-vl --pictures 2 [--a1 30000] [--b1 5000] [--kv bf16,int8]

The state of every stage is compared bit for bit, and the tokens; encoded images are counted. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.figures import GIB
from benchmarks.gpu.lane import GpuLane, Ids, following, load, random_ids
from benchmarks.gpu.switching import machine, state_of
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.types import ImageSpan

ANSWER_TOKENS = 17
MORE_TOKENS = 16
"""A2's prompt contains A1's, its answer and a new message of this many tokens."""
PICTURE_PIXELS = (1024, 768)
WORDS = range(100, 500)
"""Token ids without a special meaning in any preset."""


def words(count: int, seed: int) -> Ids:
    return random_ids(count, len(WORDS), seed) + WORDS.start


def picture(engine: TorchEngine, start: int, seed: int) -> ImageSpan:
    width, height = PICTURE_PIXELS
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert engine.images is not None, "the model reads pictures"
    facts = engine.images.facts(file.getvalue())
    return ImageSpan(start, start + facts.tokens, facts.digest, file.getvalue(), engine.images.sees_itself)


async def pass_gate(engine: TorchEngine, a1: Ids, b1: Ids, images: tuple[ImageSpan, ...]) -> dict[str, Any]:
    lane = GpuLane(engine, 16 * GIB)
    assert lane.hooks is not None
    lane.hooks.settle(120)
    await lane.turn(lane.prompt("warm", words(4096, 3)), 4)
    await lane.live.settle()
    first = await lane.turn(lane.prompt("whole", a1, images), ANSWER_TOKENS)
    a2 = following(a1, first, words(MORE_TOKENS, 4))
    await lane.live.settle()
    whole = await lane.turn(lane.prompt("whole", a2, images), ANSWER_TOKENS)
    await lane.live.settle()
    expected = state_of(lane)
    await lane.live.reset()
    cold = await lane.turn(lane.prompt("parted", a1, images), ANSWER_TOKENS)
    between = await lane.turn(lane.prompt("parted", b1), ANSWER_TOKENS)
    await lane.live.settle()
    back = await lane.turn(lane.prompt("parted", a2, images), ANSWER_TOKENS)
    await lane.live.settle()
    figures = {
        "state_equal": [torch.equal(*pair) for pair in zip(state_of(lane), expected, strict=True)],
        "tokens_equal": back.tokens == whole.tokens and cold.tokens == first.tokens,
        "outcomes": [cold.outcome, between.outcome, back.outcome],
        "reused": back.reused,
        "a2_tokens": len(a2),
        "row_bytes": engine.info.layout.row_bytes,
        "fixed_bytes": engine.info.layout.fixed_bytes,
        "a1_first_token_s": cold.first_token_s,
        "a2_after_b_first_token_s": back.first_token_s,
        "a2_same_conversation_first_token_s": whole.first_token_s,
        "decode_ms": back.decode_s * 1e3,
        "recorded": engine.session.forward.decode_graph is not None,
        "pictures_read": engine.images_encoded,
        "picture_tokens": [image.stop - image.start for image in images],
    }
    lane.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3.5-27b-vl")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--a1", type=int, default=30_000)
    parser.add_argument("--b1", type=int, default=5000)
    parser.add_argument("--pictures", type=int, default=0)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {**machine(), "model": asked.model, "runs": []}
    results["command"] = results["command"].replace("switching", "gate")
    for kv in asked.kv.split(","):
        began = time.perf_counter()
        engine = load(
            asked.model,
            ("cuda:0",),
            Path(tempfile.gettempdir()) / "parkd-bench",
            context_tokens=asked.a1 + 512,
            batch_tokens=2048,
            kv_format=kv,
            draft_tokens=asked.draft_tokens,
        )
        loaded_s = time.perf_counter() - began
        a1, b1 = words(asked.a1, 1), words(asked.b1, 2)
        images = tuple(picture(engine, 1000 + 4000 * index, index) for index in range(asked.pictures))
        for image in images:
            assert engine.images is not None, "the model reads pictures"
            a1[image.start : image.stop] = engine.images.tokens.token_id
        figures = {"kv": kv, "load_s": loaded_s, **asyncio.run(pass_gate(engine, a1, b1, images))}
        results["runs"].append(figures)
        print(json.dumps(figures), flush=True)
        del engine
        torch.cuda.empty_cache()
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
